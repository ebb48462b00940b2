"""Runs under budgets of the bytes that PyTorch's allocator reserves, beside the same run with all the room."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from benchmarks.capacity_sweep import NATURAL
from benchmarks.gpu_parts.sizes import Record, Rows, Size, Spread, clock, counted, failures, highest, prompts, settings
from benchmarks.small import filled_tokenizer, small_qwen3, small_t5
from memsafe_rl import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from memsafe_rl.accounting import host_memory

SAME_WEIGHTS = 1e-3
"""Largest distance between the final weights of two runs in float32, over the way that they went."""
WITHOUT_FAILURE = 0.4
"""Of what a run without plans reserves above its state; with so much, no allocation fails."""


@dataclass(frozen=True)
class Kind:
    """A run that is held to budgets.

    Args:
        network: makes it.
        shares: of what the run reserves above its state where it has all the room, what each budget leaves.
        lora: whether an adapter is trained.
        ppo: whether it is trained with a critic.
    """

    network: Callable[..., Any] = small_qwen3
    shares: tuple[float, ...] = (WITHOUT_FAILURE,)
    lora: bool = False
    ppo: bool = False


KINDS = {
    "GRPO, full": Kind(shares=(WITHOUT_FAILURE, 0.1)),
    "GRPO, LoRA": Kind(lora=True),
    "PPO": Kind(ppo=True),
    "T5": Kind(small_t5),
}


def budget(size: Size) -> Rows:
    """Trains under ever smaller budgets and compares with the run that had all the room."""
    for name, kind in KINDS.items():
        yield from beside(name, size, kind.shares)


def beside(name: str, size: Size, shares: Sequence[float]) -> Rows:
    """Trains one kind with all the room, and under budgets that leave shares of it."""
    free = trained_under(None, name, size)
    state, peak = free["state_bytes"], free["reserved_bytes"]
    yield name, {**_told(free, free), "passed": True}
    for share in shares:
        allowed = int(state + share * (peak - state))
        run = trained_under(allowed, name, size)
        within = run["reserved_bytes"] <= allowed and (share < WITHOUT_FAILURE or run["failures"] == 0)
        found = {"budget_bytes": allowed, **_told(run, free), "passed": within and _same(run, free)}
        yield f"{name}, {share:.0%} above the state", found


def trained_under(allowed: int | None, name: str, size: Size) -> Record:
    """Trains four steps under a budget in bytes; None for all the room, and no plan that spares any."""
    kind = KINDS[name]
    trainer_class, config_class = (PPOTrainer, PPOConfig) if kind.ppo else (GRPOTrainer, GRPOConfig)
    with tempfile.TemporaryDirectory() as folder, counted() as meter:
        reward = Spread()
        config = config_class(
            **settings(f"{folder}/run", bf16=False),
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=32,
            num_generations=1 if kind.ppo else 8,
            num_iterations=2,
            max_completion_length=size.new_tokens,
            learning_rate=1e-4,
            max_steps=4,
            memory_budget="auto" if allowed is None else allowed,
            memory_forecast=allowed is not None,
            **({} if kind.ppo else {"beta": 0.02}),
        )
        network = kind.network(size.vocab_size, hidden=size.width, layers=size.layers, head_dim=size.head_dim)
        network.save_pretrained(folder)
        start = _flat(network)
        trainer: Any = trainer_class(
            folder,
            reward,
            args=config,
            train_dataset=prompts(32, 12),
            processing_class=filled_tokenizer(size.vocab_size),
            peft_config=LoraConfig(r=8, target_modules="all-linear") if kind.lora else None,
            memory_policy=NATURAL if allowed is None else None,
        )
        before = clock()
        trainer.train()
        seconds = clock() - before
        trained = [weight for weight in trainer.setup.trained.parameters() if weight.requires_grad]
        return {
            "seconds": seconds,
            "peak_bytes": highest(trainer, "memory/peak_bytes"),
            "reserved_bytes": highest(trainer, "memory/reserved_bytes"),
            "state_bytes": meter.live_bytes() + sum(weight.nbytes for weight in trained),
            "failures": failures(trainer),
            "tokens": reward.seen,
            "moved": _flat(trainer.model.merge_and_unload() if kind.lora else trainer.model) - start,
        }


def _flat(network: Any) -> Tensor:
    """Copies all weights that a network is saved with to host memory."""
    with torch.no_grad(), host_memory():
        return torch.cat([weight.detach().cpu().flatten().double() for weight in network.parameters()])


def _told(run: Record, free: Record) -> Record:
    return {
        "peak_bytes": run["peak_bytes"],
        "reserved_bytes": run["reserved_bytes"],
        "state_bytes": run["state_bytes"],
        "seconds": run["seconds"],
        "failures": run["failures"],
        "same_tokens": run["tokens"] == free["tokens"],
        "weights_apart": _apart(run, free),
    }


def _apart(run: Record, free: Record) -> float:
    return float((run["moved"] - free["moved"]).norm() / free["moved"].norm())


def _same(run: Record, free: Record) -> bool:
    return run["tokens"] == free["tokens"] and _apart(run, free) <= SAME_WEIGHTS
