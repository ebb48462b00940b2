"""GRPO: group-relative advantages over the training loop of `base`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from transformers.utils import logging as transformers_logging

from memsafe_rl.callbacks import CompletionsTable, MetricsLog, ProgressBar, Trackers, banner
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.budget import MemoryBudget
from memsafe_rl.memory.monitor import meter_for
from memsafe_rl.memory.policies import AdaptivePolicy, MemoryPolicy
from memsafe_rl.memory.tracker import MemoryTracker
from memsafe_rl.models.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.models.loading import LoadedModel, eos_token_ids, load_model, load_tokenizer, read_config
from memsafe_rl.rewards.base import RewardRunner
from memsafe_rl.trainers.base import OnPolicyTrainer
from memsafe_rl.trainers.config import GRPOConfig
from memsafe_rl.trainers.data import (
    IndexedPrompts,
    PromptSource,
    PromptTokenizer,
    StreamedPrompts,
    check_dataset,
    usable_prompts,
)
from memsafe_rl.trainers.experience import ExperienceMaker
from memsafe_rl.trainers.given import RolloutFunction
from memsafe_rl.trainers.ranks import Ranks
from memsafe_rl.trainers.weights import read_weights, write_weights
from memsafe_rl.units import format_bytes

logger = logging.getLogger(__name__)


class GRPOTrainer(OnPolicyTrainer):
    """Trains a causal language model with Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300).

    Takes TRL's arguments with TRL's meanings; how the work is cut to fit memory is the memory policy's business and
    never changes what is learnt.

    Args:
        model: a name or path for `AutoModelForCausalLM`, or a model (a `PeftModel` too).
        reward_funcs: a reward function or a list of them: callables, sync or async, reward models, or their names.
        args: the configuration; None for the defaults.
        train_dataset: a `datasets` dataset with a `prompt` column, plain or conversational.
        eval_dataset: prompts for evaluation, or a dict of such datasets.
        processing_class: the tokenizer; None to load it with the model.
        reward_processing_classes: tokenizers of the reward models.
        callbacks: callbacks of transformers' `TrainerCallback` form.
        optimizers: an optimizer and a schedule; None for those the configuration names.
        quantization_config: quantises the base model while it is loaded; needs `peft_config`.
        peft_config: adds an adapter, which alone is trained.
        tools: not supported yet.
        rollout_func: `(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", ...}`, draws completions in
            place of the library.
        environment_factory: not supported yet.
        memory_policy: cuts the work to fit memory; None for `AdaptivePolicy()`.

    Raises:
        ConfigError: a setting cannot work; the message names it, its value and the remedy.
        DataError: the dataset cannot be used.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] | None = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Any = None,
        memory_policy: MemoryPolicy | None = None,
    ) -> None:
        self.args = _own_config(args, model)
        _refuse(tools=tools, environment_factory=environment_factory)
        _check_correction(self.args, rollout_func)
        _set_log_level(self.args.get_process_log_level())
        set_seed(self.args.seed)
        if train_dataset is None:
            raise DataError("train_dataset is None. Pass a datasets.Dataset with a 'prompt' column.")
        if self.args.remove_unused_columns:
            train_dataset, eval_dataset = _prompts_only(train_dataset), _prompts_only(eval_dataset)
        train_dataset = check_dataset(train_dataset, "train_dataset")
        self.processing_class = load_tokenizer(
            model, processing_class, trust_remote_code=self.args.trust_remote_code, **_revision(self.args)
        )
        read_prompts, source = self._prepare_prompts(model, train_dataset)
        self.rewards = RewardRunner(
            reward_funcs,
            reward_processing_classes,
            self.args.reward_weights,
            model_init_kwargs=self.args.model_init_kwargs,
            trust_remote_code=self.args.trust_remote_code,
            chat_template_kwargs=self.args.chat_template_kwargs,
        )
        eval_dataset = self._prepare_evaluation(eval_dataset, read_prompts)
        if isinstance(train_dataset, Dataset) and rollout_func is None:  # which may add columns of its own
            self.rewards.check_columns(train_dataset.column_names)

        trackers = self.args.trackers
        self.accelerator = Accelerator(cpu=self.args.use_cpu, log_with=trackers or None)
        ranks = Ranks(self.accelerator)
        loaded = load_model(
            model,
            model_init_kwargs=self.args.model_init_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            trust_remote_code=self.args.trust_remote_code,
            device=self.accelerator.device,
            with_reference=self.args.beta != 0,
        )
        self.model = loaded.model
        self.rewards.to(self.accelerator.device)
        adapter = self._prepare_adapter(loaded)
        self.memory_policy = memory_policy or AdaptivePolicy(
            checkpointing=self.args.gradient_checkpointing, trajectory_device=self.args.trajectory_device or "host"
        )
        tracker = self._prepare_memory()
        maker = ExperienceMaker(
            config=self.args,
            adapter=adapter,
            tokenizer=self.processing_class,
            read_prompts=read_prompts,
            rewards=self.rewards,
            policy=self.memory_policy,
            tracker=tracker,
            ranks=ranks,
            sampling=self.args.sampling_settings(eos_token_ids(self.processing_class, loaded.model)),
            autocast=self._autocast,
            rollout_func=rollout_func,
            owner=self,
        )
        self._assemble(
            adapter=adapter,
            reference_model=loaded.reference_model,
            source=source,
            maker=maker,
            tracker=tracker,
            ranks=ranks,
            eval_dataset=eval_dataset,
            callbacks=[*self._own_callbacks(tracker, ranks, trackers), *_listed(callbacks)],
            optimizers=optimizers or (None, None),
        )
        self.train_dataset = train_dataset
        if ranks.is_main and not self.args.disable_tqdm:
            banner(self._facts(tracker))

    def _prepare_prompts(self, model: Any, train_dataset: Any) -> tuple[PromptTokenizer, PromptSource]:
        """Checks the dataset before any weight is loaded."""
        facts = read_config(
            model, trust_remote_code=self.args.trust_remote_code, model_init_kwargs=self.args.model_init_kwargs
        )
        positions = facts.max_positions
        room = None if positions is None else positions - self.args.max_completion_length
        if room is not None and room < 1:
            raise ConfigError(
                f"max_completion_length is {self.args.max_completion_length} but the model's context is {positions} "
                f"tokens. Lower max_completion_length below {positions}."
            )
        limits = [limit for limit in (room, self.args.max_prompt_length) if limit is not None]
        limit = min(limits, default=None)
        overlong = self.args.overlong_prompts
        reader = PromptTokenizer(
            self.processing_class,
            template_kwargs=self.args.chat_template_kwargs,
            limit=limit,
            truncate=overlong == "truncate",
        )
        if isinstance(train_dataset, IterableDataset):
            if self.args.max_steps <= 0:
                raise ConfigError("max_steps is -1 but train_dataset is a stream of unknown length. Set max_steps.")
            stream = train_dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else train_dataset
            return reader, StreamedPrompts(stream)
        keep = usable_prompts(train_dataset, reader, limit=limit, overlong=overlong)
        if len(keep) < len(train_dataset):
            logger.warning("%d prompt(s) over %s tokens are left out", len(train_dataset) - len(keep), limit)
        source = IndexedPrompts(
            train_dataset,
            batch=self.args.prompts_per_rollout,
            seed=self._data_seed,
            shuffle=self.args.shuffle_dataset,
            keep=keep,
        )
        return reader, source

    def _prepare_evaluation(self, eval_dataset: Any, read_prompts: PromptTokenizer) -> Any:
        """Checks every evaluation dataset before any weight is loaded, and leaves out what is filtered."""
        if eval_dataset is None:
            if self.args.eval_strategy != "no" or self.args.load_best_model_at_end:
                raise ConfigError(
                    f"eval_strategy is {str(self.args.eval_strategy)!r} and load_best_model_at_end is "
                    f"{self.args.load_best_model_at_end}, but there is no eval_dataset. Pass one, or set "
                    "eval_strategy='no'."
                )
            return None
        if isinstance(eval_dataset, Mapping):
            return {name: self._prepare_evaluation(part, read_prompts) for name, part in eval_dataset.items()}
        dataset = check_dataset(eval_dataset, "eval_dataset")
        if isinstance(dataset, IterableDataset):
            raise DataError("eval_dataset is a stream. Pass a Dataset, such as Dataset.from_list(list(stream)).")
        keep = usable_prompts(
            dataset,
            read_prompts,
            limit=read_prompts.limit,
            overlong=self.args.overlong_prompts,
            name="eval_dataset",
        )
        self.rewards.check_columns(dataset.column_names)
        return dataset.select(keep)

    def _prepare_adapter(self, loaded: LoadedModel) -> CausalLMAdapter:
        """Wraps the model and checks the log-prob head against the model's own logits."""
        if loaded.router_aux_loss_coef and self.args.router_aux_loss_coef is None:
            raise ConfigError(
                f"the model declares router_aux_loss_coef={loaded.router_aux_loss_coef}, a balance loss that cannot "
                "be split over micro-batches. Set router_aux_loss_coef=0.0 to train without it."
            )
        loaded.model.eval()
        adapter = CausalLMAdapter(
            loaded.model,
            pad_token_id=self.processing_class.pad_token_id,
            reference_model=loaded.reference_model,
        )
        self.adapter = adapter
        with self._autocast():
            check_head(adapter)
        return adapter

    def _prepare_memory(self) -> MemoryTracker:
        device = self.accelerator.device
        meter = meter_for(device)
        budget = MemoryBudget.parse(self.args.memory_budget)
        total_bytes, free_bytes = meter.total_bytes(), meter.free_bytes()
        return MemoryTracker(device.type, meter, budget.resolve(total_bytes=total_bytes, free_bytes=free_bytes))

    def _own_callbacks(self, tracker: MemoryTracker, ranks: Ranks, trackers: Sequence[str]) -> list[Any]:
        output_dir = Path(self.args.output_dir)
        own: list[Any] = [MetricsLog(output_dir, tracker.events)]
        if self.args.log_completions:
            own.append(
                CompletionsTable(
                    output_dir,
                    limit=self.args.num_completions_to_print,
                    unique_prompts=self.args.log_unique_prompts,
                )
            )
        if trackers and ranks.is_main:
            own.append(Trackers(self.accelerator, project=self.args.project, run_name=self.args.run_name))
        if not self.args.disable_tqdm:
            own.append(ProgressBar())
        return own

    def _facts(self, tracker: MemoryTracker) -> dict[str, str]:
        """What the start banner says."""
        geometry = self.adapter.geometry
        lora = getattr(self.model, "peft_config", {})
        adapters = ", ".join(f"{type(config).__name__} r={getattr(config, 'r', '-')}" for config in lora.values())
        return {
            "effective batch": f"{self.args.step_rows} completions an optimizer step",
            "group size": f"{self.args.num_generations} completions a prompt",
            "generations": f"{self.args.rollout_rows} a rollout, learnt from {self.args.num_iterations} time(s)",
            "completion length": f"at most {self.args.max_completion_length} tokens",
            "adapter": adapters or "none, all weights are trained",
            "weights": f"{format_bytes(geometry.parameter_bytes)}, trained {format_bytes(geometry.trainable_bytes)}",
            "device": str(self.accelerator.device),
            "memory budget": format_bytes(tracker.budget_bytes),
            "memory policy": type(self.memory_policy).__name__,
        }

    def _write_weights(self, folder: Path) -> None:
        write_weights(self.model, self.processing_class, folder)

    def _load_weights(self, folder: Path) -> None:
        read_weights(self.model, folder)


def _own_config(args: Any, model: Any) -> GRPOConfig:
    if args is None:
        return GRPOConfig(output_dir=f"{_name_of(model)}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}. Use the GRPOConfig of memsafe_rl: "
            "`from memsafe_rl import GRPOConfig, GRPOTrainer`."
        )
    args.validate()
    return args


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _name_of(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
    return str(name).rstrip("/").split("/")[-1]


def _revision(config: GRPOConfig) -> dict[str, str]:
    revision = (config.model_init_kwargs or {}).get("revision")
    return {"revision": revision} if revision else {}


def _check_correction(config: GRPOConfig, rollout_func: RolloutFunction | None) -> None:
    """VESPO multiplies token weights into a row's own, so that a row's weight would count once a token."""
    corrected = rollout_func is not None and config.vllm_importance_sampling_correction
    mode = config.vllm_importance_sampling_mode
    if config.loss_type == "vespo" and corrected and mode.startswith("sequence"):
        raise ConfigError(
            f"vllm_importance_sampling_mode is {mode!r} with loss_type 'vespo' and a rollout_func. Set it to "
            "'token_truncate' or 'token_mask', or vllm_importance_sampling_correction=False."
        )


def _set_log_level(level: int) -> None:
    logging.getLogger("memsafe_rl").setLevel(level)
    transformers_logging.set_verbosity(level)


def _prompts_only(dataset: Any) -> Any:
    """Drops every column but the prompt, as `remove_unused_columns` asks."""
    if isinstance(dataset, Mapping):
        return {name: _prompts_only(part) for name, part in dataset.items()}
    return None if dataset is None else dataset.select_columns(["prompt"])


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name} is not supported yet. Leave it out, or drive the episodes from rollout_func.")
