"""What a user's own engine or adapter gets wrong is said by name, with a remedy."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memsafe_rl import (
    Adapter,
    Completion,
    ConfigError,
    DataError,
    Engine,
    FunctionAdapter,
    FunctionEngine,
    GRPOConfig,
    register_adapter,
)
from tests.extension.test_own_adapter import TinyGRU
from tests.trainers.helpers import cut, make_trainer

GOOD = Completion(torch.tensor([5, 6]), torch.zeros(2), torch.zeros(2), finished=False)


def engine(*, drops: int = 0, **changes: Any) -> Engine:
    """Returns the same completion for every row, but for some that it drops."""
    bad = replace(GOOD, **changes)

    def draw(request: Any, plan: Any) -> list[Completion]:
        return [bad] * (len(request.rows) - drops)

    return Engine(f"bad {drops} {sorted(changes)} {changes!r:.80}", lambda context: FunctionEngine(context, draw))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (engine(drops=1), r"gave 7 completions for 8 rows\. Give one for each of request\.prompts"),
        (engine(ids=torch.tensor([5.0, 6.0])), r"gave row 0 ids \(2,\) torch\.float32\. Give 1 to 6 token ids, int64"),
        (engine(ids=torch.arange(7)), r"gave row 0 ids \(7,\)"),
        (engine(ids=torch.tensor([5, 10**6])), r"gave row 0 token id 1000000\. Give ids from 0 to"),
        (engine(ids=torch.tensor([5, -1])), r"gave row 0 token id -1"),
        (engine(logprobs=torch.zeros(3)), r"row 0 logprobs \(3,\) torch\.float32\. Give one for each token, float32"),
        (engine(logprobs=torch.full((2,), torch.nan)), "Give one for each token, float32, finite"),
        (engine(logprobs=torch.tensor([-0.5, 0.5])), "Give one for each token, float32, finite and not\\s+above 0"),
        (
            engine(logprobs=torch.zeros(2).bfloat16()),
            r"row 0 logprobs \(2,\) torch\.bfloat16\. Give one",
        ),
        (engine(model_logprobs=torch.tensor([-9.0])), r"row 0 model_logprobs \(1,\) torch\.float32"),
        (engine(model_logprobs=torch.tensor([0.0, -torch.inf])), "model_logprobs may be NaN where nobody knows them"),
        (engine(model_logprobs=None), r"row 0 model_logprobs \(\) NoneType"),
        (engine(mask=torch.ones(3, dtype=torch.uint8)), r"row 0 a mask \(3,\)\. Give 0 or 1 for each of its 2 tokens"),
        (engine(mask=torch.tensor([1, -1])), r"a mask \(2,\)\. Give 0 or 1 for each of its 2 tokens"),
        (engine(mask=torch.tensor([1.0, torch.nan])), "Give 0 or 1 for each of its 2 tokens"),
        (engine(finished=None), r"gave row 0 finished=None\. Give True where an end token"),
        (engine(ids=[5, 6]), r"gave row 0 ids \(\) list\. Give 1 to 6 token ids"),
        (engine(logprobs=[0.0, 0.0]), r"gave row 0 logprobs \(\) list\. Give one for each token"),
    ],
)
def test_what_an_engine_draws_is_checked(given: Engine, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        make_trainer(tmp_path, rollout_engine=given).train()


def test_what_an_engine_draws_is_a_completion(tmp_path: Path) -> None:
    def ids_alone(context: Any) -> FunctionEngine:
        return FunctionEngine(context, lambda request, _: [GOOD.ids for _ in request.rows])  # type: ignore[misc]

    with pytest.raises(DataError, match=r"gave row 0 a Tensor\. Give a memsafe_rl\.Completion"):
        make_trainer(tmp_path, rollout_engine=ids_alone).train()


def test_an_engine_that_draws_nothing_is_told_how_much_is_missing(tmp_path: Path) -> None:
    def nothing(context: Any) -> FunctionEngine:
        return FunctionEngine(context, lambda *_: None)  # type: ignore[arg-type,return-value]

    with pytest.raises(DataError, match="gave 0 completions for 8 rows"):
        make_trainer(tmp_path, rollout_engine=nothing).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_engine": "vlm"}, r"rollout_engine is 'vlm'"),
        ({"rollout_engine": 3}, r"rollout_engine is 3"),
        ({"rollout_engine": Engine("empty", lambda _: object())}, r"'empty' gives a object, which has no cache_d"),  # type: ignore[arg-type,return-value]
        ({"rollout_engine": "denoising"}, r"rollout_engine is 'denoising', but Qwen3ForCausalLM draws tokens"),
        ({"min_p": 0.1}, r"min_p is 0\.1, which the rollout engine 'fine' cannot honour"),
        ({"partial_rollout_tokens": 2}, r"'fine' draws completions whole and cannot resume them"),
        ({"cache_implementation": "quantized"}, r"'quantized' with rollout_engine, which keeps its own cache"),
        ({"verify_plan": True}, r"verify_plan is True with rollout_engine"),
        ({"use_transformers_continuous_batching": True}, r"are both set"),
        ({"loss_type": "vespo"}, r"vllm_importance_sampling_mode is 'sequence_mask' with loss_type 'vespo'"),
        ({"rollout_func": print}, r"draws the completions itself\. Leave rollout_engine out"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_before_training(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fine = Engine("fine", fine_engine)
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, **{"rollout_engine": fine, **settings})


def fine_engine(context: Any) -> FunctionEngine:
    return FunctionEngine(context, lambda request, _: [GOOD for _ in request.rows])


def test_an_engine_answers_to_the_name_it_was_chosen_by(tmp_path: Path) -> None:
    def alias(context: Any) -> FunctionEngine:
        return fine_engine(replace(context, name="other"))

    with pytest.raises(ConfigError, match=r"'alias' calls itself 'other'\. Set its name to context\.name"):
        make_trainer(tmp_path, rollout_engine=alias)


def test_the_librarys_own_engine_may_be_named(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, rollout_engine="native", partial_rollout_tokens=2).setup.engine.name == "native"
    config = GRPOConfig(rollout_engine="native", verify_plan=True)
    assert GRPOConfig(**config.to_dict()) == config


class Backwards(TinyGRU):
    """Reads from the end."""

    def forward(self, ids_BL: Tensor) -> Tensor:
        states_BLD: Tensor = super().forward(ids_BL.flip(1)).flip(1)
        return states_BLD


class Unwrapped(TinyGRU):
    """Has an adapter that lacks almost everything."""


class Unknown(nn.Linear):
    """Has none."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Backwards(), r"Backwards gives a row other logits beside another, or once tokens follow"),
        (Unwrapped(), r"adapter 'unwrapped' gives a Linear, which has no cache_in_8_bits, caches, .*hear_routers"),
        (Unknown(2, 2), r"model is a Unknown; give a name.*register_adapter"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(model: nn.Module, message: str, tmp_path: Path) -> None:
    def backwards(model: nn.Module, **options: Any) -> FunctionAdapter:
        return FunctionAdapter(model, Backwards.forward, attrgetter("head"), **options)

    def unwrapped(model: nn.Module, **_: Any) -> Any:
        return nn.Linear(1, 1)

    register_adapter(Adapter(f"backwards {message}", backwards, lambda given: isinstance(given, Backwards)))
    if isinstance(model, Unwrapped):
        register_adapter(Adapter("unwrapped", unwrapped, lambda given: isinstance(given, Unwrapped)))
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, model=model)


class Chosen(TinyGRU):
    """Has functions that a test chooses."""


LOOKS_AHEAD = "Chosen gives a row other logits beside another, or once tokens follow"


@pytest.mark.parametrize(
    ("of_states", "message"),
    [
        (lambda states: torch.cat([states[:, 1:], states[:, :1]], 1), LOOKS_AHEAD),  # sees what it is to predict
        (
            lambda states: states[:, 1:],
            r"hidden_states gave torch\.float32 of shape \(2, \d+, 16\)\. Return a .*tensor",
        ),
        (lambda states: (states,), "hidden_states gave a tuple"),
        (lambda states: states[:, :, :8], r"of shape \(2, \d+, 8\)"),
        (lambda states: states.detach(), r"Chosen gives states without a gradient.*Leave out detach\(\)"),
    ],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_hidden_states_that_would_be_learnt_from_wrongly_are_refused(
    of_states: Any, message: str, recomputed: bool, tmp_path: Path
) -> None:
    def adapter(model: nn.Module, **options: Any) -> FunctionAdapter:
        return FunctionAdapter(model, lambda *given: of_states(Chosen.forward(*given)), attrgetter("head"), **options)

    register_adapter(Adapter("chosen", adapter, lambda given: isinstance(given, Chosen)))
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, model=Chosen(), policy=cut(checkpointing=recomputed)).train()


def test_a_trunk_that_is_frozen_needs_no_gradient_and_a_head_must_be_one(tmp_path: Path) -> None:
    head = attrgetter("head")

    def adapter(model: nn.Module, **options: Any) -> FunctionAdapter:
        return FunctionAdapter(model, lambda *given: Chosen.forward(*given).detach(), head, **options)

    register_adapter(Adapter("chosen", adapter, lambda given: isinstance(given, Chosen)))
    model = Chosen()
    model.embed.requires_grad_(False), model.gru.requires_grad_(False)
    assert make_trainer(tmp_path, model=model).train().global_step == 2
    head = attrgetter("embed")
    with pytest.raises(ConfigError, match="head gives Embedding; it must give the linear layer"):
        make_trainer(tmp_path, model=Chosen())
