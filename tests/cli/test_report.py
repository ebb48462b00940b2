"""`memsafe-rl report`: one page that stands alone, with the figures of the run's own records."""

from __future__ import annotations

import functools
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerCallback
from typer.testing import CliRunner

from memsafe_rl.callbacks.console import summary
from memsafe_rl.cli import app
from memsafe_rl.cli.charts import MOST_POINTS, Limit, Mark, Plot, Series, draw, y_ticks
from memsafe_rl.cli.report import page, report
from memsafe_rl.diagnostics.run_figures import read_run, run_figures
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import Phase, UpdatePlan
from memsafe_rl.units import format_bytes, percent
from tests.trainers.helpers import count_digits, make_trainer

RUNNER = CliRunner()
MIB = 2**20
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def step(number: int, **metrics: Any) -> dict[str, Any]:
    peaks = {"memory/rollout_peak_bytes": 3.0 * MIB, "memory/update_peak_bytes": 5.0 * MIB}
    predicted = {"memory/rollout_predicted_bytes": 3.3 * MIB, "memory/update_predicted_bytes": 4.0 * MIB}
    held = {"rollout": {"weights": MIB, "kv_cache": 2 * MIB}, "update": {"weights": MIB, "activations": 4 * MIB}}
    rest = {"memory/peak_bytes": 5.0 * MIB, "memory/budget_bytes": 8.0 * MIB, "loss": 0.5, "step_time": 2.0}
    drawn = {"reward": number / 10, "completions/mean_length": 7.0, "num_tokens": 100.0 * number}
    return {"step": number, **rest, **peaks, **predicted, **drawn, "held_at_peak": held, **metrics}


def write(folder: Path, steps: list[dict[str, Any]], events: list[dict[str, Any]] | None = None, **run: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (folder / "memory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events or []))
    content = {"device": {"kind": "simulated", "name": "simulated device", "total_bytes": 9 * MIB}, "rollout_rows": 32}
    (folder / "run.json").write_text(json.dumps({**content, "max_steps": 4, **run}))
    return folder


def html_of(folder: Path) -> str:
    """Renders a folder, once as long as nothing in it has changed."""
    return rendered(folder, tuple(sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())))


@functools.cache
def rendered(folder: Path, _: tuple[tuple[str, int], ...]) -> str:
    return page(read_run(folder))


def words(folder: Path) -> str:
    return " ".join(" ".join(read(html_of(folder)).words).split())


# ------------------------------------------------------------------ a real run


class Faults(TrainerCallback):  # type: ignore[misc]
    def __init__(self, device: SimulatedMemory) -> None:
        self.device = device

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.device.fail_after(60)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of four steps with one failure, and its trainer."""
    folder = tmp_path_factory.mktemp("runs") / "sums"

    def hostile(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("note", ["<script>alert('x')</script>"] * len(completions))
        return count_digits(completions)

    with SimulatedMemory(2**24, exact=False) as device:
        options: dict[str, Any] = {"reward_funcs": hostile, "callbacks": [Faults(device)], "log_completions": True}
        trainer = make_trainer(folder, max_steps=4, logging_steps=2, beta=0.1, **options)
        trainer.train()
    return folder, trainer


@pytest.mark.slow
def test_every_step_is_recorded_with_who_held_the_bytes(run: tuple[Path, Any]) -> None:
    folder, trainer = run
    recorded = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in recorded] == [1, 2, 3, 4]
    for line, known in zip(recorded, trainer.history, strict=True):
        assert line["memory/update_peak_bytes"] == known["memory/update_peak_bytes"]
        assert line["reward"] == known["reward"]
        held = line["held_at_peak"]
        assert set(held) >= {"rollout", "update", "optimizer"}
        for phase, parts in held.items():
            assert sum(parts.values()) == line[f"memory/{phase}_peak_bytes"]
        assert held["update"]["weights"] == held["rollout"]["weights"] > 0
        assert held["update"]["activations"] > 0
        assert held["rollout"]["kv_cache"] > 0


def test_in_host_memory_the_process_and_what_plans_expect_are_parts_of_their_own(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1).train()
    line = json.loads((tmp_path / "steps.jsonl").read_text())
    for phase, parts in line["held_at_peak"].items():
        assert sum(parts.values()) == line[f"memory/{phase}_peak_bytes"]
        assert parts["process"] > 0.5 * sum(parts.values()), "Python and torch are larger than a toy network"
    meter: Any = SimpleNamespace(
        **dict.fromkeys(("reserved_peak_bytes", "stranded_bytes", "reset_peak"), lambda: None),
        **dict.fromkeys(("peak_by_component", "live_by_component"), dict),
        **dict.fromkeys(("live_bytes", "allocator_retries"), int),
        peak_bytes=lambda: 100,
        is_exact=False,
    )
    for expected, parts in (
        ({"activations": 60, "logits": 50}, {"process": 10, "activations": 60, "logits": 30}),
        ({"activations": 60}, {"process": 10, "activations": 60, "other": 30}),
    ):
        tracker = MemoryTracker("cpu", meter, 200, process_bytes=10)
        planned = {f"update/{name}": size for name, size in expected.items()}
        tracker.adopt(UpdatePlan(predicted_bytes={"update": 90, **planned}), UpdatePlan)
        with tracker.phase(Phase.UPDATE):
            pass
        tracker.drain()
        assert tracker.step_parts == {"update": parts}


@pytest.mark.slow
def test_the_report_of_a_real_run_stands_alone_and_runs_nothing(run: tuple[Path, Any]) -> None:
    folder, trainer = run
    found = RUNNER.invoke(app, ["report", str(folder)])
    assert found.exit_code == 0, found.output
    html = (folder / "report.html").read_text()
    assert found.stdout.strip() == str(folder / "report.html")
    reader = read(html)
    assert not {"script", "img", "link", "iframe", "object"} & set(reader.tags)
    assert not [value for name, value in reader.attributes if name in ("src", "srcset") or name.startswith("on")]
    outside = [value for name, value in reader.attributes if name == "href" and not str(value).startswith("#")]
    assert outside == []
    assert "url(" not in html
    assert "default-src 'none'" in html
    assert "&lt;script&gt;alert" in html
    told = " ".join(reader.words)
    highest = max(int(step["memory/update_peak_bytes"]) for step in trainer.history)
    for expected in (format_bytes(highest), "hostile", "kv cache", "activations", "micro_batch_tokens", "torch"):
        assert expected in told
    for title in ("Memory", "Forecast against measured", "Learning", "Throughput", "Completions", "Configuration"):
        assert title in told
    assert "1 allocation failed" in told
    assert "learning_rate" in told


@pytest.mark.slow
def test_a_run_that_dies_leaves_the_failure_in_its_folder(tmp_path: Path) -> None:
    class Strike(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                device.set_capacity(device.live_bytes + 1000)

    with SimulatedMemory(2**24, exact=False) as device, pytest.raises(Exception, match="does not fit"):
        make_trainer(tmp_path, max_steps=3, callbacks=[Strike()]).train()
    told = words(tmp_path)
    assert "Stopped by MemoryBudgetError" in told
    assert "refused in rollout" in told


# ------------------------------------------------------------------ figures


def test_figures_are_those_of_the_records() -> None:
    failure = {
        "event": "failure",
        "step": 1,
        "seconds_lost": 0.5,
        "phase": "update",
        "requested_bytes": MIB,
        "tries": 1,
    }
    forecast = {"event": "forecast", "step": 0, "predicted_peak_bytes": 6 * MIB, "phases": {}}
    fallback = {"event": "fallback", "step": 1, "phase": "update", "changes": {"micro_batch_tokens": [64, 32]}}
    found = run_figures([step(1), step(2)], [forecast, failure, failure, fallback], rollout_rows=32)
    assert (found.steps, found.seconds, found.failures, found.leaner_plans) == (2, 4.0, 2, 1)
    assert (found.peak_bytes, found.peak_phase, found.budget_bytes) == (5 * MIB, "update", 8 * MIB)
    assert found.seconds_lost == 1.0
    assert found.budget_share == 0.625
    assert found.forecast_error == pytest.approx(0.2)
    assert (found.samples, found.samples_per_second, found.tokens_per_second) == (64, 16.0, 50.0)
    assert (found.first_reward, found.last_reward) == (0.1, 0.2)


def test_a_resumed_run_does_not_count_tokens_of_the_part_before() -> None:
    assert run_figures([step(11), step(12)], []).tokens_per_second == 25.0


def test_a_run_without_a_step_has_no_figures() -> None:
    found = run_figures([], [])
    assert (found.peak_bytes, found.budget_share, found.forecast_error, found.samples_per_second) == (None,) * 4


def test_the_summary_says_what_the_run_came_to() -> None:
    console = Console(file=io.StringIO(), width=100)
    events = [{"event": "forecast", "predicted_peak_bytes": 6 * MIB}, {"event": "failure", "seconds_lost": 0.5}]
    summary(run_figures([step(1), step(2)], events, rollout_rows=32), console, since=4)
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert "since step 4" in told
    for expected in ("6.00 MiB", "5.00 MiB, in update", "+20.0%", "62.5% used", "0.50 s, 12.5%", "16.00"):
        assert expected in told


# ------------------------------------------------------------------ the page


@pytest.mark.slow
def test_forecast_and_plans_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    forecast = {"event": "forecast", "step": 0, "predicted_peak_bytes": 6 * MIB, "phases": {"update": 6 * MIB}}
    told = words(write(tmp_path, [step(1), step(2)], [forecast]))
    assert "update 6.00 MiB 5.00 MiB +20.0% 2 -20.0% -20.0% -20.0%" in told
    assert "whole process" not in told
    assert "rollout - 3.00 MiB - 2 +10.0% +10.0% +10.0%" in told


@pytest.mark.slow
def test_a_forecast_of_tensors_is_not_held_against_a_whole_process(tmp_path: Path) -> None:
    """On a plain CPU every forecast was 99 % off."""
    forecast = {"event": "forecast", "step": 0, "predicted_peak_bytes": 6 * MIB, "phases": {"update": 6 * MIB}}
    told = words(write(tmp_path, [step(1), step(2)], [forecast], counts_tensors=False))
    assert "update 6.00 MiB 5.00 MiB - 2 -20.0%" in told
    assert "20.0% off" not in told
    assert "6.00 MiB of tensors alone" in told
    assert "what was measured is the whole process" in told
    console = Console(file=io.StringIO(), width=100)
    summary(run_figures([step(1)], [forecast], counts_tensors=False), console)
    assert isinstance(console.file, io.StringIO)
    assert "5.00 MiB, in update, of the whole process" in console.file.getvalue()
    assert "forecast error" not in console.file.getvalue()


@pytest.mark.slow
def test_a_resumed_run_began_when_it_first_did(tmp_path: Path) -> None:
    starts = [{"began": 0.0, "first_step": 0}, {"began": 9e8, "first_step": 12}, {"began": 1e9, "first_step": 28}]
    told = words(write(tmp_path, [step(1)], began=1e9, starts=starts))
    assert "begun 1970-01-01" in told or "begun 1969-12-31" in told
    assert "resumed after step 12, 28" in told


@pytest.mark.slow
def test_events_are_told_at_the_step_they_belong_to_and_alike_ones_once(tmp_path: Path) -> None:
    alarm = {"event": "alarm", "kind": "allocator_retries", "sentence": "The allocator <tidied> up."}
    plan = {"event": "plan", "kind": "update", "micro_batch_tokens": 64, "checkpointing": False, "predicted_bytes": {}}
    events = [
        {**plan, "step": 0},
        {**plan, "step": 1, "micro_batch_tokens": 60},
        {**plan, "step": 2, "micro_batch_tokens": 60, "checkpointing": True},
        {**alarm, "step": 0},
        {**alarm, "step": 2},
        {**alarm, "step": 2, "kind": "leak", "component": "activations", "sentence": "It leaks."},
        {"event": "failure", "step": 1, "phase": "update", "requested_bytes": MIB, "tries": 1, "seconds_lost": 0.25},
        {"event": "degradation", "step": 2, "remedy": "x", "changes": {"max_completion_length": [64, 32]}},
    ]
    folder = write(tmp_path, [step(n) for n in (1, 2, 3)], events)
    told, html = words(folder), html_of(folder)
    assert "2 times, from step 1 to 3, first: The allocator <tidied> up." in told
    assert "step 2 It leaks." in told
    assert "1 allocation failed; the work was repeated, which cost 0.25 s." in told
    assert "max_completion_length 64 → 32" in told
    assert "step 2: 1.00 MiB refused in update, try 1; 0.25 s lost" in told
    assert "update: checkpointing no → yes" in told
    assert "64 → 60" not in told  # lengths alone move sizes by as much
    assert html.count('class="mark plan"') == 2
    assert html.count('class="mark failure"') == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "counts", "said"),
    [("cuda", True, "kv cache, as planned the rest"), ("host", False, "whatever else the process")],
)
def test_where_only_owners_are_known_the_rest_is_called_the_rest(
    tmp_path: Path, kind: str, counts: bool, said: str
) -> None:
    held = {"update": {"weights": MIB, "other": 3 * MIB, "kv_cache": MIB // 2, "process": MIB // 2}}
    device = {"kind": kind, "name": "L4", "total_bytes": 9 * MIB}
    folder = write(tmp_path, [step(1, held_at_peak=held)], device=device, counts_tensors=counts)
    assert said in words(folder)
    assert html_of(folder).index("swatch c8") < html_of(folder).index("swatch c0"), "the process itself lies below all"


@pytest.mark.slow
def test_a_large_process_is_no_block_that_hides_the_rest(tmp_path: Path) -> None:
    parts = {"weights": MIB, "activations": 4 * MIB}
    for process, is_left_out in ((500 * MIB, True), (3 * MIB, False)):
        held = {"update": {"process": process, **parts}}
        lines = [step(at, held_at_peak=held, **{"memory/budget_bytes": 502.0 * MIB}) for at in (1, 2)]
        chart = figures(write(tmp_path / str(is_left_out), lines))["Peak of the update, by use"]
        assert ("Above the 500.00 MiB that the process itself holds" in chart) is is_left_out
        assert ("swatch c8" in chart) is not is_left_out
        assert f"together: {'5 MiB' if is_left_out else '8 MiB'}" in chart
        assert ("far above this scale" in chart) is not is_left_out, "the budget moves with the zero of the scale"


@pytest.mark.slow
def test_charts_of_nothing_but_zeros_are_listed_instead(tmp_path: Path) -> None:
    zero = {"frac_reward_zero_std": 0.0, "completions/clipped_ratio": 0.0}
    folder = write(tmp_path, [step(1, **zero), step(2, **{**zero, "completions/clipped_ratio": 0.5})])
    assert "Groups without a signal" not in figures(folder)
    assert "the same in every step Groups without a signal 0%" in words(folder)
    assert "Truncated completions" in figures(folder)


@pytest.mark.slow
def test_a_phone_gets_larger_letters_and_tables_without_columns(tmp_path: Path) -> None:
    html = html_of(write(tmp_path, [step(1)]))
    assert re.search(r"@media \(max-width: 620px\) \{ svg text \{ font-size: 13.5px !important", html)
    assert 'data-label="highest measured"' in html


@pytest.mark.slow
def test_a_folder_of_an_earlier_version_is_reported_from_its_log(tmp_path: Path) -> None:
    lines = [{**step(1), "held_at_peak": None}, {"step": 1, "eval_reward": 0.5}, {"step": 1, "train_runtime": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "lo')
    told = words(tmp_path)
    assert "1 unreadable line(s) left out" in told
    assert "all uses together" in told
    assert "Evaluation reward" in told
    assert "This run wrote no run.json" in told


def test_numbers_that_are_none_break_nothing(tmp_path: Path) -> None:
    odd = step(2, reward=None, kl=float("nan"), loss=float("inf"))
    assert "steps 3" in words(write(tmp_path, [step(1), odd, step(3, **{"rewards/judge/mean": None})]))


def figures(folder: Path) -> dict[str, str]:
    """Returns the small charts of a report by their titles."""
    found = re.findall(r"<figure><h3>(.*?)</h3>(.*?)</figure>", html_of(folder), re.DOTALL)
    assert len({title for title, _ in found}) == len(found)
    return dict(found)


def sections(folder: Path) -> list[str]:
    return re.findall(r"<h2 id=[^>]*>(.*?)</h2>", html_of(folder))


@pytest.mark.slow
def test_a_critic_has_charts_of_its_own(tmp_path: Path) -> None:
    assert "Critic" not in sections(write(tmp_path, [step(1), step(2)]))
    critic = {"value_loss": 0.2, "explained_variance": 0.4, "values/mean": 0.1, "returns/mean": 0.3, "policy_loss": 0.1}
    coefficient = {"clip_ratio/value": 0.05, "kl_coef": 0.01, "objective/kl": 0.7, "objective/non_score_reward": -0.1}
    folder = write(tmp_path, [step(1, **critic, **coefficient), step(2, **critic, **coefficient)])
    assert "Critic" in sections(folder)
    shown = figures(folder)
    for title, value in {
        "Critic loss": "half the squared error: 0.2",
        "Explained variance of returns": "explained: 0.4",
        "Values and returns": "actual: 0.3\npredicted: 0.1",
        "Clipped values": "share: 5%",
        "KL coefficient": "reward a nat: 0.01",
        "KL per row to the reference": "nats a row: 0.7",
        "Reward that the KL takes from a row": "in units of reward: -0.1",
        "Loss": "of the policy: 0.1\nwhole: 0.5",
    }.items():
        assert value in shown[title], title
    assert "Other metrics" not in sections(folder)


@pytest.mark.slow
def test_objectives_have_charts_of_their_own_with_bands_and_shares(tmp_path: Path) -> None:
    def of(name: str, coefficient: float, norm: float) -> dict[str, float]:
        known = {"reward": 0.5, "kl": 0.03, "beta": 0.1, "loss": 0.2, "scored": 0.5, "coefficient": coefficient}
        return {f"objectives/{name}/{key}": value for key, value in {**known, "grad_norm": norm}.items()}

    both = {**of("fair", 250.0, 0.002), **of("true", 1.0, 3.0), "objectives/cosine/fair/true": -0.2}
    config = {"objectives": {"fair": {"rewards": ["a"], "kl_band": [0.02, 0.06]}, "true": {"rewards": ["b"]}}}
    folder = write(tmp_path, [step(1, **both), step(2, **both)], config=config)
    assert "Objectives" in sections(folder)
    shown = figures(folder)
    kl = shown["KL to the reference by objective"]
    assert "band of fair: 0.06\nband of fair: 0.02\ntrue: 0.03\nfair: 0.03" in kl
    assert kl.count("c0 dashed") >= 2, "in the colour of the objective"
    assert "true: 3\nfair: 0.5" in shown["Contribution of each objective to the step"]
    assert "true: 1\nfair: 250" in shown["Coefficient in the merge"]
    assert "fair/true: -0.2" in shown["Cosine between gradients"]
    assert "Other metrics" not in sections(folder)


@pytest.mark.slow
def test_episodes_have_charts_of_their_own(tmp_path: Path) -> None:
    tools = {"tools/call_frequency": 1.5, "tools/failure_frequency": 0.25, "tools/malformed_frequency": 0.0}
    lengths = {
        "episodes/mean_turns": 2.5,
        "episodes/sequences": 1.0,
        "episodes/no_room": 0.0,
        "episodes/out_of_turns": 0.5,
    }
    folder = write(tmp_path, [step(1, **tools, **lengths)])
    shown = figures(folder)
    assert "mean: 2.5" in shown["Turns per episode"]
    assert "malformed, of all turns: 0%\nfailed, of all calls: 25%" in shown["Failed tool calls"]
    assert "out of turns: 50%" in shown["Episodes cut short"]
    assert "Other metrics" not in sections(folder)


@pytest.mark.slow
def test_what_no_group_knows_is_shown_all_the_same(tmp_path: Path) -> None:
    odd = [{"a/b_mean": 0.1 * n, "a/b_max": 0.2 * n, "lonely": n / 3, "never/changes": 7.0} for n in (1, 2)]
    folder = write(tmp_path, [step(n, **more) for n, more in zip((1, 2), odd, strict=True)])
    logs = [{"step": n, "loss": 0.5, "from_a_reward": 3.0 * n, **more} for n, more in zip((1, 2), odd, strict=True)]
    logs += [{"step": 2, "eval_reward": 0.5, "eval_b_reward": 0.25, "eval_b_pass@2": 0.75, "eval_b_odd": 0.125}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logs))
    shown = figures(folder)
    assert "max: 0.4\nmean: 0.2" in shown["a/b"]
    assert ": 0.6667" in shown["lonely"]
    assert ": 6" in shown["from_a_reward"]
    assert "b: 0.25\nmean: 0.5" in shown["Evaluation reward"]
    assert "b pass@2: 75%" in shown["Passed within k tries"]
    assert ": 0.125" in shown["eval_b_odd"]
    assert "never/changes 7" in words(folder)
    assert [title for title in shown if "loss" in title.lower()] == ["Loss"]


@pytest.mark.slow
def test_no_metric_of_a_real_run_vanishes(run: tuple[Path, Any]) -> None:
    folder, trainer = run
    drawn = "".join(figures(folder).values())
    for name in ("clip_ratio/low_min", "sampling/tied_fraction"):
        assert name in trainer.history[0]
        assert name in words(folder)
    for value in (
        trainer.history[1]["approx_kl/k1_sequence"],
        trainer.history[1]["completions/mean_terminated_length"],
    ):
        assert f"{value:.4g}" in drawn


def test_colours_of_many_series_begin_anew(tmp_path: Path) -> None:
    rewards = {f"rewards/r{n}/mean": n / 10 for n in range(12)}
    folder = write(tmp_path, [step(1, **rewards), step(2, **rewards)])
    assert set(re.findall(r"swatch c(\d+)", html_of(folder))) <= set("01234567")


def test_shares_are_written_so_that_ticks_differ() -> None:
    assert [percent(value) for value in (0.0, 0.0005, 0.0025, 0.125, 1.0, -0.05)] == [
        "0%",
        "0.05%",
        "0.25%",
        "12.5%",
        "100%",
        "-5%",
    ]


@pytest.mark.slow
def test_completions_are_shown_best_and_worst_and_escaped(tmp_path: Path) -> None:
    write(tmp_path, [step(1)])
    (tmp_path / "completions").mkdir()
    rows = [
        {
            "step": 1,
            "prompt": [{"role": "user", "content": f"<b>{n}</b>"}],
            "completion": f"answer {n}\x07",
            "advantage": n,
        }
        for n in range(9)
    ]
    (tmp_path / "completions" / "completions_00001.jsonl").write_text("\n".join(map(json.dumps, rows)))
    html = page(read_run(tmp_path))
    assert "<b>8" not in html
    told = " ".join(read(html).words)
    assert "user: <b>8</b>" in told
    assert "answer 8\\x07" in told
    assert [n for n in range(9) if f"answer {n}" in told] == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "foreign", "not a log"])
def test_a_folder_without_a_run_is_an_error_with_a_remedy(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "x"
    if kind == "file":
        folder.write_text("x")
    elif kind != "missing":
        folder.mkdir()
    if kind == "foreign":
        (folder / "trainer_state.json").write_text("{}")
    if kind == "not a log":
        (folder / "metrics.jsonl").write_text('[1]\n{"step": 1, "accuracy": 0.5}\n')
    found = RUNNER.invoke(app, ["report", str(folder)])
    assert found.exit_code == 2
    assert "Give the output_dir" in found.stderr
    assert not (folder / "report.html").exists()


@pytest.mark.slow
def test_the_page_goes_where_it_is_sent(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(1)])
    assert report(str(folder), str(tmp_path / "a.html")) == tmp_path / "a.html"
    with pytest.raises(ConfigError, match="cannot be written"):
        report(str(folder), str(tmp_path / "nowhere" / "a.html"))
    with pytest.raises(ConfigError, match=r"steps\.jsonl' exists and does not end in .html"):
        report(str(folder), str(folder / "steps.jsonl"))


# ------------------------------------------------------------------ charts


@pytest.mark.parametrize(
    ("low", "high", "binary", "ticks"),
    [
        (0.0, 1.0, False, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.0, 7.3 * MIB, True, (0, 2 * MIB, 4 * MIB, 6 * MIB, 8 * MIB)),
        (3.0, 3.0, False, (3.0, 4.0, 5.0, 6.0)),
        (-0.3, 0.9, False, (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)),
    ],
)
def test_ticks_are_round_and_span_the_range(low: float, high: float, binary: bool, ticks: tuple[float, ...]) -> None:
    found = y_ticks(low, high, binary=binary)
    assert found[0] <= low
    assert found[-1] >= high
    assert found == pytest.approx(ticks)


def chart(steps: list[int], series: list[Series], *, title: str = "x", **options: Any) -> str:
    return draw(steps, Plot(title, series, str, **options))


def heights(svg: str) -> list[float]:
    """Returns the upper edge of the first layer, step by step."""
    points = re.findall(r'<path d="M ([^"]+)" style="fill: var\(--c0\)', svg)[0].split(" L ")
    return [float(point.split()[1]) for point in points[1 : len(points) // 2 - 1 : 2]]


def test_layers_are_as_high_as_their_values() -> None:
    svg = chart([1, 2], [Series("a", [2.0, 4.0], 0), Series("b", [1.0, None], 1)], stacked=True)
    first, second = heights(svg)
    floor, top = 166, 24  # of a drawing of 186 units, with the axis up to 4
    assert floor - first == pytest.approx((floor - top) / 2, abs=0.1)
    assert second == pytest.approx(top, abs=0.1)
    assert "together: 3.0" in svg


def test_long_runs_keep_their_highest_moment_and_few_points() -> None:
    values: list[float | None] = [1.0] * 5000
    values[3210] = 9.0
    svg = chart(list(range(1, 5001)), [Series("peak", values, 0)], stacked=True)
    assert len(heights(svg)) <= MOST_POINTS
    assert "peak: 9.0" in svg
    assert len(svg) < 100_000


def test_a_limit_far_above_all_values_is_said_and_not_drawn() -> None:
    near = chart([1], [Series("a", [5.0], 0)], limit=Limit(8.0, "budget"))
    far = chart([1], [Series("a", [5.0], 0)], limit=Limit(800.0, "budget"))
    assert 'class="limit"' in near
    assert 'class="limit"' not in far
    assert "far above this scale" in far


def test_marks_and_labels_are_escaped() -> None:
    svg = chart([1, 2], [Series("<a>", [1.0, 2.0], 0)], title='"x"', marks=[Mark(1, "failure", "<b>")])
    read(svg)
    assert "<a>" not in svg
    assert "&lt;b&gt;" in svg
