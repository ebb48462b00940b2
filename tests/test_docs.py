"""Holds the documents to the code: links lead somewhere, commands and Python blocks work, settings exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import memsafe_rl
from benchmarks import what_fits
from benchmarks.front_page import SETTINGS, with_table
from memsafe_rl import GRPOConfig, MemoryPolicy, RolloutPlan, UpdatePlan
from memsafe_rl.types import MemoryState, ModelGeometry, RolloutWork, UpdateWork
from tests.tiny import VOCAB_SIZE
from tests.trainers.helpers import make_trainer

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def block_after(marker: str) -> str:
    """Returns the README's code block that follows a marker comment."""
    found = re.search(rf"^<!-- {marker} -->\n```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert found is not None, f"README.md has no bash block right after <!-- {marker} -->"
    return found.group(1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_code_exist(page: Path) -> None:
    named = re.findall(r"`((?:tests|memsafe_rl|benchmarks|examples|docs)/[\w./-]+)", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_flags_named_in_commands_exist(page: Path) -> None:
    for name, words in re.findall(r"python -m ((?:benchmarks|examples)\.[\w.]+)([^`\n#]*)", page.read_text()):
        source = (ROOT / (name.replace(".", "/") + ".py")).read_text()
        assert [flag for flag in re.findall(r"--[\w-]+", words) if f'"{flag}"' not in source] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_import_public_names(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        for names in re.findall(r"^from memsafe_rl import (.+)$", block, flags=re.MULTILINE):
            assert set(re.split(r",\s*", names)) <= set(memsafe_rl.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_written_in_sentences_exist(page: Path) -> None:
    known = {setting.name for setting in fields(GRPOConfig)}
    for call in re.findall(r"`GRPOConfig\(([^`]*)\)`", page.read_text()):
        assert set(re.findall(r"(\w+)=", call)) <= known


@pytest.mark.parametrize("marker", ["quickstart:run", "quickstart:test"])
def test_readme_commands_set_up_the_cpu_build_with_tested_versions(marker: str) -> None:
    block = block_after(marker)
    torch_version = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert torch_version is not None
    assert f"torch=={torch_version.group(1)}+cpu" in block
    assert "-c constraints.txt -e '.[" in block
    assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    page = (tmp_path / "reference" / "index.html").read_text()
    assert all(f'id="memsafe_rl.{name}"' in page for name in ("GRPOTrainer", "forecast_memory", "MemoryBudget"))
    assert "fonts.googleapis" not in page


def test_the_page_of_what_fits_is_that_of_its_result_file() -> None:
    assert what_fits.PAGE.read_text() == what_fits.page(json.loads(what_fits.RESULTS.read_text())["results"])


def test_the_table_of_the_readme_is_that_of_the_result_files() -> None:
    readme = (ROOT / "README.md").read_text()
    assert with_table(readme) == readme
    assert readme.count("MB** |") == len(SETTINGS)


def test_readme_commands_run_what_they_are_for() -> None:
    assert block_after("quickstart:run").splitlines()[-1] == "python -m examples.quickstart"
    assert block_after("quickstart:test").splitlines()[-1] == "pytest"


def test_a_stranger_is_told_of_vllm_before_it_is_asked_for() -> None:
    (block,) = blocks((ROOT / "docs" / "rollout-engines.md").read_text(), "python")
    before, line, after = block.partition("GRPOConfig(use_vllm=True)")
    assert (line, after.strip()) == ("GRPOConfig(use_vllm=True)", "")
    assert "`pip install vllm` first" in before
    exec(before, {"__name__": "docs"})


def test_the_policy_of_the_docs_plans() -> None:
    _, block, _ = blocks((ROOT / "docs" / "memory-policies.md").read_text(), "python")
    scope: dict[str, object] = {"__name__": "docs"}
    exec(block, scope)
    (policy,) = (
        value()
        for value in scope.values()
        if isinstance(value, type) and issubclass(value, MemoryPolicy) and value is not MemoryPolicy
    )
    geometry = ModelGeometry(2, 64, 192, 4, 2, 16, 512, 128, (None, None), 500_000, 500_000, 4, 4)
    memory = MemoryState(device="cpu", budget_bytes=2**30, live_bytes=0, peak_bytes=0)
    rollout = policy.before_rollout(RolloutWork((7, 9), 8, 300, geometry), memory)
    update = policy.before_update(UpdateWork((20, 1100), (4, 4), geometry), memory)
    assert (type(rollout), rollout.rows_in_flight) == (RolloutPlan, 8)
    assert (type(update), update.checkpointing) == (UpdatePlan, True)


@pytest.mark.slow
def test_the_parts_of_a_users_own_train_together(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": __name__}  # whose types a declared setting looks up
    for block in blocks((ROOT / "docs" / "extending.md").read_text(), "python"):
        exec(block, scope)
    engine = make_trainer(tmp_path, rollout_engine=scope["by_hand"], loss_type="squared", max_steps=1)
    network = make_trainer(tmp_path, model=scope["GRUModel"](VOCAB_SIZE), advantage_estimator="best", max_steps=1)
    for trainer in (engine, network):
        assert trainer.train().global_step == 1


def test_ci_runs_the_readme_and_checks_style() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    for part in ("set -euo pipefail", "block quickstart:test", "ruff check .", "ruff format --check .", "mypy"):
        assert part in script
