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
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError, DataError


class ImagePrompts:
    """The prompts with images of a run, and what their tower, which is frozen, made of these."""

    def __init__(self, lm: Any) -> None:
        """Begins an empty table.

        Args:
            lm: a Qwen2-VL or Qwen2.5-VL with its head.

        Raises:
            ConfigError: weights of its tower are trained.
        """
        trained = [name for name, weight in lm.base_model.visual.named_parameters() if weight.requires_grad]
        if trained:
            raise ConfigError(
                f"{type(lm).__name__} trains its image tower ({trained[0]} and {len(trained) - 1} more), which is not "
                "supported yet. Freeze it: model.model.visual.requires_grad_(False)."
            )
        self._lm, weight = lm, lm.get_input_embeddings().weight
        self.first_id = int(weight.shape[0])
        self._known: dict[bytes, Tensor] = {}
        self._tokens = weight.new_zeros(1, dtype=torch.int64)  # entry 0 stands for every id of the vocabulary
        self._positions = weight.new_zeros(3, 1, dtype=torch.int64)
        self._places = weight.new_full((1,), -1, dtype=torch.int64)  # of each entry's feature; -1 for text
        self._features = weight.new_zeros(1, weight.shape[1])

    @torch.no_grad()
    def add(self, ids_L: Tensor, pixels: Tensor, grids: Tensor) -> Tensor:
        """Reads the images of a prompt, once for equal prompts.

        Args:
            ids_L: (L,) int64, with one placeholder for each feature, as the processor gives them.
            pixels: (patches, values) float, of all its images in order.
            grids: (images, 3) int64, patches in time, height and width.

        Returns:
            The ids (L,) int64 under which the prompt is stored, on the host.

        Raises:
            DataError: the placeholders are not those of these images.
            ConfigError: the first prompt gets other hidden states than by the model's own forward.
        """
        ids_L, grids = ids_L.cpu(), grids.cpu()
        key = hashlib.sha256(b"".join(_bytes(part) for part in (ids_L, grids, pixels))).digest()
        if key not in self._known:
            shown_L = ids_L == self._lm.config.image_token_id
            self._check_placeholders(shown_L, grids)
            entered_L = self._enter(ids_L, shown_L, pixels, grids)
            if not self._known:
                self._check_against_own_forward(entered_L, ids_L, shown_L, pixels, grids)
            self._known[key] = entered_L
        return self._known[key]

    def of(self, lm: Any, ids_BN: Tensor, positions_BN: Tensor | None = None) -> dict[str, Any]:
        """Gives embeddings and M-RoPE positions of tokens; no tensor value is read."""
        if positions_BN is None:
            positions_BN = torch.arange(ids_BN.shape[1], device=ids_BN.device).expand_as(ids_BN)
        named_BN = ids_BN >= self.first_id
        entries_BN = (ids_BN - self.first_id + 1).clamp_min(0)
        positions_3BN = torch.where(named_BN, self._positions[:, entries_BN], positions_BN)
        embedded_BND = lm.get_input_embeddings()(torch.where(named_BN, self._tokens[entries_BN], ids_BN))
        places_BN = self._places[entries_BN]
        features_BND = self._features[places_BN.clamp_min(0)].to(embedded_BND.dtype)
        embeds_BND = torch.where((places_BN >= 0)[..., None], features_BND, embedded_BND)
        return {"inputs_embeds": embeds_BND, "position_ids": positions_3BN}

    def _enter(self, ids_L: Tensor, shown_L: Tensor, pixels: Tensor, grids: Tensor) -> Tensor:
        """Writes a prompt to the end of the table."""
        trunk, device, length = self._lm.base_model, self._tokens.device, len(ids_L)
        positions_31L, _ = trunk.get_rope_index(ids_L[None], shown_L[None].int(), image_grid_thw=grids)
        positions_3L = positions_31L[:, 0] + length - (positions_31L.max() + 1)
        read = trunk.get_image_features(pixels.to(device), grids.to(device), return_dict=True).pooler_output
        features_FD = torch.cat(tuple(read)).to(self._features)
        places_L = torch.where(shown_L, shown_L.cumsum(0) - 1 + len(self._features), -1)
        start = self.first_id + len(self._tokens) - 1
        self._tokens = torch.cat([self._tokens, ids_L.to(device)])
        self._positions = torch.cat([self._positions, positions_3L.to(device)], 1)
        self._places = torch.cat([self._places, places_L.to(device)])
        self._features = torch.cat([self._features, features_FD])
        return torch.arange(start, start + length)

    def _check_placeholders(self, shown_L: Tensor, grids: Tensor) -> None:
        merged = self._lm.config.vision_config.spatial_merge_size**2
        wanted = [int(grid.prod()) // merged for grid in grids]
        found = [len(list(run)) for shown, run in groupby(shown_L.tolist()) if shown]
        if found != wanted:
            raise DataError(
                f"a prompt of {len(shown_L)} tokens has runs of {found} image placeholders, but its {len(wanted)} "
                f"image(s) have {wanted} features. Use the model's own processor, and do not truncate the prompt."
            )

    def _check_against_own_forward(
        self, entered_L: Tensor, ids_L: Tensor, shown_L: Tensor, pixels: Tensor, grids: Tensor
    ) -> None:
        trunk, device = self._lm.base_model, self._tokens.device
        own = trunk(
            input_ids=ids_L[None].to(device),
            pixel_values=pixels.to(device),
            image_grid_thw=grids.to(device),
            mm_token_type_ids=shown_L[None].int().to(device),
            use_cache=False,
        )[0]
        trunk.rope_deltas = None  # which it keeps of its last prompt
        found = trunk(**self.of(self._lm, entered_L[None].to(device)), use_cache=False)[0]
        relative = float((found - own).abs().max() / own.abs().max())
        allowed = 1e-4 if own.dtype in (torch.float32, torch.float64) else 5e-2
        if not relative <= allowed:
            raise ConfigError(
                f"{type(self._lm).__name__} gives the first prompt with images other hidden states than its own "
                f"forward does: they differ by {relative:.1e} of the largest ({allowed:.0e} allowed), so features or "
                "positions are not where it puts them. Use the transformers version of constraints.txt."
            )


def _bytes(tensor: Tensor) -> bytes:
    return str(tuple(tensor.shape)).encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
