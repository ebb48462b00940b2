"""BNPO in TRL's sense: PPO's clipped objective, averaged over the tokens of the batch.

``sum_b sum_t -min(r A, clip(r) A) / N_tokens``. Departure from TRL: the batch is the whole optimizer step, so that no
micro-batch has a denominator of its own, and the loss equals DAPO's.
"""

from memsafe_rl.ops.losses.core import LossTraits, register_clipped_loss

register_clipped_loss("bnpo", LossTraits(("token",), separable=True))
