"""The engines that can stand behind `memsafe_rl.rollout.engine.RolloutEngine`; optional libraries load when used."""
