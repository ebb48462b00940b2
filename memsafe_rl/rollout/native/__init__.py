"""The native engine: a running batch under a bounded key/value cache."""
