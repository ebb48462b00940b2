"""Rows and naive answers for tests of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memsafe_rl.models.language.base import naive_logits
from memsafe_rl.types import Ragged, TokenDistribution, Trajectory

PAD = 0
SMALL: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_rows(
    prompts: Sequence[int] = (3, 9, 1), completions: Sequence[int] = (8, 2, 5), vocabulary: int = 258, seed: int = 1
) -> Trajectory:
    """Random rows, one per prompt, stored in another order than the prompts'."""
    generator = torch.Generator().manual_seed(seed)
    conditions = [torch.randint(2, vocabulary, (length,), generator=generator) for length in prompts]
    actions = [torch.randint(2, vocabulary, (length,), generator=generator) for length in completions]
    order = tuple(reversed(range(len(prompts))))
    return Trajectory(
        conditions=Ragged.from_rows(conditions),
        condition_of_row=order,
        actions=Ragged.from_rows([actions[index] for index in order]),
        loss_mask=Ragged.from_rows([torch.ones(completions[index]) for index in order]),
        sampling_logprobs=None,
        advantages=torch.ones(len(prompts)),
        group_of_row=order,
        finished=(True,) * len(prompts),
    )


class ExactSoftmax(TorchFunctionMode):
    """Takes every softmax of float64 scores in float64; transformers' eager attention takes it in float32.

    There, the sum over a row's keys depends on the width of its padding and of the processor's vectors, by 1e-7. With
    the softmax exact, what is left between two ways through a network is this library's, down to 1e-12.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.softmax and args[0].dtype is torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def exact_norms(model: Any) -> None:
    """Has the norms of T5 and its kin take their means in the weights' type; they take float32 even under float64."""
    for module in model.modules():
        if type(module).__name__ in ("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm"):
            module.forward = partial(_exact_norm, module)


def _exact_norm(module: Any, hidden: Tensor) -> Tensor:
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))


def naive_row_logits(model: Any, trajectory: Trajectory, rows: Sequence[int]) -> Tensor:
    """The model's own logits (M, V) at completion tokens, one unpadded row at a time."""
    pieces = []
    prompts, actions = trajectory.conditions.rows(), trajectory.actions.rows()
    for row in rows:
        prompt, action = prompts[trajectory.condition_of_row[row]], actions[row]
        ids = torch.cat([prompt, action])[None]
        pieces.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1])
    return torch.cat(pieces)


def logprobs_of(distribution: TokenDistribution) -> Tensor:
    """Log-probs (M,) of the taken tokens, by the naive form."""
    logprobs = naive_logits(distribution).log_softmax(-1)
    return logprobs.gather(-1, distribution.tokens_M[:, None])[:, 0]


def assert_close(got: Tensor, wanted: Tensor, relative: float) -> None:
    """Compares by the largest difference relative to the largest value wanted."""
    assert got.shape == wanted.shape
    assert bool(got.isfinite().all())
    got, wanted = got.detach(), wanted.detach()
    difference = float((got - wanted).abs().max())
    assert difference <= relative * float(wanted.abs().max()), difference
