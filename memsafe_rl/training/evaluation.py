"""Evaluation: completions of held-out prompts, their rewards and loss, and which step was the best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import speed_metrics

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.prompts import read_alike
from memsafe_rl.training import refusal
from memsafe_rl.training.collector import Collector
from memsafe_rl.training.learner import Learner
from memsafe_rl.training.metrics.run_log import RunLog
from memsafe_rl.training.metrics.step_metrics import averages
from memsafe_rl.training.setup import RunState


def evaluated(
    collector: Collector, learner: Learner, report: RunLog, state: RunState, dataset: Any, prefix: str
) -> dict[str, float]:
    """Draws and rewards completions for the prompts of a dataset, or of each of a mapping of them, and logs them."""
    refusal.when(dataset is None, "evaluate")
    if isinstance(dataset, Mapping):
        merged: dict[str, float] = {}
        for name, part in dataset.items():
            merged |= evaluated(collector, learner, report, state, part, f"{prefix}_{name}")
        return merged
    examples = list(read_alike(dataset, seed=0))
    kept, started = collector.reader.kept(), time.time()
    try:
        with report.apart() as logged:
            values, rollout = collector.evaluate(examples, state)
        values = {name: mean for name, mean in averages(logged).items() if mean is not None} | values
        values.pop("step_tokens")
        if rollout is not None:
            values["loss"] = learner.loss_of(rollout, state.controllers)
    finally:
        collector.reader.forget(kept)
    metrics = {f"{prefix}_{name}": value for name, value in values.items()}
    metrics = report.of_main(metrics | speed_metrics(prefix, started, num_samples=len(examples)))
    report.tell_log(state, metrics)
    report.call_event("on_evaluate", state, metrics)
    return metrics | {"epoch": state.progress.epoch}


def track_best(config: TrainerConfig, report: RunLog, state: RunState, metrics: Mapping[str, float]) -> None:
    """Remembers the best evaluation, for `load_best_model_at_end`, and has it saved where that is asked for."""
    name, progress = config.metric_for_best_model, state.progress
    if name is None:
        return
    name = name if name.startswith("eval_") else f"eval_{name}"
    refusal.when(name not in metrics, "metric_for_best_model", name=name, known=sorted(metrics))
    value, best = metrics[name], progress.best_metric
    if math.isnan(value):
        return
    if best is None or (value > best if config.greater_is_better else value < best):
        progress.best_metric, progress.best_global_step = value, state.step
        report.control.should_save = report.control.should_save or config.save_strategy == "best"
