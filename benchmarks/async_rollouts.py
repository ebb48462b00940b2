"""Rollouts drawn one ahead beside rollouts drawn when they are due: `python -m benchmarks.async_rollouts`.

Pairs of runs on a server in a process of its own, each pair from the same seed and weights, paid for digits. Printed:
the rewards of both, the 95 % interval of the difference of their means (Student's t over the pairs), the seconds.
``--url`` takes a vLLM server that is running already; see `benchmarks.vllm_server`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import transformers

from benchmarks.vllm_server import share_of_digits
from tests.rollout.external.common import small_model
from tests.trainers.helpers import make_trainer

RESULTS = Path(__file__).parent / "results" / "async_rollouts.json"
QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for a 95 % interval, by the number of pairs."""

SERVE = "from tests.rollout.server.fake_server import FakeServer; server = FakeServer(); print(server.url, flush=True)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that is running already")
    parser.add_argument("--pairs", type=int, default=5, choices=QUANTILE)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    pairs = []
    with tempfile.TemporaryDirectory() as folder, served(options.url) as url:
        for seed in range(options.pairs):
            made = {name: trained(Path(folder), url, seed, options.steps, ahead) for name, ahead in MODES.items()}
            pairs.append({"seed": seed, **made})
            told = {name: (made[name]["mean_reward"], made[name]["seconds"]) for name in MODES}
            print(f"seed {seed}: mean reward and seconds {told}", flush=True)
    gaps = [pair["one_ahead"]["mean_reward"] - pair["when_due"]["mean_reward"] for pair in pairs]
    half = QUANTILE[len(gaps)] * stdev(gaps) / math.sqrt(len(gaps))
    found = {
        "machine": {"cores": os.cpu_count(), "torch": torch.__version__, "transformers": transformers.__version__},
        "server": options.url or "the tests' stand-in, in a process of its own",
        "steps": options.steps,
        "difference_of_mean_rewards": {"mean": mean(gaps), "low": mean(gaps) - half, "high": mean(gaps) + half},
        "seconds_ratio": mean(pair["one_ahead"]["seconds"] / pair["when_due"]["seconds"] for pair in pairs),
        "pairs": pairs,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("difference_of_mean_rewards", "seconds_ratio")}, indent=1))


MODES = {"when_due": 0, "one_ahead": 1}


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """Gives a server's address; starts one, and ends it, where there is none."""
    if url is not None:
        yield url
        return
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def trained(folder: Path, url: str, seed: int, steps: int, ahead: int) -> dict[str, Any]:
    """Trains once.

    Args:
        folder: for the run's own folder.
        url: the server's address.
        seed: of the run and of its weights.
        steps: optimizer steps.
        ahead: rollouts drawn ahead.

    Returns:
        The mean reward over all steps and over the last five, the seconds, and the reward of each step.
    """
    trainer = make_trainer(
        folder / f"{seed}-{ahead}",
        model=small_model(tied=False, seed=seed),
        reward_funcs=share_of_digits,
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_server_fallback=False,
        vllm_importance_sampling_mode="token_truncate",
        async_rollouts=ahead,
    )
    began = time.perf_counter()
    trainer.train()
    seconds, rewards = time.perf_counter() - began, [record["reward"] for record in trainer.history]
    return {
        "mean_reward": round(mean(rewards), 4),
        "last_rewards": round(mean(rewards[-5:]), 4),
        "seconds": round(seconds, 2),
        "rewards": [round(reward, 4) for reward in rewards],
    }


if __name__ == "__main__":
    main()
