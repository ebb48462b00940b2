"""Denoisers with their schedulers, and critics of denoising chains."""
