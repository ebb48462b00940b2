"""Episodes by hand, with scripted draws: turn order, ids, masks, limits; then with networks, together and alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rewards.calls import TimeoutPolicy
from memsafe_rl.rollout.multi_turn.episode import Ending, Episode, EpisodeLimits, turn_key
from memsafe_rl.rollout.multi_turn.lockstep import begin, opened, play
from memsafe_rl.rollout.multi_turn.protocol import Environment, Step
from memsafe_rl.rollout.multi_turn.tools import MethodEnvironment, ToolEnvironment, methods_of
from memsafe_rl.rollout.multi_turn.users import CallableUser, ModelUser, UserTimeoutError
from memsafe_rl.types import Completion, RolloutPlan, SequenceKey
from tests.rollout.fake_adapter import FakeAdapter
from tests.rollout.multi_turn.helpers import (
    FORGETFUL,
    AsyncEcho,
    Echo,
    ThreadedEcho,
    beginning,
    chat_tokenizer,
    sampler,
    says,
    script,
    table,
)
from tests.tiny import tiny_model, tiny_tokenizer

KEY = SequenceKey(0, 0, 0, 0)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Adds, after a while.

    Args:
        a: one number.
        b: another.
    """
    await asyncio.sleep(0)
    return a + b


def test_one_sequence_holds_an_episode_whose_prompts_extend_each_other() -> None:
    tokenizer, environment = chat_tokenizer(), Echo(steps=2)
    agent = says(tokenizer, script(KEY, "left", "right"))
    (episode,) = play([beginning(environment, task=5)], table(tokenizer, agent))
    (segment,) = episode.segments
    assert tokenizer.decode(segment.condition) == "user: q0 [5]<eos>\nassistant: "
    told = "\nuser: 1: le<eos>\nassistant: "
    assert tokenizer.decode(segment.completion.ids) == f"left<eos>{told}right<eos>"
    own = "1" * 5 + "0" * len(tokenizer(told)["input_ids"]) + "1" * 6
    assert "".join(map(str, segment.mask.tolist())) == own
    # the log-probs of the draws stand where they were drawn
    drawn = segment.completion.logprobs[segment.mask.bool()]
    assert drawn.tolist() == [-1, -2, -3, -4, -5, -1, -2, -3, -4, -5, -6]
    assert segment.completion.logprobs[~segment.mask.bool()].eq(0).all()
    assert (episode.ending, episode.segments[-1].completion.finished, episode.turns) == (Ending.DONE, True, 2)
    assert [message["content"] for message in episode.messages] == ["left", "1: le", "right", "2: ri"]
    assert [message["content"] for message in episode.prompt] == ["q0 [5]"]
    assert environment.heard == [*episode.prompt, *episode.messages]


def test_a_template_that_forgets_gives_one_sequence_a_turn() -> None:
    tokenizer = chat_tokenizer(FORGETFUL)
    agent = says(tokenizer, script(KEY, "left", "right", "up"))
    (episode,) = play([beginning(Echo(steps=3))], table(tokenizer, agent))
    texts = [(tokenizer.decode(s.condition), tokenizer.decode(s.completion.ids)) for s in episode.segments]
    first = "user: q0<eos>\nassistant: "
    second = "user: q0<eos>\nassistant: ...<eos>\nuser: 1: le<eos>\nassistant: "
    third = second + "...<eos>\nuser: 2: ri<eos>\nassistant: "
    assert texts == [(first, "left<eos>"), (second, "right<eos>"), (third, "up<eos>")]
    assert all(segment.mask.all() for segment in episode.segments)
    assert [segment.completion.finished for segment in episode.segments] == [True] * 3


def test_a_token_that_an_engine_masks_counts_in_no_episode() -> None:
    tokenizer = chat_tokenizer()
    draw = says(tokenizer, {})

    def agent(*asked: Any) -> list[Completion]:
        return [replace(one, mask=(one.logprobs != -2).to(torch.uint8)) for one in draw(*asked)]

    (episode,) = play([beginning(Echo(steps=1))], table(tokenizer, agent))
    assert episode.segments[0].mask.tolist() == [1, 0, 1]


def test_equal_prompts_are_read_once_and_a_half_turn_is_one_call() -> None:
    tokenizer = chat_tokenizer()
    agent: Any = says(tokenizer, {})
    play([beginning(Echo(), prompt=p, sample=s) for p in range(2) for s in range(3)], table(tokenizer, agent))
    assert [len(call) for call in agent.calls] == [2, 2]  # all six still agree in the second turn


@pytest.mark.parametrize("tool", [add, slow_add])
def test_tools_are_called_until_none_is_named(tool: Any) -> None:
    tokenizer, call = chat_tokenizer(), CALL.replace("add", tool.__name__)
    agent = says(tokenizer, script(KEY, "so " + call, "five"))
    (episode,) = play([beginning(ToolEnvironment([tool]))], table(tokenizer, agent))
    assert episode.messages[1] == {"role": "tool", "name": tool.__name__, "content": "5"}
    assert (episode.ending, episode.turns, episode.tool_calls, episode.tool_failures) == (Ending.DONE, 2, 1, 0)
    text = tokenizer.decode(episode.segments[0].completion.ids)
    assert text == f"so {call}<eos>\ntool: 5<eos>\nassistant: five<eos>"
    assert tokenizer.decode(episode.segments[0].condition).startswith(f"tools: {tool.__name__}<eos>")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('{"name": "sub", "arguments": {}}', "Unknown tool 'sub'; there are add."),
        ('{"name": "add", "arguments": {"a": 1}}', "missing 1 required positional argument"),
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', "unsupported operand"),
    ],
)
def test_what_a_tool_raises_is_its_result(call: str, told: str) -> None:
    tokenizer = chat_tokenizer()
    agent = says(tokenizer, script(KEY, f"<tool_call>{call}</tool_call>"))
    (episode,) = play([beginning(ToolEnvironment([add]))], table(tokenizer, agent))
    assert told in episode.messages[1]["content"]
    assert "error" in episode.messages[1]["content"]
    assert (episode.tool_calls, episode.tool_failures) == (1, 1)


def test_memory_that_runs_out_in_a_tool_is_no_answer() -> None:
    def hungry() -> str:
        """Eats."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    tokenizer = chat_tokenizer()
    agent = says(tokenizer, script(KEY, '<tool_call>{"name": "hungry"}</tool_call>'))
    with pytest.raises(torch.OutOfMemoryError):
        play([beginning(ToolEnvironment([hungry]))], table(tokenizer, agent))


class Bookings:
    """An environment in TRL's form."""

    def reset(self, guest: str, **_: Any) -> str:
        self.guest, self.asked = guest, 0
        return f" for {guest}"

    def find(self, day: int) -> str:
        """Finds a booking.

        Args:
            day: of the month.
        """
        self.asked += 1
        return f"{self.guest}: day {day}"

    def get_reward(self) -> float:
        return float(self.asked)

    def _hidden(self) -> None: ...


def test_an_environment_in_trls_form_has_its_methods_as_tools() -> None:
    tokenizer, environment = chat_tokenizer(), MethodEnvironment(Bookings())
    call = '<tool_call>{"name": "find", "arguments": {"day": 3}}</tool_call>'
    agent = says(tokenizer, script(KEY, call))
    (episode,) = play([beginning(environment, guest="Ada")], table(tokenizer, agent))
    assert episode.prompt[-1]["content"] == "q0 for Ada"
    assert episode.messages[1]["content"] == "Ada: day 3"
    assert (environment.reward(), environment.name) == (1.0, "Bookings")
    assert [tool.__name__ for tool in environment.tools] == ["find"]  # type: ignore[union-attr]


def test_tools_and_environments_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="Two tools are called 'add'"):
        ToolEnvironment([add, add])
    with pytest.raises(ConfigError, match="has no method `reset`"):
        MethodEnvironment(object())
    with pytest.raises(ConfigError, match="gave the class Bookings"):
        MethodEnvironment(Bookings)
    for tools in ("add", 5, {"add": add}):
        with pytest.raises(ConfigError, match="Give a list of functions"):
            ToolEnvironment(tools)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be called"):
        ToolEnvironment(["add"])  # type: ignore[list-item]
    with pytest.raises(DataError, match="done='no', a text"):
        Step(done="no")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="failures='a'"):
        Step(failures="a")  # type: ignore[arg-type]
    assert Step(reward=np.float32(0.5)).reward == 0.5


def test_static_and_inherited_methods_are_tools_and_class_methods_are_not() -> None:
    class More(Bookings):
        @staticmethod
        def hours() -> str:
            """Says when it is open."""
            return "always"

        @classmethod
        def kind(cls) -> str:
            """Says what it is."""
            return cls.__name__

    assert [tool.__name__ for tool in methods_of(More())] == ["find", "hours"]


def test_a_result_that_is_no_text_is_a_failure() -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise self

    def mute() -> Any:
        """Says nothing."""
        return Mute()

    def halves() -> str:
        """Says half a pair."""
        return "\ud83d!"

    tokenizer = chat_tokenizer()
    agent = says(
        tokenizer, script(KEY, '<tool_call>{"name": "mute"}</tool_call>\n<tool_call>{"name": "halves"}</tool_call>')
    )
    (episode,) = play([beginning(ToolEnvironment([mute, halves]))], table(tokenizer, agent))
    assert [message["content"] for message in episode.messages[1:3]] == ["{'error': 'Mute'}", "?!"]
    assert (episode.tool_calls, episode.tool_failures) == (2, 1)


def test_a_tool_whose_own_task_was_cancelled_has_failed() -> None:
    async def waits() -> str:
        """Waits for what is given up."""
        task = asyncio.ensure_future(asyncio.sleep(5))
        task.cancel()
        await task
        return "never"

    tokenizer = chat_tokenizer()
    agent = says(tokenizer, script(KEY, '<tool_call>{"name": "waits"}</tool_call>'))
    (episode,) = play([beginning(ToolEnvironment([waits]))], table(tokenizer, agent))
    assert [message["content"] for message in episode.messages[1:2]] == ["{'error': ''}"]
    assert (episode.tool_calls, episode.tool_failures) == (1, 1)


def test_a_tool_that_exits_has_failed_and_data_of_a_kind_is_shown_as_text() -> None:
    async def waits() -> str:
        """Awaits what exits."""
        raise SystemExit("late")

    def leaves() -> str:
        """Exits."""
        raise SystemExit("bye")

    def lists() -> Any:
        """Lists rooms."""
        return [{"type": "suite", "price": 120}]

    tokenizer = chat_tokenizer()
    for tool, told in ((waits, "{'error': 'late'}"), (leaves, "{'error': 'bye'}"), (lists, str(lists()))):
        agent = says(tokenizer, script(KEY, f'<tool_call>{{"name": "{tool.__name__}"}}</tool_call>'))
        (episode,) = play([beginning(ToolEnvironment([tool]))], table(tokenizer, agent))
        assert episode.messages[1]["content"] == told
        assert (episode.tool_calls, episode.tool_failures) == (1, int("error" in told))


# ------------------------------------------------------------------ users


def test_the_user_sees_roles_turned_round_and_nothing_of_tools() -> None:
    tokenizer, seen = chat_tokenizer(), []

    def reply(messages: list[Any]) -> str | None:
        seen.append(messages)
        return None if len(seen) == 2 else "really?"

    environment = ToolEnvironment([add], user=CallableUser(reply))
    agent = says(tokenizer, script(KEY, "wait " + CALL, "five", "yes"))
    (episode,) = play([beginning(environment)], table(tokenizer, agent))
    said = [(message["role"], message["content"]) for message in seen[1]]
    assert said == [
        ("assistant", "q0"),
        ("user", "wait"),
        ("user", "five"),
        ("assistant", "really?"),
        ("user", "yes"),
    ]
    assert seen[0] == seen[1][:3]
    assert (episode.ending, episode.turns) == (Ending.DONE, 3)
    mask = episode.segments[0].mask.bool()
    assert tokenizer.decode(episode.segments[0].completion.ids[mask]) == f"wait {CALL}<eos>five<eos>yes<eos>"


def test_a_user_may_open_and_stop() -> None:
    tokenizer = chat_tokenizer()
    user = CallableUser(lambda messages: "bye ###STOP###" if messages else "hello")
    policy = [{"role": "system", "content": "be kind"}]
    agent = says(tokenizer, {})
    (episode,) = play([beginning(Echo(user=user), asked=policy)], table(tokenizer, agent))
    assert [message["content"] for message in episode.prompt] == ["be kind", "hello"]
    assert [message["content"] for message in episode.messages] == ["ok", "bye ###STOP###"]
    assert tokenizer.decode(episode.segments[0].condition).endswith("user: hello<eos>\nassistant: ")
    assert episode.segments[-1].completion.finished


def test_a_user_that_stops_at_once_leaves_nothing_to_learn_from() -> None:
    tokenizer = chat_tokenizer()
    user = CallableUser(lambda _: None)
    policy = [{"role": "system", "content": "be kind"}]
    (episode,) = play([beginning(Echo(user=user), asked=policy)], table(tokenizer, says(tokenizer, {})))
    assert (episode.turns, episode.segments[0].mask.tolist()) == (0, [0])


def test_slow_users_are_waited_for_as_long_as_their_patience_says() -> None:
    tokenizer, asked = chat_tokenizer(), []

    async def reply(messages: list[Any]) -> str:
        asked.append(len(messages))
        await asyncio.sleep(10)
        return "late"

    patience = TimeoutPolicy(0.02, retries=1, gives_none=True)
    user = CallableUser(reply, patience=patience)
    (episode,) = play([beginning(Echo(user=user))], table(tokenizer, says(tokenizer, {})))
    assert (episode.ending, episode.segments[-1].completion.finished, asked) == (Ending.USER, False, [2, 2])
    user = CallableUser(reply, patience=TimeoutPolicy(0.02))
    with pytest.raises(UserTimeoutError, match=r"within 0.02 seconds, asked 1 time"):
        play([beginning(Echo(user=user))], table(tokenizer, says(tokenizer, {})))


def test_users_that_are_models_draw_together() -> None:
    tokenizer = chat_tokenizer()
    texts = {turn_key(KEY._replace(sample=s), 0, user=True): f"more {s}" for s in range(2)}
    texts |= {turn_key(KEY._replace(sample=s), 1, user=True): "###STOP###" for s in range(3)}
    draws: list[Any] = []

    def user_draws(user: ModelUser, *work: Any) -> Any:
        draws.append((user.role, [tokenizer.decode(prompt) for prompt in work[0]]))
        return says(tokenizer, texts)(*work)

    def told(example: Any) -> str:
        return f"you want {example['task']}"

    starts = [beginning(Echo(user=ModelUser(told)), sample=s, task=s // 2) for s in range(3)]
    agent: Any = says(tokenizer, {})
    episodes = play(starts, table(tokenizer, agent, user_draws))
    assert [role for role, _ in draws] == ["base", "base"]
    assert draws[0][1] == [
        f"system: you want {task}<eos>\nassistant: q0 [{task}]<eos>\nuser: ok<eos>\nassistant: " for task in (0, 1)
    ]
    assert [episode.messages[1]["content"] for episode in episodes] == ["more 0", "more 1", "ok"]
    assert [episode.ending for episode in episodes] == [Ending.DONE] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CallableUser(str, patience=3), "patience=3"),  # type: ignore[arg-type]
        (lambda: CallableUser("hi"), "reply='hi'"),  # type: ignore[arg-type]
        (lambda: CallableUser(str, stops=("",)), "not empty"),
        (lambda: TimeoutPolicy("a"), "timeout_seconds is 'a'"),  # type: ignore[arg-type]
        (lambda: TimeoutPolicy(retries=-1), "retries is -1"),
        (lambda: ModelUser(5), "system=5"),  # type: ignore[arg-type]
        (lambda: ModelUser("x", role=None), "role=None"),  # type: ignore[arg-type]
        (lambda: ModelUser("x", max_tokens="a"), "max_tokens='a'"),  # type: ignore[arg-type]
        (lambda: ModelUser("x", max_tokens=0), "max_tokens=0"),
        (lambda: ModelUser("x", stops=3), "stops=3"),  # type: ignore[arg-type]
    ],
)
def test_users_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_one_stop_needs_no_list() -> None:
    assert ModelUser("x", stops="abc").stops == CallableUser(str, stops="abc").stops == ("abc",)
    with pytest.raises(DataError, match="system gave 5"):
        ModelUser(lambda _: 5).instructions({})  # type: ignore[arg-type, return-value]


def test_halves_of_pairs_in_what_others_say_are_replaced() -> None:
    class Half(Echo):
        def reset(self, example: Any) -> Any:
            return "\ud83d"

    tokenizer = chat_tokenizer()
    user = CallableUser(lambda said: "\udc00" if len(said) < 4 else None)
    (episode,) = play([beginning(Half(user=user))], table(tokenizer, says(tokenizer, {})))
    assert episode.prompt[0]["content"] == "q0?"
    assert episode.messages[1]["content"] == "?"


def test_plain_text_has_no_user() -> None:
    tokenizer = tiny_tokenizer()
    start = beginning(Echo(user=CallableUser(lambda _: None)), asked="text")
    with pytest.raises(ConfigError, match="A user needs conversational prompts"):
        play([start], table(tokenizer, says(tokenizer, {})))


def test_plain_text_goes_on_as_one_text() -> None:
    tokenizer = tiny_tokenizer()
    (episode,) = play([beginning(Echo(), asked="go:")], table(tokenizer, says(tokenizer, {})))
    assert tokenizer.decode(episode.segments[0].completion.ids) == "ok<eos>1: okok<eos>"


# ------------------------------------------------------------------ limits


def played(agent_says: tuple[str, ...], steps: int = 9, user: Any = None, **limits: Any) -> tuple[Any, Episode]:
    tokenizer = chat_tokenizer()
    agent = says(tokenizer, script(KEY, *agent_says))
    environment = Echo(steps, user) if user or not limits.pop("tools", False) else ToolEnvironment([add])
    (episode,) = play([beginning(environment)], table(tokenizer, agent, **limits))
    return tokenizer, episode


def test_a_turn_that_is_too_long_cuts_the_episode() -> None:
    _, episode = played(("left", "a long way"), turn_tokens=5)
    assert (episode.ending, episode.segments[-1].completion.finished, episode.turns) == (Ending.TURN, False, 2)
    assert episode.segments[0].mask[-5:].all()
    assert not episode.segments[0].completion.finished


def test_the_last_action_of_an_episode_is_carried_out() -> None:
    _, episode = played(("left", "right"), turns=2)
    assert (episode.ending, episode.segments[-1].completion.finished) == (Ending.TURNS, False)
    assert episode.messages[-1]["content"] == "2: ri"


def test_turns_are_counted_where_a_user_answers_too() -> None:
    _, episode = played(("left", "right"), user=CallableUser(lambda _: "go on"), turns=2)
    assert (episode.ending, episode.messages[-1]["content"]) == (Ending.TURNS, "right")


@pytest.mark.parametrize("limit", ["completion_tokens", "context_tokens"])
def test_an_observation_that_leaves_no_room_is_taken_back(limit: str) -> None:
    first = len("user: q0\nassistant: ") + 1
    told = len("\nuser: 1: le\nassistant: ") + 1
    room = 5 + told + (first if limit == "context_tokens" else 0)
    _, episode = played(("left", "right"), **{limit: room})
    assert (episode.ending, episode.messages[-1]["content"]) == (Ending.CONTEXT, "left")
    assert len(episode.segments[0].completion.ids) == 5
    _, longer = played(("left", "right"), **{limit: room + 3})
    assert (longer.ending, len(longer.segments[0].completion.ids)) == (Ending.TURN, 5 + told + 3)


def test_tool_calls_are_answered_so_often_and_no_more() -> None:
    _, episode = played((CALL, CALL, CALL), tools=True, tool_rounds=2, completion_tokens=400)
    assert (episode.ending, episode.tool_calls, episode.turns) == (Ending.TOOL_CALLS, 2, 3)
    assert episode.segments[-1].completion.finished
    _, none = played((CALL,), tools=True, tool_rounds=0)
    assert (none.ending, none.tool_calls) == (Ending.TOOL_CALLS, 0)


def test_a_first_prompt_without_room_ends_at_once() -> None:
    _, episode = played(("left",), context_tokens=4)
    assert (episode.ending, episode.turns) == (Ending.CONTEXT, 0)


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_episode_turns is 0"):
        EpisodeLimits(5, turns=0)


def test_what_an_environment_must_not_do_is_said() -> None:
    class Silent(Echo):
        def step(self, action: Any) -> Any:
            return Step()

    class Wrong(Echo):
        def step(self, action: Any) -> Any:
            return "text"

    class Odd(Echo):
        def reset(self, example: Any) -> Any:
            return [1]

    tokenizer = chat_tokenizer()
    for environment, message in (
        (Silent(), "no observation although"),
        (Wrong(), "Return a Step"),
        (Odd(), "observed"),
    ):
        with pytest.raises(DataError, match=message):
            play([beginning(environment)], table(tokenizer, says(tokenizer, {})))
    shared = Echo()
    with pytest.raises(ConfigError, match="share an environment"):
        begin([beginning(shared), beginning(shared)], table(tokenizer, says(tokenizer, {})))


# ------------------------------------------------------------------ networks


def ids(episodes: list[Episode]) -> list[Any]:
    return [
        (
            one.ending,
            one.messages,
            [(s.condition.tolist(), s.completion.ids.tolist(), s.mask.tolist()) for s in one.segments],
        )
        for one in episodes
    ]


def starts(kind: type[Environment] = Echo, steps: int = 3) -> list[Any]:
    return [
        beginning(kind(1 + (p + s) % steps), prompt=p, sample=s, task=p)  # type: ignore[call-arg]
        for p in range(3)
        for s in range(4)
    ]


@pytest.mark.slow
def test_together_is_as_one_by_one() -> None:
    tokenizer = chat_tokenizer()
    adapter = FakeAdapter(vocab=258, joins=True)
    together = play(starts(), table(tokenizer, sampler(adapter), turn_tokens=9))
    alone = [play([start], table(tokenizer, sampler(adapter), turn_tokens=9))[0] for start in starts()]
    assert ids(together) == ids(alone)
    assert len({tuple(one.segments[0].completion.ids.tolist()) for one in together}) > 9
    assert {one.turns for one in together} == {1, 2, 3}
    reversed_ = play(starts()[::-1], table(tokenizer, sampler(adapter), turn_tokens=9))[::-1]
    assert ids(reversed_) == ids(together)


@pytest.mark.parametrize("kind", [AsyncEcho, ThreadedEcho])
def test_async_and_threaded_environments_give_what_plain_ones_give(kind: type[Echo]) -> None:
    tokenizer, adapter = chat_tokenizer(), FakeAdapter(vocab=258, joins=True, gain=0.3)
    plain, other = starts(), starts(kind)
    wanted = play(plain, table(tokenizer, sampler(adapter)))
    assert ids(play(other, table(tokenizer, sampler(adapter)))) == ids(wanted)
    assert [len(start.environment.seen) for start in other] == [len(start.environment.seen) for start in plain]


def test_an_ordinary_completion_is_an_episode_of_one_turn() -> None:
    tokenizer, adapter = chat_tokenizer(), FakeAdapter(vocab=258)
    episodes = play([beginning(ToolEnvironment(), sample=s) for s in range(4)], table(tokenizer, sampler(adapter)))
    prompt = torch.tensor(
        tokenizer.apply_chat_template([{"role": "user", "content": "q0"}], add_generation_prompt=True)["input_ids"]
    )
    rows = sampler(adapter)([prompt], [[KEY._replace(sample=s) for s in range(4)]], [200])
    assert [one.segments[0].completion.ids.tolist() for one in episodes] == [row.ids.tolist() for row in rows]


def test_memory_that_runs_out_in_a_turn_repeats_no_step() -> None:
    tokenizer = chat_tokenizer()
    wanted = play(starts(), table(tokenizer, sampler(FakeAdapter(vocab=258, joins=True)), turn_tokens=9))
    adapter, failed = FakeAdapter(vocab=258, joins=True), []
    adapter.fail_at = {2, 5, 6, 11, 17}

    def attempt(unit: Any, undo: Any = None) -> Any:
        while True:
            try:
                return unit(RolloutPlan(rows_in_flight=max(1, 8 - len(failed))))
            except torch.OutOfMemoryError:
                failed.append(len(adapter.steps))
            undo()

    begun = starts()
    episodes = play(begun, table(tokenizer, sampler(adapter, attempt=attempt), turn_tokens=9))
    assert len(failed) == 5
    assert ids(episodes) == ids(wanted)
    assert [start.environment.resets for start in begun] == [1] * 12
    steps = [one.turns - (one.ending is Ending.TURN) for one in wanted]  # a turn that was cut is no action
    assert [len(start.environment.seen) for start in begun] == steps


def test_log_probs_stored_are_those_of_the_stored_ids() -> None:
    tokenizer = chat_tokenizer()
    model = tiny_model(scale=3.0)
    adapter = CausalLMAdapter(model, pad_token_id=0)
    check_head(adapter)
    episodes = play(starts(), table(tokenizer, sampler(adapter), turn_tokens=12, context_tokens=250))
    assert max(one.turns for one in episodes) > 1
    for one in episodes:
        for segment in one.segments:
            row = torch.cat([segment.condition, segment.completion.ids])
            logits = model(row[None]).logits[0, len(segment.condition) - 1 : -1].float()
            wanted = logits.log_softmax(-1).gather(-1, segment.completion.ids[:, None])[:, 0]
            own = segment.mask.bool()
            torch.testing.assert_close(segment.completion.logprobs[own], wanted[own], rtol=1e-4, atol=1e-4)


TEXT, PARTS = "seen", [{"type": "text", "text": "seen"}, {"type": "image"}]
SAID = [{"type": "text", "text": "asked"}]


@pytest.mark.parametrize(
    ("content", "seen", "wanted"),
    [
        ("asked", TEXT, "askedseen"),
        ("asked", PARTS, [*SAID, *PARTS]),
        (SAID, TEXT, [*SAID, {"type": "text", "text": "seen"}]),
        (SAID, PARTS, [*SAID, *PARTS]),
    ],
)
def test_a_first_observation_continues_the_prompts_last_message_as_in_trl(content: Any, seen: Any, wanted: Any) -> None:
    before = [{"role": "system", "content": "be brief"}]
    assert opened([*before, {"role": "user", "content": content}], seen) == [
        *before,
        {"role": "user", "content": wanted},
    ]
    assert opened(before, seen) == [*before, {"role": "user", "content": seen}]
