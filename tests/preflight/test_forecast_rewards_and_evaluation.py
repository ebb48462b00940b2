"""Reward models and evaluations in a forecast, beside the run that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, BitsAndBytesConfig

from memsafe_rl import GRPOConfig, GRPOTrainer, SimulatedMemory, forecast_memory
from memsafe_rl.types import Component, Phase
from tests.preflight.beside import LENGTH, ROOM, alternating, config_for, prompts, run, saved
from tests.tiny import tiny_config, tiny_tokenizer

PROMPT = 20


class SteadyTokenizer:
    """A reward model's tokenizer that makes prompt and completion as long as can be, every other one but for a token.

    What an untrained network draws has no text of its length.
    """

    pad_token_id, pad_token_type_id, eos_token, model_input_names = 0, 0, "<eos>", ("input_ids", "attention_mask")

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        lengths = [PROMPT + LENGTH - (row % 2) for row in range(len(texts))]
        return {"input_ids": [[5] * n for n in lengths], "attention_mask": [[1] * n for n in lengths]}


def judge_config() -> Any:
    config = tiny_config("qwen3", vocab_size=3000, layers=3, hidden=192)
    config.num_labels = 1
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved network and, beside it, a reward model larger than it."""
    path = tmp_path_factory.mktemp("model")
    AutoModelForSequenceClassification.from_config(judge_config()).save_pretrained(path / "judge")
    tiny_tokenizer().save_pretrained(path / "judge")
    return saved(tiny_config("qwen3", vocab_size=1000, layers=2, hidden=64), AutoModelForCausalLM, path)


def check(trainer: GRPOTrainer, held: dict[Phase, int], *phases: Phase) -> None:
    """Compares a forecast with its run."""
    forecast = trainer.forecast
    assert forecast is not None
    assert set(phases) <= set(forecast.phases)
    assert forecast.peak_bytes == pytest.approx(max(held.values()), rel=0.01)
    for phase, size in forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=0.03), phase


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False], ids=["by name", "object"])
def test_a_reward_model_counts_and_scores(folder: Path, named: bool) -> None:
    judge: Any = str(folder / "judge")
    if not named:
        judge = AutoModelForSequenceClassification.from_config(judge_config())
    given = {"reward_processing_classes": [None, SteadyTokenizer()], "peft_config": LoraConfig(r=4)}
    trainer, held = run(folder, [alternating, judge], given)
    check(trainer, held, Phase.REWARD)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_reward_model_is_in_4_bits_with_the_model(folder: Path, nested: bool) -> None:
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_use_double_quant=nested)
    given = {"reward_processing_classes": [None, SteadyTokenizer()], "peft_config": LoraConfig(r=4)}
    init = {"quantization_config": bits}
    trainer, held = run(folder, [alternating, str(folder / "judge")], given, model_init_kwargs=init)
    check(trainer, held, Phase.REWARD)


@pytest.mark.slow
def test_an_evaluation_is_a_phase_of_its_own(folder: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}
    trainer, held = run(folder, alternating, {"eval_dataset": prompts(16, PROMPT + 20)}, **settings)
    check(trainer, held, Phase.EVALUATE)
    assert held[Phase.EVALUATE] > held[Phase.ROLLOUT]
    assert trainer.forecast is not None
    assert any("evaluations draw 1 completion(s) of 16 prompts" in told for told in trainer.forecast.assumptions)


@pytest.mark.slow
@pytest.mark.parametrize("probed", [False, True], ids=["forecast", "probe"])
def test_the_completions_of_an_evaluation_are_scored(folder: Path, probed: bool) -> None:
    given = {"eval_dataset": prompts(64, PROMPT), "peft_config": LoraConfig(r=4)}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "beta": 0.1, "max_completion_length": 4, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "memory_forecast": not probed, "probe_worst_case": probed}
    trainer, held = run(folder, alternating, given, **settings)
    if not probed:
        check(trainer, held, Phase.EVALUATE, Phase.SCORE)
        return
    probe = next(event for event in trainer.memory_events if event["event"] == "probe")
    for phase in (Phase.EVALUATE, Phase.SCORE):
        assert probe["peak_bytes"][phase] == pytest.approx(held[phase], rel=0.03), phase


@pytest.mark.slow
def test_an_evaluation_with_a_reward_model_holds_both(folder: Path) -> None:
    given = {"eval_dataset": prompts(16, PROMPT), "reward_processing_classes": [None, SteadyTokenizer()]}
    trainer, held = run(folder, [alternating, str(folder / "judge")], given, eval_strategy="steps", eval_steps=1)
    check(trainer, held, Phase.EVALUATE, Phase.REWARD)


@pytest.mark.slow
def test_a_reward_model_is_known_by_its_config_alone(folder: Path, tmp_path: Path) -> None:
    judge_config().save_pretrained(tmp_path)
    config = GRPOConfig("unused", report_to="none", max_completion_length=32)
    plain, judged, twice = (
        forecast_memory(str(folder), config, device_bytes="8GiB", prompt_tokens=32, reward_models=models)
        for models in ((), (str(tmp_path),), (str(tmp_path / "config.json"), str(tmp_path)))
    )
    judge = AutoModelForSequenceClassification.from_config(judge_config())
    weights = sum(4 * weight.numel() for weight in judge.parameters())
    held = [found.phases[Phase.UPDATE][Component.WEIGHTS] for found in (plain, judged, twice)]
    assert [size - held[0] for size in held[1:]] == [pytest.approx(count * weights, rel=0.01) for count in (1, 2)]
    assert Phase.REWARD in judged.phases
    assert Phase.REWARD not in plain.phases
    assert "reward models read as many tokens as prompt and completion have" in judged.assumptions


@pytest.mark.slow
def test_a_known_reward_model_has_the_type_it_is_published_in(folder: Path) -> None:
    config = GRPOConfig("unused", report_to="none", max_completion_length=32)
    found = forecast_memory(
        str(folder), config, device_bytes="8GiB", prompt_tokens=32, reward_models=["HuggingFaceTB/SmolLM2-135M"]
    )
    assert 2 * 134e6 < found.phases[Phase.UPDATE][Component.WEIGHTS] < 2 * 136e6


@pytest.mark.slow
def test_an_encoder_that_classifies_can_be_a_reward_model(folder: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertConfig(intermediate_size=128, max_position_embeddings=40, **sizes).save_pretrained(tmp_path)
    config = GRPOConfig("unused", report_to="none", max_completion_length=32)
    found = forecast_memory(str(folder), config, device_bytes="8GiB", prompt_tokens=32, reward_models=[str(tmp_path)])
    assert found.phase_bytes[Phase.REWARD] > found.job.held_bytes


@pytest.mark.slow
def test_evaluations_nobody_describes_have_as_many_prompts_as_a_rollout_has_completions(folder: Path) -> None:
    config = GRPOConfig("unused", report_to="none", max_completion_length=32, eval_strategy="steps", eval_steps=5)
    found = forecast_memory(str(folder), config, device_bytes="8GiB", prompt_tokens=32)
    assert Phase.EVALUATE in found.phases
    assert any("8 completion(s) of 8 or more prompts" in told for told in found.assumptions)


@pytest.mark.slow
def test_a_probe_tries_reward_models_and_evaluations_too(folder: Path) -> None:
    settings = {"memory_forecast": False, "probe_worst_case": True, "eval_strategy": "steps", "eval_steps": 1}
    with SimulatedMemory(ROOM):
        config = config_for(folder, max_steps=1, **settings)
        trainer = GRPOTrainer(str(folder), str(folder / "judge"), config, prompts(), prompts(4))
        trainer.train()
    probe = next(event for event in trainer.memory_events if event["event"] == "probe")
    assert {"reward", "evaluate"} <= set(probe["peak_bytes"])


def test_scoring_keeps_no_keys_and_values(folder: Path) -> None:
    with SimulatedMemory(ROOM):
        trainer = GRPOTrainer(str(folder), str(folder / "judge"), config_for(folder, memory_forecast=False), prompts())
        seen: list[Any] = []
        judge = trainer.rewards.models[0]
        judge.register_forward_hook(lambda _, __, output: seen.append(output.past_key_values))
        trainer.rewards.rehearse(12, 4)
    assert seen == [None]
