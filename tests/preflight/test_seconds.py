"""Seconds of a step: kernels counted on fake tensors, at a device's speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter

from memsafe_rl import (
    FixedPolicy,
    GRPOConfig,
    GRPOTrainer,
    RolloutPlan,
    SimulatedMemory,
    UpdatePlan,
    forecast_memory,
)
from memsafe_rl.errors import ConfigError
from memsafe_rl.preflight.cards import DATA_SHEETS, named_card
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.preflight.speed import DeviceSpeed, Kernel, Work, WorkCounter, measured_speed, speed_of_card
from memsafe_rl.types import Phase
from memsafe_rl.units import format_seconds
from tests.tiny import tiny_model, tiny_tokenizer

EVERY_HALF = dict.fromkeys(Phase, 0.5)
SLOW = DeviceSpeed("slow", "made up", {4: {1: 100.0, 11: 200.0}}, 10.0, EVERY_HALF, waits=True)
GIGAFLOP = DeviceSpeed("one", "made up", {4: {1: 1e9}}, 1e30, dict.fromkeys(Phase, 0.0), waits=True)
"""Only products take time on it."""


class TestWork:
    def test_products_views_and_moved_bytes_are_told_apart(self) -> None:
        counter, left, right = WorkCounter(), torch.ones(3, 4), torch.ones(4, 5)
        with counter:
            product = left @ right
            product.t().unsqueeze(0).detach()
            product.add_(1.0)
            torch.empty(1000)
        assert counter.work.kernels == {Kernel(3, 2 * 3 * 4 * 5, 4 * (12 + 20 + 15)): 1, Kernel(0, 0, 4 * 30): 1}

    def test_what_is_expanded_is_read_once(self) -> None:
        counter, row = WorkCounter(), torch.ones(1, 8)
        with counter:
            row.expand(100, 8).sum()
        (kernel,) = counter.work.kernels
        assert kernel.moved_bytes == 4 * (8 + 1)

    def test_attention_whose_heads_share_keys_counts_as_if_each_had_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def old(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
            assert query[:2] == key[:2] == value[:2], "PyTorch 2.11 knows no shared keys"
            return 4 * query[0] * query[1] * query[2] * key[2] * query[3]

        monkeypatch.setattr(flop_counter, "sdpa_flop_count", old)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        counter, queries, keys = WorkCounter(), torch.ones(2, 4, 5, 8), torch.ones(2, 1, 5, 8)
        with FakeTensorMode(allow_non_fake_inputs=True), counter:
            flash(queries, keys, keys)
        assert [kernel.flops for kernel in counter.work.kernels] == [4 * 2 * 4 * 5 * 5 * 8]

    def test_a_lap_begins_anew(self) -> None:
        counter = WorkCounter()
        with counter:
            torch.ones(2).mul(2.0)
            first = counter.lap()
            torch.zeros(2)
        assert (first.launches, counter.lap().launches) == (2, 1)


class TestDeviceSpeed:
    def test_a_kernel_takes_what_takes_longest(self) -> None:
        work = Work()
        work.kernels[Kernel(6, 300, 5)] += 2  # 300 at 150 a second
        work.kernels[Kernel(0, 0, 40)] += 1
        assert SLOW.seconds(work, Phase.UPDATE) == pytest.approx(3 * 0.5 + 2 * 2.0 + 4.0)

    def test_a_product_with_a_small_matrix_is_slower(self) -> None:
        speed = replace(GIGAFLOP, flops={4: {1: 1.0, 3: 3.0}, 8: {1: 10.0, 3: 30.0}})
        for side, rate in ((2, 3.0), (4, 3.0), (6, 16.5), (8, 30.0), (16, 30.0)):
            work = Work()
            work.kernels[Kernel(3, 2 * 3 * side**2, 0)] += 1
            assert speed.seconds(work, Phase.UPDATE) == pytest.approx(2 * 3 * side**2 / rate)

    def test_launches_hide_behind_work_where_a_device_does_not_wait(self) -> None:
        work = Work()
        work.kernels[Kernel(0, 0, 10)] += 4
        for launch, seconds in ((0.5, 4.0), (3.0, 12.0)):
            speed = DeviceSpeed("", "", {1: {1: 1.0}}, 10.0, {Phase.ROLLOUT: launch}, waits=False)
            assert speed.seconds(work, Phase.ROLLOUT) == seconds

    @pytest.mark.slow
    def test_this_machine_is_measured(self) -> None:
        speed = measured_speed(torch.device("cpu"), torch.float32)
        assert speed.waits
        assert all(rates[256] > rates[1] > 1e8 for rates in speed.flops.values())
        assert set(speed.launch_seconds) == {Phase.ROLLOUT, Phase.SCORE, Phase.UPDATE}
        assert all(1e-7 < seconds < 1e-2 for seconds in speed.launch_seconds.values())
        assert speed.bytes_per_second > 1e8
        assert measured_speed(torch.device("cpu"), torch.float32) is speed

    @pytest.mark.parametrize("text", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "4090"])
    def test_cards_are_known_by_what_people_call_them(self, text: str) -> None:
        assert named_card(text) == ("RTX 4090", 24 * 2**30)

    def test_a_size_is_no_name(self) -> None:
        assert named_card("24GiB") is None
        with pytest.raises(ConfigError, match=r"no card is known as 'RTX 4099'\. Known are T4, V100"):
            speed_of_card("RTX 4099", torch.bfloat16)

    def test_every_sheet_can_be_read(self) -> None:
        for name in DATA_SHEETS["cards"]:
            half, single = (speed_of_card(name, dtype) for dtype in (torch.bfloat16, torch.float32))
            assert half.flops[0][256] > single.flops[0][256] > 1e12
            assert "not measured" in half.source


PROMPTS = Dataset.from_dict({"prompt": ["a" * 12] * 8})


def forecast(tmp_path: Path, speed: DeviceSpeed | None, **settings: Any) -> MemoryForecast:
    """Forecasts a small run under fixed plans."""
    model = tiny_model("qwen3", vocab_size=300, layers=settings.pop("layers", 2), hidden=64, positions=256)
    model.save_pretrained(tmp_path)
    plain: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 24,
        "max_steps": 3,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
    }
    given = {name: settings.pop(name) for name in ("peft_config", "memory_policy") if name in settings}
    plans = FixedPolicy(RolloutPlan(rows_in_flight=8), UpdatePlan(micro_batch_tokens=200))
    return forecast_memory(
        str(tmp_path),
        GRPOConfig(str(tmp_path / "run"), **{**plain, **settings}),
        device_bytes="8GiB",
        device="cpu",
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer(),
        speed=speed,
        **{"memory_policy": plans, **given},
    )


SHAPE = tiny_model("qwen3", vocab_size=300, layers=2, hidden=64, positions=256)
BLOCKS = sum(weight.numel() for layer in SHAPE.model.layers for weight in layer.parameters())
HEAD, ACTIONS, TOKENS = SHAPE.lm_head.weight.numel(), 8 * 24, 8 * (12 + 24)
FORWARD = 2 * (BLOCKS * TOKENS + HEAD * ACTIONS)
"""Operations of the products of a forward over all rows, attention left out."""


class TestStepSeconds:
    @pytest.mark.slow
    def test_products_of_an_update_are_three_forwards_of_its_tokens(self, tmp_path: Path) -> None:
        found = forecast(tmp_path, GIGAFLOP).step_seconds
        assert found is not None
        assert found.phases[Phase.UPDATE] * 1e9 == pytest.approx(3 * FORWARD, rel=0.25)  # attention, the head again
        decoded = 2 * (BLOCKS + HEAD) * ACTIONS
        assert found.phases[Phase.ROLLOUT] * 1e9 == pytest.approx(decoded, rel=0.25)  # attention, the prompts

    @pytest.mark.slow
    def test_a_reference_scores_by_one_forward_of_unique_tokens(self, tmp_path: Path) -> None:
        plain, scored = (forecast(tmp_path, GIGAFLOP, beta=beta).step_seconds for beta in (0.0, 0.1))
        assert plain is not None
        assert scored is not None
        assert plain.phases[Phase.SCORE] == 0
        packed = 2 * (BLOCKS * (2 * 12 + ACTIONS) + HEAD * ACTIONS)  # each of the two prompts once
        assert scored.phases[Phase.SCORE] * 1e9 == pytest.approx(packed, rel=0.15)

    @pytest.mark.slow
    def test_a_rollout_is_shared_by_the_steps_that_train_on_it(self, tmp_path: Path) -> None:
        once, thrice = (forecast(tmp_path, GIGAFLOP, num_iterations=count).step_seconds for count in (1, 3))
        assert once is not None
        assert thrice is not None
        assert thrice.phases[Phase.ROLLOUT] == pytest.approx(once.phases[Phase.ROLLOUT] / 3)
        assert once.run == pytest.approx(3 * once.step)

    @pytest.mark.slow
    def test_weights_that_come_from_the_host_take_the_bus_for_every_token(self, tmp_path: Path) -> None:
        bus = replace(GIGAFLOP, flops={4: {1: 1e30}}, waits=False, bus_bytes_per_second=1e6)
        plans = RolloutPlan(rows_in_flight=4, resident_blocks=0), UpdatePlan(resident_blocks=1, checkpointing=True)
        lora = LoraConfig(r=2, target_modules=["q_proj"])
        found = forecast(tmp_path, bus, layers=4, peft_config=lora, memory_policy=FixedPolicy(*plans)).step_seconds
        assert found is not None
        matrices = (weight for layer in SHAPE.model.layers for weight in layer.parameters() if weight.dim() > 1)
        size = 2 * sum(weight.nbytes for weight in matrices)
        waves, steps = 2, 24
        assert found.phases[Phase.ROLLOUT] * 1e6 == pytest.approx(waves * steps * size, rel=0.1)
        assert 0 < found.phases[Phase.UPDATE] * 1e6 <= 2 * size

    @pytest.mark.slow
    def test_nobody_guesses_where_the_speed_is_not_known(self, tmp_path: Path) -> None:
        found = forecast(tmp_path, None)
        assert found.step_seconds is None
        assert "estimated time" not in found.facts()

    @pytest.mark.slow
    @pytest.mark.parametrize("simulated", [True, False])
    def test_a_run_measures_its_own_device_but_no_simulated_one(self, tmp_path: Path, simulated: bool) -> None:
        tiny_model("qwen3", vocab_size=300, layers=2, hidden=64, positions=256).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        config = GRPOConfig(
            str(tmp_path / "run"),
            memory_forecast=True,
            max_completion_length=24,
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_steps=1,
        )
        with SimulatedMemory() if simulated else nullcontext():
            trainer = GRPOTrainer(str(tmp_path), lambda completions, **_: [0.0] * len(completions), config, PROMPTS)
        assert trainer.forecast is not None
        assert (trainer.forecast.step_seconds is None) is simulated

    @pytest.mark.slow
    def test_bytes_are_those_without_it(self, tmp_path: Path) -> None:
        with_it, without = (forecast(tmp_path, speed) for speed in (SLOW, None))
        assert with_it.phases == without.phases
        assert "a step takes about" in with_it.facts()["estimated time"]
        assert with_it.plain()["step_seconds"]["device"] == "slow"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.04 s"), (9.96, "10 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (90_000, "1 d 1 h")],
)
def test_durations_are_written_in_two_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
