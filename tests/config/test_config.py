"""The configuration: every TRL setting has its place, values are read and checked, and callbacks can use it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import pickle
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from transformers import (
    HfArgumentParser,
    SchedulerType,
    Trainer,
    TrainerState,
    get_scheduler,
    trainer_callback,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import OptimizerNames, ParallelMode

from memsafe_rl.config import grpo as grpo_module
from memsafe_rl.config import validation
from memsafe_rl.config.alarm_rules import KLStop
from memsafe_rl.config.declaring import declare, grouped, setting
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.config.settings import (
    ALGORITHMS,
    CACHES,
    DECLARED,
    GROUPS,
    OPTIMIZER_ARGUMENTS,
    OPTIMIZERS,
    GRPOSettings,
    RLOOSettings,
)
from memsafe_rl.config.unsupported import ALIASES, REFUSED
from memsafe_rl.config.validation import ENUMS, REGISTRIES
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import AdaptivePolicy
from memsafe_rl.ops.advantages import ESTIMATORS, AdvantageEstimator
from memsafe_rl.training.assembly.inputs import chosen_policy
from memsafe_rl.types import LossSettings, SamplingSettings

OURS = {field.name: field for field in dataclasses.fields(GRPOSettings)}
THEIRS = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
RLOO_THEIRS = {field.name: field for field in dataclasses.fields(trl.RLOOConfig)}

NEW = {
    "async_rollouts",
    "vllm_server_fallback",
    "vllm_server_weights_dir",
    "advantage_estimator",
    "distillation_coef",
    "distillation_top_k",
    "teacher_model_server_url",
    "teacher_model_init_kwargs",
    "teacher_model_name_or_path",
    "sampler_rejection",
    "sampler_rejection_limit",
    "alarms",
    "allow_lossy",
    "batch_invariant",
    "cagrad_c",
    "dynamic_sampling",
    "dynamic_sampling_max_rounds",
    "eval_pass_at",
    "eval_pass_reward",
    "eval_pass_threshold",
    "gradient_merge",
    "kl_stop",
    "max_episode_turns",
    "max_prompt_length",
    "master_weights",
    "max_turn_length",
    "memory_budget",
    "interrupt_grace_seconds",
    "on_save_error",
    "save_in_background",
    "overwrite_output_dir",
    "memory_forecast",
    "objectives",
    "overlap_async_rewards",
    "overlong_prompts",
    "partial_rollout_tokens",
    "probe_worst_case",
    "reward_retries",
    "reward_timeout_result",
    "reward_timeout_seconds",
    "rollout_engine",
    "trajectory_device",
    "verify_plan",
    "cov_fraction",
    "clip_cov_low",
    "clip_cov_high",
    "kl_cov_coef",
    "router_z_loss_coef",
    "turn_advantage_coef",
    "turn_discount",
}
"""Settings that TRL does not have."""

DIFFERENT_DEFAULTS = {
    "disable_dropout": True,  # a batch that is cut otherwise would draw other masks
    "gradient_checkpointing": None,  # the plan decides
}
"""Every default that is not TRL's."""


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    grpo_module._warn.cache_clear()
    validation._say_once.cache_clear()


# Every TRL setting has its place


@pytest.mark.parametrize("name", THEIRS)
def test_every_trl_setting_is_honoured_or_refused(name: str) -> None:
    places = [name in OURS, name in ALIASES, name in REFUSED]
    assert sum(places) == 1, f"{name} must be a field, an alias or a refusal, and only one of them"


@pytest.mark.parametrize("name", sorted(set(THEIRS) & set(OURS)))
def test_defaults_are_trls(name: str) -> None:
    expected = DIFFERENT_DEFAULTS.get(name, default_of(THEIRS[name]))
    assert OURS[name].default == expected
    assert type(OURS[name].default) is type(expected)


def test_rloo_has_every_setting_of_trls_with_its_default() -> None:
    for name, field in RLOO_THEIRS.items():
        assert (name in RLOOSettings.declared) + (name in ALIASES) + (name in REFUSED) == 1, name
        if name in RLOOSettings.declared:
            assert RLOOSettings.declared[name].default == DIFFERENT_DEFAULTS.get(name, default_of(field)), name


def test_what_is_not_trls_is_known() -> None:
    assert set(OURS) - set(THEIRS) == NEW


@pytest.mark.parametrize("name", sorted(set(THEIRS) & set(REFUSED)))
def test_trls_default_of_a_refused_setting_is_harmless(name: str) -> None:
    default = default_of(THEIRS[name])
    config = GRPOConfig(**{name: default})
    assert name not in config.to_dict()
    assert REFUSED[name].admits(str(default))  # as from a command line


TAKEN = sorted(name for name, refusal in REFUSED.items() if refusal.taken)


@pytest.mark.parametrize("name", TAKEN)
def test_what_changes_nothing_is_taken_in_one_line_that_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = GRPOConfig(**{name: "something else"})
    assert config == GRPOConfig()
    assert name not in config.to_dict()
    said = [record.message for record in caplog.records if record.message.startswith(name)]
    assert len(said) == 1
    assert said[0].startswith(f"{name} is 'something else', which changes nothing here: ")


def test_a_configuration_may_be_derived_with_fields_of_its_own() -> None:
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        benchmarks: list[str] = dataclasses.field(default_factory=list)
        num_completions_to_print: int | None = 0

    config = Mine(output_dir="x", benchmarks=["maths"], beta=0.1)
    assert (config.benchmarks, config.num_completions_to_print, config.beta) == (["maths"], 0, 0.1)
    assert config.to_dict()["benchmarks"] == ["maths"]
    assert Mine(**config.to_dict()) == config
    config.benchmarks = []
    assert config.benchmarks == []
    assert dataclasses.replace(config, seed=3).seed == 3
    (parsed,) = HfArgumentParser(Mine).parse_args_into_dataclasses(["--benchmarks", "a", "b"])
    assert parsed.benchmarks == ["a", "b"]
    with pytest.raises(ConfigError, match="There is no setting 'benchmark'"):
        config.benchmark = []
    with pytest.raises(ConfigError, match="it must be at least 0"):
        Mine(output_dir="x", num_completions_to_print=-1)


def test_what_scripts_read_of_the_processes_is_there() -> None:
    config = GRPOConfig(accelerator_config={"dispatch_batches": True})
    assert config.accelerator_config.dispatch_batches is False
    config.distributed_state.wait_for_everyone()
    assert config.distributed_state.num_processes == config.world_size


def test_rollouts_of_one_optimizer_step_are_one(caplog: pytest.LogCaptureFixture) -> None:
    paper = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 128, "steps_per_generation": 16}
    config = GRPOConfig(**paper, num_generations=16)
    assert (config.rollout_rows, config.updates_per_epoch) == (512, 1)
    assert "its 8 rollouts are drawn with the same weights, so they are drawn as one" in caplog.text
    assert dataclasses.replace(config, seed=3).rollout_rows == 512
    with pytest.raises(ConfigError, match="would straddle two rollouts"):  # passes over each of the small rollouts
        GRPOConfig(**paper, num_generations=16, num_iterations=2)


def test_no_steps_are_refused_where_trl_would_train_every_epoch() -> None:
    with pytest.raises(ConfigError, match=r"^max_steps is 0, which TRL reads as all epochs\. Give optimizer steps"):
        GRPOConfig(max_steps=0)


@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(TAKEN)))
def test_a_refusal_ends_in_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**{name: "something else"})
    message = str(caught.value)
    assert message.startswith(f"{name} is 'something else', which is refused: ")
    assert message.endswith(".")
    assert "\n" not in message


def test_use_vllm_is_refused_with_the_command_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"use_vllm is True.*not installed.*`pip install vllm`") as caught:
        GRPOConfig(use_vllm=True)
    assert isinstance(caught.value, ValueError)


def test_a_rollout_engine_is_chosen_with_what_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "vllm" or find(name, *rest))
    config = GRPOConfig(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=1024)
    assert config.use_vllm is True
    for name, value, message in (
        ("use_transformers_continuous_batching", True, r"are both set"),
        ("verify_plan", True, r"verify_plan is True with use_vllm"),
        ("probe_worst_case", True, r"probe_worst_case is True with use_vllm"),
        ("vllm_max_model_length", 512, r"leaves no prompt beside max_completion_length 512"),
        ("vllm_gpu_memory_utilization", 1.5, r"vllm_gpu_memory_utilization is 1\.5"),
        ("vllm_tensor_parallel_size", 2, r"vllm_tensor_parallel_size is 2, which is refused"),
    ):
        with pytest.raises(ConfigError, match=message):
            GRPOConfig(**{"use_vllm": True, name: value})
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="in a run of 2 ranks"):
        GRPOConfig(use_vllm=True)


def test_arguments_of_continuous_batching_are_checked_at_once() -> None:
    batching = {"page_size": 64}
    config = GRPOConfig(
        use_transformers_continuous_batching=True, transformers_continuous_batching_config='{"page_size": 64}'
    )
    assert config.transformers_continuous_batching_config == batching
    with pytest.raises(ConfigError, match="sizes follow the memory plan"):
        GRPOConfig(use_transformers_continuous_batching=True, transformers_continuous_batching_config={"num_blocks": 9})


def test_any_of_transformers_settings_of_compiling_gives_plans_a_mode() -> None:
    assert GRPOConfig().compile_mode is None
    assert GRPOConfig(torch_compile=True).compile_mode == "default"
    assert GRPOConfig(torch_compile_backend="inductor").compile_mode == "default"
    assert GRPOConfig(torch_compile_mode="reduce-overhead").compile_mode == "reduce-overhead"
    assert chosen_policy(None, GRPOConfig(torch_compile=True)) == AdaptivePolicy(compile="default")
    offloading = GRPOConfig(activation_checkpointing_kwargs={"offload": True})
    assert chosen_policy(None, offloading) == AdaptivePolicy(offload_activations=True)
    assert chosen_policy("ladder", offloading).update.offload_activations  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="offload_activations is True with memory_policy '24GB"):
        chosen_policy("24GB+", offloading)
    with pytest.raises(ConfigError, match="which decides it"):
        chosen_policy("24GB+", GRPOConfig(torch_compile=True))
    with pytest.raises(ConfigError, match="inductor"):
        GRPOConfig(torch_compile_backend="cudagraphs")
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        GRPOConfig(torch_compile=True, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"batch_invariant=True .* disable_dropout=False .* Leave one of the two out"):
        GRPOConfig(disable_dropout=False, batch_invariant=True)


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"There is no setting 'num_generation'. Did you mean 'num_generations'\?"):
        GRPOConfig(num_generation=4)
    with pytest.raises(ConfigError, match="warmup_steps"):
        GRPOConfig(warmup_ratio=0.1)


def test_another_name_of_a_setting_is_read_and_written() -> None:
    config = GRPOConfig(activation_checkpointing=True, vllm_importance_sampling_cap=None)
    assert config.gradient_checkpointing is True
    assert config.activation_checkpointing is True
    assert config.vllm_importance_sampling_clip_max == 3.0
    assert GRPOConfig(vllm_importance_sampling_cap=2.0).vllm_importance_sampling_clip_max == 2.0
    with pytest.raises(ConfigError, match="Set one only"):
        GRPOConfig(activation_checkpointing=True, gradient_checkpointing=False)


def test_attributes_are_guarded_like_arguments() -> None:
    config = GRPOConfig()
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        config.learnin_rate = 1.0
    with pytest.raises(ConfigError, match="vllm_group_port is 51217"):
        config.vllm_group_port = 51217
    config.vllm_group_port = 51216
    assert config.vllm_group_port == 51216
    assert config.deepspeed is None
    assert config.hub_strategy == "every_save"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = config.nonsense  # type: ignore[attr-defined]


# Reading values


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rate", "1e-5", 1e-5),  # PyYAML reads 1e-5 as text
        ("learning_rate", 1, 1),
        ("num_iterations", "4", 4),
        ("num_iterations", 4.0, 4),
        ("warmup_steps", "0.1", 0.1),
        ("warmup_steps", "10", 10),
        ("log_completions", "true", True),
        ("log_completions", "off", False),
        ("epsilon_high", "none", None),
        ("eval_strategy", False, "no"),  # YAML's `no`
        ("scale_rewards", True, "group"),
        ("scale_rewards", False, "none"),
        ("scale_rewards", "False", "none"),
        ("model_init_kwargs", '{"dtype": "bfloat16"}', {"dtype": "bfloat16"}),
        ("reward_weights", "1, 0.5", [1, 0.5]),
        ("reward_weights", "[1, 0.5]", [1, 0.5]),
        ("reward_weights", (1, 0.5), [1, 0.5]),
        ("report_to", "none", []),
        ("report_to", ["none"], []),
        ("report_to", None, []),
        ("report_to", "tensorboard,wandb", ["tensorboard", "wandb"]),
        ("pad_to_multiple_of", "64", 64),
        ("pad_to_multiple_of", "none", None),
        ("pad_to_multiple_of", "auto", "auto"),
        ("memory_budget", "16GiB", "16GiB"),
        ("memory_budget", None, "auto"),
        ("memory_budget", "", "auto"),
        ("output_dir", Path("runs/one"), "runs/one"),
        ("memory_budget", 2**34, 2**34),
        ("memory_budget", "80%", "80%"),
        ("allow_lossy", [], ()),
        ("allow_lossy", None, ()),
        ("kl_stop", "0.02", 0.02),
        ("trajectory_device", "host", "host"),
        ("resume_from_checkpoint", True, True),
        ("resume_from_checkpoint", "true", True),
        ("resume_from_checkpoint", "out/checkpoint-3", "out/checkpoint-3"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False}, {"use_reentrant": False}),
    ],
)
def test_values_are_read(name: str, given: Any, expected: Any) -> None:
    read = getattr(GRPOConfig(**{name: given}), name)
    assert read == expected
    assert isinstance(read, type(expected))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"learning_rate": "fast"}, ("learning_rate is 'fast'", "a number")),
        ({"learning_rate": -1.0}, ("learning_rate is -1.0", "at least 0")),
        ({"learning_rate": float("nan")}, ("learning_rate is nan",)),
        ({"num_iterations": 1.5}, ("num_iterations is 1.5", "a whole number")),
        ({"num_iterations": True}, ("num_iterations is True", "a whole number")),
        ({"num_iterations": 0}, ("num_iterations is 0", "at least 1")),
        ({"max_completion_length": None}, ("max_completion_length is None", "a whole number")),
        ({"log_completions": "perhaps"}, ("log_completions is 'perhaps'", "true or false")),
        ({"run_name": 3}, ("run_name is 3", "it must be text or none.")),
        ({"model_init_kwargs": "bf16"}, ("model_init_kwargs is 'bf16'", "a mapping")),
        ({"model_init_kwargs": "{bf16}"}, ("model_init_kwargs", "not JSON")),
        ({"reward_weights": ["a"]}, ("reward_weights is 'a'", "a number")),
        ({"num_generations": 1}, ("num_generations is 1", "at least 2", "num_generations=8")),
        ({"reward_weights": [1.0, float("nan")]}, ("reward_weights is nan; it must be finite.",)),
        ({"entropy_coef": float("nan")}, ("entropy_coef is nan; it must be finite.",)),
        ({"entropy_coef": float("inf")}, ("entropy_coef is inf; it must be finite.",)),
        ({"entropy_coef_max": "nan"}, ("entropy_coef_max is nan; it must be finite.",)),
        ({"cache_implementation": "quantised"}, ("it must be one of dynamic, static", "Did you mean 'quantized'")),
        ({"loss_type": None}, ("loss_type is None", "grpo", "a function, or Loss('mine', my_function)")),
        (
            {"advantage_estimator": AdvantageEstimator("nine", torch.sign, least_group=9)},
            (
                "num_generations is 8",
                "at least 9 are needed. Set num_generations=9.",
            ),
        ),
        ({"optim_args": "lr"}, ("optim_args has 'lr', which optim 'adamw_torch_fused' does not take. It takes none.",)),
        ({"optim": "sgd", "optim_args": "foo=1"}, ("has 'foo=1'", "momentum, dampening, nesterov, as")),
        ({"optim": "sgd", "optim_args": "weight_decay=0.5"}, ("optim_args has 'weight_decay=0.5'", "does not take")),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-5}},
            ("lr_scheduler_kwargs is {'lr_end': 1e-05}", "initial lr"),
        ),
        ({"optim": "sgd", "optim_args": "momentum=0.9, nesterov"}, ("optim_args has 'nesterov'", "'name=value,")),
        (
            {"lr_scheduler_kwargs": {"x": 1}},
            ("lr_scheduler_kwargs is {'x': 1}, which", "type 'linear'", "'x'"),
        ),
        ({"lr_scheduler_type": "warmup_stable_decay"}, ("lr_scheduler_kwargs is {}", "num_decay_steps")),
        ({"memory_budget": 0.5}, ("memory_budget is 0.5", "a share such as '50%'")),
        ({"memory_budget": "0.5"}, ("memory_budget is 0.5", "a share such as '50%'")),
        ({"loss_type": "gpro"}, ("loss_type is 'gpro'", "Did you mean 'grpo'")),
        ({"importance_sampling_level": "row"}, ("importance_sampling_level", "token, sequence")),
        ({"scale_rewards": "std"}, ("scale_rewards is 'std'", "group, batch, none")),
        ({"optim": "adamw_tourch"}, ("optim is 'adamw_tourch'", "Did you mean 'adamw_torch'")),
        ({"optim": "galore_adamw_layerwise"}, ("optim is 'galore_adamw_layerwise'", "one of")),
        ({"lr_scheduler_type": "cosin"}, ("lr_scheduler_type", "Did you mean 'cosine'")),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ("lr_scheduler_type", "one of")),
        ({"fp16": True, "bf16": True}, ("fp16 and bf16 are both True", "Set one")),
        ({"top_entropy_quantile": 1.2}, ("top_entropy_quantile is 1.2", "at least 0 and at most 1")),
        ({"temperature": 0}, ("temperature is 0", "more than 0")),
        ({"eval_pass_threshold": float("nan")}, ("eval_pass_threshold is nan; it must be finite.",)),
        (
            {"reward_timeout_seconds": float("inf")},
            ("reward_timeout_seconds is inf; it must be finite, and more than 0, or None for no limit.",),
        ),
        (
            {"reward_timeout_seconds": 0},
            ("reward_timeout_seconds is 0; it must be more than 0, or None for no limit.",),
        ),
        ({"reward_retries": 10**400}, ("reward_retries is 1000", "it must be finite, and at least 0.")),
        (
            {"max_completion_length": 8, "generation_kwargs": {"min_new_tokens": 9}},
            ("min_new_tokens is 9", "has 8 tokens", "at most 8, or raise max_completion_length"),
        ),
        ({"epsilon": 0.0}, ("epsilon is 0.0", "more than 0")),
        ({"epsilon_high": -0.1}, ("epsilon_high is -0.1", "more than 0")),
        ({"top_p": 0.0}, ("top_p is 0.0", "more than 0 and at most 1")),
        ({"min_p": 2}, ("min_p is 2",)),
        ({"top_k": -1}, ("top_k is -1", "at least 0")),
        ({"adam_beta2": 1.0}, ("adam_beta2 is 1.0", "less than 1")),
        ({"sapo_temperature_neg": 0}, ("sapo_temperature_neg is 0",)),
        ({"beta": -0.1}, ("beta is -0.1",)),
        ({"sync_ref_model": True}, ("sync_ref_model is True", "beta")),
        ({"overlong_prompts": "drop"}, ("overlong_prompts is 'drop'", "error, filter, truncate")),
        ({"trajectory_device": "disk"}, ("trajectory_device is 'disk'", "device, host")),
        ({"memory_budget": "lots"}, ("memory_budget is 'lots'", "'16GiB'")),
        ({"memory_budget": "120%"}, ("memory_budget is '120%'", "100%")),
        ({"memory_budget": 0}, ("memory_budget is 0", "more than 0 bytes")),
        ({"allow_lossy": ["shorter"]}, ("allow_lossy is 'shorter'", "max_completion_length, num_generations")),
        ({"gradient_checkpointing_kwargs": {"use_reentrent": True}}, ("use_reentrent", "Did you mean 'use_reentrant'")),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 0}}, ("every_n_layers", "at least 1")),
        ({"gradient_checkpointing_kwargs": {"offload": "maybe"}}, ("offload", "maybe")),
        ({"kl_stop": 0}, ("kl_stop is 0", "more than 0 nats")),
        ({"kl_stop": {"goal": 1}}, ("no key of kl_stop 'goal'", "target")),
        ({"kl_stop": {"unit": "token"}}, ("kl_stop", "without a target")),
        ({"kl_stop": {"target": 1, "unit": "row"}}, ("unit of kl_stop is 'row'", "token, sequence")),
        ({"kl_stop": {"target": 1, "estimator": "k2"}}, ("estimator of kl_stop is 'k2'", "k3, k1")),
        ({"generation_kwargs": {"num_beams": 4}}, ("num_beams is 4, which is refused", "temperature")),
        ({"generation_kwargs": {"typical": 0.5}}, ("key of generation_kwargs 'typical'", "Did you mean 'typical_p'")),
        ({"generation_kwargs": {"temperature": 2}}, ("generation_kwargs has temperature=2", "Set temperature itself")),
        ({"generation_kwargs": {"top_p": 3}}, ("top_p is 3",)),
        ({"report_to": "tensorbord"}, ("report_to is 'tensorbord'", "Did you mean 'tensorboard'")),
        ({"logging_steps": 1.5}, ("logging_steps is 1.5", "whole number of optimizer steps")),
        ({"load_best_model_at_end": True}, ("save_strategy is 'steps'", "eval_strategy='steps'")),
        ({"save_strategy": "best"}, ("save_strategy is 'best'", "eval_strategy 'no'", "Set eval_strategy='steps'")),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
            ("save_steps 4", "eval_steps 3", "save_steps=3"),
        ),
        (
            {"use_adaptive_entropy": True, "entropy_coef": 2.0},
            ("entropy_coef is 2.0", "entropy_coef_max 1.0"),
        ),
        ({"sampler_rejection": "token_k2"}, ("sampler_rejection is 'token_k2'", "sequence_k3")),
        ({"sampler_rejection": "token_k1"}, ("sampler_rejection_limit None", "sampler_rejection_limit=0.7")),
        ({"sampler_rejection_limit": 0.5}, ("sampler_rejection is None", "leave both out")),
        (
            {"vllm_importance_sampling_clip_min": 4.0},
            ("vllm_importance_sampling_clip_min is 4.0", "vllm_importance_sampling_clip_max 3.0"),
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            ("'token_truncate'", "vllm_importance_sampling_clip_max=3.0"),
        ),
    ],
)
def test_wrong_values_are_refused_in_one_line(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**settings)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_declaration_fits_its_setting() -> None:
    every = DECLARED
    assert set(every) == {field.name for one in ALGORITHMS.values() for field in dataclasses.fields(one)}
    assert not set(REFUSED) & set(every)
    assert not set(ALIASES) & set(every)
    assert set(OPTIMIZERS) <= {name.value for name in OptimizerNames}
    assert set(every["lr_scheduler_type"].choices) <= {name.value for name in SchedulerType}
    for name, one in every.items():
        assert one.name == name
        assert one.registry in ("", *REGISTRIES)
        assert one.enum in ("", *ENUMS)
        assert one.range is None or one.default in (None, "auto") or one.default in one.range
        words = tuple(REGISTRIES[one.registry]) if one.registry else tuple(one.choices)
        assert not words or one.default in (None, *words)


def test_each_field_is_documented_and_in_one_group() -> None:
    groups = grouped(GRPOSettings)
    assert set(groups) == set(GROUPS)
    assert sorted(one.name for settings in groups.values() for one in settings) == sorted(OURS)
    for name, one in GRPOSettings.declared.items():
        assert len(one.help) > 15
        assert f"{name}: {one.help}" in (GRPOConfig.__doc__ or "")


# Batches


def test_batches_are_counted_by_hand() -> None:
    config = GRPOConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        steps_per_generation=6,
        num_generations=8,
        num_iterations=2,
    )
    assert config.generation_batch_size == 24
    assert config.rollout_rows == 24
    assert config.prompts_per_rollout == 3
    assert config.step_rows == 12
    assert config.updates_per_epoch == 2


def test_ranks_multiply_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert GRPOConfig().world_size == 1  # nobody launched several ranks
    monkeypatch.setenv("LOCAL_RANK", "2")
    config = GRPOConfig(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert (config.world_size, config.process_index) == (4, 2)
    assert (config.step_rows, config.rollout_rows) == (16, 16)
    assert not config.should_save
    assert not config.should_log
    assert config.parallel_mode == ParallelMode.DISTRIBUTED


def test_generation_batch_size_sets_the_steps() -> None:
    config = GRPOConfig(per_device_train_batch_size=4, generation_batch_size=32)
    assert config.steps_per_generation == 8
    trls = trl.GRPOConfig(per_device_train_batch_size=4, generation_batch_size=32, use_cpu=True, bf16=False)
    assert trls.steps_per_generation == config.steps_per_generation


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"per_device_train_batch_size": 4}, "steps_per_generation=2 "),
        ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3}, "steps_per_generation=12 "),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2}, "steps_per_generation=4 "),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, "steps_per_generation=8 "),
        ({"generation_batch_size": 12}, "generation_batch_size=16"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "Set only one of the two"),
    ],
)
def test_batches_that_do_not_fit_say_what_does(settings: dict[str, int], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**settings)
    assert remedy in str(caught.value)


def test_the_effective_batch_need_not_hold_whole_groups() -> None:
    config = GRPOConfig(per_device_train_batch_size=2, steps_per_generation=8)
    assert (config.step_rows, config.rollout_rows, config.prompts_per_rollout) == (2, 16, 2)


def test_what_was_filled_in_follows_a_change() -> None:
    config = GRPOConfig()
    config.gradient_accumulation_steps = 4
    config.validate()
    assert (config.steps_per_generation, config.generation_batch_size) == (4, 32)
    config.steps_per_generation = 6
    with pytest.raises(ConfigError, match="straddle"):
        config.validate()
    config.steps_per_generation = 8
    config.validate()
    assert config.generation_batch_size == 64
    config.num_generations = 1
    with pytest.raises(ConfigError, match="num_generations is 1"):
        config.validate()


# Defaults that depend on others


def test_evaluation_and_best_model_defaults() -> None:
    config = GRPOConfig(eval_strategy="steps", save_steps=20, load_best_model_at_end=True)
    assert config.do_eval
    assert config.eval_steps == 10
    assert config.metric_for_best_model == "reward"
    assert config.greater_is_better is True
    assert GRPOConfig(metric_for_best_model="eval_loss").greater_is_better is False
    assert GRPOConfig(num_generations_eval=2).eval_generations == 2
    assert GRPOConfig().eval_generations == 8


def test_bf16_adapts_to_the_device_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = GRPOConfig(use_cpu=True)
        GRPOConfig(use_cpu=True)
    assert config.bf16 is False
    assert [record.message for record in caplog.records if "bf16" in record.message] == [
        "bf16 is off: on this device (cpu) the forward passes run in float32."
    ]
    assert GRPOConfig(use_cpu=True, bf16=True).bf16 is True


@pytest.mark.parametrize(
    ("fp16", "supported", "expected"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_bf16_on_cuda(monkeypatch: pytest.MonkeyPatch, fp16: bool, supported: bool, expected: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: supported)
    config = GRPOConfig(fp16=fp16)
    assert config.bf16 is expected
    assert config.device == torch.device("cuda", 0)
    assert config.n_gpu == 1
    if not supported:
        with pytest.raises(ConfigError, match="Set fp16=True"):
            GRPOConfig(bf16=True)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"num_generations": 2}, "0.707"),
        ({"loss_type": "luspo"}, "importance_sampling_level='sequence'"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
        *(
            ({"loss_type": loss, "importance_sampling_level": "sequence"}, "loss_type='grpo'")
            for loss in ("bnpo", "dr_grpo", "dapo", "cispo", "dppo", "gmpo")
        ),
    ],
)
def test_doubtful_settings_are_warned_of_once(settings: dict[str, Any], part: str) -> None:
    with pytest.warns(UserWarning, match=part):
        config = GRPOConfig(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.validate()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_generations": 2, "scale_rewards": "none"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
    ],
)
def test_sound_settings_are_not_warned_of(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GRPOConfig(**settings)


# What the rooms get


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    rate, weights = np.float32(0.5), [np.float64(2), torch.tensor(3)]
    given: dict[str, Any] = {"num_generations": np.int64(4), "learning_rate": rate, "reward_weights": weights}
    config = GRPOConfig(**given)
    assert (config.num_generations, config.learning_rate, config.reward_weights) == (4, 0.5, [2.0, 3.0])
    assert type(config.num_generations) is int
    with pytest.raises(ConfigError, match="num_generations is array"):
        GRPOConfig(num_generations=np.array([4]))  # type: ignore[arg-type]


def test_loss_settings_follow_the_fields() -> None:
    settings = GRPOConfig(loss_type="grpo", epsilon=0.1, beta=0.04, delta=3.0, max_completion_length=64).loss_settings()
    assert settings == LossSettings(
        loss_type="grpo", epsilon_low=0.1, epsilon_high=0.1, beta=0.04, delta=3.0, max_completion_length=64
    )
    assert GRPOConfig(epsilon=0.1, epsilon_high=0.28).loss_settings().epsilon_high == 0.28
    changed = {"sapo_temperature_pos": 2.0, "vespo_k_neg": 5.0, "off_policy_mask_threshold": 0.5}
    for name, value in changed.items():
        assert getattr(GRPOConfig(**{name: value}).loss_settings(), name) == value
    assert GRPOConfig().loss_settings() == LossSettings()


def test_no_setting_of_a_loss_is_dropped_for_want_of_a_declaration() -> None:
    of_losses = {field.name for field in dataclasses.fields(LossSettings)}
    assert of_losses - DECLARED.keys() == {"epsilon_low"}  # declared as epsilon, beside which epsilon_high stands


def test_sampling_settings_follow_the_fields() -> None:
    config = GRPOConfig(max_completion_length=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1)
    assert config.sampling_settings([1, 2]) == SamplingSettings(9, (1, 2), 0.7, 0.9, 5, 0.1, 1.1)
    over = GRPOConfig(top_p=0.9, generation_kwargs={"top_p": 0.5, "eos_token_id": 7})
    assert over.sampling_settings([1]) == SamplingSettings(512, (7,), top_p=0.5)


def test_rows_without_advantage_count_where_a_term_has_none() -> None:
    assert not GRPOConfig().every_row_learns
    assert GRPOConfig(beta=0.01).every_row_learns
    assert GRPOConfig(entropy_coef=0.01).every_row_learns
    assert GRPOConfig(use_adaptive_entropy=True).every_row_learns


def test_kl_stop_rule() -> None:
    assert GRPOConfig().kl_stop_rule is None
    assert GRPOConfig(kl_stop=0.02).kl_stop_rule == KLStop(0.02, "token", "k3")
    text = '{"target": "2", "unit": "sequence", "estimator": "k1"}'
    assert GRPOConfig(kl_stop=text).kl_stop_rule == KLStop(2.0, "sequence", "k1")


# What callbacks and scripts read


def test_writing_it_down_and_reading_it_back() -> None:
    config = GRPOConfig(
        "out",
        learning_rate=1e-4,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
        kl_stop={"target": 0.1},
        report_to=["tensorboard"],
        model_init_kwargs={"dtype": torch.bfloat16, "skipped": {"b", "c", "a"}},
    )
    written = config.to_dict()
    assert written["optim"] == "adamw_torch_fused"
    assert written["model_init_kwargs"] == {"dtype": "bfloat16", "skipped": ["a", "b", "c"]}
    assert json.loads(config.to_json_string()) == written
    again = GRPOConfig(**written)
    assert again.to_dict() == written
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    replaced = dataclasses.replace(config, learning_rate=1e-5)
    assert (replaced.learning_rate, config.learning_rate) == (1e-5, 1e-4)


def test_sanitized_values_are_plain() -> None:
    sanitized = GRPOConfig().to_sanitized_dict()
    assert all(type(value) in (bool, int, float, str) for value in sanitized.values())
    assert sanitized["train_batch_size"] == 8


def test_read_surface_of_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GRPOConfig(use_cpu=True, log_level="info", eval_strategy="epoch")
    assert config.eval_strategy == IntervalStrategy.EPOCH
    assert config.optim == OptimizerNames.ADAMW_TORCH_FUSED
    assert (config.world_size, config.process_index, config.local_process_index, config.n_gpu) == (1, 0, 0, 0)
    assert config.should_save
    assert config.should_log
    assert config.device == torch.device("cpu")
    assert config.parallel_mode == ParallelMode.NOT_PARALLEL
    assert (config.train_batch_size, config.eval_batch_size) == (8, 8)
    assert config.get_process_log_level() == logging.INFO
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert config.get_process_log_level() == logging.WARNING
    with config.main_process_first(desc="nothing"):
        pass
    state = TrainerState()
    state.compute_steps(config, 100)
    assert (state.logging_steps, state.save_steps) == (10, 500)


@pytest.mark.parametrize(("given", "steps", "expected"), [(0, 100, 0), (10, 100, 10), (0.1, 99, 10), (1, 100, 1)])
def test_warmup_steps_agree_with_transformers(given: float, steps: int, expected: int) -> None:
    assert GRPOConfig(warmup_steps=given).get_warmup_steps(steps) == expected
    trls = trl.GRPOConfig(warmup_steps=given, use_cpu=True, bf16=False)
    assert trls.get_warmup_steps(steps) == expected


# HfArgumentParser


def test_hf_argument_parser(tmp_path: Path) -> None:
    parser = HfArgumentParser(GRPOConfig)
    line = """--output_dir out --learning-rate 1e-5 --num_generations 4 --memory_budget 16GiB --kl_stop 0.02
        --bf16 false --optim sgd --reward_weights 1 0.5 --log_completions --no_shuffle_dataset
        --eval_strategy epoch --report_to tensorboard --pad_to_multiple_of 8 --allow_lossy []"""
    arguments = shlex.split(line)
    (config,) = parser.parse_args_into_dataclasses([*arguments, "--model_init_kwargs", '{"dtype": "float32"}'])
    assert isinstance(config, GRPOConfig)
    assert config.output_dir == "out"
    assert config.learning_rate == 1e-5
    assert config.memory_budget == "16GiB"
    assert config.kl_stop_rule == KLStop(0.02)
    assert config.bf16 is False
    assert config.optim == OptimizerNames.SGD
    assert config.reward_weights == [1, 0.5]
    assert config.log_completions is True
    assert config.shuffle_dataset is False
    assert config.trackers == ["tensorboard"]
    assert config.model_init_kwargs == {"dtype": "float32"}
    assert config.allow_lossy == ()
    assert "80%" in parser.format_help()
    (parsed,) = parser.parse_args_into_dataclasses([])
    assert parsed == GRPOConfig()
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-5\neval_strategy: no\n")
    (from_file,) = parser.parse_yaml_file(str(file))
    assert (from_file.learning_rate, from_file.eval_strategy) == (1e-5, "no")


def test_flags_of_trl_that_are_off_are_parsed_and_others_refused_with_the_reason() -> None:
    parser = HfArgumentParser(GRPOConfig)
    line = (
        "--use_vllm False --use_transformers_paged False --push_to_hub false --dataloader-num-workers 0 "
        "--ddp_timeout 1800 --vllm_group_port 51216"
    )
    (config,) = parser.parse_args_into_dataclasses(shlex.split(line))
    assert config == GRPOConfig()
    assert config.use_vllm is False
    assert "vllm_group_port" not in config.to_dict()
    for flags in (["--save_on_each_node"], ["--save_on_each_node", "True"]):
        with pytest.raises(ConfigError, match=r"save_on_each_node is 'True', which is refused"):
            parser.parse_args_into_dataclasses(flags)
    with pytest.raises(ConfigError, match="vllm_group_port is '8001'"):
        parser.parse_args_into_dataclasses(["--vllm_group_port", "8001"])
    assert set(THEIRS) - set(ALIASES) <= {field.name for field in dataclasses.fields(GRPOConfig)}
    assert "vllm_group_port" not in repr(config)
    assert "vllm_group_port" not in (GRPOConfig.__doc__ or "")
    assert dataclasses.replace(config, seed=3).seed == 3


def test_a_bare_flag_of_a_truth_value_that_may_be_open_means_true() -> None:
    parser = HfArgumentParser(GRPOConfig)
    (config,) = parser.parse_args_into_dataclasses(["--gradient_checkpointing", "--disable_tqdm", "--bf16"])
    assert (config.gradient_checkpointing, config.disable_tqdm, config.bf16) == (True, True, True)
    (config,) = parser.parse_args_into_dataclasses(["--gradient_checkpointing", "False", "--greater_is_better"])
    assert (config.gradient_checkpointing, config.greater_is_better) == (False, True)
    (config,) = parser.parse_args_into_dataclasses(["--activation_checkpointing"])
    assert config.gradient_checkpointing is True
    (config,) = parser.parse_args_into_dataclasses(["--vllm_importance_sampling_cap", "2"])
    assert config.vllm_importance_sampling_clip_max == 2


# Optimizers and schedules of transformers


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_torch_fused", None),
        ("adamw_torch", None),
        ("sgd", None),
        ("sgd", "momentum=0.9"),
        ("adafactor", None),
        ("rmsprop", None),
        ("adagrad", None),
        ("adamw_8bit", None),
        ("lion_32bit", None),
    ],
)
def test_optimizers_step(optim: str, optim_args: str | None) -> None:
    config = GRPOConfig(optim=optim, optim_args=optim_args, learning_rate=0.1, max_steps=10, warmup_steps=2)
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer_class, arguments = Trainer.get_optimizer_cls_and_kwargs(config, model)
    assert arguments["lr"] == 0.1
    optimizer = optimizer_class(model.parameters(), **arguments)
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, config.get_warmup_steps(10), 10, config.lr_scheduler_kwargs
    )
    for _ in range(2):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    assert not torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == pytest.approx([0.1])


@pytest.mark.slow
def test_optimizer_arguments_are_those_that_transformers_reads() -> None:
    names = {name for known in OPTIMIZER_ARGUMENTS.values() for name in known}

    def arguments(optim: str, optim_args: str | None) -> dict[str, Any]:
        config = GRPOConfig(optim=optim)
        config.optim_args = optim_args
        return dict(Trainer.get_optimizer_cls_and_kwargs(config)[1])

    for optim, package in OPTIMIZERS.items():
        if importlib.util.find_spec(package) is not None and "rmsprop_bnb" not in optim:  # takes all, as text
            plain = arguments(optim, None)
            read = {name for name in names if arguments(optim, f"{name}=1") != plain}
            assert read == {*OPTIMIZER_ARGUMENTS.get(optim, ())}, optim


def test_caches_are_those_of_transformers() -> None:
    assert {*CACHES} == {*ALL_CACHE_IMPLEMENTATIONS}


@pytest.mark.parametrize("name", GRPOSettings.declared["lr_scheduler_type"].choices)
def test_schedules_are_made(name: str) -> None:
    needed: dict[str, Any] = {
        "cosine_with_min_lr": {"min_lr": 0.01},
        "cosine_warmup_with_min_lr": {"min_lr": 0.01},
        "warmup_stable_decay": {"num_decay_steps": 2},
    }
    config = GRPOConfig(lr_scheduler_type=name, lr_scheduler_kwargs=needed.get(name))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, 0, 10, config.lr_scheduler_kwargs)
    assert scheduler.get_last_lr()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        GRPOConfig(optim="adamw_8bit")


HINTS = {
    "allow_lossy",  # only the empty one is accepted
    "auto_find_batch_size",
    "cache_implementation",
    "do_train",  # for scripts
    "pad_to_multiple_of",
    "per_device_eval_batch_size",
    "torch_empty_cache_steps",
}
"""Settings that may never change a result, so that nothing needs to read them."""


VIEWED = {field.name for view in (LossSettings, SamplingSettings) for field in dataclasses.fields(view)}
"""Settings that other rooms read by the name of a view's field."""


@functools.cache
def names_read() -> tuple[set[str], set[str]]:
    """Lists the settings that the package and transformers read of a configuration, and those read of its views."""
    package = Path(validation.__file__).parents[1]
    theirs = [inspect.getsource(trainer_callback), inspect.getsource(Trainer.get_optimizer_cls_and_kwargs)]
    sources = {path: path.read_text() for path in package.rglob("*.py") if path.name != "settings.py"}
    elsewhere = "".join(text for path, text in sources.items() if path.parent.name != "config")
    # matches of no width, since one name may end in another's beginning, as in setup.args.config.name
    of_a_config = re.findall(r"\b(?=(?:self|args|_?config)\.(\w+))", "".join([*sources.values(), *theirs]))
    return set(of_a_config), VIEWED.intersection(re.findall(r"settings\.(\w+)", elsewhere))


@pytest.mark.parametrize("name", sorted(set(OURS) - HINTS))
def test_every_setting_is_read_by_someone(name: str) -> None:
    of_a_config, of_views = names_read()
    assert name in of_a_config or name in of_views


def test_fields_alone_need_nothing_heavy() -> None:
    assert {field.name for field in dataclasses.fields(GRPOSettings)} == set(OURS)


def test_a_copy_remembers_by_itself_what_was_filled_in(tmp_path: Path) -> None:
    config = GRPOConfig(str(tmp_path), report_to="none")
    filled = dict(config._filled)
    twin = copy.copy(config)
    assert twin.to_dict() == config.to_dict()
    assert "bf16" in filled
    twin.bf16 = True
    assert config._filled == filled
    assert "bf16" not in twin._filled
    assert config.bf16 is False


def test_another_estimator_has_its_own_scale_and_least_group():
    with pytest.raises(ConfigError, match=r"scale_rewards is 'batch' with advantage_estimator='rloo'.*'group'"):
        GRPOConfig(advantage_estimator="rloo", scale_rewards="batch")
    with pytest.raises(ConfigError, match="advantage_estimator is 'gae'"):
        GRPOConfig(advantage_estimator="gae")
    assert GRPOConfig(advantage_estimator="reinforce++", num_generations=1).num_generations == 1
    with pytest.raises(ConfigError, match="num_generations is 1"):
        GRPOConfig(advantage_estimator="rloo", num_generations=1)


@declare()
class OwnSettings(GRPOSettings):
    horizon: int | None = setting(
        4, "Steps ahead, in tokens; None: all.", group="Own", low=1, also=("look_ahead",), tokens_only=True
    )


def test_everything_follows_from_one_declaration() -> None:
    one = OwnSettings.declared["horizon"]
    assert OwnSettings().horizon == 4
    assert [setting.name for setting in grouped(OwnSettings)["Own"]] == ["horizon"]
    assert (one.read("8"), one.read("none")) == (8, None)
    with pytest.raises(ConfigError, match=r"horizon is 0; it must be at least 1\."):
        one.read(0)
    with pytest.raises(ConfigError, match=r"horizon is 'far'; it must be a whole number or none\."):
        one.read("far")
    assert (one.resume, one.tokens_only) == ("must agree", True)
    help_of_parsers = HfArgumentParser(OwnSettings).format_help()
    assert "--look_ahead" in help_of_parsers
    assert "Steps ahead, in tokens" in help_of_parsers
    assert "horizon" not in GRPOSettings.declared


def test_help_names_every_estimator_of_advantages() -> None:
    told = GRPOSettings.declared["advantage_estimator"].help
    own = [name for name, one in ESTIMATORS.items() if one.function.__module__.startswith("memsafe_rl.")]
    assert [name for name in own if f"'{name}'" not in told] == []
    assert len(own) == 8


def test_settings_are_given_by_name() -> None:
    assert GRPOConfig("out").output_dir == "out"
    with pytest.raises(TypeError, match="positional"):
        GRPOConfig("out", 4)  # type: ignore[misc]


def test_a_copy_may_count_other_ranks() -> None:
    config = GRPOConfig()
    twin = config.on_ranks(4)
    assert (twin.world_size, twin.step_rows, config.world_size) == (4, 32, 1)
    assert twin.left_open("steps_per_generation")
    assert not GRPOConfig(steps_per_generation=1).left_open("steps_per_generation")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fsdp": "shard_grad_op"}, "fsdp is 'shard_grad_op', but 'shard_grad_op' is not supported"),
        ({"fsdp": "full_shard offload"}, "'offload' is not supported"),
        ({"fsdp_config": {"cpu_offload": True}}, "fsdp_config has cpu_offload=True, which is not supported"),
        ({"optim": "adafactor"}, "optim is 'adafactor' with fsdp"),
        ({"master_weights": "stochastic_rounding"}, "master_weights='stochastic_rounding' is set with fsdp"),
        ({"torch_compile": True}, "torch_compile is set with fsdp"),
        ({"save_in_background": True}, "save_in_background is set with fsdp"),
    ],
)
def test_what_sharded_ranks_cannot_do_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        GRPOConfig(**{"fsdp": "full_shard", "report_to": "none", **given}).on_ranks(2).validate()


def test_what_a_launcher_asks_of_sharded_ranks_is_done_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"OFFLOAD_PARAMS": "false", "SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "true"}
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        **{f"FSDP_{name}": value for name, value in usual.items()},
    }.items():
        monkeypatch.setenv(name, value)
    config = GRPOConfig(report_to="none").on_ranks(2)
    config.validate()
    assert config.sharded
    for name, value in {"OFFLOAD_PARAMS": "true", "SHARDING_STRATEGY": "HYBRID_SHARD"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"FSDP_{name}", value)
            with pytest.raises(ConfigError, match=f"the launcher sets FSDP_{name}='{value}'.*fsdp_{name.lower()}: "):
                config.validate()


@pytest.mark.parametrize(
    ("given", "ranks", "sharded"),
    [
        ({}, 2, False),
        ({"fsdp": True}, 2, True),
        ({"fsdp": "full_shard auto_wrap"}, 2, True),
        ({"fsdp": True}, 1, False),
    ],
)
def test_ranks_share_weights_where_they_are_told_to(given: dict[str, Any], ranks: int, sharded: bool) -> None:
    assert GRPOConfig(report_to="none", **given).on_ranks(ranks).sharded is sharded
