"""Any transformers causal LM, plain or under PEFT, as the loops use it.

Axes: ``B`` rows, ``P`` prompts, ``L`` tokens of a padded row, ``M`` completion tokens laid end to end, ``D`` hidden
width, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from memsafe_rl.accounting import claim
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.adapter import Adapter, DecodeState, register_adapter
from memsafe_rl.models.compiling import Compiled
from memsafe_rl.models.decoding.by_transformers import Choose, generate_plainly
from memsafe_rl.models.decoding.cache import is_trimmable, transit_cache
from memsafe_rl.models.decoding.padded import PaddedState
from memsafe_rl.models.decoding.shared_prefix_attention import Reading, shared_prefix_attention
from memsafe_rl.models.decoding.shared_prefix_cache import (
    SharedPrefixCache,
    SharedPrefixState,
    block_of,
    layer_windows,
    longer_block,
)
from memsafe_rl.models.decoding.short_rotations import short_rotations
from memsafe_rl.models.language import agreement
from memsafe_rl.models.language.base import (
    LanguageAdapter,
    Route,
    ScoringPath,
    in_its_numerics,
    is_encoder_decoder,
    language_model_of,
    logit_maps,
    predicting_states,
)
from memsafe_rl.models.language.packing import attending, pack_rows, padded_layout
from memsafe_rl.models.routing import Routers
from memsafe_rl.types import Component, Trajectory

logger = logging.getLogger(__name__)


class TrunkInputs(Protocol):
    """Turns stored token ids into what a trunk reads."""

    def of(self, lm: Any, ids_BN: Tensor, positions_BN: Tensor | None = None) -> dict[str, Any]:
        """Gives the trunk's arguments for tokens.

        Args:
            lm: the network that reads them.
            ids_BN: (B, N) int64 on the device.
            positions_BN: (B, N) int64, slots of the tokens in their rows; None where every row begins at slot 0.

        Returns:
            Keyword arguments of the trunk's forward; no tensor value is read.
        """


class TokenInputs:
    """Ids as they are."""

    def of(self, lm: Any, ids_BN: Tensor, positions_BN: Tensor | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Gives the ids, and the positions where these are known."""
        return {"input_ids": ids_BN} | ({} if positions_BN is None else {"position_ids": positions_BN})


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
        path = ScoringPath(_first_route(lm), logit_maps(lm.config)[0])
        copy = (
            None
            if reference_model is None
            else CausalLMAdapter(reference_model, pad_token_id=pad_token_id, inputs=self.inputs)
        )
        super().__init__(
            model,
            lm,
            pad_token_id=pad_token_id,
            path=path,
            joins=_can_share_prompts(lm, path.route),
            reference_adapter=copy,
        )
        self._step = Compiled(lm.base_model.forward, type(lm.base_model).__name__)
        _warn_of_rope_that_reads_lengths(lm.config)

    def _hidden_states(self, trajectory: Trajectory, rows: Sequence[int], *, packed: bool) -> Tensor:
        """Gives the hidden states (M, D) from which the actions of rows are predicted."""
        if packed:  # behind one copy of each prompt
            laid = pack_rows(trajectory, rows, self.geometry.windows, self.device)
            with attending(self._attention_configs, laid.layout):
                output = self.lm.base_model(**self.inputs.of(self.lm, laid.ids, laid.positions), use_cache=False)
            hidden_ND: Tensor = output[0][0]
            return hidden_ND.index_select(0, laid.places.to(hidden_ND.device))
        prompts, lengths = trajectory.condition_lengths(rows), trajectory.action_lengths(rows)
        ids_BL, row_lengths = trajectory.token_rows(rows, self.pad_token_id, self.device), trajectory.row_lengths(rows)
        if self.routers is not None:
            self.routers.lay_out(row_lengths)
        hidden_BLD = self._trunk(ids_BL, row_lengths)
        return predicting_states(hidden_BLD, [prompt - 1 for prompt in prompts], lengths)

    @torch.no_grad()
    @in_its_numerics
    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, DecodeState]:
        """Reads prompts and fills a cache."""
        if not self.path.decodes:
            raise AssertionError("rows of this network are decoded by memsafe_rl.rollout.native.by_transformers")
        if not self.joins:
            return self._padded.prefill(prompts, self.pad_token_id, self.device)
        chunk = max(int(prompt.shape[0]) for prompt in prompts)
        if len(prompts) == 1 and chunk_tokens is not None:
            chunk = min(chunk, chunk_tokens)
        ids_PL = pad_sequence([prompt[:chunk] for prompt in prompts], True, self.pad_token_id)
        lengths = [min(int(prompt.shape[0]), chunk) for prompt in prompts]
        windows = self.geometry.windows
        cache = SharedPrefixCache(reads_prompts=True, in_8_bits=self.in_8_bits, lengths=lengths, windows=windows)
        with self._attending_alone(ids_PL):
            output = self.lm.base_model(
                **self.inputs.of(self.lm, ids_PL.to(self.device)), past_key_values=cache, use_cache=True
            )
        last_PD = torch.stack([output[0][row, length - 1] for row, length in enumerate(lengths)])
        del output  # of which a copy of the last states is enough
        state = SharedPrefixState.of_prompts(block_of(cache.read, lengths, windows), windows, self.device)
        del cache
        for start in range(chunk, max(int(prompt.shape[0]) for prompt in prompts), chunk):
            last_PD = self._read_on(state, prompts[0][start : start + chunk])
        return self._logits(last_PD), state

    def balance_experts(self, coef: float) -> None:
        """Has updates add the balance loss of a mixture of experts, whose tokens count once in every row."""
        if self.path.route is Route.WHOLE:
            raise ConfigError(
                f"router_aux_loss_coef is above 0, but {type(self.lm).__name__} is scored row by row by its own "
                "forward. Set router_aux_loss_coef=0.0."
            )
        self.routers = Routers(self.lm, coef)

    def row_logits(self, model: Any, trajectory: Trajectory, rows: Sequence[int]) -> Tensor:
        """Gives a model's own logits at completion tokens, row by row without padding."""
        prompts, lengths, pieces = trajectory.condition_lengths(rows), trajectory.action_lengths(rows), []
        ids_BL = trajectory.token_rows(rows, self.pad_token_id, self.device)
        for ids_L, prompt, length in zip(ids_BL, prompts, lengths, strict=True):
            ids_1L = ids_L[None, : prompt + length]  # under a window, padding may see nothing and become NaN
            logits_1LV = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False).logits
            claim(Component.LOGITS, [logits_1LV])
            pieces.append(logits_1LV[0, prompt - 1 : prompt + length - 1])
        return torch.cat(pieces)

    def decode_plainly(
        self,
        ids_BL: Tensor,
        choose: Choose,
        *,
        prompt_tokens: int,  # noqa: ARG002
        max_new_tokens: int,
        cached: bool,
    ) -> None:
        """Has transformers' `generate` decode rows of one length."""
        generate_plainly(self.lm, ids_BL, choose, max_new_tokens=max_new_tokens, cached=cached)

    def candidate_paths(self) -> Iterator[ScoringPath]:
        """Gives the ways of scoring that the model's structure allows, the leanest first and a sure one last."""
        maps, first = logit_maps(self.lm.config), _first_route(self.lm)
        routes = {Route.LEAN: (Route.LEAN, Route.MASKED), Route.MASKED: (Route.MASKED,), Route.WHOLE: ()}[first]
        yield from (ScoringPath(route, logit_map) for route in routes for logit_map in maps)
        yield ScoringPath(Route.WHOLE, maps[0])

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

    def _trunk(self, ids_BL: Tensor, lengths: Sequence[int]) -> Tensor:
        """Gives hidden states (B, L, D) of rows padded on the right."""
        trunk = self.lm.base_model
        if self.path.route is Route.LEAN:
            with self._attending_alone(ids_BL):
                output = trunk(**self.inputs.of(self.lm, ids_BL), past_key_values=transit_cache(), use_cache=False)
        else:
            ends_B1 = torch.tensor(lengths, device=ids_BL.device)[:, None]
            mask_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None] < ends_B1
            output = trunk(**self.inputs.of(self.lm, ids_BL), attention_mask=mask_BL.long(), use_cache=False)
        return cast(Tensor, output[0])

    def _attending_alone(self, ids_BL: Tensor) -> AbstractContextManager[None]:
        """Has padded rows attend as packed ones do, where the model's own attention holds all scores or a mask."""
        rows, width = ids_BL.shape
        windows = self.geometry.windows
        masks = any(window is not None and window < width for window in windows)
        masks = masks or any(config._attn_implementation == "eager" for config in self._attention_configs)
        if not masks or not self.packs_prompts or self.lm.training:
            return nullcontext()
        return attending(self._attention_configs, padded_layout(rows, width, windows))

    def _read_on(self, state: SharedPrefixState, ids_N: Tensor) -> Tensor:
        """Reads the next tokens of a state's only prompt, and gives the last hidden state (1, D)."""
        cache = SharedPrefixCache(
            reads_prompts=True, in_8_bits=self.in_8_bits, lengths=[len(ids_N)], windows=state.windows
        )
        reading = Reading(state, cache, [len(ids_N)], keeps=False)
        hidden_1ND = self._attend_grouped(ids_N.to(self.device)[None], reading)
        state.replace_prompt(longer_block(state.blocks[0], cache.read, len(ids_N), state.windows))
        return hidden_1ND[:, -1]

    def _attend_grouped(self, ids_BN: Tensor, reading: Reading) -> Tensor:
        """Gives hidden states (B, N, D) of tokens that rows read behind what they hold."""
        positions_BN, mode = reading.positions, self._mode if reading.counts is None else None
        trunk = partial(self._step.run, mode) if mode else self.lm.base_model
        with (
            shared_prefix_attention(self._attention_configs, reading),
            short_rotations(() if mode or reading.counts is not None else self._rotations),
        ):
            output = trunk(
                **self.inputs.of(self.lm, ids_BN, positions_BN), past_key_values=reading.cache, use_cache=True
            )
        return cast(Tensor, output[0])


def check_head(adapter: CausalLMAdapter) -> None:
    """Compares an adapter's own paths with its model's logits, and takes a plain path where scoring differs.

    Two short rows of unequal length go both ways. The first scoring path that agrees is kept: without a mask, with a
    mask, each with every reading of the config's logit scale; else the whole model row by row. Anything but the first
    is logged in one warning. A frozen reference copy takes the same path. Where decoding differs, transformers'
    `generate` decodes instead, with a cache or without, which is logged too. The bytes of the cache go into the
    geometry.
    """
    agreement.settle(adapter, _settle_decoding)


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Gives the context of a forward pass; left after each, its weight cache never outlives one."""
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def causal_lm_of(model: nn.Module) -> Any:
    """Gives the transformers causal LM inside a model, LoRA layers in place."""
    lm = language_model_of(model)
    if is_encoder_decoder(lm):
        raise ConfigError(f"{type(lm).__name__} is an encoder-decoder; use Seq2SeqAdapter for it.")
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


def _first_route(lm: Any) -> Route:
    """The leanest route that a model's structure allows."""
    if lm.base_model is lm or lm.get_output_embeddings() is None:
        return Route.WHOLE
    accepted = inspect.signature(lm.base_model.forward).parameters
    plain = "past_key_values" in accepted and is_trimmable(DynamicCache(config=lm.config))
    return Route.LEAN if plain else Route.MASKED


def _settle_packing(adapter: LanguageAdapter) -> None:
    """Keeps the packed route if it gives the logits of rows alone, and says so if it does not."""
    # Rows of a prompt lie apart from each other and are unlike in length.
    trajectory = agreement.probe_rows(agreement.known_tokens(adapter), (3, 6), (4, 3, 7, 1, 5), (0, 1, 0, 1, 0))
    wanted_MV = adapter.row_logits(adapter.model, trajectory, range(len(trajectory)))
    reason = _packing_disagreement(adapter, trajectory, wanted_MV)
    adapter.packs_prompts = reason is None
    if reason is not None:
        logger.info("%s learns from every row with its own copy of the prompt: %s.", type(adapter.lm).__name__, reason)


def _packing_disagreement(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> str | None:
    """Says why rows cannot share a prompt, or None; out-of-memory errors pass through."""
    if adapter.routers is not None:
        return "the balance loss of its experts counts a prompt once for each completion"
    if adapter.path.route is not Route.LEAN:
        return f"{adapter.path.route.value} has no packed form"
    if "position_ids" not in inspect.signature(adapter.lm.base_model.forward).parameters:
        return "positions cannot be given"
    adapter.packs_prompts = True
    try:
        for packed in (True, False):  # padded rows may attend as packed ones do
            route = partial(adapter.distribution, trajectory, range(len(trajectory)), packed=packed)
            found = agreement.difference(route, adapter, wanted_MV)
            if found is not None:
                return found
        return None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # how a kernel or a shape complains
        return f"{type(error).__name__}: {error}"
    finally:
        adapter.packs_prompts = False


def _settle_decoding(adapter: LanguageAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> None:
    """Decodes both prompts together; where shared prompts give other logits, each row gets its own."""
    adapter.joins = adapter.joins and adapter.path.route is Route.LEAN
    reason = agreement.sampling_disagreement(adapter, trajectory, wanted_MV)
    if reason is not None and adapter.joins:
        adapter.joins = False
        logger.warning(
            "%s has an attention of its own, so rollouts store a prompt once per completion, in waves. %s",
            type(adapter.lm).__name__,
            reason,
        )
        reason = agreement.sampling_disagreement(adapter, trajectory, wanted_MV)
    if reason is not None:
        agreement.settle_generate(adapter, trajectory, wanted_MV, reason)
    _settle_packing(adapter)


def _can_share_prompts(lm: Any, route: Route) -> bool:
    """Whether a model's structure allows a shared-prefix cache; the check at start tells whether it agrees."""
    accepted = inspect.signature(lm.base_model.forward).parameters
    return route is Route.LEAN and "position_ids" in accepted and layer_windows(lm.config) is not None


def _matches(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and not is_encoder_decoder(model)


register_adapter(Adapter("causal LM", CausalLMAdapter, _matches, check_head))
