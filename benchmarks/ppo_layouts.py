"""Peak bytes of PPO by where its critic and its reference live: `python -m benchmarks.ppo_layouts`.

The layout that PPO is known for holds four models: policy, reference, critic and reward model. Here a reward function
takes the reward model's place, and the others are laid out in five ways on a simulated device, for the same rows under
the same plan. Writes ``benchmarks/results/ppo_layouts.json``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from benchmarks.machine import describe_machine
from benchmarks.small import byte_tokenizer, small_qwen3
from memsafe_rl import FixedPolicy, PPOConfig, PPOTrainer, RolloutPlan, SimulatedMemory, UpdatePlan
from memsafe_rl.accounting import weights_of
from memsafe_rl.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "ppo_layouts.json"
VOCAB_SIZE = 258


@dataclass(frozen=True)
class Layout:
    """Where things live.

    Args:
        name: for people.
        critic: "trunk", "adapter" or "model".
        lora: whether an adapter is trained, which switched off is the reference; else a copy is the reference.
    """

    name: str
    critic: str
    lora: bool


LAYOUTS = (
    Layout("policy, reference and critic are three models", "model", lora=False),
    Layout("the critic is a head on the policy; the reference is a copy", "trunk", lora=False),
    Layout("LoRA: one base for policy and reference; the critic is a model", "model", lora=True),
    Layout("LoRA: one base for all three; the critic is a second adapter", "adapter", lora=True),
    Layout("LoRA: one base for all three; the critic is a head on the policy", "trunk", lora=True),
)


@dataclass(frozen=True)
class Found:
    """What a layout held.

    Args:
        peak_bytes: the most that was held.
        phases: the peak of every phase.
        weights_bytes: bytes of one model.
    """

    peak_bytes: int
    phases: Mapping[str, int]
    weights_bytes: int


def measure(layout: Layout, *, hidden: int = 256, layers: int = 4) -> Found:
    """Trains one rollout of 16 rows, in two passes, on a simulated device without a limit.

    Args:
        layout: where things live.
        hidden: width of the models.
        layers: blocks of the models.

    Returns:
        What was held.
    """

    def model() -> Any:
        return small_qwen3(VOCAB_SIZE, hidden=hidden, layers=layers)

    with SimulatedMemory() as device:
        trainer = PPOTrainer(
            model(),
            lambda completions, **_: [len(text) / 10 for text in completions],
            PPOConfig(
                output_dir=tempfile.mkdtemp(),
                per_device_train_batch_size=16,
                num_iterations=2,
                max_completion_length=16,
                max_steps=2,
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                alarms=False,
            ),
            Dataset.from_dict({"prompt": [f"{n:02d} + {n} =" for n in range(16)]}),
            processing_class=byte_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear") if layout.lora else None,
            critic=model() if layout.critic == "model" else {"adapter": "adapter"}.get(layout.critic),
            memory_policy=FixedPolicy(
                RolloutPlan(score_tokens=128), UpdatePlan(micro_batch_tokens=128, checkpointing=True)
            ),
        )
        trainer.train()
        peaks = {str(phase): sum(parts.values()) for phase, parts in device.phase_peaks().items()}
        base = sum(weight.nbytes for weight in weights_of(model()))
    return Found(max(peaks.values()), peaks, base)


def main() -> None:
    """Prints a table, and writes it."""
    found = {layout.name: measure(layout) for layout in LAYOUTS}
    most = found[LAYOUTS[0].name].peak_bytes
    print(f"one model: {format_bytes(found[LAYOUTS[0].name].weights_bytes)}")
    for name, one in found.items():
        print(f"{name:70s} {format_bytes(one.peak_bytes):>12s} {one.peak_bytes / most:6.0%}")
    results = {name: asdict(one) for name, one in found.items()}
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
