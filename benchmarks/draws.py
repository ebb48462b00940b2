"""The same rollout for every engine: its keys, and its completions as transformers' `generate` draws them.

Imports nothing beyond this library and what it needs, so that it runs in the environment that has vLLM too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.types import SequenceKey


def keys_of(prompts: int, group: int, *, seed: int = 0, rollout: int = 0) -> list[list[SequenceKey]]:
    """Names the sequences of a rollout.

    Args:
        prompts: unique prompts.
        group: completions of each.
        seed: of the draws.
        rollout: the rollout's index.

    Returns:
        For each prompt, one key per completion.
    """
    return [[SequenceKey(seed, rollout, prompt, sample) for sample in range(group)] for prompt in range(prompts)]


def lengths_by_generate(
    model: Any, prompts: Sequence[Tensor], group: int, longest: int, ends: Sequence[int], pad: int, seed: int
) -> list[int]:
    """Samples with transformers' `generate`: prompts padded on the left, several sequences returned for each.

    Args:
        model: transformers model.
        prompts: token ids, (length,) int64 each.
        group: completions of each.
        longest: longest completion, in tokens.
        ends: ids that end a completion; none may.
        pad: the padding's id.
        seed: of the draws.

    Returns:
        Tokens of each completion, the one that ended it included.
    """
    torch.manual_seed(seed)
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0), value=pad) for prompt in prompts])
    mask = torch.stack([(torch.arange(width) >= width - len(prompt)).long() for prompt in prompts])
    with torch.no_grad():
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            num_return_sequences=group,
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
        )
    drawn = out[:, 1:] if model.config.is_encoder_decoder else out[:, width:]
    ended = torch.isin(drawn, torch.tensor(ends, device=drawn.device)).int()
    return torch.where(ended.any(1), ended.argmax(1) + 1, drawn.shape[1]).tolist()
