"""Whether an adapter's own ways through a network give the logits that the network gives by itself.

Axes: ``M`` completion tokens laid end to end, ``V`` vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.language.base import LanguageAdapter, Route, naive_logits
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.types import Ragged, Trajectory

logger = logging.getLogger(__name__)

_TELLING: tuple[type[Exception], ...] = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError)
"""How a network says that it cannot be run this way."""
_ALONE = 3e-2
"""What a row's logits may differ by for company, relative to the largest: less than bfloat16 may."""


def settle(adapter: LanguageAdapter, settle_decoding: Callable[[LanguageAdapter, Trajectory, Tensor], None]) -> None:
    """Has an adapter, and its reference copy, go the leanest ways that give its model's own logits."""
    with torch.no_grad(), eval_mode(adapter.model):
        trajectory = probe_rows(known_tokens(adapter))
        wanted_MV = adapter.row_logits(adapter.model, trajectory, range(2))
        first, reasons = adapter.path, []
        for path in adapter.candidate_paths:
            adapter.path = path
            if path.route is Route.WHOLE:
                break
            reason = scoring_disagreement(adapter, trajectory, wanted_MV)
            if reason is None:
                break
            reasons.append(f"{path.route.value}: {reason}")
        if adapter.path != first:
            logger.warning(
                "%s does more than its output head to compute logits; log-probs use %r (logit scale %g, soft-cap %s). "
                "%s",
                type(adapter.lm).__name__,
                adapter.path.route.value,
                adapter.path.logit_map.scale,
                adapter.path.logit_map.soft_cap,
                "; ".join(dict.fromkeys(reasons)),
            )
        settle_decoding(adapter, trajectory, wanted_MV)
    if adapter.reference_adapter is not None:
        adapter.reference_adapter.path = adapter.path
        adapter.reference_adapter.packs_prompts = adapter.packs_prompts


def sampling_disagreement(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> str | None:
    """Decodes stored rows, and says how their logits differ from those wanted, or None."""
    actions = list(trajectory.actions.rows())
    firsts = torch.tensor([0, trajectory.actions.lengths[0]], device=wanted_MV.device)

    def decoded() -> tuple[Tensor, Tensor]:
        logits_PV, state = adapter.prefill(list(trajectory.conditions.rows()))
        adapter.measure_cache(state)
        # a network may keep what it has read in its modules, where neither choosing rows nor other prompts reach it
        adapter.prefill([trajectory.conditions.rows()[1]])
        state, rows_B = state.select(order := [1, 0, 1]), firsts[order]
        got = [logits_PV, adapter.decode_step(state, torch.stack([actions[row][0] for row in order]))]
        places = [firsts, rows_B + 1]
        if adapter.joins:
            got.append(adapter.extend(state, [actions[row][1 : 4 - row] for row in order], chunk_tokens=6))
            places.append(rows_B + torch.tensor([4 - row for row in order], device=firsts.device))
        return torch.cat(got), wanted_MV[torch.cat(places)]

    return _disagreement(decoded, max(1e-3, 2 * tolerance_of(adapter, wanted_MV.device)), RuntimeError)


def settle_generate(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor, reason: str) -> None:
    """Leaves decoding to transformers' `generate`, with a cache or without, and says so."""
    others = []
    for cached in (True, False):
        other = _generate_disagreement(adapter, trajectory, wanted_MV, cached)
        if other is None:
            break
        others.append(other)
    else:
        raise refusal("path_check/together", kind=type(adapter.lm).__name__, reason=reason, others=others)
    adapter.path = replace(adapter.path, decodes=False, caches=cached)
    logger.warning(
        "%s cannot be decoded by this library's engine (%s). Rollouts run transformers' generate%s, in waves of rows "
        "of one length: the same draws, but slower, and with every prompt read once per completion.",
        type(adapter.lm).__name__,
        reason,
        "" if cached else " without a cache",
    )


@torch.no_grad()
def check_rows_alone(adapter: ModelAdapter) -> None:
    """Refuses a network whose rows see the padding, their neighbours or what follows a token."""
    vocabulary = adapter.geometry.vocab_size
    with eval_mode(adapter.model):
        whole = probe_rows(vocabulary)
        wanted_MV = naive_logits(adapter.distribution(whole, range(2)))
        # their last token is another one, which no state before it may show
        begun = replace(whole, actions=Ragged.from_rows([row[[0, 1, 3]] for row in whole.actions.rows()]))
        alone = torch.cat([naive_logits(adapter.distribution(begun, [row])) for row in range(2)])
    firsts = torch.arange(3, device=wanted_MV.device)
    relative = relative_difference(alone, wanted_MV[torch.cat([firsts, firsts + whole.actions.lengths[0]])])
    refusal.when(not relative <= _ALONE, "path_check/row", kind=type(adapter.model).__name__, relative=relative)


def scoring_disagreement(
    adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor, *errors: type[Exception], packed: bool = False
) -> str | None:
    """Says how an adapter's logits of all stored rows differ from those wanted, or fail with such errors, or None."""

    def scored() -> tuple[Tensor, Tensor]:
        return naive_logits(adapter.distribution(trajectory, range(len(trajectory)), packed=packed)), wanted_MV

    return _disagreement(scored, tolerance_of(adapter, wanted_MV.device), *errors)


def _disagreement(give: Callable[[], tuple[Tensor, Tensor]], tolerance: float, *errors: type[Exception]) -> str | None:
    """Says how logits differ from those wanted beside them, or None; out-of-memory errors pass through."""
    try:
        got, wanted = give()
    except _TELLING + errors as error:
        if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
            raise
        return f"{type(error).__name__}: {error}"
    if got.shape != wanted.shape:
        return f"logits of shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    relative = relative_difference(got, wanted)
    return (
        None if relative <= tolerance else f"logits differ by {relative:.1e} of the largest ({tolerance:.0e} allowed)"
    )


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference relative to the largest value wanted."""
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def tolerance_of(adapter: LanguageAdapter, device: torch.device) -> float:
    """Returns what two orders of the same sums may differ by, relative to the largest logit."""
    if getattr(adapter.lm, "is_quantized", False):
        return 5e-2
    dtype = adapter.lm.get_input_embeddings().weight.dtype
    if dtype is torch.float64 and adapter.attends_eagerly:
        dtype = torch.float32  # of transformers' softmax, whose sum over a row depends on the width of its padding
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 5e-2)


def known_tokens(adapter: LanguageAdapter) -> int:
    """Counts the tokens that a network can read."""
    return int(adapter.lm.get_input_embeddings().weight.shape[0])


def probe_rows(
    vocabulary: int,
    prompts: tuple[int, ...] = (5, 2),
    lengths: tuple[int, ...] = (7, 4),
    owners: tuple[int, ...] = (0, 1),
) -> Trajectory:
    """Makes rows of ids spread over the vocabulary, on the host; ``owners`` names the prompt of each."""
    read = sum(prompts)
    ids = torch.tensor([(17 + 61 * place) % vocabulary for place in range(read + sum(lengths))])
    return Trajectory(
        conditions=Ragged(ids[:read], prompts),
        condition_of_row=owners,
        actions=Ragged(ids[read:], lengths),
        loss_mask=Ragged(torch.ones(sum(lengths)), lengths),
        sampling_logprobs=None,
        advantages=torch.zeros(len(lengths)),
        group_of_row=owners,
        finished=(True,) * len(lengths),
    )


def _generate_disagreement(
    adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor, cached: bool
) -> str | None:
    """Leads `generate` along two stored rows, side by side, and says how its logits differ, or None."""
    prompts, lengths = trajectory.condition_lengths(range(2)), trajectory.action_lengths(range(2))
    ids_BL = trajectory.token_rows(range(2), adapter.pad_token_id, adapter.device)
    read, got = min(prompts), []

    def follow(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        got.append(logits_BV.clone())
        return ids_BL[:, read + len(got) - 1], torch.zeros(2, dtype=torch.bool)

    steps = ids_BL.shape[1] - read

    def led() -> tuple[Tensor, Tensor]:
        adapter.decode_plainly(ids_BL[:, :read], follow, prompt_tokens=read, max_new_tokens=steps, cached=cached)
        spans = zip(torch.stack(got, 1), prompts, lengths, strict=True)
        return torch.cat([row_NV[prompt - read :][:length] for row_NV, prompt, length in spans]), wanted_MV

    return _disagreement(led, max(1e-3, 2 * tolerance_of(adapter, wanted_MV.device)), RuntimeError)
