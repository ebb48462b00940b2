import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerState

from memsafe_rl import PPOConfig
from memsafe_rl.callbacks.console import CompletionsTable, ProgressBar, banner
from memsafe_rl.callbacks.trackers import Trackers
from tests.trainers.helpers import count_digits, make_trainer


def screen() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_banner_says_what_is_about_to_happen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, disable_tqdm=False, num_iterations=2)
    said = capsys.readouterr().err
    for fact in ("effective batch", "8 completions per optimizer step", "trained on 2 times", "memory budget", "cpu"):
        assert fact in said
    console = screen()
    banner({"a": "b"}, console)
    assert "b" in text_of(console)


def test_completions_are_shown_and_kept_with_rewards_and_extras(tmp_path: Path) -> None:
    def with_extra(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("digits", [sum(c.isdigit() for c in text) for text in completions])
        log_metric("longest", max(len(text) for text in completions))
        return count_digits(completions)

    trainer = make_trainer(tmp_path, reward_funcs=with_extra, log_completions=True, max_steps=1)
    trainer.train()
    rows = [
        json.loads(line) for line in (tmp_path / "completions" / "completions_00001.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8
    assert {"prompt", "completion", "digits", "with_extra", "advantage", "step"} == set(rows[0])
    assert "longest" in trainer.state.log_history[0]


def test_the_table_shows_one_completion_a_prompt_when_asked(tmp_path: Path) -> None:
    console = screen()
    table = CompletionsTable(tmp_path, limit=None, unique_prompts=True, console=console)
    rows = [
        {"prompt": p, "completion": c, "advantage": 0.5} for p, c in (("P1", "first"), ("P1", "second"), ("P2", "x"))
    ]
    table.on_completions(3, rows)
    assert "first" in text_of(console)
    assert "second" not in text_of(console)


def test_the_bar_tells_reward_length_and_peak(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    trainer = make_trainer(tmp_path, callbacks=[ProgressBar(console)])
    trainer.train()
    said = text_of(console)
    assert "GRPO" in said
    assert "reward" in said
    assert "peak" in said
    assert "2/2" in said


def test_the_bar_bears_the_algorithms_name(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bar, state = ProgressBar(console), TrainerState(max_steps=3)
    bar.on_train_begin(PPOConfig(str(tmp_path), report_to="none", use_cpu=True), state, None)
    bar.close()
    assert "PPO" in text_of(console)
    assert "GRPO" not in text_of(console)


def test_trackers_get_the_settings_and_every_number(tmp_path: Path) -> None:
    class FakeAccelerator:
        def __init__(self) -> None:
            self.opened: tuple[Any, ...] = ()
            self.logged: list[tuple[int, dict[str, float]]] = []
            self.closed = False

        def init_trackers(self, project: str, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None:
            self.opened = (project, config, init_kwargs)

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.logged.append((step, numbers))

        def end_training(self) -> None:
            self.closed = True

    fake = FakeAccelerator()
    trainer = make_trainer(tmp_path, callbacks=[Trackers(fake, project="sums", run_name="first")])
    trainer.train()
    project, config, named = fake.opened
    assert (project, named) == ("sums", {"wandb": {"name": "first"}})
    assert config["num_generations"] == 4
    assert all(isinstance(value, (bool, int, float, str)) for value in config.values())
    assert [step for step, _ in fake.logged] == [1, 2, 2]
    assert "reward" in fake.logged[0][1]
    assert fake.closed
