"""Ranks begin with the same settings, prompts and weights, and do together what is asked of one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from memsafe_rl import GRPOConfig
from memsafe_rl.errors import MemsafeError
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.training.assembly.rank_check import begin_alike
from tests.parallel.test_ranks import PATIENCE_SECONDS, run_ranks, set_up_rank
from tests.rollout.multi_turn.helpers import Echo, chat_tokenizer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, make_trainer, weights

DIFFERENT: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "a setting": (lambda rank: {"learning_rate": 0.1 * (1 + rank)}, "learning_rate is 0.1 on rank 0 and 0.2 on rank 1"),
    "steps": (lambda rank: {"max_steps": 1 + rank}, "max_steps is 1 on rank 0 and 2 on rank 1"),
    "sharding": (lambda rank: {"fsdp": ["", "full_shard"][rank]}, 'on rank 0 and "full_shard" on rank 1'),
    "fewer prompts": (lambda rank: {"train_dataset": prompts(PROMPTS[rank:])}, "train_dataset is not the same on rank"),
    "another order": (lambda rank: {"train_dataset": prompts(PROMPTS[:: 1 - 2 * rank])}, "or another order of them"),
    "other prompts of evaluations": (
        lambda rank: {"eval_dataset": {"one": prompts(PROMPTS[:1]), "two": prompts(PROMPTS[: 2 - rank])}},
        "eval_dataset is not the same on rank",
    ),
    "a base": (
        lambda rank: {"model": moved(rank), "peft_config": LoraConfig(target_modules="all-linear")},
        "The frozen weights of network 0 (PeftModel",
    ),
    "what is trained": (
        lambda rank: {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"][: 1 + rank])},
        "The trained weights of rank 1 are not those of rank 0",
    ),
}
CALLED: list[int] = []
FLAGS = ("should_training_stop", "should_save", "should_evaluate")


def prompts(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"prompt": texts})


def moved(rank: int) -> Any:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    return model


class Asking(TrainerCallback):  # type: ignore[misc]
    """Asks for something on one rank alone, behind its first step, and counts evaluations."""

    def __init__(self, flag: str) -> None:
        self.flag, self.evaluations = flag, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 1 and state.global_step == 1 and self.flag:
            setattr(control, self.flag, True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluations += 1
        control.should_training_stop = control.should_training_stop or args.process_index == 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 1 and not self.flag:
            raise ZeroDivisionError("the last word")


class AsksInLogs(TrainerCallback):  # type: ignore[misc]
    """Asks for a checkpoint where one rank sees the first step's metrics."""

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 0 and state.global_step == 1:
            control.should_save = True


class Replaces(TrainerCallback):  # type: ignore[misc]
    """Puts other tensors in the gradients' places."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight.grad)


class Doubled(GRPOTrainer):
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        return super()._calculate_rewards(inputs, prompts, completions, ids) * 2


class Freezing(TrainerCallback):  # type: ignore[misc]
    """Freezes all weights but a norm's behind the first step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 1:
            for name, weight in model.named_parameters():
                weight.requires_grad_(name == "model.norm.weight")
            self.seen = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def moved(self, model: Any) -> list[str]:
        return [name for name, weight in model.named_parameters() if not torch.equal(weight, self.seen[name])]


def masked_on(rank: int, asked: list[str], trainer: Any) -> dict[str, Any]:
    """Draws the same for all rows; only rank 0 says which tokens the model chose, a third of them."""
    ids = trainer.processing_class(text=asked)["input_ids"]
    drawn = {"prompt_ids": ids, "completion_ids": [[20, 30, 1]] * len(asked), "logprobs": None}
    return drawn if rank else {**drawn, "env_mask": [[1, 0, 0]] * len(asked)}


def missing_at_first(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step == 0 and not CALLED:
        CALLED.append(1)
        raise ValueError("no judge yet")
    return [float(len(text) % 3) for text in completions]


def toss(rows: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"prompt": [f"{random.randrange(10**6)}: {text}" for text in rows["prompt"]]}


def notes(seen: list[str], prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    seen.extend(dict.fromkeys(prompts))
    return [float(len(text) % 3) for text in completions]


def raising(*_: Any) -> Any:
    raise ZeroDivisionError("no optimizer")


def trainer_of(folder: Path, **settings: Any) -> Any:
    usual = {"per_device_train_batch_size": 4, "max_steps": 3, "memory_forecast": False}
    return make_trainer(folder, **{"eval_dataset": prompts(PROMPTS[:1]), **usual, **settings})


def work(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    found: dict[Any, Any] = {}
    for name, (settings, _) in DIFFERENT.items():
        with pytest.raises(MemsafeError) as caught:
            trainer_of(Path(folder) / name, **settings(rank))
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    own = {"output_dir": Path(folder) / f"own {rank}", "memory_budget": f"{1 + rank}GiB", "run_name": f"run {rank}"}
    alone = trainer_of(own.pop("output_dir"), model=moved(rank), logging_steps=1 + rank, **own)
    alone.train()
    found["trained"] = weights(alone)
    for sharded in ({}, {"fsdp": "full_shard"}):
        for flag in FLAGS:
            asking = Asking(flag)
            trainer = trainer_of(Path(folder) / f"{flag}{len(sharded)}", callbacks=[asking], **sharded)
            trainer.train()
            saved = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
            found[flag, len(sharded)] = (trainer.state.global_step, saved, asking.evaluations)
    freezing = Freezing()
    trainer = trainer_of(Path(folder) / "frozen", callbacks=[freezing], weight_decay=0.1)
    trainer.train()
    found["moved"] = freezing.moved(trainer.model)
    with pytest.raises(MemsafeError) as failed:
        trainer_of(Path(folder) / "frozen parts", callbacks=[freezing], fsdp="full_shard").train()
    found["frozen"] = str(failed.value)
    trainer = trainer_of(Path(folder) / "frozen before", fsdp="full_shard")
    trainer.model.model.layers[0].requires_grad_(False)
    with pytest.raises(MemsafeError) as failed:
        trainer.train()
    found["frozen before"] = str(failed.value)
    trainer_of(Path(folder) / "logs", callbacks=[AsksInLogs()]).train()
    found["logs"] = sorted(path.name for path in (Path(folder) / "logs").glob("checkpoint-*"))
    trainer = trainer_of(Path(folder) / "replaced", callbacks=[Replaces()], fsdp="full_shard", ddp_timeout=77)
    found["seconds"] = trainer.setup.parallel._hosts._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    before = [weight.full_tensor().clone() for weight in trainer.model.parameters()]
    trainer.train()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    found["replaced"] = all(torch.equal(one, other.full_tensor()) for one, other in pairs)
    drawing = {"rollout_func": partial(masked_on, rank), "per_device_train_batch_size": 4}
    trainer = trainer_of(Path(folder) / "masked", **drawing)
    trainer.train()
    found["masked"] = trainer.history[0]["completions/mean_length"]
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "num_generations_eval": 1, "bf16": False}
    settings |= {"use_cpu": True, "report_to": "none", "max_completion_length": 8, "memory_forecast": False}
    arguments = GRPOConfig(str(Path(folder) / "doubled"), **settings)
    given = {"processing_class": tiny_tokenizer(), "train_dataset": prompts(PROMPTS)}
    doubled = Doubled(tiny_model(), lambda completions, **_: [3.0] * len(completions), arguments, **given)
    found["doubled"] = doubled.evaluate(prompts(PROMPTS[:1]))["eval_reward"]
    (Path(folder) / f"plain {rank}").touch()
    with pytest.raises(MemsafeError) as failed:
        trainer_of(Path(folder) / ("plain 0/run" if rank == 0 else "run"))
    found["built"] = str(failed.value)

    def logs_its_rank(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("rank", float(rank))
        return [float(len(text) % 3) for text in completions]

    def absent(completions: list[str], **_: Any) -> list[float]:
        if rank == 0:
            raise ValueError("the judge is away")
        return [0.0] * len(completions)

    def draws(completions: list[str], **_: Any) -> list[float]:
        found["numbers"] = random.random(), float(torch.rand(())), float(np.random.rand())
        return [float(len(text) % 3) for text in completions]

    trainer_of(Path(folder) / "random", reward_funcs=[draws], max_steps=1).train()
    found["evaluated"] = trainer_of(Path(folder) / "evaluated", reward_funcs=[logs_its_rank]).evaluate()
    talk = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]})
    plays = {"environment_factory": Echo, "processing_class": chat_tokenizer(), "train_dataset": talk}
    for name, given in {"drawn": {}, "played": {**plays, "eval_dataset": talk.take(1)}}.items():
        judged = {"num_generations_eval": 1, "reward_funcs": lambda completions, **_: [3.0] * len(completions)}
        found[name] = trainer_of(Path(folder) / name, max_completion_length=24, **judged, **given).evaluate()
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(GRPOTrainer, "create_optimizer", raising)
        with pytest.raises((MemsafeError, ZeroDivisionError)) as failed:
            trainer_of(Path(folder) / "unready").train()
    found["unready"] = str(failed.value)
    if rank:
        time.sleep(5)  # it may do something else: the other one knows
    with pytest.raises((MemsafeError, ZeroDivisionError)) as failed:
        trainer_of(Path(folder) / "end", callbacks=[Asking("")], max_steps=1).train()
    found["end"] = str(failed.value)
    again = trainer_of(Path(folder) / "again", reward_funcs=[missing_at_first], eval_dataset=prompts(PROMPTS[:2]))
    with pytest.raises(ValueError, match="no judge yet"):
        again.evaluate()  # on all ranks
    again.train()
    found["again"] = again.state.global_step
    tossed = Dataset.from_dict({"prompt": PROMPTS}).with_transform(toss)
    seen: list[str] = []
    told = {"train_dataset": tossed, "reward_funcs": [partial(notes, seen)], "num_generations": 8}
    trainer_of(Path(folder) / "tossed", per_device_eval_batch_size=8, **told).train()
    found["tossed"] = seen
    for name in ("evaluate", "save_model"):
        trainer = trainer_of(Path(folder) / name, reward_funcs=[absent])
        (Path(folder) / f"file {rank}").touch()
        arguments = {} if name == "evaluate" else {"output_dir": Path(folder) / "file 0" / "model"}
        with pytest.raises((MemsafeError, ValueError)) as failed:
            getattr(trainer, name)(**arguments)
        found[name] = str(failed.value)
        if rank == 0:
            time.sleep(5)  # with the error caught, as in a notebook
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_told_in_what(name: str, ranks: list[dict[Any, Any]]) -> None:
    assert all(rank[name].startswith("ConfigError: ") and DIFFERENT[name][1] in rank[name] for rank in ranks)


def test_a_model_and_its_reference_of_one_class_are_compared_apart(tmp_path: Path) -> None:
    trainer, told = make_trainer(tmp_path, beta=0.1), list[dict[Any, str]]()
    ranks: Any = MagicMock(gather=lambda facts: told.extend(facts) or facts)
    begin_alike(trainer.setup, ranks)
    assert len(trainer.setup.networks) == 2
    assert [name for kind, name in told[0] if "frozen" in name] == [
        f"frozen weights of network {place} (Qwen3ForCausalLM)" for place in range(2)
    ]


@pytest.mark.slow
def test_ranks_choose_the_best_step_by_the_same_metrics(ranks: list[dict[Any, Any]]) -> None:
    assert ranks[0]["evaluated"]["eval_rank"] == 0.5  # the mean over all ranks' rows, as TRL's
    assert ranks[0]["evaluated"] == ranks[1]["evaluated"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drawn", "played"])
def test_a_rank_without_rows_takes_part_in_an_evaluation(name: str, ranks: list[dict[Any, Any]]) -> None:
    assert [rank[name]["eval_reward"] for rank in ranks] == [3.0, 3.0]
    assert name == "drawn" or all(rank[name]["eval_episodes/mean_turns"] >= 1 for rank in ranks)


@pytest.mark.slow
def test_an_error_before_there_is_an_optimizer_ends_all_ranks_with_its_name(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["unready"] for rank in ranks][1] == "no optimizer"
    assert "Rank 1 ended the run: ZeroDivisionError: no optimizer" in ranks[0]["unready"]


@pytest.mark.slow
def test_trained_weights_begin_as_those_of_the_main_rank(ranks: list[dict[Any, Any]], tmp_path: Path) -> None:
    assert torch.equal(ranks[0]["trained"], ranks[1]["trained"])
    start = weights(make_trainer(tmp_path, max_steps=1))
    assert (ranks[0]["trained"] - start).abs().max() < 0.1  # rank 1 had one that was 1 off


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [0, 1], ids=["replicas", "sharded"])
@pytest.mark.parametrize(
    ("flag", "wanted"),
    [("should_training_stop", (1, [], 0)), ("should_save", (3, ["checkpoint-1"], 0)), ("should_evaluate", (1, [], 1))],
)
def test_what_a_callback_asks_for_on_one_rank_all_do(
    flag: str, wanted: Any, sharded: int, ranks: list[dict[Any, Any]]
) -> None:
    assert [rank[flag, sharded] for rank in ranks] == [wanted, wanted]


@pytest.mark.slow
def test_weights_that_a_callback_freezes_stay_on_all_ranks_or_are_refused(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["moved"] for rank in ranks] == [["model.norm.weight"]] * 2
    assert all("1 weights are trained where 24 were" in rank["frozen"] for rank in ranks)


@pytest.mark.slow
def test_weights_that_are_frozen_before_training_are_refused_by_name_where_they_are_divided(
    ranks: list[dict[Any, Any]],
) -> None:
    assert all("weights are trained where 24 were" in rank["frozen before"] for rank in ranks)


@pytest.mark.slow
def test_a_wish_that_one_rank_has_as_it_sees_the_metrics_all_fulfil(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["logs"] for rank in ranks] == [["checkpoint-1"]] * 2


@pytest.mark.slow
def test_gradients_that_a_callback_replaces_are_stepped_where_weights_are_divided(ranks: list[dict[Any, Any]]) -> None:
    assert all(rank["replaced"] for rank in ranks)


@pytest.mark.slow
def test_ranks_wait_for_each_other_as_long_as_they_are_told(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["seconds"] for rank in ranks] == [77.0, 77.0]


@pytest.mark.slow
def test_masks_that_one_ranks_rollouts_give_leave_the_others_whole(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["masked"] for rank in ranks] == [2.0, 2.0]  # four rows of one token, four of three


@pytest.mark.slow
def test_rewards_of_a_subclass_need_no_rows_of_every_rank(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["doubled"] for rank in ranks] == [6.0, 6.0]


@pytest.mark.slow
def test_an_error_while_a_trainer_is_built_is_told_to_all_ranks(ranks: list[dict[Any, Any]]) -> None:
    assert "cannot be written" in ranks[0]["built"]
    assert "Rank 0 ended the run: ConfigError: output_dir is" in ranks[1]["built"]


@pytest.mark.slow
def test_ranks_that_failed_alike_beside_training_can_train(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["again"] for rank in ranks] == [3, 3]


@pytest.mark.slow
def test_a_group_over_two_ranks_has_one_prompt_though_rows_draw_random_numbers(ranks: list[dict[Any, Any]]) -> None:
    assert len(ranks[0]["tossed"]) == 3
    assert ranks[0]["tossed"] == ranks[1]["tossed"]


@pytest.mark.slow
def test_rewards_of_each_rank_draw_numbers_of_their_own(ranks: list[dict[Any, Any]]) -> None:
    assert all(one != other for one, other in zip(ranks[0]["numbers"], ranks[1]["numbers"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), [("evaluate", "the judge is away"), ("save_model", "cannot be written")])
def test_an_error_beside_training_is_told_to_all_ranks_at_once(
    name: str, error: str, ranks: list[dict[Any, Any]]
) -> None:
    assert error in ranks[0][name]
    assert "Rank 0 ended the run" in ranks[1][name]


@pytest.mark.slow
def test_an_error_of_the_last_callback_ends_all_ranks_with_its_name(ranks: list[dict[Any, Any]]) -> None:
    assert ranks[1]["end"] == "the last word"
    assert "Rank 1 ended the run: ZeroDivisionError: the last word" in ranks[0]["end"]
