"""The page of the five users' cases names tests that are there; and the two that belong nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import Phase
from tests.trainers.helpers import cut, make_trainer, weights
from tests.trainers.test_diffusion import make_trainer as make_diffusion_trainer

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "cases.md").read_text().splitlines() if re.match(r"\| (all|00\d) ", line)]


def test_there_are_twenty_two_rows() -> None:
    assert len(ROWS) == 22


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[2].strip())
def test_every_row_names_what_is_there(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for module in re.findall(r"`python -m ([\w.]+)`", row):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.slow
def test_accumulation_changes_nothing_and_a_budget_is_kept(tmp_path: Path) -> None:
    """Batch times accumulation is 16 in every case; what is in memory at once, the plan decides alone."""

    def run(accumulation: int, **settings: Any) -> tuple[torch.Tensor, int, Any]:
        with SimulatedMemory(2**30) as memory:
            trainer = make_trainer(
                tmp_path / f"{accumulation}-{len(settings)}",
                per_device_train_batch_size=16 // accumulation,
                gradient_accumulation_steps=accumulation,
                max_completion_length=32,
                max_steps=2,
                **settings,
            )
            trainer.train()
            peak = max(sum(parts.values()) for parts in memory.phase_peaks().values())
        return weights(trainer), peak, memory.phase_peaks()[Phase.OPTIMIZER]

    free, peak, commit = run(1)
    budget = sum(commit.values()) + (peak - sum(commit.values())) // 2
    for accumulation in (2, 8):
        assert torch.equal(run(accumulation)[0], free)
        learnt, held, _ = run(accumulation, memory_budget=budget)
        assert held <= budget < peak
        assert float((learnt - free).norm() / free.norm()) < 1e-4


@pytest.mark.slow
def test_epochs_over_chains_hold_one_chain_and_stop_by_their_kl(tmp_path: Path) -> None:
    def run(epochs: int, **settings: Any) -> tuple[Any, int]:
        with SimulatedMemory(2**30) as memory:
            trainer = make_diffusion_trainer(tmp_path / f"{epochs}-{len(settings)}", num_iterations=epochs, **settings)
            stores: list[int] = []
            step = trainer.loop.step

            def noted() -> None:
                step()
                if trainer.loop.state.rollout is not None:
                    sizes = trainer.loop.state.rollout.trajectory.nbytes()
                    stores.append(sizes["actions"] + sizes["starts"])

            trainer.loop.step = noted
            trainer.train()
        assert memory.peak_bytes > 0
        return trainer, max(stores, default=0)

    two, three = (run(epochs, max_steps=6)[1] for epochs in (2, 3))
    assert two == three > 0
    stopped, _ = run(3, max_steps=6, kl_stop=1e-12, plan=cut(8))
    stops = [event for event in stopped.memory_events if event["event"] == "kl_stop"]
    assert stops
    assert stopped.loop.state.cursor.rollout > 2  # rollouts went on after the passes over one had ended
