"""Runs the reward functions of a rollout: each exactly once, on all rows, in prompt order."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import logging
import math
import numbers
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.rewards.background import BackgroundLoop
from memsafe_rl.rewards.scoring import RewardModel, load_reward_model

RewardFunction = Callable[..., Any]
"""Called with ``prompts``, ``completions``, ``completion_ids``, the dataset's columns and more, all by keyword; gives
one number or None for each completion, or a coroutine of them."""

RewardSource = RewardFunction | nn.Module | str
"""A function, a reward model, or the name of one."""

Attempt = Callable[[Callable[[int], Tensor]], Tensor]
"""Runs a function of the completions that a reward model scores in one forward pass."""

logger = logging.getLogger(__name__)

_ROWS = 32
"""Completions that a reward model scores in one forward pass where nobody says how many."""
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardScores:
    """What the reward functions said of a rollout.

    Args:
        rewards_BF: (B, F) float32, on the CPU; NaN where a function gave None.
        names: F names, distinct.
        seconds: wall time of each function, in seconds, by name.
        extras: B values by column, logged by the functions for the table of completions.
        metrics: numbers by name, logged by the functions, in the order of the calls.
    """

    rewards_BF: Tensor
    names: tuple[str, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, list[Any]] = field(default_factory=dict)
    metrics: Mapping[str, list[float]] = field(default_factory=dict)


def _once(unit: Callable[[int], Tensor]) -> Tensor:
    return unit(_ROWS)


class RewardRunner:
    """Holds the reward functions and models of a run and calls them as TRL does.

    Args:
        reward_funcs: one or several functions (sync or async), reward models, or names of reward models.
        reward_processing_classes: a tokenizer for each (None for a function, or to load a model's own), or None.
        reward_weights: a weight for each; None for all 1.
        model_init_kwargs: for loading reward models by name.
        trust_remote_code: whether code that comes with a reward model may run.
        chat_template_kwargs: passed to the chat templates of reward models.
        device: where reward models go; None leaves them where they are.

    Raises:
        ConfigError: there is no function, counts differ, a weight is not finite, a package is missing, or an object is
            none of the kinds above.
    """

    def __init__(
        self,
        reward_funcs: RewardSource | Sequence[RewardSource],
        reward_processing_classes: Any = None,
        reward_weights: Sequence[float] | None = None,
        *,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sources: list[Any] = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        tokenizers = _one_each("reward_processing_classes", reward_processing_classes, len(sources), default=None)
        weights = _one_each("reward_weights", reward_weights, len(sources), default=1.0)
        _check_sources(sources, weights)
        self.weights = tuple(float(weight) for weight in weights)
        self._sources: list[RewardFunction | RewardModel] = []
        options = dict(model_init_kwargs or {})
        for source, tokenizer in zip(sources, tokenizers, strict=True):
            if isinstance(source, str):
                source = load_reward_model(source, options, trust_remote_code)
            if isinstance(source, nn.Module):
                source = RewardModel(
                    source,
                    tokenizer,
                    chat_template_kwargs=chat_template_kwargs,
                    revision=options.get("revision"),
                    trust_remote_code=trust_remote_code,
                )
            self._sources.append(source)
        self.names = _distinct([s.name if isinstance(s, RewardModel) else _name(s) for s in self._sources])
        self._loop = BackgroundLoop()
        self._warned = False
        if device is not None:
            self.to(device)

    @property
    def models(self) -> list[nn.Module]:
        """The reward models."""
        return [source.model for source in self._sources if isinstance(source, RewardModel)]

    def to(self, device: torch.device | str) -> None:
        """Moves the reward models, except those that were dispatched or quantised when loaded.

        Args:
            device: where they go.
        """
        for model in self.models:
            if getattr(model, "hf_device_map", None) is None and not getattr(model, "is_quantized", False):
                model.to(device)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Refuses a dataset that lacks a column some function cannot do without.

        Args:
            columns: names of the dataset's columns.

        Raises:
            DataError: a function names a column that is missing, or a column has the name of something else.
        """
        columns = sorted(set(columns) - {"prompt", "completion"})
        if clash := [column for column in columns if column in _GIVEN and column != "completion_ids"]:
            raise DataError(
                f"The dataset has a column {clash[0]!r}, and reward functions are given something else by that name. "
                "Rename the column."
            )
        for name, source in zip(self.names, self._sources, strict=True):
            missing = [] if isinstance(source, RewardModel) else sorted(_required(source) - {*columns, *_GIVEN})
            if missing:
                nearest = difflib.get_close_matches(missing[0], [*columns, *_GIVEN], n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise DataError(
                    f"Reward function {name!r} needs {missing[0]!r}, and the dataset has no such column (it has "
                    f"{', '.join(columns) or 'none besides the prompt'}).{hint} Add the column, or give the parameter "
                    "a default."
                )

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any] | None = None,
        *,
        trainer_state: Any = None,
        attempt: Attempt = _once,
    ) -> RewardScores:
        """Calls every reward function once on all rows.

        Reward models come first, then the functions in their order, then the async ones together. Only what this
        library does itself may be repeated when memory runs out: a reward model's pass, and writing down what the
        functions returned. What a function raises comes out as it is.

        Args:
            prompts: B texts, or B lists of messages, a prompt repeated for each of its samples.
            completions: B texts, or B lists of messages.
            completion_ids: B lists of token ids.
            columns: the dataset's other columns, B values each.
            trainer_state: passed to the functions.
            attempt: runs a function of the completions that a reward model scores in one forward pass, until memory
                suffices.

        Returns:
            The rewards and what the functions logged.

        Raises:
            DataError: a column is missing or of the wrong length, or a function's rewards are: not one for each row,
                not numbers, or infinite.
        """
        columns = dict(columns or {})
        _check_rows(len(prompts), {"completions": completions, "completion_ids": completion_ids, **columns})
        self.check_columns(columns)
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        call = _Call({**columns, **given, "trainer_state": trainer_state})
        if len(prompts) == 0:
            return RewardScores(torch.zeros(0, len(self._sources)), self.names)
        columns_F: dict[int, list[float]] = {}
        for index, source in enumerate(self._sources):
            if isinstance(source, RewardModel):
                with call.timed(self.names[index]):
                    columns_F[index] = attempt(functools.partial(source.score, prompts, completions)).tolist()
        for index, output in self._outputs(call).items():
            columns_F[index] = _numbers(self.names[index], output, len(prompts))
        rewards = [columns_F[index] for index in range(len(self._sources))]
        self._warn_of_unscored(rewards, prompts)
        rewards_BF = attempt(lambda _: torch.tensor(rewards).T.contiguous())
        return RewardScores(rewards_BF, self.names, call.seconds, call.joined_extras(len(prompts)), call.metrics)

    def close(self) -> None:
        """Stops the thread in which async functions run."""
        self._loop.close()

    def _outputs(self, call: _Call) -> dict[int, Any]:
        """Calls the functions, those that are not async first, and waits for the async ones together."""
        functions = [
            (index, source) for index, source in enumerate(self._sources) if not isinstance(source, RewardModel)
        ]
        outputs: dict[int, Any] = {}
        waiting: dict[int, Coroutine[Any, Any, Any]] = {}
        try:
            for index, function in sorted(functions, key=lambda item: _is_async(item[1])):
                with call.timed(self.names[index]):
                    output = function(**call.keywords(self.names[index], function))
                (waiting if inspect.iscoroutine(output) else outputs)[index] = output
        except BaseException:
            for coroutine in waiting.values():
                coroutine.close()
            raise
        if waiting:
            timed = [call.awaited(self.names[index], coroutine) for index, coroutine in waiting.items()]
            outputs.update(zip(waiting, self._loop.gather(timed), strict=True))
        return outputs

    def _warn_of_unscored(self, rewards: Sequence[Sequence[float]], prompts: Sequence[Any]) -> None:
        unscored = [row for row, values in enumerate(zip(*rewards, strict=True)) if all(map(math.isnan, values))]
        if self._warned or not unscored:
            return
        self._warned = True
        first = unscored[0]
        logger.warning(
            "%d of %d completions got no reward from any function, the first at row %d with prompt %.200r. They count "
            "for nothing. This is said once.",
            len(unscored),
            len(prompts),
            first,
            prompts[first],
        )


class _Call:
    """One call of all functions: what they are given, and what they log."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.seconds: dict[str, float] = {}
        self.metrics: dict[str, list[float]] = {}
        self._extras: dict[str, dict[str, list[Any]]] = {}

    def keywords(self, name: str, function: RewardFunction) -> dict[str, Any]:
        """Gives a function its keywords: all of them if it takes any, else those it names.

        Lists are copied, so that a function that sorts or pops does not disturb the next one.
        """
        extras = self._extras.setdefault(name, {})
        available = {key: list(value) if isinstance(value, list) else value for key, value in self.given.items()}
        available["log_extra"] = lambda column, values: extras.setdefault(column, []).extend(values)
        available["log_metric"] = lambda metric, value: self.metrics.setdefault(metric, []).append(float(value))
        accepted = _accepted(function)
        return available if accepted is None else {key: available[key] for key in available if key in accepted}

    def timed(self, name: str) -> _Stopwatch:
        """Measures the wall time of a block for a function."""
        return _Stopwatch(self.seconds, name)

    async def awaited(self, name: str, output: Awaitable[Any]) -> Any:
        """Waits for an async function, and measures the wait."""
        with self.timed(name):
            return await output

    def joined_extras(self, rows: int) -> dict[str, list[Any]]:
        """Joins the columns of all functions; a name used for different values gets its function's name in front."""
        joined: dict[str, list[Any]] = {}
        for name, extras in self._extras.items():
            for column, values in extras.items():
                if len(values) != rows:
                    raise DataError(
                        f"Reward function {name!r} logged {len(values)} values in column {column!r} for {rows} "
                        "completions. Log exactly one value for each completion."
                    )
                taken = column in joined and joined[column] != values
                joined[f"{name}/{column}" if taken else column] = values
        return joined


class _Stopwatch:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._start = seconds, name, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._start


def _numbers(name: str, output: Any, rows: int) -> list[float]:
    """Turns what a function returned into rewards, None into NaN, and refuses everything else."""
    unordered = isinstance(output, (str, bytes, Mapping, Set))
    if unordered or not isinstance(output, Iterable) or getattr(output, "ndim", 1) == 0:
        raise DataError(
            f"Reward function {name!r} returned {output!r:.100} ({type(output).__name__}) for {rows} completions. "
            "Return a list with one number or None for each completion."
        )
    values = output.tolist() if isinstance(output, Tensor) and output.ndim == 1 else list(output)
    if len(values) != rows:
        raise DataError(
            f"Reward function {name!r} returned {len(values)} rewards for {rows} completions. Return exactly one "
            "number or None for each completion."
        )
    return [_number(name, row, rows, value) for row, value in enumerate(values)]


def _number(name: str, row: int, rows: int, value: Any) -> float:
    if value is None:
        return math.nan
    elements = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    single = value.item() if elements == 1 else value
    if not isinstance(single, numbers.Real):
        raise DataError(
            f"Reward function {name!r} returned {value!r:.100} ({type(value).__name__}) for row {row} of {rows}. "
            "Return a number, or None to leave the row out."
        )
    if abs(number := float(single)) > _LARGEST:
        raise DataError(
            f"Reward function {name!r} returned {value!r} for row {row} of {rows}, which is infinite in float32. Bound "
            "the reward, or return None to leave the row out."
        )
    return number


def _check_sources(sources: Sequence[Any], weights: Sequence[Any]) -> None:
    if not sources or (len(sources) == 1 and sources[0] is None):
        raise ConfigError("reward_funcs is empty. Pass at least one reward function or reward model.")
    for index, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        if not (callable(source) or isinstance(source, str)):
            raise ConfigError(
                f"reward_funcs[{index}] is {source!r:.100} ({type(source).__name__}). Pass a function, a reward model, "
                "or the name of one."
            )
        if not isinstance(weight, numbers.Real) or not math.isfinite(weight):
            raise ConfigError(f"reward_weights[{index}] is {weight!r}; give a finite number.")
        for package, pip_name in getattr(source, "required_packages", {}).items():
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"Reward function {_name(source)!r} needs the package {pip_name}, which is not installed. Run "
                    f"`pip install {pip_name}`."
                )


def _one_each(setting: str, given: Any, count: int, *, default: Any) -> list[Any]:
    values = [default] * count if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    if len(values) != count:
        raise ConfigError(
            f"{setting} has {len(values)} entries for {count} reward functions. Give one for each, in their order."
        )
    return values


def _check_rows(rows: int, columns: Mapping[str, Any]) -> None:
    for name, values in columns.items():
        if isinstance(values, (list, tuple)) and len(values) != rows:
            raise DataError(
                f"{name!r} has {len(values)} values for {rows} prompts. Give reward functions one for each prompt."
            )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Numbers names that occur again, so that each names one column of metrics."""
    chosen: list[str] = []
    seen: Counter[str] = Counter()
    for name in names:
        candidate = name
        while candidate in chosen or (candidate != name and candidate in names):
            seen[name] += 1
            candidate = f"{name}_{seen[name] + 1}"
        chosen.append(candidate)
    return tuple(chosen)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Any) -> str:
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _is_async(function: Any) -> bool:
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _parameters(function: RewardFunction) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # compiled functions may not say what they take
        return None


def _accepted(function: RewardFunction) -> set[str] | None:
    """Names a function takes by keyword; None if it takes any."""
    parameters = _parameters(function)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _required(function: RewardFunction) -> set[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _parameters(function) or []
    return {p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty}
