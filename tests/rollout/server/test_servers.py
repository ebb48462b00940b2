"""Rollouts on servers: a failure ends in the same tokens from elsewhere or in one error, never in a wrong sample."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from memsafe_rl import GRPOConfig
from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.rollout.engine import EngineContext, RolloutEngine
from memsafe_rl.rollout.engines import ENGINES
from memsafe_rl.rollout.external.vllm_weights import is_whole, written
from memsafe_rl.rollout.server.routes import KEY_VARIABLE
from memsafe_rl.types import Completion, RolloutPlan
from tests.rollout.external.common import adapter_of, keys_of, nudge, prompts_of, settings_of, small_model
from tests.rollout.server import fake_server
from tests.rollout.server.fake_server import FakeServer
from tests.trainers.helpers import make_trainer

PROMPTS, GROUP = 3, 4
Spoil = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    started = [FakeServer(), FakeServer()]
    yield started
    for server in started:
        server.stop()


def engine_on(folder: Path, model: Any, *servers: FakeServer, **settings: Any) -> RolloutEngine:
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=",".join(server.url for server in servers),
        **{"vllm_server_timeout": 20.0, **settings},
    )
    (name,) = config.engines_chosen.values()
    return ENGINES[name].function(EngineContext(name, adapter_of(model), config, 1 << 35, lambda: 1 << 33))


def rows_of(engine: RolloutEngine, step: int = 0, limits: list[int] | None = None) -> list[Completion]:
    def attempt(unit: Any, undo: Any = None) -> Any:
        return unit(RolloutPlan(rows_in_flight=4))

    engine.synchronise(step)
    prompts = prompts_of(5, 9, 7)
    return engine.generate(prompts, keys_of(PROMPTS, GROUP), settings_of(8), attempt, limits=limits)


def ids_of(rows: list[Completion]) -> list[list[int]]:
    return [row.ids.tolist() for row in rows]


@pytest.fixture
def model() -> Any:
    return small_model(tied=False)


@pytest.fixture
def expected(tmp_path: Path, model: Any) -> list[list[int]]:
    """What a healthy server draws."""
    server = FakeServer()
    try:
        return ids_of(rows_of(engine_on(tmp_path / "healthy", model, server)))
    finally:
        server.stop()


def own_logprobs(model: Any, rows: list[Completion]) -> float:
    gaps = []
    for place, row in enumerate(rows):
        prompt = prompts_of(5, 9, 7)[place // GROUP]
        with torch.no_grad():
            logits = model(torch.cat([prompt, row.ids])[None]).logits[0, len(prompt) - 1 : -1]
        gaps.append(float((logits.log_softmax(-1).gather(1, row.ids[:, None])[:, 0] - row.logprobs).abs().max()))
    return max(gaps)


@pytest.mark.slow
def test_rows_come_from_all_servers_with_the_weights_of_the_step(
    tmp_path: Path, model: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    engine = engine_on(tmp_path, model, *servers)
    first = rows_of(engine)
    assert own_logprobs(model, first) < 1e-4
    assert [server.drawn for server in servers] == [6, 6]
    assert set(servers[0].keys) == {"Bearer secret"}
    assert ids_of(rows_of(engine)) == ids_of(first)
    assert servers[0].asked.count("/collective_rpc") == 1  # the weights have not moved
    nudge(model)
    second = rows_of(engine, step=1)
    assert own_logprobs(model, second) < 1e-4
    assert ids_of(second) != ids_of(first)
    assert len(list((tmp_path / "vllm_weights").iterdir())) == 1  # earlier weights are removed


@pytest.mark.slow
def test_rows_of_different_limits_are_asked_for_side_by_side(
    tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    engine, limits = engine_on(tmp_path, model, *servers), [3, 5, 4]
    by_row = [limit for limit in limits for _ in range(GROUP)]
    rows = rows_of(engine, limits=limits)
    assert ids_of(rows) == [ids[:limit] for ids, limit in zip(expected, by_row, strict=True)]
    assert [server.asked.count("/collective_rpc") for server in servers] == [1, 1]
    for server in servers:
        server.stop()
    own = rows_of(engine, limits=limits)
    assert [len(row.ids) <= limit for row, limit in zip(own, by_row, strict=True)] == [True] * len(own)


@pytest.mark.slow
def test_rows_of_a_server_that_dies_come_from_another_or_from_the_own_engine(
    tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_on(tmp_path, model, *servers)
    servers[0].dies_after = 2
    assert ids_of(rows_of(engine)) == expected
    assert servers[1].drawn >= 10
    servers[0].stop()
    servers[1].dies_after = servers[1].drawn + 5
    with caplog.at_level(logging.WARNING):
        rows = rows_of(engine)
    assert own_logprobs(model, rows) < 1e-4
    # what was answered before the death is kept
    assert sum(ids == other for ids, other in zip(ids_of(rows), expected, strict=True)) >= 5
    assert "The own engine draws 7 of 12 completions" in caplog.text
    assert servers[0].url in caplog.text


@pytest.mark.slow
def test_without_the_own_engine_the_dead_servers_are_named(
    tmp_path: Path, model: Any, servers: list[FakeServer]
) -> None:
    engine = engine_on(tmp_path, model, *servers, vllm_server_fallback=False)
    rows_of(engine)
    for server in servers:
        server.stop()
    with pytest.raises(MemsafeError, match=rf"No vLLM server drew 12 of 12.*{servers[0].url}.*{servers[1].url}"):
        rows_of(engine)


@pytest.mark.slow
def test_a_server_that_never_served_ends_the_run(tmp_path: Path, model: Any, servers: list[FakeServer]) -> None:
    servers[0].stop()
    with pytest.raises(MemsafeError, match="No vLLM server drew 12 of 12"):
        rows_of(engine_on(tmp_path, model, servers[0], vllm_server_timeout=0.3))


@pytest.mark.slow
def test_a_restarted_server_is_given_the_weights_again(
    tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    engine = engine_on(tmp_path, model, servers[0])
    rows_of(engine)
    servers[0].stop()
    again = FakeServer(servers[0].port)
    try:
        assert ids_of(rows_of(engine)) == expected
        assert again.drawn == 12
    finally:
        again.stop()


@pytest.mark.slow
def test_a_torn_weight_file_never_reaches_a_server(
    tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_on(tmp_path, model, servers[0])
    rows_of(engine)
    (file,) = (tmp_path / "vllm_weights").rglob("*.safetensors")
    whole = file.read_bytes()
    for torn in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(torn)
        servers[0].version = "default"  # as after a restart
        with torch.no_grad():
            servers[0].model.lm_head.weight.zero_()
        assert ids_of(rows_of(engine)) == expected
        assert file.read_bytes() == whole
    assert "are damaged" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("label", [True, False])
def test_weights_that_did_not_arrive_whole_are_found_by_the_probe(
    label: bool, tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    if label:  # the label is right, a tensor is not
        servers[0].drops = {"model.layers.1.mlp.up_proj.weight"}
    else:  # 200 OK, and nothing is loaded
        servers[0].drops = {name for name, _ in model.named_parameters()}
    assert ids_of(rows_of(engine_on(tmp_path, model, *servers))) == expected
    assert servers[0].drawn == 0
    with pytest.raises(MemsafeError, match="log-probs of a fixed prompt lie"):
        rows_of(engine_on(tmp_path / "alone", model, servers[0]))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/resume", "/inference/v1/generate"])
def test_a_server_that_answers_500_is_left_out(
    route: str, tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    servers[0].fails = {route}
    assert ids_of(rows_of(engine_on(tmp_path, model, *servers))) == expected
    assert servers[1].drawn == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "route", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume", "/update_weight_version"]
)
def test_a_server_that_is_busy_while_it_takes_weights_is_told_again(
    route: str, tmp_path: Path, model: Any, servers: list[FakeServer]
) -> None:
    engine = engine_on(tmp_path, model, servers[0])
    rows_of(engine)
    nudge(model)
    servers[0].fails_once = {route}
    rows_of(engine, step=1)  # from the own engine, if need be
    rows = rows_of(engine, step=1)
    assert not servers[0].paused
    assert servers[0].drawn >= 24
    assert own_logprobs(model, rows) < 1e-4


@pytest.mark.parametrize("route", ["/collective_rpc", "/resume", "/update_weight_version"])
def test_a_server_that_a_killed_process_left_on_the_way_serves_the_next_one(
    route: str, tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    rows_of(engine_on(tmp_path, model, servers[0]))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    nudge(model)
    servers[0].fails = {route}  # where the process is killed
    with pytest.raises(MemsafeError):
        rows_of(engine_on(tmp_path, model, servers[0]), step=1)
    servers[0].fails = set()
    model.load_state_dict(before)  # it resumes from the step before
    assert ids_of(rows_of(engine_on(tmp_path, model, servers[0]))) == expected


@pytest.mark.slow
def test_a_slow_answer_is_given_up_and_ended(
    tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    engine = engine_on(tmp_path, model, *servers, vllm_server_timeout=2.0)
    rows_of(engine)
    servers[0].slow = 4.0
    assert ids_of(rows_of(engine)) == expected
    assert servers[0].aborted
    assert all(name.startswith("generate-tokens-7-0-") for name in servers[0].aborted)


def edited(**changes: Any) -> Spoil:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "choices": [{**answer["choices"][0], **changes}]}

    return spoil


def doubled_tokens(answer: dict[str, Any]) -> dict[str, Any]:
    choice = copy.deepcopy(answer["choices"][0])
    choice["token_ids"] *= 2
    choice["logprobs"]["content"] *= 2
    choice["weight_versions"][0]["end"] *= 2
    return {**answer, "choices": [choice]}


def split(answer: dict[str, Any]) -> dict[str, Any]:
    (span,) = answer["choices"][0]["weight_versions"]
    end, version = span["end"], span["version"]
    spans = [{"version": "old", "start": 0, "end": 1}, {"version": version, "start": 1, "end": end}]
    return edited(weight_versions=spans)(answer)


SPOILT: dict[str, Spoil] = {
    "two choices": lambda answer: {**answer, "choices": answer["choices"] * 2},
    "two completions in one": doubled_tokens,
    "another request's": lambda answer: {**answer, "request_id": "generate-tokens-other"},
    "other weights": edited(weight_versions=[{"version": "0-old", "start": 0, "end": 8}]),
    "partly other weights": split,
    "no word of its weights": edited(weight_versions=None),
    "cut off": edited(token_ids=[5, 6], weight_versions=None),
    "aborted": edited(finish_reason="abort"),
    "no log-probs": edited(logprobs=None),
    "log-probs that are no numbers": edited(logprobs={"content": [{"logprob": float("nan")}] * 8}),
    "log-probs that no float holds": edited(logprobs={"content": [{"logprob": 10**400}] * 8}),
    "tokens that no integer holds": edited(token_ids=[float("inf")] * 8),
    "tokens of no vocabulary": edited(token_ids=[10**6] * 8, logprobs={"content": [{"logprob": -1.0}] * 8}),
    "nothing": lambda _: {},
}


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_an_answer_that_is_not_the_completion_is_refused(
    spoil: Spoil, tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    servers[0].spoil = spoil
    assert ids_of(rows_of(engine_on(tmp_path, model, *servers))) == expected
    assert servers[0].drawn > 0
    alone = engine_on(tmp_path / "alone", model, servers[0], vllm_server_fallback=False)
    with pytest.raises(MemsafeError, match="gave an answer that is refused"):
        rows_of(alone)


def test_a_server_that_tells_log_probs_before_the_temperature_is_refused(
    tmp_path: Path, model: Any, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does unless it is told otherwise: three of four rows were dropped at a temperature of 0.6."""
    drawn = fake_server.draw

    def raw(model: Any, body: dict[str, Any], version: str) -> dict[str, Any]:
        answer = drawn(model, body, version)
        ids = torch.tensor([*body["token_ids"], *answer["choices"][0]["token_ids"]])
        rows_LV = model(ids[None]).logits[0].detach().log_softmax(-1)
        for place, entry in enumerate(answer["choices"][0]["logprobs"]["content"], len(body["token_ids"])):
            entry["logprob"] = float(rows_LV[place - 1, ids[place]])
        return answer

    rows_of(engine_on(tmp_path / "processed", model, servers[0], temperature=0.6))
    monkeypatch.setattr(fake_server, "draw", raw)
    rows_of(engine_on(tmp_path / "alike", model, servers[0], temperature=1.0))
    with pytest.raises(MemsafeError, match=r"before the temperature.*--logprobs-mode processed_logprobs"):
        rows_of(engine_on(tmp_path / "raw", model, servers[0], temperature=0.6))


@pytest.mark.slow
def test_what_was_answered_is_kept_when_the_own_engine_runs_out_of_memory(
    tmp_path: Path, model: Any, servers: list[FakeServer], expected: list[list[int]]
) -> None:
    engine = engine_on(tmp_path, model, servers[0])
    rows_of(engine)
    servers[0].dies_after = servers[0].drawn + 5
    failures = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")]
    model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: raising(failures) if servers[0].drawn >= 17 else None
    )
    tries = []

    def attempt(unit: Any, undo: Any = None) -> Any:
        while True:
            try:
                tries.append(servers[0].drawn)
                return unit(RolloutPlan(rows_in_flight=4))
            except torch.OutOfMemoryError:
                servers[0].stop()

    rows = engine.generate(prompts_of(5, 9, 7), keys_of(PROMPTS, GROUP), settings_of(8), attempt)
    assert len(tries) == 2
    assert sum(ids == other for ids, other in zip(ids_of(rows), expected, strict=True)) >= 5
    assert own_logprobs(model, rows) < 1e-4


def raising(failures: list[torch.OutOfMemoryError]) -> None:
    if failures:
        raise failures.pop()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_on_a_server_trains_and_logs_the_mismatch(
    adapted: bool, tmp_path: Path, servers: list[FakeServer]
) -> None:
    trainer = make_trainer(
        tmp_path,
        model=small_model(tied=False),
        max_steps=3,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=servers[0].url,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if adapted else None,
    )
    trainer.train()
    assert trainer.setup.engine.name == "vllm_server"
    assert servers[0].asked.count("/collective_rpc") == 3
    assert servers[0].drawn == 24
    gaps = [record["sampling/sampling_logp_difference/max"] for record in trainer.history]
    assert max(gaps) < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_server_base_url": "localhost:8000"}, r"has the address 'localhost:8000'. Write http://"),
        ({"vllm_server_base_url": "http://me:pass@host:1"}, KEY_VARIABLE),
        ({"vllm_server_port": 70000}, "vllm_server_port is 70000"),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout is 0"),
        ({"vllm_mode": "servre"}, "vllm_mode is 'servre'"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode is True with vllm_mode 'server'"),
        ({"verify_plan": True}, "verify_plan is True with use_vllm"),
    ],
)
def test_settings_of_servers_are_checked_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        GRPOConfig(**{"use_vllm": True, "vllm_mode": "server", **settings})
    assert "pass@" not in str(caught.value)


def test_addresses_are_read_from_trls_fields() -> None:
    one = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_host="10.0.0.2", vllm_server_port=8001)
    assert one.vllm_servers == ("http://10.0.0.2:8001",)
    two = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://a:1/, http://b:2")
    assert two.vllm_servers == ("http://a:1", "http://b:2")


def test_a_folder_for_weights_keeps_what_the_run_did_not_write(tmp_path: Path, model: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "2024-data").mkdir()
    first, _ = written(model, tmp_path, 1)
    second, label = written(model, tmp_path, 2)
    assert is_whole(second, label)
    assert not first.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([label, "2024-data", "notes.txt"])
