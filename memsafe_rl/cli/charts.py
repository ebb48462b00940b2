"""Charts as inline SVG, drawn by hand: no library, no script, no network; colours are the page's own variables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

MOST_POINTS = 240
"""Points of a chart beyond which steps are drawn together."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 26
_LANE = 20
"""Height of the lane of marks above a chart."""
_OFF_SCALE = 4.0
"""How far above all values a limit may lie to be drawn; further up it would press them flat."""
_TICKS = 5


@dataclass(frozen=True)
class Series:
    """One line or layer.

    Args:
        label: its name.
        values: one a step; None where there is none.
        color: number of its colour on the page.
        dots: draw points only.
        dashed: draw the line dashed.
    """

    label: str
    values: Sequence[float | None]
    color: int
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step.

    Args:
        step: when.
        kind: "failure", "plan", "alarm" or "lossy".
        text: what, in words.
    """

    step: float
    kind: str
    text: str


@dataclass(frozen=True)
class Limit:
    """A level not to be passed.

    Args:
        value: where it lies.
        label: what it is.
    """

    value: float
    label: str


Write = Callable[[float], str]
"""Writes a value for people."""


def chart(
    steps: Sequence[float],
    series: Sequence[Series],
    *,
    write: Write,
    label: str,
    stacked: bool = False,
    limit: Limit | None = None,
    marks: Sequence[Mark] = (),
    width: int = 1080,
    height: int = 280,
    base: float = 10.0,
    from_zero: bool = True,
) -> str:
    """Draws a chart over steps."""
    groups = _groups(steps)
    drawn = [_joined(one, series, groups, highest=stacked) for one in range(len(series))]
    at = [sum(steps[index] for index in group) / len(group) for group in groups]
    tops = [sum(values[place] or 0.0 for values in drawn) for place in range(len(at))]
    flat = tops if stacked else [value for values in drawn for value in values if value is not None]
    shown = limit if limit is not None and limit.value <= _OFF_SCALE * max(flat, default=0.0) else None
    frame = _Frame.around(at, [*flat, *([shown.value] if shown else [])], width, height, base, from_zero or stacked)
    body = _layers(frame, at, series, drawn) if stacked else _lines(frame, at, series, drawn)
    parts = [_axes(frame, write), body, _limit(frame, limit, shown, below_marks=bool(marks)), _marks(frame, marks)]
    parts.append(_hints(frame, steps, groups, series, drawn, write, total=stacked and len(series) > 1))
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class _Frame:
    """Where values lie on the drawing."""

    width: int
    height: int
    low: float
    high: float
    first: float
    last: float
    ticks: tuple[float, ...]

    @classmethod
    def around(
        cls, at: Sequence[float], values: Sequence[float], width: int, height: int, base: float, from_zero: bool
    ) -> _Frame:
        low, high = min(values, default=0.0), max(values, default=1.0)
        low = min(0.0, low) if from_zero else low
        ticks = round_ticks(low, high, base)
        first, last = at[0] - 0.5, at[-1] + 0.5
        return cls(width, height, min(low, ticks[0]), max(high, ticks[-1]), first, last, ticks)

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.height - _BOTTOM - share * (self.height - _BOTTOM - _TOP - _LANE)


def round_ticks(low: float, high: float, base: float) -> tuple[float, ...]:
    """Chooses round numbers that span a range."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / _TICKS
    power = base ** math.floor(math.log(rough, base))
    steps = (1, 2) if base == 2 else (1, 2, 2.5, 5, 10)
    step = power * next(factor for factor in steps if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def _groups(steps: Sequence[float]) -> list[range]:
    """Puts steps together so that at most `MOST_POINTS` are drawn."""
    size = math.ceil(len(steps) / MOST_POINTS)
    return [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]


def _joined(one: int, series: Sequence[Series], groups: Sequence[range], *, highest: bool) -> list[float | None]:
    """Gives a series' value for each group of steps: at the group's highest step, or the mean."""
    values, found = series[one].values, list[float | None]()
    for group in groups:
        if highest:
            top = max(group, key=lambda index: sum(other.values[index] or 0.0 for other in series))
            found.append(values[top])
            continue
        there = [value for index in group if (value := values[index]) is not None]
        found.append(sum(there) / len(there) if there else None)
    return found


def _axes(frame: _Frame, write: Write) -> str:
    parts = []
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(write(tick))}</text>'
        )
    most = max(2, min(10, frame.width // 90))
    wanted = round_ticks(frame.first + 0.5, max(frame.last - 0.5, frame.first + 1.5), 10)
    whole = sorted({round(tick) for tick in wanted if frame.first < round(tick) < frame.last})
    for tick in whole[:: max(1, math.ceil(len(whole) / most))]:
        x = frame.x(tick)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{frame.height - 8}" text-anchor="middle">{tick}</text>')
    return "".join(parts)


def _layers(
    frame: _Frame, at: Sequence[float], series: Sequence[Series], drawn: Sequence[Sequence[float | None]]
) -> str:
    """Draws layers with a flat top over each step, since nothing is known of the time between."""
    half = [(after - before) / 2 for before, after in itertools.pairwise(at)]
    left = [frame.first, *(before + gap for before, gap in zip(at, half, strict=False))]
    right = [*left[1:], frame.last]
    floor, parts = [0.0] * len(at), []
    for one, values in zip(series, drawn, strict=True):
        top = [low + (value or 0.0) for low, value in zip(floor, values, strict=True)]
        over = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for a, b, y in zip(left, right, top, strict=True) for x in (a, b)]
        under = [
            f"{frame.x(x):.1f},{frame.y(y):.1f}" for a, b, y in zip(left, right, floor, strict=True) for x in (a, b)
        ]
        parts.append(f'<polygon class="layer c{one.color}" points="{" ".join([*over, *reversed(under)])}"/>')
        floor = top
    return "".join(parts)


def _lines(
    frame: _Frame, at: Sequence[float], series: Sequence[Series], drawn: Sequence[Sequence[float | None]]
) -> str:
    parts = []
    for one, values in zip(series, drawn, strict=True):
        points = [(frame.x(x), frame.y(value)) for x, value in zip(at, values, strict=True) if value is not None]
        if one.dots or len(points) == 1:
            parts += [f'<circle class="dot c{one.color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
        elif points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dashed = " dashed" if one.dashed else ""
            parts.append(f'<polyline class="line c{one.color}{dashed}" points="{path}"/>')
    return "".join(parts)


def _limit(frame: _Frame, limit: Limit | None, shown: Limit | None, *, below_marks: bool) -> str:
    if limit is None:
        return ""
    right = frame.width - _RIGHT
    if shown is None:
        text = f"{limit.label}, far above this scale ↑"
        height = _TOP + (_LANE + 12 if below_marks else 10)
        return f'<text class="limit-text" x="{right - 2}" y="{height}" text-anchor="end">{escape(text)}</text>'
    y = frame.y(shown.value)
    below = y + 13 if y < _TOP + _LANE + 14 else y - 5
    return (
        f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="limit-text" x="{right - 2}" y="{below:.1f}" text-anchor="end">{escape(limit.label)}</text>'
    )


def _marks(frame: _Frame, marks: Sequence[Mark]) -> str:
    parts = []
    for mark in marks:
        x, y = frame.x(min(max(mark.step, frame.first), frame.last)), _TOP + 2
        if mark.kind == "plan":
            shape = f'<rect x="{x - 1.5:.1f}" y="{y}" width="3" height="12"/>'
        elif mark.kind == "failure":
            shape = f'<path d="M{x - 6:.1f} {y}h12l-6 12z"/>'
        elif mark.kind == "lossy":
            shape = f'<path d="M{x:.1f} {y - 1}l7 7l-7 7l-7 -7z"/>'
        else:
            shape = f'<circle cx="{x:.1f}" cy="{y + 6}" r="5"/>'
        line = f'<line class="drop" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 14}" y2="{frame.height - _BOTTOM}"/>'
        dropped = line if mark.kind in ("failure", "lossy") else ""
        parts.append(f'<g class="mark {mark.kind}">{dropped}{shape}<title>{escape(mark.text)}</title></g>')
    return "".join(parts)


def _hints(
    frame: _Frame,
    steps: Sequence[float],
    groups: Sequence[range],
    series: Sequence[Series],
    drawn: Sequence[Sequence[float | None]],
    write: Write,
    *,
    total: bool,
) -> str:
    """Lays an unseen strip over each step that says its values when pointed at."""
    parts = []
    for place, group in enumerate(groups):
        first, last = steps[group[0]], steps[group[-1]]
        told = [f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"]
        there = [(one.label, values[place]) for one, values in zip(series, drawn, strict=True)]
        told += [f"{name}: {write(value)}" for name, value in reversed(there) if value is not None]
        if total:
            told.append(f"together: {write(sum(value or 0.0 for _, value in there))}")
        left, right = frame.x(first - 0.5), frame.x(last + 0.5)
        top = _TOP + _LANE
        parts.append(
            f'<rect class="hint" x="{left:.1f}" y="{top}" width="{max(0.5, right - left):.1f}" '
            f'height="{frame.height - _BOTTOM - top}"><title>{escape(chr(10).join(told))}</title></rect>'
        )
    return "".join(parts)
