"""Holds numbers in sentences, and in tables that are no more than sentences, to the result files they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import mean, median, stdev

import pytest

from memsafe_rl.memory.simulated.workspaces import cublas_bytes
from tests.data.test_partial_rollouts import decode_steps
from tests.docs.reader import ROOT
from tests.docs.test_tables import (
    EXAMPLES,
    FIGURES,
    GIB,
    MB,
    MIB,
    NUMBER,
    differing,
    forecasts_on_a_card,
    of_seeds,
    results,
    studies,
)

README, FORECAST, EXACTNESS, DIFFUSION = "README.md", "docs/forecast.md", "docs/exactness.md", "docs/diffusion.md"
ENGINES = "docs/rollout-engines.md"
STUDENTS_T = {3: 4.303}
"""By number of pairs, the quantile of 97.5 %."""


def errors_of_forecasts() -> list[float]:
    """Returns the worst and median error of a peak, and the worst of any phase, in percent."""
    errors = [one["errors"] for one in results("forecast_error")["results"].values()]
    peaks = [100 * abs(one["peak"]) for one in errors]
    phases = [100 * abs(error) for one in errors for phase, error in one.items() if phase != "peak"]
    return [max(peaks), median(peaks), max(phases)]


def above_state() -> list[float]:
    sides = [results("step")["results"][name]["sides"] for name in ("ragged-full", "even-full")]
    both = [side[name] for side in sides for name in ("memsafe_rl", "TRL, defaults")]
    return [(one["peak_bytes"] - one["state_bytes"]) / MB for one in both]


def beside_generate() -> list[float]:
    found = results("rollout_waves")["beside_generate"]
    sides = [found[name] for name in ("here", "generate")]
    return [*(one["cpu_seconds"] for one in sides), *(one["peak_bytes"] / MB for one in sides)]


def of_bound() -> list[float]:
    rows = [row for rows in results("rollout")["kv_growth"].values() for row in rows]
    return [100 * max(row["peak"] / row["shared"] for row in rows)]


def faults(kind: str, *phases: str) -> list[float]:
    found = results(kind)["summary"]
    return [found["faults"], *(found["by_phase"][phase] for phase in phases)]


def faults_beside_images() -> float:
    return float(sum(one["faults"] for name, one in results("fault_storm")["scenes"].items() if "image" in name))


def storm(*columns: str) -> list[float]:
    return [results("fault_storm")["summary"][column] for column in columns]


def users_errors() -> list[float]:
    found = results("fault_storm")["users_errors"]
    assert found["violations"] == []
    return [found["of_each_kind"] * len(found["kinds"])]


def device_storm(*columns: str) -> list[float]:
    found = results("device_storm")["summary"]
    assert found["violations"] == []
    return [found[column] for column in columns]


def launches() -> list[float]:
    found = results("launches")["decoding"].values()
    sides = [(one["compiled"], *(one[side]["operators"] for side in ("memsafe_rl", "generate"))) for one in found]
    sizes = [x for one, ours, theirs in sides for x in (one["launches"], ours, theirs, one["speedup"])]
    return [*sizes, *(one["compiling_cpu_s"] for one, *_ in sides)]


def card_storm() -> list[float]:
    runs = [one for one in results("gpu_suite")["results"]["storm"].values() if "runs" in one]
    assert not any(one["violations"] or one["pinned_bytes"] for one in runs)
    assert sum(one["weights_apart"] == 0 for one in runs) == 4
    sums = [sum(one[column] for one in runs) for column in ("runs", "faults", "pinned_bytes")]
    return [*sums, max(one["weights_apart"] for one in runs)]


def card_invariance() -> list[float]:
    found = results("gpu_suite")["results"]["invariance"].values()
    different = ("tokens_after_a_difference", "logprobs_that_differ", "scores_that_differ")
    return [sum(one.get("tokens", 0) for one in found), sum(one.get(name, 0) for one in found for name in different)]


def card_rollout() -> list[float]:
    sides = [results("gpu_suite")["results"]["rollout"][side] for side in ("memsafe_rl", "generate")]
    speeds, peaks = ([one[name] for one in sides] for name in ("tokens_per_second", "above_weights_bytes"))
    return [*speeds, *(peak / MIB for peak in reversed(peaks))]


def of_trls_time(kind: str, more: str = "", suite: str = "gpu_suite") -> float:
    steps = results(suite)["results"]["step"]
    ours, theirs = (steps[name]["seconds_per_step"] for name in (f"memsafe_rl, {kind}{more}", f"TRL, {kind}"))
    return float(ours / theirs)


UNDER_TRLS_PEAK, SPEED_BEFORE, LATER = ", TRL's peak as budget", "gpu_suite_speed_before", "gpu_suite_later"


def card_speed_before() -> list[float]:
    steps = (("LoRA", ""), ("full", ""), ("LoRA", UNDER_TRLS_PEAK))
    rollout = results(SPEED_BEFORE)["results"]["rollout"]["ratio"]["tokens_per_second"]
    return [rollout, *(of_trls_time(*step, SPEED_BEFORE) for step in steps)]


def card_front_page() -> list[float]:
    lora = [of_trls_time("LoRA", UNDER_TRLS_PEAK, suite) for suite in ("gpu_suite", SPEED_BEFORE, LATER)]
    full = [of_trls_time("full", UNDER_TRLS_PEAK, suite) for suite in ("gpu_suite", LATER)]
    errors = [-100 * one["error"] for one in forecasts_on_a_card().values()]
    return [min(lora), max(lora), min(full), max(full), min(errors), max(errors)]


def card_later() -> list[float]:
    before, later = results("gpu_suite")["results"], results(LATER)["results"]
    for part in ("prove", "storm", "budget", "random", "invariance", "forecast", "step"):
        for name, one in later[part].items():
            counted = [key for key in one if (key.endswith("_bytes") and key != "driver_bytes") or key == "failures"]
            assert [one[key] for key in counted] == [before[part][name][key] for key in counted]
    steps = [of_trls_time(kind, more, LATER) for more in ("", UNDER_TRLS_PEAK) for kind in ("LoRA", "full")]
    weights = later["budget"]["T5, 40% above the state"]["weights_apart"]
    return [weights, *steps]


def card_random_runs() -> list[float]:
    runs = results("card_random")["runs"]
    sides = [[(one[name], one["held_bytes"]) for one in runs] for name in ("forecast_then_bytes", "forecast_bytes")]
    then, now = ([100 * (told[p] / held[p] - 1) for told, held in side for p in told if p in held] for side in sides)
    peaks = [100 * (max(told.values()) / max(held.values()) - 1) for told, held in sides[1]]
    return [len(runs), 100 / (1 + min(then) / 100) - 100, min(peaks), max(peaks), max(map(abs, now))]


def card_features() -> list[float]:
    later = results("card_later")
    runs = [one for one in later["features"] if not one["refused"]]
    wrong = [one for run in runs for one in run["wrong"]]
    apart = [float(one.split()[5]) for one in wrong if one.startswith("cut: a gradient differs by ")]
    assert all(one.startswith("cut: ") for one in wrong)  # none resumed, and none under refused allocations
    return [len(runs), sum(one["faults"] for one in runs), min(apart), max(apart)]


def card_in_bfloat16() -> list[float]:
    (one,) = results("card_later")["full_bfloat16"].values()
    assert abs(one["forecast_bytes"] + cublas_bytes({}, "9.0") - one["held_bytes"]) < MIB / 100
    return [one["forecast_bytes"] / MIB, cublas_bytes({}, "9.0") / MIB, one["held_bytes"] / MIB]


def card_in_4_bits() -> list[float]:
    (one,) = results("card_later")["four_bits"].values()
    held, own = one["held_bytes"]["update"], one["held_bytes"]["update"] - cublas_bytes({}, "9.0")
    errors = [100 * (one[name]["update"] / own - 1) for name in ("forecast_then_bytes", "forecast_bytes")]
    return [held / MIB, cublas_bytes({}, "9.0") / MIB, *errors]


def card_forecasts_without_cublas() -> list[float]:
    taken, found = cublas_bytes({}, "9.0"), forecasts_on_a_card().values()
    return [taken / MIB, *(100 - 100 * one["forecast_bytes"] / (one["held_bytes"] - taken) for one in found)]


def card_launches() -> list[float]:
    found = results("gpu_suite")["results"]["launches"]
    shares = [found[name][column] for name in found if "ms" in found[name] for column in ("of_generate", "of_its_ms")]
    return [8, *shares]


def least_budget() -> list[float]:
    one = results("gpu_suite_rehearsal")["results"]["budget"]["GRPO, full, 10% above the state"]
    assert one["same_tokens"]
    return [10, one["reserved_bytes"] / MIB, one["budget_bytes"] / MIB, one["failures"], one["weights_apart"]]


def kills(kind: str, *columns: str) -> list[float]:
    found = results(kind)["summary"]
    return [found["kills"] - found["aimed"] if column == "at random" else found[column] for column in columns]


def on_one_of_two_ranks() -> float:
    blows = results("kill_storm")["scenes"]["two ranks"]["blows"]
    return float(sum(count for name, count in blows.items() if name != "SIGTERM"))


def soak() -> list[float]:
    found = results("soak")
    grown = found["growth"]
    sizes = [grown["python_bytes"], found["log_history_bytes"], grown["resident_bytes"]]
    return [grown["tensor_bytes"], *(size / MB for size in sizes), 100 * grown["share_of_bytes_saved"]]


def saving() -> list[float]:
    found = results("saving_small")["figures"]
    kinds = [found[f"{what}_seconds_{how}"] for what in ("stall", "lost") for how in ("in the background", "at once")]
    return [*kinds[:2], found["stall"], *kinds[2:]]


def capacity() -> list[float]:
    both = [results("capacity_sweep")[kind] for kind in ("full", "lora")]
    whole = [one[column] / MIB for one in both for column in ("natural_peak_bytes", "state_bytes")]
    return [*whole, *(one["leanest_peak_bytes"] / MIB for one in both)]


def updates_with_weights_on_the_host() -> list[float]:
    found = results("host_weights")["cpu"]["results"]["SmolLM2-135M"]
    return [found[f"{share}% resident"]["held_bytes"]["update"] / MB for share in (100, 50, 25, 0)]


def sizes(name: str) -> list[float]:
    held = [one["held_peak_bytes"] / MB for one in results(name)["results"].values()]
    return [min(held), max(held)]


def rarer() -> list[float]:
    runs = results("forecast_rarer_cpu")["results"].values()
    peaks = [100 * one["errors"]["peak"] for one in runs]
    phases = [100 * error for one in runs for phase, error in one["errors"].items() if phase != "peak"]
    return [len(runs), min(peaks), max(peaks), median(map(abs, peaks)), max(phases, key=abs)]


def reserved() -> list[float]:
    errors = [one["errors"]["reserved"] for one in results("forecast_random_pretend")["results"].values()]
    off = [error for error in errors if error]
    return [len(errors) - len(off), len(errors), len(off) - 1, sum(error < 0 for error in off)]


def of_random_runs(*numbers: int) -> list[list[float]]:
    """Returns by how many percent the peaks of some runs were off, and their megabytes."""
    found = [results("forecast_random_cpu")["results"][f"1125/{number}"] for number in numbers]
    return [[100 * abs(one["errors"]["peak"]) for one in found], [one["held_peak_bytes"] / MB for one in found]]


def largest_segment() -> list[float]:
    one = results("forecast_random_pretend")["results"]["1125/198"]
    foretold, held = (max(one[column].values()) for column in ("forecast_reserved_bytes", "reserved_bytes"))
    return [one["held_peak_bytes"] / MB, (foretold - held) / MIB]


def async_rollouts() -> list[float]:
    found = results("async_rollouts")
    return [*found["difference_of_mean_rewards"].values(), found["seconds_ratio"]]


def before_stale_rollouts() -> list[float]:
    return of_seeds(results("dppo")["runs"]["plain GRPO, fresh rollouts"], "before")


def before_turn_credit() -> list[float]:
    return of_seeds(results("turn_credit")["runs"]["plain GRPO"], "before", scale=1.0)


def beside_plain(column: str) -> list[float]:
    """Returns mean and interval of what turn-level credit adds, seed by seed, without and with rewards of turns."""
    plain, *others = results("turn_credit")["runs"].values()
    found = []
    for tries in others:
        apart = [one[column] - other[column] for one, other in zip(tries, plain, strict=True)]
        width = STUDENTS_T[len(apart)] * stdev(apart) / sqrt(len(apart))
        found += [mean(apart), mean(apart) - width, mean(apart) + width]
    return found


def invariance(weights: str, dtype: str, *cuts: str, family: str = ".*") -> list[float]:
    """Returns how far gradients are apart at most, by networks, of the mode's pieces."""
    pieces = results("batch_invariance")["pieces"]
    wanted = re.compile(f"invariant {family} {dtype} {weights}")
    found = [one["gradients"]["cuts"] for name, one in pieces.items() if wanted.fullmatch(name)]
    return [one[cut]["relative_difference"] for one in found for cut in cuts if cut in one]


def apart_between_cuts() -> list[float]:
    """Of float32 weights: between cuts without sharing; then with a shared prompt, in bf16 and fp16."""
    rows = [x for dtype in HALF for x in invariance("autocast", dtype, "8 rows")]
    rows += [x for dtype in HALF for one in DECODERS for x in invariance("autocast", dtype, "per row", family=one)]
    shared = [
        found
        for dtype in HALF
        for found in (
            max(invariance("autocast", dtype, "packed")),
            max(invariance("autocast", dtype, "per row", family="t5")),
        )
    ]
    return [max(rows), *shared]


def apart_in_half_precision() -> list[float]:
    found = []
    for dtype in HALF:
        rows = [x for one in DECODERS for x in invariance("weights", dtype, "per row", "8 rows", "packed", family=one)]
        rows += invariance("weights", dtype, "8 rows", family="t5")
        found += [min(rows), max(rows)]
    return [*found, *(max(invariance("weights", dtype, "per row", family="t5")) for dtype in HALF)]


HALF, DECODERS = ("bfloat16", "float16"), ("qwen3", "gemma3", "gpt2", "moe")


def without_the_mode() -> list[float]:
    apart = results("batch_invariance")["summary"]["plain"]["gradients_furthest_apart"]
    return [max(x for cuts in apart.values() for x in cuts.values())]


def minutes_of_invariance() -> list[float]:
    return [sum(one["processor_seconds"] for one in results("batch_invariance")["pieces"].values()) / 60]


def waves(*columns: str) -> list[float]:
    return [results("rollout_waves")["summary"][column] for column in columns]


def seconds_off() -> list[float]:
    errors = [100 * one["error"] for one in results("seconds")["runs"]]
    return [-min(errors), max(errors), median(map(abs, errors))]


def sharded_updates() -> list[float]:
    ranks = results("sharded_forecast")["ranks"]
    cases = [one for rank in ranks for one in rank.values() if isinstance(one, dict) and "held_bytes" in one]
    return [100 * max(one["held_bytes"]["update"] / one["forecast_bytes"]["update"] - 1 for one in cases)]


def shared_turns() -> list[float]:
    eight = [one for one in results("unique_tokens")["shapes"] if one["turns"] == 8]
    return [one["of_padded"]["shared"] for one in sorted(eight, key=lambda one: bool(one["rewrites"]))]


def long_turns() -> list[float]:
    tried = list(results("rereading")["runs"].values())[1]
    pairs = zip(tried[::2], tried[1::2], strict=True)
    return [x for dropped, kept in pairs for x in (kept["seconds"] / dropped["seconds"], kept["turns"])]


def same_rollouts() -> list[float]:
    return [one["relative_difference"] for one in results("learning")["same_rollouts"]]


def accepted() -> list[float]:
    found = results("trl_configs")
    return [found["accepted by TRL"], found["accepted here"]]


def marks() -> list[float]:
    found = results("offload")["mark_microseconds"]
    heard = [value for name, value in found.items() if name.endswith("heard") and not name.startswith("in_phase")]
    assert max(value for name, value in found.items() if not name.endswith("heard")) < 1
    return [min(heard), max(heard), found["in_phase, heard"]]


def server() -> list[float]:
    found = results("vllm_server")
    shares = [end for kind in ("server", "own") for end in thirds(found[kind]["rewards"])]
    most = max(found[kind]["largest_logp_difference"] for kind in ("server", "own"))
    return [found["steps"], *shares, most, *(found[kind]["seconds"] / found["steps"] for kind in ("server", "own"))]


def thirds(rewards: list[float]) -> list[float]:
    return [mean(rewards[:3]), mean(rewards[-3:])]


def one_ahead() -> list[float]:
    found = results("vllm_server")
    assert found["troubles"]["one rollout ahead"]["repeated alike"]
    return [found["steps"], thirds(found["troubles"]["one rollout ahead"]["rewards"])[1]]


def troubles() -> list[float]:
    found = [one for name, one in results("vllm_server")["troubles"].items() if name != "one rollout ahead"]
    return [max(one["largest_logp_difference"] for one in found), min(thirds(one["rewards"])[1] for one in found)]


def all_columns() -> list[float]:
    return [results("denoising_memory")["peak_bytes"]["50"]["all columns of 8 rows"] / MB]


def proved(dtype: str) -> list[float]:
    found = results("gpu_suite_rehearsal")["results"]["prove"]
    apart = [one["difference"] for name, one in found.items() if name.endswith(dtype)]
    return sorted({min(apart), max(apart)})


def mended_phases() -> list[float]:
    runs = results("forecast_random_cpu")["seed_2512_before"].values()
    high = [100 * max(one["errors"].values()) for one in runs]
    found = [error for error in high if error > 5]
    assert len(found) == 4
    return [min(found), max(found)]


def most_held(example: str) -> list[float]:
    return [max(one["process_bytes"] for one in studies(example).values()) / GIB]


def foreseen(example: str, words: str = "") -> list[float]:
    """Returns the least and the most that critics foresaw in the end."""
    found = [one["explained_variance"] for name, one in studies(example).items() if words in name]
    return [min(found), max(found)]


def smollm2() -> list[float]:
    (one,) = studies("smollm2_grpo").values()
    return [one["cpu_seconds"] / 60, *most_held("smollm2_grpo")]


def mean_tokens() -> list[float]:
    ragged = [one["mean_tokens"] for one in results("vllm_engine")["runs"] if one["shape"] == "ragged"]
    return [min(ragged), max(ragged)]


SENTENCES: list[tuple[str, str, Callable[[], Sequence[float]]]] = [
    (
        README,
        "In # settings the forecast peak was within # % of",
        lambda: [len(results("forecast_error")["results"]), errors_of_forecasts()[0]],
    ),
    (
        FORECAST,
        "the peak is off by # % at worst and by # % in the median, no phase by more than # %",
        errors_of_forecasts,
    ),
    ("docs/cases.md", "worst # %", lambda: errors_of_forecasts()[:1]),
    (FIGURES, "Worst peak # %, median # %; failures in all runs: 0.", lambda: errors_of_forecasts()[:2]),
    (
        FIGURES,
        "The naive form, with all logits at once and without entropies, takes # MB",
        lambda: [results("logprobs")["heads"]["frozen"]["naive"]["peak_bytes"] / MB],
    ),
    (FIGURES, "full training holds # against # MB (ragged) and # against # MB (even)", above_state),
    (FIGURES, "of ragged length: # against # CPU seconds and # against # MB", beside_generate),
    (FIGURES, "The most that was held is # % of the bound", of_bound),
    (
        FIGURES,
        "| faults | #: # in updates, # in rollouts, # in optimizer steps, # in scoring, # in loading, # in rewards; #",
        lambda: [
            *faults("fault_storm", "update", "rollout", "optimizer", "score", "load", "reward"),
            faults_beside_images(),
        ],
    ),
    (FIGURES, "memory that never suffices) | #, none swallowed", users_errors),
    (FIGURES, "| tokens that differ | # of #, no tie excused |", lambda: storm("excused_ties", "tokens")),
    (FIGURES, "| steps bitwise equal | # of #;", lambda: storm("bitwise_steps", "compared_steps")),
    (FIGURES, "| gradient of the others, worst | # of its norm |", lambda: storm("largest_gradient_difference")),
    (FIGURES, "| final weights, worst | # of the distance travelled |", lambda: storm("largest_weight_difference")),
    (
        FIGURES,
        "| time | # s, # s of processor time; # s lost",
        lambda: storm("seconds", "cpu_seconds", "seconds_lost"),
    ),
    (
        FIGURES,
        "| faults | # in # runs: # in updates, # in rollouts, # in scoring, # in optimizer steps |",
        lambda: [
            *device_storm("faults", "runs"),
            *faults("device_storm", "update", "rollout", "score", "optimizer")[1:],
        ],
    ),
    (FIGURES, "| most bytes pinned when a retry began | # |", lambda: device_storm("pinned_bytes")),
    (FIGURES, "| final weights, worst | # of the distance travelled; bit", lambda: device_storm("weights_apart")),
    (FIGURES, "| time | # s |", lambda: device_storm("seconds")),
    ("docs/device.md", "| # refused allocations at length", lambda: device_storm("faults")),
    (
        FIGURES,
        "At # % above the state GRPO reserved # of # MiB after # failures and changes of plan, with the same tokens "
        "and weights # apart",
        least_budget,
    ),
    (
        FIGURES,
        "| SIGKILL | #: # at random moments, # inside renames, writes, flushes, deletions and `torch.save`; # on",
        lambda: [*kills("kill_storm", "kills", "at random", "aimed"), on_one_of_two_ranks()],
    ),
    (FIGURES, "| SIGTERM | #, each ended", lambda: kills("kill_storm", "terms")),
    (FIGURES, "from the unbroken run's | # of # runs |", lambda: kills("kill_storm", "violations", "runs")),
    (FIGURES, "| steps done again | # |", lambda: kills("kill_storm", "steps_redone")),
    (FIGURES, "| time | # s on a busy machine, # starts |", lambda: kills("kill_storm", "seconds", "starts")),
    (
        FIGURES,
        "is hit): # kills, # of them at random moments, and # SIGTERM over # runs and # starts; every run's weights "
        "and optimizer state equal the unbroken run's bit for bit, # steps done again, nothing damaged, # s",
        lambda: kills("kill_storm_sharded", "kills", "at random", "terms", "runs", "starts", "steps_redone", "seconds"),
    ),
    (
        FIGURES,
        "The last rank ended within # s of the first",
        lambda: [results("kill_storm_sharded")["scenes"]["two sharded ranks"]["slowest_end_seconds"]],
    ),
    (
        FIGURES,
        "live tensors grow by # bytes, Python's objects by # MB (the newest records; `log_history` apart: # MB), the "
        "process by # MB, a checkpoint by # %",
        soak,
    ),
    (FIGURES, "the background's stall took # of # seconds (#), and in all # of # seconds were lost", saving),
    (
        FIGURES,
        "# MiB with # MiB of state (all weights), # MiB with # MiB (LoRA). The leanest plan of all peaks at # and #",
        capacity,
    ),
    (FIGURES, "Peaks of updates show what a plan saves: #, #, # and # MB", updates_with_weights_on_the_host),
    (FIGURES, "counts every byte (# to # MB; commit", lambda: sizes("forecast_random_cpu")),
    (FIGURES, "on the pretend CUDA device (# to # MB;", lambda: sizes("forecast_random_pretend")),
    (FIGURES, "on a CPU, # to # MB;", lambda: sizes("forecast_rarer_cpu")),
    (
        "docs/memory-policies.md",
        "# launches instead of #, where `generate` takes #, and runs # times as fast; a T5 of 12 + 12 layers # instead "
        "of # (#), and # times. Compiling takes # and # processor seconds.",
        launches,
    ),
    (FIGURES, "none of # past a limit, peaks # to # %, median # %, worst phase # %", rarer),
    (FIGURES, "exact in # of # runs. In # it is off by one segment of 2 MiB, too low in #;", reserved),
    (FIGURES, "was not tried (run 174, # % of the peak)", lambda: of_random_runs(174)[0]),
    (
        FIGURES,
        "(runs 26, 30, 127 and 150, # to # % of the peak in networks of # to # MB)",
        lambda: [extreme(column) for column in of_random_runs(26, 30, 127, 150) for extreme in (min, max)],
    ),
    (
        FIGURES,
        "(seed 2611) run 49 was # % too low",
        lambda: [-100 * results("forecast_random_cpu")["seed_2611_before"]["2611/49"]["errors"]["peak"]],
    ),
    (FIGURES, "in run 198, which held # MB, it is one segment of # MiB too high", largest_segment),
    (FIGURES, "The mean differs by #, 95 % interval # to #", lambda: async_rollouts()[:3]),
    (FIGURES, "Seconds: # of the synchronous", lambda: async_rollouts()[3:]),
    (FIGURES, "Held-out greedy accuracy was # ± # % before", before_stale_rollouts),
    (FIGURES, "held-out bookings were # ± # before", before_turn_credit),
    (
        FIGURES,
        "plain GRPO's by # on average, 95 % interval # to # (Student's t over three pairs), and by #, # to #, where",
        lambda: beside_plain("after"),
    ),
    (
        FIGURES,
        "plain GRPO is at # %, the teacher alone at # %, and at # % with the mean taken off",
        lambda: [of_seeds(tries, "after")[0] for tries in results("distillation_40")["runs"].values()][:3],
    ),
    (
        FIGURES,
        "The last rollouts' rewards are higher by # (# to #) and # (# to #)",
        lambda: beside_plain("last_rollouts"),
    ),
    (FIGURES, "none was too low, but four phases, one of them the peak, # to # % too high", mended_phases),
    (FIGURES, "# minutes of one core, half of it the mode's own", minutes_of_invariance),
    (EXACTNESS, "at most # of the norm between cuts", lambda: apart_between_cuts()[:1]),
    (EXACTNESS, "up to # (packed) and # (T5 row by row) in bf16, # and # in fp16", lambda: apart_between_cuts()[1:]),
    (
        EXACTNESS,
        "# to # in bf16, # to # in fp16, and up to # and # where an encoder's prompts",
        apart_in_half_precision,
    ),
    (EXACTNESS, "Without the mode all of them move, by up to #.", without_the_mode),
    (
        EXACTNESS,
        "Over # tokens of three vocabularies and four wave sizes there were # ties",
        lambda: waves("sampled_tokens", "ties"),
    ),
    (FORECAST, "estimates were at most # % too low and # % too high, # % off in the median of ten", seconds_off),
    (FORECAST, "their updates were # % above the forecast at most", sharded_updates),
    (
        "docs/agents.md",
        "at eight turns an update takes # of their time where templates extend the conversation and # where",
        shared_turns,
    ),
    ("docs/agents.md", "where drawing takes the time, need # at # turns and # at #.", long_turns),
    ("docs/trl.md", "differ by # of the distance travelled under SGD and # under AdamW", same_rollouts),
    (
        "docs/trl.md",
        "Of # `GRPOConfig(...)` and `RLOOConfig(...)` in TRL's documentation (f2cd577) that TRL 1.16 accepts, # are",
        accepted,
    ),
    ("docs/simulated-memory.md", "under 1 µs each, and # to # µs under a simulated device (a phase #;", marks),
    (
        ENGINES,
        "in # steps the share of digits rose from # to # (own engine: # to #; means of three steps), and no log-prob "
        "was more than # nats from the trainer's. A step took # s against # s on",
        server,
    ),
    (
        ENGINES,
        "No log-prob was more than # nats from the trainer's in any of these runs, and each ended at a share of # or",
        troubles,
    ),
    (ENGINES, "two runs on it had equal rewards in all # steps, and reached # too", one_ahead),
    (
        "docs/ppo.md",
        "one model being # MiB",
        lambda: [next(iter(results("ppo_layouts")["results"].values()))["weights_bytes"] / MIB],
    ),
    (DIFFUSION, "All 49 columns of 8 rows at once would take # MB at 50 steps", all_columns),
    (EXAMPLES, "The process held at most # GiB, nearly all of it libraries", lambda: most_held("quickstart")),
    (EXAMPLES, "One seed; # minutes of CPU time, one thread; the process held # GiB at most", smollm2),
    (
        EXAMPLES,
        "(mean cosine of the first ten steps #, of the next ten #; CAGrad, seed 0)",
        lambda: studies("two_objectives")["--seed 0 --merge cagrad"]["cosines_of_tens"],
    ),
    (
        DIFFUSION,
        "In the end the critic foresees # to # of the returns' variance",
        lambda: foreseen("motion_grpo", "--ppo"),
    ),
    ("docs/ppo.md", "(`explained_variance` ends between # and #)", lambda: foreseen("qwen_ppo")),
    (
        FIGURES,
        "a denoiser): # runs, # refusals, # bytes pinned at a retry, no other token; weights at most #",
        card_storm,
    ),
    (FIGURES, "Qwen3-MoE): # tokens compared, # tokens, log-probs or scores differ", card_invariance),
    (FIGURES, "drew # tokens a second; `generate` #, at a peak above the weights of # MiB beside # here", card_rollout),
    (
        FIGURES,
        "the rollout was # times as fast as `generate`, and steps took # (LoRA), # (all weights) and, LoRA with a "
        "budget, # of TRL's time",
        card_speed_before,
    ),
    (
        FIGURES,
        "T5's weights under the budget came within #. Times were not: steps took # (LoRA), # (all weights) and, with a "
        "budget, # and # of TRL's time",
        card_later,
    ),
    (FIGURES, "it is exact: # MiB and # are the # MiB that were held", card_in_bfloat16),
    (FIGURES, "held # MiB with cuBLAS's #, and # % more was forecast of its update; # % now", card_in_4_bits),
    (FIGURES, "# mixes of features that `benchmarks.random_features` draws", lambda: card_features()[:1]),
    (
        FIGURES,
        "with # allocations refused no gradient differs by more than 1e-5 of its norm. Under plans drawn anew "
        "gradients differ by bfloat16's rounding, # to # of their norm",
        lambda: card_features()[1:],
    ),
    (FIGURES, "# more runs, of seeds 28 and 29", lambda: card_random_runs()[:1]),
    (
        FIGURES,
        "with `top_p` held # % more than was told. Forecasts count that now: of all of them, made again, peaks are # "
        "to # % off, and a phase at most # %",
        lambda: card_random_runs()[1:],
    ),
    (FIGURES, "Without these # MiB, #, # and # % are missing", card_forecasts_without_cublas),
    (
        FIGURES,
        "(# rows, float32) takes # of the operators of `generate` and # of its time; one of a T5 of 12 and 12 layers "
        "# of the operators and # of the time",
        card_launches,
    ),
    (
        README,
        "a step took # to # (LoRA) and # to # (all weights) of TRL's time on different days, and the peaks of three "
        "networks of 0.6 to 8 B were forecast # to # % low",
        card_front_page,
    ),
    (ENGINES, "ragged (# to # tokens on average)", mean_tokens),
    ("docs/verify.md", "| float32 | 1e-5 | # to # in small networks", lambda: proved("float32")),
    ("docs/verify.md", "| bfloat16 | 1e-2 | #", lambda: proved("bfloat16")),
    (
        "docs/step.md",
        "fall from # to # at N = 1,024 and # at N = 256",
        lambda: [decode_steps(tokens) for tokens in (4096, 1024, 256)],
    ),
]
"""A page, words of it in which # is a number, and what the numbers are by the result files."""


@pytest.mark.parametrize(("page", "words", "values"), SENTENCES, ids=[f"{one[0]}: {one[1][:40]}" for one in SENTENCES])
def test_a_sentence_is_that_of_its_result_file(page: str, words: str, values: Callable[[], Sequence[float]]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    found = re.search(re.escape(words).replace(r"\#", f"({NUMBER})"), text)
    assert found is not None, words
    assert differing(found.groups(), values()) == []


def test_the_quickstart_takes_as_long_as_the_front_page_says() -> None:
    assert "at most five minutes of training on one core" in " ".join((ROOT / README).read_text().split())
    assert max(one["seconds"] for one in studies("quickstart").values()) < 300
