"""The charts of a report as inline SVG, and the learning curves that `templates/learning.yaml` lists."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memsafe_rl.diagnostics.run_figures import Record, RunFolder, column, known, number
from memsafe_rl.errors import texts_beside
from memsafe_rl.units import percent, plain, scientific

MOST_POINTS = 240
"""Points of a chart beyond which neighbouring steps are drawn together."""
COLORS = 8
"""Colours of series on the page; further series start over. One more is for what lies below all others."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 430, 186, 62, 6, 24, 20
"""Size and margins in pixels; small enough that a telephone shows the text at nine pixels."""
_OFF_SCALE = 4.0  # how far above all values a limit may lie and still be drawn; a higher one would flatten them
_ROOM_FOR_WORDS = 1.2
_PAINT = (*(f"c{number}" for number in range(COLORS + 1)), "bad", "warn", "plan", "lossy", "rule", "dim")
_INK = {name: f"#ab00{number:02d}" for number, name in enumerate(_PAINT)}
"""A stand-in for each colour of the page, replaced by its CSS variable once matplotlib has drawn."""
_MARKS = {"plan": ("|", "plan"), "failure": ("v", "bad"), "alarm": ("o", "warn"), "lossy": ("D", "lossy")}
_STYLE = {"svg.fonttype": "none", "path.simplify": True, "font.size": 11, "font.sans-serif": ["DejaVu Sans"]}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

Write = Callable[[float], str]
"""Writes a value for people."""


@dataclass(frozen=True)
class Series:
    """One line or layer: its name, one value a step (None where there is none), and the number of its colour."""

    label: str
    values: Sequence[float | None]
    color: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step; `kind` is "failure", "plan", "alarm" or "lossy"."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True)
class Limit:
    """A level that must not be passed."""

    value: float
    label: str


@dataclass(frozen=True)
class Plot:
    """A chart: `write` writes its values; `stacked` makes layers; `binary` sets ticks at round powers of 1,024."""

    title: str
    series: Sequence[Series]
    write: Write = plain
    from_zero: bool = False
    note: str = ""
    stacked: bool = False
    binary: bool = False
    limit: Limit | None = None
    marks: Sequence[Mark] = ()


Drawing = tuple[Plot, Markup]
"""A chart and its SVG, which is safe to insert as it is."""


def draw_all(records: Sequence[Mapping[str, Any]], plots: Sequence[Plot]) -> list[Drawing]:
    """Draws charts over the steps of records; lines without a value, and charts without a line, are left out."""
    steps = [float(record["step"]) for record in records]
    shown = [replace(plot, series=[one for one in plot.series if set(one.values) - {None}]) for plot in plots]
    return [(plot, draw(steps, plot)) for plot in shown if plot.series]


def draw(steps: Sequence[float], plot: Plot) -> Markup:
    """Draws one chart over steps."""
    groups = np.array_split(np.arange(len(steps)), min(len(steps), MOST_POINTS))
    values = _per_group(plot.series, groups, stacked=plot.stacked)
    centers = [float(np.mean([steps[index] for index in group])) for group in groups]
    edges = np.array([steps[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(centers)), steps[-1] + 0.5])
    highest = float(np.nanmax(values.sum(axis=0) if plot.stacked else values))
    limit = plot.limit if plot.limit is not None and plot.limit.value <= _OFF_SCALE * highest else None
    # The words of a limit off the scale have room of their own.
    top = max(highest, limit.value) if limit else highest * (1.0 if plot.limit is None else _ROOM_FOR_WORDS)
    low = 0.0 if plot.stacked else float(np.nanmin(values))
    ticks = y_ticks(min(0.0, low) if plot.from_zero else low, top, binary=plot.binary)
    figure, axes = _axes(edges, ticks, plot.write)
    if plot.stacked:
        for one, layer, base in zip(plot.series, values, np.cumsum(values, axis=0) - values, strict=True):
            axes.stairs(base + layer, edges, baseline=base, fill=True, color=_INK[f"c{one.color}"], alpha=0.88)
    else:
        for one, line in zip(plot.series, values, strict=True):
            known = ~np.isnan(line)
            marker = "o" if known.sum() == 1 else ""
            style = {"color": _INK[f"c{one.color}"], "linestyle": "--" if one.dashed else "-", "marker": marker}
            axes.plot(np.array(centers)[known], line[known], linewidth=1.5, markersize=4, **style)
    if plot.limit is not None:
        _draw_limit(axes, plot.limit, shown=limit is not None, ticks=ticks)
    _draw_marks(axes, plot.marks, edges)
    return _svg(figure, plot, _hints(axes, steps, groups, values, plot))


def y_ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Chooses round numbers that span a range."""
    unit = 1024.0 ** int(math.log(max(high, 1.0), 1024)) if binary else 1.0
    top = high if high > low else low + (abs(low) or 1.0)
    locator = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    return [float(tick) * unit for tick in locator.tick_values(low / unit, top / unit)]


def _per_group(series: Sequence[Series], groups: Sequence[Any], *, stacked: bool) -> Any:
    """Returns each group's values, `(series, groups)` float64: of its highest step, or their mean."""
    values = np.array([[np.nan if value is None else value for value in one.values] for one in series], dtype=float)
    if stacked:
        values = np.nan_to_num(values)
        return values[:, [group[values[:, group].sum(axis=0).argmax()] for group in groups]]
    masked = np.ma.masked_invalid(values)
    return np.ma.stack([masked[:, group].mean(axis=1) for group in groups], axis=1).filled(np.nan)


def _axes(edges: Any, ticks: Sequence[float], write: Write) -> tuple[Any, Any]:
    """Makes an empty chart whose units are the pixels of its SVG."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        axes = figure.add_axes(
            (_LEFT / _WIDTH, _BOTTOM / _HEIGHT, 1 - (_LEFT + _RIGHT) / _WIDTH, 1 - (_TOP + _BOTTOM) / _HEIGHT)
        )
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(ticks[0], ticks[-1]))
    axes.set_yticks(ticks, [write(tick) for tick in ticks])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.tick_params(length=0, labelcolor=_INK["dim"])
    axes.grid(axis="y", color=_INK["rule"])
    axes.set_axisbelow(True)
    return figure, axes


def _draw_limit(axes: Any, limit: Limit, *, shown: bool, ticks: Sequence[float]) -> None:
    crowded = limit.value > ticks[0] + 0.85 * (ticks[-1] - ticks[0])
    place = {"ha": "right", "va": "top" if crowded or not shown else "bottom", "color": _INK["bad"], "fontsize": 11}
    if shown:
        axes.axhline(limit.value, color=_INK["bad"], linestyle="--", linewidth=1.4, gid="limit")
        axes.text(1, limit.value, limit.label, transform=axes.get_yaxis_transform(), gid="limit-text", **place)
    else:
        axes.text(1, 1, f"{limit.label}, far above this scale ↑", transform=axes.transAxes, gid="limit-text", **place)


def _draw_marks(axes: Any, marks: Sequence[Mark], edges: Any) -> None:
    for place, mark in enumerate(marks):
        marker, color = _MARKS[mark.kind]
        step = min(max(mark.step, edges[0]), edges[-1])
        if mark.kind in ("failure", "lossy"):
            axes.axvline(step, color=_INK[color], linewidth=1, alpha=0.3)
        style = {"marker": marker, "color": _INK[color], "markersize": 8, "markeredgewidth": 2}
        axes.plot([step], [1.07], transform=axes.get_xaxis_transform(), gid=f"mark {mark.kind} {place}", **style)


def _hints(axes: Any, steps: Sequence[float], groups: Sequence[Any], values: Any, plot: Plot) -> str:
    """Covers each group of steps with an unseen strip whose title says the values there."""
    strips = []
    for place, group in enumerate(groups):
        first, last = steps[group[0]], steps[group[-1]]
        lines = [f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"]
        column = [(one.label, value) for one, value in zip(plot.series, values[:, place], strict=True)]
        lines += [f"{name}: {plot.write(value)}" for name, value in reversed(column) if not np.isnan(value)]
        if plot.stacked and len(plot.series) > 1:
            lines.append(f"together: {plot.write(float(values[:, place].sum()))}")
        left, right = axes.transData.transform([(first - 0.5, 0), (last + 0.5, 0)])[:, 0]
        strips.append(
            f'<rect class="hint" x="{left:.1f}" y="{_TOP}" width="{max(0.5, right - left):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{escape(chr(10).join(lines))}</title></rect>'
        )
    return "".join(strips)


def _svg(figure: Any, plot: Plot, hints: str) -> Markup:
    """Writes a figure as SVG: no ids but those of markers, nothing clipped, classes and CSS variables for the page."""
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": plot.title}):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = re.sub(r"\s*\n\s*", " ", text[text.index("<svg") :])
    text = re.sub(r'<g id="(limit|limit-text)">', r'<g class="\1">', text)
    text = re.sub(
        r'<g id="(mark \w+) (\d+)">',
        lambda found: f'<g class="{found[1]}"><title>{escape(plot.marks[int(found[2])].text)}</title>',
        text,
    )
    text = re.sub(r' id="(?!m[0-9a-f]{10}")[^"]*"| clip-path="[^"]*"', "", text)
    text = re.sub(r"#ab00(\d\d)", lambda found: f"var(--{_PAINT[int(found[1])]})", text)
    text = text.replace("</svg>", f"{hints}</svg>")
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.title)}" ', 1))


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
    catalogue = texts_beside(__file__, "templates/learning.yaml")
    unit = "denoising step" if "chains" in (folder.run.get("facts") or {}) else "token"
    objectives = (folder.run.get("config") or {}).get("objectives")
    steps = _Curves([_with_contributions(record) for record in folder.steps], unit)
    evaluations = _Curves([log for log in folder.logs if any(name.startswith("eval_") for name in log)], unit)
    sections = []
    for title, charts in catalogue.items():
        curves = evaluations if title == _EVALUATIONS else steps
        plots = [_with_bands(plot, objectives) for chart in charts if (plot := curves.plot(chart)) is not None]
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
    """Returns whether a chart would show nothing but zeros."""
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
        """Returns the metrics that no chart has drawn."""
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
        bands += [
            Series(f"band of {one.label}", [at] * len(one.values), one.color, dashed=True)
            for at in ([number(bound) for bound in band] if isinstance(band, Sequence) else [])
            if at is not None
        ]
    return replace(plot, series=[*plot.series, *bands])
