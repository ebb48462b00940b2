"""Equations on tensors: log-probs, losses, advantages, sampling; no models, no devices, no configuration."""
