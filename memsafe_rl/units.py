"""Bytes, seconds, numbers and chats as people read and write them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from memsafe_rl.errors import ConfigError

_UNITS = {
    **{"": 1, "b": 1},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(count: int) -> str:
    """Writes a byte count, which may be negative, with a binary unit and two decimals at most, such as ``1.23 GiB``."""
    size = float(abs(count))
    sign = "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} TiB"


def parse_bytes(text: str) -> int:
    """Reads a byte count such as ``16GiB``, ``1.5 GB`` or ``4096``; units are powers of 1000 or, with an i, of 1024."""
    match = _QUANTITY.fullmatch(text)
    count = math.inf if match is None else float(match[1]) * _UNITS.get(match[2].lower(), math.inf)
    if not math.isfinite(count):
        raise ConfigError(f"{text!r} is not a byte count. Write a number and a unit, such as '16GiB' or '500MB'.")
    return int(count)


def format_seconds(seconds: float) -> str:
    """Writes a duration in the two units that matter, such as ``0.42 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{whole} s"


def chat_text(value: Any) -> str:
    """Writes a prompt or a completion: a text as it is, a chat turn by turn as ``role: what was said``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "\n".join(f"{turn['role']}: {_said(turn)}" for turn in value)


def _said(turn: Mapping[str, Any]) -> str:
    """Writes one message: its text, images as placeholders, tool calls as function calls."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    words = [
        str(part.get("text", f"<{part.get('type')}>")) if isinstance(part, Mapping) else str(part) for part in parts
    ]
    for call in (call.get("function", call) for call in turn.get("tool_calls") or ()):
        given = call.get("arguments", "")  # which models give as a mapping or as JSON
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
        words.append(f"{call.get('name')}({written})")
    return " ".join(filter(None, words))


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
