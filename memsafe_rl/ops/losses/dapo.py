"""DAPO: PPO's clipped objective with two clip ranges, averaged over all tokens of the step.

``sum_b sum_t -min(r A, clip(r) A) / N_tokens`` (Yu et al. 2025, arXiv:2503.14476, eq. 8).
"""

from memsafe_rl.ops.losses.core import LossTraits, register_clipped_loss

register_clipped_loss("dapo", LossTraits(("token",), separable=True))
