"""The suite for cards says what failed and goes on; its parts are rehearsed on the pretend device (`tests/device`)."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu_parts import budgets
from benchmarks.gpu_parts.sizes import REHEARSAL
from tests.device import build


@pytest.fixture(autouse=True)
def _no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "built", lambda: Path())


def test_other_weights_a_broken_budget_or_a_failure_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(allowed: int | None, *_: Any) -> dict[str, Any]:
        moved = torch.ones(4, dtype=torch.float64)
        tokens = [[1, 2]] if allowed is None or allowed > 120 else [[1, 3]]
        reserved = 200 if allowed is None else 170 if allowed == 130 else 110
        failures = 1 if allowed in (140, 110) else 0
        return {
            "seconds": 1.0, "peak_bytes": 1, "reserved_bytes": reserved, "state_bytes": 100, "failures": failures,
            "tokens": tokens, "moved": moved,
        }  # fmt: skip

    monkeypatch.setattr(budgets, "trained_under", run)
    found = budgets.beside("PPO", REHEARSAL, [0.6, 0.4, 0.3, 0.2])
    assert [one["passed"] for one in found.values()] == [True, True, False, False, False]


def test_a_part_that_dies_or_hangs_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(command: list[str], **settings: Any) -> CompletedProcess[str]:
        part = command[command.index("--alone") + 1]
        assert command[1:4] == ["-m", "tests.device", "benchmarks.gpu_suite"]
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
    assert f"given up after {90 * gpu_suite.REHEARSAL_PATIENCE} s" in told
    results = json.loads(out.read_text())["results"]
    assert results["rollout"]["a row"] == {"seconds": 1.5, "passed": True}


def test_a_part_that_would_begin_after_the_deadline_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite, "DEADLINE_SECONDS", -1)
    assert gpu_suite.main(["--rehearse", "--parts", "step"]) == 1
    assert "no time was left" in capsys.readouterr().out


def test_every_part_is_there() -> None:
    for part in gpu_suite.PARTS.values():
        module = gpu_suite.import_module(f"benchmarks.gpu_parts.{part.module}")
        assert callable(getattr(module, part.function))


@pytest.mark.parametrize(("arguments", "lacks"), [([], "--rehearse"), (["--rehearse"], "no g++")])
def test_without_a_device_it_says_what_to_do(
    arguments: list[str], lacks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "missing", lambda: "no g++")
    with pytest.raises(SystemExit):
        gpu_suite.main(arguments)
    assert lacks in capsys.readouterr().err
