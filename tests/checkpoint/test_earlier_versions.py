"""A checkpoint that an earlier version wrote resumes in this one, to the weights of a run without a break."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.trainers.helpers import make_trainer, relative, weights

VERSIONS = sorted((Path(__file__).parent / "earlier_versions").glob("*.tar.xz"))
"""Each holds checkpoint-3 of `run`, in the middle of a rollout; before_rooms, of commit 5a1370a, has no manifest."""


def run(folder: Path, **settings: Any) -> GRPOTrainer:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(folder, peft_config=lora, beta=0.1, num_iterations=2, max_steps=4, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_a_checkpoint_of_an_earlier_version_resumes(version: Path, tmp_path: Path) -> None:
    with tarfile.open(version) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    resumed = run(tmp_path / "old", resume_from_checkpoint=str(tmp_path / "old" / "checkpoint-3"))
    assert [record["step"] for record in resumed.history] == [4]
    assert relative(weights(resumed), weights(run(tmp_path / "new"))) < 1e-4  # written on another processor


def test_there_are_some() -> None:
    assert VERSIONS
