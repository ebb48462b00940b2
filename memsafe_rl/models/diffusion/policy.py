"""Any denoiser with a scheduler as a policy: what a trainer takes as ``model``.

A chain of S steps leads from noise to a sample; each step is a Gaussian whose mean the denoiser gives and whose
deviation the scheduler. A step needs nothing of the others, so that (row, column) pairs can be run in any company.

Axes: ``B`` rows, ``S`` denoising steps, ``M`` entries, that is (row, column) pairs laid end to end, ``L`` vectors of a
condition, ``D`` their width; ``...`` stands for the axes of a state.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn

from memsafe_rl.accounting import host_memory
from memsafe_rl.models import refusal, unusable
from memsafe_rl.models.diffusion.schedulers import DenoisingScheduler, as_scheduler

EMBEDDING_CACHE_BYTES = 256 * 2**20
"""Host memory that embedded prompts may take; the least recently used ones are embedded again."""
_PLAIN = (type(None), str, bytes, int, float, bool)
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Condition:
    """What a denoiser is told besides states and timesteps.

    Args:
        embedding_MLD: (M, L, D), the embedded prompts, filled up with 0 to the longest there can be.
        mask_ML: (M, L) bool, True where a vector is part of the prompt.
        elements: (M, ...), broadcastable to the states, 1 where an element counts; None where all do.
    """

    embedding_MLD: Tensor
    mask_ML: Tensor
    elements: Tensor | None = None


@dataclass(frozen=True)
class TrainedSteps:
    """Which steps of a chain are trained on; steps without noise never are.

    Of the steps with noise, those in the window, and of these the fraction. All of a rollout's rows have the same
    steps, so that no forward pass is wasted.

    Args:
        fraction: share of the steps, rounded down to at least one: the noisiest, or at random.
        random: take the fraction at random, others in every rollout (DanceGRPO); False: the first steps (Flow-GRPO).
        window: first step and the step after the last one (MixGRPO); None for all.
    """

    fraction: float = 1.0
    random: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        refusal.when(not _is_number(self.fraction) or not 0 < self.fraction <= 1, "fraction", fraction=self.fraction)
        pair = self.window if isinstance(self.window, (tuple, list)) else ()
        if self.window is not None and (len(pair) != 2 or not all(_is_whole(end) and end >= 0 for end in pair)):
            raise refusal("window", window=self.window)

    def candidates(self, stds: Sequence[float]) -> tuple[int, ...]:
        """Returns the columns, ascending, that the fraction is taken of, by their deviations; refuses to give none."""
        first, end = (0, len(stds)) if self.window is None else self.window
        found = tuple(column for column in range(first, min(end, len(stds))) if stds[column] > 0)
        refusal.when(not found, "window/noise", steps=len(stds), first=first, end=end)
        return found

    def count(self, candidates: int) -> int:
        """Returns how many of so many candidates are trained on, at least 1."""
        return max(1, int(self.fraction * candidates + 1e-9))

    def learnable(self, stds: Sequence[float]) -> tuple[int, ...]:
        """Returns the columns that a rollout may train on: those that a random share is drawn from, else the share."""
        candidates = self.candidates(stds)
        return candidates if self.random else candidates[: self.count(len(candidates))]


class DiffusionPolicy(nn.Module):
    """A denoiser, how it is sampled, and what it is conditioned on: what a trainer takes as ``model``.

    Args:
        denoiser: any module called ``denoiser(x, t, condition)``: (M, ...) states, (M,) timesteps as the scheduler
            tells them, a `Condition`; gives what the scheduler wants to know of every state, (M, ...). It is trained,
            or, under PEFT, its adapter.
        scheduler: a `DenoisingScheduler`, or a scheduler object of diffusers.
        sample_shape: axes of a state.
        condition_shape: longest L, and D, of a prompt's embedding.
        num_inference_steps: S, steps of a chain.
        guidance_scale: w of classifier-free guidance, ``f(null) + w (f(prompt) - f(null))`` (Ho and Salimans 2022,
            arXiv:2207.12598, whose w is this one minus 1); 1 for none. It doubles the rows that the denoiser sees.
        guidance_gradient: whether the unconditional half has gradient too; False spares its activations (Flow-GRPO).
        null_condition: (L, D), the prompt of the unconditional half; None for zeros.
        embed: gives a prompt's embedding (L, D); frozen, called once per unique prompt, where and as the user put it,
            and neither trained nor saved. None where prompts are numbers already.
        elements: gives from a prompt's embedding (L, D) what counts of a state, broadcastable to `sample_shape`, such
            as the frames of a motion; None where everything does. Elements that do not count are in no log-prob.
        decode: gives what reward functions see of a sample (...); None for the sample itself.
        reduce: "mean" or "sum" over a state's elements, for log-probs and KL. With "mean" a ratio stays near 1
            whatever the size of a state, and clip ranges are about 1e-4.
        state_dtype: type in which states are stored, and to which they are rounded as they are drawn.
        shared_noise: whether all samples of a prompt begin with the same noise (DanceGRPO).
        trained_steps: which steps are trained on.

    Raises:
        ConfigError: a value cannot work.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        scheduler: DenoisingScheduler | Any,
        sample_shape: Sequence[int],
        *,
        condition_shape: tuple[int, int],
        num_inference_steps: int = 50,
        guidance_scale: float = 1.0,
        guidance_gradient: bool = True,
        null_condition: Tensor | None = None,
        embed: Callable[[Any], Tensor] | None = None,
        elements: Callable[[Tensor], Tensor] | None = None,
        decode: Callable[[Tensor], Any] | None = None,
        reduce: str = "mean",
        state_dtype: torch.dtype = torch.float32,
        shared_noise: bool = False,
        trained_steps: TrainedSteps | None = None,
    ) -> None:
        super().__init__()
        refusal.when(reduce not in ("mean", "sum"), "reduce", reduce=reduce)
        refusal.when(state_dtype not in _STATE_DTYPES, "state_dtype", state_dtype=state_dtype)
        refusal.when(not isinstance(denoiser, nn.Module), "denoiser/module", kind=type(denoiser).__name__)
        if not isinstance(trained_steps, (TrainedSteps, type(None))):
            raise refusal("trained_steps", trained_steps=trained_steps)
        if not _is_whole(num_inference_steps) or num_inference_steps < 1:
            raise refusal("num_inference_steps", num_inference_steps=num_inference_steps)
        refusal.when(not _is_number(guidance_scale), "guidance_scale", guidance_scale=guidance_scale)
        for name, flag in {"guidance_gradient": guidance_gradient, "shared_noise": shared_noise}.items():
            refusal.when(not isinstance(flag, bool), "flag", name=name, value=flag)
        for name, value in {"embed": embed, "elements": elements, "decode": decode}.items():
            refusal.when(value is not None and not callable(value), "function", name=name, kind=type(value).__name__)
        self.denoiser = denoiser
        self.scheduler = as_scheduler(scheduler)
        self.sample_shape = _as_shape("sample_shape", sample_shape, "one or more sizes, such as (3, 64, 64)")
        self.condition_shape = _as_shape("condition_shape", condition_shape, "(longest L, width D)", axes=2)
        self.num_inference_steps = num_inference_steps
        self.guidance_scale = guidance_scale
        self.guidance_gradient = guidance_gradient
        self.reduce = reduce
        self.state_dtype = state_dtype
        self.shared_noise = shared_noise
        self.trained_steps = trained_steps or TrainedSteps()
        self.elements = elements
        self._embed = (embed,)  # in a tuple, so that an encoder's weights are not taken for the policy's
        self._decode = (decode,)
        self.scheduler.set_timesteps(num_inference_steps)
        _check_laid_out(self.scheduler, num_inference_steps)
        self.stds: tuple[float, ...] = tuple(self.scheduler.stds.tolist())
        self.trained_steps.candidates(self.stds)
        null_LD = torch.zeros(self.condition_shape) if null_condition is None else null_condition
        self.null_condition: Tensor
        self.register_buffer("null_condition", self._checked(null_LD, "null_condition"), persistent=False)
        self._kept: dict[Hashable, Tensor] = {}

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        """Returns what the denoiser, guided, says of states.

        Args:
            x: (M, ...), states.
            timesteps: (M,), as the scheduler tells them.
            condition: what they are conditioned on.

        Returns:
            (M, ...).
        """
        return self.predict(self.denoiser, x, timesteps, condition)

    def predict(self, denoiser: nn.Module, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        """Returns what a denoiser, the policy's own or a frozen copy, says of states under this policy's guidance."""
        if self.guidance_scale == 1.0:
            return _answer(denoiser, x, timesteps, condition)
        null = self._null(condition)
        if self.guidance_gradient or not torch.is_grad_enabled():
            twice = torch.cat([timesteps, timesteps])
            prompted, free = _answer(denoiser, torch.cat([x, x]), twice, _joined(condition, null)).chunk(2)
        else:
            with torch.no_grad():
                free = _answer(denoiser, x, timesteps, null)
            # Autocast keeps weights that it has cast, and without gradient it has cast them without a graph.
            torch.clear_autocast_cache()
            prompted = _answer(denoiser, x, timesteps, condition)
        return free + self.guidance_scale * (prompted - free)

    def embed(self, prompts: Sequence[Any]) -> list[Tensor]:
        """Embeds prompts, each unique one once as long as the cache holds it.

        Prompts are compared by value where they are plain values, tensors, arrays, or lists, tuples and dictionaries
        of these. Other objects are known again within one call only.

        Args:
            prompts: whatever the policy's own ``embed`` takes; without one, numbers: D of them, or L lists of D.

        Returns:
            For each prompt (L, D) float32, on the host; the same tensor for equal prompts.

        Raises:
            DataError: an embedding is no tensor of finite numbers, or has another shape than `condition_shape` allows;
                or there is no ``embed``, and a prompt is no numbers; or ``elements`` gives no weights of which one
                counts.
        """
        held = list(prompts)  # so that no two of them ever have the same address
        others: dict[Hashable, Tensor] = {}
        return [self._embedded(prompt, others) for prompt in held]

    def decode(self, sample: Tensor) -> Any:
        """Returns what reward functions see of a sample.

        Args:
            sample: (...), the last state of a chain.

        Returns:
            What the policy's own ``decode`` gives of a copy of it in float32; without one, that copy.
        """
        own = self._decode[0]
        with host_memory():
            copied = sample.to(torch.float32, copy=True)
            return copied if own is None else own(copied)

    def count_elements(self, embeddings: Sequence[Tensor]) -> Tensor | None:
        """Marks what counts of states behind prompts (L, D) each: (M, ...), float32 on the host; None for all."""
        if self.elements is None:
            return None
        return torch.stack([self._counted(self.elements(embedding.cpu())) for embedding in embeddings])

    def _counted(self, mask: Tensor) -> Tensor:
        wanted = self.sample_shape
        if isinstance(mask, Tensor):
            mask = mask.reshape((1,) * (len(wanted) - mask.dim()) + tuple(mask.shape)).float()
            pairs = list(zip(mask.shape, wanted, strict=False))
            if mask.dim() == len(wanted) and all(have in (1, want) for have, want in pairs):
                return mask
        shown = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise unusable("elements/mask", shown=shown, wanted=wanted)

    def _embedded(self, prompt: Any, others: dict[Hashable, Tensor]) -> Tensor:
        """Returns (L, D) from the cache, or embeds; ``others`` holds objects that are compared by identity."""
        with host_memory():
            key = prompt_key(prompt)
        kept, key = (others, id(prompt)) if key is None else (self._kept, key)
        if key in kept:
            kept[key] = kept.pop(key)  # the least recently used come first
            return kept[key]
        own = self._embed[0]
        with torch.no_grad(), host_memory():
            found = _numbers(prompt) if own is None else own(prompt)
            name = f"the embedding of prompt {repr(prompt)[:80]}"
            embedding_LD = self._checked(found, name)
            if self.elements is not None:  # the synthetic embeddings of probes do not come here
                mask = self._counted(self.elements(embedding_LD))
                if not bool(mask.isfinite().all()) or bool((mask < 0).any()) or not bool((mask > 0).any()):
                    raise unusable("elements/numbers", least=float(mask.min()), most=float(mask.max()), name=name)
        kept[key] = embedding_LD
        while len(self._kept) > 1 and sum(held.nbytes for held in self._kept.values()) > EMBEDDING_CACHE_BYTES:
            del self._kept[next(iter(self._kept))]
        return embedding_LD

    def _checked(self, embedding: Any, name: str) -> Tensor:
        """Returns (L, D) float32 on the host, from (D,) too; a copy, since the caller may reuse its memory."""
        if not isinstance(embedding, Tensor) or embedding.is_complex():
            told = str(embedding.dtype) if isinstance(embedding, Tensor) else f"a {type(embedding).__name__}"
            raise unusable("condition/type", name=name, told=told, shape=self.condition_shape)
        longest, width = self.condition_shape
        embedding_LD = embedding[None] if embedding.dim() == 1 else embedding
        if embedding_LD.dim() != 2 or not 1 <= embedding_LD.shape[0] <= longest or embedding_LD.shape[1] != width:
            raise unusable("condition/shape", name=name, shape=tuple(embedding.shape), longest=longest, width=width)
        copied_LD = embedding_LD.detach().to("cpu", torch.float32, copy=True).contiguous()
        unusable.when(not bool(copied_LD.isfinite().all()), "condition/finite", name=name)
        return copied_LD

    def _null(self, condition: Condition) -> Condition:
        like_MLD = condition.embedding_MLD
        null_LD = self.null_condition.to(device=like_MLD.device, dtype=like_MLD.dtype)
        embedding_MLD = torch.zeros_like(like_MLD)
        embedding_MLD[:, : len(null_LD)] = null_LD
        mask_ML = torch.arange(like_MLD.shape[1], device=like_MLD.device) < len(null_LD)
        return replace(condition, embedding_MLD=embedding_MLD, mask_ML=mask_ML.expand_as(condition.mask_ML))


def policy_of(model: nn.Module) -> DiffusionPolicy:
    """Finds the policy inside what a trainer holds."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, DiffusionPolicy):
        raise refusal("policy", kind=type(inner).__name__)
    return inner


def prepare_policy(
    policy: nn.Module, *, peft_config: Any = None, device: torch.device | str, with_reference: bool
) -> tuple[nn.Module, nn.Module | None]:
    """Puts a policy where it is trained, with an adapter and a reference if wanted."""
    inner = policy_of(policy)
    adapted = isinstance(policy, PeftModel) or isinstance(inner.denoiser, PeftModel)
    refusal.when(peft_config is not None and adapted, "peft_config/twice")
    model = (policy if peft_config is None else get_peft_model(policy, peft_config)).eval()
    model = placed(model, torch.device(device))
    refusal.when(not any(weight.requires_grad for weight in model.parameters()), "policy/trainable")
    if not with_reference or adapted or peft_config is not None:
        return model, None
    return model, copy.deepcopy(inner.denoiser).requires_grad_(False).eval()


def placed(network: nn.Module, device: torch.device) -> nn.Module:
    """Moves a network to a type of device, unless it is there."""
    away = any(tensor.device.type != device.type for tensor in (*network.parameters(), *network.buffers()))
    return network.to(device) if away else network


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Real)) and type(value) is not bool and math.isfinite(value)


def _as_shape(name: str, shape: Any, wanted: str, axes: int | None = None) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    right = sizes and all(_is_whole(size) and size > 0 for size in sizes) and len(sizes) == (axes or len(sizes))
    refusal.when(not right, "shape", name=name, shape=shape, wanted=wanted)
    return tuple(int(size) for size in sizes)


def _check_laid_out(scheduler: Any, steps: int) -> None:
    """Refuses a scheduler whose tables are not those of that many steps."""
    for name in ("timesteps", "stds"):
        table = getattr(scheduler, name, None)
        if not isinstance(table, Tensor) or table.shape != (steps,):
            given = f"of shape {tuple(table.shape)}" if isinstance(table, Tensor) else f"a {type(table).__name__}"
            raise refusal("scheduler/steps", steps=steps, name=name, kind=type(scheduler).__name__, given=given)
    if not bool(scheduler.stds.isfinite().all()) or bool((scheduler.stds < 0).any()):
        raise refusal("scheduler/stds", kind=type(scheduler).__name__, stds=scheduler.stds.tolist())


def _numbers(prompt: Any) -> Tensor:
    """Returns a prompt that is an embedding already as a tensor."""
    try:
        return torch.as_tensor(prompt, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unusable("embed", prompt=repr(prompt)[:80]) from error


def _answer(denoiser: nn.Module, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
    output = denoiser(x, timesteps, condition)
    if not isinstance(output, Tensor):
        raise refusal("denoiser/answer", kind=type(output).__name__)
    return output


def _joined(first: Condition, second: Condition) -> Condition:
    """Lays conditions of the same states one behind the other."""
    return Condition(
        torch.cat([first.embedding_MLD, second.embedding_MLD]),
        torch.cat([first.mask_ML, second.mask_ML]),
        None if first.elements is None else torch.cat([first.elements, first.elements]),
    )


def prompt_key(prompt: Any) -> Hashable | None:
    """Returns what two prompts share exactly if they are the same by value."""
    kind = type(prompt)
    if kind in _PLAIN:
        return kind.__name__, repr(prompt)
    if kind is Tensor and prompt.layout is torch.strided and not prompt.is_quantized:
        flat = prompt.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return "tensor", tuple(prompt.shape), str(prompt.dtype), _digest(flat.view(torch.uint8).numpy().tobytes())
    if (kind is np.ndarray or isinstance(prompt, np.generic)) and not prompt.dtype.hasobject:
        return kind.__name__, prompt.shape, str(prompt.dtype), _digest(prompt.tobytes())
    if kind in (list, tuple, dict):
        parts = [part for item in prompt.items() for part in item] if kind is dict else prompt
        keys = tuple(prompt_key(part) for part in parts)
        return None if None in keys else (kind.__name__, keys)
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
