"""A setup on fake weights, and its dry run: the longest rows of every phase, until plans are those of the run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from memsafe_rl.accounting import charge, in_phase, listen, weights_of
from memsafe_rl.checkpoint.weights import bytes_of, saved_weights
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.errors import MemoryBudgetError
from memsafe_rl.memory.budget import MemoryBudget, room_for_weights
from memsafe_rl.memory.runtime.explanation import changes
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.simulated.device import SimulatedMemory, open_simulations
from memsafe_rl.models.critic import CRITIC_ADAPTER
from memsafe_rl.models.host_weights import put_on
from memsafe_rl.models.language.base import ScoringPath, language_model_of
from memsafe_rl.models.language.causal_lm import autocast
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.models.loading import LoadedModel, read_config
from memsafe_rl.models.vision.processors import share_tower
from memsafe_rl.parallel.one_process import OneProcess, WholeWeights
from memsafe_rl.parallel.shards import check_draws_tokens
from memsafe_rl.preflight import refusal
from memsafe_rl.preflight.fake.device import nothing_differs
from memsafe_rl.preflight.fake.sharding import Gathering, Sharding, parts_of
from memsafe_rl.preflight.outcome import MemoryForecast, StepSeconds, compile_seconds, count_step
from memsafe_rl.preflight.own_rollouts import Trial, candidates, worst_trials
from memsafe_rl.preflight.speed import DeviceSpeed
from memsafe_rl.preflight.what_fits import Job
from memsafe_rl.preflight.worst_case import Drawing, Longest, Probe, evaluates, find_longest, longest_evaluation
from memsafe_rl.rewards.scoring import reward_model_name
from memsafe_rl.training.assembly.factory import Inputs, Machine, build_setup, machine_for, read_inputs
from memsafe_rl.training.assembly.factory import check_adapter as check_by_factory
from memsafe_rl.training.assembly.inputs import router_losses
from memsafe_rl.training.assembly.language_models import settle_numerics
from memsafe_rl.training.assembly.protocol import ModelFactory, TrainingRequest
from memsafe_rl.training.learner import Learner, make_committer
from memsafe_rl.training.optim.optimizer import Committer
from memsafe_rl.training.setup import TrainingSetup
from memsafe_rl.types import Component, Phase, RolloutPlan, UpdatePlan

_MOST_ROUNDS = 6
"""Rounds after which plans are taken as they are, should corrections still change them; most runs need one or two."""
_MICRO_BATCHES, _CUDA_MICRO_BATCHES = 2, 8
"""Micro-batches of a step that are tried; on CUDA so many that an allocator's blocks come and go as in the run."""
_ANY_PROMPT = 512
"""Tokens of the longest prompt where nobody says."""


@dataclass(frozen=True)
class SharedState:
    """How ranks share a run's state."""

    sharding: Sharding  # the way of dividing
    ranks: int  # how many ranks there are

    @property
    def parts(self) -> dict[Component, int]:
        """Ranks that share each component."""
        return parts_of(self.sharding, self.ranks)

    def gathering(self, setup: TrainingSetup) -> Gathering | None:
        """Returns what lays down weights that are gathered for a while; None where they are whole on every rank."""
        if Component.WEIGHTS not in self.parts:
            return None
        copies = [] if setup.reference_model is None else [setup.reference_model]
        return Gathering([setup.model, *copies], self.ranks, setup.rewards.models)

    def sentences(self) -> tuple[str, ...]:
        """Says what is forecast, where it is one of several ranks."""
        if self.ranks == 1:
            return ()
        one = f"this is what one of {self.ranks} ranks would hold"
        if self.sharding is Sharding.NONE:
            how = "each with whole weights; gradients are added up in place, and buffers of NCCL not counted"
            return (f"{one}, {how}",)
        own = "buckets of DeepSpeed (by default up to 500 million elements each)"
        theirs = ("this library's trainers do not run under it", f"{own} come on top")
        return (
            f"{one} under {self.sharding.value}",
            *(() if self.sharding is Sharding.FSDP else theirs),
            *(("rollouts gather the whole weights, as TRL's do",) if Component.WEIGHTS in self.parts else ()),
        )


@dataclass
class DryRun:
    """A run on fake weights, and what is known of it before its setup is built."""

    config: TrainerConfig
    device: str
    device_bytes: int
    shared: SharedState
    dataset: Any = None
    tokenizer: Any = None
    prompt_tokens: int | None = None
    policy: Any = None
    critic: Callable[..., Any] = lambda **_: None
    evaluation: Any = None
    reward_models: Callable[[], list[Any]] = list
    speed: DeviceSpeed | None = None
    about_prompts: str = ""
    _assumes_evaluation: bool = False
    _critic_checked: Checked | None = None  # of one that is a language model of its own
    _at_checks: list[dict[Component, int]] = field(default_factory=list)  # what is held at each check at start

    def __post_init__(self) -> None:
        refusal.when(self.dataset is not None and self.tokenizer is None, "processing_class")
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise refusal("prompt_tokens", tokens=self.prompt_tokens)

    def run(self, network: Any, memory: SimulatedMemory, *, reference: Callable[[], Any]) -> MemoryForecast:
        """Builds a setup of a named network and tries its longest rows; where they do not fit, says why."""
        checked, self._critic_checked = (
            _check_shallow(make(shallow=True), self.config, memory) for make in (network, self.critic)
        )
        if memory.live_bytes:  # some networks hold themselves, and the shallow one would count beside the whole
            gc.collect()
        memory.empty_cache()
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            model, frozen = network(), reference()
            share_tower(language_model_of(model), None if self.config.teacher_model_name_or_path else frozen)
            copied, room = frozen and language_model_of(frozen), room_for_weights(self._budget_bytes)
            on_host = put_on(language_model_of(model), torch.device("cpu"), room, copied)
        if on_host:  # loaded there, they were never on the device, nor did anything fill the gaps between them
            memory.ledger.compact()
            memory.forget_phases()
        return self.run_model(model, frozen, memory, checked)

    def run_model(
        self, model: Any, reference: Any, memory: SimulatedMemory, checked: Checked | None = None
    ) -> MemoryForecast:
        """Builds a setup of a network with fake weights, and tries its longest rows."""
        self.config.memory_budget = f"{self._budget_bytes}B"
        self.config.validate()
        setup, refusal, settled = self._build(model, reference, checked), None, None
        longest = self._longest(setup)
        gathering = self.shared.gathering(setup)
        if gathering is not None:
            listen(gathering)  # until the fake device is left
            if self.shared.sharding is Sharding.FSDP:
                check_draws_tokens(setup.adapter)
                setup = replace(setup, shards=WholeWeights(gathering.reducing))
        try:
            settled = _try_until_settled(setup, longest, memory, self._drawn_for_evaluation(setup, longest))
        except MemoryBudgetError as error:
            refusal = str(error)
        tracker, phases, state = setup.memory, memory.phase_peaks(), setup.memory.state()
        # The peak of the load is held against the moments of the checks at start.
        phases[Phase.LOAD] = max([phases[Phase.LOAD], *self._at_checks], key=lambda parts: sum(parts.values()))
        found = MemoryForecast(
            phases=phases,
            budget_bytes=tracker.budget_bytes,
            device_bytes=self.device_bytes,
            rollout_plan=tracker.rollout_plan,
            update_plan=tracker.update_plan,
            corrections=dict(state.corrections),
            job=_job(setup, longest, memory),
            refusal=refusal,
            ranks=self.config.world_size,
            sharding=self.shared.sharding.value,
            host_bytes=_host_bytes(setup, self.device),
            reserved=memory.reserved_peaks(),
            failures=state.failures,
        )
        return found if settled is None else replace(found, step_seconds=self._seconds(settled, longest))

    @property
    def _budget_bytes(self) -> int:
        budget = MemoryBudget.parse(self.config.memory_budget)
        return budget.resolve(total_bytes=self.device_bytes, free_bytes=self.device_bytes)

    def _build(self, model: Any, reference: Any, checked: Checked | None) -> TrainingSetup:
        """Builds the run's own setup, alone on its device, which informs nobody and rewards nothing."""
        config, dataset = self.config, self.dataset
        if dataset is None:
            dataset = Dataset.from_dict({"prompt": ["a"] * max(2, config.prompts_per_rollout)})
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            critic, reward_models = self.critic(), self.reward_models()
        if evaluates(config) and self.evaluation is None:
            self.evaluation = Dataset.from_dict({"prompt": ["a"] * config.rollout_rows})
            self._assumes_evaluation = True
        # Functions that pay nothing, under the names that the settings call them by.
        wanted = dict.fromkeys(reward for objective in config.objective_list for reward in objective.rewards)
        modelled = {reward_model_name(one) for one in reward_models}
        functions = [_no_reward(name) for name in wanted if name not in modelled]
        if not functions and not reward_models:
            functions = [_no_reward("_no_reward")]
        request = TrainingRequest(
            model,
            [*functions, *reward_models],
            train_dataset=dataset,
            eval_dataset=self.evaluation,
            processing_class=None if checked is None else self.tokenizer or _stand_in_tokenizer(),
            reward_processing_classes=[*(None for _ in functions), *(_stand_in_tokenizer() for _ in reward_models)],
            memory_policy=self.policy,
            critic=critic,
        )
        inputs = read_inputs(config, request)
        parts = self.shared.parts
        machine = machine_for(inputs, torch.device("cpu"), OneProcess(parts), kind=self.device)
        machine.holdings.optimizer_parts = parts.get(Component.OPTIMIZER, 1)

        def load(inputs: Inputs, machine: Machine) -> LoadedModel:  # noqa: ARG001
            return LoadedModel(model, reference, copied=not config.teacher_model_name_or_path)

        def check(config: TrainerConfig, models: ModelFactory, adapter: Any) -> None:
            found = self._critic_checked if adapter.model is critic else checked
            if found is not None:
                held = _loaded_before(adapter.model, critic, parts.get(Component.WEIGHTS, 1))
                _, passing = adapter.geometry.frozen_bytes(adapter.host_weights.resident, scores=False)
                held[Component.WEIGHTS] += passing  # blocks that come and go
                held[Component.OTHER] += found.extra_bytes + _narrow_bytes(adapter.model, config)
                self._at_checks.append(held)
            _take_over(found, config, models, adapter)

        return build_setup(inputs, machine, load=load, check=check)

    def _seconds(self, setup: TrainingSetup, longest: Longest) -> StepSeconds | None:
        """Estimates the seconds of a step, where the device's speed is known and this library decodes tokens."""
        if self.speed is None or setup.adapter.time_separable or not setup.adapter.decodes:
            return None
        speed, counted = self.speed, count_step(setup, longest)
        phases = {
            phase: sum(times * speed.seconds(work, phase) for times, work in pieces)
            for phase, pieces in counted.items()
        }
        known = self.dataset is not None or self.config.max_steps > 0
        compiling = compile_seconds(setup.adapter.geometry.layers) if self.config.compile_mode else 0.0
        return StepSeconds(phases, setup.planned_steps if known else None, speed, compiling)

    def _drawn_for_evaluation(self, setup: TrainingSetup, longest: Longest) -> Drawing | None:
        """Returns what evaluations draw: of a dataset its own longest prompt, else that of the run."""
        config = self.config
        if not evaluates(config):
            return None
        found = None
        if not self._assumes_evaluation and self.prompt_tokens is None and self.dataset is not None:
            found = longest_evaluation(setup, self.evaluation)
        if found is None:
            rows = config.rollout_rows if self._assumes_evaluation else len(self.evaluation)
            found = Drawing(longest, rows, config.eval_generations, Phase.EVALUATE)
        many = " or more" if self._assumes_evaluation else ""
        self.about_prompts += f"; evaluations draw {found.group_size} completion(s) of {found.prompts}{many} prompts"
        return found

    def _longest(self, setup: TrainingSetup) -> Longest:
        completion = self.config.max_completion_length
        if setup.adapter.time_separable:
            return Longest((0,), completion, "chains are alike")
        if self.prompt_tokens is None and self.dataset is not None:
            longest = find_longest(setup)
        else:
            room = setup.adapter.geometry.room_for_prompt(completion)
            most = _ANY_PROMPT if room is None else room
            if room is not None and (self.prompt_tokens or 0) > room:
                raise refusal("prompt_tokens/room", tokens=self.prompt_tokens, completion=completion, room=room)
            told = {
                "as given": self.prompt_tokens,
                "max_prompt_length": self.config.max_prompt_length,
                "assumed, for nothing says how long prompts are": max(1, min(_ANY_PROMPT, most)),
            }
            source, tokens = next((source, tokens) for source, tokens in told.items() if tokens is not None)
            longest = Longest((1,) * tokens, completion, source)
        self.about_prompts = f"the longest prompt has {len(longest.prompt)} tokens ({longest.source})"
        return longest


class Checked(NamedTuple):
    """What the check at start finds, as far as fake tensors tell: everything that runs agrees."""

    path: ScoringPath  # how rows are scored and decoded
    joins: bool  # whether prompts are kept once for their groups
    packs_prompts: bool  # whether completions can share one copy of their prompt
    # int, bytes that the check holds besides the weights; of a network that is checked in place of a deeper one, narrow
    # copies of the weights left out
    extra_bytes: int


_CHECKS: dict[Hashable, Checked] = {}
"""What checks of this process found: the forecasts of a search, or of one command, are often of one network."""


def _check_shallow(model: Any, settings: Any, memory: SimulatedMemory) -> Checked | None:
    """Checks a network with a block of each kind, if it is one; a deeper one holds little more while it is checked."""
    if model is None or isinstance(model, str):
        return None
    losses = router_losses(settings, read_config(model))
    weights = tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in model.named_parameters())
    kinds = tuple(type(module) for module in model.modules())
    attention = getattr(model.config, "_attn_implementation", None)
    about = model.config.to_json_string(use_diff=False), attention, losses, settings.autocast_dtype
    numerics = settings.batch_invariant, settings.compile_mode, settings.disable_dropout
    key = weights, kinds, about, numerics, memory.allocator is None
    if key not in _CHECKS:
        held = memory.live_bytes
        adapter = adapter_for(model, pad_token_id=0)
        settle_numerics(settings, adapter)
        if losses.off:
            adapter.hear_routers(losses)
        with in_phase(Phase.ROLLOUT), nothing_differs(), autocast(adapter.device, settings.autocast_dtype):
            check_adapter(adapter)
        extra = sum(memory.phase_peaks()[Phase.ROLLOUT].values()) - held - _narrow_bytes(model, settings)
        memory.forget_phases()
        _CHECKS[key] = Checked(adapter.path, adapter.joins, adapter.packs_prompts, extra)
    return _CHECKS[key]


def _narrow_bytes(model: Any, settings: Any) -> int:
    """Counts the narrow copies that autocast keeps of trained weights, not of experts', until a forward is over."""
    dtype, named = settings.autocast_dtype, model.named_parameters()
    matrices = [weight for name, weight in named if name.endswith("weight") and weight.dim() > 1]
    kept = [weight.numel() for weight in matrices if weight.requires_grad]
    return 0 if dtype is None else dtype.itemsize * sum(kept)


def _loaded_before(model: Any, critic: Any, ranks: int) -> dict[Component, int]:
    """Divides what is held when a network is checked, before ranks divide its weights and later critics are made."""
    (memory,) = open_simulations()[-1:]
    held = memory.live_by_component()
    within = [weight for name, weight in model.named_parameters() if f".{CRITIC_ADAPTER}." in name]
    beside = list(weights_of(critic)) if isinstance(critic, nn.Module) and critic is not model else []
    held[Component.WEIGHTS] *= ranks
    held[Component.WEIGHTS] -= sum(weight.nbytes for weight in (*within, *beside))
    return held


def _take_over(checked: Checked | None, config: TrainerConfig, models: ModelFactory, adapter: Any) -> None:
    """Takes over what the check of a shallow network found, and sizes the cache."""
    if checked is None:
        with nothing_differs():
            check_by_factory(config, models, adapter)
        return
    for other in (adapter, adapter.reference_adapter):
        if other is not None:
            other.path, other.joins, other.packs_prompts = checked.path, checked.joins, checked.packs_prompts
    if checked.path.decodes:
        with autocast(adapter.device, config.autocast_dtype), torch.no_grad():
            adapter.measure_cache(adapter.prefill([torch.ones(2, dtype=torch.int64)])[1])


def _try_until_settled(
    setup: TrainingSetup, longest: Longest, memory: SimulatedMemory, evaluation: Drawing | None = None
) -> TrainingSetup:
    """Tries what may hold most until the plans are those that a run would make of what it measures."""
    tracker, resident = setup.memory, setup.adapter.host_weights.resident
    tracker.enforce()
    try:
        committer = make_committer(setup, (None, None), setup.planned_steps)
        setup = replace(setup, committer=committer)
        Learner(setup).make_state()
        among, grows = candidates(setup, longest), not committer.optimizer.state
        trials, tried = worst_trials(setup, among, grows=grows), list[tuple[RolloutPlan, UpdatePlan]]()
        for _ in range(_MOST_ROUNDS):
            # A run begins with the weights where loading left them, before its first plan sends any to the host.
            weights = setup.adapter.host_weights
            setup.recovery.repeat(Stage.PREPARE, weights.place, resident, setup.adapter.device)
            weights.release()
            memory.forget_phases({Phase.LOAD})
            memory.empty_cache()  # of what plans given up since have left there
            Learner(setup).make_state()
            if grows:
                committer.optimizer.state.clear()  # the first step comes before it
            for trial in trials:  # what ranks gather is outside of every guard
                setup.recovery.once(Stage.PREPARE, _try, setup, committer, trial)
            if evaluation is not None:
                setup.recovery.once(Stage.PREPARE, Probe(setup, longest).evaluate, evaluation)
            tried.append((tracker.rollout_plan, tracker.update_plan))
            trials = worst_trials(setup, among, grows=grows)
            rollout = trials[-1].plans[0]
            update = next(trial.plans[1] for trial in reversed(trials) if trial.steps)
            # Two plans that are about equally good may take turns.
            if any(not changes(drawn, rollout) and not changes(learned, update) for drawn, learned in tried):
                break
        return setup
    finally:
        tracker.release()


def _try(setup: TrainingSetup, committer: Committer, trial: Trial) -> None:
    """Tries a rollout and its optimizer steps, each up to the moment at which weights move, and moves them."""
    probe = Probe(setup, trial.longest)
    probe.plan_rollout()
    if trial.draws:
        probe.draw(probe.drawing)
    trajectory = probe.rows()
    if trial.scores:
        probe.score(trajectory, trial.plans[1].logprob_tile)
    count = _CUDA_MICRO_BATCHES if setup.memory.state().device == "cuda" else _MICRO_BATCHES
    # The run's first step fixes its terms before it has a plan, others under that of the step before.
    is_first = trial.longest.rollout == 0 and setup.config.steps_per_rollout == 1
    for step in trial.steps:
        terms = probe.terms(trajectory, step.rows) if is_first else None
        probe.learner.plan(trajectory, step.rows)
        probe.update(trajectory, step.rows, count, terms)
        with setup.memory.phase(Phase.OPTIMIZER):
            setup.recovery.once(Stage.COMMIT, committer.commit)


def _job(setup: TrainingSetup, longest: Longest, memory: SimulatedMemory) -> Job:
    """Sums up what decides the bytes of a run."""
    config, optimizer_bytes = setup.config, setup.holdings.optimizer_bytes()[0]
    return Job(
        geometry=setup.adapter.geometry,
        prompts=-(-config.prompts_per_rollout // config.world_size),
        group_size=config.num_generations,
        prompt_tokens=len(longest.prompt),
        completion_tokens=longest.completion_tokens,
        step_share=config.step_rows / config.rollout_rows,
        scored=config.has_reference,
        packs_prompts=setup.adapter.packs_prompts,
        held_bytes=memory.live_bytes,
        optimizer_bytes=optimizer_bytes,
        gradients_aside=setup.combiner.gradients_aside,
        whole_gradient_bytes=setup.whole_gradient_bytes,
    )


def _host_bytes(setup: TrainingSetup, device: str) -> int:
    """Returns the bytes of the copy from which a checkpoint is written in the background, the rollout's left out."""
    config = setup.config
    copies = device == "cuda" if config.save_in_background is None else config.save_in_background
    if config.save_strategy == "no" or not copies:
        return 0
    weights = sum(map(bytes_of, (saved_weights(setup.model), *(one.weights() for one in setup.advantages.critics))))
    return weights + (0 if config.save_only_model else setup.holdings.optimizer_bytes()[0])


def _stand_in_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of three tokens, for a run whose prompts only have a length."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _no_reward(name: str) -> Any:
    def pay_nothing(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    pay_nothing.__name__ = name
    return pay_nothing
