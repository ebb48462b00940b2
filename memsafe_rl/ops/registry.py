"""Parts that a configuration names: the built-in ones, and those that a user passes from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

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


class Registry(Mapping[str, Part], Generic[Part]):
    """The parts that one setting chooses from, by name.

    Args:
        setting: the setting's name, for messages.
        kind: the class of its parts.
    """

    def __init__(self, setting: str, kind: type[Part]) -> None:
        self._setting, self._kind = setting, kind
        self._parts: dict[str, Part] = {}

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def find(self, name: str) -> Part:
        """Gives the part of a name.

        Args:
            name: as in the configuration.

        Returns:
            The part.

        Raises:
            ConfigError: If there is none.
        """
        if name not in self._parts:
            known = ", ".join(self._parts)
            raise ConfigError(f"`{self._setting}` is {name!r}, which is not known. Set it to one of {known}.")
        return self._parts[name]

    def add(self, part: Part) -> Part:
        """Enters a part under its name; a function defined anew, as in a notebook, replaces the one before.

        Args:
            part: what to enter.

        Returns:
            The part.

        Raises:
            ConfigError: If the name belongs to another part.
        """
        known = self._parts.get(part.name, part)
        if known != part and not _is_redefinition(known.function, part.function):
            raise ConfigError(f"{self._setting} {part.name!r} is taken by {known.function!r}. Give yours another name.")
        self._parts[part.name] = part
        return part

    def name_of(self, given: object) -> object:
        """Enters what a user passes in place of a name.

        Args:
            given: a part, a function, which is entered under its own name, or anything else.

        Returns:
            The name of the part; anything else as it is.

        Raises:
            ConfigError: If a function has no name of its own, or its name belongs to another part.
        """
        if isinstance(given, self._kind):
            return self.add(given).name
        if not callable(given):
            return given
        name = getattr(given, "__name__", "")
        if not name.isidentifier():
            kind = self._kind.__name__
            raise ConfigError(
                f"{self._setting} is {given!r}, which has no name for logs and checkpoints. Pass {kind}('name', it)."
            )
        return self.add(self._kind(name, given)).name  # type: ignore[call-arg]


def _is_redefinition(known: object, other: object) -> bool:
    """Says whether the same ``def`` ran twice; closures differ in what they hold, and built-in parts stay."""
    names = [(getattr(each, "__module__", ""), getattr(each, "__qualname__", "")) for each in (known, other)]
    closed = any(getattr(each, "__closure__", ()) is not None for each in (known, other))
    built_in = names[0][0].startswith(f"{__package__.partition('.')[0]}.")
    return known is not other and names[0] == names[1] and not closed and not built_in
