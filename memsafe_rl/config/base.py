"""What the configurations of all trainers do: keep settings, answer callbacks, and write themselves down."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import torch
from accelerate import PartialState
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import ParallelMode
from transformers.utils import logging as transformers_logging

from memsafe_rl.config import generation_options
from memsafe_rl.config.alarm_rules import AlarmRules, KLStop, read_kl_stop, read_rules
from memsafe_rl.config.degradation import QUANTISED_CACHE
from memsafe_rl.config.objectives import Objective, read_objectives
from memsafe_rl.config.settings import TrainerSettings
from memsafe_rl.config.unsupported import ALIASES, REFUSED, admit
from memsafe_rl.config.validation import validate
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.types import LossSettings

logger = logging.getLogger(__name__)

_Config = TypeVar("_Config", bound="type[TrainerConfig]")


@dataclass_transform()
def configuration(cls: _Config) -> _Config:
    """Makes a dataclass that refuses unknown names and describes its settings in its docstring."""
    for name, refusal in REFUSED.items():
        if refusal.off:  # fields at their off values, for parsers that read the fields of a dataclass
            told = {"help": f"Refused: {refusal.reason}.".replace("%", "%%"), "nargs": "?", "const": "True"}
            cls.__annotations__[name] = str
            setattr(cls, name, field(default=refusal.off[0], metadata=told, repr=False, compare=False, kw_only=True))
    made = dataclass(cls)
    generated = made.__init__

    @functools.wraps(generated)
    def init(self: Any, *values: Any, **named: Any) -> None:
        generated(self, *values, **admit(named, cls.declared))

    made.__init__ = init  # type: ignore[method-assign]
    # What scripts read of it holds here: each rank reads its own prompts.
    made.accelerator_config = property(lambda _: AcceleratorConfig(dispatch_batches=False))  # type: ignore[attr-defined]
    lines = (f"{one.name}: {one.help} Default: {one.default!r}." for one in cls.declared.values())
    made.__doc__ = "\n        ".join((f"{cls.__doc__}\n    Args:", *lines)) + "\n    "
    return cast(_Config, made)


class TrainerConfig(TrainerSettings, ABC):
    """The settings of a trainer: mutable, filled in and checked when built and again by the trainer."""

    algorithm: ClassVar[str]
    kl_in_rewards: ClassVar[bool] = False
    """Whether `beta` charges a completion's reward for the KL, in place of the loss."""
    # GRPO has settings in the place of these.
    teacher_model_name_or_path: ClassVar[str | None] = None
    teacher_model_init_kwargs: ClassVar[dict[str, Any] | None] = None
    teacher_model_server_url: ClassVar[str | None] = None
    objectives: ClassVar[dict[str, Any] | None] = None
    gradient_merge: ClassVar[str] = "sum"
    cagrad_c: ClassVar[float] = 0.0
    _world_size: int | None = None

    def __post_init__(self) -> None:
        self._filled: dict[str, Any] = {}
        self.validate()

    def __copy__(self) -> Self:
        """Returns the same settings with a memory of its own of what was filled in."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _filled=dict(self._filled))
        return twin

    # What an algorithm says of itself

    @abstractmethod
    def check_algorithm(self) -> None:
        """Checks what only this algorithm has."""

    @abstractmethod
    def advantage_settings(self) -> dict[str, str]:
        """Returns what `ops.advantages.estimated_advantages` reads: estimator, scale_rewards and aggregation."""

    @property
    @abstractmethod
    def least_group(self) -> int:
        """Completions of a prompt that its advantages compare."""

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether a reference is needed."""

    # Settings: setting an unknown one would otherwise do nothing at all.

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or self._is_users_own(name):
            object.__setattr__(self, name, value)
            return
        for target, admitted in admit({name: value}, self.declared).items():
            self.__dict__.get("_filled", {}).pop(target, None)
            object.__setattr__(self, target, admitted)

    def _is_users_own(self, name: str) -> bool:
        """Whether a user's subclass has declared a field that the library knows nothing of."""
        return not (name in self.declared or name in REFUSED or name in ALIASES) and name in self.__dataclass_fields__

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the off value of a refused setting, and the value behind another name, to scripts that ask."""
            if name in ALIASES:
                return getattr(self, ALIASES[name])
            if name in REFUSED and REFUSED[name].off:
                return REFUSED[name].off[0]
            instead = " Assign the settings themselves." if name.startswith("set_") else ""
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}.{instead}")

    def validate(self) -> None:
        """Reads, fills in and checks every setting; after a change, what was filled in before is filled in anew."""
        for name, given in self._filled.items():
            object.__setattr__(self, name, given)
        self._filled.clear()
        validate(self)

    def fill(self, name: str, value: Any) -> None:
        """Sets a setting that the user left open, and remembers that it was."""
        self._filled.setdefault(name, getattr(self, name))
        object.__setattr__(self, name, value)

    def left_open(self, name: str) -> bool:
        """Whether the user left a setting open, so that its value was filled in."""
        return name in self._filled

    def on_ranks(self, ranks: int) -> Self:
        """Returns a copy that counts as many ranks, whatever was launched."""
        twin = self.__copy__()
        twin._world_size = ranks
        return twin

    # What the numbers mean

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
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.per_device_train_batch_size * self.world_size * steps

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout, over all ranks."""
        return self.rollout_rows // self.num_generations

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of one epoch: one pass over a rollout, of which there are `num_iterations`."""
        return self.rollout_rows // self.step_rows

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that learn from a rollout, unless the KL stop ends them."""
        return self.updates_per_epoch * self.num_iterations

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
    def loss_has_kl(self) -> bool:
        """Whether the loss, or that of an objective, has a KL to the reference in it."""
        if self.kl_in_rewards:
            return False
        objectives = self.objective_list
        return any(objective.beta != 0 for objective in objectives) if objectives else self.beta != 0

    @property
    def gives_entropy_bonus(self) -> bool:
        """Whether the loss has, or may come to have, a bonus on entropy."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def every_row_learns(self) -> bool:
        """Whether the loss has a term without the advantage in it, so that rows whose advantage is 0 count too."""
        return self.loss_has_kl or self.gives_entropy_bonus or LOSSES[self.loss_settings().loss_type].traits.every_row

    @property
    def marks_tokens(self) -> bool:
        """Whether a step marks tokens by scores of all its rows, before it is cut."""
        return self.top_entropy_quantile < 1.0 or LOSSES[self.loss_settings().loss_type].mark is not None

    @property
    def objective_list(self) -> tuple[Objective, ...]:
        """What is learnt at once, each with a gradient of its own; empty where there is but one."""
        return read_objectives(self.objectives, beta=self.beta)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type in which forward passes compute what can be narrower than the weights; None for the weights' own."""
        if self.bf16:
            return torch.bfloat16
        return torch.float16 if self.fp16 else None

    @property
    def engines_chosen(self) -> dict[str, str]:
        """The engines that are to draw in place of the model's own, by the setting that names each."""
        vllm = "vllm_server" if self.vllm_mode == "server" else "vllm"
        switches = {"use_vllm": vllm, "use_transformers_continuous_batching": "continuous"}
        chosen = {setting: engine for setting, engine in switches.items() if getattr(self, setting)}
        return chosen if self.rollout_engine is None else {**chosen, "rollout_engine": self.rollout_engine}

    @property
    def vllm_servers(self) -> tuple[str, ...]:
        """Addresses of the vLLM servers, without a slash at the end."""
        given = self.vllm_server_base_url or f"http://{self.vllm_server_host}:{self.vllm_server_port}"
        return tuple(url.strip().rstrip("/") for url in given.split(","))

    @property
    def compile_mode(self) -> str | None:
        """The mode of `torch.compile` that plans ask for; None where nothing is compiled."""
        named = self.torch_compile_mode or ("default" if self.torch_compile_backend else None)
        return named or ("default" if self.torch_compile else None)

    @property
    def offload_activations(self) -> bool | None:
        """Whether plans are to keep activations in host memory; None: they decide."""
        offload = cast(dict[str, Any], self.gradient_checkpointing_kwargs or {}).get("offload")
        return True if str(offload).lower() == "true" else None

    @property
    def caches_in_8_bits(self) -> bool:
        """Whether rollouts keep their keys and values in 8 bits."""
        return self.cache_implementation == QUANTISED_CACHE

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers in use."""
        return [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())

    @property
    def kl_stop_rule(self) -> KLStop | None:
        """What `kl_stop` means; None when the passes over a rollout never end early."""
        return read_kl_stop(self.kl_stop)

    @property
    def alarm_rules(self) -> AlarmRules:
        """What `alarms` means."""
        return read_rules(cast(dict[str, Any] | None, self.alarms), has_reference=self.has_reference)

    def loss_settings(self) -> LossSettings:
        """Returns what the loss reads; what an algorithm has no setting for stays at its default."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clipping: dict[str, Any] = {"epsilon_low": self.epsilon, "epsilon_high": high}
        if self.kl_in_rewards:
            clipping["beta"] = 0.0
        own = {field.name for field in fields(LossSettings)} - clipping.keys()
        return LossSettings(**{name: getattr(self, name) for name in own if hasattr(self, name)}, **clipping)

    sampling_settings = generation_options.sampling_settings

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Counts the steps over which the learning rate rises."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    @property
    def sharded(self) -> bool:
        """Whether the ranks of the run share its weights, gradients and optimizer state."""
        asked = bool(self.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes")
        return asked and self.world_size > 1

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
        if self._world_size is not None:
            return self._world_size
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
        """Whether this process writes files and the log: the first rank does."""
        return self.process_index == 0

    should_log = should_save

    @property
    def train_batch_size(self) -> int:
        """Completions per rank and accumulation step."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Completions per rank that an evaluation draws at once."""
        return self.per_device_eval_batch_size

    def get_process_log_level(self) -> int:
        """Returns the least level that this process logs, as `logging` counts levels."""
        name = self.log_level if self.should_log else self.log_level_replica
        passive = int(transformers_logging.get_verbosity())
        return passive if name == "passive" else int(transformers_logging.get_log_levels_dict()[name])

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Lets the main process run a block first, then the others."""
        if self.world_size == 1:
            return nullcontext()
        logger.debug("rank %d: %s, main process first", self.process_index, desc)
        state = self.distributed_state
        turn: AbstractContextManager[None] = state.local_main_process_first() if local else state.main_process_first()
        return turn

    @property
    def distributed_state(self) -> PartialState:
        """What accelerate knows of the run's processes."""
        return PartialState(cpu=self.use_cpu)

    # Writing it down

    def to_dict(self) -> dict[str, Any]:
        """Returns every setting as plain data; a configuration made from it is equal to this one but for secrets."""
        secret = {name for name, one in self.declared.items() if one.secret}
        names = [*self.declared, *(one.name for one in fields(self) if self._is_users_own(one.name))]
        return {name: None if name in secret else _plain(getattr(self, name)) for name in names}

    def to_json_string(self) -> str:
        """Writes every setting as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns every setting as a number, truth value or text, as trackers want them."""
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
    if isinstance(value, (list, tuple, set, frozenset)):  # a set's order differs between processes
        return [_plain(item) for item in (value if isinstance(value, (list, tuple)) else sorted(value, key=str))]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.to_dict() if hasattr(value, "to_dict") else value
