"""Holds tables of the pages to the result files that they say they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from statistics import mean, median, stdev
from typing import Any

import pytest

from examples.two_objectives import Gain
from tests.docs.reader import ROOT

NUMBER = r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
MB, MIB, GIB = 1e6, 2**20, 2**30
Row = tuple[str, list[float]]


def table_behind(page: str, text: str) -> list[list[str]]:
    """Returns the rows of the first table behind a text, without its head."""
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


def differing(shown: Sequence[str], values: Sequence[float]) -> list[tuple[str, float]]:
    """Returns the numbers that are not those of the result file, each beside it."""
    return [pair for pair in zip(shown, values, strict=True) if not agrees(*pair)]


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
    """Returns mean and deviation of each column."""
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


def logprobs() -> list[Row]:
    forms = {"TRL 1.16's chunked head": "TRL"}
    forms |= {f"here, tiles of {tile} tokens": f"memsafe_rl, tile {tile}" for tile in (64, 256)}
    return [
        (f"{head} {form}", [measured[key]["peak_bytes"] / MB, of_time(measured, key)])
        for head, measured in results("logprobs")["heads"].items()
        for form, key in forms.items()
    ]


def of_time(measured: Any, key: str) -> float:
    return float(measured[key]["seconds_median"] / measured["TRL"]["seconds_median"])


def packed_update() -> list[Row]:
    columns = ("row_seconds", "packed_seconds", "time_ratio", "bytes_ratio", "gradient_difference")
    return [(name, [one[column] for column in columns]) for name, one in results("packed_update")["rows"].items()]


def rollout_waves() -> list[Row]:
    found = results("rollout_waves")["summary"]
    return [
        ("tokens drawn, compared", [found["sampled_tokens"], found["compared_tokens"]]),
        ("tokens that differ", [found["flips"]]),
        ("draws reported as tied", [found["ties"]]),
        ("largest difference of a log-prob", [found["max_logprob_difference"]]),
    ]


def batch_invariance() -> list[Row]:
    sides = [results("batch_invariance")["summary"][side] for side in ("plain", "invariant")]

    def row(name: str, *columns: str) -> Row:
        return name, [side[column] for side in sides for column in columns]

    def gradients(weights: str) -> list[float]:
        return [side["gradients_furthest_apart"][weights][cut] for side in sides for cut in ("8 rows", "packed")]

    assert all(side["gradients_bitwise_when_repeated"] for side in sides)
    half = "gradients between cuts, weights in half precision: whole groups, packed"
    single = "gradients between cuts, float32 weights under autocast: whole groups, packed"
    return [
        row("tokens drawn, compared with another wave or turn", "tokens_drawn", "tokens_compared"),
        row("tokens from the first difference of a sequence on", "tokens_after_a_difference"),
        row("other log-probs that differ", "logprobs_that_differ"),
        row(
            "scores that differ from the sampler's log-probs", "scores_that_differ_from_the_samplers", "scores_compared"
        ),
        row("log-probs that differ between cuts of an update", "updates_logprobs_that_differ"),
        ("gradients when an update is repeated", []),
        (single, gradients("autocast")),
        (half, gradients("weights")),
    ]


def cost_of_invariance() -> list[Row]:
    pieces, found = results("batch_invariance")["pieces"], []
    names = {"Qwen3": "qwen3", "Gemma-3": "gemma3", "GPT-2": "gpt2", "T5": "t5", "Qwen3-MoE": "moe"}
    for name, key in names.items():
        kinds = [pieces[f"cost {key} {kind}"] for kind in ("float32", "bfloat16", "float16")]
        measured = [("rollout", "seconds"), ("update", "seconds"), ("rollout", "bytes"), ("update", "bytes")]
        ratios = [[one[part][f"invariant_{of}"] / one[part][f"plain_{of}"] for one in kinds] for part, of in measured]
        found.append((name, [*(one["step_ratio"] for one in kinds), *(ratio for row in ratios for ratio in row)]))
    return found


def step_with_invariance() -> list[Row]:
    ratios = results("batch_invariance")["summary"]["step_ratio"]
    return [("CPU, time of a step with the mode over that without", list(ratios.values())), ("CUDA", [])]


def reserved_budgets() -> list[Row]:
    budgets = results("gpu_suite_rehearsal")["results"]["budget"]
    names = {"GRPO, all weights, KL": "GRPO, full", "GRPO, LoRA, KL": "GRPO, LoRA"}
    names |= {"PPO, head on the trunk": "PPO", "GRPO, T5, all weights, KL": "T5"}
    found = []
    for name, key in names.items():
        one = budgets[f"{key}, 40% above the state"]
        sizes = (budgets[key]["reserved_bytes"], one["budget_bytes"], one["reserved_bytes"])
        found.append((name, [*(size / MIB for size in sizes), one["weights_apart"]]))
    return found


def on_a_card(part: str) -> Any:
    return results("gpu_suite")["results"][part]


def card_gradients() -> list[Row]:
    names = {"Qwen3, all weights, float32": "causal, full, float32", "Qwen3, LoRA, float32": "causal, LoRA, float32"}
    names |= {"T5, all weights, float32": "T5, full, float32", "Qwen3, PPO, float32": "PPO, full, float32"}
    names |= {"Qwen3, all weights, bfloat16": "causal, full, bfloat16"}
    found = []
    for name, key in names.items():
        one = on_a_card("prove")[key]
        assert one["passed"]
        found.append((name, [one["difference"], one["plain_peak_bytes"] / MIB, one["lean_peak_bytes"] / MIB]))
    return found


def card_budgets() -> list[Row]:
    names = {"GRPO, all weights": "GRPO, full", "GRPO, LoRA": "GRPO, LoRA", "PPO": "PPO", "GRPO, T5": "T5"}
    found, runs = [], on_a_card("budget")
    for name, key in names.items():
        for share in (40, 10) if key == "GRPO, full" else (40,):
            one = runs[f"{key}, {share}% above the state"]
            assert one["same_tokens"]
            sizes = [size / MIB for size in (runs[key]["reserved_bytes"], one["budget_bytes"], one["reserved_bytes"])]
            found.append((f"{name}, {share} % above the state", [*sizes, one["failures"], one["weights_apart"]]))
    return found


def card_steps() -> list[Row]:
    found = []
    for name, key in (("LoRA of rank 16", "LoRA"), ("all weights", "full")):
        for words, budget in (("", ""), (", with a budget", ", TRL's peak as budget")):
            sides = [on_a_card("step")[side] for side in (f"memsafe_rl, {key}{budget}", f"TRL, {key}")]
            seconds, peaks = ([one[column] for one in sides] for column in ("seconds_per_step", "peak_bytes"))
            found.append((name + words, [*seconds, *(peak / MIB for peak in peaks)]))
    return found


def forecasts_on_a_card() -> dict[str, Any]:
    return {name: one for name, one in on_a_card("forecast").items() if "error" in one}


def card_forecasts() -> list[Row]:
    found = []
    for name, one in forecasts_on_a_card().items():
        model, trained, *_ = name.split("/")[1].split(", ")
        errors = [100 * one[f"{which}error"] for which in ("", "reserved_", "driver_", "seconds_")]
        words = {"full": "all weights", "LoRA 16": "LoRA"}[trained]
        found.append((f"{model}, {words}", [one["held_bytes"] / MIB, *errors]))
    return found


def card_random_runs() -> list[Row]:
    names = ("Phi-3, all weights, tied, Adafactor", "Qwen3-MoE, PPO, tied, Adafactor", "Qwen3-MoE, bfloat16, Adafactor")
    names += ("OLMo-2, LoRA, PPO, AdamW", "GPT-2, all weights, tied, Adafactor")
    found = []
    for index, name in enumerate(names):
        one = on_a_card("random")[f"seed 0, run {index}"]
        found.append((f"{index}: {name}", [one["held_bytes"] / MB, one["forecast_bytes"] / MB, 100 * one["peak"]]))
    return found


def same_rollouts() -> list[Row]:
    names = {"sgd": "SGD", "adamw_torch": "AdamW"}
    return [(names[one["optimizer"]], [one["relative_difference"]]) for one in results("learning")["same_rollouts"]]


def memory_overhead() -> list[Row]:
    names = {"all weights": "full", "LoRA": "lora"}
    found = results("memory_overhead")
    return [
        (
            name,
            [
                *(100 * share for share in (found[key]["overhead"], *found[key]["overhead_95"])),
                found[key]["more_peak_bytes"],
            ],
        )
        for name, key in names.items()
    ]


def plan_cards() -> list[Row]:
    def cell(one: Any) -> list[float]:
        return [*([one["predicted_peak_bytes"] / GIB] if one["fits"] else []), one["seconds"]]

    return [
        (name, [x for one in cards.values() for x in cell(one)])
        for name, cards in results("plan_cards")["results"].items()
    ]


def published() -> list[Row]:
    found = []
    for one in results("plan_cards")["published"]:
        name = f"{one['model'].removeprefix('Qwen/')}, {one['tokens']:,}{', offloaded' * one['offloaded']}"
        sizes = [one[column] for column in ("published_gib", "forecast_bf16_gib", "forecast_float32_base_gib")]
        found.append((name, [*sizes, 100 * (sizes[2] / sizes[0] - 1)]))
    return found


def random_runs() -> list[Row]:
    cpu, pretend = results("forecast_random_cpu"), results("forecast_random_pretend")
    series = {
        "CPU, as run": cpu["results"],
        "CPU, with the mended runs": cpu["results"] | cpu["after_mending"],
        "pretend CUDA device, as run": pretend["results"],
        "CPU, seed 2026, commit ed4f370": cpu["another_seed"],
        "CPU, seed 2611, commit 68c2283 (run 49 under `seed_2611_before`)": cpu["seed_2611"] | cpu["seed_2611_before"],
        "CPU, seed 2611, made again with the mend (`seed_2611`)": cpu["seed_2611"],
        "CPU, seed 2512, commit c09a27d (five runs under `seed_2512_before`)": cpu["seed_2512"]
        | cpu["seed_2512_before"],
        "CPU, seed 2512, made again on commit 008fddc (`seed_2512`)": cpu["seed_2512"],
        "CPU, seed 0, commit bd005f8 (`seed_0`)": cpu["seed_0"],
        "pretend CUDA device, seed 0, commit 631b061 (two runs under `seed_0_before`)": pretend["seed_0"]
        | pretend["seed_0_before"],
        "pretend CUDA device, seed 0, made again on commit bd005f8 (`seed_0`)": pretend["seed_0"],
    }
    return [(name, of_series(runs)) for name, runs in series.items()]


def of_series(runs: Any) -> list[float]:
    """Returns how many runs there are, errors of peaks and updates in percent, and the phase that is furthest off."""
    peaks, updates = ([100 * one["errors"][phase] for one in runs.values()] for phase in ("peak", "update"))
    phases = [
        (100 * error, int(name.rpartition("/")[2]))
        for name, one in runs.items()
        for phase, error in one["errors"].items()
        if phase not in ("peak", "reserved")
    ]
    worst = max(phases, key=lambda pair: abs(pair[0]))
    return [len(runs), min(peaks), median(map(abs, peaks)), max(peaks), min(updates), *worst]


def offload() -> list[Row]:
    columns = ("held_bytes", "peak_bytes", "host_bytes", "save_on_cpu_bytes")
    return [
        (name, [one[column] / MB for column in columns[: 4 if one["host_bytes"] else 2]])
        for name, one in results("offload")["plans"].items()
    ]


def count_squares() -> list[Row]:
    rewards = results("count_squares")["mean reward of ten steps, by the last"]
    return [("reward", [rewards[step] for step in ("10", "50", "100", "150", "200", "300")])]


def vllm_engine() -> list[Row]:
    names = {"own": "native", "vLLM 0.32": "vllm", "continuous batching": "continuous", "`generate`": "generate"}
    runs = results("vllm_engine")["runs"]
    found = []
    for name, key in names.items():
        shapes = [one for shape in ("ragged", "even") for one in runs if (one["engine"], one["shape"]) == (key, shape)]
        found.append((name, [x for one in shapes for x in (one["cpu_seconds"], one["peak_bytes"] / MB)]))
    return found


def trl_suite() -> list[Row]:
    columns = ("trl passed", "counted", "ours passes")
    return [
        (name.replace("grpo", "GRPO").replace("rloo", "RLOO"), [one[column] for column in columns])
        for name, one in results("trl_suite")["counts"].items()
    ]


def larger_networks() -> list[Row]:
    screens, blocks = results("screens")["screens"], {"Qwen3-8B": 36, "Qwen3-14B": 40, "Qwen3-32B": 64}
    found = []
    for name, one in screens.items():
        if "resident_blocks" in one:
            assert one["fits"]
            sizes = [one[column] / GIB for column in ("predicted_peak_bytes", "reserved_peak_bytes")]
            resident = [*one["resident_blocks"].values(), blocks[name.partition(",")[0]]]
            card = float(one["command"].partition("--gpu ")[2].partition("GiB")[0])
            found.append((name, [card, *resident, *sizes, one["seconds"]]))
    return found


def studies(example: str) -> dict[str, Any]:
    """Returns what an example found, by the words behind its name."""
    runs = results("studies")["runs"]
    return {name.removeprefix(f"{example} "): one for name, one in runs.items() if name.startswith(f"{example} ")}


def accuracies(one: Any) -> list[float]:
    columns = ("sampled_before", "sampled_after", "greedy_before", "greedy_after")
    return [*(100 * one[column] for column in columns), one["cpu_seconds"]]


def quickstart() -> list[Row]:
    tries = studies("quickstart")
    gains = [mean(100 * (one[f"{way}_after"] - one[f"{way}_before"]) for one in tries.values()) for way in WAYS]
    rows = [(words.removeprefix("--seed "), accuracies(one)) for words, one in tries.items()]
    return [*rows, ("mean gain", gains)]


WAYS = ("sampled", "greedy")


def t5_sums() -> list[Row]:
    return [(words.removeprefix("--seed "), accuracies(one)) for words, one in studies("t5_sums").items()]


def qwen_ppo() -> list[Row]:
    names = {"Qwen3, head on the trunk, 0": "--seed 0", "Qwen3, head on the trunk, 1": "--seed 1"}
    names |= {
        "Qwen3 with LoRA, second adapter, 0": "--seed 0 --critic adapter",
        "T5, head on the trunk, 0": "--seed 0 --t5",
    }
    tries = studies("qwen_ppo")
    return [(name, accuracies(tries[words])) for name, words in names.items()]


def two_objectives() -> list[Row]:
    found = []
    for words, one in studies("two_objectives").items():
        _, seed, _, merge = words.split()
        gains = [Gain(**one[name]) for name in ("truth", "honesty")]
        parts = [(100 * gain.before, 100 * gain.after, gain.standard_errors) for gain in gains]
        found.append((f"{merge} {seed}", [*(x for part in parts for x in part), one["cpu_seconds"]]))
    return found


def agent_user() -> list[Row]:
    columns = ("reward_before", "reward_after", "standard_error", "guest_changed", "cpu_seconds")
    tries = studies("agent_user_grpo").items()
    return [(words.removeprefix("--seed "), [one[column] for column in columns]) for words, one in tries]


def motion() -> list[Row]:
    columns = (("before", -1), ("after", -1), ("gain", 1), ("standard_error", 1), ("cpu_seconds", 1))
    found = []
    for words, one in studies("motion_grpo").items():
        name = f"{'PPO' if '--ppo' in words else 'GRPO'} {words.split()[1]}"
        found.append((name, [sign * one[column] for column, sign in columns]))
    return found


def smollm2() -> list[Row]:
    return [
        ("held out, sampled", [100 * share for one in studies("smollm2_grpo").values() for share in one["sampled"]])
    ]


FIGURES, EXAMPLES = "docs/figures.md", "docs/examples.md"
TABLES: dict[str, tuple[str, str, slice, Callable[[], list[Row]]]] = {
    "forecast_error": (FIGURES, "## A forecast beside the run", slice(1), forecast_error),
    "gradients on a card": (FIGURES, "## On an H200", slice(1), card_gradients),
    "budgets on a card": (FIGURES, "Four steps under budgets of reserved bytes", slice(1), card_budgets),
    "steps on a card": (FIGURES, "A rollout of Qwen3-0.6B", slice(1), card_steps),
    "forecasts on a card": (FIGURES, "Forecasts beside runs of three steps", slice(1), card_forecasts),
    "random runs on a card": (FIGURES, "Small random runs:", slice(1), card_random_runs),
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
    "logprobs": (FIGURES, "## Log-probs of 510 tokens", slice(2), logprobs),
    "packed_update": (FIGURES, "## One copy of a prompt", slice(1), packed_update),
    "rollout_waves": (FIGURES, "## Waves", slice(1), rollout_waves),
    "batch_invariance": (FIGURES, "## Batch invariance", slice(1), batch_invariance),
    "cost of batch_invariance": (FIGURES, "What the mode costs", slice(1), cost_of_invariance),
    "step with batch_invariance": ("docs/precision.md", "was measured to cost less", slice(1), step_with_invariance),
    "reserved budgets": (FIGURES, "## Reserved bytes", slice(1), reserved_budgets),
    "same rollouts": (FIGURES, "## Learning beside TRL", slice(1), same_rollouts),
    "memory_overhead": (FIGURES, "## What watching memory costs", slice(1), memory_overhead),
    "plan_cards": (FIGURES, "## Common networks on common cards", slice(1), plan_cards),
    "published": (FIGURES, "## Beside what others measured", slice(1), published),
    "random runs": (FIGURES, "## Random runs beside", slice(1), random_runs),
    "larger networks": (FIGURES, "What `memsafe-rl plan --model MODEL", slice(1), larger_networks),
    "offload": ("docs/simulated-memory.md", "`python -m benchmarks.offload`", slice(1), offload),
    "count_squares": ("docs/images.md", "`python -m examples.count_squares`", slice(1), count_squares),
    "vllm_engine": ("docs/rollout-engines.md", "peak above the loaded model", slice(1), vllm_engine),
    "trl_suite": ("docs/trl.md", "[counts and names]", slice(1), trl_suite),
    "quickstart": (EXAMPLES, "## Quickstart", slice(1), quickstart),
    "smollm2_grpo": (EXAMPLES, "## SmolLM2-135M-Instruct", slice(1), smollm2),
    "t5_sums": (EXAMPLES, "## Sums with a small T5", slice(1), t5_sums),
    "two_objectives": (EXAMPLES, "## Two objectives", slice(2), two_objectives),
    "agent_user_grpo": (EXAMPLES, "## An agent and its guest", slice(1), agent_user),
    "motion_grpo": ("docs/diffusion.md", "## The example", slice(2), motion),
    "qwen_ppo": ("docs/ppo.md", "## An example", slice(1), qwen_ppo),
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
            assert differing(numbers, values) == [], row
