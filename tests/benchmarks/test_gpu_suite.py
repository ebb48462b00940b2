"""The suite for accelerators runs on the CPU in small, and says what failed."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from benchmarks import gpu_suite


@pytest.mark.slow
def test_a_rehearsed_forecast_is_what_the_run_holds() -> None:
    (case,) = gpu_suite.REHEARSAL.cases[:1]
    found = gpu_suite._foreseen(case, gpu_suite.REHEARSAL)
    assert found["passed"]
    assert abs(found["error"]) < 0.01
    assert found["failures"] == 0


def test_a_rehearsed_rollout_draws_every_token_on_both_sides() -> None:
    found = gpu_suite.rollout(gpu_suite.REHEARSAL)
    ours, theirs = found["memsafe_rl"], found["generate"]
    assert 0 < ours["above_weights_bytes"] < theirs["above_weights_bytes"]


@pytest.mark.slow
def test_each_budget_is_kept_with_the_same_tokens_and_weights() -> None:
    found = gpu_suite.budget(gpu_suite.REHEARSAL)
    peaks = [run["peak_bytes"] for run in found.values()]
    assert all(run["passed"] for run in found.values())
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 2


def test_other_weights_or_a_broken_budget_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(allowed: int | None, _: Any) -> dict[str, Any]:
        moved = torch.ones(4, dtype=torch.float64)
        tokens = [[1, 2]] if allowed is None or allowed > 140 else [[1, 3]]
        peak = 200 if allowed is None else 170 if allowed < 135 else 120
        return {
            "seconds": 1.0, "peak_bytes": peak, "state_bytes": 100, "failures": 0, "tokens": tokens, "moved": moved
        }  # fmt: skip

    monkeypatch.setattr(gpu_suite, "_trained_under", run)
    found = gpu_suite.budget(gpu_suite.REHEARSAL)
    assert [one["passed"] for one in found.values()] == [True, True, False, False]


def test_a_part_that_dies_or_hangs_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(command: list[str], **settings: Any) -> CompletedProcess[str]:
        part = command[command.index("--alone") + 1]
        if part == "prove":
            return CompletedProcess(command, 1, "", "Traceback ...\nRuntimeError: a kernel broke")
        if part == "budget":
            raise gpu_suite.subprocess.TimeoutExpired(command, settings["timeout"], stderr=b"still at it")
        return CompletedProcess(command, 0, 'a warning\n{"a row": {"seconds": 1.5, "passed": true}}\n', "")

    monkeypatch.setattr(gpu_suite.subprocess, "run", ended)
    out = tmp_path / "found.json"
    assert gpu_suite.main(["--rehearse", "--parts", "prove", "budget", "rollout", "--out", str(out)]) == 1
    told = capsys.readouterr().out
    assert "a kernel broke" in told
    assert "given up after 90 s" in told
    results = json.loads(out.read_text())["results"]
    assert results["rollout"]["a row"] == {"seconds": 1.5, "passed": True}


def test_without_an_accelerator_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_suite.main([])
    assert "--rehearse" in capsys.readouterr().err
