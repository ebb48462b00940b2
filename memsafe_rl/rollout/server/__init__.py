"""Rollouts on vLLM servers: their routes, weights handed over by a file, and rows drawn wherever one answers."""
