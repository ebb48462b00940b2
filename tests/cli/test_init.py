"""`memsafe-rl init`: what it writes, that it runs, what it asks, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from memsafe_rl.cli.app import app
from memsafe_rl.cli.arguments import read_request
from memsafe_rl.cli.train import prepare
from tests.tiny import tiny_config, tiny_tokenizer

RUNNER = CliRunner(env={"COLUMNS": "200"})
NAMED = ("--model", "models/m", "--reward-funcs", "a:b", "--dataset", "p.jsonl")
SHORT = ("--max-completion-length", "16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's config and tokenizer, and prompts."""
    tiny_config("qwen3", vocab_size=2000, layers=2, hidden=64, positions=600).save_pretrained(tmp_path / "models/m")
    tiny_tokenizer().save_pretrained(tmp_path / "models/m")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"1+{one}="}) + "\n" for one in range(4)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str, answers: str = "") -> Result:
    return RUNNER.invoke(app, ["init", *words], input=answers)


@pytest.mark.slow
def test_all_weights_are_trained_where_they_fit_and_every_line_is_explained() -> None:
    rewards = ["mine:f", {"get_cosine_scaled_reward": {"min_value_wrong": -1.0, "max_len": 9}}]  # commas inside
    given = ("--model", "models/m", "--dataset", "p.jsonl", "--reward-funcs", json.dumps(rewards))
    result = init(*given, *SHORT, "--seed", "3", "--gpu", "8MiB")
    assert result.exit_code == 0, result.output
    assert "train: memsafe-rl train run.yaml" in result.output
    told = Path("run.yaml").read_text()
    entries = yaml.safe_load(told)
    assert entries == {
        "model": "models/m",
        "dataset": "p.jsonl",
        "reward_funcs": rewards,
        "output_dir": "runs/m",
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 16,
        "logging_steps": 1,
        "seed": 3,
        "learning_rate": 1e-6,
    }
    assert prepare(read_request(["run.yaml"])).config.step_rows == 32
    assert told.startswith("# models/m, all weights, on a card of 8.00 MiB. Forecast: a peak of ")
    lines = told.splitlines()
    assert all(lines[at - 1].startswith("# ") for at, line in enumerate(lines) if line[:1].isalpha())
    assert "\n# memsafe-rl plan run.yaml --gpu 8.00MiB\n" in told


@pytest.mark.slow
def test_an_adapter_is_trained_where_all_weights_do_not_fit_and_what_is_missing_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memsafe_rl.cli.init.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    result = init(
        *SHORT, "--gpu", "3MiB", "-o", "my run.yaml", answers="models/m\np.jsonl\nmine:f,think_format_reward\n"
    )
    assert result.exit_code == 0, result.output
    assert "train: memsafe-rl train 'my run.yaml'" in result.output
    assert "# memsafe-rl plan 'my run.yaml' --gpu" in Path("my run.yaml").read_text()
    entries = yaml.safe_load(Path("my run.yaml").read_text())
    assert (entries["peft"], entries["learning_rate"]) == ("lora:16", 1e-5)
    assert (entries["model"], entries["dataset"], entries["reward_funcs"]) == (
        "models/m",
        "p.jsonl",
        ["mine:f", "think_format_reward"],
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "model is missing. Write 'model: ...' in the run file or --model."),
        (("--model", "models/m"), "reward_funcs is missing."),
        ((*NAMED, "--reward-funcs", "exat"), "There is no reward 'exat'."),
        (("--model", "models/m", "--reward-funcs", "a:b"), "dataset is missing. Write --dataset FILE"),
        (("--gpu", "0"), "--gpu is '0'"),
        (("--output", "p.jsonl"), "'p.jsonl' exists. Remove it, or name another file with --output."),
        ((*NAMED, "--peft", "lora:4", "--gpu", "1MiB"), "cannot be trained on 1.00 MiB; as you said does not fit"),
    ],
)
def test_what_cannot_be_written_is_refused(words: tuple[str, ...], told: str) -> None:
    result = init(*words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert not Path("run.yaml").exists()
