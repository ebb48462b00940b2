"""What else would fit: longest completions, largest groups, smallest cards, by the policy's own plans and estimates.

Each answer asks the run's memory policy for the plans of another task, and reads the peaks that they are predicted to
reach, corrected by what the forecast has learnt of the estimates. That costs milliseconds where a forecast costs
seconds; the answers are estimates, which a forecast of the task found proves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memsafe_rl.memory.budget import AUTO_SHARE
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.preflight import refusal
from memsafe_rl.types import MemoryState, ModelGeometry, Phase, RolloutWork, UpdateWork

CARD_GIB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
"""Memory of common cards, in GiB."""


@dataclass(frozen=True)
class Job:
    """The sizes of a run that decide what it holds."""

    geometry: ModelGeometry  # sizes of the network
    prompts: int  # unique prompts of a rollout
    group_size: int  # completions per prompt
    prompt_tokens: int  # longest prompt, in tokens
    completion_tokens: int  # longest completion, in tokens
    step_share: float  # share of a rollout's rows that one optimizer step takes
    scored: bool  # whether a reference scores rollouts
    packs_prompts: bool  # whether completions can share one copy of their prompt
    held_bytes: int  # int, bytes held before a rollout: weights and optimizer state
    optimizer_bytes: int  # int, bytes of the optimizer state
    gradients_aside: int = 0  # whole gradients that wait for those of further objectives
    whole_gradient_bytes: int = 0  # as in `UpdateWork`

    @property
    def rollout(self) -> RolloutWork:
        """The shape of a rollout, every row as long as it can become."""
        prompts = (self.prompt_tokens,) * self.prompts
        return RolloutWork(prompts, self.group_size, self.completion_tokens, self.geometry, self.scored)

    @property
    def update(self) -> UpdateWork:
        """The shape of an optimizer step, every row as long as it can become."""
        whole = self.prompts * self.group_size
        rows = max(1, round(whole * self.step_share))
        # Of a rollout of several steps, rows are shuffled: each step's share few prompts.
        spread = range(0, whole, max(1, whole // rows))[:rows]
        owners, encoded = tuple(row // self.group_size for row in spread), self.geometry.source_bytes is not None
        shared, sources = owners if self.packs_prompts else (), owners if encoded else ()
        length = self.prompt_tokens + self.completion_tokens
        actions = (self.completion_tokens,) * rows
        aside, reduced = self.gradients_aside, self.whole_gradient_bytes
        return UpdateWork(
            (length,) * rows, actions, self.geometry, shared, aside, sources=sources, whole_gradient_bytes=reduced
        )


@dataclass(frozen=True)
class Scout:
    """Asks a policy about jobs."""

    policy: MemoryPolicy  # makes the plans
    device: str  # kind of device
    budget_bytes: int  # int, bytes that may be held
    corrections: dict[str, float]  # per phase, what forecasts or measurements say of the estimates
    stranded_bytes: Mapping[str, int] = field(default_factory=dict)  # per phase, what the allocator needs besides

    def peak_bytes(self, job: Job) -> int:
        """Returns the bytes that the policy's plans are predicted to reach."""
        memory = MemoryState(
            device=self.device,
            budget_bytes=self.budget_bytes,
            live_bytes=job.held_bytes,
            peak_bytes=job.held_bytes,
            corrections=self.corrections,
            optimizer_bytes=job.optimizer_bytes,
            stranded_bytes=self.stranded_bytes,
        )
        rollout = self.policy.before_rollout(job.rollout, memory)
        update = self.policy.before_update(job.update, memory)
        predicted = [rollout.predicted_bytes.get(Phase.ROLLOUT), update.predicted_bytes.get(Phase.UPDATE)]
        known = [size for size in predicted if size is not None]
        refusal.when(len(known) < len(predicted), "predicted_bytes", kind=type(self.policy).__name__)
        return max(known)

    def fits(self, job: Job) -> bool:
        """Whether the plans stay within the budget."""
        return self.peak_bytes(job) <= self.budget_bytes

    def longest_completion(self, job: Job) -> int:
        """Finds the longest completion that fits."""
        limit = job.geometry.max_positions or 2**20
        most = max(1, limit - job.prompt_tokens if job.geometry.source_bytes is None else limit)
        return self._largest(lambda tokens: replace(job, completion_tokens=tokens), most)

    def largest_group(self, job: Job, most: int = 1024) -> int:
        """Finds the largest group that fits, prompts staying as many."""
        return self._largest(lambda size: replace(job, group_size=size), most)

    def cards(self, job: Job, sizes_gib: Sequence[int] = CARD_GIB) -> dict[int, tuple[int, bool]]:
        """Returns what the plans would reach on each card, and whether it fits there."""
        cards = {size: replace(self, budget_bytes=int(AUTO_SHARE * size * 2**30)) for size in sizes_gib}
        peaks = {size: card.peak_bytes(job) for size, card in cards.items()}
        return {size: (peak, peak <= cards[size].budget_bytes) for size, peak in peaks.items()}

    def _largest(self, task: Callable[[int], Job], most: int) -> int:
        if self.fits(task(most)):  # most often, for a policy cuts what it is given
            return most
        return bisect_right(range(1, most), False, key=lambda size: not self.fits(task(size)))
