"""Recovery from out-of-memory errors, budgets, meters, host memory, leaks."""
