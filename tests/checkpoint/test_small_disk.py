"""A real file system that is really full: one that lives in memory and is as small as the test wants it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memsafe_rl.checkpoint.store import check_files, checkpoints, read_manifest
from memsafe_rl.errors import ConfigError, SaveError
from memsafe_rl.records import read_lines
from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.trainers.helpers import make_trainer, weights

ALONE = ["unshare", "-rm"]
"""In a view of the file system of its own, where whoever runs the test may mount."""
MORE_FILES, MORE_BLOCKS = range(1, 17, 3), (0, 4, 64, 256)
"""Room left for the checkpoint of the second step: files, or blocks of 4 kB."""


def _mounted(folder: Path, options: str) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]


def _has_mounts(tmp_path: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*ALONE, *_mounted(tmp_path, "size=1m")], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.slow
def test_nothing_is_lost_on_a_disk_that_is_full_at_any_file(tmp_path: Path) -> None:
    if not _has_mounts(tmp_path):
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of its own")
    command = [*ALONE, sys.executable, "-m", "tests.checkpoint.test_small_disk", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    refused, saved = json.loads(ended.stdout.splitlines()[-1])
    assert refused >= 6, "the disk was never full"
    assert saved >= 1, "the disk was always full"


def storm(folder: Path) -> tuple[int, int]:
    """Trains on ever larger disks; gives how many refused a checkpoint, and how many held it."""
    torch.manual_seed(0)
    whole = trainer_in(folder / "whole", 3)
    whole.train()
    outcomes = [
        outcome_on(folder / f"{kind}{room}", kind, room, weights(whole))
        for kind, rooms in (("nr_inodes", MORE_FILES), ("nr_blocks", MORE_BLOCKS))
        for room in rooms
    ]
    return outcomes.count(False), outcomes.count(True)


def trainer_in(folder: Path, steps: int) -> GRPOTrainer:
    return make_trainer(folder, max_steps=steps, save_strategy="steps", save_steps=1)


def outcome_on(disk: Path, kind: str, room: int, whole: torch.Tensor) -> bool:
    """Leaves so much room for the second step's checkpoint; the run must go on bit for bit once there is more."""
    disk.mkdir()
    subprocess.run(_mounted(disk, "size=64m,nr_inodes=1000"), check=True)
    run = disk / "run"
    torch.manual_seed(0)
    trainer_in(run, 1).train()
    used = os.statvfs(disk)
    taken = used.f_files - used.f_ffree if kind == "nr_inodes" else used.f_blocks - used.f_bfree
    other = "size=64m" if kind == "nr_inodes" else "nr_inodes=1000"
    _remount(disk, f"{kind}={taken + room},{other}")
    told = ""
    try:
        trainer_in(run, 2).train(resume_from_checkpoint=True)
    except (SaveError, ConfigError) as error:
        told = str(error)
    saved = not told
    assert "\n" not in told
    assert saved or "No space left on device" in told or "the logs beside it cannot be written" in told
    for checkpoint in checkpoints(run):
        check_files(checkpoint, read_manifest(checkpoint))
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1", *(["checkpoint-2"] if saved else [])]
    _remount(disk, "size=64m,nr_inodes=1000")
    last = trainer_in(run, 3)
    last.train(resume_from_checkpoint=True)
    assert torch.equal(weights(last), whole)
    steps = [line["step"] for line in read_lines(run / "steps.jsonl")[0] if not line.get("redone")]
    assert steps == [1, 2, 3]
    return saved


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


if __name__ == "__main__":
    print(json.dumps(storm(Path(sys.argv[1]))))
