"""Prompts with images, as ids that name everything a trunk reads: token, position and image feature.

A prompt with images is stored as ids from the vocabulary's end on, one for each of its tokens, equal for equal prompts.
A table on the device says what each stands for, so that a prompt may be cut, packed, chunked or shared like any other.
Rotary attention sees differences of positions alone. A prompt's positions therefore end at its length rather than begin
at 0: a completion's are its slots, as without images, and a cache needs to know nothing of images.

Axes: ``B`` rows, ``N`` tokens read, ``L`` tokens of a prompt, ``F`` features of its images, ``T`` entries of the table,
``D`` hidden width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memsafe_rl.accounting import charge, host_memory
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import Context
from memsafe_rl.models.geometry import cache_windows
from memsafe_rl.models.language.packing import attending, padded_layout
from memsafe_rl.models.module_state import attention_configs, peft_adapter_on
from memsafe_rl.models.vision.families import FAMILIES, LEVELS
from memsafe_rl.models.vision.tower import Features, ImagePrompt, Reader, Shown, Tower
from memsafe_rl.types import Component, Trajectory


@dataclass(frozen=True)
class Table:
    """What the ids from the vocabulary's end on stand for; entry 0 stands for every id of the vocabulary."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (3, T) int64; (0, T) where a token's position is its slot
    places: Tensor  # (T,) int64, of each entry's feature; 0, of which there is none, for text
    features: dict[Reader, Features]  # by who reads them
    known: Mapping[bytes, Tensor] = field(default_factory=dict)  # stored ids by what was read, on the host
    # by its first id, what was read, where a tower may have to read it again
    shown: Mapping[int, Shown] = field(default_factory=dict)
    # where families' image tokens see each other: by a prompt's first id, or its length where it is made up
    images: Mapping[int, tuple[slice, ...]] = field(default_factory=dict)
    around: Context | None = None  # of reading made-up prompts, which stand for those of any rows; None for real

    def tensors(self) -> list[Tensor]:
        """Returns what lies on the device."""
        return [self.tokens, self.positions, self.places, *(one.values for one in self.features.values())]


class ImagePrompts:
    """The prompts with images that a run reads, and what towers made of these."""

    def __init__(self, lm: Any, *, dtype: torch.dtype | None = None, reference: Any = None) -> None:
        """Begins an empty table."""
        self._lm, weight = lm, lm.get_input_embeddings().weight
        self._family = FAMILIES[lm.config.model_type]
        self._tower = Tower(self._family, lm, dtype=dtype, reference=reference)
        self._rounds = dtype is not None
        for network in (lm, reference):
            if network is not None:
                self._family.reach_deeper(network)
        self.first_id = int(weight.shape[0])
        self._placeholder = int(lm.config.image_token_id)
        self._checked = self._learning = False
        self._begun: tuple[tuple[int, ...], list[int]] = ((), [])  # rows' prompts, and the first id of each prompt
        self._empty = self.table = Table(
            weight.new_zeros(1, dtype=torch.int64),
            weight.new_zeros(3 if self._family.positions else 0, 1, dtype=torch.int64),
            weight.new_zeros(1, dtype=torch.int64),
            {self._tower.own: Features(weight.new_zeros(1, self._width(lm), dtype=self._tower.feature_dtype))},
        )

    def forget(self, table: Table | None = None) -> None:
        """Goes back to an earlier table, or to an empty one; frees what was read since, and allocates nothing."""
        self.table = table or self._empty
        for features in self.table.features.values():
            features.fresh.clear()  # meanwhile, weights may have moved in ways that leave no mark

    @torch.no_grad()
    def read(self, prompts: Sequence[ImagePrompt]) -> list[Tensor]:
        """Reads the images of prompts, once for equal prompts; a failed attempt changes nothing."""
        keys = [hashlib.sha256(b"".join(map(_bytes, (ids, *shown.values())))).digest() for ids, shown in prompts]
        fresh = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.table.known}
        if fresh:
            self.table = self._grown(fresh)
        if keys and not self._checked:
            self._check_against_own_forward(self.table.known[keys[0]], prompts[0])
            self._checked = True
        stored = [self.table.known[key] for key in keys]
        if self._tower.learns:  # some may have been read before the weights last moved
            self._tower.fill(self._lm, self._features(self._lm), (self.table.shown[int(ids[0])] for ids in stored))
        return stored

    @torch.no_grad()
    def rehearse(self, prompts: Sequence[Tensor], around: Context) -> None:
        """Keeps as much of made-up images, read in a context, as prompts of so many placeholders would have it keep."""
        shown = [ids for ids in map(self._whole, prompts) if self._placeholder in ids]
        if shown:
            made = {str(place).encode(): self._made_up(ids) for place, ids in enumerate(shown)}
            self.table = self._grown(made, around)

    def of(self, lm: Any, ids_BN: Tensor, positions_BN: Tensor | None = None) -> dict[str, Any]:
        """Returns embeddings and positions of tokens; no tensor value is read."""
        table, given = self.table, {} if positions_BN is None else {"position_ids": positions_BN}
        named_BN = ids_BN >= self.first_id
        entries_BN = (ids_BN - self.first_id + 1).clamp_min(0)
        if self._family.positions is not None:
            if positions_BN is None:
                positions_BN = torch.arange(ids_BN.shape[1], device=ids_BN.device).expand_as(ids_BN)
            given = {"position_ids": torch.where(named_BN, table.positions[:, entries_BN], positions_BN)}
        embedded_BND = lm.get_input_embeddings()(torch.where(named_BN, table.tokens[entries_BN], ids_BN))
        places_BN = table.places[entries_BN]
        features_BNW = functional.embedding(places_BN, self._features(lm).values, padding_idx=0)
        features_BND, *levels = features_BNW.chunk(self._family.levels(lm.config), -1)
        embeds_BND = torch.where((places_BN > 0)[..., None], features_BND.to(embedded_BND.dtype), embedded_BND)
        return {"inputs_embeds": embeds_BND, **given, **({LEVELS: levels} if levels else {})}

    def images(self, prompts: Sequence[Tensor]) -> list[Sequence[slice]]:
        """Returns the stretches of each prompt whose tokens see each other, those that come later too."""
        table, known = self.table, self.table.images
        if not known:
            return [()] * len(prompts)
        return [known.get(len(ids) if table.around else int(ids[0]), ()) if len(ids) else () for ids in prompts]

    def make_ready(self, lm: Any, trajectory: Trajectory, rows: Sequence[int]) -> None:
        """Has a tower read the images of rows again, where its weights have moved since, or none has read them."""
        if not self._tower.reads_again:
            return
        features, shown = self._features(lm), self._shown(trajectory, rows)
        with (self.table.around or nullcontext)():
            self._tower.fill(lm, features, shown)
        if features.values.requires_grad:
            features.learnt |= {one.rows.start: one for one in shown}

    @contextmanager
    def learning(self, model: nn.Module, forward: Context) -> Iterator[None]:
        """Gathers gradients at features; leaving without an exception has the tower learn from them."""
        if not self._tower.learns:
            refusal.when(self._tower.is_trained(), "images/unfrozen")
            yield
            return
        own = self._begin(learning=True)
        try:
            yield
            for reader, features in self.table.features.items():
                with nullcontext() if features is own else peft_adapter_on(model, reader[1][0]):
                    self._tower.learn(features, forward, self.table.around or nullcontext)
            own.fresh.clear()  # weights move next, of which a fused optimizer does not tell their versions
        finally:
            self._begin(learning=False)

    def _begin(self, *, learning: bool) -> Features:
        """Begins an accumulation, or ends it: with the own features, for what others have read is used up by then."""
        self._learning, features = learning, self.table.features
        own = features[self._tower.own]
        own.values.requires_grad_(learning).grad = None
        own.learnt.clear()
        features.clear()
        features[self._tower.own] = own
        return own

    def _features(self, lm: Any) -> Features:
        """Returns the features that a network reads, with room for them."""
        found, reader = self.table.features, self._tower.reader(lm)
        if reader not in found:
            own = found[self._tower.own].values
            with charge(Component.TRAJECTORY):
                values = own.new_zeros(len(own), self._width(lm))  # of which text reads the first
            found[reader] = Features(values.requires_grad_(self._learning and torch.is_grad_enabled()))
        return found[reader]

    def _shown(self, trajectory: Trajectory, rows: Sequence[int]) -> list[Shown]:
        """Returns the prompts of rows whose images are read again; two made-up ones tell what more would hold."""
        shown, owners = self.table.shown, trajectory.condition_of_row
        if self.table.around is not None:
            return list(islice(shown.values(), 2))
        if self._begun[0] is not owners:  # read once: they may lie on the device
            self._begun = owners, [int(ids[0]) if len(ids) else 0 for ids in trajectory.conditions.rows()]
        wanted = {self._begun[1][owners[row]] for row in rows}
        return [one for first, one in shown.items() if first in wanted]

    def _grown(self, fresh: dict[bytes, ImagePrompt], around: Context | None = None) -> Table:
        """Returns the table with further prompts at its end, whose features are written where they will lie."""
        old, tokens_of = self.table, {key: prompt.ids == self._placeholder for key, prompt in fresh.items()}
        for key, prompt in fresh.items():
            self._check_placeholders(tokens_of[key], prompt)
        own, device = old.features[self._tower.own], old.tokens.device
        first, end, known, added = len(own.values), len(old.tokens), dict(old.known), dict[int, Shown]()
        images = dict(old.images)
        tokens, positions, places = [old.tokens], [old.positions], [old.places]
        for key, prompt in fresh.items():
            shown_L, length = tokens_of[key], len(prompt.ids)
            tokens.append(prompt.ids.to(device))
            positions.append(self._positions(prompt, shown_L).to(device))
            places.append(torch.where(shown_L, shown_L.cumsum(0) - 1 + first, 0).to(device))
            known[key] = torch.arange(length) + self.first_id + end - 1
            count = int(shown_L.sum())
            added[self.first_id + end - 1] = Shown(prompt, slice(first, first + count))
            if self._family.two_way:
                images[length if around else self.first_id + end - 1] = tuple(_stretches(shown_L))
            first, end = first + count, end + length
        with charge(Component.TRAJECTORY):
            values = own.values.new_empty(first, own.values.shape[1])
        values[: len(own.values)] = own.values
        features = Features(values, own.mark, set(own.fresh))
        self._tower.fill(self._lm, features, added.values())
        kept = {**old.shown, **added} if self._tower.reads_again else {}
        with charge(Component.TRAJECTORY):
            laid = torch.cat(tokens), torch.cat(positions, 1), torch.cat(places)
        return Table(*laid, {self._tower.own: features}, known, kept, images, around)

    def _whole(self, ids: Tensor) -> Tensor:
        """Leaves out what a made-up prompt, which may end anywhere, has of an image that all have whole."""
        if self._family.each is None:
            return ids
        each, whole = self._family.each(self._lm.config), ids.clone()
        for span in _stretches(ids == self._placeholder):
            if span.stop - span.start != each:
                whole[span] = 0
        return whole

    def _made_up(self, ids: Tensor) -> ImagePrompt:
        """Returns a prompt of blank images, as many as its placeholders stand for."""
        runs = [span.stop - span.start for span in _stretches(ids == self._placeholder)]
        with host_memory():
            return ImagePrompt(ids, self._family.blank(self._lm.config, runs, self.table.tokens))

    def _positions(self, prompt: ImagePrompt, shown_L: Tensor) -> Tensor:
        """Returns M-RoPE positions (3, L) that end at the prompt's length."""
        if self._family.positions is None:
            return prompt.ids.new_zeros(0, len(prompt.ids))
        positions_3L = self._family.positions(self._lm.base_model, prompt.ids, shown_L, prompt.images)
        return positions_3L + len(prompt.ids) - (positions_3L.max() + 1)

    def _width(self, lm: Any) -> int:
        """Returns the width of a placeholder's features, as a network reads them."""
        return int(lm.get_input_embeddings().weight.shape[1]) * self._family.levels(lm.config)

    def _check_placeholders(self, shown_L: Tensor, prompt: ImagePrompt) -> None:
        wanted = self._family.runs(self._lm.config, prompt.images)
        found = [span.stop - span.start for span in _stretches(shown_L)]
        if found != wanted:
            raise DataError(
                f"a prompt of {len(shown_L)} tokens has runs of {found} image placeholders, but its {len(wanted)} "
                f"image(s) have {wanted} features. Use the model's own processor, and do not truncate the prompt."
            )

    def _check_against_own_forward(self, entered_L: Tensor, prompt: ImagePrompt) -> None:
        trunk, device = self._lm.base_model, self.table.tokens.device
        given = {"input_ids": prompt.ids[None], **prompt.images}
        if self._family.marks is not None:
            given[self._family.marks] = (prompt.ids == self._placeholder)[None].int()
        with self._tower.autocast():
            own = trunk(**{name: value.to(device) for name, value in given.items()}, use_cache=False)[0]
            if self._family.positions is not None:
                trunk.rope_deltas = None  # which it keeps of its last prompt
            spans = self.images([entered_L])
            layout = padded_layout(1, len(entered_L), cache_windows(self._lm.config), device, spans)
            with attending(attention_configs(self._lm), layout) if any(spans) else nullcontext():
                found = trunk(**self.of(self._lm, entered_L[None].to(device)), use_cache=False)[0]
        relative = float((found - own).norm() / own.norm())  # single entries of bf16 differ by more
        allowed = 1e-4 if (own.dtype in (torch.float32, torch.float64) and not self._rounds) else 5e-2
        if not relative <= allowed:
            raise ConfigError(
                f"{type(self._lm).__name__} gives the first prompt with images other hidden states than its own "
                f"forward does: they differ by {relative:.1e} of their norm ({allowed:.0e} allowed), so features or "
                "positions are not where it puts them. Use the transformers version of constraints.txt."
            )


def _bytes(tensor: Tensor) -> bytes:
    return str(tuple(tensor.shape)).encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _stretches(shown_L: Tensor) -> Iterator[slice]:
    """Yields the placeholders that stand side by side."""
    start = 0
    for shown, run in groupby(shown_L.tolist()):
        stop = start + len(list(run))
        if shown:
            yield slice(start, stop)
        start = stop
