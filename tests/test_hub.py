"""A hub that does not answer is asked once, and briefly; what lies here is found without it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from memsafe_rl import hub
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.loading import load_tokenizer, read_config
from memsafe_rl.preflight.fake.families import config_for
from memsafe_rl.rewards.scoring import load_reward_model


class _Session:
    """A client whose hub answers, or not."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.asked = error, 0

    def head(self, endpoint: str, *, timeout: float) -> None:
        assert endpoint == constants.ENDPOINT
        assert timeout <= 3
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    hub._answers.cache_clear()
    yield
    hub._answers.cache_clear()


def meets(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> _Session:
    session = _Session(error)
    monkeypatch.setattr(hub, "get_session", lambda: session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return session


@pytest.mark.parametrize("load", [config_for, read_config, load_tokenizer, lambda n: load_reward_model(n, {}, False)])
def test_a_name_nobody_knows_is_refused_at_once_where_no_hub_answers(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, started = meets(monkeypatch, ConnectionError("no route")), time.perf_counter()
    with pytest.raises(ConfigError, match="nobody/nothing-7B"):
        load("nobody/nothing-7B")
    assert session.asked == 1
    assert time.perf_counter() - started < 3


def test_a_hub_that_answers_is_asked_for_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    session = meets(monkeypatch, None)
    assert hub.places_for("somebody/something", revision="main") == {"revision": "main"}
    assert hub.places_for("somebody/else") == {}
    assert session.asked == 1


def test_nobody_is_asked_for_what_lies_here_or_must_lie_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = meets(monkeypatch, ConnectionError("no route"))
    assert hub.places_for(str(tmp_path)) == {}
    assert hub.places_for("some/name", local_files_only=False) == {"local_files_only": False}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.places_for("some/name") == {}
    assert session.asked == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub.places_for("some/name") == {"local_files_only": True}
