"""Reads the text of a completion, plain or conversational."""

from __future__ import annotations

from typing import Any


def first_text(completion: Any) -> str:
    """Gives the text that ready-made rewards judge."""
    if isinstance(completion, str):
        return completion
    content = completion[0]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
