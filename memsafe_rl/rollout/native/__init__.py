"""The native engine: a running batch, whose rows `sequences.admit` bounds by the bytes of their keys and values."""
