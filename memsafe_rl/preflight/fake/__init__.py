"""Fake devices and fake weights, on which a forecast runs the training step."""
