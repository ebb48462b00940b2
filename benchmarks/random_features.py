"""Do runs of features that nobody chose to go together learn the same under any plan, under faults, and resumed?

    python -m benchmarks.random_features --random 50 [--seed 0] [--first 0]

Each run draws a trainer, a family and its settings at random, and trains a tiny network of it four times: with endless
memory; under plans that are drawn anew for every rollout and step; while allocations are refused; and stopped by a
checkpoint, then resumed. Compared are what reward functions were given, gradients before clipping, and weights: the
resumed run's bit for bit, the others' as far as rounding goes. Writes ``benchmarks/results/random_features.json``, and
exits with 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

import memsafe_rl as rl
from benchmarks.machine import describe_machine
from benchmarks.random_runs import FAMILIES, Sizes
from benchmarks.small import byte_tokenizer, small_policy
from memsafe_rl.accounting import host_memory
from memsafe_rl.ops.advantages import ESTIMATORS
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.training.optim.optimizer import Committer
from tests.faults.storms import Storm
from tests.faults.watched import end_to_end

RESULTS = Path(__file__).parent / "results" / "random_features.json"
DENOISER = "denoiser"
FAULTY = 1e-5  # relative difference of a step's gradient: ten times what rounding makes of fp32

_OPTIONS: dict[str, dict[str, Any]] = {  # what a run has or leaves at its default
    "any": {
        **{"beta": [0.04, 0.5], "epsilon": [0.01, 0.4], "delta": [1.1, 4.0], "max_grad_norm": [0.0, 0.05]},
        **{"kl_stop": [1e-4], "sync_ref_model": [True], "gradient_checkpointing": [True], "save_in_background": [True]},
    },
    "tokens": {
        **{"temperature": [0.5, 1.7], "top_k": [1, 5], "top_p": [0.3, 0.9], "min_p": [0.1]},
        **{"repetition_penalty": [0.8, 1.3], "entropy_coef": [0.01, 0.2], "top_entropy_quantile": [0.2, 0.5]},
        **{"mask_truncated_completions": [True], "partial_rollout_tokens": [1, 3], "dynamic_sampling": [True]},
        "generation_kwargs": [{"stop_strings": ["a", "1"]}, {"no_repeat_ngram_size": 2}, {"eos_token_id": [1, 9, 40]}],
    },
    "GRPO": {
        **{"loss_type": sorted(LOSSES.keys() - {"rloo"}), "importance_sampling_level": ["sequence", "sequence_sum"]},
        **{"advantage_estimator": sorted(ESTIMATORS.keys() - {"maxrl"}), "scale_rewards": ["batch", "none"]},
    },
    "RLOO": {"normalize_advantages": [True], "reward_clip_range": [(-0.5, 0.5)]},
    "PPO": {"gae_lambda": [0.0, 1.0], "vf_clip": [None, 1e-3], "whiten_rewards": [True], "kl_coef": [0.0, 0.2]},
}


@dataclass(frozen=True)
class Mix:
    """Features of one run."""

    seed: str  # of everything drawn while it runs
    trainer: str  # GRPO, RLOO or PPO
    family: str  # of `FAMILIES`, or a denoiser
    lora: bool  # whether an adapter is trained, else all weights
    missing: bool  # whether some rewards are None
    break_at: int  # step after which a run stops and is resumed
    settings: Mapping[str, Any]  # of its config


def draw_mix(seed: int, index: int) -> Mix:
    """Draws features, the same for the same arguments; some do not go together, and are refused."""
    rng = random.Random(f"{seed}/{index}")
    choose = rng.choice
    trainer, family = choose(["GRPO", "GRPO", "RLOO", "PPO"]), choose([*sorted(FAMILIES), DENOISER])
    group, steps = choose([2, 3, 4]), choose([2, 3, 4])
    optional = _OPTIONS["any"] | ({} if family == DENOISER else _OPTIONS["tokens"]) | _OPTIONS[trainer]
    settings = {
        **{"num_generations": group, "per_device_train_batch_size": group * choose([1, 2])},
        **{"steps_per_generation": choose([1, 2]), "num_iterations": choose([1, 2]), "max_steps": steps},
        "max_completion_length": 5 if family == DENOISER else choose([1, 4, 12]),
        "optim": choose(["sgd", "sgd", "adamw_torch_fused", "adafactor"]),
        **{name: choose(values) for name, values in optional.items() if rng.random() < 0.2},
    }
    lora, missing = rng.random() < 0.5, rng.random() < 0.3
    return Mix(f"{seed}/{index}", trainer, family, lora, missing, rng.randint(1, steps - 1), settings)


@dataclass(frozen=True)
class RandomPlans(rl.MemoryPolicy):
    """Plans drawn anew for every rollout and every step."""

    seed: str

    def before_rollout(self, work: Any, memory: Any) -> rl.RolloutPlan:
        """Draws a plan."""
        choose = random.Random(f"{self.seed}/{memory.step}/{work.rows}").choice
        return rl.RolloutPlan(choose([1, 2, 64]), prefill_tokens=choose([1, 20, 99]), score_tokens=choose([1, 33, 99]))

    def before_update(self, work: Any, memory: Any) -> rl.UpdatePlan:
        """Draws a plan."""
        choose = random.Random(f"{self.seed}/{memory.step}").choice
        switches = ("checkpointing", "offload_activations", "park_optimizer", *["pack_prompts"][: len(work.prompts)])
        drawn: dict[str, Any] = {name: choose([True, False]) for name in switches}
        return rl.UpdatePlan(choose([1, 30, 8192]), choose([1, 3, 1024]), **drawn)


@dataclass
class Seen:
    """What a run was seen to do."""

    told: list[str] = field(default_factory=list)  # what the reward function was given, a text for each call
    gradients: list[Tensor] = field(default_factory=list)  # of each step, end to end, float64
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # after training, likewise
    allocations: int = 0
    refused: int = 0


def train(
    mix: Mix, folder: Path, policy: rl.MemoryPolicy, *, storm: int = 0, resume: bool = False, **more: Any
) -> Seen:
    """Trains once on a simulated device, with a fault every `storm` allocations or so; `more` are settings."""
    seen = Seen()
    with rl.SimulatedMemory(exact=True) as device, _gradients_noted(seen.gradients):
        trainer = _make(mix, folder, policy, seen.told, more)
        faults = Storm(device, trainer.setup.memory, 0)
        with faults.over(faults.random.randint(1, storm), 1, near=storm, far=storm) if storm else nullcontext():
            trainer.train(resume_from_checkpoint=resume or None)
        weights = [weight for weight in trainer.setup.trained.parameters() if weight.requires_grad]
        seen.weights, seen.allocations, seen.refused = end_to_end(weights), device.allocations, device.refusals
    del trainer, weights, faults
    gc.collect()
    return seen


@contextmanager
def _gradients_noted(gradients: list[Tensor]) -> Iterator[None]:
    """Notes gradients as weights are about to move; of a commit that is repeated, as they were at first."""
    commit, began = Committer.commit, dict[int, Tensor]()

    def noted(committer: Any) -> None:
        held = [torch.zeros_like(w) if w.grad is None else w.grad for w in committer.parameters]
        with host_memory():
            began.setdefault(id(committer), end_to_end(held))
        commit(committer)
        gradients.append(began.pop(id(committer)))

    with patch.object(Committer, "commit", noted):
        yield


def _make(mix: Mix, folder: Path, policy: rl.MemoryPolicy, told: list[str], more: Mapping[str, Any]) -> Any:
    make, configure = (getattr(rl, f"{mix.trainer}{kind}") for kind in ("Trainer", "Config"))
    denoises, gpt2 = mix.family == DENOISER, mix.family == "gpt2"
    usual = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "report_to": "none", "disable_tqdm": True}
    quiet = {"save_strategy": "no", "use_cpu": True, "alarms": False}
    targets = ["up", "down"] if denoises else ["c_attn"] if gpt2 else "all-linear"
    adapter = LoraConfig(r=4, target_modules=targets, fan_in_fan_out=gpt2)

    def pay(prompts: list[Any], completion_ids: list[Any]) -> list[float | None]:
        with host_memory():
            numbers = [torch.as_tensor(ids).double().flatten().round(decimals=6).tolist() for ids in completion_ids]
        told.append(json.dumps([prompts, numbers]))
        paid = [round(sum(row) % 11 / 11 + len(row) / 50, 3) for row in numbers]
        return [None if mix.missing and len(p) % 3 == 0 else pay for p, pay in zip(prompts, paid, strict=True)]

    return make(
        small_policy() if denoises else _network(mix.family),
        pay,
        configure(str(folder), **{**usual, **quiet, **mix.settings, **more}),
        Dataset.from_dict({"prompt": [f"{n}+{n % 7}=" + " " * (n % 5) for n in range(24)]}),
        processing_class=None if denoises else byte_tokenizer(),
        peft_config=adapter if mix.lora else None,
        memory_policy=policy,
    )


def _network(family: str) -> Any:
    config = FAMILIES[family](Sizes(258, heads=4, key_heads=2, head_dim=8, inner=64, layers=2, tied=True))
    torch.manual_seed(0)
    model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.ndim == 2):
            weight.mul_(3.0)  # so that logits are far from uniform
    return model


def check(mix: Mix, folder: Path, plain: Seen) -> tuple[list[str], int]:
    """Trains a mix in three other ways; gives what is wrong, and the faults it met."""
    cut = train(mix, folder / "cut", RandomPlans(mix.seed))
    every = max(20, plain.allocations // int(mix.settings["max_steps"]))
    faulty = train(mix, folder / "faulty", rl.AdaptivePolicy(), storm=every)
    runs = {"cut": cut, "faulty": faulty}
    wrong = [f"{name}: {what}" for name, run in runs.items() for what in _differs(mix, plain, run)]
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    stopped = train(mix, folder / "resumed", rl.AdaptivePolicy(), **{**saving, "max_steps": mix.break_at})
    resumed = train(mix, folder / "resumed", rl.AdaptivePolicy(), resume=True, **saving)
    if not torch.equal(resumed.weights, plain.weights):
        wrong.append(f"resumed: weights differ by {float((resumed.weights - plain.weights).abs().max()):.1e}")
    if stopped.told + resumed.told != plain.told:
        wrong.append("resumed: the reward function was given something else")
    return wrong, faulty.refused


def _differs(mix: Mix, plain: Seen, other: Seen) -> Iterator[str]:
    """Tells how a run differs from the plain one; behind the first step only where the optimizer keeps differences."""
    calls, steps = (len(plain.told), len(plain.gradients)) if mix.settings["optim"] == "sgd" else (1, 1)
    if mix.family != DENOISER and other.told[:calls] != plain.told[:calls]:
        yield "the reward function was given something else"
        return
    if len(other.gradients) != len(plain.gradients):
        yield f"{len(other.gradients)} steps instead of {len(plain.gradients)}"
    pairs = list(zip(other.gradients[:steps], plain.gradients[:steps], strict=False))
    worst = max((float((ours - own).norm()) / max(float(own.norm()), 1e-6) for ours, own in pairs), default=0.0)
    if worst > FAULTY:
        yield f"a gradient differs by {worst:.1e} of its norm"


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the mixes and writes what was found; `arguments` are of the command line, None for this process's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=50, metavar="N", help="runs (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: 0)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the findings go")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("memsafe_rl").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    found: list[dict[str, Any]] = []
    console = Console(stderr=True)
    for index in track(range(given.first, given.first + given.random), "training", console=console):
        mix, wrong, faults, refused = draw_mix(given.seed, index), list[str](), 0, ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                plain = train(mix, Path(folder) / "plain", rl.AdaptivePolicy())
            except rl.ConfigError as error:  # features that do not go together
                refused = str(error)
            else:
                wrong, faults = check(mix, Path(folder), plain)
        found.append({"run": index, **asdict(mix), "wrong": wrong, "refused": refused, "faults": faults})
        told = "refused" if refused else wrong or "as it must be"
        console.print(f"{index} {mix.trainer} {mix.family}: {told}; {mix.settings}", soft_wrap=True)
    table = Table("trainer", "runs", "refused settings", "faults", "wrong")
    for trainer in ("GRPO", "RLOO", "PPO"):
        own = [one for one in found if one["trainer"] == trainer]
        sums = (sum(bool(one["refused"]) for one in own), sum(one["faults"] for one in own))
        table.add_row(trainer, *map(str, (len(own), *sums, sum(bool(one["wrong"]) for one in own))))
    Console().print(table)
    record = {"machine": describe_machine(), "seed": given.seed, "first": given.first, "runs": found}
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(one["wrong"] for one in found))


if __name__ == "__main__":
    main()
