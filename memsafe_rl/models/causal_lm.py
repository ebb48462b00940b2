"""Any transformers causal LM, plain or under PEFT, as the loops use it.

Axes: ``B`` rows, ``P`` prompts, ``L`` tokens of a padded row, ``M`` completion tokens laid end to end, ``D`` hidden
width, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache

from memsafe_rl.accounting import claim
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.models.adapter import DecodeState, ModelAdapter
from memsafe_rl.models.blocks import find_blocks, recomputed
from memsafe_rl.models.cache import CausalDecodeState, growing_cache, is_trimmable, transit_cache
from memsafe_rl.models.geometry import autocast_bytes, read_geometry
from memsafe_rl.models.heads import LogitMap, given_logits, head_of, logit_maps, naive_logits
from memsafe_rl.models.packed_attention import attending, attention_configs
from memsafe_rl.models.packing import pack_rows
from memsafe_rl.types import Component, LinearHead, LogitsHead, ModelGeometry, Ragged, TokenDistribution, Trajectory

logger = logging.getLogger(__name__)

REFERENCE_ADAPTER = "ref"
"""Name of the PEFT adapter that holds the reference, where there is one."""


class Route(Enum):
    """How stored rows go through the network."""

    LEAN = "trunk without a mask, then the head on completion tokens"
    MASKED = "trunk with a padding mask, then the head on completion tokens"
    WHOLE = "the whole model, row by row, with all its logits"


@dataclass
class ScoringPath:
    """How an adapter scores; decided once, by `check_head`.

    Args:
        route: how rows go through the network.
        logit_map: what the model does to its head's output.
    """

    route: Route
    logit_map: LogitMap


class CausalLMAdapter:
    """A causal LM of transformers behind the `ModelAdapter` protocol."""

    time_separable = False

    def __init__(self, model: nn.Module, *, pad_token_id: int, reference_model: nn.Module | None = None) -> None:
        """Wraps a model; of it, only transformers' checkpointing and bitsandbytes' packing on CPUs are switched off.

        Args:
            model: a transformers causal LM, or a `PeftModel` around one.
            pad_token_id: fills padding.
            reference_model: frozen copy that answers for the reference; None where a PEFT adapter is switched instead.

        Raises:
            ConfigError: PEFT's prompt learning, or an encoder-decoder.
        """
        self.model = model
        self.pad_token_id = pad_token_id
        self._lm = causal_lm_of(model)
        self._accepted = frozenset(inspect.signature(self._lm.forward).parameters)
        self.path = ScoringPath(_first_route(self._lm), logit_maps(self._lm.config)[0])
        self.packs_prompts = False
        self.slot_bytes: int | None = None
        self._geometries: dict[tuple[int | None, int | None], ModelGeometry] = {}
        self.reference_adapter: CausalLMAdapter | None = None
        if reference_model is not None:
            self.reference_adapter = CausalLMAdapter(reference_model, pad_token_id=pad_token_id)
        _switch_off_checkpointing(self._lm)
        _keep_gradient_of_4bit_layers(self._lm)
        _warn_of_rope_that_reads_lengths(self._lm.config)

    @property
    def device(self) -> torch.device:
        """Where the network takes its tokens."""
        return cast(torch.device, self._lm.get_input_embeddings().weight.device)

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted; a reference copy's weights are part of ``parameter_bytes``.

        Read once, for it walks every module: whoever freezes weights later makes a new adapter.
        """
        key = self.slot_bytes, autocast_bytes(self.device)
        if key not in self._geometries:
            copies = () if self.reference_adapter is None else (self.reference_adapter.model,)
            self._geometries[key] = read_geometry(self._lm, copies=copies, slot_bytes=self.slot_bytes)
        return self._geometries[key]

    def distribution(
        self, trajectory: Trajectory, rows: Sequence[int], columns: slice | None = None, *, packed: bool = False
    ) -> TokenDistribution:
        """Runs the network over stored rows, up to its output head.

        Rows are padded on the right, where no completion token can see the padding, or packed, without any padding
        and with one copy of a prompt for all its completions. No tensor value is read.

        Args:
            trajectory: the store.
            rows: indices of the rows wanted.
            columns: must be None; tokens of a row cannot be scored apart.
            packed: whether to pack the rows, which changes nothing beyond rounding.

        Returns:
            The distribution at every completion token of these rows; carries a graph if gradients are enabled.

        Raises:
            ConfigError: columns are given, or rows are to be packed by a network that cannot.
            DataError: a row has an empty prompt, so that nothing predicts its first token.
        """
        if columns is not None:
            raise ConfigError(f"columns={columns}: a causal LM scores whole rows; leave columns out.")
        if packed and not self.packs_prompts:
            raise ConfigError(
                f"packed=True, but {type(self._lm).__name__} gives packed rows other log-probs, or check_head has not "
                "been run. Leave packed out."
            )
        prompts, lengths = trajectory.condition_lengths(rows), trajectory.action_lengths(rows)
        for row, prompt in zip(rows, prompts, strict=True):
            if prompt < 1:
                raise DataError(f"Row {row} has a prompt of 0 tokens; give it at least one, such as the bos token.")
        if packed:
            return self._packed_distribution(trajectory, rows)
        ids_BL = trajectory.token_rows(rows, self.pad_token_id, self.device)
        tokens_M = trajectory.actions.take(rows).flat.to(self.device)
        if self.path.route is Route.WHOLE:
            return TokenDistribution(_row_logits(self._lm, ids_BL, prompts, lengths), tokens_M, lengths, given_logits)
        hidden_BLD = self._trunk(ids_BL, [prompt + length for prompt, length in zip(prompts, lengths, strict=True)])
        places_M = _predicting_places(prompts, lengths, width=ids_BL.shape[1]).to(hidden_BLD.device)
        return TokenDistribution(hidden_BLD.flatten(0, 1).index_select(0, places_M), tokens_M, lengths, self._head())

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, CausalDecodeState]:
        """Reads prompts, padded on the left, and fills a cache.

        Args:
            prompts: P tensors (length,) int64, on any device, none empty.

        Returns:
            Logits of the next token (P, V), and the cache of P rows.
        """
        width = max(int(prompt.shape[0]) for prompt in prompts)
        pads = tuple(width - int(prompt.shape[0]) for prompt in prompts)
        ids_PL = torch.full((len(prompts), width), self.pad_token_id)
        for row, (pad, prompt) in enumerate(zip(pads, prompts, strict=True)):
            ids_PL[row, pad:] = prompt
        cache = growing_cache(self._lm.config)
        pads_P = torch.tensor(pads, device=self.device)
        state = CausalDecodeState(cache, pads_P, pads, width=0, trimmable=is_trimmable(cache))
        return self._next_logits(state, ids_PL.to(self.device)), state

    @torch.no_grad()
    def select(self, state: DecodeState, rows: Tensor) -> CausalDecodeState:
        """Keeps, drops, repeats or reorders rows of a cache; padding that all rows wanted share is cut off.

        Args:
            state: a cache; must not be used afterwards.
            rows: (R,) int64, indices of the rows wanted, with repeats; on the host or the device.

        Returns:
            A cache of R rows.
        """
        return cast(CausalDecodeState, state).select(rows)

    @torch.no_grad()
    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row of a cache, in place.

        Args:
            state: a cache of B rows.
            tokens_B: (B,) int64.

        Returns:
            Logits of the next token (B, V).
        """
        return self._next_logits(cast(CausalDecodeState, state), tokens_B.to(self.device)[:, None])

    @torch.no_grad()
    def stretch(self, state: DecodeState, slots: int) -> bool:
        """Widens a cache in place as if so many tokens had been read, without reading them; to measure, not to decode.

        Args:
            state: a cache of rows that have been read.
            slots: slots of every row afterwards.

        Returns:
            Whether it could; False where a layer is neither plain nor windowed attention.
        """
        return cast(CausalDecodeState, state).stretch(slots)

    @contextmanager
    def reference(self) -> Iterator[ModelAdapter]:
        """Gives the reference: the frozen copy, else the PEFT adapter named "ref", else the base with adapters off.

        What PEFT changes on the way (active adapter, ``requires_grad``) is as before afterwards, after an error too.

        Yields:
            An adapter of the reference; its distributions must be used inside.

        Raises:
            ConfigError: there is no reference, or PEFT trains biases of the base, which cannot be switched off.
        """
        if self.reference_adapter is not None:
            yield self.reference_adapter
            return
        if not isinstance(self.model, PeftModel):
            raise ConfigError(
                f"{type(self.model).__name__} has neither a PEFT adapter nor a frozen copy, so there is no reference. "
                "Pass reference_model, or set beta=0."
            )
        refuse_trained_bias(self.model.peft_config.values())
        flags = [(weight, weight.requires_grad) for weight in self.model.parameters()]
        try:
            with _reference_weights(self.model):
                yield self
        finally:
            for weight, requires_grad in flags:
                weight.requires_grad_(requires_grad)

    def recompute(self, enabled: bool) -> AbstractContextManager[None]:
        """Recomputes each block's activations in the backward pass of what is run inside, in any mode.

        Args:
            enabled: False changes nothing.

        Returns:
            A context; only the forward must run inside.
        """
        return recomputed(find_blocks(self._lm)) if enabled else nullcontext()

    def _head(self) -> LinearHead | LogitsHead:
        return head_of(self._lm.get_output_embeddings(), self.path.logit_map)

    def _trunk(self, ids_BL: Tensor, lengths: Sequence[int]) -> Tensor:
        """Gives hidden states (B, L, D) of rows padded on the right."""
        trunk = self._lm.base_model
        if self.path.route is Route.LEAN:
            output = trunk(input_ids=ids_BL, past_key_values=transit_cache(), use_cache=False)
        else:
            ends_B1 = torch.tensor(lengths, device=ids_BL.device)[:, None]
            mask_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None] < ends_B1
            output = trunk(input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False)
        return cast(Tensor, output[0])

    def _packed_distribution(self, trajectory: Trajectory, rows: Sequence[int]) -> TokenDistribution:
        """Runs the trunk over rows laid out behind one copy of each prompt."""
        packed = pack_rows(trajectory, rows, self.geometry.windows, self.device)
        tokens_M = trajectory.actions.take(rows).flat.to(self.device)
        with attending(attention_configs(self._lm), packed.layout):
            output = self._lm.base_model(input_ids=packed.ids, position_ids=packed.positions, use_cache=False)
        hidden_ND = output[0][0]
        places_M = packed.places.to(hidden_ND.device)
        lengths = trajectory.action_lengths(rows)
        return TokenDistribution(hidden_ND.index_select(0, places_M), tokens_M, lengths, self._head())

    def _next_logits(self, state: CausalDecodeState, ids_BL: Tensor) -> Tensor:
        """Reads L more tokens of every row into the cache and gives logits after the last one."""
        width = state.width + ids_BL.shape[1]
        inputs: dict[str, Any] = {"input_ids": ids_BL, "past_key_values": state.cache, "use_cache": True}
        if "logits_to_keep" in self._accepted:
            inputs["logits_to_keep"] = 1
        if state.padded:
            slots_1L = torch.arange(width, device=ids_BL.device)[None]
            inputs["attention_mask"] = (slots_1L >= state.pads_B[:, None]).long()
            if "position_ids" in self._accepted:
                inputs["position_ids"] = (slots_1L[:, state.width :] - state.pads_B[:, None]).clamp_min(0)
        logits_BLV = self._lm(**inputs).logits
        claim(Component.LOGITS, [logits_BLV])
        if not state.trimmable:
            claim(Component.KV_CACHE, state.tensors())  # states of recurrent layers, which no update marks
        state.width = width
        return cast(Tensor, logits_BLV[:, -1])


def check_head(adapter: CausalLMAdapter) -> None:
    """Compares an adapter's own paths with its model's logits, and takes a plain path where scoring differs.

    Two short rows of unequal length go both ways. The first scoring path that agrees is kept: without a mask, with a
    mask, each with every reading of the config's logit scale; else the whole model row by row. Anything but the first
    is said in one warning. A frozen reference copy takes the same path. Sampling has no other path: it must agree
    (float64 excepted, where transformers' own padding may fail); the bytes of its cache go into the geometry.

    Args:
        adapter: the adapter; its ``path`` and ``slot_bytes`` may change.

    Raises:
        ConfigError: prompts padded to one length, or a step on their cache, give other logits than the model alone.
    """
    modes = [(module, module.training) for module in adapter.model.modules()]
    adapter.model.eval()
    try:
        with torch.no_grad():
            trajectory = _probe(adapter)
            prompts, lengths = trajectory.condition_lengths(range(2)), trajectory.action_lengths(range(2))
            ids_BL = trajectory.token_rows(range(2), adapter.pad_token_id, adapter.device)
            wanted_MV = _row_logits(adapter.model, ids_BL, prompts, lengths)
            _settle_path(adapter, trajectory, wanted_MV)
            _check_sampling(adapter, trajectory, wanted_MV)
            _settle_packing(adapter)
    finally:
        for module, training in modes:
            module.training = training
    if adapter.reference_adapter is not None:
        adapter.reference_adapter.path = adapter.path
        adapter.reference_adapter.packs_prompts = adapter.packs_prompts


def causal_lm_of(model: nn.Module) -> Any:
    """Gives the transformers causal LM inside a model, LoRA layers in place.

    Args:
        model: a transformers model, or a `PeftModel` around one.

    Returns:
        The causal LM.

    Raises:
        ConfigError: PEFT's prompt learning or adaption prompt, or an encoder-decoder.
    """
    if isinstance(model, PeftModel):
        for config in model.peft_config.values():
            refuse_prompt_learning(config)
        model = model.get_base_model()
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder; only causal (decoder-only) models are supported yet."
        )
    return model


def refuse_prompt_learning(config: Any) -> None:
    """Refuses PEFT methods that add tokens or gates to the sequence instead of layers to the network.

    Args:
        config: a PEFT config.

    Raises:
        ConfigError: the method is one of these.
    """
    if config.is_prompt_learning or config.is_adaption_prompt:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ConfigError(
            f"peft_config is {kind}, which learns a prompt; rows would no longer be prompt plus completion. "
            "Use a method that adapts layers, such as LoraConfig."
        )


def refuse_trained_bias(configs: Any) -> None:
    """Refuses, where a reference is wanted, PEFT adapters that train the base's own biases.

    Args:
        configs: PEFT configs.

    Raises:
        ConfigError: a config has ``bias`` other than "none".
    """
    for config in configs:
        bias = getattr(config, "bias", "none")
        if bias not in ("none", False):
            raise ConfigError(
                f"peft_config.bias is {bias!r}: the base's biases are trained, so switching the adapter off does not "
                "give the reference. Set bias='none', or beta=0."
            )


@contextmanager
def _reference_weights(model: Any) -> Iterator[None]:
    if REFERENCE_ADAPTER not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    active = model.active_adapter
    model.set_adapter(REFERENCE_ADAPTER)
    try:
        yield
    finally:
        model.set_adapter(active)


def _switch_off_checkpointing(lm: nn.Module) -> None:
    """Takes transformers' checkpointing back, so that blocks are not recomputed twice in train mode."""
    switched = [module for module in lm.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    if switched:
        logger.info("The model's own gradient checkpointing is switched off; the plan decides what is recomputed.")


def _keep_gradient_of_4bit_layers(lm: nn.Module) -> None:
    """Stops bitsandbytes from packing 4-bit weights for inference on a CPU.

    On a CPU with bf16 instructions, a 4-bit layer in eval mode packs its weight for good at the first input without
    gradient, and from then on its output carries no graph: gradients of all adapters before it are silently lost.
    """
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                module.state_dict()  # writing the weight out unpacks it in place


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


def _settle_path(adapter: CausalLMAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> None:
    """Keeps the first scoring path that gives the logits wanted, and says so if it is not the leanest."""
    first, reasons = adapter.path, []
    for path in _candidate_paths(adapter):
        adapter.path = path
        reason = _disagreement(adapter, trajectory, wanted_MV)
        if reason is None:
            break
        reasons.append(f"{path.route.value}: {reason}")
    if adapter.path != first:
        logger.warning(
            "%s computes its logits in a way of its own; log-probs go through %r (logit scale %g, soft-cap %s). %s",
            type(adapter._lm).__name__,
            adapter.path.route.value,
            adapter.path.logit_map.scale,
            adapter.path.logit_map.soft_cap,
            "; ".join(dict.fromkeys(reasons)),
        )


def _settle_packing(adapter: CausalLMAdapter) -> None:
    """Keeps the packed route if it gives the logits of rows alone, and says so if it does not."""
    trajectory = _shared_probe(adapter)
    rows = range(len(trajectory))
    prompts, lengths = trajectory.condition_lengths(rows), trajectory.action_lengths(rows)
    ids_BL = trajectory.token_rows(rows, adapter.pad_token_id, adapter.device)
    wanted_MV = _row_logits(adapter.model, ids_BL, prompts, lengths)
    reason = _packing_disagreement(adapter, trajectory, wanted_MV)
    adapter.packs_prompts = reason is None
    if reason is not None:
        logger.info("%s learns from every row with its own copy of the prompt: %s.", type(adapter._lm).__name__, reason)


def _packing_disagreement(adapter: CausalLMAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> str | None:
    """Says why rows cannot share a prompt, or None; out-of-memory errors pass through."""
    if adapter.path.route is not Route.LEAN:
        return f"{adapter.path.route.value} has no packed form"
    if "position_ids" not in inspect.signature(adapter._lm.base_model.forward).parameters:
        return "positions cannot be given"
    try:
        return _difference(lambda: adapter._packed_distribution(trajectory, range(len(trajectory))), adapter, wanted_MV)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # how a kernel or a shape complains
        return f"{type(error).__name__}: {error}"


def _check_sampling(adapter: CausalLMAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> None:
    """Reads both prompts together and takes one step; transformers pads on the left, which not every model masks."""
    tokens = [row[0] for row in trajectory.actions.rows()]
    firsts = torch.tensor([0, trajectory.actions.lengths[0]], device=wanted_MV.device)
    logits_PV, state = adapter.prefill(trajectory.conditions.rows())
    step_PV = adapter.decode_step(state, torch.stack(tokens))
    if all(window is None or window > state.width for window in adapter.geometry.windows):
        adapter.slot_bytes = state.nbytes() // (state.rows * state.width)
    if wanted_MV.dtype is torch.float64:
        return  # transformers' eager attention makes NaN of padding there, as its softmax is float32
    relative = _relative_difference(torch.cat([logits_PV, step_PV]), wanted_MV[torch.cat([firsts, firsts + 1])])
    tolerance = max(1e-3, 2 * _tolerance(adapter, wanted_MV.device))
    if not relative <= tolerance:
        raise ConfigError(
            f"{type(adapter._lm).__name__} gives prompts that are decoded together other logits than alone: they "
            f"differ by {relative:.1e} of the largest ({tolerance:.0e} allowed). It probably does not mask padding on "
            "the left (recurrent layers often do not); use a model that does."
        )


def _candidate_paths(adapter: CausalLMAdapter) -> Iterator[ScoringPath]:
    maps = logit_maps(adapter._lm.config)
    first = _first_route(adapter._lm)
    routes = {Route.LEAN: (Route.LEAN, Route.MASKED), Route.MASKED: (Route.MASKED,), Route.WHOLE: ()}[first]
    yield from (ScoringPath(route, logit_map) for route in routes for logit_map in maps)
    yield ScoringPath(Route.WHOLE, maps[0])


def _disagreement(adapter: CausalLMAdapter, trajectory: Trajectory, wanted_MV: Tensor) -> str | None:
    """Says how an adapter's path fails, or None; out-of-memory errors pass through."""
    if adapter.path.route is Route.WHOLE:
        return None
    return _difference(lambda: adapter.distribution(trajectory, range(len(trajectory))), adapter, wanted_MV)


def _difference(route: Callable[[], TokenDistribution], adapter: CausalLMAdapter, wanted_MV: Tensor) -> str | None:
    """Says how a route's logits differ from those wanted, or None."""
    try:
        logits_MV = naive_logits(route())
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    if logits_MV.shape != wanted_MV.shape:
        return f"logits of shape {tuple(logits_MV.shape)} instead of {tuple(wanted_MV.shape)}"
    relative, tolerance = _relative_difference(logits_MV, wanted_MV), _tolerance(adapter, wanted_MV.device)
    return (
        None if relative <= tolerance else f"logits differ by {relative:.1e} of the largest ({tolerance:.0e} allowed)"
    )


def _relative_difference(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def _tolerance(adapter: CausalLMAdapter, device: torch.device) -> float:
    """Relative to the largest logit, what two orders of the same sums may differ by."""
    if getattr(adapter._lm, "is_quantized", False):
        return 5e-2
    dtype = adapter._lm.get_input_embeddings().weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 5e-2)


def _probe(adapter: CausalLMAdapter) -> Trajectory:
    """Makes two rows of 5 + 7 and 2 + 4 tokens, of ids spread over the vocabulary, on the host."""
    vocabulary = adapter._lm.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([(17 + 61 * place) % vocabulary for place in range(18)])
    actions = Ragged(ids[7:], (7, 4))
    return Trajectory(
        conditions=Ragged(ids[:7], (5, 2)),
        condition_of_row=(0, 1),
        actions=actions,
        loss_mask=Ragged(torch.ones(11), actions.lengths),
        sampling_logprobs=None,
        advantages=torch.zeros(2),
        group_of_row=(0, 1),
        finished=(True, True),
    )


def _shared_probe(adapter: CausalLMAdapter) -> Trajectory:
    """Makes five rows of two prompts, those of a prompt apart from each other and unlike in length."""
    vocabulary = adapter._lm.get_input_embeddings().weight.shape[0]
    lengths = (4, 3, 7, 1, 5)
    ids = torch.tensor([(31 + 59 * place) % vocabulary for place in range(9 + sum(lengths))])
    actions = Ragged(ids[9:], lengths)
    return Trajectory(
        conditions=Ragged(ids[:9], (3, 6)),
        condition_of_row=(0, 1, 0, 1, 0),
        actions=actions,
        loss_mask=Ragged(torch.ones(sum(lengths)), lengths),
        sampling_logprobs=None,
        advantages=torch.zeros(5),
        group_of_row=(0, 1, 0, 1, 0),
        finished=(True,) * 5,
    )


def _row_logits(model: Any, ids_BL: Tensor, prompts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Gives a model's own logits (M, V) at completion tokens; only one row's (L, V) exist beside them.

    A row goes without its padding: under a window, padding may have nothing to attend to and become NaN.
    """
    pieces = []
    for ids_L, prompt, length in zip(ids_BL, prompts, lengths, strict=True):
        ids_1L = ids_L[None, : prompt + length]
        logits_1LV = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False).logits
        claim(Component.LOGITS, [logits_1LV])
        pieces.append(logits_1LV[0, prompt - 1 : prompt + length - 1])
    return torch.cat(pieces)


def _predicting_places(prompts: Sequence[int], lengths: Sequence[int], *, width: int) -> Tensor:
    """Indices (M,), into rows laid end to end, of the positions that predict completion tokens."""
    starts = [row * width + prompt - 1 for row, prompt in enumerate(prompts)]
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
