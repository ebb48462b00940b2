"""Rewards: prompts and completions in, one number a completion out; never the trained model."""
