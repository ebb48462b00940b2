"""Reads prompts with images: how they are opened, how many tokens each becomes, and what a tower makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.data import refusal, unusable
from memsafe_rl.data.prompts import (
    COLUMNS,
    PromptReader,
    Prompts,
    PromptTokenizer,
    hollow,
    images_in,
    prompt_of,
    with_image_parts,
    within_limit,
)
from memsafe_rl.models.adapter import Context
from memsafe_rl.models.vision.families import FAMILIES, Images
from memsafe_rl.models.vision.image_prompts import ImagePrompts, Table
from memsafe_rl.models.vision.tower import ImagePrompt

UNREADABLE = (OSError, ValueError, TypeError, AttributeError, SyntaxError)
"""What Pillow raises of a file that is missing, cut short, or no image."""


class ImagePromptReader(PromptReader):
    """Turns conversations with images into ids that name what a network reads of them."""

    columns = ("prompt", *COLUMNS)

    def __init__(self, text: PromptTokenizer, image_processor: Any, config: Any) -> None:
        """Reads by a tokenizer and an image processor, as the network of a config does."""
        self.limit, self.why_limited = text.limit, text.why_limited
        text.limit, text.shows_images = None, True
        self._text, self._image_processor, self._config = text, image_processor, config
        self._family, self._video = FAMILIES[config.model_type], getattr(config, "video_token_id", None)
        self._placeholder = int(getattr(config, self._family.stands))
        if self._family.spelled is not None:
            text.spelled = partial(self._family.spelled, text.tokenizer, config)
        self._images: ImagePrompts | None = None

    def attach(self, images: ImagePrompts) -> None:
        """Names the tower that reads the images, once it is loaded."""
        self._images = images

    def kept(self) -> Table:
        """Gives what is kept of the prompts read so far."""
        return self._tower.table

    def forget(self, kept: Table | None = None) -> None:
        """Goes back to what was kept before, or to nothing."""
        self._tower.forget(kept)

    def rehearse(self, prompts: Sequence[Tensor], around: Context) -> None:
        """Keeps as much as reading prompts with so many image tokens would keep."""
        self._tower.rehearse(prompts, around)

    def tensors(self) -> list[Tensor]:
        """Gives what is kept on the device."""
        return [] if self._images is None else self._images.table.tensors()

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Tokenizes prompts without a limit; of each image only the size is read."""
        shown = [[size_of(image) for image in images_in(prompt)] for prompt in prompts]
        rows = self._text.ids([hollow(prompt, in_parts=self._family.in_parts) for prompt in prompts])
        return [self._expanded(row, sizes) for row, sizes in zip(rows, shown, strict=True)]

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Tokenizes the prompts of some examples, and has the tower read their images."""
        prompts = tuple(filled(prompt_of(example)) for example in examples)
        with host_memory():
            rows = within_limit(self.ids(prompts), self, truncates=self._text.truncate)  # `ids` refuses to cut images
            ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
            read = {
                place: ImagePrompt(ids[place], self._pixels(prompt))
                for place, prompt in enumerate(prompts)
                if next(images_in(prompt), None) is not None
            }
        for place, stored in zip(read, self._tower.read(list(read.values())), strict=True):
            ids[place] = stored
        return Prompts(tuple(examples), prompts, tuple(ids))

    @property
    def _tower(self) -> ImagePrompts:
        if self._images is None:
            raise AssertionError("no tower reads the images yet")
        return self._images

    def _expanded(self, row: list[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Repeats each image's token as often as it has features."""
        unusable.when(self._video in row, "images/video")
        if row.count(self._placeholder) != len(sizes):
            raise unusable("images/template", found=row.count(self._placeholder), count=len(sizes))
        if not sizes:
            return row
        tokenizer = self._text.tokenizer
        try:
            spans = [self._family.tokens(self._image_processor, tokenizer, self._config, size) for size in sizes]
        except ValueError as error:  # such as a strip two hundred times as long as wide
            raise unusable("images/sizes", sizes=list(sizes), error=error) from error
        queue = iter(spans)
        tokens = [token for one in row for token in (next(queue) if one == self._placeholder else [one])]
        if self._text.truncate and self.limit is not None and len(tokens) > self.limit:
            raise unusable("images/truncate", count=len(tokens), limit=self.limit, why=self.why_limited)
        return tokens

    def _pixels(self, prompt: Any) -> Images:
        """Gives the pixels of a prompt's images, and what tells how they lie."""
        try:
            read = self._image_processor(images=list(images_in(prompt)), return_tensors="pt")
            return {name: read[name] for name in self._family.takes}
        except (*UNREADABLE, LookupError) as error:
            raise unusable("images/pixels", prompt=hollow(prompt), error=error) from error


def filled(prompt: Any) -> Any:
    """Gives a prompt whose images are open."""
    return with_image_parts(prompt, lambda part: {**part, "image": opened(part["image"])})


def opened(image: Any) -> Any:
    """Reads an image of Pillow, a path, bytes, a mapping of these as datasets store it, or an array (H, W, 3) uint8."""
    with _open(image) as found:
        found.load()
        return found


def size_of(image: Any) -> tuple[int, int]:
    """Gives the height and width of an image, as `opened` takes it; of a file only the head is read."""
    with _open(image) as found:
        return found.height, found.width


@contextmanager
def _open(image: Any) -> Iterator[Any]:
    """Opens an image, and closes its file where it was opened here."""
    try:
        from PIL import Image
    except ImportError as error:
        raise refusal("images/pillow") from error
    try:
        if isinstance(image, Image.Image):
            yield image
            return
        stored = image
        if isinstance(image, Mapping):
            stored = image["path"] if image.get("bytes") is None else image["bytes"]
        if hasattr(stored, "__array_interface__"):
            yield Image.fromarray(stored)
            return
        with Image.open(BytesIO(stored) if isinstance(stored, bytes) else stored) as found:
            yield found
    except (*UNREADABLE, LookupError) as error:
        raise unusable("images/read", image=image, error=error) from error
