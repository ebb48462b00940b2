"""How a setting is declared: one `setting(...)` from which help, parsers, checks, resume and refusals follow."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, cast, dataclass_transform, get_args, get_origin, get_type_hints

from memsafe_rl.config import refusal
from memsafe_rl.errors import ConfigError, did_you_mean

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
    none: str = ""  # what None means, told where infinity is refused; empty to leave it out

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high) and _is_finite(value)

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
    if isinstance(value, os.PathLike) and str in plain:
        value = os.fspath(value)
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
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"{name} is {str(value)!r}; it must be one of {', '.join(choices)}.{hint}")


_FEW = 40  # names that an error lists; there are hundreds of settings


def unknown(name: object, names: Iterable[str], what: str = "setting", *, also: Iterable[str] = ()) -> ConfigError:
    """Makes the error for a name that is not known."""
    known = list(names)
    everything = "see `memsafe-rl train --help`" if what == "setting" and len(known) >= _FEW else ", ".join(known)
    hint = did_you_mean(str(name), [*known, *also]) or f" What there is: {everything}."
    return ConfigError(f"There is no {what} {name!r}.{hint}")


def check_known(given: Iterable[Any], known: Collection[str], what: str) -> None:
    """Refuses the first name that is not known."""
    for name in given:
        if name not in known:
            raise unknown(name, known, what)


_Class = TypeVar("_Class", bound=type)

Resume = Literal["must agree", "may change"]


@dataclass(frozen=True)
class Setting:
    """One setting."""

    default: Any  # its value where the user gives none
    help: str  # one sentence: what it does, its unit, what None means
    group: str = ""  # title of the panel that shows it in help
    range: Range | None = None  # the numbers it may be; None for any
    choices: Collection[str] = ()  # the words it may be; a mapping gives the package that each needs. Empty for any
    registry: str = ""  # in place of choices, the registry whose parts it may name; see `validation.REGISTRIES`
    # other ways to write a value, such as YAML's reading of a bare ``no``
    spellings: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    enum: str = ""  # transformers' enumeration whose members callbacks and optimizers expect; see `validation.ENUMS`
    also: tuple[str, ...] = ()  # other names that TRL and transformers have for it
    resume: Resume = "must agree"  # whether a resumed run must agree on it or may change it
    tokens_only: bool = False  # whether only rows of tokens, or models loaded by name, have a use for it
    secret: bool = False  # whether it is written nowhere: into no file, log or tracker
    positional: bool = False  # whether it may be given without its name
    name: str = ""  # the field's name; `declare` sets it
    hint: Any = Any  # the field's type; `declare` sets it

    def field(self) -> Any:
        """Returns the dataclass field, with what `HfArgumentParser` reads."""
        flags = [f"--{form}" for name in self.also for form in dict.fromkeys((name, name.replace("_", "-")))]
        # A truth value that is None by default: its bare flag means True.
        bare = {"nargs": "?", "const": True} if self.hint == (bool | None) else {}
        return dataclasses.field(
            default=self.default,
            kw_only=not self.positional,
            repr=not self.secret,
            metadata={"help": self.help.replace("%", "%%"), **({"aliases": flags} if flags else {}), **bare},
        )

    def read(self, value: Any, told: str = "") -> Any:
        """Reads a value as the declared type, from Python, YAML or a command line, and checks it."""
        told = told or self.name
        plain = value.value if isinstance(value, Enum) else value
        key = plain.lower() if isinstance(plain, str) else plain
        if isinstance(key, (str, bool, type(None))):
            plain = self.spellings.get(key, plain)
        result = read(told, plain, self.hint)
        if result is None:
            result = self.spellings.get(None)  # as a text that stands for none
        for number in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(number, (int, float)):  # without a range of its own it must still be finite
                check_in(told, number, self.range or Range())
        if self.choices and result is not None:
            check_choice(told, result, self.choices)
            package = self.choices[result] if isinstance(self.choices, Mapping) else ""
            if package and importlib.util.find_spec(package) is None:
                raise refusal("package", name=self.name, result=result, package=package, default=self.default)
        return result


def setting(
    default: Any,
    text: str,
    *,
    group: str = "",
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    none: str = "",
    **traits: Any,
) -> Any:
    """Declares one setting in the body of a class under `declare`; ``traits`` are further fields of `Setting`.

    ``low`` and ``high`` are allowed themselves, ``above`` and ``below`` are not; ``none`` says what None stands for
    where a user might write infinity for it.
    """
    least, most = max(low, above), min(high, below)
    interval = Range(least, most, open_low=above > -math.inf, open_high=below < math.inf, none=none)
    return Setting(default, text, group, None if interval == Range(none=none) else interval, **traits)


class Declared:
    """Base of the classes under `declare`."""

    declared: ClassVar[Mapping[str, Setting]]


@dataclass_transform()
def declare(*, frozen: bool = False) -> Callable[[_Class], _Class]:
    """Makes a dataclass of a class whose body declares settings, and keeps them as `declared`, by name."""

    def make(cls: _Class) -> _Class:
        hints = get_type_hints(cls)
        own = {
            name: replace(one, name=name, hint=hints[name])
            for name, one in vars(cls).items()
            if isinstance(one, Setting)
        }
        for name, one in own.items():
            setattr(cls, name, one.field())
        cls.declared = {**getattr(cls, "declared", {}), **own}  # type: ignore[attr-defined]
        return cast(_Class, dataclass(frozen=frozen)(cls))

    return make


def grouped(cls: type[Declared]) -> dict[str, list[Setting]]:
    """Sorts the settings of a class by group, those of the class itself before those of its bases."""
    shared = {name: sum(name in getattr(base, "declared", ()) for base in cls.__mro__) for name in cls.declared}
    groups: dict[str, list[Setting]] = {}
    for one in sorted(cls.declared.values(), key=lambda one: shared[one.name]):
        groups.setdefault(one.group, []).append(one)
    return groups
