"""What values may be: types, ranges, words and names, as pure functions."""

from __future__ import annotations

import difflib
import functools
import json
import math
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from memsafe_rl.errors import ConfigError

_TRUE, _FALSE, _NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"none", "null", ""}

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping (JSON on a command line)",
    NoneType: "none",
}


@dataclass(frozen=True)
class Range:
    """An interval of numbers."""

    low: float = -math.inf  # least number
    high: float = math.inf  # greatest number
    open_low: bool = False  # whether ``low`` itself lies outside
    open_high: bool = False  # whether ``high`` itself lies outside
    none: str = ""  # what None stands for, where infinity might be written for it; empty where that is unlikely

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and _is_finite(value)

    def __str__(self) -> str:
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'more than' if self.open_low else 'at least'} {self.low:g}")
        if self.high < math.inf:
            bounds.append(f"{'less than' if self.open_high else 'at most'} {self.high:g}")
        words = " and ".join(bounds) or "finite"
        return f"{words}, or None for {self.none}" if self.none else words


def read(name: str, value: Any, hint: Any) -> Any:
    """Reads a setting as its declared type, from Python, YAML or a command line."""
    if hint is Any:
        return value
    value = value.item() if getattr(value, "shape", None) == () else value  # a number of numpy's or torch's
    kinds = get_args(hint) if get_origin(hint) not in (list, tuple, dict) and get_args(hint) else (hint,)
    plain = {get_origin(kind) or kind: kind for kind in kinds}
    if isinstance(value, str):
        return _read_text(name, value, plain)
    if value is None and NoneType in plain:
        return None
    if isinstance(value, bool) and bool in plain:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (int in plain or float in plain):
        if isinstance(value, int) or float in plain:
            return value
        if value.is_integer():
            return int(value)
    if isinstance(value, Mapping) and dict in plain:
        return dict(value)
    if isinstance(value, Sequence) and (list in plain or tuple in plain):
        return _read_items(name, value, plain)
    raise _wrong(name, value, plain)


def _read_text(name: str, text: str, plain: Mapping[Any, Any]) -> Any:
    stripped = text.strip()
    if NoneType in plain and stripped.lower() in _NONE:
        return None
    if stripped[:1] in ("{", "[") and {dict, list, tuple} & set(plain):
        try:
            content = json.loads(stripped)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f'{name} is {stripped!r}, which is not JSON ({error}). Write it like {{"name": 1}} or [1, 2].'
            ) from None
        kinds = (kind for base, kind in plain.items() if base is not str)
        return read(name, content, functools.reduce(operator.or_, kinds))
    if bool in plain and stripped.lower() in _TRUE | _FALSE:
        return stripped.lower() in _TRUE
    number = _number(stripped)
    if number is not None and int in plain and float(number).is_integer() and str not in plain:
        return int(number)
    if number is not None and float in plain:
        return number
    if list in plain or tuple in plain:
        return _read_items(name, [item.strip() for item in stripped.split(",")], plain)
    if str in plain and dict not in plain:
        return text
    raise _wrong(name, text, plain)


def _number(text: str) -> int | float | None:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return None


def _read_items(name: str, items: Sequence[Any], plain: Mapping[Any, Any]) -> list[Any] | tuple[Any, ...]:
    base = list if list in plain else tuple
    inner = get_args(plain[base])[0]
    return base(read(name, item, inner) for item in items)


def _wrong(name: str, value: Any, plain: Mapping[Any, Any]) -> ConfigError:
    # Where a list or a mapping is asked for, text is only how a command line writes it; saying so would mislead.
    written_as_text = {dict, tuple} & set(plain)
    words = [_WORDS[base] for base in plain if base is not str or not written_as_text]
    return ConfigError(f"{name} is {value!r}; it must be {' or '.join(dict.fromkeys(words))}.")


def _is_finite(value: float) -> bool:
    """Whether a number is a finite float; a whole number may also be too large for one."""
    return abs(value) <= sys.float_info.max


def check_in(told: str, value: float, allowed: Range) -> None:
    """Refuses a number outside a range."""
    if value in allowed:
        return
    wanted = str(allowed)
    finite = "" if _is_finite(value) or wanted == "finite" else "finite, and "
    raise ConfigError(f"{told} is {value!r}; it must be {finite}{wanted}.")


def check_band(told: str, given: object, band: Sequence[float] | None, unit: str, example: str) -> None:
    """Refuses what is no pair of rising numbers from 0 on."""
    if band is not None and (len(band) != 2 or not 0 <= band[0] < band[1] < math.inf):
        raise ConfigError(f"{told} is {given!r}; it must be [low, high] in {unit}, such as {example}.")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuses a word that is not among some choices, and names the nearest one."""
    if value not in choices:
        close = nearest(str(value), choices)
        hint = f" Did you mean {close!r}?" if close else ""
        raise ConfigError(f"{name} is {str(value)!r}; it must be one of {', '.join(choices)}.{hint}")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Finds the known name that looks most like a given one; None if none does."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return found[0] if found else None


_FEW = 40  # names that an error lists; there are hundreds of settings


def unknown(name: object, names: Iterable[str], what: str = "setting", *, also: Iterable[str] = ()) -> ConfigError:
    """Makes the error for a name that is not known."""
    known = list(names)
    close = nearest(str(name), [*known, *also])
    everything = ", ".join(known) if len(known) < _FEW else "see `memsafe-rl train --help`"
    hint = f"Did you mean {close!r}?" if close else f"What there is: {everything}."
    return ConfigError(f"There is no {what} {name!r}. {hint}")
