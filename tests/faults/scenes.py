"""The configurations that storms go over, and the trainer of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback

from benchmarks.small import byte_tokenizer, small_policy, small_qwen3, small_t5
from memsafe_rl import (
    AdaptivePolicy,
    FixedPolicy,
    GRPOConfig,
    GRPOTrainer,
    MemoryPolicy,
    PPOConfig,
    PPOTrainer,
    RolloutPlan,
    UpdatePlan,
)
from memsafe_rl.accounting import host_memory
from memsafe_rl.types import MemoryFailure
from tests import images

VOCAB_SIZE = 258

GROUP_SIZE = 4


@dataclass(frozen=True)
class HalvingPolicy(FixedPolicy):
    """Starts with the plans it is given; halves every cut of a plan that failed."""

    def after_oom(self, plan: Any, failure: MemoryFailure) -> Any:
        """Returns the plan with everything halved, None once nothing can be."""
        names = ("rows_in_flight", "prefill_tokens", "score_tokens", "micro_batch_tokens", "logprob_tile")
        leaner = replace(plan, **{name: max(1, getattr(plan, name) // 2) for name in names if hasattr(plan, name)})
        return None if leaner == plan else leaner


@dataclass(frozen=True)
class Scene:
    """A configuration that storms go over.

    Args:
        name: for people.
        policy: cuts the work; one that knows no leaner plan meets a fault at a time.
        encodes: whether an encoder reads the prompts (a T5), else a Qwen3 is trained.
        lora: whether an adapter is trained.
        dropout: rate of dropout in the update; 0 for none.
        settings: fields of `GRPOConfig` or `PPOConfig`.
        denoises: whether a diffusion policy is trained.
        half: whether weights are held in bfloat16.
        critic: "trunk", "adapter", "model" or, of a denoiser, "states", what foresees rewards in PPO; None for GRPO.
        reads_images: family of the network that is trained on prompts with images, tower and all; None for texts.
        taught: whether a wider network teaches, which waits on the host.
    """

    name: str
    policy: MemoryPolicy
    encodes: bool = False
    lora: bool = False
    dropout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    critic: str | None = None
    denoises: bool = False
    half: bool = False
    reads_images: str | None = None
    taught: bool = False

    @property
    def burst(self) -> int:
        """Faults in a row: one where there is no leaner plan, since two in one unit would end the run."""
        return 1 if self.is_bitwise else 4 if isinstance(self.policy, FixedPolicy) else 2

    @property
    def is_bitwise(self) -> bool:
        """Whether the plan can never change."""
        return type(self.policy) is FixedPolicy

    @property
    def parks(self) -> bool:
        """Whether optimizer state may move to the host and back: what has been moved stays, whatever fails later."""
        return not isinstance(self.policy, FixedPolicy) or self.policy.update.park_optimizer

    @property
    def most_features_bytes(self) -> int:
        """Bytes of image features: an attempt that fails may leave those it has made, or have let stale ones go."""
        return 33 * 32 * 4 if self.reads_images else 0  # of all prompts, in float32

    @property
    def passes(self) -> bool:
        """Whether frozen weights come and go."""
        return isinstance(self.policy, FixedPolicy) and self.policy.rollout.resident_blocks is not None


TWO_OBJECTIVES: dict[str, Any] = {
    "sums": {"rewards": ["pay"], "beta": 0.05, "kl_band": [0.001, 0.002], "adaptive_beta": True, "beta_window": 1},
    "brevity": {"rewards": ["pay_for_brevity"], "weight": 0.5},
}
"""The second has no opinion of every other prompt; the beta of the first is moved in nearly every step."""


def _plans(rows: int, tokens: int, **update: Any) -> tuple[RolloutPlan, UpdatePlan]:
    rollout = RolloutPlan(rows_in_flight=rows, score_tokens=tokens)
    return rollout, UpdatePlan(micro_batch_tokens=tokens, logprob_tile=32, **update)


SCENES = (
    Scene("full", FixedPolicy(*_plans(8, 64))),
    Scene(
        "full, DPPO with an advantage a token, leaner plans",
        HalvingPolicy(*_plans(8, 128)),
        settings={"loss_type": "dppo", "advantage_estimator": "otb"},
    ),
    Scene("full, KL to a copy, leaner plans", HalvingPolicy(*_plans(4, 96)), settings={"beta": 0.05}),
    Scene(
        "full, recomputed, dropout",
        FixedPolicy(*_plans(8, 64, checkpointing=True)),
        dropout=0.1,
        settings={"disable_dropout": False},
    ),
    Scene(
        "LoRA, dropout, KL to the base",
        FixedPolicy(*_plans(4, 64)),
        lora=True,
        dropout=0.1,
        settings={"disable_dropout": False, "beta": 0.05},
    ),
    Scene("LoRA, recomputed, leaner plans", HalvingPolicy(*_plans(8, 128, checkpointing=True)), lora=True),
    Scene(
        "full, everything on the host, leaner plans",
        HalvingPolicy(
            *_plans(8, 96, offload_activations=True, trajectory_device="device", park_optimizer=True),
        ),
        settings={"steps_per_generation": 2, "per_device_train_batch_size": 4},
    ),
    Scene("full, AdaptivePolicy", AdaptivePolicy()),
    Scene(
        "AdamW that allocates as it steps, marked tokens",
        FixedPolicy(*_plans(8, 64)),
        settings={"optim": "adamw_torch", "loss_type": "kl_cov", "cov_fraction": 0.1},
    ),
    Scene(
        "SGD without clipping, GMPO, leaner plans",
        HalvingPolicy(*_plans(8, 128)),
        settings={"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1, "loss_type": "gmpo"},
    ),
    Scene("PPO, head on the trunk, KL to a copy", FixedPolicy(*_plans(8, 64)), critic="trunk"),
    Scene(
        "PPO, second adapter, recomputed, leaner plans",
        HalvingPolicy(*_plans(8, 128, checkpointing=True)),
        lora=True,
        critic="adapter",
    ),
    Scene(
        "PPO, critic of its own, on the host",
        FixedPolicy(*_plans(8, 96, offload_activations=True, park_optimizer=True)),
        critic="model",
        settings={"kl_coef": 0.0, "steps_per_generation": 2, "per_device_train_batch_size": 4},
    ),
    Scene("T5, KL to a copy", FixedPolicy(*_plans(8, 64)), encodes=True, settings={"beta": 0.05}),
    Scene("T5, LoRA, recomputed, leaner plans", HalvingPolicy(*_plans(8, 128, checkpointing=True)), True, lora=True),
    Scene("denoiser, KL to a copy", FixedPolicy(*_plans(8, 16)), denoises=True, settings={"beta": 0.05}),
    Scene(
        "denoiser, LoRA, recomputed, leaner plans",
        HalvingPolicy(*_plans(8, 16, checkpointing=True)),
        lora=True,
        denoises=True,
        settings={"beta": 0.05, "epsilon": 1e-3},
    ),
    Scene("denoiser, PPO", FixedPolicy(*_plans(8, 16)), denoises=True, critic="states"),
    Scene(
        "denoiser, PPO with LoRA, recomputed, leaner plans",
        HalvingPolicy(*_plans(8, 16, checkpointing=True)),
        lora=True,
        denoises=True,
        critic="states",
        settings={"beta": 0.05, "epsilon": 1e-3},
    ),
    Scene(
        "LoRA, two objectives",
        FixedPolicy(*_plans(8, 64)),
        lora=True,
        settings={"objectives": TWO_OBJECTIVES, "gradient_merge": "cagrad"},
    ),
    Scene(
        "full, two objectives, leaner plans",
        HalvingPolicy(*_plans(8, 96)),
        settings={"objectives": TWO_OBJECTIVES, "gradient_merge": "pcgrad"},
    ),
    Scene(
        "LoRA, frozen weights on the host, leaner plans",
        HalvingPolicy(*(replace(plan, resident_blocks=0) for plan in _plans(8, 96))),
        lora=True,
        settings={"beta": 0.05},
    ),
    Scene("bfloat16 with copies, on the host", FixedPolicy(*_plans(8, 64, park_optimizer=True)), half=True),
    Scene(
        "bfloat16 rounded at random, AdamW that allocates as it steps",
        FixedPolicy(*_plans(8, 64)),
        half=True,
        settings={"optim": "adamw_torch", "master_weights": "stochastic_rounding"},
    ),
    Scene("bfloat16 with copies, PPO", FixedPolicy(*_plans(8, 64)), half=True, critic="model"),
    Scene("images, KL to a copy", FixedPolicy(*_plans(8, 64)), settings={"beta": 0.05}, reads_images="qwen2_vl"),
    Scene(  # the biases of its tower's keys have gradients of 0, of whose rounding Adam makes steps
        "images that see both ways, PPO, leaner plans",
        HalvingPolicy(*_plans(8, 128)),
        critic="trunk",
        settings={"optim": "sgd", "learning_rate": 0.1},
        reads_images="gemma3",
    ),
    Scene(
        "images into several layers, LoRA, leaner plans",
        HalvingPolicy(*_plans(8, 128, checkpointing=True)),
        lora=True,
        reads_images="qwen3_vl",
    ),
    Scene(
        "full, a teacher on the host, leaner plans",
        HalvingPolicy(*(replace(plan, resident_blocks=0) for plan in _plans(8, 96))),
        settings={"distillation_top_k": 4, "teacher_model_init_kwargs": {"dtype": "float32"}},
        taught=True,
    ),
)


def pay(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Pays by token ids (states) alone, so that any difference in sampling changes what is learnt."""
    if isinstance(completion_ids[0], Tensor):
        return [float(state.sin().sum()) for state in completion_ids]
    return [sum(ids) % 11 / 11 + len(ids) / 50 for ids in completion_ids]


def pay_for_brevity(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """Pays for short completions of prompts of even length, and knows nothing of the others."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [None if len(prompt) % 2 else sum(ids) % 7 / 7 - len(ids) / 20 for prompt, ids in pairs]


def _noted(values: list[Any]) -> list[Any]:
    """Returns what can be compared: states as numbers without their last digits, which other waves may round."""
    if not isinstance(values[0], Tensor):
        return values
    return [value.double().flatten().round(decimals=9).tolist() for value in values]


class Reward:
    """A reward function that notes what it is given, and can be told to break off."""

    __name__ = "pay"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.upset: Callable[[int], None] | None = None

    def __call__(self, prompts: Any, completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Pays, or breaks off."""
        with host_memory():  # where samples are
            self.calls.append((prompts, _noted(completions), _noted(completion_ids)))
            paid = pay(completion_ids)
        if self.upset is not None:
            self.upset(len(self.calls))
        return paid


def build_model(scene: Scene) -> Any:
    """Makes a tiny network whose logits are far from uniform, or a tiny denoiser in float64."""
    if scene.denoises:
        return small_policy()
    if scene.reads_images:
        return images.small(scene.reads_images).requires_grad_(True)
    model = (small_t5 if scene.encodes else small_qwen3)(VOCAB_SIZE, hidden=32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(2.0 if scene.encodes else 3.0)
    for layer in [] if scene.encodes else model.model.layers:
        layer.self_attn.attention_dropout = scene.dropout
    return model.bfloat16() if scene.half else model


def processing_class(scene: Scene) -> Any:
    """Makes what reads a scene's prompts."""
    if scene.denoises:
        return None
    return images.processor(scene.reads_images) if scene.reads_images else byte_tokenizer()


def make_trainer(
    scene: Scene, output_dir: Path, reward: Reward, callback: TrainerCallback, settings: Mapping[str, Any]
) -> GRPOTrainer | PPOTrainer:
    """Makes the trainer of a scene; `settings` are further fields of its config."""
    usual: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 8,
        "num_generations": GROUP_SIZE,
        "num_iterations": 2,
        "max_completion_length": 6,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "log_level": "error",
    }
    prompts: Any = Dataset.from_list([{"prompt": f"{n}+{n % 7}=" + " " * (n % 5)} for n in range(24)])
    if scene.reads_images:
        prompts = images.rows()
    targets = ["q", "v", "wo"] if scene.encodes else ["q_proj", "v_proj", "down_proj"]
    kind = "SEQ_2_SEQ_LM" if scene.encodes else "CAUSAL_LM"
    if scene.denoises:
        targets, kind = ["up", "down"], None
    adapter = LoraConfig(r=4, lora_dropout=scene.dropout, target_modules=targets, task_type=kind)
    named = {**usual, **scene.settings, **settings}
    if scene.taught:
        named["teacher_model_name_or_path"] = str(output_dir.with_name(f"{output_dir.name}-teacher"))
        small_qwen3(VOCAB_SIZE, hidden=64).save_pretrained(named["teacher_model_name_or_path"])
    if scene.critic is None:
        make: Any = partial(GRPOTrainer, args=GRPOConfig(**named))
    else:
        small = small_qwen3(VOCAB_SIZE, hidden=32) if scene.critic == "model" else None
        critic = {"trunk": None, "states": None, "adapter": "adapter", "model": small}[scene.critic]
        make = partial(PPOTrainer, args=PPOConfig(**{"kl_coef": 0.1, **named}), critic=critic)
    trainer: GRPOTrainer | PPOTrainer = make(
        build_model(scene),
        [reward, pay_for_brevity] if "objectives" in scene.settings else reward,
        train_dataset=prompts,
        eval_dataset=prompts if scene.reads_images else prompts.select(range(2)),
        processing_class=processing_class(scene),
        peft_config=adapter if scene.lora else None,
        memory_policy=scene.policy,
        callbacks=[callback],
    )
    return trainer
