"""Prompts by position, the order of rows, and rollouts that users draw themselves."""
