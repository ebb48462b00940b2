"""Which models train on which card, and with what completions? Writes docs/what-fits.md from `plan`'s own forecasts.

    python -m benchmarks.what_fits [--models Qwen/Qwen3-4B] [--cards 24 80] [--page]

For every model, way to train it and card: the longest completion that a forecast confirms. The estimate of a forecast
at 256 tokens is tried first; where it does not fit, lengths between the two are. Figures go to
``benchmarks/results/what_fits.json`` as they are found, and what is there already is not asked again; ``--page`` writes
the page from that file alone. Nothing is loaded, and nothing was measured on a card.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.machine import describe_machine
from memsafe_rl.cli.arguments import RunRequest
from memsafe_rl.cli.plan import plan, wish
from memsafe_rl.preflight.cards import NamedCard

RESULTS = Path(__file__).parent / "results" / "what_fits.json"
PAGE = Path(__file__).parents[1] / "docs" / "what-fits.md"
MODELS = (
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"),
    *("meta-llama/Llama-3.1-8B", "google-t5/t5-base", "google-t5/t5-3b"),
)
CARDS = (8, 12, 16, 24, 40, 48, 80)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {},
    "LoRA": {"peft": "lora:16"},
    "LoRA, base in 4 bits": {"peft": "lora:16", "quantization": "4bit"},
}
PROMPT_TOKENS = 512
FIRST, LONGEST = 256, 32_768
"""Completions of the first forecast, and the longest that are asked for, in tokens."""
FORECASTS = 6
"""How often lengths between two are tried; the last two then lie within a tenth of each other."""

TEXT = """\
# What fits

The longest completion, in tokens, with which a model trains on a card, by forecasts alone: 8 completions a prompt, 32 a
step, prompts of {prompt_tokens} tokens, bf16, AdamW, no reference model, plans left to the library.
**No figure here was measured on a card.** Each is a length at which `memsafe-rl plan` says that the run fits. A longer
one may fit too, so a larger card can show a shorter one. *host* means that frozen weights wait in the host's memory and
are brought in block by block, which costs time; a dash means that not even {first} tokens fit. No length above
{longest:,} was asked for.

Ask for your own run, in seconds, without a GPU or the weights:

```bash
memsafe-rl plan --model Qwen/Qwen3-4B --gpu 24GiB --peft lora:16 --prompt-tokens {prompt_tokens} --find
```

{tables}
{missing}`python -m benchmarks.what_fits` writes this page. A forecast took {middle:.0f} s in the median and
{most:.0f} s at most, on two cores that other work shared. LoRA is of rank 16 on all linear layers. How a forecast is
made, and how near it comes: [Knowing the peak before the run](forecast.md).
"""

Cell = dict[str, Any]
"""Longest completion (0: none), seconds of its slowest forecast, and the resident blocks of a base on the host."""


def longest(model: str, way: str, gib: int, folder: str) -> Cell:
    """Finds the longest completion that a forecast confirms.

    Args:
        model: name of the network.
        way: one of `WAYS`.
        gib: memory of the card, in GiB.
        folder: where a run would write.

    Returns:
        Its tokens, seconds of the slowest forecast, and the resident blocks where the base lies on the host.
    """
    seconds = 0.0

    def ask(tokens: int) -> tuple[bool, int | None, int]:
        nonlocal seconds
        settings = {
            **{"output_dir": folder, "num_generations": 8, "per_device_train_batch_size": 8},
            **{"gradient_accumulation_steps": 4, "max_completion_length": tokens},
        }
        wanted = wish(
            RunRequest({"model": model, **WAYS[way]}, settings),
            card=NamedCard("", gib * 2**30),
            prompt_tokens=PROMPT_TOKENS,
        )
        started = time.perf_counter()
        forecast, found = plan(wanted, None, find=False)
        seconds = max(seconds, round(time.perf_counter() - started, 1))
        return forecast.fits, forecast.update_plan.resident_blocks, found.longest_completion

    fits, resident, ahead = ask(FIRST)
    best, ends = FIRST if fits else 0, min(LONGEST, ahead) + 1  # the longest that is known to fit, and one that is not
    tokens = ends - 1
    for _ in range(FORECASTS if fits and tokens > FIRST else 0):
        fits, blocks, _ = ask(tokens)
        if fits:
            best, resident = tokens, blocks
        else:
            ends = tokens
        tokens = math.isqrt(best * ends)  # half-way, as a ratio
        if best + 1 >= min(ends, LONGEST):
            break
    return {"tokens": best, "seconds": seconds, "resident_blocks": resident if best else None}


def page(results: Mapping[str, Mapping[str, Cell]]) -> str:
    """Writes the page.

    Args:
        results: cells by card, by model and way.

    Returns:
        Markdown.
    """
    seconds = sorted(cell["seconds"] for row in results.values() for cell in row.values())
    cells = {(name, way): len(results.get(f"{name}, {way}", {})) for way in WAYS for name in MODELS}
    left = [f"{name.split('/')[1]} ({way})" for (name, way), count in cells.items() if count < len(CARDS)]
    tables = [f"## {way[0].upper() + way[1:]}\n\n" + "".join(_table(results, way)) for way in WAYS]
    return TEXT.format(
        prompt_tokens=PROMPT_TOKENS,
        first=FIRST,
        longest=LONGEST,
        tables="\n".join(tables),
        missing=f"Not asked yet: {', '.join(left)}.\n\n" if left else "",
        middle=seconds[len(seconds) // 2],
        most=seconds[-1],
    )


def _table(results: Mapping[str, Mapping[str, Cell]], way: str) -> Iterator[str]:
    yield "| | " + " | ".join(f"{gib} GiB" for gib in CARDS) + " |\n"
    yield "|---|" + "---:|" * len(CARDS) + "\n"
    for model in MODELS:
        row = results.get(f"{model}, {way}", {})
        if len(row) == len(CARDS):
            yield f"| {model.split('/')[1]} | " + " | ".join(_text(row[str(gib)]) for gib in CARDS) + " |\n"


def _text(cell: Cell) -> str:
    if not cell["tokens"]:
        return "-"
    return f"{cell['tokens']:,}" + (" *host*" if cell["resident_blocks"] is not None else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Asks about every model, way and card that is not known yet, and writes the page.

    Args:
        arguments: of the command line; None for those of this process.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers' of its own names
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--cards", nargs="*", type=int, default=list(CARDS), help="GiB")
    parser.add_argument("--page", action="store_true", help="write the page from what is known, and ask nothing")
    given = parser.parse_args(arguments)
    results: dict[str, dict[str, Cell]] = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    asked = [] if given.page else [(model, way, gib) for model in given.models for way in WAYS for gib in given.cards]
    with tempfile.TemporaryDirectory() as folder:
        for model, way, gib in track(asked, "forecasting", console=Console(stderr=True)):
            row = results.setdefault(f"{model}, {way}", {})
            if str(gib) not in row:  # asked from the smallest card on; what is slow is kept as it comes
                row[str(gib)] = longest(model, way, gib, folder)
                RESULTS.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
