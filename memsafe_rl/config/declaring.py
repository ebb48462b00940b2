"""How a setting is declared: one `setting(...)` from which help, parsers, checks, resume and refusals follow."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast, dataclass_transform, get_type_hints

from memsafe_rl.config.values import Range, check_choice, check_in, read
from memsafe_rl.errors import ConfigError

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
        """Gives the dataclass field, with what `HfArgumentParser` reads."""
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
        for number in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(number, (int, float)):  # without a range of its own it must still be finite
                check_in(told, number, self.range or Range())
        if self.choices and result is not None:
            check_choice(told, result, self.choices)
            package = self.choices[result] if isinstance(self.choices, Mapping) else ""
            if package and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"{self.name} is {result!r}, which needs the package {package}. "
                    f"Install it with `pip install {package}`, or set {self.name}={self.default!r}."
                )
        return result


def setting(
    default: Any,
    text: str,
    *,
    group: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    none: str = "",
    **traits: Any,
) -> Any:
    """Declares one setting in the body of a class under `declare`; ``traits`` are further fields of `Setting`.

    ``low`` and ``high`` are allowed themselves, ``above`` and ``below`` are not; ``none`` says what None stands for
    where a user might write infinity for it.
    """
    interval = None
    if any(bound is not None for bound in (low, high, above, below)):
        least = next((bound for bound in (low, above) if bound is not None), -math.inf)
        most = next((bound for bound in (high, below) if bound is not None), math.inf)
        interval = Range(least, most, open_low=above is not None, open_high=below is not None, none=none)
    return Setting(default, text, group, interval, **traits)


class Declared(Protocol):
    """A class under `declare`."""

    declared: ClassVar[Mapping[str, Setting]]


def again(cls: type[Declared], name: str, default: Any, text: str | None = None) -> Any:
    """Declares a setting of a base class again, with another default and, perhaps, another sentence."""
    known = cls.declared[name]
    return replace(known, default=default, help=known.help if text is None else text)


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
