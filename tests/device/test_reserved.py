"""Reserved bytes: forecasts of random runs beside what the device's allocator, written apart from theirs, reserves."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.forecast_error import peaks_on_device, save_network
from benchmarks.random_runs import RandomRun, draw_run
from memsafe_rl import FixedPolicy, RolloutPlan, UpdatePlan
from memsafe_rl.preflight.speed import measured_speed
from tests.device.pretend import Pretend

NEAR = 0.03
"""Largest error of a run's highest count of reserved bytes."""
MANY_SEGMENTS = 40 * 2**20
"""Bytes of which a segment of the allocator is a small share."""


def drawn(seed: int) -> RandomRun:
    """Draws a ragged run of one rollout whose weights fill many segments.

    A critic on an adapter is left out: its scoring is forecast a third too high, and later phases find what that took.
    """
    run, dice = draw_run(seed, 0), random.Random(seed)
    sizes = replace(run.sizes, vocab=dice.randint(20_000, 40_000), heads=4, key_heads=2, head_dim=48, layers=2)
    prompts = [dice.randint(3, 60) for _ in range(12)]
    return replace(
        run,
        sizes=sizes,
        steps=run.parts * run.iterations,
        prompts=4,
        group=4,
        critic=None,
        completion_tokens=dice.randint(8, 24),
        prompt_tokens=tuple(prompts),
    )


@pytest.fixture
def expandable(request: pytest.FixtureRequest, cuda: Pretend, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Both ways of cutting segments, on the device and in forecasts."""
    torch.cuda.empty_cache()
    if request.param:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cuda.devices[0].set_expandable(request.param)
    yield request.param
    cuda.devices[0].set_expandable(False)


# A micro-batch may find what a shorter one before it took too small, which then stays cached beside what it takes.
@pytest.mark.parametrize(
    ("seed", "micro_batch_tokens", "expandable"),
    [(0, None, False), (2, None, True), (3, 300, False), (4, 130, True)],
    indirect=["expandable"],
)
def test_a_run_reserves_what_was_said(
    seed: int, micro_batch_tokens: int | None, expandable: bool, tmp_path: Path, cuda: Pretend
) -> None:
    run, policy = drawn(seed), None
    if micro_batch_tokens is not None:
        scored = RolloutPlan(rows_in_flight=8, score_tokens=micro_batch_tokens)
        policy = FixedPolicy(scored, UpdatePlan(micro_batch_tokens))
    print(f"seed {seed}: {run}")
    save_network(run.network_config(), str(tmp_path))
    trainer, _, reserved, _ = peaks_on_device(lambda: run.trainer(tmp_path, use_cpu=False, policy=policy))
    told, most = trainer.forecast.reserved_peak_bytes, max(reserved.values())
    assert most >= MANY_SEGMENTS
    assert told == pytest.approx(most, rel=NEAR), (reserved, trainer.forecast.reserved_bytes)


def test_timing_the_device_leaves_nothing_reserved(cuda: Pretend) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    measured_speed.__wrapped__(torch.device("cuda"), torch.float32)
    assert torch.cuda.memory_reserved() == before
