"""Draws tokens so that batching changes nothing: noise from a counter, and a choice that survives rounding.

Axes: ``B`` rows, ``V`` vocabulary, ``N`` blocks of the vocabulary, ``W`` tokens in a block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TIE_GAP = 1e-4
"""Nats; logits move by less than half of this when fp32 rows are batched differently."""

_TILE_ELEMENTS, _TILE_ROWS = 1 << 21, 32
"""Most logits whose exponentials are there at once, and most rows: what many rows save pays for noise made ahead."""

_GAMMA, _MIX_1, _MIX_2 = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Draw(NamedTuple):
    """One token a row.

    Args:
        tokens_B: (B,) int64.
        logprobs_B: (B,) float64, nats, under the given logits; not finite where a row has no distribution (a NaN, a
            +inf, or -inf everywhere), which the caller can look for when it reads the values anyway.
        tied_B: (B,) bool, whether the best and the second best choice lay within `TIE_GAP` of each other.
    """

    tokens_B: Tensor
    logprobs_B: Tensor
    tied_B: Tensor


def sample_with_noise(
    logits_BV: Tensor, noise_BS: Tensor, *, temperature: float = 1.0, columns_W: Tensor | None = None
) -> Draw:
    """Draws one token a row from ``softmax(logits / temperature)``, the same in any batch.

    The Gumbel-max trick (Maddison et al. 2014, "A* Sampling", eq. 1: ``argmax_i (z_i + g_i)`` is distributed as
    ``softmax(z)``), in two stages over N = ceil(V / W) blocks of W = ceil(sqrt(V)) tokens, so that a token costs N + W
    uniforms instead of V: first ``b = argmax_b (logsumexp_{i in b} z_i + g_b)``, then ``argmax_{i in b} (z_i + g_i)``.
    The product of the two probabilities is the softmax, exactly. Departure from the paper: none but the stages. A
    rounding difference in the logits changes the choice only where two perturbed values nearly agree, which is marked.

    Args:
        logits_BV: (B, V), any float type, nats; -inf is never drawn. Computed in at least float32, never copied whole.
        noise_BS: (B, S) float64 of `gumbel_noise`, or the first of (steps, B, S) of `noise_ahead`.
        temperature: divides the logits; greater than 0.
        columns_W: 0, 1, … on the device, W or more of them; None to count here.

    Returns:
        The `Draw`.
    """
    sums_BN, width = _block_sums(logits_BV, temperature)
    sums_BN, last = sums_BN.double(), logits_BV.shape[1] - 1
    noise_BN, noise_BW = noise_BS[:, : sums_BN.shape[1]], noise_BS[:, sums_BN.shape[1] :]
    block_B1, block_gap_B = _best_two(sums_BN + noise_BN)
    columns_W = torch.arange(width, device=block_B1.device) if columns_W is None else columns_W[:width]
    index_BW = torch.add(columns_W, block_B1, alpha=width)
    column_BW = index_BW.clamp(max=last)
    inside_BW = _scaled(logits_BV.gather(1, column_BW), temperature).masked_fill(index_BW > last, -math.inf)
    inside_B1, inside_gap_B = _best_two(inside_BW + noise_BW)
    return Draw(
        column_BW.gather(1, inside_B1)[:, 0],
        inside_BW.gather(1, inside_B1)[:, 0] - sums_BN.logsumexp(1),
        torch.minimum(block_gap_B, inside_gap_B) < TIE_GAP,
    )


def noise_slots(vocab: int) -> int:
    """Counts the numbers that a draw takes from a row's stream.

    Args:
        vocab: tokens V to draw from.

    Returns:
        N blocks, and W tokens of one.
    """
    width = _block_width(vocab)
    return -(-vocab // width) + width


def noise_ahead(words_B: Tensor, positions_B: Tensor, vocab: int, steps: int) -> Tensor:
    """Returns the noise of each row's next draws, a function of key, position and slot alone.

    Args:
        words_B: (B,) int64, each row's key, from `hash_keys`.
        positions_B: (B,) int64, index of each row's next token in its completion.
        vocab: tokens V to draw from.
        steps: draws of each row.

    Returns:
        (steps, B, S) float64, nats.
    """
    slots = noise_slots(vocab)
    positions_TB = positions_B + torch.arange(steps, device=positions_B.device)[:, None]
    return gumbel_noise(_hash_field(words_B, positions_TB).flatten(), slots).view(steps, -1, slots)


def greedy_tokens(logits_BV: Tensor, *, temperature: float = 1.0) -> Draw:
    """Takes the most likely token of each row, the first of equals.

    ``argmax_i z_i``; the log-prob is the token's under ``softmax(z / temperature)``.

    Args:
        logits_BV: (B, V), any float type, nats.
        temperature: divides the logits for the log-prob and the tie alone; greater than 0.

    Returns:
        The `Draw`.
    """
    tokens_B, best = logits_BV.argmax(1), logits_BV.topk(min(2, logits_BV.shape[1]), 1).values
    gap_B = _scaled(best[:, 0], temperature).double() - _scaled(best[:, -1], temperature).double()
    tied_B = (gap_B < TIE_GAP) & (logits_BV.shape[1] > 1)
    return Draw(tokens_B, taken_logprobs(logits_BV, tokens_B, temperature=temperature), tied_B)


def taken_logprobs(logits_BV: Tensor, tokens_B: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns ``log softmax(logits / temperature)`` at one token a row.

    Equals ``(logits / temperature).log_softmax(-1).gather(-1, tokens)`` without a second (B, V) tensor.

    Args:
        logits_BV: (B, V), any float type, nats.
        tokens_B: (B,) int64.
        temperature: divides the logits; greater than 0.

    Returns:
        (B,) float64, nats.
    """
    sums_BN, _ = _block_sums(logits_BV, temperature)
    taken_B = _scaled(logits_BV.gather(1, tokens_B[:, None]), temperature)[:, 0]
    return taken_B.double() - sums_BN.double().logsumexp(1)


def hash_fields(keys_BK: Tensor, positions_B: Tensor) -> Tensor:
    """Mixes a row's key and position into one 64-bit word.

    ``h <- mix((h xor field) + gamma)`` over the fields, with SplitMix64's ``mix`` (Steele, Lea and Flood 2014, "Fast
    Splittable Pseudorandom Number Generators", fig. 17). Integer arithmetic, so every device gives the same word.

    Args:
        keys_BK: (B, K) int64.
        positions_B: (B,) int64.

    Returns:
        (B,) int64.
    """
    return _hash_field(hash_keys(keys_BK), positions_B)


def hash_keys(keys_BK: Tensor) -> Tensor:
    """Mixes a row's key into one 64-bit word: `hash_fields` before its last field.

    Args:
        keys_BK: (B, K) int64.

    Returns:
        (B,) int64.
    """
    word_B = torch.zeros_like(keys_BK[:, 0])
    for field_B in keys_BK.unbind(1):
        word_B = _hash_field(word_B, field_B)
    return word_B


def uniform_noise(words_B: Tensor, slots: int, *, first: int = 0) -> Tensor:
    """Returns each row's uniforms: the SplitMix64 stream that starts at its word.

    ``u_s = (floor(mix(h + (s + 1) gamma) / 2^12) + 1/2) / 2^52``: exact in float64, and neither 0 nor 1.

    Args:
        words_B: (B,) int64, from `hash_fields`.
        slots: numbers per row.
        first: index of the first of them in the stream.

    Returns:
        (B, slots) float64, in (0, 1).
    """
    steps = torch.arange(first + 1, first + slots + 1, device=words_B.device) * _GAMMA
    bits = _shift_right(_mix(words_B[:, None] + steps), 12)
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel_noise(words_B: Tensor, slots: int) -> Tensor:
    """Returns each row's standard Gumbel variates, ``-log(-log u)``.

    Args:
        words_B: (B,) int64, from `hash_fields`.
        slots: numbers per row.

    Returns:
        (B, slots) float64, nats.
    """
    return uniform_noise(words_B, slots).log_().neg_().log_().neg_()


def _hash_field(words: Tensor, field: Tensor) -> Tensor:
    return _mix((words ^ field) + _GAMMA)


def _mix(words: Tensor) -> Tensor:
    """Scrambles 64-bit words, one to one (SplitMix64's finaliser, Stafford's variant 13)."""
    words = _shift_right(words, 30).bitwise_xor_(words).mul_(_MIX_1)
    words = _shift_right(words, 27).bitwise_xor_(words).mul_(_MIX_2)
    return _shift_right(words, 31).bitwise_xor_(words)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shifts zeros in from the left; torch's own shift repeats the sign bit."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divides by the temperature in at least float32; the same values for a whole row and for a part of it."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1.0 else wide / temperature


def _block_sums(logits_BV: Tensor, temperature: float) -> tuple[Tensor, int]:
    """Sums the exponentials of each block, (B, N) logarithms, a few rows at a time; returns a block's width too."""
    vocab = logits_BV.shape[1]
    width = _block_width(vocab)
    rows = max(1, min(_TILE_ROWS, _TILE_ELEMENTS // vocab))
    tiles = [_tile_sums(_scaled(tile, temperature), width) for tile in torch.split(logits_BV, rows)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles)), width


def _block_width(vocab: int) -> int:
    return math.isqrt(vocab - 1) + 1


def _tile_sums(logits_BV: Tensor, width: int) -> Tensor:
    full = logits_BV.shape[1] // width
    body_BN = logits_BV[:, : full * width].view(-1, full, width).logsumexp(2)
    if full * width == logits_BV.shape[1]:
        return body_BN
    return torch.cat([body_BN, logits_BV[:, full * width :].logsumexp(1, keepdim=True)], 1)


def _best_two(values_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Finds a greatest value of each row, (B, 1), and its lead over the second greatest (inf if it is alone)."""
    if values_BN.shape[1] == 1:
        return torch.zeros_like(values_BN, dtype=torch.int64), torch.full_like(values_BN[:, 0], math.inf)
    best_B2, index_B2 = values_BN.topk(2, 1)
    return index_B2[:, :1], best_B2[:, 0] - best_B2[:, 1]
