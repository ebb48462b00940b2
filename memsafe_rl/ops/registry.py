"""Parts that a configuration names: the built-in ones, and those that a user passes from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import get_annotations
from typing import Any, NoReturn, Protocol, TypeVar

from torch import Tensor

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


def check_part(part: Named) -> None:
    """Refuses a part without a name, or whose function is none."""
    kind, name, function = type(part).__name__, part.name, part.function
    if not isinstance(name, str) or not name or not callable(function) or isinstance(function, type):
        written = f"{kind}({name!r}, {function!r:.80})"
        raise ConfigError(f"{written} is not a name and a function. Write {kind}('mine', my_function).")


def wrong_answer(told: str, given: object, shapes: Iterable[tuple[int, ...]], wanted: str) -> ConfigError:
    """Makes the error for a part's function whose answer has another form; it would be broadcast silently."""
    found = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    shape = " or ".join(map(str, shapes))
    return ConfigError(f"{told} gave {found}. Return a floating-point tensor of shape {shape}: {wanted}.")


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
        if known != part and (_is_built_in(known) or not _is_redefinition(known.function, part.function)):
            owner = "the built-in one" if _is_built_in(known) else "another one"
            raise ConfigError(f"{self._setting} {part.name!r} is taken by {owner}. Give yours another name.")
        self[part.name] = part
        return part

    def name_of(self, given: object) -> str:
        """Enters a part, or a function under its own name, that a user passes in place of a name.

        Args:
            given: what the user passes.

        Returns:
            The name of the part; a name as it is.

        Raises:
            ConfigError: If it is neither name nor part nor function, a function has no name of its own, or the name
                belongs to another part.
        """
        if isinstance(given, self._kind):
            return self.add(given).name
        if isinstance(given, str):
            return given
        if not callable(given) or isinstance(given, type):
            kind = self._kind.__name__
            raise ConfigError(
                f"{self._setting} is {given!r}; it must be one of {', '.join(self)}, a function, or "
                f"{kind}('mine', my_function)."
            )
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
    """Says whether the same ``def`` ran twice; closures differ in what they hold."""
    names = [(getattr(each, "__module__", ""), getattr(each, "__qualname__", "")) for each in (known, other)]
    closed = any(getattr(each, "__closure__", ()) is not None for each in (known, other))
    return known is not other and names[0] == names[1] and not closed


def _is_built_in(part: Named) -> bool:
    """Says whether a part's function is one of this package's."""
    return getattr(part.function, "__module__", "").startswith(f"{__package__.partition('.')[0]}.")
