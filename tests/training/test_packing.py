"""A whole run learns the same whether completions share one copy of their prompt or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BloomConfig, BloomForCausalLM

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import AdaptivePolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.preflight.verify import verify_plan
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, make_trainer, weights

PROMPTS = [f"what is {a} plus {b} and then some more words?" for a in range(4) for b in range(4)]


def trained(output_dir: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"per_device_train_batch_size": 16, "max_steps": 4, "train_dataset": dataset()}
    trainer = make_trainer(output_dir, **{**defaults, **settings})
    trainer.train()
    return trainer


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS})


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_iterations": 2, "beta": 0.1}, id="reference, old log-probs"),
        pytest.param({"peft_config": LoraConfig(r=4, target_modules="all-linear"), "beta": 0.1}, id="lora"),
        pytest.param({"steps_per_generation": 2, "per_device_train_batch_size": 8}, id="shuffled"),
        pytest.param({"top_entropy_quantile": 0.5}, id="entropy"),
    ],
)
def test_a_run_learns_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    start = weights(make_trainer(tmp_path / "start", **settings))
    apart = trained(tmp_path / "apart", policy=cut(400, checkpointing=True), **settings)
    for plan in ({"micro_batch_tokens": 400}, {"micro_batch_tokens": 90, "checkpointing": True}):
        packed = trained(tmp_path / f"packed-{len(plan)}", policy=cut(**plan, pack_prompts=True), **settings)
        travelled = (weights(apart) - start).norm()
        # Adam makes whole steps of gradients that are all rounding; another split differs by as much.
        assert (weights(packed) - weights(apart)).norm() < 1e-4 * travelled
        for mine, other in zip(packed.history, apart.history, strict=True):
            assert mine["plan/pack_prompts"] == 1.0
            assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert mine["entropy"] == pytest.approx(other["entropy"], rel=1e-5)
            assert mine.get("reward") == other.get("reward")


def test_the_default_packs_and_its_plan_is_proved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=dataset(), policy=AdaptivePolicy(), max_steps=1)
    found = verify_plan(trainer.loop)
    assert found.chosen.update_plan.pack_prompts
    assert not found.plain.update_plan.pack_prompts
    assert found.chosen.gradient_difference is not None
    assert found.chosen.gradient_difference <= found.tolerance


@pytest.mark.slow
def test_packed_updates_hold_less_and_run_within_less(tmp_path: Path) -> None:
    peaks = []
    for packed in (False, True):
        with SimulatedMemory():
            trainer = make_trainer(
                tmp_path / str(packed),
                model=tiny_model(hidden=64, layers=4, scale=1.0),
                train_dataset=dataset(),
                policy=cut(10_000, pack_prompts=packed),
                max_steps=1,
            )
            trainer.train()
            peaks.append(trainer.history[0]["memory/update_peak_bytes"])
    assert peaks[1] < peaks[0]


def test_a_plan_that_packs_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=1)
    with pytest.raises(ConfigError, match="rows cannot share their prompts"):
        make_trainer(tmp_path, model=BloomForCausalLM(config).eval(), policy=cut(pack_prompts=True)).train()
    dropping = tiny_model("gpt2")
    with pytest.raises(ConfigError, match="disable_dropout=False"):
        make_trainer(tmp_path, model=dropping, disable_dropout=False, policy=cut(pack_prompts=True)).train()
