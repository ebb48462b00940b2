"""Writes docs/settings.md: every setting with its default and what it does, from the declarations of `config`.

    python -m benchmarks.settings_page

`tests/config/test_trl_page.py` holds the page to what this gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memsafe_rl.config.declaring import Setting
from memsafe_rl.config.settings import ALGORITHMS

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Every setting of `GRPOConfig`, `RLOOConfig` and `PPOConfig`; run files and the flags of `memsafe-rl train` take the same
names. Names and defaults are TRL's wherever the concept is the same ([TRL's settings one by one](trl-settings.md)).
`python -m benchmarks.settings_page` writes this page from the declarations.
"""


def page() -> str:
    """Returns the whole page."""
    declared = {name: algorithm.declared for name, algorithm in ALGORITHMS.items()}
    known = {setting.name: setting for settings in declared.values() for setting in settings.values()}
    groups = dict.fromkeys(setting.group for setting in known.values())
    return "\n".join([HEAD, *(line for group in groups for line in _table(group, known, declared))])


def _table(group: str, known: dict[str, Setting], declared: dict[str, Any]) -> Iterator[str]:
    yield from (f"## {group}", "", "| setting | default | |", "|---|---|---|")
    for name, setting in known.items():
        if setting.group != group:
            continue
        owners = [algorithm for algorithm, settings in declared.items() if name in settings]
        defaults = {algorithm: declared[algorithm][name].default for algorithm in owners}
        told = repr(setting.default)
        if len({*map(repr, defaults.values())}) > 1:
            told = ", ".join(f"{default!r} ({algorithm})" for algorithm, default in defaults.items())
        of = "" if len(owners) == len(declared) else f" ({', '.join(owners)})"
        yield f"| `{name}`{of} | {_cell(told)} | {_cell(setting.help)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {page().count(chr(10))} lines")
