"""Dry runs: the worst-case check, `verify`, and the memory forecast."""
