"""Checks everything a user passes to a trainer before any weight is loaded, and turns it into the trainer's parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.declaring import unknown
from memsafe_rl.config.objectives import check_reward_names
from memsafe_rl.data.external_rollout import RolloutFunction
from memsafe_rl.data.prompts import (
    IndexedPrompts,
    PromptReader,
    PromptSource,
    PromptTokenizer,
    StreamedPrompts,
    check_dataset,
    columns_of,
    fits,
    usable_prompts,
)
from memsafe_rl.memory.planning.policies import PRESETS, AdaptivePolicy, LadderPolicy, MemoryPolicy, preset
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.loading import ModelFacts, read_config
from memsafe_rl.models.routing import RouterLosses
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.registry import refuse_incomplete
from memsafe_rl.rewards.runner import RewardRunner
from memsafe_rl.rollout.engine import EngineContext, RolloutEngine
from memsafe_rl.rollout.engines import ENGINES
from memsafe_rl.rollout.external.sampling_support import refuse_begun
from memsafe_rl.training import refusal, unusable
from memsafe_rl.types import RolloutPlan, UpdatePlan

logger = logging.getLogger(__name__)


def own_config(args: Any, model: Any, trainer: Any) -> TrainerConfig:
    """Returns a valid configuration of this library's."""
    wanted: type[TrainerConfig] = trainer.config_class
    name = trainer.__name__
    if args is None:
        of = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        return wanted(output_dir=f"{str(of or 'model').rstrip('/').split('/')[-1]}-{name.removesuffix('Trainer')}")
    if not isinstance(args, wanted):
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise refusal("args", kind=kind, wanted=wanted.__name__, trainer=name)
    args.validate()
    return args


def model_facts(config: TrainerConfig, model: Any) -> ModelFacts:
    """Reads what must be known of a model before it is loaded, and refuses what cannot be trained."""
    facts = read_config(model, trust_remote_code=config.trust_remote_code, model_init_kwargs=config.model_init_kwargs)
    asked: dict[str, Any] = {"torch_compile": config.compile_mode, "objectives": config.objective_list}
    asked["critic_warmup_rollouts"] = getattr(config, "critic_warmup_rollouts", 0)  # in which no router may move
    off, other = router_losses(config, facts).off, next((name for name, value in asked.items() if value), None)
    refusal.when(off and other, "router_losses", off=off, other=other)
    prompt_room(config, facts, "model")
    return facts


def router_losses(config: TrainerConfig, facts: ModelFacts) -> RouterLosses:
    """Returns the coefficients of the losses on a mixture of experts' routers: the settings, else the model's own."""
    asked, declared = (config.router_aux_loss_coef, config.router_z_loss_coef), vars(facts.router_losses).values()
    return RouterLosses(*(own if coef is None else coef for coef, own in zip(asked, declared, strict=True)))


def prompt_room(config: TrainerConfig, facts: ModelFacts, whose: str) -> tuple[int | None, str]:
    """Returns the longest prompt that leaves room for a completion in a network's context."""
    room, length = facts.room_for_prompt(config.max_completion_length), config.max_completion_length
    if room is not None and room <= 0:
        raise refusal("max_completion_length", length=length, whose=whose, positions=facts.max_positions)
    beside = "" if room == facts.max_positions else f" beside max_completion_length {length}"
    return room, f"which is what the {whose}'s context of {facts.max_positions} tokens leaves{beside}"


def prompt_reader(config: TrainerConfig, tokenizer: Any, facts: ModelFacts) -> PromptTokenizer:
    """Makes what turns prompts into ids, with the longest prompt that leaves room for a completion."""
    reader = PromptTokenizer(
        tokenizer,
        template_kwargs=config.chat_template_kwargs,
        limit=config.max_prompt_length,
        truncate=config.overlong_prompts == "truncate",
        vocab_size=facts.vocab_size,
        why_limited="which is max_prompt_length",
    )
    reader.bound(*prompt_room(config, facts, "model"))
    return reader


def prompt_dataset(
    config: TrainerConfig, dataset: Any, reader: PromptReader, name: str = "train_dataset"
) -> Dataset | IterableDataset:
    """Checks a dataset's form, and drops every column that is not read if `remove_unused_columns` asks for it."""
    unusable.when(dataset is None, "train_dataset", name=name)
    checked = check_dataset(dataset, name, reader.columns)
    names = checked.column_names or ["prompt"]
    if not config.remove_unused_columns or "prompt" not in names:
        return checked
    return checked.select_columns([column for column in reader.columns if column in names])


def training_prompts(config: TrainerConfig, dataset: Dataset | IterableDataset, reader: PromptReader) -> PromptSource:
    """Checks the prompts of the training set and makes them readable by position."""
    if isinstance(dataset, IterableDataset):
        refusal.when(config.max_steps <= 0, "max_steps")
        dataset = dataset.filter(fits, fn_kwargs={"reader": reader}) if config.overlong_prompts == "filter" else dataset
        seed = config.order_seed
        return StreamedPrompts(dataset.shuffle(seed=seed) if config.shuffle_dataset else dataset, seed)
    keep = usable_prompts(dataset, reader, overlong=config.overlong_prompts)
    return IndexedPrompts(
        dataset, batch=config.prompts_per_rollout, seed=config.order_seed, shuffle=config.shuffle_dataset, keep=keep
    )


def evaluation_prompts(config: TrainerConfig, dataset: Any, reader: PromptReader, rewards: RewardRunner) -> Any:
    """Checks every evaluation set, and leaves out what is filtered."""
    passed, known = config.eval_pass_reward, ", ".join(rewards.names)
    refusal.when(passed not in (None, *rewards.names), "eval_pass_reward", name=passed, known=known)
    if dataset is None:
        strategy, best = getattr(config.eval_strategy, "value", config.eval_strategy), config.load_best_model_at_end
        refusal.when(strategy != "no", "eval_dataset", name="eval_strategy", value=strategy, off="no")
        refusal.when(best, "eval_dataset", name="load_best_model_at_end", value=best, off=False)
        return None
    if isinstance(dataset, Mapping):
        missing = [name for name, part in dataset.items() if part is None]
        what = f"whose {missing[0]!r} is None" if missing else "of nothing"
        unusable.when(missing or not dataset, "eval_dataset/parts", what=what)
        return {name: evaluation_prompts(config, part, reader, rewards) for name, part in dataset.items()}
    dataset = prompt_dataset(config, dataset, reader, "eval_dataset")
    if isinstance(dataset, IterableDataset):
        # every evaluation reads it to its end; how long its prompts are must be known before the first
        dataset = Dataset.from_list(list(dataset), features=dataset.features)
    keep = usable_prompts(dataset, reader, overlong=config.overlong_prompts, name="eval_dataset")
    rewards.check_columns(columns_of(dataset))
    return dataset.select(keep)


def check_together(
    config: TrainerConfig,
    dataset: Any,
    rewards: RewardRunner,
    rollout_func: RolloutFunction | None,
    stage: object = None,
) -> None:
    """Refuses what is right alone and wrong together."""
    if rollout_func is None and getattr(dataset, "column_names", None):
        rewards.check_columns(columns_of(dataset))
    drawn, played, ahead = rollout_func is not None, stage is not None, config.async_rollouts
    kind, engines = type(rollout_func).__name__, " and ".join(config.engines_chosen)
    refusal.when(drawn and not callable(rollout_func), "rollout_func", given=rollout_func, kind=kind)
    refusal.when(drawn and played, "rollout_func/episodes")
    refusal.when(ahead and (drawn or played), "async_rollouts/turns", value=ahead)
    check_reward_names(config.objective_list, rewards.names)
    refusal.when(drawn and config.caches_in_8_bits, "rollout_func/cache")
    refusal.when(drawn and config.engines_chosen, "rollout_func/engine", engines=engines)
    partly = config.partial_rollout_tokens
    if partly is not None:
        refusal.when(drawn, "partial_rollout_tokens/rollout_func", value=partly)
        _check_later_weights(config, "partial_rollout_tokens", partly)
        logger.warning(
            "partial_rollout_tokens is %d: completions longer than that continue in the next rollout, so the order of "
            "the data depends on their lengths; importance weights correct for tokens that older weights sampled.",
            partly,
        )


def _check_later_weights(config: TrainerConfig, name: str, value: int) -> None:
    """Refuses what does not go with completions that later weights learn from."""
    refusal.when(config.dynamic_sampling, f"{name}/dynamic_sampling", value=value)
    refusal.when(not config.vllm_importance_sampling_correction, f"{name}/correction", value=value)


def chosen_policy(given: MemoryPolicy | str | None, config: TrainerConfig) -> MemoryPolicy:
    """Returns the memory policy of a run."""
    if isinstance(given, MemoryPolicy):
        return given
    if isinstance(given, type):
        raise refusal("memory_policy/class", name=given.__name__)
    refusal.when(not isinstance(given, str | None), "memory_policy/kind", kind=type(given).__name__)
    mode, offload = config.compile_mode, bool(config.offload_activations)
    checkpointing, place = config.gradient_checkpointing, config.trajectory_device or UpdatePlan.trajectory_device
    if given in (None, "adaptive"):
        return AdaptivePolicy(checkpointing, place, compile=mode, offload_activations=offload)
    if given == "ladder":
        update = UpdatePlan(
            checkpointing=bool(checkpointing), offload_activations=offload, trajectory_device=place, compile=mode
        )
        return LadderPolicy(rollout=RolloutPlan(compile=mode), update=update)
    if given not in PRESETS:
        raise unknown(str(given), ("adaptive", "ladder", *PRESETS), "memory_policy")
    for hint in ("gradient_checkpointing", "offload_activations", "trajectory_device", "compile_mode"):
        value = getattr(config, hint)
        refusal.when(value is not None, "memory_policy/hint", hint=hint, value=value, policy=given)
    return preset(str(given))


def engine_for(config: TrainerConfig, own: str, adapter: ModelAdapter, tracker: MemoryTracker) -> RolloutEngine:
    """Makes the engine that the configuration names, or the model's own, and refuses what it does not support."""
    name = next(iter(config.engines_chosen.values()), own)

    def room() -> int:
        return tracker.budget_bytes - tracker.meter.live_bytes()

    engine = ENGINES[name].function(EngineContext(name, adapter, config, tracker.meter.total_bytes(), room))
    refuse_incomplete(engine, RolloutEngine, f"rollout_engine {name!r}")
    refusal.when(engine.name != name, "rollout_engine", name=name, own=engine.name)
    if not engine.supports.resumes_completions:
        refuse_begun(name, config.partial_rollout_tokens)
    if config.caches_in_8_bits:
        engine.round_cache()
    ahead = config.async_rollouts
    if ahead:
        refusal.when(engine.supports.ahead is None, "async_rollouts/engine", value=ahead, engine=engine.name)
        _check_later_weights(config, "async_rollouts", ahead)
    return engine


def check_sampler(config: TrainerConfig, *, is_external: bool) -> None:
    """Refuses a loss that cannot be corrected, as the configuration says, for samples of another sampler."""
    corrected = is_external or config.partial_rollout_tokens is not None
    mode, loss = config.vllm_importance_sampling_mode, LOSSES[config.loss_settings().loss_type]
    if not (corrected and loss.traits.weighs_sampler):
        return
    rejection = config.sampler_rejection
    refusal.when(rejection is not None, "sampler_rejection", value=rejection, loss=loss.name)
    by_sequence = config.vllm_importance_sampling_correction and mode.startswith("sequence")
    refusal.when(by_sequence, "vllm_importance_sampling_mode", mode=mode, loss=loss.name)
