"""Generation, scoring and storage of trajectories; uses adapters and plans, knows no losses or optimizers."""
