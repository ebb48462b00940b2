"""Train language models with GRPO inside a memory budget, without changing what is learnt."""
