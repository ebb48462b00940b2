"""Checkpoints: what a resumed run needs, written whole or not at all."""
