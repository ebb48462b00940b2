"""Every setting of a run with its default and one sentence on it; nothing heavy is imported, so that help is fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any

# ruff: noqa: RUF009  (`option` is `dataclasses.field` with a help text)

if TYPE_CHECKING:  # what a validated configuration holds
    Settings = dict[str, Any] | None
    Filled = str
    Size = int | str
    Words = tuple[str, ...]
    Rules = dict[str, Any] | bool | None
else:  # what a user may write: text on a command line, None where a default is filled in
    Settings = dict[str, Any] | str | None
    Filled = str | None
    Size = int | str | None
    Words = tuple[str, ...] | str | None
    Rules = dict[str, Any] | str | None


def option(default: Any, text: str, **parsing: Any) -> Any:
    """Declares one setting."""
    return field(default=default, metadata={"help": text.replace("%", "%%"), **parsing})


_BARE_IS_TRUE: dict[str, Any] = {"nargs": "?", "const": True}
"""For truth values that are None by default, whose flag `HfArgumentParser` would not take without a value."""


def help_text(setting: Field[Any]) -> str:
    """Gives the sentence with which a setting was declared."""
    return str(setting.metadata.get("help", "")).replace("%%", "%")


@dataclass
class TrainerFields:
    """Settings that every trainer has; names, defaults and meanings are TRL 1.16's where the concept is the same."""

    output_dir: Filled = option(
        None, "Folder of checkpoints, the final model and the metrics log; None: 'trainer_output'."
    )
    per_device_train_batch_size: int = option(
        8,
        "Completions per rank and accumulation step; fixes the effective batch only, never what is in memory at once.",
    )
    num_train_epochs: float = option(3.0, "Passes over the prompts; a fraction ends within a pass.")
    max_steps: int = option(-1, "Optimizer steps of the run; overrides num_train_epochs; -1: not set.")

    # Optimizer and schedule
    learning_rate: float = option(1e-6, "Highest learning rate.")
    lr_scheduler_type: str = option("linear", "Shape of the learning rate over the run, under transformers' names.")
    lr_scheduler_kwargs: Settings = option(
        None, 'Further arguments of the schedule, such as {"num_cycles": 1}; JSON on a command line.'
    )
    warmup_steps: float = option(
        0, "Optimizer steps over which the learning rate rises from 0; below 1: that share of the run."
    )
    optim: str = option("adamw_torch_fused", "Optimizer, under transformers' names, such as 'sgd' or 'adamw_8bit'.")
    optim_args: str | None = option(None, "Further arguments of the optimizer, as 'name=value,name=value'.")
    weight_decay: float = option(0.0, "Weight decay of all trained weights but biases and norms.")
    adam_beta1: float = option(0.9, "Decay of the mean gradient in Adam-like optimizers.")
    adam_beta2: float = option(0.999, "Decay of the mean squared gradient in Adam-like optimizers.")
    adam_epsilon: float = option(1e-8, "Added to the denominator in Adam-like optimizers.")
    gradient_accumulation_steps: int = option(
        1, "Accumulation steps per optimizer step; with the batch per rank it fixes the effective batch, nothing else."
    )
    max_grad_norm: float = option(1.0, "Gradient norm above which the gradient is scaled down; 0: never.")

    # Precision and model
    bf16: bool | None = option(
        None,
        "Forward passes in bfloat16; None: on where a CUDA device supports it and fp16 is off, else off.",
        **_BARE_IS_TRUE,
    )
    fp16: bool = option(False, "Forward passes in float16, with loss scaling.")
    model_init_kwargs: Settings = option(
        None, 'Arguments of from_pretrained when the model is a name, such as {"dtype": "bfloat16"}.'
    )
    trust_remote_code: bool = option(False, "Whether models and tokenizers may run code that comes with them.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of a mixture of experts' balance loss; only 0.0 trains such a model here (None: it is refused)."
    )
    disable_dropout: bool = option(
        True, "Score and update without dropout; with it, only retries of the same size are exact."
    )

    # Memory
    memory_budget: Size = option(
        "auto", "Device memory this run may hold: 'auto', bytes, a size such as '16GiB' or a share such as '80%'."
    )
    allow_lossy: Words = option(
        (),
        "Remedies that change the task, taken in this order when no plan fits: 'max_completion_length', "
        "'num_generations', 'num_iterations', 'cache_implementation', 'optim'.",
    )
    trajectory_device: str | None = option(
        None, "Where a rollout waits between updates: 'device' or 'host'; None: the plan decides."
    )
    gradient_checkpointing: bool | None = option(
        None,
        "Hint: recompute activations in the backward pass (True) or not (False); None: the plan decides.",
        aliases=["--activation_checkpointing", "--activation-checkpointing"],
        **_BARE_IS_TRUE,
    )
    gradient_checkpointing_kwargs: Settings = option(
        None, 'Only {"use_reentrant": false}, which is how recomputation works here.'
    )
    torch_empty_cache_steps: int | None = option(
        None, "Hint: optimizer steps between two releases of cached device memory; None: the plan decides."
    )
    auto_find_batch_size: bool = option(
        False,
        "Hint without effect on results: a failed allocation always makes the micro-batch smaller, never a group.",
    )
    cache_implementation: str | None = option(
        None,
        "Kind of key/value cache for rollouts, under transformers' names: 'quantized' keeps it in 8 bits, which is "
        "lossy and corrected by importance weights; others are hints without effect on results; None: the plan "
        "decides.",
    )
    pad_to_multiple_of: int | str | None = option(
        "auto", "Hint without effect on results: pad rows to a multiple of so many tokens; 'auto': none."
    )
    memory_forecast: bool | None = option(
        None,
        "Before weights are loaded, run a step on tensors without bytes: plan by what it would hold, and refuse a run "
        "that cannot fit; costs a few seconds. None: for a model given by name, on a CUDA device or under a budget "
        "that is written.",
    )
    verify_plan: bool = option(
        False,
        "Before the first step, prove on this model that the plan changes neither tokens nor gradient, failures "
        "included; costs about three rollouts and gradients of one optimizer step.",
    )
    probe_worst_case: bool = option(
        False,
        "Before the first step, try the longest prompt and completion once, so that a run that cannot fit says so in "
        "its first minute; costs a few long forward passes and two micro-batches.",
    )

    # Evaluation
    eval_strategy: str = option("no", "When to evaluate: 'no', 'steps' or 'epoch'.")
    eval_steps: float | None = option(
        None, "Optimizer steps between evaluations; below 1: share of the run; None: logging_steps."
    )
    eval_delay: float = option(0, "Optimizer steps (or epochs) before the first evaluation.")
    eval_on_start: bool = option(False, "Evaluate once before the first optimizer step.")
    per_device_eval_batch_size: int = option(
        8, "Completions per rank that an evaluation draws at once; never changes its result."
    )
    do_train: bool = option(False, "For scripts that ask whether to train; the trainer does not read it.")
    do_eval: bool = option(False, "Whether to evaluate; on whenever eval_strategy is not 'no'.")

    # Saving
    save_strategy: str = option("steps", "When to save a checkpoint: 'no', 'steps', 'epoch' or 'best'.")
    save_steps: float = option(500, "Optimizer steps between checkpoints; below 1: share of the run.")
    save_total_limit: int | None = option(None, "Checkpoints kept, oldest removed first; None: all.")
    save_only_model: bool = option(False, "Save weights only; such a checkpoint cannot be resumed from.")
    load_best_model_at_end: bool = option(False, "Load the best checkpoint when the run ends.")
    metric_for_best_model: str | None = option(
        None, "Metric of an evaluation by which checkpoints are compared; None: 'reward', where one is needed."
    )
    greater_is_better: bool | None = option(
        None, "Whether that metric should be large; None: unless its name ends in 'loss'.", **_BARE_IS_TRUE
    )
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint folder to go on from; 'true': the latest in output_dir."
    )

    # Logging
    logging_strategy: str = option("steps", "When to log: 'no', 'steps' or 'epoch'.")
    logging_first_step: bool = option(False, "Log the first optimizer step too.")
    logging_steps: float = option(10, "Optimizer steps between two lines of the log; below 1: share of the run.")
    log_level: str = option("passive", "Least level logged on the main process; 'passive': as it is.")
    log_level_replica: str = option("warning", "Least level logged on the other processes.")
    disable_tqdm: bool | None = option(
        None, "No progress bar; None: a bar unless logging is below warnings.", **_BARE_IS_TRUE
    )
    report_to: list[str] | str | None = option(
        "none", "Trackers, such as 'tensorboard' or 'wandb'; 'all': every one installed; 'none': none."
    )
    run_name: str | None = option(None, "Name of the run in trackers.")
    project: str = option("huggingface", "Name of the project in trackers.")
    log_completions: bool = option(False, "Show a table of prompts, completions and rewards at every log.")
    num_completions_to_print: int | None = option(None, "Rows of that table; None: all.")
    log_unique_prompts: bool = option(False, "Show each prompt once in that table.")
    alarms: Rules = option(
        None,
        "Limits from which an alarm is given, once an episode: truncation (share, 0.05), judge_seconds (6), "
        "equal_rewards (share of groups, 0.9), kl ([low, high] in nats per token, off), objective_kl (objectives' own "
        "kl_band, on), lost_updates (share of half-precision weights, 0.5), throughput_drop (share lost, 0.5), retries "
        "(in 20 steps, 3); null switches one off, false all; None: these.",
    )

    # Randomness, device and data
    seed: int = option(42, "Seed of everything random; samples depend on it alone, not on how work is cut.")
    data_seed: int | None = option(None, "Seed of the order of prompts; None: seed.")
    use_cpu: bool = option(False, "Train on the CPU even where a CUDA device is at hand.")
    shuffle_dataset: bool = option(True, "Shuffle the prompts in every pass.")
    remove_unused_columns: bool = option(False, "Keep only the prompt; reward functions then see no other column.")
    max_prompt_length: int | None = option(
        None, "Longest prompt, in tokens; None: what the model's context leaves beside max_completion_length."
    )
    overlong_prompts: str = option(
        "error",
        "What to do with a longer prompt: 'error', 'filter' (leave it out) or 'truncate' (keep its last tokens).",
    )
    chat_template_kwargs: Settings = option(
        None, 'Further arguments of the chat template, such as {"enable_thinking": false}.'
    )

    # Rollout
    num_generations: int = option(8, "Completions sampled per prompt: the group size G.")
    num_generations_eval: int | None = option(None, "Completions per prompt in evaluations; None: num_generations.")
    eval_pass_at: list[int] | None = option(
        None,
        "Evaluations log pass@k and best@k for these k; None: 1, 2, 4, ... and num_generations_eval, where above 1.",
    )
    eval_pass_threshold: float = option(1.0, "Reward from which a completion of an evaluation passes.")
    eval_pass_reward: str | None = option(
        None, "Name of the reward function that decides what passes; None: the weighted sum of all."
    )
    steps_per_generation: int | None = option(
        None, "Batches (completions per rank and accumulation step) in one rollout; None: gradient_accumulation_steps."
    )
    generation_batch_size: int | None = option(
        None, "Completions in one rollout over all ranks; None: batch per rank x ranks x steps_per_generation."
    )
    num_iterations: int = option(1, "Epochs K: passes over each rollout, rows reshuffled in every one.")
    max_completion_length: int = option(
        512, "Longest completion, in tokens; of an episode, all turns, tool results and users' words together."
    )
    max_tool_calling_iterations: int | None = option(
        None, "Turns of an episode whose tool calls are answered; None: no limit."
    )
    max_turn_length: int | None = option(
        None, "Longest turn of an episode that the model draws, in tokens; None: what is left of the completion."
    )
    max_episode_turns: int | None = option(None, "Turns that the model has in an episode; None: no limit.")
    partial_rollout_tokens: int | None = option(
        None,
        "Most tokens a completion draws in a rollout; an unfinished one goes on in the next, which changes the order "
        "of the data and needs importance weights; None: every completion is drawn to its end.",
    )
    temperature: float = option(1.0, "Sampling temperature; the loss uses log-probs at the same temperature.")
    top_p: float = option(1.0, "Sample from the likeliest tokens that hold this much probability; 1: all.")
    top_k: int = option(0, "Sample from this many likeliest tokens; 0: all.")
    min_p: float | None = option(None, "Least probability of a token, relative to the likeliest one's; None: none.")
    repetition_penalty: float = option(1.0, "Divides the logits of tokens already seen; 1: no penalty.")
    generation_kwargs: Settings = option(
        None,
        "Sampling settings that go before the fields above, under the names of transformers' GenerationConfig: top_p, "
        "eos_token_id, stop_strings, bad_words_ids, min_new_tokens, logits_processor and so on; see docs/trl.md.",
    )
    use_vllm: bool = option(
        False, "Draw completions with vLLM, in this process, with a copy of the weights; needs the package vllm."
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "Share of the device that vLLM's weights and cache may fill; the plan and memory_budget hold as well."
    )
    vllm_enable_sleep_mode: bool = option(
        False, "Take vLLM's weights and cache off the device between rollouts; CUDA only."
    )
    vllm_max_model_length: int | None = option(
        None, "Longest prompt and completion together under vLLM, in tokens; None: what model and cache hold."
    )
    use_transformers_continuous_batching: bool = option(
        False, "Draw completions with transformers' continuous batching."
    )
    transformers_continuous_batching_config: Settings = option(
        None, "Further arguments of transformers' ContinuousBatchingConfig; its sizes follow the plan."
    )
    vllm_importance_sampling_correction: bool = option(
        True,
        "Correct for another sampler's log-probs (vLLM's, continuous batching's, or those that rollout_func returns) "
        "by importance weights.",
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "How those weights are bounded: 'token_' or 'sequence_' and 'truncate' (clip) or 'mask' (set to 0).",
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0,
        "Upper bound of those weights; None: none.",
        aliases=["--vllm_importance_sampling_cap", "--vllm-importance-sampling-cap"],
    )
    vllm_importance_sampling_clip_min: float | None = option(None, "Lower bound of those weights; None: none.")

    # Rewards, clipping and reference
    reward_weights: list[float] | None = option(None, "Weight of each reward function; None: 1 each.")
    reward_timeout_seconds: float | None = option(
        None, "Longest call of an async reward function, in seconds, after which it is cancelled; None: no limit."
    )
    reward_retries: int = option(0, "Further calls of an async reward function that took longer than that.")
    reward_timeout_result: str = option(
        "error",
        "What follows when it took longer every time: 'error' ends the run, 'none' goes on without its rewards.",
    )
    overlap_async_rewards: bool = option(
        True, "Score the reference while async reward functions are waited for; False: only once they have answered."
    )
    mask_truncated_completions: bool = option(False, "Leave completions that were cut off out of the loss.")
    epsilon: float = option(0.2, "Clip range of the ratio below 1 (and above, unless epsilon_high is set).")
    epsilon_high: float | None = option(None, "Clip range of the ratio above 1; None: epsilon.")
    kl_stop: float | str | dict[str, Any] | None = option(
        None,
        "KL to the model before the update, in nats, that ends the passes over a rollout: a target per token, or "
        '{"target": 0.02, "unit": "token" or "sequence", "estimator": "k3" or "k1"}; None: never.',
    )
    beta: float = option(0.0, "Coefficient of the KL to the reference model, in nats; 0: no reference is loaded.")
    sync_ref_model: bool = option(False, "Move the reference towards the model as training goes on.")
    ref_model_mixup_alpha: float = option(0.6, "Share of the model in the new reference.")
    ref_model_sync_steps: int = option(512, "Optimizer steps between two moves of the reference.")
    entropy_coef: float = option(0.0, "Coefficient of a bonus on the mean entropy per token, in nats; 0: none.")
    use_adaptive_entropy: bool = option(False, "Steer that coefficient towards entropy_target.")
    entropy_coef_min: float = option(0.0, "Least coefficient that steering reaches.")
    entropy_coef_max: float = option(1.0, "Greatest coefficient that steering reaches.")
    entropy_coef_delta: float = option(0.005, "Change of the coefficient per optimizer step.")
    entropy_target: float = option(0.2, "Entropy per token, in nats, above which the bonus is off.")
    top_entropy_quantile: float = option(
        1.0, "Share of tokens, by entropy, that the loss keeps, over an optimizer step; 1: all."
    )
    use_bias_correction_kl: bool = option(True, "Multiply the KL to the reference by the ratio.")
    delta: float | None = option(None, "Upper bound of the ratio before clipping (two-sided clipping); None: none.")
    dynamic_sampling: bool = option(
        False, "Draw further prompts in place of groups whose rewards are all equal, which teach nothing (DAPO)."
    )
    dynamic_sampling_max_rounds: int = option(3, "Further draws per rollout at most.")


@dataclass
class GRPOFields(TrainerFields):
    """Settings of group-relative policy optimization; names, defaults and meanings are TRL 1.16's."""

    advantage_estimator: str = option(
        "group",
        "Advantages of rewards, by the name of an estimator, such as 'group' (as scale_rewards says), 'rloo' or "
        "'reinforce++'; in a script also a function of your own.",
    )
    scale_rewards: str = option(
        "group", "Divide advantages by the deviation of the 'group', of the 'batch', or not at all ('none')."
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (GDPO)."
    )
    objectives: Settings = option(
        None,
        'Several things to learn at once, by name, such as {"fair": {"rewards": ["unbiased"], "beta": 0.1}}: each has '
        "advantages of its own rewards and a gradient of its own; keys: rewards, weight, beta, kl_band, adaptive_beta, "
        "beta_bounds, beta_window, beta_factors; None: the weighted sum of all rewards.",
    )
    gradient_merge: str = option(
        "sum", "How the objectives' gradients become one, once per optimizer step: 'sum', 'pcgrad' or 'cagrad'."
    )
    cagrad_c: float = option(
        0.2, "How far CAGrad goes from the mean gradient, as a share of its length, for the objective that gains least."
    )
    loss_type: str = option(
        "dapo", "Loss, by the name of a file in memsafe_rl/ops/losses, such as grpo; in a script also your own."
    )
    importance_sampling_level: str = option("token", "Ratios per 'token' or per 'sequence' (GSPO).")
    off_policy_mask_threshold: float | None = option(
        None, "Drop rows with a negative advantage and a greater mean KL to the sampler, in nats; None: keep all."
    )
    sapo_temperature_pos: float = option(1.0, "Temperature of SAPO's gate for positive advantages.")
    sapo_temperature_neg: float = option(1.05, "Temperature of SAPO's gate for the others.")
    vespo_k_pos: float = option(2.0, "Power of VESPO's weight for positive advantages.")
    vespo_lambda_pos: float = option(3.0, "Decay of VESPO's weight for positive advantages.")
    vespo_k_neg: float = option(3.0, "Power of VESPO's weight for negative advantages.")
    vespo_lambda_neg: float = option(2.0, "Decay of VESPO's weight for negative advantages.")


@dataclass
class PPOFields(TrainerFields):
    """Settings of proximal policy optimization; names and meanings are those of TRL's where the concept is the same."""

    num_generations: int = option(1, "Completions sampled per prompt; PPO's critic needs no group to compare with.")
    num_iterations: int = option(4, "Epochs K: passes over each rollout, rows reshuffled in every one.")
    gamma: float = option(1.0, "Discount per action.")
    gae_lambda: float = option(
        0.95, "Share of what follows in an advantage: 0 for the critic's next value, 1 for all that came of it (GAE)."
    )
    vf_coef: float = option(0.1, "Coefficient of the critic's loss.")
    vf_clip: float | None = option(
        0.2, "Most a value moves away from its rollout's before the loss holds it, in units of reward; None: no bound."
    )
    whiten_advantages: bool = option(True, "Bring advantages to mean 0 and deviation 1 over the whole rollout.")
    whiten_rewards: bool = option(
        False, "Bring the rewards of actions to deviation 1 over the whole rollout; their mean stays."
    )
    kl_coef: float = option(
        0.05,
        "What a nat of KL to the reference costs in the reward of an action; 0: nothing. `beta` puts the KL into the "
        "loss instead.",
    )
    kl_estimator: str = option("k1", "How the KL of an action's reward is estimated: 'k1' or 'k3' (Schulman 2020).")
    kl_target: float | None = option(
        None, "KL to the reference per row, in nats, towards which kl_coef and beta are steered; None: they stay."
    )
    kl_horizon: float = option(10_000.0, "Rows over which that steering acts; fewer steer faster.")
    missing_eos_penalty: float | None = option(
        None, "Taken from the score of a completion that was cut off, in units of reward; None: nothing."
    )


GROUPS: dict[str, tuple[str, ...]] = {
    "Length, randomness, device": (
        "output_dir",
        "num_train_epochs",
        "max_steps",
        "seed",
        "data_seed",
        "use_cpu",
        "resume_from_checkpoint",
        "do_train",
    ),
    "Batches and groups": (
        "num_generations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "num_iterations",
        "dynamic_sampling",
        "dynamic_sampling_max_rounds",
    ),
    "Prompts": (
        "shuffle_dataset",
        "remove_unused_columns",
        "max_prompt_length",
        "overlong_prompts",
        "chat_template_kwargs",
    ),
    "Sampling": (
        "max_completion_length",
        "max_tool_calling_iterations",
        "max_turn_length",
        "max_episode_turns",
        "partial_rollout_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "generation_kwargs",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
    ),
    "Rollout engine": (
        "use_vllm",
        "vllm_gpu_memory_utilization",
        "vllm_enable_sleep_mode",
        "vllm_max_model_length",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
    ),
    "Rewards": (
        "reward_weights",
        "reward_timeout_seconds",
        "reward_retries",
        "reward_timeout_result",
        "overlap_async_rewards",
        "advantage_estimator",
        "scale_rewards",
        "multi_objective_aggregation",
    ),
    "Several objectives": (
        "objectives",
        "gradient_merge",
        "cagrad_c",
    ),
    "Loss": (
        "loss_type",
        "importance_sampling_level",
        "epsilon",
        "epsilon_high",
        "delta",
        "kl_stop",
        "mask_truncated_completions",
        "top_entropy_quantile",
        "off_policy_mask_threshold",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
    ),
    "Reference and entropy": (
        "beta",
        "use_bias_correction_kl",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "entropy_coef",
        "use_adaptive_entropy",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
        "entropy_target",
    ),
    "Optimizer": (
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ),
    "Precision and model": (
        "bf16",
        "fp16",
        "model_init_kwargs",
        "trust_remote_code",
        "router_aux_loss_coef",
        "disable_dropout",
    ),
    "Memory (never changes the result)": (
        "memory_budget",
        "allow_lossy",
        "trajectory_device",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "torch_empty_cache_steps",
        "auto_find_batch_size",
        "cache_implementation",
        "pad_to_multiple_of",
        "memory_forecast",
        "verify_plan",
        "probe_worst_case",
    ),
    "Evaluation": (
        "do_eval",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "per_device_eval_batch_size",
        "num_generations_eval",
        "eval_pass_at",
        "eval_pass_threshold",
        "eval_pass_reward",
    ),
    "Checkpoints": (
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
    ),
    "Log": (
        "logging_strategy",
        "logging_first_step",
        "logging_steps",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "log_completions",
        "num_completions_to_print",
        "log_unique_prompts",
        "alarms",
    ),
}
"""The settings as help shows them: each in one group, what matters most first."""


def describe(settings: Iterable[Field[Any]]) -> Iterator[str]:
    """Writes settings as the lines of a docstring's ``Args`` section."""
    yield "Args:"
    for setting in settings:
        yield f"    {setting.name}: {help_text(setting)} Default: {setting.default!r}."
