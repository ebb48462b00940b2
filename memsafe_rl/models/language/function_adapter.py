"""An adapter made of two functions of a network: its hidden states, and its head.

Axes: ``B`` rows, ``L`` tokens of a row, ``M`` completion tokens laid end to end, ``D`` hidden width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memsafe_rl.accounting import autocast_bytes, claim
from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import Choose, ModelAdapter
from memsafe_rl.models.geometry import weight_bytes
from memsafe_rl.models.language.base import LogitMap, head_of, naive_logits, predicting_states
from memsafe_rl.models.module_state import as_reference, replaced
from memsafe_rl.ops.registry import wrong_answer
from memsafe_rl.types import Component, ModelGeometry, TokenDistribution, Trajectory


class FunctionAdapter(ModelAdapter):
    """A causal network of any kind behind the `ModelAdapter` protocol; it keeps no cache.

    Every token drawn reads its row again, so that rollouts take time quadratic in their length; an adapter with a
    cache of its own implements `ModelAdapter` instead. Functions get the network without PEFT around it.

    Args:
        model: the network that is trained.
        hidden_states: gives hidden states (B, L, D) of token ids (B, L) int64, padded on the right.
        head: gives the linear layer that makes logits of them, under LoRA too.
        pad_token_id: fills rows up.
        reference_model: a frozen copy; None where there is none, or PEFT is switched off.
        layers: repeated blocks, for estimates of bytes.
        max_positions: longest sequence the network accepts, in tokens; None if unbounded.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden_states: Callable[[Any, Tensor], Tensor],
        head: Callable[[Any], nn.Module],
        *,
        pad_token_id: int,
        reference_model: nn.Module | None = None,
        layers: int = 1,
        max_positions: int | None = None,
    ) -> None:
        self.model = model
        self._inner = model.get_base_model() if isinstance(model, PeftModel) else model
        self._hidden_states, self._head, self._recomputes = hidden_states, head, False
        self._pad_token_id, self._layers, self._max_positions = pad_token_id, layers, max_positions
        self._reference: FunctionAdapter | None = None
        if reference_model is not None:
            self._reference = FunctionAdapter(reference_model, hidden_states, head, pad_token_id=pad_token_id)

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return next(self.model.parameters()).device

    @property
    def geometry(self) -> ModelGeometry:
        """Sizes from which bytes are counted."""
        width, dtype = self.value_inputs
        return ModelGeometry(
            layers=self._layers,
            hidden_size=width,
            intermediate_size=4 * width,
            heads=1,
            kv_heads=1,
            head_dim=width,
            vocab_size=int(self._layer.out_features),
            max_positions=self._max_positions,
            windows=(0,) * self._layers,
            parameter_bytes=weight_bytes(self.model, *(() if self._reference is None else (self._reference.model,))),
            trainable_bytes=sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad),
            compute_bytes=autocast_bytes(self.device) or dtype.itemsize,
            cache_bytes=dtype.itemsize,
            head_trainable=any(weight.requires_grad for weight in self._layer.parameters()),
        )

    def distribution(
        self,
        trajectory: Trajectory,
        rows: Sequence[int],
        columns: Sequence[int] | None = None,  # noqa: ARG002
        *,
        packed: bool = False,  # noqa: ARG002
    ) -> TokenDistribution:
        """Runs the network over stored rows, up to its output head; see `ScoringAdapter.distribution`."""
        prompts, lengths = trajectory.condition_lengths(rows), trajectory.action_lengths(rows)
        ids_BL = trajectory.token_rows(rows, self._pad_token_id, self.device)
        hidden_MD = predicting_states(self._states(ids_BL), [prompt - 1 for prompt in prompts], lengths)
        tokens_M = trajectory.actions.take(rows).flat.to(self.device)
        return TokenDistribution(hidden_MD, tokens_M, lengths, head_of(self._layer, LogitMap()))

    @contextmanager
    def reference(self) -> Iterator[FunctionAdapter]:
        """Gives the frozen copy, else this network with PEFT switched off."""
        with as_reference(self.model) if self._reference is None else nullcontext():
            yield self._reference or self

    def recompute(self, enabled: bool) -> AbstractContextManager[None]:
        """Recomputes the hidden states in the backward pass of what is run inside."""
        return replaced([(self, "_recomputes", enabled)])

    def decode_plainly(
        self,
        ids_BL: Tensor,
        choose: Choose,
        *,
        prompt_tokens: int,  # noqa: ARG002
        max_new_tokens: int,
        cached: bool,  # noqa: ARG002
    ) -> None:
        """Decodes rows of one length, until all have ended."""
        nothing, ended_B = torch.empty(0, dtype=torch.int64), torch.zeros(len(ids_BL), dtype=torch.bool)
        with torch.no_grad():
            for _ in range(max_new_tokens):
                hidden_BD = self._states(ids_BL)[:, -1]
                logits_BV = naive_logits(TokenDistribution(hidden_BD, nothing, (), head_of(self._layer, LogitMap())))
                claim(Component.LOGITS, [logits_BV])
                tokens_B, ends_B = choose(logits_BV.float())
                ended_B |= ends_B.cpu()
                if bool(ended_B.all()):
                    return
                ids_BL = torch.cat([ids_BL, tokens_B[:, None]], 1)

    @property
    def value_inputs(self) -> tuple[int, torch.dtype]:
        """Width and type of the hidden states."""
        return int(self._layer.in_features), self._layer.weight.dtype

    def _cannot(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("this adapter has no cache; it says so by `decodes`")

    prefill = decode_step = extend = resume = _cannot

    @property
    def _layer(self) -> Any:
        layer = self._head(self._inner)
        refusal.when(not hasattr(layer, "in_features"), "states/head", kind=type(layer).__name__)
        return layer

    def _states(self, ids_BL: Tensor) -> Tensor:
        run, learns = self._hidden_states, torch.is_grad_enabled()
        if self._recomputes and learns:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=self._inner.training)
        states_BLD, wanted = run(self._inner, ids_BL), (*ids_BL.shape, self.value_inputs[0])
        if not isinstance(states_BLD, Tensor) or states_BLD.shape != wanted:
            raise wrong_answer("hidden_states", states_BLD, [wanted], "a hidden state for each token")
        if learns and not states_BLD.requires_grad:
            beside = {id(weight) for weight in self._layer.parameters()}
            cut = any(weight.requires_grad and id(weight) not in beside for weight in self.model.parameters())
            refusal.when(cut, "states/gradient", kind=type(self._inner).__name__)
        return states_BLD
