"""The training loop: collect, then learn. A subclass says how advantages and losses come about."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from memsafe_rl.accounting import charge
from memsafe_rl.callbacks.console import summary
from memsafe_rl.checkpoint.store import (
    checkpoint_folder,
    drop_old_checkpoints,
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from memsafe_rl.config.degradation import Degradation, degrade, next_degradation
from memsafe_rl.config.resume_checks import check_same_run, run_facts
from memsafe_rl.data.order import Cursor, rows_of_step
from memsafe_rl.data.partial_rollouts import OpenGroup, plain_groups
from memsafe_rl.data.prompts import PromptSource, check_dataset
from memsafe_rl.diagnostics.run_figures import run_figures
from memsafe_rl.errors import ConfigError, DataError, MemoryBudgetError, MemsafeError
from memsafe_rl.memory.runtime.attribution import held_by, optimizer_tensors
from memsafe_rl.memory.runtime.interrupts import uninterrupted
from memsafe_rl.memory.runtime.meters import check_meter
from memsafe_rl.memory.runtime.random_state import (
    RandomState,
    capture_random_state,
    plain_random_state,
    restore_random_state,
)
from memsafe_rl.memory.runtime.recovery import Recovery, flush_autograd
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.parallel.ranks import Ranks
from memsafe_rl.rewards.base import RewardScores
from memsafe_rl.training.alarms import AlarmWatch
from memsafe_rl.training.controllers import Controllers
from memsafe_rl.training.experience import ExperienceMaker
from memsafe_rl.training.gradient import StepGradient
from memsafe_rl.training.learning import LearningTrainer
from memsafe_rl.training.objectives import kl_bands
from memsafe_rl.training.optim.optimizer import Committer
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.step_metrics import averages
from memsafe_rl.training.weight_sample import WeightSample
from memsafe_rl.types import Component, Phase

logger = logging.getLogger(__name__)


class TrainResult(NamedTuple):
    """What a finished run returns, in the order of transformers' `TrainOutput`.

    Args:
        global_step: optimizer steps done.
        training_loss: mean loss of the steps of this call.
        metrics: the last step's metrics and the run's totals.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class OnPolicyTrainer(LearningTrainer):
    """Rolls out, rewards, learns, logs, evaluates and saves; resumes at any optimizer step.

    A subclass prepares the parts in its constructor and calls `_assemble`.
    """

    history: list[dict[str, float]]

    def _assemble(
        self,
        *,
        adapter: ModelAdapter,
        reference_model: Any,
        source: PromptSource,
        maker: ExperienceMaker,
        recovery: Recovery,
        ranks: Ranks,
        eval_dataset: Any,
        callbacks: Sequence[Any],
        optimizers: tuple[torch.optim.Optimizer | None, Any],
    ) -> None:
        self.adapter = adapter
        self._reference_model = reference_model
        self.history = []
        self.eval_dataset = eval_dataset
        self.state = TrainerState(is_world_process_zero=ranks.is_main, is_local_process_zero=ranks.is_main)
        self.control = TrainerControl()
        self._source = source
        self._maker = maker
        self._recovery = recovery
        self._tracker = recovery.tracker
        self._ranks = ranks
        self._packable = self.args.disable_dropout  # under dropout, completions behind one prompt would share its mask
        self._given_optimizers = optimizers
        self._committer: Committer | None = None
        self._cursor = Cursor()
        self._experience: Rollout | None = None
        self._waiting: tuple[OpenGroup, ...] = ()
        self._controllers = Controllers.at_start(self.args)
        self._table: tuple[dict[str, Any], ...] = ()
        self._random_before_step: RandomState | None = None
        self._pending: dict[str, list[float]] = defaultdict(list)
        self._degradations: list[Degradation] = []
        self._alarms = AlarmWatch(self.args.alarm_rules, kl_bands(self.args.objective_list))
        self._judged: dict[str, float] = {}
        self._callbacks = CallbackHandler(
            [DefaultFlowCallback(), *callbacks], self.model, self.processing_class, None, None
        )
        self.control = self._callbacks.on_init_end(self.args, self.state, self.control)

    @property
    def memory_events(self) -> list[dict[str, Any]]:
        """One record a plan, retry or alarm."""
        return self._tracker.events

    def _trajectory_tensors(self) -> list[Tensor]:
        """Gives the tensors of the stored rollout, if there is one."""
        return [] if self._experience is None else self._experience.trajectory.tensors()

    def _holders(self) -> dict[Component, int]:
        """Counts the bytes on the device of what this run is known to hold."""
        if not hasattr(self, "_experience"):  # the model is still being loaded
            return {}
        return held_by(
            self.adapter.device,
            weights=self._weights(),
            optimizer=self.optimizer,
            trajectory=self._trajectory_tensors(),
        )

    def _long_lived(self) -> list[Tensor]:
        """Gives the tensors that may outlive a step."""
        return [*self._weights(), *optimizer_tensors(self._committed.optimizer), *self._trajectory_tensors()]

    # ------------------------------------------------------------------ the run

    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> TrainResult:
        """Trains to the end, or from a checkpoint to the end."""
        del ignore_keys_for_eval
        if trial is not None:
            raise ConfigError("trial is given, but there is no hyperparameter search. Build one trainer a trial.")
        started = time.perf_counter()
        try:
            self._begin(resume_from_checkpoint or self.args.resume_from_checkpoint)
            first = len(self.history)
            while not self.control.should_training_stop:
                degradation = self._step_or_degradation()
                if degradation is not None:
                    self._concede(degradation)
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._maker.close()
            self._tracker.release()
            self._notify("close")
        return self._end(started, first)

    def _step_or_degradation(self) -> Degradation | None:
        """Does one step, or gives the next change of the task that the user allows where no plan fits."""
        try:
            self._train_step()
        except MemoryBudgetError as error:
            degradation = self._degradation_after(error)
            if degradation is None:
                raise
            return degradation
        return None

    def _degradation_after(self, error: MemoryBudgetError) -> Degradation | None:
        """Gives the next change of the task that the user allows; several ranks would choose different ones."""
        if error.failure is None:
            return None
        listed = self.args.allow_lossy if self._ranks.world_size == 1 else ()
        possible = {"optim": self._given_optimizers[0] is None, "cache_implementation": self._maker.can_round_cache}
        allowed = [name for name in listed if possible.get(name, True)]
        return next_degradation(self.args, allowed, error.failure)

    def _leave(self, error: BaseException) -> None:
        """Leaves the state as it was before the step, tells the other ranks, and saves what can be gone on from."""
        if self._committer is None:
            return
        self._committer.drop_gradients()
        flush_autograd()  # an interrupted backward left its graph there
        self._ranks.fail(f"{type(error).__name__}: {error}")
        if not isinstance(error, (KeyboardInterrupt, MemsafeError)):
            return
        if self.args.save_strategy != "no" and self.state.global_step > 0:
            logger.warning("saving step %d before leaving", self.state.global_step)
            self._save_checkpoint(self._random_before_step)

    def _concede(self, degradation: Degradation) -> None:
        """Changes the task as the user allowed, and begins the rollout anew, or the next one if weights have moved."""
        self._committed.drop_gradients()
        self._apply(degradation)
        if not self._cursor.starts_rollout:
            consumed = 0 if self._experience is None else self._experience.consumed
            self._cursor = self._cursor.advance(steps=1, epochs=1, consumed=consumed, stop=True)
            self._waiting = () if self._experience is None else self._experience.waiting
        self._experience = None
        self._tracker.record("degradation", remedy=degradation.name, changes=dict(degradation.changes))
        told = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in degradation.changes.items())
        logger.warning("no plan fits: going on with a changed task, as allow_lossy allows: %s", told)

    def _apply(self, degradation: Degradation) -> None:
        degrade(self.args, degradation)
        self.args.validate()
        self._degradations.append(degradation)
        self._maker.limit(self.args.max_completion_length)
        if "cache_implementation" in degradation.changes:
            self._maker.round_cache()
        if "optim" in degradation.changes:
            schedule = self._committed.scheduler.state_dict()
            self._committer = None  # its state makes room for the new one's
            self._make_optimizer(self._max_steps())
            self._committed.go_on_at(schedule)

    def _train_step(self) -> None:
        """One optimizer step, from the prompts to the log."""
        self._begin_step()
        metrics = self._learn()
        self._finish_step(metrics)

    def _learn(self) -> dict[str, float]:
        """Rolls out where it is due and moves the weights; what it needs is freed before evaluation and saving."""
        if self._experience is None:
            self._experience = self._roll_out()
        rows = self._experience.trajectory.rows_of(self._rows())
        terms = self._fix_terms(self._experience, rows)
        mine = self._mine(self._experience.trajectory, rows)
        self._plan_update(self._experience.trajectory, mine)
        with self._tracker.phase(Phase.UPDATE):
            self._experience, gradient = self._gradient(self._experience, mine, terms)
            measured = self._measure(gradient, terms)
            look = self._look_at_weights()
            experience = self._with_old_logprobs(self._experience, gradient)
        with uninterrupted():  # from here to the cursor nothing is read from the device
            self._commit()
            self._experience = experience
            metrics = self._account(measured, gradient.micro_batches)
            self._advance(metrics)
            self._note(metrics)
            self._random_before_step = None
        return metrics if look is None else metrics | self._lost_updates(look)

    def _roll_out(self) -> Rollout:
        """Prompts, completions, rewards, advantages, reference and old log-probs of the next rollout."""
        cursor = self._cursor
        first = set(self._rows())
        later = [row for row in range(self.args.rollout_rows) if row not in first]
        experience = self._maker.make(
            self._source,
            rollout=cursor.rollout,
            position=cursor.position,
            later_rows=later,
            waiting=self._waiting,
        )
        self._table = experience.table
        self._random_before_step = self._recovery.repeat(capture_random_state)  # reward functions may have drawn
        return experience

    def _rows(self) -> list[int]:
        """Rows of the next optimizer step, over all ranks."""
        config = self.args
        return self._recovery.repeat(
            lambda: rows_of_step(self._cursor, config.rollout_rows, config.step_rows, config.order_seed)
        )

    def _with_old_logprobs(self, experience: Rollout, gradient: StepGradient) -> Rollout:
        """Keeps the first update's own log-probs, detached, as the old ones of the later passes."""
        if self.args.num_iterations == 1 or self._cursor.epoch > 0:
            return experience
        trajectory = experience.trajectory

        def fresh() -> list[tuple[int, Tensor]]:
            return [(row, values.cpu()) for row, values in gradient.logprobs.items() if not trajectory.has_old[row]]

        found = dict(self._ranks.gather(self._recovery.repeat(fresh)))
        if not found:
            return experience
        has_old = tuple(known or row in found for row, known in enumerate(trajectory.has_old))
        with charge(Component.TRAJECTORY):
            store = self._recovery.repeat(lambda: trajectory.actions.beside(found, trajectory.old_logprobs))
        return replace(experience, trajectory=replace(trajectory, old_logprobs=store, has_old=has_old))

    # ------------------------------------------------------------------ metrics and events

    def record(self, scores: RewardScores) -> None:
        """Takes what reward functions logged through `log_metric`, and their seconds."""
        for name, values in scores.metrics.items():
            self._pending[name].append(sum(values) / len(values))
        for name, seconds in scores.seconds.items():
            metric = f"time/reward/{name}_seconds"
            self._pending[metric].append(seconds)
            self._judged[metric] = self._judged.get(metric, 0.0) + seconds
        for name, timeouts in scores.timeouts.items():
            self._pending[f"rewards/{name}/timeouts"].append(timeouts)

    def report_sampling(self, ended: int, total: int) -> None:
        """Tells progress bars how many of a rollout's completions have ended."""
        self._notify("on_sampling", ended, total)

    def _account(self, measured: Mapping[str, float], micro_batches: int) -> dict[str, float]:
        """Adds to the step's numbers what is known on the host, and moves what follows from them."""
        metrics, plan = dict(measured), self._tracker.update_plan
        if self._experience is not None and self._cursor.starts_rollout:
            metrics |= self._experience.metrics
            self.state.num_input_tokens_seen += int(metrics.pop("step_tokens"))
        metrics["num_tokens"] = float(self.state.num_input_tokens_seen)
        metrics["learning_rate"] = self._last_learning_rate
        metrics["plan/micro_batch_tokens"] = float(plan.micro_batch_tokens)
        metrics["plan/micro_batches"] = float(micro_batches)
        metrics["plan/checkpointing"] = float(plan.checkpointing)
        metrics["plan/pack_prompts"] = float(plan.pack_prompts)
        metrics["plan/rows_in_flight"] = float(self._tracker.rollout_plan.rows_in_flight)
        self._controllers = self._controllers.after(metrics, self.args)
        if self.args.gives_entropy_bonus:
            metrics["entropy_coef"] = self._controllers.entropy.coef
        metrics |= self._tracker.drain()
        metrics["step_time"] = time.perf_counter() - self._step_started
        return metrics

    def _begin_step(self) -> None:
        self._step_started = time.perf_counter()
        self._tracker.step = self.state.global_step
        self._judged.clear()  # an evaluation's rewards may take longer
        self._random_before_step = self._recovery.repeat(capture_random_state)
        self._last_learning_rate = self._committed.learning_rate
        self.control = self._callbacks.on_step_begin(self.args, self.state, self.control)

    def _advance(self, metrics: Mapping[str, float]) -> None:
        """Moves to the next optimizer step; the KL stop ends the passes over this rollout only."""
        stop = self._kl_stops(metrics)
        if stop:
            self._tracker.record("kl_stop", step=self.state.global_step + 1, **stop)
        consumed = 0 if self._experience is None else self._experience.consumed
        before = self._cursor
        self._cursor = before.advance(
            steps=self.args.updates_per_epoch, epochs=self.args.num_iterations, consumed=consumed, stop=bool(stop)
        )
        if self._cursor.rollout != before.rollout:
            if self.credit is not None and self._experience is not None:
                self.credit.leave_rollout(self._experience.metrics)
            self._waiting = () if self._experience is None else self._experience.waiting
            self._experience = None
        self.state.global_step += 1

    def _kl_stops(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Gives the KL against the old model and its bound when the bound is passed, else nothing."""
        rule = self.args.kl_stop_rule
        if rule is None:
            return {}
        measured = metrics[f"approx_kl/{rule.estimator}_{rule.unit}"]
        return {"measured": measured, "target": rule.target} if measured > rule.target else {}

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Writes a step down that is done."""
        self.history.append({"step": float(self.state.global_step), "epoch": self._epoch(), **metrics})
        for name, value in metrics.items():
            self._pending[name].append(value)
        self._sound_alarms(metrics)

    def _sound_alarms(self, metrics: Mapping[str, float]) -> None:
        """Says it when the step broke a rule of `alarms` that held before."""
        self._tell(self._alarms.observe(self.state.global_step, {**metrics, **self._judged}, self.memory_events))

    def _lost_updates(self, look: WeightSample) -> dict[str, float]:
        """Notes which share of half-precision weights the step just done did not move, and says it if it is large."""
        share = self._recovery.repeat(look.lost_share)
        if share is None:
            return {}
        self.history[-1]["lost_updates"] = share
        self._pending["lost_updates"].append(share)
        self._tell(self._alarms.observe_weights(self.state.global_step, share, self._last_learning_rate))
        return {"lost_updates": share}

    def _tell(self, events: Sequence[dict[str, Any]]) -> None:
        """Writes alarms down."""
        for event in events:
            self.memory_events.append(event)
            if self._ranks.is_main:
                logger.warning("step %d: %s", event["step"], event["sentence"])

    def _finish_step(self, metrics: dict[str, float]) -> None:
        """Logs, evaluates, saves and stops as callbacks say."""
        epoch = self._epoch()
        crossed = int(epoch) > int(self.state.epoch)
        self.state.epoch = epoch
        self._notify("on_progress", self.state.global_step, metrics)
        self.control = self._callbacks.on_step_end(self.args, self.state, self.control)
        if self._used_up():
            self.control.should_training_stop = True
        self._obey()
        if crossed or self.control.should_training_stop:
            self.control = self._callbacks.on_epoch_end(self.args, self.state, self.control)
            self._obey()
            if not self.control.should_training_stop:
                self.control = self._callbacks.on_epoch_begin(self.args, self.state, self.control)
        self._tracker.end_step(self._long_lived, steps_per_rollout=self._steps_per_rollout)

    def _obey(self) -> None:
        """Does what the control flags ask for."""
        if self.control.should_log:
            self.control.should_log = False
            self.log(averages(self._pending))
            self._pending.clear()
            if self.args.log_completions and self._ranks.is_main and self._table:
                self._notify("on_completions", self.state.global_step, self._table)
                self._table = ()
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            if self.eval_dataset is not None:
                self._track_best(self.evaluate())
        if self.control.should_save:
            self.control.should_save = False
            self._save_checkpoint()

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds a record to `state.log_history` and hands it to the callbacks."""
        del start_time
        record = {name: None if _is_nan(value) else value for name, value in logs.items()} | {"epoch": self.state.epoch}
        self.state.log_history.append({**record, "step": self.state.global_step})
        self.control = self._callbacks.on_log(self.args, self.state, self.control, record)

    def _notify(self, event: str, *arguments: Any) -> None:
        """Tells the callbacks that know an event of ours beside transformers' own."""
        for callback in self._callbacks.callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                handler(*arguments)

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Draws and rewards completions for the evaluation prompts; moves no weight and no random stream."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluate() needs prompts. Pass eval_dataset to the trainer or to evaluate().")
        if isinstance(dataset, Mapping):
            merged: dict[str, float] = {}
            for name, part in dataset.items():
                merged |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return merged
        examples = list(check_dataset(dataset, "eval_dataset"))
        if not examples:
            raise DataError("eval_dataset is empty. Pass at least one example with a 'prompt' column.")
        values = self._maker.evaluate(examples, self.args.eval_generations)
        values.pop("step_tokens")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(metrics)
        self.control = self._callbacks.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _track_best(self, metrics: Mapping[str, float]) -> None:
        """Remembers the best evaluation, for `load_best_model_at_end`."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"metric_for_best_model is {name!r}, which evaluation does not give. Use one of {sorted(metrics)}."
            )
        value, best = metrics[name], self.state.best_metric
        if math.isnan(value):
            return
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.control.should_save = self.control.should_save or self.args.save_strategy == "best"

    # ------------------------------------------------------------------ beginning, end, checkpoints

    def _begin(self, resume: bool | str | Path | None) -> None:
        """Makes optimizer and schedule, and goes to where the run stands."""
        self.args.validate()
        check_meter(self._tracker.meter)
        max_steps = self._max_steps()
        if self.args.memory_budget != "auto":
            self._tracker.enforce()
        self._make_optimizer(max_steps)
        self._go_to_start()
        if resume:
            folder = find_checkpoint(Path(self.args.output_dir), resume)
            self._recovery.repeat(lambda: self._resume(folder))
        self.state.max_steps = max_steps
        self.state.num_train_epochs = math.ceil(self.args.num_train_epochs)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, max_steps)
        self._rehearse()
        self.control = self._callbacks.on_train_begin(self.args, self.state, self.control)
        self.control = self._callbacks.on_epoch_begin(self.args, self.state, self.control)
        if self.state.global_step >= max_steps:
            self.control.should_training_stop = True
        if self.args.eval_on_start and not resume and self.eval_dataset is not None:
            self.evaluate()

    def _go_to_start(self) -> None:
        """Forgets where an earlier call of `train` got to; the weights stay as they are."""
        main = self._ranks.is_main
        self.state = TrainerState(is_world_process_zero=main, is_local_process_zero=main)
        self.control = TrainerControl()
        self.history = []
        self._cursor, self._experience, self._waiting, self._table = Cursor(), None, (), ()
        self._controllers = Controllers.at_start(self.args)
        if self.credit is not None:
            self.credit.kl_scale = 1.0
        self._alarms = AlarmWatch(self.args.alarm_rules, kl_bands(self.args.objective_list))
        self._pending.clear()

    def _end(self, started: float, first: int) -> TrainResult:
        """Waits for all ranks, logs totals and loads the best model if asked to."""
        self._ranks.wait()
        seconds = time.perf_counter() - started
        losses = [record["loss"] for record in self.history[first:]]
        totals = {
            "train_runtime": seconds,
            "train_steps_per_second": len(losses) / seconds,
            "train_loss": sum(losses) / len(losses) if losses else float("nan"),
        }
        if self.args.load_best_model_at_end:
            self._load_best()
        self.log(dict(totals))
        self.control = self._callbacks.on_train_end(self.args, self.state, self.control)
        if self._ranks.is_main and not self.args.disable_tqdm:
            summary(run_figures(self.history[first:], self.memory_events, rollout_rows=self.args.rollout_rows))
        last = self.history[-1] if self.history else {}
        return TrainResult(self.state.global_step, totals["train_loss"], {**last, **totals})

    def _load_best(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not Path(best).is_dir():
            logger.warning(
                "the best step, %s, was not saved, so the last weights stay; save whenever you evaluate, or set "
                "save_strategy='best'",
                self.state.best_global_step,
            )
            return
        self._recovery.repeat(lambda: self._load_weights(Path(best)))

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Writes the weights (the adapter's, when there is one) and the tokenizer."""
        del _internal_call
        folder = Path(output_dir or self.args.output_dir)
        if self._ranks.is_main:
            self._write_weights(folder)
        self._ranks.wait()

    def _rehearse(self) -> None:
        """Does what is asked for before the first step, and leaves everything as it was."""
        raise NotImplementedError

    def _write_weights(self, folder: Path) -> None:
        raise NotImplementedError

    def _load_weights(self, folder: Path) -> None:
        raise NotImplementedError

    def _save_checkpoint(self, random: RandomState | None = None) -> None:
        """Writes everything a resumed run needs to go on bit for bit."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(
                checkpoint_folder(Path(self.args.output_dir), self.state.global_step)
            )
        with self._tracker.phase(Phase.CHECKPOINT):
            if self._ranks.is_main:
                self._recovery.repeat(lambda: self._write_checkpoint(random))
            self._ranks.wait()
        self.control = self._callbacks.on_save(self.args, self.state, self.control)

    def _write_checkpoint(self, random: RandomState | None) -> None:
        loop = {
            "cursor": asdict(self._cursor),
            "kl_scale": 1.0 if self.credit is None else self.credit.kl_scale,
            **self._controllers.state_dict(),
            "memory": self._tracker.state_dict(),
            "alarms": self._alarms.state_dict(),
            "history": self.history,
            "experience": self._experience_facts(),
            "waiting": plain_groups(self._waiting),
            "concessions": [asdict(degradation) for degradation in self._degradations],
            "run": self._run_facts(),
            "random": plain_random_state(random or capture_random_state()),
        }
        output_dir = Path(self.args.output_dir)
        write_checkpoint(
            output_dir,
            self.state.global_step,
            save_model=self._write_weights,
            write_state=lambda path: self.state.save_to_json(str(path)),
            tensors=None if self.args.save_only_model else self._state_tensors(),
            loop=loop,
            trajectory=None if self._experience is None else self._experience.trajectory,
        )
        drop_old_checkpoints(output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _state_tensors(self) -> dict[str, Any]:
        state = self._committed.state_dict()
        if self.args.sync_ref_model and self._reference_model is not None:
            state["reference"] = self._reference_model.state_dict()
        return state

    def _run_facts(self) -> dict[str, Any]:
        first = self._source.take(0, 2)
        return run_facts(self.args, first, self._source.prompts_per_epoch)

    def _experience_facts(self) -> dict[str, Any] | None:
        if self._experience is None:
            return None
        experience = self._experience
        return {
            "consumed": experience.consumed,
            "external": experience.external,
            "metrics": experience.metrics,
            "waiting": plain_groups(experience.waiting),
        }

    def _resume(self, folder: Path) -> None:
        """Puts weights, optimizer, data position, rollout and random state back as they were."""
        tensors, loop, trajectory = read_checkpoint(folder)
        for saved in loop["concessions"][len(self._degradations) :]:
            self._apply(Degradation(**saved))
        check_same_run(loop["run"], self._run_facts())
        self._load_weights(folder)
        self._committed.load_state_dict(tensors)
        if self._reference_model is not None and "reference" in tensors:
            self._reference_model.load_state_dict(tensors["reference"])
        self.state = TrainerState(**loop["trainer_state"])
        self.state.is_world_process_zero = self.state.is_local_process_zero = self._ranks.is_main
        self.history = list(loop["history"])
        self._cursor = Cursor(**loop["cursor"])
        self._controllers = self._controllers.loaded(loop)
        if self.credit is not None:
            self.credit.kl_scale = loop["kl_scale"]
        self._tracker.load_state_dict(loop["memory"])
        if "alarms" in loop:  # checkpoints of before there were any
            self._alarms.load_state_dict(loop["alarms"])
        if self.args.memory_budget == "auto":
            self._tracker.budget_bytes = loop["memory"]["budget_bytes"]
        if trajectory is not None:
            facts = loop["experience"]
            left = self._maker.groups_from(facts["waiting"], self._source)
            self._experience = Rollout(trajectory=trajectory, **{**facts, "waiting": left})
        self._waiting = self._maker.groups_from(loop["waiting"], self._source)
        restore_random_state(loop["random"])

    def _max_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        per_epoch = self._source.prompts_per_epoch
        if per_epoch is None:
            raise ConfigError("max_steps is -1 but the dataset is a stream of unknown length. Set max_steps.")
        rollouts = per_epoch // self.args.prompts_per_rollout
        return math.ceil(self.args.num_train_epochs * rollouts * self._steps_per_rollout)

    @property
    def _steps_per_rollout(self) -> int:
        return self.args.updates_per_epoch * self.args.num_iterations

    def _epoch(self) -> float:
        """Passes over the dataset so far, counting a rollout as far as it has been learnt from."""
        per_epoch = self._source.prompts_per_epoch
        if per_epoch is None:
            return 0.0
        done = self._cursor.epoch * self.args.updates_per_epoch + self._cursor.step
        consumed = 0 if self._experience is None else self._experience.consumed
        return (self._cursor.position + consumed * done / self._steps_per_rollout) / per_epoch

    def _used_up(self) -> bool:
        """Whether the epochs asked for are over although fewer steps were done (after KL stops)."""
        per_epoch = self._source.prompts_per_epoch
        if self.args.max_steps > 0 or per_epoch is None:
            return False
        return self._cursor.position >= self.args.num_train_epochs * per_epoch


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
