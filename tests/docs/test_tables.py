"""Holds tables of the pages to the result files that they say they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import pytest

from tests.docs.reader import ROOT

NUMBER = r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
MB, MIB = 1e6, 2**20
Row = tuple[str, list[float]]


def table_behind(page: str, text: str) -> list[list[str]]:
    """Gives the rows of the first table behind a text, without its head."""
    lines = (ROOT / page).read_text().partition(text)[2].splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def agrees(shown: str, value: float) -> bool:
    """Whether a number is another one, rounded to the digits it shows."""
    shown = shown.replace(",", "")
    mantissa, _, power = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    return abs(float(shown) - value) <= 0.501 * 10.0 ** (int(power or 0) - digits)


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def forecast_error() -> list[Row]:
    def row(name: str, one: Any) -> Row:
        errors = one["errors"]
        worst = max(abs(error) for phase, error in errors.items() if phase != "peak")
        shares = [100 * error for error in (errors["peak"], errors["rollout"], errors["update"], worst)]
        return name, [one["held_peak_bytes"] / MB, *shares, one["forecast_seconds"]]

    return [row(name, one) for name, one in results("forecast_error")["results"].items()]


def step() -> list[Row]:
    names = {"ragged, LoRA": "ragged-lora", "even, LoRA": "even-lora"}
    names |= {"ragged, full": "ragged-full", "even, full": "even-full", "SmolLM2-135M, LoRA": "smollm2"}

    def row(name: str, sides: Any) -> Row:
        three = [sides[side] for side in ("memsafe_rl", "TRL, defaults", "TRL, fast")]
        time, peak = ([side[key] for side in three] for key in ("cpu_ms_per_token", "peak_bytes"))
        measured = [x for pair in zip(time, [size / MB for size in peak], strict=True) for x in pair]
        return name, [*measured, time[0] / time[1], time[0] / time[2], peak[0] / peak[1], peak[0] / peak[2]]

    return [row(name, results("step")["results"][key]["sides"]) for name, key in names.items()]


def rollout() -> list[Row]:
    found = []
    names = {"Qwen3": "qwen3", "T5": "t5", "Gemma-3": "gemma3", "GPT-2": "gpt2", "Qwen3-MoE": "qwen3-moe"}
    for name, key in names.items():
        for case, engines in results("rollout")["results"][key].items():
            runs = [engines[one] for one in ("memsafe_rl", "generate", "continuous batching") if one in engines]
            time, peak = ([one.get(key) for one in runs] for key in ("cpu_ms_per_token", "peak_bytes"))
            time, peak = ([x for x in row if x is not None] for row in (time, peak))
            measured = [x for pair in zip(time, [size / MB for size in peak], strict=True) for x in pair]
            beside = [other / time[0] for other in time[1:]] + [peak[0] / other for other in peak[1:]]
            completions, length, kind = case.split("-")
            found.append((f"{name}, {completions} {length}, {kind}", [*measured, *beside]))
    return found


def capacity() -> list[Row]:
    found: dict[str, list[float]] = {}
    for kind in ("full", "lora"):
        for one in results("capacity_sweep")[kind]["rows"]:
            off = [one["weights_off"]] if one["finished"] else []
            sizes = [one["capacity_bytes"] / MIB, one["peak_bytes"] / MIB]
            found.setdefault(one["share"].replace("%", " %"), []).extend([*sizes, *off, one["failures"]])
    return [(share, found[share]) for share in ("100 %", "40 %", "20 %", "10 %", "5 %", "2 %")]


def sharded() -> list[Row]:
    cases = {"tied head": "tied head", "untied head": "untied head", "LoRA of rank 16": "LoRA"}
    cases |= {"LoRA of rank 16 on 4 bits, scales in float32": "LoRA on 4 bits", "8 blocks": "many blocks"}
    cases |= {"with a reference copy": "reference", "activations kept": "activations kept", "T5 of 3 + 3 blocks": "T5"}
    cases |= {name: name for name in ("T5, LoRA", "T5, activations kept")}

    def off(one: Any, phase: str) -> float:
        return 100 * float(one["forecast_bytes"][phase] / one["held_bytes"][phase] - 1)

    found = []
    for name, case in cases.items():
        for rank in results("sharded_forecast")["ranks"]:
            one, late = rank[case], rank[f"{case}, added up once a step"]
            phases = [
                phase for phase in ("load", "rollout", "score", "update", "optimizer") if phase in one["forecast_bytes"]
            ]
            errors = [off(one, phase) for phase in phases]
            peaks = [size["held_peak_bytes"] / MB for size in (one, late)]
            found.append((name, [peaks[0], *errors, peaks[1], off(late, "update")]))
    return found


def sharded_storm() -> list[Row]:
    names = {"all weights": "sharded", "LoRA": "sharded lora", "T5 in float64": "sharded t5"}
    names |= {"all weights, gradients added up once a step": "sharded, once a step"}
    names |= {"all weights, a checkpoint after every step": "sharded, saving"}
    columns = ("leaner_plans", "largest_gradient_difference", "largest_weight_difference")
    columns = (*columns, "longest_seconds_without_progress")
    found = []
    for name, case in names.items():
        one = results("sharded_storm")["cases"][case]
        counts = [one["runs"], one["faults"], one["by_phase"].get("update", 0)]
        found.append((name, [*counts, *(one[column] for column in columns)]))
    return found


def async_rollouts() -> list[Row]:
    cells = [(side, column) for column in ("mean_reward", "last_rewards") for side in ("when_due", "one_ahead")]
    pairs = results("async_rollouts")["pairs"]
    return [(str(pair["seed"]), [pair[side][column] for side, column in cells]) for pair in pairs]


def servers_troubles() -> list[Row]:
    names = {"answers dropped": "dropped answers", "answers later than the timeout": "late answers"}
    names |= {"weight files cut in half": "torn file", "a tensor left out of the file": "dropped tensor"}
    names |= {"label changed, weights kept back": "weights kept back"}
    troubles = results("vllm_server")["troubles"]
    found = [(name, [troubles[key]["harmed"], troubles[key]["drawn_here"]]) for name, key in names.items()]
    killed = troubles["killed"]
    found.append(("requests sent twice", [troubles["doubled requests"]["drawn_here"]]))
    rollouts = killed["rollouts_with_own"]
    found.append(("server killed in a rollout, started again", [1, killed["drawn_here"], rollouts]))
    return found


def host_weights() -> list[Row]:
    return [
        (
            f"{device}, {network} {case.removesuffix(' resident')}",
            [one["peak_bytes"] / MB, 100 * one["peak_error"], one["tokens_per_second"], one["failures"]],
        )
        for device, measured in results("host_weights").items()
        for network, cases in measured["results"].items()
        for case, one in cases.items()
    ]


def of_seeds(tries: list[Any], *columns: str, scale: float = 100.0) -> list[float]:
    """Gives mean and deviation of each column."""
    taken = [[scale * one[column] for one in tries] for column in columns]
    return [figure for column in taken for figure in (mean(column), stdev(column))]


def dppo() -> list[Row]:
    return [
        (name, [*of_seeds(tries, "after", "most_held_back"), *of_seeds(tries, "most_kl", scale=1.0)])
        for name, tries in results("dppo")["runs"].items()
    ]


def turn_credit() -> list[Row]:
    found = []
    for name, tries in results("turn_credit")["runs"].items():
        compared = [] if name == "plain GRPO" else of_seeds(tries, "compared")
        found.append((name, [*of_seeds(tries, "after", "last_rollouts", scale=1.0), *compared]))
    return found


def learning() -> list[Row]:
    return [
        (
            f"{one['seed']} {one['trainer'].replace('TRL', 'TRL 1.16')}",
            [100 * one["sampled"], 100 * one["greedy"], one["seconds"], one["peak_bytes"] / MIB],
        )
        for one in results("learning")["own_sampling"]
    ]


def rereading() -> list[Row]:
    tried = next(iter(results("rereading")["runs"].values()))
    found = []
    for dropped, kept in zip(tried[::2], tried[1::2], strict=True):
        pair = [[one[key] for one in (dropped, kept)] for key in ("tokens_read", "seconds", "peak_bytes")]
        sizes = [size / MB for size in pair[2]]
        found.append((str(dropped["turns"]), [*pair[0], *pair[1], kept["seconds"] / dropped["seconds"], *sizes]))
    return found


def distillation() -> list[Row]:
    runs = results("distillation")["runs"].items()
    return [(name, of_seeds(tries, "before", "after", "teacher")) for name, tries in runs]


def teacher_memory() -> list[Row]:
    return [
        (
            f"{trained} {kind}",
            [
                one["peak_bytes"] / MB,
                one["peak_bytes"] / found["resident"]["peak_bytes"],
                100 * one["worst_phase_error"],
            ],
        )
        for trained, found in results("teacher_memory")["cases"].items()
        for kind, one in found.items()
    ]


def unique_tokens() -> list[Row]:
    def row(one: Any) -> Row:
        tokens, of = one["tokens"], one["of_padded"]
        shares = [tokens["unique"] / tokens["all"], one["needed"], of["prompts"], of["shared"], of["walked"]]
        sizes = [one["walked_bytes"] / one["longest_bytes"], one["shared_bytes"] / one["padded_bytes"]]
        name = f"{'rewrites' if one['rewrites'] else 'extends'} {one['turns']}"
        return name, [tokens["all"], *shares, *sizes, max(one["gradients"].values())]

    return [row(one) for one in results("unique_tokens")["shapes"]]


def roofline() -> list[Row]:
    return [
        (f"{training} {phase}", [one[name] for name in ("gflop", "seconds", "share")])
        for training, phases in results("roofline")["training"].items()
        for phase, one in phases.items()
    ]


def ppo_layouts() -> list[Row]:
    layouts = results("ppo_layouts")["results"]
    most = layouts["policy, reference and critic are three models"]["peak_bytes"]
    return [(name, [one["peak_bytes"] / MIB, 100 * one["peak_bytes"] / most]) for name, one in layouts.items()]


def denoising() -> list[Row]:
    found = results("denoising_memory")["peak_bytes"]
    return [
        (steps, [size / MB for name, size in one.items() if not name.startswith("all")]) for steps, one in found.items()
    ]


FIGURES = "docs/figures.md"
TABLES: dict[str, tuple[str, str, slice, Callable[[], list[Row]]]] = {
    "forecast_error": (FIGURES, "## A forecast beside the run", slice(1), forecast_error),
    "step": (FIGURES, "## A whole step beside TRL", slice(1), step),
    "rollout": (FIGURES, "## Rollouts beside `generate`", slice(1), rollout),
    "sharded_forecast": (FIGURES, "## A sharded rank beside its forecast", slice(1), sharded),
    "sharded_storm": (FIGURES, "## Sharded ranks under faults", slice(1), sharded_storm),
    "async_rollouts": (FIGURES, "## Rollouts one ahead", slice(1), async_rollouts),
    "vllm_server": ("docs/rollout-engines.md", "With `--troubles`", slice(1), servers_troubles),
    "host_weights": (FIGURES, "## Frozen weights on the host", slice(2), host_weights),
    "capacity_sweep": (FIGURES, "## Ever smaller devices", slice(1), capacity),
    "learning": (FIGURES, "Each sampling for itself", slice(2), learning),
    "dppo": (FIGURES, "## Stale rollouts", slice(1), dppo),
    "turn_credit": (FIGURES, "## Credit for turns", slice(1), turn_credit),
    "rereading": ("docs/agents.md", "`python -m benchmarks.rereading`", slice(1), rereading),
    "distillation": (FIGURES, "## A larger teacher beside plain GRPO", slice(1), distillation),
    "teacher_memory": (FIGURES, "## Where a teacher lies", slice(2), teacher_memory),
    "unique_tokens": (FIGURES, "## Turns that sequences share", slice(2), unique_tokens),
    "roofline": (FIGURES, "## The machine's own speed", slice(2), roofline),
    "ppo_layouts": ("docs/ppo.md", "`python -m benchmarks.ppo_layouts`", slice(1), ppo_layouts),
    "denoising_memory": ("docs/diffusion.md", "`python -m benchmarks.denoising_memory`", slice(1), denoising),
}
"""A table's page, the text before it, the cells that name a row, and the numbers of each row by the result file."""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_its_result_file(name: str) -> None:
    page, text, named, rows_of = TABLES[name]
    wanted: dict[str, list[list[float]]] = {}
    for key, values in rows_of():
        wanted.setdefault(key, []).append(values)
    shown = {
        " ".join(row[named]): re.findall(NUMBER, " | ".join(row[named.stop :])) for row in table_behind(page, text)
    }
    assert set(shown) == set(wanted)
    for row, numbers in shown.items():
        for values in wanted[row]:
            assert len(numbers) == len(values), row
            differ = [
                (number, value) for number, value in zip(numbers, values, strict=True) if not agrees(number, value)
            ]
            assert differ == [], row
