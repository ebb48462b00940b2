"""Images in prompts: what a tower makes of them, and where it stands in a row."""
