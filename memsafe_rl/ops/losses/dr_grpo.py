"""Dr. GRPO: PPO's clipped objective over a constant, which no completion's length biases.

``sum_b sum_t -min(r A, clip(r) A) / (N_rows · max_completion_length)`` (Liu et al. 2025, arXiv:2503.20783).
"""

from memsafe_rl.ops.losses.core import LossTraits, register_clipped_loss

register_clipped_loss("dr_grpo", LossTraits(("token",), separable=True, aggregation="seq-mean-token-sum-norm"))
