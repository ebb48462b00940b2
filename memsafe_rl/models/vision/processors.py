"""Processors of networks that read images, and the tower that such a network and its reference share."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.utils import is_torchvision_available

from memsafe_rl.errors import ConfigError
from memsafe_rl.hub import places_for
from memsafe_rl.models.vision.families import KNOWN, vision_family

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PillowProcessor:
    """An image processor and a tokenizer side by side: all that is read of a processor, without torchvision."""

    image_processor: Any  # of transformers, such as `AutoImageProcessor` loads
    tokenizer: Any  # with the chat template

    def save_pretrained(self, folder: Any) -> None:
        """Writes both."""
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def reads_images(config: Any) -> bool:
    """Whether the prompts of a network may hold images, by its config."""
    return vision_family(config) is not None


def processor_for(name: str, processing_class: Any, config: Any, *, trust_remote_code: bool, **places: Any) -> Any:
    """Returns the processor of a network, or None where its prompts are read by a tokenizer alone."""
    given = processing_class is not None
    if given and not hasattr(processing_class, "image_processor"):
        return None
    if given and not reads_images(config):
        kind = getattr(config, "model_type", type(config).__name__)
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, which reads images, but the model a {kind!r}. "
            f"Images are read by {KNOWN}. Pass the processor's tokenizer if the prompts are text alone."
        )
    return processing_class if given or not reads_images(config) else _loaded(name, trust_remote_code, places)


def freeze_unused_tower(lm: Any, *, sees_images: bool) -> None:
    """Freezes the image tower of a network that is loaded by name, where no prompt holds an image."""
    family = None if sees_images else vision_family(lm.config)
    if family is not None:
        nn.ModuleList(family.modules_of(lm)).requires_grad_(False)


def share_tower(lm: Any, reference: Any) -> None:
    """Has a reference hold the tower of the network that is trained, where that is frozen, in place of its own."""
    family = vision_family(getattr(lm, "config", None))
    if reference is None or family is None:
        return
    modules = family.modules_of(lm)
    if not any(weight.requires_grad for weight in nn.ModuleList(modules).parameters()):
        for name, module in zip(family.tower, modules, strict=True):
            setattr(reference.base_model, name, module)


def _loaded(name: str, trust_remote_code: bool, places: dict[str, Any]) -> Any:
    """Loads a processor by name; None where there is none, as beside a network saved for text."""
    where = {"trust_remote_code": trust_remote_code, **places_for(name, **places)}
    try:
        if is_torchvision_available():
            with suppress(ImportError):  # of what a processor wants for videos alone
                return AutoProcessor.from_pretrained(name, **where)
        images = AutoImageProcessor.from_pretrained(name, **where)
        return PillowProcessor(images, AutoTokenizer.from_pretrained(name, **where))
    except ImportError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the processor of {name!r} cannot be loaded ({reason}). Install what reads images: pip install "
            "'memsafe-rl[images]'."
        ) from error
    except (OSError, ValueError):
        logger.warning("%s has no processor: its prompts are read as text. Pass processing_class to read images.", name)
        return None
