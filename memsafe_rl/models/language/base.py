"""What causal LMs and encoder-decoders of transformers have in common behind the `ModelAdapter` protocol.

Axes: ``B`` rows, ``N`` tokens read in one forward, ``M`` completion tokens laid end to end, ``D`` hidden width, ``V``
vocabulary.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import wraps
from inspect import getattr_static
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from memsafe_rl.accounting import autocast_bytes, claim
from memsafe_rl.models import refusal, unusable
from memsafe_rl.models.adapter import Choose, DecodeState, ModelAdapter
from memsafe_rl.models.batch_invariance import batch_invariant
from memsafe_rl.models.blocks import find_blocks, recomputed
from memsafe_rl.models.compiling import MODE, mode_in_force
from memsafe_rl.models.decoding.few_operators import norms_of, rotations_of, short_norms
from memsafe_rl.models.decoding.padded import PaddedState
from memsafe_rl.models.decoding.shared_prefix_attention import Reading
from memsafe_rl.models.decoding.shared_prefix_cache import RowCache, SharedPrefixCache, SharedPrefixState, SourceMarks
from memsafe_rl.models.geometry import read_geometry
from memsafe_rl.models.host_weights import HostWeights, host_weights_of
from memsafe_rl.models.module_state import as_reference, attention_configs, is_hooked, mend_attention, replaced
from memsafe_rl.ops.fixed_tiles import FIXED_TILES
from memsafe_rl.types import (
    CACHE_SCALE_BYTES,
    Component,
    LinearHead,
    LogitsHead,
    ModelGeometry,
    TokenDistribution,
    Trajectory,
)

logger = logging.getLogger(__name__)


class Route(Enum):
    """How stored rows go through the network."""

    LEAN = "trunk without a mask, then the head on completion tokens"
    MASKED = "trunk with a padding mask, then the head on completion tokens"
    WHOLE = "the whole model, row by row, with all its logits"


@dataclass
class ScoringPath:
    """How an adapter scores; decided once, by the check at start."""

    route: Route  # how rows go through the network
    logit_map: LogitMap  # what the model does to its head's output
    # whether rows can be decoded together by this library; if not, transformers' `generate` decodes rows of one length
    decodes: bool = True
    caches: bool = True  # whether `generate` may keep a cache


OWN_ATTENTION = "its layers do not ask transformers for the attention that its config names"
S = TypeVar("S", bound="LanguageAdapter")
P = ParamSpec("P")
R = TypeVar("R")


def in_its_numerics(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Has an adapter's method compute as the adapter is told to."""

    @wraps(method)
    def run(adapter: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with adapter.numerics():
            return method(adapter, *args, **kwargs)

    return run


class LanguageAdapter(ModelAdapter, ABC):
    """A network of transformers that draws tokens one after another; its kind says how it reads them."""

    _cross_layers: int = 0

    def __init__(
        self,
        model: nn.Module,
        lm: Any,
        *,
        pad_token_id: int,
        routes: Sequence[Route],
        joins: bool,
        reference_model: nn.Module | None,
        **options: Any,
    ) -> None:
        """Wraps a model, and its frozen copy with further ``options``, to go one of ``routes`` or as a whole."""
        self.model, self.lm = model, lm
        self.pad_token_id = pad_token_id
        maps = logit_maps(lm.config)
        paths = [ScoringPath(route, logit_map) for route in routes for logit_map in maps]
        self.candidate_paths = (*paths, ScoringPath(Route.WHOLE, maps[0]))
        self.path = self.candidate_paths[0]
        self.joins = joins
        self.batch_invariant = False
        self.slot_bytes: int | None = None
        self._key_bytes: int | None = None
        self.reference_adapter: Self | None = None
        if reference_model is not None:
            self.reference_adapter = cast(Any, type(self))(reference_model, pad_token_id=pad_token_id, **options)
        self._attention_configs = self._all_configs = attention_configs(lm)  # the second, an encoder's too
        self._norms, self._rotations = norms_of(lm), rotations_of(lm)
        self._geometries: dict[tuple[int | None, int | None, bool, bool], ModelGeometry] = {}
        self.host_weights = self._movable()
        mend_attention()
        _switch_off_checkpointing(lm)
        _keep_gradient_of_4bit_layers(lm)

    @abstractmethod
    def _hidden_states(self, trajectory: Trajectory, rows: Sequence[int], *, packed: bool) -> Tensor:
        """Returns the hidden states (M, D) from which the actions of rows are predicted, in the adapter's numerics."""

    def numerics(self, *, invariant: bool = False) -> AbstractContextManager[None]:
        """Computes what is run inside as this adapter is told to: rows as if alone, to the bit, or in any order."""
        if not (self.batch_invariant or invariant):
            return nullcontext()
        # an attention of a network's own would be handed masks of another one, and read padding
        return batch_invariant(self._all_configs if self.joins else ())

    @torch.no_grad()
    @in_its_numerics
    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row of a cache, in place."""
        if not self.joins:
            return cast(PaddedState, state).read(tokens_B.to(self.device)[:, None])
        rows = cast(SharedPrefixState, state)  # rows that follow a shared prompt
        rows.reserve(1)
        with nullcontext() if (FIXED_TILES.get() or self._mode) else short_norms(self._norms, rows.constants):
            hidden_B1D = self._attend_grouped(tokens_B.to(self.device)[:, None], self._reading(rows))
        if not rows.keys:
            raise NotImplementedError(OWN_ATTENTION)
        rows.advance()
        return self._logits(hidden_B1D[:, -1])

    @abstractmethod
    def row_logits(self, model: Any, trajectory: Trajectory, rows: Sequence[int]) -> Tensor:
        """Returns a model's own logits at completion tokens, row by row without padding."""

    @abstractmethod
    def measure_cache(self, state: DecodeState) -> None:
        """Notes the bytes of a token in a cache that prompts have just been read into."""

    @abstractmethod
    def _attend_grouped(self, ids_BN: Tensor, reading: Reading) -> Tensor:
        """Returns hidden states (B, N, D) of tokens that rows read behind what they hold."""

    @property
    def device(self) -> torch.device:
        """Where the network takes its tokens."""
        return cast(torch.device, self.lm.get_input_embeddings().weight.device)

    @property
    def _mode(self) -> str | None:
        """The mode in which a step runs compiled, where a plan asks for it and fixed tiles do not forbid it."""
        return None if MODE.get() is None or FIXED_TILES.get() else mode_in_force()

    @property
    def attends_eagerly(self) -> bool:
        """Whether a layer runs transformers' eager attention, which may take its softmax in float32 under float64."""
        return any(config._attn_implementation_internal == "eager" for config in self._attention_configs)

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted, a reference copy's weights included; read once, until `reread`."""
        key = self.slot_bytes, autocast_bytes(self.device), self.joins, self.in_8_bits
        if key not in self._geometries:
            copies = () if self.reference_adapter is None else (self.reference_adapter.model,)
            geometry = read_geometry(self.lm, copies=copies, slot_bytes=self.slot_bytes)
            movable, copied = self.host_weights.block_bytes, self.host_weights.reference_blocks
            geometry = replace(geometry, shares_prompts=self.joins, frozen_block_bytes=movable, reference_blocks=copied)
            if self.in_8_bits:
                key_bytes = self._key_bytes or geometry.kv_heads * (geometry.head_dim + CACHE_SCALE_BYTES)
                source_bytes = None if geometry.source_bytes is None else 2 * key_bytes * self._cross_layers
                geometry = replace(geometry, key_bytes=key_bytes, source_bytes=source_bytes)
            self._geometries[key] = geometry
        return self._geometries[key]

    @property
    def value_inputs(self) -> tuple[int, torch.dtype] | None:
        """Width and type of the hidden states that a critic's head can read; None where only logits are shown."""
        if self.path.route is Route.WHOLE:
            return None
        output = self.lm.get_output_embeddings()
        embedding = self.lm.get_input_embeddings().weight  # a critic's, whose head was taken away before, has no other
        width = getattr(output, "in_features", None) or getattr(output, "weight", embedding).shape[-1]
        return int(width), embedding.dtype

    def reread(self) -> None:
        """Forgets the sizes read so far, after weights were added or frozen."""
        self.host_weights = self._movable()
        self._geometries.clear()

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: Sequence[int] | None = None, *, packed: bool = False
    ) -> TokenDistribution:
        """Runs the network over stored rows, packed, or padded on the right, where no action sees it."""
        if columns is not None:
            raise refusal("columns/rows", columns=columns, kind=type(self.lm).__name__)
        if packed and not self.packs_prompts:
            raise refusal("packed/rows", kind=type(self.lm).__name__)
        for row, prompt in zip(rows, trajectory.condition_lengths(rows), strict=True):
            if prompt < 1:
                raise unusable("prompt/empty", row=row)
        tokens_M, lengths = trajectory.actions.take(rows).flat.to(self.device), trajectory.action_lengths(rows)
        with self.numerics():
            if self.path.route is Route.WHOLE and not packed:
                logits_MV = self.row_logits(self.lm, trajectory, rows)
                return TokenDistribution(logits_MV, tokens_M, lengths, given_logits, FIXED_TILES.get())
        hidden_MD = self._hidden_states(trajectory, rows, packed=packed)
        with self.numerics():
            return TokenDistribution(hidden_MD, tokens_M, lengths, self._head(), FIXED_TILES.get())

    def decode_plainly(
        self, ids_BL: Tensor, choose: Choose, *, prompt_tokens: int, max_new_tokens: int, cached: bool
    ) -> None:
        """Runs transformers' `generate` on rows of one length, with tokens that the caller chooses."""
        ended_B = torch.zeros(len(ids_BL), dtype=torch.bool, device=ids_BL.device)

        def leave_no_choice(_ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
            tokens_B, ends_B = choose(scores_BV)
            ended_B.logical_or_(ends_B.to(ended_B.device))
            return torch.full_like(scores_BV, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)

        plain = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=cached, disable_compile=True
        )
        begun = {}
        if self.start_token_id is not None:
            start_B1 = ids_BL.new_full((len(ids_BL), 1), self.start_token_id)
            begun["decoder_input_ids"] = torch.cat([start_B1, ids_BL[:, prompt_tokens:]], 1)
            ids_BL, plain.decoder_start_token_id = ids_BL[:, :prompt_tokens], self.start_token_id
        with replaced([(self.lm, "generation_config", plain)]):  # from which `generate` takes what it is not given
            self.lm.generate(
                input_ids=ids_BL,
                attention_mask=torch.ones_like(ids_BL),
                generation_config=plain,
                logits_processor=[leave_no_choice],
                stopping_criteria=[lambda *_, **__: ended_B],
                **begun,
            )

    @property
    def decodes(self) -> bool:
        """Whether this library's loop decodes rows together; if not, transformers' `generate` decodes them."""
        return self.path.decodes

    @property
    def kv_retention(self) -> bool:
        """Whether rows can wait between turns, and caches be in 8 bits: this library keeps the caches itself."""
        return self.joins and self.path.decodes

    @property
    def own_generate(self) -> Callable[..., Any] | None:
        """The `generate` of the network that a user, or code that came with it, has put in transformers' place."""
        found = vars(self.model).get("generate", getattr_static(type(self.lm), "generate", None))
        is_theirs = found is None or str(found.__module__).startswith("transformers.")
        return None if is_theirs else cast(Callable[..., Any], self.model.generate)

    @property
    def caches(self) -> bool:
        """Whether transformers' `generate` may keep a cache."""
        return self.path.caches

    @torch.no_grad()
    @in_its_numerics
    def extend(self, state: DecodeState, tokens: Sequence[Tensor], chunk_tokens: int) -> Tensor:
        """Appends tokens that were drawn before to the rows of a cache, in place; only where the adapter `joins`."""
        rows = cast(SharedPrefixState, state)
        step = max(1, chunk_tokens // rows.rows)
        last: list[Tensor] = [torch.empty(0)] * rows.rows
        for start in range(0, max(len(row) for row in tokens), step):
            pieces = [row[start : start + step] for row in tokens]
            counts = [len(piece) for piece in pieces]
            rows.reserve(counts)
            ids_BN = pad_sequence(pieces, True, self.pad_token_id).to(self.device)
            hidden_BND = self._attend_grouped(ids_BN, self._reading(rows, counts))
            rows.advance(counts)
            last = [hidden_BND[row, count - 1] if count else last[row] for row, count in enumerate(counts)]
        return self._logits(torch.stack(last))

    @torch.no_grad()
    def resume(
        self, rows: Sequence[RowCache], kept: Sequence[int], tokens: Sequence[Tensor], chunk_tokens: int
    ) -> tuple[Tensor, SharedPrefixState]:
        """Puts rows that waited into a cache, and has each read on."""
        state = SharedPrefixState.resumed(
            rows, kept, [len(more) for more in tokens], self.geometry.windows, self.device
        )
        return self.extend(state, tokens, chunk_tokens), state

    @contextmanager
    def reference(self) -> Iterator[ModelAdapter]:
        """Gives the frozen copy, else the PEFT adapter "ref", else the base, and takes back what PEFT changed."""
        model, copied = self.model, self.reference_adapter
        refusal.when(not (copied or isinstance(model, PeftModel)), "beta/reference", kind=type(model).__name__)
        with nullcontext() if copied else as_reference(model):
            yield copied or self

    def recompute(self, enabled: bool) -> AbstractContextManager[None]:
        """Recomputes each block's activations in the backward pass of what is run inside, in any mode."""
        return recomputed(find_blocks(self.lm)) if enabled else nullcontext()

    @property
    def _reader(self) -> str | None:
        """The PEFT adapter that is active: a critic may be another one on the same base."""
        return str(self.model.active_adapter) if isinstance(self.model, PeftModel) else None

    def _note_heads(self, keys: Sequence[Tensor]) -> None:
        """Notes what the keys of a token take in 8 bits, in the widest layer."""
        self._key_bytes = max(part.shape[1] * (part.shape[3] + CACHE_SCALE_BYTES) for part in keys)

    def _movable(self) -> HostWeights:
        return host_weights_of(self.lm, None if self.reference_adapter is None else self.reference_adapter.lm)

    def _head(self) -> LinearHead | LogitsHead:
        bias_1V = getattr(self.lm, "final_logits_bias", None)
        return head_of(self.lm.get_output_embeddings(), self.path.logit_map, None if bias_1V is None else bias_1V[0])

    def _reading(self, state: SharedPrefixState, counts: Sequence[int] | None = None) -> Reading:
        sources = SourceMarks(self._cross_layers, self.device) if self._cross_layers else None
        return Reading(state, SharedPrefixCache(reads_prompts=False, in_8_bits=self.in_8_bits), counts, sources=sources)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        """Returns logits (B, V) of hidden states, as scoring does."""
        logits_BV = naive_logits(TokenDistribution(hidden_BD, torch.empty(0, dtype=torch.int64), (), self._head()))
        claim(Component.LOGITS, [logits_BV])
        return logits_BV


def language_model_of(model: nn.Module) -> Any:
    """Returns the transformers model inside a model, LoRA layers in place."""
    if isinstance(model, PeftModel):
        for config in model.peft_config.values():
            refuse_peft_method(config)
        model = model.get_base_model()
    return model


def is_encoder_decoder(model: Any) -> bool:
    """Says whether an encoder reads the prompts, by a model's config."""
    return bool(getattr(getattr(model, "config", model), "is_encoder_decoder", False))


def refuse_peft_method(config: Any) -> None:
    """Refuses PEFT methods that add to the sequence, or whose layers need to be told of it by the wrapper's forward."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    refusal.when(config.is_prompt_learning or config.is_adaption_prompt, "peft_config/prompt", kind=kind)
    for name in ("alora_invocation_tokens", "arrow_config", "n_tasks"):
        refusal.when(getattr(config, name, None) is not None, "peft_config/told", kind=kind, name=name)


def _switch_off_checkpointing(lm: nn.Module) -> None:
    """Takes transformers' checkpointing back, so that blocks are not recomputed twice in train mode."""
    switched = [module for module in lm.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    if switched:
        logger.info("The model's own gradient checkpointing is switched off; the plan decides what is recomputed.")


def _keep_gradient_of_4bit_layers(lm: nn.Module) -> None:
    """Stops bitsandbytes from packing 4-bit weights for a CPU in eval mode, which silently cuts off gradients."""
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                module.state_dict()  # writing the weight out unpacks it in place


@dataclass(frozen=True)
class LogitMap:
    """What a model does to the output of its head: ``cap · tanh(scale · z / cap)``."""

    scale: float = 1.0  # factor on the logits
    soft_cap: float | None = None  # bound of the logits, None for none

    def __call__(self, logits_MV: Tensor) -> Tensor:
        """Applies the map, in float32 at least if it does anything."""
        if self.scale == 1.0 and self.soft_cap is None:
            return logits_MV
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) * self.scale
        return logits_MV if self.soft_cap is None else torch.tanh(logits_MV / self.soft_cap) * self.soft_cap


@dataclass(frozen=True)
class ModuleHead:
    """A head that is more than one linear map (LoRA, quantised, hooked): the module itself, then the model's map."""

    module: nn.Module  # maps hidden states (M, D) to (M, V)
    logit_map: LogitMap  # what the model does afterwards
    bias_V: Tensor | None = None  # (V,) that the model adds to the module's output, or None

    def __call__(self, hidden_MD: Tensor) -> Tensor:
        """Returns logits (M, V)."""
        logits_MV: Tensor = self.module(hidden_MD)
        return self.logit_map(logits_MV if self.bias_V is None else logits_MV + self.bias_V)


def given_logits(logits_MV: Tensor) -> Tensor:
    """The head of a distribution whose hidden states are already the model's logits."""
    return logits_MV


def logit_maps(config: Any) -> tuple[LogitMap, ...]:
    """Guesses from a config what its model does to logits; the check at start picks the one that holds.

    Cohere multiplies by ``logit_scale``, Falcon-H1 by ``lm_head_multiplier``; Granite divides by ``logits_scaling``
    and HyperCLOVA X multiplies by it; T5 with a tied head multiplies by D**-0.5; Gemma caps at
    ``final_logit_softcapping``.
    """
    text = config.get_text_config(decoder=True)
    factor = _number(text, "logit_scale") * _number(text, "lm_head_multiplier")
    scaling = _number(text, "logits_scaling")
    scales = dict.fromkeys((factor / scaling, factor * scaling, 1.0))
    if getattr(config, "is_encoder_decoder", False):
        tied = text.hidden_size**-0.5
        scaled = getattr(config, "scale_decoder_outputs", config.model_type in ("umt5", "switch_transformers"))
        scales = dict.fromkeys((tied, 1.0) if scaled else (1.0, tied))
    caps = dict.fromkeys((getattr(text, "final_logit_softcapping", None) or None, None))
    return tuple(LogitMap(scale, cap) for cap in caps for scale in scales)


def head_of(module: nn.Module, logit_map: LogitMap, bias_V: Tensor | None = None) -> LinearHead | ModuleHead:
    """Describes an output head as it is now (PEFT's adapters on or off)."""
    linear = _active(module)
    if type(linear) is nn.Linear and not is_hooked(module) and not is_hooked(linear):
        both = linear.bias if bias_V is None else bias_V if linear.bias is None else linear.bias + bias_V
        return LinearHead(linear.weight, both, logit_map.scale, logit_map.soft_cap)
    return ModuleHead(module, logit_map, bias_V)


def padding_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Returns which slots of rows padded on the right hold their tokens, (B, width) int64."""
    return (torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]).long()


def predicting_states(hidden_BND: Tensor, firsts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Returns hidden states (M, D) that predict completion tokens: of each row so many, from a first place on."""
    starts = [row * hidden_BND.shape[1] + first for row, first in enumerate(firsts)]
    places = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return hidden_BND.flatten(0, 1).index_select(0, torch.cat(places).to(hidden_BND.device))


def naive_logits(distribution: TokenDistribution) -> Tensor:
    """Returns all logits of a distribution, as the check at start compares them: the naive form of what `ops` does."""
    head, hidden_MD = distribution.head, distribution.hidden_MD
    if not isinstance(head, LinearHead):
        return head(hidden_MD)
    dtype = torch.promote_types(hidden_MD.dtype, head.weight_VD.dtype)
    bias_V = None if head.bias_V is None else head.bias_V.to(dtype)
    logits_MV = functional.linear(hidden_MD.to(dtype), head.weight_VD.to(dtype), bias_V)
    return LogitMap(head.scale, head.soft_cap)(logits_MV)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) and value else 1.0


def _active(module: Any) -> Any:
    """Looks through PEFT's wrapper of a fully trained module."""
    if not hasattr(module, "modules_to_save") or not hasattr(module, "original_module"):
        return module
    trained = [name for name in module.active_adapters if name in module.modules_to_save]
    if module.disable_adapters or not trained:
        return module.original_module
    return module.modules_to_save[trained[0]]
