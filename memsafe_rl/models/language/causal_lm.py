"""Any transformers causal LM, plain or under PEFT, as the loops use it.

Axes: ``B`` rows, ``P`` prompts, ``L`` tokens of a padded row, ``M`` completion tokens laid end to end, ``D`` hidden
width, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from memsafe_rl.accounting import claim, worth_running
from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import Adapter, Context, DecodeState, register_adapter
from memsafe_rl.models.compiling import Compiled
from memsafe_rl.models.decoding.few_operators import short_rotations
from memsafe_rl.models.decoding.padded import PaddedState
from memsafe_rl.models.decoding.shared_prefix_attention import Reading, shared_prefix_attention
from memsafe_rl.models.decoding.shared_prefix_cache import SharedPrefixCache, SharedPrefixState, block_of, longer_block
from memsafe_rl.models.geometry import layer_windows
from memsafe_rl.models.language import path_check
from memsafe_rl.models.language.base import (
    OWN_ATTENTION,
    LanguageAdapter,
    Route,
    in_its_numerics,
    is_encoder_decoder,
    language_model_of,
    padding_mask,
    predicting_states,
)
from memsafe_rl.models.language.packing import PackedRows, Trunk, attending, pack_rows, pack_trunk, padded_layout
from memsafe_rl.models.module_state import cache_name
from memsafe_rl.models.routing import RouterLosses, Routers
from memsafe_rl.ops.fixed_tiles import FIXED_TILES
from memsafe_rl.types import SCORE_ELEMENTS, Component, Trajectory

logger = logging.getLogger(__name__)

_LAST_CHUNKS = 3
"""A whole one beside the last states of one that is whole too, and the last, which may be shorter."""


class TrunkInputs(Protocol):
    """What stored ids stand for."""

    def of(self, lm: Any, ids_BN: Tensor, positions_BN: Tensor | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Returns a trunk's arguments from ids and their slots (None: all rows begin at 0); reads no tensor value."""
        return {"input_ids": ids_BN} | ({} if positions_BN is None else {"position_ids": positions_BN})

    def images(self, prompts: Sequence[Tensor]) -> list[Sequence[slice]]:
        """Returns the stretches of each prompt whose tokens see each other, those that come later too."""
        return [()] * len(prompts)

    def make_ready(self, lm: Any, trajectory: Trajectory, rows: Sequence[int]) -> None:  # noqa: ARG002
        """Makes what rows read besides their tokens, where it is missing, or weights have moved since."""
        return

    def learning(self, model: nn.Module, forward: Context) -> AbstractContextManager[None]:  # noqa: ARG002
        """Gathers the gradients of what rows read besides their tokens; see `ScoringAdapter.learning`."""
        return nullcontext()


class TokenInputs(TrunkInputs):
    """Ids that stand for tokens of the vocabulary alone."""


class _TransitLayer(DynamicLayer):  # type: ignore[misc]
    """Keeps no keys and values: beside an empty cache, transformers makes masks by shapes, else by tensors' values."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class CausalLMAdapter(LanguageAdapter):
    """A causal LM of transformers behind the `ModelAdapter` protocol."""

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        reference_model: nn.Module | None = None,
        inputs: TrunkInputs | None = None,
    ) -> None:
        """Wraps a model; of it, only transformers' checkpointing and bitsandbytes' packing on CPUs are switched off."""
        lm = causal_lm_of(model)
        self.inputs = inputs or TokenInputs()
        accepted = inspect.signature(lm.base_model.forward).parameters
        self._cache_name = cache_name(accepted)
        routes: tuple[Route, ...] = (Route.MASKED,)
        if lm.base_model is lm or lm.get_output_embeddings() is None:
            routes = ()
        elif self._cache_name in accepted and layer_windows(lm.config) is not None:
            routes = (Route.LEAN, Route.MASKED)
        super().__init__(
            model,
            lm,
            pad_token_id=pad_token_id,
            routes=routes,
            # whether the structure allows a shared-prefix cache; the check at start tells whether the model agrees
            joins=Route.LEAN in routes and "position_ids" in accepted,
            reference_model=reference_model,
            inputs=self.inputs,
        )
        self._trunks: list[Trunk] = []  # what micro-batches now follow, from the first on
        self._step = Compiled(lm.base_model.forward, type(lm.base_model).__name__)
        _warn_of_rope_that_reads_lengths(lm.config)

    def _hidden_states(self, trajectory: Trajectory, rows: Sequence[int], *, packed: bool) -> Tensor:
        """Returns the hidden states (M, D) from which the actions of rows are predicted."""
        self.inputs.make_ready(self.lm, trajectory, rows)  # in the numerics in which prompts are read
        with self.numerics():
            if packed:  # behind one copy of each prompt
                # What was read with another PEFT adapter, such as a critic's, is read anew.
                trunks = [trunk for trunk in self._trunks if trunk.reader == self._reader]
                images = dict(zip(rows, self._images(trajectory, rows), strict=True))
                laid = pack_rows(trajectory, rows, self.geometry.windows, self.device, trunks, images)
                own = [self._packed_states(laid)] if laid.ids.numel() else []  # rows may have nothing behind a trunk
                hidden_ND = torch.cat([*(trunk.states() for trunk in trunks), *own])
                return hidden_ND.index_select(0, laid.places.to(hidden_ND.device))
            prompts, lengths = trajectory.condition_lengths(rows), trajectory.action_lengths(rows)
            ids_BL = trajectory.token_rows(rows, self.pad_token_id, self.device)
            row_lengths = trajectory.row_lengths(rows)
            if self.routers is not None:
                self.routers.row_lengths = row_lengths
            hidden_BLD = self._trunk(ids_BL, row_lengths, self._images(trajectory, rows))
            return predicting_states(hidden_BLD, [prompt - 1 for prompt in prompts], lengths)

    def learning(self, forward: Context) -> AbstractContextManager[None]:
        """Gathers the gradients of what rows read besides their tokens."""
        return self.inputs.learning(self.model, forward)

    def _packed_states(self, laid: PackedRows) -> Tensor:
        """Returns hidden states (N, D) of all tokens of a packed row."""
        with attending(self._attention_configs, laid.layout) as layers:
            output = self.lm.base_model(**self.inputs.of(self.lm, laid.ids, laid.positions), use_cache=False)
        if not layers:
            raise NotImplementedError(OWN_ATTENTION)
        hidden_ND: Tensor = output[0][0]
        return hidden_ND

    @contextmanager
    def read_together(self, trajectory: Trajectory, rows: Sequence[int], forward: Context) -> Iterator[None]:
        """Reads once what all of some rows share and is not read yet; what follows leaves its gradients there."""
        with self.numerics():
            apart = FIXED_TILES.get()
        if apart:  # a row that has the bits that it would have alone reads all of it for itself
            yield
            return
        images = dict(zip(rows, self._images(trajectory, rows), strict=True))
        laid = pack_trunk(trajectory, rows, self.geometry.windows, self.device, self._trunks, images)
        trunk = laid.layout.keeps
        assert trunk is not None, "a trunk is laid to be kept"
        self.inputs.make_ready(self.lm, trajectory, rows)
        with forward(), self.numerics():
            graph_ND = self._packed_states(laid)
        wide = torch.promote_types(graph_ND.dtype, torch.float32)
        trunk.hidden_ND = graph_ND.detach().to(wide).requires_grad_(graph_ND.requires_grad)
        trunk.reader, trunk.dtype = self._reader, graph_ND.dtype
        self._trunks.append(trunk)
        try:
            yield
            reached = trunk.hidden_ND.grad
        finally:
            self._trunks.pop()
        if graph_ND.requires_grad and (reached is not None or trunk.learnt):
            torch.autograd.backward(
                graph_ND, torch.zeros_like(graph_ND) if reached is None else reached.to(graph_ND.dtype)
            )

    @torch.no_grad()
    @in_its_numerics
    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, DecodeState]:
        """Reads prompts and fills a cache; what a dry run leaves out between chunks only takes its place there."""
        if not self.joins:
            return PaddedState.of_prompts(self.lm, prompts, self.pad_token_id, self.device)
        images, length = self.inputs.images(prompts), max(int(prompt.shape[0]) for prompt in prompts)
        most = length if len(prompts) > 1 or chunk_tokens is None else chunk_tokens
        chunks = list(worth_running(_chunks(length, most, images[0]), self._telling_chunks))
        chunk = chunks[0].stop
        ids_PL = pad_sequence([prompt[:chunk] for prompt in prompts], True, self.pad_token_id)
        lengths = [min(int(prompt.shape[0]), chunk) for prompt in prompts]
        windows = self.geometry.windows
        cache = SharedPrefixCache(reads_prompts=True, in_8_bits=self.in_8_bits, lengths=lengths, windows=windows)
        with self._attending_alone(ids_PL, [[span for span in spans if span.stop <= chunk] for spans in images]):
            output = self.lm.base_model(
                **self.inputs.of(self.lm, ids_PL.to(self.device)), **{self._cache_name: cache}, use_cache=True
            )
        last_PD = torch.stack([output[0][row, length - 1] for row, length in enumerate(lengths)])
        del output  # of which a copy of the last states is enough
        state = SharedPrefixState.of_prompts(block_of(cache.read, lengths), windows, self.device)
        del cache
        for before, after in pairwise(chunks):
            start, end = after.start, after.stop
            if start > before.stop:
                state.stretch_prompt(start - before.stop)
            spans = [slice(one.start - start, one.stop - start) for one in images[0] if start <= one.start < end]
            last_PD = self._read_on(state, prompts[0][start:end], spans)
        return self._logits(last_PD), state

    def _telling_chunks(self, chunks: Sequence[slice]) -> list[int]:
        """Finds the chunks of a prompt that tell what all hold, the first apart: the last ones."""
        geometry, read = self.geometry, max(chunk.stop - chunk.start for chunk in chunks)
        scores = chunks[-1].stop * max(read * geometry.heads, geometry.kv_heads * geometry.head_dim)
        most = len(chunks) if scores > SCORE_ELEMENTS else _LAST_CHUNKS  # scores made in parts may be larger before
        return list(range(max(0, len(chunks) - most), len(chunks)))

    def hear_routers(self, losses: RouterLosses) -> None:
        """Has updates add losses on the routers of a mixture of experts, whose tokens count once in every row."""
        refusal.when(self.path.route is Route.WHOLE, "routers/rows", off=losses.off, kind=type(self.lm).__name__)
        self.routers = Routers(self.lm, losses)

    def row_logits(self, model: Any, trajectory: Trajectory, rows: Sequence[int]) -> Tensor:
        """Returns a model's own logits at completion tokens, row by row without padding."""
        prompts, lengths, pieces = trajectory.condition_lengths(rows), trajectory.action_lengths(rows), []
        ids_BL = trajectory.token_rows(rows, self.pad_token_id, self.device)
        for ids_L, prompt, length in zip(ids_BL, prompts, lengths, strict=True):
            ids_1L = ids_L[None, : prompt + length]  # under a window, padding may see nothing and become NaN
            logits_1LV = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False).logits
            claim(Component.LOGITS, [logits_1LV])
            pieces.append(logits_1LV[0, prompt - 1 : prompt + length - 1])
        return torch.cat(pieces)

    def measure_cache(self, state: DecodeState) -> None:
        """Notes the bytes of a token in the cache of all layers, unless a window may have hidden some."""
        if self.joins:
            block = state.prompt_blocks()[0]
            width = max(block.lengths)
            self._note_heads(block.keys)
        else:
            width = cast(PaddedState, state).width
        if not any(window is not None and window <= width for window in self.geometry.windows):
            self.slot_bytes = state.nbytes() // (state.rows * width)

    def _trunk(self, ids_BL: Tensor, lengths: Sequence[int], images: Sequence[Sequence[slice]]) -> Tensor:
        """Returns hidden states (B, L, D) of rows padded on the right, and frees all else that is made for them."""
        inputs, run = self.inputs.of(self.lm, ids_BL), partial(self.lm.base_model, use_cache=False)
        if self.path.route is Route.LEAN:
            with self._attending_alone(ids_BL, images):
                output = run(**inputs, **{self._cache_name: Cache(layer_class_to_replicate=_TransitLayer)})
        else:
            output = run(**inputs, attention_mask=padding_mask(lengths, ids_BL.shape[1], ids_BL.device))
        return cast(Tensor, output[0])

    def _images(self, trajectory: Trajectory, rows: Sequence[int]) -> list[Sequence[slice]]:
        """Returns the stretches of rows whose tokens see each other."""
        prompts = trajectory.conditions.rows()
        return self.inputs.images([prompts[trajectory.condition_of_row[row]] for row in rows])

    def _attending_alone(self, ids_BL: Tensor, images: Sequence[Sequence[slice]]) -> AbstractContextManager[object]:
        """Has padded rows attend as packed ones do, where the model's own attention holds all scores or a mask."""
        rows, width = ids_BL.shape
        windows = self.geometry.windows
        masks = self.attends_eagerly or any(window is not None and window < width for window in windows)
        alone = masks and self.packs_prompts and not self.lm.training
        if not alone and not any(images):
            return nullcontext()
        return attending(self._attention_configs, padded_layout(rows, width, windows, self.device, images))

    def _read_on(self, state: SharedPrefixState, ids_N: Tensor, images: Sequence[slice]) -> Tensor:
        """Reads the next tokens of a state's only prompt, and gives the last hidden state (1, D)."""
        cache = SharedPrefixCache(
            reads_prompts=True, in_8_bits=self.in_8_bits, lengths=[len(ids_N)], windows=state.windows
        )
        reading = Reading(state, cache, [len(ids_N)], keeps=False, images=images)
        hidden_1ND = self._attend_grouped(ids_N.to(self.device)[None], reading)
        state.replace_prompt(longer_block(state.origins[0].block, cache.read, len(ids_N), state.windows))
        return hidden_1ND[:, -1]

    def _attend_grouped(self, ids_BN: Tensor, reading: Reading) -> Tensor:
        """Returns hidden states (B, N, D) of tokens that rows read behind what they hold."""
        positions_BN, mode = reading.positions, self._mode if reading.counts is None else None
        trunk = partial(self._step.run, mode) if mode else self.lm.base_model
        with (
            shared_prefix_attention(self._attention_configs, reading),
            short_rotations(() if mode or reading.counts is not None else self._rotations),
        ):
            given = self.inputs.of(self.lm, ids_BN, positions_BN) | {self._cache_name: reading.cache}
            output = trunk(**given, use_cache=True)
        return cast(Tensor, output[0])


def _chunks(length: int, chunk: int, images: Sequence[slice]) -> list[slice]:
    """Returns the chunks of a prompt: they end before an image that they would cut, behind one that is longer."""
    ends = [0]
    while ends[-1] < length:
        end = min(length, ends[-1] + chunk)
        cut = next((span for span in images if span.start < end < span.stop), None)
        ends.append(end if cut is None else cut.start if cut.start > ends[-1] else cut.stop)
    return [slice(start, end) for start, end in pairwise(ends)]


def check_head(adapter: CausalLMAdapter) -> None:
    """Compares an adapter's own paths with its model's logits, and takes a plain path where they differ."""
    path_check.settle(adapter, _settle_decoding)


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Returns the context of a forward pass; left after each, its weight cache never outlives one."""
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def causal_lm_of(model: nn.Module) -> Any:
    """Returns the transformers causal LM inside a model, LoRA layers in place."""
    lm = language_model_of(model)
    refusal.when(is_encoder_decoder(lm), "adapter/seq2seq", kind=type(lm).__name__)
    return lm


def _warn_of_rope_that_reads_lengths(config: Any) -> None:
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        logger.warning(
            "rope_type %r sets all rows' frequencies by the longest row of a batch: beyond the length the model was "
            "first trained for, log-probs depend on which rows share a micro-batch. Keep rows below that length.",
            kind,
        )


def _settle_packing(adapter: LanguageAdapter) -> None:
    """Keeps the packed route if it gives the logits of rows alone, and says so if it does not."""
    # Rows of a prompt lie apart from each other and are unlike in length.
    trajectory = path_check.probe_rows(path_check.known_tokens(adapter), (3, 6), (4, 3, 7, 1, 5), (0, 1, 0, 1, 0))
    wanted_MV = adapter.row_logits(adapter.model, trajectory, range(len(trajectory)))
    reason = _packing_disagreement(adapter, trajectory, wanted_MV)
    adapter.packs_prompts = reason is None
    if reason is not None:
        logger.info("%s learns from every row with its own copy of the prompt: %s.", type(adapter.lm).__name__, reason)


def _packing_disagreement(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> str | None:
    """Says why rows cannot share a prompt, or None."""
    if adapter.routers is not None:
        return "the balance loss of its experts counts a prompt once for each completion"
    if adapter.path.route is not Route.LEAN:
        return f"{adapter.path.route.value} has no packed form"
    if "position_ids" not in inspect.signature(adapter.lm.base_model.forward).parameters:
        return "positions cannot be given"
    adapter.packs_prompts = True
    try:  # padded rows may attend as packed ones do; a `RuntimeError` is how a kernel or a shape complains
        return path_check.scoring_disagreement(
            adapter, trajectory, wanted_MV, RuntimeError, packed=True
        ) or path_check.scoring_disagreement(adapter, trajectory, wanted_MV, RuntimeError)
    finally:
        adapter.packs_prompts = False


def _settle_decoding(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> None:
    """Decodes both prompts together; where shared prompts give other logits, each row gets its own."""
    adapter.joins = adapter.joins and adapter.path.route is Route.LEAN
    reason = path_check.sampling_disagreement(adapter, trajectory, wanted_MV)
    if reason is not None and adapter.joins:
        adapter.joins = False
        logger.warning(
            "%s has an attention of its own, so rollouts store a prompt once per completion, in waves. %s",
            type(adapter.lm).__name__,
            reason,
        )
        reason = path_check.sampling_disagreement(adapter, trajectory, wanted_MV)
    if reason is not None:
        path_check.settle_generate(adapter, trajectory, wanted_MV, reason)
    _settle_packing(adapter)


def _matches(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and not is_encoder_decoder(model)


register_adapter(Adapter("causal LM", CausalLMAdapter, _matches, check_head))
