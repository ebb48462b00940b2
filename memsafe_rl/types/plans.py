"""Work, memory and plans: what a memory policy is told and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from memsafe_rl.types.trajectory import in_order


class Phase(StrEnum):
    """The phases of a run to which bytes and failures are attributed."""

    LOAD = "load"
    ROLLOUT = "rollout"
    REWARD = "reward"
    SCORE = "score"
    UPDATE = "update"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


class Component(StrEnum):
    """What the bytes on a device are for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    KV_CACHE = "kv_cache"
    LOGITS = "logits"
    TRAJECTORY = "trajectory"
    OTHER = "other"


KV_BLOCK_SLOTS = 32
"""Slots by which a row's cache grows."""

SCORE_ELEMENTS = 2**21
"""Attention scores that decoding has at the same time, at least those of one token and one key/value head."""


CACHE_SCALE_BYTES = 4
"""Bytes of the scale beside each vector of a cache in 8 bits."""


def whole_blocks(slots: int) -> int:
    """Rounds slots of a cache up to whole blocks."""
    return -(-slots // KV_BLOCK_SLOTS) * KV_BLOCK_SLOTS


def blocks_on_host(blocks: int, resident: int | None, reference: int = 0) -> frozenset[int]:
    """Chooses which blocks' frozen weights wait on the host: the last ``reference`` first, others spread evenly."""
    leaving = 0 if resident is None else max(0, blocks - resident)
    others, first = blocks - reference, min(leaving, reference)
    parts = ((0, others, leaving - first), (others, reference, first))
    return frozenset(
        start + (2 * place + 1) * size // (2 * count) for start, size, count in parts for place in range(count)
    )


@dataclass(frozen=True)
class UnitBytes:
    """What one (row, column) pair of a time-separable network holds; measured, for such a network has any shape."""

    kept: int  # bytes that its forward keeps for the backward pass
    recomputed: int  # bytes of them where blocks are recomputed
    forward: int  # bytes of temporaries of its forward at any moment, about
    state: int  # bytes of one state of a row as it is stored


def room_for_prompt(positions: int | None, new_tokens: int, *, encoded: bool) -> int | None:
    """Counts the tokens of the longest prompt beside a completion; None if unbounded, 0 or less if there is no room."""
    if positions is None or (encoded and new_tokens <= positions):
        return positions
    return positions - new_tokens


@dataclass(frozen=True)
class ModelGeometry:
    """The sizes of a network from which its bytes can be counted."""

    layers: int  # transformer blocks
    hidden_size: int  # width D of the residual stream; of a network with ``unit``, hidden elements of one pair
    intermediate_size: int  # width of the feed-forward part of a block
    heads: int  # query heads of a block
    kv_heads: int  # key/value heads of a block (fewer than ``heads`` under grouped-query attention)
    head_dim: int  # width of one head
    vocab_size: int  # rows V of the output head
    max_positions: int | None  # longest sequence the network accepts, in tokens; None if unbounded
    windows: tuple[int | None, ...]  # per block, the attention window in tokens, None for full attention
    parameter_bytes: int  # bytes of all weights
    trainable_bytes: int  # bytes of the weights that receive gradients
    compute_bytes: int  # bytes of one activation element (2 for bf16, 4 for fp32)
    cache_bytes: int  # bytes of one key or value element in the cache
    head_trainable: bool = True  # whether the output head receives a gradient
    shares_prompts: bool = False  # whether a rollout's cache keeps a prompt once for all rows that follow it
    # bytes of the cross-attention's keys and values of one prompt token, where an encoder reads the prompts; None
    # where prompts and completions are one sequence
    source_bytes: int | None = None
    # bytes of one token's keys in one layer of the cache; None for ``cache_bytes · kv_heads · head_dim``, which an
    # 8-bit cache with its scales is not
    key_bytes: int | None = None
    # bytes of each block's frozen weights, which can wait on the host; empty where none can
    frozen_block_bytes: tuple[int, ...] = ()
    reference_blocks: int = 0  # how many of those, the last ones, are a reference's, which only scores
    encoder_layers: int = 0  # blocks of the encoder through which gradients go; 0 where it is frozen, or there is none
    bias_heads: int = 0  # heads with a bias for every pair of tokens, as T5's have; 0 where there is none
    bias_trained: bool = False  # whether it receives gradients, so that attention keeps its scores
    # what one (row, column) pair holds, where pairs are run one by one; None for a network that reads tokens. Wherever
    # plans and work count tokens, they then count pairs.
    unit: UnitBytes | None = None

    def room_for_prompt(self, new_tokens: int) -> int | None:
        """Counts the tokens of the longest prompt that the network accepts; see `room_for_prompt`."""
        return room_for_prompt(self.max_positions, new_tokens, encoded=self.source_bytes is not None)

    def kv_bytes(self, slots: int) -> int:
        """Counts the bytes of ``slots`` tokens of a row: ``2 · e · Σ_layers H_kv · d_head · min(slots, window)``."""
        return 2 * self._slot_bytes * sum(slots if window is None else min(slots, window) for window in self.windows)

    def prompt_kv_bytes(self, tokens: int) -> int:
        """Counts a prompt's key/value bytes; where an encoder reads it, the cross-attention's and a start token's."""
        return self.kv_bytes(tokens) if self.source_bytes is None else self.source_bytes * tokens + self.kv_bytes(1)

    @property
    def model_blocks(self) -> int:
        """Of the blocks whose frozen weights can wait on the host, the model's own."""
        return len(self.frozen_block_bytes) - self.reference_blocks

    def frozen_bytes(self, resident: int | None, *, scores: bool = True) -> tuple[int, int]:
        """Counts frozen weights of blocks on the device: those that stay, and two that pass of those that run."""
        away = blocks_on_host(len(self.frozen_block_bytes), resident, self.reference_blocks)
        stay = sum(size for place, size in enumerate(self.frozen_block_bytes) if place not in away)
        runs = len(self.frozen_block_bytes) if scores else self.model_blocks
        return stay, sum(sorted((self.frozen_block_bytes[place] for place in away if place < runs), reverse=True)[:2])

    def positions(self, prompt_tokens: int, new_tokens: int) -> int:
        """Counts the positions of the longest sequence that the network reads; an encoder reads prompts alone."""
        return prompt_tokens + new_tokens if self.source_bytes is None else max(prompt_tokens, new_tokens)

    def batch_kv_bytes(self, prompt_bytes: int, rows: int, new_tokens: int) -> int:
        """Counts the key/value bytes of rows whose prompts are kept once; a tensor that is moved counts twice."""
        slots = whole_blocks(new_tokens)
        longest = max((slots if window is None else min(slots, window) for window in self.windows), default=0)
        growing = rows * self._slot_bytes * longest
        moving = prompt_bytes // (2 * max(1, sum(window is None for window in self.windows) or len(self.windows)))
        return prompt_bytes + rows * self.kv_bytes(slots) + max(growing, moving)

    @property
    def _slot_bytes(self) -> int:
        """Bytes of one token's keys, or values, in one layer."""
        return self.cache_bytes * self.kv_heads * self.head_dim if self.key_bytes is None else self.key_bytes


@dataclass(frozen=True)
class RolloutWork:
    """The shape of one rollout, before it is cut."""

    prompt_tokens: tuple[int, ...]  # length of each unique prompt, in tokens, in prompt order
    group_size: int  # samples per prompt
    max_new_tokens: int  # longest completion, in tokens, or denoising steps
    geometry: ModelGeometry  # sizes of the network that samples
    scored: bool = False  # whether a pass for reference or old log-probs follows
    # int, bytes of all rows' caches at their longest, every role's, to wait between turns; 0 where there is one turn
    kept_bytes: int = 0

    @property
    def rows(self) -> int:
        """Sequences to sample: prompts times group size."""
        return len(self.prompt_tokens) * self.group_size


@dataclass(frozen=True)
class UpdateWork:
    """The shape of one optimizer step on this rank, before it is cut."""

    # length of each row (prompt plus completion), in tokens; columns to run of each, where these are run one by one
    row_tokens: tuple[int, ...]
    action_tokens: tuple[int, ...]  # length of each row's completion, in tokens; or the same as ``row_tokens``
    geometry: ModelGeometry  # sizes of the network that learns
    # index of each row's prompt, the same for rows that share one; empty where rows cannot be packed behind one copy
    prompts: tuple[int, ...] = ()
    gradients_aside: int = 0  # whole gradients, of other objectives, that will be held beside this step's last one
    # index of each row's prompt where an encoder reads it, once for all rows that share it; else empty
    sources: tuple[int, ...] = ()
    # of each row, its place among rows sorted by their tokens, and how many tokens it shares with the one before it
    # there; empty where rows share nothing but whole prompts
    prefixes: tuple[tuple[int, int], ...] = ()
    # int, bytes of whole gradients as ranks add them up, of which each keeps its part; 0 where gradients stay whole
    whole_gradient_bytes: int = 0

    @cached_property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """Rows that can be packed so that those which share tokens follow one another, and what each shares so."""
        if self.prefixes:
            return in_order(self.prefixes)
        members: dict[int, list[int]] = {}
        for row in sorted(range(len(self.prompts)), key=lambda row: -self.action_tokens[row]):
            members.setdefault(self.prompts[row], []).append(row)
        prompts = [row - actions for row, actions in zip(self.row_tokens, self.action_tokens, strict=True)]
        return tuple((row, prompts[row] if place else 0) for rows in members.values() for place, row in enumerate(rows))

    @cached_property  # a search asks for it of thousands of plans
    def least_tokens(self) -> int:
        """Tokens below which no micro-batch can go: the longest row's, or a single pair."""
        return 1 if self.geometry.unit is not None else max(self.row_tokens, default=1)

    @cached_property
    def packed_tokens(self) -> int:
        """Tokens of all rows, those that several share once."""
        return sum(self.row_tokens) - sum(shared for _, shared in self.branches)


COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of `torch.compile`; on a CUDA device, "reduce-overhead" and "max-autotune" run CUDA graphs."""


@dataclass(frozen=True)
class RolloutPlan:
    """How a rollout and the scoring after it are cut to fit memory.

    Args:
        rows_in_flight: sequences decoded together.
        kv_bytes: int, bytes; cap on the key/value cache of rows in flight and those that wait beside them; None: none.
        kept_kv_bytes: int, bytes; as long as the caches of rows in flight and of episodes that wait for their next turn
            are no more together, the latter are kept; 0 keeps none, and each turn reads its context again.
        prefill_tokens: prompt tokens (padding included) read in one forward.
        score_tokens: tokens (padding included) scored in one forward without gradient.
        reward_rows: completions a reward model scores in one forward.
        cache_dtype: element type of the cache: None for the model's own, or "int8", which is lossy and which only the
            run's `cache_implementation` chooses.
        engine: name of the rollout engine; "native" stands for whichever the run has.
        park_optimizer: keep the optimizer state in host memory from the rollout until an update wants it back.
        resident_blocks: blocks whose frozen weights stay on the device; those of the others wait in host memory and
            come while their block runs. None for all.
        compile: mode of `torch.compile`, one of `COMPILE_MODES`, for the steps that decode a token; None for none.
        predicted_bytes: predicted peak of a phase ("rollout", "score"), in bytes, with what is held already; under
            "phase/component" the part of a component. Empty when nothing was predicted.
    """

    rows_in_flight: int = 64
    kv_bytes: int | None = None
    prefill_tokens: int = 8192
    score_tokens: int = 8192
    reward_rows: int = 32
    cache_dtype: str | None = None
    engine: str = "native"
    park_optimizer: bool = False
    kept_kv_bytes: int = 0
    resident_blocks: int | None = None
    compile: str | None = None
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept_limit_bytes(self) -> int:
        """int, bytes: ``kept_kv_bytes``, as far as ``kv_bytes`` allows."""
        return self.kept_kv_bytes if self.kv_bytes is None else min(self.kept_kv_bytes, self.kv_bytes)


@dataclass(frozen=True)
class UpdatePlan:
    """How one optimizer step is cut to fit memory; none of it changes the gradient.

    Args:
        micro_batch_tokens: tokens (padding included) of one forward and backward; a longer row goes alone.
        logprob_tile: completion tokens whose logits exist at the same time.
        checkpointing: recompute each block's activations in the backward pass.
        offload_activations: keep saved activations in host memory.
        pack_prompts: one copy of a prompt for all its completions, counted once by ``micro_batch_tokens``; no padding.
        trajectory_device: "device" or "host": where the trajectory waits between micro-batches.
        park_optimizer: keep the optimizer state in host memory outside the commit.
        resident_blocks: as in `RolloutPlan`.
        reduce_each: of gradients that ranks divide, add up each micro-batch's at once and hold one rank's part; False
            holds them whole and adds them up once a step, unless another rank's plan says True.
        compile: mode of `torch.compile`, one of `COMPILE_MODES`, for the network's blocks; None for none.
        predicted_bytes: under "update" the predicted peak in bytes, with what is held already; under
            "update/component" the part of a component. Empty when nothing was predicted.
    """

    micro_batch_tokens: int = 8192
    logprob_tile: int = 1024
    checkpointing: bool = False
    offload_activations: bool = False
    pack_prompts: bool = False
    trajectory_device: str = "host"
    park_optimizer: bool = False
    resident_blocks: int | None = None
    reduce_each: bool = True
    compile: str | None = None
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryFailure:
    """One allocation that failed and outlived its same-plan retry."""

    phase: Phase  # where it failed
    requested_bytes: int | None  # bytes asked for; None when the message does not say
    attempt: int  # how many plans have failed for this piece of work, from 1
    message: str  # the allocator's own words
    step: int = 0  # optimizer steps done when it failed
    plan: RolloutPlan | UpdatePlan | None = None  # the plan that failed; None where there was none
    work: RolloutWork | UpdateWork | None = None  # the shape of the work that was cut; None where nothing was cut
    budget_bytes: int = 0  # bytes the run may hold
    live_bytes: int = 0  # bytes held once the failed attempt was cleared away
    # int, bytes that the plan was estimated to take of that work beside what was held; None where nobody knows
    estimated_bytes: int | None = None
    foreseen: bool = False  # whether it failed in the run's forecast, and would in the run at any step


@dataclass(frozen=True)
class MemoryState:
    """What a memory policy may know of the device and of this run's past."""

    device: str  # "cuda", "cpu" or another device type
    budget_bytes: int  # bytes this run may hold on the device
    live_bytes: int  # bytes held now
    peak_bytes: int  # most bytes held since the run began
    step: int = 0  # optimizer steps done
    # per phase, measured over predicted bytes above what was held before it, from the last plans that predicted; a
    # phase that was never measured is left out
    corrections: Mapping[str, float] = field(default_factory=dict)
    last_rollout_plan: RolloutPlan | None = None  # the plan of the last rollout, None before the first
    last_update_plan: UpdatePlan | None = None  # the plan of the last optimizer step, None before the first
    failures: tuple[MemoryFailure, ...] = ()  # those of this run that outlived their same-plan retry, oldest first
    optimizer_bytes: int = 0  # bytes of its state, wherever it lies; 0 while there is none or it is unknown
    parked_bytes: int = 0  # bytes of that state that lie in host memory now, no part of ``live_bytes``
    resident_blocks: int | None = None  # blocks whose frozen weights are on the device now; None for all
    # per phase, bytes that the device's allocator needs beside those of live tensors, since it holds whole segments; a
    # phase of which nothing is known is left out
    stranded_bytes: Mapping[str, int] = field(default_factory=dict)
