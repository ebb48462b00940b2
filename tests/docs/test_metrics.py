"""The page of metrics names what runs log, and every word of a name stands in the code."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.docs.reader import ROOT
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer
from tests.trainers.test_ppo import make_ppo

PLACEHOLDERS = {"NAME": "[a-z_0-9]+", "PHASE": "[a-z]+", "K": "[0-9]+"}
NOT_METRICS = re.compile(r"[a-z_]+\.jsonl|trainer\..*|eval_|report_to|memsafe-rl .*|log_metric|--.*")


def page() -> str:
    return (ROOT / "docs" / "metrics.md").read_text()


def names() -> list[str]:
    """Returns the first column of every table, name by name, and what stands in backticks about evaluations."""
    rows = re.findall(r"^\| (`.*?) \|", page(), re.M)
    cells = [*rows, page().partition("## Evaluation")[2]]
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell) if not NOT_METRICS.fullmatch(name)]


def pattern(name: str) -> re.Pattern[str]:
    parts = (PLACEHOLDERS.get(part, re.escape(part)) for part in re.split("(NAME|PHASE|K)", name))
    return re.compile(f"(?:eval_)?{''.join(parts)}")


@functools.cache
def code() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "memsafe_rl").rglob("*.py"))


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


def runs(folder: Path) -> dict[str, Any]:
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    judged = {"reward_funcs": [length], "eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:4]}), **evaluated}
    bonus = {"beta": 0.1, "entropy_coef": 0.01, "use_adaptive_entropy": True, "top_entropy_quantile": 0.5}
    objectives = {"a": {"rewards": ["count_digits"], "beta": 0.1}, "b": {"rewards": ["length"], "beta": 0.1}}
    rewards = [count_digits, length]
    return {
        "evaluated, KL, entropy": make_trainer(folder / "kl", **judged, **bonus),
        "objectives": make_trainer(folder / "objectives", reward_funcs=rewards, objectives=objectives),
        "PPO": make_ppo(folder / "ppo"),
        "partial rollouts": make_trainer(folder / "partial", partial_rollout_tokens=3),
    }


def test_what_runs_log_is_on_the_page(tmp_path: Path) -> None:
    known = [pattern(name) for name in names()]
    for what, trainer in runs(tmp_path).items():
        trainer.train()
        logged = {name for record in trainer.state.log_history for name in record}
        unknown = sorted(name for name in logged if not any(one.fullmatch(name) for one in known))
        assert unknown == [], what


@pytest.mark.parametrize("name", names())
def test_what_the_page_names_stands_in_the_code(name: str) -> None:
    words = [word for word in re.split("NAME|PHASE|K|[/@_]", name.removeprefix("eval_")) if word]
    assert all(re.search(rf"(?<![a-z]){word}(?![a-z])", code()) for word in words), name
