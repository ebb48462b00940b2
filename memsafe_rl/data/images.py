"""Images in the rows of a dataset: where they lie, how they get into messages, and how they are opened."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from memsafe_rl.errors import ConfigError, DataError

COLUMNS = ("image", "images")
"""Columns of a row that hold its images, as in TRL."""

UNREADABLE = (OSError, ValueError, TypeError, AttributeError, SyntaxError)
"""What Pillow raises of a file that is missing, cut short, or no image."""


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Gives the images of a row's columns, as they are stored."""
    several = row.get("images")
    if several is not None:
        return list(several)
    return [] if row.get("image") is None else [row["image"]]


def with_images(prompt: Any, images: Sequence[Any]) -> Any:
    """Puts images into the messages of a prompt: into their placeholders, else before the first text of the user."""
    if not is_chat(prompt):
        raise DataError(
            f"prompt {prompt!r:.100} has {len(images)} image(s) but is no conversation. Write it as messages with "
            "'role' and 'content'."
        )
    turns = [{**turn, "content": _parts(turn.get("content"))} for turn in prompt]
    if not any(_waits(part) for turn in turns for part in turn["content"]):
        first = next((turn for turn in turns if turn.get("role") == "user"), turns[0])
        first["content"] = [{"type": "image"} for _ in images] + first["content"]
    waiting = sum(_waits(part) for turn in turns for part in turn["content"])
    if waiting != len(images):
        raise DataError(
            f"prompt {prompt!r:.200} has {waiting} image placeholder(s) and its row {len(images)} image(s). Give as "
            "many {'type': 'image'} parts as images, or none."
        )
    queue = iter(images)
    for turn in turns:
        turn["content"] = [{**part, "image": next(queue)} if _waits(part) else part for part in turn["content"]]
    return turns


def images_in(prompt: Any) -> Iterator[Any]:
    """Walks the images inside the messages of a prompt."""
    for turn in prompt if is_chat(prompt) else ():
        for part in turn["content"] if isinstance(turn.get("content"), list) else ():
            if part.get("image") is not None:
                yield part["image"]


def filled(prompt: Any) -> Any:
    """Gives a prompt whose images are open."""
    return _with_image_parts(prompt, lambda part: {**part, "image": opened(part["image"])})


def hollow(prompt: Any) -> Any:
    """Gives a prompt whose images are placeholders, as chat templates and tables show it."""
    return _with_image_parts(prompt, lambda _: {"type": "image"})


def copied(prompt: Any) -> Any:
    """Copies a prompt; images are shared."""
    return copy.deepcopy(prompt, {id(image): image for image in images_in(prompt)})


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
        raise ConfigError("Prompts with images need Pillow: pip install 'memsafe-rl[images]'.") from error
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
        raise DataError(f"image {image!r:.200} cannot be read ({error}). Mend it, or remove its row.") from error


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and all(isinstance(turn, Mapping) for turn in prompt)


def _with_image_parts(prompt: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Changes the parts of messages that hold an image; what a table filled with None is left out."""
    if not is_chat(prompt) or not any(isinstance(turn.get("content"), list) for turn in prompt):
        return prompt
    return [
        {**turn, "content": [change(part) if "image" in part else part for part in _parts(turn["content"])]}
        if isinstance(turn.get("content"), list)
        else turn
        for turn in prompt
    ]


def _parts(content: Any) -> list[dict[str, Any]]:
    """Gives a message's content as parts, each with its own keys."""
    if not isinstance(content, list):
        return [] if content is None else [{"type": "text", "text": content}]
    return [{key: value for key, value in part.items() if value is not None} for part in content]


def _waits(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image" and part.get("image") is None
