"""Tiny networks that read images, their processor and rows of generated pictures, all built offline."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

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
BREAKS: Any = pre_tokenizers.Split(Regex("\n+"), "isolated")
SQUARES: dict[str, Any] = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
}
"""Families that cut images into squares, of 16 pixels a side and 4 features here."""
SQUARE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}
AROUND, WHOLE, SHOWN = "<fake_token_around_image>", "<global-img>", "<image>"
DEEP: dict[str, Any] = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
}
"""Families whose features enter the first two of three language layers too."""
TWO_WAY = "gemma3"
"""The family whose image tokens see each other; 4 of them to an image of 16 pixels a side here."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", *SQUARES, *DEEP, TWO_WAY)
UNLIKE = ("qwen2_vl", "qwen3_vl", "smolvlm", TWO_WAY)
"""Families each of which reads features in a way of its own."""
TOWERS = ("visual", "vision_model", "connector", "vision_tower", "multi_modal_projector")
"""What families call the modules of their towers."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part %}"
    "IMAGE{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant {% endif %}"
)


def small(family: str = "qwen2_vl", dtype: torch.dtype = torch.float32, tower: Any = None, **text: Any) -> Any:
    """Makes a network of two blocks and a frozen tower of two."""
    torch.manual_seed(0)
    model: Any
    config, tower = {**TEXT, **text}, tower or {}
    if family in SQUARES:
        named, kind, _ = SQUARES[family]
        config |= {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        tower = {**SQUARE, "hidden_size": 16, "intermediate_size": 24, **tower}
        ids = {"image_token_id": IMAGE, "pad_token_id": 0, "scale_factor": 2}
        model = kind(named(text_config=config, vision_config=tower, **ids))
    elif family == TWO_WAY:
        ropes = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
        ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e3}
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
        config |= {"rope_parameters": ropes, "head_dim": config["hidden_size"] // 4, **kinds}
        tower = {**SQUARE, "hidden_size": 16, "intermediate_size": 24, "vision_use_head": False, **tower}
        ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
        made = Gemma3Config(text_config=config, vision_config=tower, mm_tokens_per_image=4, **ids)
        model = Gemma3ForConditionalGeneration(made)
        nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # which begins at 0
    elif family in DEEP:
        named, kind = DEEP[family]
        rope = {**config["rope_parameters"], "mrope_interleaved": True}
        rope["mrope_section"] = rope["mrope_section"][::-1]
        config |= {"rope_parameters": rope, "head_dim": config["hidden_size"] // 4, "num_hidden_layers": 3}
        config |= EXPERTS if family == "qwen3_vl_moe" else {}
        tower = {**TOWER, "hidden_size": 16, "out_hidden_size": config["hidden_size"], "intermediate_size": 24, **tower}
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        made = named(text_config=config, vision_config=tower, **IDS)
        if dtype is torch.float64:
            made.text_config._experts_implementation = "eager"  # the default has no float64
        model = kind(made)
    elif family == "qwen2_vl":
        tower = {**TOWER, "embed_dim": 16, "hidden_size": config["hidden_size"], "mlp_ratio": 2, **tower}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=config, vision_config=tower, **IDS))
    else:
        tower = {**TOWER, "hidden_size": 16, "out_hidden_size": config["hidden_size"], "intermediate_size": 24, **tower}
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=config, vision_config=tower, **IDS))
    for module in tower_of(model):
        module.requires_grad_(False)
    return model.to(dtype).eval()


def larger(family: str) -> Any:
    """Makes a network whose tower's activations stand out."""
    text = {"vocab_size": 300, "hidden_size": 128, "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}}
    wide = {"embed_dim": 256, "hidden_size": 128, "mlp_ratio": 4} if family == "qwen2_vl" else {"hidden_size": 256}
    wide |= {"intermediate_size": 8192} if family in SQUARES else {}
    wide |= {"hidden_size": 64, "intermediate_size": 40960} if family == TWO_WAY else {}
    return small(family, tower=wide, **text)


def tower_of(model: Any) -> list[nn.Module]:
    """Returns the modules of a tower, that of its blocks first."""
    return [getattr(model.model, name) for name in TOWERS if hasattr(model.model, name)]


def in_tower(name: str) -> bool:
    """Whether a weight is a tower's, by its name."""
    return any(part in name for part in TOWERS)


def blocks_of(model: Any) -> Any:
    """Returns the blocks of a tower."""
    tower: Any = tower_of(model)[0]
    tower = getattr(tower, "vision_model", tower)
    return tower.blocks if hasattr(tower, "blocks") else tower.encoder.layers


def never_drawn(family: str) -> list[int]:
    """Returns the tokens that stand for images or videos."""
    return [IMAGE] if family in (*SQUARES, TWO_WAY) else [IMAGE, VIDEO]


def processor(family: str = "qwen2_vl") -> PillowProcessor:
    """Makes a processor of 64 words whose patches have 4 pixels a side, two by two of them a token."""
    words, special = ["<pad>", "<bos>", "<eos>", "user", "assistant"], list(SPECIAL)
    split: Any = pre_tokenizers.WhitespaceSplit()
    image, images = "".join(special[place] for place in (0, 2, 1)), None
    if family in SQUARES:
        squares = [f"<row_{y}_col_{x}>" for y in (1, 2) for x in (1, 2)]
        words, special, image = [*words, "\n", "\n\n", *squares], [AROUND, WHOLE, SHOWN, "<video>"], SHOWN
        edges = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
        images = SQUARES[family][2](**edges)
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" +"), "removed"), BREAKS])
    if family == TWO_WAY:
        words, image, images = [*words, "\n\n"], SPECIAL[0], Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" +"), "removed"), BREAKS])
    words = [*words, *(f"w{place}" for place in range(START - len(words))), *special, "x62", "x63"]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="x62"))
    made.pre_tokenizer = split
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=[*special, *(word for word in words if word.startswith("<row"))],
        chat_template=TEMPLATE.replace("IMAGE", image),
    )
    sizes = {"shortest_edge": 64, "longest_edge": 4096}
    return PillowProcessor(images or Qwen2VLImageProcessorPil(patch_size=4, size=sizes), tokenizer)


_processor = cache(processor)
"""One that nobody changes."""


def own_inputs(family: str, row: dict[str, Any], completion: list[int]) -> dict[str, Tensor]:
    """Returns what the model's own forward reads of a row: ids as transformers' processors expand them, and pixels."""
    known, shown = _processor(family), {}
    if row["images"]:
        more = {"return_row_col_info": True} if family in SQUARES else {}
        shown = dict(known.image_processor(images=row["images"], return_tensors="pt", **more))
    if family in SQUARES:
        cuts = zip(*(shown.pop(name, [[]])[0] for name in ("rows", "cols")), strict=True)
        parts = [get_image_prompt_string(*cut, 4, AROUND, SHOWN, WHOLE) for cut in cuts]
    elif family == TWO_WAY:
        parts = [f"\n\n{SPECIAL[0]}{SPECIAL[2] * 4}{SPECIAL[1]}\n\n" for _ in shown.pop("num_crops", ())]
    else:
        counts = [int(grid.prod()) // 4 for grid in shown.get("image_grid_thw", [])]
        parts = [f"{SPECIAL[0]}{SPECIAL[2] * count}{SPECIAL[1]}" for count in counts]
    text = f"user {''.join(parts)} {row['prompt'][0]['content']} assistant "
    return own_arguments(family, [*known.tokenizer(text)["input_ids"], *completion], shown)


def own_arguments(family: str, ids: list[int], shown: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the arguments of the model's own forward, for one row."""
    ids_1L = torch.tensor(ids)[None]
    name = "token_type_ids" if family == TWO_WAY else "mm_token_type_ids"
    kinds = {} if family in SQUARES else {name: (ids_1L == IMAGE).int()}
    return {"input_ids": ids_1L, **kinds, **shown}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Makes a picture of noise."""
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def rows() -> list[dict[str, Any]]:
    """Returns rows with one image, with two unlike ones, and with none."""
    return [
        {"prompt": [{"role": "user", "content": "w1 w2"}], "images": [picture(16, 16)], "goal": 1},
        {"prompt": [{"role": "user", "content": "w3"}], "images": [picture(32, 16, 1), picture(16, 24, 2)], "goal": 2},
        {"prompt": [{"role": "user", "content": "w4 w5 w6"}], "images": None, "goal": 3},
        {"prompt": [{"role": "user", "content": "w7"}], "images": [picture(24, 40, 3)], "goal": 4},
    ]
