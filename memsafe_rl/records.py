"""Records of a run: an append-only file of JSON lines that reads as a sequence, with only the newest in memory."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import tempfile
import threading
import weakref
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

logger = logging.getLogger(__name__)

Record = dict[str, Any]
_Line = TypeVar("_Line")

RECENT = 100
"""Records kept in memory besides those not yet written."""

RUN_FILE = "run.json"
"""Which run a folder belongs to, its settings, device, forecast and versions, written when a run begins."""
_STAMP = ("start", "redone", "run_id")
"""What a line says besides its record: which start of the run wrote it, and whether the step was recorded before."""
RESERVED = (*_STAMP, "step", "epoch")
"""Names of a record's own values; what a user logs under one of them is kept as `logged/NAME`."""
_HEAD = re.compile(rb'\{"step": (\d+)(?:\.0)?, "start": (\d+), ("redone")?')
_TAIL = re.compile(rb'"run_id": "(\w*)"\}\Z')
"""How a line begins and ends that was written whole."""


class Lineage(NamedTuple):
    """Which records a run builds on: one that resumes leaves what earlier starts wrote after its checkpoint behind."""

    starts: tuple[tuple[int, int], ...] = ((0, 0),)  # number of a start and the step it began from, oldest first
    logged: tuple[int, ...] = ()  # records in the log where each of these starts was left; -1: not counted

    def resumed(self, start: int, step: int) -> Lineage:
        """Returns the lineage of a start that resumes at a step."""
        return self._replace(starts=(*self.starts, (start, step)))

    def by_step(self) -> Lineage:
        """Returns the lineage of a log that has one record a step, whose records need no count."""
        return Lineage(self.starts)

    def chosen(self, lines: Iterable[tuple[float, int, _Line]], step: float) -> list[_Line]:
        """Picks the records up to a step of lines with their steps and starts: by number where that is known."""
        written, found = defaultdict[int, list[tuple[float, _Line]]](list), list[tuple[float, _Line]]()
        for number, start, line in lines:
            written[start].append((number, line))
        ends = [*(began for _, began in self.starts[1:]), step]
        for place, (start, _) in enumerate(self.starts):
            found += written.pop(start, [])
            known = self.logged[place] if place < len(self.logged) else -1
            found = [one for one in found if one[0] <= ends[place]] if known < 0 else found[:known]
        return [line for _, line in found]


class RecordLog(Sequence[Record]):
    """Records in the order they were appended, in memory until `flush` writes them; ``restore`` makes one of JSON."""

    def __init__(self, restore: Callable[[Record], Record] | None = None) -> None:
        self._restore = restore or (lambda record: record)
        self._path: Path | None = None
        self._file: _File | None = None
        self._offsets = array("q")
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._waiting: list[tuple[Record, Mapping[str, Any]]] = []
        self._stamp: dict[str, Any] = {"start": 0}
        self._again: Counter[float] = Counter()  # records by step that stand in the file and are to be written again
        self._complained = False
        self._lock = threading.RLock()  # the status thread reads along

    def __len__(self) -> int:
        return len(self._offsets) + len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        with self._lock:
            if isinstance(index, slice):
                return [self._at(place) for place in range(*index.indices(len(self)))]
            return self._at(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # copied and pickled as what it reads like

    def __repr__(self) -> str:
        return f"<{len(self)} records, newest {self[-1] if len(self) else None}>"

    def _at(self, place: int) -> Record:
        written = len(self._offsets)
        if place >= written:
            return self._waiting[place - written][0]
        if place >= written - len(self._recent):
            return self._recent[place - written + len(self._recent)]
        return self._restore(_without_stamp(json.loads(self._written().line_at(self._offsets[place]))))

    def append(self, record: Record, **beside: Any) -> None:
        """Adds a record; `beside` is written with it and not read back."""
        with self._lock:
            self._waiting.append((record, beside))

    def amend(self, **values: Any) -> None:
        """Adds values to the newest record, which has not been written yet."""
        with self._lock:
            self._waiting[-1][0].update(values)

    def clear(self) -> None:
        """Begins anew, without a file; what was written stays where it is."""
        with self._lock:
            self.flush()
            self._path, self._file = None, None
            self._again.clear()
            self._offsets, self._recent = array("q"), deque(maxlen=RECENT)
            self._waiting.clear()

    def open(self, path: Path, stamp: Mapping[str, Any], lineage: Lineage | None = None, step: int = 0) -> None:
        """Continues a file behind what the run's lineage wrote up to ``step``; records without a file move there."""
        with self._lock:
            if self._path is not None:
                self._flush()  # to where the file is now, if the run that it was of has been moved aside
            carried: list[tuple[Record, Mapping[str, Any]]] = [] if self._path else [(record, {}) for record in self]
            self._path, self._stamp = path, dict(stamp)
            self._file = _File(path)
            self._offsets, self._recent = array("q"), deque(maxlen=RECENT)
            lines = [(head, at) for at, line in _lines(self._file.descriptor) if (head := _head(line)) is not None]
            ours = [(head, at) for head, at in lines if _is_of(head[3], stamp.get("run_id", ""))]
            self._again = Counter(head[0] for head, _ in ours if not head[2] and head[0] >= step)
            if lineage is None:
                del self._again[step]
            else:
                built_on = lineage.chosen(((*head[:2], (head[0], at)) for head, at in ours), step)
                self._again.subtract(number for number, _ in built_on if number >= step)
                self._offsets.extend(at for _, at in built_on)
                texts = map(self._file.line_at, self._offsets[-RECENT:])
                self._recent.extend(self._restore(_without_stamp(json.loads(text))) for text in texts)
            self._waiting = carried

    def flush(self, *, durable: bool = False) -> bool:
        """Writes what waits, durably if asked; a full disk is said once, and what waits goes on waiting."""
        with self._lock:
            if self._path is None and len(self._waiting) <= RECENT:
                return True  # few records need no file while they have none of their own
            try:
                if self._file is not None and self._path is not None and self._file.has_lost(self._path):
                    self._put_back(self._file, self._path)
                self._flush()
                if durable and self._path is not None:
                    os.fsync(self._written().descriptor)
            except OSError as error:
                if not self._complained:
                    logger.warning("%s cannot be written (%s); records wait in memory", self._path, error.strerror)
                self._complained = True
                return False
            self._complained = False
            return True

    def _written(self) -> _File:
        """Returns the file, a temporary one where the log has none of its own yet."""
        if self._file is None:
            self._file = _File(self._path)
        return self._file

    def _flush(self) -> None:
        while self._waiting:
            record, beside = self._waiting[0]
            step = _number(record.get("step"))
            redone = self._again[step] > 0
            line = {"step": int(step), "start": self._stamp["start"], **({"redone": True} if redone else {})}
            line |= {str(name): value for name, value in {**record, **beside}.items() if str(name) not in line}
            line |= {name: value for name, value in self._stamp.items() if name not in line}
            offset = self._written().append(json.dumps(plain(line)).encode() + b"\n")
            if redone:
                self._again[step] -= 1
            self._offsets.append(offset)
            self._recent.append(record)
            del self._waiting[0]

    def _put_back(self, old: _File, path: Path) -> None:
        if not still_ours(path.parent, self._stamp.get("run_id", "")):
            raise OSError(errno.ESTALE, "its folder was moved or deleted, and is another run's now")
        path.parent.mkdir(parents=True, exist_ok=True)
        was_cut, new = old.is_at(path), _File(path)
        kept = [(offset, line) for offset in self._offsets if _object(line := old.line_at(offset)) is not None]
        self._file = new
        if was_cut:
            self._recent.clear()
            self._offsets = array("q", (offset for offset, _ in kept))
            logger.warning("%s was cut during the run; what it has lost is missing in the trainer's records too", path)
            return
        self._offsets = array("q", (new.append(line) for _, line in kept))
        logger.warning("%s was deleted or moved during the run; it is written again", path)


class _File:
    """A file that is appended to; without a path, one that has no name."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self.descriptor, name = tempfile.mkstemp(prefix="memsafe_rl-")
            os.unlink(name)
        else:
            self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self.descriptor)
        self._size = os.fstat(self.descriptor).st_size
        if self._size and os.pread(self.descriptor, 1, self._size - 1) != b"\n":
            self.append(b"\n")  # a killed process left half a line, which stays for itself

    def append(self, content: bytes) -> int:
        """Writes at the end, whole or not at all; returns where."""
        offset, rest = self._size, memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except OSError:
            os.ftruncate(self.descriptor, offset)
            raise
        self._size += len(content)
        return offset

    def line_at(self, offset: int, block: int = 1 << 13) -> bytes:
        """Reads the line that begins somewhere, its end included."""
        content = b""
        while b"\n" not in content and (more := os.pread(self.descriptor, block, offset + len(content))):
            content += more
        return content.partition(b"\n")[0] + b"\n"

    def is_at(self, path: Path) -> bool:
        """Returns whether the file is still where it was: neither deleted, nor moved with the folder it was in."""
        return bool(os.fstat(self.descriptor).st_nlink) and path.exists()

    def has_lost(self, path: Path) -> bool:
        """Returns whether the file has gone, or somebody has cut it."""
        return not self.is_at(path) or os.fstat(self.descriptor).st_size < self._size


def records_until(path: Path, lineage: Lineage, step: int, run_id: str = "") -> Iterator[Record]:
    """Yields the records that a run's checkpoint builds on; none where there is no log."""
    lines = ((line["step"], line.get("start", 0), line) for line in read_lines(path, run_id)[0])
    yield from map(_without_stamp, lineage.chosen(lines, step))


def read_lines(path: Path, run_id: str = "") -> tuple[list[Record], int]:
    """Reads a log, stamps included: its records, those of other runs left out, and how many lines are unreadable."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    found = [record for record in map(_object, texts) if record is not None]
    damaged = sum(bool(text.strip()) for text in texts) - len(found)
    return [record for record in found if _is_of(str(record.get("run_id", "")), run_id)], damaged


def _is_of(written: str, run_id: str) -> bool:
    """Returns whether a line is a run's; an earlier version's does not say."""
    return not written or not run_id or written == run_id


def _object(text: bytes) -> Record | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("start", 0), int):
        return None
    step = content.get("step")
    return content if isinstance(step, (int, float)) and math.isfinite(step) else None


def _without_stamp(line: Record) -> Record:
    return {name: value for name, value in line.items() if name not in _STAMP}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def plain(value: Any) -> Any:
    """Returns a value in a form that every reader of JSON knows; numbers of numpy and torch are numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if not isinstance(value, (str, int, float, bool, type(None))):
        scalar = getattr(value, "item", None)
        try:
            return plain(scalar()) if callable(scalar) else str(value)
        except (RuntimeError, ValueError):
            return str(value)  # of many numbers
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _head(line: bytes) -> tuple[float, int, bool, str] | None:
    """Reads a line's step, its start, whether it is marked as done again, and its run; None of what is no record."""
    match, tail = _HEAD.match(line), _TAIL.search(line, max(0, len(line) - 100))
    if match is not None and tail is not None:
        return float(match[1]), int(match[2]), match[3] is not None, tail[1].decode()
    record = _object(line)  # of a version that did not count starts, or torn
    if record is None:
        return None
    return float(record["step"]), record.get("start", 0), bool(record.get("redone")), str(record.get("run_id", ""))


def _lines(descriptor: int, block: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """Yields the complete lines of a file and where they begin."""
    offset, rest = 0, b""
    while content := os.pread(descriptor, block, offset + len(rest)):
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            yield offset, line
            offset += len(line) + 1


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a file of one JSON object; None if it is missing or unreadable."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def run_id_of(run_dir: Path) -> str:
    """Returns the id of the run whose folder this is; empty where `run.json` does not say."""
    return str((read_json(run_dir / RUN_FILE) or {}).get("run_id", ""))


def still_ours(run_dir: Path, run_id: str) -> bool:
    """Returns whether a run's folder was not moved or deleted and its place taken by another run."""
    return run_id_of(run_dir) in ("", run_id)
