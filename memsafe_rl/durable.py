"""Files that are written whole: what they should hold, and when the disk has them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any


def sha256_of(path: Path) -> str:
    """Hashes a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns bytes and sha-256 of every file of a folder, by its name there."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def sync(path: Path) -> None:
    """Waits until the disk has a file's bytes, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Waits until the disk has a folder and everything in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
