"""Runnable examples; each is a short script over the public names of `memsafe_rl`."""
