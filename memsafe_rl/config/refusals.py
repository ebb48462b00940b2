"""Settings of TRL and transformers that this library does not have, each with the reason and the nearest way."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from memsafe_rl.config.fields import GRPOFields, PPOFields, TrainerFields
from memsafe_rl.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """A setting that is refused by name.

    Args:
        reason: why it is not here, as the end of a sentence.
        remedy: what to do instead, as a sentence.
        off: values that switch it off; these are harmless and accepted, the first is what reading it gives.
    """

    reason: str
    remedy: str
    off: tuple[Any, ...] = ()

    def admits(self, value: Any) -> bool:
        """Tells whether a value switches the setting off; values may be text, as from a command line."""
        return _written(value) in {_written(harmless) for harmless in self.off}


def _written(value: Any) -> str:
    text = str(value).strip().lower()
    return "none" if text == "null" else text


ALIASES: dict[str, str] = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "cliprange_value": "vf_clip",
    "lam": "gae_lambda",
    "response_length": "max_completion_length",
}
"""Other names that TRL and transformers have for a setting of ours; None under such a name means not given."""


_SHARED = {setting.name for setting in fields(TrainerFields)}
_ALGORITHM_OF = {
    setting.name: algorithm
    for algorithm, own in (("GRPO", GRPOFields), ("PPO", PPOFields))
    for setting in fields(own)
    if setting.name not in _SHARED
}
"""The algorithm of each setting that only one has."""


def _table(reason: str, remedy: str, **off: Any) -> dict[str, Refusal]:
    """Refuses several settings for one reason; each keyword names one, with its off value or a tuple of them."""
    return {
        name: Refusal(reason, remedy, values if isinstance(values, tuple) else (values,))
        for name, values in off.items()
    }


REFUSED: dict[str, Refusal] = {
    **_table(
        "trained weights, the head among them, are float32 already unless told otherwise, and log-probs always are",
        "Leave it out; for a float32 matrix product as well, leave bf16 and fp16 off.",
        cast_lm_head_to_fp32=False,
    ),
    "vllm_mode": Refusal(
        "vLLM runs in the training process, where weights reach it by reference; a server would need a transport for "
        "them that this library does not have",
        "Leave it out, or draw the completions from your server in rollout_func.",
        ("colocate",),
    ),
    **_table(
        "vLLM runs in the training process, so that there is no server to reach",
        "Leave it out, or draw the completions from your server in rollout_func.",
        vllm_server_base_url=None,
        vllm_server_host="0.0.0.0",
        vllm_server_port=8000,
        vllm_server_timeout=240.0,
        vllm_group_port=51216,
    ),
    "vllm_tensor_parallel_size": Refusal(
        "vLLM runs in one process, which has one device", "Leave it out; every weight must fit on one device.", (1,)
    ),
    "vllm_model_impl": Refusal(
        "only vLLM's own form of a network has been compared with the trained one", "Leave it out.", ("vllm",)
    ),
    "vllm_structured_outputs_regex": Refusal(
        "tokens that a pattern rules out would have other log-probs in training than in sampling",
        "Leave it out, or draw the completions yourself in rollout_func.",
        (None,),
    ),
    "use_transformers_paged": Refusal("it is an earlier name", "Set use_transformers_continuous_batching.", (False,)),
    **_table(
        "weights are replicated on every rank; sharding them is not supported yet",
        "Leave it out; use peft_config or quantization_config to make the model smaller.",
        fsdp=(None, "", False, []),
        fsdp_config=(None, {}),
        deepspeed=None,
        parallelism_config=None,
        ds3_gather_for_generation=True,
    ),
    **_table(
        "ranks meet in a few collectives of this library's own, outside everything that is retried",
        "Leave it out, or configure torch.distributed in the launcher.",
        accelerator_config=(None, {}),
        ddp_find_unused_parameters=(None, False),
        ddp_bucket_cap_mb=None,
        ddp_broadcast_buffers=(None, False),
        ddp_static_graph=(None, False),
        ddp_backend=None,
        ddp_timeout=1800,
    ),
    "local_rank": Refusal("the launcher sets it in the environment", "Leave it out; read local_process_index.", (-1,)),
    "average_tokens_across_devices": Refusal(
        "every denominator is counted over the whole optimizer step and all ranks", "Leave it out.", (True,)
    ),
    **_table(
        "prompts are read by index in the main process, so that no failure can lose the order of the data",
        "Leave it out; prepare slow columns beforehand with datasets.map.",
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=(True, False),
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=(True, False),
        ignore_data_skip=False,
    ),
    "train_sampling_strategy": Refusal(
        "rows are sorted by length inside each update whatever their order in the data",
        "Set shuffle_dataset=False for the dataset's own order.",
        ("random",),
    ),
    "length_column_name": Refusal("lengths are counted in tokens by the library", "Leave it out.", ("length", None)),
    "label_names": Refusal("rewards take the place of labels", "Leave it out.", (None, [])),
    "label_smoothing_factor": Refusal("the loss has no labels", "Use entropy_coef to keep entropy up.", (0.0, 0)),
    "neftune_noise_alpha": Refusal(
        "noise in the embeddings would make each attempt at an update another one", "Leave it out.", (None,)
    ),
    "use_cache": Refusal("rollouts always use a cache, updates never do", "Leave it out.", (False, None)),
    **_table(
        "updates are cut to the length of their rows, and each new shape would be compiled again",
        "Leave it out.",
        torch_compile=False,
        torch_compile_backend=None,
        torch_compile_mode=None,
    ),
    **_table(
        "log-probs are already computed in tiles, and Liger replaces the forward pass they are taken from",
        "Leave it out, or apply Liger's layers to the model before passing it to the trainer.",
        use_liger_kernel=False,
        liger_kernel_config=(None, {}),
    ),
    **_table(
        "evaluation runs in the precision of training, so that the two can be compared",
        "Set bf16 or fp16.",
        bf16_full_eval=False,
        fp16_full_eval=False,
    ),
    "tf32": Refusal(
        "it is a setting of the process, not of a run",
        "Call torch.set_float32_matmul_precision('high') in your script.",
        (None,),
    ),
    "full_determinism": Refusal(
        "it is a setting of the process, not of a run",
        "Call transformers.enable_full_determinism(seed) in your script.",
        (False,),
    ),
    "optim_target_modules": Refusal(
        "the low-rank optimizers that read it are not supported", "Use peft_config for low-rank training.", (None,)
    ),
    **_table(
        "nothing is sent to a hub",
        "Leave it out, and upload output_dir when the run has ended.",
        push_to_hub=False,
        hub_token=None,
        hub_private_repo=None,
        hub_model_id=None,
        hub_strategy="every_save",
        hub_always_push=False,
        hub_revision=None,
        log_completions_hub_repo=None,
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=(None, False),
    ),
    **_table(
        "checkpoints and logs are written once, by the main process",
        "Leave it out; let the nodes share output_dir.",
        save_on_each_node=False,
        log_on_each_node=(True, False),
    ),
    "enable_jit_checkpoint": Refusal(
        "a checkpoint is written whole at the end of an optimizer step", "Lower save_steps.", (False,)
    ),
    "restore_callback_states_from_checkpoint": Refusal(
        "the callbacks passed to the trainer are the ones that run",
        "Pass them again when you resume.",
        (False,),
    ),
    "logging_nan_inf_filter": Refusal("losses are logged as they are", "Leave it out.", (True, False)),
    "include_num_input_tokens_seen": Refusal("num_tokens is always logged", "Leave it out.", ("no", False)),
    "skip_memory_metrics": Refusal(
        "memory is always measured", "Leave it out and read memory/* in the log.", (True, None)
    ),
    "debug": Refusal(
        "transformers' debug hooks replace the forward pass", "Use torch.autograd.detect_anomaly().", ("", None, [])
    ),
    **_table(
        "an evaluation draws completions and reports their rewards; it has no predictions to gather",
        "Leave it out; write a reward function for what you want to measure.",
        prediction_loss_only=False,
        eval_do_concat_batches=(True, False),
        eval_use_gather_object=False,
        eval_accumulation_steps=None,
        include_for_metrics=(None, []),
        batch_eval_metrics=False,
        do_predict=False,
    ),
    "log_multimodal": Refusal("prompts are text", "Leave it out.", (True, False)),
    # Names that earlier versions of TRL and transformers had, which scripts still carry.
    "warmup_ratio": Refusal("transformers 5 has joined it with warmup_steps", "Set warmup_steps to a share below 1."),
    "evaluation_strategy": Refusal("it is now called eval_strategy", "Set eval_strategy."),
    "no_cuda": Refusal("it is now called use_cpu", "Set use_cpu."),
    "logging_dir": Refusal("trackers write into output_dir", "Leave it out.", (None,)),
    "overwrite_output_dir": Refusal(
        "a run never removes what it did not write", "Leave it out, or choose another output_dir.", (False,)
    ),
    "save_safetensors": Refusal("weights are always saved as safetensors", "Leave it out.", (True,)),
    "group_by_length": Refusal(
        "rows are sorted by length inside each update whatever their order in the data", "Leave it out.", (False,)
    ),
    "use_liger_loss": Refusal("log-probs are already computed in tiles", "Leave it out.", (False, None)),
    "vllm_guided_decoding_regex": Refusal(
        "rollouts run in this library's own engine", "Draw the completions yourself in rollout_func.", (None,)
    ),
}
"""Every setting of TRL 1.16's GRPOConfig that is not here (see `ALIASES` too), and some of earlier versions."""


if TYPE_CHECKING:

    class RefusedFields:
        """The refused settings; scripts may ask for them, but no checked code sets them."""

else:
    RefusedFields = make_dataclass(
        "RefusedFields",
        [
            (
                name,
                str,
                field(
                    default=refusal.off[0],
                    metadata={"help": f"Refused: {refusal.reason}.".replace("%", "%%"), "nargs": "?", "const": "True"},
                    repr=False,
                    compare=False,
                    kw_only=True,
                ),
            )
            for name, refusal in REFUSED.items()
            if refusal.off
        ],
        namespace={
            "__module__": __name__,
            "__doc__": "The refused settings at their off values, for parsers that read the fields of a dataclass.",
        },
    )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Finds the known name that looks most like a given one; None if none does."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return found[0] if found else None


_FEW = 40
"""Names that an error lists; there are hundreds of settings."""


def unknown(name: object, names: Iterable[str], what: str = "setting", *, also: Iterable[str] = ()) -> ConfigError:
    """Makes the error for a name that nobody knows."""
    there = list(names)
    close = nearest(str(name), [*there, *also])
    everything = ", ".join(there) if len(there) < _FEW else "see `memsafe-rl train --help`"
    hint = f"Did you mean {close!r}?" if close else f"What there is: {everything}."
    return ConfigError(f"There is no {what} {name!r}. {hint}")


def admit(
    given: Mapping[str, Any],
    known: Collection[str],
    refused: Mapping[str, Refusal] = REFUSED,
    what: str = "setting",
) -> dict[str, Any]:
    """Keeps the settings that are honoured, drops those that are off, and refuses the others by name."""
    kept: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        target = ALIASES.get(name, name)
        if target in known:
            if name in ALIASES and value is None:
                continue
            if target in kept and kept[target] != value:
                raise ConfigError(
                    f"{name} is {value!r}, but {written[target]}, another name of the same {what}, is "
                    f"{kept[target]!r}. Set one only."
                )
            kept[target], written[target] = value, name
        elif target in refused:
            _refuse(target, value, refused[target])
        elif what == "setting" and target in _ALGORITHM_OF:
            algorithm = _ALGORITHM_OF[target]
            raise ConfigError(
                f"{name} is {value!r:.100}, but it is a setting of {algorithm} alone. Use {algorithm}Config with "
                f"{algorithm}Trainer, or leave {name} out."
            )
        else:
            others = [alias for alias, meant in ALIASES.items() if meant in known]
            raise unknown(name, known, what, also=[*refused, *others])
    return kept


def _refuse(name: str, value: Any, refusal: Refusal) -> None:
    if not refusal.admits(value):
        raise ConfigError(f"{name} is {value!r}, which is refused: {refusal.reason}. {refusal.remedy}")
