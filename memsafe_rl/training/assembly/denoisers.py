"""Diffusion and flow policies: prompts embedded, chains drawn, samples shown and saved."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import charge, hold, host_memory, weights_of
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.prompts import PromptReader, Prompts, prompt_of
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import DiffusionPolicy, policy_of, prepare_policy
from memsafe_rl.models.diffusion.state_critic import StateCritic, StateNetwork
from memsafe_rl.models.language.factory import family_of
from memsafe_rl.models.loading import LoadedModel
from memsafe_rl.rollout.engines.denoising import DenoisingEngine
from memsafe_rl.training import refusal
from memsafe_rl.training.assembly.protocol import ModelFactory, ModelFamily, TrainingRequest, register_model_family
from memsafe_rl.training.gradient import check_separable
from memsafe_rl.types import Completion, Component, SamplingSettings

logger = logging.getLogger(__name__)

_SHORTENED_BY_NOTHING = frozenset({"max_completion_length", "cache_implementation"})
"""Remedies of `allow_lossy` that would change nothing of a chain."""


class ConditionReader(PromptReader):
    """Turns prompts into what a denoiser is conditioned on."""

    limit: int | None = None
    why_limited = "which embeddings do not know"

    def __init__(self, policy: DiffusionPolicy) -> None:
        self._policy = policy

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Counts no tokens: prompts are embedded when their rollout comes, one vector each at least."""
        return [[0]] * len(prompts)

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Embeds the prompts of some examples."""
        prompts = tuple(prompt_of(example) for example in examples)
        return Prompts(tuple(examples), prompts, tuple(self._policy.embed(prompts)))


class Denoisers(ModelFactory):
    """Diffusion and flow policies: a denoiser with a scheduler."""

    own_engine = DenoisingEngine.name
    processing_class: Any = None

    def __init__(self, config: TrainerConfig, model: Any, processing_class: Any) -> None:
        refusal.when(processing_class is not None, "denoiser/processing_class", kind=type(processing_class).__name__)
        _refuse_what_is_for_tokens(config)
        self._config, self._policy = config, policy_of(model)
        steps = self._policy.num_inference_steps
        if config.max_completion_length not in (config.declared["max_completion_length"].default, steps):
            logger.warning(
                "max_completion_length is %d, but a chain of this DiffusionPolicy has %d steps (num_inference_steps): "
                "the setting is without effect",
                config.max_completion_length,
                steps,
            )
        config.max_completion_length = steps  # a chain is a row
        check_separable(config.loss_settings())
        self.reader: PromptReader = ConditionReader(self._policy)

    def load(self, request: TrainingRequest, device: torch.device, room_bytes: int) -> LoadedModel:  # noqa: ARG002
        """Puts the policy where it is trained."""
        refusal.when(request.quantization_config is not None, "denoiser/quantization_config")
        refusal.when(request.ref_model is not None, "denoiser/ref_model")
        with charge(Component.WEIGHTS):
            trained, reference = prepare_policy(
                request.model, peft_config=request.peft_config, device=device, with_reference=self._config.has_reference
            )
        hold(Component.WEIGHTS, weights_of(*(network for network in (trained, reference) if network is not None)))
        return LoadedModel(trained, reference)

    def adapt(self, loaded: LoadedModel) -> DiffusionAdapter:
        """Wraps the policy."""
        return DiffusionAdapter(loaded.model, reference_denoiser=loaded.reference_model)

    def check(self, adapter: DiffusionAdapter | StateNetwork) -> None:
        """Compares states that are denoised, or valued, together with the same ones alone."""
        adapter.check()

    def sampling_settings(self, adapter: DiffusionAdapter) -> SamplingSettings:
        """Returns the steps of a chain; how they are drawn, the policy says."""
        return SamplingSettings(adapter.policy.num_inference_steps, ())

    def critic(self, adapter: DiffusionAdapter, wanted: Any, check: Callable[[Any], None]) -> StateCritic:
        """Makes a critic that reads states."""
        refusal.when(not isinstance(wanted, nn.Module | None), "critic/denoiser", given=wanted)
        refusal.when(family_of(wanted) is not None, "critic/states", kind=type(wanted).__name__)
        critic = StateCritic(adapter, wanted)
        check(critic.network)
        return critic

    def decoded(self, prompts: Prompts, conditions: Sequence[Tensor], completions: Sequence[Completion]) -> list[Any]:  # noqa: ARG002
        """Returns what the policy's ``decode`` makes of the last states."""
        return [self._policy.decode(completion.ids[-1]) for completion in completions]

    def completion_ids(self, completions: Sequence[Completion]) -> list[Any]:
        """Returns copies of the last states, float32."""
        with host_memory():
            return [completion.ids[-1].to(torch.float32, copy=True) for completion in completions]

    def loggable(self, sample: Any) -> Any:
        """Returns a sample's shape and spread, for tables; what is no tensor stays as it is."""
        if not isinstance(sample, Tensor):
            return sample
        return f"{tuple(sample.shape)}, mean {sample.float().mean():.3g}, std {sample.float().std():.3g}"

    def facts(self) -> dict[str, str]:
        """Says how chains are drawn, for the start banner."""
        steps = sum(std > 0 for std in self._policy.stds)
        return {"chains": f"{self._policy.num_inference_steps} denoising steps, {steps} of them with noise"}

    def run_facts(self) -> dict[str, Any]:
        """Says how chains are drawn and scored, for runs that are resumed."""
        policy = self._policy
        laid_out = torch.stack([policy.scheduler.timesteps.double().cpu(), policy.scheduler.stds.double().cpu()])
        ones = policy.null_condition.new_ones((1, *policy.sample_shape), dtype=torch.float32)
        asked = [(output, [column]) for column in range(policy.num_inference_steps) for output in (ones, 1 - ones)]
        facts = {
            "sample_shape": list(policy.sample_shape),
            "condition_shape": list(policy.condition_shape),
            "num_inference_steps": int(policy.num_inference_steps),
            "guidance_scale": float(policy.guidance_scale),
            "guidance_gradient": bool(policy.guidance_gradient),
            "reduce": policy.reduce,
            "state_dtype": str(policy.state_dtype),
            "shared_noise": bool(policy.shared_noise),
            "trained_steps": str(policy.trained_steps),
            "scheduler": f"{type(policy.scheduler).__name__}, {_digest([laid_out])}",
            "means": _digest(policy.scheduler.mean(output, columns, 1 - output) for output, columns in asked),
            "null_condition": _digest([policy.null_condition]),
        }
        return {f"{name} of the policy": value for name, value in facts.items()}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuses what plays or draws texts."""
        for name, value in given.items():
            refusal.when(value, "denoiser/turns", name=name)


def _refuse_what_is_for_tokens(config: TrainerConfig) -> None:
    """Refuses every setting that was changed and would be without effect; chains are alike: the first step is worst."""
    for name, setting in config.declared.items():
        value, default = getattr(config, name), setting.default
        if setting.tokens_only and value != default:
            raise refusal("denoiser/tokens", name=name, value=value, default=default)
    useless = sorted(_SHORTENED_BY_NOTHING.intersection(config.allow_lossy))
    if useless:
        raise refusal("denoiser/allow_lossy", name=useless[0])


def _digest(parts: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        plain = part.detach().cpu()
        digest.update((plain if plain.dtype == torch.float64 else plain.float()).numpy().tobytes())
    return digest.hexdigest()[:16]


register_model_family(ModelFamily("diffusion policy", Denoisers, lambda model: isinstance(model, DiffusionPolicy)))
