"""RLOO: PPO's clipped objective on the ratio of whole completions, averaged over completions.

``sum_b -min(r_b A, clip(r_b) A) / N_rows``, ``r_b = exp(sum_t log pi - log pi_old)`` (Ahmadian et al. 2024,
arXiv:2402.14740, whose policy gradient it is at ratio 1; clipped as in TRL 1.16).
"""

from memsafe_rl.ops.losses.core import LossTraits, register_clipped_loss

register_clipped_loss("rloo", LossTraits(("sequence_sum",), separable=True, aggregation="seq-mean-token-mean"))
