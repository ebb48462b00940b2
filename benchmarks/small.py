"""A small model and tokenizer made on the spot, for benchmarks whose subject is not what is learnt."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memsafe_rl import Condition, DDIMScheduler, DiffusionPolicy

PAD_ID, EOS_ID = 0, 1


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token a byte.

    Returns:
        A tokenizer of 258 tokens: pad, eos and the bytes.
    """
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def small_qwen3(
    vocab_size: int, *, hidden: int = 64, layers: int = 2, head_dim: int = 16, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """Makes a random Qwen3, the same for the same arguments.

    Args:
        vocab_size: rows of the embedding.
        hidden: width.
        layers: blocks.
        head_dim: width of a head; there are as many as make up the width, over half as many for keys and values.
        seed: of the weights.
        config: settings of `Qwen3Config` that are to be others than here.

    Returns:
        The model, fp32.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 1024,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // head_dim,
            num_key_value_heads=hidden // (2 * head_dim),
            head_dim=head_dim,
            **{**settings, **config},
        )
    )


def small_t5(
    vocab_size: int, *, hidden: int = 64, layers: int = 2, head_dim: int = 16, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """Makes a random T5, the same for the same arguments.

    Args:
        vocab_size: rows of the embedding, which is the output head's too.
        hidden: width.
        layers: blocks of the encoder, and of the decoder.
        head_dim: width of a head; there are as many as make up the width.
        seed: of the weights.
        config: settings of `T5Config` that are to be others than here.

    Returns:
        The model, fp32.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "d_ff": 2 * hidden,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": PAD_ID,
    }
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab_size,
            d_model=hidden,
            d_kv=head_dim,
            num_heads=hidden // head_dim,
            num_layers=layers,
            **{**settings, **config},
        )
    )


def filled_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token a byte that knows a text for every id of a larger vocabulary.

    Args:
        vocab_size: tokens, 258 or more.

    Returns:
        The tokenizer; a text is still cut into bytes.
    """
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [f"Ġw{number}" for number in range(vocab_size - len(alphabet))]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


class SmallBlock(torch.nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps (M, width) to the same."""
        return hidden + self.down(self.up(hidden).tanh())


class SmallDenoiser(torch.nn.Module):
    """Guesses clean states of 3 × 4 elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = torch.nn.Linear(12 + 3, width), torch.nn.Linear(width, 12)
        self.blocks = torch.nn.ModuleList(SmallBlock(width) for _ in range(2))

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Maps states (M, 3, 4), timesteps and a prompt of two numbers to states."""
        told = torch.cat([condition.embedding_MLD[:, 0], timesteps[:, None] / 1000], 1)
        hidden = self.read(torch.cat([x.flatten(1), told.to(x.dtype)], 1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.write(hidden).view_as(x)


def small_policy(*, steps: int = 5, width: int = 16, seed: int = 0) -> DiffusionPolicy:
    """Makes a random diffusion policy in float64, the same for the same arguments; any text is a prompt.

    Args:
        steps: denoising steps.
        width: of the denoiser.
        seed: of the weights.

    Returns:
        The policy.
    """
    torch.manual_seed(seed)
    return DiffusionPolicy(
        SmallDenoiser(width),
        DDIMScheduler(prediction_type="sample", timestep_spacing="trailing"),
        (3, 4),
        condition_shape=(1, 2),
        num_inference_steps=steps,
        guidance_scale=1.5,
        embed=lambda prompt: torch.tensor([len(prompt) / 10, sum(map(ord, prompt)) % 17 / 17]),
        state_dtype=torch.float64,
    ).double()
