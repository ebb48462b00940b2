"""Holds the screens of the pages to what the commands print; figures of a machine are left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memsafe_rl.memory.planning.policies import preset
from memsafe_rl.types import UpdateWork
from tests.diagnostics.test_oom_messages import CASE
from tests.docs.reader import ROOT, blocks
from tests.docs.test_tables import GIB, results, table_behind
from tests.memory.planning.test_search import CARDS, MODELS, memory

app: Any = importlib.import_module("memsafe_rl.cli.app")
LAUNCH = "distributed_type: 'NO'\ngradient_accumulation_steps: 4\n"


def screens(page: str) -> list[tuple[str, list[str]]]:
    """Returns the commands of a page, or "" where none is shown, and the lines behind each."""
    found = []
    for block in blocks(ROOT / "docs" / f"{page}.md", "text"):
        first, _, rest = block.partition("\n")
        told, lines = (first[2:], rest) if first.startswith("$ ") else ("", block)
        found.append((told, lines.splitlines()))
    return found


def printed(command: str, columns: int = 120) -> list[str]:
    """Returns what a command prints, its lines without trailing spaces."""
    shown = CliRunner().invoke(app.app, command.split()[1:], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    return [line.rstrip() for line in shown.output.splitlines()]


def test_the_proof_is_what_the_command_printed() -> None:
    ((command, lines),) = screens("verify")
    found = results("screens")["screens"]["verify"]
    assert (command, lines) == (found["command"], found["lines"])


def test_doctor_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (healthy, (line,)), (command, lines) = screens("doctor")
    kind = re.compile(r"healthy: torch [\d.]+\+\w+ for cpu, no GPU, \d+ cores, [\d.]+ \wiB of [\d.]+ \wiB RAM free")
    assert healthy == "memsafe-rl doctor"
    assert kind.fullmatch(line)
    if (told := printed(healthy))[0].startswith("healthy"):  # this machine has no GPU either, and no other finding
        assert kind.fullmatch(told[0]) or "GPU(s)" in told[0]
    monkeypatch.chdir(tmp_path)
    Path("launch.yaml").write_text(LAUNCH)
    Path("run.yaml").write_text("model: Qwen/Qwen3-0.6B\n")
    Path("train.py").write_text("import torch\n")
    assert lines.pop() == "..."
    assert "\n".join(lines) in "\n".join(printed(command))


def test_an_explanation_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((command, lines),) = screens("explain-oom")
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text(CASE)
    told = "\n".join(printed(command, 107))
    for part in re.split(r" ?\.\.\.\n?", "\n".join(lines)):
        assert part in told


@pytest.mark.slow
def test_the_phases_are_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, lines),) = screens("simulated-memory")
    (script,) = (block for block in blocks(ROOT / "docs" / "simulated-memory.md", "python") if "phase_peaks" in block)
    exec(compile(script, "simulated-memory.md", "exec"), {"__name__": "docs"})
    told = capsys.readouterr().out.splitlines()[-len(lines) :]
    assert [re.findall("[a-z_]+", line) for line in told] == [re.findall("[a-z_]+", line) for line in lines]
    assert numbers(told) == pytest.approx(numbers(lines), abs=0.11)  # MiB


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"[\d.]+(?= MiB|,|$)", line)]


def test_presets_plan_as_the_page_says() -> None:
    rows = table_behind("docs/memory-policies.md", "## Presets for cards")
    for (_, *cells), sizes in zip(rows, MODELS.values(), strict=True):
        held = sizes.parameter_bytes + 2 * sizes.trainable_bytes
        work = UpdateWork((1536,) * 64, (1024,) * 64, sizes)
        for cell, (card, gib) in zip(cells, CARDS.items(), strict=True):
            budget = int(0.9 * gib * GIB)
            plan = preset(card).before_update(
                work, memory(budget, live_bytes=held, optimizer_bytes=2 * sizes.trainable_bytes)
            )
            told = "fits" if plan.predicted_bytes["update"] <= budget else "the weights alone are in the way"
            told += ", state parked" if plan.park_optimizer and told == "fits" else ""
            told += ", offloaded" if plan.offload_activations and told == "fits" else ""
            assert told == cell, (card, sizes)
