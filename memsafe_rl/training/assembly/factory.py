"""The one place that builds a `TrainingSetup`: first all that is known before a weight is loaded, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from accelerate.utils import set_seed
from peft import PeftModel
from torch import nn

from memsafe_rl.accounting import weights_of
from memsafe_rl.checkpoint.weights import refuse_unsaved
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.grpo import GRPOConfig, RLOOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.data.environments import ENVIRONMENTS, EnvironmentPool, with_prompts
from memsafe_rl.data.prompts import PromptReader, PromptSource, holds_text_alone
from memsafe_rl.errors import MemoryBudgetError
from memsafe_rl.memory.budget import MemoryBudget, room_for_weights
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.meters import meter_for
from memsafe_rl.memory.runtime.recovery import Recovery, prepare_device
from memsafe_rl.memory.runtime.stages import Stage
from memsafe_rl.memory.runtime.tracker import Holdings, MemoryTracker
from memsafe_rl.models.language.causal_lm import autocast
from memsafe_rl.models.loading import LoadedModel
from memsafe_rl.parallel.replicas import Parallel, Replicas, connect, open_accelerator, sharing_failures
from memsafe_rl.parallel.shards import ShardedWeights, check_critic_dividable, check_dividable, save_whole_only
from memsafe_rl.rewards.calls import TimeoutPolicy
from memsafe_rl.rewards.runner import RewardRunner
from memsafe_rl.rollout.multi_turn.roles import ModelRoles
from memsafe_rl.training import refusal
from memsafe_rl.training.algorithms.advantages import (
    Advantages,
    CriticAdvantages,
    GroupAdvantages,
    distilled_advantages,
    leave_one_out_advantages,
    token_baseline_advantages,
    turn_advantages,
)
from memsafe_rl.training.algorithms.objectives import Combiner
from memsafe_rl.training.assembly.inputs import (
    check_sampler,
    check_together,
    chosen_policy,
    engine_for,
    evaluation_prompts,
    prompt_dataset,
    training_prompts,
)
from memsafe_rl.training.assembly.language_models import bound_prompts
from memsafe_rl.training.assembly.protocol import MODEL_FAMILIES, ModelFactory, TrainingRequest
from memsafe_rl.training.assembly.rank_check import begin_alike
from memsafe_rl.training.gradient import pass_once
from memsafe_rl.training.learner import Learner, make_committer
from memsafe_rl.training.optim.optimizer import trained_names
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.training.setup import DrawRollout, TrainingSetup
from memsafe_rl.types import Phase
from memsafe_rl.units import format_bytes

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f"{__package__}.{_module.name}")  # a file that registers a family of models makes it known


@dataclass(frozen=True)
class Inputs:
    """A request that was checked, as far as that goes before any weight is loaded."""

    request: TrainingRequest  # what the user passed
    config: TrainerConfig  # the run's settings
    models: ModelFactory  # reads prompts, loads and shows what this kind of model needs
    environments: EnvironmentPool | None  # where episodes are played; None where a completion is one turn
    train_dataset: Any  # the prompts, checked
    source: PromptSource  # the prompts by position
    rewards: RewardRunner  # the reward functions, their models not on the device yet
    memory_policy: MemoryPolicy  # makes the plans
    eval_dataset: Any = None  # prompts for evaluation, checked

    def for_training(self, dataset: Any) -> tuple[Any, PromptSource]:
        """Checks other prompts for training, and returns them with what reads them by position."""
        dataset, source = _for_training(self.config, self.models.reader, self.environments, dataset)
        check_together(self.config, dataset, self.rewards, self.request.rollout_func, self.environments)
        return dataset, source

    def for_evaluation(self, dataset: Any) -> Any:
        """Checks prompts for evaluation, and returns those that are used."""
        if self.environments is not None:
            dataset = with_prompts(self.config, dataset, self.environments, evaluates=True)
        return evaluation_prompts(self.config, dataset, self.models.reader, self.rewards)


@dataclass(frozen=True)
class Machine:
    """Where a setup is built."""

    device: torch.device  # where the weights go
    parallel: Parallel  # the processes of the run
    recovery: Recovery  # repeats stages that run out of memory, and tracks the run's memory
    holdings: Holdings  # filled in as parts are made


def read_inputs(config: TrainerConfig, request: TrainingRequest) -> Inputs:
    """Checks everything a user passes to a trainer before any weight is loaded."""
    models = factory_of(request.model)(config, request.model, request.processing_class)
    sets = request.eval_dataset.values() if isinstance(request.eval_dataset, Mapping) else [request.eval_dataset]
    known = [one for one in (request.train_dataset, *sets) if one is not None]
    shows_more = request.tools or request.environment_factory  # than the datasets tell of
    if request.processing_class is None and not shows_more and all(map(holds_text_alone, known)):
        models.read_text_alone()
    bound_prompts(config, request.critic, models.reader)
    models.check_given({name: getattr(request, name) for name in ("tools", "rollout_func", "environment_factory")})
    tokenizer = getattr(models.processing_class, "tokenizer", models.processing_class)  # of a processor
    pool = None
    if request.tools or request.environment_factory is not None:
        pool = EnvironmentPool(config, tokenizer, models.reader, request.tools, request.environment_factory)
    dataset, source = _for_training(config, models.reader, pool, request.train_dataset)
    rewards = _reward_runner(config, request, pool)
    check_together(config, dataset, rewards, request.rollout_func, pool)
    policy = chosen_policy(request.memory_policy, config)
    inputs = Inputs(request, config, models, pool, dataset, source, rewards, policy)
    return replace(inputs, eval_dataset=inputs.for_evaluation(request.eval_dataset))


def _for_training(
    config: TrainerConfig, reader: PromptReader, pool: EnvironmentPool | None, dataset: Any
) -> tuple[Any, PromptSource]:
    dataset = dataset if pool is None else with_prompts(config, dataset, pool)
    dataset = prompt_dataset(config, dataset, reader)
    return dataset, training_prompts(config, dataset, reader)


def prepare(
    config: TrainerConfig, request: TrainingRequest, optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None)
) -> TrainingSetup:
    """Makes everything a training step needs, for a loop of one's own.

    Args:
        config: the run's settings.
        request: model, rewards and prompts, under the trainers' names.
        optimizers: an optimizer and a schedule; None for those the configuration names.

    Returns:
        The setup, its weights loaded and its optimizer's state made.

    Raises:
        ConfigError: a setting cannot work.
        DataError: the dataset cannot be used.
        MemoryBudgetError: weights or optimizer state do not fit.
    """
    config.validate()
    set_seed(config.seed)
    accelerator = open_accelerator(config.use_cpu)
    parallel = connect(accelerator, sharded=config.sharded, timeout_seconds=config.ddp_timeout)
    with sharing_failures(parallel):
        inputs = read_inputs(config, request)
        setup = build_setup(inputs, machine_for(inputs, accelerator.device, parallel))
        seed_rank(setup)
        setup = replace(setup, committer=make_committer(setup, optimizers, setup.planned_steps))
        Learner(setup).make_state()
        return setup


def machine_for(inputs: Inputs, device: torch.device, parallel: Parallel, *, kind: str | None = None) -> Machine:
    """Opens a device of a kind (None: this one's own) for a run: its meter, its budget and the recovery over both."""
    meter, holdings, model = meter_for(device), Holdings(device), inputs.request.model
    total_bytes, free_bytes = meter.total_bytes(), meter.free_bytes()
    budget = MemoryBudget.parse(inputs.config.memory_budget)
    budget_bytes = budget.resolve(total_bytes=total_bytes, free_bytes=free_bytes)
    loaded = sum(weight.nbytes for weight in weights_of(model)) if isinstance(model, nn.Module) else 0
    process_bytes = 0 if meter.is_exact else max(0, meter.live_bytes() - loaded)
    tracker = MemoryTracker(kind or device.type, meter, budget_bytes, holdings, process_bytes)
    recovery = Recovery(tracker, inputs.memory_policy)
    if kind is None:
        recovery.repeat(Stage.LOAD, prepare_device, device)
    return Machine(device, parallel, recovery, holdings)


def seed_rank(setup: TrainingSetup) -> None:
    """Has a user's rewards and rollouts draw other numbers on each rank, once new weights have been drawn alike."""
    if setup.parallel.rank:
        set_seed(setup.config.seed + setup.parallel.rank)


def build_setup(
    inputs: Inputs,
    machine: Machine,
    *,
    load: Callable[[Inputs, Machine], LoadedModel] | None = None,
    check: Callable[[TrainerConfig, ModelFactory, Any], None] | None = None,
    draw_rollout: DrawRollout | None = None,
) -> TrainingSetup:
    """Loads the weights and puts the parts of a step together, by ``load``, ``check`` and ``draw_rollout`` if given."""
    config, models, recovery = inputs.config, inputs.models, machine.recovery
    check = check or check_adapter
    with recovery.tracker.phase(Phase.LOAD):
        loaded = (load or _load)(inputs, machine)
        if config.sync_ref_model:
            reference = loaded.reference_model
            refusal.when(reference is None, "sync_ref_model/adapter")
            own, followed = ([weight.shape for weight in one.parameters()] for one in (reference, loaded.model))
            refusal.when(own != followed, "sync_ref_model/shape", kind=type(reference).__name__)
        trained = ((name, weight) for name, weight in loaded.model.named_parameters() if weight.requires_grad)
        halved = next((name for name, weight in trained if weight.dtype == torch.float16), None)
        refusal.when(halved, "float16", name=halved)
        refuse_unsaved(loaded.model)
        loaded.model.eval()
        recovery.repeat(Stage.LOAD, inputs.rewards.to, machine.device)
        adapter = models.adapt(loaded)
        recovery.repeat(Stage.LOAD, check, config, models, adapter)
        advantages = _advantages(inputs, machine, adapter, check)
        adapter.host_weights.release()
    engine = engine_for(config, models.own_engine, adapter, recovery.tracker)
    check_sampler(config, is_external=engine.supports.is_external or draw_rollout is not None)
    sampling = models.sampling_settings(adapter)
    is_causal_lm = not adapter.time_separable and adapter.geometry.source_bytes is None
    plays = inputs.environments is not None
    refusal.when(plays and not is_causal_lm, "environment_factory", model=type(adapter.model).__name__)
    engine.check(sampling)
    adapter.take_sources(for_copy=loaded.copied)
    setup = TrainingSetup(
        config=config,
        adapter=adapter,
        reference_model=loaded.reference_model,
        models=models,
        engine=engine,
        sampling=sampling,
        rewards=inputs.rewards,
        memory_policy=inputs.memory_policy,
        recovery=recovery,
        holdings=machine.holdings,
        parallel=machine.parallel,
        advantages=advantages,
        combiner=Combiner(config.objective_list),
        source=inputs.source,
        dataset=inputs.train_dataset,
        roles=ModelRoles(adapter),
        environments=inputs.environments,
        draw_rollout=draw_rollout,
    )
    if isinstance(machine.parallel, Replicas):
        begin_alike(setup, machine.parallel, inputs.eval_dataset)
        if config.sharded:
            with machine.parallel.beside():
                shards = recovery.once(Stage.ADOPT, _divided, setup, machine.parallel, machine.device)
            setup = replace(setup, shards=shards)
    machine.holdings.networks = setup.networks
    machine.holdings.resident_blocks = partial(attrgetter("host_weights.resident"), adapter)
    return setup


def _divided(setup: TrainingSetup, ranks: Replicas, device: torch.device) -> ShardedWeights:
    """Divides the weights of model, reference copy and critic among the ranks."""
    check_dividable(setup.adapter)
    for critic in setup.advantages.critics:
        check_critic_dividable(critic)
    others = [setup.adapter.reference_adapter, *(one.network for one in setup.advantages.critics)]
    adapters = [setup.adapter, *(one for one in others if one is not None)]
    for one in adapters:
        check_dividable(one)
    shards = ShardedWeights(list({id(one.lm): one.lm for one in adapters}.values()), ranks, device)
    # An encoder whose output is kept is not run in updates, and has no part in their collectives.
    critics, lay = setup.advantages.critics, Scorer(setup).with_room_for_sources
    shards.learn_order(partial(pass_once, setup.adapter, critics, autocast=setup.autocast, shards=shards, lay=lay))
    setup.trained.zero_grad()
    for one in adapters:
        one.reread()
    save_whole_only(setup.model)
    shards.trained = trained_names(setup.trained)
    return shards


def factory_of(model: Any) -> Callable[[TrainerConfig, Any, Any], ModelFactory]:
    """Returns what makes the factory of a model; language models say what else can be passed."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    families = (family for family in reversed(MODEL_FAMILIES.values()) if family.matches(inner))
    return next(families, MODEL_FAMILIES["language model"]).function


def check_adapter(config: TrainerConfig, models: ModelFactory, adapter: Any) -> None:
    """Compares an adapter's own paths with the network's; it may take another path."""
    with autocast(adapter.device, config.autocast_dtype):
        models.check(adapter)


def _advantages(
    inputs: Inputs, machine: Machine, adapter: Any, check: Callable[[TrainerConfig, ModelFactory, Any], None]
) -> Advantages:
    """Makes what turns rewards into advantages; a critic that was passed as an object is prepared once."""
    config, wanted = inputs.config, inputs.request.critic
    if isinstance(config, RLOOConfig):
        return leave_one_out_advantages(config)
    if isinstance(config, GRPOConfig) and (config.teacher_model_name_or_path or config.teacher_model_server_url):
        has_encoder, kind = adapter.geometry.source_bytes is not None, type(adapter.model).__name__
        refusal.when(config.teacher_model_server_url and has_encoder, "teacher_model_server_url", model=kind)
        return distilled_advantages(config)
    if isinstance(config, GRPOConfig) and config.advantage_estimator == "otb":
        refusal.when(adapter.time_separable, "advantage_estimator/tokens", value="otb")
        return token_baseline_advantages()
    if isinstance(config, GRPOConfig) and config.turn_advantage_coef:
        single = config.max_turn_length is None and config.max_episode_turns in (None, 1)
        refusal.when(inputs.environments is None and single, "turn_advantage_coef", value=config.turn_advantage_coef)
        weights = inputs.rewards.weights[-len(inputs.environments.rewards) :] if inputs.environments else ()
        refusal.when({*weights} - {1.0}, "turn_advantage_coef/weights", weights=weights)
        return turn_advantages(config)
    if not isinstance(config, PPOConfig):
        return GroupAdvantages()
    make, values = inputs.models.critic, (adapter, wanted, partial(check, config, inputs.models))
    repeats = wanted is None or isinstance(wanted, str)
    made = machine.recovery.repeat(Stage.LOAD, make, *values) if repeats else make(*values)
    return CriticAdvantages(config, made)


def _load(inputs: Inputs, machine: Machine) -> LoadedModel:
    """Loads what the user named, or prepares what the user passed."""
    request, recovery = inputs.request, machine.recovery
    values = request, machine.device, room_for_weights(recovery.tracker.budget_bytes)
    # An adapter goes into a model object in place, so that only a model loaded by name can be loaded again.
    if isinstance(request.model, str):
        return recovery.repeat(Stage.LOAD, inputs.models.load, *values)
    try:
        return recovery.once(Stage.ADOPT, inputs.models.load, *values)
    except MemoryBudgetError as error:
        storages = {weight.untyped_storage()._cdata: weight.untyped_storage() for weight in weights_of(request.model)}
        size = format_bytes(sum(storage.nbytes() for storage in storages.values()))
        raise MemoryBudgetError(
            f"The weights of the {type(request.model).__name__} that was given are {size}. {error}",
            failure=error.failure,
            held_bytes=error.held_bytes,
        ) from None


def _reward_runner(config: TrainerConfig, request: TrainingRequest, pool: EnvironmentPool | None) -> RewardRunner:
    functions, tokenizers, weights = request.reward_funcs, request.reward_processing_classes, config.reward_weights
    if pool is not None:
        functions, tokenizers, weights = pool.beside(functions, tokenizers, weights)
    return RewardRunner(
        functions,
        tokenizers,
        weights,
        model_init_kwargs=config.model_init_kwargs,
        trust_remote_code=config.trust_remote_code,
        chat_template_kwargs=config.chat_template_kwargs,
        patience=TimeoutPolicy(
            config.reward_timeout_seconds, config.reward_retries, config.reward_timeout_result == "none"
        ),
        rollout_columns=() if pool is None else (ENVIRONMENTS,),
    )


def facts_of(setup: TrainingSetup) -> Mapping[str, str]:
    """Says what a run is: what the start banner and the run's folder show."""
    config, geometry = setup.config, setup.adapter.geometry
    lora = getattr(setup.model, "peft_config", {})
    adapters = ", ".join(f"{type(one).__name__} r={getattr(one, 'r', '-')}" for one in lora.values())
    passes = "once" if config.num_iterations == 1 else f"{config.num_iterations} times"
    name = getattr(getattr(setup.model, "config", None), "_name_or_path", "")
    return {
        **({"model": name} if name else {}),
        "effective batch": f"{config.step_rows} completions per optimizer step",
        "group size": f"{config.num_generations} completions per prompt",
        "generations": f"{config.rollout_rows} per rollout, trained on {passes}",
        **setup.models.facts(),
        "adapter": adapters or "none, all weights are trained",
        "weights": f"{format_bytes(geometry.parameter_bytes)}, trained {format_bytes(geometry.trainable_bytes)}",
        "device": str(setup.holdings.device),
        "memory budget": format_bytes(setup.memory.budget_bytes),
        "memory policy": type(setup.memory_policy).__name__,
    }
