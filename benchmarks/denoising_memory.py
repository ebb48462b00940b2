"""Peaks of diffusion policies at the size of motions: `python -m benchmarks.denoising_memory`.

States of 263 × 1 × 196, groups of 4 for 2 prompts, KL to a copy. Bytes over weights, the stored trajectory apart.
Writes ``benchmarks/results/denoising_memory.json``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from examples.motion_grpo import make_policy
from examples.motions import make_motions
from memsafe_rl import DDIMScheduler, RolloutPlan, SimulatedMemory, TrainedSteps, UpdatePlan
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.rollout.engines.denoising import DenoisingEngine
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.types import Completion, Denominators, LossSettings, Ragged, SamplingSettings, SequenceKey, Trajectory

PROMPTS = ("walk for 196 frames", "run for 120 frames")
GROUP = 4
MB = 10**6
RESULTS = Path(__file__).parent / "results" / "denoising_memory.json"
MEASURED = ("trajectory", "rollout, 8 rows", "rollout, 1 row", "update, 1 pair", "recomputed", "a column of 8 rows")


def make_adapter(steps: int) -> DiffusionAdapter:
    """Makes the example's policy with another number of steps, and a copy of it as the reference.

    Args:
        steps: S.

    Returns:
        The adapter.
    """
    policy = make_policy(make_motions(32, 0), width=48, seed=0).eval()
    policy.scheduler = DDIMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="sample")
    policy.scheduler.set_timesteps(steps)
    policy.num_inference_steps, policy.stds = steps, tuple(policy.scheduler.stds.tolist())
    policy.trained_steps = TrainedSteps()
    return DiffusionAdapter(policy, reference_denoiser=copy.deepcopy(policy.denoiser).requires_grad_(False))


def draw(adapter: DiffusionAdapter, rows: int) -> list[Completion]:
    """Draws the chains of a rollout.

    Args:
        adapter: the policy.
        rows: chains denoised together.

    Returns:
        The chains.
    """
    keys = [[SequenceKey(0, 0, prompt, sample) for sample in range(GROUP)] for prompt in range(len(PROMPTS))]
    settings, plan = SamplingSettings(adapter.policy.num_inference_steps, ()), RolloutPlan(rows_in_flight=rows)
    return DenoisingEngine(adapter).generate(adapter.policy.embed(PROMPTS), keys, settings, under(plan))


def lay_down(adapter: DiffusionAdapter, drawn: list[Completion]) -> Trajectory:
    """Makes chains a rollout to learn from, with advantages that alternate.

    Args:
        adapter: the policy.
        drawn: the chains.

    Returns:
        The rollout.
    """
    return Trajectory(
        conditions=Ragged.from_rows(adapter.policy.embed(PROMPTS)),
        condition_of_row=tuple(row // GROUP for row in range(len(drawn))),
        actions=Ragged.from_rows([one.ids for one in drawn]),
        loss_mask=Ragged.from_rows([one.mask for one in drawn if one.mask is not None]),
        sampling_logprobs=None,
        advantages=torch.tensor([1.0, -1.0] * (len(drawn) // 2)),
        group_of_row=tuple(row // GROUP for row in range(len(drawn))),
        finished=(True,) * len(drawn),
        has_old=(False,) * len(drawn),
        starts=torch.stack([one.start for one in drawn if one.start is not None]),
    )


def peak_of(work: Callable[[], object]) -> int:
    """Measures what work adds to what is there.

    Args:
        work: the work.

    Returns:
        int, bytes.
    """
    with SimulatedMemory() as memory:
        work()
        return memory.peak_bytes


def learn(adapter: DiffusionAdapter, trajectory: Trajectory, pairs: int, *, recomputed: bool) -> None:
    """Accumulates the gradient of one optimizer step, and drops it.

    Args:
        adapter: the policy.
        trajectory: the rollout.
        pairs: pairs of one forward and backward.
        recomputed: whether blocks run again in the backward pass.
    """
    counted = sum(trajectory.counted_actions)
    terms = StepTerms(
        settings=LossSettings(beta=0.04),
        denominators=Denominators(len(trajectory), counted, counted),
        temperature=1.0,
        with_entropy=True,
    )
    plan = UpdatePlan(micro_batch_tokens=pairs, checkpointing=recomputed)
    rows = range(len(trajectory))
    accumulate_gradient(adapter, trajectory, rows, plan, terms, autocast=nullcontext, scale=lambda loss: loss)
    adapter.model.zero_grad(set_to_none=True)


def main() -> None:
    """Prints a table, and writes it."""
    torch.set_num_threads(1)
    results: dict[int, dict[str, int]] = {}
    print("| " + " | ".join(["steps", *MEASURED]) + " |")
    print("|---|---|---|---|---|---|---|")
    for steps in (5, 50, 500):
        adapter = make_adapter(steps)
        trajectory = lay_down(adapter, draw(adapter, len(PROMPTS) * GROUP))
        found = [
            peak_of(lambda adapter=adapter: draw(adapter, 8)),  # type: ignore[misc]
            peak_of(lambda adapter=adapter: draw(adapter, 1)),  # type: ignore[misc]
        ]
        for pairs, recomputed in ((1, False), (1, True), (8, False)):
            work = (adapter, trajectory, pairs)
            found.append(peak_of(lambda work=work, recomputed=recomputed: learn(*work, recomputed=recomputed)))  # type: ignore[misc]
        found = [sum(trajectory.nbytes().values()), *found]
        results[steps] = dict(zip(MEASURED, found, strict=True))
        print("| " + " | ".join([str(steps), *(f"{size / MB:.2f} MB" for size in found)]) + " |", flush=True)
        if steps == 50:
            whole = peak_of(lambda: learn(adapter, trajectory, 8 * 49, recomputed=False))  # noqa: B023
            results[steps]["all columns of 8 rows"] = whole
            print(f"all 49 columns of 8 rows at once: {whole / MB:.0f} MB", flush=True)
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "peak_bytes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
