"""Log-probs and entropies of taken tokens without a ``[M, V]`` tensor: a tile's logits live and die together.

Axes: ``M`` tokens of several rows laid end to end, ``N`` tokens of one tile or of a slice of it, ``V`` vocabulary,
``D`` hidden width. Besides a tile's logits, all temporaries are slices of one `_PARTS`-th of the tile or of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memsafe_rl.accounting import charge, device_type_of, worth_running
from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.fixed_tiles import FIXED_TILES, TILE_ROWS, fixed_tiles, tiled_linear
from memsafe_rl.ops.sampling import taken_logprobs
from memsafe_rl.types import Component, LinearHead, LogitsHead, TokenDistribution

_PARTS = 16
_SUMMED = (Component.ACTIVATIONS, Component.GRADIENTS, Component.GRADIENTS)
"""What the sums of a head's gradients are: those of hidden states, weight and bias."""

_LEAST_LOGPROB = -1e4
"""Nats; its exponential is 0 in float64, so that a token that cannot be drawn adds 0 instead of 0 x inf."""

_LEAST_ROWS = 8
"""Rows under which a CPU's matrix product adds the vocabulary's entries one after another: at 49,152 of them rounding
was measured to reach 4e-5 of the gradient, against 1e-6 with rows of zeros beside."""


def token_logprobs(
    distribution: TokenDistribution, *, temperature: float, tile: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores taken tokens under ``softmax(logits / temperature)``, a tile of tokens at a time.

    With ``z = logits / temperature`` and ``p = softmax(z)``: ``log p_t = z_t - logsumexp(z)`` and
    ``H = logsumexp(z) - sum_v p_v z_v``. Backward recomputes a tile's logits from its hidden states and uses
    ``d log p_t / dz_v = [v = t] - p_v`` and ``dH / dz_v = -p_v (log p_v + H)``. Where the head is frozen, forward keeps
    ``d log p_t / dh``, (M, D), while it has the tile's logits, and backward only scales it, unless entropies have a
    gradient too. Equals the naive form ``(logits / temperature).log_softmax(-1)`` with a gather, and
    ``-(p * log p).sum(-1)``.

    Logits of a `LinearHead` are ``cap * tanh(scale * (h W^T + b) / cap)``. The matrix product runs in the head's
    ``compute_dtype``; if that is None, in autocast's type where autocast is on, else in the wider of hidden states and
    weight. All the rest, and the sums that make the weight's gradient, are in float32, or in float64 if the product is.
    A head that is any function of hidden states is run once more in backward, tile by tile.

    Args:
        distribution: hidden states (M, D), tokens (M,) and the head.
        temperature: divides the logits; greater than 0.
        tile: tokens whose logits exist at the same time; need not divide M.
        with_entropy: whether to give entropies too.

    Returns:
        Log-probs (M,) and entropies (M,) or None, nats, float32 (float64 for a float64 product), both differentiable.

    Raises:
        ConfigError: If ``tile`` is less than 1 or ``temperature`` is not greater than 0.
    """
    if tile < 1:
        raise ConfigError(f"A log-prob tile of {tile} tokens holds nothing. Set `logprob_tile` to 1 or more.")
    if not temperature > 0:
        raise ConfigError(
            f"Log-probs at temperature {temperature} are not defined. Set `temperature` to more than 0, such as 1.0."
        )
    head, hidden_MD, tokens_M = distribution.head, distribution.hidden_MD, distribution.tokens_M
    if not isinstance(head, LinearHead):
        with fixed_tiles(distribution.fixed_tiles):
            return _function_scores(head, hidden_MD, tokens_M, temperature, tile, with_entropy)
    trained = any(value is not None and value.requires_grad for value in (head.weight_VD, head.bias_V))
    recipe = _Recipe(
        _product_dtype(hidden_MD, head),
        head.scale,
        head.soft_cap,
        temperature,
        tile,
        with_entropy,
        keeps_slopes=torch.is_grad_enabled() and hidden_MD.requires_grad and not trained,
        fixed_tiles=distribution.fixed_tiles,
    )
    logprobs_M, entropies_M = _LinearScores.apply(  # type: ignore[no-untyped-call]
        hidden_MD, head.weight_VD, head.bias_V, tokens_M, recipe
    )
    return logprobs_M, entropies_M


@torch.no_grad()
def choice_logprobs(
    distribution: TokenDistribution, choices: int | Tensor, *, temperature: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Returns log-probs of the likeliest tokens of every place, or of given ones, a tile at a time, without gradient.

    Args:
        distribution: as in `token_logprobs`; the tokens that were taken are not looked at.
        choices: how many of the likeliest tokens to take, at most all; or their ids (M, K), on the device.
        temperature: as in `token_logprobs`.
        tile: likewise.

    Returns:
        Ids (M, K), int64, the likeliest first or as given, and their log-probs (M, K), nats, float32 at least.
    """
    head, hidden_MD = distribution.head, distribution.hidden_MD
    found: tuple[Tensor, Tensor] | None = None
    for rows in _cuts(len(hidden_MD), max(1, tile // 2)):  # a sum over the vocabulary takes as much again
        with charge(Component.LOGITS), fixed_tiles(distribution.fixed_tiles):
            scores_NV = _scores_of(head, hidden_MD[rows], temperature, distribution.fixed_tiles)
        count = choices.shape[1] if isinstance(choices, Tensor) else min(choices, scores_NV.shape[1])
        if found is None:  # before all that this part holds besides, since a forecast runs the first part only
            ids_MK = torch.empty(len(hidden_MD), count, dtype=torch.int64, device=hidden_MD.device)
            found = ids_MK, torch.empty_like(ids_MK, dtype=scores_NV.dtype)
        with charge(Component.LOGITS):
            ids_NK = choices[rows] if isinstance(choices, Tensor) else scores_NV.topk(count).indices
            found[0][rows] = ids_NK
            found[1][rows] = scores_NV.gather(1, ids_NK) - scores_NV.logsumexp(1, keepdim=True)
        del scores_NV, ids_NK
    assert found is not None, "rows have tokens"
    return found


def _scores_of(head: LinearHead | LogitsHead, hidden_ND: Tensor, temperature: float, fixed: bool) -> Tensor:
    """Returns logits over temperature (N, V)."""
    if not isinstance(head, LinearHead):
        logits_NV = head(hidden_ND)
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    dtype, tile = _product_dtype(hidden_ND, head), len(hidden_ND)
    recipe = _Recipe(dtype, head.scale, head.soft_cap, temperature, tile, with_entropy=False, fixed_tiles=fixed)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        scores_NV = _tile_buffer(hidden_ND, head.weight_VD, recipe)
        _write_scores(scores_NV, hidden_ND, head.weight_VD, head.bias_V, recipe)
    return scores_NV


@dataclass(frozen=True)
class _Recipe:
    """What turns a linear map's output into scores, and how it is cut."""

    product_dtype: torch.dtype
    scale: float
    soft_cap: float | None
    temperature: float
    tile: int
    with_entropy: bool
    keeps_slopes: bool = False  # whether forward keeps the gradient of log-probs with respect to hidden states
    fixed_tiles: bool = False  # whether log-probs are, to the bit, those that a draw gives of the same hidden states

    @property
    def wide_dtype(self) -> torch.dtype:
        return torch.promote_types(self.product_dtype, torch.float32)

    def squash_(self, outputs_NV: Tensor) -> None:
        """Turns outputs of the linear map into logits over temperature, in place."""
        if self.soft_cap is not None:
            outputs_NV.mul_(self.scale / self.soft_cap).tanh_().mul_(self.soft_cap / self.temperature)
        elif self.scale / self.temperature != 1:
            outputs_NV.mul_(self.scale / self.temperature)

    def slope(self, scores_NV: Tensor) -> Tensor | None:
        """Returns the soft-cap's derivative, ``1 - tanh^2``, from the scores it made; None without a cap."""
        if self.soft_cap is None:
            return None
        return (scores_NV * (self.temperature / self.soft_cap)).square_().neg_().add_(1)

    def unsquash_(self, gradient_NV: Tensor, cap_NV: Tensor | None) -> Tensor:
        """Turns a gradient with respect to scores into one with respect to the linear map's output, in place."""
        if cap_NV is not None:
            gradient_NV.mul_(cap_NV)
        factor = self.scale / self.temperature
        return gradient_NV if factor == 1 else gradient_NV.mul_(factor)


class _LinearScores(torch.autograd.Function):
    """Scores under a linear head; saves hidden states and a few numbers a token."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_M: Tensor, recipe: _Recipe
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        logprobs_M, log_sums_M, entropies_M = _empty_scores(tokens_M, recipe.wide_dtype, recipe.with_entropy)
        slopes = _HeadGradients((recipe.keeps_slopes, False, False), hidden_MD, weight_VD, bias_V, recipe)
        with torch.autocast(hidden_MD.device.type, enabled=False), charge(Component.LOGITS):
            buffer_NV = _tile_buffer(hidden_MD, weight_VD, recipe)
            for rows in _cuts(len(tokens_M), recipe.tile):
                scores_NV = buffer_NV[: rows.stop - rows.start]
                _write_scores(scores_NV, hidden_MD[rows], weight_VD, bias_V, recipe)
                for part in _cuts(rows.stop - rows.start, _part(recipe.tile)):
                    where = slice(rows.start + part.start, rows.start + part.stop)
                    taken_N, certain_N = _exact_scores(scores_NV[part], tokens_M[where], recipe)
                    summary = _score_part_(scores_NV[part], tokens_M[where], recipe)
                    summary = summary if taken_N is None else (taken_N, summary[1], certain_N)
                    _store(where, summary, (logprobs_M, log_sums_M, entropies_M))
                if recipe.keeps_slopes:
                    slopes.add(rows, scores_NV)
        ctx.recipe = recipe
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, tokens_M, log_sums_M, entropies_M, slopes.sums[0])
        return logprobs_M, entropies_M

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_M: Tensor | None, grad_entropies_M: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, tokens_M, log_sums_M, entropies_M, slopes_MD = ctx.saved_tensors
        recipe: _Recipe = ctx.recipe
        if slopes_MD is not None and grad_entropies_M is None and grad_logprobs_M is not None:
            return (slopes_MD * grad_logprobs_M[:, None]).to(hidden_MD.dtype), None, None, None, None
        grads = _HeadGradients(ctx.needs_input_grad, hidden_MD, weight_VD, bias_V, recipe)
        with torch.autocast(hidden_MD.device.type, enabled=False), charge(Component.LOGITS):
            buffer_NV = _tile_buffer(hidden_MD, weight_VD, recipe)
            for rows in _cuts(len(tokens_M), recipe.tile):
                scores_NV = buffer_NV[: rows.stop - rows.start]
                _write_scores(scores_NV, hidden_MD[rows], weight_VD, bias_V, recipe)
                for part in _cuts(rows.stop - rows.start, _part(recipe.tile)):
                    where = slice(rows.start + part.start, rows.start + part.stop)
                    cap_NV = recipe.slope(scores_NV[part])
                    saved = _at(where, tokens_M, log_sums_M, entropies_M, grad_logprobs_M, grad_entropies_M)
                    scores_NV[part] = recipe.unsquash_(_score_gradient_(scores_NV[part], *saved), cap_NV)
                grads.add(rows, scores_NV)
        return *grads.result(), None, None


class _LogitsScores(torch.autograd.Function):
    """Scores of one tile from its logits, for a head that is any function."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        logprobs_N, log_sums_N, entropies_N = _empty_scores(tokens_N, wide, with_entropy)
        with charge(Component.LOGITS):
            for part in _cuts(len(tokens_N), _part(len(tokens_N))):
                scores_NV = logits_NV[part].to(wide) / temperature
                taken_N = taken_logprobs(scores_NV, tokens_N[part]) if FIXED_TILES.get() else None
                summary, _ = _summarise_(scores_NV, tokens_N[part], with_entropy)
                summary = summary if taken_N is None else (taken_N, *summary[1:])
                _store(part, summary, (logprobs_N, log_sums_N, entropies_N))
        ctx.temperature = temperature
        ctx.save_for_backward(logits_NV, tokens_N, log_sums_N, entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits_NV, tokens_N, log_sums_N, entropies_N = ctx.saved_tensors
        with charge(Component.LOGITS):
            gradient_NV = torch.empty_like(logits_NV)
            for part in _cuts(len(tokens_N), _part(len(tokens_N))):
                scores_NV = logits_NV[part].to(log_sums_N.dtype) / ctx.temperature
                saved = _at(part, tokens_N, log_sums_N, entropies_N, grad_logprobs_N, grad_entropies_N)
                gradient_NV[part] = _score_gradient_(scores_NV, *saved).div_(ctx.temperature)
        return gradient_NV, None, None, None


def _function_scores(
    head: LogitsHead, hidden_MD: Tensor, tokens_M: Tensor, temperature: float, tile: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    def score(hidden_ND: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor | None]:
        with charge(Component.LOGITS):
            logits_NV = head(hidden_ND)
        scores: tuple[Tensor, Tensor | None] = _LogitsScores.apply(logits_NV, tokens_N, temperature, with_entropy)  # type: ignore[no-untyped-call]
        return scores

    again = (lambda: (nullcontext(), fixed_tiles())) if FIXED_TILES.get() else noop_context_fn
    tiles = [
        checkpoint(score, hidden_ND, tokens_N, use_reentrant=False, context_fn=again)
        if torch.is_grad_enabled()
        else score(hidden_ND, tokens_N)
        for hidden_ND, tokens_N in zip(torch.split(hidden_MD, tile), torch.split(tokens_M, tile), strict=True)
    ]
    logprobs, entropies = zip(*tiles, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _score_part_(scores_NV: Tensor, tokens_N: Tensor, recipe: _Recipe) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what `_summarise_` does, and puts the gradient of log-probs in place of the scores where it is kept."""
    cap_NV = recipe.slope(scores_NV) if recipe.keeps_slopes else None
    summary, chances = _summarise_(scores_NV, tokens_N, recipe.with_entropy)
    if recipe.keeps_slopes:
        weights_NV, sums_N = chances
        gradient_NV, at_N1 = weights_NV.mul_(-1 / sums_N[:, None]), tokens_N[:, None]  # [v = t] - p
        gradient_NV.scatter_(1, at_N1, gradient_NV.gather(1, at_N1) + 1)
        scores_NV.copy_(recipe.unsquash_(gradient_NV, cap_NV))
    return summary


def _summarise_(
    scores_NV: Tensor, tokens_N: Tensor, with_entropy: bool
) -> tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """Returns log-probs, logsumexps and entropies, and the vocabulary's weights with their sums; destroys scores."""
    peaks_N1 = scores_NV.amax(1, keepdim=True)
    shifted_NV = scores_NV.sub_(peaks_N1)
    taken_N = shifted_NV.gather(1, tokens_N[:, None])[:, 0]
    weights_NV = shifted_NV.exp() if with_entropy else shifted_NV.exp_()
    sums_N = weights_NV.sum(1)
    logs_N = sums_N.log()
    # nansum, because a token that cannot be drawn gives 0 x -inf; a real NaN still shows through the logarithm.
    entropies_N = logs_N - shifted_NV.mul_(weights_NV).nansum(1) / sums_N if with_entropy else None
    return (taken_N - logs_N, peaks_N1[:, 0] + logs_N, entropies_N), (weights_NV, sums_N)


def _score_gradient_(
    scores_NV: Tensor,
    tokens_N: Tensor,
    log_sums_N: Tensor,
    entropies_N: Tensor | None,
    grad_logprobs_N: Tensor | None,
    grad_entropies_N: Tensor | None,
) -> Tensor:
    """Returns the gradient with respect to the scores, ``g ([v = t] - p) - g_H p (log p + H)``; destroys the scores."""
    logprobs_NV = scores_NV.sub_(log_sums_N[:, None])
    if grad_entropies_N is None or entropies_N is None:
        gradient_NV = logprobs_NV.exp_()
        if grad_logprobs_N is None:
            return gradient_NV.zero_()
        gradient_NV.mul_(-grad_logprobs_N[:, None])
    else:
        gradient_NV = logprobs_NV.exp()
        factors_NV = logprobs_NV.clamp_(min=_LEAST_LOGPROB).add_(entropies_N[:, None]).mul_(grad_entropies_N[:, None])
        if grad_logprobs_N is not None:
            factors_NV.add_(grad_logprobs_N[:, None])
        gradient_NV.mul_(factors_NV).neg_()
    if grad_logprobs_N is not None:
        at_N1 = tokens_N[:, None]
        gradient_NV.scatter_(1, at_N1, gradient_NV.gather(1, at_N1) + grad_logprobs_N[:, None])
    return gradient_NV


def _write_scores(
    scores_NV: Tensor, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, recipe: _Recipe
) -> None:
    """Fills a tile with logits over temperature; the product is rounded to its own type, as a linear layer's is."""
    dtype = recipe.product_dtype
    hidden_ND = hidden_ND.to(dtype)
    if recipe.fixed_tiles:
        # In the steps in which a model makes its logits and a draw divides them, a few rows at a time.
        weight_VD, bias_V = weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
        for part in _cuts(len(hidden_ND), TILE_ROWS):
            target_NV = scores_NV[part].copy_(tiled_linear(hidden_ND[part], weight_VD, bias_V))
            if recipe.scale != 1.0 or recipe.soft_cap is not None:
                target_NV.mul_(recipe.scale)
            if recipe.soft_cap is not None:
                target_NV.div_(recipe.soft_cap).tanh_().mul_(recipe.soft_cap)
            if recipe.temperature != 1.0:
                target_NV.div_(recipe.temperature)
        return
    for block in _cuts(len(weight_VD), _head_rows(weight_VD, recipe)):
        target = scores_NV[:, block] if scores_NV.dtype == dtype else None
        matrix = weight_VD[block].to(dtype).t()
        if bias_V is None:
            written = torch.mm(hidden_ND, matrix, out=target)
        else:
            written = torch.addmm(bias_V[block].to(dtype), hidden_ND, matrix, out=target)
        if target is None:
            scores_NV[:, block] = written
    recipe.squash_(scores_NV)


def _exact_scores(scores_NV: Tensor, tokens_N: Tensor, recipe: _Recipe) -> tuple[Tensor | None, Tensor | None]:
    """Returns log-probs as a draw does, and entropies summed in float64; None where rows may differ by cut."""
    if not recipe.fixed_tiles:
        return None, None
    logprobs_N = taken_logprobs(scores_NV, tokens_N)
    if not recipe.with_entropy:
        return logprobs_N, None
    # The sum over one row alone may be shared among threads, in another order; never that over two.
    wide_NV = (scores_NV if len(scores_NV) > 1 else scores_NV.expand(2, -1)).double()
    log_NV = wide_NV - wide_NV.logsumexp(1, keepdim=True)
    return logprobs_N, (log_NV.exp() * -log_NV).nansum(1)[: len(scores_NV)]


class _HeadGradients:
    """Sums of a head's gradients over tiles, in at least float32."""

    def __init__(
        self, needed: tuple[bool, ...], hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, recipe: _Recipe
    ) -> None:
        self._inputs = (hidden_MD, weight_VD, bias_V)
        self._recipe = recipe
        self.sums = tuple(
            _zeros(value, recipe.wide_dtype, component) if wanted and value is not None else None
            for wanted, value, component in zip(needed[:3], self._inputs, _SUMMED, strict=True)
        )

    def add(self, rows: slice, gradient_NV: Tensor) -> None:
        """Adds one tile's share, given the gradient with respect to the linear map's output."""
        hidden_MD, weight_VD, _ = self._inputs
        hidden_sum, weight_sum, bias_sum = self.sums
        for block in _cuts(len(weight_VD), _head_rows(weight_VD, self._recipe)):
            part = gradient_NV[:, block]
            if hidden_sum is not None:
                self._add_product(hidden_sum[rows], part, weight_VD[block])
            if weight_sum is not None:
                self._add_product(weight_sum[block], part.t(), hidden_MD[rows])
            if bias_sum is not None:
                bias_sum[block] += part.sum(0)

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        dtype, device = self._recipe.product_dtype, device_type_of(total)
        if device == "cuda" and dtype.itemsize == 2:
            torch.addmm(total, left.to(dtype), right.to(dtype), out_dtype=total.dtype, out=total)
        elif device == "cpu" and len(left) < _LEAST_ROWS:
            padded = torch.cat([left, left.new_zeros(_LEAST_ROWS - len(left), left.shape[1])])
            total += (padded @ right.to(total.dtype))[: len(left)]
        else:
            total.addmm_(left, right.to(total.dtype))

    def result(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden states, weight and bias in the types of their owners."""
        return tuple(
            None if total is None or value is None else total.to(value.dtype)
            for total, value in zip(self.sums, self._inputs, strict=True)
        )


def _product_dtype(hidden_MD: Tensor, head: LinearHead) -> torch.dtype:
    if head.compute_dtype is not None:
        return head.compute_dtype
    wider = torch.promote_types(hidden_MD.dtype, head.weight_VD.dtype)
    device = hidden_MD.device.type
    # Autocast leaves float64 alone.
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and wider != torch.float64 else wider


def _cuts(length: int, size: int) -> Iterator[slice]:
    return worth_running(slice(start, min(start + size, length)) for start in range(0, length, size))


def _part(size: int) -> int:
    return max(1, -(-size // _PARTS))


def _head_rows(weight_VD: Tensor, recipe: _Recipe) -> int:
    """Returns the tokens of the vocabulary taken at once, so that no copy of the whole head in another type exists."""
    plain = weight_VD.dtype == recipe.product_dtype == recipe.wide_dtype
    return len(weight_VD) if plain else _part(len(weight_VD))


def _zeros(like: Tensor, dtype: torch.dtype, component: Component) -> Tensor:
    with charge(component):
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _tile_buffer(hidden_MD: Tensor, weight_VD: Tensor, recipe: _Recipe) -> Tensor:
    tokens = min(recipe.tile, hidden_MD.shape[0])
    return torch.empty(tokens, weight_VD.shape[0], dtype=recipe.wide_dtype, device=hidden_MD.device)


def _empty_scores(tokens_M: Tensor, dtype: torch.dtype, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    logprobs_M, log_sums_M = torch.empty_like(tokens_M, dtype=dtype), torch.empty_like(tokens_M, dtype=dtype)
    return logprobs_M, log_sums_M, torch.empty_like(logprobs_M) if with_entropy else None


def _store(where: slice, parts: tuple[Tensor | None, ...], wholes: tuple[Tensor | None, ...]) -> None:
    for part, whole in zip(parts, wholes, strict=True):
        if part is not None and whole is not None:
            whole[where] = part


def _at(where: slice, tokens: Tensor, log_sums: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    return (tokens[where], log_sums[where], *(None if value is None else value[where] for value in others))


def pad_rows(flat_M: Tensor, lengths: Sequence[int], fill: float = 0.0) -> Tensor:
    """Cuts flat values into rows, padded on the right to the longest; gradients flow back to the flat values.

    Args:
        flat_M: (M, ...), any type; rows laid end to end.
        lengths: entries of each row; they add up to M.
        fill: value of the padding.

    Returns:
        (B, T, ...), of the type of ``flat_M``; T is the greatest length.
    """
    if not lengths:
        return flat_M.reshape(0, 0, *flat_M.shape[1:])
    return pad_sequence(list(torch.split(flat_M, list(lengths))), batch_first=True, padding_value=fill)
