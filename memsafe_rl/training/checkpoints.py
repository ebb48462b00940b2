"""What a checkpoint of a run holds, and how a resumed run takes it over, bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerState

from memsafe_rl.checkpoint.store import (
    FORMAT,
    CheckpointContent,
    RunMark,
    check_files,
    checkpoint_folder,
    drop_old_checkpoints,
    read_manifest,
    write_checkpoint,
)
from memsafe_rl.checkpoint.weights import (
    HostCopies,
    Weights,
    bytes_of,
    host_copy,
    read_critic,
    saved_weights,
    write_critic,
)
from memsafe_rl.config.degradation import Degradation
from memsafe_rl.config.resume_checks import check_same_run, run_facts
from memsafe_rl.data.partial_rollouts import completion_from, plain_completion, plain_groups
from memsafe_rl.data.prompts import prompt_of
from memsafe_rl.diagnostics.status import plain_number
from memsafe_rl.errors import DamagedCheckpointError
from memsafe_rl.memory.runtime.recovery import capture_random_state, plain_random_state, restore_random_state
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.micro_batches import Cursor
from memsafe_rl.models.module_state import copy_into
from memsafe_rl.training import refusal
from memsafe_rl.training.collector import Collector
from memsafe_rl.training.metrics.run_log import Hooks, RunLog
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.setup import Ending, RunState, TrainingSetup
from memsafe_rl.types import SequenceKey, Trajectory

logger = logging.getLogger(__name__)


Saved = tuple[Weights, Weights, dict[str, Any] | None]
"""The weights of the model and of the critic, and the tensors beside them; None for weights alone."""


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint as it was read, weights left out."""

    tensors: dict[str, Any]  # of optimizer, schedule, loss scale and a moving reference
    loop: Mapping[str, Any]  # everything in plain values
    trajectory: Trajectory | None  # the rollout that was being trained on; None where there was none

    @property
    def degradations(self) -> list[Degradation]:
        """Changes of the task that the run had taken."""
        return [Degradation(**saved) for saved in self.loop["concessions"]]


class Checkpoints:
    """Writes and restores the checkpoints of a run."""

    def __init__(self, setup: TrainingSetup, collector: Collector, hooks: Hooks) -> None:
        refusal.when(hooks.save_model is not None and setup.shards.divided, "save_model/fsdp")
        self._setup = setup
        self._collector = collector
        self._hooks = hooks
        self._copies = HostCopies()
        self.repeat = setup.recovery.repeat  # runs a stage until it fits

    def write(self, content: CheckpointContent, mark: RunMark, best: str | None) -> None:
        """Writes a checkpoint, and deletes those of this run that are older than it should keep."""
        output_dir = Path(self._setup.config.output_dir)
        write_checkpoint(output_dir, content, mark)
        drop_old_checkpoints(output_dir, mark, self._setup.config.save_total_limit, best)

    def prepared_copies(self) -> Callable[[], None]:
        """Returns what makes the host memory into which the tensors of each checkpoint will be copied."""
        return self._copies.prepared(self._saved())

    @property
    def writes_beside(self) -> bool:
        """Whether training goes on while a checkpoint is written, from a copy for which the host needs room."""
        setup = self._setup
        if self._hooks.save_model is not None or setup.shards.divided:  # a user's own finds the model, not a copy of it
            return False
        if setup.config.save_in_background is not None:
            return setup.config.save_in_background
        on_gpu = setup.adapter.device.type == "cuda"
        return bool(on_gpu and psutil.virtual_memory().available > 2 * sum(map(bytes_of, self._saved())))

    def _saved(self) -> Saved:
        """Returns the weights of the model and of the critic, and the tensors beside them; None for weights alone."""
        setup = self._setup
        return saved_weights(setup.model), self._critics(), None if setup.config.save_only_model else self._tensors()

    def saved(self) -> Saved:
        """Returns the tensors of a checkpoint; divided ones come whole to the main rank, with all ranks' help."""
        return self._setup.shards.on_main(self.repeat(Stage.CHECKPOINT, self._saved), self.repeat)

    def writer(self) -> Callable[[Path], None]:
        """Returns what writes the weights as they are now; all ranks take part in it where weights are divided."""
        weights = saved_weights(self._setup.model), self._critics()
        model, critic = self._setup.shards.on_main(weights, self.repeat)
        return partial(self.write_weights, model=model, critic=critic)

    def content(self, state: RunState, report: RunLog, saved: Saved, *, copied: bool) -> CheckpointContent:
        """Returns what a checkpoint will hold, its tensors copied to the host where training goes on meanwhile."""
        trajectory = None if state.rollout is None else state.rollout.trajectory
        stored = 0 if trajectory is None else sum(trajectory.nbytes().values())
        progress = asdict(replace(state.progress, log_history=[]))  # metrics.jsonl has it
        progress["stateful_callbacks"] = report.callback_states()
        tensor_bytes = sum(map(bytes_of, saved)) + stored
        save_model: Callable[[Path], None] = self.write_weights
        if self._hooks.save_model is not None:
            save_model = partial(_save_through, self._hooks.save_model, self.write_weights)
        if copied:
            saved = self._copies.copy(saved)
            trajectory = None if trajectory is None else trajectory.moved(host_copy)
        if copied or self._setup.shards.divided:
            save_model = partial(self.write_weights, model=saved[0], critic=saved[1])
        return CheckpointContent(
            step=state.step,
            save_model=save_model,
            progress=json.dumps(progress, indent=2, sort_keys=True, default=plain_number),
            tensors=saved[2],
            loop=json.dumps({"format": FORMAT, **self._loop(state), **report.state_dict()}, default=plain_number),
            trajectory=trajectory,
            tensor_bytes=tensor_bytes,
        )

    def restore(self, folder: Path, saved: SavedRun, state: RunState, report: RunLog) -> None:
        """Puts weights, optimizer, data position, rollout and random state back as they were."""
        setup, loop = self._setup, saved.loop
        check_same_run(loop["run"], self._run_facts(), setup.config)
        self.load_weights(folder)
        setup.committed.load_state_dict(saved.tensors)
        if setup.reference_model is not None and "reference" in saved.tensors:
            for name, target in setup.reference_model.state_dict().items():
                copy_into(target, saved.tensors["reference"][name])
        state.progress = TrainerState(**loop["trainer_state"])
        if state.progress.best_model_checkpoint:  # it moved along with the folder
            best = folder.parent / Path(state.progress.best_model_checkpoint).name
            state.progress.best_model_checkpoint = str(best) if best.is_dir() else state.progress.best_model_checkpoint
        state.progress.is_world_process_zero = state.progress.is_local_process_zero = setup.parallel.is_main
        state.cursor = Cursor(**loop["cursor"])
        state.ending = Ending(**loop["ending"]) if loop.get("ending") else None
        report.load_state_dict(loop, state.progress.stateful_callbacks)
        state.controllers = state.controllers.loaded(loop)
        setup.advantages.load_state_dict(loop)
        setup.memory.load_state_dict(loop["memory"])
        if "alarms" in loop:  # checkpoints of before there were any
            state.alarms.load_state_dict(loop["alarms"])
        if setup.config.memory_budget == "auto":  # this device may have less than the one before
            setup.memory.budget_bytes = min(setup.memory.budget_bytes, loop["memory"]["budget_bytes"])
        if saved.trajectory is not None:
            facts = loop["experience"]
            _read_again(setup, saved.trajectory, state.cursor.position, facts["consumed"], loop.get("contexts"))
            waiting = self._collector.groups_from(facts["waiting"])
            state.rollout = Rollout(trajectory=saved.trajectory, **{**facts, "waiting": waiting})
        state.waiting = self._collector.groups_from(loop["waiting"])
        ahead = setup.engine.supports.ahead
        if ahead is not None:
            drawn = loop.get("ahead", ())  # checkpoints of before there was any have none
            ahead.restore({SequenceKey(*key): completion_from(plain) for key, plain in drawn})
        randoms, rank = loop.get("rank_randoms") or [loop["random"]], setup.parallel.rank
        if rank < len(randoms):  # further ranks keep the state that they were built with
            restore_random_state(randoms[rank])

    def write_weights(self, folder: Path, model: Weights | None = None, critic: Weights | None = None) -> None:
        """Writes the trained weights, or copies of them, in the form users load."""
        self._setup.models.save(self._setup.model, folder, model)
        critic = self._critics() if critic is None else critic
        if critic:
            write_critic(critic, folder)

    def _critics(self) -> Weights:
        return {name: value for one in self._setup.advantages.critics for name, value in one.weights().items()}

    def load_weights(self, folder: Path) -> None:
        """Copies saved weights in, bit for bit."""
        self._setup.models.restore(self._setup.model, folder)
        for critic in self._setup.advantages.critics:
            read_critic(critic, folder)

    def _loop(self, state: RunState) -> dict[str, Any]:
        # the next rollout as far as it is drawn ahead of the weights, which a resumed run no longer has
        ahead = self._setup.engine.supports.ahead
        drawn = {} if ahead is None else ahead.drawn()
        experience = contexts = None
        if (rollout := state.rollout) is not None:
            experience = {name: getattr(rollout, name) for name in ("consumed", "external", "metrics")}
            experience["waiting"] = plain_groups(rollout.waiting)
            contexts = self._setup.models.reader.read_in_contexts()
        return {
            "cursor": asdict(state.cursor),
            "ending": None if state.ending is None else asdict(state.ending),
            **self._setup.advantages.state_dict(),
            **state.controllers.state_dict(),
            "memory": self._setup.memory.state_dict(),
            "alarms": state.alarms.state_dict(),
            "experience": experience,
            "contexts": contexts,
            "waiting": plain_groups(state.waiting),
            "ahead": [(key, plain_completion(completion)) for key, completion in drawn.items()],
            "concessions": [asdict(degradation) for degradation in state.degradations],
            "run": self._run_facts(),
            "random": plain_random_state(state.random or capture_random_state()),
            "rank_randoms": list(map(plain_random_state, state.rank_randoms)),
        }

    def _tensors(self) -> dict[str, Any]:
        setup = self._setup
        tensors = setup.committed.state_dict()
        if setup.config.sync_ref_model and setup.reference_model is not None:
            tensors["reference"] = setup.reference_model.state_dict()
        return tensors

    def _run_facts(self) -> dict[str, Any]:
        setup = self._setup
        first = [{"prompt": prompt_of({"prompt": None, **one})} for one in setup.source.take(0, 2)]
        return {**run_facts(setup.config, first, setup.source.prompts_per_epoch), **setup.models.run_facts()}


def _read_again(
    setup: TrainingSetup, trajectory: Trajectory, position: int, consumed: int, contexts: Mapping[str, Any] | None
) -> None:
    """Reads the prompts of a stored rollout again where their ids stand for what the device keeps of them."""
    reader = setup.models.reader
    reader.forget()
    if reader.kept() is None:
        return
    if setup.environments is not None and contexts is not None:
        reader.read_contexts_again(contexts)
        return
    read = {tuple(ids.tolist()) for ids in reader(setup.source.take(position, consumed)).ids}
    refusal.when(not {tuple(ids.tolist()) for ids in trajectory.conditions.rows()} <= read, "checkpoint/prompts")


def _save_through(hook: Callable[[Path], object], write: Callable[[Path], None], folder: Path) -> None:
    """Has a user's `save_model` write the weights; where it leaves them out, a resumed run needs them all the same."""
    hook(folder)
    if not any(folder.glob("*model*.safetensors*")):  # transformers' and PEFT's names, in one file or several
        write(folder)


def best_folder(state: RunState) -> Path | None:
    """Returns the checkpoint of the best step, or of the best that was saved; None, with a warning, where none was."""
    progress, advice = state.progress, "save whenever you evaluate, or set save_strategy='best'"
    best, step = progress.best_model_checkpoint, progress.best_global_step
    if best is None or not Path(best).is_dir():
        logger.warning("the best step, %s, was not saved, so the last weights stay; %s", step, advice)
        return None
    try:
        check_files(Path(best), read_manifest(Path(best)))
    except DamagedCheckpointError as error:
        logger.warning("the best step, %s, cannot be loaded, so the last weights stay: %s", step, error)
        return None
    if step is not None and Path(best).name != checkpoint_folder(Path(), step).name:
        told = "the best step, %s, was not saved, so that of %s is loaded, the best when it was; %s"
        logger.warning(told, step, Path(best).name, advice)
    return Path(best)
