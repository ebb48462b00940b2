"""A user's own engine draws for a run: it is repeated when memory runs out, and its log-probs are corrected."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from memsafe_rl import Completion, Engine, EngineContext, EngineRequest, FunctionEngine, RolloutPlan
from tests.trainers.helpers import gradient_of, make_trainer, relative


def by_hand(context: EngineContext, says_too_little: float = 0.0) -> FunctionEngine:
    failures = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")]

    def sample(prompt: list[int], seed: int, tokens: int) -> Completion:
        ids_L, chosen = torch.tensor(prompt), torch.Generator().manual_seed(seed)
        for _ in range(tokens):
            logprobs_LV = context.adapter.model(ids_L[None]).logits[0].log_softmax(-1)
            ids_L = torch.cat([ids_L, logprobs_LV[-1].exp().multinomial(1, generator=chosen)])
        logprobs_T = logprobs_LV[len(prompt) - 1 :].gather(1, ids_L[len(prompt) :, None])[:, 0] - says_too_little
        return Completion(ids_L[len(prompt) :], logprobs_T, logprobs_T, finished=False)

    def draw(request: EngineRequest, plan: RolloutPlan) -> list[Completion]:
        if failures:
            raise failures.pop()
        rows = zip(request.prompts, request.seeds, strict=True)
        return [sample(*row, request.settings.max_new_tokens) for row in rows]

    return FunctionEngine(context, draw)


def test_an_engine_passed_from_outside_is_retried_and_corrected(tmp_path: Path) -> None:
    shy = Engine("shy", lambda context: by_hand(context, math.log(2)))
    trainers = [
        make_trainer(tmp_path, rollout_engine=engine, vllm_importance_sampling_mode="token_truncate")
        for engine in (by_hand, shy)
    ]
    honest, doubled = map(gradient_of, trainers)
    assert relative(doubled, 2 * honest) < 1e-5
    assert [event["event"] for event in trainers[1].memory_events].count("retry") == 1
    assert trainers[0].train().global_step == 2


def test_tokens_that_an_engine_masks_are_not_counted(tmp_path: Path) -> None:
    """Its mask may be of any type that holds 0 and 1."""

    def half(context: EngineContext) -> FunctionEngine:
        whole = by_hand(context).draw_rows
        masks = [torch.arange(6) > 2, (torch.arange(6) > 2).float()] * 4
        return FunctionEngine(
            context,
            lambda *asked: [replace(one, mask=mask) for one, mask in zip(whole(*asked), masks, strict=True)],
        )

    trainer = make_trainer(tmp_path, rollout_engine=half, max_steps=1)
    trainer.train()
    assert trainer.history[0]["completions/mean_length"] == 3.0
