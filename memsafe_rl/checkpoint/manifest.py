"""What a checkpoint says of itself: whose it is, and the size and hash of every file, so that damage is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsafe_rl.diagnostics.status import versions
from memsafe_rl.durable import contents, sha256_of
from memsafe_rl.errors import ConfigError, DamagedCheckpointError
from memsafe_rl.records import Lineage, read_json

MANIFEST = "manifest.json"
LOOP = "loop.json"
"""Where the run stood, in plain values."""
FORMAT = 2
"""Of `loop.json`; 1 held the history and had no manifest beside it."""
_MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class RunMark:
    """Which run, and which of its starts, wrote something."""

    run_id: str = ""  # empty: written by a version without run ids
    start: int = -1
    lineage: Lineage = field(default_factory=Lineage)

    @property
    def stamp(self) -> dict[str, Any]:
        """What each line of a log repeats."""
        return {"run_id": self.run_id, "start": self.start}

    @property
    def plain(self) -> dict[str, Any]:
        """All of it, in values that JSON has a form for."""
        return {**self.stamp, "lineage": self.lineage.starts}


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    mark: RunMark
    step: int = -1
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] | None = None  # bytes and sha256 by name; None: an earlier version's


def write_manifest(folder: Path, mark: RunMark, step: int) -> None:
    """Describes all files of a folder, in a file that is written last."""
    files = contents(folder)
    content = {"format": _MANIFEST_FORMAT, **mark.plain, "step": step, "versions": versions(), "files": files}
    (folder / MANIFEST).write_text(json.dumps({**content, "seal": _seal(content)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Reads what a checkpoint says of itself; checkpoints of earlier versions say nothing."""
    path = folder / MANIFEST
    try:
        if not path.exists():
            if int((read_json(folder / LOOP) or {}).get("format", 1)) >= FORMAT:
                raise FileNotFoundError("it is missing")
            return Manifest(RunMark())
        content = json.loads(path.read_text())
        if content.pop("seal") != _seal(content):
            raise ValueError("its seal does not fit its content")
        if content["format"] > _MANIFEST_FORMAT:
            by = dict(content.get("versions", {})).get("memsafe-rl", "unknown")
            raise ConfigError(
                f"{str(path)!r} has format {content['format']}, of a newer memsafe-rl ({by}); this one reads up to "
                f"{_MANIFEST_FORMAT}. Upgrade memsafe-rl, or resume from a checkpoint that this version wrote."
            )
        lineage = Lineage(tuple((int(start), int(step)) for start, step in content["lineage"]))
        mark = RunMark(str(content["run_id"]), int(content["start"]), lineage)
        return Manifest(mark, int(content["step"]), dict(content["versions"]), dict(content["files"]))
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{str(path)!r} is damaged ({type(error).__name__}: {error})") from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compares every file with what was written."""
    for name, written in (manifest.files or {}).items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{str(path)!r} is missing")
        if path.stat().st_size != written["bytes"]:
            sizes = f"{path.stat().st_size:,} bytes; written were {written['bytes']:,}"
            raise DamagedCheckpointError(f"{str(path)!r} has {sizes}")
        if sha256_of(path) != written["sha256"]:
            raise DamagedCheckpointError(f"{str(path)!r} differs from what was written (sha-256)")


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
