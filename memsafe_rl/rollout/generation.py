"""Samples completions in waves that fit a plan; the wave a sequence rides in never changes its tokens.

Axes: ``P`` unique prompts of a wave, ``B`` rows of its cache, ``L`` tokens so far, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.memory.recovery import Attempt
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.sampling import greedy_tokens, sample_tokens, taken_logprobs
from memsafe_rl.types import Completion, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey

Progress = Callable[[int, int], None]
"""Told the sequences that have ended and the sequences there are, whenever more have ended."""

_COMPACT_SHARE = 8


@dataclass(frozen=True)
class Wave:
    """Sequences that are decoded together.

    Args:
        prompts: P unique prompts (length,) int64.
        prompt_of_row: for each of the B rows, the index of its prompt.
        keys: names of the B rows' random streams.
    """

    prompts: tuple[Tensor, ...]
    prompt_of_row: tuple[int, ...]
    keys: tuple[SequenceKey, ...]


def generate(
    adapter: ModelAdapter,
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    attempt: Attempt[RolloutPlan],
    progress: Progress | None = None,
) -> list[Completion]:
    """Samples completions for every prompt, without gradient, in eval mode, in waves that fit the plan.

    A wave is what is repeated when memory runs out; completions of earlier waves are kept, on the host, and the rows
    that are left are cut by the plan then in force.

    A sequence depends on its prompt, its key and the settings; the plan and the other sequences change it only where
    a draw is marked in `Completion.ties`. That holds for networks that compute in float32. In bfloat16 another batch
    shape moves logits by more than a tie's gap, so other waves may draw other, equally likely tokens; and the edge at
    which top-k, top-p or min-p cuts can move by rounding in any type, which is not marked.

    Args:
        adapter: the network.
        prompts: P tensors (length,) int64, on any device.
        keys: for each prompt, one key per sample wanted.
        settings: how tokens are drawn.
        attempt: runs a wave under the plan in force: its ``rows_in_flight``, ``kv_bytes`` and ``prefill_tokens``.
        progress: told of sequences that ended; None for nobody.

    Returns:
        Completions on the host, prompt by prompt, samples in the order of the keys.

    Raises:
        ConfigError: ``max_new_tokens`` is below 1 or the temperature below 0.
        DataError: a prompt is empty, or too long for the network together with its completion; or prompts and keys
            differ in number.
        MemsafeError: the network gave a row no distribution to draw from.
    """
    lengths = tuple(int(prompt.shape[0]) for prompt in prompts)
    geometry = adapter.geometry
    _check(lengths, keys, settings, geometry)
    group_sizes = tuple(len(group) for group in keys)
    ended: dict[tuple[int, int], Completion] = {}
    waiting = _ordered_rows(lengths, group_sizes)

    def sample_next(plan: RolloutPlan) -> dict[tuple[int, int], Completion]:
        rows = next_wave(waiting, lengths, settings.max_new_tokens, geometry, plan)
        wave = _gather_wave(rows, prompts, keys)
        completions = sample_wave(adapter, wave, settings, _shifted(progress, len(ended), sum(group_sizes)))
        return dict(zip(rows, completions, strict=True))

    while waiting:
        ended |= attempt(sample_next)
        waiting = [row for row in waiting if row not in ended]
    return [ended[prompt, sample] for prompt, size in enumerate(group_sizes) for sample in range(size)]


def cut_waves(
    prompt_tokens: Sequence[int],
    group_sizes: Sequence[int],
    max_new_tokens: int,
    geometry: ModelGeometry,
    plan: RolloutPlan,
) -> list[list[tuple[int, int]]]:
    """Cuts a rollout into waves: like lengths together, the longest first, samples of a prompt side by side.

    A wave holds at most ``rows_in_flight`` sequences, ``kv_bytes`` of cache with every row as long as its longest can
    become, and unique prompts of ``prefill_tokens`` with padding; at least one sequence in any case.

    Args:
        prompt_tokens: length of each prompt, in tokens.
        group_sizes: samples wanted of each prompt.
        max_new_tokens: longest completion, in tokens.
        geometry: sizes of the network.
        plan: the limits.

    Returns:
        Waves of (prompt, sample) pairs; every pair once.
    """
    waiting, waves = _ordered_rows(prompt_tokens, group_sizes), []
    while waiting:
        waves.append(next_wave(waiting, prompt_tokens, max_new_tokens, geometry, plan))
        waiting = waiting[len(waves[-1]) :]
    return waves


def next_wave(
    waiting: Sequence[tuple[int, int]],
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    geometry: ModelGeometry,
    plan: RolloutPlan,
) -> list[tuple[int, int]]:
    """Cuts the next wave from the head of the sequences that wait.

    Args:
        waiting: (prompt, sample) pairs, the longest prompts first; at least one.
        prompt_tokens: length of each prompt, in tokens.
        max_new_tokens: longest completion, in tokens.
        geometry: sizes of the network.
        plan: the limits.

    Returns:
        The first pairs of ``waiting``.
    """
    # Waves of even size take as many steps as full ones and a short last one, at a lower peak.
    waves_needed = math.ceil(len(waiting) / max(1, plan.rows_in_flight))
    most = math.ceil(len(waiting) / waves_needed)
    longest = prompt_tokens[waiting[0][0]]
    row_bytes = max(1, geometry.kv_bytes(longest + max_new_tokens))
    fitting = most if plan.kv_bytes is None else min(most, plan.kv_bytes // row_bytes)
    wave = waiting[: max(1, fitting)]
    prefilled = list(dict.fromkeys(prompt for prompt, _ in wave))[: max(1, plan.prefill_tokens // longest)]
    return [row for row in wave if row[0] in prefilled]


def sample_wave(
    adapter: ModelAdapter, wave: Wave, settings: SamplingSettings, progress: Progress | None = None
) -> list[Completion]:
    """Samples one wave to its end; the piece of a rollout that is repeated when memory runs out.

    Each prompt is read once, and after the first token its cache is spread over the samples that go on; rows that
    end later leave the cache. Nothing of it stays on the device, and the modules' modes are put back, whether this
    returns or raises.

    Args:
        adapter: the network.
        wave: what to sample.
        settings: how tokens are drawn.
        progress: told of sequences that ended; None for nobody.

    Returns:
        One completion per row of the wave, on the host.

    Raises:
        MemsafeError: the network gave a row no distribution to draw from.
    """
    with torch.no_grad(), eval_mode(adapter.model):
        record = _Record(wave, settings, progress)
        draw = _Drawer(settings)
        keys_B4 = _key_tensor(wave.keys).to(adapter.device)
        seen_BL = _prompt_rows(wave).to(adapter.device) if draw.reads_history else None
        slots_B, places_B = torch.arange(len(wave.keys)), torch.tensor(wave.prompt_of_row)
        spread = wave.prompt_of_row == tuple(range(len(wave.prompts)))
        logits_PV, state = adapter.prefill(wave.prompts)
        tokens_B, values_4B = draw(logits_PV[places_B.to(adapter.device)], keys_B4, 0, seen_BL)
        del logits_PV  # its bytes are free before the next logits are made
        for step in range(settings.max_new_tokens):
            alive_B = record.write(slots_B, step, values_4B)
            if step + 1 == settings.max_new_tokens or not alive_B.any():
                break
            if seen_BL is not None:
                seen_BL = torch.cat([seen_BL, tokens_B[:, None]], 1)
            if not spread or _pays(alive_B):
                kept = alive_B.nonzero()[:, 0]
                state = adapter.select(state, places_B[kept])  # from the host, where adapters know their rows
                spread, places_B = True, torch.arange(len(kept))
                slots_B, kept = slots_B[kept], kept.to(adapter.device)
                tokens_B, keys_B4 = tokens_B[kept], keys_B4[kept]
                seen_BL = None if seen_BL is None else seen_BL[kept]
            tokens_B, values_4B = draw(adapter.decode_step(state, tokens_B), keys_B4, step + 1, seen_BL)
        return record.completions()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switches every module to eval mode, and each back to its own mode at the end.

    Args:
        model: the network; modules frozen in eval mode stay so.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _Drawer:
    """Turns logits into tokens as the settings say."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.greedy = settings.temperature == 0
        self.temperature = 1.0 if self.greedy else float(settings.temperature)
        self.filters = _filters(settings)
        self.reads_history = settings.repetition_penalty != 1.0

    def __call__(self, logits_BV: Tensor, keys_B4: Tensor, step: int, seen_BL: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draws a token a row.

        Returns:
            Tokens (B,) on the device; and tokens, both log-probs and ties as (4, B) float64, for one trip to the host.
        """
        history_BL = keys_B4[:, :0] if seen_BL is None else seen_BL
        scores_BV, temperature = logits_BV, self.temperature
        if self.filters:
            scores_BV, temperature = self.filters(history_BL, logits_BV.float()), 1.0
        if self.greedy:
            drawn = greedy_tokens(scores_BV)
        else:
            positions_B = keys_B4.new_full((len(keys_B4),), step)
            drawn = sample_tokens(scores_BV, keys_B4, positions_B, temperature=temperature)
        model_logprobs_B = drawn.logprobs_B
        if self.filters:
            model_logprobs_B = taken_logprobs(logits_BV, drawn.tokens_B, temperature=self.temperature)
        columns = (drawn.tokens_B.double(), drawn.logprobs_B, model_logprobs_B, drawn.tied_B.double())
        return drawn.tokens_B, torch.stack(columns)


class _Record:
    """What the rows of a wave have drawn so far, on the host."""

    def __init__(self, wave: Wave, settings: SamplingSettings, progress: Progress | None) -> None:
        shape = (len(wave.keys), settings.max_new_tokens)
        self.keys, self.progress = wave.keys, progress
        self.eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64)
        self.ids = torch.zeros(shape, dtype=torch.int64)
        self.logprobs = torch.zeros(shape)
        self.model_logprobs = torch.zeros(shape) if _filters(settings) else self.logprobs
        self.ties = torch.zeros(shape[0], dtype=torch.int64)
        self.lengths = torch.zeros(shape[0], dtype=torch.int64)
        self.finished = torch.zeros(shape[0], dtype=torch.bool)

    def write(self, slots_B: Tensor, step: int, values_4B: Tensor) -> Tensor:
        """Notes one token of every row that has not ended; the one place where a rollout reads tensor values.

        Args:
            slots_B: (B,) int64, for each row of the cache, the row of the wave.
            step: position in the completion.
            values_4B: (4, B) float64 from `_Drawer`.

        Returns:
            (B,) bool, on the host: rows of the cache that go on.
        """
        running_B = ~self.finished[slots_B]
        rows, values = slots_B[running_B], values_4B.cpu()[:, running_B]
        self._refuse_broken(rows, step, values[1:3])
        self.ids[rows, step] = values[0].long()
        self.model_logprobs[rows, step] = values[2].float()
        self.logprobs[rows, step] = values[1].float()
        self.ties[rows] += values[3].long()
        self.lengths[rows] = step + 1
        self.finished[rows] = torch.isin(self.ids[rows, step], self.eos)
        if self.progress is not None and bool(self.finished[rows].any()):
            self.progress(int(self.finished.sum()), len(self.keys))
        return ~self.finished[slots_B]

    def completions(self) -> list[Completion]:
        """Gives each row its own tensors, so that no padding outlives the wave."""
        if self.progress is not None and not bool(self.finished.all()):
            self.progress(len(self.keys), len(self.keys))
        same = self.model_logprobs is self.logprobs
        completions = []
        for row, length in enumerate(self.lengths.tolist()):
            logprobs = self.logprobs[row, :length].clone()
            model_logprobs = logprobs if same else self.model_logprobs[row, :length].clone()
            ids, finished = self.ids[row, :length].clone(), bool(self.finished[row])
            completions.append(Completion(ids, logprobs, model_logprobs, finished, int(self.ties[row])))
        return completions

    def _refuse_broken(self, rows: Tensor, step: int, logprobs_2B: Tensor) -> None:
        broken = ~logprobs_2B.isfinite().all(0)
        if not broken.any():
            return
        key = self.keys[int(rows[broken][0])]
        raise MemsafeError(
            f"No token can be drawn at position {step} of prompt {key.prompt}, sample {key.sample} "
            f"({int(broken.sum())} of {len(rows)} rows): the logits hold NaN or +inf, or every token is at -inf. "
            "The weights have probably diverged: lower the learning rate or resume from an earlier checkpoint; if the "
            "model runs in float16, use bfloat16 or float32."
        )


def _filters(settings: SamplingSettings) -> Any:
    """Builds transformers' processors in the order of its `generate`; empty if only the temperature counts.

    Greedy decoding takes the penalty alone, as there: the others never change the most likely token.
    """
    chosen: list[Any] = []
    if settings.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    if settings.temperature == 0:
        return LogitsProcessorList(chosen)
    narrowing: list[Any] = []
    if settings.top_k:
        narrowing.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        narrowing.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p is not None:
        narrowing.append(MinPLogitsWarper(settings.min_p))
    if (chosen or narrowing) and settings.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(float(settings.temperature)))
    return LogitsProcessorList(chosen + narrowing)


def _pays(alive_B: Tensor) -> bool:
    """Dropping rows copies the cache once; an ended row costs its share of every step to come."""
    return int((~alive_B).sum()) * _COMPACT_SHARE >= len(alive_B)


def _key_tensor(keys: Sequence[SequenceKey]) -> Tensor:
    """Stacks keys as (B, 4) int64; a wider number keeps its low 64 bits."""
    half = 1 << 63
    return torch.tensor([[(value + half) % (2 * half) - half for value in key] for key in keys])


def _prompt_rows(wave: Wave) -> Tensor:
    """Pads prompts on the left with their own first token, which a penalty on seen tokens does not notice."""
    width = max(len(prompt) for prompt in wave.prompts)
    padded = [torch.cat([prompt[:1].expand(width - len(prompt)), prompt]) for prompt in wave.prompts]
    return torch.stack([padded[prompt] for prompt in wave.prompt_of_row])


def _ordered_rows(prompt_tokens: Sequence[int], group_sizes: Sequence[int]) -> list[tuple[int, int]]:
    order = sorted(range(len(prompt_tokens)), key=lambda prompt: -prompt_tokens[prompt])
    return [(prompt, sample) for prompt in order for sample in range(group_sizes[prompt])]


def _gather_wave(
    rows: Sequence[tuple[int, int]], prompts: Sequence[Tensor], keys: Sequence[Sequence[SequenceKey]]
) -> Wave:
    unique = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in rows))}
    return Wave(
        tuple(prompts[prompt] for prompt in unique),
        tuple(unique[prompt] for prompt, _ in rows),
        tuple(keys[prompt][sample] for prompt, sample in rows),
    )


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Tells of a wave's rows as part of the whole rollout."""
    return None if progress is None else lambda ended, _: progress(before + ended, total)


def _check(
    lengths: Sequence[int],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    geometry: ModelGeometry,
) -> None:
    if settings.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {settings.max_new_tokens}; a completion needs at least 1 token.")
    if not settings.temperature >= 0:
        raise ConfigError(f"temperature is {settings.temperature}; use 0 for greedy decoding or a positive number.")
    if len(lengths) != len(keys):
        raise DataError(f"{len(lengths)} prompts came with keys for {len(keys)}; give one list of keys per prompt.")
    for index, length in enumerate(lengths):
        if length == 0:
            raise DataError(f"Prompt {index} has 0 tokens; give it at least one, such as the tokenizer's bos token.")
        if geometry.max_positions is not None and length + settings.max_new_tokens > geometry.max_positions:
            raise DataError(
                f"Prompt {index} has {length} tokens; with up to {settings.max_new_tokens} new ones it passes the "
                f"model's {geometry.max_positions} positions. Shorten the prompt or lower max_completion_length to "
                f"at most {max(0, geometry.max_positions - length)}."
            )
