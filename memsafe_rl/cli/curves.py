"""Curves of a run's metrics, group by group; what no group knows comes last, so that nothing logged is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memsafe_rl.cli.charts import Series
from memsafe_rl.cli.pieces import COLORS, Plot, grid, line, percent, plain, scientific, table
from memsafe_rl.cli.run_folder import Record, RunFolder
from memsafe_rl.diagnostics.run_figures import number

_SHOWN_ELSEWHERE = ("memory/", "time/", "plan/", "train_", "eval_", "held_at_peak")
_NO_METRICS = ("step", "epoch", "num_tokens", "step_time", "seconds")
_FIRST_PASS = "Exactly 0 in the first pass over a rollout."
_HINT = "<p class='dim'>Over optimizer steps. Values show where a chart is pointed at.</p>"
_PARTS = re.compile(r"(.+?)[/_](mean|min|max|std)")
_EVALUATED = re.compile(r"eval_(?:(.+)_)?(reward|completions/mean_length|(?:pass|best|mean)@\d+)")


def learning_sections(folder: RunFolder) -> list[tuple[str, str]]:
    """Draws everything that a run has logged of its learning."""
    curves = _Curves(folder.steps)
    objectives = (folder.run.get("config") or {}).get("objectives")
    sections = [
        ("Learning", _HINT + grid(folder.steps, _learning(curves, _unit(folder)))),
        ("Critic", grid(folder.steps, _critic(curves))),
        ("Objectives", grid(folder.steps, _objectives(curves, objectives if isinstance(objectives, Mapping) else {}))),
        ("Episodes", grid(folder.steps, _episodes(curves))),
        ("Evaluations", _evaluations(folder.logs)),
        ("Other metrics", _others(curves, folder.logs)),
    ]
    return [(title, content) for title, content in sections if content.removeprefix(_HINT)]


class _Curves:
    """Makes lines of metrics and remembers which metrics it was asked for."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.names = list(dict.fromkeys(name for record in records for name in record if _is_metric(record, name)))
        self._drawn: set[str] = set()

    def line(self, name: str, label: str, color: int = 0, *, dashed: bool = False) -> Series:
        """Makes a line of one metric."""
        self._drawn.add(name)
        return line(self.records, name, label, color, dashed=dashed)

    def lines(self, pattern: str) -> list[Series]:
        """Makes a line of each metric that a pattern knows, under the name that its first group finds."""
        found = [(name, match[1]) for name in self.names if (match := re.fullmatch(pattern, name)) is not None]
        return [self.line(name, label, color) for color, (name, label) in enumerate(found)]

    def level(self, value: float, label: str, color: int) -> Series:
        """Makes a dashed line at one height."""
        return Series(label, [value] * len(self.records), color, dashed=True)

    def left(self) -> list[str]:
        """Gives the metrics that nobody has asked for and that are shown nowhere else."""
        return [name for name in self.names if name not in self._drawn and not _is_elsewhere(name)]


def _unit(folder: RunFolder) -> str:
    """Says what an action of this run is."""
    facts = folder.run.get("facts") or {}
    return "denoising step" if "chains" in facts else "token"


def _learning(curves: _Curves, unit: str) -> Iterator[Plot]:
    line = curves.line
    by_function, spreads = curves.lines(r"rewards/(.+)/mean"), curves.lines(r"rewards/(.+)/std")
    several = len(by_function) > 1
    beside: tuple[list[Series], list[Series]] = (_recolored(by_function), _recolored(spreads)) if several else ([], [])
    yield Plot("Reward", [line("reward", "together"), *beside[0]])
    yield Plot("Spread of rewards", [line("reward_std", "standard deviation"), *beside[1]], from_zero=True)
    yield Plot("Groups without a signal", [line("frac_reward_zero_std", "all rewards equal", 5)], percent)
    yield Plot("Judges that did not answer in time", curves.lines(r"rewards/(.+)/timeouts"), from_zero=True)
    yield Plot("KL to the reference", [line("kl", f"nats a {unit}")])
    yield Plot(
        "KL to the weights that sampled",
        [line("approx_kl/k3_token", f"k3, nats a {unit}", 2), line("approx_kl/k1_token", "k1", 6, dashed=True)],
        note=_FIRST_PASS,
    )
    yield Plot(
        "KL of whole rows to the weights that sampled",
        [line("approx_kl/k3_sequence", "k3, nats a row", 2), line("approx_kl/k1_sequence", "k1", 6, dashed=True)],
        note=_FIRST_PASS,
    )
    yield Plot("Entropy", [line("entropy", f"nats a {unit}", 3), line("active_entropy", f"of each {unit} kept", 4)])
    yield Plot("Coefficient of the entropy bonus", [line("entropy_coef", "coefficient", 3)], scientific)
    yield Plot(
        "Clipped ratios",
        [
            line("clip_ratio/region_mean", "either way", 0),
            line("clip_ratio/low_mean", "below", 2),
            line("clip_ratio/high_mean", "above", 5),
            line("cispo_clip_ratio", "CISPO", 1),
        ],
        percent,
        note=_FIRST_PASS,
    )
    if unit == "token":  # chains are all as long
        yield from _lengths(curves)
    yield Plot("Loss", [line("loss", "whole"), line("policy_loss", "of the policy", 1)])
    yield Plot("Gradient norm", [line("grad_norm", "before clipping", 3)], from_zero=True)
    yield Plot("Learning rate", [line("learning_rate", "learning rate", 6)], scientific)
    yield Plot("Weights that a step did not move", [line("lost_updates", "share of a sample", 5)], percent)


def _lengths(curves: _Curves) -> Iterator[Plot]:
    line = curves.line
    yield Plot(
        "Tokens of completions",
        [
            line("completions/max_length", "longest", 5),
            line("completions/mean_length", "mean", 0),
            line("completions/min_length", "shortest", 2),
        ],
        from_zero=True,
    )
    yield Plot(
        "Tokens of completions that ended by themselves",
        [
            line("completions/max_terminated_length", "longest", 5),
            line("completions/mean_terminated_length", "mean", 0),
            line("completions/min_terminated_length", "shortest", 2),
        ],
        from_zero=True,
    )
    yield Plot("Truncated completions", [line("completions/clipped_ratio", "share", 5)], percent)


def _critic(curves: _Curves) -> Iterator[Plot]:
    line = curves.line
    yield Plot("Loss of the critic", [line("value_loss", "half the squared error", 3)], from_zero=True)
    yield Plot(
        "Variance of returns that the critic explains",
        [line("explained_variance", "explained", 2), *_zero_and_one(curves, "explained_variance")],
        note="1: foreseen exactly; 0: as good as saying the mean; below: worse.",
    )
    yield Plot("Values and returns", [line("values/mean", "foreseen", 0), line("returns/mean", "come true", 1)])
    yield Plot("Clipped values", [line("clip_ratio/value", "share", 5)], percent)
    yield Plot("KL of a row to the reference", [line("objective/kl", "nats a row", 0)])
    yield Plot("Coefficient of the KL", [line("kl_coef", "reward a nat", 6)], scientific)
    yield Plot("Reward that the KL takes from a row", [line("objective/non_score_reward", "in units of reward", 1)])


def _zero_and_one(curves: _Curves, name: str) -> list[Series]:
    return [curves.level(1.0, "all", 7)] if name in curves.names else []


def _objectives(curves: _Curves, settings: Mapping[str, Any]) -> Iterator[Plot]:
    def each(what: str) -> list[Series]:
        return curves.lines(rf"objectives/([^/]+)/{what}")

    bands = [
        curves.level(float(bound), f"band of {one.label}", one.color)
        for one in each("kl")
        for bound in _band(settings.get(one.label))
    ]
    yield Plot("Reward of each objective", each("reward"))
    yield Plot("KL of each objective's rows to the reference", [*each("kl"), *bands], from_zero=True)
    yield Plot("Beta", each("beta"), scientific)
    yield Plot(
        "Length of what each objective adds to the step",
        [
            Series(one.label, [_product(*pair) for pair in zip(one.values, other.values, strict=True)], one.color)
            for one in each("coefficient")
            for other in each("grad_norm")
            if one.label == other.label
        ],
        from_zero=True,
        note="Its gradient's length times its coefficient in the merge.",
    )
    yield Plot(
        "Coefficient in the merge",
        each("coefficient"),
        note="What an objective's gradient is multiplied by; 0 where it scored nothing in the step.",
    )
    yield Plot("Length of each objective's gradient", each("grad_norm"), from_zero=True)
    angles = [*curves.lines(r"objectives/cosine/(.+)"), curves.level(0.0, "at right angles", 7)]
    if len(angles) > 1:
        yield Plot("Cosine between gradients", angles, note="Below 0, what helps one objective harms the other.")
    yield Plot("Loss of each objective", each("loss"))
    yield Plot("Rows that each objective scored", each("scored"), percent)


def _product(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second


def _band(settings: Any) -> tuple[float, ...]:
    band = settings.get("kl_band") if isinstance(settings, Mapping) else None
    return tuple(band) if isinstance(band, Sequence) and all(number(bound) is not None for bound in band) else ()


def _episodes(curves: _Curves) -> Iterator[Plot]:
    line = curves.line
    yield Plot("Turns of an episode", [line("episodes/mean_turns", "mean")], from_zero=True)
    yield Plot("Tool calls of an episode", [line("tools/call_frequency", "mean", 2)], from_zero=True)
    yield Plot(
        "Calls that went wrong",
        [
            line("tools/failure_frequency", "failed, of all calls", 5),
            line("tools/malformed_frequency", "could not be read, of all turns", 4),
        ],
        percent,
    )
    yield Plot(
        "Episodes cut short",
        [line("episodes/out_of_turns", "out of turns", 1), line("episodes/no_room", "out of context", 5)],
        percent,
    )
    yield Plot("Sequences learnt from, an episode", [line("episodes/sequences", "mean", 3)], from_zero=True)


def _evaluations(logs: Sequence[Record]) -> str:
    """Draws evaluations, of each dataset if there are several; what else they logged stands folded below."""
    found = [record for record in logs if any(name.startswith("eval_") for name in record)]
    curves = _Curves(found)
    known = [(match, name) for name in curves.names if (match := _EVALUATED.fullmatch(name)) is not None]

    def of(pattern: str) -> list[Series]:
        chosen = [(match, name) for match, name in known if re.fullmatch(pattern, match[2])]
        labels = [" ".join(filter(None, (match[1], match[2] if "@" in match[2] else ""))) for match, _ in chosen]
        pairs = zip(chosen, labels, strict=True)
        return [curves.line(name, label or "mean", n) for n, ((_, name), label) in enumerate(pairs)]

    plots = [
        Plot("Reward in evaluations", of("reward")),
        Plot("Passed in k tries", of(r"(?:pass|mean)@\d+"), percent),
        Plot("Best of k tries", of(r"best@\d+")),
        Plot("Length of completions in evaluations", of("completions/mean_length"), from_zero=True),
    ]
    rest = [name for name in curves.names if name.startswith("eval_") and name not in {known for _, known in known}]
    drawn = _drawn_by_parts(curves, rest)
    folded = f"<details><summary>Everything else of evaluations: {len(rest)} metrics</summary>{drawn}</details>"
    return grid(found, plots) + (folded if drawn else "")


def _others(curves: _Curves, logs: Sequence[Record]) -> str:
    """Draws what no group knows: of every step, and what reward functions and callbacks logged besides."""
    of_steps = curves.left()
    logged = [record for record in logs if not any(name.startswith(("eval_", "train_")) for name in record)]
    besides = _Curves(logged)
    of_logs = [name for name in besides.left() if name not in curves.names]
    return _drawn_by_parts(curves, of_steps) + _drawn_by_parts(besides, of_logs)


def _drawn_by_parts(curves: _Curves, names: Sequence[str]) -> str:
    """Draws metrics one by one, but means with their extremes; those that never change are listed."""
    groups: dict[str, list[str]] = {}
    constant: list[tuple[str, str]] = []
    for name in names:
        values = {value for record in curves.records if (value := number(record.get(name))) is not None}
        if len(values) == 1 and len(curves.records) > 1:
            constant.append((name, plain(values.pop())))
        else:
            match = _PARTS.fullmatch(name)
            groups.setdefault(name if match is None else match[1], []).append(name)
    plots = []
    for stem, members in groups.items():
        alone = len(members) == 1
        labels = ["" if alone else name.removeprefix(stem).strip("/_") for name in members]
        series = [curves.line(name, label, n) for n, (name, label) in enumerate(zip(members, labels, strict=True))]
        plots.append(Plot(members[0] if alone else stem, series, _writer(members[0])))
    listed = table(("the same in every step", ""), constant) if constant else ""
    return grid(curves.records, plots) + listed


def _writer(name: str) -> Callable[[float], str]:
    return percent if name.endswith(("_fraction", "_ratio", "_share", "_frequency")) else plain


def _is_metric(record: Record, name: str) -> bool:
    return name not in _NO_METRICS and number(record.get(name)) is not None


def _is_elsewhere(name: str) -> bool:
    return name.startswith(_SHOWN_ELSEWHERE)


def _recolored(series: Sequence[Series]) -> list[Series]:
    """Leaves the first colour to the line of all together."""
    return [Series(one.label, one.values, (place + 1) % COLORS) for place, one in enumerate(series)]
