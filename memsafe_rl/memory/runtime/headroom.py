"""How near the peak came to the budget, said once each time it changes, and when the allocator had to stop and tidy."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from memsafe_rl.units import format_bytes

SAFE_SHARE = 0.85
"""Share of the budget below which there is room."""

EDGE_SHARE = 0.90
"""Share of the budget above which the next longer batch may fail."""


class Headroom(StrEnum):
    """Where the peak lies in the budget."""

    SAFE = "safe"
    EDGE = "edge"
    DANGER = "danger"


_MEANINGS = {
    Headroom.SAFE: "there is room",
    Headroom.EDGE: "little room is left; nothing needs to be done",
    Headroom.DANGER: "a longer batch may not fit, and its first attempt would be lost; lower max_completion_length or "
    "raise memory_budget if failures follow",
}


def headroom_of(peak_bytes: int, budget_bytes: int) -> Headroom:
    """Tells where a peak lies in a budget."""
    if peak_bytes < SAFE_SHARE * budget_bytes:
        return Headroom.SAFE
    return Headroom.EDGE if peak_bytes <= EDGE_SHARE * budget_bytes else Headroom.DANGER


class HeadroomWatch:
    """Gives an event when the band, at first safe, changes or the allocator retried, and none otherwise."""

    def __init__(self) -> None:
        self._band = Headroom.SAFE
        self._retries: int | None = None

    def observe(
        self, step: int, peak_bytes: int, budget_bytes: int, allocator_retries: int = 0
    ) -> list[dict[str, Any]]:
        """Compares a step with the one before."""
        events: list[dict[str, Any]] = []
        band = headroom_of(peak_bytes, budget_bytes)
        if band is not self._band:
            self._band, share = band, peak_bytes / budget_bytes
            sentence = (
                f"The peak of {format_bytes(peak_bytes)} is {share:.1%} of the budget of {format_bytes(budget_bytes)}: "
                f"{_MEANINGS[band]}."
            )
            known = {"band": str(band), "peak_bytes": peak_bytes, "budget_bytes": budget_bytes, "share": share}
            events.append({"event": "band", "step": step, **known, "sentence": sentence})
        if retries := max(0, allocator_retries - (allocator_retries if self._retries is None else self._retries)):
            times = "once" if retries == 1 else f"{retries} times"
            sentence = (
                f"The allocator found no block large enough {times} and gave all cached memory back before going on: "
                "the card is nearly full or its memory is cut into small pieces, and each time costs speed; set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start, or lower memory_budget so that "
                "smaller plans are made."
            )
            alarm = {"event": "alarm", "kind": "allocator_retries", "step": step}
            events.append({**alarm, "retries": retries, "sentence": sentence})
        self._retries = allocator_retries
        return events
