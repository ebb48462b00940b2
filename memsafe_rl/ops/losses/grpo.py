"""GRPO: PPO's clipped objective, averaged over each completion and then over completions.

``sum_b (1 / |o_b|) sum_t -min(r A, clip(r) A) / N_rows`` (Shao et al. 2024, arXiv:2402.03300, eq. 3); with one ratio a
row it is GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5).
"""

from memsafe_rl.ops.losses.core import LossTraits, register_clipped_loss

register_clipped_loss("grpo", LossTraits(separable=True, aggregation="seq-mean-token-mean"))
