"""Operators whose results are made from memory give what they give of real tensors, and hold as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.preflight.fake.device import Memo, fake_device

OPERATORS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2,
    lambda x: x * 2.0,
    lambda x: x.to(torch.int32) * 2,
    lambda x: x.to(torch.int32) * 2.0,
    lambda x: x.to(torch.int32) * True,
    lambda x: x.t(),
    lambda x: x.t() * 1,
    lambda x: x.t().contiguous(),
    lambda x: x.view(2, 2, -1),
    lambda x: x.view(torch.int16),
    lambda x: x[1:, 2:],
    lambda x: x[1:, 2:].clone(),
    lambda x: x.detach(),
    lambda x: x.add_(1),
    lambda x: x.clone().unsqueeze_(0),
    lambda x: x.clone().t_(),
    lambda x: x[:2].copy_(x[2:]),
    lambda x: torch.cat([x, x[:1]]),
    lambda x: torch.stack([x, x]),
    lambda x: torch.add(x, x, out=torch.empty_like(x)),
    lambda x: x.sum(-1, keepdim=True).expand(4, 5),
    lambda x: x.split(2)[1],
    lambda x: x.max(-1).values,
    lambda x: x.t().unbind(0)[1],
    lambda x: (x * 2).split([3, 1])[1].add_(1),
    lambda x: x.topk(2).indices,
    lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    lambda x: torch.arange(x.shape[0]),
    lambda x: torch.ones(x.shape[1], dtype=torch.bfloat16),
    lambda x: torch.tensor([1.0, 2.0]) + x.sum(),
    lambda x: x @ x.t(),
    lambda x: torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    lambda x: x.new_empty(0).resize_(7),
]


def shapes(operator: Callable[[Tensor], Tensor], memory: SimulatedMemory) -> list[Any]:
    """Asks an operator three times, of arguments of two shapes."""
    found: list[Any] = []
    for columns in (6, 6, 8, 6):
        before = memory.live_bytes
        one = torch.zeros(4, columns)
        kept, result = one[:], operator(one)
        shared = result.untyped_storage()._cdata == kept.untyped_storage()._cdata
        place = result.shape, result.stride(), result.storage_offset(), result.dtype, result.device.type
        found.append((place, shared, result.untyped_storage().nbytes(), memory.live_bytes - before))
        del one, kept, result
        assert memory.live_bytes == before
    return found


@pytest.mark.parametrize("place", range(len(OPERATORS)))
def test_results_made_from_memory_are_those_of_real_tensors(place: int) -> None:
    with SimulatedMemory(exact=False) as memory:
        real = shapes(OPERATORS[place], memory)
    with fake_device() as memory:
        assert shapes(OPERATORS[place], memory) == real


def test_a_question_asked_before_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    learn = Memo.remember

    def note(self: Memo, key: Any, func: Any, *rest: Any) -> None:
        asked.append(func)
        learn(self, key, func, *rest)

    monkeypatch.setattr(Memo, "remember", note)
    with fake_device():
        weight = torch.zeros(8, 8)
        for _ in range(5):
            torch.nn.functional.silu(weight @ weight.t()).unbind(0)[0].sum()
    assert len(asked) == len(set(asked))
    assert {torch.ops.aten.mm.default, torch.ops.aten.unbind.int} <= set(asked)


def test_a_result_made_from_memory_is_refused_where_it_does_not_fit() -> None:
    with fake_device(1000) as memory:
        one = torch.zeros(10, 10)
        held = [one * 2]
        with pytest.raises(torch.OutOfMemoryError):
            held.append(one * 2)
        held.clear()
        held.append(one * 2)
        assert memory.peak_bytes == memory.live_bytes == 800


def test_gradients_flow_through_results_made_from_memory() -> None:
    def learnt(weight: Tensor) -> list[tuple[Any, ...]]:
        grads = []
        for _ in range(3):
            loss = (torch.ones(5, 4) @ weight.t()).view(-1).exp().sum()
            (grad,) = torch.autograd.grad(loss, weight)
            grads.append((grad.shape, grad.stride(), grad.dtype))
        return grads

    real = learnt(torch.zeros(3, 4, requires_grad=True))
    with fake_device():
        assert learnt(torch.zeros(3, 4, requires_grad=True)) == real
