"""`memsafe-rl plan`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memsafe_rl.cli.app import app
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

runner = CliRunner(env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and nothing else."""
    path = tmp_path_factory.mktemp("config")
    tiny_config("qwen3", vocab_size=2000, layers=2, hidden=64, positions=600).save_pretrained(path)
    return path


def plan(folder: Path, *words: str) -> tuple[int, str, str]:
    result = runner.invoke(app, ["plan", "--model", str(folder), *words])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_a_config_alone_is_enough(folder: Path) -> None:
    code, told, _ = plan(folder, "--gpu", "1GiB", "--max-completion-length", "64", "--prompt-tokens", "32")
    assert code == 0
    for line in ("fits: a peak of", "plan: rollouts of 8 rows in flight", "headroom: safe", "biggest lever left: "):
        assert line in told
    assert (
        "longest completion that fits: 568 tokens, all that the model takes (--max-completion-length 568; esti" in told
    )
    assert "(--num-generations 1024, where it divides the batch; estimated)" in " ".join(told.split())
    assert "921.60 MiB); MiB" in told, "the unit of the table"
    assert "assumed: the longest prompt has 32 tokens (as given)" in told
    for phase in ("load", "rollout", "update", "optimizer"):
        assert f"│{phase}" in told.replace("│ ", "│")
    assert any("peak┃reserved" in line for line in told.splitlines())


def test_prompts_without_a_tokenizer_ask_for_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unreachable)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n')
    code, _, told = plan(Path("Qwen/Qwen3-0.6B"), "--gpu", "8", "--dataset", str(prompts))
    assert code == 2
    assert "the tokenizer of 'Qwen/Qwen3-0.6B' cannot be loaded" in told
    assert "--prompt-tokens N" in told


@pytest.mark.slow
def test_json_has_the_peak_on_top_and_what_was_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsafe_rl.cli.plan._RANKS", (8, 64))
    monkeypatch.setattr("memsafe_rl.cli.plan._PROVING_SECONDS", 600)  # on a busy machine too
    words = ("--gpu", "1", "--max-completion-length", "64", "--prompt-tokens", "32", "--peft", "lora:8", "--json")
    code, written, _ = plan(folder, *words, "--find")
    found = json.loads(written)
    assert code == 0
    assert found["predicted_peak_bytes"] == max(found["phases"].values())
    assert found["longest_completion"] == 568
    assert found["proved"] is True
    assert found["smallest_card_gib"] == 8
    assert {entry["lora_rank"] for entry in found["frontier"]} == {8, 64}
    proved = [entry for entry in found["frontier"] if entry["proved"]]
    assert {(entry["num_generations"], entry["lora_rank"]) for entry in proved} == {(8, 8), (8, 64)}
    assert all(entry["longest_completion"] > 0 for entry in proved)
    assert "saves about" in found["lever"]


AN_ADAPTER = (
    "train an adapter (--peft lora:16): its base stays in bf16, without gradients and optimizer state, and may wait on "
    "the host"
)


@pytest.mark.slow
def test_what_cannot_fit_is_said_with_its_reason(folder: Path) -> None:
    code, told, _ = plan(folder, "--gpu", "2MiB", "--max-completion-length", "64")
    assert code == 1
    assert "does not fit into 1.80 MiB" in told
    assert "weights" in told
    flags = " ".join(told.partition("what would need less: ")[2].split())
    assert flags.startswith(f"{AN_ADAPTER}; or optimizer")
    assert "--gpu" in flags
    for python in ("peft_config", "optim='", "longest completion", "rows in flight", "allocator said"):
        assert python not in told


@pytest.mark.slow
def test_where_the_weights_alone_are_too_large_only_fewer_of_them_are_proposed(folder: Path) -> None:
    code, told, _ = plan(folder, "--model", "Qwen/Qwen3-0.6B", "--gpu", "2GiB", "--max-completion-length", "64")
    told = " ".join(told.partition("what would need less: ")[2].split()).partition(" on the host: ")[0]
    assert code == 1
    assert told == f"{AN_ADAPTER}; or a larger card (--gpu)"


@pytest.mark.slow
def test_what_needs_no_torch_is_refused_before_it_is_imported(folder: Path) -> None:
    model = ("--model", str(folder), "--reward-funcs", "a:b")
    mistakes = [
        ("plan", *model, "--gpu=-3"),
        ("plan", *model, "--gpu", "24", "--temperature=-3"),
        ("plan", *model, "--load-in-4bit"),
        ("plan", *model, "--ranks=0"),
        ("train", *model, "--max-steps=many"),
        ("train", *model, "--trainer", "sft"),
        ("train", *model, "--memory-budget", "24"),
        ("train", *model, "--peft", "lora:big"),
        ("train", *model, "--quantization", "4bit"),
        ("train", *model, "--dataset", "nowhere.jsonl"),
        ("train", *model, "--resume-from-checkpoint", "nowhere"),
        ("verify", "nowhere.yaml"),
        ("init", "--gpu", "0"),
        ("export", "nowhere", "new"),
        ("report", "nowhere"),
        ("monitor", "--run", "nowhere"),
        ("explain-oom", "nowhere.log"),
        ("doctor", "--config", "nowhere.yaml"),
    ]
    code = (
        f"import sys\nfrom memsafe_rl.cli import app\nfor words in {mistakes!r}:\n"
        "    try: app(list(words))\n"
        "    except SystemExit as end: assert end.code == 2 and 'torch' not in sys.modules, words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["error:"] * len(mistakes), done.stderr


@pytest.mark.slow
def test_prompts_are_measured_where_there_are_some(tmp_path: Path) -> None:
    tiny_model("qwen3", positions=600).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "abcdefghijk"}\n')
    code, told, _ = plan(tmp_path, "--gpu", "1GiB", "--dataset", str(prompts), "--max-completion-length", "32")
    assert code == 0
    assert "the longest prompt has 11 tokens (the longest of train_dataset)" in told


@pytest.mark.slow
def test_reward_models_and_evaluations_are_phases_of_their_own(folder: Path, tmp_path: Path) -> None:
    tiny_config("qwen3", vocab_size=2000, layers=3, hidden=96, positions=600).save_pretrained(tmp_path)
    words = ("--gpu", "1GiB", "--max-completion-length", "32", "--prompt-tokens", "32", "--json")
    evaluated = (*words, "--eval-strategy", "steps", "--eval-steps", "5")
    found = [
        json.loads(plan(folder, *chosen)[1])
        for chosen in (
            evaluated,
            (*evaluated, "--reward-model", str(tmp_path / "config.json")),
            (*evaluated, "--reward-funcs", str(tmp_path)),
        )
    ]
    assert ["reward" in one["phases"] for one in found] == [False, True, True]
    assert all("evaluate" in one["phases"] for one in found)
    weights = [one["components"]["update"]["weights"] for one in found]
    assert weights[0] < weights[1] == weights[2]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [(), ("--quantization", "4bit")])
def test_a_frozen_base_is_as_narrow_as_the_passes(folder: Path, bits: tuple[str, ...]) -> None:
    code, told, error = plan(folder, "--gpu", "1GiB", "--prompt-tokens", "32", "--peft", "lora:8", "--fp16", *bits)
    assert code == 0, error
    assert "weights of the base are float16" in " ".join(told.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpu", "large"), "--gpu: "),
        (("--gpu", "0"), "--gpu is '0'"),
        (("--load-in-4bit",), "A 4-bit base cannot be trained"),
        (("--load-in-4bit", "--quantization", "8bit"), "contradict each other"),
        (("--num-generation", "8"), "num_generations"),
        (("--reward-model", "nobody/judge"), "reward model='nobody/judge' is neither"),
        (("--trainer", "ppo", "--critic", "nobody/critic"), "critic='nobody/critic' is neither"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, words: tuple[str, ...], told: str) -> None:
    code, _, error = plan(folder, *words)
    assert code == 2
    assert told in " ".join(error.split())


def test_a_model_is_needed_and_must_be_known() -> None:
    result = runner.invoke(app, ["plan", "--gpu", "24GiB"])
    assert result.exit_code == 2
    assert "plan needs a model" in result.stderr
    result = runner.invoke(app, ["plan", "--model", "nobody/nothing-7B"])
    assert result.exit_code == 2
    assert "is neither a folder with a config.json" in " ".join(result.stderr.split())
    result = runner.invoke(app, ["plan", "--model", ""])
    assert "plan needs a model" in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{no json", "is there, but its config.json cannot be read"),
        ("[1]", "is there, but its config.json cannot be read"),
        ('{"model_type": "qwen3", "hidden_size": "64"}', "expected int, got str"),
        ('{"model_type": "frobnicate"}', "frobnicate"),
        ('{"model_type": "vit"}', "type 'vit' cannot be trained as a language model"),
        ('{"model_type": "qwen3", "num_hidden_layers": 0}', "Check the sizes in its config.json"),
    ],
)
def test_a_config_that_no_model_can_have_is_named(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "config.json").write_text(content)
    code, out, error = plan(tmp_path, "--json")
    assert (code, out) == (2, "")
    assert told in " ".join(error.split())
    assert "Qwen/Qwen3-0.6B" not in error


@pytest.mark.slow
def test_prompts_that_nobody_describes_leave_room_for_completions(folder: Path) -> None:
    code, out, _ = plan(folder, "--max-completion-length", "500", "--json")
    assert code == 0
    assert json.loads(out)["prompt_tokens"] == 100


@pytest.mark.slow
def test_a_forecast_that_does_not_fit_tells_of_no_failures(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not fake allocations, but the refusal says what does not fit."""
    code, out, _ = plan(folder, "--gpu", "3MiB", "--max-completion-length", "64", "--json")
    assert code == 1
    assert "does not fit" in json.loads(out)["refusal"]
    assert caplog.messages == []
