"""What only a device can show: its own thread's queue, generators of several cards, handles, trainers side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from memsafe_rl.memory.runtime import recovery
from memsafe_rl.memory.runtime.recovery import capture_random_state, plain_random_state, restore_random_state
from memsafe_rl.trainers import policy_trainer
from memsafe_rl.training.assembly.factory import build_setup
from tests.device.pretend import Pretend
from tests.trainers.helpers import make_trainer

DEVICE = torch.device("cuda")


class Refused(torch.autograd.Function):
    """Fails in its backward, as an allocation does."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")


def failed_backward() -> None:
    """Leaves many nodes queued: branches that a backward never came to."""
    leaf = torch.ones(4096, device="cuda", requires_grad=True)
    branches = [leaf * n for n in range(200)]  # made before, so that they run after what fails
    total = torch.stack([branch.exp().sum() for branch in branches]).sum() + Refused.apply(leaf).sum()
    try:
        total.backward()
    except torch.OutOfMemoryError:
        return
    raise AssertionError("the backward did not fail")


def test_nothing_of_a_failed_backward_is_held_when_the_retry_begins(cuda: Pretend) -> None:
    recovery.prepare_device(DEVICE)
    failed_backward()
    torch.cuda.synchronize()
    recovery.flush_autograd()
    before, held = torch.cuda.memory_allocated(), []
    for _ in range(20):
        failed_backward()
        recovery.flush_autograd()
        held.append(torch.cuda.memory_allocated() - before)
    assert held == [0] * 20


def test_the_flush_allocates_nothing_on_the_device(cuda: Pretend) -> None:
    recovery.prepare_device(DEVICE)
    before = cuda.devices[0].allocations
    recovery.flush_autograd()
    assert cuda.devices[0].allocations == before


def test_the_device_multiplies_in_both_threads_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: Pretend
) -> None:
    ran: list[dict[str, int]] = []

    def noted(*arguments: Any, **named: Any) -> Any:
        ran.append(cuda.counts.operators())
        return build_setup(*arguments, **named)

    monkeypatch.setattr(policy_trainer, "build_setup", noted)
    make_trainer(tmp_path, use_cpu=False, bf16=False)
    (before_weights,) = ran
    counts = [
        sum(n for name, n in before_weights.items() if name.startswith(f"aten::{kind}")) for kind in ("addmm", "mm")
    ]
    assert counts == [2, 2]  # in either thread one with a bias, as cublasLt takes it, and those of the backward


def test_no_room_for_a_handle_is_out_of_memory(monkeypatch: pytest.MonkeyPatch, cuda: Pretend) -> None:
    def refused(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(torch, "addmm", refused)
    with pytest.raises(torch.OutOfMemoryError, match="no room for its handle on cuda"):
        recovery.prepare_device(DEVICE)


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (0, 2), (2, 2)])
def test_random_states_of_more_or_fewer_cards_are_restored(
    then: int, now: int, monkeypatch: pytest.MonkeyPatch, cuda: Pretend
) -> None:
    torch.cuda.manual_seed_all(7)
    saved = plain_random_state(capture_random_state())
    saved["cuda"] = saved["cuda"][:then]
    torch.cuda.manual_seed_all(8)
    before = torch.cuda.get_rng_state_all()
    monkeypatch.setattr(cuda, "devices", cuda.devices[:now])
    restore_random_state(saved)
    for index, state in enumerate(torch.cuda.get_rng_state_all()):
        expected = bytes(saved["cuda"][index]) if index < then else before[index].numpy().tobytes()
        assert state.numpy().tobytes() == expected


@pytest.mark.parametrize("first_on_cpu", [True, False])
def test_trainers_of_one_process_run_where_each_is_told_to(first_on_cpu: bool, tmp_path: Path, cuda: Pretend) -> None:
    AcceleratorState._reset_state(True)  # as at the start of a process
    order = [first_on_cpu, not first_on_cpu, first_on_cpu]
    trainers = [make_trainer(tmp_path / str(n), use_cpu=cpu, bf16=False) for n, cpu in enumerate(order)]
    wanted = ["cpu" if cpu else "cuda" for cpu in order]
    assert [trainer.accelerator.device.type for trainer in trainers] == wanted
    for trainer in trainers:
        trainer.train()
    assert [next(trainer.model.parameters()).device.type for trainer in trainers] == wanted
