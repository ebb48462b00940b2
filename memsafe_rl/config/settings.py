"""Every setting of a run, declared once; nothing heavy is imported, so that help is fast."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memsafe_rl.config.alarm_rules import ALARMS
from memsafe_rl.config.declaring import Declared, Setting, declare, setting

if TYPE_CHECKING:  # what a validated configuration holds
    Settings = dict[str, Any] | None
    Filled = str
    Size = int | str | float
    Words = tuple[str, ...]
    Rules = dict[str, Any] | bool | None
else:  # what a user may write: text on a command line, None where a default is filled in
    Settings = dict[str, Any] | str | None
    Filled = str | None
    Size = int | str | float | None
    Words = tuple[str, ...] | str | None
    Rules = dict[str, Any] | str | None

run = partial(setting, group="Length, randomness, device", resume="may change")
seeding = partial(run, low=0, below=2**63, resume="must agree")
batch = partial(setting, group="Batches and groups")
layout = partial(batch, low=1, resume="may change")
"""How rows are laid out; the rows of a step and of a rollout are compared in their place."""
prompt = partial(setting, group="Prompts")
token_prompt = partial(prompt, tokens_only=True)
sampling = partial(setting, group="Sampling", tokens_only=True)
engine = partial(setting, group="Rollout engine", tokens_only=True)
server = partial(engine, resume="may change")
reward = partial(setting, group="Rewards")
calls = partial(reward, resume="may change")
objective = partial(setting, group="Several objectives")
loss = partial(setting, group="Loss")
token_loss = partial(loss, tokens_only=True)
reference = partial(setting, group="Reference and entropy")
entropy = token_reference = partial(reference, tokens_only=True)
optimizer = partial(setting, group="Optimizer")
precision = partial(setting, group="Precision and model")
memory = partial(setting, group="Memory (never changes the result)", resume="may change")
token_memory = partial(memory, tokens_only=True)
evaluation = partial(setting, group="Evaluation", resume="may change")
checkpoint = partial(setting, group="Checkpoints", resume="may change")
log = partial(setting, group="Log", resume="may change")
critic = partial(setting, group="Critic")
token_critic = partial(critic, tokens_only=True)
decay = partial(critic, low=0, high=1)

_PANELS = (run, batch, prompt, sampling, engine, reward, objective, loss, reference, optimizer, precision, memory)
GROUPS: tuple[str, ...] = tuple(panel.keywords["group"] for panel in (*_PANELS, evaluation, checkpoint, log))
"""The panels of help, what matters most first; PPO's own settings have one of their own."""

_OFF = {False: "no", "false": "no"}  # YAML's reading of a bare ``no``
_INTERVAL: dict[str, Any] = {"choices": ("no", "steps", "epoch"), "enum": "IntervalStrategy", "spellings": _OFF}
_ALARM_WORDS = {
    **dict.fromkeys((False, "false", "off", "no"), json.dumps(dict.fromkeys(ALARMS))),
    **dict.fromkeys((True, "true", "on", "yes"), "none"),
}
_LEVELS = ("passive", "detail", "debug", "info", "warning", "error", "critical")
_SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay"),
)
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop"), "torch"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"), "bitsandbytes"),
    **dict.fromkeys(("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"), "bitsandbytes"),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"), "bitsandbytes"),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), "bitsandbytes"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
}
"""The optimizers that can be named, and the package each needs.

Left out: those that move weights inside the backward pass (layer-wise GaLore and APOLLO, LOMO), which no failed attempt
could undo; those that need target modules; those whose weights differ between training and evaluation (schedule-free);
those of other devices.
"""
_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
OPTIMIZER_ARGUMENTS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
    **{name: _ADEMAMIX for name in OPTIMIZERS if "ademamix" in name},
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("bf16_stochastic_round",)),
}
"""What `optim_args` may hold, by optimizer: transformers drops any other name without a word, and hands text where
bitsandbytes' RMSprop and torchao's `block_size` need numbers."""
CACHES = (
    *("dynamic", "static", "offloaded", "offloaded_static", "quantized"),
    *("sliding_window", "hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
)
"""Key/value caches, by transformers' names."""


@declare()
class RunSettings(Declared):
    """What any training run has: length, optimizer, precision, memory, evaluation, checkpoints, log."""

    output_dir: Filled = run(
        None, "Folder of checkpoints, the final model and the metrics log; None: 'trainer_output'.", positional=True
    )
    num_train_epochs: float = run(3.0, "Passes over the prompts; a fraction ends within a pass.", above=0)
    max_steps: int = run(
        -1, "Optimizer steps of the run; overrides num_train_epochs; -1: not set; 0 is refused.", low=-1
    )
    do_train: bool = run(False, "For scripts that ask whether to train; the trainer does not read it.")
    resume_from_checkpoint: str | None = run(
        None,
        "Checkpoint folder to resume from; 'true': the newest sound one in output_dir; 'auto': if there is one.",
        spellings={True: "true", False: "none"},
    )
    seed: int = seeding(42, "Seed of all randomness; samples depend on it, never on how work is cut.")
    data_seed: int | None = seeding(None, "Seed of the order of prompts; None: seed.")
    fsdp: str | None = run(
        None,
        "Divides weights, gradients and optimizer state among the ranks of a launch, by FSDP2: 'full_shard'; None: "
        "every rank holds all of them.",
        spellings={True: "full_shard", False: "none"},
    )
    fsdp_config: Settings = run(None, 'Further settings of fsdp, such as {"version": 2}; JSON on a command line.')
    ddp_timeout: int = run(
        1800, "Seconds that a rank waits for the slowest one before the run ends.", low=1, high=10**8
    )
    use_cpu: bool = run(False, "Train on the CPU even where a CUDA device is available.")

    learning_rate: float = optimizer(1e-6, "Highest learning rate.", low=0)
    lr_scheduler_type: str = optimizer(
        "linear", "Shape of the learning rate, by transformers' name.", choices=_SCHEDULES, enum="SchedulerType"
    )
    lr_scheduler_kwargs: Settings = optimizer(
        None, 'Further arguments of the schedule, such as {"num_cycles": 1}; JSON on a command line.'
    )
    warmup_steps: float = optimizer(
        0, "Optimizer steps over which the learning rate rises from 0; below 1: that share of the run.", low=0
    )
    optim: str = optimizer(
        "adamw_torch_fused",
        "Optimizer, by transformers' name, such as 'sgd'.",
        choices=OPTIMIZERS,
        enum="OptimizerNames",
    )
    optim_args: str | None = optimizer(None, "Further arguments of the optimizer, as 'name=value,name=value'.")
    weight_decay: float = optimizer(0.0, "Weight decay of all trained weights but biases and norms.", low=0)
    adam_beta1: float = optimizer(0.9, "Decay of the mean gradient in Adam-like optimizers.", low=0, below=1)
    adam_beta2: float = optimizer(0.999, "Decay of the mean squared gradient in Adam-like optimizers.", low=0, below=1)
    adam_epsilon: float = optimizer(1e-8, "Added to the denominator in Adam-like optimizers.", low=0)
    max_grad_norm: float = optimizer(1.0, "Gradient norm above which the gradient is scaled down; 0: never.", low=0)

    bf16: bool | None = precision(
        None, "Forward passes in bfloat16; None: on where a CUDA device supports it and fp16 is off, else off."
    )
    fp16: bool = precision(False, "Forward passes in float16, with loss scaling.")
    batch_invariant: bool | None = precision(
        None,
        "Tokens and log-probs that are the same bits in any wave, slice, packing and retry, in half precision too, and "
        "the same in sampler and trainer; None: on where it was measured to cost less than a tenth of a step.",
        tokens_only=True,
    )
    model_init_kwargs: Settings = precision(
        None, 'Arguments of from_pretrained when the model is a name, such as {"dtype": "bfloat16"}.', tokens_only=True
    )
    master_weights: str | None = precision(
        None,
        "Trained weights in bfloat16: true: the optimizer steps on float32 copies; 'stochastic_rounding': it steps in "
        "float32, and sums are rounded at random; false: on the weights themselves, which rounds small updates away; "
        "None: true where weights are in bfloat16 and optim names the optimizer.",
        choices=("on", "off", "stochastic_rounding"),
        spellings={True: "on", "true": "on", "yes": "on", False: "off", "false": "off", "no": "off"},
        resume="may change",
    )
    trust_remote_code: bool = precision(
        False, "Whether models and tokenizers may run code that comes with them.", resume="may change"
    )
    router_aux_loss_coef: float | None = precision(
        None, "Weight of a mixture of experts' balance loss; None: what the model declares; 0.0: none.", low=0
    )
    router_z_loss_coef: float | None = precision(
        None, "Weight of a mixture of experts' router z-loss; None: what the model declares; 0.0: none.", low=0
    )
    disable_dropout: bool = precision(
        True, "Score and update without dropout; with dropout, only retries of the same size are exact."
    )

    memory_budget: Size = memory(
        "auto",
        "Device memory this run may use: 'auto', bytes, '16GiB' or a share such as '80%'.",
        spellings={None: "auto"},
    )
    allow_lossy: Words = memory(
        (),
        "Remedies that change the task, taken in this order when no plan fits: 'max_completion_length', "
        "'num_generations', 'num_iterations', 'cache_implementation', 'optim'.",
    )
    trajectory_device: str | None = memory(
        None,
        "Where a rollout waits between updates: 'device' or 'host'; None: the plan decides.",
        choices=("device", "host"),
    )
    gradient_checkpointing: bool | None = memory(
        None, "Hint: recompute activations; None: the plan decides.", also=("activation_checkpointing",)
    )
    gradient_checkpointing_kwargs: Settings = memory(
        None,
        'Hints under transformers\' names: {"offload": true} keeps activations in host memory; "every_n_layers" and '
        '"use_reentrant" change nothing, the log says why.',
        also=("activation_checkpointing_kwargs",),
    )
    torch_empty_cache_steps: int | None = memory(
        None, "Hint: optimizer steps between two releases of cached device memory; None: the plan decides.", low=1
    )
    torch_compile: bool = memory(
        False,
        "Decode and learn through torch.compile: same tokens and gradients up to rounding, for seconds of compiling "
        "at the start; needs a C++ compiler on a CPU, Triton on CUDA. A memory policy of one's own decides by itself.",
    )
    torch_compile_backend: str | None = memory(
        None,
        "Backend of torch.compile; only 'inductor', whose costs are known. Implies torch_compile.",
        choices=("inductor",),
    )
    torch_compile_mode: str | None = memory(
        None,
        "Mode of torch.compile; 'reduce-overhead' and 'max-autotune' run CUDA graphs on CUDA, which is not yet "
        "measured. Implies torch_compile; None: 'default'.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    auto_find_batch_size: bool = memory(
        False, "Hint without effect on results: a failed allocation makes the micro-batch smaller, never a group."
    )
    cache_implementation: str | None = token_memory(
        None,
        "Kind of key/value cache for rollouts, under transformers' names: 'quantized' keeps it in 8 bits, which is "
        "lossy and corrected by importance weights; others are hints without effect on results; None: the plan "
        "decides.",
        choices=CACHES,
    )
    pad_to_multiple_of: int | str | None = token_memory(
        "auto", "Hint without effect on results: multiple of tokens to pad rows to; 'auto': none.", low=1
    )
    memory_forecast: bool | None = memory(
        None,
        "Before weights are loaded, run a step on tensors without bytes: plan by what it would hold, and refuse a "
        "run that cannot fit; costs a few seconds. None: for a model given by name, on a CUDA device or under an "
        "explicit budget.",
    )
    verify_plan: bool = token_memory(
        False,
        "Before the first step, prove on this model that the plan changes neither tokens nor gradient, failures "
        "included; costs about three rollouts and gradients of one step.",
    )
    probe_worst_case: bool = token_memory(
        False,
        "Before the first step, try the longest prompt and completion once, so that a run that cannot fit fails in "
        "its first minute; costs a few long forward passes and two micro-batches.",
    )

    eval_strategy: str = evaluation("no", "When to evaluate: 'no', 'steps' or 'epoch'.", **_INTERVAL)
    eval_steps: float | None = evaluation(
        None, "Optimizer steps between evaluations; below 1: share of the run; None: logging_steps.", low=0
    )
    eval_delay: float = evaluation(0, "Optimizer steps (or epochs) before the first evaluation.", low=0)
    eval_on_start: bool = evaluation(False, "Evaluate once before the first optimizer step.")
    per_device_eval_batch_size: int = evaluation(
        8, "Completions per rank that an evaluation draws at once; never changes its result.", low=1
    )
    do_eval: bool = evaluation(False, "Whether to evaluate; on whenever eval_strategy is not 'no'.")
    num_generations_eval: int | None = evaluation(
        None, "Completions per prompt in evaluations; None: num_generations.", low=1
    )
    eval_pass_at: list[int] | None = evaluation(
        None, "Evaluations log pass@k and best@k for these k; None: 1, 2, 4, ... and num_generations_eval, if above 1."
    )
    eval_pass_threshold: float = evaluation(1.0, "Reward from which a completion of an evaluation passes.")
    eval_pass_reward: str | None = evaluation(
        None, "Name of the reward function that decides what passes; None: the weighted sum of all."
    )

    save_strategy: str = checkpoint(
        "steps",
        "When to save a checkpoint: 'no', 'steps', 'epoch' or 'best'.",
        choices=("no", "steps", "epoch", "best"),
        enum="SaveStrategy",
        spellings=_OFF,
    )
    save_steps: float = checkpoint(500, "Optimizer steps between checkpoints; below 1: share of the run.", above=0)
    save_total_limit: int | None = checkpoint(None, "Checkpoints kept, oldest removed first; None: all.", low=1)
    overwrite_output_dir: bool = checkpoint(
        False,
        "Move an earlier run's checkpoints and weights in output_dir into its folder previous/; nothing is deleted.",
    )
    on_save_error: str = checkpoint(
        "raise",
        "When a checkpoint cannot be written: 'raise' ends the run, 'warn' trains on without it.",
        choices=("raise", "warn"),
    )
    save_in_background: bool | None = checkpoint(
        None,
        "Copy a checkpoint to the host and write it while training goes on; None: on a GPU, where the host has room.",
    )
    interrupt_grace_seconds: float = checkpoint(
        10.0, "Seconds that a step may go on after SIGTERM, SIGINT or SIGHUP before it is abandoned; 0: none.", low=0
    )
    save_only_model: bool = checkpoint(False, "Save weights only; such a checkpoint cannot be resumed from.")
    load_best_model_at_end: bool = checkpoint(False, "Load the best checkpoint when the run ends.")
    metric_for_best_model: str | None = checkpoint(
        None, "Metric of an evaluation by which checkpoints are compared; None: 'reward', where one is needed."
    )
    greater_is_better: bool | None = checkpoint(
        None, "Whether a larger value of that metric is better; None: unless its name ends in 'loss'."
    )

    push_to_hub: bool = checkpoint(
        False, "Upload weights to a hub at every save, beside training, and in save_model()."
    )
    hub_model_id: str | None = checkpoint(
        None, "Repository to upload to, as 'owner/name'; None: the name of output_dir, in your own account."
    )
    hub_strategy: str = checkpoint(
        "every_save",
        "What is uploaded: 'every_save' (weights), 'checkpoint' (the newest too, as last-checkpoint), "
        "'all_checkpoints', or 'end' (what save_model() and push_to_hub() write).",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
        enum="HubStrategy",
    )
    hub_token: str | None = checkpoint(
        None, "Token for uploads; it is written nowhere; None: that of `hf auth login` or HF_TOKEN.", secret=True
    )
    hub_private_repo: bool | None = checkpoint(None, "Whether a new repository is private; None: the owner's default.")
    hub_always_push: bool = checkpoint(False, "Upload a save even while an earlier one is still on its way.")
    hub_revision: str | None = checkpoint(None, "Branch to upload to, made where it is missing; None: the main one.")

    logging_strategy: str = log("steps", "When to log: 'no', 'steps' or 'epoch'.", **_INTERVAL)
    logging_first_step: bool = log(False, "Log the first optimizer step too.")
    logging_steps: float = log(10, "Optimizer steps between two lines of the log; below 1: share of the run.", above=0)
    log_level: str = log("passive", "Least level logged on the main process; 'passive': as it is.", choices=_LEVELS)
    log_level_replica: str = log("warning", "Least level logged on the other processes.", choices=_LEVELS)
    disable_tqdm: bool | None = log(
        None, "Print no settings, metrics, progress bar or summary; None: print them unless warnings are off."
    )
    report_to: list[str] | str | None = log(
        "none", "Trackers, such as 'tensorboard' or 'wandb'; 'all': every one installed; 'none': none."
    )
    run_name: str | None = log(None, "Name of the run in trackers.")
    project: str = log("huggingface", "Name of the project in trackers.")
    trackio_space_id: str | None = log(None, "Hugging Face Space that trackio sends the run to; None: stays local.")
    log_completions: bool = log(False, "Show a table of prompts, completions and rewards at every log.")
    num_completions_to_print: int | None = log(None, "Rows of that table; None: all, 0: no table.", low=0)
    log_unique_prompts: bool = log(False, "Show each prompt once in that table.")
    alarms: Rules = log(
        None,
        "Limits from which an alarm is raised, once until it clears: truncation (share, 0.05), judge_seconds (6), "
        "equal_rewards (share of groups, 0.9), kl ([low, high] in nats per token, off), objective_kl (objectives' "
        "own kl_band, on), lost_updates (share of half-precision weights, 0.5), throughput_drop (share lost, 0.5), "
        "retries (in 20 steps, 3); null switches one off, false all; None: these.",
        spellings=_ALARM_WORDS,
    )


@declare()
class TrainerSettings(RunSettings):
    """What learning from rewards adds; names, defaults and meanings are TRL 1.16's where the concept is the same."""

    per_device_train_batch_size: int = layout(
        8, "Completions per rank and accumulation step; sets the effective batch, never what is in memory at once."
    )
    gradient_accumulation_steps: int = layout(
        1, "Accumulation steps per optimizer step; sets the effective batch, nothing else."
    )
    num_generations: int = batch(8, "Completions sampled per prompt: the group size G.", low=1)
    steps_per_generation: int | None = layout(
        None, "Batches (completions per rank and accumulation step) in one rollout; None: gradient_accumulation_steps."
    )
    generation_batch_size: int | None = layout(
        None, "Completions in one rollout over all ranks; None: batch per rank x ranks x steps_per_generation."
    )
    num_iterations: int = batch(
        1, "Epochs K: passes over each rollout, rows reshuffled in every one.", low=1, also=("num_ppo_epochs",)
    )
    dynamic_sampling: bool = batch(
        False, "Replace groups whose rewards, those of weight 0 left out, are all equal, by further prompts (DAPO)."
    )
    dynamic_sampling_max_rounds: int = batch(3, "Further draws per rollout at most.", low=1)

    shuffle_dataset: bool = prompt(True, "Shuffle the prompts in every pass.")
    remove_unused_columns: bool = prompt(False, "Keep only the prompt; reward functions then see no other column.")
    max_prompt_length: int | None = token_prompt(
        None, "Longest prompt, in tokens; None: what the context leaves beside max_completion_length.", low=1
    )
    overlong_prompts: str = token_prompt(
        "error",
        "What to do with a longer prompt: 'error', 'filter' (drop it) or 'truncate' (keep its end).",
        choices=("error", "filter", "truncate"),
    )
    chat_template_kwargs: Settings = token_prompt(
        None, 'Further arguments of the chat template, such as {"enable_thinking": false}.'
    )

    max_completion_length: int = sampling(
        512,
        "Longest completion, in tokens; of an episode, all turns and tool results together.",
        low=1,
        also=("response_length",),
        tokens_only=False,
    )
    max_tool_calling_iterations: int | None = sampling(
        None, "Turns of an episode whose tool calls are answered; None: no limit.", low=0
    )
    max_turn_length: int | None = sampling(
        None, "Longest turn of an episode that the model draws, in tokens; None: what is left of the completion.", low=1
    )
    max_episode_turns: int | None = sampling(None, "Turns that the model has in an episode; None: no limit.", low=1)
    partial_rollout_tokens: int | None = sampling(
        None,
        "Most tokens a completion draws in one rollout; an unfinished one is continued in the next, which changes "
        "the order of the data and needs importance weights; None: every completion is drawn to its end.",
        low=1,
    )
    temperature: float = sampling(
        1.0, "Sampling temperature; the loss uses log-probs at the same temperature.", above=0
    )
    top_p: float = sampling(
        1.0, "Sample from the likeliest tokens that hold this much probability; 1: all.", above=0, high=1
    )
    top_k: int = sampling(0, "Sample from this many likeliest tokens; 0: all.", low=0)
    min_p: float | None = sampling(
        None, "Least probability of a token, relative to the likeliest one's; None: none.", low=0, high=1
    )
    repetition_penalty: float = sampling(1.0, "Divides the logits of tokens already seen; 1: no penalty.", above=0)
    generation_kwargs: Settings = sampling(
        None,
        "Sampling settings under the names of transformers' GenerationConfig, which override the ones above: top_p, "
        "eos_token_id, stop_strings, bad_words_ids, min_new_tokens, logits_processor and so on; see docs/trl.md.",
    )
    vllm_importance_sampling_correction: bool = sampling(
        True, "Correct for another sampler's log-probs (an engine's, or rollout_func's) by importance weights."
    )
    vllm_importance_sampling_mode: str = sampling(
        "sequence_mask",
        "How those weights are bounded: 'token_' or 'sequence_' and 'truncate' (clip) or 'mask' (set to 0).",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    vllm_importance_sampling_clip_max: float | None = sampling(
        3.0, "Upper bound of those weights; None: none.", above=0, also=("vllm_importance_sampling_cap",)
    )
    vllm_importance_sampling_clip_min: float | None = sampling(None, "Lower bound of those weights; None: none.", low=0)
    sampler_rejection: str | None = sampling(
        None,
        "Exclude from the policy loss what another sampler found far more or far less likely, with or without weights: "
        "'token_' or 'sequence_' and 'k1' (log-ratio) or 'k3'; None: nothing.",
        choices=("token_k1", "token_k3", "sequence_k1", "sequence_k3"),
    )
    sampler_rejection_limit: float | None = sampling(
        None, "Most that sampler_rejection accepts, in nats, of a sequence per token.", above=0
    )

    rollout_engine: str | None = engine(
        None,
        "Engine that draws completions, by name; in a script also your own (docs/extending.md); None: the model's own.",
        registry="engines",
    )
    use_vllm: bool = engine(
        False, "Draw completions with vLLM: in this process (needs the package vllm) or on servers, see vllm_mode."
    )
    vllm_mode: str = engine(
        "colocate",
        "Where vLLM runs: 'colocate' in this process, 'server' in servers that are running already.",
        choices=("colocate", "server"),
    )
    vllm_server_base_url: str | None = server(
        None, "Address of the vLLM server, or of several, separated by commas; None: host and port."
    )
    vllm_server_host: str = server("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = server(8000, "Port of the vLLM server.", low=1, high=65535)
    vllm_server_timeout: float = server(
        240.0, "Longest wait for a vLLM server to be up, and longest silence of one, in seconds.", above=0
    )
    vllm_server_weights_dir: str | None = server(
        None,
        "Folder through which weights reach the servers, at the same path there; None: vllm_weights in output_dir.",
    )
    vllm_server_fallback: bool = server(
        True, "Have the model's own engine draw what no server answers; False: end the run."
    )
    async_rollouts: int = engine(
        0,
        "Rollouts that vLLM servers draw ahead: 1 draws the next one while this one is trained on, with weights that "
        "are one rollout old.",
        low=0,
        high=1,
    )
    vllm_gpu_memory_utilization: float = engine(
        0.3, "Share of the device that vLLM may fill; the plan and memory_budget hold as well.", above=0, high=1
    )
    vllm_enable_sleep_mode: bool = engine(
        False, "Take vLLM's weights and cache off the device between rollouts; CUDA only."
    )
    vllm_max_model_length: int | None = engine(
        None, "Longest prompt and completion together under vLLM, in tokens; None: what model and cache hold.", low=1
    )
    use_transformers_continuous_batching: bool = engine(
        False, "Draw completions with transformers' continuous batching."
    )
    transformers_continuous_batching_config: Settings = engine(
        None, "Further arguments of transformers' ContinuousBatchingConfig; its sizes follow the plan."
    )

    reward_weights: list[float] | None = reward(None, "Weight of each reward function; None: 1 each.")
    reward_timeout_seconds: float | None = calls(
        None, "Longest call of an async reward function, in seconds; None: no limit.", above=0, none="no limit"
    )
    reward_retries: int = calls(0, "Further calls of an async reward function that took longer.", low=0)
    reward_timeout_result: str = calls(
        "error",
        "When every call took longer: 'error' ends the run, 'none' leaves its rewards out.",
        choices=("error", "none"),
    )
    overlap_async_rewards: bool = calls(
        True, "Score the reference while async reward functions run; False: only once they have answered."
    )

    mask_truncated_completions: bool = token_loss(False, "Exclude completions that were cut off from the loss.")
    epsilon: float = loss(
        0.2, "Clip range of the ratio below 1 (and above, unless epsilon_high is set).", above=0, also=("cliprange",)
    )
    epsilon_high: float | None = loss(None, "Clip range of the ratio above 1; None: epsilon.", above=0)
    kl_stop: float | str | dict[str, Any] | None = loss(
        None,
        "KL to the model before the update, in nats, that ends the passes over a rollout: a target per token, or "
        '{"target": 0.02, "unit": "token" or "sequence", "estimator": "k3" or "k1"}; None: never.',
    )
    top_entropy_quantile: float = token_loss(
        1.0, "Share of tokens, by entropy, that the loss keeps in a step; 1: all.", low=0, high=1
    )
    delta: float | None = loss(
        None, "Upper bound of the ratio before clipping (two-sided clipping); None: none.", above=0
    )

    beta: float = reference(
        0.0, "Coefficient of the KL to the reference model, in nats; 0: no reference is loaded.", low=0
    )
    sync_ref_model: bool = reference(False, "Move the reference towards the model during training.")
    ref_model_mixup_alpha: float = reference(0.6, "Share of the model in the new reference.", low=0, high=1)
    ref_model_sync_steps: int = reference(512, "Optimizer steps between two moves of the reference.", low=1)
    entropy_coef: float = entropy(0.0, "Coefficient of a bonus on the mean entropy per token, in nats; 0: none.")
    use_adaptive_entropy: bool = entropy(False, "Adapt that coefficient towards entropy_target.")
    entropy_coef_min: float = entropy(0.0, "Least coefficient that it adapts to.")
    entropy_coef_max: float = entropy(1.0, "Greatest coefficient that it adapts to.")
    entropy_coef_delta: float = entropy(0.005, "Change of the coefficient per optimizer step.", low=0)
    entropy_target: float = entropy(0.2, "Entropy per token, in nats, above which the bonus is off.", low=0)
    use_bias_correction_kl: bool = reference(True, "Multiply the KL to the reference by the ratio.")


def again(name: str, default: Any, text: str | None = None) -> Any:
    """Declares a setting of every trainer again, with another default and, perhaps, another sentence."""
    known = TrainerSettings.declared[name]
    return replace(known, default=default, help=known.help if text is None else text)


@declare()
class GRPOSettings(TrainerSettings):
    """Settings of group-relative policy optimization; names, defaults and meanings are TRL 1.16's."""

    advantage_estimator: str = reward(
        "group",
        "Estimator of advantages: 'group' (as scale_rewards says), 'rloo', 'dr_grpo', 'reinforce++', "
        "'reinforce++-baseline', 'maxrl', 'opo' or 'otb'; in a script also a function of your own.",
        registry="estimators",
    )
    scale_rewards: str = reward(
        "group",
        "Divide advantages by the deviation of the 'group', of the 'batch', or not at all ('none').",
        choices=("group", "batch", "none"),
        spellings={True: "group", "true": "group", False: "none", "false": "none"},
    )
    multi_objective_aggregation: str = reward(
        "sum_then_normalize",
        "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    objectives: Settings = objective(
        None,
        'Several objectives to learn at once, by name, such as {"fair": {"rewards": ["unbiased"], "beta": 0.1}}, '
        "each with its own advantages and gradient; keys: rewards, weight, beta, kl_band, adaptive_beta, "
        "beta_bounds, beta_window, beta_factors; None: the weighted sum of all rewards.",
    )
    turn_advantage_coef: float = reward(
        0.0,
        "Weight of turn-level credit in episodes (GiGPO): how what follows a turn compares with what follows the "
        "group's other turns that began with the same observation; 0: none.",
        low=0,
    )
    turn_discount: float = reward(
        0.95, "How much a reward counts a turn earlier, for turn-level credit.", low=0, high=1
    )
    teacher_model_name_or_path: str | None = token_reference(
        None,
        "Teacher for on-policy distillation, a name or a folder: a network of the model's family and vocabulary, or "
        "an adapter, which joins a model under LoRA on the same base.",
    )
    teacher_model_init_kwargs: Settings = token_reference(
        None, "Arguments of its from_pretrained, such as dtype; JSON on a command line.", resume="may change"
    )
    teacher_model_server_url: str | None = token_reference(
        None,
        "Address of a vLLM server whose model is the teacher, such as http://gpu2:8000; None: it is loaded here.",
        resume="may change",
    )
    distillation_coef: float = token_reference(
        1.0, "How much a token's advantage drops per nat that the model finds it likelier than the teacher.", above=0
    )
    distillation_top_k: int | None = token_reference(
        None,
        "Tokens that the model finds likeliest at each place, which the teacher scores beside the drawn one: what they "
        "would pay on average is taken off its advantage, without bias, for less noise; None: none.",
        low=1,
    )
    gradient_merge: str = objective(
        "sum",
        "How each step merges the objectives' gradients: 'sum', 'pcgrad' or 'cagrad'.",
        choices=("sum", "pcgrad", "cagrad"),
    )
    cagrad_c: float = objective(
        0.2, "How far CAGrad moves from the mean gradient, as a share of its length.", low=0, below=1
    )
    loss_type: str = loss(
        "dapo",
        "Loss, by the name of a file in memsafe_rl/ops/losses, such as grpo; in a script also your own.",
        registry="losses",
    )
    importance_sampling_level: str = loss(
        "token",
        "Ratios per 'token', or per sequence: 'sequence' (its mean log-ratio, GSPO) or 'sequence_sum' (RLOO).",
        choices=("token", "sequence", "sequence_sum"),
    )
    off_policy_mask_threshold: float | None = loss(
        None, "Drop rows with a negative advantage and a larger mean KL to the sampler, in nats; None: none.", above=0
    )
    sapo_temperature_pos: float = loss(1.0, "Temperature of SAPO's gate for positive advantages.", above=0)
    sapo_temperature_neg: float = loss(1.05, "Temperature of SAPO's gate for the others.", above=0)
    vespo_k_pos: float = loss(2.0, "Power of VESPO's weight for positive advantages.", low=0)
    vespo_lambda_pos: float = loss(3.0, "Decay of VESPO's weight for positive advantages.", low=0)
    vespo_k_neg: float = loss(3.0, "Power of VESPO's weight for negative advantages.", low=0)
    vespo_lambda_neg: float = loss(2.0, "Decay of VESPO's weight for negative advantages.", low=0)
    cov_fraction: float = loss(2e-4, "Share of a step's tokens that clip_cov and kl_cov mark.", above=0, high=1)
    clip_cov_low: float = loss(1.0, "Least covariance of a token that clip_cov may mark.")
    clip_cov_high: float = loss(5.0, "Greatest covariance of a token that clip_cov may mark.")
    kl_cov_coef: float = loss(1.0, "What a token that kl_cov marks pays for a nat of its log-ratio.", low=0)


@declare()
class RLOOSettings(TrainerSettings):
    """Settings of REINFORCE leave-one-out; names, defaults and meanings are TRL 1.16's."""

    num_generations: int = again("num_generations", 2)
    beta: float = again(
        "beta", 0.05, "Cost of a nat of KL to the reference model in a completion's reward; 0: no reference is loaded."
    )
    normalize_advantages: bool = reward(False, "Scale advantages to mean 0 and deviation 1 over the whole rollout.")
    reward_clip_range: list[float] | None = reward(
        None, "Least and greatest reward of a completion, before the KL's cost; None: no bounds."
    )


@declare()
class PPOSettings(TrainerSettings):
    """Settings of proximal policy optimization; names and meanings are those of TRL's where the concept is the same."""

    num_generations: int = again(
        "num_generations", 1, "Completions sampled per prompt; the critic needs no group to compare with."
    )
    num_iterations: int = again("num_iterations", 4)
    gamma: float = decay(1.0, "Discount per action.")
    gae_lambda: float = decay(
        0.95, "Lambda of advantage estimation: 0 trusts the critic's next value, 1 rewards alone.", also=("lam",)
    )
    gae_lambda_critic: float | None = decay(
        None, "Lambda of the returns that the critic learns (VAPO, arXiv:2504.05118: 1.0); None: gae_lambda."
    )
    critic_warmup_rollouts: int = critic(
        0, "First rollouts from which only the critic learns (VAPO); needs a critic with weights of its own.", low=0
    )
    vf_coef: float = critic(0.1, "Coefficient of the critic's loss.", low=0)
    vf_clip: float | None = critic(
        0.2,
        "Clip range of a value around the rollout's, in units of reward; None: no bound.",
        above=0,
        also=("cliprange_value",),
    )
    whiten_advantages: bool = critic(True, "Scale advantages to mean 0 and deviation 1 over the whole rollout.")
    whiten_rewards: bool = critic(
        False, "Scale the rewards of actions to deviation 1 over the whole rollout; their mean stays."
    )
    kl_coef: float = critic(
        0.05, "Cost of a nat of KL to the reference in an action's reward; `beta` puts it into the loss.", low=0
    )
    kl_estimator: str = token_critic(
        "k1", "Estimator of the KL in an action's reward: 'k1' or 'k3' (Schulman 2020).", choices=("k1", "k3")
    )
    kl_target: float | None = critic(
        None, "KL to the reference per row, in nats, towards which kl_coef and beta adapt; None: they stay.", above=0
    )
    kl_horizon: float = critic(10_000.0, "Rows over which they adapt; fewer adapt faster.", above=0)
    missing_eos_penalty: float | None = token_critic(
        None, "Subtracted from the score of a completion cut off, in units of reward; None: nothing.", low=0
    )


ALGORITHMS: dict[str, type[TrainerSettings]] = {"GRPO": GRPOSettings, "RLOO": RLOOSettings, "PPO": PPOSettings}
"""The settings of each algorithm."""
DECLARED: dict[str, Setting] = {
    name: one for kind in (*ALGORITHMS.values(), ALGORITHMS["GRPO"]) for name, one in kind.declared.items()
}
"""The settings of all algorithms; GRPO's where defaults differ."""
