"""Mistakes that only show on a device, planted one by one: each must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.small import small_qwen3
from memsafe_rl.memory.runtime import host_memory
from memsafe_rl.memory.runtime.host_memory import offloaded, to_device, to_host
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.types import RolloutPlan, SamplingSettings, SequenceKey
from tests.device.pretend import Pretend
from tests.rollout.plainly import generate

ROWS = 8
MOST = {"upload": 0.1, "read-back": 1, "wait": 0}
"""Transfers a decoded token may cost, whatever the rows; blocks of noise are uploaded for many at once."""


def drawn(tokens: int, plant: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    adapter = adapter_for(small_qwen3(300, hidden=32, layers=2).eval().cuda(), pad_token_id=0)
    plant(adapter)
    prompts = [torch.arange(2, 16), torch.arange(3, 15)]
    keys = [[SequenceKey(0, 0, prompt, sample) for sample in range(ROWS // 2)] for prompt in range(2)]
    settings = SamplingSettings(max_new_tokens=tokens, temperature=1.0, eos_token_ids=())
    with torch.no_grad():
        generate(adapter, prompts, keys, settings, RolloutPlan(rows_in_flight=ROWS))


def cost_of_a_token(cuda: Pretend, plant: Callable[[Any], None]) -> dict[str, float]:
    """Returns uploads, read-backs and waits a token, from two lengths, so that a rollout's own cancel."""
    counted = []
    for tokens in (9, 41):
        cuda.counts.reset()
        drawn(tokens, plant)
        counted.append({kind: cuda.counts.total(kind) for kind in MOST})
    return {kind: (counted[1][kind] - counted[0][kind]) / 32 for kind in MOST}


def nothing(adapter: Any) -> None: ...


def with_each_step(adapter: Any, look: Callable[[Tensor], object]) -> None:
    """Has something look at the first weight in every step of decoding."""
    step, weight = adapter.decode_step, next(adapter.model.parameters())

    def planted(*arguments: Any, **named: Any) -> Any:
        look(weight.detach())
        return step(*arguments, **named)

    object.__setattr__(adapter, "decode_step", planted)


def test_a_token_costs_few_transfers(cuda: Pretend) -> None:
    cost = cost_of_a_token(cuda, nothing)
    assert all(cost[kind] <= most for kind, most in MOST.items()), cost


@pytest.mark.parametrize(
    ("look", "kind"),
    [
        (lambda weight: weight[0, 0].item(), "read-back"),
        (lambda weight: weight[torch.tensor([0, 1])], "upload"),
        (lambda weight: weight[0].nonzero(), "wait"),
    ],
    ids=["an item", "an index on the host", "a size that depends on values"],
)
def test_a_planted_transfer_passes_the_bound(look: Callable[[Tensor], object], kind: str, cuda: Pretend) -> None:
    calm = cost_of_a_token(cuda, nothing)
    cost = cost_of_a_token(cuda, lambda adapter: with_each_step(adapter, look))
    assert cost[kind] >= calm[kind] + 1
    assert cost[kind] > MOST[kind]


def test_an_index_on_the_host_where_a_kernel_takes_none_is_refused(cuda: Pretend) -> None:
    def look(weight: Tensor) -> Tensor:
        return weight.index_select(0, torch.tensor([0]))

    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        drawn(9, lambda adapter: with_each_step(adapter, look))


def is_kept(values: Tensor) -> bool:
    """Moves a tensor to the host and back, and looks at it in both places."""
    host = to_host(values.cuda())
    return torch.equal(host, values) and torch.equal(to_device(host, "cuda").cpu(), values)


def test_what_is_moved_to_the_host_is_there(cuda: Pretend) -> None:
    assert is_kept(torch.randn(1000))


def test_a_planted_missing_wait_of_a_move_is_found(monkeypatch: pytest.MonkeyPatch, cuda: Pretend) -> None:
    into_host = host_memory._into_host

    def hasty(tensor: Tensor, *, wait: bool) -> Tensor:
        return into_host(tensor, wait=wait and False)

    monkeypatch.setattr(host_memory, "_into_host", hasty)
    assert not is_kept(torch.randn(1000))


def gradient(offload: bool) -> Tensor:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    x = torch.randn(64, 64, device="cuda")
    with offloaded([weight]) if offload else torch.enable_grad():
        y = (x @ weight).exp().sin().sum()
    y.backward()
    assert weight.grad is not None
    return weight.grad.cpu()


def test_offloaded_activations_give_the_same_gradient(cuda: Pretend) -> None:
    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("waits", [True, False])
def test_offload_over_a_stream_of_its_own_must_wait(
    waits: bool, monkeypatch: pytest.MonkeyPatch, cuda: Pretend
) -> None:
    side, onto_device = torch.cuda.Stream(), host_memory._onto_device

    def beside(piece: Any) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = onto_device(piece)
        there.record_stream(torch.cuda.default_stream())
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        return there

    plain = gradient(False)
    monkeypatch.setattr(host_memory, "_onto_device", beside)
    if waits:
        assert torch.equal(gradient(True), plain)
    else:
        with pytest.raises(RuntimeError, match="missing wait"):
            gradient(True)
    torch.cuda.synchronize()
