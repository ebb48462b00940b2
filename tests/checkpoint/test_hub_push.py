"""Uploads to a hub that stands in for the real one."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from safetensors.torch import load_file

from memsafe_rl import ConfigError, GRPOConfig, GRPOTrainer
from memsafe_rl.checkpoint import export
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer, weights

WEIGHTS = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


class Hub:
    """Keeps what is uploaded, as `HfApi` would."""

    def __init__(self) -> None:
        self.repos: list[tuple[str, bool | None]] = []
        self.branches: list[str] = []
        self.commits: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.failure: Exception | None = None
        self.waiting: list[Future[Any]] | None = None

    def __call__(self, token: str | None = None) -> Hub:
        self.tokens.append(token)
        return self

    def create_repo(self, name: str, *, private: bool | None, exist_ok: bool) -> Any:
        assert exist_ok
        if self.failure is not None:
            raise self.failure
        self.repos.append((name, private))
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        assert exist_ok
        assert repo_id == "me/mine"
        self.branches.append(branch)

    def upload_folder(self, *, folder_path: Path, run_as_future: bool, **commit: Any) -> Future[Any]:
        assert run_as_future
        files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        self.commits.append({**commit, "files": files})
        upload: Future[Any] = Future()
        if self.failure is not None:
            upload.set_exception(self.failure)
        elif self.waiting is None:
            upload.set_result(f"commit {len(self.commits)}")
        else:
            self.waiting.append(upload)
        return upload


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(export, "HfApi", made)
    return made


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "push_to_hub": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("every_save", [None, None]),
        ("checkpoint", [None, "last-checkpoint"] * 2),
        ("all_checkpoints", [None, "checkpoint-1", None, "checkpoint-2"]),
        ("end", []),
    ],
)
def test_saves_are_uploaded_as_the_strategy_says(hub: Hub, strategy: str, places: list[Any], tmp_path: Path) -> None:
    settings = {"hub_model_id": "me/mine", "hub_revision": "next", "hub_private_repo": True, **SAVES}
    trainer = make_trainer(tmp_path, hub_strategy=strategy, hub_token="hf_secret", save_total_limit=1, **settings)
    assert hub.repos == [("me/mine", True)]
    assert (hub.branches, hub.tokens) == (["next"], ["hf_secret"])
    (tmp_path / ".push-of_1_that_was_killed").mkdir()
    trainer.train()
    assert [commit["path_in_repo"] for commit in hub.commits] == places
    for commit in hub.commits:
        assert (commit["repo_id"], commit["revision"]) == ("me/mine", "next")
        is_whole = commit["path_in_repo"] is not None
        assert commit.get("delete_patterns") == ("*" if is_whole else None)  # no file of the one before may stay
        assert set(commit["files"]) - ({*export.RUN_STATE} if is_whole else set()) == WEIGHTS
        assert ("training_state.pt" in commit["files"]) == is_whole
    if hub.commits:
        assert (
            hub.commits[-1]["files"]["model.safetensors"] == (tmp_path / "checkpoint-2/model.safetensors").read_bytes()
        )
        assert hub.commits[0]["commit_message"] == "Training in progress, step 1"
    assert list(tmp_path.glob(".push-*")) == []
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    assert written == []
    assert "hf_secret" not in repr(trainer.args) + json.dumps(trainer.args.to_dict())


def test_what_is_pushed_at_the_end_loads_and_has_a_card(hub: Hub, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", max_steps=1)
    trainer.train()
    assert hub.repos == []
    found = trainer.push_to_hub(dataset_name="me/questions", tags="maths", revision="v2", token="other")
    assert found == "commit 1"
    (commit,) = hub.commits
    assert (commit["repo_id"], commit["revision"], hub.tokens[-1]) == ("me/run", "v2", "other")
    assert set(commit["files"]) == WEIGHTS | {"README.md"}
    card = commit["files"]["README.md"].decode()
    for part in ("me/questions", "maths", "grpo", "# run"):
        assert part in card
    (tmp_path / "model.safetensors").write_bytes(commit["files"]["model.safetensors"])
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(weight.numel() for weight in saved.values()) == weights(trainer).numel()
    trainer.args.push_to_hub = True
    trainer.save_model(tmp_path / "final")
    assert hub.commits[-1]["commit_message"] == "Model save"


def test_a_card_is_written_beside_the_weights_where_a_script_asks_for_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", max_steps=1)
    trainer.train()
    trainer.create_model_card(dataset_name="me/questions", tags=["maths"])
    card = (tmp_path / "run" / "README.md").read_text()
    for part in ("me/questions", "- maths", "- grpo", "# run"):
        assert part in card


def test_a_subclass_uploads_in_its_own_way(hub: Hub, tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def push_to_hub(self, commit_message: str = "", blocking: bool = True, **options: Any) -> Any:
            return super().push_to_hub(f"mine: {commit_message}", blocking, **options)

    made = make_trainer(tmp_path, max_steps=1, push_to_hub=True)
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = Mine(tiny_model(), count_digits, made.args, data, processing_class=tiny_tokenizer())
    trainer.save_model(tmp_path / "final")
    assert hub.commits[-1]["commit_message"] == "mine: Model save"


@pytest.mark.slow
def test_a_save_passes_while_an_upload_is_under_way_unless_told_otherwise(hub: Hub, tmp_path: Path) -> None:
    for always, count in ((False, 1), (True, 3)):
        hub.commits, hub.waiting = [], []
        trainer = make_trainer(tmp_path / str(always), hub_always_push=always, **{**SAVES, "max_steps": 3})
        push = next(one for one in trainer.callback_handler.callbacks if isinstance(one, export.HubPush))
        ended = push.on_train_end

        def end(*values: Any, ended: Any = ended, **named: Any) -> None:
            for upload in hub.waiting or ():
                upload.set_result("done")
            ended(*values, **named)

        push.on_train_end = end  # type: ignore[method-assign]
        trainer.train()
        assert len(hub.commits) == count
        assert list((tmp_path / str(always)).glob(".push-*")) == []


def test_a_failed_upload_is_told_and_a_repository_that_cannot_be_opened_is_refused(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path / "run", **SAVES)
    hub.failure = OSError("no network")
    trainer.train()
    assert caplog.text.count("an upload to me/run failed; training continues: no network") == 2
    with pytest.raises(ConfigError, match=r"hub_model_id is 'x/y', which cannot be opened \(OSError: no network\)"):
        make_trainer(tmp_path / "other", hub_model_id="x/y", **SAVES)
    with pytest.raises(ConfigError, match="hub_strategy is 'always'"):
        GRPOConfig(hub_strategy="always", use_cpu=True)
