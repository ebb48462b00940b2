"""How long does training wait for a checkpoint, written at once and in the background?

    python -m benchmarks.saving [--model small] [--repeats 5]

A random Llama trains all its weights with AdamW: without saving, with checkpoints that are written at once, and with
`save_in_background`, in turns and in changing order, so that a machine that is busy with other work slows all alike.
Two figures: the *stall*, the seconds in which the step that saves stands still; and what is *lost* in all, the time of
the run beyond that of the run without saving, per checkpoint, steps that were slowed down by the writer and the wait at
the run's end included. `--model smollm2` has the sizes of SmolLM2-135M, whose checkpoints take 1.6 GB.

Writes `benchmarks/results/saving_MODEL.json`; exits with 1 if the background's stall is beyond 15 % or its loss beyond
40 % of what writing at once takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, PAD_ID, filled_tokenizer
from memsafe_rl import GRPOConfig, GRPOTrainer
from memsafe_rl.training.loop import TrainingLoop

SIZES: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "not": {"save_strategy": "no"},
    "at once": {"save_strategy": "steps", "save_in_background": False},
    "in the background": {"save_strategy": "steps", "save_in_background": True},
}
LIMITS = {"stall": 0.15, "lost": 0.40}


@dataclass
class Timed:
    """What a way of saving took.

    Args:
        seconds: of each run.
        stalls: seconds of each save that was not the run's last.
        stall_cpu: processor seconds of the training thread in them, which other work on the machine does not stretch.
    """

    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    stall_cpu: list[float] = field(default_factory=list)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times a run up to its last step, before the save that ends it; what is still being written then is waited for."""

    def __init__(self, trainer: GRPOTrainer, steps: int, timed: Timed) -> None:
        self._trainer, self._steps, self._timed = trainer, steps, timed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Starts."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Stops after the last step."""
        if state.global_step == self._steps:
            loop = self._trainer.loop
            loop.files.finish()
            self._timed.seconds.append(time.perf_counter() - self._started)


def make_model(size: str) -> LlamaForCausalLM:
    """Makes a random Llama, the same for the same size."""
    torch.manual_seed(0)
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True, max_position_embeddings=256, **ids))


def timed_run(size: str, way: str, steps: int, save_steps: int, completion: int, folder: Path, timed: Timed) -> None:
    """Trains once, and notes how long that and its saves took."""

    def stalling(loop: TrainingLoop, save: Callable[..., None], *, wait: bool = True) -> None:
        started, worked = time.perf_counter(), time.thread_time()
        save(loop, wait=wait)
        if not wait:
            timed.stalls.append(time.perf_counter() - started)
            timed.stall_cpu.append(time.thread_time() - worked)

    trainer = GRPOTrainer(
        make_model(size),
        lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            save_steps=save_steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=completion,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **WAYS[way],
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]}),
        processing_class=filled_tokenizer(SIZES[size]["vocab_size"]),
    )
    trainer.add_callback(Clock(trainer, steps, timed))
    with patch.object(TrainingLoop, "save_checkpoint", partialmethod(stalling, TrainingLoop.save_checkpoint)):
        trainer.train()
    shutil.rmtree(folder)


def compare(found: dict[str, Timed], saves: int) -> dict[str, float]:
    """Returns seconds per checkpoint, by neighbouring runs, and what the background takes of writing at once."""

    def lost(way: str) -> float:
        pairs = zip(found[way].seconds, found["not"].seconds, strict=True)
        return statistics.median(one - bare for one, bare in pairs) / saves

    stalls = {way: statistics.median(found[way].stalls) for way in WAYS if way != "not"}
    figures = {f"stall_seconds_{way}": seconds for way, seconds in stalls.items()}
    figures |= {f"stall_cpu_seconds_{way}": statistics.median(found[way].stall_cpu) for way in stalls}
    figures |= {f"lost_seconds_{way}": lost(way) for way in stalls}
    return figures | {
        "stall": stalls["in the background"] / stalls["at once"],
        "lost": lost("in the background") / lost("at once"),
    }


def main() -> None:
    """Times all ways of saving and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="small", help="its size (default: small)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of every way (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="of a run (default: 10)")
    parser.add_argument("--save-steps", type=int, default=4, help="steps between two checkpoints (default: 4)")
    parser.add_argument("--completion", type=int, default=16, help="tokens of a completion (default: 16)")
    parser.add_argument("--results", type=Path, help="(default: benchmarks/results/saving_MODEL.json)")
    given = parser.parse_args()
    if not given.steps % given.save_steps:
        parser.error("the last step must not save: nothing follows it that could go on meanwhile")
    torch.set_num_threads(1)
    found, order = {way: Timed() for way in WAYS}, random.Random(0)
    turns = [way for _ in range(given.repeats) for way in order.sample(list(WAYS), len(WAYS))]
    with tempfile.TemporaryDirectory() as place:
        run = partial(timed_run, given.model, steps=given.steps, save_steps=given.save_steps)
        for number, way in enumerate(track(turns, description="runs", console=Console(stderr=True))):
            run(way, completion=given.completion, folder=Path(place) / str(number), timed=found[way])
    figures = compare(found, given.steps // given.save_steps)
    beyond = [name for name, limit in LIMITS.items() if figures[name] > limit]
    Console().print({**figures, "limits": LIMITS, "beyond": beyond, "load": os.getloadavg()})
    path = given.results or Path(f"benchmarks/results/saving_{given.model}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": describe_machine(),
        "load": os.getloadavg(),
        "arguments": {name: value for name, value in vars(given).items() if name != "results"},
        "figures": figures,
        "limits": LIMITS,
        "runs": {way: vars(timed) for way, timed in found.items()},
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    if beyond:
        sys.exit(1)


if __name__ == "__main__":
    main()
