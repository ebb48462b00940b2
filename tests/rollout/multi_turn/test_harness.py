"""Agents that keep their own conversation draw their turns over HTTP: same tokens as an environment's, each once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch

from memsafe_rl import AgentClient, AgentHarness
from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.rollout.multi_turn.chat import as_template, shared_messages
from memsafe_rl.rollout.multi_turn.endpoint import ChatRequest, Mailbox, RefusedError, read_request
from memsafe_rl.rollout.multi_turn.harness import AgentEpisode
from memsafe_rl.rollout.multi_turn.lockstep import Beginning, play
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Step
from memsafe_rl.types import SequenceKey
from tests.rollout.multi_turn.helpers import beginning, chat_tokenizer, says, script, table
from tests.trainers.helpers import weights
from tests.trainers.test_episodes import trainer_of

TURNS = 3


NESTED = b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]}'
TOOLS = b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "parameters": %s}]}'


def paid(said: list[str]) -> float:
    text = "".join(said)
    return sum(character.isdigit() for character in text) / 4 + len(text) / 50


class Counting(Environment):
    """What `count_through` plays, as an environment."""

    def reset(self, example: Any) -> Any:
        self.said: list[str] = []
        return f" {example['number']}"

    def step(self, action: Any) -> Step:
        self.said.append(action.text)
        return Step(f"turn {len(self.said)}", done=len(self.said) >= TURNS)

    def reward(self) -> float:
        return paid(self.said)


def requested(text: str) -> ChatRequest:
    return read_request({"messages": [{"role": "user", "content": text}]})


def chat(client: AgentClient, messages: list[Any], **more: Any) -> Any:
    """One turn, by plain HTTP."""
    answer = requests.post(
        f"{client.base_url}/chat/completions",
        json={"model": client.model, "messages": messages, **more},
        headers={"Authorization": f"Bearer {client.api_key}"},
        timeout=60,
    )
    answer.raise_for_status()
    return answer.json()


def opening(example: Mapping[str, Any]) -> list[Any]:
    return [{"role": "user", "content": f"{example['prompt'][0]['content']} {example['number']}"}]


def count_through(example: Mapping[str, Any], client: AgentClient, turn: Any = None) -> float:
    """Plays by plain HTTP, or by whatever gives the text of a turn and whether it was cut."""

    def by_http(messages: list[Any]) -> tuple[str, bool]:
        choice = chat(client, messages)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"] == "length"

    messages, said = opening(example), list[str]()
    for number in range(TURNS):
        text, cut = (turn or by_http)(messages)
        if cut:  # the episode is over, and environments never see such a turn
            break
        said.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {number + 1}"}]
    return paid(said)


def by_openai(example: Mapping[str, Any], client: AgentClient) -> float:
    api = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)

    def turn(messages: list[Any]) -> tuple[str, bool]:
        choice = api.chat.completions.create(model="policy", messages=messages, temperature=0.3).choices[0]
        return choice.message.content or "", choice.finish_reason == "length"

    return count_through(example, client, turn)


async def by_async_openai(example: Mapping[str, Any], client: AgentClient) -> float:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:
        messages, said = opening(example), list[str]()
        for number in range(TURNS):
            stream = await api.chat.completions.create(model="policy", messages=messages, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            if chunks[-1].finish_reason == "length":
                break
            said.append("".join(chunk.delta.content or "" for chunk in chunks))
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": f"turn {number + 1}"}]
        return paid(said)


class Unreliable:
    """Calls of which a part fails before or behind the model, comes late, or comes twice at once."""

    def __init__(self) -> None:
        self.calls = self.broken = 0
        self._lock = threading.Lock()

    def __call__(self, client: AgentClient, messages: list[Any]) -> tuple[str, bool]:
        choice = self.ask(client, messages)
        return choice["message"]["content"], choice["finish_reason"] == "length"

    def ask(self, client: AgentClient, messages: list[Any]) -> Any:
        with self._lock:
            self.calls += 1
            kind = self.calls % 10
            self.broken += kind < 4
        if kind == 0:  # the answer is lost: the agent hangs up and asks again
            with suppress(requests.exceptions.ReadTimeout):
                return self._post(client, messages, timeout=(60.0, 0.002)).json()["choices"][0]
        if kind == 1:
            time.sleep(0.05)
        if kind == 2:  # another request with it, which nobody reads
            twice = partial(self._post, client, messages, **{"Idempotency-Key": f"call {self.calls}"})
            threading.Thread(target=twice, daemon=True).start()
            return twice().json()["choices"][0]
        answer = self._post(client, messages)
        if kind == 3:  # asked again, as clients do that lost the answer
            again = self._post(client, messages, **{"x-stainless-retry-count": "1"})
            assert again.json()["choices"][0]["token_ids"] == answer.json()["choices"][0]["token_ids"]
        return answer.json()["choices"][0]

    @staticmethod
    def _post(client: AgentClient, messages: list[Any], timeout: Any = 60.0, **headers: str) -> Any:
        url, key = f"{client.base_url}/chat/completions", {"Authorization": f"Bearer {client.api_key}"}
        return requests.post(url, json={"messages": messages}, headers=key | headers, timeout=timeout)


@pytest.fixture
def harness() -> Iterator[Callable[..., AgentHarness]]:
    made: list[AgentHarness] = []

    def make(agent: Any, **settings: Any) -> AgentHarness:
        made.append(AgentHarness(agent, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, list[float]]:
    trainer = trainer_of(tmp_path_factory.mktemp("plain"), environment_factory=Counting)
    trainer.train()
    return weights(trainer), [record["reward"] for record in trainer.history]


@pytest.mark.slow
@pytest.mark.parametrize("agent", [count_through, by_openai, by_async_openai])
def test_an_agent_over_http_learns_what_an_environment_learns(
    agent: Any, expected: Any, harness: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, environment_factory=harness(agent))
    trainer.train()
    assert [record["reward"] for record in trainer.history] == expected[1]
    assert torch.equal(weights(trainer), expected[0])


@pytest.mark.slow
def test_lost_late_and_doubled_calls_change_nothing(expected: Any, harness: Any, tmp_path: Path) -> None:
    call = Unreliable()

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        return count_through(example, client, partial(call, client))

    trainer = trainer_of(tmp_path, environment_factory=harness(agent))
    trainer.train()
    assert call.calls >= 20
    assert call.broken >= 8
    assert torch.equal(weights(trainer), expected[0])


@pytest.mark.slow
def test_turns_come_with_the_ids_and_logprobs_that_are_trained_on(harness: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        answer = chat(client, opening(example), logprobs=True)
        seen.append(answer)
        return float(len(answer["choices"][0]["token_ids"]))

    trainer = trainer_of(tmp_path, environment_factory=harness(agent), max_steps=1, max_turn_length=8)
    trainer.train()
    for answer in seen:
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            told = choice["logprobs"]["content"]
            assert [f"token_id:{one}" for one in choice["token_ids"]] == [each["token"] for each in told]
            assert all(each["logprob"] <= 0 for each in told)
            assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"]) > 0
    assert any(answer["choices"][0]["token_ids"] for answer in seen)


@pytest.mark.slow
def test_an_agent_that_rewrites_its_conversation_trains_on_every_turn(harness: Any, tmp_path: Path) -> None:
    def forgetful(example: Mapping[str, Any], client: AgentClient) -> float:
        said = [
            chat(client, [{"role": "user", "content": f"{example['number']} part {part}"}])["choices"][0]
            for part in range(2)
        ]
        return float(sum(len(one["message"]["content"]) for one in said))

    trainer = trainer_of(tmp_path, environment_factory=harness(forgetful), max_steps=1)
    trainer.train()
    assert trainer.history[-1]["episodes/mean_turns"] > 1
    assert trainer.history[-1]["episodes/sequences"] == trainer.history[-1]["episodes/mean_turns"]


@pytest.mark.slow
def test_an_agent_may_draw_twice_behind_one_conversation(harness: Any, tmp_path: Path) -> None:
    pairs: list[Any] = []

    def best_of_two(example: Mapping[str, Any], client: AgentClient) -> float:
        drawn = [chat(client, opening(example))["choices"][0] for _ in range(2)]
        pairs.append([one["token_ids"] for one in drawn])
        return max(paid([one["message"]["content"]]) for one in drawn)

    trainer = trainer_of(
        tmp_path, environment_factory=harness(best_of_two), max_turn_length=40, max_completion_length=80, max_steps=1
    )
    trainer.train()
    assert len(pairs) >= 4
    assert all(first != second for first, second in pairs)
    assert trainer.history[-1]["episodes/sequences"] > 1.5


@pytest.mark.slow
def test_openais_client_draws_several_turns_behind_one_conversation_at_once(harness: Any, tmp_path: Path) -> None:
    drawn: list[set[tuple[int, ...]]] = []

    async def best_of_three(example: Mapping[str, Any], client: AgentClient) -> float:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:
            calls = [api.chat.completions.create(model="policy", messages=opening(example)) for _ in range(3)]
            answers = await asyncio.gather(*calls)
        drawn.append({tuple((answer.choices[0].model_extra or {})["token_ids"]) for answer in answers})
        return float(len(drawn[-1]))

    trainer = trainer_of(
        tmp_path, environment_factory=harness(best_of_three), max_turn_length=60, max_completion_length=60, max_steps=1
    )
    trainer.train()
    assert drawn
    assert all(len(turns) == 3 for turns in drawn)


@pytest.mark.slow
def test_a_cut_turn_is_told_as_cut_and_the_agent_is_told_when_the_episode_is_over(harness: Any, tmp_path: Path) -> None:
    reasons, refusals = list[str](), list[Any]()

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        messages = opening(example)
        try:
            while True:
                choice = chat(client, messages)["choices"][0]
                reasons.append(choice["finish_reason"])
                messages += [choice["message"], {"role": "user", "content": "more"}]
        except requests.HTTPError as error:
            refusals.append(error.response.json()["error"])
        return 1.0

    trainer = trainer_of(tmp_path, environment_factory=harness(agent), max_steps=1, max_episode_turns=2)
    trainer.train()
    assert len(refusals) == 8  # every episode of the step
    assert {refusal["code"] for refusal in refusals} == {"episode_over"}
    assert set(reasons) <= {"stop", "length"}
    assert trainer.history[-1]["reward"] == 1.0


@pytest.mark.slow
def test_a_failing_agent_has_no_reward_and_one_that_asks_for_nothing_is_refused(
    harness: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    played = []

    def breaks(example: Mapping[str, Any], client: AgentClient) -> float:
        content = chat(client, opening(example))["choices"][0]["message"]["content"]
        played.append(content)
        if len(played) % 4 == 0:
            raise KeyError("missing")
        return float(len(content))

    trainer = trainer_of(tmp_path / "a", environment_factory=harness(breaks), max_steps=1)
    trainer.train()
    assert "an agent failed" in caplog.text
    with pytest.raises(DataError, match="before it asked the model for anything"):
        trainer_of(tmp_path / "b", environment_factory=harness(lambda *_: 1.0)).train()


@pytest.mark.slow
def test_agents_are_let_go_where_an_error_ends_the_run(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[str] = []

    def broken(*_: Any) -> Step:
        raise RuntimeError("the engine broke")

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        with suppress(requests.RequestException):
            while True:
                try:
                    chat(client, opening(example))
                except requests.HTTPError as error:
                    codes.append(error.response.json()["error"]["code"])
                    raise
        return 0.0

    trainer = trainer_of(tmp_path, environment_factory=harness(agent), max_steps=1)
    monkeypatch.setattr(AgentEpisode, "step", broken)
    with pytest.raises(RuntimeError, match="the engine broke"):
        trainer.train()
    until = time.monotonic() + 10
    while len(codes) < 8 and time.monotonic() < until:
        time.sleep(0.02)
    assert codes == ["episode_over"] * 8


@pytest.mark.slow
def test_an_agent_that_falls_silent_does_not_hold_up_the_run(harness: Any, tmp_path: Path) -> None:
    wake = threading.Event()

    def silent(example: Mapping[str, Any], client: AgentClient) -> float:
        chat(client, opening(example))
        wake.wait(60)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memsafe_rl.rollout.multi_turn.harness._FAREWELL_SECONDS", 0.2)
        trainer = trainer_of(tmp_path, environment_factory=harness(silent, timeout_seconds=0.5), max_steps=1)
        with suppress(DataError, ConfigError):  # there is no reward at all
            trainer.train()
    wake.set()


@pytest.mark.slow
def test_an_agent_that_returns_too_late_is_not_paid(harness: Any, caplog: Any) -> None:
    wake = threading.Event()

    def late(example: Mapping[str, Any], client: AgentClient) -> float:
        chat(client, opening(example))
        wake.wait(30)
        return 5.0

    place, tokenizer = harness(late, timeout_seconds=0.3), chat_tokenizer()
    asked = [{"role": "user", "content": "q"}]
    start = Beginning(SequenceKey(0, 0, 0, 0), {"prompt": asked, "number": 0}, asked, place())
    (episode,) = play([start], table(tokenizer, says(tokenizer, {})))
    wake.set()
    assert episode.environment.reward() is None
    assert "TimeoutError('no request for 0.3 seconds')" in caplog.text
    assert place._failures == 1


def test_an_agent_that_fails_before_its_first_request_has_no_reward(harness: Any, caplog: Any) -> None:
    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        if example["number"] == 0:
            raise OSError("no sandbox")
        chat(client, opening(example))
        return 1.0

    place = harness(agent)
    tokenizer = chat_tokenizer()
    asked = [{"role": "user", "content": "q"}]
    starts = [
        Beginning(SequenceKey(0, 0, number, 0), {"prompt": asked, "number": number}, asked, place())
        for number in range(2)
    ]
    episodes = play(starts, table(tokenizer, says(tokenizer, {})))
    assert [one.turns for one in episodes] == [0, 1]
    assert [one.environment.reward() for one in episodes] == [None, 1.0]
    assert not episodes[0].segments[0].mask.any()
    assert "no sandbox" in caplog.text


@pytest.mark.slow
def test_a_run_ends_where_no_agent_returns_any_more(harness: Any, tmp_path: Path) -> None:
    def breaks(*_: Any) -> float:
        raise OSError("no sandbox")

    with pytest.raises(MemsafeError, match=r"\d+ agents in a row failed, the last with OSError\('no sandbox'\)"):
        trainer_of(tmp_path, environment_factory=harness(breaks), max_steps=40).train()


@pytest.mark.slow
def test_what_an_agent_writes_into_its_row_stays_its_own(harness: Any) -> None:
    sizes: list[int] = []

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        sizes.append(len(example["prompt"]))
        example["prompt"].append({"role": "user", "content": "go"})
        chat(client, example["prompt"])
        return 1.0

    place, row, tokenizer = harness(agent), {"prompt": [{"role": "user", "content": "q"}]}, chat_tokenizer()
    starts = [Beginning(SequenceKey(0, 0, 0, sample), row, row["prompt"], place()) for sample in range(3)]
    play(starts, table(tokenizer, says(tokenizer, {})))
    assert sizes == [1, 1, 1]
    assert len(row["prompt"]) == 1


@pytest.mark.slow
def test_tools_that_come_later_are_told_to_the_model(harness: Any) -> None:
    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        answer = chat(client, messages := [{"role": "user", "content": "plan"}])["choices"][0]["message"]
        later = [*messages, answer, {"role": "user", "content": "act"}]
        prompts.append(chat(client, later, tools=[{"type": "function", "function": {"name": "dig"}}]))
        return 1.0

    prompts: list[Any] = []
    tokenizer = chat_tokenizer()
    (episode,) = play([beginning(harness(agent)())], table(tokenizer, says(tokenizer, {})))
    assert tokenizer.decode(prompts[0]["prompt_token_ids"]) == (
        "tools: dig<eos>\nuser: plan<eos>\nassistant: ok<eos>\nuser: act<eos>\nassistant: "
    )
    assert [int(one.mask.sum()) for one in episode.segments] == [3, 3]


def test_calls_that_are_not_answered_any_more_reach_the_agent(harness: Any) -> None:
    choices: list[Any] = []

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        dig = {"type": "function", "function": {"name": "dig"}}
        choices.append(chat(client, [{"role": "user", "content": "act"}], tools=[dig])["choices"][0])
        return 1.0

    tokenizer, start = chat_tokenizer(), beginning(harness(agent)())
    said = script(start.key, '<tool_call>{"name": "dig", "arguments": {"deep": 2}}</tool_call>')
    play([start], table(tokenizer, says(tokenizer, said), tool_rounds=0))
    assert start.environment.reward() == 1.0
    assert choices[0]["message"]["tool_calls"][0]["function"] == {"name": "dig", "arguments": '{"deep": 2}'}


def test_what_is_asked_of_the_sampler_and_not_used_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    harness = AgentHarness(count_through)
    for _ in range(2):
        harness.server.note_sampling({"response_format": {"type": "json_object"}, "top_p": 0.5, "seed": None})
    harness.close()
    assert caplog.text.count("an agent sets top_p, response_format:") == 1


def test_requests_with_keys_of_their_own_are_not_each_others_repetition() -> None:
    box = Mailbox()
    plain, other, first, second = map(requested, "xxxx")
    assert box.put(first, key="1") is first
    assert box.put(second, key="2") is second
    assert box.put(other, key="2") is second
    assert box.put(plain) is first


def test_a_turn_that_was_lost_is_given_again_though_another_was_drawn_meanwhile() -> None:
    box, (lost, other, again, new) = Mailbox(), (requested(text) for text in "abaa")
    for request in (lost, other):
        box.put(request)
        assert box.take(threading.Event(), 1.0) is request
        request.answer(Action("x"))
    other.answers += 1
    assert box.put(again) is lost
    lost.answers += 1
    assert box.put(new) is new


def test_nobody_waits_for_an_agent_whose_episode_is_left(harness: Any) -> None:
    wake = threading.Event()

    def agent(example: Mapping[str, Any], client: AgentClient) -> float:
        wake.wait(30)
        return 1.0

    place = harness(agent)()
    waiting = threading.Thread(target=lambda: place.reset({}), daemon=True)  # as a rollout that Ctrl-C ends
    waiting.start()
    while place._play is None:
        time.sleep(0.01)
    place.close()
    waiting.join(10)
    wake.set()
    assert not waiting.is_alive()


def test_whoever_waits_for_a_turn_hears_of_the_end_of_the_endpoint() -> None:
    harness = AgentHarness(count_through)
    _, box = harness.server.open()
    taken, waiting = (box.put(requested(text)) for text in "ab")
    assert box.take(threading.Event(), 1.0) is taken
    harness.close()
    for request in (taken, waiting):
        assert request.answered.is_set()
        assert request.refused is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "key", "body", "status"),
    [
        ("", "wrong", b"{}", 401),
        ("", "", b"{}", 401),
        ("/nothing", None, b"{}", 404),
        ("", None, b"not json", 400),
        ("", None, b"[]", 400),
        ("", None, b'{"messages": []}', 400),
        ("", None, b'{"messages": [{"content": "no role"}]}', 400),
        ("", None, b'{"messages": [{"role": "user", "content": "x"}], "n": 3}', 400),
        ("", None, b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', 400),
        ("", None, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        ("", None, b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', 400),
        ("", None, b'{"messages": [{"role": "assistant", "tool_calls": ["add"]}]}', 400),
        ("", None, b'{"messages": [{"role": "tool", "content": "x", "tool_call_id": ["c"]}]}', 400),
        ("", None, NESTED % (b"[" * 300 + b"]" * 300), 400),
        ("", None, NESTED % (b'"' + b"[" * 900 + b"]" * 900 + b'"'), 400),
        ("", None, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
        ("", None, b'{"messages": [{"role": "user", "content": "x"}], "tools": 5}', 400),
        ("", None, b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": 5}]}', 400),
        ("", None, b'{"messages": [{"role": "user", "content": "x"}], "tools": {"name": "add"}}', 400),
        ("", None, TOOLS % (b"[" * 300 + b"]" * 300), 400),
    ],
)
def test_bad_requests_are_refused_as_openai_does(path: str, key: str | None, body: bytes, status: int) -> None:
    harness = AgentHarness(count_through)
    url, _ = harness.server.open()
    token = harness.server.token if key is None else key
    answer = requests.post(
        f"{url}/chat/completions{path}", data=body, headers={"Authorization": f"Bearer {token}"}, timeout=10
    )
    harness.close()
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_other_machines_are_kept_out_unless_told_and_bad_arguments_are_refused() -> None:
    for host in ("0.0.0.0", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigError, match="remote=True"):
            AgentHarness(count_through, host=host)
    for place in ({"host": "::1"}, {"port": 70_000}):
        with pytest.raises(ConfigError, match="cannot listen at"):
            AgentHarness(count_through, **place)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="agent is 3"):
        AgentHarness(3)  # type: ignore[arg-type]
    for seconds in (0, "x"):
        with pytest.raises(ConfigError, match=f"timeout_seconds is {seconds!r}"):
            AgentHarness(count_through, timeout_seconds=seconds)  # type: ignore[arg-type]


def test_openais_messages_become_those_of_templates() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    own = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    assert as_template(sent) == as_template(own)
    assert shared_messages(own[:2], list(as_template(sent))) == 2
    assert shared_messages([{"role": "user", "content": "2+2"}], list(as_template(sent))) == 0
    with pytest.raises(RefusedError):
        read_request(json.loads('{"messages": "text"}'))
    assert asyncio.iscoroutinefunction(by_async_openai)
