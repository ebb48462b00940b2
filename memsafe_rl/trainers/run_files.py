"""Metrics as scripts of transformers print and save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def show_metrics(split: str, metrics: Mapping[str, Any]) -> None:
    """Prints metrics, a line each, under a heading."""
    lines = [f"  {name:40s} = {value}" for name, value in sorted(metrics.items())]
    print("\n".join([f"***** {split} metrics *****", *lines]))


def save_metrics(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Writes metrics as JSON, and adds them to those of other splits where that is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}_results.json").write_text(json.dumps(dict(metrics), indent=4))
    if combined:
        path = folder / "all_results.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **metrics}, indent=4))
