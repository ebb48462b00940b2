"""Holds the tables of refusals to the code: every refusal that is made has its text, with the braces that it fills."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from string import Formatter

import pytest

from memsafe_rl.errors import ConfigError, Refusals, texts_beside
from tests.test_imports import PACKAGE, modules

TABLES = sorted(PACKAGE.rglob("refusals.yaml"))
NAMES = ("refusal", "unusable", "failure")  # what rooms call their `Refusals`


def made_in(room: Path) -> Iterator[tuple[str, set[str]]]:
    """Yields the case of each refusal that a room's code makes, any of ``/`` cases for a name filled in later."""
    for path in modules(room):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            name, _, method = called.partition(".")
            if isinstance(node, ast.Call) and name in NAMES and method in ("", "when"):
                case = node.args[method == "when"]
                for one in (case.body, case.orelse) if isinstance(case, ast.IfExp) else (case,):
                    parts = one.values if isinstance(one, ast.JoinedStr) else [one]
                    pattern = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
                    yield pattern, {str(each.arg) for each in node.keywords}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_every_refusal_has_its_text_and_every_text_its_refusal(table: Path) -> None:
    texts = texts_beside(str(table), table.name)
    fields = {
        case: {re.split(r"[.[]", name)[0] for _, name, _, _ in Formatter().parse(text) if name}
        for case, text in texts.items()
    }
    used = set[str]()
    for pattern, given in made_in(table.parent):
        cases = [case for case in texts if fnmatchcase(case, pattern)]
        assert cases, pattern
        assert all(fields[case] == given for case in cases), pattern
        used.update(cases)
    assert used == set(texts)


def test_a_refusal_fills_its_text() -> None:
    refusal = Refusals(str(PACKAGE / "training" / "loop.py"))
    refusal.when(False, "max_steps")
    with pytest.raises(ConfigError, match=r"sampler_rejection is 'k3' with loss_type 'vespo', whose weight"):
        refusal.when(True, "sampler_rejection", value="k3", loss="vespo")
