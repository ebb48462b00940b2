"""Learns to count squares in made-up pictures, offline, in about a minute: `python -m examples.count_squares`."""

import random
from typing import Any

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from memsafe_rl import GRPOConfig, GRPOTrainer, PillowProcessor

WORDS = ["<pad>", "<eos>", "<start>", "<end>", "<image>", "<video>", "count", *"012345678"]
PART = "{{ '<start><image><end>' if p['type'] == 'image' else p['text'] }}"
TEMPLATE = "{% for p in messages[0]['content'] %}" + PART + "{% endfor %}"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TEXT = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "eos_token_id": 1, "pad_token_id": 0, **ROPE}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
TOWER = {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 64, "patch_size": 4, "mlp_ratio": 2}
IDS: Any = {"vision_start_token_id": 2, "vision_end_token_id": 3, "image_token_id": 4, "video_token_id": 5}


def row(source: random.Random) -> dict[str, Any]:
    """Draws up to three squares on a grid of three by three, and says how many."""
    picture, count = Image.new("RGB", (24, 24)), source.randint(1, 3)
    for y, x in source.sample([(y, x) for y in (1, 9, 17) for x in (1, 9, 17)], count):
        ImageDraw.Draw(picture).rectangle((x, y, x + 5, y + 5), fill="white")
    return {"prompt": [{"role": "user", "content": " count"}], "image": picture, "count": count}


def right(completions: list[Any], count: list[int], **_: Any) -> list[float]:
    """Pays for the right number alone."""
    return [float(said[0]["content"] == str(own)) for said, own in zip(completions, count, strict=True)]


def main(steps: int = 300, output_dir: str = "outputs/count_squares") -> list[float]:
    """Trains, and gives the mean reward of each step."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    more: dict[str, Any] = {"additional_special_tokens": WORDS[2:6], "chat_template": TEMPLATE}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", **more)
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 576, "longest_edge": 576})
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT, vision_config=TOWER, **IDS))
    model.model.visual.requires_grad_(False)
    source = random.Random(0)
    data = Dataset.from_list([row(source) for _ in range(600)])
    run: dict[str, Any] = {"max_steps": steps, "per_device_train_batch_size": 64, "max_completion_length": 1}
    run |= {"learning_rate": 1e-3, "report_to": "none", "save_strategy": "no", "overwrite_output_dir": True}
    processor = PillowProcessor(images, tokenizer)
    trainer = GRPOTrainer(model, right, GRPOConfig(output_dir, **run), data, processing_class=processor)
    trainer.train()
    return [step["reward"] for step in trainer.history]


if __name__ == "__main__":
    rewards = main()
    print(f"mean reward: first ten steps {sum(rewards[:10]) / 10:.2f}, last ten {sum(rewards[-10:]) / 10:.2f}")
