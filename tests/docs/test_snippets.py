"""Runs what the pages show: Python, run files and commands."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from datasets import Dataset
from typer.testing import CliRunner

from memsafe_rl import GRPOConfig, GRPOTrainer, MCPTools, MemoryPolicy, PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer
from memsafe_rl.cli.arguments import read_request, require
from memsafe_rl.cli.train import ingredients, prepare
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.trainers.policy_trainer import PolicyTrainer
from tests.docs.reader import PAGES, ROOT, TEXT_MODELS, blocks
from tests.trainers.helpers import PROMPTS, count_digits

SLOW = ("agents", "forecast")
"""Pages whose Python takes more than two seconds."""
app: Any = importlib.import_module("memsafe_rl.cli.app")  # of whose name the package has the commands themselves
TRAINERS: dict[type, Any] = {GRPOConfig: GRPOTrainer, RLOOConfig: RLOOTrainer, PPOConfig: PPOTrainer}


def pages_with(language: str) -> list[Any]:
    """Returns the pages that have blocks of a language."""
    found = [page for page in PAGES if blocks(page, language)]
    return [pytest.param(page, marks=[pytest.mark.slow] if page.stem in SLOW else (), id=page.stem) for page in found]


def rewards_for(config: TrainerConfig) -> list[Any]:
    """Returns a reward function under each name that the objectives of a run ask for."""

    def named(name: str) -> Any:
        def reward(completions: Any, **columns: Any) -> list[float]:
            return count_digits(completions)

        reward.__name__ = name
        return reward

    objectives = getattr(config, "objectives", None) or {"": {"rewards": ["count_digits"]}}
    return [named(name) for objective in objectives.values() for name in objective["rewards"]]


def train_a_step(trainer: PolicyTrainer) -> None:
    rmtree(trainer.args.output_dir, ignore_errors=True)
    assert trainer.train().global_step == 1


def trainer_of(kind: Any, config: TrainerConfig, **given: Any) -> PolicyTrainer:
    dataset = Dataset.from_dict({"prompt": 4 * PROMPTS})
    trainer: PolicyTrainer = kind(TEXT_MODELS[0], rewards_for(config), args=config, train_dataset=dataset, **given)
    return trainer


def put_to_use(made: Any) -> None:
    """Trains with a trainer, settings, a class of trainers or a memory policy that a page has made."""
    if inspect.isclass(made):
        if made.__module__ == "docs" and issubclass(made, PolicyTrainer):
            train_a_step(trainer_of(made, made.config_class()))
        elif made.__module__ == "docs" and issubclass(made, MemoryPolicy):
            put_to_use(made())
    elif isinstance(made, PolicyTrainer) and made.state.global_step == 0:
        train_a_step(made)
    elif isinstance(made, TrainerConfig):
        train_a_step(trainer_of(TRAINERS[type(made)], made))
    elif isinstance(made, MemoryPolicy):
        train_a_step(trainer_of(GRPOTrainer, GRPOConfig(), memory_policy=made))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Could not find a config file")  # of peft, which asks the hub itself
@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_runs(page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docs", ModuleType("docs"))  # where dataclasses look for the types of a class
    scope: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        known = {name: id(value) for name, value in scope.items()}
        exec(compile(block, str(page), "exec"), scope)
        for name, made in list(scope.items()):
            if known.get(name) != id(made):
                put_to_use(made)
    for made in scope.values():
        if isinstance(made, MCPTools):
            made.close()


def test_the_python_of_a_page_knows_every_name_and_imports_none_in_vain(tmp_path: Path) -> None:
    for page in PAGES:
        (tmp_path / f"{page.stem}.py").write_text("\n".join(blocks(page, "python")))
    wanted = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F401,F821", str(tmp_path)]
    found = subprocess.run(wanted, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("yaml"))
def test_the_run_files_of_a_page_are_read(page: Path, reader: Path) -> None:
    for block in blocks(page, "yaml"):
        Path("shown.yaml").write_text(block)
        request = read_request(["shown.yaml"])
        require(request)
        assert ingredients(prepare(request))["reward_funcs"]


@pytest.mark.parametrize("page", pages_with("bash"))
def test_the_shell_of_a_page_is_shell(page: Path) -> None:
    for block in blocks(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0


@pytest.mark.parametrize(("told", "code", "queued"), [(True, 75, "requeue 7\n"), (False, 0, "")])
def test_a_batch_script_queues_a_run_that_was_told_to_end(told: bool, code: int, queued: str, tmp_path: Path) -> None:
    (script,) = [block for block in blocks(ROOT / "docs" / "run-folder.md", "bash") if "#SBATCH" in block]
    waits = "trap 'kill $!; exit 75' TERM; sleep 30 & touch sleeping; wait" if told else "true"
    for name, does in {"memsafe-rl": waits, "scontrol": 'echo "$@" >> queue'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "queue").touch()
    named = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=named)
    while told and not (tmp_path / "sleeping").exists():
        time.sleep(0.01)
    if told:
        time.sleep(0.3)  # until the script, too, has set its trap
        job.terminate()
    assert job.wait(timeout=20) == code
    assert (tmp_path / "queue").read_text() == queued


USUAL = {"train": "run.yaml", "verify": "run.yaml", "plan": "run.yaml", "init": "run.yaml", "report": "outputs/run"}
USUAL |= {"explain-oom": "train.log"}
"""What a sentence that names a command, and perhaps a flag, leaves out."""
STANDS_FOR = {"NAME": "Qwen/Qwen3-4B", "MODEL": "Qwen/Qwen3-4B", "SIZE": "24GiB", "CARD": "RTX 4090"}
STANDS_FOR |= {"FILE": "run.yaml", "CONFIG.yaml": "run.yaml"}


def commands_of(page: Path) -> list[list[str]]:
    """Returns the words of each `memsafe-rl` command of a page, in blocks and in sentences."""
    text = "\n".join(blocks(page, "bash", "text")).replace("\\\n", " ")
    shown = re.findall(r"^ *(?:\$ )?memsafe-rl (.*?)(?: &)?$", text, flags=re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in shown]
    for line in re.findall(r"`memsafe-rl ([^`]+)`", page.read_text()):
        words = shlex.split(line)
        left_out = words[0] in USUAL and not any(word == "--help" or "model" in word or "." in word for word in words)
        found.append([*words, USUAL[words[0]]] if left_out and not set(words) & {*STANDS_FOR} else words)
    return [[STANDS_FOR.get(word, word) for word in words] for words in found]


def idle(name: str, room: str = "cli") -> Any:
    """Stands for the module of a command: reads and checks what it is asked, and does nothing."""
    real = importlib.import_module(f"memsafe_rl.{room}.{name}")
    module = MagicMock(**{part: getattr(real, part) for part in ("prepare", "wish") if hasattr(real, part)})
    module.plan.return_value = MagicMock(), MagicMock()
    return module


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if commands_of(page)])
def test_the_commands_of_a_page_are_understood(page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "command", idle)
    for words in commands_of(page):
        result = CliRunner().invoke(app.app, words)
        assert result.exit_code == 0, f"memsafe-rl {shlex.join(words)}: {result.output}"
