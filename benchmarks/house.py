"""How large is the house, how deep does a step go, and where are its rules broken?

    python -m benchmarks.house [--json]

Prints the figures that `tests/test_house.py` holds under ceilings; ``--json`` adds the places behind each. Most come
from the syntax trees of the package; files entered and depth come from a tiny GRPO run under `sys.setprofile`.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.test_imports import PACKAGE, hidden_imports, modules, package_of
from tests.trainers.helpers import make_trainer

CATALOGUES = {"ops/losses"}
"""Rooms of many small files of one form, which may hold more files than others."""
FACTORIES = ("make_", "build_", "adapter_for", "engine_for", "critic_for")
"""How functions begin that choose a class; a file whose name holds "factory" is one as a whole."""
GUARDS = ("recovery", "guard", "attempt")
PARTS = {
    "rollout": {"TrainingLoop.collect"},
    "update": {"Learner.step", "Learner.commit"},
}
"""Functions whose call is one rollout or one update; what runs inside both counts for the inner one."""

LIBRARY_PRIVATES = {
    *("_cdata", "_version", "_buffers", "_parameters", "_make_subclass", "_use_count", "_schema"),  # torch
    *("_local_tensor", "_get_fsdp_state", "_fsdp_param_groups", "_lazy_init"),  # torch's FSDP2
    *("_to_sharded", "_unsharded_param"),  # likewise
    *("_forward_hooks", "_forward_pre_hooks", "_replace"),  # torch, named tuples
    *("_attn_implementation", "_attn_implementation_internal", "_name_or_path"),  # transformers
    *("_keys_to_ignore_on_save", "_hf_peft_config_loaded", "_keep_in_fp32_modules", "_get_dtype_plan"),  # likewise
}
"""Privates of libraries for which there is no public name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Places = Iterator[tuple[int, str]]
"""Lines, and what stands there."""


@cache
def package() -> dict[Path, tuple[Any, ...]]:
    """Returns the nodes of every file's syntax tree, the module first."""
    gc.disable()  # CPython 3.11 fails to parse where a finalizer parses meanwhile (gh-106905)
    try:
        return {path: tuple(ast.walk(ast.parse(path.read_text()))) for path in modules(PACKAGE)}
    finally:
        gc.enable()


def last_name(node: ast.AST) -> str:
    """Returns the last name of a dotted or subscripted expression; empty where there is none."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# ------------------------------------------------------------------ rules that a syntax tree tells


def private_reaches(nodes: tuple[Any, ...], _: Path) -> Places:
    """Yields `x._y` with x not self or cls and `_y` neither of the file nor a library's; getattr(x, "_y") likewise."""
    own = {node.name for node in nodes if isinstance(node, Function | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    own |= {last_name(node) for node in stored} | LIBRARY_PRIVATES
    for node in nodes:
        name = node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = str(getattr(node.args[1], "value", ""))
        if name.startswith("_") and not name.endswith("__") and name not in own:
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            if owner not in ("self", "cls") and not owner.startswith("torch"):
                yield node.lineno, ast.unparse(node)


def recovery_lambdas(nodes: tuple[Any, ...], _: Path) -> Places:
    """Yields calls of recovery, of a guard or of attempts that are handed a lambda."""
    for node in (node for node in nodes if isinstance(node, ast.Call)):
        handed = [*node.args, *(each.value for each in node.keywords)]
        names = ast.unparse(node.func).lower().replace("_", "").replace("(", ".").split(".")
        if any(isinstance(value, ast.Lambda) for value in handed) and any(name.startswith(GUARDS) for name in names):
            yield node.lineno, ast.unparse(node.func)


def kind_tests(nodes: tuple[Any, ...], path: Path) -> Places:
    """Yields isinstance on adapters and engines outside factories."""
    makers = [node for node in nodes if isinstance(node, Function) and node.name.lstrip("_").startswith(FACTORIES)]
    excused = {id(inner) for maker in makers for inner in ast.walk(maker)}
    for node in nodes if "factory" not in path.name else ():
        if isinstance(node, ast.Call) and last_name(node.func) == "isinstance" and id(node) not in excused:
            names = [last_name(node.args[0]).title(), *map(last_name, ast.walk(node.args[1]))]
            if any(name.endswith(("Adapter", "Engine")) for name in names):
                yield node.lineno, ast.unparse(node)


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Returns every class of the package by name."""
    return {node.name: node for nodes in package().values() for node in nodes if isinstance(node, ast.ClassDef)}


def bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """Returns the classes of the package that a class derives from itself, protocols excepted."""
    found = [classes()[name] for base in node.bases if (name := last_name(base)) in classes() and name != node.name]
    return [base for base in found if "Protocol" not in map(last_name, base.bases)]


def ancestors(node: ast.ClassDef) -> list[ast.ClassDef]:
    """Returns all classes of the package that a class derives from."""
    return [each for base in bases(node) for each in (base, *ancestors(base))]


def methods(node: ast.ClassDef, concrete: bool = False) -> dict[str, Function]:
    """Returns the methods written in a class by name, dunder ones excepted; if asked, only those that do something."""
    found = [part for part in node.body if isinstance(part, Function) and not part.name.endswith("__")]
    return {part.name: part for part in found if not (concrete and _is_abstract(part))}


def _is_abstract(method: Function) -> bool:
    decorated = "abstractmethod" in map(last_name, method.decorator_list)
    last = ast.unparse(method.body[-1])
    does_nothing = last in ("...", "return", "return None") or last.startswith("del ")  # a hook
    return decorated or does_nothing or last.startswith("raise NotImplementedError")


def overrides(nodes: tuple[Any, ...], _: Path) -> Places:
    """Yields methods that stand in for a method of a base class that does something itself."""
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for name, method in methods(node).items():
            hidden = [base.name for base in ancestors(node) if name in methods(base, concrete=True)]
            if hidden:
                yield method.lineno, f"{node.name}.{name} overrides {hidden[0]}'s"


def mixins(nodes: tuple[Any, ...], _: Path) -> Places:
    """Yields classes with several bases of the package, and classes that are made or exchanged at run time."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and len(bases(node)) > 1:
            yield node.lineno, f"{node.name} of {', '.join(base.name for base in bases(node))}"
        made = isinstance(node, ast.Call) and last_name(node.func) == "type" and len(node.args) == 3
        if made or (isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)):
            yield node.lineno, ast.unparse(node)


def long_classes(nodes: tuple[Any, ...], _: Path) -> Places:
    """Yields classes over 400 lines."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > 400:
            yield node.lineno, f"{node.name}, {lines} lines"


RULES: dict[str, Callable[[tuple[Any, ...], Path], Places]] = {
    "reaches into privates": private_reaches,
    "lambdas handed to recovery": recovery_lambdas,
    "isinstance on adapters and engines": kind_tests,
    "concrete overrides": overrides,
    "mixins": mixins,
    "classes over 400 lines": long_classes,
    "imports inside functions": lambda nodes, path: ((0, each) for each in hidden_imports(nodes[0], package_of(path))),
}


# ------------------------------------------------------------------ what a step enters


class Visits:
    """Notes the files of the package that each of `PARTS` enters, and its deepest stack of the package's frames."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = defaultdict(set)
        self.deepest: dict[str, list[str]] = defaultdict(list)
        self._stack: list[CodeType] = []
        self._parts: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Takes a call or a return of the interpreter."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        if event == "return":
            self._stack.pop()
            self._parts = [entry for entry in self._parts if entry[1] <= len(self._stack)]
            return
        self._stack.append(code)
        self._parts += [(part, len(self._stack)) for part, names in PARTS.items() if code.co_qualname in names]
        for part, _since in self._parts[-1:]:
            self.files[part].add(code.co_filename.removeprefix(f"{PACKAGE}/"))
            if len(self._stack) > len(self.deepest[part]):
                self.deepest[part] = [code.co_qualname for code in self._stack]


def visits() -> Visits:
    """Trains a tiny model for one step and notes where it went."""
    noted, before = Visits(), sys.getprofile()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), max_steps=1)
        sys.setprofile(noted)
        try:
            trainer.train()
        finally:
            sys.setprofile(before)
    return noted


# ------------------------------------------------------------------ all figures


def figures() -> dict[str, tuple[int, list[str]]]:
    """Measures everything: the figure and what it counts, by name."""
    files, lines = defaultdict[str, int](int), defaultdict[str, int](int)
    for path in package():
        room = str(path.parent.relative_to(PACKAGE))
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
    found: dict[str, tuple[int, list[str]]] = {"lines of the package": (sum(lines.values()), [])}
    found["files of the largest room"] = _largest(files, files.keys() - CATALOGUES)
    found["files of the largest catalogue"] = _largest(files, files.keys() & CATALOGUES)
    found["lines of the largest room"] = _largest(lines, lines.keys())
    noted = visits()
    for part in PARTS:
        found[f"files entered by one {part}"] = len(noted.files[part]), sorted(noted.files[part])
        found[f"frames deep in one {part}"] = len(noted.deepest[part]), noted.deepest[part]
    for name, rule in RULES.items():
        places = [
            f"{p.relative_to(PACKAGE)}:{at} {what}" for p, n in package().items() for at, what in sorted(rule(n, p))
        ]
        found[name] = len(places), places
    return found


def _largest(sizes: dict[str, int], rooms: Iterable[str]) -> tuple[int, list[str]]:
    order = sorted(rooms, key=lambda room: -sizes[room])
    return max((sizes[room] for room in order), default=0), [f"{room}: {sizes[room]:,}" for room in order]


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print what each figure counts too, as JSON")
    measured, as_json = figures(), parser.parse_args().json
    lines = [f"{value:7,}  {name}" for name, (value, _) in measured.items()]
    print(json.dumps(measured, indent=2) if as_json else "\n".join(lines))


if __name__ == "__main__":
    main()
