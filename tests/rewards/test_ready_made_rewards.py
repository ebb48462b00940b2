"""Ready-made rewards against TRL's and against values by hand."""

import math
import pickle
import sys
import threading

import pytest
import trl.rewards

from memsafe_rl import rewards
from memsafe_rl.errors import ConfigError
from memsafe_rl.rewards import REWARD_FACTORIES, REWARD_FUNCTIONS, RewardRunner, resolve_reward

ANSWERS = [
    (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"My answer is \boxed{\frac{1}{2}}", r"\frac{1}{3}"),
    (r"It is $0.5$ or \boxed{\frac{2}{4}}", r"$\frac{1}{2}$"),
    (r"The final answer is $x = 7$.", r"$7$"),
    ("The answer is 42", r"$42$"),
    (r"\boxed{42", "42"),
    (r"\boxed{3\text{ cm}}", r"$3$"),
    (r"\boxed{(1, 2)}", r"$(1,2)$"),
    ("", r"$1$"),
    (r"\boxed{5}", "no number at all"),
    (r"<think> \boxed{1} </think> so \boxed{2}", r"$2$"),
    (r"<think> \boxed{2} </think> so \boxed{1}", r"$2$"),
    (r"<think> never ends \boxed{2}", r"$2$"),
    (r"</think> <answer> \boxed{2} </answer> no", r"$2$"),
    (r"<think> a </think> b </think> \boxed{9}", r"$9$"),
    (r"<think> a </think> \boxed{9}", "no number at all"),
]
FORMATS = [
    "<think>\nreasons\n</think>\nanswer",
    "<think>\nreasons\nanswer",
    "<think></think>",
    "<think>a</think><think>b</think>",
    "<think>a<think>b</think>c</think>",
    " <think>a</think>",
    "text\n<think>a</think>",
    "<think>a</think></think>",
    "</think><think>",
    "",
]
TOKEN_IDS = [[], [1], [1, 2, 3], [5] * 5, [1, 2, 1, 2, 1, 2], list(range(100)), [7] * 81, [7] * 100, [7] * 101]


def conversations(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_accuracy_equals_trl_s_with_its_log(name):
    texts, solution = zip(*ANSWERS, strict=True)
    ours, theirs = {}, {}
    expected = getattr(trl.rewards, name)(conversations(texts), list(solution), log_extra=theirs.__setitem__)
    assert {0.0, 1.0, None} == set(expected)
    assert getattr(rewards, name)(conversations(texts), solution, log_extra=ours.__setitem__) == expected
    assert ours == theirs
    assert getattr(rewards, name)(texts, solution) == expected, "plain texts"


@pytest.mark.parametrize("delimiters", [["</answer>", "</think>"], ["</think>", "</answer>"], []])
def test_reasoning_delimiters_equal_trl_s(delimiters):
    texts, solution = zip(*ANSWERS, strict=True)
    expected = trl.rewards.reasoning_accuracy_reward(conversations(texts), list(solution), delimiters)
    assert rewards.reasoning_accuracy_reward(texts, solution, reasoning_delimiters=delimiters) == expected


def test_think_format_equals_trl_s():
    expected = trl.rewards.think_format_reward(conversations(FORMATS))
    assert {0.0, 1.0} == set(expected)
    assert rewards.think_format_reward(conversations(FORMATS)) == expected
    assert rewards.think_format_reward(completions=FORMATS, prompts=FORMATS) == expected


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("get_soft_overlong_punishment", {"max_completion_len": 100, "soft_punish_cache": 20}),
        ("get_soft_overlong_punishment", {"max_completion_len": 100, "soft_punish_cache": 0}),
        ("get_soft_overlong_punishment", {"max_completion_len": 100, "soft_punish_cache": 100}),
        ("get_repetition_penalty_reward", {}),
        ("get_repetition_penalty_reward", {"ngram_size": 1, "max_penalty": -0.5}),
        ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": 0.0}),
    ],
)
def test_rewards_of_length_equal_trl_s(name, settings):
    ours, theirs = getattr(rewards, name)(**settings), getattr(trl.rewards, name)(**settings)
    assert ours(completion_ids=TOKEN_IDS, prompts=[]) == pytest.approx(theirs(completion_ids=TOKEN_IDS), abs=1e-15)
    assert ours.__name__ == theirs.__name__
    assert pickle.loads(pickle.dumps(ours)) == ours


def test_rewards_of_length_by_hand():
    assert rewards.get_soft_overlong_punishment(100, 20)([[1] * 90]) == [-0.5]
    assert rewards.get_repetition_penalty_reward(2)([[1, 2, 3, 4], [5] * 5]) == [0.0, -0.75]


def test_cosine_scaled_equals_trl_s():
    texts, solution = zip(*ANSWERS[:10], strict=True)
    ids = [[0] * length for length in (0, 1, 10, 50, 99, 100, 101, 500, 3, 4)]
    for settings in ({}, {"min_value_wrong": -2.0, "max_value_wrong": 0.0, "max_value_correct": 3.0}):
        ours = rewards.get_cosine_scaled_reward(100, **settings)
        theirs = trl.rewards.get_cosine_scaled_reward(100, **settings)
        expected = theirs(conversations(texts), list(solution), ids)
        got = ours(completions=texts, solution=solution, completion_ids=ids, prompts=texts)
        assert [x is None for x in got] == [x is None for x in expected]
        assert [x or 0 for x in got] == pytest.approx([x or 0 for x in expected], abs=1e-12)
    assert ours.__name__ == theirs.__name__
    half = rewards.get_cosine_scaled_reward(100)(texts[:2], solution[:2], [[1] * 50] * 2)
    assert half == pytest.approx([0.75, -0.75])


def test_accuracy_works_off_the_main_thread_and_leaves_the_loggers_alone(caplog):
    got = []
    texts, solution = zip(*ANSWERS[:3], strict=True)
    thread = threading.Thread(target=lambda: got.extend(rewards.accuracy_reward(texts, solution)))
    thread.start()
    thread.join()
    assert got == [1.0, 0.0, 1.0]
    assert not caplog.records


def test_contents_may_be_parts_or_missing():
    completions = [
        [{"role": "assistant", "content": [{"type": "text", "text": "<think>a</think>"}]}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    assert rewards.think_format_reward(completions) == [1.0, 0.0, 0.0]


def test_without_math_verify_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="pip install math-verify"):
        rewards.accuracy_reward(["1"], ["$1$"])


def test_accuracy_runs_in_a_runner_beside_a_reward_without_kwargs():
    texts, solution = zip(*ANSWERS[:2], strict=True)
    runner = RewardRunner([rewards.accuracy_reward, rewards.get_soft_overlong_punishment(2, 1)])
    scores = runner.begin(["p", "p"], list(texts), [[1], [1, 2]], {"solution": list(solution)}).result()
    assert scores.rewards_BF.tolist() == [[1.0, 0.0], [0.0, -1.0]]
    assert scores.names == ("accuracy_reward", "soft_overlong_punishment_reward")
    assert set(scores.extras) == {"solution", "gold_parsed", "answer_parsed"}


def test_every_name_of_trl_is_registered():
    assert {*REWARD_FUNCTIONS, *REWARD_FACTORIES} == set(trl.rewards.__dict__["_class_to_module"])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "get_soft_overlong_punishment",
            {"max_completion_len": 10, "soft_punish_cache": 11},
            "soft_punish_cache is 11",
        ),
        ("get_repetition_penalty_reward", {"ngram_size": 0}, "ngram_size is 0"),
        ("get_repetition_penalty_reward", {"max_penalty": 1.0}, "max_penalty is 1.0"),
        ("get_cosine_scaled_reward", {"max_len": 0}, "max_len is 0"),
        ("get_cosine_scaled_reward", None, "missing 1 required positional argument: 'max_len'"),
        ("get_cosine_scaled_reward", {"max_length": 5}, "max_length"),
        ("acuracy_reward", None, "Did you mean 'accuracy_reward'"),
        ("nonsense", None, "Ready-made: accuracy_reward"),
        ("no.such.module", None, "cannot be imported"),
        ("math.no_such_function", None, "cannot be imported"),
        ("math.pi", None, "not a function"),
        ("math.sqrt", {"x": 4}, "cannot be made"),
    ],
)
def test_names_and_settings_that_lead_nowhere_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name, settings)


def test_names_lead_to_functions():
    assert resolve_reward("accuracy_reward") is rewards.accuracy_reward
    assert resolve_reward("get_repetition_penalty_reward", {"ngram_size": 2}).ngram_size == 2
    assert resolve_reward("get_repetition_penalty_reward").ngram_size == 3
    assert resolve_reward("math.sqrt") is math.sqrt
    assert resolve_reward("memsafe_rl.rewards.registry:think_format_reward") is rewards.think_format_reward
