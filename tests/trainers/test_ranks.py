"""Two processes over gloo learn what one process learns."""

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState

from tests.trainers.helpers import make_trainer, weights

SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "num_iterations": 2,
    "beta": 0.1,
    "max_steps": 4,
    "top_entropy_quantile": 0.8,
}


def train_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
    }
    torch.set_num_threads(1)
    trainer = make_trainer(Path(folder) / "two", per_device_train_batch_size=6, num_generations=4, **rest())
    trainer.train()
    torch.save(
        {"weights": weights(trainer), "history": trainer.history, "events": len(trainer.memory_events)},
        Path(folder) / f"rank{rank}.pt",
    )
    torch.distributed.destroy_process_group()


def rest() -> dict[str, Any]:
    return {name: value for name, value in SETTINGS.items() if name != "num_generations"}


def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train_rank, args=(port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    one = make_trainer(tmp_path / "one", per_device_train_batch_size=12, num_generations=4, **rest())
    one.train()
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    start = make_trainer(tmp_path / "start", per_device_train_batch_size=12, num_generations=4, **rest())
    travelled = (weights(one) - weights(start)).norm()
    assert (ranks[0]["weights"] - weights(one)).norm() < 1e-4 * travelled
    for mine, theirs in zip(ranks[0]["history"], one.history, strict=True):
        for name in ("loss", "kl", "entropy", "num_tokens", "grad_norm"):
            assert abs(mine[name] - theirs[name]) <= 1e-4 * max(1e-3, abs(theirs[name])), name
