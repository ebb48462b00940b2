"""The suite for cards says what failed and goes on; its parts are rehearsed on the pretend device (`tests/device`)."""

import json
from io import StringIO
from pathlib import Path
from typing import Any, cast

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
    found = dict(budgets.beside("PPO", REHEARSAL, [0.6, 0.4, 0.3, 0.2]))
    assert [one["passed"] for one in found.values()] == [True, True, False, False, False]


class Pretended:
    """Stands for the process of a part: one dies, one hangs after its first row, the others end."""

    def __init__(self, command: list[str], *, stdout: Any, stderr: Any, **_: Any) -> None:
        assert command[1:4] == ["-m", "tests.device", "benchmarks.gpu_suite"]
        self.part = command[command.index("--alone") + 1]
        self.stdin, self.returncode = StringIO(), 0
        if self.part == "prove":
            stderr.write("Traceback ...\nRuntimeError: a kernel broke")
            self.returncode = 1
        else:
            stdout.write('a warning\n{"a row": {"seconds": 1.5, "passed": true}}\n{"half a ro')

    def wait(self, seconds: float | None = None) -> None:
        assert self.stdin.closed or self.stdin.getvalue() == "\n"
        if self.part == "budget" and self.returncode == 0:
            assert seconds is not None
            raise gpu_suite.subprocess.TimeoutExpired([], seconds)

    def kill(self) -> None:
        self.returncode = -9


def test_a_part_that_dies_or_hangs_keeps_its_rows_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite.subprocess, "Popen", Pretended)
    out = tmp_path / "found.json"
    assert gpu_suite.main(["--rehearse", "--parts", "prove", "budget", "rollout", "--out", str(out)]) == 1
    told = capsys.readouterr().out
    assert "a kernel broke" in told
    assert f"given up after {150 * gpu_suite.REHEARSAL_PATIENCE} s" in told
    results = json.loads(out.read_text())["results"]
    assert results["rollout"] == {"a row": {"seconds": 1.5, "passed": True}}
    assert results["budget"].keys() == {"a row", "error"}


@pytest.mark.parametrize("cores", [1, 8, 64])
def test_what_is_timed_has_the_machine_to_itself(
    cores: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running: set[str] = set()

    class Watched(Pretended):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.returncode, self.part = 0, self.part.replace("budget", "a budget")
            self.stdin = cast(Any, self)

        def write(self, _: str) -> None:
            running.add(self.part)
            most[:] = [max(most[0], len(running))]
            assert len(running) == 1 or not any(name in running for name in ("rollout", "forecast"))

        def flush(self) -> None: ...
        def close(self) -> None: ...

        def wait(self, seconds: float | None = None) -> None:
            running.discard(self.part)

    most = [0]
    monkeypatch.setattr(gpu_suite.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(gpu_suite.subprocess, "Popen", Watched)
    gpu_suite.main(["--rehearse", "--parts", "prove", "rollout", "budget", "forecast", "random"])
    assert most[0] == min(3, max(1, cores // 3))


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
