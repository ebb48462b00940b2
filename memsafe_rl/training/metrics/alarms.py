"""Alarms: rules that a healthy run keeps, and a watch that says it in plain words, once, when one is broken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

from memsafe_rl.config.alarm_rules import AlarmRules
from memsafe_rl.errors import texts_beside

STEPS_TO_END = 5
"""Steps in a row in which a rule must hold before its episode is over, so that what flickers is one episode."""

WINDOW_STEPS = 20
"""Steps that the present speed is compared with, and over which work done again is counted."""

RECENT_STEPS = 3
"""Steps whose median is the present speed: one slow step is no fall."""

_LEAST_KNOWN_STEPS = 5
_LEAST_SECONDS_LOST = 1.0
"""Seconds a step below which a fall costs too little to tell apart from the noise of a machine."""

_LEAST_SPREAD = 1e-6  # standard deviation, relative to the mean, up to which equal float32 rewards may seem to differ
_REWARD_SECONDS = ("time/reward/", "_seconds")
_TEXTS = texts_beside(__file__, "alarms.yaml")
_REMEDIES: Mapping[str, str] = _TEXTS["remedies"]
"""What to do about a phase that has become slow."""


class _Reading(NamedTuple):
    """What a step says about a rule."""

    told: str  # the case of `alarms.yaml` that says what was found and what to do
    broken: bool  # whether the rule is broken
    value: float  # what was measured
    limit: Any  # what the rule allows
    words: Mapping[str, Any] = {}  # what the case needs besides
    details: Mapping[str, Any] = {}  # more for the event


class AlarmWatch:
    """Gives one event an episode of a broken rule, which is over once the rule has held for `STEPS_TO_END` steps."""

    def __init__(self, rules: AlarmRules, bands: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._rules = rules
        self._bands = dict(bands or {}) if rules.objective_kl else {}
        self._held_for: dict[str, int] = {}  # of each open episode: readings in a row that held
        self._seconds: list[dict[str, float]] = []  # of the last steps that began a rollout, by phase
        self._were_in_band: set[str] = set()  # of the run's KL ("") and of objectives'

    def observe(
        self, step: int, metrics: Mapping[str, float], events: Sequence[Mapping[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """Holds a step against the rules."""
        return self._events(step, self._readings(step, metrics, events))

    def observe_weights(self, step: int, share: float, rate: float) -> list[dict[str, Any]]:
        """Holds against the rules what a step has moved."""
        limit, told = self._rules.lost_updates, "lost_updates"
        return [] if limit is None else self._events(step, [(told, _share(told, share, limit, rate=rate))])

    def _events(self, step: int, readings: Iterable[tuple[str, _Reading]]) -> list[dict[str, Any]]:
        return [
            {
                "event": "alarm",
                "kind": episode.partition("/")[0],
                "step": step,
                "value": reading.value,
                "limit": reading.limit,
                **reading.details,
                "sentence": _TEXTS[reading.told].format(value=reading.value, limit=reading.limit, **reading.words),
            }
            for episode, reading in readings
            if self._begins(episode, reading.broken)
        ]

    def _begins(self, kind: str, broken: bool) -> bool:
        """Returns whether an episode begins, and ends one that has held long enough."""
        begins = broken and kind not in self._held_for
        if broken:
            self._held_for[kind] = 0
        elif kind in self._held_for:
            self._held_for[kind] += 1
            if self._held_for[kind] == STEPS_TO_END:
                del self._held_for[kind]
        return begins

    def _readings(
        self, step: int, metrics: Mapping[str, float], events: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, _Reading]]:
        """Yields what the step says about each rule that is on, under the name of its episode."""
        rules = self._rules
        share, equal = _number(metrics, "completions/clipped_ratio"), _number(metrics, "frac_reward_zero_std")
        judges, kl = _judges(metrics), _number(metrics, "kl")
        if rules.truncation is not None and share is not None:
            yield "truncation", _share("truncation", share, rules.truncation)
        if rules.judge_seconds is not None and judges:
            yield "judge_seconds", _slow_judge(judges, rules.judge_seconds)
        flat = _flat_rewards(metrics, first=step == 1)
        if rules.equal_rewards is not None and (equal is not None or flat):
            told = 1.0 if equal is None else equal
            yield "equal_rewards", _equal_rewards(told, rules.equal_rewards, _number(metrics, "reward"), flat)
        if rules.kl is not None and kl is not None:
            yield "kl", self._kl("", kl, rules.kl)
        for objective, band in self._bands.items():
            own = _number(metrics, f"objectives/{objective}/kl")
            if own is not None:
                yield f"objective_kl/{objective}", self._kl(objective, own, band)
        if rules.throughput_drop is not None and share is not None:  # a step that began a rollout
            self._seconds = [*self._seconds, _phase_seconds(metrics)][-WINDOW_STEPS - RECENT_STEPS :]
            reading = _throughput(self._seconds, rules.throughput_drop)
            if reading is not None:
                yield "throughput_drop", reading
        if rules.retries is not None:
            recent = takewhile(lambda event: event["step"] >= step - WINDOW_STEPS, reversed(events))
            yield "retries", _retries(sum(event["event"] == "failure" for event in recent), rules.retries)

    def _kl(self, objective: str, value: float, band: tuple[float, float]) -> _Reading:
        """Reads a KL; a run begins at its reference, so that too little counts only once there has been enough."""
        low, high = band
        if value >= low:
            self._were_in_band.add(objective)
        of, beta = (f" on the rows of objective {objective!r}", "its beta") if objective else ("", "beta")
        told, words = "kl/above" if value > high else "kl/below", {"of": of, "beta": beta, "low": low, "high": high}
        broken = value > high or (value < low and objective in self._were_in_band)
        return _Reading(told, broken, value, list(band), words, {"objective": objective} if objective else {})

    def state_dict(self) -> dict[str, Any]:
        """Gives, in plain values, open episodes and what the present is compared with."""
        return {
            "held_for": dict(self._held_for),
            "seconds": [dict(seconds) for seconds in self._seconds],
            "were_in_band": sorted(self._were_in_band),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; the rules may be others by now."""
        self._held_for = dict(state["held_for"])
        self._seconds = [dict(seconds) for seconds in state["seconds"]]
        self._were_in_band = set(state.get("were_in_band", [""] if state.get("kl_was_in_band") else []))


def _share(told: str, share: float, limit: float, **words: Any) -> _Reading:
    """Reads a share that must stay below a limit."""
    return _Reading(told, share >= limit, share, limit, words)


def _slow_judge(judges: Mapping[str, float], limit: float) -> _Reading:
    name = max(judges, key=lambda judge: judges[judge])
    return _Reading("judge_seconds", judges[name] >= limit, judges[name], limit, {"name": name}, {"reward": name})


def _equal_rewards(share: float, limit: float, mean: float | None, flat: Mapping[str, float]) -> _Reading:
    if not flat:
        return _share("equal_rewards", share, limit, known="" if mean is None else f"; mean reward {mean:.3g}")
    gave = (f"{name} gave {'no reward' if math.isnan(at) else f'{at:.3g}'}" for name, at in flat.items())
    return _Reading("flat_rewards", True, share, limit, {"gave": " and ".join(gave)})


def _flat_rewards(metrics: Mapping[str, float], *, first: bool) -> dict[str, float]:
    """Returns the reward functions that gave the first rollout one value or none; later, all where none gave any."""
    found = {}
    without = math.isnan(metrics.get("reward", 0.0))
    for name, mean in metrics.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            spread = metrics.get(name.removesuffix("mean") + "std", math.nan)
            if without or (first and (math.isnan(mean) or spread <= _LEAST_SPREAD * max(1.0, abs(mean)))):
                found[name.removeprefix("rewards/").removesuffix("/mean")] = mean
    return found


def _throughput(steps: Sequence[Mapping[str, float]], limit: float) -> _Reading | None:
    """Compares the last steps that began a rollout with those before; None while too few are known."""
    before, recent = steps[:-RECENT_STEPS], steps[-RECENT_STEPS:]
    if len(before) < _LEAST_KNOWN_STEPS:
        return None
    usual, now = _medians(before), _medians(recent)
    drop = 1 - usual["step"] / now["step"] if now["step"] > 0 else 0.0
    slowest = max(_REMEDIES, key=lambda phase: now.get(phase, 0.0) - usual.get(phase, 0.0))
    words = {
        "now": now["step"],
        "usual": usual["step"],
        "phase": slowest,
        "before": usual.get(slowest, 0.0),
        "after": now.get(slowest, 0.0),
        "remedy": _REMEDIES[slowest],
    }
    broken = drop >= limit and now["step"] - usual["step"] >= _LEAST_SECONDS_LOST
    return _Reading("throughput_drop", broken, drop, limit, words)


def _retries(failures: int, limit: int) -> _Reading:
    times = "once" if failures == 1 else f"{failures} times"
    return _Reading("retries", failures >= limit, failures, limit, {"times": times, "steps": WINDOW_STEPS})


def _number(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or math.isnan(value) else value


def _judges(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each reward function."""
    before, after = _REWARD_SECONDS
    return {
        name.removeprefix(before).removesuffix(after): seconds
        for name, seconds in metrics.items()
        if name.startswith(before) and name.endswith(after)
    }


def _phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of a step, and of its phases."""
    known = {phase: _number(metrics, f"time/{phase}_seconds") for phase in _REMEDIES}
    step = _number(metrics, "step_time")
    return {phase: seconds for phase, seconds in ({"step": step} | known).items() if seconds is not None}


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {"step": 0.0} | {name: median(step.get(name, 0.0) for step in steps) for name in names}
