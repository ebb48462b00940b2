"""Explains an out-of-memory message: why it failed, what the bytes were for, and what to change, best first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from memsafe_rl.diagnostics.known_tensors import Configuration, KnownTensor, guesses, matching, span_of
from memsafe_rl.diagnostics.oom_messages import Allocator, OutOfMemoryMessage, Place, Printed
from memsafe_rl.errors import texts_beside
from memsafe_rl.units import format_bytes

STRANDED_SHARE = 0.15
"""Share of the reserved bytes without a tensor that counts as fragmentation."""
_STRANDED_SHARE_IN_NEED = 0.05  # where they alone would have held the request

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
    VLLM = "vLLM's share of the device"
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
    stranded_share: float | None  # of the reserved bytes, those without a tensor; None where the message does not tell
    neighbours_bytes: int | None  # bytes that other processes hold on the device; None where the message does not tell
    outside_bytes: int | None  # bytes of this process outside PyTorch's allocator; None where the message does not tell
    tensors: tuple[KnownTensor, ...]  # what the request may be for, likeliest first
    reasons: tuple[Reason, ...]  # weightiest first
    remedies: tuple[Remedy, ...]  # best first


def explain_message(message: OutOfMemoryMessage, configuration: Configuration, log: str) -> Explanation:
    """Explains an out-of-memory message."""
    tensors = _tensors(message, configuration, log)
    reasons, share = _reasons(message, tensors), _stranded_share(message)
    remedies = _remedies(message, reasons, tensors)
    return Explanation(message, share, _neighbours(message), _outside(message), tensors, reasons, remedies)


def _tensors(message: OutOfMemoryMessage, known: Configuration, log: str) -> tuple[KnownTensor, ...]:
    if message.requested is None or message.requested.count == 0:
        return ()
    span = span_of(message.requested, rounded_up=message.rounded_up)
    if known.known:
        return matching(span, known)
    if message.place in (None, Place.LOGITS, Place.BACKWARD):
        return guesses(span, log)
    return ()


def _stranded_share(message: OutOfMemoryMessage) -> float | None:
    if message.stranded is None or message.allocated is None:
        return None
    reserved = message.stranded.count + message.allocated.count
    return message.stranded.count / reserved if reserved else 0.0


def _reserved(message: OutOfMemoryMessage) -> int:
    return sum(size.count for size in (message.allocated, message.stranded) if size is not None)


def own_process(message: OutOfMemoryMessage) -> int | None:
    """Finds the process that failed by what it holds: in a container, the driver lists the host's numbers."""
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
    """Returns the driver's count for the failed process; None if that is no more than its tensors."""
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


def _because(cause: Cause, decisive: bool = False, case: str = "", **values: object) -> Reason:
    """Writes a reason of `remedies.yaml`, whose cases are named after causes unless one has several."""
    return Reason(cause, _TABLE["reasons"][case or cause.name].format(**values), decisive)


def _reasons(message: OutOfMemoryMessage, tensors: tuple[KnownTensor, ...]) -> tuple[Reason, ...]:
    guessed = bool(tensors) and tensors[0].guessed
    found = [*filter(None, [_special(message)]), *_of_the_request(message)]
    found += () if guessed else _tensor(tensors)
    found += _of_the_device(message, limited=any(reason.cause is Cause.LIMIT for reason in found))
    held, of = message.allocated, message.total or message.allowed
    full = _count(held) / (_count(of) or math.nan)
    if full >= _FULL_SHARE and not any(reason.decisive for reason in found):
        found.append(_because(Cause.FULL, case="FULL_AND_MOVED" if full > 1 else "", held=held, of=of, share=full))
    if not found:
        asked = message.requested
        found.append(_because(Cause.UNTOLD, case="" if asked is None else "UNTOLD_REST", asked=asked))
    found += _tensor(tensors) if guessed else ()
    # Decisive ones first.
    return tuple(sorted(found, key=lambda reason: not reason.decisive))


def _special(message: OutOfMemoryMessage) -> Reason | None:
    """Returns the reason if something other than a device's caching allocator failed."""
    asked, held, limit = message.requested, message.allocated, message.total
    match message.allocator:
        case Allocator.HOST:
            return _because(Cause.HOST, True, asked="" if asked is None else f" of {asked}")
        case Allocator.KERNEL:
            return _because(Cause.HOST, True, "KERNEL", held="" if held is None else f" when it held {held}")
        case Allocator.SIMULATED:
            return _because(Cause.SIMULATED, True, held="" if held is None else f"; {held} were live")
        case Allocator.BUDGET:
            largest = max(message.held, key=lambda held: held[1].count, default=None)
            who = "" if largest is None else f" The largest share is held by {largest[0]}: {largest[1]}."
            return _because(Cause.BUDGET, True, limit="" if limit is None else f" of {limit}", who=who)
        case Allocator.VLLM:
            return _because(Cause.VLLM, True)
        case Allocator.LIBRARY:
            return _because(Cause.LIBRARY)
        case Allocator.DRIVER:
            return _because(Cause.LIBRARY, case="DRIVER")
    return None


def _count(size: Printed | None) -> float:
    """Returns a figure in bytes; NaN, of which every comparison is false, where the message has none."""
    return math.nan if size is None else size.count


def _of_the_request(message: OutOfMemoryMessage) -> Iterator[Reason]:
    """Finds why the request did not fit: the size of the device, a limit, other processes, stranded memory."""
    asked, total, free = _count(message.requested), _count(message.total), message.free.count if message.free else 0
    on_mps = message.allocator is Allocator.MPS
    limit = message.total or (message.allowed if on_mps else None)
    if asked > _count(limit) and message.allocator is not Allocator.BUDGET:
        yield _because(Cause.TOO_LARGE, True, asked=message.requested, limit=limit)
    held = message.in_use.count if on_mps and message.in_use else _reserved(message)
    if message.allocated is not None and held + asked > _count(message.allowed) - _REPORTING_GAP_BYTES // 8:
        spare = "" if message.free is None else f", though {message.free} of the device are free"
        yield _because(Cause.LIMIT, True, allowed=message.allowed, held=format_bytes(held), spare=spare)
    others = _neighbours(message)
    if others and others >= _NEIGHBOURS_SHARE * total and not free > asked:
        own, decisive = own_process(message), free + others >= asked
        listed = ", ".join(f"process {number} {size}" for number, size in message.processes if number != own)
        names = listed or "whatever is neither free nor held by this process"
        texts = {"names": names, "without": "; without them the request would fit" if decisive else ""}
        yield _because(Cause.NEIGHBOURS, decisive, "", others=format_bytes(others), total=message.total, **texts)
    share, stranded = _stranded_share(message), _count(message.stranded)
    fits = stranded + free >= asked
    least = _STRANDED_SHARE_IN_NEED if stranded >= asked > free else STRANDED_SHARE
    if share is not None and share >= least and stranded >= 64 * 2**20:
        case = "FRAGMENTS" if fits else "FRAGMENTS_TOO_FEW"
        yield _because(Cause.FRAGMENTS, fits, case, stranded=message.stranded, share=share)


def _tensor(tensors: tuple[KnownTensor, ...]) -> Iterator[Reason]:
    for best in tensors[:1]:
        solved = "" if best.exact else "; batch or length is inferred"
        others = f"; {len(tensors) - 1} others would fit too" if len(tensors) > 1 else ""
        yield _because(Cause.TENSOR, case="GUESS" if best.guessed else "", best=best, solved=solved, others=others)


def _of_the_device(message: OutOfMemoryMessage, *, limited: bool) -> Iterator[Reason]:
    """Finds what else holds the device, and whether it refused although it had room."""
    asked, total, outside = _count(message.requested), _count(message.total), _outside(message)
    if _count(message.private_pools) >= _POOLS_SHARE * total:
        yield _because(Cause.POOLS, pools=message.private_pools)
    if outside is not None and outside >= _GIB and outside >= _OUTSIDE_SHARE * _count(message.total or message.allowed):
        case = "OUTSIDE_MPS" if message.allocator is Allocator.MPS else "OUTSIDE"
        yield _because(Cause.OUTSIDE, case=case, outside=format_bytes(outside))
    if _count(message.free) > asked and not limited and not asked > total:
        case = "ROOM_REFUSED_XPU" if message.allocator is Allocator.XPU and asked > 4 * _GIB else "ROOM_REFUSED"
        yield _because(Cause.ROOM_REFUSED, True, case, asked=message.requested, free=message.free)


_TABLE = texts_beside(__file__, "remedies.yaml")


def _remedies(
    message: OutOfMemoryMessage, reasons: tuple[Reason, ...], tensors: tuple[KnownTensor, ...]
) -> tuple[Remedy, ...]:
    """Gathers the remedies of the reasons in order, then those of the work; a guessed tensor promotes none."""
    of_the_tensor: list[str] = _TABLE["kinds"][tensors[0].kind.name] if tensors else []
    of_the_place: list[str] = _TABLE["places"][message.place.name] if message.place else []
    of_the_work = of_the_tensor if tensors and not tensors[0].guessed else of_the_place
    chosen: list[str] = []
    for reason in reasons:
        if reason.cause in (Cause.TENSOR, Cause.TOO_LARGE, Cause.FULL):
            chosen += of_the_work
        if message.allocator is not Allocator.MPS:
            chosen += _TABLE["causes"][reason.cause.name]
        elif reason.cause is Cause.LIMIT:
            chosen.append("mps-limit")
    chosen += of_the_work
    if message.allocator not in (Allocator.HOST, Allocator.KERNEL, Allocator.BUDGET, Allocator.VLLM):
        chosen += ("smaller", *of_the_tensor, "shorter")
    return tuple(Remedy(**_TABLE["remedies"][name]) for name in dict.fromkeys(chosen))
