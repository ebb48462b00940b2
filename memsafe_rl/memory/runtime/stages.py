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
    """The stages of a run, in the order in which they happen, each with what may follow a failed attempt."""

    LOAD = "load", Retry.SAME_PLAN  # by name: nothing of a failed load is kept
    ADOPT = "adopt", Retry.NEVER  # a model object is changed in place
    PREPARE = "prepare", Retry.SAME_PLAN  # prompts, row orders, random state: host integers and small tensors
    DRAW = "draw", Retry.LEANER_PLAN  # a wave of completions; finished rows are kept
    REWARD_PASS = "reward pass", Retry.LEANER_PLAN  # of a reward model; reward functions run outside of any stage
    SCORE = "score", Retry.LEANER_PLAN  # a slice of rows without gradient
    STORE = "store", Retry.SAME_PLAN  # what was scored, joined into the trajectory
    ACCUMULATE = "accumulate", Retry.LEANER_PLAN  # all micro-batches of an optimizer step; gradients are dropped first
    ACCOMPANY = "accompany", Retry.SAME_PLAN  # a collective of a round in which this rank computes nothing
    MERGE = "merge", Retry.SAME_PLAN  # gradients of several objectives
    MEASURE = "measure", Retry.SAME_PLAN  # unscales no gradient twice
    COMMIT = "commit", Retry.SAME_PLAN  # rolled back first
    CHECKPOINT = "checkpoint", Retry.SAME_PLAN  # written beside its final place
    RESUME = "resume", Retry.SAME_PLAN

    retry: Retry

    def __new__(cls, name: str, retry: Retry) -> Stage:
        """Makes a stage of the table."""
        stage = str.__new__(cls, name)
        stage._value_, stage.retry = name, retry
        return stage
