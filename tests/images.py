"""Tiny networks that read images, their processor and rows of generated pictures, all built offline."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from memsafe_rl.models.vision.processors import PillowProcessor

START, END, IMAGE, VIDEO = 58, 59, 60, 61
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": ROPE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "in_channels": 3}
FAMILIES = ("qwen2_vl", "qwen2_5_vl")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant {% endif %}"
)


def small(family: str = "qwen2_vl", dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """Makes a network of two blocks and a frozen tower of two."""
    torch.manual_seed(0)
    model: Any
    config = {**TEXT, **text}
    if family == "qwen2_vl":
        tower = {**TOWER, "embed_dim": 16, "hidden_size": config["hidden_size"], "mlp_ratio": 2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=config, vision_config=tower, **IDS))
    else:
        tower = {**TOWER, "hidden_size": 16, "out_hidden_size": config["hidden_size"], "intermediate_size": 24}
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=config, vision_config=tower, **IDS))
    model.model.visual.requires_grad_(False)
    return model.to(dtype).eval()


def processor() -> PillowProcessor:
    """Makes a processor of 64 words whose patches have 4 pixels a side, two by two of them a token."""
    words = ["<pad>", "<bos>", "<eos>", "user", "assistant", *(f"w{place}" for place in range(53)), *SPECIAL]
    words += [f"x{place}" for place in range(len(words), 64)]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="x62"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL),
        chat_template=TEMPLATE,
    )
    sizes = {"shortest_edge": 64, "longest_edge": 4096}
    return PillowProcessor(Qwen2VLImageProcessorPil(patch_size=4, size=sizes), tokenizer)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Makes a picture of noise."""
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def rows() -> list[dict[str, Any]]:
    """Gives rows with one image, with two unlike ones, and with none."""
    return [
        {"prompt": [{"role": "user", "content": "w1 w2"}], "images": [picture(16, 16)], "goal": 1},
        {"prompt": [{"role": "user", "content": "w3"}], "images": [picture(32, 16, 1), picture(16, 24, 2)], "goal": 2},
        {"prompt": [{"role": "user", "content": "w4 w5 w6"}], "images": None, "goal": 3},
        {"prompt": [{"role": "user", "content": "w7"}], "images": [picture(24, 40, 3)], "goal": 4},
    ]
