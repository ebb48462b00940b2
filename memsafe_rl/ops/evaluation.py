"""What several samples of a prompt say of a model: how often one of k is good enough, and how good the best of k is.

Axes: ``P`` prompts, ``G`` samples per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

_RELATIVE_ROUNDING = 1e-6
"""By how much of itself a sum of float32 rewards may miss the threshold."""


def pass_at_k(passed: int, samples: int, k: int) -> float:
    """Estimates, without bias, the probability that one of k samples of a prompt passes.

        pass@k = 1 - C(n - c, k) / C(n, k)

    for c of n samples that passed (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1): one
    minus the share of the k-subsets in which none did. Computed with whole numbers, so that nothing overflows.

    Args:
        passed: c, samples that passed.
        samples: n, samples there are.
        k: samples of a try; at most n.

    Returns:
        The estimate, in [0, 1].

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} passed out of {samples} samples: 1 <= k <= samples is needed.")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Estimates, without bias, the expected best reward among k samples of a prompt.

        best@k = sum_{i=k..n} r_(i) C(i - 1, k - 1) / C(n, k)

    for rewards sorted upwards, r_(1) <= ... <= r_(n): the i-th is the best of a k-subset whose other k - 1 members lie
    below it, so that this is the mean of the maximum over all k-subsets. It is `pass_at_k` where rewards are 0 and 1.

    Args:
        rewards: of the prompt's n samples, in any order.
        k: samples of a try; at most n.

    Returns:
        The estimate.

    Raises:
        ValueError: not 1 <= k <= n.
    """
    samples = len(rewards)
    if not 1 <= k <= samples:
        raise ValueError(f"best@{k} of {samples} samples: 1 <= k <= samples is needed.")
    subsets = math.comb(samples, k)
    best = (reward * (math.comb(i - 1, k - 1) / subsets) for i, reward in enumerate(sorted(rewards), start=1) if i >= k)
    return math.fsum(best)


def sample_metrics(rewards_PG: Tensor, ks: Sequence[int], threshold: float) -> dict[str, float]:
    """Averages pass@k, best@k and the share that passed over prompts, each prompt counting the same.

    A sample without a reward (NaN) is left out, and a prompt with fewer than k rewards out of what is said of k.

    Args:
        rewards_PG: (P, G) float32, NaN where there is no reward.
        ks: samples of a try, each between 1 and G.
        threshold: reward at which a sample passes.

    Returns:
        ``pass@k`` for every k, ``best@k`` for every k above 1, and ``mean@G``, the mean share of samples that passed,
        which is pass@1 where every sample has a reward; NaN where no prompt has rewards enough.
    """
    least = threshold - _RELATIVE_ROUNDING * abs(threshold)
    prompts = [[reward for reward in rewards if not math.isnan(reward)] for rewards in rewards_PG.tolist()]
    counts = [(sum(reward >= least for reward in rewards), len(rewards)) for rewards in prompts]
    metrics = {f"mean@{rewards_PG.shape[1]}": _mean([passed / samples for passed, samples in counts if samples])}
    for k in ks:
        metrics[f"pass@{k}"] = _mean([pass_at_k(passed, samples, k) for passed, samples in counts if samples >= k])
        if k > 1:
            metrics[f"best@{k}"] = _mean([best_at_k(rewards, k) for rewards in prompts if len(rewards) >= k])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
