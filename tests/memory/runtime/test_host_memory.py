"""Moves to host memory and back: bytes on the simulated device, gradients bitwise, nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memsafe_rl.memory.runtime import host_memory as host
from memsafe_rl.memory.runtime.host_memory import offloaded, to_device, to_host
from memsafe_rl.memory.simulated.device import SimulatedMemory
from tests.tiny import tiny_model

KIB = 1024
EXACT = pytest.mark.parametrize("exact", [True, False])


def runs_out(work: Callable[[], object]) -> bool:
    """Runs something and says whether it ran out of memory; its frames are gone when this returns."""
    try:
        work()
    except torch.OutOfMemoryError:
        return True
    return False


@EXACT
def test_a_move_to_the_host_takes_the_bytes_off_the_device_and_back(exact: bool) -> None:
    with SimulatedMemory(exact=exact) as memory:
        x = torch.arange(1024.0)
        parked = to_host(x)
        assert (memory.live_bytes, memory.host_live_bytes) == (4 * KIB, 4 * KIB)
        assert to_host(parked) is parked
        assert to_device(x, "cpu") is x
        del x
        assert (memory.live_bytes, memory.host_live_bytes) == (0, 4 * KIB)
        back = to_device(parked, "cpu")
        del parked
        assert (memory.live_bytes, memory.host_live_bytes, memory.host_peak_bytes) == (4 * KIB, 0, 4 * KIB)
        assert torch.equal(back, torch.arange(1024.0))


def test_where_nobody_counts_there_is_one_memory() -> None:
    x = torch.arange(10.0)
    assert to_host(x) is x
    assert to_device(x, "cpu") is x


@EXACT
def test_the_host_has_no_limit_and_no_faults(exact: bool) -> None:
    with SimulatedMemory(capacity_bytes=6 * KIB, exact=exact) as memory:
        x = torch.zeros(1024)
        memory.fail_after(1)
        parked = [to_host(x) for _ in range(4)]
        assert (memory.live_bytes, memory.host_live_bytes, memory.refusals) == (4 * KIB, 16 * KIB, 0)
        with pytest.raises(torch.OutOfMemoryError):
            to_device(parked[0], "cpu")
        with pytest.raises(torch.OutOfMemoryError, match="capacity"):
            to_device(parked[0], "cpu")
        assert (memory.live_bytes, memory.host_live_bytes) == (4 * KIB, 16 * KIB)


class Network(nn.Module):
    """Residual blocks that save views, strided and expanded tensors, outputs of their own and the same input twice."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(width))

    def block(self, number: int, x: Tensor) -> Tensor:
        q, k, v = self.blocks[number](x).chunk(3, dim=-1)
        gate = (q * k).sum(-1, keepdim=True).expand_as(v).sigmoid()
        return x + self.outs[number](torch.tanh(v.exp() * gate) * (self.scale * x))

    def forward(self, x: Tensor, recompute: bool) -> Tensor:
        for number in range(len(self.blocks)):
            x = checkpoint(self.block, number, x, use_reentrant=False) if recompute else self.block(number, x)
        return x.square().mean()


def gradients(network: nn.Module, loss: Callable[[], Tensor], offload: bool) -> list[Tensor]:
    network.zero_grad()
    if offload:
        with offloaded([*network.parameters(), *network.buffers()]):
            value = loss()
    else:
        value = loss()
    value.backward()
    return [weight.grad.clone() for weight in network.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@EXACT
def test_gradients_are_bitwise_the_same(exact: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    network, x = Network(), torch.randn(16, 8, 64)
    with SimulatedMemory(exact=exact) as memory:
        plain = gradients(network, lambda: network(x, recompute), offload=False)
        assert memory.host_peak_bytes == 0
        moved = gradients(network, lambda: network(x, recompute), offload=True)
        assert memory.host_peak_bytes > 0
        assert memory.host_live_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


@pytest.mark.parametrize(("arch", "autocast"), [("llama", True), ("gemma3", False), ("gpt2", False)])
def test_a_real_model_keeps_its_gradient_and_its_activations_leave_the_device(arch: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = tiny_model(arch, layers=4, hidden=64)
    ids = torch.randint(2, 250, (4, 64))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1).square().mean()

    held = {}
    with SimulatedMemory() as memory:
        plain, moved = gradients(model, loss, False), gradients(model, loss, True)
        model.zero_grad()
        for offload in (False, True):
            before = memory.live_bytes
            with offloaded(model.parameters()) if offload else nullcontext():
                value = loss()
            held[offload] = memory.live_bytes - before
            value.backward()
            del value
            model.zero_grad()
            assert memory.live_bytes == before
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert held[True] < 0.1 * held[False]


@EXACT
def test_weights_stay_and_what_is_saved_twice_moves_once(exact: bool) -> None:
    with SimulatedMemory(exact=exact) as memory:
        first, second = (torch.randn(64, 256, requires_grad=True) for _ in range(2))
        x = torch.randn(512, 64, requires_grad=True)
        with offloaded([first, second]):
            y = (x @ first).sum() + (x.view(512, 64) @ second).sum() + x.mT.mT[:256].sum()
        assert memory.host_live_bytes == x.nbytes
        y.backward()
        assert memory.host_live_bytes == memory.host_peak_bytes - x.nbytes == 0


@EXACT
def test_each_version_of_a_tensor_written_in_place_is_kept(exact: bool) -> None:
    with SimulatedMemory(exact=exact):
        factor, x = torch.full((512,), 2.0, requires_grad=True), torch.ones(512)
        with offloaded([]):
            y = (factor * x).sum()
            x += 1
            y = y + (factor * x).sum()
        y.backward()
        assert factor.grad is not None
        assert torch.equal(factor.grad, torch.full((512,), 3.0))


def test_an_address_that_is_used_again_is_no_other_tensor() -> None:
    with SimulatedMemory():
        factor, losses = torch.ones(512, requires_grad=True), []
        with offloaded([]):
            for number in range(8):  # each scratch tensor takes the address of the one before
                losses.append((factor * torch.full((512,), float(number))).sum())
        torch.stack(losses).sum().backward()
        assert factor.grad is not None
        assert torch.equal(factor.grad, torch.full((512,), 28.0))


def test_gaps_and_offsets_come_back_as_they_lay() -> None:
    with SimulatedMemory() as memory:
        base = torch.randn(4096)
        for x in (base[5:1029], base.view(64, 64).t(), base.view(8, 512)[:, 7:263], base[:512].expand(4, 512)):
            factor, seen = torch.ones_like(x, requires_grad=True), []
            with offloaded([]):
                y = factor * x
            y.grad_fn.register_prehook(lambda *_, y=y, seen=seen: seen.append(y.grad_fn._saved_other))
            y.sum().backward()
            assert torch.equal(seen[0], x)
            assert seen[0].stride() == x.stride()
            assert (seen[0].data_ptr() - x.data_ptr()) % 64 == 0 or x.stride() == (512, 1)
            assert memory.host_peak_bytes < base.nbytes + 4 * KIB


def test_a_weight_written_in_place_before_the_backward_pass_is_refused() -> None:
    weight, x = torch.ones(512, requires_grad=True), torch.ones(512, requires_grad=True)
    with SimulatedMemory():
        with offloaded([weight]):
            y = (weight * x).sum()
        with torch.no_grad():
            weight += 1
        with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
            y.backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_fault_anywhere_leaves_nothing_and_the_next_try_is_exact(recompute: bool) -> None:
    torch.manual_seed(0)
    with SimulatedMemory(exact=True) as memory:
        network, x = Network(blocks=2), torch.randn(16, 64)
        wanted = gradients(network, lambda: network(x, recompute), offload=False)
        network.zero_grad()
        before, started = memory.live_by_component(), memory.allocations
        gradients(network, lambda: network(x, recompute), offload=True)
        number = memory.allocations - started
        for fault in range(1, number + 1, 3):
            network.zero_grad()
            memory.fail_after(fault)
            assert runs_out(lambda: gradients(network, lambda: network(x, recompute), offload=True))
            network.zero_grad()
            torch.ones(1, requires_grad=True).sum().backward()  # empties the queue that a failed backward left full
            assert (memory.live_by_component(), memory.host_live_bytes) == (before, 0), f"allocation {fault}"
        got = gradients(network, lambda: network(x, recompute), offload=True)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_a_host_that_is_full_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(tensor: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 7:
            raise RuntimeError("no host memory")
        return copied(tensor)

    copied = host._copied_to_arena
    monkeypatch.setattr(host, "_copied_to_arena", failing)
    with SimulatedMemory() as memory:
        network, x = Network(), torch.randn(16, 64)
        before = memory.live_by_component()
        with pytest.raises(RuntimeError, match="no host memory"):
            gradients(network, lambda: network(x, False), offload=True)
        gc.collect()
        assert (memory.live_by_component(), memory.host_live_bytes) == (before, 0)
        assert floats_on_device(memory)


def floats_on_device(memory: SimulatedMemory) -> bool:
    """Whether a new tensor counts for the device, as it must once a move was broken off."""
    before = memory.live_bytes
    made = torch.empty(256)
    return memory.live_bytes - before == made.nbytes
