"""Optimizer state: making it early, offloading it, committing a step, undoing a failed one."""
