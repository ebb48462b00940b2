"""GRPO as a loop of your own, on the parts behind the trainers: `python -m examples.minimal_loop`.

The same task, model and settings as `examples.quickstart`, and the same weights in the end. What is left out here is
logging, evaluation, checkpoints and the changes of the task that `allow_lossy` permits; memory plans and recovery are
in the parts, so that this loop survives a failed allocation too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from examples.quickstart import Parts, WarmUp, small_parts
from examples.tasks import exact, greedy_accuracy
from memsafe_rl import Collector, Learner, RunState, TrainingRequest, collect, prepare


def train(parts: Parts) -> RunState:
    """Trains a model step by step.

    Args:
        parts: model, tokenizer, prompts and settings.

    Returns:
        Where the run stands in the end.
    """
    request = TrainingRequest(parts.model, exact, parts.train, parts.held_out, parts.tokenizer)
    setup = prepare(parts.config, request)
    collector, learner = Collector(setup), Learner(setup)
    state = RunState.at_start(parts.config, is_main=True)
    state.progress.max_steps = setup.planned_steps

    for _ in track(range(setup.planned_steps), description="GRPO"):
        setup.memory.step = state.step
        if state.rollout is None:  # prompts, completions, rewards, advantages, reference and old log-probs
            state.rollout = collect(collector, state, learner.later_samples(state.cursor))
        result = learner.step(state)  # the gradient, over micro-batches that the memory policy cuts
        learner.commit(state.step)  # the weights move
        state.rollout = result.rollout
        state.controllers = state.controllers.after(result.metrics, parts.config)
        used_up = state.advance(parts.config)
        if used_up is not None:
            setup.advantages.end_rollout(used_up.metrics)
            state.history.append({**used_up.metrics, **result.metrics})
        setup.memory.drain()
    collector.close()
    return state


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        Held-out accuracies of greedy answers, 0 to 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps of GRPO (default: 800)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:  # the settings name one, though nothing is written here
        parts = small_parts(Path(folder), given.seed, given.steps, WarmUp())
        longest = parts.config.max_completion_length

        def accuracy() -> float:
            return greedy_accuracy(parts.model, parts.tokenizer, parts.held_out, new_tokens=longest)

        before = accuracy()
        state = train(parts)
        after = accuracy()
    rewards = [record["reward"] for record in state.history]
    print(f"reward {rewards[0]:.2f} -> {sum(rewards[-10:]) / len(rewards[-10:]):.2f}")
    print(f"held-out accuracy, greedy: {before:.1%} -> {after:.1%}   (seed {given.seed})")
    return {"greedy_before": before, "greedy_after": after}


if __name__ == "__main__":
    main()
