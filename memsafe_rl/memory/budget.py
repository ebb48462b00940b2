"""The byte budget of a run: what the user wrote, and the bytes it stands for on a given device."""

from __future__ import annotations

from dataclasses import dataclass

from memsafe_rl.errors import ConfigError
from memsafe_rl.units import format_bytes, parse_bytes

AUTO_SHARE = 0.9
"""Share of the free device memory that "auto" takes; the rest is margin for what nobody counts."""

_LEAST_BARE_BYTES = 2**16
"""A smaller number without a unit is taken for GiB or MiB whose unit was forgotten; toy networks need some 100 KiB."""

_WEIGHTS_SHARE = 0.8
"""Share of a budget beyond which weights that need not be on the device do not begin there."""


def room_for_weights(budget_bytes: int) -> int:
    """Returns the bytes that all weights may take at the start; a plan may bring more, or less, to the device."""
    return int(_WEIGHTS_SHARE * budget_bytes)


@dataclass(frozen=True)
class MemoryBudget:
    """How many bytes a run may hold on its device."""

    limit_bytes: int | None = None  # int, bytes; None when the budget is a share
    share: float | None = None  # share of the device's total memory; None when the budget is in bytes or automatic

    @classmethod
    def parse(cls, text: str | float) -> MemoryBudget:
        """Reads a budget as users write it.

        Args:
            text: "auto", a count of bytes, a size such as "16GiB", or a share of the device such as "80%".

        Returns:
            The budget.

        Raises:
            ConfigError: the text is none of these, or the amount is not positive.
        """
        if text == "auto":
            return cls()
        if isinstance(text, str) and text.strip().endswith("%"):
            return cls(share=_parse_share(text))
        wrong = isinstance(text, bool) or text == "" or (isinstance(text, float) and not text.is_integer())
        limit_bytes = 0 if wrong else parse_bytes(text) if isinstance(text, str) else int(text)
        if limit_bytes <= 0:
            wanted = "'auto', more than 0 bytes, a size such as '16GiB', or a share such as '50%'"
            raise ConfigError(f"memory_budget is {text!r}; write {wanted}.")
        if limit_bytes < _LEAST_BARE_BYTES and str(text).strip().isdigit():
            raise ConfigError(
                f"memory_budget is {text!r}, and a number without a unit is bytes. Write the unit, such as "
                f"'{int(text)}GiB' or '{int(text)}B'."
            )
        return cls(limit_bytes=limit_bytes)

    def resolve(self, *, total_bytes: int, free_bytes: int) -> int:
        """Turns the budget into bytes on a device.

        Args:
            total_bytes: int, bytes of the device.
            free_bytes: int, bytes that nobody holds, other processes counted.

        Returns:
            int, bytes: the limit, the share of the total, or 90 % of what is free.

        Raises:
            ConfigError: the limit is larger than the device, or nothing is left of the device.
        """
        if self.limit_bytes is not None:
            if self.limit_bytes > total_bytes:
                raise ConfigError(
                    f"memory_budget is {format_bytes(self.limit_bytes)} but the device has "
                    f"{format_bytes(total_bytes)}. Lower memory_budget or leave it at 'auto'."
                )
            return self.limit_bytes
        budget_bytes = int(AUTO_SHARE * free_bytes if self.share is None else self.share * total_bytes)
        if budget_bytes < 1:
            raise ConfigError(
                f"memory_budget comes to {budget_bytes} bytes: the device has {format_bytes(total_bytes)}, of which "
                f"{format_bytes(free_bytes)} are free. End what else runs on it, or give memory_budget in bytes."
            )
        return budget_bytes


def check_budget(text: str | float) -> None:
    """Refuses a setting that is no budget, by its name."""
    try:
        MemoryBudget.parse(text)
    except ConfigError as error:
        told = str(error) if "memory_budget" in str(error) else f"memory_budget is {text!r}: {error}"
        raise ConfigError(f"{told} 'auto' leaves the choice to the library.") from None


def _parse_share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100
    except ValueError:
        raise ConfigError(f"memory_budget is {text!r}; write a share as a number and '%', such as '80%'.") from None
    if not 0 < share <= 1:
        raise ConfigError(f"memory_budget is {text!r}; a share lies above 0% and at most at 100%.")
    return share
