"""Checks everything a user passes to a trainer before any weight is loaded, and turns it into the trainer's parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.objectives import check_reward_names
from memsafe_rl.config.values import unknown
from memsafe_rl.data.external_rollout import RolloutFunction
from memsafe_rl.data.prompts import (
    IndexedPrompts,
    PromptReader,
    PromptSource,
    PromptTokenizer,
    StreamedPrompts,
    check_dataset,
    usable_prompts,
)
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.planning.policies import PRESETS, AdaptivePolicy, LadderPolicy, MemoryPolicy, preset
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.models.loading import ModelFacts, read_config
from memsafe_rl.ops.losses import LOSSES
from memsafe_rl.ops.registry import refuse_incomplete
from memsafe_rl.rewards.base import RewardRunner
from memsafe_rl.rollout.engine import EngineContext, RolloutEngine
from memsafe_rl.rollout.engines import ENGINES
from memsafe_rl.rollout.external.sampling_support import refuse_begun
from memsafe_rl.types import RolloutPlan, UpdatePlan

logger = logging.getLogger(__name__)


def own_config(args: Any, model: Any, trainer: Any) -> TrainerConfig:
    """Gives a valid configuration of this library's."""
    wanted: type[TrainerConfig] = trainer.config_class
    name = trainer.__name__
    if args is None:
        return wanted(output_dir=f"{_name_of(model)}-{name.removesuffix('Trainer')}")
    if not isinstance(args, wanted):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}. Use the {wanted.__name__} of memsafe_rl: "
            f"`from memsafe_rl import {wanted.__name__}, {name}`."
        )
    args.validate()
    return args


def model_facts(config: TrainerConfig, model: Any) -> ModelFacts:
    """Reads what must be known of a model before it is loaded, and refuses what cannot be trained."""
    facts = read_config(model, trust_remote_code=config.trust_remote_code, model_init_kwargs=config.model_init_kwargs)
    if balance_coef(config, facts) and (config.compile_mode or config.objective_list):
        other = "torch_compile" if config.compile_mode else "objectives"
        raise ConfigError(
            f"router_aux_loss_coef is {balance_coef(config, facts)} (a mixture of experts declares one of its own) "
            f"beside {other}. Set router_aux_loss_coef=0.0, or leave {other} out."
        )
    prompt_room(config, facts, "model")
    return facts


def balance_coef(config: TrainerConfig, facts: ModelFacts) -> float:
    """Gives the coefficient of the balance loss of a mixture of experts: the setting, else the model's own."""
    coef = config.router_aux_loss_coef
    return facts.router_aux_loss_coef if coef is None else coef


def prompt_room(config: TrainerConfig, facts: ModelFacts, whose: str) -> tuple[int | None, str]:
    """Gives the longest prompt that leaves room for a completion in a network's context."""
    room, length = facts.room_for_prompt(config.max_completion_length), config.max_completion_length
    if room is not None and room <= 0:
        raise ConfigError(
            f"max_completion_length is {length} but the {whose}'s context is {facts.max_positions} tokens. "
            f"Lower max_completion_length below {facts.max_positions}, or give a {whose} with a longer context."
        )
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
    if dataset is None:
        raise DataError(f"{name} is None. Pass a datasets.Dataset with a 'prompt' column.")
    checked = check_dataset(dataset, name, reader.columns)
    names = checked.column_names or ["prompt"]
    if not config.remove_unused_columns or "prompt" not in names:
        return checked
    return checked.select_columns([column for column in reader.columns if column in names])


def training_prompts(config: TrainerConfig, dataset: Dataset | IterableDataset, reader: PromptReader) -> PromptSource:
    """Checks the prompts of the training set and makes them readable by position."""
    if isinstance(dataset, IterableDataset):
        if config.max_steps <= 0:
            raise ConfigError("max_steps is -1 but train_dataset is a stream of unknown length. Set max_steps.")
        return StreamedPrompts(dataset.shuffle(seed=config.seed) if config.shuffle_dataset else dataset)
    keep = usable_prompts(dataset, reader, overlong=config.overlong_prompts)
    return IndexedPrompts(
        dataset, batch=config.prompts_per_rollout, seed=config.order_seed, shuffle=config.shuffle_dataset, keep=keep
    )


def evaluation_prompts(config: TrainerConfig, dataset: Any, reader: PromptReader, rewards: RewardRunner) -> Any:
    """Checks every evaluation set, and leaves out what is filtered."""
    if config.eval_pass_reward not in (None, *rewards.names):
        raise ConfigError(
            f"eval_pass_reward is {config.eval_pass_reward!r}, and there is no such reward function. Use one of "
            f"{', '.join(rewards.names)}, or None for the weighted sum of all."
        )
    if dataset is None:
        if config.eval_strategy != "no" or config.load_best_model_at_end:
            raise ConfigError(
                f"eval_strategy is {config.eval_strategy.value!r} and load_best_model_at_end is "  # type: ignore[attr-defined]
                f"{config.load_best_model_at_end}, but there is no eval_dataset. Pass one, or set eval_strategy='no'."
            )
        return None
    if isinstance(dataset, Mapping):
        missing = [name for name, part in dataset.items() if part is None]
        if missing or not dataset:
            raise DataError(
                f"eval_dataset is a dict {f'whose {missing[0]!r} is None' if missing else 'of nothing'}. Give every "
                "name a dataset, or leave eval_dataset out."
            )
        return {name: evaluation_prompts(config, part, reader, rewards) for name, part in dataset.items()}
    dataset = prompt_dataset(config, dataset, reader, "eval_dataset")
    if isinstance(dataset, IterableDataset):
        # every evaluation reads it to its end; how long its prompts are must be known before the first
        dataset = Dataset.from_list(list(dataset), features=dataset.features)
    overlong = config.overlong_prompts
    keep = usable_prompts(dataset, reader, overlong=overlong, name="eval_dataset")
    rewards.check_columns(dataset.column_names)
    return dataset.select(keep)


def check_together(
    config: TrainerConfig,
    dataset: Any,
    rewards: RewardRunner,
    rollout_func: RolloutFunction | None,
    stage: object = None,
) -> None:
    """Refuses what is right alone and wrong together."""
    if rollout_func is not None and not callable(rollout_func):
        raise ConfigError(
            f"rollout_func is {rollout_func!r:.100} ({type(rollout_func).__name__}). Give a function "
            "(prompts, trainer) -> {'prompt_ids', 'completion_ids', 'logprobs'}."
        )
    if rollout_func is not None and stage is not None:
        raise ConfigError(
            "A rollout_func draws the completions itself. Leave tools and environment_factory out, or rollout_func."
        )
    if rollout_func is None and getattr(dataset, "column_names", None):
        rewards.check_columns(dataset.column_names)
    if config.async_rollouts and (rollout_func is not None or stage is not None):
        raise ConfigError(
            f"async_rollouts is {config.async_rollouts}, which draws single turns ahead. Leave it out beside tools, "
            "environment_factory and rollout_func."
        )
    check_reward_names(config.objective_list, rewards.names)
    if config.caches_in_8_bits and rollout_func is not None:
        raise ConfigError(
            "cache_implementation='quantized' with a rollout_func, which draws the completions itself and keeps its "
            "own cache. Leave one of the two out."
        )
    if config.engines_chosen and rollout_func is not None:
        raise ConfigError(
            f"A rollout_func draws the completions itself. Leave {' and '.join(config.engines_chosen)} out, or "
            "rollout_func."
        )
    if config.partial_rollout_tokens is not None:
        _check_partial(config, alone=rollout_func is None)


def _check_partial(config: TrainerConfig, *, alone: bool) -> None:
    told = f"partial_rollout_tokens is {config.partial_rollout_tokens}, but "
    if not alone:
        raise ConfigError(f"{told}only this library's own engine can continue completions. Leave one out.")
    if config.dynamic_sampling:
        raise ConfigError(
            f"{told}with dynamic_sampling a rollout is replaced by its rewards, which unfinished groups do not have. "
            "Set one of the two only."
        )
    if not config.vllm_importance_sampling_correction:
        raise ConfigError(
            f"{told}vllm_importance_sampling_correction is False, and completions that older weights have begun need "
            "it. Set it to True."
        )
    logger.warning(
        "%scompletions longer than that continue in the next rollout, so the order of the data depends on their "
        "lengths; importance weights correct for tokens that older weights sampled.",
        told.removesuffix("but "),
    )


def chosen_policy(given: MemoryPolicy | str | None, config: TrainerConfig) -> MemoryPolicy:
    """Gives the memory policy of a run."""
    if isinstance(given, MemoryPolicy):
        return given
    if isinstance(given, type):
        raise ConfigError(f"memory_policy is the class {given.__name__}. Pass an instance: {given.__name__}().")
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
        if getattr(config, hint) is not None:
            raise ConfigError(
                f"{hint} is {getattr(config, hint)!r} with memory_policy {given!r}, which decides it. Leave one of the "
                "two out, or set memory_policy to 'adaptive' or 'ladder'."
            )
    return preset(str(given))


def engine_for(config: TrainerConfig, own: str, adapter: ModelAdapter, tracker: MemoryTracker) -> RolloutEngine:
    """Makes the engine that the configuration names, or the model's own, and refuses what it does not support."""
    name = next(iter(config.engines_chosen.values()), own)

    def room() -> int:
        return tracker.budget_bytes - tracker.meter.live_bytes()

    engine = ENGINES[name].function(EngineContext(name, adapter, config, tracker.meter.total_bytes(), room))
    refuse_incomplete(engine, RolloutEngine, f"rollout_engine {name!r}")
    if engine.name != name:
        raise ConfigError(f"rollout_engine {name!r} calls itself {engine.name!r}. Set its name to context.name.")
    if not engine.supports.resumes_completions:
        refuse_begun(name, config.partial_rollout_tokens)
    if config.caches_in_8_bits:
        engine.round_cache()
    if config.async_rollouts:
        _check_ahead(config, engine)
    return engine


def _check_ahead(config: TrainerConfig, engine: RolloutEngine) -> None:
    told = f"async_rollouts is {config.async_rollouts}, but "
    if engine.supports.ahead is None:
        raise ConfigError(
            f"{told}the engine {engine.name!r} draws in this process, on the device that trains. Set use_vllm=True and "
            "vllm_mode='server', or leave async_rollouts out."
        )
    if config.dynamic_sampling:
        raise ConfigError(
            f"{told}with dynamic_sampling rewards decide which prompts come next. Set one of the two only."
        )
    if not config.vllm_importance_sampling_correction:
        raise ConfigError(
            f"{told}vllm_importance_sampling_correction is False, and completions of older weights need it. Set it to "
            "True."
        )


def check_sampler(config: TrainerConfig, *, is_external: bool) -> None:
    """Refuses a loss that cannot be corrected, as the configuration says, for samples of another sampler."""
    corrected = is_external or config.partial_rollout_tokens is not None
    mode, loss = config.vllm_importance_sampling_mode, LOSSES[config.loss_settings().loss_type]
    if not (corrected and loss.traits.weighs_sampler):
        return
    if config.sampler_rejection is not None:
        raise ConfigError(
            f"sampler_rejection is {config.sampler_rejection!r} with loss_type {loss.name!r}, whose weight of a row "
            "would take a rejected token for a very unlikely one. Leave it out, or set another loss_type."
        )
    if config.vllm_importance_sampling_correction and mode.startswith("sequence"):
        raise ConfigError(
            f"vllm_importance_sampling_mode is {mode!r} with loss_type {loss.name!r} and another sampler. Set it to "
            "'token_truncate' or 'token_mask', or vllm_importance_sampling_correction=False."
        )


def _name_of(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    return str(name).rstrip("/").split("/")[-1]
