"""Checks and times everything on this machine's accelerator, in under eight minutes.

    python -m benchmarks.gpu_suite [--parts prove budget] [--rehearse]

Five parts, each in a process of its own, so that one that fails or hangs takes no other with it:

- prove: the gradient of one step under a lean plan, under the plain plan, and with refused allocations in it, for
  causal models and T5, GRPO and PPO, full and LoRA, in float32 and bfloat16;
- budget: whole runs under ever smaller memory budgets, with the same tokens and weights, and never above the budget;
- forecast: the peak forecast before the run beside the allocator's and the driver's figures, for networks of real size
  with random weights;
- rollout: tokens per second beside transformers' `generate`;
- step: seconds and peak of a rollout and its optimizer step beside TRL, where TRL is installed.

Writes ``benchmarks/results/gpu_suite.json`` with the device's name and versions after every part. `--rehearse` runs the
same code on the CPU with tiny networks and a simulated device, and writes nothing unless `--out` is given.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.capacity_sweep import NATURAL
from benchmarks.draws import keys_of, lengths_by_generate
from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, PAD_ID, filled_tokenizer, small_qwen3, small_t5
from memsafe_rl import (
    FixedPolicy,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RolloutPlan,
    SimulatedMemory,
    UpdatePlan,
    forecast_memory,
)
from memsafe_rl.accounting import host_memory
from memsafe_rl.memory.runtime.device_readings import driver_free_bytes
from memsafe_rl.memory.runtime.meters import MemoryMeter, meter_for
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.preflight.fake.families import config_for
from memsafe_rl.preflight.verify import verify_plan
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Phase, SamplingSettings

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results" / "gpu_suite.json"
LEAN = FixedPolicy(
    RolloutPlan(rows_in_flight=3, prefill_tokens=64, score_tokens=64),
    UpdatePlan(
        micro_batch_tokens=64, logprob_tile=16, checkpointing=True, offload_activations=True, park_optimizer=True
    ),
)
SHARES = (0.6, 0.3, 0.1)
"""Of what a run without plans holds above its state, what each budget leaves."""
SAME_WEIGHTS = 1e-3
"""Largest distance between the final weights of two runs in float32, over the way that they went."""
NEAR_PEAK, NEAR_DRIVER = 0.05, 0.08
"""Largest relative error of the forecast, against the allocator's figure and against the driver's."""


@dataclass(frozen=True)
class Case:
    """A run whose peak is forecast.

    Args:
        model: a name that the library knows.
        lora: rank of the adapter that is trained; None for all weights.
        group: completions a prompt, of which there are four.
        new_tokens: tokens of every completion.
    """

    model: str
    lora: int | None
    group: int = 8
    new_tokens: int = 512

    def __str__(self) -> str:
        what = "full" if self.lora is None else f"LoRA {self.lora}"
        return f"{self.model}, {what}, G={self.group}, {self.new_tokens} tokens"


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        rehearsal: whether it runs on the CPU, on a simulated device.
        width: of the small networks of `prove` and `budget`.
        vocab_size: of the small networks.
        new_tokens: longest completion of the small networks, in tokens.
        cases: of `forecast`.
        beside: the network of `rollout` and `step`, a name that the library knows.
        shrunk: whether the networks of `forecast`, `rollout` and `step` keep their family but not their size.
        rollout_tokens: tokens of every completion of `rollout` and `step`.
        prompt_tokens: of every prompt of `rollout`, `step` and `forecast`.
    """

    rehearsal: bool
    width: int
    vocab_size: int
    new_tokens: int
    cases: tuple[Case, ...]
    beside: str
    shrunk: bool
    rollout_tokens: int
    prompt_tokens: int


CARD = Size(
    rehearsal=False,
    width=512,
    vocab_size=32_000,
    new_tokens=128,
    cases=(
        Case("Qwen/Qwen3-0.6B", None),
        Case("Qwen/Qwen3-0.6B", 16),
        Case("Qwen/Qwen3-1.7B", 16, new_tokens=1024),
        Case("Qwen/Qwen3-4B", 16),
        Case("meta-llama/Llama-3.2-1B", None, group=4),
        Case("meta-llama/Llama-3.1-8B", 16, group=4),
    ),
    beside="Qwen/Qwen3-0.6B",
    shrunk=False,
    rollout_tokens=256,
    prompt_tokens=200,
)
REHEARSAL = Size(
    rehearsal=True,
    width=64,
    vocab_size=512,
    new_tokens=16,
    cases=(Case("Qwen/Qwen3-0.6B", None, 4, 12), Case("meta-llama/Llama-3.2-1B", 8, 4, 12)),
    beside="Qwen/Qwen3-0.6B",
    shrunk=True,
    rollout_tokens=12,
    prompt_tokens=24,
)


# ------------------------------------------------------------------ the device


def device_of(size: Size) -> torch.device:
    """Gives the device that is measured."""
    return torch.device("cpu") if size.rehearsal else torch.accelerator.current_accelerator() or torch.device("cpu")


@contextmanager
def counted(size: Size) -> Iterator[MemoryMeter]:
    """Counts what is held on the device; the meter's peak begins here."""
    gc.collect()
    if size.rehearsal:
        with SimulatedMemory(16 * 2**30):
            yield meter_for(device_of(size))
        return
    meter = meter_for(device_of(size))
    torch.accelerator.memory.empty_cache()
    meter.reset_peak()
    yield meter


def clock(size: Size) -> float:
    """Reads the clock when the device has done all that it was given, in seconds."""
    if not size.rehearsal:
        torch.accelerator.synchronize()
    return time.perf_counter()


def real_config(name: str, size: Size) -> PretrainedConfig:
    """Gives a network's config; of a rehearsal, the same family in small."""
    config = config_for(name)
    if size.shrunk:
        small = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config.update({**small, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.update({"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None})
    return config


def random_network(config: PretrainedConfig, size: Size) -> Any:
    """Makes a network with random weights where they are wanted, in the type that they are trained in."""
    torch.manual_seed(0)
    dtype = torch.float32 if size.rehearsal else torch.bfloat16
    with torch.device(device_of(size)):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def settings(size: Size, folder: str, **more: Any) -> dict[str, Any]:
    """Gives settings that every run has."""
    return {
        "output_dir": folder,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": size.rehearsal,
        "optim": "adamw_torch_fused",
        **more,
    }


def prompts(count: int, tokens: int) -> Dataset:
    """Gives prompts of one byte a token."""
    return Dataset.from_dict({"prompt": [f"{index:03d}".ljust(tokens, ".") for index in range(count)]})


def own_peak(trainer: Any) -> int:
    """Gives the most bytes that a run of ours held in any step; its phases restart the meter's peak."""
    return int(max(step["memory/peak_bytes"] for step in trainer.history))


class Spread:
    """Pays every completion by its own ids, and keeps them."""

    __name__ = "spread"

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Rewards completions."""
        self.seen += [list(map(int, ids)) for ids in completion_ids]
        return [float(sum((7919 * int(token)) % 1009 for token in ids) % 997) / 997 for ids in completion_ids]


# ------------------------------------------------------------------ the parts


def prove(size: Size) -> Record:
    """Compares the gradients of a step under plans, and after failures."""
    shape = {"hidden": size.width, "layers": 4, "head_dim": 16 if size.rehearsal else 64}
    kinds: dict[str, tuple[type[GRPOTrainer | PPOTrainer], Callable[..., Any], bool, bool]] = {
        "causal, full, float32": (GRPOTrainer, small_qwen3, False, False),
        "causal, LoRA, float32": (GRPOTrainer, small_qwen3, True, False),
        "T5, full, float32": (GRPOTrainer, small_t5, False, False),
        "PPO, full, float32": (PPOTrainer, small_qwen3, False, False),
        "causal, full, bfloat16": (GRPOTrainer, small_qwen3, False, True),
    }
    found: Record = {}
    for name, (trainer_class, network, lora, half) in kinds.items():
        with tempfile.TemporaryDirectory() as folder, counted(size):
            config_class = PPOConfig if trainer_class is PPOTrainer else GRPOConfig
            config = config_class(
                **settings(size, folder, bf16=half),
                per_device_train_batch_size=8,
                num_generations=4 if trainer_class is GRPOTrainer else 1,
                max_completion_length=size.new_tokens,
                beta=0.02,
                max_steps=1,
            )
            trainer = trainer_class(
                network(size.vocab_size, **shape),
                Spread(),
                args=config,
                train_dataset=prompts(16, 12),
                processing_class=filled_tokenizer(size.vocab_size),
                peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
                memory_policy=LEAN,
            )
            proof = verify_plan(trainer.loop)
            found[name] = {
                "passed": proof.passed,
                "difference": proof.difference,
                "tolerance": proof.tolerance,
                "plain_peak_bytes": proof.plain.peak_bytes,
                "lean_peak_bytes": proof.chosen.peak_bytes,
                "failures": proof.failing.failures,
            }
            del trainer
    return found


def budget(size: Size) -> Record:
    """Trains under ever smaller budgets and compares with the run that had all the room."""
    free = _trained_under(None, size)
    state, peak = free["state_bytes"], free["peak_bytes"]
    found: Record = {"without": _told(free, free)}
    for share in SHARES:
        allowed = int(state + share * (peak - state))
        run = _trained_under(allowed, size)
        found[f"{share:.0%} above the state"] = {"budget_bytes": allowed, **_told(run, free)}
        within = run["peak_bytes"] <= allowed
        found[f"{share:.0%} above the state"]["passed"] = within and _same(run, free)
    found["without"]["passed"] = True
    return found


def _trained_under(allowed: int | None, size: Size) -> Record:
    with tempfile.TemporaryDirectory() as folder, counted(size) as meter:
        reward = Spread()
        config = GRPOConfig(
            **settings(size, folder, bf16=False),
            per_device_train_batch_size=32,
            num_generations=8,
            num_iterations=2,
            max_completion_length=size.new_tokens,
            learning_rate=1e-4,
            beta=0.02,
            max_steps=4,
            memory_budget="auto" if allowed is None else allowed,
        )
        network = small_qwen3(size.vocab_size, hidden=size.width, layers=4, head_dim=16 if size.rehearsal else 64)
        start = _flat(network)
        trainer = GRPOTrainer(
            network,
            reward,
            args=config,
            train_dataset=prompts(32, 12),
            processing_class=filled_tokenizer(size.vocab_size),
            memory_policy=NATURAL if allowed is None else None,
        )
        before = clock(size)
        trainer.train()
        seconds = clock(size) - before
        peak, held = own_peak(trainer), meter.live_bytes()
        moved = _flat(trainer.model) - start
        gradients = sum(weight.nbytes for weight in trainer.model.parameters() if weight.requires_grad)
        failed = [event for event in trainer.memory_events if event["event"] in ("retry", "failure", "fallback")]
        return {
            "seconds": seconds,
            "peak_bytes": peak,
            "state_bytes": held + gradients,
            "failures": len(failed),
            "tokens": reward.seen,
            "moved": moved,
        }


def _flat(network: Any) -> Tensor:
    """Copies all weights to host memory."""
    with torch.no_grad(), host_memory():
        return torch.cat([weight.detach().cpu().flatten().double() for weight in network.parameters()])


def _told(run: Record, free: Record) -> Record:
    return {
        "peak_bytes": run["peak_bytes"],
        "state_bytes": run["state_bytes"],
        "seconds": run["seconds"],
        "failures": run["failures"],
        "same_tokens": run["tokens"] == free["tokens"],
        "weights_apart": _apart(run, free),
    }


def _apart(run: Record, free: Record) -> float:
    return float((run["moved"] - free["moved"]).norm() / free["moved"].norm())


def _same(run: Record, free: Record) -> bool:
    return run["tokens"] == free["tokens"] and _apart(run, free) <= SAME_WEIGHTS


def forecast(size: Size) -> Record:
    """Forecasts runs, makes them with random weights and completions of full length, and compares the peaks."""
    return {str(case): _foreseen(case, size) for case in size.cases}


def _foreseen(case: Case, size: Size) -> Record:
    config = real_config(case.model, size)
    tokenizer = filled_tokenizer(config.vocab_size)
    rows = 4 * case.group
    with tempfile.TemporaryDirectory() as folder, counted(size) as meter:
        config.save_pretrained(folder)
        args = GRPOConfig(
            **settings(size, folder, bf16=not size.rehearsal),
            per_device_train_batch_size=rows,
            num_generations=case.group,
            max_completion_length=case.new_tokens,
            generation_kwargs={"min_new_tokens": case.new_tokens},
            max_steps=2,
        )
        given: Record = {
            "train_dataset": prompts(16, size.prompt_tokens),
            "processing_class": tokenizer,
            "peft_config": None if case.lora is None else LoraConfig(r=case.lora, target_modules="all-linear"),
        }
        device = device_of(size)
        told = forecast_memory(
            folder,
            args,
            device_bytes=meter.total_bytes(),
            device=device.type,
            **given,
        )
        driver_before = driver_free_bytes(meter, device)
        trainer = GRPOTrainer(random_network(config, size), Spread(), args=args, **given)
        began = clock(size)
        trainer.train()
        seconds = clock(size) - began
        held, driver = own_peak(trainer), driver_before - driver_free_bytes(meter, device)
        foreseen = max(peak for phase, peak in told.phase_bytes.items() if phase is not Phase.LOAD)
        failed = [event for event in trainer.memory_events if event["event"] in ("retry", "failure", "fallback")]
        del trainer
    error = foreseen / held - 1
    driver_error = None if size.rehearsal else foreseen / driver - 1
    near = abs(error) <= NEAR_PEAK and (driver_error is None or abs(driver_error) <= NEAR_DRIVER)
    return {
        "forecast_bytes": foreseen,
        "held_bytes": held,
        "driver_bytes": None if size.rehearsal else driver,
        "error": error,
        "driver_error": driver_error,
        "forecast_seconds": told.seconds,
        "seconds": seconds,
        "failures": len(failed),
        "passed": near,
    }


def rollout(size: Size) -> Record:
    """Draws a rollout of completions of full length here and with transformers' `generate`."""
    config = real_config(size.beside, size)
    found: Record = {}
    dice = torch.Generator().manual_seed(1)
    asked = [torch.randint(2, config.vocab_size, (size.prompt_tokens,), generator=dice) for _ in range(4)]
    with counted(size) as meter:
        network = random_network(config, size).eval().requires_grad_(False)
        network.generation_config.eos_token_id = None
        network.config.eos_token_id = None
        for name, draw in (("memsafe_rl", _drawn_here), ("generate", _drawn_by_generate)):
            draw(network, asked, min(8, size.rollout_tokens), 0)
            held = meter.live_bytes()
            meter.reset_peak()
            began = clock(size)
            tokens = draw(network, asked, size.rollout_tokens, 1)
            seconds = clock(size) - began
            found[name] = {"tokens_per_second": tokens / seconds, "above_weights_bytes": meter.peak_bytes() - held}
        del network
    ours, theirs = found["memsafe_rl"], found["generate"]
    found["ratio"] = {
        "tokens_per_second": ours["tokens_per_second"] / theirs["tokens_per_second"],
        "above_weights_bytes": ours["above_weights_bytes"] / max(1, theirs["above_weights_bytes"]),
    }
    return found


_GROUP = 8


def _drawn_here(network: Any, asked: Sequence[Tensor], longest: int, seed: int) -> int:
    adapter = adapter_for(network, pad_token_id=PAD_ID)
    drawn = generate(
        adapter,
        asked,
        keys_of(len(asked), _GROUP, seed=seed),
        SamplingSettings(max_new_tokens=longest, eos_token_ids=()),
        attempt=under(RolloutPlan(rows_in_flight=len(asked) * _GROUP)),
    )
    return sum(len(completion.ids) for completion in drawn)


def _drawn_by_generate(network: Any, asked: Sequence[Tensor], longest: int, seed: int) -> int:
    return sum(lengths_by_generate(network, asked, _GROUP, longest, (), PAD_ID, seed))


def step(size: Size) -> Record:
    """Times a rollout and its optimizer step here and in TRL, LoRA and all weights."""
    found: Record = {}
    sides = ["memsafe_rl"] + (["TRL"] if importlib.util.find_spec("trl") else [])
    for lora in (True, False):
        for side in sides:
            found[f"{side}, {'LoRA' if lora else 'full'}"] = _stepped(side, lora, size)
    return found


def _stepped(side: str, lora: bool, size: Size) -> Record:
    config = real_config(size.beside, size)
    rows, steps = 4 * _GROUP, 3
    with tempfile.TemporaryDirectory() as folder, counted(size) as meter:
        shared = settings(
            size,
            folder,
            bf16=not size.rehearsal,
            num_generations=_GROUP,
            max_completion_length=size.rollout_tokens,
            max_steps=steps,
            logging_steps=100,
            generation_kwargs={"min_new_tokens": size.rollout_tokens},
        )
        given: Record = {
            "train_dataset": prompts(32, size.prompt_tokens),
            "processing_class": filled_tokenizer(config.vocab_size),
            "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            if lora
            else None,
        }
        ends: list[float] = []
        reward = Spread()

        def timed(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
            ends.append(clock(size))
            return reward(completion_ids, **others)

        network = random_network(config, size)
        if side == "TRL":
            import trl  # may be absent on the machine that is measured

            args = trl.GRPOConfig(**shared, per_device_train_batch_size=8, gradient_accumulation_steps=rows // 8)
            trainer: Any = trl.GRPOTrainer(network, timed, args=args, **given)
        else:
            own = GRPOConfig(**shared, per_device_train_batch_size=rows)
            trainer = GRPOTrainer(network, timed, args=own, **given)
        meter.reset_peak()
        trainer.train()
        peak = meter.peak_bytes() if side == "TRL" else own_peak(trainer)
        del trainer, network
    # From one rollout's rewards to the next one's lies one update and one rollout.
    between = [after - before for before, after in itertools.pairwise(ends)]
    return {"seconds_per_step": min(between), "peak_bytes": peak, "steps": len(ends)}


PARTS: dict[str, tuple[Callable[[Size], Record], int]] = {
    "prove": (prove, 90),
    "budget": (budget, 90),
    "forecast": (forecast, 200),
    "rollout": (rollout, 60),
    "step": (step, 100),
}
"""Each part, and the seconds after which it is given up; together they stay below nine minutes, and usually six."""


# ------------------------------------------------------------------ all of it


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, shows what they found, and writes it.

    Args:
        arguments: of the command line; None for those of this process.

    Returns:
        0 where every check passed, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny networks on the CPU")
    parser.add_argument("--out", type=Path, help=f"where the figures go; {RESULTS} where a card is measured")
    parser.add_argument("--alone", choices=list(PARTS), help=argparse.SUPPRESS)  # a part in a process of its own
    given = parser.parse_args(arguments)
    size = REHEARSAL if given.rehearse else CARD
    if not given.rehearse and not torch.accelerator.is_available():
        parser.error("there is no accelerator here; --rehearse runs the same code on the CPU with tiny networks")
    if given.alone:
        print(json.dumps(PARTS[given.alone][0](size)))
        return 0
    out = given.out or (None if given.rehearse else RESULTS)
    console, results = Console(width=140), {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(given.parts))
        for name in given.parts:
            progress.update(bar, description=name)
            results[name] = _alone(name, given.rehearse)
            progress.advance(bar)
            if out is not None:
                out.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")
    for name, found in results.items():
        console.print(_table(name, found))
    passed = all(_passed(found) for found in results.values())
    console.print("every check passed" if passed else "SOMETHING FAILED: see the rows above")
    return 0 if passed else 1


def _alone(name: str, rehearse: bool) -> Record:
    """Runs a part in a process of its own; says how it failed where it did."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--alone", name, *(["--rehearse"] if rehearse else [])]
    began = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PARTS[name][1], check=False)
    except subprocess.TimeoutExpired as late:
        last = late.stderr or b""
        return {"error": {"passed": False, "told": f"given up after {PARTS[name][1]} s: {str(last)[-400:]}"}}
    if ended.returncode:
        return {"error": {"passed": False, "told": ended.stderr[-2000:]}}
    found: Record = json.loads(ended.stdout.splitlines()[-1])
    found["whole part"] = {"seconds": time.perf_counter() - began}
    return found


def _passed(found: Record) -> bool:
    return all(row.get("passed", True) for row in found.values())


def _table(name: str, found: Record) -> Table:
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    table = Table(name, *(column.replace("_", " ") for column in columns))
    for row, values in found.items():
        table.add_row(row, *(_shown(column, values.get(column)) for column in columns))
    return table


def _shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if column.endswith("_bytes") and abs(value) > 1000:
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
