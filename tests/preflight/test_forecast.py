"""A forecast beside the run it was made for: peaks within a percent, the same plans, and no failure on the way."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from memsafe_rl import GRPOConfig, GRPOTrainer, MemoryBudgetError, SimulatedMemory, forecast_memory
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import AdaptivePolicy, FixedPolicy, MemoryPolicy
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.preflight.speed import speed_of_card
from memsafe_rl.preflight.what_fits import Scout
from memsafe_rl.types import Component, MemoryState, Phase, RolloutPlan, RolloutWork, UpdatePlan, UpdateWork
from tests.preflight import beside
from tests.preflight.beside import ROOM, alternating, prompts
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

LENGTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved network, large enough that its tensors outweigh a step's odd bytes."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=4000, layers=2, hidden=128).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def config_for(folder: Path, **settings: Any) -> GRPOConfig:
    return beside.config_for(folder, **{"max_completion_length": LENGTH, **settings})


def trainer_for(folder: Path, peft_config: Any = None, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(str(folder), alternating, config_for(folder, **settings), prompts(), peft_config=peft_config)


def run(folder: Path, peft_config: Any = None, **settings: Any) -> tuple[GRPOTrainer, dict[Phase, int]]:
    return beside.run(folder, given={"peft_config": peft_config}, **{"max_completion_length": LENGTH, **settings})


def foreseen(trainer: GRPOTrainer) -> MemoryForecast:
    assert trainer.forecast is not None
    return trainer.forecast


def failures(trainer: GRPOTrainer) -> list[str]:
    return [event["event"] for event in trainer.memory_events if event["event"] in ("failure", "retry", "fallback")]


LORA = {"r": 8, "target_modules": "all-linear"}


class TakesTurns(MemoryPolicy):
    """Plans otherwise whenever the estimate of an update is corrected anew, as two equally good plans may."""

    def __init__(self) -> None:
        self.corrections: list[float | None] = []

    def before_rollout(self, work: RolloutWork, memory: MemoryState) -> RolloutPlan:
        return RolloutPlan()

    def before_update(self, work: UpdateWork, memory: MemoryState) -> UpdatePlan:
        corrected = memory.corrections.get(Phase.UPDATE)
        self.corrections += [corrected] if corrected not in self.corrections else []
        tokens = 128 if len(self.corrections) % 2 else 256
        return UpdatePlan(micro_batch_tokens=tokens, predicted_bytes={Phase.UPDATE: memory.live_bytes + 5 * 10**6})


@pytest.mark.slow
def test_plans_that_take_turns_are_each_tried_once(folder: Path) -> None:
    """Six rounds were run, of which a large network needs half a minute for each."""
    policy = TakesTurns()
    forecast_memory(str(folder), config_for(folder), device_bytes=ROOM, prompt_tokens=60, memory_policy=policy)
    assert len(policy.corrections) == 1 + 2, "none, and one after each round"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (False, {"num_iterations": 2, "beta": 0.04}),
        pytest.param(True, {"gradient_checkpointing": True, "beta": 0.04}, marks=pytest.mark.slow),
        pytest.param(False, {"optim": "sgd", "gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(True, {"optim": "adamw_torch"}, marks=pytest.mark.slow),
        pytest.param(True, {"cache_implementation": "quantized"}, marks=pytest.mark.slow),
    ],
    ids=["full, reference copy", "LoRA, recomputed", "SGD", "LoRA, state made late", "LoRA, cache in 8 bits"],
)
def test_peaks_are_what_the_run_then_holds(folder: Path, lora: bool, settings: dict[str, Any]) -> None:
    trainer, held = run(folder, LoraConfig(**LORA) if lora else None, **settings)
    forecast = foreseen(trainer)
    assert forecast.peak_bytes == pytest.approx(max(held.values()), rel=0.01)
    for phase, size in forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=0.03), phase
    assert forecast.job.geometry.trainable_bytes == trainer.adapter.geometry.trainable_bytes
    assert forecast.job.geometry.kv_bytes(7) == trainer.adapter.geometry.kv_bytes(7)
    assert failures(trainer) == []


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("layer", ["norm", "embed_tokens", "lm_head"])
def test_layers_that_are_trained_whole_beside_an_adapter_are_forecast_and_leave_the_heap_whole(
    tmp_path: Path, layer: str
) -> None:
    """Deep copies of fake tensors, as PEFT makes them, corrupted it: the process died some allocations later."""
    tiny_model(layers=2, tied=False).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    peft = LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=[layer])
    trainer, held = beside.run(tmp_path, given={"peft_config": peft})
    for _ in range(10):
        Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert trainer.forecast is not None
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=0.01, abs=2**13), phase


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_copies_for_checkpoints_are_what_the_host_then_holds(folder: Path, lora: bool) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "overwrite_output_dir": True}

    def held(*, beside: bool) -> tuple[Any, int]:
        with SimulatedMemory(ROOM, exact=True) as memory:
            trainer = trainer_for(folder, LoraConfig(**LORA) if lora else None, save_in_background=beside, **settings)
            trainer.train()
        shutil.rmtree(trainer.args.output_dir)  # other tests train there too
        return trainer, memory.host_peak_bytes

    held(beside=False)  # the first run of a process measures the machine's speed, in host memory too
    (_, without), (trainer, with_copies) = held(beside=False), held(beside=True)
    assert foreseen(trainer).host_bytes == pytest.approx(with_copies - without, rel=0.01)


@pytest.mark.slow
def test_weights_that_come_from_the_host_are_foreseen_even_in_one_micro_batch(tmp_path: Path) -> None:
    tiny_model("qwen3", vocab_size=300, layers=6, hidden=128, positions=256).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    plans = RolloutPlan(resident_blocks=1), UpdatePlan(resident_blocks=1, checkpointing=True, logprob_tile=8)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    given = {"peft_config": lora, "memory_policy": FixedPolicy(*plans)}
    trainer, held = beside.run(tmp_path, given=given, max_completion_length=6)
    forecast = foreseen(trainer)
    # Before the first plan sends them away, all weights are on the device beside the optimizer's state.
    for phase in (Phase.ROLLOUT, Phase.UPDATE, Phase.OPTIMIZER):
        assert forecast.phase_bytes[phase] == pytest.approx(held[phase], rel=0.002), phase
    assert "of 6 blocks, so many have their frozen weights on the device: 1 in rollouts, 1 in updates" in (
        forecast.sentence()
    )


@pytest.mark.slow
def test_a_load_below_the_size_of_the_weights_counts_the_blocks_that_pass_while_it_is_checked(tmp_path: Path) -> None:
    model = tiny_model("qwen3", vocab_size=300, layers=6, hidden=128, positions=256)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    budget = int(0.6 * sum(weight.nbytes for weight in model.parameters()))
    trainer, held = beside.run(tmp_path, given=given, max_completion_length=6, memory_budget=budget)
    for phase in (Phase.LOAD, Phase.ROLLOUT, Phase.UPDATE):
        assert foreseen(trainer).phase_bytes[phase] == pytest.approx(held[phase], rel=0.01), phase


@pytest.mark.slow
def test_prompts_that_are_read_a_few_at_a_time_count_once_they_are_all_there(tmp_path: Path) -> None:
    tiny_model("qwen3", vocab_size=2000, layers=2, hidden=128, positions=1024).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    policy = FixedPolicy(RolloutPlan(rows_in_flight=16, prefill_tokens=512, score_tokens=512), UpdatePlan())
    with SimulatedMemory(ROOM, exact=True) as memory:
        settings: dict[str, Any] = {"max_completion_length": 8, "max_steps": 1}
        settings["generation_kwargs"] = {"min_new_tokens": 8}
        prompts = Dataset.from_dict({"prompt": [f"{index:02d}".ljust(400, ".") for index in range(8)]})
        trainer = GRPOTrainer(
            str(tmp_path),
            alternating,
            config_for(tmp_path, num_generations=4, per_device_train_batch_size=32, **settings),
            prompts,
            memory_policy=policy,
        )
        trainer.train()
        held = sum(memory.phase_peaks()[Phase.ROLLOUT].values())
    assert foreseen(trainer).phase_bytes[Phase.ROLLOUT] == pytest.approx(held, rel=0.03)


@pytest.mark.slow
def test_rows_of_a_rollout_of_several_steps_share_few_prompts(folder: Path) -> None:
    packed = FixedPolicy(RolloutPlan(), UpdatePlan(pack_prompts=True))
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 4}
    settings |= {"max_completion_length": 8, "generation_kwargs": None}
    with SimulatedMemory(ROOM):
        forecast = forecast_memory(
            str(folder), config_for(folder, **settings), device_bytes=ROOM, prompt_tokens=60, memory_policy=packed
        )
    assert len(set(forecast.job.update.prompts)) == 4
    alone = forecast_memory(
        str(folder),
        config_for(folder, **settings),
        device_bytes=ROOM,
        prompt_tokens=60,
        memory_policy=FixedPolicy(RolloutPlan(), UpdatePlan(pack_prompts=False)),
    )
    ours, unshared = (found.phases[Phase.UPDATE][Component.ACTIVATIONS] for found in (forecast, alone))
    assert ours > 0.8 * unshared


@pytest.mark.slow
def test_the_same_settings_give_the_same_forecast_again(folder: Path) -> None:
    config = GRPOConfig("unused", report_to="none", max_completion_length=16)
    first, second = (
        forecast_memory(str(folder), config, device_bytes="8GiB", prompt_tokens=16).peak_bytes for _ in range(2)
    )
    assert first == second


@pytest.mark.slow
def test_what_the_check_at_start_holds_is_held_to_the_device_alone(on_a_gib: MemoryForecast) -> None:
    forecast = on_a_gib
    load = forecast.phase_bytes[Phase.LOAD]
    others = max(size for phase, size in forecast.phase_bytes.items() if phase is not Phase.LOAD)
    parts = {**forecast.phases, Phase.LOAD: {Component.WEIGHTS: 2 * others}}
    raised = replace(forecast, phases=parts, budget_bytes=others, device_bytes=2 * others)
    assert load < 2 * others
    assert raised.fits
    assert not replace(raised, device_bytes=2 * others - 1).fits
    assert not replace(raised, budget_bytes=others - 1).fits


@pytest.mark.slow
def test_weights_that_do_not_fit_are_a_refusal(folder: Path) -> None:
    forecast = on_a_card(folder, device_bytes=2**20)
    assert not forecast.fits
    assert "does not fit into 921.60 KiB" in forecast.sentence()


@pytest.mark.slow
def test_an_optimizer_whose_first_step_does_not_fit_is_a_refusal(folder: Path) -> None:
    """Optimizers of bitsandbytes make their state then, and other steps hold temporaries."""
    pytest.importorskip("bitsandbytes")
    small = {"max_completion_length": 8, "per_device_train_batch_size": 4, "generation_kwargs": None}
    config = config_for(folder, optim="adamw_bnb_8bit", **small)
    given: dict[str, Any] = {"device_bytes": ROOM, "device": "cpu", "prompt_tokens": 4}
    sizes = dict(forecast_memory(str(folder), config, **given).phase_bytes)
    stepping, before = sizes.pop(Phase.OPTIMIZER), max(sizes.values())
    assert before < stepping
    config.memory_budget = (before + stepping) // 2
    tight = forecast_memory(str(folder), config, **given)
    assert not tight.fits
    assert "The optimizer's state or step does not fit in memory" in (tight.refusal or "")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"eval_strategy": "steps", "eval_steps": 1}], ids=str)
def test_settings_that_change_what_is_drawn_or_when_are_forecast(folder: Path, settings: dict[str, Any]) -> None:
    assert on_a_card(folder, settings=settings).fits


@pytest.mark.slow
def test_a_tight_budget_needs_no_failure_to_be_kept(folder: Path) -> None:
    trainer, held = run(folder)
    state = foreseen(trainer).job.held_bytes + trainer.adapter.geometry.trainable_bytes
    budget = int(state + 0.5 * (max(held.values()) - state))
    tight, kept = run(folder, memory_budget=budget)
    assert max(kept.values()) <= budget
    assert failures(tight) == []
    assert foreseen(tight).update_plan == tight.setup.memory.update_plan or foreseen(tight).fits


@pytest.mark.slow
@pytest.mark.parametrize("budget", [3 * 2**20, "1KiB"])
def test_a_run_that_cannot_fit_is_refused_before_its_weights_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int | str
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("memsafe_rl.training.assembly.language_models.load_model", never)
    with SimulatedMemory(ROOM), pytest.raises(MemoryBudgetError, match=r"before loading weights: the run does not fit"):
        trainer_for(folder, memory_budget=budget)


@pytest.mark.slow
def test_a_budget_without_room_for_float32_copies_is_refused_with_remedies(folder: Path) -> None:
    half = {"model_init_kwargs": {"dtype": "bfloat16"}}
    budgets = {
        choice: forecast_memory(str(folder), config_for(folder, **half, master_weights=choice), device_bytes=ROOM)
        for choice in (None, "stochastic_rounding", False)
    }
    peaks = {choice: forecast.peak_bytes for choice, forecast in budgets.items()}
    assert peaks[False] < peaks["stochastic_rounding"] < peaks[None]
    short = budgets[None].job.optimizer_bytes
    tight = forecast_memory(str(folder), config_for(folder, **half), device_bytes=short)
    assert tight.refusal is not None
    for words in ("peft_config", "master_weights='stochastic_rounding'", "adamw_bnb_8bit", "master_weights=False"):
        assert words in tight.refusal


def test_a_model_object_that_does_not_fit_is_named_with_its_size() -> None:
    network = tiny_model("qwen3", vocab_size=4000, layers=4, hidden=128)
    told = r"The weights of the Qwen3ForCausalLM that was given are 3\.83 MiB\. Loading the model does not fit"
    with SimulatedMemory(2**20), pytest.raises(MemoryBudgetError, match=told) as caught:
        GRPOTrainer(
            network,
            alternating,
            GRPOConfig("unused", report_to="none", use_cpu=True, max_completion_length=8),
            Dataset.from_dict({"prompt": ["a"] * 8}),
            processing_class=tiny_tokenizer(),
        )
    assert caught.value.failure is not None
    assert caught.value.failure.phase is Phase.LOAD


@pytest.mark.slow
def test_remedies_are_left_to_the_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SimulatedMemory(ROOM), caplog.at_level(logging.WARNING):
        trainer_for(folder, memory_budget=2**20, allow_lossy=["num_iterations"])
    assert "the run starts, since allow_lossy names remedies" in caplog.text


def test_a_network_that_cannot_be_forecast_trains_nevertheless(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("an operator without shapes\nand a long story")

    monkeypatch.setattr("memsafe_rl.preflight.forecast.fake_language_model", broken)
    with SimulatedMemory(ROOM), caplog.at_level(logging.WARNING):
        trainer = trainer_for(folder, max_steps=1)
    assert trainer.forecast is None
    assert "no forecast of this run's memory: RuntimeError: an operator without shapes" in caplog.text


@pytest.mark.slow
def test_nothing_of_the_run_is_touched(folder: Path) -> None:
    lora = LoraConfig(**LORA)
    before, state = lora.to_dict(), torch.get_rng_state()
    config = config_for(folder)
    settings = config.to_dict()
    forecast_memory(str(folder), config, device_bytes=ROOM, prompt_tokens=20, peft_config=lora)
    assert lora.to_dict() == before
    assert config.to_dict() == settings
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.zeros(3).tolist() == [0.0] * 3


@pytest.mark.slow
def test_a_forecast_is_wanted_where_it_can_be_had(folder: Path) -> None:
    with SimulatedMemory(ROOM):
        assert trainer_for(folder, memory_forecast=None).forecast is None  # "auto" on a CPU
        assert trainer_for(folder, memory_forecast=None, memory_budget="512MiB").forecast is not None
        assert trainer_for(folder, memory_forecast=False, memory_budget="512MiB").forecast is None
    with pytest.raises(ConfigError, match=r"memory_forecast is True, but model is a Qwen3ForCausalLM"):
        GRPOTrainer(
            tiny_model(),
            alternating,
            config_for(folder),
            Dataset.from_dict({"prompt": ["a"] * 8}),
            processing_class=tiny_tokenizer(),
        )


@pytest.fixture(scope="module")
def on_a_gib(folder: Path) -> MemoryForecast:
    """Of the saved network, on a card of 1 GiB."""
    return on_a_card(folder)


def on_a_card(folder: Path, **changes: Any) -> MemoryForecast:
    given: dict[str, Any] = {"device_bytes": "1GiB", "prompt_tokens": 64, **changes}
    config = GRPOConfig("unused", report_to="none", max_completion_length=64, **given.pop("settings", {}))
    return forecast_memory(str(folder), config, **given)


@pytest.fixture(scope="module")
def parameters(folder: Path) -> int:
    """Weights of the saved network."""
    return sum(weight.numel() for weight in tiny_model("qwen3", vocab_size=4000, layers=2, hidden=128).parameters())


class TestOfACard:
    """Forecasts for a device that is not there."""

    @pytest.mark.slow
    def test_a_card_that_is_named_says_what_its_libraries_hold(self, folder: Path) -> None:
        small = on_a_card(folder, card="NVIDIA RTX 4090")
        assert any("cuBLAS takes 18.25 MiB" in told for told in small.assumptions)  # twice 8 MiB, 128 KiB and 1 MiB
        assert any("attention, sorts and sums" in told for told in small.assumptions)
        with pytest.raises(ConfigError, match="no card is known as 'GTX 1'"):
            on_a_card(folder, card="GTX 1")

    @pytest.mark.slow
    def test_the_types_of_a_cuda_device(self, folder: Path, parameters: int, on_a_gib: MemoryForecast) -> None:
        forecast = on_a_card(folder, peft_config=LoraConfig(**LORA))
        adapter = forecast.job.geometry.trainable_bytes
        assert forecast.job.held_bytes - 3 * adapter == pytest.approx(2 * parameters, rel=0.03)
        assert "weights of the base are bfloat16" in forecast.assumptions
        whole = on_a_gib
        assert whole.phases[Phase.UPDATE][Component.OPTIMIZER] == pytest.approx(8 * parameters, rel=0.03)
        assert whole.phases[Phase.OPTIMIZER][Component.GRADIENTS] == pytest.approx(4 * parameters, rel=0.03)

    @pytest.mark.slow
    def test_reserved_bytes_stand_beside_allocated_ones(
        self, folder: Path, on_a_gib: MemoryForecast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert set(on_a_gib.reserved_bytes) == set(on_a_gib.phases)
        for phase, peak in on_a_gib.phase_bytes.items():
            assert on_a_gib.reserved_bytes[phase] >= peak - 2**20  # the load's is held against the check at start
            assert on_a_gib.reserved_bytes[phase] % (2 * 2**20) == 0
        # What one phase has left in the cache is reserved in the next, too.
        assert on_a_gib.reserved_bytes[Phase.OPTIMIZER] == on_a_gib.reserved_peak_bytes
        assert on_a_gib.plain()["reserved_peak_bytes"] == on_a_gib.reserved_peak_bytes
        assert "reserved by PyTorch's allocator" in on_a_gib.sentence()
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:40,roundup_power2_divisions:4")
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
        growing = on_a_card(folder)
        assert growing.reserved_peak_bytes == (on_a_gib.reserved_peak_bytes or 0) + 20 * 2**20  # one segment of 40
        assert any("roundup_power2_divisions:4 left out" in told for told in growing.assumptions)
        assert any("cuBLAS takes 18.25 MiB" in told for told in growing.assumptions)  # twice 8 MiB, 128 KiB and 1 MiB
        on_a_cpu = on_a_card(folder, device="cpu")
        assert (on_a_cpu.reserved_bytes, on_a_cpu.reserved_peak_bytes) == ({}, None)
        assert "reserved" not in on_a_cpu.sentence()

    @pytest.mark.slow
    def test_an_adapter_fills_no_gaps_between_weights_that_were_never_on_the_card(self, tmp_path: Path) -> None:
        """A weight of 10.6 MiB leaves room for an adapter's of 1.1 in its segment of 12, which then cannot go back."""
        sizes = {"vocab_size": 1000, "hidden_size": 320, "intermediate_size": 17_408, "num_hidden_layers": 10}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        Qwen3Config(**sizes, **heads).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        adapter = LoraConfig(r=16, target_modules=["gate_proj", "up_proj", "down_proj"])
        forecast = on_a_card(tmp_path, settings={"memory_budget": "330MiB"}, peft_config=adapter)
        assert forecast.fits
        assert forecast.update_plan.resident_blocks is not None  # of 360 MiB, some waits on the host
        assert forecast.reserved_bytes[Phase.LOAD] < 1.2 * forecast.phase_bytes[Phase.LOAD]

    @pytest.mark.slow
    def test_a_tight_budget_holds_reserved_bytes(self, folder: Path, on_a_gib: MemoryForecast) -> None:
        budget = 32 * 2**20
        # Live tensors would fit without another plan, what is reserved for them would not.
        assert on_a_gib.peak_bytes < budget < max(found.needed for found in on_a_gib.reserved.values()) + 2**22
        assert (on_a_gib.reserved_peak_bytes or 0) > budget
        tight = on_a_card(folder, settings={"memory_budget": budget})
        assert tight.fits
        assert (tight.reserved_peak_bytes or 0) <= budget

    @pytest.mark.slow
    def test_eight_bit_moments_are_a_quarter_but_for_embeddings(self, folder: Path, parameters: int) -> None:
        optimizer, embeddings = on_a_card(folder, settings={"optim": "adamw_bnb_8bit"}).job.optimizer_bytes, 4000 * 128
        assert optimizer == pytest.approx(2 * (parameters - embeddings) + 8 * embeddings, rel=0.02)

    @pytest.mark.slow
    def test_a_name_is_enough(self) -> None:
        forecast = forecast_memory(
            "HuggingFaceTB/SmolLM2-135M-Instruct", device_bytes="24GiB", peft_config=LoraConfig(**LORA)
        )
        assert forecast.fits
        assert forecast.job.geometry.parameter_bytes > 2 * 134_515_008

    @pytest.mark.slow
    def test_what_is_given_of_the_prompts_is_told(self, folder: Path, on_a_gib: MemoryForecast) -> None:
        assert "the longest prompt has 64 tokens (as given)" in on_a_gib.assumptions
        assumed = on_a_card(folder, prompt_tokens=None, settings={"max_prompt_length": 33})
        assert assumed.job.prompt_tokens == 33
        assert "the longest prompt has 33 tokens (max_prompt_length)" in assumed.assumptions
        dataset = Dataset.from_dict({"prompt": ["abc", "a" * 17]})
        found = on_a_card(folder, prompt_tokens=None, train_dataset=dataset, processing_class=tiny_tokenizer())
        assert "the longest prompt has 17 tokens (the longest of train_dataset)" in found.assumptions

    @pytest.mark.slow
    def test_a_length_is_assumed_where_nobody_says(self, tmp_path: Path) -> None:
        tiny_model("qwen3", positions=2048).save_pretrained(tmp_path)
        assumed = on_a_card(tmp_path, prompt_tokens=None)
        assert assumed.job.prompt_tokens == 512
        assert "the longest prompt has 512 tokens (assumed, for nothing says how long prompts are)" in (
            assumed.assumptions
        )

    @pytest.mark.slow
    def test_rollouts_of_servers_are_told_apart(self, tmp_path: Path) -> None:
        tiny_model("qwen3", positions=2048).save_pretrained(tmp_path)
        on_servers = {"use_vllm": True, "vllm_mode": "server", "async_rollouts": 1}
        told = on_a_card(tmp_path, settings=on_servers).assumptions
        assert any(one.startswith("servers draw on other cards: rollout is what the own engine holds") for one in told)

    @pytest.mark.slow
    def test_plain_values_are_json_with_the_peak_on_top(self, on_a_gib: MemoryForecast) -> None:
        forecast = on_a_gib
        written = json.loads(json.dumps(forecast.plain()))
        assert written["predicted_peak_bytes"] == forecast.peak_bytes == max(written["phases"].values())
        assert written["fits"] is True
        assert sum(written["components"]["update"].values()) == written["phases"]["update"]

    @pytest.mark.slow
    def test_how_the_weights_were_saved_counts(self, tmp_path: Path) -> None:
        config = tiny_config("qwen3", hidden=128, layers=4)  # two pass at a time
        config.dtype = torch.bfloat16
        config.save_pretrained(tmp_path / "half")
        half = on_a_card(tmp_path / "half", settings={"model_init_kwargs": {"dtype": "auto"}})
        assert "weights of the base are bfloat16" in half.assumptions
        config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        config.save_pretrained(tmp_path / "four")
        lora = LoraConfig(**LORA)
        four, plain = (on_a_card(tmp_path / name, peft_config=lora) for name in ("four", "half"))
        weights = [found.phases[Phase.LOAD][Component.WEIGHTS] for found in (four, plain)]
        assert weights[0] < 0.5 * weights[1]
        tight = on_a_card(tmp_path / "four", peft_config=lora, device_bytes=weights[0] * 11 // 10)
        assert tight.phases[Phase.LOAD][Component.WEIGHTS] < weights[0]  # it is quantised on the host
        config.quantization_config = {"quant_method": "awq", "bits": 4}
        config.save_pretrained(tmp_path / "other")
        with pytest.raises(ConfigError, match=r"saved quantised \(awq\)"):
            on_a_card(tmp_path / "other", peft_config=lora)

    @pytest.mark.slow
    def test_a_model_larger_than_its_card_trains_with_blocks_on_the_host(self, tmp_path: Path) -> None:
        """Six blocks of Qwen3-8B, 4.8 GB with their embeddings; what all 36 take is in docs/figures.md."""
        sizes = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
        Qwen3Config(**sizes, **heads).save_pretrained(tmp_path)
        config = GRPOConfig(
            "unused", num_generations=8, max_completion_length=128, bf16=True, use_cpu=True, report_to="none"
        )
        found = forecast_memory(
            str(tmp_path),
            config,
            device_bytes="4GiB",
            prompt_tokens=32,
            peft_config=LoraConfig(r=16, target_modules="all-linear"),
            speed=speed_of_card("RTX 4080", torch.bfloat16),
        )
        assert found.fits, found.refusal
        assert found.rollout_plan.resident_blocks is not None or found.update_plan.resident_blocks is not None
        assert max(found.reserved_bytes.values()) <= found.device_bytes
        assert "so many have their frozen weights on the device" in found.sentence()
        assert found.step_seconds is not None
        assert "an estimate" in found.step_seconds.sentence()

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"device_bytes": 0}, "device_bytes is 0"),
            ({"device_bytes": "many"}, "many"),
            ({"device": "tpu"}, "device is 'tpu'; write 'cuda' or 'cpu'"),
            ({"prompt_tokens": 0}, "prompt_tokens is 0"),
            ({"train_dataset": Dataset.from_dict({"prompt": ["a"]})}, "without processing_class"),
        ],
    )
    def test_bad_input_is_named(self, folder: Path, changes: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            on_a_card(folder, **changes)


@pytest.fixture(scope="module")
def small_card(folder: Path) -> MemoryForecast:
    return on_a_card(folder, device_bytes="64MiB")


def scout_for(forecast: MemoryForecast) -> Scout:
    return Scout(AdaptivePolicy(), "cuda", forecast.budget_bytes, dict(forecast.corrections))


@pytest.mark.slow
class TestSearch:
    """What else would fit, and whether a forecast agrees."""

    def test_its_estimate_is_near_the_forecast(self, small_card: MemoryForecast) -> None:
        assert small_card.fits
        found = scout_for(small_card).peak_bytes(small_card.job)
        assert found == pytest.approx(small_card.peak_bytes, rel=0.15)

    @pytest.mark.slow
    def test_the_longest_completion_fits_and_the_next_does_not(self, small_card: MemoryForecast) -> None:
        job = replace(small_card.job, geometry=replace(small_card.job.geometry, max_positions=10**6))
        scout = scout_for(small_card)
        longest = scout.longest_completion(job)
        assert 0 < longest < 10**6 - 64
        fits = [scout.fits(replace(job, completion_tokens=tokens)) for tokens in (longest, longest + 1)]
        assert fits == [True, False]

    def test_larger_cards_hold_what_smaller_ones_hold(self, small_card: MemoryForecast) -> None:
        job = replace(small_card.job, held_bytes=3 * 2**30)
        fits = [fits for _, fits in scout_for(small_card).cards(job, (1, 2, 4, 24)).values()]
        assert fits == [False, False, True, True]

    def test_a_policy_that_predicts_nothing_is_named(self, small_card: MemoryForecast) -> None:
        class Silent(FixedPolicy):
            def before_update(self, *_: Any) -> UpdatePlan:
                return UpdatePlan()

        scout = Scout(Silent(RolloutPlan(), UpdatePlan()), "cuda", 2**34, {})
        with pytest.raises(ConfigError, match="Silent predicts no bytes"):
            scout.peak_bytes(small_card.job)
