"""Prompts with images become the tokens that transformers' own processors make of them."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from memsafe_rl.data.image_reader import ImagePromptReader
from memsafe_rl.data.prompts import PromptTokenizer, holds_text_alone, prompt_of
from tests.images import IMAGE, SPECIAL, SQUARES, START, TWO_WAY, processor, rows, small


def own_processor(family: str) -> Any:
    """Makes the processor of transformers around the parts of a tiny one."""
    parts = processor(family)
    if family in SQUARES:
        return Idefics3Processor(parts.image_processor, parts.tokenizer, image_seq_len=4)
    named = dict(zip(("boi_token", "eoi_token", "image_token"), SPECIAL, strict=False))
    for name, value in {**named, "boi_token_id": START, "image_token_id": IMAGE}.items():
        setattr(parts.tokenizer, name, value)
    return Gemma3Processor(parts.image_processor, parts.tokenizer, image_seq_length=4)


@pytest.mark.parametrize("family", [*SQUARES, TWO_WAY])
def test_prompts_have_the_tokens_of_transformers_processors(family: str) -> None:
    own, parts = own_processor(family), processor(family)
    text = PromptTokenizer(parts.tokenizer, template_kwargs=None, limit=None, truncate=False, vocab_size=64)
    found = ImagePromptReader(text, parts.image_processor, small(family).config).ids([prompt_of(row) for row in rows()])
    for row, ids in zip(rows(), found, strict=True):
        said = [{"type": "text", "text": row["prompt"][0]["content"]}]
        turns = [{"role": "user", "content": [{"type": "image"}] * len(row["images"] or ()) + said}]
        told = parts.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        images = {"images": [row["images"]]} if row["images"] else {}
        assert ids == list(own(text=[told], add_special_tokens=False, **images)["input_ids"][0])


@pytest.mark.parametrize(
    ("row", "alone"),
    [
        ({"prompt": "words"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [{"role": "user", "content": "words"}], "answer": "4"}, True),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "text": None}]}]}, False),
        ({"prompt": "words", "images": [None]}, False),
    ],
)
def test_columns_tell_whether_a_prompt_may_hold_an_image(row: dict[str, Any], alone: bool) -> None:
    assert holds_text_alone(Dataset.from_list([row])) is alone
    assert not holds_text_alone([row])
