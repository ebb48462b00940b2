"""From what a user passes to a trainer that is ready: the same constructor for every algorithm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers.utils import logging as transformers_logging

from memsafe_rl.accounting import weights_of
from memsafe_rl.callbacks.console import CompletionsTable, ProgressBar, banner
from memsafe_rl.callbacks.logs import MetricsLog, RunRecord
from memsafe_rl.callbacks.status_file import StatusFile
from memsafe_rl.callbacks.trackers import Trackers
from memsafe_rl.checkpoint.weights import read_critic, write_critic
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.environments import ENVIRONMENTS, EnvironmentPool, environment_pool_for, with_prompts
from memsafe_rl.data.external_rollout import RolloutFunction
from memsafe_rl.data.prompts import PromptReader
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.budget import MemoryBudget
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.meters import meter_for
from memsafe_rl.memory.runtime.recovery import Recovery
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.models.loading import LoadedModel
from memsafe_rl.parallel.ranks import Ranks
from memsafe_rl.preflight.forecast import foresee, wants_forecast
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.preflight.verify import require_proof
from memsafe_rl.preflight.worst_case import probe_worst_case
from memsafe_rl.rewards.base import RewardRunner
from memsafe_rl.rewards.calls import TimeoutPolicy
from memsafe_rl.trainers.inputs import (
    check_together,
    chosen_policy,
    evaluation_prompts,
    own_config,
    text_dataset,
    training_prompts,
)
from memsafe_rl.trainers.kinds import kind_of
from memsafe_rl.training.critic_advantages import CriticAdvantages
from memsafe_rl.training.experience import ExperienceMaker
from memsafe_rl.training.loop import OnPolicyTrainer
from memsafe_rl.training.optim.optimizer import given_optimizers
from memsafe_rl.types import Phase
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)


class PolicyTrainer(OnPolicyTrainer):
    """A trainer with TRL's arguments; its algorithm says which configuration it takes.

    Args and errors are those of `GRPOTrainer`.
    """

    config_class: ClassVar[type[TrainerConfig]]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: TrainerConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] | None = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Any = None,
        memory_policy: MemoryPolicy | str | None = None,
    ) -> None:
        self.args = own_config(args, model, type(self))
        _set_log_level(self.args.get_process_log_level())
        set_seed(self.args.seed)
        self._kind = kind_of(model)(self.args, model, processing_class)
        self.processing_class, reader = self._kind.processing_class, self._kind.reader
        self._bound_prompts(reader)
        self._kind.check_given(
            {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        )
        stage = environment_pool_for(self.args, self.processing_class, tools, environment_factory)
        if stage is not None:
            train_dataset = with_prompts(self.args, train_dataset, stage)
            eval_dataset = with_prompts(self.args, eval_dataset, stage, evaluates=True)
        self.train_dataset = text_dataset(self.args, train_dataset, "train_dataset")
        source = training_prompts(self.args, self.train_dataset, reader)
        self.rewards = self._prepare_rewards(reward_funcs, reward_processing_classes, stage)
        check_together(self.args, self.train_dataset, self.rewards, rollout_func, stage)
        eval_dataset = evaluation_prompts(self.args, eval_dataset, reader, self.rewards)

        self.accelerator = self._make_accelerator()
        ranks = Ranks(self.accelerator)
        self.memory_policy = chosen_policy(memory_policy, self.args)
        recovery = Recovery(self._prepare_memory(), self.memory_policy)
        self.forecast = self._foresee(
            recovery.tracker,
            model,
            eval_dataset,
            peft_config=peft_config,
            quantization_config=quantization_config,
        )
        with recovery.tracker.phase(Phase.LOAD):
            loaded = self._load(recovery, model, quantization_config, peft_config)
            self.credit = self._make_credit(recovery)
        maker = ExperienceMaker(
            config=self.args,
            adapter=self.adapter,
            engine=self._kind.engine(self.adapter, recovery.tracker),
            kind=self._kind,
            rewards=self.rewards,
            policy=self.memory_policy,
            recovery=recovery,
            ranks=ranks,
            sampling=self._kind.sampling_settings(self.adapter),
            autocast=self._autocast,
            rollout_func=rollout_func,
            owner=self,
            credit=self.credit,
            stage=stage,
        )
        self.roles = maker.roles
        self._assemble(
            adapter=self.adapter,
            reference_model=loaded.reference_model,
            source=source,
            maker=maker,
            recovery=recovery,
            ranks=ranks,
            eval_dataset=eval_dataset,
            callbacks=[*self._own_callbacks(recovery.tracker, ranks), *_listed(callbacks)],
            optimizers=given_optimizers(optimizers),
        )
        if ranks.is_main and not self.args.disable_tqdm:
            banner(self._facts(recovery.tracker))

    def _bound_prompts(self, reader: PromptReader) -> None:
        """Lowers the limit of prompts to what every network that reads them has room for."""

    def _foresee(self, tracker: MemoryTracker, model: Any, eval_dataset: Any, **given: Any) -> MemoryForecast | None:
        """Forecasts the run where its weights are still to be loaded; plans begin with what that tells."""
        if not wants_forecast(self.args, model):
            return None
        forecast = foresee(
            type(self),
            model,
            self.args,
            tracker,
            train_dataset=self.train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.processing_class,
            memory_policy=self.memory_policy,
            reward_models=self.rewards.models,
            **given,
        )
        if forecast is not None:
            tracker.expect(forecast.corrections)
        return forecast

    def _weights(self) -> list[Tensor]:
        """Adds the weights of reward models, which lie beside the model's."""
        return [*super()._weights(), *weights_of(*self.rewards.models)]

    def _make_accelerator(self) -> Accelerator:
        return Accelerator(cpu=self.args.use_cpu, log_with=self.args.trackers or None)

    def _prepare_rewards(
        self, reward_funcs: Any, reward_processing_classes: Any, stage: EnvironmentPool | None = None
    ) -> RewardRunner:
        weights = self.args.reward_weights
        if stage is not None:
            reward_funcs, reward_processing_classes, weights = stage.beside(
                reward_funcs, reward_processing_classes, weights
            )
        return RewardRunner(
            reward_funcs,
            reward_processing_classes,
            weights,
            model_init_kwargs=self.args.model_init_kwargs,
            trust_remote_code=self.args.trust_remote_code,
            chat_template_kwargs=self.args.chat_template_kwargs,
            patience=TimeoutPolicy(
                self.args.reward_timeout_seconds, self.args.reward_retries, self.args.reward_timeout_result == "none"
            ),
            rollout_columns=() if stage is None else (ENVIRONMENTS,),
        )

    def _load(self, recovery: Recovery, model: Any, quantization_config: Any, peft_config: Any) -> LoadedModel:
        """Loads the weights and checks the log-prob head against the model's own logits."""

        def load() -> LoadedModel:
            return self._load_model(model, quantization_config, peft_config)

        # An adapter goes into a model object in place, so that only a model loaded by name can be loaded again.
        loaded = recovery.repeat(load) if isinstance(model, str) else _loaded_once(recovery, load, model)
        _refuse_half_weights(loaded.model)
        self.model = loaded.model.eval()
        recovery.repeat(lambda: self.rewards.to(self.accelerator.device))
        self.adapter = self._kind.adapt(loaded)
        recovery.repeat(lambda: self._check(self.adapter))
        return loaded

    def _make_credit(self, recovery: Recovery) -> CriticAdvantages | None:
        """Makes what judges single actions; None where a row's advantage is that of all its actions."""
        del recovery
        return None

    def _check(self, adapter: Any) -> None:
        with self._autocast():
            self._kind.check(adapter)

    def _load_model(self, model: Any, quantization_config: Any, peft_config: Any) -> LoadedModel:
        return self._kind.load(
            model,
            self.accelerator.device,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    def _prepare_memory(self) -> MemoryTracker:
        device, kind = self.accelerator.device, self._kind_of_device()
        meter = meter_for(device)
        budget = MemoryBudget.parse(self.args.memory_budget)
        total_bytes, free_bytes = meter.total_bytes(), meter.free_bytes()
        budget_bytes = budget.resolve(total_bytes=total_bytes, free_bytes=free_bytes)
        return MemoryTracker(kind, meter, budget_bytes, self._holders, self._optimizer_bytes)

    def _kind_of_device(self) -> str:
        return str(self.accelerator.device.type)

    def _own_callbacks(self, tracker: MemoryTracker, ranks: Ranks) -> list[Any]:
        output_dir = Path(self.args.output_dir)
        device = self.accelerator.device
        own: list[Any] = [
            MetricsLog(output_dir, tracker.events),
            RunRecord(output_dir, tracker, device, self._run_record),
            StatusFile(output_dir, tracker, device, rank=ranks.rank, world_size=ranks.world_size),
        ]
        if self.args.log_completions:
            own.append(
                CompletionsTable(
                    output_dir,
                    limit=self.args.num_completions_to_print,
                    unique_prompts=self.args.log_unique_prompts,
                )
            )
        if self.args.trackers and ranks.is_main:
            own.append(Trackers(self.accelerator, project=self.args.project, run_name=self.args.run_name))
        if not self.args.disable_tqdm:
            own.append(ProgressBar())
        return own

    def _run_record(self) -> dict[str, Any]:
        """What the run's folder says of the run besides its settings."""
        return {
            "facts": self._facts(self._tracker),
            "rollout_rows": self.args.rollout_rows,
            "forecast": None if self.forecast is None else self.forecast.plain(),
        }

    def _facts(self, tracker: MemoryTracker) -> dict[str, str]:
        """What the start banner says."""
        geometry = self.adapter.geometry
        lora = getattr(self.model, "peft_config", {})
        adapters = ", ".join(f"{type(config).__name__} r={getattr(config, 'r', '-')}" for config in lora.values())
        return {
            "effective batch": f"{self.args.step_rows} completions an optimizer step",
            "group size": f"{self.args.num_generations} completions a prompt",
            "generations": f"{self.args.rollout_rows} a rollout, learnt from {self.args.num_iterations} time(s)",
            **self._kind.facts(),
            "adapter": adapters or "none, all weights are trained",
            "weights": f"{format_bytes(geometry.parameter_bytes)}, trained {format_bytes(geometry.trainable_bytes)}",
            "device": str(self.accelerator.device),
            "memory budget": format_bytes(tracker.budget_bytes),
            **({} if self.forecast is None else {"forecast": self.forecast.sentence()}),
            "memory policy": type(self.memory_policy).__name__,
        }

    def _run_facts(self) -> dict[str, Any]:
        return {**super()._run_facts(), **self._kind.run_facts()}

    def _rehearse(self) -> None:
        if self.args.verify_plan:
            require_proof(self)
        if self.args.probe_worst_case:
            probe_worst_case(self)

    def _write_weights(self, folder: Path) -> None:
        self._kind.save(self.model, folder)
        if self.credit is not None:
            write_critic(self.credit.critic, folder)

    def _load_weights(self, folder: Path) -> None:
        self._kind.restore(self.model, folder)
        if self.credit is not None:
            read_critic(self.credit.critic, folder)


def _loaded_once(recovery: Recovery, load: Callable[[], LoadedModel], model: Any) -> LoadedModel:
    """Prepares a model object; where that does not fit, says how large its weights are."""
    try:
        return recovery.once(load)
    except MemoryBudgetError as error:
        storages = {weight.untyped_storage()._cdata: weight.untyped_storage() for weight in weights_of(model)}
        size = format_bytes(sum(storage.nbytes() for storage in storages.values()))
        raise MemoryBudgetError(
            f"The weights of the {type(model).__name__} that was given are {size}. {error}",
            failure=error.failure,
            held_bytes=error.held_bytes,
        ) from None


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in listed:
        if not hasattr(callback, "on_init_end"):
            raise ConfigError(
                f"callbacks has {callback!r:.100} ({type(callback).__name__}), which is no callback. Derive it from "
                "transformers.TrainerCallback."
            )
    return listed


def _refuse_half_weights(model: Any) -> None:
    """Refuses to move float16 weights, whose updates are lost to rounding or overflow without a word."""
    name = next((name for name, w in model.named_parameters() if w.requires_grad and w.dtype == torch.float16), None)
    if name is not None:
        raise ConfigError(
            f"{name} is to be trained in float16, in which updates vanish or overflow. Load the model in float32 "
            "(model.float(), or model_init_kwargs={'dtype': 'float32'}) and set fp16=True or bf16=True for the forward "
            "passes, or train an adapter (peft_config)."
        )


def _set_log_level(level: int) -> None:
    logging.getLogger("memsafe_rl").setLevel(level)
    transformers_logging.set_verbosity(level)
