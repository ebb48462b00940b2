"""The run files to copy are settings that a trainer takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from memsafe_rl.cli.app import app

FILES = sorted((Path(__file__).parents[2] / "examples").glob("**/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_run_file_is_understood(file: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(file), "--print-config"])
    assert result.exit_code == 0, result.output
    printed, written = yaml.safe_load(result.stdout), yaml.safe_load(file.read_text())
    assert {name: printed[name] for name in written} == written
    text = file.read_text()
    assert file.name in " ".join(re.findall(r"^#   .*", text, re.MULTILINE)), "a command that starts it"


def test_there_is_one_for_each_layout_and_each_script_to_copy() -> None:
    assert [file.stem for file in FILES] == ["cards", "host_weights", "machines", "servers", "qwen_grpo", "t5_grpo"]
