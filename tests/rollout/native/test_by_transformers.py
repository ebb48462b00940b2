"""Rollouts by transformers' `generate`: the draws of this library, whatever the waves, on networks it cannot decode."""

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    Qwen3ForCausalLM,
    SuppressTokensLogitsProcessor,
)

from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.native import running_batch as native
from memsafe_rl.rollout.native.by_transformers import generate_by_transformers
from memsafe_rl.rollout.native.sequences import Drawer, begin_sequences, key_tensor, text_stops
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey
from tests.rollout.plainly import draw_from
from tests.tiny import PAD_ID, tiny_config, tiny_model, tiny_tokenizer

VOCAB = 97
SETTINGS = SamplingSettings(12, tuple(range(2, 9)), temperature=1.5)


def own_cache_only(trunk: Any) -> None:
    """Has a network take no cache but the one that `generate` makes."""
    plain = trunk.forward

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and type(past_key_values) is not DynamicCache:
            raise ValueError(f"{type(past_key_values).__name__} is not mine")
        return plain(*args, past_key_values=past_key_values, **kwargs)

    trunk.forward = functools.wraps(plain)(forward)


def broken_cache(trunk: Any) -> None:
    """Has a network forget the first token that a cache holds."""
    plain = trunk.forward

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if type(past_key_values) is DynamicCache:
            for layer in past_key_values.layers:
                if layer.get_seq_length():
                    layer.keys[:, :, 0] = 0
                    layer.values[:, :, 0] = 0
        elif past_key_values is not None:
            raise ValueError("not mine")
        return plain(*args, past_key_values=past_key_values, **kwargs)

    trunk.forward = functools.wraps(plain)(forward)


def built(kind: str) -> CausalLMAdapter:
    """An adapter of a network that this library cannot decode, checked as a trainer does it."""
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind in ("own_cache_only", "broken_cache"):
            model = Qwen3ForCausalLM(tiny_config("qwen3", VOCAB))
            {"own_cache_only": own_cache_only, "broken_cache": broken_cache}[kind](model.model)
        else:
            griffin = {"num_attention_heads": 4, "lru_width": 32, "attention_window_size": 16}  # state in its modules
            griffin["block_types"] = ["recurrent", "attention"]
            own = {"mamba": {"state_size": 8}, "rwkv": {"context_length": 128}, "recurrent_gemma": griffin}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **own[kind]))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    adapter = CausalLMAdapter(model.eval(), pad_token_id=PAD_ID)
    check_head(adapter)
    return adapter


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(9, VOCAB, (length,), generator=generator) for length in (3, 7, 3, 5, 7)]


def keys(group: int = 3) -> list[list[SequenceKey]]:
    return [[SequenceKey(3, 1, prompt, sample) for sample in range(group)] for prompt in range(5)]


def by_waves(
    adapter: CausalLMAdapter,
    prompts: list[Tensor],
    keys: list[list[SequenceKey]],
    settings: SamplingSettings,
    attempt: Any,
    progress: Any = None,
    begun: Any = None,
) -> list[Completion]:
    sequences = begin_sequences(prompts, keys, settings, begun, [settings.max_new_tokens] * len(prompts))
    drawer = Drawer(settings, adapter.start_token_id)
    generate_by_transformers(adapter, sequences, drawer, attempt, progress)
    return [one.completion(drawer.keeps_model_logprobs) for one in sequences]


def alone(adapter: CausalLMAdapter, settings: SamplingSettings, group_size: int = 3) -> list[Completion]:
    """Every row by itself, without a cache."""
    drawer, rows = Drawer(settings), []
    for prompt, group in zip(prompts(), keys(group_size), strict=True):
        for key in group:
            ids, values = prompt, torch.zeros(4, 0, dtype=torch.float64)
            for position in range(settings.max_new_tokens):
                with torch.no_grad():
                    logits = adapter.model(ids[None], use_cache=False).logits[:, -1]
                token, value = draw_from(
                    drawer, logits, key_tensor([key]), torch.tensor([position]), [ids], [len(prompt)]
                )
                ids, values = torch.cat([ids, token]), torch.cat([values, value], 1)
                if int(token) in settings.eos_token_ids:
                    break
            drawn = ids[len(prompt) :]
            finished = int(drawn[-1]) in settings.eos_token_ids
            rows.append(Completion(drawn, values[1].float(), values[2].float(), finished, int(values[3].sum())))
    return rows


def assert_alike(ours: list[Completion], theirs: list[Completion]) -> None:
    assert len(ours) == len(theirs)
    untied = 0
    for one, other in zip(ours, theirs, strict=True):
        if one.ties or other.ties:
            continue
        untied += 1
        assert one.ids.tolist() == other.ids.tolist()
        assert one.finished == other.finished
        # Logits of up to 30 nats in float32, whose sums another batch shape orders otherwise.
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(one.model_logprobs, other.model_logprobs, rtol=0, atol=1e-4)
    assert untied >= len(ours) - 1


class Told(list[tuple[int, int]]):
    """Notes progress."""

    def __call__(self, ended: int, total: int) -> None:
        self.append((ended, total))


@pytest.fixture(scope="module")
def adapters() -> Callable[[str], CausalLMAdapter]:
    made: dict[str, CausalLMAdapter] = {}

    def get(kind: str) -> CausalLMAdapter:
        if kind not in made:
            made[kind] = built(kind)
        return made[kind]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "rwkv", "recurrent_gemma", "own_cache_only", "broken_cache"])
def test_tokens_are_those_of_rows_alone_in_any_wave(adapters: Callable[[str], CausalLMAdapter], kind: str) -> None:
    adapter = adapters(kind)
    assert not adapter.path.decodes
    # transformers' RWKV mixes the rows of a batch when it reads one token from a cache.
    assert adapter.path.caches == (kind not in ("rwkv", "broken_cache"))
    for settings in (SETTINGS, replace(SETTINGS, top_k=20, repetition_penalty=1.2, temperature=0.9)):
        expected = alone(adapter, settings, group_size=2)
        assert len({len(row.ids) for row in expected}) > 2
        for plan in (RolloutPlan(), RolloutPlan(rows_in_flight=1), RolloutPlan(rows_in_flight=4, prefill_tokens=12)):
            told = Told()
            assert_alike(by_waves(adapter, prompts(), keys(2), settings, under(plan), told), expected)
            assert told[-1] == (10, 10)


@pytest.mark.slow
def test_the_library_itself_falls_back(adapters: Callable[[str], CausalLMAdapter]) -> None:
    adapter = adapters("mamba")
    adapter.model.train()
    try:
        got = native.generate(adapter, prompts(), keys(), SETTINGS, under(RolloutPlan(rows_in_flight=4)))
        assert adapter.model.training
    finally:
        adapter.model.eval()
    assert_alike(got, alone(adapter, SETTINGS))


PAIRS = tiny_tokenizer(320)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"min_new_tokens": 4, "bad_words_ids": ((12,), (13, 14)), "top_p": 0.8},
        {"no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.4, "forced_eos_token_ids": (3,)},
        {"stops": text_stops(["a", "be"], PAIRS)},
        {"logits_processor": (SuppressTokensLogitsProcessor(list(range(40, 60))),)},
        {"max_step_tokens": 5},
    ],
)
def test_it_equals_the_librarys_own_decoding(changes: dict[str, Any]) -> None:
    adapter = CausalLMAdapter(tiny_model("qwen3", len(PAIRS)), pad_token_id=PAD_ID)
    # What the model's own config asks for, `generate` would do on its own; and it must not.
    adapter.model.generation_config = GenerationConfig(suppress_tokens=list(range(80)), num_beams=3, eos_token_id=11)
    settings, plan = replace(SETTINGS, **changes), under(RolloutPlan(rows_in_flight=4))
    ours = native.generate(adapter, prompts(), keys(), settings, plan)
    assert_alike(by_waves(adapter, prompts(), keys(), settings, plan), ours)
    assert adapter.model.generation_config.num_beams == 3


@pytest.mark.slow
def test_what_was_begun_is_gone_on_with(adapters: Callable[[str], CausalLMAdapter]) -> None:
    adapter = adapters("mamba")
    settings = replace(SETTINGS, repetition_penalty=1.3, encoder_no_repeat_ngram_size=2, min_new_tokens=7)
    whole = by_waves(adapter, prompts(), keys(), settings, under(RolloutPlan()))
    partly = replace(settings, max_step_tokens=5)
    first = by_waves(adapter, prompts(), keys(), partly, under(RolloutPlan()))
    assert {len(row.ids) for row in first} == {5}
    rows: Iterator[Completion] = iter(first)
    begun = [[next(rows) for _ in group] for group in keys()]
    second = by_waves(adapter, prompts(), keys(), settings, under(RolloutPlan()), begun=begun)
    assert_alike(second, whole)


@pytest.mark.slow
def test_waves_keep_to_the_plan_and_hold_rows_of_one_length(adapters: Callable[[str], CausalLMAdapter]) -> None:
    adapter, shapes = adapters("own_cache_only"), []
    row_bytes = adapter.geometry.kv_bytes(7 + SETTINGS.max_new_tokens)
    assert row_bytes > 0
    hook = adapter.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: shapes.append(ids[0].shape))
    try:
        for plan, most in (
            (RolloutPlan(rows_in_flight=4), 4),
            (RolloutPlan(kv_bytes=3 * row_bytes), 4),  # of rows of three tokens one more fits
            (RolloutPlan(prefill_tokens=14), 4),
            (RolloutPlan(kv_bytes=1), 1),
        ):
            shapes.clear()
            by_waves(adapter, prompts(), keys(), SETTINGS, under(plan))
            read = [tuple(shape) for shape in shapes if shape[1] > 1]
            assert sum(rows for rows, _ in read) == 15
            assert max(rows for rows, _ in read) <= most
            assert max(rows for rows, length in read if length == 7) <= 3 or plan.rows_in_flight == 4
    finally:
        hook.remove()


@pytest.mark.slow
def test_a_wave_that_runs_out_of_memory_is_repeated_and_leaves_nothing(
    adapters: Callable[[str], CausalLMAdapter],
) -> None:
    adapter = adapters("own_cache_only")
    expected = by_waves(adapter, prompts(), keys(), SETTINGS, under(RolloutPlan()))
    own, calls, caches = adapter.model.generation_config, [0], []

    def forward(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("past_key_values") is not None:
            caches.append(weakref.ref(kwargs["past_key_values"]))
        calls[0] += 1
        if calls[0] % 6 == 0:
            raise torch.OutOfMemoryError("planted")

    retries = 0

    def attempt(unit: Any, undo: Any = None) -> Any:
        nonlocal retries
        rows = 6
        while True:
            try:
                return unit(RolloutPlan(rows_in_flight=rows))
            except torch.OutOfMemoryError:
                retries, rows = retries + 1, max(1, rows // 2)

    hook = adapter.model.register_forward_pre_hook(forward, with_kwargs=True)
    settings = replace(SETTINGS, max_new_tokens=5)
    try:
        got = by_waves(adapter, prompts(), keys(), settings, attempt)
    finally:
        hook.remove()
    assert retries > 2
    for one, other in zip(got, expected, strict=True):
        assert one.ties or other.ties or one.ids.tolist() == other.ids[:5].tolist()
    assert adapter.model.generation_config is own
    gc.collect()
    assert caches
    assert not any(cache() is not None for cache in caches)


def test_it_is_said_once_and_a_network_without_any_way_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built("own_cache_only")
    said = [record.getMessage() for record in caplog.records if "generate" in record.getMessage()]
    assert len(said) == 1
    assert "Qwen3ForCausalLM cannot be decoded by this library's engine" in said[0]
    assert "waves of rows of one length" in said[0]
    xlnet = {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlnet", **xlnet)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5)
    with pytest.raises(ConfigError, match=r"decoded together.*generate does not give those logits either"):
        check_head(CausalLMAdapter(model, pad_token_id=PAD_ID))


def test_rows_without_a_token_to_draw_are_refused(adapters: Callable[[str], CausalLMAdapter]) -> None:
    settings = replace(SETTINGS, suppress_tokens=tuple(range(VOCAB)))
    with pytest.raises(MemsafeError, match=r"prompt 1, sample 0.*forbid every token"):
        by_waves(adapters("mamba"), prompts(), keys(), settings, under(RolloutPlan()))


def test_a_generate_in_transformers_place_draws_and_its_rows_end_where_they_should() -> None:
    model = tiny_model()
    asked: list[dict[str, Any]] = []

    def own(input_ids: Tensor, **given: Any) -> Tensor:
        asked.append({"input_ids": input_ids, **given})
        drawn = torch.tensor([[10, 11, 2, 12, 13], [20, 21, 22, 23, 24], [30, 31, 32, 2, 33]])
        return torch.cat([input_ids, drawn[: len(input_ids)]], 1)

    adapter = CausalLMAdapter(model, pad_token_id=PAD_ID)
    assert adapter.own_generate is None
    model.generate = own
    prompts_given = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    names = [[SequenceKey(0, 0, 0, 0), SequenceKey(0, 0, 0, 1)], [SequenceKey(0, 0, 1, 0)]]
    plan = under(RolloutPlan(rows_in_flight=3))
    found = native.generate(adapter, prompts_given, names, SamplingSettings(4, (2,), top_k=7), plan, limits=[4, 2])

    assert [one.ids.tolist() for one in found] == [[10, 11, 2], [20, 21, 22, 23], [30, 31]]
    assert [one.finished for one in found] == [True, False, False]
    assert asked[0]["input_ids"].tolist() == [[5, 6, 7], [5, 6, 7], [PAD_ID, PAD_ID, 8]]
    assert asked[0]["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert (asked[0]["generation_config"].top_k, asked[0]["generation_config"].max_new_tokens) == (7, 4)
    with pytest.raises(ConfigError, match=r"suppress_tokens is .* cannot honour"):
        native.generate(adapter, prompts_given, names, SamplingSettings(4, (2,), suppress_tokens=(3,)), plan)
