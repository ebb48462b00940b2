"""GRPO on a Qwen3 in one screen: `python qwen_grpo.py [MODEL]`; without a name, on a tiny random one, with no hub.

It learns to answer with a digit. Copy it, and put your prompts, your reward and `Qwen/Qwen3-0.6B` in their places.
"""

import sys
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from memsafe_rl import GRPOConfig, GRPOTrainer


def tiny() -> tuple[Any, Any]:
    """Makes a Qwen3 of two small blocks that reads and writes single characters."""
    letters = {text: place for place, text in enumerate(["<eos>", "<pad>", *"0123456789+=?abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0, "pad_token_id": 1}
    config = Qwen3Config(vocab_size=len(letters), **sizes, **heads)
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    return Qwen3ForCausalLM(config), named


def digits(completions: list[str], **_: object) -> list[float]:
    """Rewards the share of a completion that is digits."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


model, tokenizer = (sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[1])) if len(sys.argv) > 1 else tiny()
prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]})
config = GRPOConfig("outputs/qwen_grpo", num_generations=8, per_device_train_batch_size=32, max_completion_length=8,
                    max_steps=40, learning_rate=3e-3, overwrite_output_dir=True)  # fmt: skip
trainer = GRPOTrainer(model, digits, args=config, train_dataset=prompts, processing_class=tokenizer)
trainer.train()
print(f"reward {trainer.history[0]['reward']:.2f} -> {trainer.history[-1]['reward']:.2f}")
