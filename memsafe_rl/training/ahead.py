"""One rollout ahead: servers draw the next rollout while this one is learnt from."""

from __future__ import annotations

from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.rollout.engine import DrawsAhead
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.training.state import RunState
from memsafe_rl.types import Phase, SequenceKey


def draw_ahead(setup: TrainingSetup, state: RunState, rollout: Rollout) -> None:
    """Has the engine begin the rollout after this one, with the weights as they are, if the run needs another.

    The lag is fixed: the weights of rollout k are those after rollout k - 2, however long drawing and learning take,
    so that a run can be repeated. The first rollout is drawn alone.
    """
    config, ahead = setup.config, setup.engine.supports.ahead
    least = 1 if config.kl_stop_rule else config.steps_per_rollout
    if ahead is None or state.step + least >= setup.planned_steps:
        return
    with setup.memory.phase(Phase.ROLLOUT, compared=False):
        setup.recovery.repeat(Stage.PREPARE, _begin, setup, ahead, state, rollout)


def _begin(setup: TrainingSetup, ahead: DrawsAhead, state: RunState, rollout: Rollout) -> None:
    config = setup.config
    position = state.cursor.position + rollout.consumed
    prompts = setup.models.reader(setup.source.take(position, setup.settings.prompts_per_rollout))
    keys = [
        [SequenceKey(config.seed, state.cursor.rollout + 1, prompt, sample) for sample in range(config.num_generations)]
        for prompt in range(len(prompts.ids))
    ]
    ahead.begin(prompts.ids, keys, setup.sampling, setup.memory.rollout_plan)
