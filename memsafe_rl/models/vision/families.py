"""Families of networks that read images: what a prompt shows for an image, and what the tower makes of it.

A description holds what differs between families; all else is shared. Each must agree with the network's own forward on
pixels, which is compared at start.

Axes: ``L`` tokens of a prompt, ``F`` features of all its images, ``D`` hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.errors import ConfigError

LEVELS = "image_levels"
"""Argument that a forward hands on to its layers: what is added to the output of each of the first, (B, N, D)."""

Images = Mapping[str, Tensor]
"""What an image processor gives of a prompt's images, by the arguments of the network's forward."""


@dataclass(frozen=True)
class VisionFamily:
    """How a family reads images."""

    name: str  # that people know
    tower: tuple[str, ...]  # modules of the trunk on whose weights features depend
    takes: tuple[str, ...]  # of what an image processor gives, pixels first
    # image processor, tokenizer, config, (height, width): the tokens in place of an image's own
    tokens: Callable[[Any, Any, Any, tuple[int, int]], list[int]]
    runs: Callable[[Any, Images], list[int]]  # config, images: features that each run of placeholders stands for
    features: Callable[[Any, Images], Tensor]  # trunk, images on its device: (F, levels * D)
    blank: Callable[[Any, Sequence[int], Tensor], Images]  # config, runs, any tensor: made-up images of these runs
    # trunk, ids (L,), which are placeholders (L,), images: M-RoPE positions (3, L); None where a token's is its slot
    positions: Callable[[Any, Tensor, Tensor, Images], Tensor] | None = None
    marks: str | None = None  # argument of the forward that is 1 where a token is a placeholder
    deep: bool = False  # whether features enter the first language layers too, after each a level of them
    stands: str = "image_token_id"  # in the config, what stands for an image in a chat template's text
    # tokenizer, config, a rendered prompt: the same with all that stands for an image and around it, whatever its size
    spelled: Callable[[Any, Any, str], str] | None = None
    each: Callable[[Any], int] | None = None  # config: features of every run; None where images differ
    two_way: bool = False  # whether the tokens of a run see each other, those that come later too

    def modules_of(self, lm: Any) -> tuple[nn.Module, ...]:
        """Returns the modules of a network's tower."""
        return tuple(getattr(lm.base_model, name) for name in self.tower)

    def levels(self, config: Any) -> int:
        """Counts the features of a placeholder, each as wide as the language model."""
        return 1 + (len(config.vision_config.deepstack_visual_indexes) if self.deep else 0)

    def reach_deeper(self, lm: Any) -> None:
        """Has the first language layers add what they are given of images, once for a network and its copies."""
        for level in range(self.levels(lm.config) - 1):
            layer = lm.base_model.language_model.layers[level]
            if not hasattr(layer, "image_level"):
                layer.image_level = level
                layer.register_forward_hook(_with_level, with_kwargs=True)


def _with_level(layer: Any, _: Any, given: Mapping[str, Any], states: Tensor) -> Tensor:
    return states + given[LEVELS][layer.image_level].to(states.dtype) if LEVELS in given else states


def vision_family(config: Any) -> VisionFamily | None:
    """Returns the family of a config; None where it reads no images here."""
    return FAMILIES.get(getattr(config, "model_type", ""))


# ------------------------------------------------------------------ images as grids of patches: Qwen


def _grid_tokens(processor: Any, _: Any, config: Any, size: tuple[int, int]) -> list[int]:
    return [int(config.image_token_id)] * (processor.get_number_of_image_patches(*size, {}) // processor.merge_size**2)


def _grid_runs(config: Any, images: Images) -> list[int]:
    merged = config.vision_config.spatial_merge_size**2
    return [int(grid.prod()) // merged for grid in images["image_grid_thw"]]


def _grid_features(trunk: Any, images: Images) -> Tensor:
    return torch.cat(tuple(trunk.get_image_features(**images, return_dict=True).pooler_output))


def _deep_features(trunk: Any, images: Images) -> Tensor:
    read = trunk.get_image_features(**images, return_dict=True)
    levels = (read.pooler_output, *read.deepstack_features)  # each by image, or in transformers 5.17 of all
    return torch.cat([one if isinstance(one, Tensor) else torch.cat(tuple(one)) for one in levels], -1)


def _grid_blank(config: Any, runs: Sequence[int], like: Tensor) -> Images:
    """Makes each image a strip of as many patches as its placeholders stand for."""
    tower = config.vision_config
    side, values = tower.spatial_merge_size, tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    pixels = like.new_zeros(sum(runs) * side**2, values, dtype=torch.float32)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, side, side * run) for run in runs])}


def _rope_positions(trunk: Any, ids_L: Tensor, shown_L: Tensor, images: Images) -> Tensor:
    positions_31L, _ = trunk.get_rope_index(ids_L[None], shown_L[None].int(), image_grid_thw=images["image_grid_thw"])
    positions_3L: Tensor = positions_31L[:, 0]
    return positions_3L


# ------------------------------------------------------------------ images cut into squares: Idefics3, SmolVLM


def _squares_tokens(processor: Any, tokenizer: Any, config: Any, size: tuple[int, int]) -> list[int]:
    placeholder, run = int(config.image_token_id), _square_run(config)
    _, rows, columns = processor.get_number_of_image_patches(*size, {})
    around, image = "<fake_token_around_image>", tokenizer.convert_ids_to_tokens(placeholder)
    squares = [[f"{around}<row_{y + 1}_col_{x + 1}>{image}" for x in range(columns)] for y in range(rows)]
    text = "".join("".join(row) + "\n" for row in squares) + "\n" * bool(rows)
    text += f"{around}<global-img>{image}{around}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token for one in ids for token in [one] * (run if one == placeholder else 1)]


def _square_run(config: Any) -> int:
    tower = config.vision_config
    return int((tower.image_size // tower.patch_size) ** 2 // config.scale_factor**2)


def _squares_runs(config: Any, images: Images) -> list[int]:
    _, count, _, height, width = images["pixel_values"].shape
    side = config.vision_config.patch_size
    return [(height // side) * (width // side) // config.scale_factor**2] * count


def _squares_features(trunk: Any, images: Images) -> Tensor:
    """Reads every square; the network's own method looks at pixels for squares that only fill a batch up."""
    side, (pixels,) = trunk.config.vision_config.patch_size, images["pixel_values"]
    mask = images["pixel_attention_mask"][0].unfold(1, side, side).unfold(2, side, side).sum((-1, -2)) > 0
    states = trunk.vision_model(pixel_values=pixels.to(trunk.dtype), patch_attention_mask=mask).last_hidden_state
    features: Tensor = trunk.connector(states).flatten(0, 1)
    return features


def _squares_blank(config: Any, runs: Sequence[int], like: Tensor) -> Images:
    tower = config.vision_config
    shape, side = (1, len(runs)), (tower.image_size, tower.image_size)
    pixels = like.new_ones(*shape, tower.num_channels, *side, dtype=torch.float32)
    return {"pixel_values": pixels, "pixel_attention_mask": like.new_ones(*shape, *side)}


# ------------------------------------------------------------------ images whose tokens see each other: Gemma 3


def _whole_tokens(processor: Any, _: Any, config: Any, __: tuple[int, int]) -> list[int]:
    if processor.do_pan_and_scan:
        raise ConfigError("do_pan_and_scan is set, which shows crops of an image. Set it to False on the processor.")
    return [int(config.boi_token_id)]


def _whole_text(tokenizer: Any, config: Any, text: str) -> str:
    """Spells images out before tokens are made: their blank lines join those of the text around them."""
    ids = config.boi_token_id, config.image_token_id, config.eoi_token_id
    begin, image, end = tokenizer.convert_ids_to_tokens(list(ids))
    return text.replace(begin, f"\n\n{begin}{image * config.mm_tokens_per_image}{end}\n\n")


def _whole_runs(config: Any, images: Images) -> list[int]:
    return [config.mm_tokens_per_image] * len(images["pixel_values"])


def _whole_features(trunk: Any, images: Images) -> Tensor:
    features: Tensor = trunk.get_image_features(**images, return_dict=True).pooler_output.flatten(0, 1)
    return features


def _whole_blank(config: Any, runs: Sequence[int], like: Tensor) -> Images:
    tower = config.vision_config
    shape = len(runs), tower.num_channels, tower.image_size, tower.image_size
    return {"pixel_values": like.new_zeros(*shape, dtype=torch.float32)}


_GRIDS = partial(
    VisionFamily,
    tower=("visual",),
    takes=("pixel_values", "image_grid_thw"),
    tokens=_grid_tokens,
    runs=_grid_runs,
    blank=_grid_blank,
    positions=_rope_positions,
    marks="mm_token_type_ids",
)
_SQUARES = _squares_tokens, _squares_runs, _squares_features, _squares_blank
_IDEFICS3 = VisionFamily(
    "Idefics3", ("vision_model", "connector"), ("pixel_values", "pixel_attention_mask"), *_SQUARES, each=_square_run
)
_WHOLE = _whole_tokens, _whole_runs, _whole_features, _whole_blank
_GEMMA3 = VisionFamily("Gemma 3", ("vision_tower", "multi_modal_projector"), ("pixel_values",), *_WHOLE, two_way=True)
_ITS_TEXT: Any = {"marks": "token_type_ids", "stands": "boi_token_id", "spelled": _whole_text}

FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": _GRIDS("Qwen2-VL", features=_grid_features),
    "qwen2_5_vl": _GRIDS("Qwen2.5-VL", features=_grid_features),
    "qwen3_vl": _GRIDS("Qwen3-VL", features=_deep_features, deep=True),
    "qwen3_vl_moe": _GRIDS("Qwen3-VL-MoE", features=_deep_features, deep=True),
    "smolvlm": replace(_IDEFICS3, name="SmolVLM"),
    "idefics3": _IDEFICS3,
    "gemma3": replace(_GEMMA3, each=attrgetter("mm_tokens_per_image"), **_ITS_TEXT),
}
"""Networks whose prompts may hold images, by the type that their config names."""

*_BUT_LAST, _LAST = (family.name for family in FAMILIES.values())
KNOWN = f"{', '.join(_BUT_LAST)} and {_LAST}"
"""Their names, in a sentence."""
