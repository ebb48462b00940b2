"""The order of events: configurations and training loops."""
