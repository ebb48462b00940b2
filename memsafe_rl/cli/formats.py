"""Numbers as people read them, on a terminal or on a page."""

from __future__ import annotations

from memsafe_rl.units import format_bytes


def plain(value: float | None) -> str:
    """Writes a number with four digits, a large one with separators or a power of ten, or a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 10_000 <= abs(value) < 10_000_000 else f"{value:.4g}"


def percent(value: float) -> str:
    """Writes a share."""
    return f"{100 * value:.3g}%"


def scientific(value: float) -> str:
    """Writes a number that may be very small."""
    return "0" if value == 0 else f"{value:.2g}"


def bytes_text(value: float) -> str:
    """Writes bytes without trailing zeros."""
    return format_bytes(int(value)).replace(".00 ", " ")


def bytes_or_dash(value: float | None) -> str:
    """Writes bytes, or a dash for none."""
    return "-" if value is None else format_bytes(int(value))


def duration(seconds: float, decimals: int = 1) -> str:
    """Writes a time span in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{decimals}f} {unit}"
    return f"{seconds:.{decimals}f} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"
