"""Charts over optimizer steps as inline SVG: matplotlib draws, the page's style sheet colours."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from memsafe_rl.errors import ConfigError
from memsafe_rl.units import plain

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
        floor = np.cumsum(values, axis=0) - values
        for one, layer, base in zip(plot.series, values, floor, strict=True):
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
    locator = _matplotlib().ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    return [float(tick) * unit for tick in locator.tick_values(low / unit, top / unit)]


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ModuleNotFoundError as error:
        raise ConfigError(
            "The charts of a report need matplotlib, which is not installed. Install it: pip install "
            "'memsafe-rl[plots]'."
        ) from error
    return matplotlib


def _per_group(series: Sequence[Series], groups: Sequence[Any], *, stacked: bool) -> Any:
    """Gives each group's values, `(series, groups)` float64: of its highest step, or their mean."""
    values = np.array([[np.nan if value is None else value for value in one.values] for one in series], dtype=float)
    if stacked:
        values = np.nan_to_num(values)
        return values[:, [group[values[:, group].sum(axis=0).argmax()] for group in groups]]
    masked = np.ma.masked_invalid(values)
    return np.ma.stack([masked[:, group].mean(axis=1) for group in groups], axis=1).filled(np.nan)


def _axes(edges: Any, ticks: Sequence[float], write: Write) -> tuple[Any, Any]:
    """Makes an empty chart whose units are the pixels of its SVG."""
    library = _matplotlib()
    with library.rc_context(_STYLE):
        figure = library.figure.Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        axes = figure.add_axes(
            (_LEFT / _WIDTH, _BOTTOM / _HEIGHT, 1 - (_LEFT + _RIGHT) / _WIDTH, 1 - (_TOP + _BOTTOM) / _HEIGHT)
        )
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(ticks[0], ticks[-1]))
    axes.set_yticks(ticks, [write(tick) for tick in ticks])
    axes.xaxis.set_major_locator(library.ticker.MaxNLocator(nbins=7, integer=True))
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
        text = f"{limit.label}, far above this scale ↑"
        axes.text(1, 1, text, transform=axes.transAxes, gid="limit-text", **place)


def _draw_marks(axes: Any, marks: Sequence[Mark], edges: Any) -> None:
    for number, mark in enumerate(marks):
        marker, color = _MARKS[mark.kind]
        step = min(max(mark.step, edges[0]), edges[-1])
        if mark.kind in ("failure", "lossy"):
            axes.axvline(step, color=_INK[color], linewidth=1, alpha=0.3)
        style = {"marker": marker, "color": _INK[color], "markersize": 8, "markeredgewidth": 2}
        axes.plot([step], [1.07], transform=axes.get_xaxis_transform(), gid=f"mark {mark.kind} {number}", **style)


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
    with _matplotlib().rc_context({**_STYLE, "svg.hashsalt": plot.title}):
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
