"""What a rollout is asked for and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class SequenceKey(NamedTuple):
    """Names one sampled sequence for the counter-based random stream; all that its draws depend on.

    Args:
        seed: the run's seed.
        rollout: index of the rollout in the run (evaluations count apart, see the trainer).
        prompt: index of the prompt in the rollout.
        sample: index of the sample in the prompt's group.
    """

    seed: int
    rollout: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn; fields have TRL's names and meanings.

    Args:
        max_new_tokens: longest completion, in tokens.
        eos_token_ids: ids that end a completion; the one drawn is part of it.
        temperature: divides the logits; 0 means greedy.
        top_p: nucleus mass in (0, 1].
        top_k: number of tokens kept, 0 for all.
        min_p: least probability relative to the most likely token, None for none.
        repetition_penalty: 1.0 for none.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Completion:
    """One sampled sequence, on the host.

    Args:
        ids: (T,) int64, the tokens, including the eos if one was drawn.
        logprobs: (T,) float32, nats: of the distribution sampled from.
        model_logprobs: (T,) float32, nats: of the model's distribution at the run's temperature, before top-k, top-p,
            min-p and penalties; the same tensor as ``logprobs`` when none of them is active.
        finished: whether an eos was drawn (False: cut at ``max_new_tokens``).
        ties: positions whose two best perturbed logits lay closer than rounding can tell apart.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    model_logprobs: torch.Tensor
    finished: bool
    ties: int = 0
