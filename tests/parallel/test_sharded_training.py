"""Two processes that share the weights by FSDP2 draw and learn what one process does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.forecast_error import beside
from benchmarks.sharded_forecast import make_trainer as make_forecast_trainer
from benchmarks.sharded_forecast import save_model
from memsafe_rl.accounting import local_part, weights_of
from memsafe_rl.checkpoint import export
from memsafe_rl.errors import ConfigError
from memsafe_rl.models.blocks import blocks_of
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.parallel import replicas
from memsafe_rl.parallel.shards import check_dividable
from memsafe_rl.trainers.grpo import GRPOTrainer
from tests.checkpoint.test_hub_push import Hub
from tests.parallel.test_ranks import PATIENCE_SECONDS, Pulse, outcome_of, run_ranks, set_up_rank
from tests.parallel.test_ranks_under_faults import At
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, make_trainer, relative, rewire
from tests.trainers.test_diffusion import make_trainer as make_denoising_trainer
from tests.trainers.test_encoder_decoder import tiny_t5
from tests.trainers.test_ppo import make_ppo

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"num_generations": 4, "num_iterations": 2, "beta": 0.1, "max_steps": 4}


ODD_VOCABULARY = 259
"""Which neither two ranks nor three can divide evenly."""


def ranks_now() -> int:
    """Counts the ranks of this run: 1 in the process of the tests."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def grpo(folder: Path, rank: int | None, **settings: Any) -> GRPOTrainer:
    """A run of 12 rows; the second rank cuts its rows into more micro-batches than the first."""
    own = {"per_device_train_batch_size": 12 // ranks_now()}
    dtype, tied = settings.pop("dtype", torch.float32), settings.pop("tied", True)
    reduce_each = settings.pop("reduce_each", (True, True))[rank == 1]
    model = tiny_model(vocab_size=ODD_VOCABULARY, scale=4.0, tied=tied, dtype=dtype)
    return make_trainer(
        folder,
        callbacks=[Asks()],
        model=model,
        policy=cut(20 if rank == 1 else 60, reduce_each=reduce_each),
        **{**SETTINGS, **own, **sharding(rank), **settings},
    )


def ppo(folder: Path, rank: int | None, critic: str) -> Any:
    rows = 8 // ranks_now()
    settings = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4, "kl_target": 1.0}
    return make_ppo(folder, critic, per_device_train_batch_size=rows, **settings, **sharding(rank))


def t5(folder: Path, rank: int | None, *, reads: bool = True, reduce_each: bool = True, **settings: Any) -> GRPOTrainer:
    """An encoder-decoder; its encoder learns, or is read once for all updates."""
    own = {"per_device_train_batch_size": 12 // ranks_now()}
    model = tiny_t5()
    model.get_encoder().requires_grad_(reads)
    policy = cut(10 if rank == 1 else 40, reduce_each=reduce_each)
    return make_trainer(folder, model=model, policy=policy, **{**SETTINGS, **own, **sharding(rank), **settings})


def sharding(rank: int | None) -> dict[str, Any]:
    return {} if rank is None else {"fsdp": "full_shard"}


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


CASES: dict[str, Callable[[Path, int | None], Any]] = {
    "tied": grpo,
    "untied, in float64": partial(grpo, tied=False, dtype=torch.float64),
    "some tokens by their entropy": partial(grpo, top_entropy_quantile=0.5, beta=0.0),
    "lora": lambda folder, rank: grpo(folder, rank, peft_config=lora()),
    "added up once a step": partial(grpo, reduce_each=(False, False)),
    "added up once a step, in float64": partial(grpo, dtype=torch.float64, reduce_each=(False, False)),
    "added up as the rank with fewer micro-batches wants": partial(grpo, reduce_each=(True, False)),
    "lora, added up as the other wants": lambda folder, rank: grpo(
        folder, rank, peft_config=lora(), reduce_each=(False, True)
    ),
    "an encoder-decoder, added up once a step": partial(t5, reduce_each=False),
    "an encoder-decoder": t5,
    "an encoder-decoder whose encoder is frozen": partial(t5, reads=False),
    "a critic on the model": partial(ppo, critic="trunk"),
    "a critic of its own": partial(ppo, critic="model"),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    given: Any = tensor.detach()
    return (given.full_tensor() if hasattr(given, "full_tensor") else given).clone().double()


def gradient_of(weight: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(whole(weight)) if weight.grad is None else whole(weight.grad)


def train(trainer: Any) -> dict[str, Any]:
    """Trains, and gives the tokens and the gradient of every step, the weights, and the bytes that are held."""
    network: nn.Module = trainer.setup.trained
    parameters = [weight for weight in network.parameters() if weight.requires_grad]
    start = torch.cat([whole(weight).flatten() for weight in parameters])
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(measure: Any, *values: Any, **named: Any) -> Any:
        tokens = trainer.loop.state.rollout.trajectory.actions.flat.clone()
        steps.append((tokens, torch.cat([gradient_of(weight).flatten() for weight in parameters])))
        return measure(*values, **named)

    rewire(trainer, "learner", "measure", lambda measure: partial(noted, measure))
    trainer.train()
    return {
        "steps": steps,
        "start": start,
        "end": torch.cat([whole(weight).flatten() for weight in parameters]),
        "history": trainer.history,
        "held": sum(local_part(weight).nbytes for weight in {id(one): one for one in weights_of(network)}.values()),
        "state": sum(local_part(tensor).nbytes for tensor in trainer.setup.committed.tensors()),
    }


def push(folder: Path, rank: int) -> dict[str, bytes]:
    """Saves a model in a folder, which uploads it too, and gives what was uploaded."""
    export.HfApi = hub = Hub()  # type: ignore[misc, assignment]
    trainer = grpo(folder, rank, push_to_hub=True)
    trainer.save_model(folder / "saved")
    return {name: value for commit in hub.commits for name, value in commit["files"].items()}


RESUMED = ("an encoder-decoder", "tied", "lora", "a critic of its own")
RESUMED_ON_THREE = ("tied", "lora", "an encoder-decoder")
SAVES = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": None}


def saving(make: Any, folder: Path, rank: int | None, **settings: Any) -> Any:
    trainer = make(folder, rank)
    for name, value in {**SAVES, **settings}.items():
        setattr(trainer.args, name, value)
    return trainer


def the_last_step(resumed: Any) -> torch.Tensor:
    """Trains a run on that has one step left, and gives its weights."""
    found = train(resumed)
    assert len(found["steps"]) == 1
    return found["end"]


def at_a_forward(trainer: Any, do: Callable[[], object]) -> None:
    """Does something in the middle of the next forward that will have a backward."""

    def hook(*_: Any) -> None:
        if torch.is_grad_enabled():
            do()

    blocks_of(trainer.setup.adapter.lm)[1].register_forward_pre_hook(hook)


def fail() -> None:
    raise ZeroDivisionError("a bad row")


def vanish(note: Path) -> None:
    """Ends this process as SIGKILL does, with a code for which nobody ends the other ranks from outside."""
    note.write_text(str(time.time()))
    os._exit(0)


def ask_to_stop(trainer: Any) -> None:
    trainer.loop.stop.reason = "SIGTERM"


class Asks(TrainerCallback):
    """Runs the model itself, on all ranks, as a callback that shows samples does."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        with torch.no_grad():
            assert model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


ENDINGS: dict[str, Callable[[Any], None]] = {
    "an error in a forward": lambda trainer: at_a_forward(trainer, fail),
    "asked to stop": ask_to_stop,
}


@contextmanager
def third_copy_refused() -> Iterator[list[int]]:
    """Refuses memory once for the third part that a checkpoint brings to the main rank."""
    copy, calls = replicas._on_host, list[int]()

    def refusing(part: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return copy(part)

    replicas._on_host = refusing
    yield calls
    replicas._on_host = copy


def train_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    found: dict[str, Any] = {}
    pulse = Pulse(Path(folder), rank)
    for name, make in CASES.items():
        pulse()
        path = Path(folder) / name
        trainer = saving(make, path, rank)
        refused = rank == 1 and name in RESUMED
        with third_copy_refused() if refused else nullcontext([]) as copies:
            found[name] = train(trainer)
        found[f"{name}, copies refused"] = len(copies) > 3, [event["event"] for event in trainer.memory_events]
        if name not in RESUMED:
            continue
        trainer.save_model(path / "saved")
        for source, given in (("two", path / "checkpoint-3"), ("one", Path(folder) / "one" / name / "checkpoint-3")):
            resumed = saving(make, Path(folder) / f"{name} from {source}", rank, resume_from_checkpoint=str(given))
            found[f"{name} from {source}"] = the_last_step(resumed)
    pulse()
    checked = partial(grpo, verify_plan=True, probe_worst_case=True)
    trainer = saving(checked, Path(folder) / "checked", rank)
    found["checked"] = train(trainer)["end"], list(trainer.memory_events)
    found["refused"] = {
        "adapter": outcome_of(partial(ppo, Path(folder) / "adapter", rank, "adapter")),
        "denoiser": outcome_of(partial(make_denoising_trainer, Path(folder) / "denoiser", fsdp="full_shard")),
        "save_pretrained": outcome_of(partial(trainer.model.save_pretrained, Path(folder) / "parts")),
    }
    found["pushed"] = push(Path(folder) / "pushed", rank)
    shape = {"vocab_size": 1000, "num_hidden_layers": 4, "beta": 0.1, "tokens": 8}
    if rank == 0:
        save_model(shape, Path(folder) / "forecast" / "model")
    torch.distributed.barrier()
    make_forecast = partial(make_forecast_trainer, shape, Path(folder) / "forecast")
    found["forecast"] = beside("forecast", make_forecast, on_device=False)
    for name, spoil in ENDINGS.items():
        pulse()
        trainer = saving(grpo, Path(folder) / name, rank, save_steps=100)
        if rank == 1:
            trainer.loop.report.callbacks.add_callback(At("on_step_begin", 2, partial(spoil, trainer)))
        found[name] = outcome_of(trainer.train), trainer.state.global_step
    torch.save(found, Path(folder) / f"{rank}.pt")
    trainer = saving(grpo, Path(folder) / "killed", rank)
    if rank == 1:
        at_a_forward(trainer, partial(vanish, Path(folder) / "vanished"))
    found["killed"] = outcome_of(trainer.train), time.time()
    torch.save(found, Path(folder) / f"{rank}.pt")


def resume_on_three(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port, world_size=3)
    found = {}
    for name in RESUMED_ON_THREE:
        given = str(Path(folder).parent / name / "checkpoint-3")
        resumed = saving(CASES[name], Path(folder) / name, rank, resume_from_checkpoint=given)
        found[name] = the_last_step(resumed)
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs of one process, which save as the ranks do; first, so that the ranks can resume from them."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, {name: train(saving(make, folder / "one" / name, None)) for name, make in CASES.items()}


@pytest.fixture(scope="module")
def ranks(alone: tuple[Path, dict[str, Any]]) -> list[Any]:
    return run_ranks(train_rank, alone[0], PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def three(alone: tuple[Path, dict[str, Any]], ranks: list[Any]) -> list[Any]:
    """What three ranks give that go on from the checkpoints of two."""
    folder = alone[0] / "three"
    folder.mkdir()
    return run_ranks(resume_on_three, folder, PATIENCE_SECONDS, count=3)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_does(case: str, ranks: list[Any], alone: tuple[Path, dict[str, Any]]) -> None:
    one = alone[1][case]
    exact = one["start"].dtype is torch.float64 and "float64" in case
    for found in (rank[case] for rank in ranks):
        assert torch.equal(found["start"], one["start"])
        for mine, known in zip(found["steps"], one["steps"], strict=True):
            assert torch.equal(mine[0], known[0])
        assert relative(found["steps"][0][1], one["steps"][0][1]) < (1e-12 if exact else 1e-6)
        assert (found["end"] - one["end"]).norm() < (1e-10 if exact else 2e-5) * (one["end"] - one["start"]).norm()
        for mine, known in zip(found["history"], one["history"], strict=True):
            for name in ("loss", "kl", "entropy", "num_tokens", "grad_norm", "value_loss"):
                if name in known:
                    assert abs(mine[name] - known[name]) <= 1e-4 * max(1e-3, abs(known[name])), name
        assert 0.45 * one["held"] < found["held"] < 0.6 * one["held"]
        assert found["state"] < 0.6 * one["state"]
    assert torch.equal(ranks[0][case]["end"], ranks[1][case]["end"])


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_resumes_on_any_number_of_ranks(
    case: str, ranks: list[Any], alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, runs = alone
    one, two = runs[case], ranks[0][case]
    assert torch.equal(ranks[0][f"{case} from two"], two["end"])
    assert resumed_apart(ranks[0][f"{case} from one"], one) < 1e-6
    resumed = saving(CASES[case], tmp_path, None, resume_from_checkpoint=str(folder / case / "checkpoint-3"))
    assert resumed_apart(the_last_step(resumed), two) < 1e-6
    assert sorted(file.name for file in (folder / case / "checkpoint-3").iterdir()) == sorted(
        file.name for file in (folder / "one" / case / "checkpoint-3").iterdir()
    )


@pytest.mark.parametrize("case", RESUMED)
def test_a_copy_for_a_checkpoint_that_one_rank_is_refused_is_made_again(case: str, ranks: list[Any]) -> None:
    """What was saved there is what other tests resume from."""
    went_on, events = ranks[1][f"{case}, copies refused"]
    assert went_on
    assert events.count("failure") == 1
    assert "failure" not in ranks[0][f"{case}, copies refused"][1]


@pytest.mark.parametrize("case", RESUMED_ON_THREE)
def test_a_checkpoint_of_two_ranks_resumes_on_three(case: str, ranks: list[Any], three: list[Any]) -> None:
    for found in three:
        assert torch.equal(found[case], three[0][case])
        assert resumed_apart(found[case], ranks[0][case]) < 1e-6


def resumed_apart(resumed: torch.Tensor, run: dict[str, Any]) -> float:
    """Returns how far a resumed run ended from one that went on, of the way that this one went."""
    return float((resumed - run["end"]).norm() / (run["end"] - run["start"]).norm())


def test_a_saved_model_is_whole(ranks: list[Any], alone: tuple[Path, dict[str, Any]]) -> None:
    saved = AutoModelForCausalLM.from_pretrained(alone[0] / "tied" / "saved")
    assert saved.get_input_embeddings().weight.shape[0] == ODD_VOCABULARY
    values = torch.cat([weight.detach().flatten().double() for weight in saved.parameters()])
    assert torch.equal(values, ranks[0]["tied"]["end"])


def test_a_saved_adapter_is_whole(ranks: list[Any], alone: tuple[Path, dict[str, Any]]) -> None:
    base = tiny_model(vocab_size=ODD_VOCABULARY, scale=4.0)
    saved = PeftModel.from_pretrained(base, alone[0] / "lora" / "saved", is_trainable=True)
    values = torch.cat([w.detach().flatten().double() for w in saved.parameters() if w.requires_grad])
    assert torch.equal(values, ranks[0]["lora"]["end"])


def test_what_is_pushed_is_whole(ranks: list[Any], alone: tuple[Path, dict[str, Any]]) -> None:
    pushed, others = (found["pushed"] for found in ranks)
    saved = alone[0] / "pushed" / "saved"
    assert pushed["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert others == {}


def test_checks_before_training_pass_on_all_ranks_and_change_nothing(ranks: list[Any]) -> None:
    for end, events in (found["checked"] for found in ranks):
        assert torch.equal(end, ranks[0]["tied"]["end"])
        verified, probed = (next(one for one in events if one["event"] == name) for name in ("verify", "probe"))
        assert verified["passed"]
        assert (verified["compared_with"], 0 < verified["gradient_difference"] < 1e-5) == ("halved", True)
        assert set(probed["peak_bytes"]) >= {"rollout", "score", "update", "optimizer"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable_token_indices": [3, 5]}, "trains single rows of a table"),
        ({"modules_to_save": ["input_layernorm"]}, "trains weights of torch.bfloat16 and torch.float32 in one block"),
    ],
)
def test_weights_that_fsdp2_does_not_divide_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    model = get_peft_model(tiny_model(dtype=torch.bfloat16), lora)
    with pytest.raises(ConfigError, match=message):
        check_dividable(adapter_for(model, pad_token_id=0))


def test_what_cannot_be_divided_is_refused_on_all_ranks(ranks: list[Any]) -> None:
    for refused in (found["refused"] for found in ranks):
        assert refused["adapter"].startswith(
            "ConfigError: critic='adapter' trains a second adapter on the model's weights"
        )
        assert refused["denoiser"].startswith("ConfigError: fsdp divides language models, and ")
        assert refused["save_pretrained"].startswith("MemsafeError: model.save_pretrained finds parts of the weights")
        assert "trainer.save_model(folder) on all ranks" in refused["save_pretrained"]


def test_a_forecast_of_a_rank_is_what_the_rank_then_holds(ranks: list[Any]) -> None:
    for found in (one["forecast"] for one in ranks):
        for phase, low, high in (
            ("load", 0.01, 0.01),
            ("rollout", 0.01, 0.01),
            ("score", 0.01, 0.01),
            ("update", 0, 0.05),
        ):
            error = found["forecast_bytes"][phase] / found["held_bytes"][phase] - 1
            assert -low <= error <= high, phase
        assert found["failures"] == 0


def test_a_rank_that_fails_inside_a_round_ends_the_others_with_its_reason(ranks: list[Any]) -> None:
    zero, one = (found["an error in a forward"] for found in ranks)
    assert one == ("ZeroDivisionError: a bad row", 2)
    assert zero[0].startswith("MemsafeError: Rank 1 ended the run: ZeroDivisionError: a bad row.")
    assert zero[1] == 2


def test_ranks_that_are_asked_to_stop_save_together(ranks: list[Any], alone: tuple[Path, dict[str, Any]]) -> None:
    for outcome, step in (found["asked to stop"] for found in ranks):
        assert outcome.startswith("TrainingInterrupted: SIGTERM")
        assert step == 3
    assert [path.name for path in (alone[0] / "asked to stop").glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_killed_rank_ends_the_others(ranks: list[Any], alone: tuple[Path, dict[str, Any]]) -> None:
    told, ended_at = ranks[0]["killed"]
    assert told.startswith("MemsafeError: rank 0 lost the others")
    assert "a rank was killed" in told
    # A tenth of a second when nothing else runs; a rank left waiting would stay for gloo's half hour.
    assert ended_at - float((alone[0] / "vanished").read_text()) < 10
