"""Attention gives its log-sum-exp and its gradients by any device's kernel as plain products of matrices do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from memsafe_rl.accounting import standing_for
from memsafe_rl.models.language import kernels
from memsafe_rl.models.language.kernels import (
    Joined,
    Kernel,
    Part,
    attend,
    attend_backward,
    kernel_for,
    target_of,
)
from tests.models.language.cuda_kernels import cuda_kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("asked", "options", "wanted"),
    [
        (("cpu", FP32, 64, 64), {}, Kernel.CPU_FLASH),
        (("cpu", FP64, 12, 12), {"masked": True}, Kernel.CPU_FLASH),
        (("cpu", FP32, 16, 12), {}, Kernel.BLOCKS),
        (("cuda", BF16, 64, 64), {}, Kernel.FLASH),
        (("cuda", FP16, 256, 256), {}, Kernel.FLASH),
        (("cuda", BF16, 512, 512), {}, Kernel.EFFICIENT),
        (("cuda", BF16, 64, 64), {"masked": True}, Kernel.EFFICIENT),
        (("cuda", BF16, 192, 128), {}, Kernel.EFFICIENT),
        (("cuda", FP32, 64, 64), {}, Kernel.EFFICIENT),
        (("cuda", FP64, 64, 64), {}, Kernel.BLOCKS),
        (("cuda", BF16, 64, 64), {"soft_capped": True}, Kernel.BLOCKS),
        (("cuda", FP16, 64, 64), {"capability": (7, 5)}, Kernel.EFFICIENT),
        (("cuda", BF16, 64, 64), {"capability": (7, 5)}, Kernel.BLOCKS),
        (("cuda", FP32, 64, 64), {"capability": (7, 0)}, Kernel.EFFICIENT),
        (("mps", FP32, 64, 64), {}, Kernel.BLOCKS),
    ],
)
def test_a_kernel_is_chosen_before_tensors_exist(asked: Any, options: Any, wanted: Kernel) -> None:
    assert kernel_for(*asked, **options) is wanted


@pytest.fixture(params=["cpu", "flash", "efficient", "blocks"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """Each kernel, for types that the real ones do not have too, a few queries at a time."""
    monkeypatch.setattr(kernels, "_MOST_BLOCK", 3)
    monkeypatch.setattr(kernels, "_LEAST_BLOCK", 3)
    monkeypatch.setattr(kernels, "_SCORES", 100)
    if request.param == "flash":
        monkeypatch.setattr(kernels, "_HALF", (FP32, FP64))
    if request.param == "efficient":
        monkeypatch.setattr(kernels, "_HALF", (FP64,))
        monkeypatch.setattr(kernels, "_FLASH_WIDEST", 0)
    name = {"cpu": "cpu", "blocks": "mps"}.get(request.param, "cuda")
    with standing_for(name), cuda_kernels() as ran:
        yield request.param, ran


def plainly(part: Part) -> tuple[Tensor, Tensor]:
    repeats = part.query.shape[1] // part.key.shape[1]
    key, value = part.key.repeat_interleave(repeats, 1), part.value.repeat_interleave(repeats, 1)
    scores = part.query @ key.mT * part.scale
    if part.soft_cap is not None:
        scores = part.soft_cap * torch.tanh(scores / part.soft_cap)
    if part.first is not None:
        distance = part.first + torch.arange(scores.shape[2])[:, None] - torch.arange(scores.shape[3])
        scores = scores.masked_fill((distance < 0) | (distance >= (part.window or 10**6)), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


SHAPES = {  # segments, heads, key heads, queries, keys, head, value, soft cap, first, window
    "causal": (2, 4, 4, 7, 7, 8, 8, None, 0, None),
    "shared key heads": (2, 4, 2, 7, 7, 8, 8, None, 0, None),
    "one segment, shared key heads": (1, 4, 2, 7, 5, 8, 8, None, None, None),
    "all keys": (1, 2, 2, 35, 5, 12, 12, None, None, None),
    "odd heads": (2, 2, 1, 6, 6, 5, 5, None, 0, None),
    "narrow values": (2, 2, 2, 6, 6, 16, 12, None, 0, None),
    "window": (2, 4, 2, 11, 11, 8, 8, None, 0, 4),
    "window of itself": (2, 2, 2, 8, 8, 8, 8, None, 0, 1),
    "window over a prompt": (1, 4, 2, 5, 6, 8, 8, None, 6, 7),
    "soft cap": (2, 4, 2, 7, 7, 8, 8, 2.0, 0, 3),
}


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_sum_and_gradients(shape: str, dtype: torch.dtype, device: tuple[str, list[str]]) -> None:
    segments, heads, kv_heads, width, seen, head, narrow, cap, first, window = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=FP64).to(dtype).double()

    wide = Part(
        draw(segments, heads, width, head),
        draw(segments, kv_heads, seen, head),
        draw(segments, kv_heads, seen, narrow),
        0.3,
        cap,
        first,
        window,
    )
    leaves = [whole.requires_grad_() for whole in wide[:3]]
    out, lse = plainly(wide)
    grad = draw(*out.shape)
    wanted = torch.autograd.grad(out, leaves, grad)
    part = Part(*(whole.detach().to(dtype) for whole in leaves), *wide[3:])
    target = target_of(part.query)
    found_out, found_lse = attend(part, target)
    joined = Joined(grad.to(dtype), found_out, found_lse)
    found = attend_backward(part, joined, target)
    kernel, ran = device
    if kernel in ("flash", "efficient") and cap is None:
        efficient = kernel == "efficient" or not part.is_plain or head != narrow
        assert {one.split()[0] for one in ran} == {"efficient" if efficient else "flash"}
    else:
        assert not ran
    limit = 1e-6 if dtype is FP32 else 1e-12
    for got, true in zip((found_out, found_lse, *found), (out.detach(), lse.detach(), *wanted), strict=True):
        assert got.dtype == dtype
        # A query that sees itself alone has no gradient.
        assert float((got.double() - true).norm()) < limit * max(1.0, float(true.norm()))
