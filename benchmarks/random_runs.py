"""Runs drawn at random, which nobody chose to be easy to forecast: family, sizes, prompts and every kind of setting."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    BartConfig,
    BitsAndBytesConfig,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MarianConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
    T5Config,
)

from benchmarks.small import EOS_ID, PAD_ID, byte_tokenizer
from memsafe_rl import AdaptivePolicy, GRPOConfig, GRPOTrainer, MemoryPolicy, PPOConfig, PPOTrainer
from memsafe_rl.ops.losses import LOSSES

_IDS = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
_POSITIONS = 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network."""

    vocab: int  # rows of the embedding
    heads: int  # attention heads
    key_heads: int  # heads of keys and values, of which each serves as many others
    head_dim: int  # width of a head
    inner: int  # width inside a feed-forward block
    layers: int  # blocks; of an encoder-decoder, of either
    tied: bool  # whether the output head is the embedding

    @property
    def hidden(self) -> int:
        """Width between blocks."""
        return self.heads * self.head_dim


def _decoder(sizes: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": sizes.tied,
        **_IDS,
        **more,
    }


def _mixed(sizes: Sizes) -> dict[str, Any]:
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes.layers)]
    return {"head_dim": sizes.head_dim, "sliding_window": 24, "layer_types": kinds}


def _gpt2(sizes: Sizes) -> PretrainedConfig:
    own = {"n_embd": sizes.hidden, "n_inner": sizes.inner, "n_layer": sizes.layers, "n_head": sizes.heads}
    return GPT2Config(vocab_size=sizes.vocab, n_positions=_POSITIONS, **own, **_IDS)


def _gpt_neox(sizes: Sizes) -> PretrainedConfig:
    given = {name: value for name, value in _decoder(sizes).items() if name != "num_key_value_heads"}
    return GPTNeoXConfig(**given)


def _t5(sizes: Sizes) -> PretrainedConfig:
    return T5Config(
        vocab_size=sizes.vocab,
        d_model=sizes.hidden,
        d_ff=sizes.inner,
        d_kv=sizes.head_dim,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        feed_forward_proj="relu" if sizes.tied else "gated-gelu",
        tie_word_embeddings=sizes.tied,
        decoder_start_token_id=PAD_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )


def _bart(sizes: Sizes, kind: type[PretrainedConfig] = BartConfig) -> PretrainedConfig:
    own = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", sizes.layers), ("attention_heads", sizes.heads), ("ffn_dim", sizes.inner))
    }
    return kind(
        vocab_size=sizes.vocab,
        d_model=sizes.hidden,
        max_position_embeddings=_POSITIONS,
        decoder_start_token_id=PAD_ID,
        forced_eos_token_id=None,
        **own,
        **_IDS,
    )


def _moe(sizes: Sizes) -> PretrainedConfig:
    own = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.inner // 16 * 8,  # PyTorch's product of experts wants strides of 16 bytes
        "router_aux_loss_coef": 0.0,
    }
    return Qwen3MoeConfig(**_decoder(sizes, head_dim=sizes.head_dim, **own))


FAMILIES: Mapping[str, Callable[[Sizes], PretrainedConfig]] = {
    "llama": lambda sizes: LlamaConfig(**_decoder(sizes)),
    "qwen2": lambda sizes: Qwen2Config(**_decoder(sizes)),
    "qwen3": lambda sizes: Qwen3Config(**_decoder(sizes, head_dim=sizes.head_dim)),
    "mistral": lambda sizes: MistralConfig(**_decoder(sizes, sliding_window=None)),
    "phi": lambda sizes: PhiConfig(**_decoder(sizes)),
    "phi3": lambda sizes: Phi3Config(**_decoder(sizes)),
    "gemma2": lambda sizes: Gemma2Config(**_decoder(sizes, **_mixed(sizes), query_pre_attn_scalar=sizes.head_dim)),
    "gemma3": lambda sizes: Gemma3TextConfig(**_decoder(sizes, **_mixed(sizes), query_pre_attn_scalar=sizes.head_dim)),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": lambda sizes: GraniteConfig(**_decoder(sizes)),
    "olmo2": lambda sizes: Olmo2Config(**_decoder(sizes)),
    "qwen3_moe": _moe,
    "t5": _t5,
    "bart": _bart,
}
"""How a small network of each family is made."""


def _falcon(sizes: Sizes) -> PretrainedConfig:
    own = {"num_kv_heads": sizes.key_heads, "new_decoder_architecture": True, "ffn_hidden_size": sizes.inner}
    return FalconConfig(**{**_decoder(sizes), **own})


def _opt(sizes: Sizes) -> PretrainedConfig:
    return OPTConfig(**_decoder(sizes), ffn_dim=sizes.inner, word_embed_proj_dim=sizes.hidden)


def _bloom(sizes: Sizes) -> PretrainedConfig:
    own = {"n_layer": sizes.layers, "n_head": sizes.heads, "tie_word_embeddings": sizes.tied}
    return BloomConfig(vocab_size=sizes.vocab, hidden_size=sizes.hidden, **own, **_IDS)


FURTHER_FAMILIES: Mapping[str, Callable[[Sizes], PretrainedConfig]] = {
    "marian": lambda sizes: _bart(sizes, MarianConfig),
    "falcon": _falcon,
    "bloom": _bloom,
    "opt": _opt,
    "mixtral": lambda sizes: MixtralConfig(**_decoder(sizes, num_local_experts=3, router_aux_loss_coef=0.0)),
    "cohere": lambda sizes: CohereConfig(**_decoder(sizes)),
    "stablelm": lambda sizes: StableLmConfig(**_decoder(sizes)),
    "starcoder2": lambda sizes: Starcoder2Config(**_decoder(sizes)),
}
"""Those that only runs of rarer features are drawn from."""

_EXPERTS = ("qwen3_moe", "mixtral")
_LORA_TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    **{family: ["q_proj", "v_proj", "o_proj"] for family in _EXPERTS},
}
_BASES = {
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32),
}


@dataclass(frozen=True)
class RandomRun:
    """One run that is forecast and made."""

    family: str  # one of `FAMILIES`
    sizes: Sizes  # of its network
    prompt_tokens: tuple[int, ...]  # of every prompt of the dataset
    completion_tokens: int  # of every completion
    prompts: int  # unique prompts of a rollout
    group: int  # completions a prompt
    steps: int  # optimizer steps of the run
    parts: int  # optimizer steps into which a pass over a rollout is cut
    accumulation: int  # `gradient_accumulation_steps`
    iterations: int  # passes over a rollout
    ppo: bool  # else GRPO
    critic: str | None  # "adapter" for PPO's critic on an adapter; None for a head on the trunk
    beta: float  # weight of the reference's KL
    loss: str  # `loss_type`, of GRPO
    optim: str  # name of the optimizer
    lora: int | None  # rank of an adapter; None to train all weights
    checkpointing: bool | None  # whether activations are recomputed; None for what the plan decides
    packing: bool | None  # whether completions share one copy of their prompt; likewise
    quantile: float  # `top_entropy_quantile`, of GRPO
    bf16: bool  # whether forward passes run in bfloat16
    base: str | None = None  # one of `_BASES`, the bits of the base under an adapter
    dora: bool = False  # whether the adapter is a DoRA
    rarer: Mapping[str, Any] = field(default_factory=dict)  # further settings

    def __str__(self) -> str:
        sizes, kind = self.sizes, "full" if self.lora is None else f"LoRA {self.lora}"
        chosen = {None: "free", True: "yes", False: "no"}
        algorithm = f"PPO {self.critic or 'trunk'}" if self.ppo else self.loss
        return (
            f"{self.family} V={sizes.vocab} D={sizes.heads}x{sizes.head_dim} kv={sizes.key_heads} F={sizes.inner} "
            f"L={sizes.layers}{' tied' if sizes.tied else ''}, {kind}, {algorithm}, {self.optim}, "
            f"{self.prompts}x{self.group} rows of {min(self.prompt_tokens)}-{max(self.prompt_tokens)}"
            f"+{self.completion_tokens} tokens of {len(self.prompt_tokens)} prompts, K={self.iterations} "
            f"parts={self.parts} acc={self.accumulation} steps={self.steps} beta={self.beta} "
            f"recomputed={chosen[self.checkpointing]} packed={chosen[self.packing]}"
            f"{f' quantile={self.quantile}' if self.quantile < 1 else ''}{' bf16' if self.bf16 else ''}"
            f"{f' {self.base}' if self.base else ''}{' DoRA' if self.dora else ''}"
            f"{''.join(f' {name}={value}' for name, value in self.rarer.items())}"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, as they are saved and loaded."""
        return torch.bfloat16 if "master_weights" in self.rarer else torch.float32

    def network_config(self) -> PretrainedConfig:
        """Returns the config of the run's network."""
        return {**FAMILIES, **FURTHER_FAMILIES}[self.family](self.sizes)

    def trainer(self, folder: Path, use_cpu: bool = True, policy: MemoryPolicy | None = None) -> Any:
        """Makes the run's trainer, which forecasts it first.

        Args:
            folder: of the saved network.
            use_cpu: whether it runs on the CPU, whatever else there is.
            policy: makes the plans; None for the default one, held to the run's own choices.

        Returns:
            The trainer.
        """
        adapter = None
        if self.lora is not None:
            targets = _LORA_TARGETS.get(self.family, "all-linear")
            more = {"fan_in_fan_out": self.family == "gpt2", "use_dora": self.dora}
            adapter = LoraConfig(r=self.lora, target_modules=targets, **more)
        given = {
            "train_dataset": Dataset.from_dict({"prompt": [_prompt(*one) for one in enumerate(self.prompt_tokens)]}),
            "processing_class": byte_tokenizer(),
            "peft_config": adapter,
            "memory_policy": policy or AdaptivePolicy(checkpointing=self.checkpointing, pack_prompts=self.packing),
        }
        out, settings = str(folder / "run"), {**self._settings(), **self.rarer, "use_cpu": use_cpu}
        if self.base is not None:
            settings["model_init_kwargs"] = {"quantization_config": _BASES[self.base]}
        if self.ppo:
            config = PPOConfig(out, kl_coef=self.beta, **settings)
            return PPOTrainer(str(folder), alternating, config, critic=self.critic, **given)
        own: dict[str, Any] = {"beta": self.beta, "loss_type": self.loss, "top_entropy_quantile": self.quantile}
        return GRPOTrainer(str(folder), alternating, GRPOConfig(out, **settings, **own), **given)

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that GRPO and PPO share; completions have their full length."""
        return {
            "num_generations": self.group,
            "per_device_train_batch_size": self.prompts * self.group // (self.accumulation * self.parts),
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_generation": self.accumulation * self.parts,
            "max_completion_length": self.completion_tokens,
            "generation_kwargs": {"min_new_tokens": self.completion_tokens},
            "num_iterations": self.iterations,
            "gradient_checkpointing": self.checkpointing,
            "optim": self.optim,
            "bf16": self.bf16,
            "memory_forecast": True,
            "max_steps": self.steps,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "alarms": False,
        }


def _prompt(index: int, tokens: int) -> str:
    return f"{index:02d}".ljust(tokens, ".")[:tokens]


def alternating(completions: list[str], **_: Any) -> list[float]:
    """Pays neighbours differently, so that every row learns.

    Args:
        completions: texts of a rollout's completions.

    Returns:
        A reward each.
    """
    return [float(index % 2) for index in range(len(completions))]


def draw_run(seed: int, index: int) -> RandomRun:
    """Draws a run, the same for the same arguments.

    Args:
        seed: of all runs.
        index: which of them.

    Returns:
        The run.
    """
    rng = random.Random(f"{seed}/{index}")
    choose = rng.choice
    family = choose(list(FAMILIES))
    key_heads = choose([1, 2, 3])
    heads = key_heads * choose([1, 2, 3])
    sizes = Sizes(
        vocab=rng.randint(300, 9000),
        heads=heads,
        key_heads=key_heads,
        head_dim=choose([16, 24, 32, 40]),
        inner=8 * rng.randint(10, 75),
        layers=rng.randint(1, 2),
        tied=choose([True, False]),
    )
    ppo = rng.random() < 0.25
    lora = choose([None, None, 4, 8, 16])
    prompts, group, parts = choose([2, 3, 4, 6]), choose([2, 3, 4, 8]), choose([1, 1, 1, 2])
    accumulation = choose([1, 1, 2])
    if prompts * group % (parts * accumulation):
        prompts *= 2
    if prompts * group % (parts * accumulation):
        prompts *= 2
    iterations = choose([1, 1, 2])
    rollouts = choose([1, 2])
    count = prompts * rollouts + rng.randint(1, 3 * prompts)
    longest = choose([12, 40, 80])
    return RandomRun(
        family=family,
        sizes=sizes,
        prompt_tokens=tuple(rng.randint(3, longest) for _ in range(count)),
        completion_tokens=choose([2, 8, 16, 24, 33, 48]),
        prompts=prompts,
        group=group,
        steps=rollouts * iterations * parts,
        parts=parts,
        accumulation=accumulation,
        iterations=iterations,
        ppo=ppo,
        critic="adapter" if ppo and lora and rng.random() < 0.5 else None,
        beta=choose([0.0, 0.0, 0.04]),
        loss=choose(sorted(LOSSES.keys() - {"rloo"})),
        optim=choose(["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"]),
        lora=lora,
        checkpointing=choose([None, True, False]),
        packing=choose([None, None, True, False]),
        quantile=choose([1.0, 1.0, 1.0, 0.3]),
        bf16=rng.random() < 0.15,
    )


_RARER: dict[str, list[Any]] = {
    "cache_implementation": ["quantized"],
    "batch_invariant": [True],
    "entropy_coef": [0.01],
    "trajectory_device": ["host"],
    "repetition_penalty": [1.2],
    "top_k": [5],
    "top_p": [0.9],
    "max_grad_norm": [0.0],
    "disable_dropout": [False],
    "gradient_checkpointing_kwargs": [{"offload": True}],
}


def draw_rarer(seed: int, index: int) -> RandomRun:
    """Draws a run of features that few runs have, the same for the same arguments.

    Args:
        seed: of all runs.
        index: which of them.

    Returns:
        The run.
    """
    run, rng = draw_run(seed, index), random.Random(f"rarer/{seed}/{index}")
    family = rng.choice([run.family, *FURTHER_FAMILIES])
    lora = run.lora or (8 if rng.random() < 0.5 else None)
    on_linear_layers = lora and family not in (*_EXPERTS, "gpt2")
    names = rng.sample(sorted(_RARER), rng.randint(1, 3))
    rarer = {name: rng.choice(_RARER[name]) for name in names}
    own_decoding = family in ("falcon", "bloom")  # by its own attention, padded
    if own_decoding or run.loss == "vespo":  # whose correction is not that of whole sequences
        rarer.pop("cache_implementation", None)
    if own_decoding or "disable_dropout" in rarer:
        rarer.pop("batch_invariant", None)
    trains_in_halves = lora is None and rng.random() < 0.3
    if trains_in_halves:
        rarer["model_init_kwargs"] = {"dtype": "bfloat16"}
        rarer["master_weights"] = rng.choice([True, False, "stochastic_rounding"])
    return replace(
        run,
        family=family,
        lora=lora,
        base=rng.choice([None, *_BASES]) if on_linear_layers else None,
        dora=bool(on_linear_layers and rng.random() < 0.25),
        bf16=run.bf16 or trains_in_halves,
        rarer=rarer,
    )
