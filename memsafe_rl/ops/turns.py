"""Credit for single turns of an episode: what followed a turn, beside what followed other turns in the same state.

Axes: ``T`` turns of one episode, ``N`` turns of all episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


def turn_returns(rewards_T: Tensor, discount: float) -> Tensor:
    """Gives what follows each turn, ``R_t = sum_{k >= t} discount^(k - t) r_k`` (GiGPO, arXiv:2505.10978).

    Args:
        rewards_T: (T,), what each turn has earned.
        discount: in [0, 1], by which a reward counts less a turn earlier.

    Returns:
        (T,).
    """
    returns, following = torch.empty_like(rewards_T), rewards_T.new_zeros(())
    for turn in reversed(range(len(rewards_T))):
        following = rewards_T[turn] + discount * following
        returns[turn] = following
    return returns


def relative_to_state(
    returns_N: Tensor, states_N: Sequence[Hashable], compare: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Compares what follows a turn with what follows all turns that began in the same state of the same group.

    GiGPO (arXiv:2505.10978): ``A^S = (R - mean) / std`` over an anchor state's turns, or without the
    division, as ``compare`` has it. One episode may reach a state several times.

    Args:
        returns_N: (N,) of `turn_returns`; NaN for an episode that was not scored, which counts for nothing.
        states_N: for each turn its group and the state it began in.
        compare: of `memsafe_rl.ops.advantages`: compares (1, n) numbers with each other.

    Returns:
        (N,), 0 where no other turn began in the same state; and (N,) bool, whether one did.
    """
    alike: dict[Hashable, list[int]] = {}
    for place, state in enumerate(states_N):
        alike.setdefault(state, []).append(place)
    advantages_N, met_N = torch.zeros_like(returns_N), torch.zeros(len(states_N), dtype=torch.bool)
    for places in alike.values():
        if len(places) > 1:
            advantages_N[places] = compare(returns_N[places][None])[0].nan_to_num(nan=0.0)
            met_N[places] = True
    return advantages_N, met_N
