"""`generation_kwargs`: each key honoured or refused by name, and the model's own generation config as TRL uses it."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MinPLogitsWarper, SuppressTokensLogitsProcessor

from memsafe_rl import GRPOConfig
from memsafe_rl.config.generation_options import (
    APART,
    HARMLESS,
    OPTIONS,
    OTHER_FIELDS,
    say_what_is_left_out,
)
from memsafe_rl.config.resume_checks import run_facts
from memsafe_rl.config.unsupported import REFUSED_OPTIONS
from memsafe_rl.errors import ConfigError
from memsafe_rl.rollout.native.sequences import Drawer
from memsafe_rl.types import SamplingSettings
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer
from tests.trainers.helpers import make_trainer

GIVEN: dict[str, tuple[Any, Any]] = {
    "top_p": (0.5, 0.5),
    "top_k": (7, 7),
    "min_p": ("0.25", 0.25),
    "repetition_penalty": (2, 2.0),
    "top_h": (0.4, 0.4),
    "typical_p": (0.9, 0.9),
    "epsilon_cutoff": (0.01, 0.01),
    "eta_cutoff": (0.01, 0.01),
    "encoder_repetition_penalty": (1.5, 1.5),
    "no_repeat_ngram_size": (3, 3),
    "encoder_no_repeat_ngram_size": (2, 2),
    "min_length": (5, 5),
    "min_new_tokens": (6, 6),
    "forced_bos_token_id": (9, 9),
    "forced_eos_token_id": ([5, 6], (5, 6)),
    "remove_invalid_values": (True, True),
    "suppress_tokens": ([3, 4], (3, 4)),
    "begin_suppress_tokens": ([8], (8,)),
    "bad_words_ids": ([[3], [4, 5]], ((3,), (4, 5))),
    "sequence_bias": ({(3,): 1.5, (4, 5): -2}, (((3,), 1.5), ((4, 5), -2.0))),
    "exponential_decay_length_penalty": ((3, 1.2), (3, 1.2)),
    "logits_processor": (LogitsProcessorList([warper := MinPLogitsWarper(0.2)]), (warper,)),
}


@pytest.mark.parametrize("key", OPTIONS)
def test_every_key_sets_its_field(key: str) -> None:
    value, expected = GIVEN[key]
    settings = GRPOConfig(generation_kwargs={key: value}).sampling_settings([EOS_ID])
    default = SamplingSettings(512, (EOS_ID,))
    changed = {name: new for name, new in vars(settings).items() if new != getattr(default, name)}
    assert changed == {OTHER_FIELDS.get(key, key): expected}
    assert hash(settings)
    assert Drawer(settings).keeps_model_logprobs


def test_every_key_of_transformers_is_known() -> None:
    theirs = {key for key in vars(GenerationConfig()) if not key.startswith("_")} - {"transformers_version"}
    ours = {*OPTIONS, *APART, *HARMLESS, *REFUSED_OPTIONS, *GRPOConfig.declared}
    assert not theirs - ours
    assert not set(OPTIONS) & set(REFUSED_OPTIONS)


@pytest.mark.parametrize("key", REFUSED_OPTIONS)
def test_what_is_refused_is_named_and_off_values_pass(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is 'x7', which is refused: .*\\. [A-Z].*"):
        GRPOConfig(generation_kwargs={key: "x7"})
    for harmless in REFUSED_OPTIONS[key].off:
        GRPOConfig(generation_kwargs={key: harmless})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"typical": 0.3}, "no key of generation_kwargs 'typical'. Did you mean 'typical_p'"),
        ({"stop_string": "a"}, "Did you mean 'stop_strings'"),
        ({"typical_p": 1.5}, "typical_p is 1.5; it must be more than 0 and at most 1"),
        ({"top_p": "high"}, "top_p is 'high'"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"bad_words_ids": [[3], []]}, "each word must have at least one token"),
        ({"bad_words_ids": [[3, -4]]}, "ids of tokens are at least 0"),
        ({"bad_words_ids": 3}, "bad_words_ids is 3"),
        ({"sequence_bias": {"a": 1.0}}, "write pairs of ids and a bias"),
        ({"sequence_bias": [[[3], "a"]]}, "sequence_bias is 'a'"),
        ({"exponential_decay_length_penalty": [3]}, "such as [20, 1.1]"),
        ({"sequence_bias": {(3, 4): math.inf}}, "sequence_bias adds inf to the logit of [3, 4]; write a finite number"),
        ({"sequence_bias": {(3,): math.nan}}, "sequence_bias adds nan to the logit of [3]"),
        ({"exponential_decay_length_penalty": (1, math.inf)}, "a finite factor above 0"),
        ({"exponential_decay_length_penalty": (1, math.nan)}, "a finite factor above 0"),
        ({"logits_processor": [3]}, "cannot be called"),
        ({"logits_processor": [lambda ids: ids]}, "takes (ids), but is called as processor(input_ids, scores)"),
        ({"logits_processor": [lambda ids, *, by: ids + by]}, "takes (ids, *, by), but is called as"),
        ({"logits_processor": [torch.nn.functional.cosine_embedding_loss]}, "asks for target beside input_ids and"),
        ({"stop_strings": [""]}, "at least one character"),
        ({"stop_strings": 5}, "stop_strings is 5; it must hold strings"),
        ({5: 3}, "There is no key of generation_kwargs 5. What there is: top_p, "),
        ({"foo": 3}, "begin_suppress_tokens, bad_words_ids, sequence_bias, "),
        ({"eos_token_id": [5, "a"]}, "eos_token_id is"),
        ({"eos_token_id": 1.5}, "eos_token_id is 1.5; it must be a whole number or a list of them."),
        ({"eos_token_id": True}, "eos_token_id is True; it must be a whole number or a list of them."),
        ({"eos_token_id": -1}, "ids of tokens are at least 0"),
        ({"max_new_tokens": 9}, "Set max_completion_length"),
        ({"do_sample": False}, "greedy decoding"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GRPOConfig(generation_kwargs=given)
    assert said in str(refused.value)


def test_a_processor_that_does_not_say_what_it_takes_is_admitted() -> None:
    """`inspect.signature` of a compiled function raises ValueError."""
    settings = GRPOConfig(generation_kwargs={"logits_processor": [torch.add]}).sampling_settings([EOS_ID])
    assert settings.logits_processor == (torch.add,)


def test_harmless_keys_change_nothing() -> None:
    kwargs = {"pad_token_id": 0, "bos_token_id": 3, "renormalize_logits": True, "disable_compile": True, "num_beams": 1}
    assert GRPOConfig(generation_kwargs=kwargs).sampling_settings([1]) == GRPOConfig().sampling_settings([1])


def test_the_models_own_generation_config_fills_what_is_left_open() -> None:
    """As in TRL 1.16 with transformers 5: fields that TRL always sets win, the rest is the model's."""
    declared = GenerationConfig(
        top_p=0.3, top_k=3, temperature=0.1, repetition_penalty=3.0, min_p=0.2, typical_p=0.8, suppress_tokens=[4],
        max_new_tokens=3, do_sample=False, no_repeat_ngram_size=2,
    )  # fmt: skip
    settings = GRPOConfig(generation_kwargs={"no_repeat_ngram_size": 4}).sampling_settings([1], declared=declared)
    assert settings == SamplingSettings(
        512, (1,), min_p=0.2, typical_p=0.8, suppress_tokens=(4,), no_repeat_ngram_size=4
    )
    off = GRPOConfig(min_p=0.1, generation_kwargs={"typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": []})
    assert off.sampling_settings([1], declared=declared) == SamplingSettings(512, (1,), min_p=0.1)


def test_trl_fills_the_same_fields() -> None:
    """The oracle of the rule above: what `generate` ends up with, given TRL's generation config."""
    model = tiny_model()
    model.generation_config = GenerationConfig(top_p=0.3, top_k=3, min_p=0.2, typical_p=0.8, suppress_tokens=[4])
    trl = GenerationConfig(
        max_new_tokens=9, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0
    )
    theirs, _ = model._prepare_generation_config(trl)
    ours = GRPOConfig().sampling_settings([1], declared=model.generation_config)
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "typical_p"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert list(ours.suppress_tokens) == theirs.suppress_tokens


def test_wishes_that_are_not_followed_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        say_what_is_left_out(GenerationConfig(num_beams=4, length_penalty=2.0, guidance_scale=1.0, max_new_tokens=3))
    assert len(caplog.records) == 1
    assert "num_beams=4, length_penalty=2.0, which rollouts leave out" in caplog.text
    caplog.clear()
    say_what_is_left_out(GenerationConfig(no_repeat_ngram_size=3))
    say_what_is_left_out(None)
    assert not caplog.records


def test_stop_strings_come_with_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer(320)
    for given in ("stop", ["stop"]):
        settings = GRPOConfig(generation_kwargs={"stop_strings": given}).sampling_settings([1], tokenizer=tokenizer)
        assert settings.stops is not None
        assert settings.stops.strings == ("stop",)
    drawer = Drawer(settings)
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("do not stop", "do not go")]
    assert drawer.ends_by_text(rows) == [True, False]
    declared = GenerationConfig(stop_strings=["x"])
    own = GRPOConfig().sampling_settings([1], tokenizer=tokenizer, declared=declared)
    assert own.stops is not None


def test_a_decay_without_an_eos_is_refused() -> None:
    config = GRPOConfig(generation_kwargs={"exponential_decay_length_penalty": [3, 1.2]})
    with pytest.raises(ConfigError, match="neither tokenizer nor model declares one"):
        config.sampling_settings([])


def test_settings_with_objects_can_be_written_down() -> None:
    kwargs = {"logits_processor": [warper], "sequence_bias": {(3, 4): 1.0}}
    config = GRPOConfig(generation_kwargs=kwargs)
    assert json.loads(config.to_json_string())["generation_kwargs"]["sequence_bias"] == [[[3, 4], 1.0]]
    again = GRPOConfig(**{name: value for name, value in config.to_dict().items() if name == "generation_kwargs"})
    assert again.sampling_settings([1]) == config.sampling_settings([1])
    other = GRPOConfig(generation_kwargs={**kwargs, "logits_processor": [MinPLogitsWarper(0.2)]})
    assert run_facts(config, [], 1) == run_facts(other, [], 1)
    assert "MinPLogitsWarper" in json.dumps(run_facts(config, [], 1))


@pytest.mark.slow
def test_a_run_draws_as_the_keys_say(tmp_path: Path) -> None:
    drawn: list[tuple[str, list[int]]] = []

    def note(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        drawn.extend(zip(completions, completion_ids, strict=True))
        return [float(len(text)) for text in completions]

    trainer = make_trainer(
        tmp_path,
        reward_funcs=note,
        max_completion_length=30,
        generation_kwargs={
            "stop_strings": ["x", "y"],
            "logits_processor": [SuppressTokensLogitsProcessor(list(range(10, 40)))],
            "min_new_tokens": 2,
            "repetition_penalty": 1.2,
        },
    )
    trainer.train()
    assert len(drawn) == 16
    stopped = [text for text, ids in drawn if len(ids) < 30 and ids[-1] != EOS_ID]
    assert stopped
    assert all(text[-1] in "xy" for text in stopped)
    assert all(not set(ids) & set(range(10, 40)) and len(ids) >= 2 for _, ids in drawn)
    clipped = sum(len(ids) == 30 for _, ids in drawn) / len(drawn)
    shares = [record["completions/clipped_ratio"] for record in trainer.history]
    assert abs(sum(shares) / len(shares) - clipped) < 1e-6


@pytest.mark.parametrize("key", ["eos_token_id", "suppress_tokens", "begin_suppress_tokens"])
def test_ids_beyond_the_vocabulary_are_refused_before_a_run(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{key} holds the id 258, but the model draws from 258 tokens .* Set {key}"):
        make_trainer(tmp_path, generation_kwargs={key: [4, 258]})


@pytest.mark.parametrize(
    "given", [{"bad_words_ids": [[3], [4, 258]]}, {"sequence_bias": {(258, 4): 1.0}}, {"forced_eos_token_id": 258}]
)
def test_sequences_beyond_the_vocabulary_are_refused_before_a_run(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(given))} holds the id 258, but the model draws from 258"):
        make_trainer(tmp_path, generation_kwargs=given)


def test_a_shortest_completion_of_the_model_beyond_the_longest_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.min_new_tokens = 7
    with pytest.raises(ConfigError, match=r"min_new_tokens is 7, but the longest completion has 6 tokens"):
        make_trainer(tmp_path, model=model)
