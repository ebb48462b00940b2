"""Are the configurations in TRL's documentation accepted here?

    python -m benchmarks.trl_configs PATH_TO_TRL

Reads every ``GRPOConfig(...)`` and ``RLOOConfig(...)`` in the Python blocks of a checkout's ``docs``, makes it with the
installed TRL and with memsafe_rl, and prints the counts and what is refused here alone. Arguments that are no literals
are left out; vllm is taken to be installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl

import memsafe_rl
from benchmarks.machine import describe_machine

KINDS = ("GRPOConfig", "RLOOConfig")
BLOCK = re.compile(r"```(?:python|py|diff)\n(.*?)```", re.DOTALL)
ELLIPSIS = re.compile(r",\s*\.\.\.|^\s*\.\.\.,?\s*$", re.MULTILINE)
RESULT = Path(__file__).parent / "results" / "trl_configs.json"


def call_at(text: str, start: int) -> str:
    """Returns the call that begins at a place, up to its closing bracket."""
    depth = 0
    for place in range(text.index("(", start), len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    return text[start:]


def literals(call: str) -> dict[str, Any]:
    """Returns the arguments of a call that are literals; raises SyntaxError where it is no Python."""
    node: Any = ast.parse(ELLIPSIS.sub("", call), mode="eval").body
    found = {}
    for keyword in node.keywords:
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:  # a variable, or a call
            continue
    return found


def configurations(docs: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields page, kind and arguments of every configuration in the documentation."""
    for page in sorted(docs.rglob("*.md")):
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            lines = ("" if line.startswith("-") else line.removeprefix("+") for line in block.split("\n"))
            text = textwrap.dedent("\n".join(lines))
            for kind in KINDS:
                for found in re.finditer(rf"{kind}\(", text):
                    yield page.name, kind, literals(call_at(text, found.start()))


def refusal_of(library: Any, kind: str, given: dict[str, Any]) -> str | None:
    """Makes a configuration; gives what a library says against it, or None."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            getattr(library, kind)(**{"output_dir": folder, **given, "use_cpu": True, "report_to": "none"})
        except Exception as error:  # whatever it says is what is asked
            return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Counts what both accept, and prints what is refused here alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of TRL")
    docs = parser.parse_args().checkout / "docs" / "source"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vllm").mkdir()
        (Path(folder) / "vllm" / "__init__.py").touch()
        sys.path.append(folder)
        known = [one for one in configurations(docs) if refusal_of(trl, *one[1:]) is None]
        said = [(page, kind, given, refusal_of(memsafe_rl, kind, given)) for page, kind, given in known]
    refused = [one for one in said if one[-1] is not None]
    print(f"{len(known)} configurations that TRL accepts, of which {len(known) - len(refused)} are accepted here")
    for page, kind, given, why in refused:
        print(f"{page}: {kind}({given}): {why}")
    names = [{"page": page, "kind": kind, "why": why} for page, kind, _, why in refused]
    counts = {"machine": describe_machine(), "accepted by TRL": len(known), "accepted here": len(known) - len(refused)}
    RESULT.write_text(json.dumps({**counts, "refused here": names}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
