"""What a rollout consists of before it is trained on: samples, their rewards, and the store that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import charge, claim, host_memory
from memsafe_rl.data.environments import episode_metrics
from memsafe_rl.data.partial_rollouts import Gathered, OpenGroup
from memsafe_rl.data.prompts import Prompts
from memsafe_rl.memory.runtime.host_memory import to_device, to_host
from memsafe_rl.prefix_tree import sort_by_tokens
from memsafe_rl.rollout.multi_turn.episode import Segment as Piece
from memsafe_rl.training import refusal
from memsafe_rl.training.algorithms.advantages import objective_advantages
from memsafe_rl.types import AdvantageResult, Completion, Component, Ragged, SequenceKey, Trajectory


@dataclass(frozen=True)
class Groups:
    """Groups of completions to be drawn: prompts, and what names the random stream of each completion."""

    prompts: Prompts  # P prompts
    size: int  # completions per prompt
    seed: int  # of the run
    rollout: int  # index of the rollout
    first: int = 0  # index of the first prompt among those of the rollout

    @property
    def rows(self) -> int:
        """Completions to be drawn."""
        return len(self.prompts.ids) * self.size

    def key(self, row: int) -> SequenceKey:
        """Names the random stream of a completion."""
        prompt, sample = divmod(row, self.size)
        return SequenceKey(self.seed, self.rollout, self.first + prompt, sample)

    def keys(self, rows: Sequence[int]) -> dict[int, list[SequenceKey]]:
        """Returns the keys of some completions, by prompt."""
        found: dict[int, list[SequenceKey]] = {}
        for row in rows:
            found.setdefault(row // self.size, []).append(self.key(row))
        return found

    def conditions(self, rows: Sequence[int]) -> list[Tensor]:
        """Returns the prompt ids that some completions follow."""
        return [self.prompts.ids[row // self.size] for row in rows]


@dataclass(frozen=True)
class Samples:
    """Prompts and their completions, group by group, over all ranks."""

    prompts: Prompts  # P prompts
    group_size: int  # completions per prompt
    # the prompt ids that each completion follows; the tokenizer's, or those a `rollout_func` gave
    conditions: tuple[Tensor, ...]
    completions: tuple[Completion, ...]  # P × group_size of them, prompt by prompt
    masks: tuple[Tensor, ...] | None  # per completion, 1 where the model itself chose the token; None when it chose all
    texts: tuple[Any, ...]  # what the reward functions see of each completion
    rewards_BF: Tensor  # (B, F) float32, NaN where a function gave None; (0, 0) until the rewards are known
    # per completion, what the reward functions logged through `log_extra`; () until the rewards are known
    extras: tuple[dict[str, Any], ...]
    external: bool = False  # whether another sampler than the trained model drew them
    stale: tuple[bool, ...] = ()  # per completion, whether older weights drew some of it; () where none is
    # per completion, the sequences that train on it; () where each is one
    pieces: tuple[tuple[Piece, ...], ...] = ()
    # per completion, what its environment made of the prompt, images left out; () where it is the dataset's
    asked: tuple[Any, ...] = ()
    counts: tuple[dict[str, int], ...] = ()  # per completion, what its episode did; () where none is an episode

    @property
    def lengths(self) -> Tensor:
        """Counts, (B,) float32, the actions of each completion that the model itself chose."""
        masks = self.masks or [one.mask for one in self.completions]
        counts = [
            len(one.ids) if mask is None else int(mask.sum()) for one, mask in zip(self.completions, masks, strict=True)
        ]
        return torch.tensor(counts, dtype=torch.float32)

    def groups(self, indices: Sequence[int]) -> Samples:
        """Returns some groups only."""
        rows = [group * self.group_size + sample for group in indices for sample in range(self.group_size)]
        prompts = Prompts(*(tuple(values[i] for i in indices) for values in vars(self.prompts).values()))
        known = {name: getattr(self, name) for name in _OF_ROWS}
        picked: dict[str, Any] = {name: tuple(values[row] for row in rows) for name, values in known.items() if values}
        return replace(self, prompts=prompts, rewards_BF=self.rewards_BF[rows], **picked)

    def joined(self, other: Samples) -> Samples:
        """Appends other groups."""
        prompts = zip(vars(self.prompts).values(), vars(other.prompts).values(), strict=True)
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _OF_ROWS}
        rows: dict[str, Any] = {name: None if None in pair else pair[0] + pair[1] for name, pair in pairs.items()}
        return replace(
            self,
            prompts=Prompts(*(mine + theirs for mine, theirs in prompts)),
            rewards_BF=torch.cat([self.rewards_BF, other.rewards_BF]),
            **rows,
        )


_OF_ROWS = ("conditions", "completions", "masks", "texts", "extras", "pieces", "asked", "counts")
"""Fields of `Samples` that have an entry for each completion."""


@dataclass(frozen=True)
class Rollout:
    """A rollout, rewarded and ready to train on."""

    trajectory: Trajectory  # the store
    consumed: int  # prompts taken from the source
    external: bool  # whether another sampler than the trained model drew the completions
    metrics: dict[str, float] = field(default_factory=dict)  # what is logged of it
    table: tuple[dict[str, Any], ...] = ()  # one row a completion, for people
    waiting: tuple[OpenGroup, ...] = ()  # groups that the next rollout continues

    def to(self, place: str, device: torch.device) -> Rollout:
        """Moves the trajectory to where a plan wants it."""
        move = to_host if place == "host" else partial(to_device, device=device)
        with charge(Component.TRAJECTORY):
            return replace(self, trajectory=self.trajectory.moved(move))


def build_trajectory(
    samples: Samples, *, masks_truncated: bool, needs_whole: bool, with_turns: bool = False, filtered: bool = True
) -> Trajectory:
    """Stores samples as a trajectory that has no advantages yet, their log-probs ``filtered`` as they were drawn."""
    pieces, sample_of_row = _sequences(samples)
    cut = [masks_truncated and not piece.completion.finished for piece in pieces]
    masks = [torch.zeros_like(one.mask) if gone else one.mask for one, gone in zip(pieces, cut, strict=True)]
    unique: dict[Any, Tensor] = {}
    for piece in pieces:
        unique.setdefault(_identity(piece.condition), piece.condition)
    places = {identity: place for place, identity in enumerate(unique)}
    completions = [piece.completion for piece in pieces]
    starts = [one.start for one in completions if one.start is not None]
    split = len(pieces) > len(samples.completions)
    refusal.when(split and needs_whole, "episodes/split")
    return Trajectory(
        conditions=Ragged.from_rows(list(unique.values())),
        condition_of_row=tuple(places[_identity(piece.condition)] for piece in pieces),
        actions=Ragged.from_rows([piece.completion.ids for piece in pieces]),
        loss_mask=Ragged.from_rows(masks),
        sampling_logprobs=Ragged.from_rows([one.logprobs if filtered else one.model_logprobs for one in completions]),
        advantages=torch.zeros(len(pieces)),
        group_of_row=tuple(sample // samples.group_size for sample in sample_of_row),
        finished=tuple(piece.completion.finished for piece in pieces),
        has_old=(False,) * len(pieces),
        starts=torch.stack(starts) if starts else None,
        sample_of_row=sample_of_row if split else (),
        turns=tuple(piece.turns for piece in pieces) if with_turns else (),
        prefixes=sort_by_tokens([torch.cat([one.condition, one.completion.ids]) for one in pieces]) if split else (),
    )


def with_advantages(trajectory: Trajectory, advantages: AdvantageResult) -> Trajectory:
    """Adds advantages to a trajectory; a row that no reward function scored is masked out of the loss."""
    advantages_B, unscored = advantages.advantages_B, advantages.unscored_B.tolist()
    with host_memory(), charge(Component.TRAJECTORY):
        objectives = objective_advantages(advantages)
    if trajectory.sample_of_row:  # the sequences of one sample share its advantages
        sample_of_row = list(trajectory.sample_of_row)
        advantages_B, unscored = advantages_B[sample_of_row], [unscored[sample] for sample in sample_of_row]
        objectives = None if objectives is None else objectives[sample_of_row]
    claim(Component.TRAJECTORY, [advantages_B])
    trajectory = replace(trajectory, advantages=advantages_B, objective_advantages=objectives)
    if not any(unscored):
        return trajectory
    with host_memory(), charge(Component.TRAJECTORY):
        loss_mask = Ragged(trajectory.loss_mask.flat.clone(), trajectory.loss_mask.lengths)
    for row, mask in enumerate(loss_mask.rows()):
        if unscored[row]:
            mask.zero_()
    groups = tuple(-1 if unscored[row] else group for row, group in enumerate(trajectory.group_of_row))
    return replace(trajectory, loss_mask=loss_mask, group_of_row=groups)


def rollout_metrics(samples: Samples, advantages: AdvantageResult, names: Sequence[str]) -> dict[str, float]:
    """Computes TRL's rollout metrics, plus certified ties."""
    lengths = samples.lengths
    finished = torch.tensor([completion.finished for completion in samples.completions])
    ended = lengths[finished] if finished.any() else torch.zeros(1)
    metrics = {
        "step_tokens": sum(len(ids) for ids in samples.conditions) + lengths.sum().item(),
        "completions/clipped_ratio": 1.0 - finished.float().mean().item(),
        "sampling/tied_fraction": sum(c.ties for c in samples.completions) / max(1.0, lengths.sum().item()),
    }
    for name, values in (("", lengths), ("_terminated", ended)):
        metrics[f"completions/mean{name}_length"] = values.mean().item()
        metrics[f"completions/min{name}_length"] = values.min().item()
        metrics[f"completions/max{name}_length"] = values.max().item()
    for column, name in enumerate(names):
        values = samples.rewards_BF[:, column]
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = _mean_std(values)
    metrics["reward"], metrics["reward_std"] = _mean_std(advantages.rewards_B)
    if samples.counts:
        metrics |= episode_metrics(samples.counts)
    flat = torch.isclose(advantages.std_B, torch.zeros_like(advantages.std_B))
    metrics["frac_reward_zero_std"] = flat.float().mean().item()
    return metrics


def rejection_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Returns which share of the counted actions, and of the rows that have any, has an importance weight of 0."""
    if trajectory.importance_weights is None:
        return {}
    dropped = ((trajectory.importance_weights.flat == 0) & (trajectory.loss_mask.flat != 0)).float()
    dropped_B = [float(row.sum()) for row in Ragged(dropped, trajectory.actions.lengths).rows()]
    rows = [part == whole for part, whole in zip(dropped_B, trajectory.counted_actions, strict=True) if whole]
    tokens = sum(dropped_B) / max(1, sum(trajectory.counted_actions))
    return {"sampling/rejected_tokens": tokens, "sampling/rejected_rows": sum(rows) / max(1, len(rows))}


def partial_metrics(gathered: Gathered, samples: Samples) -> dict[str, float]:
    """Counts what a partial rollout left unfinished, and what earlier weights had begun."""
    return {
        "partial/rounds": float(gathered.rounds),
        "partial/fresh_prompts": float(gathered.consumed),
        "partial/waiting_groups": float(len(gathered.waiting)),
        "partial/stale_fraction": sum(samples.stale) / len(samples.stale),
    }


def _sequences(samples: Samples) -> tuple[list[Piece], tuple[int, ...]]:
    """Lists the sequences of all samples, and which sample each is a part of."""
    if samples.pieces:
        pairs = [(piece, sample) for sample, pieces in enumerate(samples.pieces) for piece in pieces]
        return [piece for piece, _ in pairs], tuple(sample for _, sample in pairs)
    masks = samples.masks or [
        torch.ones(len(one.ids), dtype=torch.uint8) if one.mask is None else one.mask for one in samples.completions
    ]
    whole = zip(samples.conditions, samples.completions, masks, strict=True)
    return [Piece(*parts) for parts in whole], tuple(range(len(samples.completions)))


def _identity(ids: Tensor) -> tuple[Any, ...]:
    """Returns a key that is the same for equal prompts."""
    return tuple(ids.shape), ids.cpu().numpy().tobytes()


def _mean_std(values: Tensor) -> tuple[float, float]:
    known = values[~torch.isnan(values)]
    if known.numel() == 0:
        return float("nan"), float("nan")
    return known.mean().item(), known.std().item() if known.numel() > 1 else 0.0
