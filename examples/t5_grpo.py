"""GRPO on a T5 in one screen: `python t5_grpo.py [MODEL]`; without a name, on a tiny random one, with no hub.

It learns to answer with a digit. Copy it, and put your prompts, your reward and `google/flan-t5-small` in their places.
"""

import sys
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from memsafe_rl import GRPOConfig, GRPOTrainer


def tiny() -> tuple[Any, Any]:
    """Makes a T5 of two small blocks to a stack that reads and writes single characters."""
    letters = {text: place for place, text in enumerate(["<pad>", "<eos>", *"0123456789+=?abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    config = T5Config(vocab_size=len(letters), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                      dropout_rate=0.0, decoder_start_token_id=0)  # fmt: skip
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    return T5ForConditionalGeneration(config), named


def digits(completions: list[str], **_: object) -> list[float]:
    """Rewards the share of a completion that is digits."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


model, tokenizer = (sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[1])) if len(sys.argv) > 1 else tiny()
prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]})
config = GRPOConfig("outputs/t5_grpo", num_generations=8, per_device_train_batch_size=32, max_completion_length=8,
                    max_steps=40, learning_rate=3e-3, overwrite_output_dir=True)  # fmt: skip
trainer = GRPOTrainer(model, digits, args=config, train_dataset=prompts, processing_class=tokenizer)
trainer.train()
print(f"reward {trainer.history[0]['reward']:.2f} -> {trainer.history[-1]['reward']:.2f}")
