"""Runs a step's own code on tensors that hold no bytes, and counts what they would hold."""
