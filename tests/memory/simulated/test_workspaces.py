"""What reductions held on an H200 (PyTorch 2.11), by its allocator, beside what is counted for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsafe_rl.memory.simulated.workspaces import reduction_bytes, sort_bytes
from memsafe_rl.preflight.cards import DATA_SHEETS, multiprocessors_of
from memsafe_rl.preflight.fake.device import fake_device

H200 = multiprocessors_of("NVIDIA H200")
BLOCK = 512
"""Bytes whose multiples the allocator gives; it gave one block more, for counters of the blocks that are ready."""
aten = torch.ops.aten
SUM, MEAN, NORM = aten.sum.dim_IntList, aten.mean.dim, aten.linalg_vector_norm.default
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def reduced(operator: Any, whole: torch.Tensor, axes: list[int], card: Any = H200) -> int:
    arguments = (whole, 2, axes) if operator is NORM else (whole, axes)
    return reduction_bytes(operator, arguments, operator(*arguments), card)


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
    assert reduction_bytes(aten.exp.default, (whole,), whole, H200) == 0
    assert reduced(SUM, whole, [0], SimpleNamespace(multi_processor_count=8, max_threads_per_multi_processor=0)) == 0
    assert reduced(SUM, whole, [0], None) == 0 < reduced(SUM, whole, [0], multiprocessors_of("T4"))


@pytest.mark.parametrize(
    ("shape", "strides", "axes", "held"),
    [
        ((4096, 3, 512), (1536, 1, 3), [0], 2162688),  # kept axes lie in the result otherwise than in the input
        ((128, 9000, 64), (0, 64, 1), [0, 1], 34603008),  # repeated, as gradients of a mean are
        ((512, 31, 96), (0, 96, 1), [0, 1], 3047424),
    ],
)
def test_strides_decide_what_lies_side_by_side(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: list[int], held: int
) -> None:
    """As `setReduceConfig` and the order of `TensorIterator`'s axes say, computed apart from the library."""
    assert reduced(SUM, torch.empty_strided(shape, strides, device="meta"), axes) == held


@pytest.mark.parametrize(
    ("dtype", "into", "copied"),
    [(F32, F64, 8), (torch.bool, None, 8), (BF16, F32, 0), (F32, BF16, 2), (F32, None, 0)],
)
def test_a_sum_of_another_type_holds_a_copy_on_any_card(
    dtype: torch.dtype, into: torch.dtype | None, copied: int
) -> None:
    """As `make_reduction_from_out_ty` does: only half precision is added up in float32 as it is."""
    with fake_device(stands_for="cuda") as memory:
        whole = torch.ones(256, 4096, dtype=dtype)
        held = memory.live_bytes
        total = whole.sum(1, dtype=into)
        assert memory.peak_bytes - held == copied * whole.numel() + total.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "held"),
    [
        ((), F32, 0),
        ((3, 4096), F32, 0),  # in place
        ((1, 5000), F32, 5000 * (8 + 4 + 8)),  # places, and CUB's numbers and places
        ((127, 5000), F32, 635_000 * (8 + 8 + 4 + 4 + 8)),  # places twice, numbers, and CUB's of both
        ((127, 5000), BF16, 635_000 * (8 + 8 + 2 + 2 + 8)),
        ((128, 5000), F32, 640_000 * (8 + 4 + 8)),
        ((3, 1_000_000), F64, 1_000_000 * (8 + 8 + 8)),  # a row at a time
    ],
)
def test_a_sort_of_long_rows_holds_places_and_buffers(shape: tuple[int, ...], dtype: torch.dtype, held: int) -> None:
    """As `launch_stable_sort_kernel` asks for: on an H200 a rollout with top_p held 45 % more than was told."""
    scores = torch.empty(shape, dtype=dtype, device="meta")
    assert sort_bytes(aten.sort.default, (scores,)) == held
    assert sort_bytes(aten.exp.default, (scores,)) == 0


def test_every_card_of_the_table_says_what_its_sums_hold() -> None:
    whole = torch.empty(36152, 1104, device="meta")
    assert all(reduced(SUM, whole, [0], multiprocessors_of(name)) > 0 for name in DATA_SHEETS["cards"])


@pytest.mark.parametrize("known", [True, False])
def test_a_forecast_for_a_known_card_counts_it_in_a_weights_gradient(known: bool) -> None:
    with fake_device(stands_for="cuda", card=H200 if known else None) as memory:
        scale = torch.ones(1024, requires_grad=True)
        rows = torch.ones(2, 4096, 1024)
        gradient = torch.ones_like(rows)
        product = rows * scale
        memory.reset_peak()
        held = memory.live_bytes
        product.backward(gradient)
        grown = memory.peak_bytes - held
    weighed, summed, shared = rows.nbytes, scale.nbytes, 4 * 1024 * 128 * (2 * 4096 // 4 // 16)
    assert grown == weighed + summed + (shared if known else 0)
