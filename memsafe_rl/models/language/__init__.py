"""Causal LMs and encoder-decoders of transformers."""
