"""Moves to host memory and back: bytes on the simulated device, gradients bitwise, nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memsafe_rl.memory.host import offloaded, to_device, to_host
from memsafe_rl.memory.simulated import SimulatedMemory
from tests.tiny import tiny_model

KIB = 1024
EXACT = pytest.mark.parametrize("exact", [True, False])


def drain_backward() -> None:
    """Runs a backward that empties the queue a failed one left full."""
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


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


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_a_real_model_keeps_its_gradient_and_its_activations_leave_the_device(arch: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(arch, layers=4, hidden=64)
    ids = torch.randint(2, 250, (4, 64))

    def loss() -> Tensor:
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
