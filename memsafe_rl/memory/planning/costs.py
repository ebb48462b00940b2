"""How much slower a plan is than the fastest: relative times from a few constants, for choosing plans.

Only the CPU figure is measured; the others follow from arithmetic intensity and bus width, and serve to put plans in
order, not to tell seconds.
"""

from __future__ import annotations

from memsafe_rl.memory.planning.estimator import kept_bytes, wave_rows
from memsafe_rl.slices import measure_slices, packed_tokens
from memsafe_rl.types import ModelGeometry, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork

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

_FIXED_SHARE = 0.2
"""Time of a full-speed piece that does not shrink with it: launches, and reading the weights. A guess, except for
updates on a CPU."""
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
_LEAST_COST = 1.12
"""What a fallback costs at least that has no business in a plan while there is room."""


def full_speed_tokens(device: str, geometry: ModelGeometry) -> int:
    """Gives the tokens of one forward beyond which more are not worth their memory."""
    if geometry.unit is not None:
        elements = _CPU_FULL_SPEED_ELEMENTS if device == "cpu" else _FULL_SPEED_ELEMENTS
        return max(1, elements // max(1, geometry.hidden_size))
    if device != "cpu":
        return _FULL_SPEED_TOKENS
    least, most = _CPU_TOKENS
    return max(least, min(most, _CPU_FULL_SPEED_ELEMENTS // geometry.hidden_size))


def full_speed_packed_tokens(device: str, work: UpdateWork) -> int:
    """Gives the tokens of one forward over packed rows beyond which more are not worth their memory.

    A prompt whose completions do not fit beside it is run again with the rest of them, so that small micro-batches run
    more tokens: as many as are fast, doubled until at most a twentieth of all is run again.
    """
    least = packed_tokens(work, range(len(work.prompts)))
    tokens = min(least, max(full_speed_tokens(device, work.geometry), *work.row_tokens))
    while measure_slices(work, tokens, packed=True).total > _RUN_AGAIN * least:
        tokens = min(least, 2 * tokens)
    return tokens


def full_speed_rows(device: str, work: RolloutWork) -> int:
    """Gives the sequences decoded together beyond which more are not worth their memory."""
    worth = _FULL_SPEED_ROWS
    if work.geometry.unit is not None:
        worth = min(worth, full_speed_tokens(device, work.geometry))
    elif device == "cpu":
        slots = max(work.prompt_tokens, default=1) + work.max_new_tokens
        row_bytes = work.geometry.kv_bytes(slots) + 4 * work.geometry.vocab_size
        worth = min(worth, max(_LEAST_ROWS, _CPU_ROWS_BYTES // row_bytes))
    return max(1, min(work.rows, worth))


def full_speed_tile(work: UpdateWork) -> int:
    """Gives the completion tokens whose logits exist together beyond which more are not faster."""
    if work.geometry.unit is not None:
        return _LEAST_TILE  # there are no logits
    return max(_LEAST_TILE, min(sum(work.action_tokens), _TILE_BYTES // (4 * work.geometry.vocab_size)))


def update_time(device: str, work: UpdateWork, plan: UpdatePlan, fastest: UpdatePlan) -> float:
    """Compares an optimizer step with that of the fastest plan.

    Micro-batches cost their tokens, padding and prompts that are run again included, and a fixed part each.
    """
    share = _CPU_UPDATE_SHARE if device == "cpu" else _FIXED_SHARE
    fixed = share * full_speed_tokens(device, work.geometry)
    time = max(1.0, _run_tokens(work, plan, fixed) / _run_tokens(work, fastest, fixed))
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


def rollout_time(work: RolloutWork, plan: RolloutPlan, fastest: RolloutPlan) -> float:
    """Compares sampling a rollout with that by the fastest plan."""
    time = _slowness(wave_rows(work, fastest)[0], wave_rows(work, plan)[0], _FIXED_SHARE)
    if work.kept_bytes:
        time *= 1 + _READ_AGAIN * (1 - kept_bytes(work, plan) / work.kept_bytes)
    return time * (_LEAST_COST if plan.park_optimizer else 1.0)


def score_time(work: RolloutWork, plan: RolloutPlan, fastest: RolloutPlan) -> float:
    """Compares scoring a rollout with that by the fastest plan."""
    prompt = 0 if work.geometry.unit is not None else max(work.prompt_tokens, default=1)
    total = work.rows * (prompt + work.max_new_tokens)
    time = _slowness(min(total, fastest.score_tokens), min(total, plan.score_tokens), _FIXED_SHARE)
    return time * (_LEAST_COST if plan.park_optimizer else 1.0)


def reward_time(plan: RolloutPlan, fastest: RolloutPlan) -> float:
    """Compares a reward model's passes with those by the fastest plan."""
    time = _slowness(fastest.reward_rows, plan.reward_rows, _FIXED_SHARE)
    return time * (_LEAST_COST if plan.park_optimizer else 1.0)


def _run_tokens(work: UpdateWork, plan: UpdatePlan, fixed: float) -> float:
    """Tokens of all micro-batches, a prompt that several of them need several times, and what each costs besides."""
    slices = measure_slices(work, plan.micro_batch_tokens, packed=plan.pack_prompts)
    return slices.total + fixed * slices.number


def _slowness(full: int, size: int, fixed: float) -> float:
    """Relative time of pieces smaller than full speed asks for: ``(1 + f · full / size) / (1 + f)``, at least 1."""
    return max(1.0, (1 + fixed * full / max(1, size)) / (1 + fixed))
