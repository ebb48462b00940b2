"""The configuration of a run: every field is honoured, every other name refused, and nothing is swallowed."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, get_type_hints

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, ParallelMode
from transformers.utils import logging as transformers_logging

from memsafe_rl.config.alarm_rules import NO_ALARMS, AlarmRules, read_rules
from memsafe_rl.config.degradation import LOSSY_REMEDIES, QUANTISED_CACHE
from memsafe_rl.config.fields import GRPOFields, TrainerFields, describe
from memsafe_rl.config.generation_options import OPTIONS, eos_tokens, generation_fields, stop_strings
from memsafe_rl.config.objectives import Objective, read_objectives
from memsafe_rl.config.refusals import ALIASES, REFUSED, RefusedFields, admit, unknown
from memsafe_rl.config.values import (
    CHOICES,
    ESTIMATORS_OF_KL,
    OPTIMIZERS,
    REGISTRIES,
    UNITS_OF_KL,
    check_choice,
    check_range,
    read,
)
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.budget import MemoryBudget
from memsafe_rl.ops.advantages import ESTIMATORS
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.merging import MOST_CAGRAD_OBJECTIVES
from memsafe_rl.rollout.external.sampling_support import check_options, refuse_missing_vllm
from memsafe_rl.rollout.native.drawing import text_stops
from memsafe_rl.rollout.sampling_checks import check_least_tokens
from memsafe_rl.types import LossSettings, SamplingSettings

logger = logging.getLogger(__name__)

_Config = TypeVar("_Config", bound=type)

_SPELLINGS: dict[str, dict[Any, str]] = {
    "scale_rewards": {True: "group", "true": "group", False: "none", "false": "none"},
    "eval_strategy": {False: "no", "false": "no"},
    "save_strategy": {False: "no", "false": "no"},
    "logging_strategy": {False: "no", "false": "no"},
    "resume_from_checkpoint": {True: "true", False: "none"},
    "memory_budget": {None: "auto"},
    "alarms": {
        **dict.fromkeys((False, "false", "off", "no"), NO_ALARMS),
        **dict.fromkeys((True, "true", "on", "yes"), "none"),
    },
}
"""Other ways to write a value: TRL's booleans, and YAML's reading of a bare ``no``."""

_ENUMS: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}
"""Settings whose words transformers' callbacks, optimizers and schedules expect as members of an enumeration."""


@dataclass(frozen=True)
class KLStop:
    """When the passes over a rollout end early.

    Args:
        target: KL to the model before the first update on that rollout, in nats, above which they end.
        unit: "token" (mean over tokens) or "sequence" (sum over a row, mean over rows).
        estimator: "k3" or "k1" (Schulman 2020, "Approximating KL divergence").
    """

    target: float
    unit: str = "token"
    estimator: str = "k3"


def _settings(cls: Any) -> list[Field[Any]]:
    """Gives the fields that are honoured; the others are there for parsers alone."""
    return [setting for setting in fields(cls) if setting.name not in REFUSED]


def named(cls: _Config) -> _Config:
    """Makes a configuration class refuse names that it does not know, and describes its fields in its docstring."""
    generated = cls.__init__  # type: ignore[misc]
    known = {setting.name for setting in _settings(cls)}

    @functools.wraps(generated)
    def init(self: Any, *values: Any, **named: Any) -> None:
        generated(self, *values, **admit(named, known))

    cls.__init__ = init  # type: ignore[misc]
    cls.__doc__ = "\n\n    ".join((cls.__doc__ or "", "\n    ".join(describe(_settings(cls))))) + "\n    "
    return cls


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {setting.name: hints[setting.name] for setting in _settings(cls)}


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


class TrainerConfig(TrainerFields, ABC):
    """What the configurations of all trainers do: fill in defaults, check, and answer callbacks.

    A subclass is a dataclass that adds its fields and `_check_algorithm`.
    """

    algorithm: ClassVar[str]
    _assumed_world_size: int | None = None

    def __post_init__(self) -> None:
        self._filled: dict[str, Any] = {}
        self.validate()

    def assume_world_size(self, ranks: int) -> None:
        """Takes so many ranks for granted, whatever the launcher says; a forecast stands for one of them."""
        self._assumed_world_size = ranks

    def was_left_open(self, name: str) -> bool:
        """Tells whether a setting was filled in rather than given."""
        return name in self._filled

    def __copy__(self) -> Self:
        """Gives the same settings, which remember by themselves what was filled in: setting one makes it given."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _filled=dict(self._filled))
        return twin

    @abstractmethod
    def _check_algorithm(self) -> None:
        """Checks what only this trainer has."""

    @abstractmethod
    def loss_settings(self) -> LossSettings:
        """Gives the part of the configuration that the loss reads."""

    @abstractmethod
    def advantage_settings(self) -> dict[str, str]:
        """Gives what `ops.advantages.estimated_advantages` reads: estimator, scale_rewards and aggregation."""

    @property
    def has_reference(self) -> bool:
        """Whether a reference is needed."""
        return self.loss_has_kl

    @property
    def _least_group(self) -> int:
        """Completions of a prompt that its advantages compare."""
        return 1

    # Names: setting an unknown one would otherwise do nothing at all.

    def __setattr__(self, name: str, value: Any) -> None:
        hints = _hints(type(self))
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        for target, admitted in admit({name: value}, hints).items():
            self.__dict__.get("_filled", {}).pop(target, None)
            object.__setattr__(self, target, admitted)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Gives the off value of a refused setting, and the value behind another name, to scripts that ask."""
            if name in ALIASES:
                return getattr(self, ALIASES[name])
            if name in REFUSED and REFUSED[name].off:
                return REFUSED[name].off[0]
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}.")

    # Filling in and checking

    def validate(self) -> None:
        """Reads every setting as its type, fills in what was left open, and checks all of it.

        A configuration may be changed after it was made; the trainer calls this again. What was filled in before is
        filled in anew.
        """
        for name, given in self._filled.items():
            object.__setattr__(self, name, given)
        self._filled.clear()
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            value = REGISTRIES[name].name_of(value) if name in REGISTRIES else value
            spelled = _SPELLINGS.get(name, {})
            key = value.lower() if isinstance(value, str) and not isinstance(value, Enum) else value
            plain = spelled[key] if isinstance(key, (str, bool, type(None))) and key in spelled else value
            object.__setattr__(self, name, read(name, plain.value if isinstance(plain, Enum) else plain, hint))
        self._check_ranges()
        self._check_words()
        self._fill_batches()
        self._fill_precision()
        self._fill_evaluation()
        self._fill_rest()
        self._check_sampling()
        self._check_engine()
        self._check_reference()
        self._check_saving()
        self._check_memory()
        self._check_algorithm()

    def _fill(self, name: str, value: Any) -> None:
        """Sets a field that the user left open, and remembers that it was."""
        self._filled.setdefault(name, getattr(self, name))
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        for name in _hints(type(self)):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                check_range(name, value)

    def _check_words(self) -> None:
        for name in _hints(type(self)):
            value = getattr(self, name)
            if name in CHOICES and value is not None:
                check_choice(name, value, CHOICES[name])
        check_choice("optim", self.optim, tuple(OPTIMIZERS))
        package = OPTIMIZERS[self.optim]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"optim is {str(self.optim)!r}, which needs the package {package}. "
                f"Install it with `pip install {package}`, or set optim='adamw_torch_fused'."
            )
        for name, kind in _ENUMS.items():
            object.__setattr__(self, name, kind(getattr(self, name)))

    def _fill_batches(self) -> None:
        if self.num_generations < self._least_group:
            raise ConfigError(
                f"num_generations is {self.num_generations}; advantages compare the completions of one prompt, so "
                f"that at least {self._least_group} are needed. Set num_generations=8."
            )
        batch = self.per_device_train_batch_size * self.world_size
        written = f"per_device_train_batch_size {self.per_device_train_batch_size} x {self.world_size} rank(s)"
        if self.steps_per_generation is None and self.generation_batch_size is not None:
            if self.generation_batch_size % batch:
                raise ConfigError(
                    f"generation_batch_size is {self.generation_batch_size}, not a multiple of {written} = {batch}. "
                    f"Set generation_batch_size={batch * math.ceil(self.generation_batch_size / batch)}."
                )
            self._fill("steps_per_generation", self.generation_batch_size // batch)
        if self.steps_per_generation is None:
            self._fill("steps_per_generation", self.gradient_accumulation_steps)
        steps = self._steps_per_generation
        if self.generation_batch_size is None:
            self._fill("generation_batch_size", batch * steps)
        if self.generation_batch_size != batch * steps:
            raise ConfigError(
                f"generation_batch_size is {self.generation_batch_size}, but {written} x steps_per_generation "
                f"{steps} = {batch * steps}. Set only one of the two."
            )
        self._check_rollout(batch, steps, written)

    def _check_rollout(self, batch: int, steps: int, written: str) -> None:
        group, accumulation = self.num_generations, self.gradient_accumulation_steps
        whole_groups = group // math.gcd(group, batch)
        fitting = math.lcm(accumulation, whole_groups)
        remedy = f"Set steps_per_generation={fitting * math.ceil(steps / fitting)} (and leave generation_batch_size)."
        if batch * steps % group:
            raise ConfigError(
                f"The generation batch, {written} x steps_per_generation {steps} = {batch * steps} completions, is "
                f"not a multiple of num_generations {group}. {remedy}"
            )
        if steps % accumulation:
            raise ConfigError(
                f"steps_per_generation is {steps}, not a multiple of gradient_accumulation_steps {accumulation}: an "
                f"optimizer step would straddle two rollouts. {remedy}"
            )

    def _fill_precision(self) -> None:
        if self.fp16 and self.bf16:
            raise ConfigError("fp16 and bf16 are both True. Set one of them to False.")
        on_cuda = self.device.type == "cuda"
        supported = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        if self.bf16 and on_cuda and not supported:
            raise ConfigError("bf16 is True, but this CUDA device does not support it. Set fp16=True, bf16=False.")
        if self.bf16 is None:
            self._fill("bf16", supported and not self.fp16)
            if not supported and not self.fp16:
                _say_once(f"bf16 is off: on this device ({self.device.type}) the forward passes run in float32.")

    def _fill_evaluation(self) -> None:
        if self.eval_strategy != "no" and not self.do_eval:
            self._fill("do_eval", True)
        if self.eval_strategy == "steps" and not self.eval_steps:
            self._fill("eval_steps", self.logging_steps)
        for name in ("eval_steps", "save_steps", "logging_steps"):
            steps = getattr(self, name)
            if steps is not None and steps > 1 and not float(steps).is_integer():
                raise ConfigError(f"{name} is {steps}; above 1 it must be a whole number of optimizer steps.")
        for k in self.eval_pass_at or ():
            if not 1 <= k <= self.eval_generations:
                raise ConfigError(
                    f"eval_pass_at has {k}, but an evaluation draws {self.eval_generations} completion(s) a prompt. "
                    f"Set num_generations_eval={max(1, k)}, or lower k."
                )
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            self._fill("metric_for_best_model", "reward")
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self._fill("greater_is_better", not self.metric_for_best_model.endswith("loss"))

    def _fill_rest(self) -> None:
        for name, default in (("output_dir", "trainer_output"), ("allow_lossy", ())):
            if getattr(self, name) is None:
                self._fill(name, default)
        self._fill("output_dir", os.path.expanduser(self.output_dir))
        if self.disable_tqdm is None:
            self._fill("disable_tqdm", transformers_logging.get_verbosity() > logging.WARNING)
        self._fill("report_to", self._trackers())
        if str(self.resume_from_checkpoint).lower() == "true":
            self._fill("resume_from_checkpoint", True)

    def _trackers(self) -> list[str]:
        asked = [tracker for tracker in self.trackers if tracker.lower() != "none"]
        if "all" in asked:
            return sorted(str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers())
        for tracker in asked:
            check_choice("report_to", tracker, ("none", "all", *LOGGER_TYPE_TO_CLASS))
        return asked

    def _check_sampling(self) -> None:
        for key, value in self._generation().items():
            if key not in OPTIONS and key in _hints(type(self)):
                raise ConfigError(f"generation_kwargs has {key}={value!r}, which the loss reads too. Set {key} itself.")
        check_least_tokens(self._drawing_fields().get("min_new_tokens", 0), self.max_completion_length)
        stop_strings(self._generation())
        eos_tokens(self._generation(), ())
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min is {low}, not below vllm_importance_sampling_clip_max {high}. "
                "Lower the first or raise the second."
            )
        if low is None and high is None and self.vllm_importance_sampling_mode.endswith("truncate"):
            raise ConfigError(
                f"vllm_importance_sampling_mode is {self.vllm_importance_sampling_mode!r}, but it has no bound. "
                "Set vllm_importance_sampling_clip_max=3.0."
            )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type in which forward passes compute what can be narrower than the weights; None for the weights' own."""
        if self.bf16:
            return torch.bfloat16
        return torch.float16 if self.fp16 else None

    @property
    def caches_in_8_bits(self) -> bool:
        """Whether rollouts keep their keys and values in 8 bits."""
        return self.cache_implementation == QUANTISED_CACHE

    def _check_engine(self) -> None:
        chosen = [name for name in ("use_vllm", "use_transformers_continuous_batching") if getattr(self, name)]
        if self.caches_in_8_bits:
            self._check_rounded_cache(chosen)
        if not chosen:
            return
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} are both True. Set one of them, for there is one engine.")
        for name in ("verify_plan", "probe_worst_case"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is True with {chosen[0]}; it looks at the library's own engine. Leave one of the two out."
                )
        if self.use_vllm:
            self._check_vllm()
        check_options(self.transformers_continuous_batching_config or {})

    def _check_rounded_cache(self, engines: Sequence[str]) -> None:
        told = f"cache_implementation is {self.cache_implementation!r}"
        if engines:
            raise ConfigError(f"{told} with {engines[0]}, which keeps its own cache. Leave one of the two out.")
        if self.verify_plan:
            raise ConfigError(
                f"{told} with verify_plan, which proves that plans change no token; a cache in 8 bits may, where "
                "rounding tips a number over. Leave one of the two out."
            )
        if self.partial_rollout_tokens is not None:
            raise ConfigError(
                f"{told} with partial_rollout_tokens={self.partial_rollout_tokens}, whose completions go on under "
                "newer weights; only one of these corrections can be made. Leave one of the two out."
            )

    def _check_vllm(self) -> None:
        refuse_missing_vllm()
        if self.world_size > 1:
            raise ConfigError(
                f"use_vllm is True in a run of {self.world_size} ranks; vLLM would take over their process group. "
                "Run one process, or leave use_vllm out."
            )
        longest = self.vllm_max_model_length
        if longest is not None and longest <= self.max_completion_length:
            raise ConfigError(
                f"vllm_max_model_length is {longest}, which leaves no prompt beside max_completion_length "
                f"{self.max_completion_length}. Raise it to the longest prompt plus {self.max_completion_length}."
            )

    def _check_reference(self) -> None:
        if self.sync_ref_model and not self.has_reference:
            raise ConfigError(
                "sync_ref_model is True, but beta is 0, so that there is no reference. "
                "Set beta above 0 or sync_ref_model=False."
            )
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef is {self.entropy_coef}, outside entropy_coef_min {self.entropy_coef_min} and "
                f"entropy_coef_max {self.entropy_coef_max}. Set it between them."
            )
        if self.router_aux_loss_coef:
            raise ConfigError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}; the balance loss of a mixture of experts "
                "depends on how a batch is cut. Set router_aux_loss_coef=0.0."
            )
        _ = self.kl_stop_rule
        _ = self.alarm_rules

    def _check_saving(self) -> None:
        if not self.load_best_model_at_end or self.save_strategy == "best":
            return
        if self.eval_strategy != self.save_strategy:
            raise ConfigError(
                f"load_best_model_at_end needs equal strategies, but save_strategy is {self.save_strategy.value!r} "  # type: ignore[attr-defined]
                f"and eval_strategy {self.eval_strategy.value!r}. Set eval_strategy={self.save_strategy.value!r}."  # type: ignore[attr-defined]
            )
        if self.eval_strategy == "steps" and not _is_multiple(self.save_steps, self.eval_steps or 0):
            raise ConfigError(
                f"load_best_model_at_end needs every checkpoint to be evaluated, but save_steps {self.save_steps} is "
                f"not a multiple of eval_steps {self.eval_steps}. Set save_steps={self.eval_steps}."
            )

    def _check_memory(self) -> None:
        try:
            MemoryBudget.parse(self.memory_budget)
        except ConfigError as error:
            told = str(error) if "memory_budget" in str(error) else f"memory_budget is {self.memory_budget!r}: {error}"
            raise ConfigError(f"{told} 'auto' leaves the choice to the library.") from None
        for remedy in self.allow_lossy:
            check_choice("allow_lossy", remedy, tuple(LOSSY_REMEDIES))
        for key, value in (self.gradient_checkpointing_kwargs or {}).items():
            if key != "use_reentrant" or value not in (False, "false", "False"):
                raise ConfigError(
                    f"gradient_checkpointing_kwargs has {key}={value!r}; recomputation here is not reentrant and has "
                    "no other settings. Set gradient_checkpointing_kwargs=None."
                )
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of != "auto":
            self._fill("pad_to_multiple_of", read("pad_to_multiple_of", self.pad_to_multiple_of, int | None))
            self._check_ranges()

    # What the numbers mean

    @property
    def _steps_per_generation(self) -> int:
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def order_seed(self) -> int:
        """Seed of every order of prompts and rows."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def step_rows(self) -> int:
        """Rows (completions) of one optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.world_size * self.gradient_accumulation_steps

    @property
    def rollout_rows(self) -> int:
        """Rows (completions) of one rollout, over all ranks."""
        return self.per_device_train_batch_size * self.world_size * self._steps_per_generation

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout, over all ranks."""
        return self.rollout_rows // self.num_generations

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of one epoch: one pass over a rollout, of which there are `num_iterations`."""
        return self._steps_per_generation // self.gradient_accumulation_steps

    @property
    def eval_generations(self) -> int:
        """Completions per prompt in evaluations."""
        return self.num_generations_eval or self.num_generations

    @property
    def eval_tries(self) -> list[int]:
        """The k of pass@k and best@k in evaluations; none where a single completion says it all."""
        if self.eval_pass_at is not None:
            return list(self.eval_pass_at)
        group = self.eval_generations
        return [] if group == 1 else sorted({*(2**power for power in range(group.bit_length())), group})

    @property
    def every_row_learns(self) -> bool:
        """Whether the loss has a term without the advantage in it, so that rows whose advantage is 0 count too."""
        return self.loss_has_kl or self.gives_entropy_bonus

    @property
    def loss_has_kl(self) -> bool:
        """Whether the loss, or that of an objective, has a KL to the reference in it."""
        objectives = self.objective_list
        return any(objective.beta != 0 for objective in objectives) if objectives else self.beta != 0

    @property
    def gives_entropy_bonus(self) -> bool:
        """Whether the loss has, or may come to have, a bonus on entropy."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def objective_list(self) -> tuple[Objective, ...]:
        """What is learnt at once, each with a gradient of its own; empty where there is but one."""
        return ()

    def merge_settings(self) -> dict[str, Any]:
        """Gives what `ops.merging.merge_weights` reads: method and cagrad_c."""
        return {"method": "sum"}

    @property
    def gradients_aside(self) -> int:
        """Whole gradients that wait for those of further objectives."""
        return max(0, len(self.objective_list) - 1)

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers in use."""
        return [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())

    @property
    def kl_stop_rule(self) -> KLStop | None:
        """What `kl_stop` means; None when the passes over a rollout never end early."""
        given = self.kl_stop
        if given is None:
            return None
        parts: dict[str, Any] = dict(given) if isinstance(given, dict) else {"target": given}
        for key in parts:
            if key not in ("target", "unit", "estimator"):
                raise unknown(key, ("target", "unit", "estimator"), "key of kl_stop")
        if "target" not in parts:
            raise ConfigError(f"kl_stop is {given!r}, without a target. Set kl_stop={{'target': 0.02}} (nats).")
        rule = KLStop(**{**parts, "target": read("kl_stop", parts["target"], float)})
        if not rule.target > 0:
            raise ConfigError(f"kl_stop is {rule.target!r}; it must be more than 0 nats. None switches it off.")
        check_choice("unit of kl_stop", rule.unit, UNITS_OF_KL)
        check_choice("estimator of kl_stop", rule.estimator, ESTIMATORS_OF_KL)
        return rule

    @property
    def alarm_rules(self) -> AlarmRules:
        """What `alarms` means."""
        return read_rules(cast(dict[str, Any] | None, self.alarms), has_reference=self.has_reference)

    def _generation(self) -> dict[str, Any]:
        return self.generation_kwargs or {}

    def _drawing_fields(self, declared: Any = None) -> dict[str, Any]:
        own = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        own["repetition_penalty"] = self.repetition_penalty
        return generation_fields({**own, **self._generation()}, declared)

    def sampling_settings(
        self, eos_token_ids: Iterable[int], *, greedy: bool = False, tokenizer: Any = None, declared: Any = None
    ) -> SamplingSettings:
        """Gives the settings by which completions are drawn."""
        fields = self._drawing_fields(declared)
        strings = stop_strings(self._generation(), declared)
        settings = SamplingSettings(
            max_new_tokens=self.max_completion_length,
            eos_token_ids=eos_tokens(self._generation(), eos_token_ids),
            temperature=0.0 if greedy else self.temperature,
            stops=text_stops(strings, tokenizer) if strings else None,
            **fields,
        )
        decay = settings.exponential_decay_length_penalty
        if decay is not None and not settings.eos_token_ids:
            raise ConfigError(
                f"exponential_decay_length_penalty is {decay}, which makes an eos likelier, but neither tokenizer nor "
                "model declares one. Set generation_kwargs['eos_token_id']."
            )
        return settings

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Counts the steps over which the learning rate rises."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # Where the run takes place; read from the launcher's environment until ranks have met.

    @property
    def device(self) -> torch.device:
        """Device of this process: its own CUDA device, or the CPU."""
        forced = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
        if self.use_cpu or forced or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_process_index)

    @property
    def n_gpu(self) -> int:
        """CUDA devices of this process: 0 or 1."""
        return int(self.device.type == "cuda")

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self._assumed_world_size or self._launched_world_size

    @property
    def _launched_world_size(self) -> int:
        return torch.distributed.get_world_size() if _ranks_met() else _launched("WORLD_SIZE", 1)

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return torch.distributed.get_rank() if _ranks_met() else _launched("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return _launched("LOCAL_RANK", 0)

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several ranks take part, in transformers' words."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_save(self) -> bool:
        """Whether this process writes files: the first rank does."""
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        """Whether this process writes the log: the first rank does."""
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        """Completions per rank and accumulation step."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Completions per rank that an evaluation draws at once."""
        return self.per_device_eval_batch_size

    def get_process_log_level(self) -> int:
        """Gives the least level that this process logs, as `logging` counts levels."""
        name = self.log_level if self.should_log else self.log_level_replica
        passive = int(transformers_logging.get_verbosity())
        return passive if name == "passive" else int(transformers_logging.get_log_levels_dict()[name])

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Lets the main process run a block first, then the others."""
        if self.world_size == 1:
            return nullcontext()
        logger.debug("rank %d: %s, main process first", self.process_index, desc)
        state = PartialState(cpu=self.use_cpu)
        turn: AbstractContextManager[None] = state.local_main_process_first() if local else state.main_process_first()
        return turn

    # Writing it down

    def to_dict(self) -> dict[str, Any]:
        """Gives every setting as plain data; a configuration made from it is equal to this one."""
        return {name: _plain(getattr(self, name)) for name in _hints(type(self))}

    def to_json_string(self) -> str:
        """Writes every setting as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Gives every setting as a number, truth value or text, as trackers want them."""
        settings = self.to_dict() | {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in settings.items()
        }


def _ranks_met() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _launched(name: str, alone: int) -> int:
    # Like accelerate: without LOCAL_RANK nobody launched several ranks, whatever else the environment holds.
    return int(os.environ.get(name, alone)) if "LOCAL_RANK" in os.environ else alone


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.to_dict() if hasattr(value, "to_dict") else value


def _is_multiple(whole: float, part: float) -> bool:
    """Tells whether one count of steps is a multiple of another; shares of a run only compare with shares."""
    if part <= 0 or (whole < 1) != (part < 1):
        return False
    quotient = whole / part
    return round(quotient) >= 1 and math.isclose(quotient, round(quotient), rel_tol=1e-9)


@named
@dataclass
class GRPOConfig(RefusedFields, TrainerConfig, GRPOFields):
    """Settings of `GRPOTrainer`, under TRL 1.16's names, with its defaults and meanings.

    Every setting here is honoured; any other one of TRL or transformers is refused by name when the object is made or
    changed. The object is mutable and is validated when it is made and again by the trainer.

    Differences from TRL's defaults: `disable_dropout` is True, since a batch cut otherwise would draw other masks;
    `gradient_checkpointing` is None, since the plan decides; `bf16` is False on a device without it.
    """

    algorithm: ClassVar[str] = "GRPO"

    @property
    def _least_group(self) -> int:
        """Completions of a prompt that its advantages compare."""
        return ESTIMATORS[self.advantage_estimator].least_group

    @property
    def objective_list(self) -> tuple[Objective, ...]:
        """What `objectives` means; empty where there is but the weighted sum of all rewards."""
        return read_objectives(self.objectives, beta=self.beta)

    def _check_algorithm(self) -> None:
        self._check_objectives()
        self._check_estimator()
        scaled = self.advantage_estimator == "group" and self.scale_rewards != "none"
        if scaled and self.num_generations == 2:
            _warn(
                "num_generations is 2 with scaled rewards: every advantage is then 0 or +-0.707, and the size of the "
                "rewards is lost. Set num_generations to 4 or more, or scale_rewards='none'."
            )
        self._check_level()

    def merge_settings(self) -> dict[str, Any]:
        """Gives the part of the configuration that the merge of the objectives' gradients reads."""
        return {"method": self.gradient_merge, "cagrad_c": self.cagrad_c}

    def _check_objectives(self) -> None:
        """Refuses settings that only several objectives read, where there are none, and too many for a merge."""
        objectives = self.objective_list
        if not objectives:
            for name, default in (("gradient_merge", "sum"), ("cagrad_c", 0.2)):
                if getattr(self, name) != default:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r} without objectives, whose gradients it would merge. Set "
                        f"objectives, or leave {name} out."
                    )
        if self.gradient_merge == "cagrad" and len(objectives) > MOST_CAGRAD_OBJECTIVES:
            raise ConfigError(
                f"gradient_merge is 'cagrad' with {len(objectives)} objectives; it weighs at most "
                f"{MOST_CAGRAD_OBJECTIVES}. Join some of them, or set gradient_merge='pcgrad'."
            )

    def _check_estimator(self) -> None:
        """Refuses settings of the estimator "group" beside another one, which would not read them."""
        if self.advantage_estimator == "group":
            return
        for name, default in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize")):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r} with advantage_estimator={self.advantage_estimator!r}, which "
                    f"has a scale of its own. Leave {name} out, or set advantage_estimator='group'."
                )

    def _check_level(self) -> None:
        level, levels = self.importance_sampling_level, LOSSES[self.loss_type].traits.levels
        if level not in levels:
            _warn(
                f"importance_sampling_level is {level!r} with loss_type {self.loss_type!r}, which is defined for "
                f"{levels[0]!r}. Set importance_sampling_level={levels[0]!r}, or loss_type='grpo', which suits both."
            )

    def advantage_settings(self) -> dict[str, str]:
        """Gives the part of the configuration that advantages read."""
        return {
            "estimator": self.advantage_estimator,
            "scale_rewards": self.scale_rewards,
            "aggregation": self.multi_objective_aggregation,
        }

    def loss_settings(self) -> LossSettings:
        """Gives the part of the configuration that the loss reads."""
        return LossSettings(
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            delta=self.delta,
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
            max_completion_length=self.max_completion_length,
        )


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
