"""Finds out-of-memory messages in a log and reads their figures, for all PyTorch versions and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from memsafe_rl.units import format_bytes

_POWERS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_IMPOSSIBLE_BYTES = 2**60  # more than any machine has; under WSL the driver reports such figures for a process

_REACH = 1_500  # characters after the start of a message that hold its figures

_BEFORE = 6_000  # characters before a message that are searched for its origin


class Allocator(StrEnum):
    """Who refused the allocation."""

    CUDA = "CUDA"
    HIP = "HIP"
    XPU = "XPU"
    MPS = "MPS"
    OTHER = "accelerator"
    DRIVER = "driver"
    LIBRARY = "library"
    HOST = "host"
    KERNEL = "operating system"
    SIMULATED = "simulated device"
    BUDGET = "memory budget"
    VLLM = "vLLM"


class Place(StrEnum):
    """What the program was doing, judging by the traceback before a message."""

    LOAD = "load"
    ROLLOUT = "rollout"
    LOGITS = "logits"
    ATTENTION = "attention"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Printed:
    """A byte count as a message prints it: two decimals of a unit."""

    count: int  # nearest to what is printed
    slack: int = 0  # hidden by rounding, to either side

    def __str__(self) -> str:
        """Writes the count as other texts of this library do."""
        return format_bytes(self.count)


@dataclass(frozen=True)
class OutOfMemoryMessage:
    """An out-of-memory message, figure by figure; None where it has none."""

    text: str
    allocator: Allocator
    line: int = 1  # of the log, from 1
    found: int = 1  # messages in the log; this is the last
    requested: Printed | None = None
    device: str | None = None  # such as ``GPU 0``
    total: Printed | None = None
    free: Printed | None = None  # what the driver would still give
    in_use: Printed | None = None  # of this process, as the driver counts: libraries and context included
    allocated: Printed | None = None
    stranded: Printed | None = None  # held by the allocator, used by no tensor
    private_pools: Printed | None = None  # of the allocated bytes, those of CUDA graphs and the like
    allowed: Printed | None = None  # limit of this process
    processes: tuple[tuple[int, Printed], ...] = ()  # by process number, as the driver counts
    held: tuple[tuple[str, Printed], ...] = ()  # by component, in messages of this library
    place: Place | None = None  # what the program was doing; None where no traceback tells

    @property
    def rounded_up(self) -> bool:
        """Returns whether a caching allocator rounded the requested size up before printing it."""
        return self.allocator in (Allocator.CUDA, Allocator.HIP, Allocator.XPU, Allocator.OTHER)


def _words(pattern: str) -> str:
    """Lets a space of a pattern match any white space, line breaks and box borders included."""
    return pattern.replace(" ", r"[\s│┃]+").replace("~", r"[\s│┃]*")


def _size(name: str) -> str:
    return rf"(?P<{name}>\d+(?:\.\d+)?~(?:bytes|[KMGT]i?B|B)\b)"


_HEADS = re.compile(
    "|".join(
        _words(pattern)
        for pattern in (
            r"does not fit in memory \(step \d+\): (?P<budget>.+?) could not be allocated within "
            rf"{_size('limit')}, of which {_size('outside')} are held outside this work~\((?P<holders>[^)]*)\)[^\n]*",
            rf"Simulated device out of memory\. Tried to allocate {_size('simulated')}\.~(?P<live>\d+) bytes are live",
            rf"MPS backend out of memory \(MPS allocated: {_size('mps')}, other allocations: {_size('mps_other')}, max "
            rf"allowed: {_size('mps_allowed')}\)\.(?: Tried to allocate {_size('mps_requested')}(?: on \w+ pool)?)?",
            rf"Invalid buffer size: {_size('buffer')}",
            r"(?i:Out of memory): Killed process (?P<killed>\d+) \([^)]*\)(?:[^\n]*?anon-rss:(?P<rss>\d+)kB)?",
            r"(?P<event>[Dd]etected \d+ oom[-_]kill event[^\n]*)",
            r"(?:DefaultCPUAllocator|Torch): (?:can't allocate|not enough) memory: you tried to allocate "
            rf"{_size('host')}",
            r"\bposix_memalign\(&data, gAlignment, nbytes\) == 0\. 12 vs 0",
            rf"[Uu]nable to (?:mmap|allocate) {_size('mapped')}",
            r"(?P<vllm>No available memory for the cache blocks[^\n]*|[^\n]*?KV cache is needed, which is larger than "
            r"the available KV cache memory[^\n]*|Free memory on device[^\n]*? is less than desired GPU memory[^\n]*)",
            r"std::bad_alloc\b",
            r"(?:CUDA|HIP) (?:driver )?error: out of memory\b",
            r"Triton Error \[(?:CUDA|HIP)\]: out of memory\b",
            r"Cuda failure (?:\d+ )?'out of memory'",
            rf"Failed to CUDA calloc(?: async)? {_size('nccl')}",
            r"\b(?:CU|HIP)(?:BLAS|DNN|SPARSE|SOLVER|FFT)_(?:STATUS_)?(?:\w+_)?(?:ALLOC|ALLOCATION)_FAILED\b",
            rf"(?:\b(?P<backend>[A-Z]{{2,5}}) out of memory\.?(?: |(?=~\())~)?Tried to allocate {_size('requested')}"
            r"(?:(?=~\(GPU)|\.|\b)",
            r"\b(?P<bare>[A-Z]{2,5}) out of memory\b",
        )
    )
)

_FIGURES = {
    name: re.compile("|".join(_words(pattern) for pattern in patterns))
    for name, patterns in {
        "total": (r"total capaci?ty of " + _size("a"), _size("b") + " total capacity"),
        "free": ("of which " + _size("a") + " is free", _size("b") + r" free\b"),
        "in_use": ("this process has " + _size("a") + " memory in use",),
        "allowed": (_size("a") + " allowed;",),
        "allocated": (_size("a") + " is allocated by PyTorch", _size("b") + " already allocated"),
        "private_pools": ("with " + _size("a") + " allocated in private pools",),
        "stranded": (_size("a") + " is reserved by PyTorch but unallocated", _size("b") + r" cached\)"),
        "reserved": (_size("a") + " reserved in total by PyTorch",),
    }.items()
}
_PROCESS = re.compile(_words(r"Process (?P<number>\d+) has " + _size("bytes") + " memory in use"))
_DEVICE = re.compile(r"\b(?P<name>GPU\s+\d+)\b")
_HOLDER = re.compile(r"(?P<name>[a-z_ ]+?) (?P<bytes>\d+(?:\.\d+)? (?:B|[KMGT]iB))")
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.(?P<decimals>\d+))?)[\s│┃]*(?P<unit>[A-Za-z]+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_PLACES = {
    Place.OPTIMIZER: r"optimizer\.step\(|/torch/optim/|_init_group|_foreach_(?:add|mul|lerp|addcdiv)",
    Place.LOGITS: r"log_softmax|cross_entropy|logsumexp|\blogits\.(?:float|clone|to)\b|\blogits = |lm_head\(|"
    r"logprobs?_from_logits|per_token_logps|compute_log_probs",
    Place.ATTENTION: r"matmul\(query|attn_weights|attention_scores|scaled_dot_product_attention|"
    r"\bq(?:uery)? @ k(?:ey)?\b",
    Place.BACKWARD: r"\.backward\(|_engine_run_backward|run_backward",
    Place.ROLLOUT: r"\.generate\(|_sample\(|past_key_values|DynamicCache|cache_utils|generate_sequences",
    Place.LOAD: r"from_pretrained|load_state_dict|\.to\(device\)|_load_pretrained_model|\.cuda\(\)",
}


def read_printed(text: str) -> Printed | None:
    """Reads a byte count as PyTorch prints it (in powers of 1024, on MPS as ``MB``), with the rounding it hides."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found["unit"][0].lower() not in _POWERS:
        return None
    unit = 1024 ** _POWERS[found["unit"][0].lower()]
    count = round(float(found["number"]) * unit)
    slack = 0 if unit == 1 else -(-unit // (2 * 10 ** len(found["decimals"] or "")))
    return None if count >= _IMPOSSIBLE_BYTES else Printed(count, slack)


def find_message(log: str) -> OutOfMemoryMessage | None:
    """Finds the last out-of-memory message of a log."""
    text = _ANSI.sub("", log)
    heads = list(_distinct(_HEADS.finditer(text)))
    if not heads:
        return None
    head = heads[-1]
    before = text[max(0, head.start() - _BEFORE) : head.start()]
    line = text.count("\n", 0, head.start()) + 1
    facts: dict[str, object] = {"line": line, "found": len(heads), "place": _place(before)}
    return OutOfMemoryMessage(**(facts | _read(head, text[head.start() : head.start() + _REACH])))  # type: ignore[arg-type]


def _distinct(heads: Iterator[re.Match[str]]) -> Iterator[re.Match[str]]:
    """Skips a message without a size that only repeats the one before it."""
    last: re.Match[str] | None = None
    for head in heads:
        if head["bare"] and last is not None and head.start() - last.end() < _REACH:
            continue
        yield head
        last = head


def _read(head: re.Match[str], window: str) -> dict[str, object]:
    """Reads a message from its start and the text after it, as arguments of the record."""
    given = head.groupdict()
    if given["budget"] is not None:
        return _read_budget(head)
    if given["simulated"] is not None:
        live, device = Printed(int(given["live"])), "simulated device"
        return _facts(head, Allocator.SIMULATED, requested=given["simulated"], allocated=live, device=device)
    if given["mps"] is not None:
        held = [size for size in (read_printed(given["mps"]), read_printed(given["mps_other"])) if size is not None]
        in_use = Printed(sum(size.count for size in held), sum(size.slack for size in held))
        figures = {"requested": given["mps_requested"], "allocated": given["mps"], "allowed": given["mps_allowed"]}
        return _facts(head, Allocator.MPS, **figures, in_use=in_use, device="MPS")
    if given["buffer"] is not None:
        return _facts(head, Allocator.MPS, requested=given["buffer"], device="MPS")
    if given["killed"] is not None or given["event"] is not None:  # the kernel's own words, or Slurm's
        resident = None if given["rss"] is None else Printed(int(given["rss"]) * 1024)
        return _facts(head, Allocator.KERNEL, allocated=resident, device="host")
    if given["vllm"] is not None:
        return _facts(head, Allocator.VLLM)
    if given["requested"] is not None or given["bare"] is not None:
        return _read_caching(head, window)
    size = given["host"] or given["mapped"]
    if size is not None or head[0].startswith(("std::bad_alloc", "posix_memalign")):
        return _facts(head, Allocator.HOST, requested=size, device="host")
    own_words = head[0].startswith(("CUDA", "HIP", "Triton")) and "ALLOC" not in head[0]
    return _facts(head, Allocator.DRIVER if own_words else Allocator.LIBRARY, requested=given["nccl"])


def _facts(head: re.Match[str], allocator: Allocator, **figures: object) -> dict[str, object]:
    read = {
        name: read_printed(value) if isinstance(value, str) and name != "device" else value
        for name, value in figures.items()
    }
    return {"text": _plain(head[0]), "allocator": allocator, **read}


def _plain(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("┃", " ").split())


def _read_budget(head: re.Match[str]) -> dict[str, object]:
    holders = _HOLDER.finditer(_plain(head["holders"]))
    held = tuple((one["name"].strip(), size) for one in holders if (size := read_printed(one["bytes"])) is not None)
    figures = {"requested": _plain(head["budget"]), "total": head["limit"], "allocated": head["outside"]}
    facts = _facts(head, Allocator.BUDGET, **figures, held=held)
    # The allocator's own message comes last and adds nothing.
    return facts | {"text": str(facts["text"]).partition(" The allocator said:")[0]}


def _read_caching(head: re.Match[str], window: str) -> dict[str, object]:
    """Reads a caching allocator's message: one sentence per figure, or brackets up to torch 2.0."""
    behind = window[len(head[0]) :]
    following = _HEADS.search(behind)
    behind = behind if following is None else behind[: following.start()]
    found = {name: pattern.search(behind) for name, pattern in _FIGURES.items()}
    sizes = {
        name: read_printed(next(group for group in match.groups() if group is not None))
        for name, match in found.items()
        if match is not None
    }
    reserved, allocated = sizes.pop("reserved", None), sizes.get("allocated")
    if reserved is not None and allocated is not None:
        sizes["stranded"] = Printed(max(0, reserved.count - allocated.count), reserved.slack + allocated.slack)
    processes = [(int(match["number"]), read_printed(match["bytes"])) for match in _PROCESS.finditer(behind)]
    device = _DEVICE.search(behind)
    ends = [match.end() for match in (*found.values(), *_PROCESS.finditer(behind), device) if match is not None]
    whole = head[0] + behind[: max(ends, default=0)]
    if whole.count("(") > whole.count(")"):
        whole += ")"
    name = head["backend"] or head["bare"] or "CUDA"
    return {
        "text": _plain(whole) + ("." if whole.endswith(("unallocated", "use", "free")) else ""),
        "allocator": Allocator(name) if name in set(Allocator) else Allocator.OTHER,
        "requested": None if head["requested"] is None else read_printed(head["requested"]),
        "device": None if device is None else " ".join(device["name"].split()),
        "processes": tuple((number, size) for number, size in processes if size is not None),
        **sizes,
    }


def _place(before: str) -> Place | None:
    """Returns what the program was doing, by the innermost frame of the traceback that shows it."""
    begun = before.rfind("Traceback")
    frames = before[begun:] if begun >= 0 else before
    found = [(match.end(), place) for place, pattern in _PLACES.items() for match in re.finditer(pattern, frames)]
    return max(found)[1] if found else None
