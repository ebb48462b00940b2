"""Key/value caches in which completions share their prompt, and the attention that reads them."""
