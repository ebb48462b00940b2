"""Adapters: forward passes and sampling steps of each kind of network, and its geometry; no bytes, no budgets."""
