"""How many operators does a decoded token cost, and an update, here and elsewhere?

    python -m benchmarks.launches [--rows 8] [--tokens 16] [--quick]

Writes ``benchmarks/results/launches.json``. On a card each operator is a launch of about 5 microseconds, whatever the
network's width, so narrow random networks of full depth tell how many there are: a Qwen3 of 28 layers, a T5 of 12.
Operators are counted below autograd, where PyTorch hands them to a device's kernels; views and allocations are left
out, and a few operators are more than one kernel on a device (``logsumexp``), on either side. A token's share is the
difference between a longer and a shorter rollout of the same rows. Uploads are host values made into tensors on the
device, read-backs are values of tensors asked for; each of the latter waits for the device. All of it runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C import DispatchKey
from torch._inductor.codecache import PyCodeCache
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memsafe_rl
from benchmarks.draws import keys_of
from benchmarks.machine import describe_machine
from benchmarks.small import PAD_ID, filled_tokenizer, small_qwen3, small_t5
from memsafe_rl import FixedPolicy, RolloutPlan, UpdatePlan
from memsafe_rl.accounting import listen, stop_listening
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.rollout.native.sequences import Drawer, Streams, begin_sequences
from memsafe_rl.types import Component, Phase, SamplingSettings

RESULTS = Path(__file__).parent / "results" / "launches.json"
Record = dict[str, Any]
SETTLED = 4
"""Tokens of the shorter rollout, behind which nothing is made for the first time."""

NO_KERNELS = frozenset(
    """_local_scalar_dense _reshape_alias _unsafe_view alias as_strided detach device diagonal empty empty_like
    empty_strided expand flatten is_same_size lift_fresh new_empty new_empty_strided permute promote_types reshape
    select slice split split_with_sizes squeeze sym_size t transpose unbind unflatten unfold unsqueeze view""".split()  # noqa: SIM905
)
"""Operators that only look at memory, or reserve it."""

READS = frozenset(["cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"])
UPLOADS = frozenset(("tensor", "as_tensor"))


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators that run kernels.

    Attributes:
        counts: how often each was called, by name.
        counting: whether calls count.
    """

    def __init__(self, counting: bool = True) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.counting = counting

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Counts what compiled code calls too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one call."""
        space, name = func._schema.name.split("::")
        if space == "memsafe_rl":  # of this library's own operators, what they call counts
            with self:
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        if self.counting and name not in NO_KERNELS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Traffic(TorchFunctionMode):  # type: ignore[misc]
    """Counts values that cross between host and device, by what the code says of either: on a CPU both are one.

    A listener of the library's marks, by which it says what stands for host memory.

    Attributes:
        uploads: host values made into tensors on the device, or taken there.
        reads: questions for values of tensors on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads = self.reads = 0
        self._on_host = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one call."""
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        was_on_host = bool(getattr(first, "is_on_host", False))
        result = func(*args, **(kwargs or {}))
        reads = name in READS and first is not None
        if reads and not was_on_host:
            self.reads += 1
        elif not self._on_host and (name in UPLOADS or (name == "to" and was_on_host)):
            self.uploads += 1
        if isinstance(result, Tensor) and (self._on_host or reads or was_on_host):
            result.is_on_host = self._on_host or reads or name != "to"  # type: ignore[attr-defined]
        return result

    def mark_host(self, on_host: bool) -> bool:
        """Notes whether what is made from now on lies on the host."""
        before, self._on_host = self._on_host, on_host
        return before

    def is_on_host(self, tensor: Tensor) -> bool:
        """Tells where a tensor lies."""
        return bool(getattr(tensor, "is_on_host", False))

    def mark_component(self, component: Component | None) -> Component | None:
        """Does not care what bytes are for."""
        return component

    def enter_phase(self, phase: Phase) -> None:
        """Does not care for phases."""

    def leave_phase(self) -> None:
        """Does not care for phases."""

    def claim(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Does not care what bytes are for."""

    def hold(self, component: Component, tensors: Iterable[Tensor]) -> None:
        """Does not care what bytes are for."""


@contextmanager
def counted() -> Iterator[tuple[Operators, Traffic]]:
    """Counts what runs inside.

    Yields:
        The counts.
    """
    operators, traffic = Operators(), Traffic()
    listen(traffic, traffic)
    try:
        with traffic, operators:
            yield operators, traffic
    finally:
        stop_listening(traffic, traffic)


# ------------------------------------------------------------------ decoding


def prompts_of(count: int) -> list[Tensor]:
    """Makes prompts of 24 tokens, alike for either side: padding would cost `generate` more.

    Args:
        count: how many.

    Returns:
        Token ids, (24,) int64 each.
    """
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(2, 4000, (24,), generator=dice) for _ in range(count)]


def ours(
    adapter: Any,
    prompts: Sequence[Tensor],
    group: int,
    tokens: int,
    plan: RolloutPlan = RolloutPlan(),  # noqa: B008
) -> None:
    """Samples with this library's loop; nothing ends a completion before its time.

    Args:
        adapter: of the network.
        prompts: token ids.
        group: completions of each.
        tokens: of each completion.
        plan: of the rollout.
    """
    prompts = [prompt.clone() for prompt in prompts]  # on the device in each call anew
    generate(adapter, prompts, keys_of(len(prompts), group), SamplingSettings(tokens, ()), under(plan))


def theirs(model: Any, prompts: Sequence[Tensor], group: int, tokens: int) -> None:
    """Samples with transformers' `generate`, attention fused.

    Args:
        model: the network.
        prompts: token ids.
        group: completions of each.
        tokens: of each completion.
    """
    ids_PL = torch.stack(list(prompts)).to(model.device)
    with torch.no_grad():
        model.generate(
            ids_PL,
            attention_mask=torch.ones_like(ids_PL),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            eos_token_id=model.config.vocab_size,  # looked for, as ever, and never drawn
            num_return_sequences=group,
            pad_token_id=PAD_ID,
        )


def per_token(play: Callable[[int], None], tokens: int) -> Record:
    """Counts what one more token of all rows costs.

    Args:
        play: samples completions of so many tokens.
        tokens: over which the cost is averaged.

    Returns:
        Operators, uploads and read-backs a token, and operators by name.
    """
    found = []
    play(SETTLED)
    for length in (SETTLED, SETTLED + tokens):
        with counted() as (operators, traffic):
            play(length)
        found.append((operators.counts, traffic.uploads, traffic.reads))
    (short, short_up, short_reads), (long, long_up, long_reads) = found
    more = {name: (long[name] - short[name]) / tokens for name in sorted(long) if long[name] != short[name]}
    return {
        "operators": sum(more.values()),
        "uploads": (long_up - short_up) / tokens,
        "read_backs": (long_reads - short_reads) / tokens,
        "by_name": more,
    }


def seconds_per_token(plays: dict[str, Callable[[int], None]], tokens: int, turns: int) -> dict[str, float]:
    """Times one more token of all rows, the sides taking turns.

    Args:
        plays: each samples completions of so many tokens.
        tokens: over which the cost is averaged.
        turns: of each side; the fastest counts, for others only add what the machine did beside.

    Returns:
        Seconds by side.
    """
    best: dict[str, dict[int, float]] = {name: {} for name in plays}
    for _ in range(turns):
        for name, play in plays.items():
            for length in (SETTLED, SETTLED + tokens):
                began = time.perf_counter()
                play(length)
                seconds = time.perf_counter() - began
                best[name][length] = min(seconds, best[name].get(length, seconds))
    return {name: (found[SETTLED + tokens] - found[SETTLED]) / tokens for name, found in best.items()}


def sampler_operators(rows: int, vocab: int, tokens: int) -> float:
    """Counts the operators of drawing alone, logits given.

    Args:
        rows: drawn together.
        vocab: tokens to draw from.
        tokens: draws over which what is made ahead is averaged; whole turns of it.

    Returns:
        Operators a draw.
    """
    settings = SamplingSettings(tokens + 1, ())
    sequences = begin_sequences(prompts_of(1), keys_of(1, rows), settings, None, [tokens + 1])
    draw, streams, logits_BV = Drawer(settings), Streams.of(sequences, torch.device("cpu")), torch.randn(rows, vocab)
    with Operators() as operators:
        for _ in range(tokens):
            draw(logits_BV, streams.keys_B4[:, 0], streams.noise(vocab))
            streams.advance()
    return sum(operators.counts.values()) / tokens


def decoding(model: Any, rows: int, tokens: int, turns: int) -> Record:
    """Measures both sides on one network, eagerly.

    Args:
        model: the network.
        rows: completions, four of a prompt.
        tokens: over which costs are averaged.
        turns: of the clock.

    Returns:
        Figures by side.
    """
    adapter, prompts, group = _rows(model, rows)
    plays = {
        "memsafe_rl": lambda length: ours(adapter, prompts, group, length),
        "generate": lambda length: theirs(model, prompts, group, length),
    }
    found: Record = {name: per_token(play, tokens) for name, play in plays.items()}
    for name, seconds in seconds_per_token(plays, tokens, turns).items():
        found[name]["ms"] = 1000 * seconds
    mine, other = found["memsafe_rl"], found["generate"]
    found["our_share"] = {name: mine[name] / other[name] for name in ("operators", "ms")}
    found["sampler_operators"] = sampler_operators(rows, model.config.vocab_size, 4 * tokens)
    return found


def _rows(model: Any, rows: int) -> tuple[Any, list[Tensor], int]:
    """Returns the network's adapter, prompts, and completions of each."""
    group = min(rows, 4)
    adapter = adapter_for(model, pad_token_id=PAD_ID)
    check_adapter(adapter)
    return adapter, prompts_of(rows // group), group


# ------------------------------------------------------------------ torch.compile


def compiled(model: Any, rows: int, tokens: int, turns: int) -> Record:
    """Measures compiled steps beside eager ones.

    Args:
        model: the network.
        rows: completions, four of a prompt.
        tokens: over which costs are averaged.
        turns: of the clock.

    Returns:
        Kernels that inductor made and calls outside of its output, a token; what its output calls in libraries, which
        products of matrices are; the seconds of compiling, and of a token on either side.
    """
    adapter, prompts, group = _rows(model, rows)
    plan = RolloutPlan(compile="default")
    plays = {
        "eager": lambda length: ours(adapter, prompts, group, length),
        "compiled": lambda length: ours(adapter, prompts, group, length, plan),
    }
    known, began = {module.__file__ for module in PyCodeCache.modules}, sum(os.times()[:4])
    plays["compiled"](SETTLED)
    cpu_seconds = sum(os.times()[:4]) - began
    made = [Path(module.__file__).read_text() for module in PyCodeCache.modules if module.__file__ not in known]
    calls = [line for text in made for line in text.split("def call(")[-1].splitlines()]
    kernels = sum(bool(re.match(r"\s+cpp_fused\w*\(", line)) for line in calls)
    inside = sum("extern_kernels." in line for line in calls)
    operators = per_token(plays["compiled"], tokens)["operators"]
    seconds = seconds_per_token(plays, tokens, turns)
    return {
        "generated_kernels": kernels,
        "library_calls": inside,
        "calls_outside": operators - inside,
        "launches": kernels + operators - inside,
        "compiling_cpu_s": cpu_seconds,
        "forms": len(made),
        **{f"{side}_ms": 1000 * value for side, value in seconds.items()},
        "speedup": seconds["eager"] / seconds["compiled"],
    }


# ------------------------------------------------------------------ updates


def update_operators(side: str, model: Any, rows: int) -> Record:
    """Counts the operators of one update micro-batch: forward, loss and backward, without the optimizer.

    Args:
        side: "memsafe_rl" or "TRL".
        model: the network.
        rows: completions of the micro-batch, four of a prompt.

    Returns:
        Operators.
    """
    common: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 32,
        "max_steps": 1,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    data = Dataset.from_dict({"prompt": [chr(97 + index) * 24 for index in range(8)]})
    operators = Operators(counting=False)
    with tempfile.TemporaryDirectory() as folder, operators:
        if side == "TRL":
            config: Any = trl.GRPOConfig(output_dir=folder, **common)
            parts = {"args": config, "train_dataset": data, "processing_class": filled_tokenizer(4096)}
            trainer: Any = trl.GRPOTrainer(model, _spread, **parts)
            _count_in(operators, trainer, "compute_loss")
            _count_in(operators, trainer.accelerator, "backward")
        else:
            config = memsafe_rl.GRPOConfig(output_dir=folder, **common)
            parts = {"args": config, "train_dataset": data, "processing_class": filled_tokenizer(4096)}
            plans = FixedPolicy(RolloutPlan(), UpdatePlan(micro_batch_tokens=1 << 20))
            trainer = memsafe_rl.GRPOTrainer(model, _spread, memory_policy=plans, **parts)
            updates = _InUpdates(operators)
            listen(updates, updates)
        trainer.train()
    return {"operators": sum(operators.counts.values()), "by_name": dict(sorted(operators.counts.items()))}


class _InUpdates(Traffic):
    """Has operators count in updates alone."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators, self._phases = operators, [False]

    def enter_phase(self, phase: Phase) -> None:
        """Counts in updates."""
        self._phases.append(phase is Phase.UPDATE)
        self._operators.counting = self._phases[-1]

    def leave_phase(self) -> None:
        """Counts as it did before."""
        self._phases.pop()
        self._operators.counting = self._phases[-1]


def _count_in(operators: Operators, owner: Any, name: str) -> None:
    """Counts in a method of another library."""
    method = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        operators.counting = True
        try:
            return method(*args, **kwargs)
        finally:
            operators.counting = False

    setattr(owner, name, run)


def _spread(completions: Sequence[Any], **_: Any) -> list[float]:
    """Rewards rows by their place, so that no advantage is 0."""
    return [float(place % 7) for place, _ in enumerate(completions)]


# ------------------------------------------------------------------ report


def networks(layers: int | None = None) -> dict[str, Callable[..., Any]]:
    """Returns the networks, by name.

    Args:
        layers: blocks; None for as many as the models have that they stand for.

    Returns:
        Functions that make one of a vocabulary.
    """
    return {
        "qwen3, 28 layers": partial(small_qwen3, layers=layers or 28),
        "t5, 12 + 12 layers": partial(small_t5, layers=layers or 12),
    }


VOCABULARIES = {"qwen3, 28 layers": 151_936, "t5, 12 + 12 layers": 32_128}


def show(results: Record) -> None:
    """Prints a table."""
    table = Table(title="A decoded token of all rows")
    for column in ("network", "side", "operators", "uploads", "read-backs", "ms on this CPU"):
        table.add_column(column, justify="left" if column in ("network", "side") else "right")
    for name, found in results["decoding"].items():
        for side in ("memsafe_rl", "generate"):
            entry = found[side]
            counts = [f"{entry[key]:.1f}" for key in ("operators", "uploads", "read_backs", "ms")]
            table.add_row(name, side, *counts)
        share = found["our_share"]
        table.add_row(name, "our share", f"{share['operators']:.3f}", "", "", f"{share['ms']:.2f}")
        table.add_row(name, "our sampler", f"{found['sampler_operators']:.1f}", "", "", "")
        entry = found["compiled"]
        table.add_row(name, "compiled", f"{entry['launches']:.1f}", "", "", f"{entry['compiled_ms']:.1f}")
        table.add_row(name, "its share", f"{entry['share']:.3f}", "", "", f"{1 / entry['speedup']:.2f}")
    for name, sides in results["update"].items():
        for side, entry in sides.items():
            table.add_row(name, f"{side}, an update", f"{entry['operators']}", "", "", "")
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> Record:
    """Runs the benchmark from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Figures.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="completions decoded together, four of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens over which costs are averaged")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side on the clock")
    parser.add_argument("--quick", action="store_true", help="two layers, nothing written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    layers = 2 if options.quick else None
    results: Record = {"decoding": {}, "update": {}}
    for name, build in networks(layers).items():
        model = build(VOCABULARIES[name]).eval()
        turns = 1 if options.quick else options.turns
        found = results["decoding"][name] = decoding(model, options.rows, options.tokens, turns)
        found["compiled"] = compiled(model, options.rows, options.tokens, turns)
        found["compiled"]["share"] = found["compiled"]["launches"] / found["generate"]["operators"]
        sides = ("memsafe_rl", "TRL") if name.startswith("qwen3") else ("memsafe_rl",)  # TRL has no encoder-decoders
        results["update"][name] = {side: update_operators(side, build(4096), options.rows) for side in sides}
    show(results)
    if not options.quick:
        written = {"machine": describe_machine(), "rows": options.rows, "tokens": options.tokens, **results}
        options.out.write_text(json.dumps(written, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
