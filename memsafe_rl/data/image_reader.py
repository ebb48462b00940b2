"""Reads prompts with images: how they are opened, how many tokens each becomes, and what a tower makes of it."""

from __future__ import annotations

import copy
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.data import refusal, unusable
from memsafe_rl.data.prompts import (
    COLUMNS,
    PromptReader,
    Prompts,
    PromptTokenizer,
    Repeat,
    hollow,
    images_in,
    parts_in,
    prompt_of,
    with_image_parts,
    within_limit,
)
from memsafe_rl.models.adapter import Context
from memsafe_rl.models.vision.families import FAMILIES
from memsafe_rl.models.vision.image_prompts import ImagePrompts, Table
from memsafe_rl.models.vision.tower import ImagePrompt
from memsafe_rl.rollout.multi_turn.protocol import ImageContexts, Message

UNREADABLE = (OSError, ValueError, TypeError, AttributeError, SyntaxError)
"""What Pillow raises of a file that is missing, cut short, or no image."""


class ReadContext(NamedTuple):
    """A context with images that environments or tools have shown."""

    ids: list[int]  # with one placeholder for each feature
    images: list[Any]  # open
    stored: list[int]  # what stands for the ids


Kept = tuple[Table, dict[Hashable, ReadContext], dict[bytes, Any]]
"""What a reader has read."""


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
        self._contexts: dict[Hashable, ReadContext] = {}  # by tokens and images, and by their first id
        self._own: dict[bytes, Any] = {}  # images that were shown, by their pixels

    def attach(self, images: ImagePrompts) -> None:
        """Names the tower that reads the images, once it is loaded."""
        self._images = images

    def kept(self) -> Kept:
        """Returns what is kept of the prompts read so far."""
        return self._tower.table, dict(self._contexts), dict(self._own)

    def forget(self, kept: Kept | None = None) -> None:
        """Goes back to what was kept before, or to nothing."""
        table, self._contexts, self._own = kept or (None, {}, {})
        self._tower.forget(table)

    def rehearse(self, prompts: Sequence[Tensor], around: Context) -> None:
        """Keeps as much as reading prompts with so many image tokens would keep."""
        self._tower.rehearse(prompts, around)

    def tensors(self) -> list[Tensor]:
        """Returns what is kept on the device."""
        return [] if self._images is None else self._images.table.tensors()

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Tokenizes prompts without a limit; of each image only the size is read."""
        shown = [[size_of(image) for image in images_in(prompt)] for prompt in prompts]
        rows = self._text.ids(list(map(_checked, prompts)))
        found = [self.expanded(row, sizes) for row, sizes in zip(rows, shown, strict=True)]
        for row, sizes in zip(found, shown, strict=True):
            if sizes and self._text.truncate and self.limit is not None and len(row) > self.limit:
                raise unusable("images/truncate", count=len(row), limit=self.limit, why=self.why_limited)
        return found

    def measured(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Tokenizes the prompts of some examples; their ids count tokens, and no network can read them."""
        prompts = tuple(filled(prompt_of(example)) for example in examples)
        with host_memory():
            rows = within_limit(self.ids(prompts), self, truncates=self._text.truncate)  # `ids` refuses to cut images
            return Prompts(tuple(examples), prompts, tuple(torch.tensor(row, dtype=torch.int64) for row in rows))

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Tokenizes the prompts of some examples, and has the tower read their images."""
        found = self.measured(examples)
        shown = {place: list(images_in(prompt)) for place, prompt in enumerate(found.prompts)}
        with host_memory():
            read = {place: self._prompt(found.ids[place], images) for place, images in shown.items() if images}
        stored = dict(zip(read, self._tower.read(list(read.values())), strict=True))
        return replace(found, ids=tuple(stored.get(place, row) for place, row in enumerate(found.ids)))

    def contexts(self, repeat: Repeat) -> ImageContexts:
        """Returns what reads images in conversations that grow."""
        return GrowingContexts(self, self._text, repeat)

    def enter(self, ids: list[int], images: list[Any]) -> list[int]:
        """Has the tower read a context, once for equal ones; returns what stands for its tokens."""
        key = tuple(ids), tuple(map(id, images))  # which are kept with it, so that no other gets its id
        if key not in self._contexts:
            with host_memory():
                prompt = self._prompt(torch.tensor(ids, dtype=torch.int64), images)
            found = ReadContext(ids, images, self._tower.read([prompt])[0].tolist())
            self._contexts[key] = self._contexts[found.stored[0]] = found
        return self._contexts[key].stored

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Returns the tokens that ids stand for."""
        begun = self._contexts.get(ids[0]) if ids else None
        return list(ids) if begun is None else [*begun.ids, *ids[len(begun.ids) :]]

    def read_in_contexts(self) -> dict[str, Any]:
        """Returns the contexts read so far, each image once, as PNG in base 64."""
        contexts = [one for key, one in self._contexts.items() if isinstance(key, int)]
        images = {id(image): image for one in contexts for image in one.images}
        places = {name: place for place, name in enumerate(images)}
        return {
            "images": list(map(_written, images.values())),
            "contexts": [(one.ids, [places[id(image)] for image in one.images]) for one in contexts],
        }

    @property
    def _tower(self) -> ImagePrompts:
        if self._images is None:
            raise AssertionError("no tower reads the images yet")
        return self._images

    def read_contexts_again(self, saved: Mapping[str, Any]) -> None:
        """Reads the contexts of a checkpoint in their order, so that the same ids stand for them."""
        images = [self.own(b64decode(image)) for image in saved["images"]]
        for ids, places in saved["contexts"]:
            self.enter(ids, [images[place] for place in places])

    def expanded(self, row: list[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Repeats each image's token as often as it has features."""
        unusable.when(self._video in row, "images/video")
        if row.count(self._placeholder) != len(sizes):
            raise unusable("images/template", found=row.count(self._placeholder), count=len(sizes))
        if not sizes:
            return row
        tokenizer = self._text.tokenizer
        try:
            spans = [self._family.tokens(self._image_processor, tokenizer, self._config, size) for size in sizes]
        except (ValueError, ZeroDivisionError) as error:  # such as a strip two hundred times as long as wide
            raise unusable("images/sizes", sizes=list(sizes), error=error) from error
        queue = iter(spans)
        return [token for one in row for token in (next(queue) if one == self._placeholder else [one])]

    def own(self, image: Any) -> Any:
        """Returns a copy of an image, one for equal pixels, that its owner cannot change and a PNG file can hold."""
        found, kinds = opened(image), ("RGB", "RGBA")
        found = found.convert(found.mode if found.mode in kinds else ("RGBA" if found.has_transparency_data else "RGB"))
        name = hashlib.sha256(f"{found.mode} {found.size} ".encode() + found.tobytes()).digest()
        return self._own.setdefault(name, found)

    def _prompt(self, ids: Tensor, images: list[Any]) -> ImagePrompt:
        """Returns a prompt as the tower reads it: with the pixels of its images, and what tells how they lie."""
        try:
            read = self._image_processor(images=images, return_tensors="pt")
            return ImagePrompt(ids, {name: read[name] for name in self._family.takes})
        except (*UNREADABLE, LookupError) as error:
            raise unusable("images/pixels", prompt=self._text.tokenizer.decode(ids), error=error) from error


@dataclass(frozen=True)
class GrowingContexts(ImageContexts):
    """Reads conversations with images as they grow; towers read under a guard."""

    reader: ImagePromptReader
    text: PromptTokenizer
    repeat: Repeat

    def received(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with copies of their images."""
        return list(with_image_parts(messages, lambda part: {**part, "image": self.reader.own(part["image"])}))

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages as chat templates take them, images as placeholders."""
        return list(copy.deepcopy(_checked(messages)))

    def tokens(self, text: str) -> list[int]:
        """Tokenizes what a chat template has written."""
        text = text if self.text.spelled is None else self.text.spelled(text)
        return list(self.text.tokenizer(text=text, add_special_tokens=False)["input_ids"])

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Returns the tokens that a context stands for."""
        return self.reader.plain(ids)

    def entered(
        self, before: Sequence[int], told: Sequence[int], messages: Sequence[Message], seen: Sequence[Message]
    ) -> list[int]:
        """Puts tokens behind a context; where they bring images, the tower reads the whole anew."""
        more = self.reader.expanded(list(told), [size_of(image) for image in images_in(seen)])
        if next(images_in(seen), None) is None:
            return [*before, *more]
        return list(self.repeat(self.reader.enter, [*self.plain(before), *more], list(images_in(messages))))


def _checked(messages: Any) -> Any:
    """Returns messages with their images as placeholders; refuses parts that are neither text nor image."""
    for part in parts_in(messages):
        kind = part.get("type")
        unusable.when(kind not in ("text", "image") or part.get(kind) is None, "images/part", part=part)
    return hollow(messages)


def _written(image: Any) -> str:
    file = BytesIO()
    image.save(file, format="PNG")
    return b64encode(file.getvalue()).decode()


def filled(prompt: Any) -> Any:
    """Returns a prompt whose images are open."""
    return with_image_parts(prompt, lambda part: {**part, "image": opened(part["image"])})


_PHOTOS = ("JPEG", "MPO", "WEBP", "TIFF")  # formats of cameras, whose heads say how an image is to be turned
_ORIENTATION = 0x0112  # the tag that says so; above 4 on its side, as datasets and transformers read it


def opened(image: Any) -> Any:
    """Reads an image of Pillow, a path, bytes, a mapping of these as datasets store it, or an array (H, W, 3) uint8."""
    with _open(image) as found:
        found.load()
        if found is not image and (found.format in _PHOTOS or "exif" in found.info):
            from PIL import ImageOps

            ImageOps.exif_transpose(found, in_place=True)
        return found


def size_of(image: Any) -> tuple[int, int]:
    """Returns the height and width of an image, as `opened` takes it; of a file only the head is read."""
    with _open(image) as found:
        says = found.format in _PHOTOS or "exif" in found.info
        turned = found is not image and says and found.getexif().get(_ORIENTATION, 1) > 4
        return (found.width, found.height) if turned else (found.height, found.width)


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
