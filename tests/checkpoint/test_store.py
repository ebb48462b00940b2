import random
from pathlib import Path

import numpy as np
import pytest
import torch

from memsafe_rl.checkpoint.store import (
    CheckpointContent,
    RunMark,
    checkpoints,
    drop_old_checkpoints,
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from memsafe_rl.checkpoint.weights import read_weights, write_weights
from memsafe_rl.errors import ConfigError, SaveError
from memsafe_rl.memory.runtime.recovery import capture_random_state, plain_random_state, restore_random_state
from tests.tiny import tiny_model


def put_weights(folder: Path) -> None:
    (folder / "weights").write_text("w")


def write(folder: Path, step: int, save_model=put_weights, run_id: str = "ours", start: int = 0) -> Path:
    content = CheckpointContent(
        step,
        save_model=save_model,
        progress="{}",
        tensors={"optimizer": {"exp_avg": torch.arange(3.0)}},
        loop='{"format": 2, "cursor": 1}',
        trajectory=None,
        tensor_bytes=12,
    )
    return write_checkpoint(folder, content, RunMark(run_id, start))


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        (path / "half").write_text("...")
        raise OSError("disk full")

    with pytest.raises(SaveError, match=r"checkpoint-3 was not saved: disk full.*No checkpoint was written before it"):
        write(tmp_path, 3, fails)
    assert list(tmp_path.iterdir()) == []
    folder = write(tmp_path, 3)
    tensors, loop, trajectory = read_checkpoint(folder)
    assert tensors["optimizer"]["exp_avg"].tolist() == [0, 1, 2]
    assert loop["cursor"] == 1
    assert trajectory is None


def test_old_checkpoints_go_but_never_the_best_or_the_newest(tmp_path: Path) -> None:
    folders = [write(tmp_path, step) for step in (2, 10, 9, 4)]
    foreign = write(tmp_path, 1, run_id="theirs")
    drop_old_checkpoints(tmp_path, RunMark("ours", 0), 2, keep=str(folders[0]))
    foreign.rename(tmp_path / "kept")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]


def test_the_latest_checkpoint_is_found_by_number(tmp_path: Path) -> None:
    write(tmp_path, 9)
    write(tmp_path, 10)
    assert find_checkpoint(tmp_path, True).name == "checkpoint-10"
    with pytest.raises(ConfigError, match="holds no sound folder 'checkpoint-N'"):
        find_checkpoint(tmp_path / "empty", True)
    with pytest.raises(ConfigError, match="not a folder"):
        find_checkpoint(tmp_path, str(tmp_path / "gone"))


def test_random_streams_continue_where_they_were() -> None:
    state = plain_random_state(capture_random_state())
    first = (random.random(), np.random.rand(), torch.rand(2).tolist())
    restore_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == first


def test_buffers_that_are_not_stored_stay_as_they_are(tmp_path: Path) -> None:
    """Gemma's scale of embeddings, rounded before the network was made float64, would come back unrounded."""
    model = tiny_model("gemma3", dtype=torch.float64)
    held = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    write_weights(model, None, tmp_path)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    read_weights(model, tmp_path)
    assert all(torch.equal(tensor, known) for tensor, known in zip(held, before, strict=True))
