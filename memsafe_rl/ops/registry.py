"""Parts that a configuration names: the built-in ones, and those that a user passes from outside."""

from __future__ import annotations

from collections.abc import Callable
from inspect import get_annotations
from typing import Any, NoReturn, Protocol, TypeVar

from memsafe_rl.errors import ConfigError


class Named(Protocol):
    """A part: a function under a name, built as ``kind(name, function)``."""

    @property
    def name(self) -> str:
        """The name in the configuration."""

    @property
    def function(self) -> Callable[..., Any]:
        """What it computes."""


Part = TypeVar("Part", bound=Named)


class Registry(dict[str, Part]):
    """The parts that one setting chooses from, by name; an unknown name is a `ConfigError` that lists them.

    Args:
        setting: the setting's name, for messages.
        kind: the class of its parts.
    """

    def __init__(self, setting: str, kind: type[Part]) -> None:
        super().__init__()
        self._setting, self._kind = setting, kind

    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(f"`{self._setting}` is {name!r}, which is not known. Set it to one of {', '.join(self)}.")

    def add(self, part: Part) -> Part:
        """Makes a part known by name; a function defined anew, as in a notebook, replaces the one before.

        Args:
            part: what to enter.

        Returns:
            The part.

        Raises:
            ConfigError: If the name belongs to another part.
        """
        known = self.get(part.name, part)
        if known != part and not _is_redefinition(known.function, part.function):
            raise ConfigError(f"{self._setting} {part.name!r} is taken by {known.function!r}. Give yours another name.")
        self[part.name] = part
        return part

    def name_of(self, given: object) -> object:
        """Enters a part, or a function under its own name, that a user passes in place of a name.

        Args:
            given: what the user passes.

        Returns:
            The name of the part; anything that is neither part nor function as it is.

        Raises:
            ConfigError: If a function has no name of its own, or its name belongs to another part.
        """
        if isinstance(given, self._kind):
            return self.add(given).name
        if not callable(given):
            return given
        name = getattr(given, "__name__", "")
        if not name.isidentifier():
            raise ConfigError(
                f"{self._setting} is {given!r}, which has no name for logs and checkpoints. "
                f"Pass {self._kind.__name__}('name', it)."
            )
        return self.add(self._kind(name, given)).name  # type: ignore[call-arg]


def refuse_incomplete(made: object, protocol: type, told: str) -> None:
    """Refuses an object that lacks a part of a protocol.

    Args:
        made: what a user's function made.
        protocol: what it must be.
        told: what made it, for the message.

    Raises:
        ConfigError: If it lacks something.
    """
    wanted = {name for each in protocol.__mro__ for name in (*vars(each), *get_annotations(each))}
    missing = sorted(name for name in wanted.difference(dir(made)) if not name.startswith("_"))
    if missing:
        raise ConfigError(
            f"{told} gives a {type(made).__name__}, which has no {', '.join(missing)}. Add what "
            f"{protocol.__module__}.{protocol.__name__} says of it."
        )


def _is_redefinition(known: object, other: object) -> bool:
    """Says whether the same ``def`` ran twice; closures differ in what they hold, and built-in parts stay."""
    names = [(getattr(each, "__module__", ""), getattr(each, "__qualname__", "")) for each in (known, other)]
    closed = any(getattr(each, "__closure__", ()) is not None for each in (known, other))
    built_in = names[0][0].startswith(f"{__package__.partition('.')[0]}.")
    return known is not other and names[0] == names[1] and not closed and not built_in
