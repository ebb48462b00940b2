"""Waves never change tokens, keep to the plan, and leave nothing behind."""

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from memsafe_rl.errors import ConfigError, DataError, MemsafeError
from memsafe_rl.memory.runtime.recovery import Attempt, under
from memsafe_rl.models.module_state import eval_mode
from memsafe_rl.ops.sampling import noise_ahead
from memsafe_rl.rollout.native import sequences
from memsafe_rl.rollout.native.running_batch import generate as generate_under
from memsafe_rl.rollout.native.sequences import Candidate, admit
from memsafe_rl.types import Completion, ModelGeometry, RolloutPlan, SamplingSettings, SequenceKey
from tests.rollout.fake_adapter import FakeAdapter, FakeState
from tests.rollout.plainly import generate

SETTINGS = SamplingSettings(max_new_tokens=24, eos_token_ids=(1, 2))
ONE_WAVE = RolloutPlan(rows_in_flight=1000)


def prompts_of(count: int, vocab: int = 23, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (length,), generator=generator) for length in lengths]


def keys_of(count: int, group: int = 4, seed: int = 7) -> list[list[SequenceKey]]:
    return [[SequenceKey(seed, 0, prompt, sample) for sample in range(group)] for prompt in range(count)]


def assert_same(ours: list[Completion], theirs: list[Completion], atol: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.finished == other.finished
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=atol)
        torch.testing.assert_close(one.model_logprobs, other.model_logprobs, rtol=0, atol=atol)


def naive_logits(adapter: FakeAdapter, tokens: torch.Tensor) -> torch.Tensor:
    hidden_1D = torch.zeros(1, adapter.width)
    with torch.no_grad(), eval_mode(adapter.model):
        for token in tokens:
            hidden_1D = adapter.model.step(hidden_1D, token[None])
        return adapter.model.head(hidden_1D)[0].double()


# What is drawn


def test_noise_is_made_for_one_draw_where_rows_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def spy(words_B: torch.Tensor, positions_B: torch.Tensor, vocab: int, steps: int) -> torch.Tensor:
        made.append((int(positions_B.max()), steps))
        return noise_ahead(words_B, positions_B, vocab, steps)

    monkeypatch.setattr(sequences, "noise_ahead", spy)
    settings = replace(SETTINGS, eos_token_ids=())
    generate(FakeAdapter(joins=True), prompts_of(4), keys_of(4), settings, RolloutPlan(rows_in_flight=16))
    assert made[0] == (0, 1)
    assert made[1:] == [(1, 16), (17, 16)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5, "temperature": 1.3},
        {"top_p": 0.8},
        {"min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.0, "repetition_penalty": 1.5},
    ],
)
@pytest.mark.parametrize("joins", [False, True])
def test_company_and_order_change_no_token(changes: dict[str, float], joins: bool) -> None:
    settings = replace(SETTINGS, max_new_tokens=16, **changes)
    prompts, keys = prompts_of(9), keys_of(9, group=2)
    whole = generate(FakeAdapter(), prompts, keys, settings, ONE_WAVE)
    assert len({len(completion.ids) for completion in whole}) > 1
    for plan in (
        RolloutPlan(rows_in_flight=1),
        RolloutPlan(rows_in_flight=4),
        RolloutPlan(rows_in_flight=8, prefill_tokens=10),
        RolloutPlan(rows_in_flight=18, kv_bytes=64 * 32 * 5),
    ):
        assert_same(generate(FakeAdapter(joins=joins), prompts, keys, settings, plan), whole)
    backwards = generate(FakeAdapter(joins=joins), prompts[::-1], keys[::-1], settings, RolloutPlan(rows_in_flight=4))
    groups = [backwards[start : start + 2] for start in range(0, 18, 2)]
    assert_same([row for group in groups[::-1] for row in group], whole)


def test_samples_depend_on_every_part_of_the_key() -> None:
    prompts = prompts_of(1)
    base = SequenceKey(1, 2, 3, 4)
    others = [base._replace(**{name: 9}) for name in base._fields]
    rows = generate(FakeAdapter(), prompts, [[base, *others, base]], SETTINGS, ONE_WAVE)
    assert rows[0].ids.tolist() == rows[-1].ids.tolist()
    assert len({tuple(row.ids.tolist()) for row in rows}) == 5


def test_keys_of_any_width_are_taken() -> None:
    keys = [[SequenceKey(2**64 - 1, 0, 0, 0), SequenceKey(-1, 0, 0, 0)]]
    wide, negative = generate(FakeAdapter(), prompts_of(1), keys, SETTINGS, ONE_WAVE)
    assert wide.ids.tolist() == negative.ids.tolist()


def test_completions_end_at_an_eos_or_at_the_limit() -> None:
    rows = generate(FakeAdapter(), prompts_of(12), keys_of(12), SETTINGS, RolloutPlan(rows_in_flight=20))
    assert {row.finished for row in rows} == {True, False}
    for row in rows:
        ended = [token in SETTINGS.eos_token_ids for token in row.ids.tolist()]
        assert not any(ended[:-1])
        assert ended[-1] == row.finished
        assert row.finished or len(row.ids) == SETTINGS.max_new_tokens
        assert row.ids.dtype == torch.int64
        assert row.logprobs.dtype == torch.float32
        assert row.ids.shape == row.logprobs.shape == row.model_logprobs.shape
        assert row.ids.untyped_storage().nbytes() == row.ids.nbytes
    assert {int(row.ids[-1]) for row in rows if row.finished} == {1, 2}


def test_no_eos_means_full_length() -> None:
    rows = generate(FakeAdapter(), prompts_of(2), keys_of(2), replace(SETTINGS, eos_token_ids=()), ONE_WAVE)
    assert {len(row.ids) for row in rows} == {SETTINGS.max_new_tokens}
    assert not any(row.finished for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_models_at_the_temperature(temperature: float) -> None:
    adapter, prompts = FakeAdapter(), prompts_of(3)
    rows = generate(adapter, prompts, keys_of(3), replace(SETTINGS, temperature=temperature), ONE_WAVE)
    for index, row in enumerate(rows):
        assert row.model_logprobs is row.logprobs
        prompt = prompts[index // 4]
        for position in range(len(row.ids)):
            logits_V = naive_logits(adapter, torch.cat([prompt, row.ids[:position]]))
            expected = (logits_V / temperature).log_softmax(0)[row.ids[position]]
            # float32 recurrence against itself in another batch: a few units in the last place of ~10 nats.
            assert abs(float(row.logprobs[position]) - float(expected)) < 1e-5


@pytest.mark.slow
def test_filters_have_transformers_own_order_and_meaning() -> None:
    settings = replace(SETTINGS, temperature=0.8, top_k=6, top_p=0.9, min_p=0.02, repetition_penalty=1.4)
    adapter, prompts = FakeAdapter(), prompts_of(4)
    rows = generate(adapter, prompts, keys_of(4), settings, RolloutPlan(rows_in_flight=6))
    for index, row in enumerate(rows):
        prompt = prompts[index // 4]
        for position in range(len(row.ids)):
            seen = torch.cat([prompt, row.ids[:position]])
            logits_V, drawn = naive_logits(adapter, seen), int(row.ids[position])
            assert abs(float(row.model_logprobs[position]) - float((logits_V / 0.8).log_softmax(0)[drawn])) < 1e-5
            assert abs(float(row.logprobs[position]) - naive_filtered(logits_V, seen, settings)[drawn]) < 1e-5


def naive_filtered(logits_V: torch.Tensor, seen: torch.Tensor, settings: SamplingSettings) -> list[float]:
    """Penalty, temperature, top-k, top-p, min-p, written out by hand for one row."""
    scores = logits_V.tolist()
    for token in set(seen.tolist()):
        penalty = settings.repetition_penalty
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    scores = [score / settings.temperature for score in scores]
    best = sorted(range(len(scores)), key=lambda token: -scores[token])[: settings.top_k]
    mass = {token: math.exp(scores[token]) for token in best}
    total, kept, held = sum(mass.values()), [], 0.0
    for token in best:
        if held < settings.top_p * total:
            kept.append(token)
        held += mass[token]
    kept = [token for token in kept if mass[token] >= (settings.min_p or 0) * mass[best[0]]]
    norm = math.log(sum(mass[token] for token in kept))
    return [scores[token] - norm if token in kept else -math.inf for token in range(len(scores))]


def test_greedy_takes_the_most_likely_token_whatever_the_key() -> None:
    adapter, prompts = FakeAdapter(), prompts_of(5)
    rows = generate(adapter, prompts, keys_of(5, group=2), replace(SETTINGS, temperature=0.0), ONE_WAVE)
    for index, row in enumerate(rows):
        tokens = prompts[index // 2]
        for position, token in enumerate(row.ids.tolist()):
            logits_V = naive_logits(adapter, tokens)
            assert token == int(logits_V.argmax())
            assert abs(float(row.logprobs[position]) - float(logits_V.log_softmax(0).max())) < 1e-5
            tokens = torch.cat([tokens, torch.tensor([token])])


def test_ties_are_counted() -> None:
    adapter = FakeAdapter()
    with torch.no_grad():
        adapter.model.head.weight.zero_()
        adapter.model.head.bias.zero_()
    settings = replace(SETTINGS, temperature=0.0, eos_token_ids=(22,), max_new_tokens=5)
    assert [row.ties for row in generate(adapter, prompts_of(1), keys_of(1, 2), settings, ONE_WAVE)] == [5, 5]
    assert sum(row.ties for row in generate(FakeAdapter(), prompts_of(4), keys_of(4), SETTINGS, ONE_WAVE)) == 0


# How it is cut


def test_each_prompt_is_read_once_a_wave_and_ended_rows_leave() -> None:
    adapter = FakeAdapter()
    prompts = prompts_of(6)
    rows = generate(adapter, prompts, keys_of(6), SETTINGS, ONE_WAVE)
    assert adapter.prefills == [sorted((len(prompt) for prompt in prompts), reverse=True)]
    assert adapter.steps == sorted(adapter.steps, reverse=True)
    needed = sum(len(row.ids) - 1 for row in rows)
    # An eighth of the rows may wait to leave.
    assert needed <= sum(adapter.steps) <= needed * 8 / 7
    assert len(adapter.steps) == max(len(row.ids) for row in rows) - 1


def test_rows_that_end_at_once_never_enter_the_cache() -> None:
    adapter = FakeAdapter()
    rows = generate(
        adapter, prompts_of(3), keys_of(3, group=8), replace(SETTINGS, eos_token_ids=tuple(range(12))), ONE_WAVE
    )
    ended = sum(len(row.ids) == 1 for row in rows)
    assert 0 < ended < 24
    assert adapter.steps[0] == 24 - ended


def test_waiting_rows_join_while_others_run() -> None:
    adapter, plan = FakeAdapter(joins=True), RolloutPlan(rows_in_flight=10)
    rows = generate(adapter, prompts_of(9), keys_of(9), SETTINGS, plan)
    assert_same(rows, generate(FakeAdapter(), prompts_of(9), keys_of(9), SETTINGS, ONE_WAVE))
    assert max(adapter.steps) <= 10
    waves = FakeAdapter()
    generate(waves, prompts_of(9), keys_of(9), SETTINGS, plan)
    assert len(adapter.steps) < 0.8 * len(waves.steps)
    # Each prompt is read once, though its group joined in parts.
    assert sum(len(lengths) for lengths in adapter.prefills) == 9
    assert adapter.alive() == 0


def test_samples_of_a_prompt_wait_for_room_without_another_reading() -> None:
    adapter = FakeAdapter(joins=True)
    keys = keys_of(1, group=30)
    rows = generate(adapter, prompts_of(1), keys, SETTINGS, RolloutPlan(rows_in_flight=7))
    assert_same(rows, generate(FakeAdapter(), prompts_of(1), keys, SETTINGS, ONE_WAVE))
    assert len(adapter.prefills) == 1
    assert max(adapter.steps) <= 7


def again(fails: list[int]) -> Attempt[RolloutPlan]:
    """Repeats what ran out of memory, with half the rows each time, and counts how often it did."""
    rows = [16]

    def run(unit, undo=None):  # type: ignore[no-untyped-def]
        while True:
            try:
                return unit(RolloutPlan(rows_in_flight=rows[0]))
            except torch.OutOfMemoryError:
                fails.append(rows[0])
            undo()
            rows[0] = max(2, rows[0] // 2)

    return run


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("changes", [{}, {"min_p": 0.05, "repetition_penalty": 1.3}])
def test_a_batch_that_failed_goes_on_from_its_tokens(joins: bool, changes: dict[str, float]) -> None:
    prompts, keys, settings = prompts_of(6), keys_of(6), replace(SETTINGS, **changes)
    whole = generate(FakeAdapter(), prompts, keys, settings, ONE_WAVE)
    adapter, fails = FakeAdapter(joins=joins), []
    adapter.fail_at = {3, 4, 9, 20, 21, 22, 40}
    assert_same(generate_under(adapter, prompts, keys, settings, again(fails)), whole)
    assert len(fails) == 7
    if joins:
        # What was drawn is read back, not drawn again.
        assert [drawn for lengths in adapter.extended for drawn in lengths]
        assert all(drawn >= 1 for lengths in adapter.extended for drawn in lengths)
    drawn = sum(len(row.ids) for row in whole)
    assert sum(adapter.steps) < 1.6 * drawn


@pytest.mark.parametrize("joins", [False, True])
def test_a_completion_may_be_drawn_in_several_calls(joins: bool) -> None:
    prompts, keys = prompts_of(5), keys_of(5)
    whole = generate(FakeAdapter(), prompts, keys, SETTINGS, ONE_WAVE)
    adapter, plan = FakeAdapter(joins=joins), under(RolloutPlan(rows_in_flight=9))
    limited = replace(SETTINGS, max_step_tokens=7)
    rows = generate_under(adapter, prompts, keys, limited, plan)
    assert max(len(row.ids) for row in rows) == 7
    for _ in range(3):
        groups = [rows[start : start + 4] for start in range(0, 20, 4)]
        done = {(p, s) for p, group in enumerate(groups) for s, row in enumerate(group) if row.finished}
        left = [[s for s in range(4) if (p, s) not in done and len(groups[p][s].ids) < 24] for p in range(5)]
        begun = [[groups[p][s] for s in samples] for p, samples in enumerate(left)]
        more = generate_under(
            adapter, prompts, [[keys[p][s] for s in left[p]] for p in range(5)], limited, plan, begun=begun
        )
        places = [(p, s) for p, samples in enumerate(left) for s in samples]
        for (p, s), row in zip(places, more, strict=True):
            rows[4 * p + s] = row
    assert_same(rows, whole)


def test_a_completion_that_has_ended_is_left_as_it_is() -> None:
    prompts, keys = prompts_of(3), keys_of(3)
    whole = generate(FakeAdapter(), prompts, keys, SETTINGS, ONE_WAVE)
    begun = [whole[start : start + 4] for start in range(0, 12, 4)]
    adapter = FakeAdapter(joins=True)
    assert_same(generate_under(adapter, prompts, keys, SETTINGS, under(ONE_WAVE), begun=begun), whole)
    assert adapter.prefills == []


def geometry_of(joins: bool = False) -> ModelGeometry:
    return FakeAdapter(joins=joins).geometry  # 2 * 4 B * 8 = 64 B a token


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kv_tokens", [None, 1, 60, 200])
@pytest.mark.parametrize("rows_in_flight", [1, 7, 64])
@pytest.mark.parametrize("prefill_tokens", [1, 25, 8192])
@pytest.mark.parametrize("inside", [0, 5])
def test_rows_join_as_far_as_the_plan_goes(
    joins: bool, kv_tokens: int | None, rows_in_flight: int, prefill_tokens: int, inside: int
) -> None:
    lengths, groups, geometry = (12, 12, 9, 5), (1, 6, 4, 4), geometry_of(joins)
    kv_bytes = None if kv_tokens is None else kv_tokens * 64
    plan = RolloutPlan(rows_in_flight=rows_in_flight, kv_bytes=kv_bytes, prefill_tokens=prefill_tokens)
    waiting = [Candidate(p, lengths[p], 0, 10) for p, size in enumerate(groups) for _ in range(size)]
    count = admit(waiting, plan, geometry, rows=inside, prompt_bytes=inside * 64)
    assert count <= len(waiting)
    assert count >= (0 if inside else 1)
    if count < 2:
        return
    chosen = waiting[:count]
    unique = {one.prompt for one in chosen}
    assert inside + count <= rows_in_flight
    assert len(unique) == 1 or len(unique) * chosen[0].prompt_tokens <= prefill_tokens
    if joins:
        prompts = inside * 64 + len(unique) * geometry.kv_bytes(12)
        assert kv_bytes is None or geometry.batch_kv_bytes(prompts, inside + count, 10) <= kv_bytes
        # A group is parted only if it is alone.
        assert len(unique) == 1 or count == len(waiting) or waiting[count].prompt not in unique
    else:
        assert kv_bytes is None or count * geometry.kv_bytes(chosen[0].prompt_tokens + 10) <= kv_bytes


def test_batches_that_nothing_joins_are_of_even_size() -> None:
    waiting = [Candidate(prompt, 4, 0, 10) for prompt in range(65)]
    plan = RolloutPlan(rows_in_flight=64)
    assert admit(waiting, plan, geometry_of(), rows=0, prompt_bytes=0) == 33
    assert admit(waiting, plan, geometry_of(joins=True), rows=0, prompt_bytes=0) == 64


def test_progress_counts_sequences() -> None:
    told: list[tuple[int, int]] = []
    plan = RolloutPlan(rows_in_flight=10)
    generate(FakeAdapter(), prompts_of(6), keys_of(6), SETTINGS, plan, lambda ended, total: told.append((ended, total)))
    assert told[-1] == (24, 24)
    assert told == sorted(told)
    assert len(set(told)) == len(told) > 3


def test_nothing_asked_for_is_nothing_done() -> None:
    adapter = FakeAdapter()
    assert generate(adapter, [], [], SETTINGS, ONE_WAVE) == []
    assert generate(adapter, prompts_of(2), [[], []], SETTINGS, ONE_WAVE) == []
    assert adapter.prefills == []


# What is left behind


def test_nothing_is_left_after_return() -> None:
    adapter = FakeAdapter()
    gc.collect()
    gc.disable()
    try:
        rows = generate(adapter, prompts_of(6), keys_of(6), SETTINGS, RolloutPlan(rows_in_flight=9))
        assert adapter.alive() == 0
    finally:
        gc.enable()
    assert all(not row.logprobs.requires_grad and not row.logprobs.is_inference() for row in rows)


@pytest.mark.parametrize("fail_at", [1, 5])
def test_nothing_is_left_after_an_exception(fail_at: int) -> None:
    adapter = FakeAdapter()
    adapter.fail_at = fail_at
    failed = False
    gc.collect()
    gc.disable()
    try:
        try:
            generate(adapter, prompts_of(6), keys_of(6), SETTINGS, ONE_WAVE)
        except torch.OutOfMemoryError:
            failed = True
        assert failed
        assert adapter.alive() == 0
    finally:
        gc.enable()
    assert torch.is_grad_enabled()


def test_at_most_one_set_of_logits_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, held = FakeAdapter(), []
    step = adapter.decode_step

    def counted(state: FakeState, tokens_B: torch.Tensor) -> torch.Tensor:
        living = [ref() for ref in adapter.handed]
        held.append(sum(isinstance(it, torch.Tensor) and it.shape[1] == adapter.vocab for it in living))
        return step(state, tokens_B)

    monkeypatch.setattr(adapter, "decode_step", counted)
    generate(adapter, prompts_of(3), keys_of(3), SETTINGS, ONE_WAVE)
    assert set(held) == {0}


@pytest.mark.parametrize("fail_at", [None, 3])
def test_every_modules_mode_is_put_back(fail_at: int | None) -> None:
    adapter = FakeAdapter()
    adapter.model.train()
    adapter.model.mix.eval()
    before = [module.training for module in adapter.model.modules()]
    adapter.fail_at = fail_at
    try:
        generate(adapter, prompts_of(2), keys_of(2), SETTINGS, ONE_WAVE)
    except torch.OutOfMemoryError:
        assert fail_at is not None
    assert [module.training for module in adapter.model.modules()] == before
    assert adapter.modes == {False}


def test_rows_come_as_plain_tensors_that_autograd_takes() -> None:
    row = generate(FakeAdapter(), prompts_of(1), keys_of(1, 1), SETTINGS, ONE_WAVE)[0]
    weight = torch.ones((), requires_grad=True)
    (weight * row.logprobs).sum().backward()
    assert weight.grad is not None


# Refusals


def test_a_row_without_a_distribution_is_named() -> None:
    adapter = FakeAdapter()
    adapter.poison = (3, 1)
    settings = replace(SETTINGS, eos_token_ids=())
    with pytest.raises(MemsafeError, match=r"position 3 of prompt 0, sample 1 \(1 of 4 rows\).*learning rate"):
        generate(adapter, prompts_of(1), keys_of(1), settings, ONE_WAVE)


def test_a_row_that_has_ended_may_hold_anything() -> None:
    prompts, keys, settings = prompts_of(1), keys_of(1, group=30, seed=2), replace(SETTINGS, eos_token_ids=(2,))
    whole = generate(FakeAdapter(), prompts, keys, settings, ONE_WAVE)
    lengths = [len(row.ids) for row in whole]
    adapter = FakeAdapter()
    adapter.poison = (min(lengths), lengths.index(min(lengths)))
    assert_same(generate(adapter, prompts, keys, settings, ONE_WAVE), whole)
    assert adapter.steps[min(lengths) - 1] == 30  # it had not left the cache


def test_a_too_long_prompt_is_refused() -> None:
    adapter = FakeAdapter(max_positions=30)
    prompts = [torch.arange(3, 9), torch.arange(3, 10)]
    with pytest.raises(DataError, match=r"Prompt 1 has 7 tokens; with up to 24 new .* 30 positions.* at most 23\."):
        generate(adapter, prompts, keys_of(2), SETTINGS, ONE_WAVE)
    assert adapter.prefills == []
    assert len(generate(adapter, prompts[:1], keys_of(1), SETTINGS, ONE_WAVE)) == 4


def test_other_bad_input_is_refused() -> None:
    adapter, prompts = FakeAdapter(), prompts_of(2)
    with pytest.raises(DataError, match=r"Prompt 1 has 0 tokens"):
        generate(adapter, [prompts[0], prompts[0][:0]], keys_of(2), SETTINGS, ONE_WAVE)
    with pytest.raises(DataError, match="2 prompts came with keys for 3"):
        generate(adapter, prompts, keys_of(3), SETTINGS, ONE_WAVE)
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        generate(adapter, prompts, keys_of(2), replace(SETTINGS, max_new_tokens=0), ONE_WAVE)
    with pytest.raises(ConfigError, match=r"temperature is -1\.0"):
        generate(adapter, prompts, keys_of(2), replace(SETTINGS, temperature=-1.0), ONE_WAVE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_step_tokens": 0}, r"max_step_tokens is 0, .* at least 1 token, or to None"),
        ({"max_step_tokens": -3}, "max_step_tokens is -3"),
        ({"min_new_tokens": 25}, r"min_new_tokens is 25, .* has 24 tokens.* at most 24"),
        ({"eos_token_ids": (1, 23)}, r"eos_token_id holds the id 23, .* from 23 tokens \(0 to 22\).* Set eos_token_id"),
        ({"eos_token_ids": (-1,)}, "eos_token_id holds the id -1"),
        ({"suppress_tokens": (4, 40)}, "suppress_tokens holds the id 40"),
        ({"begin_suppress_tokens": (23,)}, "begin_suppress_tokens holds the id 23"),
        ({"forced_bos_token_id": 23}, "forced_bos_token_id holds the id 23"),
        ({"forced_eos_token_ids": (24,)}, "forced_eos_token_id holds the id 24"),
        ({"bad_words_ids": ((3, 25),)}, "bad_words_ids holds the id 25"),
        ({"sequence_bias": (((3, 26), 1.0),)}, "sequence_bias holds the id 26"),
    ],
)
def test_settings_that_no_network_can_follow_are_refused(changes: dict[str, Any], said: str) -> None:
    adapter = FakeAdapter()
    with pytest.raises(ConfigError, match=said):
        generate(adapter, prompts_of(2), keys_of(2), replace(SETTINGS, **changes), ONE_WAVE)
    assert adapter.prefills == []


@pytest.mark.parametrize("name", ["prefill_tokens", "rows_in_flight"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_plan_without_room_for_a_token_is_refused(name: str, value: int) -> None:
    adapter = FakeAdapter()
    with pytest.raises(ConfigError, match=rf"RolloutPlan\.{name} is {value}; it must be at least 1\."):
        generate(adapter, prompts_of(2), keys_of(2), SETTINGS, RolloutPlan(**{name: value}))
    assert adapter.prefills == []
