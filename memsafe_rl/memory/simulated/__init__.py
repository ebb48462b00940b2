"""Simulated devices: counts every byte PyTorch holds on a CPU, and refuses what does not fit."""
