"""Does credit for single turns teach an agent more than one advantage an episode?

    python -m benchmarks.turn_credit [--seeds 0 1 2] [--steps 24]

The agent, guest and warm-up of `examples.agent_user_grpo`, warmed up once a seed. Plain GRPO gives every token of an
episode the same advantage; with turn-level credit (GiGPO, arXiv:2505.10978) a turn is compared besides with the turns
of its group that began with the same observation. Rivals differ in nothing else. Shows the reward on held-out
bookings after equal optimizer steps, as mean ± standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from examples.agent_user_grpo import (
    FrontDesk,
    WarmUp,
    as_dataset,
    divided,
    make_model,
    make_tokenizer,
    settings,
    warm_up,
)
from memsafe_rl import Action, GRPOTrainer, Step


class PayingDesk(FrontDesk):
    """The front desk, which says which turn has earned the 0.2 for looking the guest up."""

    def step(self, action: Action) -> Step:
        """Carries an action out.

        Args:
            action: the agent's.

        Returns:
            What follows, with the reward of the first right look-up.
        """
        before = self.looked_up
        step = super().step(action)
        assert isinstance(step, Step), "`find` is not async"
        return replace(step, reward=0.2 * (self.looked_up and not before))


RIVALS: dict[str, tuple[type[FrontDesk], dict[str, Any]]] = {
    "plain GRPO": (FrontDesk, {}),
    "turns compared": (FrontDesk, {"turn_advantage_coef": 1.0}),
    "turns compared and paid": (PayingDesk, {"turn_advantage_coef": 1.0}),
}
"""By name, each rival's environment, and what it sets."""


def learn(
    model: Any, tokenizer: Any, folder: Path, seed: int, steps: int, rival: tuple[type[FrontDesk], dict[str, Any]]
) -> dict[str, float]:
    """Trains an adapter on a copy of the warmed-up model.

    Args:
        model: the warmed-up model.
        tokenizer: its tokenizer.
        folder: of the run.
        seed: of the run.
        steps: optimizer steps.
        rival: a value of `RIVALS`.

    Returns:
        Held-out reward before and after, the mean reward of the last quarter of the rollouts, the share of turns that
        were compared, and seconds.
    """
    desk, own = rival
    train, held_out = divided(12_000, seed=0)
    config = settings(folder, seed, steps)
    for name, value in {"eval_steps": steps, "disable_tqdm": True, "report_to": "none", "alarms": False, **own}.items():
        setattr(config, name, value)
    trainer = GRPOTrainer(
        copy.deepcopy(model),
        None,
        args=config,
        train_dataset=as_dataset(train),
        eval_dataset=as_dataset(held_out[:150]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        environment_factory=desk,
    )
    start = time.perf_counter()
    trainer.train()
    judged = [record["eval_reward"] for record in trainer.state.log_history if "eval_reward" in record]
    rewards = [record["reward"] for record in trainer.history if "reward" in record]
    compared = [record["turns/compared"] for record in trainer.history if "turns/compared" in record]
    return {
        "before": judged[0],
        "after": judged[-1],
        "last_rollouts": statistics.mean(rewards[-max(1, len(rewards) // 4) :]),
        "compared": statistics.mean(compared) if compared else 0.0,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Runs every rival with every seed, shows a table and writes the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps, two a rollout (default: 24)")
    parser.add_argument("--warm-up", type=int, default=WarmUp().steps, help="supervised steps (default: 1,200)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/turn_credit"), help="where the runs write")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/turn_credit.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, train = make_tokenizer(), divided(12_000, seed=0)[0]
    records: dict[str, list[dict[str, float]]] = {name: [] for name in RIVALS}
    for seed in arguments.seeds:
        model = make_model(tokenizer, seed)
        warming = WarmUp(steps=arguments.warm_up, wrong_from=arguments.warm_up * 5 // 6)
        warm_up(model, tokenizer, train, warming, seed)
        for name, rival in RIVALS.items():
            found = learn(model, tokenizer, arguments.output_dir, seed, arguments.steps, rival)
            records[name].append({"seed": seed, **found})
            shown = {"steps": arguments.steps, "warm_up": arguments.warm_up, "runs": records}
            arguments.results.write_text(json.dumps({"machine": describe_machine(), **shown}, indent=2) + "\n")
    table = Table(title=f"{arguments.steps} optimizer steps, {len(arguments.seeds)} seeds")
    for column in ("credit", "held out before", "held out after", "last rollouts", "turns compared", "seconds"):
        table.add_column(column)
    for name, runs in records.items():
        table.add_row(name, *(_spread([run[key] for run in runs]) for key in runs[0] if key != "seed"))
    Console().print(table)


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


if __name__ == "__main__":
    main()
