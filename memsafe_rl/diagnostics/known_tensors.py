"""Identifies the tensor of a failed allocation from its size and the shapes of a model.

Axes: ``B`` sequences, ``T`` tokens of a sequence, ``V`` vocabulary, ``D`` hidden width, ``I`` inner width, ``H`` heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

from memsafe_rl.diagnostics.oom_messages import Printed

_MIB = 2**20
_PIECE_BYTES = 2 * _MIB
"""A caching allocator requests more than 10 MiB in multiples of this, and prints the rounded size."""

VOCABULARIES: Mapping[int, tuple[str, str]] = {
    32_000: ("Llama 2, Mistral", r"llama-?2|mistral|zephyr|vicuna|alpaca"),
    32_128: ("T5", r"\b(?:flan-?)?m?t5\b"),
    40_960: ("ChatLM-mini", r"chatlm"),
    49_152: ("SmolLM2", r"smollm"),
    50_257: ("GPT-2", r"gpt-?2"),
    128_256: ("Llama 3", r"llama-?3"),
    151_936: ("Qwen2, Qwen3", r"qwen-?(?:2|3(?!\.5))|qwq"),
    248_320: ("Qwen3.5", r"qwen-?3\.5"),
    256_000: ("Gemma 1 and 2", r"gemma-?[12]?\b"),
    262_144: ("Gemma 3", r"gemma-?3"),
}
"""Vocabularies of common models: whose, and how a log names them."""

_LEAST_GUESSED_BYTES = 256 * _MIB
_LEAST_ROUND = 32  # A guess needs a number of rows divisible by this: most batches and lengths are round

_MOST_GUESSES = 4

_LOGITS, _COPIES = "logits [B, T, V]", "or a copy of them: their log-softmax, their gradient"
_MOMENTS = "the weight, its gradient, or a moment of the optimizer"


class Kind(StrEnum):
    """What a tensor is for."""

    LOGITS = "logits"
    SCORES = "attention scores"
    CACHE = "KV cache"
    HIDDEN = "activations"
    WEIGHT = "weights"


@dataclass(frozen=True)
class Configuration:
    """The known sizes of model and batch; None where unknown."""

    vocab: int | None = None  # V, rows of the output head
    batch: tuple[int, ...] = ()  # possible numbers of sequences in one pass
    seq_len: tuple[int, ...] = ()  # possible lengths in tokens, longest first
    hidden: int | None = None  # D
    inner: int | None = None  # I, of the feed-forward part
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: int | None = None
    dtypes: tuple[tuple[str, int], ...] = (("float32", 4), ("bfloat16", 2))  # element sizes by name, likeliest first

    @property
    def width_of_head(self) -> int | None:
        """The width of a head, derived from the hidden width if not given."""
        if self.head_dim is None and self.hidden is not None and self.heads:
            return self.hidden // self.heads
        return self.head_dim

    @property
    def known(self) -> bool:
        """Returns whether any size of the model is known."""
        return any(size is not None for size in (self.vocab, self.hidden, self.heads, self.layers))


@dataclass(frozen=True)
class KnownTensor:
    """A tensor that the request may have been for."""

    kind: Kind
    name: str
    shape: str  # such as ``32 x 252 x 40,960``
    dtype: str  # name of the type of an element
    bytes: int
    exact: bool = True  # False: batch or length was solved for
    guessed: bool = False  # True: the network itself is unknown
    note: str = ""  # what else has this shape

    def __str__(self) -> str:
        """Writes name, shape, type and note."""
        return f"{self.name}, {self.shape} in {self.dtype}" + (f" ({self.note})" if self.note else "")


def span_of(requested: Printed, *, rounded_up: bool) -> tuple[int, int]:
    """Bounds the bytes of the tensor that a printed request was for, ``rounded_up`` as it is asked of the driver."""
    low, high = requested.count - requested.slack, requested.count + requested.slack
    if not rounded_up:
        return low, high
    if high <= _PIECE_BYTES:  # as for any tensor of up to 1 MiB
        return 1, high
    if low <= 10 * _PIECE_BYTES <= high:  # as for any of up to 10 MiB; above that the next multiple of a piece
        return _MIB + 1, high
    fewest, most = -(-low // _PIECE_BYTES) * _PIECE_BYTES, high // _PIECE_BYTES * _PIECE_BYTES
    # Other versions rounded differently: if no multiple prints as the message does, allow one piece less.
    return (fewest - _PIECE_BYTES + 1, most) if fewest <= most else (low - _PIECE_BYTES + 1, high)


def matching(span: tuple[int, int], configuration: Configuration) -> tuple[KnownTensor, ...]:
    """Lists the tensors of a configuration that have the bytes of a request."""
    low, high = span
    fitting: dict[tuple[str, str], KnownTensor] = {}
    for kind, title, axes, note in _shapes(configuration):
        for name, size in configuration.dtypes if all(axes) else ():
            if low <= (count := math.prod(axes) * size) <= high:
                text = " x ".join(f"{axis:,}" for axis in axes)
                fitting.setdefault((title, name), KnownTensor(kind, title, text, name, count, note=note))
    found = sorted(fitting.values(), key=lambda tensor: list(Kind).index(tensor.kind))
    if any(tensor.kind is Kind.LOGITS for tensor in found):
        return tuple(found)
    return (*found, *_solved_logits(span, configuration))  # a last batch is smaller, most sequences are shorter


def guesses(span: tuple[int, int], log: str) -> tuple[KnownTensor, ...]:
    """Guesses which common vocabulary's logits have a request's bytes: one that the log names, or with round rows."""
    if span[0] < _LEAST_GUESSED_BYTES:
        return ()
    named = [vocab for vocab, (_, names) in VOCABULARIES.items() if re.search(names, log, re.IGNORECASE)]
    found = []
    for vocab, (whose, _) in VOCABULARIES.items():
        fitting = _counts(span, 4 * vocab)
        if not fitting or (named and vocab not in named):
            continue
        rows = max(fitting, key=_roundness)
        if named or _roundness(rows) >= _LEAST_ROUND:
            # Some number fits nearly every vocabulary. It surprises if its power of two is large for the open range.
            found.append((_roundness(rows) / len(fitting), rows, vocab, whose))
    guessed = []
    for _, rows, vocab, whose in sorted(found, reverse=True)[:_MOST_GUESSES]:
        batch = next((size for size in (32, 16, 8, 4) if rows % size == 0 and rows // size >= 16), None)  # a usual one
        example = "" if batch is None else f", such as {batch} x {rows // batch:,}"
        name, shape = f"logits of V = {vocab:,} ({whose})", f"B*T = {rows:,} rows{example}"
        guessed.append(KnownTensor(Kind.LOGITS, name, shape, "float32", 4 * rows * vocab, exact=False, guessed=True))
    return tuple(guessed)


def _counts(span: tuple[int, int], size: int) -> range:
    """Returns the numbers that, times a size, lie within a span."""
    return range(-(-span[0] // size), span[1] // size + 1)


def _roundness(number: int) -> int:
    """Returns the largest power of two that divides a number."""
    return number & -number if number else 0


def _shapes(known: Configuration) -> Iterator[tuple[Kind, str, tuple[Any, ...], str]]:
    """Yields the shapes of a network's tensors: kind, name, axes (None where unknown), and what else has the shape."""
    vocab, width, inner, heads = known.vocab, known.hidden, known.inner, known.heads
    kv_heads, of_head = known.kv_heads or heads, known.width_of_head
    for batch, tokens in product(known.batch, known.seq_len):
        # One more or less: the last token predicts nothing, or an end token is added.
        yield from ((Kind.LOGITS, _LOGITS, (batch, tokens + more, vocab), _COPIES) for more in (0, -1, 1))
        yield Kind.SCORES, "attention scores [B, H, T, T]", (batch, heads, tokens, tokens), ""
        yield Kind.CACHE, "keys or values of one layer [B, H, T, d]", (batch, kv_heads, tokens, of_head), ""
        whole = 2, known.layers, batch, kv_heads, tokens, of_head
        yield Kind.CACHE, "the whole KV cache [2, L, B, H, T, d]", whole, ""
        yield Kind.HIDDEN, "activations of the feed-forward part [B, T, I]", (batch, tokens, inner), ""
        yield Kind.HIDDEN, "hidden states [B, T, D], or queries", (batch, tokens, width), ""
    yield Kind.WEIGHT, "output head or embedding [V, D]", (vocab, width), _MOMENTS
    yield Kind.WEIGHT, "a feed-forward matrix [I, D]", (inner, width), _MOMENTS
    yield Kind.WEIGHT, "gate and up matrix together [2, I, D]", (2, inner, width), _MOMENTS


def _solved_logits(span: tuple[int, int], known: Configuration) -> Iterator[KnownTensor]:
    """Infers the length, batch or rows with which logits have the requested size."""
    if not known.vocab:
        return
    for name, size in known.dtypes:
        rows_in_span = _counts(span, size * known.vocab)
        if rows_in_span and (solved := _rows_as(rows_in_span, known)) is not None:
            rows, shape = solved[0], f"{solved[1]} x {known.vocab:,}"
            yield KnownTensor(Kind.LOGITS, _LOGITS, shape, name, rows * size * known.vocab, exact=False, note=_COPIES)


def _rows_as(rows: range, known: Configuration) -> tuple[int, str] | None:
    """Writes one of some numbers of rows as a batch and a length that the configuration allows."""
    span, longest = (rows[0], rows[-1]), max(known.seq_len, default=None)
    for batch in known.batch:
        lengths = _counts(span, batch)
        if lengths and (longest is None or lengths[-1] <= longest + 1):
            length = max(lengths, key=_roundness)
            text = f"{length:,}" if len(lengths) == 1 else f"{length:,} ({lengths[0]:,} to {lengths[-1]:,} would fit)"
            return batch * length, f"{batch:,} x T = {text}"
    largest = max(known.batch, default=None)
    for length in known.seq_len:
        batches = _counts(span, length)
        if batches and (largest is None or batches[-1] <= largest):
            return batches[0] * length, f"B = {batches[0]:,} x {length:,}"
    if known.batch and known.seq_len:
        return None
    best = max(rows, key=_roundness)
    return best, f"B*T = {best:,} ({rows[0]:,} to {rows[-1]:,} would fit)"
