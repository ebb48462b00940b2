"""Budgets, plans and policies; knows geometry and bytes, never networks, rewards or text."""
