"""Builds the pretend CUDA device for the torch that is installed, once; needs g++ and nothing of torch but its headers.

The library is kept in the user's cache, under the version of torch and a hash of the sources.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def missing() -> str | None:
    """Says what the device lacks on this machine; None where it can be had."""
    if shutil.which("g++") is None:
        return "the pretend CUDA device is built with g++, which is not installed"
    if "+cpu" not in importlib.metadata.version("torch"):
        return f"the pretend CUDA device takes a CPU build of torch, not {importlib.metadata.version('torch')}"
    return None


def built() -> Path:
    """Returns the library, and builds it where it is not there yet: about a minute of processor time.

    Raises:
        RuntimeError: the compiler refused, with what it said.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memsafe_rl" / "pretend_device"
    folder = cache / importlib.metadata.version("torch")
    folder.mkdir(parents=True, exist_ok=True)
    sources, headers = sorted(SOURCES.glob("*.cpp")), sorted(SOURCES.glob("*.h"))
    lib = torch_folder() / "lib"  # found by its path, which another environment has elsewhere
    library = folder / f"{_hash(*sources, *headers)}-{hashlib.sha256(str(lib).encode()).hexdigest()[:8]}.so"
    # Whoever comes second waits, rather than compile the same.
    with FileLock(folder / ".lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compiled(source, folder, _hash(source, *headers)), sources))
        return _made(library, *map(str, objects), "-shared", f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10")


def torch_folder() -> Path:
    """Finds torch without loading it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def _compiled(source: Path, folder: Path, digest: str) -> Path:
    include = torch_folder() / "include"
    includes = (f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}")
    return _made(folder / f"{source.stem}-{digest}.o", *_FLAGS, *includes, "-c", str(source))


def _made(target: Path, *arguments: str) -> Path:
    """Runs the compiler where the file is not there yet; it appears whole, also where the process is killed."""
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        done = subprocess.run(["g++", *arguments, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"The pretend device could not be built: g++ {' '.join(arguments)}\n{done.stderr[-4000:]}"
            )
        made.replace(target)
    return target


def _hash(*files: Path) -> str:
    text = b"".join(path.read_bytes() for path in files) + " ".join(_FLAGS).encode()
    return hashlib.sha256(text).hexdigest()[:16]
