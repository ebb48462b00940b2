"""Features on the device: each runs, on it alone, and trains as it does on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from memsafe_rl import FixedPolicy, RolloutPlan, UpdatePlan
from tests.device.pretend import Pretend
from tests.device.runs import relative
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, make_trainer, weights

SAME = 1e-5
"""Of the weights' norm, after two steps of Adam with a high rate."""
ROUNDED = 1e-3
"""The same where keys are rounded to 8 bits, of which the last bit of a number decides."""
NARROW = 2e-2
"""The same where products are in half precision."""


def reward_model() -> dict[str, Any]:
    torch.manual_seed(1)
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1, "pad_token_id": 0, "eos_token_id": 1}
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes, **heads))
    return {"reward_funcs": model, "reward_processing_classes": tiny_tokenizer()}


def plan(**update: Any) -> FixedPolicy:
    return FixedPolicy(RolloutPlan(rows_in_flight=8), UpdatePlan(micro_batch_tokens=64, logprob_tile=32, **update))


CASES: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "temperature": 0.8},
    "generation_kwargs": {
        "generation_kwargs": {"no_repeat_ngram_size": 2, "bad_words_ids": [[5, 6]], "min_new_tokens": 2}
    },
    "stop strings": {"generation_kwargs": {"stop_strings": ["1"]}},
    "int8 cache": {"cache_implementation": "quantized"},
    "entropy, quantile, KL": {"top_entropy_quantile": 0.4, "beta": 0.1, "num_iterations": 2, "delta": 1.5},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "partial rollouts": {"partial_rollout_tokens": 3},
    "sync_ref": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "a reference on the host": {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "policy": FixedPolicy(RolloutPlan(resident_blocks=0), UpdatePlan(resident_blocks=0)),
    },
    "LoRA": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"), "beta": 0.1},
    "Adafactor": {"optim": "adafactor"},
    "a budget": {"memory_budget": "64MiB"},
    "packed prompts": {"policy": plan(pack_prompts=True)},
    "activations on the host": {"policy": plan(offload_activations=True)},
    "optimizer on the host": {"policy": plan(park_optimizer=True)},
    "recomputed": {"policy": plan(checkpointing=True)},
    "bnpo": {"loss_type": "bnpo"},
    "gemma2": {"arch": "gemma2"},
    "gemma3": {"arch": "gemma3"},
    # Adam divides by a gradient's size: where it is nothing but rounding (GPT-2's keys' biases, one weight of Llama's
    # under the processor's oldest instructions), its step is the rounding's.
    "gpt2": {"arch": "gpt2", "optim": "sgd"},
    "llama": {"arch": "llama", "optim": "sgd"},
}
HALF: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16 with a scaler": {"fp16": True},
    "fp16 with a scaler, SGD": {"fp16": True, "optim": "sgd"},
}


def run(output_dir: Path, case: dict[str, Any], use_cpu: bool) -> torch.Tensor:
    case = dict(case)
    torch.manual_seed(0)
    model = tiny_model(case.pop("arch", "qwen3"))
    trainer = make_trainer(output_dir, model=model, **{"bf16": False, **case, "use_cpu": use_cpu})
    trainer.train()
    devices = {weight.device.type for weight in trainer.model.parameters()}
    assert devices == {"cpu" if use_cpu else "cuda"}
    assert trainer.setup.adapter.decodes
    return weights(trainer).cpu()


@pytest.mark.parametrize("name", CASES)
def test_a_feature_trains_as_on_the_cpu(name: str, tmp_path: Path, cuda: Pretend) -> None:
    cuda.draw_from_host(True)
    there, here = run(tmp_path / "device", CASES[name], False), run(tmp_path / "cpu", CASES[name], True)
    assert there.isfinite().all()
    assert relative(there, here) <= (ROUNDED if name == "int8 cache" else SAME)


@pytest.mark.parametrize("name", HALF)
def test_half_precision_trains(name: str, tmp_path: Path, cuda: Pretend) -> None:
    there, plain = run(tmp_path / "half", HALF[name], False), run(tmp_path / "plain", {}, False)
    assert there.isfinite().all()
    assert relative(there, plain) <= NARROW or "SGD" in name  # another optimizer, another place


def test_a_reward_model_evaluations_and_saves(tmp_path: Path, cuda: Pretend) -> None:
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    case = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:4]}), **every_step}
    there, here = (run(tmp_path / str(cpu), {**case, **reward_model()}, cpu) for cpu in (False, True))
    assert relative(there, here) <= SAME
    assert (tmp_path / "False" / "checkpoint-2" / "model.safetensors").exists()


def rewards(trainer: Any) -> list[float]:
    return [step["reward"] for step in trainer.history if "reward" in step]


@pytest.mark.parametrize("first_on_cpu", [True, False], ids=["CPU to device", "device to CPU"])
def test_a_run_resumes_on_the_other_device(first_on_cpu: bool, tmp_path: Path, cuda: Pretend) -> None:
    cuda.draw_from_host(True)
    settings = {"bf16": False, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    torch.manual_seed(0)
    whole = make_trainer(tmp_path / "whole", **settings, use_cpu=first_on_cpu)
    whole.train()
    again = make_trainer(tmp_path / "again", **settings, use_cpu=not first_on_cpu)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert next(again.model.parameters()).device.type == ("cuda" if first_on_cpu else "cpu")
    assert rewards(again) == rewards(whole)[-len(rewards(again)) :] != []
    assert relative(weights(again).cpu(), weights(whole).cpu()) <= SAME
