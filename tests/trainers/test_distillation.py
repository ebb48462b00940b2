"""On-policy distillation: advantages of tokens by hand, one gradient under any plan, and the bytes of a teacher."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from memsafe_rl import ConfigError, FixedPolicy, GRPOConfig, GRPOTrainer, RolloutPlan, SimulatedMemory, UpdatePlan
from memsafe_rl.errors import MemsafeError
from memsafe_rl.types import Phase
from tests.faults.audit import audited
from tests.preflight import beside
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import make_trainer, relative, weights

LORA = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved network, wider and deeper than the student."""
    path = tmp_path_factory.mktemp("teacher")
    tiny_model("qwen3", layers=3, hidden=64, seed=7, scale=4.0).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved network, and in `adapter` an adapter on it that has learned something."""
    path = tmp_path_factory.mktemp("base")
    tiny_model(scale=4.0).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(path / "adapter")
    return path


def no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def distilled(folder: Path, teacher: str, **settings: Any) -> GRPOTrainer:
    named = {"teacher_model_name_or_path": teacher, "reward_funcs": no_reward, **settings}
    return make_trainer(folder, **{"model": tiny_model(scale=4.0), **named})


def first_rollout(trainer: GRPOTrainer) -> Any:
    trainer.loop.begin(None)
    trainer.loop.files.folder.release()
    return trainer.loop.collect()


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000], ids=lambda top_k: f"top_k={top_k}")
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "LoRA"])
def test_advantages_are_those_of_the_two_networks_own_logits(
    tmp_path: Path, teacher: str, lora: Any, top_k: int | None
) -> None:
    peft = None if lora is None else LoraConfig(**lora)
    more: dict[str, Any] = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    more["distillation_top_k"] = top_k
    trainer = distilled(tmp_path, teacher, distillation_coef=0.5, temperature=0.7, peft_config=peft, **more)
    stored = first_rollout(trainer).trajectory
    expert = trainer.setup.reference_model
    assert expert.config.num_hidden_layers == 3
    assert not any(weight.requires_grad for weight in expert.parameters())
    prompts = stored.conditions.rows()
    for row, ids in enumerate(stored.actions.rows()):
        prompt = prompts[stored.condition_of_row[row]]
        both = torch.cat([prompt, ids])[None]
        with torch.no_grad():
            ours_TV, theirs_TV = (
                (network(both).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
                for network in (trainer.model, expert)
            )
        ours, theirs = (each_TV[range(len(ids)), ids] for each_TV in (ours_TV, theirs_TV))
        wanted = stored.advantages[row] - 0.5 * (ours - theirs)
        if top_k is not None:
            falling_TV, at_TV = ours_TV.sort(-1, descending=True)
            left_out_T = falling_TV[:, top_k].exp() if top_k < ours_TV.shape[-1] else torch.zeros(len(ids))
            for rank in range(min(top_k, ours_TV.shape[-1])):
                chance_T, gap_T = (
                    falling_TV[:, rank].exp(),
                    falling_TV[:, rank] - theirs_TV[range(len(ids)), at_TV[:, rank]],
                )
                wanted += 0.5 * (chance_T - left_out_T) * gap_T
        torch.testing.assert_close(stored.action_advantages.rows()[row], wanted, rtol=0, atol=2e-5)
    assert float((stored.action_advantages.flat - stored.advantages.mean()).abs().max()) > 0.1


@pytest.mark.slow
def test_the_model_comes_nearer_to_its_teacher_without_any_reward(tmp_path: Path, teacher: str) -> None:
    trainer = distilled(tmp_path, teacher, max_steps=25, learning_rate=5e-3, per_device_train_batch_size=32)
    trainer.train()
    apart = [step["distillation/kl"] for step in trainer.history]
    assert sum(apart[-3:]) < 0.5 * sum(apart[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"peft_config": LoraConfig(**LORA)}, {"num_iterations": 2}, {"distillation_top_k": 4, "num_iterations": 2}],
    ids=str,
)
def test_no_plan_changes_what_is_learnt(tmp_path: Path, teacher: str, settings: dict[str, Any]) -> None:
    found = []
    for rows, tokens in ((64, 4096), (3, 20)):
        policy = FixedPolicy(
            RolloutPlan(rows_in_flight=rows, score_tokens=tokens), UpdatePlan(micro_batch_tokens=tokens, logprob_tile=7)
        )
        trainer = distilled(tmp_path / str(rows), teacher, policy=policy, optim="sgd", **settings)
        trainer.train()
        found.append(weights(trainer))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, teacher: str, base: Path, adapter: bool) -> None:
    saving: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "distillation_top_k": 3}
    if adapter:
        teacher = str(base / "adapter")
        saving |= {"model": str(base), "peft_config": LoraConfig(**LORA), "memory_forecast": False}
    whole = distilled(tmp_path / "whole", teacher, **saving)
    with audited() as audit:
        whole.train()
    assert audit.unguarded == []
    again = distilled(tmp_path / "whole", teacher, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again))


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 50, 1000])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_a_forecast_counts_the_teacher(tmp_path: Path, teacher: str, lora: bool, top_k: int | None) -> None:
    tiny_model("qwen3", layers=1, hidden=32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {"peft_config": LoraConfig(r=8, target_modules="all-linear")} if lora else {}
    named = {"teacher_model_name_or_path": teacher, "distillation_top_k": top_k, "alarms": False}
    trainer, held = beside.run(tmp_path, given=given, **named)
    assert trainer.forecast is not None
    assert held[Phase.SCORE] > sum(weight.nbytes for weight in trainer.setup.reference_model.parameters())
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=0.01), phase


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_an_adapter_teaches_from_the_models_base_or_one_of_its_own(tmp_path: Path, base: Path, lora: bool) -> None:
    given = {"peft_config": LoraConfig(**LORA)} if lora else {}
    trainer = distilled(tmp_path, str(base / "adapter"), model=str(base), memory_forecast=False, **given)
    stored = first_rollout(trainer).trajectory
    expert = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), base / "adapter")
    assert (trainer.setup.reference_model is None) == lora
    prompts, plain = stored.conditions.rows(), weights(trainer)
    for row, ids in enumerate(stored.actions.rows()):
        prompt = prompts[stored.condition_of_row[row]]
        with torch.no_grad():
            logits = expert(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(len(ids)), ids]
        torch.testing.assert_close(stored.ref_logprobs.rows()[row], wanted, rtol=0, atol=2e-5)
    trainer.train()
    assert not torch.equal(weights(trainer), plain)
    for name, weight in trainer.model.named_parameters():
        assert weight.requires_grad == (not lora or ".default." in name)
    if lora:
        learned = trainer.model.state_dict()
        for name, weight in expert.state_dict().items():
            if "lora" in name:
                assert torch.equal(learned[name.replace("default", "ref")], weight)
        trainer.save_model(str(tmp_path / "saved"))
        assert not list((tmp_path / "saved").glob("ref*"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert not any("ref" in name.split(".") for name, _ in loaded.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_a_forecast_counts_an_adapter_that_teaches(base: Path, lora: bool) -> None:
    given = {"peft_config": LoraConfig(r=8, target_modules="all-linear")} if lora else {}
    teacher = {"teacher_model_name_or_path": str(base / "adapter"), "alarms": False}
    trainer, held = beside.run(base, given=given, overwrite_output_dir=True, **teacher)
    assert trainer.forecast is not None
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=0.01, abs=2**13), phase


@pytest.mark.slow
def test_adapters_that_cannot_teach_are_refused(tmp_path: Path, base: Path) -> None:
    lora = {"peft_config": LoraConfig(**LORA), "model": str(base), "memory_forecast": False}
    broken = tmp_path / "broken"
    for name, change, told in (
        ("adapter_config.json", lambda _: "{", "the adapter '.*broken' cannot teach"),
        ("adapter_config.json", lambda text: text.replace(str(base), "elsewhere/none"), "teacher='elsewhere/none' has"),
        ("adapter_config.json", lambda text: text.replace(f'"{base}"', "null"), "does not say what it is on"),
        ("adapter_config.json", lambda text: text.replace('"bias": "none"', '"bias": "all"'), "bias"),
        ("adapter_config.json", lambda text: text.replace('"r": 4', '"r": 5'), r"cannot teach: Error.*: size mismatch"),
        ("adapter_model.safetensors", lambda _: "nothing", "the adapter '.*broken' cannot teach"),
    ):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(base / "adapter", broken)
        (broken / name).write_text(change((broken / name).read_text(errors="replace")))
        with pytest.raises(MemsafeError, match=told):
            distilled(tmp_path / "run", str(broken), **lora)
    with pytest.raises(ConfigError, match="teacher_model_init_kwargs has dtype, but the adapter"):
        distilled(tmp_path / "run", str(base / "adapter"), teacher_model_init_kwargs={"dtype": "float32"}, **lora)
    places = {"teacher_model_init_kwargs": {"local_files_only": True}}
    assert distilled(tmp_path / "run", str(base / "adapter"), **places, **lora).setup.reference_model is None


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_an_adapter_whose_weights_belong_elsewhere_is_refused(tmp_path: Path, base: Path, lora: bool) -> None:
    shutil.copytree(base / "adapter", tmp_path / "renamed")
    file = tmp_path / "renamed" / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.7"): one for name, one in load_file(file).items()}, file)
    given: dict[str, Any] = {"peft_config": LoraConfig(**LORA)} if lora else {}
    with pytest.raises(MemsafeError, match=r"weights are missing or belong to no layer, such as .*layers"):
        distilled(tmp_path / "run", str(tmp_path / "renamed"), model=str(base), memory_forecast=False, **given)


@pytest.mark.slow
def test_an_adapter_teaches_beside_a_model_that_it_cannot_join(tmp_path: Path, base: Path) -> None:
    """A network that was passed may have moved since; PEFT stacks adapters of one kind."""
    passed = AutoModelForCausalLM.from_pretrained(base)
    moved = get_peft_model(passed, LoraConfig(**LORA)).merge_and_unload()
    kinds = {"an object": (moved, LoraConfig(**LORA)), "IA3": (str(base), IA3Config(task_type="CAUSAL_LM"))}
    for name, (model, peft) in kinds.items():
        settings = {"model": model, "peft_config": peft, "memory_forecast": name == "IA3"}
        trainer = distilled(tmp_path / name, str(base / "adapter"), **settings)
        assert isinstance(trainer.setup.reference_model, PeftModel)
        assert "ref" not in trainer.model.peft_config
        trainer.train()


def score_peak(trainer: GRPOTrainer) -> float:
    return max(record.get("memory/score_peak_bytes", 0) for record in trainer.history)


KL = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "LoRA", "KL"])
def test_a_reference_on_the_host_teaches_the_same_bits_in_less(tmp_path: Path, teacher: str, kind: str) -> None:
    settings: dict[str, Any] = {"peft_config": LoraConfig(**LORA)} if kind == "LoRA" else {}
    settings |= {"model": tiny_model(layers=6, hidden=64, scale=4.0), **KL} if kind == "KL" else {}
    named = {} if kind == "KL" else {"teacher_model_name_or_path": teacher}

    def run(resident: int | None) -> GRPOTrainer:
        plans = RolloutPlan(resident_blocks=resident), UpdatePlan(resident_blocks=resident)
        given = {"model": tiny_model(scale=4.0), "reward_funcs": no_reward, **named, **copy.deepcopy(settings)}
        with SimulatedMemory(2**34):
            trainer = make_trainer(tmp_path / str(resident), policy=FixedPolicy(*plans), max_steps=3, **given)
            trainer.train()
        return trainer

    plain = run(None)
    geometry = plain.setup.adapter.geometry
    assert geometry.model_blocks == (2 if kind == "LoRA" else 0)
    assert geometry.reference_blocks == len(plain.setup.reference_model.model.layers)
    for resident in (geometry.model_blocks, 0):
        away = run(resident)
        assert torch.equal(weights(away), weights(plain))
        assert score_peak(plain) - score_peak(away) >= sum(sorted(geometry.frozen_block_bytes[resident:])[:-2])
        for one, other in zip(*(each.setup.reference_model.parameters() for each in (plain, away)), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_a_budget_without_room_for_the_teacher_sends_only_it_to_the_host(tmp_path: Path, lora: bool) -> None:
    large = str(tmp_path / "large")
    tiny_model("qwen3", layers=12, hidden=128, seed=7, scale=4.0).save_pretrained(large)
    tiny_model("qwen3", layers=2, hidden=32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {"peft_config": LoraConfig(r=8, target_modules="all-linear")} if lora else {}
    plain, before = beside.run(tmp_path, given=given, teacher_model_name_or_path=large, alarms=False)
    teacher_bytes = sum(weight.nbytes for weight in plain.setup.reference_model.parameters())
    budget = max(before.values()) - teacher_bytes // 2
    trainer, held = beside.run(
        tmp_path, given=given, teacher_model_name_or_path=large, alarms=False, memory_budget=budget
    )
    assert trainer.forecast is not None
    assert trainer.forecast.fits
    assert max(held.values()) <= budget
    for phase, size in trainer.forecast.phase_bytes.items():
        assert size == pytest.approx(held[phase], rel=0.01, abs=2**13), phase
    plans = [event for event in trainer.memory_events if event["event"] == "plan"]
    assert {event["resident_blocks"] for event in plans} == {trainer.setup.adapter.geometry.model_blocks}
    assert not [event for event in trainer.memory_events if event["event"] == "failure"]
    assert relative(weights(trainer), weights(plain)) < 1e-5


def test_what_does_not_go_with_a_teacher_is_refused(tmp_path: Path, teacher: str) -> None:
    for wrong, told in (
        ({"beta": 0.1}, "beta is 0.1 with a teacher"),
        ({"loss_type": "vespo"}, "loss_type is 'vespo' with a teacher.*Set one of"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence' with a teacher"),
    ):
        with pytest.raises(ConfigError, match=told):
            GRPOConfig(str(tmp_path), teacher_model_name_or_path=teacher, use_cpu=True, **wrong)
    with pytest.raises(ConfigError, match=r"distillation_coef is 0\.5 without a teacher"):
        GRPOConfig(str(tmp_path), distillation_coef=0.5, use_cpu=True)
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="a llama of 258 tokens and the model a qwen3 of 258"):
        distilled(tmp_path / "run", str(tmp_path / "llama"))
    with pytest.raises(ConfigError, match="teacher='nowhere' has no config"):
        distilled(tmp_path / "run", "nowhere")
