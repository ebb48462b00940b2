"""One training step: collect a rollout, compute its gradient, commit it; and the loop around it."""
