"""The training loop: collect a rollout, train on it step by step, log, evaluate, save; it resumes at any step."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.trainer_callback import CallbackHandler

from memsafe_rl.callbacks.console import summary
from memsafe_rl.checkpoint.store import checkpoint_folder, read_checkpoint
from memsafe_rl.config.degradation import Degradation, degrade, next_degradation
from memsafe_rl.diagnostics.run_figures import run_figures
from memsafe_rl.errors import ConfigError, MemoryBudgetError, MemsafeError, SaveError, TrainingInterrupted, do_each
from memsafe_rl.memory.runtime.interrupts import StopRequest, uninterrupted
from memsafe_rl.memory.runtime.meters import check_meter
from memsafe_rl.memory.runtime.recovery import capture_random_state, empty_caches, flush_autograd
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.training import refusal
from memsafe_rl.training.checkpoints import Checkpoints, SavedRun, best_folder
from memsafe_rl.training.collector import Collector
from memsafe_rl.training.evaluation import evaluated, track_best
from memsafe_rl.training.learner import Learner, make_committer
from memsafe_rl.training.metrics.run_log import Hooks, RunLog
from memsafe_rl.training.run_files import RunFiles
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.setup import Ending, RunState, TrainingSetup
from memsafe_rl.types import Phase

logger = logging.getLogger(__name__)


class TrainResult(NamedTuple):
    """What a finished run returns, in the order of transformers' `TrainOutput`."""

    global_step: int  # optimizer steps done
    training_loss: float  # mean loss of the steps of this call
    metrics: dict[str, float]  # the last step's metrics and the run's totals


def collect(collector: Collector, state: RunState, later_samples: Sequence[int]) -> Rollout:
    """Prompts, completions, rewards, advantages, reference and old log-probs of the next rollout.

    Args:
        collector: runs the stages.
        state: where the run stands; not changed.
        later_samples: samples outside the first optimizer step: when their turn comes, weights have moved.

    Returns:
        The rollout, on the host.
    """
    drawn = collector.draw(state)  # begins the rewards, too
    if not collector.overlaps_rewards:
        drawn = collector.reward(drawn, state)
    trajectory = collector.score(drawn, later_samples)  # while async rewards are under way
    drawn = collector.reward(drawn, state)  # does nothing where they have been waited for
    return collector.assign(drawn, trajectory, later_samples)


@contextmanager
def between_runs(setup: TrainingSetup) -> Iterator[None]:
    """Tells other ranks of an error outside of the steps; ends threads and brings frozen weights back in any case."""
    try:
        yield
    except BaseException as error:
        setup.shards.finish_round(setup.recovery.repeat)
        setup.parallel.fail(f"{type(error).__name__}: {error}")
        setup.parallel.rejoin()
        raise
    finally:
        if setup.environments is not None:
            setup.environments.close()
        setup.return_weights()


class TrainingLoop:
    """Runs a setup's steps in order and calls callbacks; `before_training` must not change any state."""

    def __init__(
        self,
        setup: TrainingSetup,
        *,
        optimizers: tuple[torch.optim.Optimizer | None, Any],
        callbacks: CallbackHandler,
        eval_dataset: Any,
        before_training: Callable[[TrainingLoop], None],
        hooks: Hooks,
    ) -> None:
        self.optimizers = optimizers
        self.hooks = hooks
        self._before_training = before_training
        self._output_dir, self._memory_budget = setup.config.output_dir, setup.config.memory_budget
        self.eval_dataset = eval_dataset
        self.report = RunLog(setup, callbacks, hooks)
        self._step_started = 0.0
        self._learning_rate = 0.0
        self.use(replace(setup, on_sampling=self.report.sampling, on_rewards=self.report.rewarded))
        self.state = RunState.at_start(setup.config, is_main=setup.parallel.is_main)
        self.files = RunFiles(setup.config, self.report)
        self.stop = StopRequest()
        self._begun = self._running = False
        setup.holdings.trajectory = self._trajectory_tensors

    def use(self, setup: TrainingSetup) -> None:
        """Replaces the setup and rebuilds the parts made from it."""
        self.setup, self.config = setup, setup.config
        self.collector, self.learner = Collector(setup), Learner(setup)
        self.checkpoints = Checkpoints(setup, self.collector, self.hooks)

    # ------------------------------------------------------------------ the run

    def train(self, resume: bool | str | Path | None) -> TrainResult:
        """Trains to the end, or from a checkpoint to the end."""
        started = time.perf_counter()
        self.stop = StopRequest(self.config.interrupt_grace_seconds)
        self._running = True
        try:
            with self.stop.listening(), self._left_in_order():
                self._begun = False
                self.begin(self.config.resume_from_checkpoint if resume is None else resume)
                first, self._begun = len(self.state.history), True
                due: Callable[[], None] | None = self._end_step  # after which an earlier start was saved or cut short
                while due is not None:
                    degradation = None
                    try:
                        due()
                    except MemoryBudgetError as error:
                        degradation = self.degradation_after(error)
                        if degradation is None:
                            raise
                    if degradation is None:
                        due = self.step if self._goes_on() else None
                    else:
                        self.degrade(degradation)
                        due = self._end_step  # of a step that had been taken; does nothing after another
                self.files.finish()
        finally:
            self._running = False
            do_each(
                self.collector.close,
                self.setup.memory.release,
                partial(self.report.write, self.state),
                partial(self.report.call_own_event, "on_run_closed"),
                self.files.release,
                self.setup.return_weights,
            )
        with between_runs(self.setup):
            return self._end(started, first)

    @contextmanager
    def _left_in_order(self) -> Iterator[None]:
        """Saves what can be resumed when an error or a signal ends the run."""
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise

    def _goes_on(self) -> bool:
        """Whether another step follows; ends the run between two steps, on all ranks where one was asked to."""
        reason = self.stop.reason or self.files.stop_asked()
        done, interrupted = self.setup.parallel.any_rank(self.report.control.should_training_stop, bool(reason))
        if done or not interrupted:
            return not done
        asked = self.setup.parallel.gather([(reason, self.files.has_unsaved(self.state.step))])
        if asked[0][1] and self.setup.parallel.world_size > 1:
            self.save_checkpoint()  # while all ranks are there to take part
        raise TrainingInterrupted(next(reason for reason, _ in asked if reason))

    def step(self) -> None:
        """One optimizer step, from the prompts to the log: collects a rollout where one is due, moves the weights."""
        state = self.state
        self.begin_step()
        if state.rollout is None:
            state.rollout = self.collect()
        result = self.learner.step(state)
        randoms = self.setup.parallel.gather([self.setup.recovery.repeat(Stage.PREPARE, capture_random_state)])
        self.report.call_event("on_pre_optimizer_step", state)
        with uninterrupted():  # from here to the cursor nothing is read from the device
            self.learner.commit(state.step)
            state.rollout = result.rollout
            metrics = self.report.complete(state, result.metrics, self._learning_rate)
            metrics["step_time"] = time.perf_counter() - self._step_started
            self._advance(metrics)
            state.ending, state.progress.epoch = Ending(state.progress.epoch), self._epoch()
            self.report.record_step(state, metrics)
            state.random, state.rank_randoms = None, randoms
            self.setup.committed.uncounted = False
        share = None if result.sample is None else self.setup.recovery.repeat(Stage.MEASURE, result.sample.lost_share)
        if share is not None:  # of half-precision weights, those that the step did not move
            self.report.record_lost_updates(state, share, self._learning_rate)
            metrics["lost_updates"] = share
        del result  # what the step needed is freed before evaluation and saving
        self.report.call_event("on_optimizer_step", state)
        self.finish_step(metrics)

    def collect(self) -> Rollout:
        """Collects the next rollout; reward functions may draw random numbers."""
        state = self.state
        with self.setup.gathered():
            rollout = collect(self.collector, state, self.learner.later_samples(state.cursor))
        if self.config.async_rollouts:
            self.collector.draw_ahead(state, rollout)
        self.report.table = rollout.table
        state.note_random(self.setup)
        return rollout

    def begin_step(self) -> None:
        """Notes what the step starts from, and calls callbacks."""
        setup, state = self.setup, self.state
        self._step_started = time.perf_counter()
        setup.memory.step = state.step
        state.note_random(self.setup)
        self._learning_rate = setup.committed.learning_rate
        self.report.begin_step(state)

    def _advance(self, metrics: Mapping[str, float]) -> None:
        """Moves to the next optimizer step; the KL stop ends the passes over this rollout only."""
        rule = self.config.kl_stop_rule
        stop = {} if rule is None else rule.exceeded(metrics)
        if stop:
            self.setup.memory.record("kl_stop", step=self.state.step + 1, **stop)
        used_up = self.state.advance(self.config, stop=bool(stop))
        if used_up is not None:
            self.setup.advantages.end_rollout(used_up.metrics)

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Logs, evaluates, saves and stops as callbacks say."""
        state, report = self.state, self.report
        report.write(state)
        self.files.finish(wait=False)
        report.call_own_event("on_progress", state.step, metrics)
        self._end_step()
        self.setup.memory.end_step(self.setup.holdings.tensors, steps_per_rollout=self.config.steps_per_rollout)

    def _end_step(self) -> None:
        """Asks callbacks what follows a step, and does it, from where an interrupted process left off."""
        state, report, ending = self.state, self.report, self.state.ending
        if ending is None:
            return
        if self._used_up():
            state.progress.max_steps = state.step  # so that callbacks do what is due after the last step
        report.call_event_once("on_step_end", state)
        if self._used_up():
            report.control.should_training_stop = True
        self._obey()
        if int(state.progress.epoch) > int(ending.epoch_before) or report.control.should_training_stop:
            report.call_event_once("on_epoch_end", state)
            self._obey()
            if not report.control.should_training_stop:
                report.call_event("on_epoch_begin", state)
        state.ending = None

    def _obey(self) -> None:
        """Does what the control flags ask for."""
        report = self.report
        report.agree()
        if report.control.should_log:
            report.flush(self.state)
            report.agree()
        if report.control.should_evaluate:
            with report.taken_back_if_cut_short():
                if self.eval_dataset is not None:
                    track_best(self.config, report, self.state, (self.hooks.evaluate or self.evaluate)())
                report.control.should_evaluate = False
            report.agree()
        if report.control.should_save:
            report.control.should_save = False
            self.save_checkpoint(wait=report.control.should_training_stop)
            report.agree()

    def evaluate(self, dataset: Any = None, prefix: str = "eval") -> dict[str, float]:
        """Evaluates on the run's own evaluation prompts, or on others."""
        chosen = self.eval_dataset if dataset is None else dataset
        with nullcontext() if self._running else between_runs(self.setup), self.setup.gathered():
            return evaluated(self.collector, self.learner, self.report, self.state, chosen, prefix)

    def degradation_after(self, error: MemoryBudgetError) -> Degradation | None:
        """Returns the next lossy fallback that the user allows; several ranks would choose different ones."""
        setup = self.setup
        if error.failure is None or setup.committed.uncounted:
            return None
        rounds = setup.engine.supports.int8_cache and setup.draw_rollout is None
        possible = {
            "optim": self.optimizers[0] is None,
            "cache_implementation": rounds and self.config.partial_rollout_tokens is None,
        }
        listed = self.config.allow_lossy if setup.parallel.world_size == 1 else ()
        return next_degradation(self.config, [name for name in listed if possible.get(name, True)], error.failure)

    def degrade(self, degradation: Degradation) -> None:
        """Applies a lossy fallback, and restarts this rollout, or moves on to the next if weights have changed."""
        state = self.state
        self.setup.committed.drop_gradients()
        self.apply(degradation)
        if not state.cursor.starts_rollout:
            state.cursor = state.cursor.advance(steps=1, epochs=1, consumed=state.consumed, stop=True)
            state.leave_rollout()
            if state.ending is not None and self._used_up():  # callbacks then do what is due after the last step
                state.ending.told.clear()
        state.rollout = None
        self.setup.memory.record("degradation", remedy=degradation.name, changes=dict(degradation.changes))
        logger.warning("no plan fits: the run continues with a changed task, as allow_lossy allows: %s", degradation)

    def apply(self, degradation: Degradation) -> None:
        """Changes settings, and the parts that were made from them."""
        config, setup = self.config, self.setup
        degrade(config, degradation)
        config.validate()
        self.state.degradations.append(degradation)
        most, least = config.max_completion_length, setup.sampling.min_new_tokens
        self.use(replace(setup, sampling=replace(setup.sampling, max_new_tokens=most, min_new_tokens=min(least, most))))
        if "cache_implementation" in degradation.changes:
            setup.engine.round_cache()
        if "optim" in degradation.changes:
            schedule = setup.committed.scheduler.state_dict()
            self.make_optimizer()
            self.setup.committed.resume_schedule(schedule)

    def _leave(self, error: BaseException) -> None:
        """Leaves the state as it was before the step, tells the other ranks, and saves what can be resumed."""
        setup = self.setup
        flush_autograd()  # an interrupted backward left its graph there
        setup.shards.finish_round(setup.recovery.repeat)
        if setup.committer is not None:
            setup.committer.drop_gradients()
        setup.parallel.fail(f"{type(error).__name__}: {error}")
        if not isinstance(error, (KeyboardInterrupt, MemsafeError)) or isinstance(error, SaveError):
            return
        can_save = self._begun and setup.can_save_alone and not self.stop.leaves_at_once
        if can_save and self.files.has_unsaved(self.state.step):
            logger.warning("saving step %d before leaving", self.state.step)
            try:
                self.save_checkpoint(alone=True)
            except SaveError as save_error:  # the error that ended the run matters more
                logger.warning("%s", save_error)
        if isinstance(error, TrainingInterrupted) and setup.parallel.is_main:
            logger.warning("%s: %s", error, self.files.how_to_resume())

    # ------------------------------------------------------------------ beginning, end, checkpoints

    def begin(self, resume: bool | str | Path | None) -> None:
        """Makes optimizer and schedule, and goes to where the run stands."""
        config, setup = self.config, self.setup
        config.validate()
        refusal.when(config.output_dir != self._output_dir, "output_dir/changed", now=config.output_dir)
        refusal.when(config.memory_budget != self._memory_budget, "memory_budget/changed", now=config.memory_budget)
        check_meter(setup.memory.meter)
        if config.memory_budget != "auto":
            setup.memory.enforce()
        if not self.state.degradations:  # which change how tokens are drawn themselves
            self.use(setup.drawing_as_told())
        self.make_optimizer()
        self._go_to_start()
        checkpoint = self.files.claim(setup.parallel, resume)
        if checkpoint is not None:
            setup.recovery.repeat(Stage.RESUME, self._resume, checkpoint)
        self.files.open_logs(self.state, checkpoint)
        progress, max_steps, per_epoch = self.state.progress, setup.planned_steps, setup.steps_per_epoch
        progress.max_steps = max_steps
        progress.num_train_epochs = math.ceil(max_steps / per_epoch) if per_epoch else sys.maxsize
        progress.train_batch_size = config.per_device_train_batch_size
        progress.compute_steps(config, max_steps)
        is_over = self.state.step >= max_steps or self._used_up()
        if checkpoint is not None and is_over and not self.report.has_unfinished(self.state):
            told = f"nothing is left to train: {checkpoint} is at step {self.state.step} of {max_steps}"
            ours = checkpoint.absolute().parent.resolve() == Path(config.output_dir).resolve()
            if self.state.step > max_steps or not ours:
                raise ConfigError(
                    f"{told}. Raise max_steps or num_train_epochs, or start without resume_from_checkpoint."
                )
            logger.warning("%s; the run ends here", told)
        self._before_training(self)
        empty_caches()  # of what loading and checks left there: a budget holds reserved bytes, and forecasts begin so
        self.files.prepare(self.checkpoints, max_steps)
        self.report.call_event("on_train_begin", self.state)
        if is_over:
            self.report.control.should_training_stop = True
        if config.eval_on_start and checkpoint is None and self.eval_dataset is not None:
            (self.hooks.evaluate or self.evaluate)()
        self.report.call_event("on_epoch_begin", self.state)

    def make_optimizer(self) -> None:
        """Makes what moves the weights."""
        callbacks = self.report.callbacks  # an earlier optimizer's state makes room for the new one's
        callbacks.optimizer = callbacks.lr_scheduler = None
        self.setup.holdings.optimizer = list
        self.use(replace(self.setup, committer=None))
        if self.hooks.create_optimizers is not None:
            self.hooks.create_optimizers(self.setup.planned_steps)
        committer = make_committer(self.setup, self.optimizers, self.setup.planned_steps, self.hooks.create_scheduler)
        self.use(replace(self.setup, committer=committer))
        self.learner.make_state()
        callbacks.optimizer, callbacks.lr_scheduler = committer.optimizer, committer.scheduler

    def _go_to_start(self) -> None:
        """Discards the progress of an earlier call of `train`; the weights stay as they are."""
        start = RunState.at_start(self.config, is_main=self.setup.parallel.is_main)
        self.state = replace(start, degradations=self.state.degradations)  # the settings stay changed
        self.setup.advantages.reset()
        self.report.reset()

    def _resume(self, folder: Path) -> None:
        """Puts weights, optimizer, data position, rollout and random state back as they were."""
        saved = SavedRun(*read_checkpoint(folder))
        for degradation in saved.degradations[len(self.state.degradations) :]:
            self.apply(degradation)
        self.checkpoints.restore(folder, saved, self.state, self.report)

    def save_checkpoint(self, *, wait: bool = True, alone: bool = False) -> None:
        """Writes what a resumed run needs, in the background only where it need not `wait`; `alone` without ranks."""
        self.files.finish()
        state, before = self.state, self.state.progress.best_model_checkpoint
        if state.progress.best_global_step == state.step:
            state.progress.best_model_checkpoint = str(checkpoint_folder(Path(self.config.output_dir), state.step))
        own = state.random or self.setup.recovery.repeat(Stage.CHECKPOINT, capture_random_state)
        state.rank_randoms = [own, *state.rank_randoms[1:]] if alone else self.setup.parallel.gather([own])
        with self.setup.memory.phase(Phase.CHECKPOINT), self.stop.saving():
            saved = self.checkpoints.saved()
            if self.setup.parallel.is_main:
                self.files.save(self.checkpoints, state, saved, wait=wait, best_before=before)
            else:
                self.report.saved(state.progress)
            self.setup.parallel.wait()

    def save_model(self, folder: Path) -> None:
        """Writes the weights (the adapter's, when there is one) and the tokenizer."""
        with nullcontext() if self._running else between_runs(self.setup):
            write = self.checkpoints.writer()
            if self.setup.parallel.is_main:
                self.files.save_model(folder, write)
            self.setup.parallel.wait()

    def _end(self, started: float, first: int) -> TrainResult:
        """Waits for all ranks, logs totals and loads the best model if asked to."""
        setup, state = self.setup, self.state
        setup.parallel.wait()
        seconds = time.perf_counter() - started
        self.files.finish()
        losses = [record["loss"] for record in state.history[first:]]
        totals = {
            "train_runtime": seconds,
            "train_samples_per_second": len(losses) * self.config.step_rows / seconds,
            "train_steps_per_second": len(losses) / seconds,
            "train_loss": sum(losses) / len(losses) if losses else float("nan"),
        }
        best = setup.parallel.gather([best_folder(state)])[0] if self.config.load_best_model_at_end else None
        if best is not None:
            setup.recovery.repeat(Stage.RESUME, self.checkpoints.load_weights, best)
        self.report.end(state, totals)
        self.report.call_event("on_train_end", state)
        setup.parallel.wait()  # for callbacks, which may fail on one rank
        if setup.parallel.is_main and not self.config.disable_tqdm:
            rows, exact = self.config.rollout_rows, setup.memory.meter.is_exact
            figures = run_figures(state.history[first:], setup.memory.events, rollout_rows=rows, counts_tensors=exact)
            summary(figures, then=self.files.what_follows(), since=first)
        return TrainResult(state.step, totals["train_loss"], {**(state.history[-1] if state.history else {}), **totals})

    def _epoch(self) -> float:
        """Passes over the dataset so far, counting a rollout as far as it has been trained on."""
        per_epoch, cursor = self.setup.source.prompts_per_epoch, self.state.cursor
        if per_epoch is None:  # of a stream, the share of all steps, as transformers has it
            return self.state.step / self.config.max_steps
        done = cursor.epoch * self.config.updates_per_epoch + cursor.step
        return (cursor.position + self.state.consumed * done / self.config.steps_per_rollout) / per_epoch

    def _used_up(self) -> bool:
        """Whether the epochs asked for are over although fewer steps were done (after KL stops)."""
        per_epoch = None if self.config.max_steps > 0 else self.setup.source.prompts_per_epoch
        return per_epoch is not None and self.state.cursor.position >= self.config.num_train_epochs * per_epoch

    def _trajectory_tensors(self) -> list[torch.Tensor]:
        rollout, kept = self.state.rollout, self.setup.models.reader.tensors()
        return kept if rollout is None else [*rollout.trajectory.tensors(), *kept]
