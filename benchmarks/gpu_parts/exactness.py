"""The same gradients, weights and tokens whatever the plan, whatever fails, and however rows are batched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import batch_invariance as invariant
from benchmarks.gpu_parts.sizes import DEVICE, Record, Rows, Size, Spread, counted, prompts, settings
from benchmarks.small import filled_tokenizer, small_qwen3, small_t5
from memsafe_rl import (
    FixedPolicy,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RolloutPlan,
    UpdatePlan,
)
from memsafe_rl.preflight.verify import verify_plan
from tests.device import runs
from tests.faults.scenes import SCENES
from tests.faults.storms import NEVER

LEAN = FixedPolicy(
    RolloutPlan(rows_in_flight=3, prefill_tokens=64, score_tokens=64),
    UpdatePlan(
        micro_batch_tokens=64, logprob_tile=16, checkpointing=True, offload_activations=True, park_optimizer=True
    ),
)
_RUNS = 4  # under refused allocations, of each scene
_NO_SUCH_BYTES = 2**60  # that no card has


def prove(size: Size) -> Rows:
    """Compares the gradients of a step under plans, and after failures."""
    kinds: dict[str, tuple[type[GRPOTrainer | PPOTrainer], Callable[..., Any], bool, bool]] = {
        "causal, full, float32": (GRPOTrainer, small_qwen3, False, False),
        "causal, LoRA, float32": (GRPOTrainer, small_qwen3, True, False),
        "T5, full, float32": (GRPOTrainer, small_t5, False, False),
        "PPO, full, float32": (PPOTrainer, small_qwen3, False, False),
        "causal, full, bfloat16": (GRPOTrainer, small_qwen3, False, True),
    }
    for name, kind in kinds.items():
        yield name, _proved(size, *kind)


def _proved(
    size: Size, trainer_class: type[GRPOTrainer | PPOTrainer], network: Callable[..., Any], lora: bool, half: bool
) -> Record:
    with tempfile.TemporaryDirectory() as folder, counted():
        config_class = PPOConfig if trainer_class is PPOTrainer else GRPOConfig
        config = config_class(
            **settings(folder, bf16=half),
            per_device_train_batch_size=8,
            num_generations=4 if trainer_class is GRPOTrainer else 1,
            max_completion_length=size.new_tokens,
            beta=0.02,
            max_steps=1,
        )
        trainer = trainer_class(
            network(size.vocab_size, hidden=size.width, layers=size.layers, head_dim=size.head_dim),
            Spread(),
            args=config,
            train_dataset=prompts(16, 12),
            processing_class=filled_tokenizer(size.vocab_size),
            peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
            memory_policy=LEAN,
        )
        proof = verify_plan(trainer.loop)
    return {
        "passed": proof.passed,
        "difference": proof.difference,
        "tolerance": proof.tolerance,
        "plain_peak_bytes": proof.plain.peak_bytes,
        "lean_peak_bytes": proof.chosen.peak_bytes,
        "failures": proof.failing.failures,
    }


class Refusals(TorchDispatchMode):  # type: ignore[misc]
    """Has the device's own allocator refuse a request, where an operator just made a tensor on it.

    Attributes:
        allocations: operators that made a tensor on the device so far.
        refusals: of these, how many failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocations = self.refusals = 0
        self._chosen = NEVER

    def fail_after(self, more: int) -> None:
        """Refuses what the `more`-th operator from now on makes."""
        self._chosen = self.allocations + more

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator, and asks for more than there is where it is the chosen one."""
        result = func(*args, **(kwargs or {}))
        makes = any(returned.alias_info is None for returned in func._schema.returns) and not func._schema.is_mutable
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if makes and any(isinstance(part, Tensor) and part.is_cuda for part in parts):
            self.allocations += 1
            if self.allocations == self._chosen:
                self.refusals += 1
                torch.empty(_NO_SUCH_BYTES, dtype=torch.uint8, device=DEVICE)
        return result


def storm(size: Size) -> Rows:
    """Refuses allocations at random places of whole runs, and compares each with a calm one.

    Kernels that add in any order are kept out, so that a difference is ours.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    named = {scene.name: scene for scene in SCENES}
    for number, name in enumerate(size.scenes):
        with tempfile.TemporaryDirectory() as folder, Refusals() as device:
            tally = runs.storm(named[name], device, _RUNS, number, Path(folder))
        findings = tally.findings
        found = {
            "runs": tally.runs,
            "faults": findings.faults,
            "pinned_bytes": tally.pinned_bytes,
            "weights_apart": findings.weights,
            "violations": "; ".join(findings.violations)[:300],
            "passed": not findings.violations and findings.faults > 0,
        }
        yield name, found


def invariance(size: Size) -> Rows:
    """Draws and scores the same rows in batches of other sizes, in bf16, and counts what differs."""
    for family in size.families:
        yield f"{family}, bf16", _invariant(family, size.sampled_tokens)


def _invariant(family: str, tokens: int) -> Record:
    length = 40
    adapter = invariant.adapter_of(invariant.make(family, torch.bfloat16).to(DEVICE), invariant=True)
    asked = invariant.prompts_of(max(4, tokens // (invariant.GROUP * length)))
    base = invariant.draw(adapter, asked, length, invariant.WAVES[0])
    compared = [
        invariant.compare(invariant.draw(adapter, asked, length, wave, prefill=7 + wave), base) for wave in (7, 32)
    ]
    drawn, trajectory = torch.cat([row.logprobs for row in base]), invariant.rows_of(asked, base)
    scored = [
        int((invariant.score(adapter, trajectory, cut).float() != drawn).sum()) for cut in invariant.CUTS.values()
    ]
    found = {
        "tokens": sum(each["tokens"] for each in compared),
        "tokens_after_a_difference": sum(each["tokens_after_a_difference"] for each in compared),
        "logprobs_that_differ": sum(each["logprobs_that_differ"] for each in compared),
        "scores_that_differ": sum(scored),
    }
    return {**found, "passed": not any(count for name, count in found.items() if name != "tokens")}
