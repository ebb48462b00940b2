"""Runs TRL's own trainer tests twice, on TRL and with the import swapped to ours, and writes how many pass.

    python -m benchmarks.trl_suite PATH_TO_TRL [--only EXPRESSION] [--side trl|ours]

PATH_TO_TRL is a checkout of TRL with its tests. Models and data sets that these tests take from the hub are made here,
small and random, in folders of the hub's names. A test counts where it passes on the installed TRL and neither touches
an underscore name of a trainer nor asserts the wording of a message. Tests of tools need `jmespath`,
those of images a torchvision that fits torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.machine import describe_machine
from benchmarks.trl_stand_ins import MARKS, PIECES, SPECIAL, make_stand_ins, own_id

RESULT = Path(__file__).parent / "results" / "trl_suite.json"
SUITES = ("grpo", "rloo")
SIDES = ("trl", "ours")
_WRITTEN = {*SPECIAL, *MARKS, *PIECES}
Results = dict[str, dict[str, dict[str, str]]]
"""By side and test, how it ended."""
REPOSITORY = Path(__file__).parents[1]


KNOWN = {
    "test_train_with_generation_kwargs": "num_beams=2 is refused: a beam search does not draw from the model, so a "
    "ratio of log-probs means nothing for it, and its draws would depend on how rows are batched",
    "test_iterable_eval_keeps_map_style_train_workers": "asks for the trainer's dataloaders: there are none, prompts "
    "are read by position, so that no failure and no resume can lose their order",
    "test_prepare_input_called_with_correct_data": "watches training_step, which is no step of this loop",
}
"""By part of a test's name: why it fails with ours."""


def run_side(checkout: Path, root: Path, side: str, only: str | None) -> None:
    """Runs both files of tests on one side, in a process of its own.

    Args:
        checkout: TRL's folder.
        root: folder of the stand-ins, which is the working directory.
        side: "trl", or "ours" for the swapped import.
        only: pytest's -k, None for all.
    """
    folder, report = root / "runs" / side, root / "runs" / f"{side}.xml"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout / "tests", folder / "tests", ignore=shutil.ignore_patterns("experimental", "distributed"))
    files = [folder / "tests" / f"test_{suite}_trainer.py" for suite in SUITES]
    _without_names_that_went(folder / "tests" / "testing_utils.py")
    for file in files:
        text = re.sub(r"\b\d{4,6}\b", _own_id, file.read_text())
        if side == "ours":
            text = re.sub(r"^from trl import (?=GRPO|RLOO)", "from memsafe_rl import ", text, flags=re.M)
        file.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # networks of 8 channels gain nothing from threads
        "HF_HOME": str(root / "cache"),
    }
    options = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-W",
        "ignore",
        "--timeout=300",
        "--durations=8",
    ]
    chosen = ["-k", only] if only else []
    command = [sys.executable, "-m", "pytest", *options, *chosen, f"--rootdir={folder}", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    subprocess.run([*command, *map(str, files)], cwd=root, env=environment, check=False)


def _own_id(found: re.Match[str]) -> str:
    place = int(found[0])
    return str(own_id(place)) if place in _WRITTEN else found[0]


def _without_names_that_went(file: Path) -> None:
    """Has the suite's helpers take a package for missing where the installed TRL no longer asks for it."""

    def looked_up(found: re.Match[str]) -> str:
        names = re.findall(r"\w+", found[1])
        lines = [f"{name} = getattr(_known, {name!r}, lambda: False)" for name in names]
        return "\n".join(["import importlib", '_known = importlib.import_module("trl.import_utils")', *lines, ""])

    file.write_text(re.sub(r"^from trl\.import_utils import \(([^)]*)\)", looked_up, file.read_text(), flags=re.M))


def _outcomes(report: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields by test its outcome ("passed", "failed" or "skipped") and the first line of the reason."""
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        suite = next((name for name in SUITES if f"test_{name}_trainer" in case.get("classname", "")), None)
        if suite is None:
            raise RuntimeError(f"TRL's tests could not be collected: {case.get('name')}. See pytest's output above.")
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        reason = found[0].get("message", "").partition("\n")[0] if found else ""
        outcome = "passed" if not found else "skipped" if found[0].tag == "skipped" else "failed"
        class_name = case.get("classname", "").rpartition(".")[2]
        yield f"{suite}::{class_name}::{case.get('name')}", {"outcome": outcome, "reason": reason[:300]}


def exclusions(checkout: Path) -> dict[str, str]:
    """Says by test function why a drop-in cannot be held to it: TRL's private names, or its wording."""
    found: dict[str, str] = {}
    for suite in SUITES:
        tree = ast.parse((checkout / "tests" / f"test_{suite}_trainer.py").read_text())
        for group in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            helpers = {each.name: each for each in group.body if isinstance(each, ast.FunctionDef)}
            for name, function in helpers.items():
                called = [helpers[each] for each in _self_calls(function) if each in helpers]
                reasons = [reason for each in (function, *called) for reason in _reasons(each)]
                if name.startswith("test_") and reasons:
                    found[f"{suite}::{group.name}::{name}"] = reasons[0]
    return found


def _self_calls(function: ast.FunctionDef) -> set[str]:
    names = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
    return {node.attr for node in names if isinstance(node.value, ast.Name) and node.value.id == "self"}


def _reasons(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr.startswith("_") and node.value.id in ("trainer", "GRPOTrainer", "RLOOTrainer"):
                yield f"private name {node.attr}"
            if (node.value.id, node.attr) == ("caplog", "text"):
                yield "wording of a warning"
        raises = isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"
        if raises and any(keyword.arg == "match" for keyword in node.keywords):
            yield "wording of an error"


def table(results: Results, excluded: dict[str, str]) -> dict[str, dict[str, int]]:
    """Counts, by kind of test, what passes on TRL, of these what is excluded, and what of the rest passes with ours."""
    counts: dict[str, Counter[str]] = {}
    for test, theirs in results["trl"].items():
        suite, group, name = test.split("::")
        row = counts.setdefault(f"{suite}, {'images' if group.endswith('VLM') else 'text'}", Counter())
        row[f"trl {theirs['outcome']}"] += 1
        if theirs["outcome"] != "passed":
            continue
        ours = results["ours"].get(test, {}).get("outcome") == "passed"
        held = f"{suite}::{group}::{name.partition('[')[0]}" not in excluded
        row["counted" if held else "excluded"] += 1
        row["ours passes"] += ours and held
        row["ours passes, excluded"] += ours and not held
    return {kind: dict(row) for kind, row in sorted(counts.items())}


def remaining(
    results: dict[str, dict[str, dict[str, str]]], excluded: dict[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yields each test that passes on TRL alone: its name, why it is not counted if so, and what it ended with."""
    for test, theirs in results["trl"].items():
        ours = results["ours"].get(test, {"outcome": "missing", "reason": ""})
        if theirs["outcome"] == "passed" and ours["outcome"] != "passed":
            yield test, excluded.get(test.partition("[")[0], ""), ours["reason"]


def _known(test: str) -> str:
    return next((why for part, why in KNOWN.items() if part in test), "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the stand-ins, runs the sides, prints and writes the figures.

    Args:
        arguments: command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="TRL's folder, with its tests")
    parser.add_argument("--only", help="pytest's -k; nothing is written")
    parser.add_argument(
        "--side", choices=(*SIDES, "none"), help="run one side, or none; what is not run is read from --keep"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for stand-ins and runs; one that goes afterwards if not given"
    )
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        make_stand_ins(root, chosen.checkout)
        (root / "runs").mkdir(exist_ok=True)
        for side in SIDES if chosen.side is None else {chosen.side} & {*SIDES}:
            run_side(chosen.checkout.resolve(), root, side, chosen.only)
        results = {side: dict(_outcomes(root / "runs" / f"{side}.xml")) for side in SIDES}
    excluded = exclusions(chosen.checkout)
    counts, left = table(results, excluded), list(remaining(results, excluded))
    print(json.dumps(counts, indent=1))
    for test, why, reason in left:
        print(f"{test}{f' [{why}]' if why else ''}: {reason}")
    if chosen.only is None:
        failures = [
            {"test": test, "excluded": why, "reason": reason, "why": _known(test)} for test, why, reason in left
        ]
        found = {"machine": describe_machine(), "counts": counts, "passes on TRL alone": failures}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
