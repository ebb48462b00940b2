"""The trainer that users hold: TRL's constructor, transformers' methods, and behind them one training loop."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from transformers import DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging as transformers_logging

from memsafe_rl.callbacks.console import CompletionsTable, ProgressBar, banner
from memsafe_rl.callbacks.status_file import RunRecord, StatusFile
from memsafe_rl.callbacks.trackers import Trackers, check_installed
from memsafe_rl.checkpoint.export import HubPush
from memsafe_rl.checkpoint.run_folder import check_writable
from memsafe_rl.checkpoint.weights import check_savable
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.external_rollout import RolloutFunction
from memsafe_rl.diagnostics.status import plain_number
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.ops.entropy import entropy_threshold, high_entropy_mask
from memsafe_rl.ops.losses.core import off_policy_mask
from memsafe_rl.parallel.replicas import connect, open_accelerator, sharing_failures
from memsafe_rl.preflight.forecast import forecast_before_loading, wants_forecast
from memsafe_rl.preflight.verify import require_proof
from memsafe_rl.preflight.worst_case import check_worst_case
from memsafe_rl.rewards.runner import RewardRunner, weights_for
from memsafe_rl.rollout.multi_turn.roles import ModelRoles
from memsafe_rl.trainers.overrides import INSTEAD, OwnRewards, hooks_of, refuse_ignored
from memsafe_rl.training.assembly.factory import build_setup, facts_of, machine_for, read_inputs, seed_rank
from memsafe_rl.training.assembly.inputs import own_config
from memsafe_rl.training.assembly.protocol import TrainingRequest
from memsafe_rl.training.loop import TrainingLoop, TrainResult
from memsafe_rl.training.optim.optimizer import build_optimizer, build_scheduler, given_optimizers
from memsafe_rl.training.setup import TrainingSetup


def _read(path: str, doc: str, change: Callable[[Any, Any], None] | None = None) -> Any:
    """Makes an attribute that is read from a part of the trainer's, however that is replaced, and may have a setter."""
    return property(attrgetter(path), change, doc=doc)


def _read_played(name: str, without: Any, doc: str) -> Any:
    """Makes an attribute that is read from where episodes are played, with its value where none are."""
    return property(lambda trainer: getattr(trainer.setup.environments, name, without), doc=doc)


def _moving(place: int, name: str, doc: str) -> Any:
    """Makes an attribute of one of the two that move weights: as it was passed or set, else as the committer has it."""

    def change(trainer: PolicyTrainer, value: Any) -> None:
        given = list(trainer._loop.optimizers)
        given[place] = value
        trainer._loop.optimizers = given_optimizers(given)

    return property(
        lambda trainer: trainer._loop.optimizers[place] or getattr(trainer.setup.committer, name, None), change, doc=doc
    )


def _set_train_dataset(trainer: PolicyTrainer, dataset: Any) -> None:
    dataset, source = trainer._inputs.for_training(dataset)
    trainer._loop.use(replace(trainer.setup, dataset=dataset, source=source))


def _set_eval_dataset(trainer: PolicyTrainer, dataset: Any) -> None:
    trainer._eval_dataset, trainer._loop.eval_dataset = dataset, trainer._inputs.for_evaluation(dataset)


class PolicyTrainer:
    """A trainer with TRL's arguments, which are `GRPOTrainer`'s; `config_class` says which configuration it takes."""

    config_class: ClassVar[type[TrainerConfig]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_ignored(cls, PolicyTrainer)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
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
        data = train_dataset, eval_dataset, processing_class, reward_processing_classes
        parts = quantization_config, peft_config, tools, rollout_func, environment_factory, memory_policy
        self._build(TrainingRequest(model, reward_funcs, *data, *parts), args, callbacks, optimizers)

    def _build(
        self,
        request: TrainingRequest,
        args: TrainerConfig | None,
        callbacks: Sequence[Any] | None,
        optimizers: tuple[Any, Any] | None,
    ) -> None:
        """Checks what was passed, forecasts the run where its weights are still to be loaded, and builds its loop."""
        self.args = own_config(args, request.model, type(self))
        self.args.output_dir = os.path.abspath(self.args.output_dir)  # a callback may change the directory
        logging.getLogger("memsafe_rl").setLevel(self.args.get_process_log_level())
        transformers_logging.set_verbosity(self.args.get_process_log_level())
        set_seed(self.args.seed)
        check_installed(self.args.trackers)
        self.accelerator = open_accelerator(
            self.args.use_cpu, log_with=self.args.trackers or None, project_dir=self.args.output_dir
        )
        parallel = connect(self.accelerator, sharded=self.args.sharded, timeout_seconds=self.args.ddp_timeout)
        with sharing_failures(parallel):
            if self.accelerator.is_main_process:  # several at once would take the folder from under each other
                check_writable(Path(self.args.output_dir))
            self._inputs = inputs = read_inputs(self.args, request)
            self._eval_dataset = request.eval_dataset
            outputs = self._check_outputs(inputs.models.processing_class)
            machine = machine_for(inputs, self.accelerator.device, parallel)
            self.forecast = (
                forecast_before_loading(inputs, machine) if wants_forecast(self.args, request.model) else None
            )
            draw = request.rollout_func  # which expects the trainer too
            draw_rollout = None if draw is None else lambda prompts: draw(prompts, self)
            setup = build_setup(inputs, machine, draw_rollout=draw_rollout)
            seed_rank(setup)
            handler = CallbackHandler([DefaultFlowCallback()], setup.model, setup.models.processing_class, None, None)
            self._loop = TrainingLoop(
                setup,
                optimizers=given_optimizers(optimizers),
                callbacks=handler,
                eval_dataset=inputs.eval_dataset,
                before_training=_check_before_training,
                hooks=hooks_of(self, PolicyTrainer),
            )
            self._own_rewards = OwnRewards(self, self._calculate_rewards, PolicyTrainer)
            for callback in (*_own_callbacks(self.args, setup, self._run_record), *outputs, *_listed(callbacks)):
                handler.add_callback(callback)
            self._loop.report.call_event("on_init_end", self._loop.state)
            if setup.parallel.is_main and not self.args.disable_tqdm:
                banner(self._facts())

    def _check_outputs(self, processing_class: Any) -> list[Any]:
        """Proves that the run's results can be written, followed and uploaded, before any weight is loaded."""
        self._hub = HubPush(self.args)
        if not self.accelerator.is_main_process:
            return []
        outputs: list[Any] = []
        if self.args.push_to_hub:
            self._hub.open()
            outputs.append(self._hub)
        if self.args.save_strategy != "no":
            check_savable(processing_class)
        if self.args.trackers:
            trackers = Trackers(self.accelerator, project=self.args.project, run_name=self.args.run_name)
            trackers.open(self.args)
            outputs.append(trackers)
        return outputs

    def __getattr__(self, name: str) -> Any:
        reason = INSTEAD.get(name)
        if reason is not None and name in self.config_class.declared:
            return getattr(self.args, name)  # as scripts and callbacks read it from TRL's trainer
        explained = f": {reason}." if reason else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{explained}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in INSTEAD:  # nobody would read it
            raise AttributeError(f"{type(self).__name__}.{name} cannot be set: {INSTEAD[name]}.")
        super().__setattr__(name, value)

    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> TrainResult:
        """Trains to the end, or from a checkpoint to the end.

        Args:
            resume_from_checkpoint: True for the latest checkpoint of `output_dir`, or a checkpoint's folder; False for
                none; None for what the configuration says.
            trial: must be None; there is no hyperparameter search.
            ignore_keys_for_eval: without effect; evaluation returns no model outputs.

        Returns:
            Steps done, mean loss, metrics.

        Raises:
            ConfigError: a setting cannot work, or there is no such checkpoint.
            MemoryBudgetError: no plan fits, and `allow_lossy` leaves no remedy.
        """
        del ignore_keys_for_eval
        if trial is not None:
            raise ConfigError("trial is given, but there is no hyperparameter search. Build one trainer a trial.")
        return self._loop.train(resume_from_checkpoint)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Draws and rewards completions for the evaluation prompts; moves no weight and no random stream.

        Args:
            eval_dataset: prompts; None for the trainer's own, or the name of one of them; a dict of datasets gives one
                set of metrics each.
            ignore_keys: without effect; no model outputs are returned.
            metric_key_prefix: begins every metric's name.

        Returns:
            Metrics, which are logged too.

        Raises:
            ConfigError: there is no evaluation dataset.
            DataError: it cannot be used.
        """
        del ignore_keys
        known = self._loop.eval_dataset
        if isinstance(eval_dataset, str) and isinstance(known, Mapping) and eval_dataset in known:
            return self._loop.evaluate(known[eval_dataset], metric_key_prefix)
        dataset = None if eval_dataset is None else self._inputs.for_evaluation(eval_dataset)
        return self._loop.evaluate(dataset, metric_key_prefix)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Writes the weights (the adapter's, when there is one) and the tokenizer.

        Args:
            output_dir: folder; None for `args.output_dir`.
            _internal_call: whether a checkpoint or an upload is being written, as TRL's trainer tells subclasses.
        """
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            self._loop.checkpoints.write_weights(folder)
        else:
            self._loop.save_model(folder)
            if self.args.push_to_hub:
                self.push_to_hub("Model save")

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True, **options: Any) -> Any:
        """Uploads the weights (the adapter's, when there is one), the tokenizer and a model card.

        Args:
            commit_message: of the commit.
            blocking: whether to wait for the upload.
            options: `revision`, `token`, `private`, and `dataset_name`, `model_name` and `tags` of the card.

        Returns:
            The commit, or its future where nobody waits; None on other ranks than the first. A repository that cannot
            be opened is a `ConfigError`.
        """
        # all ranks bring what they have of divided weights, before the first one goes on alone
        write = self._loop.checkpoints.writer() if self.setup.shards.divided else None
        save, push = self.save_model if write is None else lambda folder, **_: write(Path(folder)), self._hub.push_model
        return push(save, commit_message, wait=blocking, **options) if self.is_world_process_zero() else None

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = ()) -> None:
        """Writes a model card, `README.md`, into the run's folder.

        Args:
            model_name: None for the folder's name.
            dataset_name: of the training data.
            tags: a word, or several.
        """
        if self.is_world_process_zero():
            self._loop.files.write("README.md", str(self._hub.card(model_name, dataset_name, tags)))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Makes the optimizer that `optim` names; a subclass may make its own, and `train` uses it.

        Args:
            model: the network; None for `trainer.model`.

        Returns:
            The optimizer, which is `trainer.optimizer` from now on.
        """
        self.optimizer = optimizer = build_optimizer(self.setup.trained if model is None else model, self.args)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Makes the schedule that `lr_scheduler_type` names; a subclass may make its own, and `train` uses it.

        Args:
            num_training_steps: optimizer steps of the run.
            optimizer: what it moves; None for `trainer.optimizer`.

        Returns:
            The schedule, which is `trainer.lr_scheduler` from now on.
        """
        self.lr_scheduler = scheduler = build_scheduler(optimizer or self.optimizer, self.args, num_training_steps)
        return scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes both, by `create_optimizer` and `create_scheduler`.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        self.create_scheduler(num_training_steps, self.create_optimizer())

    def _calculate_rewards(
        self,
        inputs: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids_list: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Calls the reward functions, (B, F) float32; a subclass may reward in its own way, as in TRL."""
        return self._own_rewards.call_functions(inputs, prompts, completions, completion_ids_list)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds a record to `state.log_history` and hands it to the callbacks.

        Args:
            logs: names and values.
            start_time: without effect; `train_runtime` is logged at the end.
        """
        del start_time
        self._loop.report.log(self._loop.state, logs)

    get_off_policy_mask = staticmethod(off_policy_mask)

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """Marks a batch's actions whose entropy reaches their quantile, as `top_entropy_quantile` a step's."""
        least = entropy_threshold(entropies.flatten(), mask.flatten(), 1.0 - threshold)
        return high_entropy_mask(entropies, mask, least).bool()

    setup: TrainingSetup = _read("_loop.setup", "The parts of a training step, as they are now.")
    loop: TrainingLoop = _read("_loop", "Runs the setup's steps in order.")
    model: Any = _read("setup.model", "The network that is trained.")
    adapter: Any = _read("setup.adapter", "The network as the loops use it.")
    processing_class: Any = _read("setup.models.processing_class", "The tokenizer; None where there is none.")
    tokenizer: Any = _read("processing_class", "The tokenizer, under its older name.")
    rewards: RewardRunner = _read("setup.rewards", "The reward functions.")
    reward_funcs: list[Any] = _read("rewards.functions", "The reward functions and models, in their order.")
    reward_processing_classes: list[Any] = _read("rewards.processing_classes", "Their tokenizers, None for functions.")
    ref_model: Any = _read("setup.reference_model", "The frozen reference; None without one, or with an adapter to it.")
    entropy_coef: float = _read(
        "_loop.state.controllers.entropy.coef", "The entropy bonus's coefficient, as it is now."
    )
    tools: list[Any] = _read_played("tools", [], "What the model may call, methods of environments included.")
    environments: list[Any] | None = _read_played(
        "latest", None, "Environments of the latest rollout's rows, as they were made; None before it, or without any."
    )
    roles: ModelRoles = _read("setup.roles", "The model under its adapters, as users of episodes.")
    memory_policy: MemoryPolicy = _read("setup.memory_policy", "What makes the plans.")
    state: TrainerState = _read("_loop.state.progress", "Steps, epochs and logs, in transformers' form.")
    control: TrainerControl = _read("_loop.report.control", "What callbacks ask for.")
    history: Sequence[dict[str, float]] = _read(
        "_loop.state.history", "One record per optimizer step, read from the run's `steps.jsonl`."
    )
    memory_events: Sequence[dict[str, Any]] = _read(
        "setup.memory.events", "One record per plan, retry or alarm, read from the run's `memory.jsonl`."
    )
    callback_handler: CallbackHandler = _read("_loop.report.callbacks", "Calls the callbacks.")

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether updates add the balance loss of a mixture of experts."""
        return self.adapter.routers is not None

    @property
    def reward_func_names(self) -> list[str]:
        """The names of the reward functions, distinct."""
        return list(self.rewards.names)

    @property
    def reward_weights(self) -> torch.Tensor:
        """The weights of the reward functions, (F,) float32; others that are set hold from the next rollout on."""
        return torch.tensor(self.rewards.weights)

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        self.rewards.weights = weights_for(len(self.rewards.weights), weights)

    train_dataset: Any = _read(
        "setup.dataset", "The prompts; others may be set between two calls of `train`.", _set_train_dataset
    )
    eval_dataset: Any = _read("_eval_dataset", "The evaluation prompts, as they were passed or set.", _set_eval_dataset)
    optimizer: Any = _moving(0, "optimizer", "The optimizer that was passed or set, or the one that `train` made.")
    lr_scheduler: Any = _moving(
        1, "scheduler", "The learning-rate schedule that was passed or set, or the one that `train` made."
    )

    def add_callback(self, callback: Any) -> None:
        """Adds a callback of transformers' `TrainerCallback` form."""
        self._loop.report.callbacks.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, given as an instance or a class."""
        self._loop.report.callbacks.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback, given as an instance or a class, and gives it back."""
        return self._loop.report.callbacks.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Returns whether this is the first of all processes."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """Returns whether this is the first process of its machine."""
        return bool(self.accelerator.is_local_main_process)

    def save_state(self) -> None:
        """Writes `trainer_state.json` into the run's folder."""
        if self.is_world_process_zero():
            self._loop.files.write("trainer_state.json", json.dumps(asdict(self.state), default=plain_number))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics, a line each.

        Args:
            split: "train", "eval" or another heading.
            metrics: names and values.
        """
        if self.is_world_process_zero():
            lines = [f"  {name:40s} = {value}" for name, value in sorted(metrics.items())]
            print("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes metrics as JSON into the run's folder.

        Args:
            split: names the file, `SPLIT_results.json`.
            metrics: names and values.
            combined: also add them to `all_results.json`.

        Raises:
            ConfigError: if `all_results.json` holds something else than metrics, which would be lost.
        """
        if self.is_world_process_zero():
            metrics = json.loads(json.dumps(dict(metrics), default=plain_number))
            self._loop.files.write(f"{split}_results.json", json.dumps(metrics, indent=4))
            if combined:
                self._loop.files.add("all_results.json", metrics)

    def end(self) -> None:
        """Closes trackers and leaves the process group."""
        self.accelerator.end_training()

    def _run_record(self) -> dict[str, Any]:
        """Says what the run's folder holds of the run besides its settings."""
        return {
            "facts": self._facts(),
            "data": _rows_and_columns(self.train_dataset),
            "rollout_rows": self.args.rollout_rows,
            "forecast": None if self.forecast is None else self.forecast.plain(),
        }

    def _facts(self) -> dict[str, str]:
        return {**facts_of(self.setup), **({} if self.forecast is None else self.forecast.facts())}


def _rows_and_columns(dataset: Any) -> str:
    """Says what a dataset holds, for a model card."""
    rows = f"{len(dataset):,} rows" if isinstance(dataset, Dataset) else "a stream"
    return f"{rows}: {', '.join(getattr(dataset, 'column_names', None) or ())}".rstrip(": ")


def _check_before_training(loop: TrainingLoop) -> None:
    """Runs the checks that the settings ask for; they leave everything as it was."""
    if loop.config.verify_plan:
        require_proof(loop)
    if loop.config.probe_worst_case:
        check_worst_case(loop)


def _own_callbacks(args: TrainerConfig, setup: TrainingSetup, record: Any) -> list[Any]:
    """Makes the callbacks that every run has; ``record`` says what the run's folder holds besides settings."""
    output_dir, parallel = Path(args.output_dir), setup.parallel
    own: list[Any] = [
        RunRecord(output_dir, setup.memory, record),
        StatusFile(output_dir, setup.memory, rank=parallel.rank, world_size=parallel.world_size),
    ]
    if args.log_completions:
        limit = args.num_completions_to_print
        own.append(CompletionsTable(output_dir, limit=limit, unique_prompts=args.log_unique_prompts))
    if not args.disable_tqdm:
        own.append(ProgressBar())
    return own


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
