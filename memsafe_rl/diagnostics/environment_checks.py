"""Checks an environment for what costs memory, time or a run; pure, so that tests need no GPU."""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from memsafe_rl.errors import ConfigError, texts_beside
from memsafe_rl.memory.runtime.cards import Card
from memsafe_rl.units import format_bytes, parse_bytes

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names that PyTorch reads, in its order."""

_TRUTH, _SIZE, _SHARE, _WORD, _ANY = "True or False", "whole MB of 20 or more", "a share between 0 and 1", "", "a value"
_WHOLE_SHARE = "a share between 0 and 1, or 1"
ALLOCATOR_KEYS: Mapping[str, str] = {
    **{"backend": _WORD, "garbage_collection_threshold": _SHARE, "per_process_memory_fraction": _WHOLE_SHARE},
    **dict.fromkeys(("max_non_split_rounding_mb", "max_split_size_mb"), _SIZE),
    **dict.fromkeys(("expandable_segments", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"), _TRUTH),
    **dict.fromkeys(("release_lock_on_cudamalloc", "release_lock_on_hipmalloc"), _TRUTH),
    **dict.fromkeys(("pinned_use_background_threads", "pinned_use_cuda_host_register"), _TRUTH),
    **dict.fromkeys(("pinned_use_hip_host_register",), _TRUTH),
    **dict.fromkeys(("pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"), _ANY),
    **dict.fromkeys(("pinned_num_register_threads", "pinned_reserve_segment_size_mb"), _ANY),
    **dict.fromkeys(("large_segment_size_mb", "roundup_power2_divisions"), _ANY),
}
"""Settings of PyTorch 2.13's allocator, each with the values it takes."""

_LEAST_SPLIT_MB = 20
_BACKENDS = ("native", "cudaMallocAsync")
_NATIVE_ONLY = ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold", "expandable_segments")

_WITH_TORCH = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "memsafe_rl", "vllm", "deepspeed")
_LARGE_SHARE = 0.02  # share of a card held by other processes that is worth a finding

_RELATIONS: Mapping[str, Callable[[Any, Any], bool]] = {"=": operator.eq, ">=": operator.ge, "<=": operator.le}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Severity(StrEnum):
    """How serious a finding is."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """A fault, with its remedy."""

    code: str  # short name, for programs
    severity: Severity  # error: the run fails or differs; warning: it costs memory or time
    what: str  # what is wrong, with the value
    where: str  # variable, file and key, or package
    why: str
    remedy: str


_TEXTS: Mapping[str, Mapping[str, str]] = texts_beside(__file__, "findings.yaml")


def finding(case: str, /, **values: object) -> Finding:
    """Writes a finding of `findings.yaml`."""
    texts = {part: text.format(**values) for part, text in _TEXTS[case].items()}
    return Finding(case.partition("/")[0], Severity(texts.pop("severity", "error")), **texts)


@dataclass(frozen=True)
class Environment:
    """A machine and its software."""

    variables: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)  # by package; None if it is not installed
    requirements: Sequence[str] = ()  # of this library, as in its pyproject
    optional: Sequence[str] = ()  # requirements of optional features
    backend: str = "cpu"  # what PyTorch is built for: ``cuda``, ``hip``, ``xpu``, ``mps`` or ``cpu``
    usable_gpus: int = 0
    cards: tuple[Card, ...] = ()  # without this process's own use; empty without a driver
    cores: int = 1
    host_bytes: int = 0
    host_free_bytes: int = 0  # available RAM


def check_environment(environment: Environment) -> tuple[Finding, ...]:
    """Checks a machine and its software."""
    checks = (check_versions, check_allocator, check_devices, check_threads)
    return in_order([found for check in checks for found in check(environment)])


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sorts findings, errors first."""
    return tuple(sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR))


def check_versions(environment: Environment) -> Iterator[Finding]:
    """Checks installed versions against the bounds of this library."""
    for written in (*environment.requirements, *environment.optional):
        requirement = Requirement(written)
        installed = environment.versions.get(requirement.name)
        needed = written in environment.requirements
        if installed is None and needed:
            yield finding("package-missing", package=requirement.name, specifier=requirement.specifier)
        elif installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            case = "version" if needed else "version/optional"
            yield finding(case, package=requirement.name, installed=installed, specifier=requirement.specifier)


def check_allocator(environment: Environment) -> Iterator[Finding]:
    """Checks the variables of PyTorch's allocator: names, settings inside, and contradictions."""
    variables = environment.variables
    for name in sorted(variables):
        yield from _wrong_name(name, environment.backend)
    given = [name for name in ALLOCATOR_VARIABLES if variables.get(name, "").strip()]
    for name in given:
        yield from check_settings(name, variables[name])
    if len({"".join(variables[name].split()) for name in given}) > 1:
        yield finding("allocator-two-names", both=" and ".join(given), first=given[0], second=given[1])
    if variables.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        yield finding("allocator-off")
    settings = {key: value for name in reversed(given) for key, value in allocator_settings(variables[name])}
    uses_cuda = environment.backend in ("cuda", "hip") and (environment.usable_gpus or environment.cards)
    if uses_cuda and settings.get("expandable_segments") != "True" and settings.get("backend") != "cudaMallocAsync":
        yield finding("segments-fixed", variable=given[0] if given else ALLOCATOR_VARIABLES[0])


def _wrong_name(name: str, backend: str) -> Iterator[Finding]:
    if name == "PYTORCH_HIP_ALLOC_CONF" and backend == "cuda":
        yield finding("allocator-other-backend", name=name)
    if name in ALLOCATOR_VARIABLES or not re.search(r"ALLOC\w*_?CONF", name, re.IGNORECASE):
        return
    if not re.search(r"TORCH|CUDA|HIP", name, re.IGNORECASE):
        return
    meant = difflib.get_close_matches(name.upper(), ALLOCATOR_VARIABLES, n=1, cutoff=0.0)[0]
    yield finding("allocator-name", name=name, meant=meant)


def allocator_settings(text: str) -> list[tuple[str, str]]:
    """Splits an allocator variable into settings."""
    parts = re.split(r",(?![^\[]*\])", "".join(text.split()))
    return [(key, value) for key, _, value in (part.partition(":") for part in parts if part)]


def nearest(word: str, known: Collection[str], cutoff: float, otherwise: str) -> str:
    """Says to write what a word comes nearest to, if to anything."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"Write {near[0]}." if near else otherwise


def check_settings(name: str, text: str) -> Iterator[Finding]:
    """Checks the settings in an allocator variable."""
    settings = allocator_settings(text)
    for key, value in settings:
        yield from _setting(name, key, value)
    keys = [key for key, _ in settings]
    for key in sorted({key for key in keys if len({value for known, value in settings if known == key}) > 1}):
        yield finding("allocator-contradiction/values", name=name, key=key)
    ignored = [key for key in keys if key in _NATIVE_ONLY]
    if ("backend", "cudaMallocAsync") in settings and ignored:
        yield finding("allocator-contradiction/backend", ignored=", ".join(ignored), name=name)


def _setting(name: str, key: str, value: str) -> Iterator[Finding]:
    if key not in ALLOCATOR_KEYS:
        remedy = nearest(key, ALLOCATOR_KEYS, 0.5, f"Remove {key}.")
        remedy = "Write settings as key:value, with a colon." if "=" in key else remedy
        yield finding("allocator-key", name=name, key=key, remedy=remedy)
    elif not _fits(takes := ALLOCATOR_KEYS[key], value):
        yield finding("allocator-value", key=key, value=value, name=name, takes=takes or " or ".join(_BACKENDS))


def _fits(takes: str, value: str) -> bool:
    if takes == _TRUTH:
        return value in ("True", "False")
    if takes == _SIZE:
        return value.isdigit() and int(value) >= _LEAST_SPLIT_MB
    if takes in (_SHARE, _WHOLE_SHARE):
        with suppress(ValueError):
            return 0 < float(value) < 1 or (takes == _WHOLE_SHARE and value in ("1", "1.0"))
        return False
    return value in _BACKENDS if takes == _WORD else value != ""


def check_devices(environment: Environment) -> Iterator[Finding]:
    """Checks the cards: other processes, a PyTorch that cannot use them, and visibility."""
    for number, card in enumerate(environment.cards):
        held = sum(process.used_bytes or 0 for process in card.processes)
        if card.processes and max(held, card.total_bytes - card.free_bytes) >= _LARGE_SHARE * card.total_bytes:
            listed = ", ".join(f"{process.pid} ({format_bytes(process.used_bytes or 0)})" for process in card.processes)
            sizes = {"free": format_bytes(card.free_bytes), "total": format_bytes(card.total_bytes)}
            yield finding("card-shared", listed=listed, **sizes, number=number, card=card.name)
    hidden = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        yield from _visible(hidden, len(environment.cards))
    if environment.cards and not environment.usable_gpus and hidden not in ("", "-1"):
        built = "for the CPU only" if environment.backend == "cpu" else f"for {environment.backend}"
        yield finding("card-unusable", cards=len(environment.cards), built=built)


def _visible(text: str, cards: int) -> Iterator[Finding]:
    named = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [int(part) for part in named if part.isdigit()]
    if cards and (text.strip() in ("", "-1")):
        yield finding("cards-hidden", text=text)
    if len(set(named)) < len(named):
        yield finding("cards-twice", text=text)
    missing = [number for number in numbers if cards and number >= cards]
    if missing:
        yield finding("cards-missing", missing=missing[0], cards=cards, last=cards - 1)


def check_threads(environment: Environment, processes: int = 1) -> Iterator[Finding]:
    """Checks the thread counts against the cores."""
    for name in _THREADS:
        value = environment.variables.get(name)
        if value is None:
            continue
        if not value.isdigit() or int(value) < 1:
            yield finding("threads/unreadable", name=name, value=value, cores=environment.cores)
        elif int(value) * processes > environment.cores:
            many = f" in each of {processes} processes" if processes > 1 else ""
            cores = {"cores": environment.cores, "threads": max(1, environment.cores // processes)}
            yield finding("threads/many", name=name, value=value, many=many, **cores)


def check_script(text: str, name: str) -> tuple[Finding, ...]:
    """Checks that a script configures PyTorch's allocator before importing torch."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name} is not Python: {error.msg} in line {error.lineno}.") from None
    imported = min((line for line, module in _imports(tree) if module.partition(".")[0] in _WITH_TORCH), default=None)
    found: list[Finding] = []
    for line, variable, value in _assignments(tree):
        found += _wrong_name(variable, "")
        if variable not in ALLOCATOR_VARIABLES:
            continue
        found += check_settings(variable, value) if value is not None else ()
        if imported is not None and line > imported:
            found.append(finding("allocator-late", variable=variable, line=line, imported=imported, name=name))
    return in_order(found)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def _assignments(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Yields line, variable and value (if literal) of each assignment to an environment variable."""
    for node in (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.Call))):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        match node:
            case ast.Assign(targets=targets, value=value):
                subscripts = (target for target in targets if isinstance(target, ast.Subscript))
                pairs = [(target.slice, value) for target in subscripts if _is_environ(target.value)]
            case ast.Call(func=ast.Attribute(attr="putenv"), args=[key, value]):
                pairs = [(key, value)]
            case ast.Call(func=ast.Attribute(value=owner, attr="setdefault"), args=[key, value]) if _is_environ(owner):
                pairs = [(key, value)]
            case ast.Call(func=ast.Attribute(value=owner, attr="update"), args=args, keywords=words):
                if _is_environ(owner):
                    pairs = [(ast.Constant(word.arg), word.value) for word in words]
                    given = [one for one in args if isinstance(one, ast.Dict)]
                    pairs += [pair for one in given for pair in zip(one.keys, one.values, strict=True)]
        for name, value in pairs:
            if (variable := _text(name)) is not None:
                yield node.lineno, variable, _text(value)


def _is_environ(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@dataclass(frozen=True)
class Expectation:
    """A fact that the user expects."""

    key: str
    relation: str  # ``=``, ``>=`` or ``<=``
    value: str
    actual: str | None  # None if there is no such fact
    met: bool


def check_expectations(wanted: Sequence[str], facts: Mapping[str, object]) -> tuple[Expectation, ...]:
    """Compares facts with expectations."""
    found = []
    for written in wanted:
        parts = re.fullmatch(r"\s*([\w.-]+)\s*(>=|<=|=)\s*(.*?)\s*", written)
        if parts is None:
            raise ConfigError(f"--expect {written!r} is not key=value. Write such as torch=2.13.0 or gpus>=1.")
        key, relation, value = parts.groups()
        actual = facts.get(key, facts.get(key.replace("-", "_")))
        text = str(actual).lower() if isinstance(actual, bool) else None if actual is None else str(actual)
        found.append(Expectation(key, relation, value, text, text is not None and _holds(text, relation, value)))
    return tuple(found)


def _holds(actual: str, relation: str, value: str) -> bool:
    """Compares two texts as they are, as bytes or numbers, or as versions."""
    if relation == "=" and actual.strip().lower() == value.strip().lower():
        return True
    compare = _RELATIONS[relation]
    with suppress(ConfigError):
        return compare(parse_bytes(actual), parse_bytes(value))
    with suppress(InvalidVersion):
        there, wanted = Version(actual), Version(value)
        # A local label, such as +cpu, counts only if the expectation has one.
        return compare(there if wanted.local else Version(there.public), wanted)
    return False
