"""Peaks and relative times of a plan from a network's geometry; for choosing plans, not for promises.

Every function gives the bytes that come on top of what is held when the phase begins (weights, optimizer state, and
for an update no gradients yet), split by what they are for at the moment of the peak. Against the allocator's count
the sums lie between 0.6 and 1.7 times the measured peak for Llama-, Qwen- and GPT-2-like networks, float32 and
bfloat16, full training and LoRA, and between 0.45 and 1.9 for T5, whose attention keeps scores where its biases learn
(``tests/memory/planning/test_estimator.py``); run-time corrections and the forecast take care of the rest. Not
seen from a geometry, and therefore left to them: attention kernels that keep a score for each pair of tokens, layers
that unpack quantised weights, filters of the sampler that copy the logits, and reward models.

Of the times, only the CPU's are measured; the others follow from arithmetic intensity and bus width, and serve to put
plans in order, not to tell seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

from memsafe_rl.micro_batches import SourceSlices, measure_slices, measure_sources, packing_saves, source_tokens
from memsafe_rl.types import (
    SCORE_ELEMENTS,
    Component,
    ModelGeometry,
    Phase,
    RolloutPlan,
    RolloutWork,
    UnitBytes,
    UpdatePlan,
    UpdateWork,
    blocks_on_host,
)

Parts = Mapping[Component, int]

_WIDE_TENSORS = 8
"""Tensors of the hidden width that a transformer block saves for backward: two norms (input and normalised input
each), the attention output, its projection's input, and two residual sums."""
_HEAD_TENSORS = 2
"""Copies of queries, keys and values saved: before and after rotary embedding."""
_FEED_FORWARD_TENSORS = 4
"""Tensors of the feed-forward width saved: gate, up, activated gate, product."""
_WIDENED_TENSORS = 4
"""Further tensors of the hidden width where activations are narrower than float32: norms and LoRA layers widen them."""
_LOGIT_BYTES = 4
"""Bytes of one logit where log-probs are computed."""
_TILE_COPIES = 1.25
"""The tile of logits, and temporaries of a sixteenth of it."""
_SAMPLER_ELEMENTS = 2**20
"""Logits that the sampler widens to float32 at a time, at least a row."""
_NOISE_BYTES = 8 * 8
"""Bytes of noise and its temporaries, per row and per square root of the vocabulary."""
_SCORE_COPIES = 3
"""Copies of the scores: those over prompts, those over completions, and both joined."""
_SCORES_KEPT = 3
"""Copies of a layer's scores that are saved for backward where the bias on them is trained."""
_SCORES_AT_ONCE = 5
"""Copies of them where a layer is recomputed and runs backward."""
_STATES_AT_ONCE = 5
"""Tensors of a state's size in a denoising step beside the network's: state, next, mean, difference, square/noise."""
_STORED_BYTES = 8 + 8 + 1 + 3 * 4
"""Bytes of one stored token: its id, a share of its prompt's, its mask, and three log-probs."""

BAND = 1.1
"""A plan this much slower than the fastest is still taken where it holds less."""

_FULL_SPEED_TOKENS = 16384
"""Tokens of a micro-batch beyond which no accelerator gains speed worth its memory."""
_CPU_FULL_SPEED_ELEMENTS = 2**18
"""Elements of a hidden state beyond which a CPU gains no speed worth its memory: on two cores a model of width 576 took
8.4 s for 2,048 tokens at a time (2.3 GiB) and 9.5 s for 512 (0.6 GiB)."""
_FULL_SPEED_ELEMENTS = 2**25
"""Elements of a hidden state beyond which no accelerator gains speed worth its memory: 16,384 tokens of width 2,048."""
_CPU_TOKENS = (256, 512)
"""Least and most tokens of a CPU's full speed, whatever the width: what a piece costs besides its tokens is worth about
fifty of them. A model of width 256 with rows of 30 to 210 tokens took 2.5 s of one core for 512 at a time (146 MB), 2.7
for 1,024 (261 MB), 3.2 for 2,048 (451 MB) and 4.8 for all, whose padding and caches cost more than pieces."""
_FULL_SPEED_ROWS = 256
"""Sequences decoded together beyond which no device gains speed worth its memory."""
_LEAST_ROWS = 32
_CPU_ROWS_BYTES = 64 * 2**20
"""Caches and logits of the rows in flight beyond which a CPU gains no speed worth its memory."""
_RUN_AGAIN = 1.05
"""Tokens of all micro-batches over those of rows packed together, at most, at full speed."""
_TILE_BYTES = 32 * 2**20
"""A tile of fp32 logits of this size is large enough that a larger one is not faster."""
_LEAST_TILE = 64
_ACCELERATOR_TILE = 512
"""Tokens of a tile below which an accelerator waits for the head's weights, which it reads once a tile: the arithmetic
of common cards is worth 100 to 420 half-precision operations a byte (`preflight/cards.yaml`), a tile's one for each of
its tokens."""

_FIXED_SHARE = 0.2
"""Time of a full-speed piece that does not shrink with it: launches, reading weights. A guess but for CPU updates."""
_CPU_UPDATE_SHARE = 0.1
"""The same for a CPU's micro-batches. On two cores each costs as much as about 50 further tokens, a tenth of 512, for a
Qwen3 of 17 million parameters (48 to 52) and for SmolLM2-135M (51 to 53) alike, packed, with LoRA, in pieces of 128 to
1,320 tokens; on one core 3 to 17 tokens, with LoRA or all weights."""
_TILE_SHARE = 0.15
"""The same for a tile of logits: the head's weights are read once a tile."""
_CHECKPOINTED = 4 / 3
"""A second forward beside a forward and a backward of twice its time."""
_OFFLOADED = 3.0
"""All activations cross the bus twice, and a block's arithmetic is faster than its bytes are moved."""
_OFFLOADED_INPUTS = 1.25
"""With checkpointing only each block's input crosses."""
_PARKING_TOKENS = 2**15
"""Tokens of a step whose arithmetic takes as long as moving the state of all weights there and back (16 bytes a weight
at 20 GB/s, 6 operations a weight and token at 2e14 a second)."""
_READ_AGAIN = 0.5
"""Share by which reading contexts again makes a rollout of episodes longer; measured on one core: 0.4, 0.7 and 0.9 of
the time with caches kept, at 2, 4 and 8 turns (`python -m benchmarks.rereading`)."""
_BUS_TOKENS = 2**13
"""Tokens of a forward whose arithmetic takes as long as bringing the weights from the host: 2 bytes a weight at 25 GB a
second, and 2 operations a weight and token at 2e14 a second. An estimate; far too high where a CPU is the device."""
_REDUCE_TOKENS = 2**11
"""Tokens of an update whose arithmetic takes as long as adding up whole float32 gradients over ranks: 4 bytes a weight
at 65 GB a second, and 6 operations a weight and token at 2e14 a second. An estimate."""
_CPU_REDUCE_TOKENS = 2**5
"""The same between two processes of one CPU, over gloo: 3 to 80 tokens, median 38, with 6 and 21 million weights."""
_REDUCE_ALONE = 1.1
"""Adding them up once, at the end, where no backward runs beside it. A guess."""
_LEAST_COST = 1.12
"""What a fallback costs at least that has no business in a plan while there is room."""


def block_activation_bytes(geometry: ModelGeometry) -> int:
    """Counts what one block saves for backward, per token."""
    elements = (
        (_WIDE_TENSORS + _is_narrow(geometry) * _WIDENED_TENSORS) * geometry.hidden_size
        + _HEAD_TENSORS * _attention_width(geometry)
        + _FEED_FORWARD_TENSORS * geometry.intermediate_size
    )
    return elements * geometry.compute_bytes


def update_parts(work: UpdateWork, plan: UpdatePlan) -> Parts:
    """Estimates what an optimizer step adds to what is held before its first forward, at the fullest of its moments."""
    geometry = work.geometry
    if geometry.unit is not None:
        return _unit_update_parts(work, plan, geometry.unit)
    kept, working, actions, count = (_sourced_activations if work.sources else _activations)(work, plan)
    head_elements = geometry.vocab_size * geometry.hidden_size if geometry.head_trainable else 0
    aside = work.gradients_aside * geometry.trainable_bytes
    whole = 0 if plan.reduce_each else work.whole_gradient_bytes  # held until they are added up, a unit at a time
    earlier = aside + ((whole or geometry.trainable_bytes) if count > 1 else 0)
    stored = _STORED_BYTES * sum(work.row_tokens) if plan.trajectory_device == "device" else 0
    logits = _tile_bytes(geometry, min(plan.logprob_tile, actions))
    sums = actions * geometry.hidden_size * (geometry.compute_bytes + _wide_bytes(geometry))
    narrowed = head_elements * geometry.compute_bytes if _is_narrow(geometry) else 0
    moments = (
        # the head's backward, with its gradient in float32; the first block's; and the end, with all gradients
        (kept + sums, logits, earlier + head_elements * _wide_bytes(geometry) + narrowed),
        (kept + working, 0, earlier + head_elements * geometry.compute_bytes),
        (working, 0, aside + (whole or geometry.trainable_bytes) + head_elements * geometry.compute_bytes),
    )
    activations, tile, gradients = max(moments, key=sum)
    return {
        Component.ACTIVATIONS: activations,
        Component.LOGITS: tile,
        Component.GRADIENTS: gradients,
        Component.TRAJECTORY: stored,
    }


def _activations(work: UpdateWork, plan: UpdatePlan) -> tuple[int, int, int, int]:
    """Bytes kept for the backward, those of a block at work, and completion tokens of a slice and number of slices."""
    geometry = work.geometry
    tokens, actions, count, _ = measure_slices(work, plan.micro_batch_tokens, packed=plan.pack_prompts)
    block, width = block_activation_bytes(geometry), geometry.hidden_size * geometry.compute_bytes
    inner = geometry.intermediate_size * geometry.compute_bytes
    kept = geometry.layers * (width if plan.checkpointing else block) * tokens
    working = ((block if plan.checkpointing else 2 * width) + 2 * inner) * tokens
    if plan.offload_activations:
        kept = width * tokens  # on its way to the host
        working += 0 if plan.checkpointing else block // (3 if _is_narrow(geometry) else 4) * tokens
    return kept, working, actions, count


def _sourced_activations(work: UpdateWork, plan: UpdatePlan) -> tuple[int, int, int, int]:
    """The same where an encoder reads prompts: what it gave waits for the last slice of its group."""
    geometry = work.geometry
    slices = measure_sources(work, plan.micro_batch_tokens)
    block, width = block_activation_bytes(geometry), geometry.hidden_size * geometry.compute_bytes
    heads = geometry.heads * geometry.head_dim * geometry.compute_bytes
    inner = geometry.intermediate_size * geometry.compute_bytes
    layer = (block + 2 * (width + heads)) * slices.tokens + 2 * heads * slices.attended
    decoder = geometry.layers * (width * slices.tokens if plan.checkpointing else layer)
    encoder = geometry.encoder_layers * (width if plan.checkpointing else block) * slices.read
    states = width * (2 * slices.read + slices.attended)
    working = (layer if plan.checkpointing else 2 * width * slices.tokens) + 2 * inner * slices.tokens
    read, written, bias = _scores(work, slices)
    working += bias + read
    if geometry.bias_trained and plan.checkpointing:
        working += _SCORES_AT_ONCE * max(read, written)
    elif geometry.bias_trained:
        decoder += _SCORES_KEPT * geometry.layers * written
        encoder += _SCORES_KEPT * geometry.encoder_layers * read
    if plan.offload_activations:
        decoder, encoder = width * slices.tokens, 0
        working += 0 if plan.checkpointing else layer // (3 if _is_narrow(geometry) else 4)
    return decoder + encoder + states, working, slices.actions, slices.number


def _scores(work: UpdateWork, slices: SourceSlices) -> tuple[int, int, int]:
    """Bytes of a layer's scores over prompts and over completions, and of their bias, which T5 makes for all pairs."""
    geometry, longest = work.geometry, max(work.action_tokens)
    source = max(source_tokens(work, row) for row in range(len(work.row_tokens)))
    token = geometry.bias_heads * geometry.compute_bytes
    return token * source * slices.read, token * longest * slices.tokens, 2 * token * max(source, longest) ** 2


def wave_rows(work: RolloutWork, plan: RolloutPlan) -> tuple[int, int]:
    """Counts the sequences that are decoded together, and their unique prompts."""
    longest, room = max(work.prompt_tokens, default=1), plan.kv_bytes
    rows = max(1, min(work.rows, plan.rows_in_flight))
    if work.geometry.unit is None and work.geometry.shares_prompts:
        if room is not None:
            rows = max(1, bisect_right(range(1, rows + 1), room, key=lambda rows: _shared_cache_bytes(work, rows)))
    elif work.geometry.unit is None:
        rows = math.ceil(work.rows / max(1, math.ceil(work.rows / max(1, plan.rows_in_flight))))
        if room is not None:
            rows = min(rows, room // max(1, work.geometry.kv_bytes(longest + work.max_new_tokens)))
        rows = max(1, min(rows, work.group_size * max(1, plan.prefill_tokens // max(1, longest))))
    return rows, _prompts_of(work, rows)


def read_tokens(work: RolloutWork, plan: RolloutPlan) -> int:
    """Counts the prompt tokens, padding included, of the largest forward that reads prompts."""
    longest = max(work.prompt_tokens, default=1)
    prompts = min(wave_rows(work, plan)[1], max(1, plan.prefill_tokens // max(1, longest)))
    in_chunks = work.geometry.shares_prompts and work.geometry.source_bytes is None
    return min(longest, plan.prefill_tokens) if prompts == 1 and in_chunks else prompts * longest


def kept_bytes(work: RolloutWork, plan: RolloutPlan) -> int:
    """Counts the bytes up to which caches are kept between turns, those of the rows in flight included."""
    return min(plan.kept_limit_bytes, work.kept_bytes)


def rollout_parts(work: RolloutWork, plan: RolloutPlan) -> Parts:
    """Estimates what a rollout adds to what is held before it, at the fullest of its moments."""
    geometry = work.geometry
    longest = max(work.prompt_tokens, default=1)
    rows, prompts = wave_rows(work, plan)
    if geometry.unit is not None:
        return {Component.ACTIVATIONS: rows * (geometry.unit.forward + _STATES_AT_ONCE * geometry.unit.state)}
    slots, layers = longest + work.max_new_tokens, max(1, geometry.layers)
    prompt_cache = prompts * geometry.prompt_kv_bytes(longest)
    decoding, spreading = _forward_bytes(geometry) * rows, rows * geometry.kv_bytes(longest)
    if geometry.shares_prompts:
        cache, spreading = max(_shared_cache_bytes(work, rows), kept_bytes(work, plan)), prompt_cache
        if geometry.key_bytes is not None:  # what is kept in 8 bits is floats while it is attended to
            head = rows * slots * geometry.head_dim
            decoding += _LOGIT_BYTES * max(head, min(SCORE_ELEMENTS, geometry.kv_heads * head))
        decoding += _SCORE_COPIES * _LOGIT_BYTES * min(SCORE_ELEMENTS, rows * geometry.heads * slots)
    else:
        cache = rows * geometry.kv_bytes(slots)
        cache += cache // layers  # one layer is there twice while it grows
    reading = _forward_bytes(geometry) + geometry.bias_heads * longest * geometry.compute_bytes
    moments = (
        (reading * read_tokens(work, plan), prompt_cache, 0),
        (decoding, cache, 0),  # the last step
        (0, cache, _sampler_bytes(geometry, rows)),  # the draw after it
        (0, prompt_cache // layers + spreading, _sampler_bytes(geometry, rows)),  # copies of the prompts for each row
    )
    activations, kept, logits = max(moments, key=sum)
    return {Component.ACTIVATIONS: activations, Component.KV_CACHE: kept, Component.LOGITS: logits}


def score_parts(work: RolloutWork | UpdateWork, plan: RolloutPlan, tile: int = UpdatePlan.logprob_tile) -> Parts:
    """Estimates what a forward without gradient adds: hidden states, one block's temporaries, and a tile of logits."""
    geometry = work.geometry
    rows = _rows_to_score(work)
    if geometry.unit is not None:
        pairs = measure_slices(rows, plan.score_tokens, packed=False).tokens
        return {Component.ACTIVATIONS: pairs * (geometry.unit.forward + _STATES_AT_ONCE * geometry.unit.state)}
    if rows.sources:
        return _sourced_score_parts(rows, plan, tile)
    slices = measure_slices(rows, plan.score_tokens, packed=packing_saves(rows))
    logits = _tile_bytes(geometry, min(tile, plan.score_tokens, slices.actions))
    hidden = (slices.tokens + slices.actions) * geometry.hidden_size * geometry.compute_bytes
    activations, kept = max((hidden, logits), (_forward_bytes(geometry) * slices.tokens, 0), key=sum)
    return {Component.ACTIVATIONS: activations, Component.LOGITS: kept}


def _sourced_score_parts(work: UpdateWork, plan: RolloutPlan, tile: int) -> Parts:
    """Estimates scoring where an encoder reads the prompts: its forward, or the decoder's beside what it read."""
    geometry = work.geometry
    slices = measure_sources(work, plan.score_tokens)
    width = geometry.hidden_size * geometry.compute_bytes
    logits = _tile_bytes(geometry, min(tile, plan.score_tokens, slices.actions))
    over_prompts, _, bias = _scores(work, slices)
    read = width * (slices.read + slices.attended) + bias
    keys = 2 * geometry.heads * geometry.head_dim * geometry.compute_bytes * slices.attended
    moments = (
        (_forward_bytes(geometry) * slices.read + over_prompts + bias, 0),
        (read + keys + _forward_bytes(geometry) * slices.tokens, 0),
        (width * (slices.tokens + slices.actions), logits),
    )
    activations, kept = max(moments, key=sum)
    return {Component.ACTIVATIONS: activations, Component.LOGITS: kept}


def _unit_update_parts(work: UpdateWork, plan: UpdatePlan, unit: UnitBytes) -> Parts:
    """Estimates a step of (row, column) pairs run one by one, where its backwards begin and where the last one ends."""
    pairs, _, count, total = measure_slices(work, plan.micro_batch_tokens, packed=False)
    kept = min(unit.kept, unit.recomputed + unit.forward) if plan.checkpointing else unit.kept
    if plan.offload_activations:
        kept = min(kept, unit.forward)
    gradients = work.geometry.trainable_bytes
    earlier = gradients if count > 1 else 0
    states = _STATES_AT_ONCE * unit.state
    stored = total * unit.state if plan.trajectory_device == "device" else 0
    moments = ((pairs * (kept + states), earlier), (pairs * (unit.forward + states), gradients))
    activations, held = max(moments, key=sum)
    return {Component.ACTIVATIONS: activations, Component.GRADIENTS: held, Component.TRAJECTORY: stored}


def _prompts_of(work: RolloutWork, rows: int) -> int:
    return min(len(work.prompt_tokens), math.ceil(rows / work.group_size)) or 1


def _shared_cache_bytes(work: RolloutWork, rows: int) -> int:
    """The cache of rows at their full length, with each of their prompts once."""
    prompts = _prompts_of(work, rows) * work.geometry.prompt_kv_bytes(max(work.prompt_tokens, default=1))
    return work.geometry.batch_kv_bytes(prompts, rows, work.max_new_tokens)


def _rows_to_score(work: RolloutWork | UpdateWork) -> UpdateWork:
    if isinstance(work, UpdateWork):
        return work
    if work.geometry.unit is not None:
        return UpdateWork((work.max_new_tokens,) * work.rows, (work.max_new_tokens,) * work.rows, work.geometry)
    rows = tuple(prompt + work.max_new_tokens for prompt in work.prompt_tokens for _ in range(work.group_size))
    owners = tuple(prompt for prompt in range(len(work.prompt_tokens)) for _ in range(work.group_size))
    sources = () if work.geometry.source_bytes is None else owners
    return UpdateWork(rows, (work.max_new_tokens,) * len(rows), work.geometry, sources=sources)


def _attention_width(geometry: ModelGeometry) -> int:
    """Elements of a token's queries, keys and values."""
    return (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim


def _forward_bytes(geometry: ModelGeometry) -> int:
    """Bytes a token takes at most inside a block that keeps nothing: its feed-forward part, or its attention."""
    inner = max(4 * geometry.intermediate_size, 2 * _attention_width(geometry))
    widened = geometry.hidden_size + 2 * geometry.intermediate_size if _is_narrow(geometry) else 0
    return (3 * geometry.hidden_size + inner + widened) * geometry.compute_bytes


def _is_narrow(geometry: ModelGeometry) -> bool:
    """Whether activations are narrower than float32, so that norms and LoRA layers make wider copies."""
    return geometry.compute_bytes < _LOGIT_BYTES


def _wide_bytes(geometry: ModelGeometry) -> int:
    return max(_LOGIT_BYTES, geometry.compute_bytes)


def _tile_bytes(geometry: ModelGeometry, tile: int) -> int:
    return int(_TILE_COPIES * _wide_bytes(geometry) * tile * geometry.vocab_size)


def _sampler_bytes(geometry: ModelGeometry, rows: int) -> int:
    widened = min(rows * geometry.vocab_size, max(geometry.vocab_size, _SAMPLER_ELEMENTS))
    noise = _NOISE_BYTES * rows * math.isqrt(geometry.vocab_size)
    return rows * geometry.vocab_size * geometry.compute_bytes + 2 * _LOGIT_BYTES * widened + noise


def full_speed_tokens(device: str, geometry: ModelGeometry) -> int:
    """Returns the tokens of one forward beyond which more are not worth their memory."""
    if geometry.unit is not None:
        elements = _CPU_FULL_SPEED_ELEMENTS if device == "cpu" else _FULL_SPEED_ELEMENTS
        return max(1, elements // max(1, geometry.hidden_size))
    if device != "cpu":
        return _FULL_SPEED_TOKENS
    least, most = _CPU_TOKENS
    return max(least, min(most, _CPU_FULL_SPEED_ELEMENTS // geometry.hidden_size))


def full_speed_packed_tokens(device: str, work: UpdateWork) -> int:
    """Returns the same over packed rows: doubled until running shared tokens again costs at most a twentieth."""
    least, full = work.packed_tokens, full_speed_tokens(device, work.geometry)
    fixed = _update_share(device) * full
    tokens, enough = min(least, max(full, *work.row_tokens)), _RUN_AGAIN * (least + fixed * (1 + -(-least // full)))
    while tokens < least:
        slices = measure_slices(work, tokens, packed=True)
        if slices.total <= _RUN_AGAIN * least and slices.total + fixed * slices.number <= enough:
            break
        tokens = min(least, 2 * tokens)
    return tokens


def full_speed_rows(device: str, work: RolloutWork) -> int:
    """Returns the sequences decoded together beyond which more are not worth their memory."""
    worth = _FULL_SPEED_ROWS
    if work.geometry.unit is not None:
        worth = min(worth, full_speed_tokens(device, work.geometry))
    elif device == "cpu":
        slots = max(work.prompt_tokens, default=1) + work.max_new_tokens
        row_bytes = work.geometry.kv_bytes(slots) + 4 * work.geometry.vocab_size
        worth = min(worth, max(_LEAST_ROWS, _CPU_ROWS_BYTES // row_bytes))
    return max(1, min(work.rows, worth))


def full_speed_tile(device: str, work: UpdateWork) -> int:
    """Returns the completion tokens whose logits exist together beyond which more are not faster."""
    if work.geometry.unit is not None:
        return _LEAST_TILE  # there are no logits
    least = _LEAST_TILE if device == "cpu" else min(_ACCELERATOR_TILE, sum(work.action_tokens))
    return max(_LEAST_TILE, least, min(sum(work.action_tokens), _TILE_BYTES // (4 * work.geometry.vocab_size)))


def update_time(device: str, work: UpdateWork, plan: UpdatePlan, fastest: UpdatePlan) -> float:
    """Compares an optimizer step with the fastest plan's: all tokens that run, and a fixed part each micro-batch."""
    fixed = _update_share(device) * full_speed_tokens(device, work.geometry)
    # forward and backward bring the weights twice, and compute thrice as much as a forward
    brought = fixed + 2 / 3 * _bus_tokens(work.geometry, plan.resident_blocks)
    share = work.whole_gradient_bytes / max(1, work.geometry.parameter_bytes)
    reduced = share * (_CPU_REDUCE_TOKENS if device == "cpu" else _REDUCE_TOKENS)
    returning = _bus_tokens(work.geometry, plan.resident_blocks, reference=True)  # to be scored with
    tokens = _run_tokens(work, plan, brought, reduced) + returning
    time = max(1.0, tokens / _run_tokens(work, fastest, fixed, reduced))
    time *= _slowness(fastest.logprob_tile, plan.logprob_tile, _TILE_SHARE)
    if plan.checkpointing and not fastest.checkpointing:
        time *= _CHECKPOINTED
    if plan.offload_activations:
        time *= _OFFLOADED_INPUTS if plan.checkpointing else _OFFLOADED
    if plan.trajectory_device != fastest.trajectory_device:
        time *= _LEAST_COST
    if plan.park_optimizer:
        share = work.geometry.trainable_bytes / max(1, work.geometry.parameter_bytes)
        time *= _LEAST_COST + share * _PARKING_TOKENS / max(1, sum(work.row_tokens))
    return time


def _update_share(device: str) -> float:
    return _CPU_UPDATE_SHARE if device == "cpu" else _FIXED_SHARE


def rollout_time(phase: Phase, work: RolloutWork, plan: RolloutPlan, fastest: RolloutPlan) -> float:
    """Compares sampling a rollout, scoring it or a reward model's passes with that by the fastest plan."""
    if phase is Phase.REWARD:
        time = _slowness(fastest.reward_rows, plan.reward_rows, _FIXED_SHARE)
        return time * (_LEAST_COST if plan.park_optimizer else 1.0)
    if phase is Phase.ROLLOUT:
        full, size = wave_rows(work, fastest)[0], wave_rows(work, plan)[0]
    else:
        prompt = 0 if work.geometry.unit is not None else max(work.prompt_tokens, default=1)
        total = work.rows * (prompt + work.max_new_tokens)
        full, size = min(total, fastest.score_tokens), min(total, plan.score_tokens)
    parts = (False,) if phase is Phase.ROLLOUT else (False, True)
    brought = sum(_bus_tokens(work.geometry, plan.resident_blocks, reference=part) for part in parts)
    time = _slowness(full, size, _FIXED_SHARE) + brought / size
    if phase is Phase.ROLLOUT and work.kept_bytes:
        time *= 1 + _READ_AGAIN * (1 - kept_bytes(work, plan) / work.kept_bytes)
    return time * (_LEAST_COST if plan.park_optimizer else 1.0)


def _bus_tokens(geometry: ModelGeometry, resident: int | None, *, reference: bool = False) -> float:
    """Tokens of a forward that take as long as bringing in the model's, or a reference's, weights from the host."""
    sizes, others = geometry.frozen_block_bytes, geometry.model_blocks
    away = blocks_on_host(len(sizes), resident, geometry.reference_blocks)
    all_bytes = max(1, sum(sizes[others:] if reference else sizes[:others]))
    return _BUS_TOKENS * sum(sizes[place] for place in away if (place >= others) == reference) / all_bytes


def _run_tokens(work: UpdateWork, plan: UpdatePlan, fixed: float, reduced: float) -> float:
    """Tokens of all micro-batches, what each costs besides, and adding up gradients over ranks, each time or once."""
    slices = measure_slices(work, plan.micro_batch_tokens, packed=plan.pack_prompts)
    return slices.total + fixed * slices.number + reduced * (slices.number if plan.reduce_each else _REDUCE_ALONE)


def _slowness(full: int, size: int, fixed: float) -> float:
    """Relative time of pieces smaller than full speed asks for: ``(1 + f · full / size) / (1 + f)``, at least 1."""
    return max(1.0, (1 + fixed * full / max(1, size)) / (1 + fixed))
