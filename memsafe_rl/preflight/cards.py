"""Cards by name or by size; nothing heavy is imported, so that a wrong one is refused at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from memsafe_rl.errors import ConfigError, texts_beside
from memsafe_rl.preflight import refusal
from memsafe_rl.units import parse_bytes


class NamedCard(NamedTuple):
    """A card."""

    name: str  # empty where only its memory is known
    total_bytes: int


class Multiprocessors(NamedTuple):
    """What of a card decides how it adds up columns, under PyTorch's names."""

    major: int
    minor: int
    multi_processor_count: int
    max_threads_per_multi_processor: int


DATA_SHEETS: Mapping[str, Any] = texts_beside(__file__, "cards.yaml")
"""What data sheets say of cards, and what is assumed of all."""


def named_card(text: str) -> NamedCard | None:
    """Finds a card by its name, such as "RTX 4090" or "h100"; None where the name is not known."""
    wanted = _plain(text)
    for name, sheet in DATA_SHEETS["cards"].items():
        if wanted in {_plain(name), *map(_plain, sheet.get("also", ()))}:
            return NamedCard(name, int(sheet["gib"] * 2**30))
    return None


def data_sheet(text: str) -> Mapping[str, Any]:
    """Returns what a card's data sheet says, and its name."""
    card = named_card(text)
    if card is None:
        raise refusal("card", name=text, names=", ".join(DATA_SHEETS["cards"]))
    return {"name": card.name, **DATA_SHEETS["cards"][card.name]}


def multiprocessors_of(text: str) -> Multiprocessors:
    """Returns the multiprocessors of a card by its name."""
    sheet = data_sheet(text)
    major, minor = map(int, sheet["capability"].split("."))
    threads = DATA_SHEETS["threads_of_a_multiprocessor"][sheet["capability"]]
    return Multiprocessors(major, minor, sheet["multiprocessors"], threads)


def read_card(text: str) -> NamedCard:
    """Reads a card's name or memory; a bare number is GiB, and a card sold as 24GB has 24 GiB."""
    card = named_card(text)
    if card is not None:
        return card
    plain = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gb|g)?\s*", text.lower())
    try:
        size = parse_bytes(f"{plain[1]}GiB" if plain else text)
    except ConfigError as error:
        raise ConfigError(f"--gpu: {error} Or name one of {', '.join(DATA_SHEETS['cards'])}.") from None
    refusal.when(size < 2**20, "gpu", text=text)
    return NamedCard("", size)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", text.lower())
