"""Any transformers encoder-decoder of text, plain or under PEFT, as the loops use it.

The encoder reads a prompt once; its cross-attention keys and values are kept once for all completions of the prompt.
A completion is what the decoder draws after its start token, which is no part of it.

Axes: ``B`` rows, ``P`` prompts, ``L`` tokens of a padded prompt, ``N`` tokens the decoder reads, ``M`` completion
tokens laid end to end, ``D`` hidden width, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderCache, PreTrainedModel

from memsafe_rl.accounting import claim
from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import Adapter, Context, DecodeState, register_adapter
from memsafe_rl.models.compiling import Compiled
from memsafe_rl.models.decoding.shared_prefix_attention import Reading, biases_left_out, shared_prefix_attention
from memsafe_rl.models.decoding.shared_prefix_cache import SharedPrefixCache, SharedPrefixState, block_of
from memsafe_rl.models.geometry import decoder_config, layer_windows
from memsafe_rl.models.language import path_check
from memsafe_rl.models.language.base import (
    LanguageAdapter,
    Route,
    in_its_numerics,
    is_encoder_decoder,
    language_model_of,
    padding_mask,
    predicting_states,
)
from memsafe_rl.models.module_state import attention_configs, biased_modules, cache_name, replaced
from memsafe_rl.types import Component, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Read:
    """What an encoder made of some prompts of a store."""

    trajectory: Trajectory  # the store
    prompts: tuple[int, ...]  # indices of the prompts
    hidden_PLD: Tensor  # (P, L, D), padded on the right
    reader: str | None  # the PEFT adapter that was active; None for none


class Seq2SeqAdapter(LanguageAdapter):
    """An encoder-decoder of transformers behind the `ModelAdapter` protocol."""

    start_token_id: int
    takes_sources: bool
    """Whether the encoder states that a trajectory holds are this encoder's own; whoever stored them says so."""

    def __init__(self, model: nn.Module, *, pad_token_id: int, reference_model: nn.Module | None = None) -> None:
        """Wraps a model; of it, only transformers' checkpointing and bitsandbytes' packing on CPUs are switched off."""
        lm = language_model_of(model)
        refusal.when(not is_encoder_decoder(lm), "adapter/causal_lm", kind=type(lm).__name__)
        windows = layer_windows(decoder_config(lm))
        head, own = lm.get_output_embeddings(), lm.get_decoder().get_output_embeddings()
        if windows is None or head is None or own is not None:  # a decoder with its own gives logits
            raise refusal("seq2seq/head", kind=type(lm).__name__)
        super().__init__(
            model, lm, pad_token_id=pad_token_id, routes=(Route.MASKED,), joins=True, reference_model=reference_model
        )
        self._attention_configs = attention_configs(lm.get_decoder())
        self._biased = biased_modules(lm.get_decoder())
        self._windows, self._cross_layers, self.start_token_id = windows, len(windows), start_token_of(lm)
        obstacle = "its positions are read from a table" if hasattr(lm.get_decoder(), "embed_positions") else None
        obstacle = "its layers have biases of their own" if len(self._biased) > 1 else obstacle
        self._step = Compiled(lm.get_decoder().forward, type(lm).__name__, obstacle)
        self.takes_sources = False
        self._read: _Read | None = None
        accepted = inspect.signature(lm.get_decoder().forward).parameters
        self._takes_positions, self._cache_name = "position_ids" in accepted, cache_name(accepted)

    @in_its_numerics
    def _hidden_states(self, trajectory: Trajectory, rows: Sequence[int], *, packed: bool) -> Tensor:  # noqa: ARG002
        """Returns the states (M, D) that predict actions; the encoder reads each prompt once, masked."""
        return predicting_states(self._decoded(trajectory, rows), [0] * len(rows), trajectory.action_lengths(rows))

    @torch.no_grad()
    @in_its_numerics
    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, DecodeState]:  # noqa: ARG002
        """Reads prompts, and the decoder's start token after each."""
        lengths = [int(prompt.shape[0]) for prompt in prompts]
        hidden_PLD, mask_PL = self._encoded(prompts)
        own, cross = (SharedPrefixCache(reads_prompts=True, in_8_bits=self.in_8_bits) for _ in range(2))
        last_P1D = self.lm.get_decoder()(
            input_ids=torch.full((len(prompts), 1), self.start_token_id, device=self.device),
            encoder_hidden_states=hidden_PLD,
            encoder_attention_mask=mask_PL,
            use_cache=True,
            **{self._cache_name: EncoderDecoderCache(own, cross)},
        )[0]
        if len(own.read) != len(self._windows) or len(cross.read) != len(self._windows):
            raise NotImplementedError(f"{len(own.read)} and {len(cross.read)} layers of {len(self._windows)} keep keys")
        block = block_of(own.read, [1] * len(prompts))
        block.source = block_of(cross.read, lengths)
        return self._logits(last_P1D[:, -1]), SharedPrefixState.of_prompts(block, self._windows, self.device)

    def row_logits(self, model: Any, trajectory: Trajectory, rows: Sequence[int]) -> Tensor:
        """Returns a model's own logits at completion tokens, row by row without padding."""
        prompts, pieces = trajectory.conditions.rows(), []
        for row, read in zip(rows, self._decoder_rows(trajectory, rows), strict=True):
            ids_1L = prompts[trajectory.condition_of_row[row]].to(self.device)[None]
            output = model(
                input_ids=ids_1L,
                attention_mask=torch.ones_like(ids_1L),
                decoder_input_ids=read.to(self.device)[None],
                use_cache=False,
            )
            claim(Component.LOGITS, [output.logits])
            pieces.append(output.logits[0, : trajectory.actions.lengths[row]])
        return torch.cat(pieces)

    def measure_cache(self, state: DecodeState) -> None:
        """Notes the bytes of a token in the decoder's layers; a prompt's token has as many in cross-attention."""
        block = state.prompt_blocks()[0]
        own = sum(part.nbytes for part in (*block.keys, *block.values)) // len(block.lengths)
        read = 0 if block.source is None else block.source.nbytes() // (state.rows * max(block.source.lengths))
        self.slot_bytes = max(own, read)
        self._note_heads(block.keys if block.source is None else [*block.keys, *block.source.keys])

    @property
    def reads_alike(self) -> bool:
        """Whether the encoder is frozen and has no PEFT layers, so that policy and reference read a prompt alike."""
        encoder = self.lm.get_encoder()
        learns = any(weight.requires_grad for weight in encoder.parameters())
        return not learns and not any(isinstance(module, BaseTunerLayer) for module in encoder.modules())

    def take_sources(self, *, for_copy: bool) -> None:
        """Reads prompts from trajectories from now on, where these hold what an encoder made of them."""
        for adapter in (self, self.reference_adapter if for_copy else None):
            if adapter is not None:
                adapter.takes_sources = True

    @contextmanager
    def read_together(self, trajectory: Trajectory, rows: Sequence[int], forward: Context) -> Iterator[None]:
        """Has the encoder read each prompt once; gradients gather at its output, then pass through it once."""
        if self.path.route is Route.WHOLE:
            yield
            return
        with forward():
            read = self._read_prompts(trajectory, rows)
        graph = read.hidden_PLD
        self._read = replace(read, hidden_PLD=graph.detach().requires_grad_(graph.requires_grad))
        try:
            yield
            reached = self._read.hidden_PLD.grad
        finally:
            self._read = None
        if reached is not None:
            torch.autograd.backward(graph, reached)

    @torch.no_grad()
    @in_its_numerics
    def read_sources(self, prompts: Sequence[Tensor]) -> list[Tensor]:
        """Returns what the encoder makes of prompts, to be kept; only where it ``reads_alike`` in all of a rollout."""
        hidden_PLD, _ = self._encoded(prompts)
        return [hidden_PLD[place, : len(prompt)] for place, prompt in enumerate(prompts)]

    def _encoded(self, prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns what the encoder makes of prompts (P, L, D), and their mask (P, L); None without padding."""
        ids_PL = pad_sequence(list(prompts), True, self.pad_token_id).to(self.device)
        mask_PL = self._mask([int(prompt.shape[0]) for prompt in prompts])
        return self.lm.get_encoder()(input_ids=ids_PL, attention_mask=mask_PL)[0], mask_PL

    def _mask(self, lengths: Sequence[int]) -> Tensor | None:
        """Returns the mask (P, L) of padded prompts; None without padding."""
        return None if min(lengths) == max(lengths) else padding_mask(lengths, max(lengths), self.device)

    @in_its_numerics
    def _read_prompts(self, trajectory: Trajectory, rows: Sequence[int]) -> _Read:
        """Has the encoder read the unique prompts of some rows, unless what it gave is in the store."""
        unique = tuple(dict.fromkeys(trajectory.condition_of_row[row] for row in rows))
        if trajectory.sources is not None and self.takes_sources:
            hidden_PLD = trajectory.sources.pad(unique, 0, self.device)
        else:
            prompts = trajectory.conditions.rows()
            hidden_PLD, _ = self._encoded([prompts[prompt] for prompt in unique])
        return _Read(trajectory, unique, hidden_PLD, self._reader)

    def _decoded(self, trajectory: Trajectory, rows: Sequence[int]) -> Tensor:
        """Returns the decoder's hidden states (B, N, D) of stored rows, its start token's first."""
        read = self._read
        if read is None or read.trajectory is not trajectory or read.reader != self._reader:
            read = self._read_prompts(trajectory, rows)
        order = [read.prompts.index(trajectory.condition_of_row[row]) for row in rows]
        lengths, hidden_BLD = trajectory.condition_lengths(rows), read.hidden_PLD
        if order != list(range(len(read.prompts))):
            hidden_BLD = hidden_BLD[:, : max(lengths)].index_select(0, torch.tensor(order, device=hidden_BLD.device))
        ids_BN = pad_sequence(self._decoder_rows(trajectory, rows), True, self.pad_token_id).to(self.device)
        decoder, places_N = self.lm.get_decoder(), torch.arange(ids_BN.shape[1], device=self.device)
        padding = getattr(getattr(decoder, "embed_positions", None), "padding_idx", None)
        skips = padding not in (None, self.start_token_id)  # so that drawn padding would have no position
        with _own_positions(decoder, places_N, range(len(places_N))) if skips else nullcontext():
            output = decoder(
                input_ids=ids_BN,
                encoder_hidden_states=hidden_BLD,
                encoder_attention_mask=self._mask(lengths),
                use_cache=False,
            )
        return cast(Tensor, output[0])

    def _decoder_rows(self, trajectory: Trajectory, rows: Sequence[int]) -> list[Tensor]:
        """Returns what the decoder reads of each row: its start token, and all completion tokens but the last."""
        actions = trajectory.actions.rows()
        start_1 = actions[0].new_full((1,), self.start_token_id)
        return [torch.cat([start_1, actions[row][:-1]]) for row in rows]

    def _attend_grouped(self, ids_BN: Tensor, reading: Reading) -> Tensor:
        """Returns hidden states (B, N, D) of tokens that rows read behind what they hold."""
        decoder, sources = self.lm.get_decoder(), cast(Any, reading.sources)
        nothing_B0D = torch.empty((ids_BN.shape[0], 0, self.geometry.hidden_size), device=self.device)
        positions_BN, mode = reading.positions, self._mode if reading.counts is None else None
        run = partial(self._step.run, mode) if mode else decoder
        if mode and self._biased:
            reading.bias = self._biased[0]
        cache = EncoderDecoderCache(reading.cache, sources)
        cache.is_updated = dict.fromkeys(range(self._cross_layers), True)
        given: dict[str, Any] = {"position_ids": positions_BN} if self._takes_positions else {}
        given[self._cache_name] = cache
        first, last = min(reading.state.positions), max(reading.state.positions) + ids_BN.shape[1]
        with (
            shared_prefix_attention(self._attention_configs, reading),
            biases_left_out(() if mode else self._biased),
            _own_positions(decoder, positions_BN, range(first, last)),
        ):
            output = run(input_ids=ids_BN, encoder_hidden_states=nothing_B0D, use_cache=True, **given)
        return cast(Tensor, output[0])


def check_seq2seq(adapter: Seq2SeqAdapter) -> None:
    """Compares an adapter's own paths with its model's logits, and takes a plain path where they differ."""
    path_check.settle(adapter, _settle_decoding)


def _settle_decoding(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> None:
    reason = path_check.sampling_disagreement(adapter, trajectory, wanted_MV)
    if reason is not None:
        adapter.joins = False
        alike = path_check.probe_rows(path_check.known_tokens(adapter), (4, 4))
        alike_MV = adapter.row_logits(adapter.model, alike, range(len(alike)))
        path_check.settle_generate(adapter, alike, alike_MV, reason)


def start_token_of(lm: Any) -> int:
    """Returns the token that the decoder reads before a completion."""
    known = int(lm.get_decoder().get_input_embeddings().weight.shape[0])
    for name, config in product(("decoder_start_token_id", "bos_token_id"), (lm.generation_config, lm.config)):
        start = getattr(config, name, None)
        if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < known:
            return start
        if start is not None:
            kind = type(lm).__name__
            raise refusal("decoder_start_token_id/range", name=name, kind=kind, start=start, last=known - 1)
    raise refusal("decoder_start_token_id/missing", kind=type(lm).__name__)


def _own_positions(decoder: Any, positions_BN: Tensor, span: range) -> AbstractContextManager[None]:
    """Has a table of positions give each row its own; such a decoder takes one for all, from its cache's length."""
    table = getattr(decoder, "embed_positions", None)
    if table is None:
        return nullcontext()
    forward = table.forward

    def own(first: Any = None, *_args: Any, **_kwargs: Any) -> Tensor:
        rows_WD = _positions_in(table, forward, first, span, positions_BN.device)
        return rows_WD.reshape(-1, rows_WD.shape[-1])[positions_BN - span.start]

    return replaced([(table, "forward", own)])


def _positions_in(table: Any, forward: Any, first: Any, span: range, device: torch.device) -> Tensor:
    """Asks a table for a span of positions, in whichever form it takes them."""
    accepted = inspect.signature(forward).parameters
    if "position_ids" in accepted:
        return cast(Tensor, forward(first, position_ids=torch.arange(span.start, span.stop, device=device)))
    if isinstance(first, Tensor):  # tokens, of which only padding would have no position
        first = first.new_full((1, len(span)), (table.padding_idx or 0) + 1)
    else:
        first = torch.Size((1, len(span)))
    return cast(Tensor, forward(first, **{f"{cache_name(accepted)}_length": span.start}))


def _matches(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and is_encoder_decoder(model)


register_adapter(Adapter("encoder-decoder", Seq2SeqAdapter, _matches, check_seq2seq))
