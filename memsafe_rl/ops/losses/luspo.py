"""LUSPO: GSPO's clipped objective, each completion weighed by its length.

``sum_b |o_b| · -min(s_b A, clip(s_b) A) / N_rows``, s_b the one ratio of a row (arXiv:2602.05261).
"""

from memsafe_rl.ops.losses.core import LossTraits, register_clipped_loss

register_clipped_loss("luspo", LossTraits(("sequence",), separable=True, aggregation="seq-mean-token-sum"))
