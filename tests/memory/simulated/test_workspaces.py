"""What reductions held on an H200 (PyTorch 2.11), by its allocator, beside what is counted for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsafe_rl.memory.simulated.workspaces import reduction_bytes
from memsafe_rl.preflight.fake.device import fake_device

H200 = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)
BLOCK = 512
"""Bytes whose multiples the allocator gives; it gave one block more, for counters of the blocks that are ready."""
aten = torch.ops.aten
SUM, MEAN, NORM = aten.sum.dim_IntList, aten.mean.dim, aten.linalg_vector_norm.default
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def reduced(operator: Any, whole: torch.Tensor, axes: list[int], card: Any = H200) -> int:
    return reduction_bytes(operator, (whole, 2, axes) if operator is NORM else (whole, axes), card)


@pytest.mark.parametrize(
    ("operator", "dtype", "shape", "axes", "held"),
    [
        (SUM, F32, (73181, 189), [0], 2129408),
        (SUM, F32, (70968, 51), [0], 1723904),
        (SUM, F32, (89566, 13), [0], 37376),
        (SUM, F32, (23, 726, 5, 22), [0, 1, 2], 231424),
        (SUM, BF16, (122717, 413), [0], 2168320),
        (SUM, F64, (31, 42, 2000), [0, 1], 43008512),
        (SUM, F64, (18, 128, 9, 141), [0, 1, 2], 2924544),
        (MEAN, F32, (38410, 436), [0], 117867008),
        (MEAN, BF16, (2274, 786), [0], 3622400),
        (MEAN, F64, (72414, 590), [0], 32020992),
        (NORM, F32, (36152, 1104), [0], 132833792),
        (NORM, F32, (12, 62, 8, 192), [0, 1, 2], 9142784),
        (NORM, F64, (67289, 5), [0], 6144),
    ],
)
def test_blocks_that_share_results_hold_what_a_card_held(
    operator: Any, dtype: torch.dtype, shape: tuple[int, ...], axes: list[int], held: int
) -> None:
    told = reduced(operator, torch.empty(shape, dtype=dtype, device="meta"), axes)
    assert -(-told // BLOCK) * BLOCK + BLOCK == held


def test_rows_that_begin_off_the_grid_are_read_one_number_at_a_time() -> None:
    whole = torch.empty(7021, 97, device="meta")[:, 3:-2]
    assert reduced(NORM, whole, [0]) == 329728


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3000, 151_936), [1]), ((4096, 64), [1]), ((128, 4096), [0]), ((9026290,), [0]), ((), []), ((0, 8), [0])],
)
def test_a_block_of_its_own_for_each_result_or_few_results_hold_nothing(
    shape: tuple[int, ...], axes: list[int]
) -> None:
    assert reduced(SUM, torch.empty(shape, device="meta"), axes) == 0


def test_only_reductions_hold_it_and_only_where_the_card_is_known() -> None:
    whole = torch.empty(36152, 1104, device="meta")
    assert reduction_bytes(aten.exp.default, (whole,), H200) == 0
    assert reduced(SUM, whole, [0], SimpleNamespace(multi_processor_count=8, max_threads_per_multi_processor=0)) == 0


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_forecast_for_the_card_at_hand_counts_it_in_a_weights_gradient(
    at_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: at_hand)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: H200)
    with fake_device(stands_for="cuda") as memory:
        scale = torch.ones(1024, requires_grad=True)
        rows = torch.ones(2, 4096, 1024)
        gradient = torch.ones_like(rows)
        product = rows * scale
        memory.reset_peak()
        held = memory.live_bytes
        product.backward(gradient)
        grown = memory.peak_bytes - held
    weighed, summed, shared = rows.nbytes, scale.nbytes, 4 * 1024 * 128 * (2 * 4096 // 4 // 16)
    assert grown == weighed + summed + (shared if at_hand else 0)


def test_a_forecast_for_a_cpu_does_not_wake_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("this makes a CUDA context, which a forked process may not")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    with fake_device() as memory:
        torch.ones(4096, 64).sum(0)
    assert memory.peak_bytes > 0
