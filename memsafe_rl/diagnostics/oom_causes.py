"""Explains an out-of-memory message: why it failed, what the bytes were for, and what to change, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import yaml

from memsafe_rl.diagnostics.known_tensors import (
    Configuration,
    Kind,
    KnownTensor,
    guesses,
    matching,
    named_vocabularies,
    span_of,
)
from memsafe_rl.diagnostics.oom_messages import Allocator, OutOfMemoryMessage, Place
from memsafe_rl.units import format_bytes

STRANDED_SHARE = 0.15
"""Share of the reserved bytes without a tensor that counts as fragmentation."""

_NEIGHBOURS_SHARE = 0.05
_OUTSIDE_SHARE = 0.1
_POOLS_SHARE = 0.1
_FULL_SHARE = 0.7

_GIB = 2**30
_OWN_OVERHEAD_BYTES = 2 * _GIB
"""The most that the failed process may hold outside PyTorch's allocator, to be recognised."""

_REPORTING_GAP_BYTES = _GIB // 2
"""Difference between the driver's and the allocator's figures that needs no explanation."""


class Cause(StrEnum):
    """Why an allocation failed."""

    TOO_LARGE = "larger than the device"
    LIMIT = "a limit of the process"
    FRAGMENTS = "stranded memory"
    NEIGHBOURS = "other processes"
    TENSOR = "a known tensor"
    ROOM_REFUSED = "refused with room left"
    OUTSIDE = "memory outside PyTorch"
    POOLS = "private pools"
    FULL = "the device is full"
    HOST = "host memory"
    LIBRARY = "a library found no memory"
    SIMULATED = "the simulated device"
    BUDGET = "the memory budget"
    UNTOLD = "the message has no figures"


@dataclass(frozen=True)
class Reason:
    """One reason for a failure."""

    cause: Cause
    sentence: str
    decisive: bool = False  # whether the request would have fitted otherwise


@dataclass(frozen=True)
class Remedy:
    """Something to change."""

    action: str
    here: str  # in this library
    elsewhere: str  # in other trainers


@dataclass(frozen=True)
class Explanation:
    """The meaning of a message."""

    message: OutOfMemoryMessage
    # of the reserved bytes, those that no tensor uses; None where the message does not tell
    stranded_share: float | None
    neighbours_bytes: int | None  # bytes that other processes hold on the device; None where the message does not tell
    outside_bytes: int | None  # bytes of this process outside PyTorch's allocator; None where the message does not tell
    tensors: tuple[KnownTensor, ...]  # what the request may be for, likeliest first
    reasons: tuple[Reason, ...]  # weightiest first
    remedies: tuple[Remedy, ...]  # best first


def explain_message(
    message: OutOfMemoryMessage, configuration: Configuration | None = None, log: str = ""
) -> Explanation:
    """Explains an out-of-memory message."""
    tensors = _tensors(message, configuration or Configuration(), log)
    reasons = _reasons(message, tensors)
    return Explanation(
        message,
        _stranded_share(message),
        _neighbours(message),
        _outside(message),
        tensors,
        reasons,
        _remedies(message, reasons, tensors),
    )


def _tensors(message: OutOfMemoryMessage, known: Configuration, log: str) -> tuple[KnownTensor, ...]:
    if message.requested is None or message.requested.count == 0:
        return ()
    span = span_of(message.requested, rounded_up=message.rounded_up)
    if known.known:
        return matching(span, known)
    if message.place in (None, Place.LOGITS, Place.BACKWARD):
        return guesses(span, named_vocabularies(log))
    return ()


def _stranded_share(message: OutOfMemoryMessage) -> float | None:
    if message.stranded is None or message.allocated is None:
        return None
    reserved = message.stranded.count + message.allocated.count
    return message.stranded.count / reserved if reserved else 0.0


def _reserved(message: OutOfMemoryMessage) -> int:
    return sum(size.count for size in (message.allocated, message.stranded) if size is not None)


def own_process(message: OutOfMemoryMessage) -> int | None:
    """Finds the process that failed among those that the driver lists by number.

    In a container the driver reports the host's process numbers, and PyTorch does not know its own: it is the process
    that holds as much as the allocator and a little more.
    """
    if message.in_use is not None or message.allocated is None:
        return None
    reserved = _reserved(message)
    room = max(_OWN_OVERHEAD_BYTES, reserved // 10)
    fitting = [
        (size.count, number)
        for number, size in message.processes
        if reserved <= size.count + size.slack and size.count - reserved <= room
    ]
    return min(fitting)[1] if fitting else None


def _own_bytes(message: OutOfMemoryMessage) -> int | None:
    """Gives the driver's count for the failed process; None if that is no more than its tensors."""
    own = own_process(message)
    used = message.in_use or next((size for number, size in message.processes if number == own), None)
    # In containers and under WSL the driver says 0 bytes.
    return None if used is None or used.count + used.slack < _reserved(message) else used.count


def _neighbours(message: OutOfMemoryMessage) -> int | None:
    if message.processes:
        own = own_process(message)
        return sum(size.count for number, size in message.processes if number != own)
    if message.total is None or message.free is None or message.allocated is None:
        return None
    used = _own_bytes(message)
    # If the message omits the process's own context, that is not a neighbour's.
    held = _reserved(message) + 2 * _REPORTING_GAP_BYTES if used is None else used
    unseen = message.total.count - message.free.count - held
    return unseen if unseen > _REPORTING_GAP_BYTES else 0


def _outside(message: OutOfMemoryMessage) -> int | None:
    used = _own_bytes(message)
    return None if used is None or message.allocated is None else used - _reserved(message)


def _reasons(message: OutOfMemoryMessage, tensors: tuple[KnownTensor, ...]) -> tuple[Reason, ...]:
    guessed = bool(tensors) and tensors[0].guessed
    found = [
        reason
        for reason in (
            _special(message),
            _too_large(message),
            _limit(message),
            _neighbours_reason(message),
            _fragments(message),
            None if guessed else _tensor(tensors),
            _pools(message),
            _outside_reason(message),
            _room_refused(message),
        )
        if reason is not None
    ]
    if not any(reason.decisive for reason in found) and (full := _full(message)) is not None:
        found.append(full)
    if not found:
        found.append(Reason(Cause.UNTOLD, _untold(message)))
    if guessed and (guess := _tensor(tensors)) is not None:
        found.append(guess)
    # Decisive ones first.
    return tuple(sorted(found, key=lambda reason: not reason.decisive))


def _special(message: OutOfMemoryMessage) -> Reason | None:
    """Gives the reason if something other than a device's caching allocator failed."""
    asked = "" if message.requested is None else f" of {message.requested}"
    match message.allocator:
        case Allocator.HOST:
            return Reason(Cause.HOST, f"Host memory (RAM), not the card, had no room for an allocation{asked}.", True)
        case Allocator.KERNEL:
            held = "" if message.allocated is None else f" when it held {message.allocated}"
            return Reason(Cause.HOST, f"The operating system ran out of RAM and killed the process{held}.", True)
        case Allocator.SIMULATED:
            chosen = "This simulated device was full, or a test made this allocation fail"
            held = "" if message.allocated is None else f"; {message.allocated} were live"
            return Reason(Cause.SIMULATED, f"{chosen}{held}.", True)
        case Allocator.BUDGET:
            largest = max(message.held, key=lambda held: held[1].count, default=None)
            who = "" if largest is None else f" The largest share is held by {largest[0]}: {largest[1]}."
            limit = "" if message.total is None else f" of {message.total}"
            return Reason(Cause.BUDGET, f"Even the leanest plan needs more than the budget{limit}.{who}", True)
        case Allocator.LIBRARY:
            return Reason(
                Cause.LIBRARY,
                "A library (cuBLAS, cuDNN, NCCL ...) needed its own workspace, but PyTorch's allocator or another "
                "process holds the whole card.",
            )
        case Allocator.DRIVER:
            return Reason(
                Cause.LIBRARY,
                "The driver itself had no memory left outside PyTorch's allocator: often other processes fill the "
                "card before this one starts.",
            )
    return None


def _too_large(message: OutOfMemoryMessage) -> Reason | None:
    limit = message.total or (message.allowed if message.allocator is Allocator.MPS else None)
    if message.requested is None or limit is None or message.allocator is Allocator.BUDGET:
        return None
    if message.requested.count <= limit.count:
        return None
    return Reason(
        Cause.TOO_LARGE,
        f"A single tensor of {message.requested} was requested, and the whole device has {limit}: freeing memory "
        "cannot make it fit.",
        True,
    )


def _limit(message: OutOfMemoryMessage) -> Reason | None:
    if message.allowed is None or message.requested is None or message.allocated is None:
        return None
    held = message.in_use.count if message.allocator is Allocator.MPS and message.in_use else _reserved(message)
    reached = held + message.requested.count > message.allowed.count - _REPORTING_GAP_BYTES // 8
    if not reached:
        return None
    spare = "" if message.free is None else f", though {message.free} of the device are free"
    return Reason(Cause.LIMIT, f"This process may hold {message.allowed} and holds {format_bytes(held)}{spare}.", True)


def _neighbours_reason(message: OutOfMemoryMessage) -> Reason | None:
    others = _neighbours(message)
    if not others or message.total is None or others < _NEIGHBOURS_SHARE * message.total.count:
        return None
    free = message.free.count if message.free else 0
    if message.requested is not None and free > message.requested.count:
        return None
    decisive = message.requested is not None and free + others >= message.requested.count
    own = own_process(message)
    listed = [f"process {number} {size}" for number, size in message.processes if number != own]
    names = f" ({', '.join(listed)})" if listed else " (whatever is neither free nor held by this process)"
    without = "; without them the request would fit" if decisive else ""
    return Reason(
        Cause.NEIGHBOURS,
        f"Other processes hold {format_bytes(others)} of the device's {message.total}{names}{without}.",
        decisive,
    )


def _fragments(message: OutOfMemoryMessage) -> Reason | None:
    share, stranded, asked = _stranded_share(message), message.stranded, message.requested
    if share is None or stranded is None or share < STRANDED_SHARE or stranded.count < 64 * 2**20:
        return None
    free = message.free.count if message.free else 0
    fits = asked is not None and stranded.count + free >= asked.count
    ending = (
        ": enough for the request, but in pieces that are each too small"
        if fits
        else "; even in one piece they would not be enough"
    )
    return Reason(
        Cause.FRAGMENTS,
        f"{stranded} ({share:.1%} of what PyTorch reserved) are stranded: reserved, but used by no tensor{ending}.",
        fits,
    )


def _tensor(tensors: tuple[KnownTensor, ...]) -> Reason | None:
    if not tensors:
        return None
    best = tensors[0]
    if best.guessed:
        return Reason(Cause.TENSOR, f"A guess, since the model is unknown: the size fits {best}.")
    solved = "" if best.exact else "; batch or length is inferred"
    others = f"; {len(tensors) - 1} others would fit too" if len(tensors) > 1 else ""
    return Reason(Cause.TENSOR, f"The size is that of {best}{solved}{others}.")


def _pools(message: OutOfMemoryMessage) -> Reason | None:
    if message.private_pools is None or message.total is None:
        return None
    if message.private_pools.count < _POOLS_SHARE * message.total.count:
        return None
    return Reason(
        Cause.POOLS,
        f"{message.private_pools} belong to private pools (CUDA graphs of vLLM or torch.compile), which nothing else "
        "may use.",
    )


def _outside_reason(message: OutOfMemoryMessage) -> Reason | None:
    outside = _outside(message)
    of = message.total or message.allowed
    if outside is None or of is None or outside < max(_OUTSIDE_SHARE * of.count, _GIB):
        return None
    whose = (
        "Metal and other libraries" if message.allocator is Allocator.MPS else "context, NCCL, vLLM, other libraries"
    )
    return Reason(Cause.OUTSIDE, f"This process holds {format_bytes(outside)} outside PyTorch's allocator ({whose}).")


def _room_refused(message: OutOfMemoryMessage) -> Reason | None:
    free, asked = message.free, message.requested
    if free is None or asked is None or free.count <= asked.count or _limit(message) is not None:
        return None
    if message.total is not None and asked.count > message.total.count:
        return None
    if message.allocator is Allocator.XPU and asked.count > 4 * _GIB:
        what = (
            "Intel's drivers refuse single allocations above 4 GiB unless UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 is set"
        )
    else:
        what = (
            "something else limits the process (a vGPU or MIG share, WSL or Windows paging, shared memory of an "
            "integrated GPU, a driver that does not match PyTorch's build)"
        )
    return Reason(Cause.ROOM_REFUSED, f"The driver refused {asked} although it reports {free} free: {what}.", True)


def _full(message: OutOfMemoryMessage) -> Reason | None:
    of = message.total or message.allowed
    if message.allocated is None or of is None or message.allocated.count < _FULL_SHARE * of.count:
        return None
    share = message.allocated.count / of.count
    if share > 1:
        held = f"Live tensors hold {message.allocated}, more than the device's {of}: the driver has moved some to RAM"
        return Reason(Cause.FULL, f"{held}, as it does under WSL and Windows, and that is full too.")
    work = "the batch is too large for the device"
    return Reason(Cause.FULL, f"Live tensors hold {message.allocated} of {of} ({share:.0%}): {work}.")


def _untold(message: OutOfMemoryMessage) -> str:
    if message.requested is None:
        return "The message has no figures, so only general remedies can be named."
    return f"{message.requested} were requested; the message does not say who holds the rest."


_TABLE = yaml.load(
    Path(__file__).with_name("remedies.yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
_Key = TypeVar("_Key", bound=StrEnum)
_REMEDIES = {name: Remedy(**texts) for name, texts in _TABLE["remedies"].items()}


def _listed(names: type[_Key], table: Mapping[str, Sequence[str]]) -> Mapping[_Key, tuple[Remedy, ...]]:
    return {names[name]: tuple(_REMEDIES[one] for one in remedies) for name, remedies in table.items()}


_BY_CAUSE = _listed(Cause, _TABLE["causes"])
_BY_KIND = _listed(Kind, _TABLE["kinds"])
_BY_PLACE = _listed(Place, _TABLE["places"])


def _remedies(
    message: OutOfMemoryMessage, reasons: tuple[Reason, ...], tensors: tuple[KnownTensor, ...]
) -> tuple[Remedy, ...]:
    """Gathers the remedies of the reasons in order, then those of the work; a guessed tensor promotes none."""
    known = bool(tensors) and not tensors[0].guessed
    of_the_work = _BY_KIND[tensors[0].kind] if known else _BY_PLACE[message.place] if message.place else ()
    chosen: list[Remedy] = []
    for reason in reasons:
        if reason.cause in (Cause.TENSOR, Cause.TOO_LARGE, Cause.FULL):
            chosen += of_the_work
        if message.allocator is not Allocator.MPS:
            chosen += _BY_CAUSE[reason.cause]
        elif reason.cause is Cause.LIMIT:
            chosen.append(_REMEDIES["mps-limit"])
    chosen += of_the_work
    if message.allocator not in (Allocator.HOST, Allocator.KERNEL, Allocator.BUDGET):
        guessed = _BY_KIND[tensors[0].kind] if tensors else ()
        chosen += (_REMEDIES["smaller"], *guessed, _REMEDIES["shorter"])
    return tuple(dict.fromkeys(chosen))
