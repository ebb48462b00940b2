"""Worst case first: one attempt at the longest lengths before the first step, so that a run that cannot fit says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor

from memsafe_rl.accounting import host_memory, only_bytes_matter
from memsafe_rl.data.prompts import Prompts, prompt_batches, prompt_of
from memsafe_rl.errors import MemoryBudgetError
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state, under
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.models.adapter import Context, DecodeState, ModelAdapter
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.ops.sampling import noise_slots
from memsafe_rl.preflight import unusable
from memsafe_rl.preflight.fake.device import host_numbers
from memsafe_rl.preflight.synthetic import chains, embedded_prompts, lay_down
from memsafe_rl.preflight.worst_rows import later_samples, steps_of, tried_places, widest_slices, worst_step
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.rollout.native.sequences import Candidate, admit, noise_steps
from memsafe_rl.rollout.scoring import score_all, value_all
from memsafe_rl.training.algorithms.objectives import Controllers
from memsafe_rl.training.collector import Collector, by_reward_rows
from memsafe_rl.training.gradient import StepTerms
from memsafe_rl.training.learner import Learner, counting_experts
from memsafe_rl.training.loop import TrainingLoop
from memsafe_rl.training.samples import Rollout
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import (
    KV_BLOCK_SLOTS,
    Completion,
    Phase,
    Ragged,
    RolloutPlan,
    RolloutWork,
    SamplingSettings,
    SequenceKey,
    Trajectory,
    UpdatePlan,
    whole_blocks,
)
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)

_TOKENIZED = 8192
"""Prompts that are tokenized in search of the longest one; of more, those with the most characters."""
_STREAM_SAMPLE = 512
"""Examples of a stream that are read in search of its longest prompt."""
_PROBED_MICRO_BATCHES = 2
"""From the second one on, the gradients of earlier ones are held too; later ones hold no more."""
_LEARNT = ("failure", "retry", "fallback")
"""Events of a dry run that are true of the run's memory too."""

Samples = tuple[list[Tensor], list[list[SequenceKey]]]
"""Prompts, and for each the keys of its samples."""


@dataclass(frozen=True)
class Longest:
    """The longest row a run may meet."""

    prompt: tuple[int, ...]  # token ids of the longest prompt
    completion_tokens: int  # longest completion, in tokens
    source: str  # how the prompt's length is known, for people
    # lengths of the longest prompts, as many as a rollout has, the longest first; empty where only that is known
    longest_prompts: tuple[int, ...] = ()
    rollout: int | None = None  # index of the run's rollout whose prompts these are, in its order; None: of any

    @property
    def row_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + self.completion_tokens

    def prompts(self, count: int) -> tuple[Tensor, ...]:
        """Returns the longest prompts that a rollout can have."""
        known = self.longest_prompts[:count]
        guessed = (max(1, len(self.prompt) - place % 2) for place in range(count))
        return tuple(self.ids(tokens) for tokens in (known if len(known) == count else guessed))

    def ids(self, tokens: int) -> Tensor:
        """Returns so many token ids: the prompt's, again and again."""
        return torch.tensor(self.cut(tokens), dtype=torch.int64)

    def of_rollout(self, rollout: int, lengths: tuple[int, ...]) -> Longest:
        """Returns the longest row of one of the run's rollouts, of which the prompts' lengths are known."""
        return replace(self, prompt=self.cut(max(lengths)), longest_prompts=lengths, rollout=rollout)

    def cut(self, tokens: int) -> tuple[int, ...]:
        """Returns so many token ids as plain numbers."""
        return (self.prompt * -(-tokens // len(self.prompt)))[:tokens]


@dataclass(frozen=True)
class Drawing:
    """What a rollout or an evaluation draws at most."""

    longest: Longest  # the longest row
    prompts: int  # unique prompts
    group_size: int  # completions per prompt
    phase: Phase  # rollout or evaluate


def check_worst_case(loop: TrainingLoop) -> dict[str, int]:
    """Tries the longest prompt and completion once, to the peak of every phase; later plans learn from what failed."""
    while True:
        outcome = _try(loop)
        if not isinstance(outcome, MemoryBudgetError):
            return outcome
        degradation = loop.degradation_after(outcome)
        if degradation is None:
            raise outcome
        loop.degrade(degradation)


def _try(loop: TrainingLoop) -> dict[str, int] | MemoryBudgetError:
    """Tries once; returns the peaks, or the error with what was tried in it."""
    setup, longest, started = loop.setup, find_longest(loop.setup), time.perf_counter()
    trial = setup.dry(step=loop.state.step)
    memory, error = trial.memory, None
    try:
        with untouched(setup):
            Probe(trial, longest).try_all(longest_evaluation(setup, loop.eval_dataset))
    except MemoryBudgetError as caught:
        error = MemoryBudgetError(
            f"The worst case does not fit: a prompt of {len(longest.prompt)} tokens ({longest.source}) with a "
            f"completion of {longest.completion_tokens} tokens (max_completion_length), tried before the first step. "
            f"{caught}",
            failure=caught.failure,
            held_bytes=caught.held_bytes,
        )
    learnt = [event for event in memory.events if event["event"] in _LEARNT]
    if learnt:  # else plans stay as without the check
        setup.memory.load_state_dict(memory.state_dict())
    for event in learnt:
        setup.memory.record(**{**event, "during": "probe"})
    if error is not None:
        return error
    peaks = {str(phase): peak for phase, peak in memory.phase_peaks.items()}
    setup.memory.record(
        "probe",
        prompt_tokens=len(longest.prompt),
        completion_tokens=longest.completion_tokens,
        source=longest.source,
        rows_in_flight=memory.rollout_plan.rows_in_flight,
        micro_batch_tokens=memory.update_plan.micro_batch_tokens,
        peak_bytes=peaks,
        seconds=time.perf_counter() - started,
    )
    # Said as a warning, which is what is shown by default: whoever asks for the check wants its answer.
    logger.warning("%s", _sentence(longest, peaks, setup.memory.budget_bytes))
    return peaks


@contextmanager
def untouched(setup: TrainingSetup) -> Iterator[None]:
    """Puts everything that a step without a commit may move back as it was: gradients, modes, random state."""
    repeat, reader = setup.recovery.repeat, setup.models.reader
    state, kept = repeat(Stage.PREPARE, capture_random_state), reader.kept()
    with eval_mode(setup.model):
        try:
            yield
        finally:
            setup.committed.drop_gradients()
            reader.forget(kept)
            repeat(Stage.PREPARE, setup.committed.unpark)
            set_random_state(state)
            setup.memory.meter.reset_peak()


def find_longest(setup: TrainingSetup, dataset: Any = None) -> Longest:
    """Finds a run's longest row by its prompts; of a stream by `max_prompt_length` or its first 512 examples."""
    reader, config = setup.models.reader, setup.config
    dataset, limit = dataset or setup.dataset, reader.limit
    is_whole, truncated = isinstance(dataset, Dataset), config.overlong_prompts == "truncate"
    if is_whole:
        dataset, source = _longest_first(dataset)
        batches: Iterable[Any] = prompt_batches(dataset, reader.columns)
    else:
        batches = [[prompt_of(example) for example in setup.source.take(0, _STREAM_SAMPLE)]]
        source = f"the longest of the stream's first {_STREAM_SAMPLE}"
    rows = (
        ids if limit is None else ids[-limit:]
        for batch in batches
        for ids in reader.ids(batch)
        if truncated or limit is None or len(ids) <= limit
    )
    found = nlargest(config.prompts_per_rollout, islice(rows, _TOKENIZED) if is_whole else rows, key=len)
    unusable.when(not found, "worst_case", limit=limit)
    known = tuple(map(len, found)) if is_whole else ()
    longest, given = Longest(tuple(found[0]), config.max_completion_length, source, known), config.max_prompt_length
    if is_whole or given is None:
        return longest
    return replace(longest, prompt=longest.cut(given), source="max_prompt_length")


def longest_evaluation(setup: TrainingSetup, dataset: Any) -> Drawing | None:
    """Finds what the run's evaluations draw at most; None where the run does not evaluate."""
    config = setup.config
    if dataset is None or not evaluates(config):
        return None
    sets = list(_sets_of(dataset))
    if setup.adapter.time_separable:
        longest = Longest((0,), config.max_completion_length, "chains are alike")
    else:
        longest = max([find_longest(setup, one) for one in sets if len(one)], key=lambda one: len(one.prompt))
    return Drawing(longest, max(map(len, sets)), config.eval_generations, Phase.EVALUATE)


def evaluates(config: Any) -> bool:
    """Returns whether a run evaluates by itself."""
    return config.eval_strategy != "no" or bool(config.eval_on_start)


def _sets_of(given: Any) -> Iterator[Any]:
    """Walks the evaluation sets of a run, which may stand in mappings."""
    if not isinstance(given, Mapping):
        yield given
        return
    for part in given.values():
        yield from _sets_of(part)


def _longest_first(dataset: Dataset) -> tuple[Dataset, str]:
    """Sorts a dataset by characters where it has more rows than are tokenized, and says what is then looked at."""
    if len(dataset) <= _TOKENIZED:
        return dataset, "the longest of train_dataset"
    sizes = [len(str(prompt)) for prompt in dataset["prompt"]]
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    return dataset.select(order), f"of the {_TOKENIZED:,} longest texts of train_dataset"


class Probe:
    """The longest rows of a setup, tried phase by phase up to the moment at which weights would move."""

    def __init__(self, setup: TrainingSetup, longest: Longest) -> None:
        config, self.setup, self.longest = setup.config, setup, longest
        self.drawing = Drawing(longest, config.prompts_per_rollout, config.num_generations, Phase.ROLLOUT)
        self.learner, self._collector, self._adapter = Learner(setup), Collector(setup), setup.adapter

    def try_all(self, evaluation: Drawing | None = None) -> None:
        """Tries every phase in the order of a step."""
        if self.setup.draw_rollout is None:
            self.plan_rollout()
        with self.setup.gathered():
            self.draw(self.drawing)
        trajectory = self.rows()
        rows = worst_step(self.setup, trajectory, self.longest.rollout)
        self.learner.plan(trajectory, rows)
        self.score(trajectory, self.setup.memory.update_plan.logprob_tile)
        if evaluation is not None:  # scored in an update's tiles, and before there are gradients
            self.evaluate(evaluation)
        self.update(trajectory, rows, _PROBED_MICRO_BATCHES)

    def rows(self, drawing: Drawing | None = None) -> Trajectory:
        """Lays down the longest rows of an evaluation, or of a whole rollout."""
        setup, config, drawing = self.setup, self.setup.config, drawing or self.drawing
        longest, count, group = drawing.longest, drawing.prompts, drawing.group_size
        objectives = len(config.objective_list)
        needs_old = config.updates_per_epoch > 1 or config.num_iterations > 1
        if self._adapter.time_separable:
            laid = chains(cast(Any, self._adapter), count, group, objectives, needs_old=needs_old)
            return setup.advantages.placeholder(laid, laid.sampling_logprobs)
        completions = [longest.ids(longest.completion_tokens)] * (count * group)
        with host_memory():
            trajectory = lay_down(longest.prompts(count), completions, group, objectives)
            unsure = Ragged(torch.full((len(trajectory.actions.flat),), -1.0), trajectory.actions.lengths)
        corrected = self._collector.corrects_sampler
        needs_old = needs_old or corrected
        laid = replace(
            self._collector.scorer.with_room_for_sources(trajectory),
            old_logprobs=unsure if needs_old else None,
            has_old=(needs_old,) * len(trajectory),
            ref_logprobs=unsure if config.has_reference or config.teacher_model_server_url else None,
            importance_weights=unsure if corrected else None,
        )
        return setup.advantages.placeholder(laid, unsure)

    @property
    def work(self) -> RolloutWork:
        """The shape of a rollout of the longest prompts."""
        return self._collector.work(self._prompts_of(self.drawing), self.drawing.group_size)

    def plan_rollout(self) -> None:
        """Asks for the plan of a rollout, beside what is kept of its prompts, and adopts it."""
        self.setup.models.reader.forget()
        self._read(self.drawing)
        self._collector.plan(self._prompts_of(self.drawing))

    def wave(self) -> tuple[Samples, int, int]:
        """Returns what the first wave of a rollout draws, how many rows it has, and how many the rollout has."""
        prompts, rows = self._samples_of(self.drawing)
        first = rows[: self._together(prompts.ids, rows, self.setup.memory.rollout_plan)]
        return _samples(prompts.ids, first), len(first), len(rows)

    def draw(self, drawing: Drawing) -> None:
        """Tries drawing the longest rows, and the largest pass of every reward model over as many tokens."""
        setup = self.setup
        if setup.draw_rollout is None:
            self._try_wave(drawing)
        if not setup.rewards.models or self._adapter.time_separable:
            return
        prompts, rows = self._samples_of(drawing)
        work = self._collector.work(prompts, drawing.group_size)
        attempt = self._collector.scorer.attempt(Stage.REWARD_PASS, work, nullcontext)
        with setup.memory.phase(Phase.REWARD if drawing.phase is Phase.ROLLOUT else drawing.phase):
            setup.rewards.rehearse(drawing.longest.row_tokens, len(rows), by_reward_rows(attempt))

    def evaluate(self, drawing: Drawing) -> None:
        """Tries drawing, rewarding and scoring an evaluation's longest rows, beside what is kept of its prompts."""
        setup, reader, adapter = self.setup, self.setup.models.reader, self._adapter
        kept, tile = reader.kept(), setup.memory.update_plan.logprob_tile
        with setup.gathered():
            self._read(drawing)
            self.draw(drawing)
            if self._collector.evaluates_loss:
                # More rows than a slice has, of as little as their completions, tell no more.
                rows = 1 + setup.memory.rollout_plan.score_tokens // drawing.longest.completion_tokens
                most = setup.config.world_size * -(-rows // drawing.group_size)
                laid = self.rows(replace(drawing, prompts=min(drawing.prompts, most)))
                everyone = range(0, len(laid), setup.config.world_size)
                self._score_unrewarded(laid, [], tile)
                self._mark(laid, [everyone], tile)
                self._score(laid, adapter, [everyone], phase=Phase.EVALUATE, tile=tile, with_entropy=True)
        reader.forget(kept)

    def _read(self, drawing: Drawing) -> None:
        """Keeps of the longest prompts what reading them keeps on the device."""
        setup, reader = self.setup, self.setup.models.reader
        if reader.kept() is not None:
            with setup.memory.phase(drawing.phase, compared=False), host_numbers():
                prompts = drawing.longest.prompts(drawing.prompts)
                setup.recovery.repeat(Stage.STORE, reader.rehearse, prompts, host_numbers)

    def _try_wave(self, drawing: Drawing) -> None:
        """Tries a wave of the longest prompts, at its first moment and at its last, under the rollout's plan."""
        setup, longest, adapter, sampling = self.setup, drawing.longest, self._adapter, self.setup.sampling
        prompts, rows = self._samples_of(drawing)
        ids, work, episodes = prompts.ids, self._collector.work(prompts, drawing.group_size), self._collector.episodes
        attempt = self._collector.scorer.attempt(Stage.DRAW, work)
        if adapter.time_separable:
            with setup.memory.phase(drawing.phase):
                setup.engine.generate(*_samples(ids, rows), sampling, attempt)
            return
        # An end that no row reaches, where a least length makes a copy of the logits to forbid it; else none at all.
        delayed = bool(sampling.eos_token_ids) and max(sampling.min_new_tokens, sampling.min_length) > 0
        ends = (adapter.geometry.vocab_size - 1,) if delayed else ()
        least = min(2, sampling.max_new_tokens) if delayed else 0
        two_tokens = replace(
            sampling, max_step_tokens=2, eos_token_ids=ends, min_new_tokens=least, min_length=0, stops=None
        )

        part, most = setup.config.partial_rollout_tokens, longest.completion_tokens
        begun = 0  # tokens of rows that lack their last part
        if part is not None and drawing.phase is Phase.ROLLOUT:
            begun = min((most - 1) // part * part, most - 2)

        def from_first_to_last(plan: RolloutPlan) -> None:
            first = rows[: self._together(ids, rows, plan)]
            context = longest.ids(longest.row_tokens - 2)
            several = episodes.several_turns and longest.completion_tokens > 2
            ending = _AtTheEnd(adapter, longest, sampling, plan.prefill_tokens if several and plan.kept_kv_bytes else 0)
            # The cache that transformers' generate keeps, where that decodes, is out of reach.
            tried = cast(ModelAdapter, ending) if adapter.decodes else adapter
            generate(tried, *_samples(ids, first), two_tokens, under(plan))
            if not ending.stretched and longest.completion_tokens > 2:  # a cache that only grows by reading
                alike = [(0, sample) for sample in range(len(first))]
                generate(adapter, *_samples([context], alike), replace(two_tokens, max_new_tokens=2), under(plan))
            if begun > 0:
                for ended in {0, 1, drawing.group_size - 1}:  # fewer rows of a group are read in longer chunks
                    _read_begun(adapter, _samples(ids, first[: max(1, len(first) - ended)]), begun, two_tokens, plan)
            if several and adapter.decodes and plan.kept_kv_bytes < episodes.most_kept_bytes(work):
                _read_again(adapter, ids, first, longest, two_tokens, plan)

        with setup.memory.phase(drawing.phase):
            attempt(from_first_to_last)

    def _together(self, ids: Sequence[Tensor], rows: Sequence[tuple[int, int]], plan: RolloutPlan) -> int:
        """Counts the (prompt, sample) pairs that are decoded together in the end: prompts are read a few at a time."""
        most, geometry, count = self.setup.sampling.max_new_tokens, self._adapter.geometry, 0
        waiting = [Candidate(prompt, len(ids[prompt]), 0, most) for prompt, _ in rows]
        while True:
            read = {one.prompt: geometry.prompt_kv_bytes(one.prompt_tokens) for one in waiting[:count]}
            more = admit(waiting[count:], plan, geometry, rows=count, prompt_bytes=sum(read.values()))
            count += more
            if not more or not self._adapter.joins:
                return count

    def _samples_of(self, drawing: Drawing) -> tuple[Prompts, list[tuple[int, int]]]:
        """Returns the longest prompts there can be, and the most (prompt, sample) pairs of them that one rank has."""
        prompts, group = self._prompts_of(drawing), drawing.group_size
        count = -(-len(prompts.ids) * group // self.setup.config.world_size)
        return prompts, [divmod(row, group) for row in range(count)]

    def _prompts_of(self, drawing: Drawing) -> Prompts:
        """Returns the longest prompts there can be; in an evaluation, only as many as are in flight at once."""
        count, longest, setup = drawing.prompts, drawing.longest, self.setup
        if drawing.phase is not Phase.ROLLOUT:
            count = min(count, setup.config.world_size * max(setup.memory.rollout_plan.rows_in_flight, 1))
        if self._adapter.time_separable:
            return embedded_prompts(cast(Any, self._adapter), count)
        # Rows that are decoded in waves, each with its own prompt, are forecast as padded ones, whatever their lengths.
        known = longest if self._adapter.joins else replace(longest, longest_prompts=())
        return Prompts((), (), known.prompts(count))

    def score(self, trajectory: Trajectory, tile: int) -> None:
        """Scores the slices that may hold most, of every pass before an update, with the tile of the one before."""
        setup, rollout, adapter = self.setup, self.longest.rollout, self._adapter
        first = UpdatePlan.logprob_tile  # before there is a plan
        before = max(tile, first) if rollout is None else tile if rollout else first
        self._score_unrewarded(trajectory, later_samples(setup, rollout), before)
        steps = [step.rows for step in steps_of(setup, trajectory, rollout)]
        # All steps of a rollout but the first are scored after the update of another one.
        for sets, own in [(steps[:1], before), (steps[1:], tile)] if rollout == 0 else [(steps, before)]:
            self._mark(trajectory, sets, own)
            if adapter.routers is not None and sets:
                self._score(trajectory, adapter, sets, partial(counting_experts, setup, []), tile=own)
        everyone = range(0, len(trajectory), setup.config.world_size)
        for critic in setup.advantages.critics:
            with setup.memory.phase(Phase.SCORE), critic.running() as network, setup.gathered(network.model):
                attempt = self._collector.scorer.attempt(Stage.SCORE, adapter.work(trajectory, everyone))
                columns, budget = setup.advantages.needs.columns, setup.memory.rollout_plan.score_tokens
                for rows, packed in widest_slices(setup, trajectory, [everyone], budget):
                    value_all(network, trajectory, rows, critic.head, attempt=attempt, columns=columns, packed=packed)

    def _score_unrewarded(self, trajectory: Trajectory, later: Sequence[Sequence[int]], tile: int) -> None:
        """Scores what needs no rewards, under the reference and, rows of later steps or all, under the model."""
        config, needs, adapter = self.setup.config, self.setup.advantages.needs, self._adapter
        scored, everyone = partial(self._score, trajectory, tile=tile), range(0, len(trajectory), config.world_size)
        if config.has_reference and not adapter.closed_form_kl:
            ids = None
            if likeliest := needs.likeliest:
                likeliest = min(likeliest, adapter.geometry.vocab_size)
                scored(adapter, [everyone], choices=likeliest + 1)
                sizes = zip(everyone, trajectory.action_lengths(everyone), strict=True)
                with host_memory():
                    ids = {row: torch.zeros(size, likeliest, dtype=torch.int64) for row, size in sizes}
            with adapter.reference() as reference:
                scored(reference, [everyone], choices=ids)
        if self._collector.corrects_sampler or needs.logprobs:  # which gives those of later steps too
            later = [everyone]
        if later:
            scored(adapter, later, with_kl=needs.with_kl, columns=needs.columns)

    def _mark(self, trajectory: Trajectory, sets: Sequence[Sequence[int]], tile: int) -> None:
        """Scores each row as if alone, where some of its tokens are marked by that."""
        config = self.setup.config
        if config.marks_tokens and sets:
            wanted = config.top_entropy_quantile < 1.0
            self._score(trajectory, self._adapter, sets, self.setup.row_by_row, tile=tile, with_entropy=wanted)

    def _score(
        self,
        trajectory: Trajectory,
        adapter: ModelAdapter,
        sets: Sequence[Sequence[int]],
        context: Context | None = None,
        *,
        phase: Phase = Phase.SCORE,
        **wanted: Any,
    ) -> None:
        """Scores, of rows that are scored together, the slices that may hold most."""
        setup, scorer = self.setup, self._collector.scorer
        wanted["temperature"] = setup.config.temperature
        with setup.gathered(adapter.model), setup.memory.phase(phase):
            for rows, packed in widest_slices(setup, trajectory, sets, setup.memory.rollout_plan.score_tokens):
                attempt = scorer.attempt(Stage.SCORE, setup.adapter.work(trajectory, rows), context)
                score_all(adapter, trajectory, rows, attempt=attempt, packed=packed, **wanted)

    def rollout(self, trajectory: Trajectory) -> Rollout:
        """Returns rows as a rollout of the run's own engine."""
        return Rollout(trajectory, consumed=0, external=self._collector.corrects_sampler)

    def terms(self, trajectory: Trajectory, rows: Sequence[int]) -> StepTerms:
        """Fixes an optimizer step's terms, scored in tiles of the plan that is in force."""
        return self.learner.terms(self.rollout(trajectory), rows, Controllers.at_start(self.setup.config))

    def update(
        self, trajectory: Trajectory, rows: Sequence[int], micro_batches: int, terms: StepTerms | None = None
    ) -> None:
        """Tries the micro-batches of an optimizer step that may hold most, up to the point where weights would move."""
        setup, learner, rollout = self.setup, self.learner, self.rollout(trajectory)
        places = tried_places(learner.work(trajectory, rows), setup.memory.update_plan, micro_batches)
        tried = [rows[place] for place in places]
        terms = terms or self.terms(trajectory, rows)  # of all, which are scored in other slices than some would be
        committer, repeat = setup.committed, setup.recovery.repeat
        with setup.memory.phase(Phase.UPDATE):
            learner.gradient(rollout, tried, terms, step=setup.memory.step)
            repeat(Stage.MEASURE, committer.measure)
        with setup.memory.phase(Phase.OPTIMIZER):
            repeat(Stage.COMMIT, committer.unpark)
            repeat(Stage.COMMIT, committer.prepare_commit)


def _samples(prompts: Sequence[Tensor], rows: Sequence[tuple[int, int]]) -> Samples:
    """Returns the prompts of (prompt, sample) pairs, and for each prompt the keys of its samples."""
    wanted = list(dict.fromkeys(prompt for prompt, _ in rows))
    keys = [[SequenceKey(0, 0, *row) for row in rows if row[0] == prompt] for prompt in wanted]
    return [prompts[prompt] for prompt in wanted], keys


def _read_again(
    adapter: ModelAdapter,
    ids: Sequence[Tensor],
    rows: Sequence[tuple[int, int]],
    longest: Longest,
    settings: SamplingSettings,
    plan: RolloutPlan,
) -> None:
    """Tries the moment at which the last contexts of a turn are read again, beside all others."""
    context = longest.ids(longest.row_tokens - 2)
    together = min(len(rows), max(1, plan.prefill_tokens // len(context)))
    if adapter.joins and len(rows) > together:
        others = _AtTheEnd(adapter, longest, settings, plan.prefill_tokens, [context] * together)
        generate(cast(ModelAdapter, others), *_samples(ids, rows[together:]), settings, under(plan))
    else:
        keys = [[SequenceKey(0, 0, *row)] for row in rows]
        generate(adapter, [context] * len(rows), keys, replace(settings, max_new_tokens=2), under(plan))


def _read_begun(
    adapter: ModelAdapter, samples: Samples, drawn: int, settings: SamplingSettings, plan: RolloutPlan
) -> None:
    """Tries resuming rows that have drawn so many tokens, each of which is read again."""
    with host_memory():
        ids, logprobs = torch.zeros(drawn, dtype=torch.int64), torch.zeros(drawn)
    begun = Completion(ids, logprobs, logprobs, finished=False)
    generate(adapter, *samples, settings, under(plan), begun=[[begun] * len(own) for own in samples[1]])


@dataclass(eq=False)
class _AtTheEnd:
    """An adapter whose first decoding step is a rollout's last: its cache, if it decodes, grows a last time before."""

    _adapter: ModelAdapter
    _longest: Longest
    _settings: SamplingSettings
    _reads: int = 0
    _anew: Sequence[Tensor] = ()
    stretched: bool = False

    def __getattr__(self, name: str) -> Any:
        """Returns everything else as the adapter does."""
        return getattr(self._adapter, name)

    def prefill(self, prompts: Sequence[Tensor], chunk_tokens: int | None = None) -> tuple[Tensor, DecodeState]:
        """Reads of a long prompt the chunks that tell what all hold, on a real device too."""
        with only_bytes_matter():
            return self._adapter.prefill(prompts, chunk_tokens)

    def decode_step(self, state: DecodeState, tokens_B: Tensor) -> Tensor:
        """Appends one token to every row of the widened cache."""
        drawn, slots = self._longest.completion_tokens - 2, self._longest.row_tokens - 2
        told = 0 if self._anew else min(self._reads // state.rows, slots // 2)
        more, filled = max(0, drawn - told - bool(self._reads)), whole_blocks(drawn + 1) - KV_BLOCK_SLOTS
        ahead, vocab = None, self._adapter.geometry.vocab_size
        if self._settings.temperature > 0 and drawn > 0:
            shape = noise_steps(state.rows, vocab), state.rows, noise_slots(vocab)
            ahead = torch.empty(*shape, dtype=torch.float64, device=self._adapter.device)
        if filled > 0 and not self._reads and self._grows_beyond_logits(filled):
            state.stretch(filled - 1)
            self._adapter.decode_step(state, tokens_B)
            more -= filled
        self.stretched = state.stretch(more)
        if self._reads and self.stretched and self._adapter.joins:
            self._adapter.decode_step(state, tokens_B)  # makes room for all that the cache now stands for
            if self._anew:
                self.prefill(self._anew, self._reads)
            elif told:
                self._adapter.extend(state, [torch.zeros(told, dtype=torch.int64)] * state.rows, self._reads)
        logits_BV = self._adapter.decode_step(state, tokens_B)
        del ahead
        return logits_BV

    def _grows_beyond_logits(self, slots: int) -> bool:
        """Whether a layer's old store, beside the new ones, may hold more than the logits of the step that follows."""
        geometry = self._adapter.geometry
        store_bytes = replace(geometry, windows=(None,)).kv_bytes(slots) // 2
        return self._adapter.joins and store_bytes > geometry.vocab_size * geometry.compute_bytes


def _sentence(longest: Longest, peaks: Mapping[str, int], budget_bytes: int) -> str:
    told = ", ".join(f"{phase} {format_bytes(peak)}" for phase, peak in peaks.items())
    peak = max(peaks.values())
    verdict = "fits" if peak <= budget_bytes else "runs, but holds more than the budget"
    return (
        f"the worst case {verdict}: prompt {len(longest.prompt)} ({longest.source}) + completion "
        f"{longest.completion_tokens} tokens, peak {format_bytes(peak)} of a budget of {format_bytes(budget_bytes)} "
        f"({told})"
    )
