"""What a user may write wrongly: each mistake ends in one line that names it and the remedy, never in a traceback."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from memsafe_rl.cli import app
from tests.tiny import tiny_model, tiny_tokenizer

REWARDS = """
import math


def good(completions, **columns):
    return [float(len(text) % 3) for text in completions]


def short(completions, **columns):
    return [1.0]


def text(completions, **columns):
    return ["good"] * len(completions)


def none(completions, **columns):
    return None


def scalar(completions, **columns):
    return 1.0


def infinite(completions, **columns):
    return [math.inf] * len(completions)


def raises(completions, **columns):
    return [1 / 0 for _ in completions]


async def judge(completions, **columns):
    raise OSError("the judge is down")


def needs(completions, solution):
    return [1.0] * len(completions)


def made(size):
    return good


number = 5
"""
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB.\n"
)
USER = {"role": "user", "content": "1+1="}
BASE: dict[str, Any] = {
    "model": "model",
    "dataset": "prompts.jsonl",
    "reward_funcs": ["rewards_of_bad_inputs:good"],
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "max_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}
ABSENT = object()

Case = tuple[Any, str]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of all these mistakes."""
    path, before, known = tmp_path_factory.mktemp("mistakes"), Path.cwd(), list(sys.path)
    for name, chat in (("model", False), ("chat", True)):
        tiny_model().save_pretrained(path / name)
        tiny_tokenizer(chat=chat).save_pretrained(path / name)
    tiny_model().save_pretrained(path / "no_tokenizer")
    for name in ("empty", "broken", "alien", "adapter", "no_weights"):
        (path / name).mkdir()
    (path / "broken" / "config.json").write_text("{")
    (path / "alien" / "config.json").write_text('{"model_type": "alien"}')
    (path / "no_weights" / "config.json").write_text((path / "model" / "config.json").read_text())
    (path / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "gone/base"}'
    )
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)))
    (path / "rewards_of_bad_inputs.py").write_text(REWARDS)
    (path / "syntax_of_bad_inputs.py").write_text("def f(:\n")
    (path / "text.txt").write_text("hello\n")
    (path / "zero.jsonl").write_text("")
    (path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    (path / "oom.log").write_text(OOM)
    (path / "base.yaml").write_text(yaml.safe_dump(BASE))
    os.chdir(path)
    yield path
    os.chdir(before)
    sys.path[:] = known


def refused(words: Sequence[str], told: str) -> None:
    """Runs a command and looks at the one line that it must end in."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "100"})
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    error = result.stderr.rstrip("\n").rpartition("\n")[2]  # loaders' progress and warnings may stand before it
    assert error.startswith("error: ")
    assert len(re.findall("^error: ", result.stderr, re.M)) == 1
    assert "Traceback" not in result.stderr
    for part in told.split(" | "):
        assert part in error


# A run file

ENTRIES: list[Case] = [
    ({"model": ABSENT}, "model is missing. | --model"),
    ({"model": 5}, "model is 5; it must be text"),
    ({"model": "empty"}, "model='empty' has no config that can be read | Give a folder with a config.json"),
    ({"model": "broken"}, "model='broken' | not a valid JSON file | Give a folder"),
    ({"model": "alien"}, "model='alien' | alien | Give a folder"),
    ({"model": "text.txt"}, "model='text.txt' | Give a folder"),
    ({"model": "nobody/nothing"}, "model='nobody/nothing' | Give a folder with a config.json, or the name"),
    ({"model": "no_tokenizer"}, "no tokenizer can be loaded from 'no_tokenizer' | Pass processing_class"),
    ({"trainer": "sft"}, "trainer is 'sft'; it must be one of grpo, rloo, ppo"),
    ({"critic": "x"}, "critic is 'x' with trainer 'grpo' | Set trainer to ppo"),
    ({"dataset": ABSENT}, "Prompts come from one source. Set dataset"),
    ({"dataset": "nowhere.jsonl"}, "no dataset 'nowhere.jsonl' | Give a file or a folder"),
    ({"dataset": "text.txt"}, "dataset is 'text.txt' | .jsonl | Convert it"),
    ({"dataset": "zero.jsonl"}, "'zero.jsonl' cannot be read: it is empty | Repair or replace it"),
    ({"dataset": "bytes.jsonl"}, "'bytes.jsonl' cannot be read | Repair or replace it"),
    ({"dataset": "model"}, "'model' cannot be read | Repair or replace it"),
    ({"dataset": ["prompts.jsonl"]}, "dataset is ['prompts.jsonl']; it must be text"),
    ({"dataset_split": "test"}, "'prompts.jsonl' | \"test\" | 'train' | Correct the split"),
    ({"eval_dataset": "nowhere.jsonl"}, "no eval dataset 'nowhere.jsonl'"),
    ({"dataset": ABSENT, "dataset_name": "nobody/prompts"}, "'nobody/prompts' | give a file or a folder as dataset"),
    ({"reward_funcs": ABSENT}, "reward_funcs is missing | --reward-funcs"),
    ({"reward_funcs": "exact"}, "no reward 'exact' | accuracy_reward"),
    ({"reward_funcs": [None]}, "no reward 'None'"),
    ({"reward_funcs": ["rewards_of_bad_inputs:nothing"]}, "no attribute 'nothing' | Check that file and name"),
    ({"reward_funcs": ["rewards_of_bad_inputs:number"]}, "is 5, which is not a function | Name a function"),
    ({"reward_funcs": ["syntax_of_bad_inputs:f"]}, "SyntaxError: invalid syntax (syntax_of_bad_inputs.py, line 1)"),
    ({"reward_funcs": ["rewards_of_bad_inputs:needs"]}, "'needs' needs 'solution' | Add the column"),
    ({"reward_funcs": [{"rewards_of_bad_inputs:made": {"sise": 2}}]}, "{'sise': 2} | 'sise' | Mend them"),
    ({"reward_funcs": [{"rewards_of_bad_inputs:made": 3}]}, "made': 3} | one reward a line"),
    ({"reward_funcs": ["nobody/judge"]}, "reward model 'nobody/judge' cannot be loaded | Give a folder"),
    ({"reward_funcs": ["model"]}, "reward model 'model' has no trained head (score.weight | Give a folder"),
    ({"reward_weights": [1, 2]}, "reward_weights has 2 entries for 1 reward functions | Give one for each"),
    ({"memory_budget": 24}, "memory_budget is 24 | without a unit is bytes | '24GiB'"),
    ({"memory_budget": -3}, "memory_budget is -3 | '16GiB'"),
    ({"memory_budget": "many"}, "memory_budget is 'many' | '16GiB'"),
    ({"memory_budget": "120%"}, "memory_budget is '120%' | at most at 100%"),
    ({"memory_budget": "nan"}, "memory_budget is nan; it must be finite"),
    ({"memory_budget": "90TiB"}, "memory_budget is 90.00 TiB but the device has | Lower memory_budget"),
    ({"learning_rate": "fast"}, "learning_rate is 'fast'; it must be a number"),
    ({"learning_rate": -1}, "learning_rate is -1; it must be at least 0"),
    ({"learning_rate": "nan"}, "learning_rate is nan; it must be finite"),
    ({"num_generations": 1}, "num_generations is 1 | Set num_generations=8"),
    ({"num_generations": 3}, "not a multiple of num_generations 3 | Set steps_per_generation=3"),
    ({"num_generations": 2.5}, "num_generations is 2.5; it must be a whole number"),
    ({"temperature": 0}, "temperature is 0; it must be more than 0"),
    ({"top_p": 2}, "top_p is 2; it must be more than 0 and at most 1"),
    ({"top_k": -5}, "top_k is -5; it must be at least 0"),
    ({"max_completion_length": 1000}, "max_completion_length is 1000 | 256 tokens | Lower max_completion_length"),
    ({"max_steps": 0}, "max_steps is 0 | -1 for all epochs"),
    ({"save_steps": 0}, "save_steps is 0; it must be more than 0"),
    ({"save_strategy": "sometimes"}, "save_strategy is 'sometimes'; it must be one of no, steps"),
    ({"lr_scheduler_type": "linea"}, "Did you mean 'linear'?"),
    ({"optim": "adamm"}, "optim is 'adamm'; it must be one of"),
    ({"loss_type": "gpro"}, "Did you mean 'grpo'?"),
    ({"beta": "nan"}, "beta is nan; it must be finite, and at least 0"),
    ({"kl_stop": -1}, "kl_stop is -1; it must be more than 0 nats"),
    ({"report_to": "wandbb"}, "Did you mean 'wandb'?"),
    ({"eval_strategy": "steps"}, "there is no eval_dataset | set eval_strategy='no'"),
    ({"allow_lossy": "everything"}, "allow_lossy is 'everything'; it must be one of"),
    ({"alarms": {"nothing": 1}}, "There is no alarm 'nothing'. What there is: truncation"),
    ({"bf16": "maybe"}, "bf16 is 'maybe'; it must be true or false"),
    ({"deepspeed": "zero.json"}, "deepspeed is 'zero.json', which is refused | set fsdp='full_shard'"),
    ({"learning_rat": 1}, "no setting 'learning_rat' | Did you mean 'learning_rate'?"),
    ({"memory_policy": "lader"}, "no memory_policy 'lader' | Did you mean 'ladder'?"),
    ({"peft": "lora:big"}, "peft is 'lora:big' | 'lora:16'"),
    ({"peft": "qlora"}, "peft is 'qlora' | 'lora:16'"),
    ({"peft": {"rr": 3}}, "no field of peft 'rr' | Did you mean 'r'?"),
    ({"peft": {"r": 0}}, "`r` should be a positive integer value but the value passed is 0 | Correct peft_config"),
    ({"peft": {"task_type": "FOO"}}, "{'task_type': 'FOO'}, which LoraConfig does not take | Correct that field"),
    ({"peft": {"foo": 1}}, "no field of peft 'foo' | target_modules"),
    ({"peft": {"bias": "bad"}}, "bad | Correct peft_config"),
    ({"peft": {"rank_pattern": 3}}, "'int' object has no attribute | Correct peft_config"),
    ({"peft": {"target_modules": ["nope"]}}, "{'nope'} | target_modules"),
    ({"quantization": "4bits", "peft": "lora"}, "quantization is '4bits'; write '4bit'"),
    ({"quantization": "4bit"}, "A 4-bit base cannot be trained | Set peft"),
    ({"quantization": "8bit"}, "An 8-bit base cannot be trained"),
    ({"quantization": {"load_in_4bits": True}, "peft": "lora"}, "'load_in_4bits' | Did you mean 'load_in_4bit'?"),
    ({"model_init_kwargs": {"dtype": "float13"}}, "float13 | Check its files and model_init_kwargs"),
    ({"model_init_kwargs": {"nothing": 1}}, "'nothing' | Check its files and model_init_kwargs"),
    ({"model_init_kwargs": "{bad"}, "model_init_kwargs is '{bad', which is not JSON"),
    ({"resume_from_checkpoint": "nowhere"}, "resume_from_checkpoint is 'nowhere' | Name a checkpoint folder"),
    ({"resume_from_checkpoint": "empty"}, "resume_from_checkpoint is 'empty' | Name a folder 'checkpoint-N'"),
    ({"resume_from_checkpoint": True}, "resume_from_checkpoint is True but | Start without it"),
    ({"output_dir": "text.txt"}, "output_dir is 'text.txt', which cannot be written | Set output_dir"),
    ({"output_dir": "model"}, "output_dir is 'model', which holds model.safetensors | set another output_dir"),
    *(
        ({"reward_funcs": [f"rewards_of_bad_inputs:{name}"]}, told)
        for name, told in {
            "short": "'short' returned 1 rewards for 4 completions. Return exactly one number",
            "text": "'text' returned 'good' (str) for row 0 of 4. Return a number",
            "none": "'none' returned None (NoneType) for 4 completions. Return a list",
            "scalar": "'scalar' returned 1.0 (float) for 4 completions. Return a list",
            "infinite": "'infinite' returned inf for row 0 of 4 | Bound the reward",
            "raises": "'raises' raised ZeroDivisionError: division by zero ( | rewards_of_bad_inputs.py:30). Mend it",
            "judge": "function 'judge' raised OSError: the judge is down ( | Mend it there, or catch the error",
        }.items()
    ),
]


@pytest.mark.parametrize(("entries", "told"), ENTRIES)
def test_run_files(entries: dict[str, Any], told: str, tmp_path: Path) -> None:
    written = {name: value for name, value in {**BASE, **entries}.items() if value is not ABSENT}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    refused(["train", str(tmp_path / "run.yaml")], told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: a\n\tdataset: b", "found character '\\t' that cannot start any token in line 2, column 1"),
        ("model: a: b", "mapping values are not allowed here in line 1, column 9"),
        ("reward_funcs: [a\n", "but got '<stream end>' in line 2, column 1 | Mend that line."),
        ("model: *nothing", "undefined alias 'nothing' in line 1"),
        ("just words", "holds str, not names and values. Write lines 'name: value'."),
        ("seed: 1\nseed: 2\n", "'seed' stands twice | line 2 | Remove one"),
        ("null: 3\n", "There is no setting 'None'."),
        ("run_name: 2024-13-45\n", "month must be in 1..12"),
        ("seed: !!int abc\n", "invalid literal for int"),
        ("seed: !!bool abc\n", "'abc'"),
        ("peft: &a {x: *a}\n", "Circular reference"),
        (f"peft: {'[' * 3000}\n", "recursion"),
    ],
)
def test_run_files_that_are_none(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    refused(["train", str(tmp_path / "run.yaml")], told)


# Prompts


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": None}, "train_dataset[4]: prompt None is neither text nor a list of messages | Make it one"),
        ({"prompt": ""}, "train_dataset[4]: prompt '' has no tokens. Remove empty prompts"),
        ({"prompt": 5}, "train_dataset[4]: prompt 5 is neither text nor a list of messages"),
        ({"prompt": ["a"]}, "train_dataset[4]: prompt ['a'] is neither text nor a list of messages"),
        (
            {"prompt": [USER]},
            "train_dataset[4]: | not of the same kind as the first one | Use text or messages for all",
        ),
        ({"prompt": "x" * 300}, "train_dataset[4] | longer than 252 tokens | Set overlong_prompts"),
    ],
)
def test_prompts(row: dict[str, Any], told: str) -> None:
    dataset_of([{"prompt": "1+1="}] * 4 + [row], told)


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (None, "train_dataset[4]: prompt None is neither text nor a list of messages"),
        ([], "train_dataset[4]: prompt [] is a conversation without messages. Remove empty prompts"),
        ([{"content": "1+1="}], "train_dataset[4]: message 0 is {'content': '1+1='}, without a 'role'. Give it one"),
        ([{"role": "user"}], "train_dataset[4]: message 0 is {'role': 'user'}, without a 'content'. Give it a text"),
        (
            [USER, {"role": "user", "content": None}],
            "train_dataset[4]: message 1 is {'role': 'user'}, without a 'content'",
        ),
        ([{"role": "user", "content": 5}], "train_dataset[4]: the chat template cannot render | Give every message"),
        ([{"role": "user", "content": [{"type": "image"}]}], "train_dataset[4]: | holds an image"),
    ],
)
def test_chats(turns: Any, told: str) -> None:
    dataset_of([{"prompt": [USER]}] * 4 + [{"prompt": turns}], told, "--model", "chat")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"question": "1+1="}] * 4, "train_dataset has the columns ['question'] but no 'prompt'. Rename or add"),
        ([{"prompt": [USER]}] * 4, "the tokenizer has no chat template. Set processing_class.chat_template"),
    ],
)
def test_datasets(rows: list[Any], told: str) -> None:
    dataset_of(rows, told)


def dataset_of(rows: Sequence[Any], told: str, *words: str) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(["train", "base.yaml", "--dataset", "rows.jsonl", *words], told)


# Commands

COMMANDS: list[Case] = [
    ("trian base.yaml", "No such command 'trian' | Did you mean 'train'? | --help"),
    ("--nothing", "No such option: --nothing | See `memsafe-rl --help`"),
    ("train nowhere.yaml", "no run file 'nowhere.yaml'. Give the path"),
    ("train bytes.jsonl", "bytes.jsonl is not YAML: | Give a text file"),
    ("train base.yaml --learning-rate", "--learning-rate has no value. Write --learning-rate VALUE."),
    ("train base.yaml other.yaml", "'other.yaml' stands alone | Write settings --name value"),
    ("train base.yaml --num-generations 4 8", "'8' stands alone | Write settings --name value"),
    ("train base.yaml --simulate", "Option '--simulate' requires an argument"),
    ("train base.yaml --simulate 2", "--simulate is '2'; write a size with its unit, such as 2GiB"),
    ("train base.yaml --simulate -5GiB", "--simulate: '-5GiB' is not a byte count | '16GiB'"),
    ("verify nowhere.yaml", "no run file 'nowhere.yaml'. Give the path"),
    ("plan --gpu 24", "plan needs a model. Write --model"),
    ("plan --model model --gpu=-3", "--gpu: '-3' is not a byte count | RTX 4090"),
    ("plan --model model --gpu 0", "--gpu is '0'; write a card's memory"),
    ("plan --model model --gpu RTX9999", "--gpu: 'RTX9999' | RTX 4090"),
    (f"plan --model model --gpu 1{'0' * 400}", "is not a byte count | RTX 4090"),
    ("plan --model model --ranks 0", "Invalid value for '--ranks' | See `memsafe-rl plan --help`"),
    (
        "plan --model HuggingFaceTB/SmolLM2-135M --gpu A100-80GB --prompt-tokens 99999999",
        "prompt_tokens is 99,999,999, but beside completions of 512 tokens the model's context has room for",
    ),
    ("train --torch_compile maybe", "no run file 'maybe'. Give the path of a YAML file; behind a flag"),
    ("plan --model model --prompt-tokens many", "Invalid value for '--prompt-tokens'"),
    ("plan --model model --sharding zero4", "sharding is 'zero4'; write one of none"),
    ("plan --model model --load-in-4bit", "A 4-bit base cannot be trained | Set peft"),
    ("plan --model model --nothing 3", "There is no setting 'nothing'. | memsafe-rl train --help"),
    ("plan --model nobody/nothing", "model='nobody/nothing' is neither | such as Qwen/Qwen3-0.6B | Write one of these"),
    ("plan --model Qwen/Qwen3-5B", "near to it are Qwen/Qwen3-"),
    ("plan --model model --dataset nowhere.jsonl", "no dataset 'nowhere.jsonl'"),
    ("plan --model model --num-generations 1", "num_generations is 1 | Set num_generations=8"),
    ("init --model model", "reward_funcs is missing"),
    ("init base.yaml -o prompts.jsonl", "'prompts.jsonl' exists. Remove it, or name another file with --output."),
    ("init base.yaml -o nowhere/run.yaml", "--output is 'nowhere/run.yaml', whose folder is not there. Make it"),
    ("init base.yaml --reward-funcs accuracy -o new.yaml", "no reward 'accuracy' | Did you mean 'accuracy_reward'?"),
    ("explain-oom nowhere.log", "'nowhere.log' cannot be read: No such file or directory. Give a file"),
    ("explain-oom text.txt", "'text.txt' has no out-of-memory message in its 1 lines. Give the whole log"),
    ("explain-oom oom.log --dtype float13", "--dtype is 'float13'; write one of float32"),
    ("explain-oom oom.log --vocab=-4", "--vocab is -4; give a number of 1 or more"),
    ("explain-oom oom.log --config empty", "empty has no config.json and no run file. Give --vocab"),
    ("explain-oom oom.log --config broken", "broken/config.json is not JSON. Give a run's folder"),
    ("doctor hello", "'doctor hello' is not a valid command. Write `memsafe-rl doctor accelerate FILE`"),
    ("doctor accelerate nowhere.yaml", "no file 'nowhere.yaml'. Give the file"),
    ("doctor --config nowhere.yaml", "no run file 'nowhere.yaml'. Give the path"),
    ("doctor --script nowhere.py", "'nowhere.py' cannot be read | Give a file"),
    ("doctor --expect torch", "--expect 'torch' is not key=value. Write such as torch=2.13.0"),
    ("monitor --pid 0", "Invalid value for '--pid' | See `memsafe-rl monitor --help`"),
    ("monitor --pid 99999999", "--pid is 99999999, and there is no such process"),
    ("monitor --run nowhere", "--run is 'nowhere', and there is no such folder. Give the run's output_dir"),
    ("monitor --run empty", "'empty' has no readable monitor.json | Give the output_dir"),
    ("report nowhere", "'nowhere' does not exist. Give the output_dir of a run"),
    ("report empty", "'empty' holds no run | Give the output_dir"),
    ("report text.txt", "'text.txt' is a file. Give the output_dir"),
    ("export model", "Missing argument 'OUT'. See `memsafe-rl export --help`"),
    ("export nowhere new", "'nowhere' holds no weights | Give a run's output_dir"),
    ("export model model", "'model' is there and not empty. Give a new folder"),
    ("export model new --dtype int8", "--dtype is 'int8'; it must be one of float32"),
    ("export broken new", "'broken' cannot be exported | not a valid JSON file | Give a folder"),
    ("export no_weights new", "'no_weights' cannot be exported | Give a folder"),
    ("export adapter new", "'adapter' belongs to the base 'gone/base' | base_model_name_or_path"),
]


@pytest.mark.parametrize(("line", "told"), COMMANDS)
def test_commands(line: str, told: str) -> None:
    refused(line.split(), told)
