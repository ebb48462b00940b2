"""Runs the reward functions of a rollout: each exactly once, on all rows, in prompt order."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.accounting import hold, weights_of
from memsafe_rl.errors import did_you_mean
from memsafe_rl.rewards.background import BackgroundLoop
from memsafe_rl.rewards.calls import (
    Begun,
    Calls,
    Pending,
    RewardFunction,
    TimeoutPolicy,
    function_name,
    is_async,
    required_names,
)
from memsafe_rl.rewards.refusals import refusal, unusable
from memsafe_rl.rewards.scoring import RewardModel, load_reward_model
from memsafe_rl.types import Component

RewardSource = RewardFunction | nn.Module | str
"""A function, a reward model, or the name of one."""

Attempt = Callable[[Callable[[int], Tensor]], Tensor]
"""Runs a function of the completions that a reward model scores in one forward pass."""

logger = logging.getLogger(__name__)

_ENDLESS = TimeoutPolicy()
_ROWS = 32  # completions that a reward model scores in one forward pass where nobody says how many
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_ROWS_NAMED = 3
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardScores:
    """What the reward functions said of a rollout."""

    rewards_BF: Tensor  # (B, F) float32, on the CPU; NaN where a function gave None
    names: tuple[str, ...]  # F names, distinct
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall time of each function, in seconds, by name
    # B values by column, logged by the functions for the table of completions
    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    # numbers by name, logged by the functions, in their order
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    # by name, how often a function took longer than it may; functions that never did are left out
    timeouts: Mapping[str, int] = field(default_factory=dict)


def over_ranks(own: RewardScores, everywhere: Sequence[RewardScores]) -> RewardScores:
    """Joins what all ranks' functions logged; seconds stay this rank's own, unless it had no rows."""
    names = dict.fromkeys(name for scores in everywhere for name in scores.metrics)
    metrics = {name: [value for one in everywhere for value in one.metrics.get(name, ())] for name in names}
    seconds = next((one.seconds for one in (own, *everywhere) if one.seconds), {})
    timeouts = sum((Counter(one.timeouts) for one in everywhere), Counter[str]())
    return replace(own, seconds=seconds, metrics=metrics, timeouts=timeouts)


PendingScores = Pending[RewardScores]
"""Rewards of a rollout whose async functions may still be under way."""

Calculation = Callable[
    [Sequence[Any], Sequence[Any], Sequence[Sequence[int]], Mapping[str, Any], Any, Attempt], PendingScores
]
"""Rewards prompts and completions, of which it is given texts, ids and columns; see `RewardRunner.call_each`."""


def run_once(unit: Callable[[int], Tensor]) -> Tensor:
    """Scores without a retry."""
    return unit(_ROWS)


class RewardRunner:
    """Holds the reward functions and models of a run and calls them as TRL does."""

    def __init__(
        self,
        reward_funcs: RewardSource | Sequence[RewardSource],
        reward_processing_classes: Any = None,
        reward_weights: Sequence[float] | None = None,
        *,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        patience: TimeoutPolicy = _ENDLESS,
        rollout_columns: Sequence[str] = (),
    ) -> None:
        sources: list[Any] = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        tokenizers = _one_each("reward_processing_classes", reward_processing_classes, len(sources), default=None)
        _check_sources(sources)
        self.weights = weights_for(len(sources), reward_weights)
        self._sources: list[RewardFunction | RewardModel] = []
        options = dict(model_init_kwargs or {})
        for source, tokenizer in zip(sources, tokenizers, strict=True):
            if isinstance(source, str):
                source = load_reward_model(source, options, trust_remote_code)
            if isinstance(source, nn.Module):
                code: dict[str, Any] = {"revision": options.get("revision"), "trust_remote_code": trust_remote_code}
                source = RewardModel(source, tokenizer, chat_template_kwargs=chat_template_kwargs, **code)
            self._sources.append(source)
        self.names = _distinct([s.name if isinstance(s, RewardModel) else function_name(s) for s in self._sources])
        self.calculate: Calculation = self.call_each
        self._loop = BackgroundLoop()
        self._patience = patience
        self._rollout_columns = frozenset(rollout_columns)
        self._warned = False
        self._gave_nan: set[str] = set()

    @property
    def functions(self) -> list[RewardFunction | nn.Module]:
        """The reward functions and models, in their order."""
        return [source.model if isinstance(source, RewardModel) else source for source in self._sources]

    @property
    def processing_classes(self) -> list[Any]:
        """The tokenizer of each reward model, None for a function, in their order."""
        return [source.tokenizer if isinstance(source, RewardModel) else None for source in self._sources]

    @property
    def models(self) -> list[nn.Module]:
        """The reward models."""
        return [source.model for source in self._sources if isinstance(source, RewardModel)]

    def to(self, device: torch.device | str) -> None:
        """Moves the reward models, except those that were dispatched or quantised when loaded."""
        device = torch.device(device)
        for model in self.models:
            placed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
            if not placed and not all(tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
                model.to(device)
            hold(Component.WEIGHTS, weights_of(model))  # on a CPU they are mapped from the file

    def rehearse(self, tokens: int, rows: int, attempt: Attempt = run_once) -> None:
        """Tries the largest pass of every reward model; calls no function and gives no rewards."""
        for source in self._sources:
            if isinstance(source, RewardModel):
                attempt(functools.partial(source.rehearse, tokens, rows))

    def check_columns(self, columns: Iterable[str]) -> None:
        """Refuses a dataset that lacks a column some function cannot do without."""
        columns = sorted({*columns, *self._rollout_columns} - {"prompt", "completion"})
        if clash := [column for column in columns if column in _GIVEN and column != "completion_ids"]:
            raise unusable("column/taken", clash=clash)
        for name, source in zip(self.names, self._sources, strict=True):
            missing = [] if isinstance(source, RewardModel) else sorted(required_names(source) - {*columns, *_GIVEN})
            if missing:
                there, hint = ", ".join(columns), did_you_mean(missing[0], [*columns, *_GIVEN])
                there = there or "none besides the prompt"
                raise unusable("column/missing", name=name, missing=missing, there=there, hint=hint)

    def begin(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any] | None = None,
        *,
        trainer_state: Any = None,
        attempt: Attempt = run_once,
    ) -> PendingScores:
        """Has `calculate` reward all rows once; async functions may still be under way afterwards."""
        columns = dict(columns or {})
        for name, values in {"completions": completions, "completion_ids": completion_ids, **columns}.items():
            if isinstance(values, (list, tuple)) and len(values) != len(prompts):
                raise unusable("values/count", name=name, count=len(values), prompts=len(prompts))
        self.check_columns(columns)
        return self.calculate(prompts, completions, completion_ids, columns, trainer_state, attempt)

    def call_each(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
        trainer_state: Any,
        attempt: Attempt,
    ) -> PendingScores:
        """Calls every reward function once on all rows: models, then functions in order, then async ones together."""
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        calls = Calls({**columns, **given, "trainer_state": trainer_state}, len(prompts), self._patience)
        if len(prompts) == 0:
            return PendingScores(lambda: RewardScores(torch.zeros(0, len(self._sources)), self.names))
        found: dict[str, list[float]] = {}
        functions: dict[str, RewardFunction] = {}
        for name, source in zip(self.names, self._sources, strict=True):
            if not isinstance(source, RewardModel):
                functions[name] = source
                continue
            with calls.timed(name):
                found[name] = attempt(functools.partial(source.score, prompts, completions)).tolist()
        awaited = self._call(functions, calls, found)

        def finish() -> RewardScores:
            later = {name: self._numbers(name, output, len(prompts)) for name, output in awaited.result().items()}
            rewards = [(found | later)[name] for name in self.names]
            self._warn_of_unscored(rewards, prompts)
            rewards_BF = attempt(functools.partial(_by_row, rewards))
            return RewardScores(
                rewards_BF, self.names, calls.seconds, calls.joined_extras(), calls.joined_metrics(), calls.timeouts
            )

        return PendingScores(finish, awaited.cancel)

    def close(self) -> None:
        """Stops the thread in which async functions run."""
        self._loop.close()

    def _call(
        self, functions: Mapping[str, RewardFunction], calls: Calls, found: dict[str, list[float]]
    ) -> Pending[dict[str, Any]]:
        """Calls the functions, those that are not async first, and has the async ones run."""
        begun: dict[str, Begun] = {}
        try:
            for name, function in sorted(functions.items(), key=lambda item: is_async(item[1])):
                output = calls.first(name, function)
                if inspect.iscoroutine(output):
                    begun[name] = function, output
                else:
                    found[name] = self._numbers(name, output, calls.rows)
        except BaseException:
            for _, waiting in begun.values():
                waiting.close()
            raise
        return calls.await_together(begun, self._loop)

    def _numbers(self, name: str, output: Any, rows: int) -> list[float]:
        """Turns what a function returned into rewards, None into NaN; tells of NaN that it returned itself."""
        values = _values(name, output, rows)
        found = [_number(name, row, rows, value) for row, value in enumerate(values)]
        odd = [row for row, value in enumerate(values) if value is not None and math.isnan(found[row])]
        if odd and name not in self._gave_nan:
            self._gave_nan.add(name)
            told = "Reward function %r returned NaN for %d of %d completions, the first at row(s) %s. "
            remedy = "NaN counts as no reward: return a number, or None to leave a row out. This warning appears once."
            logger.warning(told + remedy, name, len(odd), rows, ", ".join(map(str, odd[:_ROWS_NAMED])))
        return found

    def _warn_of_unscored(self, rewards: Sequence[Sequence[float]], prompts: Sequence[Any]) -> None:
        unscored = [row for row, values in enumerate(zip(*rewards, strict=True)) if all(map(math.isnan, values))]
        if self._warned or not unscored:
            return
        self._warned = True
        facts = len(unscored), len(prompts), unscored[0], prompts[unscored[0]]
        told = "%d of %d completions got no reward from any function, the first at row %d with prompt %.200r. "
        logger.warning(told + "They are excluded from the loss. This warning appears once.", *facts)


def _by_row(rewards_FB: Sequence[Sequence[float]], rows: int) -> Tensor:  # noqa: ARG001
    return torch.tensor(rewards_FB).T.contiguous()


def _values(name: str, output: Any, rows: int) -> list[Any]:
    """Returns what a function returned as a list, and refuses everything else."""
    unordered = isinstance(output, (str, bytes, Mapping, Set))
    if unordered or not isinstance(output, Iterable) or getattr(output, "ndim", 1) == 0:
        raise unusable("returned/kind", name=name, output=output, kind=type(output).__name__, rows=rows)
    values = output.tolist() if isinstance(output, Tensor) and output.ndim == 1 else list(output)
    unusable.when(len(values) != rows, "returned/count", name=name, count=len(values), rows=rows)
    return values


def _number(name: str, row: int, rows: int, value: Any) -> float:
    if value is None:
        return math.nan
    elements = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    single: Any = value.item() if elements == 1 else value
    if not isinstance(single, numbers.Real | Decimal):
        raise unusable("returned/number", name=name, value=value, kind=type(value).__name__, row=row, rows=rows)
    size: Any = abs(single)
    unusable.when(size > _LARGEST, "returned/infinite", name=name, value=value, row=row, rows=rows)
    return float(single)


def weights_for(count: int, reward_weights: Any) -> tuple[float, ...]:
    """Returns the weights of so many reward functions, 1 each where none are given."""
    given = reward_weights.tolist() if isinstance(reward_weights, Tensor) else reward_weights
    weights = _one_each("reward_weights", given, count, default=1.0)
    for index, weight in enumerate(weights):
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight):
            raise refusal("reward_weights", index=index, weight=weight)
    return tuple(map(float, weights))


def _check_sources(sources: Sequence[Any]) -> None:
    refusal.when(not sources or (len(sources) == 1 and sources[0] is None), "reward_funcs/empty")
    for index, source in enumerate(sources):
        if not (callable(source) or isinstance(source, str)):
            raise refusal("reward_funcs/kind", index=index, source=source, kind=type(source).__name__)
        for package, pip_name in getattr(source, "required_packages", {}).items():
            if importlib.util.find_spec(package) is None:
                raise refusal("package/needed", function=function_name(source), pip_name=pip_name)


def _one_each(setting: str, given: Any, count: int, *, default: Any) -> list[Any]:
    values = [default] * count if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    refusal.when(len(values) != count, "each", setting=setting, given=len(values), count=count)
    return values


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Numbers names that occur again, so that each names one column of metrics."""
    chosen: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        free = (other for other in numbered if other not in (*chosen, *names))
        chosen.append(next(free) if name in chosen else name)
    return tuple(chosen)
