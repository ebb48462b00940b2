"""What a run logs and whom it informs: metrics until the next record, alarms, and callbacks of transformers' form."""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from memsafe_rl.memory.runtime.interrupts import uninterrupted
from memsafe_rl.models.module_state import replaced
from memsafe_rl.records import RESERVED, RecordLog
from memsafe_rl.rewards.runner import RewardScores
from memsafe_rl.training.metrics.step_metrics import averages
from memsafe_rl.training.optim.optimizer import build_scheduler
from memsafe_rl.training.setup import RunState, TrainingSetup

logger = logging.getLogger(__name__)

_WISHES = ("should_log", "should_evaluate", "should_save")
"""What callbacks ask for at the end of a step, but for the end of training, after which a run may be resumed."""


@dataclass(frozen=True)
class Hooks:
    """Steps of the loop that a user's subclass of a trainer does in its own way; None where nobody replaces one."""

    create_optimizers: Callable[[int], object] | None = None  # for so many steps; hands them to the loop itself
    create_scheduler: Callable[[torch.optim.Optimizer, Any, int], Any] = build_scheduler
    evaluate: Callable[[], Mapping[str, float]] | None = None
    log: Callable[[dict[str, Any]], object] | None = None
    save_model: Callable[[Path], object] | None = None  # writes a checkpoint's weights into a folder


class RunLog:
    """Collects a run's metrics and informs its callbacks, whose wishes stand in `control`."""

    def __init__(self, setup: TrainingSetup, callbacks: CallbackHandler, hooks: Hooks) -> None:
        self.callbacks = callbacks
        self._hooks = hooks
        self.control = TrainerControl()
        self.pending: dict[str, list[float]] = defaultdict(list)
        self.table: tuple[dict[str, Any], ...] = ()
        self.records = RecordLog()
        self.events = setup.memory.events  # one record per plan, retry or alarm
        # tells progress bars how many of a rollout's completions have ended
        self.sampling = partial(self.call_own_event, "on_sampling")
        self._config, self._memory, self._parallel = setup.config, setup.memory, setup.parallel
        self._reward_seconds: dict[str, float] = {}

    def reset(self) -> None:
        """Forgets what an earlier call of `train` left."""
        self.control, self.table = TrainerControl(), ()
        self.pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """Gives, in plain values, what the next record will average and what callbacks have asked for."""
        asked = {name: getattr(self.control, name) for name in _WISHES}
        table = json.loads(json.dumps(self.table, default=str)) if self._config.log_completions else ()
        pending = {name: list(values) for name, values in self.pending.items()}
        return {"pending": pending, "asked": asked, "table": table}

    def load_state_dict(self, saved: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, and callbacks' states from `callback_states`; settings stay the user's."""
        self.pending.update({name: list(values) for name, values in saved.get("pending", {}).items()})
        self.control, self.table = TrainerControl(**saved.get("asked", {})), tuple(saved.get("table", ()))
        left = {name: list(states) if isinstance(states, list) else [states] for name, states in callbacks.items()}
        for callback in self.callbacks.callbacks:
            if states := left.get(type(callback).__name__):
                vars(callback).update(states.pop(0).get("attributes", {}))

    def callback_states(self) -> dict[str, Any]:
        """Returns the states of callbacks that export one, by class as transformers stores them."""
        exported = [callback for callback in self._exporting() if _is_plain(callback)]
        states: dict[str, Any] = TrainerState(stateful_callbacks=exported).stateful_callbacks
        return states

    def _exporting(self) -> list[Any]:
        return [callback for callback in self.callbacks.callbacks if isinstance(callback, ExportableState)]

    @contextmanager
    def taken_back_if_cut_short(self) -> Iterator[None]:
        """Takes back what callbacks wished and counted in a block that is cut short: they will be called again."""
        control, counted = copy.copy(self.control), [(each, dict(each.state())) for each in self._exporting()]
        try:
            yield
        except BaseException:
            self.control = control
            for callback, state in counted:
                vars(callback).update(state.get("attributes", {}))
            raise

    def call_event(self, event: str, state: RunState, *arguments: Any) -> None:
        """Calls an event of transformers' callbacks; they may change `control`."""
        self.control = getattr(self.callbacks, event)(self._config, state.progress, self.control, *arguments)

    def agree(self) -> None:
        """Has all ranks do what callbacks asked of one."""
        wishes = (*_WISHES, "should_training_stop")
        asked = self._parallel.any_rank(*(getattr(self.control, name) for name in wishes))
        vars(self.control).update(zip(wishes, asked, strict=True))

    def saved(self, progress: TrainerState) -> None:
        """Tells callbacks of a checkpoint, which may have been written while later steps went on."""
        self.control = self.callbacks.on_save(self._config, progress, self.control)

    def call_own_event(self, event: str, *arguments: Any) -> None:
        """Informs the callbacks that know an event of ours beside transformers' own."""
        for callback in self.callbacks.callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                handler(*arguments)

    def rewarded(self, scores: RewardScores) -> None:
        """Takes what reward functions logged through `log_metric`, and their seconds."""
        for name, values in scores.metrics.items():
            self.pending[name].append(sum(values) / len(values))
        for name, seconds in scores.seconds.items():
            metric = f"time/reward/{name}_seconds"
            self.pending[metric].append(seconds)
            self._reward_seconds[metric] = self._reward_seconds.get(metric, 0.0) + seconds
        for name, timeouts in scores.timeouts.items():
            self.pending[f"rewards/{name}/timeouts"].append(timeouts)

    @contextmanager
    def apart(self) -> Iterator[Mapping[str, Sequence[float]]]:
        """Gives what rewards log inside, an evaluation, and keeps it out of the next record of training."""
        with replaced([(self, "pending", defaultdict(list))]):
            yield self.pending

    def of_main(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the main rank's metrics on all ranks, which choose the best step by them."""
        return self._parallel.gather([metrics])[0]

    def begin_step(self, state: RunState) -> None:
        """Begins a step's own figures: an evaluation's rewards may have taken longer."""
        self._reward_seconds.clear()
        self.call_event("on_step_begin", state)

    def complete(self, state: RunState, measured: Mapping[str, float], learning_rate: float) -> dict[str, float]:
        """Adds what is known on the host to a step's numbers, and moves the controllers (beta, entropy)."""
        memory, metrics = self._memory, dict(measured)
        if state.rollout is not None and state.cursor.starts_rollout:
            metrics |= state.rollout.metrics
            state.progress.num_input_tokens_seen += int(metrics.pop("step_tokens"))
        metrics["num_tokens"] = float(state.progress.num_input_tokens_seen)
        metrics["learning_rate"] = learning_rate
        metrics["plan/micro_batch_tokens"] = float(memory.update_plan.micro_batch_tokens)
        metrics["plan/checkpointing"] = float(memory.update_plan.checkpointing)
        metrics["plan/pack_prompts"] = float(memory.update_plan.pack_prompts)
        metrics["plan/rows_in_flight"] = float(memory.rollout_plan.rows_in_flight)
        state.controllers = state.controllers.after(metrics, self._config)
        if self._config.gives_entropy_bonus:
            metrics["entropy_coef"] = state.controllers.entropy.coef
        return metrics | memory.drain()

    def record_step(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Writes a step down that is done, and sounds alarms whose rules it broke."""
        beside = {"seconds": time.time(), "held_at_peak": self._memory.step_parts}
        state.history.append({"step": float(state.step), "epoch": state.progress.epoch, **metrics}, **beside)
        for name, value in metrics.items():
            self.pending[name].append(value)
        self._sound(state.alarms.observe(state.step, {**metrics, **self._reward_seconds}, self.events))

    def record_lost_updates(self, state: RunState, share: float, learning_rate: float) -> None:
        """Writes down which share of half-precision weights the step just done did not move."""
        state.history.amend(lost_updates=share)
        self.pending["lost_updates"].append(share)
        self._sound(state.alarms.observe_weights(state.step, share, learning_rate))

    def _sound(self, events: Sequence[dict[str, Any]]) -> None:
        """Records alarms and shows them."""
        for event in events:
            self.events.append(event)
            if self._parallel.is_main:
                logger.warning("step %d: %s", event["step"], event["sentence"])

    def log(self, state: RunState, logs: Mapping[str, Any]) -> None:
        """Adds a record to `log_history` and hands it to the callbacks."""
        with uninterrupted():
            record = self._record(state, logs)
        self.control = self.callbacks.on_log(self._config, state.progress, self.control, record)

    def tell_log(self, state: RunState, logs: Mapping[str, Any]) -> None:
        """Logs a record of the loop's own, by the trainer's own `log` where a subclass has one."""
        if self._hooks.log is None:
            self.log(state, logs)
        else:
            self._hooks.log(dict(logs))

    def _record(self, state: RunState, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a record down, and gives it as callbacks see it: with the user's own value under every name."""
        seen = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in logs.items()}
        record = {f"logged/{name}" if name in RESERVED else name: value for name, value in seen.items()}
        record |= {"epoch": state.progress.epoch, "step": state.step}
        state.progress.log_history.append(record)
        self.records.append(dict(record))
        self.records.flush()
        return {"epoch": state.progress.epoch, **seen}

    def call_event_once(self, event: str, state: RunState) -> None:
        """Calls an event of a step's end, once, however often the step's end is resumed."""
        if state.ending is not None and event not in state.ending.told:
            with self.taken_back_if_cut_short():
                self.call_event(event, state)
            state.ending.told.append(event)

    def has_unfinished(self, state: RunState) -> bool:
        """Returns whether a step was cut short before it was logged, evaluated and saved as callbacks wished."""
        asked = any(getattr(self.control, name) for name in _WISHES)
        return state.ending is not None and ("on_step_end" not in state.ending.told or asked)

    def write(self, state: RunState, *, durable: bool = False) -> bool:
        """Writes steps, logs and memory events that wait in memory; tells whether all of them are written."""
        with uninterrupted():  # a record is written once
            written = [log.flush(durable=durable) for log in (state.history, self.records, self.events)]
        return all(written)

    def flush(self, state: RunState) -> None:
        """Logs the averages since the last record, and shows the completions of the last rollout."""
        own = self._hooks.log
        with uninterrupted():  # made once, though callbacks that hear of it may be cut short
            logs = self._take_averages()
            self.control.should_log = False
            record = self._record(state, logs) if own is None else own(logs)  # which tells callbacks itself
        if own is None:
            self.control = self.callbacks.on_log(self._config, state.progress, self.control, record)
        self._show_completions(state)

    def end(self, state: RunState, totals: Mapping[str, Any]) -> None:
        """Logs a run's totals, with the averages of steps since the last record, as TRL does."""
        self.tell_log(state, {**self._take_averages(), **totals})
        self._show_completions(state)

    def _take_averages(self) -> dict[str, float | None]:
        """Returns the averages since the last record, and begins those of the next."""
        taken = averages(self.pending)
        self.pending.clear()
        return taken

    def _show_completions(self, state: RunState) -> None:
        if self._config.log_completions and self._parallel.is_main and self.table:
            self.call_own_event("on_completions", state.step, self.table)
            self.table = ()


def _is_plain(callback: Any) -> bool:
    """Tells, with a warning where it is not, whether JSON gives back what a callback wants kept."""
    try:
        json.dumps(callback.state(), default=methodcaller("tolist"))
    except (AttributeError, TypeError, ValueError) as error:
        told = "what %s exports as its state is not saved, for JSON has no form for it (%s); a resume starts it anew"
        logger.warning(told, type(callback).__name__, error)
        return False
    return True
