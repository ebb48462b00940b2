"""Which stages of a run may be repeated when memory runs out, and how: the one table of it."""

from __future__ import annotations

from enum import StrEnum


class Retry(StrEnum):
    """What may follow a failed attempt."""

    SAME_PLAN = "same plan"
    """Again as it was, after everything that can be freed was freed: no plan makes the stage smaller."""
    LEANER_PLAN = "leaner plan"
    """Once more under the same plan, then under the policy's next ones."""
    NEVER = "never"
    """Not at all: the stage has effects that cannot be taken back."""


class Stage(StrEnum):
    """The stages of a run, in the order in which they happen."""

    LOAD = "load"
    ADOPT = "adopt"
    PREPARE = "prepare"
    DRAW = "draw"
    REWARD_PASS = "reward pass"
    SCORE = "score"
    STORE = "store"
    ACCUMULATE = "accumulate"
    ACCOMPANY = "accompany"
    MERGE = "merge"
    MEASURE = "measure"
    COMMIT = "commit"
    CHECKPOINT = "checkpoint"
    RESUME = "resume"


RETRIES: dict[Stage, Retry] = {
    Stage.LOAD: Retry.SAME_PLAN,  # by name: nothing of a failed load is kept
    Stage.ADOPT: Retry.NEVER,  # a model object is changed in place
    Stage.PREPARE: Retry.SAME_PLAN,  # prompts, row orders, random state: host integers and small tensors
    Stage.DRAW: Retry.LEANER_PLAN,  # a wave of completions; finished rows are kept
    Stage.REWARD_PASS: Retry.LEANER_PLAN,  # one pass of a reward model; reward functions run outside of any stage
    Stage.SCORE: Retry.LEANER_PLAN,  # a slice of rows without gradient
    Stage.STORE: Retry.SAME_PLAN,  # what was scored, joined into the trajectory
    Stage.ACCUMULATE: Retry.LEANER_PLAN,  # all micro-batches of an optimizer step; gradients are dropped first
    Stage.ACCOMPANY: Retry.SAME_PLAN,  # a collective of a round in which this rank computes nothing
    Stage.MERGE: Retry.SAME_PLAN,  # gradients of several objectives
    Stage.MEASURE: Retry.SAME_PLAN,  # unscales no gradient twice
    Stage.COMMIT: Retry.SAME_PLAN,  # rolled back first
    Stage.CHECKPOINT: Retry.SAME_PLAN,  # written beside its final place
    Stage.RESUME: Retry.SAME_PLAN,
}
