import io
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from rich.console import Console
from transformers import TrainerState

from memsafe_rl import PPOConfig
from memsafe_rl.callbacks.console import CompletionsTable, ProgressBar, banner
from memsafe_rl.callbacks.trackers import Trackers
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer


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


def test_a_limit_of_0_shows_no_table_and_keeps_the_file(tmp_path: Path) -> None:
    console = screen()
    table = CompletionsTable(tmp_path, limit=0, unique_prompts=False, console=console)
    table.on_completions(3, [{"prompt": "P1", "completion": "first", "advantage": 0.5}])
    assert text_of(console) == ""
    assert "first" in (tmp_path / "completions" / "completions_00003.jsonl").read_text()


def test_the_bar_tells_reward_length_and_peak(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    trainer = make_trainer(tmp_path, callbacks=[ProgressBar(console)])
    trainer.train()
    said = text_of(console)
    assert "GRPO" in said
    assert "reward" in said
    assert "peak" in said
    assert "2/2" in said


@pytest.mark.slow
def test_off_a_terminal_every_log_is_one_line_and_so_is_an_evaluation(tmp_path: Path) -> None:
    console = screen()
    settings = {"max_steps": 5, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "beta": 0.1}
    data = Dataset.from_dict({"prompt": PROMPTS[:2]})
    make_trainer(tmp_path, callbacks=[ProgressBar(console)], eval_dataset=data, **settings).train()
    lines = text_of(console).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 4/5", "step 5/5"]
    number = r"-?[\d.,]+"
    expected = (
        rf"step 2/5  reward {number} ± {number}  loss {number}  KL {number}  entropy {number}  length 6  "
        rf"truncated 100%  peak {number} .iB of {number} .iB  {number} tokens/s  ETA {number} s"
    )
    assert re.fullmatch(expected, lines[0])
    assert lines[2].startswith("step 4/5  eval  reward ")
    assert "ETA" not in lines[3], "nothing is left"


def test_a_line_shows_the_highest_peak_and_nan_and_other_ranks_are_silent() -> None:
    logs = {"loss": 0.5, "entropy": None, "reward": None, "reward_std": None, "memory/peak_bytes": 2.0**20}
    for is_main in (True, False):
        console, state = screen(), TrainerState(max_steps=9, is_world_process_zero=is_main)
        bar = ProgressBar(console)
        bar.on_train_begin(SimpleNamespace(algorithm="GRPO"), state, None)
        bar.on_progress(1, {"memory/peak_bytes": 3.0 * 2**20})
        state.global_step = 2
        bar.on_log(None, state, None, logs)
        bar.on_log(None, state, None, {"train_runtime": 1.0})
        said = text_of(console)
        assert "entropy" not in said, "no token was trained"
        assert ("step 2/9  reward nan ± nan  loss 0.5000  peak 3.00 MiB  ETA" in said) is is_main
        assert len(said.splitlines()) == is_main


def test_disable_tqdm_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path).train()
    assert not capsys.readouterr().err


def test_the_summary_ends_with_commands_for_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, disable_tqdm=False, save_strategy="steps", save_steps=1).train()
    said = capsys.readouterr().err
    assert f"report: memsafe-rl report {tmp_path}\n" in said
    assert "longer: trainer.train(resume_from_checkpoint=True), with a higher max_steps or num_train_epochs" in said


def test_chats_are_shown_turn_by_turn(tmp_path: Path) -> None:
    console, call = screen(), {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    picture = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "user", "content": picture}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    table = CompletionsTable(tmp_path, limit=None, unique_prompts=False, console=console)
    table.on_completions(1, [{"prompt": chat, "completion": [{"role": "assistant", "content": "[b]2"}]}])
    said = text_of(console)
    for line in ("user: <image> What is it?", 'assistant: add({"a": 1})', "assistant: [b]2"):
        assert line in said
    assert "content" not in said
    assert json.loads((tmp_path / "completions" / "completions_00001.jsonl").read_text())["prompt"] == chat


def test_the_bar_bears_the_algorithms_name(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    bar, state = ProgressBar(console), TrainerState(max_steps=3)
    bar.on_train_begin(PPOConfig(str(tmp_path), report_to="none", use_cpu=True), state, None)
    bar.on_run_closed()
    assert "PPO" in text_of(console)
    assert "GRPO" not in text_of(console)


def test_trackers_get_the_settings_and_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("wandb", "tensorboard")

    class FakeAccelerator:
        def __init__(self) -> None:
            self.opened: list[tuple[Any, ...]] = []
            self.trackers: list[Any] = []
            self.logged: list[tuple[int, dict[str, float]]] = []
            self.closed: list[str] = []

        def init_trackers(self, project: str, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None:
            self.opened.append((project, config, init_kwargs))
            self.trackers = [SimpleNamespace(name=name, finish=partial(self.closed.append, name)) for name in known]

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.logged.append((step, numbers))

    fake = FakeAccelerator()
    monkeypatch.setenv("WANDB_PROJECT", "for wandb")
    trainer = make_trainer(tmp_path, callbacks=[Trackers(fake, project="sums", run_name="first")])
    trainer.train()
    project, config, named = fake.opened.pop()
    assert not fake.opened
    assert (project, named) == ("sums", {"wandb": {"name": "first"}})
    assert config["num_generations"] == 4
    assert all(isinstance(value, (bool, int, float, str)) for value in config.values())
    assert [step for step, _ in fake.logged] == [1, 2, 2]
    assert {"train/reward", "train/epoch"} <= fake.logged[0][1].keys()  # as transformers' own trackers are told
    assert fake.closed == ["tensorboard"]  # wandb's run may be the user's own, and what is evaluated later is logged
    trainer.log({"eval_later": 1.0})
    assert fake.logged[-1] == (2, {"eval/later": 1.0, "train/epoch": trainer.state.epoch})
    assert len(fake.opened) == 1
    chosen = SimpleNamespace(trackers=["wandb"], trackio_space_id=None, to_sanitized_dict=dict)
    Trackers(fake, project="sums", run_name=None).open(chosen)
    assert fake.opened[-1] == ("for wandb", {}, {})  # as wandb's own variable says
