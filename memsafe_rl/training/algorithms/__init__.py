"""What GRPO, RLOO and PPO, one objective and several differ in."""
