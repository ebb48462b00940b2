"""Rows whose prompts hold images score, learn and decode as by the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, _chunks, check_head
from memsafe_rl.models.vision.image_prompts import ImagePrompts
from memsafe_rl.models.vision.tower import ImagePrompt
from memsafe_rl.types import Ragged, Trajectory
from tests.images import END, FAMILIES, IMAGE, SQUARES, START, TWO_WAY, own_arguments, small
from tests.models.language.test_packing import InDouble


def prompt(
    *sides: tuple[int, int], family: str = "qwen2_vl", seed: int = 0, dtype: torch.dtype = torch.float32
) -> ImagePrompt:
    """Makes a prompt of images of so many patches in height and width, with text before, between and after."""
    source = torch.Generator().manual_seed(seed)
    ids, images = [5, 6], {}
    for height, width in sides:
        run = 4 if family in (*SQUARES, TWO_WAY) else height * width // 4
        for _ in range(height * width // 4 // run):
            ids += [START, *[IMAGE] * run, END]
        ids.append(7)
    patches = sum(height * width for height, width in sides)
    if family in SQUARES:
        pixels = torch.randn(1, patches // 16, 3, 16, 16, generator=source, dtype=dtype)
        mask = torch.ones(1, patches // 16, 16, 16, dtype=torch.int64)
        mask[:, -1, 8:] = 0
        images = {"pixel_values": pixels, "pixel_attention_mask": mask}
    elif family == TWO_WAY:
        images = {"pixel_values": torch.randn(patches // 16, 3, 16, 16, generator=source, dtype=dtype)}
    else:
        pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=source, dtype=dtype)
        images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, *side) for side in sides])}
    return ImagePrompt(torch.tensor([*ids, 8, 9]), images)


def several(family: str, dtype: torch.dtype = torch.float32) -> tuple[ImagePrompt, ...]:
    """Makes prompts of one image, of two and of three, unlike in size."""
    shapes: list[list[tuple[int, int]]] = [[(4, 4)], [(4, 8), (8, 4)], [(4, 4), (4, 8), (4, 12)]]
    return tuple(prompt(*sides, family=family, seed=seed, dtype=dtype) for seed, sides in enumerate(shapes))


def adapter_of(model: Any) -> tuple[CausalLMAdapter, ImagePrompts]:
    """Wraps and checks a network."""
    images = ImagePrompts(model)
    adapter = CausalLMAdapter(model, pad_token_id=0, inputs=images)
    check_head(adapter)
    assert adapter.joins
    assert adapter.packs_prompts
    return adapter, images


def rows_of(ids: Sequence[Tensor], group: int = 3) -> Trajectory:
    """Stores a group of unlike completions of each prompt."""
    owners = tuple(place for place in range(len(ids)) for _ in range(group))
    lengths = tuple(2 + (3 * row) % 5 for row in range(len(owners)))
    actions = torch.tensor([(11 + 17 * place) % 50 + 3 for place in range(sum(lengths))])
    return Trajectory(
        conditions=Ragged.from_rows(list(ids)),
        condition_of_row=owners,
        actions=Ragged(actions, lengths),
        loss_mask=Ragged(torch.ones(sum(lengths)), lengths),
        sampling_logprobs=None,
        advantages=torch.zeros(len(owners)),
        group_of_row=owners,
        finished=(True,) * len(owners),
    )


def logprobs(adapter: CausalLMAdapter, trajectory: Trajectory, rows: Sequence[int], *, packed: bool) -> Tensor:
    """Returns the log-probs of completion tokens."""
    found = adapter.distribution(trajectory, rows, packed=packed)
    logits_MV = adapter.lm.lm_head(found.hidden_MD)
    return torch.log_softmax(logits_MV, -1).gather(1, found.tokens_M[:, None])[:, 0]


def own_logprobs(model: Any, given: ImagePrompt, action: Tensor) -> Tensor:
    """Returns the same by the model's own forward."""
    ids, family = [*given.ids.tolist(), *action.tolist()], model.config.model_type
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    logits = model(**own_arguments(family, ids, given.images)).logits[0, len(given.ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, action[:, None])[:, 0]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_the_models_own(family: str, packed: bool) -> None:
    model = small(family)
    adapter, images = adapter_of(model)
    given = several(family)
    trajectory = rows_of(images.read(given))
    with torch.no_grad():
        found = logprobs(adapter, trajectory, range(9), packed=packed)
        actions = trajectory.actions.rows()
        own = [own_logprobs(model, given[row // 3], actions[row]) for row in range(9)]
        torch.testing.assert_close(found, torch.cat(own), rtol=0, atol=1e-5)
        pixels = given[0].images["pixel_values"] + 1
        other = images.read([given[0]._replace(images={**given[0].images, "pixel_values": pixels})])[0]
        unlike = logprobs(adapter, rows_of([other]), range(3), packed=packed)
    assert (unlike - found[: len(unlike)]).abs().max() > 1e-4, "the image makes no difference"


def gradient(adapter: CausalLMAdapter, trajectory: Trajectory, cuts: Sequence[Sequence[int]], packed: bool) -> Tensor:
    """Returns the gradient of the summed log-probs, run in cuts."""
    adapter.lm.zero_grad()
    for rows in cuts:
        logprobs(adapter, trajectory, rows, packed=packed).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in adapter.lm.parameters() if weight.grad is not None])


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("dtype", "allowed"), [pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_gives_the_same_gradient(family: str, dtype: torch.dtype, allowed: float) -> None:
    adapter, images = adapter_of(small(family, dtype))
    trajectory = rows_of(images.read(several(family, dtype)))
    with InDouble() if dtype is torch.float64 else nullcontext():
        whole = gradient(adapter, trajectory, [range(9)], False)
        for cuts in ([[row] for row in range(9)], [[0, 4, 8], [1, 2], [3, 5, 6, 7]]):
            for packed in (False, True):
                difference = (gradient(adapter, trajectory, cuts, packed) - whole).norm() / whole.norm()
                assert difference < allowed, (cuts, packed, float(difference))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("chunk", "alone"),
    [(6, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((6, True), (None, False), (3, False)))],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family: str, chunk: int | None, alone: bool) -> None:
    """However a prompt is read; ``alone`` as where every row has the bits that it would have alone."""
    model = small(family)
    adapter, images = adapter_of(model)
    adapter.batch_invariant = alone
    for given in several(family):
        own = model.generate(
            **own_arguments(family, given.ids.tolist(), given.images),
            attention_mask=torch.ones_like(given.ids)[None],
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )[0, len(given.ids) :]
        logits_PV, state = adapter.prefill([images.read([given])[0]], chunk)
        state, tokens = state.select([0, 0]), []
        logits_BV = logits_PV.expand(2, -1)
        for _ in range(12):
            tokens.append(logits_BV.argmax(-1))
            logits_BV = adapter.decode_step(state, tokens[-1])
        assert torch.equal(torch.stack(tokens, 1), own.expand(2, -1))


def test_a_chunk_cuts_no_image() -> None:
    spans = [slice(3, 7), slice(9, 19)]
    assert [chunk.stop for chunk in _chunks(20, 100, spans)] == [20]
    assert [chunk.stop for chunk in _chunks(20, 5, spans)] == [3, 8, 9, 19, 20]
    assert [chunk.stop for chunk in _chunks(8, 3, ())] == [3, 6, 8]


def test_the_tower_reads_equal_prompts_once_and_a_group_shares_their_bytes() -> None:
    adapter, images = adapter_of(small())
    towers: list[int] = []
    adapter.lm.model.visual.register_forward_pre_hook(lambda *_: towers.append(1))
    given = prompt((16, 16))
    stored = images.read([given])[0]
    begun = len(towers)
    assert images.read([given])[0] is stored
    assert len(towers) == begun

    def peak(rows: Trajectory, packed: bool) -> int:
        adapter.lm.zero_grad()
        with SimulatedMemory() as memory:
            logprobs(adapter, rows, range(8), packed=packed).sum().backward()
        return memory.peak_bytes

    trajectory = rows_of([stored], group=8)
    shared, copied = peak(trajectory, True), peak(trajectory, False)
    assert shared < copied / 3
    assert len(towers) == begun


@pytest.mark.parametrize("family", FAMILIES)
def test_a_moved_placeholder_is_refused(family: str) -> None:
    _, images = adapter_of(small(family))
    one, given, _ = several(family)
    moved = given.ids.clone()
    last = int((moved == IMAGE).nonzero()[-1])
    first = int((moved == END).nonzero()[0])
    moved[last], moved[first] = END, IMAGE
    runs = "5, 4, 4, 3" if family in (*SQUARES, TWO_WAY) else "9, 7"
    with pytest.raises(DataError, match=rf"runs of \[{runs}\] image placeholders.*have \[[48, ]*\] features"):
        images.read([given._replace(ids=moved)])
    with pytest.raises(DataError, match=r"image placeholders, but its 1 image"):
        images.read([given._replace(images=one.images)])


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("what", ["places", "positions"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shift_by_one_place_is_refused_at_start(family: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, images = adapter_of(small(family))
    if what == "positions" and not len(images.table.positions):
        pytest.skip("a token's position is its slot")
    grown = images._grown

    def shifted(*given: Any) -> Any:
        table = grown(*given)
        return replace(table, **{what: getattr(table, what).roll(1, -1)})

    monkeypatch.setattr(images, "_grown", shifted)
    with pytest.raises(ConfigError, match="other hidden states than its own forward"):
        images.read([several(family)[1]])
