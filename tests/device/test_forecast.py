"""Forecasts for CUDA beside what runs hold on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from benchmarks.forecast_error import beside, errors_of, peaks_on_device, save_network
from benchmarks.random_runs import FAMILIES, RandomRun, Sizes
from memsafe_rl import FixedPolicy, GRPOConfig, GRPOTrainer, RolloutPlan, UpdatePlan, forecast_memory
from tests.device.pretend import Pretend
from tests.preflight.beside import alternating, config_for, prompts
from tests.tiny import tiny_model, tiny_tokenizer

CASES: dict[str, dict[str, Any]] = {
    "float32, packed": {"packs": True},
    "bf16, packed, own heads": {"packs": True, "bf16": True, "arch": "gpt2"},
    "bf16, recomputed, LoRA": {"packs": False, "bf16": True, "rank": 4, "beta": 0.1, "num_iterations": 2},
    "bf16, packed, experts": {"packs": True, "bf16": True, "family": "qwen3_moe"},
    "float32, long rows sorted": {"packs": True, "vocab": 9000, "top_p": 0.9},
    "float32, position bias": {"packs": False, "checkpoints": False, "family": "t5"},
}
SIZES = Sizes(vocab=600, heads=4, key_heads=2, head_dim=32, inner=256, layers=1, tied=True)


@pytest.mark.parametrize("name", CASES)
def test_a_run_holds_what_was_said(name: str, tmp_path: Path, cuda: Pretend) -> None:
    case = dict(CASES[name])
    packs = case.pop("packs")
    checkpoints = case.pop("checkpoints", not packs)
    if (family := case.pop("family", None)) is not None:
        save_network(FAMILIES[family](SIZES), str(tmp_path))
    else:
        sizes = {"vocab_size": case.pop("vocab", 2000), "layers": 2, "hidden": 128, "positions": 512}
        tiny_model(case.pop("arch", "qwen3"), **sizes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {
        "train_dataset": prompts(length=100),
        "peft_config": LoraConfig(r=case.pop("rank"), target_modules="all-linear") if "rank" in case else None,
        "memory_policy": FixedPolicy(
            RolloutPlan(rows_in_flight=16),
            UpdatePlan(micro_batch_tokens=8192, pack_prompts=packs, checkpointing=checkpoints),
        ),
    }
    settings = {"max_completion_length": 60, "bf16": False, "use_cpu": False, "alarms": False, **case}
    trainer, held, *_ = peaks_on_device(
        lambda: GRPOTrainer(str(tmp_path), alternating, config_for(tmp_path, **settings), **given)
    )
    errors = {phase.value: size / held[phase.value] - 1 for phase, size in trainer.forecast.phase_bytes.items()}
    assert {"load", "rollout", "update", "optimizer"} <= set(errors)
    assert max(map(abs, errors.values())) < 0.01, errors


def test_a_step_of_few_tokens_may_hold_most_in_attention(tmp_path: Path, cuda: Pretend) -> None:
    run = RandomRun(
        family="gpt_neox",
        sizes=Sizes(vocab=2085, heads=6, key_heads=2, head_dim=16, inner=80, layers=1, tied=True),
        prompt_tokens=(11, 8, 8, 4, 12, 5, 11, 6, 9, 3, 7, 9, 6, 10, 3, 8),
        completion_tokens=8,
        prompts=6,
        group=4,
        steps=4,
        parts=2,
        accumulation=1,
        iterations=1,
        ppo=False,
        critic=None,
        beta=0.0,
        loss="vespo",
        optim="adamw_torch_fused",
        lora=4,
        checkpointing=False,
        packing=None,
        quantile=1.0,
        bf16=False,
    )
    save_network(run.network_config(), str(tmp_path))
    found = beside(run, lambda: run.trainer(tmp_path, use_cpu=False), on_device=True)
    assert abs(dict(errors_of(found))["update"]) < 0.01, found


def test_only_a_forecast_for_the_card_at_hand_asks_it(
    tmp_path: Path, cuda: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking it makes a CUDA context, which a forecast for a CPU may not, nor a forked process."""
    tiny_model("qwen3").save_pretrained(tmp_path)
    asked: list[Any] = []
    properties = torch.cuda.get_device_properties

    def noted(*given: Any) -> Any:
        asked.append(given)
        return properties(*given)

    monkeypatch.setattr(torch.cuda, "get_device_properties", noted)

    def told(**given: Any) -> list[Any]:
        asked.clear()
        config = GRPOConfig("unused", report_to="none", max_completion_length=8)
        assert forecast_memory(str(tmp_path), config, device_bytes="1GiB", prompt_tokens=8, **given).fits
        return list(asked)

    assert told(device="cpu") == told(card="H200") == []
    assert told() != []
