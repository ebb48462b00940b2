"""Prompts with images, as ids that name everything a trunk reads: token, M-RoPE position and image feature.

A prompt with images is stored as ids from the vocabulary's end on, one for each of its tokens, equal for equal prompts.
A table on the device says what each stands for, so that a prompt may be cut, packed, chunked or shared like any other.
Rotary attention sees differences of positions alone. A prompt's positions therefore end at its length rather than begin
at 0: a completion's are its slots, as without images, and a cache needs to know nothing of images.

Axes: ``B`` rows, ``N`` tokens read, ``L`` tokens of a prompt, ``F`` features of its images, ``T`` entries of the table,
``D`` hidden width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsafe_rl.accounting import charge, host_memory
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.types import Component

FAMILIES = {"qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL"}
"""Networks whose prompts may hold images, by the type that their config names."""


class ImagePrompt(NamedTuple):
    """A prompt as a processor gives it, on the host."""

    ids: Tensor  # (L,) int64, with one placeholder for each feature
    pixels: Tensor  # (patches, values) float, of all its images in order
    grids: Tensor  # (images, 3) int64, patches in time, height and width


@dataclass(frozen=True)
class Table:
    """What the ids from the vocabulary's end on stand for; entry 0 stands for every id of the vocabulary."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (3, T) int64
    places: Tensor  # (T,) int64, of each entry's feature; -1 for text
    features: Tensor  # (F, D)
    known: dict[bytes, Tensor] = field(default_factory=dict)  # stored ids by what was read, on the host

    def tensors(self) -> list[Tensor]:
        """Gives what lies on the device."""
        return [self.tokens, self.positions, self.places, self.features]


class ImagePrompts:
    """The prompts with images that a run reads, and what their tower, which is frozen, made of these."""

    def __init__(self, lm: Any, *, dtype: torch.dtype | None = None) -> None:
        """Begins an empty table."""
        refuse_trained_tower(lm)
        self._lm, weight = lm, lm.get_input_embeddings().weight
        self._rounds = dtype is not None
        self._autocast = partial(
            torch.autocast, weight.device.type, dtype=dtype or torch.bfloat16, enabled=self._rounds
        )
        self.first_id = int(weight.shape[0])
        self._placeholder = int(lm.config.image_token_id)
        self._checked = False
        self._empty = self.table = Table(
            weight.new_zeros(1, dtype=torch.int64),
            weight.new_zeros(3, 1, dtype=torch.int64),
            weight.new_full((1,), -1, dtype=torch.int64),
            weight.new_zeros(1, weight.shape[1]),
        )

    def forget(self, table: Table | None = None) -> None:
        """Goes back to an earlier table, or to an empty one; frees what was read since, and allocates nothing."""
        self.table = table or self._empty

    @torch.no_grad()
    def read(self, prompts: Sequence[ImagePrompt]) -> list[Tensor]:
        """Reads the images of prompts, once for equal prompts; a failed attempt changes nothing."""
        keys = [hashlib.sha256(b"".join(map(_bytes, prompt))).digest() for prompt in prompts]
        fresh = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.table.known}
        if fresh:
            self.table = self._grown(fresh)
        if fresh and not self._checked:
            key, prompt = next(iter(fresh.items()))
            self._check_against_own_forward(self.table.known[key], prompt)
            self._checked = True
        return [self.table.known[key] for key in keys]

    @torch.no_grad()
    def rehearse(self, prompts: Sequence[Tensor]) -> None:
        """Keeps as much of made-up images as prompts with so many placeholders would have it keep."""
        shown = [ids for ids in prompts if self._placeholder in ids]
        if shown:
            self.table = self._grown({str(place).encode(): self._made_up(ids) for place, ids in enumerate(shown)})

    def of(self, lm: Any, ids_BN: Tensor, positions_BN: Tensor | None = None) -> dict[str, Any]:
        """Gives embeddings and M-RoPE positions of tokens; no tensor value is read."""
        table = self.table
        if positions_BN is None:
            positions_BN = torch.arange(ids_BN.shape[1], device=ids_BN.device).expand_as(ids_BN)
        named_BN = ids_BN >= self.first_id
        entries_BN = (ids_BN - self.first_id + 1).clamp_min(0)
        positions_3BN = torch.where(named_BN, table.positions[:, entries_BN], positions_BN)
        embedded_BND = lm.get_input_embeddings()(torch.where(named_BN, table.tokens[entries_BN], ids_BN))
        places_BN = table.places[entries_BN]
        features_BND = table.features[places_BN.clamp_min(0)].to(embedded_BND.dtype)
        embeds_BND = torch.where((places_BN >= 0)[..., None], features_BND, embedded_BND)
        return {"inputs_embeds": embeds_BND, "position_ids": positions_3BN}

    def _grown(self, fresh: dict[bytes, ImagePrompt]) -> Table:
        """Gives the table with further prompts at its end, whose features are written where they will lie."""
        old, shown = self.table, {key: prompt.ids == self._placeholder for key, prompt in fresh.items()}
        for key, prompt in fresh.items():
            self._check_placeholders(shown[key], prompt.grids)
        first, end, known = len(old.features), len(old.tokens), dict(old.known)
        counts = {key: int(shown_L.sum()) for key, shown_L in shown.items()}
        with charge(Component.TRAJECTORY):
            features = old.features.new_empty(first + sum(counts.values()), old.features.shape[1])
        features[:first] = old.features
        tokens, positions, places = [old.tokens], [old.positions], [old.places]
        for key, prompt in fresh.items():
            shown_L, length = shown[key], len(prompt.ids)
            features[first : first + counts[key]] = self._features(prompt)
            tokens.append(prompt.ids.to(old.tokens.device))
            positions.append(self._positions(prompt, shown_L).to(old.tokens.device))
            places.append(torch.where(shown_L, shown_L.cumsum(0) - 1 + first, -1).to(old.tokens.device))
            known[key] = torch.arange(length) + self.first_id + end - 1
            first, end = first + counts[key], end + length
        with charge(Component.TRAJECTORY):
            return Table(torch.cat(tokens), torch.cat(positions, 1), torch.cat(places), features, known)

    def _features(self, prompt: ImagePrompt) -> Tensor:
        device = self.table.tokens.device
        with self._autocast():
            read = self._lm.base_model.get_image_features(
                prompt.pixels.to(device, copy=True), prompt.grids.to(device), return_dict=True
            ).pooler_output
        return torch.cat(tuple(read))

    def _made_up(self, ids: Tensor) -> ImagePrompt:
        """Gives a prompt of blank images, each a strip of as many patches as its placeholders stand for."""
        tower = self._lm.config.vision_config
        side, values = tower.spatial_merge_size, tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        runs = [len(list(run)) for shown, run in groupby((ids == self._placeholder).tolist()) if shown]
        with host_memory():
            pixels = self.table.features.new_zeros(sum(runs) * side**2, values, dtype=torch.float32)
        return ImagePrompt(ids, pixels, torch.tensor([(1, side, side * run) for run in runs]))

    def _positions(self, prompt: ImagePrompt, shown_L: Tensor) -> Tensor:
        """Gives M-RoPE positions (3, L) that end at the prompt's length."""
        positions_31L, _ = self._lm.base_model.get_rope_index(
            prompt.ids[None], shown_L[None].int(), image_grid_thw=prompt.grids
        )
        moved_3L: Tensor = positions_31L[:, 0] + len(prompt.ids) - (positions_31L.max() + 1)
        return moved_3L

    def _check_placeholders(self, shown_L: Tensor, grids: Tensor) -> None:
        merged = self._lm.config.vision_config.spatial_merge_size**2
        wanted = [int(grid.prod()) // merged for grid in grids]
        found = [len(list(run)) for shown, run in groupby(shown_L.tolist()) if shown]
        if found != wanted:
            raise DataError(
                f"a prompt of {len(shown_L)} tokens has runs of {found} image placeholders, but its {len(wanted)} "
                f"image(s) have {wanted} features. Use the model's own processor, and do not truncate the prompt."
            )

    def _check_against_own_forward(self, entered_L: Tensor, prompt: ImagePrompt) -> None:
        trunk, device = self._lm.base_model, self.table.tokens.device
        with self._autocast():
            own = trunk(
                input_ids=prompt.ids[None].to(device),
                pixel_values=prompt.pixels.to(device),
                image_grid_thw=prompt.grids.to(device),
                mm_token_type_ids=(prompt.ids == self._placeholder)[None].int().to(device),
                use_cache=False,
            )[0]
            trunk.rope_deltas = None  # which it keeps of its last prompt
            found = trunk(**self.of(self._lm, entered_L[None].to(device)), use_cache=False)[0]
        relative = float((found - own).abs().max() / own.abs().max())
        exact = own.dtype in (torch.float32, torch.float64) and not self._rounds
        allowed = 1e-4 if exact else 5e-2
        if not relative <= allowed:
            raise ConfigError(
                f"{type(self._lm).__name__} gives the first prompt with images other hidden states than its own "
                f"forward does: they differ by {relative:.1e} of the largest ({allowed:.0e} allowed), so features or "
                "positions are not where it puts them. Use the transformers version of constraints.txt."
            )


def refuse_trained_tower(lm: Any) -> None:
    """Refuses a network whose image tower learns."""
    trained = [name for name, weight in lm.base_model.visual.named_parameters() if weight.requires_grad]
    if not trained:
        return
    remedy = "Freeze it: model.model.visual.requires_grad_(False)."
    if any("lora_" in name for name in trained):
        remedy = r"Keep the adapter out of it: LoraConfig(..., exclude_modules=r'.*visual\..*')."
    raise ConfigError(
        f"{type(lm).__name__} trains its image tower ({trained[0]} and {len(trained) - 1} more), which is not "
        f"supported yet. {remedy}"
    )


def _bytes(tensor: Tensor) -> bytes:
    return str(tuple(tensor.shape)).encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
