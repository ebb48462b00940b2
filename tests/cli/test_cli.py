"""The command line: what is written reaches the trainer, mistakes end in one line, and help is fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

import memsafe_rl
from memsafe_rl.cli import app
from memsafe_rl.cli import train as training_module
from memsafe_rl.cli.arguments import RUN_NAMES, RunFields, parse_flags, read_request
from memsafe_rl.config.grpo import GRPOConfig, RLOOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.config.settings import DECLARED, GROUPS
from memsafe_rl.errors import ConfigError, MemoryBudgetError, TrainingInterrupted
from memsafe_rl.memory.planning.policies import PRESETS, AdaptivePolicy, LadderPolicy
from memsafe_rl.memory.simulated.device import active_simulation
from memsafe_rl.preflight.verify import Verification, verify_plan
from memsafe_rl.rewards import REWARD_FUNCTIONS
from memsafe_rl.trainers.grpo import RLOOTrainer
from tests.tiny import tiny_model, tiny_tokenizer

RUNNER = CliRunner()


def invoke(*words: object) -> Any:
    return RUNNER.invoke(app, ["train", *(str(word) for word in words)], env={"COLUMNS": "100"})


class FakeTrainer:
    """Remembers how it was made and used."""

    config_class: type = GRPOConfig
    made: list[FakeTrainer]
    failure: BaseException | None = None

    def __init__(self, model: Any, reward_funcs: Any, **arguments: Any) -> None:
        self.given, self.reward_funcs, self.arguments = model, reward_funcs, arguments
        self.model = SimpleNamespace(config=LlamaConfig())
        self.saved: list[str] = []
        FakeTrainer.made.append(self)

    def train(self) -> Any:
        if FakeTrainer.failure is not None:
            raise FakeTrainer.failure
        return SimpleNamespace(global_step=3)

    def save_model(self, folder: str) -> None:
        self.saved.append(folder)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrainer]:
    monkeypatch.setitem(training_module.TRAINERS, "grpo", FakeTrainer)
    monkeypatch.setattr(FakeTrainer, "made", [], raising=False)
    monkeypatch.setattr(FakeTrainer, "failure", None)
    return FakeTrainer


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(4)))
    return file


@pytest.fixture
def run_file(tmp_path: Path, prompts: Path) -> Path:
    return write(
        tmp_path,
        model="some/model",
        dataset=str(prompts),
        reward_funcs=["accuracy_reward"],
        output_dir=str(tmp_path / "out"),
        num_generations=4,
        learning_rate="1e-5",
    )


def write(folder: Path, **entries: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(entries))
    return file


def refused(result: Any, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    error = result.stderr.rstrip("\n").rpartition("\n")[2]  # progress of `datasets` may stand before it
    assert error.startswith("error: ")
    for part in parts:
        assert part in error


# What is written reaches the trainer


def test_a_run_file_reaches_the_trainer(trainer: type[FakeTrainer], run_file: Path, tmp_path: Path) -> None:
    result = invoke(run_file)
    assert result.exit_code == 0, result.output
    (made,) = trainer.made
    config = made.arguments["args"]
    assert isinstance(config, GRPOConfig)
    assert (config.num_generations, config.learning_rate) == (4, 1e-5)
    assert made.given == "some/model"
    assert made.reward_funcs == [REWARD_FUNCTIONS["accuracy_reward"]]
    assert made.arguments["train_dataset"]["answer"][:] == ["1", "2", "3", "4"]
    assert made.arguments["eval_dataset"] is None
    assert made.arguments["peft_config"] is None
    assert made.arguments["quantization_config"] is None
    assert made.saved == [str(tmp_path / "out")]
    assert "3 optimizer steps done" in result.stdout


def test_flags_go_before_the_file(trainer: type[FakeTrainer], run_file: Path, prompts: Path) -> None:
    result = invoke(
        "--learning-rate", "1e-3", "--log_completions", run_file, "--num_generations=2", "--no-shuffle-dataset",
        "--max-steps", "-1", "--scale-rewards", "none", "--peft", "lora:4", "--quantization", "4bit",
        "--eval-dataset", prompts, "--model-init-kwargs", '{"dtype": "float32"}',
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (made,) = trainer.made
    config = made.arguments["args"]
    assert (config.learning_rate, config.num_generations, config.max_steps) == (1e-3, 2, -1)
    assert (config.log_completions, config.shuffle_dataset) == (True, False)
    assert config.model_init_kwargs == {"dtype": "float32"}
    assert made.arguments["peft_config"].r == 4
    assert made.arguments["quantization_config"].load_in_4bit
    assert len(made.arguments["eval_dataset"]) == 4


def test_a_run_of_ppo(monkeypatch: pytest.MonkeyPatch, trainer: type[FakeTrainer], run_file: Path) -> None:
    fake = type("FakePPO", (FakeTrainer,), {"config_class": PPOConfig})
    monkeypatch.setitem(training_module.TRAINERS, "ppo", fake)
    entries = yaml.safe_load(run_file.read_text())
    entries = {"trainer": "ppo", "critic": "some/critic", "gae_lambda": 0.9, **entries}
    result = invoke(write(run_file.parent, **entries), "--vf-coef", "0.5")
    assert result.exit_code == 0, result.output
    (made,) = trainer.made
    assert made.arguments["critic"] == "some/critic"
    assert isinstance(made.arguments["args"], PPOConfig)
    assert (made.arguments["args"].gae_lambda, made.arguments["args"].vf_coef) == (0.9, 0.5)
    grpo = write(run_file.parent, **{**entries, "trainer": "grpo"})
    refused(invoke(grpo), "critic is 'some/critic'", "trainer to ppo")
    refused(invoke(write(run_file.parent, **{**entries, "trainer": "sft"})), "trainer is 'sft'", "grpo, rloo, ppo")
    del entries["critic"]
    refused(invoke(write(run_file.parent, **{**entries, "trainer": "grpo"})), "gae_lambda")


def test_a_run_of_rloo(run_file: Path) -> None:
    request = read_request([str(run_file), "--trainer", "rloo", "--reward-clip-range", "-1,2"])
    run = training_module.prepare(request)
    assert training_module.TRAINERS[run.fields.trainer] is RLOOTrainer
    assert isinstance(run.config, RLOOConfig)
    assert run.config.reward_clip_range == [-1.0, 2.0]


def test_a_run_needs_no_file(trainer: type[FakeTrainer], prompts: Path) -> None:
    result = invoke(
        "--model", "m", "--dataset", prompts, "--output-dir", prompts.parent / "out",
        "--reward-funcs", "accuracy_reward", "think_format_reward",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert trainer.made[0].reward_funcs == [
        REWARD_FUNCTIONS["accuracy_reward"],
        REWARD_FUNCTIONS["think_format_reward"],
    ]


def test_rewards_of_the_working_directory(
    trainer: type[FakeTrainer], run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_of_this_test.py").write_text(
        "def exact(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n\n"
        "def made(size):\n    return lambda prompts, **columns: [size] * len(prompts)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    entries = yaml.safe_load(run_file.read_text())
    entries["reward_funcs"] = [
        "rewards_of_this_test:exact",
        {"rewards_of_this_test:made": {"size": 3}},
        "./a_reward_model",
    ]
    result = invoke(write(tmp_path, **entries))
    assert result.exit_code == 0, result.output
    exact, made, named = trainer.made[0].reward_funcs
    assert exact(["a"], ["b"]) == [1.0]
    assert made(["a"]) == [3]
    assert named == "./a_reward_model"


@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "folder"])
def test_kinds_of_datasets(trainer: type[FakeTrainer], run_file: Path, tmp_path: Path, kind: str) -> None:
    dataset = Dataset.from_dict({"prompt": ["a", "b"]})
    target = tmp_path / f"data.{kind}"
    {
        "csv": dataset.to_csv,
        "parquet": dataset.to_parquet,
        "json": dataset.to_json,
        "folder": dataset.save_to_disk,
    }[kind](str(target))
    result = invoke(run_file, "--dataset", target)
    assert result.exit_code == 0, result.output
    assert trainer.made[0].arguments["train_dataset"]["prompt"][:] == ["a", "b"]


def test_splits_of_files_and_folders(trainer: type[FakeTrainer], run_file: Path, tmp_path: Path) -> None:
    assert invoke(run_file, "--dataset-split", "train[1:3]").exit_code == 0
    assert trainer.made[0].arguments["train_dataset"]["prompt"][:] == ["1+1=", "2+1="]
    split = DatasetDict(a=Dataset.from_dict({"prompt": ["a"]}), b=Dataset.from_dict({"prompt": ["b"]}))
    split.save_to_disk(tmp_path / "split")
    split["a"].save_to_disk(tmp_path / "plain")
    arguments = (run_file, "--dataset", tmp_path / "split")
    refused(invoke(*arguments), "has the splits 'a', 'b', but no 'train'", "Set dataset_split")
    assert invoke(*arguments, "--dataset-split", "b", "--eval-dataset-split", "a").exit_code == 0
    assert trainer.made[1].arguments["train_dataset"]["prompt"][:] == ["b"]
    assert trainer.made[1].arguments["eval_dataset"]["prompt"][:] == ["a"]
    refused(invoke(run_file, "--dataset", tmp_path / "plain", "--dataset-split", "b"), "no splits", "'b'")


def test_a_named_dataset(trainer: type[FakeTrainer], run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*arguments: Any, **named: Any) -> Dataset:
        asked.append((*arguments, named["split"]))
        return Dataset.from_dict({"prompt": ["a"]})

    monkeypatch.setattr(training_module, "load_dataset", load)
    result = invoke(
        run_file, "--dataset", "none", "--dataset-name", "openai/gsm8k", "--dataset-config", "main",
        "--eval-dataset-split", "test",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


def test_memory_policies_by_name(trainer: type[FakeTrainer], run_file: Path) -> None:
    assert invoke(run_file).exit_code == invoke(run_file, "--memory-policy", "adaptive").exit_code == 0
    assert [made.arguments["memory_policy"] for made in trainer.made] == [AdaptivePolicy(), AdaptivePolicy()]
    words = ("--memory-policy", "ladder", "--gradient-checkpointing", "--trajectory-device", "device")
    assert invoke(run_file, *words).exit_code == 0
    ladder = trainer.made[2].arguments["memory_policy"]
    assert isinstance(ladder, LadderPolicy)
    assert (ladder.update.checkpointing, ladder.update.trajectory_device) == (True, "device")
    for name in PRESETS:
        assert invoke(run_file, f"--memory-policy={name}").exit_code == 0
        assert trainer.made[-1].arguments["memory_policy"] == PRESETS[name]
        assert name in next(field.metadata["help"] for field in fields(RunFields) if field.name == "memory_policy")
    preset, hinted = next(iter(PRESETS)), len(trainer.made)
    refused(invoke(run_file, "--memory-policy", preset, "--gradient-checkpointing"), "gradient_checkpointing is True")
    refused(invoke(run_file, "--memory-policy", "lader"), "Did you mean 'ladder'?")
    assert len(trainer.made) == hinted


def test_adapters_and_quantization() -> None:
    assert training_module.adapter(None) is None
    lora = training_module.adapter("lora:8")
    assert lora is not None
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (8, 16, "all-linear")
    own = training_module.adapter({"r": 2, "target_modules": ["q_proj"]})
    assert own is not None
    assert (own.r, own.target_modules, own.task_type) == (2, {"q_proj"}, "CAUSAL_LM")
    for wrong in ("lora:big", "lora:0", "ia3"):
        with pytest.raises(ConfigError, match="lora:16"):
            training_module.adapter(wrong)
    with pytest.raises(ConfigError, match="Did you mean 'lora_alpha'"):
        training_module.adapter({"lora_alfa": 2})
    assert training_module.quantization(None, bf16=False) is None
    eight = training_module.quantization("8bit", bf16=False)
    assert eight is not None
    assert eight.load_in_8bit
    with pytest.raises(ConfigError, match="'4bit', '8bit'"):
        training_module.quantization("2bit", bf16=False)


def test_the_printed_run_can_be_run(trainer: type[FakeTrainer], run_file: Path, tmp_path: Path) -> None:
    result = invoke(run_file, "--print-config", "--gradient-accumulation-steps", "4")
    assert result.exit_code == 0, result.output
    printed = yaml.safe_load(result.stdout)
    assert set(printed) >= set(GRPOConfig().to_dict())
    assert printed["steps_per_generation"] == 4
    assert printed["optim"] == "adamw_torch_fused"
    assert printed["model"] == "some/model"
    assert not trainer.made
    again = tmp_path / "again.yaml"
    again.write_text(result.stdout)
    assert invoke(again, "--print-config").stdout == result.stdout


# Mistakes end in one line


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"learning_rat": 1}, ("no setting 'learning_rat'", "Did you mean 'learning_rate'?")),
        ({"modle": "m"}, ("Did you mean 'model'?",)),
        ({"model_name_or_path": "m"}, ("model_name_or_path is 'm'", "Set model.")),
        ({"use_peft": True}, ("use_peft is True", "peft: lora:16")),
        ({"lora_target_modules": ["q_proj"]}, ("lora_target_modules", "Set peft", "target_modules")),
        ({"load_in_4bit": True}, ("load_in_4bit is True", "quantization: 4bit")),
        ({"dtype": "bfloat16"}, ("dtype is 'bfloat16'", "model_init_kwargs")),
        ({"simulate": "2GiB"}, ("simulate is '2GiB'", "Write --simulate 2GiB.")),
        ({"config": "run.yaml"}, ("config is 'run.yaml'", "memsafe-rl train CONFIG.yaml")),
        ({"dataset_train_split": "test"}, ("dataset_train_split", "Set dataset_split")),
        ({"reward_model_name_or_path": "r"}, ("reward_model_name_or_path is 'r'", "Set reward_funcs")),
        ({"vllm_group_port": 1}, ("vllm_group_port is 1, which is refused",)),
        ({"num_generations": 3}, ("not a multiple of num_generations 3",)),
        ({"loss_type": "gpro"}, ("Did you mean 'grpo'?",)),
        ({"model": None}, ("model is missing",)),
        ({"reward_funcs": None}, ("reward_funcs is missing", "--reward-funcs")),
        ({"reward_funcs": ["acuracy_reward"]}, ("Did you mean 'accuracy_reward'?",)),
        ({"reward_funcs": ["nowhere.to:be_found"]}, ("nowhere.to:be_found",)),
        ({"reward_funcs": [{"a": {}, "b": {}}]}, ("one reward a line",)),
        ({"dataset": None}, ("Set dataset",)),
        ({"dataset_name": "x/y"}, ("only one",)),
        ({"dataset": None, "dataset_name": "prompts.jsonl"}, ("dataset_name is 'prompts.jsonl'", "Set dataset to it")),
        ({"dataset_split": "test"}, ("test", "'train'")),
        ({"output_dir": "/proc/x"}, ("output_dir is '/proc/x'", "cannot be written", "Set output_dir")),
        ({"output_dir": __file__ + "/x"}, ("output_dir is ", "cannot be written")),
        ({"dataset": "nowhere.jsonl"}, ("no dataset 'nowhere.jsonl'",)),
        ({"dataset": __file__}, (".jsonl",)),
        ({"peft": "lora16"}, ("peft is 'lora16'", "lora:16")),
        ({"quantization": "5bit"}, ("quantization is '5bit'",)),
    ],
)
def test_mistakes_in_the_file(
    trainer: type[FakeTrainer], run_file: Path, tmp_path: Path, entries: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(invoke(write(tmp_path, **yaml.safe_load(run_file.read_text()) | entries)), *parts)
    assert not trainer.made


def test_a_broken_file_of_prompts(trainer: type[FakeTrainer], run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"\n{]}')
    refused(invoke(run_file, "--dataset", tmp_path / "broken.jsonl"), "broken.jsonl' cannot be read: ")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--learnin-rate", "1"], ("no setting 'learnin_rate'", "Did you mean 'learning_rate'?")),
        (["--save-on-each-node"], ("save_on_each_node is True, which is refused",)),
        (["--learning-rate"], ("--learning-rate has no value",)),
        (["--learning-rate", "--bf16"], ("--learning-rate has no value",)),
        (["--log-completions", "maybe"], ("'maybe' stands alone",)),
        (["--learning-rate", "fast"], ("learning_rate is 'fast'",)),
        (["--model_name_or_path", "m"], ("Set model.",)),
        (["--reward", "accuracy_reward"], ("reward is 'accuracy_reward'", "Set reward_funcs.")),
        (["--use_peft"], ("use_peft is True", "peft: lora:16")),
        (["--config", "run.yaml"], ("memsafe-rl train CONFIG.yaml",)),
        (["stray.yaml"], ("'stray.yaml' stands alone",)),
        (["--simulate", "2 potatoes"], ("--simulate: '2 potatoes' is not a byte count",)),
        (["--simulate", "0"], ("--simulate is '0'", "2GiB")),
    ],
)
def test_mistakes_in_flags(
    trainer: type[FakeTrainer], run_file: Path, words: list[str], parts: tuple[str, ...]
) -> None:
    refused(invoke(run_file, *words), *parts)
    assert not trainer.made


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("- a\n- b\n", ("holds list",)),
        ("a: [1\n", ("is not YAML",)),
        ("", ("holds NoneType",)),
        ("seed: 1\nbeta: 0\nseed: 2\n", ("'seed' stands twice", "line 3")),
        ("learning_rate: 1\nlearning-rate: 2\n", ("'learning_rate' stands twice", "line 2")),
        ("kl_stop: {target: 1, target: 2}\n", ("'target' stands twice",)),
        ("[1]: 2\n", ("[1]", "is not YAML")),
    ],
)
def test_files_that_are_not_run_files(tmp_path: Path, content: str, parts: tuple[str, ...]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    refused(invoke(file), *parts)
    refused(invoke(tmp_path / "none.yaml"), "There is no run file")


def test_a_harmless_setting_of_trl_passes(trainer: type[FakeTrainer], run_file: Path) -> None:
    result = invoke(
        run_file, "--use-vllm", "false", "--use_peft", "false", "--dataloader-num-workers", "0", "--push_to_hub=False"
    )
    assert result.exit_code == 0, result.output
    assert trainer.made


def test_errors_and_interruptions_of_the_trainer(trainer: type[FakeTrainer], run_file: Path) -> None:
    trainer.failure = MemoryBudgetError("one row needs 3 GiB;\nthe budget is 2 GiB. Raise memory_budget.")
    refused(invoke(run_file), "one row needs 3 GiB; the budget is 2 GiB. Raise memory_budget.")
    trainer.failure = KeyboardInterrupt()
    result = invoke(run_file)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    trainer.failure = TrainingInterrupted("SIGTERM")
    assert invoke(run_file).exit_code == 75
    trainer.failure = RuntimeError("a defect keeps its traceback")
    assert isinstance(invoke(run_file).exception, RuntimeError)


# The real trainer

REWARD_OF_THIS_TEST = """
def varied(prompts, completions, **columns):
    return [sum(map(ord, text)) % 7 for text in completions]


def forbidden(prompts, completions, **columns):
    raise AssertionError("called")
"""


@pytest.fixture
def tiny_run(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "reward_of_this_test.py").write_text(REWARD_OF_THIS_TEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write(
        tmp_path,
        model="model",
        dataset=prompts.name,
        eval_dataset=prompts.name,
        reward_funcs=["reward_of_this_test:varied"],
        output_dir="out",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        save_steps=1,
        eval_strategy="steps",
        learning_rate="1e-4",
        use_cpu=True,
        disable_tqdm=True,
    )


def test_a_tiny_model_is_trained_and_gone_on_with(tiny_run: Path, tmp_path: Path) -> None:
    result = invoke(tiny_run, "--num-iterations", "2")
    assert result.exit_code == 0, result.output
    assert "2 optimizer steps done; the model is in out" in result.stdout
    assert "Loading weights" not in result.stderr, "no progress bars in a log"
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert sorted(folder.name for folder in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    result = invoke(tiny_run, "--num-iterations", "2", "--resume-from-checkpoint", "true", "--max-steps", "3")
    assert result.exit_code == 0, result.output
    assert "3 optimizer steps done" in result.stdout


@pytest.mark.slow
def test_an_adapter_on_a_quantised_model_is_trained(tiny_run: Path, tmp_path: Path) -> None:
    result = invoke(tiny_run, "--peft", "lora:2", "--quantization", "8bit", "--max-steps", "1")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "More Information Needed" not in card, "PEFT's form"
    for fact in ("base_model: model\n", "library_name: peft\n", "| rewards | varied |", "| optimizer steps | 1 |"):
        assert fact in card
    load, merge = result.stdout.splitlines()[-2:]
    assert merge == "merge: memsafe-rl export out out/merged"
    assert load == "load: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('model'), 'out')"
    known = {"PeftModel": PeftModel, "AutoModelForCausalLM": AutoModelForCausalLM}
    adapted = eval(load.removeprefix("load: "), known)  # what the screen says is what works
    words = merge.removeprefix("merge: memsafe-rl ").split()
    assert RUNNER.invoke(app, [*words, "--dtype", "float32"]).exit_code == 0
    merged, ids = AutoModelForCausalLM.from_pretrained("out/merged"), torch.arange(9)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits)
    assert AutoTokenizer.from_pretrained("out/merged")("1+2=") == tiny_tokenizer()("1+2=")
    card = (tmp_path / "out" / "merged" / "README.md").read_text()
    for fact in (
        "base_model: model",
        "| rewards | varied |",
        "| optimizer steps | 1 |",
        "| data | 4 rows: prompt, answer |",
        "| peak memory |",
    ):
        assert fact in card
    again = RUNNER.invoke(app, words)
    assert (again.exit_code, again.stderr) == (2, "error: 'out/merged' is there and not empty. Give a new folder.\n")


@pytest.mark.slow
def test_a_checkpoint_is_exported_in_another_type(tiny_run: Path, tmp_path: Path) -> None:
    assert invoke(tiny_run, "--max-steps", "1").exit_code == 0
    with open("out/steps.jsonl", "a") as log:  # as if the run had gone on from it
        log.write(json.dumps({**json.loads(Path("out/steps.jsonl").read_text()), "step": 2}) + "\n")
    found = RUNNER.invoke(app, ["export", "out/checkpoint-1", "half", "--dtype", "bfloat16"])
    assert (found.exit_code, found.stdout) == (0, "half\n"), found.stderr
    card = Path("half/README.md").read_text()
    assert "base_model: model\n" in card
    assert "| model | model |" in card
    assert "| optimizer steps | 1 |" in card
    half = AutoModelForCausalLM.from_pretrained("half")
    trained = load_file(tmp_path / "out" / "model.safetensors")
    name, weight = next(iter(half.named_parameters()))
    assert torch.equal(weight, trained[name].bfloat16())
    for words, told in (
        (("model/nothing", "x"), "'model/nothing' holds no weights: neither adapter_config.json nor config.json"),
        (("out", "x", "--dtype", "int3"), "--dtype is 'int3'"),
    ):
        found = RUNNER.invoke(app, ["export", *words])
        assert found.exit_code == 2
        assert told in found.stderr


def test_mistakes_that_the_trainer_finds(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"question": "1+1="}\n')
    refused(invoke(tiny_run, "--dataset", "empty.jsonl"), "prompt")
    refused(invoke(tiny_run, "--max-completion-length", "1000"), "max_completion_length is 1000")
    refused(invoke(tiny_run, "--model", "no/such/folder"), "model='no/such/folder' has no config that can be read")
    refused(invoke(tiny_run, "--reward-funcs", "no/such/reward"), "reward model 'no/such/reward' cannot be loaded")
    refused(invoke(tiny_run, "--resume-from-checkpoint", "out/checkpoint-9"), "checkpoint-9")


# A simulated device


@pytest.mark.slow
def test_a_run_on_a_simulated_device_tells_what_it_held(tiny_run: Path, tmp_path: Path) -> None:
    result = invoke(tiny_run, "--simulate", "64MiB", "--use-cpu", "false", "--eval-strategy", "no")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "2 optimizer steps done; the model is in out" in told
    found = re.search(
        r"Simulated device: at most (\S+) (KiB|MiB) of 64.00 MiB \((\d+)%\) held, 0 allocations refused", told
    )
    assert found is not None, told
    assert "host memory at most" in told
    for phase, times in (("load", 1), ("update", 2), ("checkpoint", 2)):
        assert re.search(rf"^{phase} +{times} ", result.stdout, re.M), result.stdout
    assert re.search(r"^optimizer .* KiB +optimizer \d+%, weights \d+%, ", result.stdout, re.M), result.stdout
    assert active_simulation() is None
    written = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert written[0]["memory/budget_bytes"] == int(0.9 * 64 * 2**20)


@pytest.mark.slow
def test_a_run_that_does_not_fit_on_a_simulated_device(tiny_run: Path) -> None:
    result = invoke(tiny_run, "--simulate", "400KiB")
    assert result.exit_code == 2
    assert "of 400.00 KiB" in result.stdout
    assert "optimizer steps done" not in result.stdout
    assert "error: " in result.stderr
    assert active_simulation() is None


# Proof


def invoke_verify(*words: object) -> Any:
    return RUNNER.invoke(app, ["verify", *(str(word) for word in words)], env={"COLUMNS": "110"})


def rows_of(table: str) -> dict[str, list[str]]:
    """Reads a table of rich's: cells by the name in the first column."""
    lines = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in table.splitlines() if "│" in line]
    return {line[0]: line[1:] for line in lines}


@pytest.mark.slow
def test_a_run_is_verified(tiny_run: Path, tmp_path: Path) -> None:
    result = invoke_verify(tiny_run, "--reward-funcs", "reward_of_this_test:forbidden")
    assert result.exit_code == 0, result.output
    cells = rows_of(result.stdout)
    assert cells["sampled tokens equal"][0] == cells["sampled tokens equal"][2]
    assert re.fullmatch(r"(\d+) of \1", cells["sampled tokens equal"][0])
    assert cells["gradient difference"][0] == "-"
    assert cells["failures recovered from"] == ["0", "0", "2"]
    assert cells["equal bit for bit"][1:] == ["yes", "no"]
    assert cells["micro-batches"][:2] == ["1", "1"]
    assert int(cells["micro-batches"][2]) > 1
    assert set(cells) >= {"rows in flight", "peak of the process", "saved", "seconds", "peak in update"}
    verdict = " ".join(result.stdout.split())
    assert "EQUAL: the plain plan, the chosen plan, and a leaner plan with failures" in verdict
    assert "(tolerance 1e-05 in float32)" in verdict
    assert "reward functions were not called" in verdict
    assert "the whole process" in verdict
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_is_verified_on_a_simulated_device(tiny_run: Path) -> None:
    result = invoke_verify(tiny_run, "--simulate", "8MiB", "--memory-policy", "ladder", "--max-completion-length", "40")
    assert result.exit_code == 0, result.output
    cells = rows_of(result.stdout)
    assert re.fullmatch(r"[\d.]+ (B|KiB|MiB) \(\d+%\)|nothing", cells["saved"][1])
    assert "peak" in cells
    assert "Simulated device: at most" in result.stdout
    assert "2 allocations refused" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_a_wrong_plan_ends_with_its_own_exit_code(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(loop: Any) -> Verification:
        found = verify_plan(loop)
        worse = found.plain.peak_bytes + 2**20
        return replace(found, failing=replace(found.failing, gradient_difference=0.38, peak_bytes=worse))

    monkeypatch.setattr(training_module, "verify_plan", wrong)
    result = invoke_verify(tiny_run)
    assert result.exit_code == 1, result.output
    assert rows_of(result.stdout)["saved"][2] == "nothing"
    verdict = " ".join(result.stdout.split())
    assert (
        "NOT EQUAL: a leaner plan's gradient after failures differs from that of the plain plan by 3.8e-01" in verdict
    )


def test_mistakes_before_a_proof(run_file: Path, tmp_path: Path) -> None:
    refused(invoke_verify(run_file, "--learnin-rate", "1"), "Did you mean 'learning_rate'?")
    refused(invoke_verify(run_file, "--simulate", "much"), "--simulate: 'much' is not a byte count")
    refused(invoke_verify(write(tmp_path, dataset="x")), "model is missing")


def test_help_of_the_proof() -> None:
    result = invoke_verify("--help")
    assert result.exit_code == 0
    told = " ".join(result.stdout.replace("│", " ").split())
    for part in ("memsafe-rl verify [CONFIG.yaml]", "--simulate SIZE", "no reward function is called", "Exit code: 0"):
        assert part in told


# Help


def test_the_version_is_told() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"memsafe-rl {memsafe_rl.__version__}\n")


def test_help_teaches_every_setting() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for name in (*RUN_NAMES, *DECLARED):
        assert f"--{name.replace('_', '-')} " in result.stdout
    for title in GROUPS:
        assert title in result.stdout
    assert "reward_funcs:" in result.stdout
    assert "[default: 8]" in result.stdout
    assert "share such as '80%'" in " ".join(result.stdout.replace("│", " ").split())


def test_the_example_in_the_help_is_valid() -> None:
    from memsafe_rl.cli.app import EXAMPLE

    entries = yaml.safe_load(EXAMPLE)
    config = GRPOConfig(**{name: value for name, value in entries.items() if name not in RUN_NAMES})
    assert (config.step_rows, config.learning_rate) == (32, 1e-5)


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom memsafe_rl.cli import app\n"
        "try:\n    app(['train', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_names_do_not_collide() -> None:
    assert not set(RUN_NAMES) & set(DECLARED)
    assert list(GRPOConfig().to_dict()) == list(DECLARED)[: len(GRPOConfig().to_dict())]
    assert set(PPOConfig().to_dict()) <= set(DECLARED)


def test_flags_are_split_as_written() -> None:
    assert parse_flags(["a.yaml", "--seed", "3", "--bf16", "--no-fp16", "--beta=0.1"]) == (
        "a.yaml",
        {"seed": "3", "bf16": True, "fp16": False, "beta": "0.1"},
    )
    assert parse_flags(["--reward-weights", "1", "2", "--optim_args", "momentum=0.9"]) == (
        None,
        {"reward_weights": ["1", "2"], "optim_args": "momentum=0.9"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", ["memsafe_rl", "memsafe_rl.cli"])
def test_the_command_runs_as_a_module_too(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"memsafe-rl {memsafe_rl.__version__}\n"), done.stderr
