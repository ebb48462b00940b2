"""Everything that knows of several processes; with one process it is the identity."""
