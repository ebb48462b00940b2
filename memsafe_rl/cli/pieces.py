"""What pages are put together from: tables, legends, small charts side by side, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from memsafe_rl.cli.charts import Series, chart
from memsafe_rl.cli.run_folder import Record
from memsafe_rl.diagnostics.run_figures import number
from memsafe_rl.units import format_bytes

COLORS = 8
"""Colours of the page; series beyond them begin anew."""


def plain(value: float) -> str:
    """Writes a number with four digits."""
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def percent(value: float) -> str:
    """Writes a share."""
    return f"{100 * value:.3g}%"


def in_seconds(value: float) -> str:
    """Writes seconds."""
    return f"{value:.3g} s"


def scientific(value: float) -> str:
    """Writes a number that may be very small."""
    return "0" if value == 0 else f"{value:.2g}"


def short(value: float | None) -> str:
    """Writes a number, or a dash for none."""
    return "-" if value is None else plain(value)


def bytes_text(value: float) -> str:
    """Writes bytes without needless zeros."""
    return format_bytes(int(value)).replace(".00 ", " ")


def bytes_or_dash(value: float | None) -> str:
    """Writes bytes, or a dash for none."""
    return "-" if value is None else format_bytes(int(value))


def duration(seconds: float) -> str:
    """Writes a time span in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"


@dataclass(frozen=True)
class Plot:
    """A small chart.

    Args:
        title: what it shows.
        series: its lines; those without a value are left out.
        write: writes a value.
        from_zero: begin the axis at 0 where all values are above it.
        note: a sentence under the title, as plain text; empty for none.
    """

    title: str
    series: Sequence[Series]
    write: Callable[[float], str] = plain
    from_zero: bool = False
    note: str = ""


def line(records: Sequence[Record], name: str, label: str, color: int, *, dashed: bool = False) -> Series:
    """Makes a line of one metric."""
    return Series(label, [number(record.get(name)) for record in records], color % COLORS, dashed=dashed)


def grid(records: Sequence[Record], plots: Iterable[Plot]) -> str:
    """Sets small charts side by side; those without a value are left out."""
    steps = [float(record["step"]) for record in records]
    cells = []
    for plot in plots:
        there = [one for one in plot.series if any(value is not None for value in one.values)]
        if there:
            from_zero = plot.from_zero or plot.write in (percent, scientific)
            shape: dict[str, Any] = {"from_zero": from_zero, "width": 530, "height": 210}
            drawn = chart(steps, there, write=plot.write, label=plot.title, **shape)
            note = f'<p class="hint-text">{escape(plot.note)}</p>' if plot.note else ""
            cells.append(f"<figure><h3>{escape(plot.title)}</h3>{note}{legend(there)}{drawn}</figure>")
    return f'<div class="grid2">{"".join(cells)}</div>' if cells else ""


def legend(series: Sequence[Series]) -> str:
    """Names the colours of a chart."""
    if len(series) == 1 and len(series[0].label) < 3:
        return ""
    items = (
        f'<span><i class="swatch c{one.color}{" dashed" if one.dashed else ""}"></i>{escape(one.label)}</span>'
        for one in series
    )
    return f'<p class="legend">{"".join(items)}</p>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = (), wide: bool = False
) -> str:
    """Writes a table; the first column and those named hold text, the others figures."""
    words = {0, *text_columns}

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if place in words else ' class=n'}>{escape(value)}</{tag}>" for place, value in enumerate(row)
        )

    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table{" class=wide" if wide else ""}>{top}<tbody>{body}</tbody></table></div>'
