"""What the site needs besides MkDocs: links to files outside of docs/ become their names, which say where they are."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^]]+)]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes the links off that lead out of the site."""
    return _OUTSIDE.sub(r"\1", markdown)
