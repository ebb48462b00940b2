"""The learning curves of a report, as `templates/learning.yaml` lists them; metrics it does not list come last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from memsafe_rl.cli.charts import COLORS, Drawing, Plot, Series, draw_all
from memsafe_rl.diagnostics.run_figures import column, known, number
from memsafe_rl.diagnostics.run_folder import Record, RunFolder
from memsafe_rl.units import percent, plain, scientific

_SHOWN_ELSEWHERE = ("memory/", "time/", "plan/", "train_", "eval_", "held_at_peak")
_NO_METRICS = ("step", "start", "epoch", "num_tokens", "step_time", "seconds")
_WRITERS = {"plain": plain, "percent": percent, "scientific": scientific}
_PARTS = re.compile(r"(.+?)[/_](mean|min|max|std)")
_EVALUATIONS = "Evaluations"


@dataclass(frozen=True)
class Section:
    """Charts under one title, metrics that never change as a table, and charts to be folded away."""

    title: str
    drawings: Sequence[Drawing]
    constants: Sequence[tuple[str, str]] = ()
    folded: Sequence[Drawing] = ()
    folded_metrics: int = 0


def learning_sections(folder: RunFolder) -> list[Section]:
    """Draws everything that a run has logged of its learning."""
    catalogue = yaml.safe_load(resources.files(__package__).joinpath("templates/learning.yaml").read_text("utf-8"))
    unit = "denoising step" if "chains" in (folder.run.get("facts") or {}) else "token"
    steps = _Curves([_with_contributions(record) for record in folder.steps], unit)
    evaluations = _Curves([log for log in folder.logs if any(name.startswith("eval_") for name in log)], unit)
    sections = []
    for title, charts in catalogue.items():
        curves = evaluations if title == _EVALUATIONS else steps
        plots = [plot for chart in charts if (plot := curves.plot(chart)) is not None]
        if title == "Objectives":
            plots = [_with_bands(plot, (folder.run.get("config") or {}).get("objectives")) for plot in plots]
        still = [plot for plot in plots if len(curves.records) > 1 and _is_zero(plot)]
        constants = [(plot.title, plot.write(0.0)) for plot in still]
        sections.append(Section(title, draw_all(curves.records, [p for p in plots if p not in still]), constants))
    rest = [name for name in evaluations.unused() if name.startswith("eval_")]
    charts, constants = evaluations.one_by_one(rest)
    last = sections[-1]
    sections[-1] = Section(_EVALUATIONS, last.drawings, [*last.constants, *constants], charts, len(rest))
    sections.append(_others(steps, folder.logs))
    return [section for section in sections if section.drawings or section.folded or section.constants]


def _is_zero(plot: Plot) -> bool:
    """Tells whether a chart would show nothing but zeros."""
    return bool(plot.series) and {value for one in plot.series for value in one.values} <= {0.0, None}


class _Curves:
    """Turns metrics into lines and remembers which it has drawn."""

    def __init__(self, records: Sequence[Record], unit: str) -> None:
        self.records = records
        numbers = (name for record in records for name in record if number(record.get(name)) is not None)
        self.names = [name for name in dict.fromkeys(numbers) if name not in _NO_METRICS]
        self._unit = unit
        self._drawn: set[str] = set()

    def plot(self, chart: Mapping[str, Any]) -> Plot | None:
        """Makes a chart of the catalogue, if this run has it."""
        if chart.get("only", self._unit) != self._unit:
            return None
        series = list[Series]()
        for pattern, *rest in chart["lines"]:
            label = rest[0].format(unit=self._unit) if rest else ""
            series += self._lines(pattern, label, len(series), dashed="dashed" in rest[1:])
        several = self._lines(chart.get("several", ""), "", len(series))
        series += several if len(several) > 1 else []
        if series:
            length = len(self.records)
            series += [Series(label, [at] * length, 7, dashed=True) for label, at in chart.get("levels", {}).items()]
        write = chart.get("write", "plain")
        from_zero = chart.get("zero", write != "plain")
        return Plot(chart["title"], series, _WRITERS[write], from_zero=from_zero, note=chart.get("note", ""))

    def unused(self) -> list[str]:
        """Gives the metrics that no chart has drawn."""
        return [name for name in self.names if name not in self._drawn]

    def one_by_one(self, names: Iterable[str]) -> tuple[list[Drawing], list[tuple[str, str]]]:
        """Draws each metric, a mean together with its extremes; those that never change are listed instead."""
        groups: dict[str, list[str]] = {}
        constants: list[tuple[str, str]] = []
        for name in names:
            values = set(known(self.records, name))
            if len(values) == 1 and len(self.records) > 1:
                constants.append((name, plain(values.pop())))
            else:
                match = _PARTS.fullmatch(name)
                groups.setdefault(name if match is None else match[1], []).append(name)
        plots = []
        for stem, members in groups.items():
            alone = len(members) == 1
            series = [
                self._line(name, "" if alone else name.removeprefix(stem).strip("/_"), place)
                for place, name in enumerate(members)
            ]
            share = members[0].endswith(("_fraction", "_ratio", "_share", "_frequency"))
            plots.append(Plot(members[0] if alone else stem, series, percent if share else plain, from_zero=share))
        return draw_all(self.records, plots), constants

    def _lines(self, pattern: str, label: str, first_color: int, *, dashed: bool = False) -> list[Series]:
        """Makes a line of each metric that matches, named by the groups it finds."""
        matches = [match for name in self.names if (match := re.fullmatch(pattern, name)) is not None]
        return [
            self._line(match[0], " ".join(filter(None, match.groups())) or label, first_color + place, dashed=dashed)
            for place, match in enumerate(matches)
        ]

    def _line(self, name: str, label: str, color: int, *, dashed: bool = False) -> Series:
        self._drawn.add(name)
        return Series(label, column(self.records, name), color % COLORS, dashed=dashed)


def _others(curves: _Curves, logs: Sequence[Record]) -> Section:
    """Draws what the catalogue does not list: metrics of every step, and what else was logged."""
    plain_logs = [record for record in logs if not any(name.startswith(("eval_", "train_")) for name in record)]
    logged = _Curves(plain_logs, "")
    drawings, constants = curves.one_by_one(n for n in curves.unused() if not n.startswith(_SHOWN_ELSEWHERE))
    names = [n for n in logged.names if n not in curves.names and not n.startswith(_SHOWN_ELSEWHERE)]
    more, more_constants = logged.one_by_one(names)
    return Section("Other metrics", [*drawings, *more], [*constants, *more_constants])


def _with_contributions(record: Record) -> Record:
    """Adds the size of what each objective adds to the step: its gradient norm times its coefficient."""
    found = {}
    for name, value in record.items():
        if name.startswith("objectives/") and name.endswith("/coefficient"):
            norm, coefficient = number(record.get(name.replace("/coefficient", "/grad_norm"))), number(value)
            if norm is not None and coefficient is not None:
                found[name.replace("/coefficient", "/contribution")] = coefficient * norm
    return {**record, **found}


def _with_bands(plot: Plot, objectives: Any) -> Plot:
    """Adds the bounds of each objective's `kl_band` to the chart of KLs, in the objective's colour."""
    if plot.title != "KL to the reference by objective" or not isinstance(objectives, Mapping):
        return plot
    bands = []
    for one in plot.series:
        settings = objectives.get(one.label)
        band = settings.get("kl_band") if isinstance(settings, Mapping) else None
        bounds = [number(bound) for bound in band] if isinstance(band, Sequence) else []
        bands += [
            Series(f"band of {one.label}", [at] * len(one.values), one.color, dashed=True)
            for at in bounds
            if at is not None
        ]
    return Plot(plot.title, [*plot.series, *bands], plot.write, from_zero=plot.from_zero)
