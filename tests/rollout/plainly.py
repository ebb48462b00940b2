"""Rollouts and scoring under one plan, with nothing caught."""

from collections.abc import Callable, Sequence

from torch import Tensor

from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.ops.sampling import gumbel_noise, hash_fields, noise_slots
from memsafe_rl.rollout import scoring
from memsafe_rl.rollout.native import running_batch as native
from memsafe_rl.rollout.native.sequences import Drawer, Noise
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey, Trajectory


def generate(
    adapter: ModelAdapter,
    prompts: Sequence[Tensor],
    keys: Sequence[Sequence[SequenceKey]],
    settings: SamplingSettings,
    plan: RolloutPlan,
    progress: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    return native.generate(adapter, prompts, keys, settings, under(plan), progress)


def score_all(
    adapter: ModelAdapter,
    trajectory: Trajectory,
    rows: Sequence[int],
    *,
    temperature: float,
    score_tokens: int,
    tile: int,
) -> list[Tensor]:
    attempt = under(RolloutPlan(score_tokens=score_tokens))
    scored = scoring.score_all(adapter, trajectory, rows, temperature=temperature, attempt=attempt, tile=tile)
    return [row.logprobs for row in scored]


def draw_from(
    drawer: Drawer,
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    histories: Sequence[Tensor] | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws with noise that is made of keys and positions here and now, not ahead."""
    noise = Noise(gumbel_noise(hash_fields(keys, positions), noise_slots(logits.shape[1]))) if drawer.draws else None
    return drawer(logits, positions, noise, histories, lengths)
