"""How a token is drawn, against transformers' `generate` on the same histories, and against itself in other batches."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.rollout.native import sequences
from memsafe_rl.rollout.native.sequences import Drawer, key_tensor, refuse_broken, text_stops
from memsafe_rl.types import SamplingSettings, SequenceKey
from tests.rollout.plainly import draw_from
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer

VOCAB = 64
NEW = 14
EOS = (EOS_ID, 5)
BASE = SamplingSettings(NEW, EOS)


class Odd(LogitsProcessor):
    """Bans odd tokens after a token divisible by three, and looks at the whole history."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores + input_ids.float().mean(1, keepdim=True) * torch.arange(scores.shape[1]) / 500
        scores[:, 1::2] = scores[:, 1::2].masked_fill((input_ids[:, -1] % 3 == 0)[:, None], -torch.inf)
        return scores


ODD = Odd()

# Ours, and what transformers is told; both with names of their own.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "top_k": ({"top_k": 9}, {"top_k": 9}),
    "top_p": ({"top_p": 0.7}, {"top_p": 0.7}),
    "min_p": ({"min_p": 0.3}, {"min_p": 0.3}),
    "top_h": ({"top_h": 0.5}, {"top_h": 0.5}),
    "typical_p": ({"typical_p": 0.6}, {"typical_p": 0.6}),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.015}, {"epsilon_cutoff": 0.015}),
    "eta_cutoff": ({"eta_cutoff": 0.05}, {"eta_cutoff": 0.05}),
    "repetition_penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 1.5}, {"encoder_repetition_penalty": 1.5}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "no_repeat_token": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 2}),
    "sequence_bias": (
        {"sequence_bias": (((7,), 2.5), ((7, 9), -3.0), ((8, 7, 9), 4.0), ((9,), -1.0), ((5,), 1.5))},
        {"sequence_bias": {(7,): 2.5, (7, 9): -3.0, (8, 7, 9): 4.0, (9,): -1.0, (5,): 1.5}},
    ),
    "bad_words_ids": (
        {"bad_words_ids": ((7,), (9, 9), (7, 20), (EOS_ID,))},
        {"bad_words_ids": [[7], [9, 9], [7, 20], [EOS_ID]]},
    ),
    "min_length": ({"min_length": 12}, {"min_length": 12}),
    "min_new_tokens": ({"min_new_tokens": 5}, {"min_new_tokens": 5}),
    "forced_bos_token_id": ({"forced_bos_token_id": 11}, {"forced_bos_token_id": 11}),
    "forced_eos_token_id": ({"forced_eos_token_ids": (5, 12)}, {"forced_eos_token_id": [5, 12]}),
    "exponential_decay": (
        {"exponential_decay_length_penalty": (3, 1.4)},
        {"exponential_decay_length_penalty": (3, 1.4)},
    ),
    "suppress_tokens": ({"suppress_tokens": (3, 40, 41)}, {"suppress_tokens": [3, 40, 41]}),
    "begin_suppress_tokens": ({"begin_suppress_tokens": (3, 40)}, {"begin_suppress_tokens": [3, 40]}),
    "begin_after_forced": (
        {"begin_suppress_tokens": (3, 40), "forced_bos_token_id": 11},
        {"begin_suppress_tokens": [3, 40], "forced_bos_token_id": 11},
    ),
    "logits_processor": ({"logits_processor": (ODD,)}, {"logits_processor": [ODD]}),
    "own_in_place_of_theirs": (
        {"logits_processor": (ODD, RepetitionPenaltyLogitsProcessor(3.0)), "repetition_penalty": 1.2},
        {"logits_processor": [ODD, RepetitionPenaltyLogitsProcessor(3.0)], "repetition_penalty": 1.2},
    ),
    "all_of_them": (
        {
            "sequence_bias": (((7,), 2.5), ((7, 9), -3.0)),
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": ((30,), (9, 9)),
            "min_new_tokens": 4,
            "exponential_decay_length_penalty": (6, 1.2),
            "suppress_tokens": (3,),
            "begin_suppress_tokens": (33,),
            "logits_processor": (ODD,),
            "top_h": 0.95,
            "top_k": 30,
            "top_p": 0.95,
            "min_p": 0.01,
            "typical_p": 0.95,
            "epsilon_cutoff": 0.002,
            "eta_cutoff": 0.002,
        },
        {
            "sequence_bias": {(7,): 2.5, (7, 9): -3.0},
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[30], [9, 9]],
            "min_new_tokens": 4,
            "exponential_decay_length_penalty": (6, 1.2),
            "suppress_tokens": [3],
            "begin_suppress_tokens": [33],
            "logits_processor": [ODD],
            "top_h": 0.95,
            "top_k": 30,
            "top_p": 0.95,
            "min_p": 0.01,
            "typical_p": 0.95,
            "epsilon_cutoff": 0.002,
            "eta_cutoff": 0.002,
        },
    ),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    models = {arch: tiny_model(arch, VOCAB) for arch in ("qwen3", "gpt2")}
    for model in models.values():
        for weight in (model.get_output_embeddings().weight,):
            weight.data.normal_(std=1.5, generator=torch.Generator().manual_seed(5))
    return models


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(6, VOCAB, (length,), generator=generator) for length in (1, 4, 9)]


def by_generate(model: Any, prompt: Tensor, theirs: dict[str, Any], **how: Any) -> Any:
    theirs = dict(theirs)
    given = {"logits_processor": theirs.pop("logits_processor", None)}
    neutral = {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
    config = GenerationConfig(
        **{**neutral, **how, **theirs},
        max_new_tokens=NEW,
        eos_token_id=list(EOS),
        pad_token_id=PAD_ID,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    torch.manual_seed(9)
    return model.generate(prompt[None], generation_config=config, **given)


def scores_of(
    drawer: Drawer, logits: Tensor, positions: Tensor, histories: Sequence[Tensor] = (), lengths: Sequence[int] = ()
) -> Tensor:
    """The scores whose softmax is sampled from, or, with temperature 0, whose greatest is taken."""
    if not drawer._processors:
        return logits.float() / drawer._temperature
    return drawer._process(logits, drawer._rows(positions, lengths, histories))


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [*(pytest.param(t, marks=pytest.mark.slow) for t in (1.0, 0.0)), 0.6])
def test_scores_equal_those_of_generate(models: dict[str, Any], case: str, temperature: float) -> None:
    """All steps of all prompts are processed as one ragged batch, which `generate` saw one row and step at a time."""
    ours, theirs = CASES[case]
    settings = replace(BASE, temperature=temperature, **ours)
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    logits, scores, histories, lengths, positions = [], [], [], [], []
    for prompt in prompts():
        made = by_generate(models["qwen3"], prompt, theirs, **how)
        for step, (raw, processed) in enumerate(zip(made.logits, made.scores, strict=True)):
            logits.append(raw[0])
            scores.append(processed[0])
            histories.append(made.sequences[0, : len(prompt) + step])
            lengths.append(len(prompt))
            positions.append(step)
    drawer = Drawer(settings)
    given = torch.stack(logits)
    before = given.clone()
    got = scores_of(drawer, given, torch.tensor(positions), histories, lengths)
    assert torch.equal(given, before)
    expected = torch.stack(scores)
    assert len(expected) > 8
    assert torch.equal(got.isneginf(), expected.isneginf())
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)  # a few ulps of float32: sums in another order
    assert drawer.keeps_model_logprobs or torch.equal(got, given / (temperature or 1.0))


def decode(model: Any, prompts: Sequence[Tensor], settings: SamplingSettings, keys: Any = None) -> list[list[int]]:
    """Decodes row by row without a cache, all rows in one call of the drawer at their own lengths."""
    drawer, rows = Drawer(settings), [prompt.clone() for prompt in prompts]
    keys_B4 = key_tensor(keys or [SequenceKey(1, 2, row, 0) for row in range(len(rows))])
    alive = list(range(len(rows)))
    for step in range(settings.max_new_tokens):
        with torch.no_grad():
            logits = torch.stack([model(rows[row][None]).logits[0, -1] for row in alive])
        histories = [rows[row] for row in alive]
        tokens, values = draw_from(
            drawer,
            logits,
            keys_B4[alive],
            torch.full((len(alive),), step),
            histories if drawer.needs_history else None,
            [len(prompts[row]) for row in alive] if drawer.needs_prompt_lengths else None,
        )
        assert values[0].tolist() == tokens.tolist()
        for row, token in zip(alive, tokens, strict=True):
            rows[row] = torch.cat([rows[row], token[None]])
        stopped = drawer.ends_by_text([rows[row] for row in alive])
        alive = [row for row, ended in zip(alive, stopped, strict=True) if rows[row][-1] not in EOS and not ended]
        if not alive:
            break
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, prompts, strict=True)]


# What is drawn follows from logits alone, whatever network they are of.
@pytest.mark.slow_after(10)
@pytest.mark.parametrize(("arch", "case"), [*(("qwen3", case) for case in CASES), ("gpt2", "all_of_them")])
def test_greedy_tokens_equal_those_of_generate(models: dict[str, Any], arch: str, case: str) -> None:
    ours, theirs = CASES[case]
    got = decode(models[arch], prompts(), replace(BASE, temperature=0.0, **ours))
    for prompt, tokens in zip(prompts(), got, strict=True):
        made = by_generate(models[arch], prompt, theirs, do_sample=False)
        assert tokens == made.sequences[0, len(prompt) :].tolist()


def ragged(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[int]]:
    """Logits, keys, positions, histories and prompt lengths of rows that stand anywhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCAB, generator=generator) * 3
    lengths = torch.randint(1, 8, (count,), generator=generator)
    positions = torch.randint(0, NEW, (count,), generator=generator)
    histories = [
        torch.randint(0, VOCAB, (int(total),), generator=generator) for total in (lengths + positions).tolist()
    ]
    return (
        logits,
        key_tensor([SequenceKey(1, 2, row, 3) for row in range(count)]),
        positions,
        histories,
        lengths.tolist(),
    )


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize("case", CASES)
def test_a_draw_does_not_depend_on_the_rows_around(
    monkeypatch: pytest.MonkeyPatch, case: str, temperature: float
) -> None:
    drawer = Drawer(replace(BASE, temperature=temperature, **CASES[case][0]))
    logits, keys, positions, histories, lengths = ragged()
    tokens, values = draw_from(drawer, logits, keys, positions, histories, lengths)
    assert values.shape == (4, len(logits))
    assert values.isfinite().all()
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        alone, alone_values = draw_from(drawer, logits[one], keys[one], positions[one], histories[one], lengths[one])
        assert alone.tolist() == tokens[one].tolist()
        torch.testing.assert_close(alone_values, values[:, one], rtol=1e-6, atol=1e-6)  # float32 sums of 64 numbers
    monkeypatch.setattr(sequences, "_TILE_ELEMENTS", 7 * VOCAB)
    tiled, tiled_values = draw_from(drawer, logits, keys, positions, histories, lengths)
    assert tiled.tolist() == tokens.tolist()
    torch.testing.assert_close(tiled_values, values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mass", [0.3, 0.9, 0.999])
def test_a_nucleus_of_a_large_vocabulary_is_that_of_transformers(mass: float) -> None:
    """Rows from peaked to flat: those with a nucleus of few tokens are not sorted, the others are."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(12, 6000, generator=generator) * torch.linspace(0.01, 9, 12)[:, None]
    got = scores_of(Drawer(replace(BASE, top_p=mass)), logits, torch.zeros(12, dtype=torch.int64))
    expected = TopPLogitsWarper(mass)(torch.empty(0), logits)
    sizes = expected.isfinite().sum(1)
    assert sizes.min() < 100
    assert sizes.max() > 1024
    # Their sum runs over 6,000 float32 numbers, whose rounding may move the edge by a token or two of 1e-5.
    differing = got.isfinite() != expected.isfinite()
    assert differing.sum(1).max() <= 2
    assert torch.equal(got[~differing], expected[~differing])


def test_log_probs_are_of_the_distribution_sampled_from_and_of_the_model() -> None:
    drawer = Drawer(replace(BASE, temperature=0.5, top_k=5, repetition_penalty=1.4))
    logits, keys, positions, histories, lengths = ragged()
    tokens, values = draw_from(drawer, logits, keys, positions, histories, lengths)
    scores = scores_of(drawer, logits, positions, histories, lengths).log_softmax(1)
    own = (logits / 0.5).log_softmax(1)
    index = tokens[:, None]
    torch.testing.assert_close(values[1].float(), scores.gather(1, index)[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values[2].float(), own.gather(1, index)[:, 0], rtol=1e-5, atol=1e-5)
    assert (values[1] > values[2] + 1e-3).any()


@pytest.mark.slow
def test_sampling_follows_the_processed_distribution() -> None:
    """Chi-square over 20,000 draws of one row, tokens expected fewer than five times together."""
    count = 20_000
    settings = replace(
        BASE, temperature=1.3, top_p=0.9, repetition_penalty=1.5, bad_words_ids=((4, 9),), begin_suppress_tokens=(2,)
    )
    drawer = Drawer(settings)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)).expand(count, -1) * 1.5
    history, positions = torch.tensor([11, 12, 4]), torch.zeros(count, dtype=torch.int64)
    keys = key_tensor([SequenceKey(7, 1, row, 0) for row in range(count)])
    histories, lengths = [history] * count, [3] * count
    tokens, _ = draw_from(drawer, logits, keys, positions, histories, lengths)
    probs = scores_of(drawer, logits[:1], positions[:1], histories[:1], lengths[:1])[0].double().softmax(0)
    seen = torch.bincount(tokens, minlength=VOCAB).double()
    assert seen[probs == 0].sum() == 0
    assert 0 < (probs == 0).sum() < VOCAB - 10
    kept = probs * count >= 5
    expected = torch.cat([probs[kept], probs[~kept].sum()[None]]) * count
    observed = torch.cat([seen[kept], seen[~kept].sum()[None]])
    used = expected > 0
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    # Wilson and Hilferty 1931: the cube root of chi-square over its freedom is nearly normal; 3.3 sigma is p = 5e-4.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(z) < 3.3


@pytest.mark.slow
def test_without_history_no_value_of_a_tensor_is_read() -> None:
    """Meta tensors have no values: whatever needs one fails."""
    free = {"suppress_tokens", "begin_suppress_tokens", "min_new_tokens", "forced_eos_token_id", "exponential_decay"}
    for case, (ours, _) in CASES.items():
        drawer = Drawer(replace(BASE, **ours))
        if drawer.needs_history or drawer.needs_prompt_lengths:
            assert case not in free
            continue
        empty = torch.empty(3, VOCAB, device="meta")
        positions = torch.empty(3, dtype=torch.int64, device="meta")
        tokens, values = draw_from(drawer, empty, torch.empty(3, 4, dtype=torch.int64, device="meta"), positions)
        assert tokens.shape == (3,)
        assert values.shape == (4, 3)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_processors_that_forbid_every_token_are_named(temperature: float) -> None:
    drawer = Drawer(replace(BASE, temperature=temperature, suppress_tokens=tuple(range(VOCAB))))
    logits, keys, positions, *_ = ragged(3)
    names = [SequenceKey(1, 2, row, 3) for row in range(3)]
    _, values = draw_from(drawer, logits, keys, positions)
    with pytest.raises(MemsafeError, match=r"prompt 0, sample 3 \(3 of 3 rows\).*forbid every token.*suppress_tokens"):
        refuse_broken(values, names, positions.tolist())
    logits[1] = torch.nan
    _, values = draw_from(Drawer(replace(BASE, temperature=temperature)), logits, keys, positions)
    with pytest.raises(MemsafeError, match=r"prompt 1, sample 3 \(1 of 3 rows\).*NaN.*learning rate"):
        refuse_broken(values, names, positions.tolist())
    refuse_broken(values[:, [0, 2]], [names[0], names[2]], [0, 0])


@pytest.mark.parametrize(
    "certain",
    [
        {"exponential_decay_length_penalty": (0, 1e300)},
        {"exponential_decay_length_penalty": (0, 7.0)},
        {"sequence_bias": (((EOS_ID,), 1e308),)},
        {"sequence_bias": (((7, EOS_ID), 1e308), ((EOS_ID,), 1e308))},
    ],
)
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_a_score_that_grows_beyond_float32_makes_its_token_certain(certain: dict[str, Any], temperature: float) -> None:
    drawer = Drawer(replace(BASE, eos_token_ids=(EOS_ID,), temperature=temperature, **certain))
    logits, keys, *_ = ragged(3)
    logits[:, EOS_ID] = torch.tensor([-20.0, 0.5, 20.0])
    positions = torch.full((3,), 1000)
    tokens, values = draw_from(drawer, logits, keys, positions, [torch.full((1003,), 7)] * 3, [3] * 3)
    assert tokens.tolist() == [EOS_ID] * 3
    refuse_broken(values, [SequenceKey(1, 2, row, 3) for row in range(3)], positions.tolist())
    assert values[1].tolist() == [0.0] * 3


def test_processors_that_raise_a_token_to_infinity_are_named() -> None:
    drawer = Drawer(replace(BASE, logits_processor=(lambda _, scores: scores / 0.0,)))
    logits, keys, positions, histories, lengths = ragged(3)
    _, values = draw_from(drawer, logits, keys, positions, histories, lengths)
    with pytest.raises(MemsafeError, match=r"raise one to infinity.*sequence_bias.*exponential_decay_length_penalty"):
        refuse_broken(values, [SequenceKey(1, 2, row, 3) for row in range(3)], positions.tolist())


def test_invalid_values_are_removed() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = torch.nan, torch.inf, -torch.inf
    scores = scores_of(Drawer(replace(BASE, remove_invalid_values=True)), logits, torch.zeros(1, dtype=torch.int64))
    assert scores[0, 3:6].tolist() == [0.0, torch.finfo().max, torch.finfo().min]


def test_wrong_processors_are_refused() -> None:
    logits, keys, positions, histories, lengths = ragged(2)
    for given, message in (
        (lambda _, scores: scores[:, :3], r"returned \(2, 3\)|returned \(1, 3\)"),
        (lambda _, __: None, "returned NoneType"),
        (lambda _, scores, beam: scores + beam, "asks for beam"),
        ("top_p", "cannot be called"),
    ):
        with pytest.raises(ConfigError, match=message):
            draw_from(Drawer(replace(BASE, logits_processor=(given,))), logits, keys, positions, histories, lengths)
    for wrong in ({"top_p": -0.5}, {"top_h": 2.0}, {"eta_cutoff": 1.0}, {"repetition_penalty": -1.0}):
        with pytest.raises(ConfigError):
            draw_from(Drawer(replace(BASE, **wrong)), logits, keys, positions, histories, lengths)
    with pytest.raises(ConfigError, match="names token 64; the vocabulary has 64"):
        draw_from(Drawer(replace(BASE, bad_words_ids=((64,),))), logits, keys, positions)


PAIRS = tiny_tokenizer(320)
STOPS = {"inside": ["b"], "straddling": ["bbc"], "several": ["q!", "xyz", "ac"], "long": ["bcacbc"]}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("strings", STOPS.values(), ids=STOPS)
def test_stop_strings_end_where_generate_ends(strings: list[str]) -> None:
    """Tokens of one and two letters, so that a string begins and ends inside of tokens."""
    model = tiny_model("qwen3", len(PAIRS))
    letters = [token for text, token in PAIRS.get_vocab().items() if set(text) <= set("abc")]
    assert len(letters) > 10
    others = tuple(token for token in range(len(PAIRS)) if token not in letters)
    settings = SamplingSettings(60, EOS, suppress_tokens=others, stops=text_stops(strings, PAIRS))
    given = [torch.tensor(PAIRS(text)["input_ids"]) for text in ("a", "cab", "acbb", "hello ab")]
    ends = 0
    for seed in range(3):
        got = decode(model, given, settings, [SequenceKey(seed, 0, row, 0) for row in range(4)])
        for prompt, tokens in zip(given, got, strict=True):
            # generate is led along our tokens, and must stop where we did.
            forced = Follow(tokens, len(prompt), len(PAIRS))
            made = model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                logits_processor=[forced],
                max_new_tokens=60,
                do_sample=False,
                stop_strings=strings,
                tokenizer=PAIRS,
                eos_token_id=list(EOS),
                pad_token_id=PAD_ID,
            )
            assert made[0, len(prompt) :].tolist() == tokens
            ends += len(tokens) < 60
            text = PAIRS.decode([*prompt.tolist(), *tokens])
            assert len(tokens) == 60 or any(string in text for string in strings)
    assert ends > 0 or strings == STOPS["long"]


class Follow(LogitsProcessor):
    """Leaves `generate` the next of some tokens only, and after the last of them one that would give it away."""

    def __init__(self, tokens: list[int], prompt: int, vocab: int) -> None:
        self.tokens, self.prompt, self.vocab = [*tokens, 2], prompt, vocab

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[input_ids.shape[1] - self.prompt]] = 0
        return forced


def test_stops_ask_for_the_end_of_a_history_only() -> None:
    stops = text_stops(["bbc"], PAIRS)
    drawer = Drawer(replace(BASE, stops=stops))
    assert drawer.stops_by_text
    assert not drawer.needs_history
    rows = [torch.tensor(PAIRS(text)["input_ids"]) for text in ("abbc", "bbcac", "bc", "xxbbcc")]
    ended = drawer.ends_by_text(rows)
    assert ended == drawer.ends_by_text([row[-drawer.text_window :] for row in rows])
    assert ended == [drawer.ends_by_text([row])[0] for row in rows]
    assert ended[:3] == [True, False, False]
    assert Drawer(BASE).ends_by_text(rows) == [False] * 4
    assert drawer.ends_by_text([]) == []
    for wrong in ([], [""], [3]):
        with pytest.raises(ConfigError, match="stop_strings"):
            text_stops(wrong, PAIRS)  # type: ignore[arg-type]


def test_settings_can_be_hashed_and_sent() -> None:
    settings = replace(
        BASE, stops=text_stops(["bbc"], PAIRS), **{**CASES["all_of_them"][0], "logits_processor": (ODD,)}
    )
    sent = pickle.loads(pickle.dumps(replace(settings, logits_processor=())))
    assert sent == replace(settings, logits_processor=())
    assert hash(sent) == hash(replace(settings, logits_processor=()))
    assert settings != sent
    row = torch.tensor(PAIRS("abbc")["input_ids"])
    assert Drawer(sent).ends_by_text([row]) == [True]
