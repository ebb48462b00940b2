"""Reads the text of a completion, plain or conversational."""

from __future__ import annotations

from typing import Any


def first_text(completion: Any) -> str:
    """Gives the text that ready-made rewards judge.

    Args:
        completion: a text, or a list of messages of which the first is taken, as TRL does. A message's content may be
            a text, None, or a list of parts such as ``{"type": "text", "text": ...}``.

    Returns:
        The text; "" where there is none.
    """
    if isinstance(completion, str):
        return completion
    content = completion[0]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
