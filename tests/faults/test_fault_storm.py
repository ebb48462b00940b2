"""Runs that keep running out of memory, and runs that the user's own code breaks off.

What must make one of these fail if it is done to the library: clearing up inside of `except`, gradients that are not
dropped, random states that are not put back, a step repeated without being undone, an autograd queue that is not
flushed. At length: `python -m benchmarks.fault_storm`.
"""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.training.optim.optimizer import Committer
from tests.faults.audit import audited
from tests.faults.scenes import SCENES, Reward, Scene
from tests.faults.scenes import make_trainer as scene_trainer
from tests.faults.storms import GRADIENT_TOLERANCE, storm_over, sweep
from tests.faults.upsets import UPSETS, upset
from tests.trainers.helpers import make_trainer, weights

FAULTS = 100
NAMED = {scene.name: scene for scene in SCENES}
EVERYTHING_ELSE = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "num_generations_eval": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "reward",
}
"""Evaluates, saves, and loads the best weights at the end."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs of a storm set both levels for their process, which is the next test's too."""
    logger = logging.getLogger("memsafe_rl")
    level, verbosity = logger.level, transformers_logging.get_verbosity()
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    transformers_logging.set_verbosity(verbosity)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_storm_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    share = max(8, FAULTS // len(SCENES))
    found = storm_over(scene, share, seed=50 + SCENES.index(scene), output_dir=tmp_path)
    assert found.violations == []
    assert found.faults >= share
    assert found.compared_steps > 0
    assert found.gradient <= GRADIENT_TOLERANCE
    assert found.bitwise_steps == found.compared_steps if scene.is_bitwise else found.fallbacks > 0


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("LoRA, dropout, KL to the base", {}, 6),
        ("AdamW that allocates as it steps, marked tokens", {}, 6),
        ("LoRA, two objectives", {}, 6),
        ("denoiser, KL to a copy", {}, 6),
        ("PPO, head on the trunk, KL to a copy", {}, 6),
        ("denoiser, PPO", {}, 6),
        ("PPO, second adapter, recomputed, leaner plans", {}, 6),
        ("full, everything on the host, leaner plans", {}, 10),
        ("full", EVERYTHING_ELSE, 6),
    ],
)
@pytest.mark.slow
def test_no_allocation_of_a_run_is_unguarded(name: str, settings: dict[str, Any], most: int, tmp_path: Path) -> None:
    found = sweep(NAMED[name], most, output_dir=tmp_path, **settings)
    assert found.violations == []
    assert found.runs > 3 * most


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_operator_of_a_run_is_under_a_guard(scene: Scene, tmp_path: Path) -> None:
    trainer = scene_trainer(scene, tmp_path, Reward(), TrainerCallback(), {"max_steps": 2, "max_completion_length": 3})
    with audited() as audit:
        trainer.train()
    assert audit.unguarded == []
    assert audit.guarded > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", UPSETS)
@pytest.mark.parametrize("name", ["full, recomputed, dropout", "LoRA, dropout, KL to the base"])
def test_what_ends_a_run_comes_out_and_leaves_nothing_behind(name: str, kind: str, tmp_path: Path) -> None:
    assert upset(NAMED[name], kind, seed=0, output_dir=tmp_path / "run") == []


def test_an_interrupt_between_a_rollout_and_its_first_update_is_gone_on_from(tmp_path: Path) -> None:
    """The rollout is in the checkpoint, and what is logged of it."""
    settings: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 100}
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    first = make_trainer(tmp_path / "b", **settings)

    def interrupt(module: Any, args: Any) -> None:
        if torch.is_grad_enabled() and first.state.global_step == 1:
            raise KeyboardInterrupt

    hook = first.model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    hook.remove()
    second = make_trainer(tmp_path / "b", **settings)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))
    for name in ("reward", "num_tokens", "completions/mean_length", "loss"):
        assert [step[name] for step in second.history] == [step[name] for step in whole.history]


@pytest.mark.slow
def test_an_interrupt_while_weights_move_waits_until_the_step_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Committer.commit
    commits: list[int] = []

    def interrupted(self: Committer) -> None:
        commits.append(1)
        if len(commits) == 2:
            signal.raise_signal(signal.SIGINT)
        commit(self)

    settings: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 100}
    settings["interrupt_grace_seconds"] = 0.0
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    monkeypatch.setattr(Committer, "commit", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path / "b", **settings).train()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (tmp_path / "b" / "checkpoint-2").is_dir()
    second = make_trainer(tmp_path / "b", **settings)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))
    assert [step["step"] for step in second.history] == [1.0, 2.0, 3.0]


def test_an_interrupted_backward_leaves_no_graph(tmp_path: Path) -> None:
    """What was queued for the rest of the backward is freed, not only at the next one."""
    with SimulatedMemory(exact=True) as device:
        trainer = make_trainer(tmp_path, max_steps=1)
        weight = next(iter(trainer.model.model.layers[0].parameters()))

        def interrupt(grad: torch.Tensor) -> None:
            raise KeyboardInterrupt

        trainer.train()
        held = device.live_bytes
        hook = weight.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        hook.remove()
        assert device.live_bytes - held < 16 * 1024
