"""What engines of other libraries have in common, and transformers' continuous batching."""
