"""What the site needs besides MkDocs: links out of docs/ become plain names, and long names break at underscores."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^]]+)]\(\.\./[^)]+\)")
_CODE = re.compile(r"<code>[^<]+</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes the links off that lead out of the site."""
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Lets a narrow column break `max_completion_length` after an underscore, not inside a word."""
    return _CODE.sub(lambda code: code[0].replace("_", "_<wbr>"), html)
