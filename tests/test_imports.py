"""Holds the direction of imports between the rooms of the package, by reading every module's syntax tree."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "memsafe_rl"

RANKS = (
    {"accounting", "durable", "errors", "hub", "micro_batches", "prefix_tree", "records", "types", "units"},
    {"ops", "rewards"},
    {"models", "memory"},
    {"parallel"},
    {"rollout"},
    {"config"},
    {"data"},
    {"diagnostics"},
    {"callbacks", "checkpoint"},
    {"training"},
    {"preflight"},
    {"trainers"},
    {"cli"},
)
"""A room may import rooms of earlier ranks and itself; only the first rank's rooms may import each other."""

OPTIONAL = {
    "bitsandbytes",
    "deepspeed",
    "latex2sympy2_extended",
    "liger_kernel",
    "math_verify",
    "PIL",
    "pynvml",
    "vllm",
}
"""Packages that a user may lack, and that a function may therefore import when it is called."""


def rank_of(room: str) -> int:
    """Returns a room's rank, or fails with the remedy."""
    for rank, rooms in enumerate(RANKS):
        if room in rooms:
            return rank
    raise AssertionError(f"{room!r} has no place in the import graph: add it to RANKS in tests/test_imports.py")


def modules(folder: Path) -> list[Path]:
    """Lists the Python files of a folder, sorted."""
    return sorted(folder.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    """Returns the room of a module: the first name below the package; empty for the package's own face."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first in ("__init__.py", "__main__.py") else first.removesuffix(".py")


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[ast.stmt, str]]:
    """Yields each import statement with the full dotted name it brings in; ``package`` resolves relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*stem, node.module) if node.module else stem)
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def package_of(path: Path) -> tuple[str, ...]:
    """Returns the dotted package a module lies in."""
    return path.relative_to(ROOT).parent.parts


def wrong_direction(room: str, targets: Iterator[tuple[ast.stmt, str]]) -> list[str]:
    """Lists the imports that a room may not make."""
    found = []
    for node, name in targets:
        parts = name.split(".")
        if parts[0] != "memsafe_rl":
            continue
        target = parts[1] if len(parts) > 1 else ""
        peers = target in RANKS[0] and room in RANKS[0]
        if target == room or peers:
            continue
        if not (PACKAGE / target).is_dir() and not (PACKAGE / f"{target}.py").is_file():
            found.append(f"line {node.lineno}: {name} (the package's public face is for scripts, not for its rooms)")
        elif rank_of(target) >= rank_of(room):
            found.append(f"line {node.lineno}: {name}")
    return found


def hidden_imports(tree: ast.AST, package: tuple[str, ...]) -> list[str]:
    """Lists imports inside functions, other than of optional packages."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return sorted(
        {
            f"line {node.lineno}: {name}"
            for function in functions
            for node, name in imported(function, package)
            if name.split(".")[0] not in OPTIONAL
        }
    )


@pytest.mark.parametrize("path", modules(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_earlier_ranks(path: Path) -> None:
    room = room_of(path)
    if room:
        rank_of(room)
        assert wrong_direction(room, imported(tree_of(path), package_of(path))) == []


@pytest.mark.parametrize("path", modules(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_hides_in_a_function(path: Path) -> None:
    assert hidden_imports(tree_of(path), package_of(path)) == []


@pytest.mark.parametrize("path", modules(ROOT / "examples"), ids=lambda path: path.name)
def test_examples_use_public_names_only(path: Path) -> None:
    names = [name for _, name in imported(tree_of(path), package_of(path))]
    private = [name for name in names if name.startswith("memsafe_rl.") and name.count(".") > 1]
    assert private == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("ops", "from memsafe_rl.memory import budget"),
        ("types", "import memsafe_rl.ops"),
        ("rollout", "from memsafe_rl.trainers.grpo import GRPOTrainer"),
        ("memory", "from ..models import adapter"),
        ("trainers", "from memsafe_rl import GRPOConfig"),
        ("models", "def late():\n    from memsafe_rl.rollout import x"),
    ],
)
def test_a_planted_wrong_import_is_found(room: str, source: str) -> None:
    package = ("memsafe_rl", room)
    assert wrong_direction(room, imported(ast.parse(source), package))


def test_a_planted_hidden_import_is_found() -> None:
    tree = ast.parse("def f():\n    import transformers\n    import bitsandbytes.nn\n")
    assert hidden_imports(tree, ("memsafe_rl", "ops")) == ["line 2: transformers"]
