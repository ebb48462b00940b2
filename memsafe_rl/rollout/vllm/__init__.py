"""vLLM inside the training process."""
