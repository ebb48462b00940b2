"""Frozen weights that wait on the host: the same bits, fewer bytes, whole again at the end."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import AdaptivePolicy, FixedPolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.blocks import blocks_of, find_blocks, recomputed
from memsafe_rl.models.host_weights import HostWeights, host_weights_of, put_on
from memsafe_rl.types import RolloutPlan, UpdatePlan, blocks_on_host
from tests.models.language.test_seq2seq import build
from tests.tiny import tiny_model
from tests.trainers.helpers import PROMPTS, make_trainer, relative, weights

BLOCKS = 6
CPU = torch.device("cpu")


def adapted(layers: int = BLOCKS, hidden: int = 64, **settings: Any) -> Any:
    model = tiny_model(layers=layers, hidden=hidden, scale=4.0)
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(model, config)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    return model


def pass_of(model: Any, *, recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns logits and gradients of one pass."""
    ids = torch.arange(15).reshape(3, 5)
    model.zero_grad()
    with recomputed(find_blocks(model)) if recompute else nullcontext():
        logits = model(ids).logits
    logits.square().mean().backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("blocks", [1, 5, 28])
def test_blocks_leave_evenly_spread(blocks: int) -> None:
    assert blocks_on_host(blocks, None) == frozenset()
    for resident in range(blocks + 3):
        away = sorted(blocks_on_host(blocks, resident))
        assert len(away) == max(0, blocks - resident)
        gaps = [later - earlier for earlier, later in pairwise(away)]
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_logits_and_gradients_are_the_same_bits(recompute: bool, dora: bool) -> None:
    model = adapted(use_dora=dora)
    logits, gradients = pass_of(model, recompute=recompute)
    host = HostWeights(blocks_of(model))
    for resident in (0, 4, 1, 3, None):
        host.place(resident)
        for _ in range(2):  # the second time, it is known which block comes next
            found, others = pass_of(model, recompute=recompute)
            assert torch.equal(found, logits)
            assert others.keys() == gradients.keys()
            assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


def test_two_blocks_are_on_the_device_at_most_and_none_after_release() -> None:
    model, most = adapted(), 0
    host = HostWeights(blocks_of(model))
    (size,) = {*host.block_bytes}
    host.place(0)
    frozen = [weight for block in blocks_of(model) for weight in block.parameters() if not weight.requires_grad]

    def held() -> int:
        return sum(weight.untyped_storage().nbytes() for weight in frozen if weight.dim() > 1)

    assert held() == 0
    for block in blocks_of(model):
        block.register_forward_hook(lambda *_: sizes.append(held()))
    sizes: list[int] = []
    for _ in range(2):
        pass_of(model, recompute=True)
        most = max(most, *sizes)
    assert most == 2 * size
    host.release()
    host.place(0)
    assert held() == 0


@pytest.mark.slow
def test_a_device_that_refuses_leaves_a_block_away_and_the_next_try_succeeds() -> None:
    model = adapted()
    logits, _ = pass_of(model, recompute=False)
    with SimulatedMemory(2**40) as memory:
        assert not put_on(model, CPU)
        host = host_weights_of(model)
        host.place(0)
        live = memory.live_bytes
        for place in range(1, 12):
            memory.fail_after(place)
            with pytest.raises(torch.OutOfMemoryError):
                model(torch.arange(15).reshape(3, 5))
            host.release()
            gc.collect()
            assert memory.live_bytes == live
        assert torch.equal(pass_of(model, recompute=False)[0], logits)


def test_weights_that_pass_the_room_begin_on_the_host_and_others_do_not() -> None:
    model = adapted()
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert not put_on(model, CPU, size)
    assert host_weights_of(model).resident == BLOCKS
    assert put_on(model, CPU, size - 1)
    assert host_weights_of(model).resident == 0
    assert host_weights_of(model) is host_weights_of(model)


@pytest.mark.parametrize("plan", [RolloutPlan, UpdatePlan])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"resident_blocks": -1}, "resident_blocks is -1; it must be at least 0"),
        ({"resident_blocks": True}, "resident_blocks is True; it must be a whole number"),
        ({"resident_blocks": 1, "compile": "default"}, "cannot be compiled in. Leave one of the two None"),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(plan: Any, wrong: dict[str, Any], said: str) -> None:
    kind = "rollout" if plan is RolloutPlan else "update"
    with pytest.raises(ConfigError, match=said):
        FixedPolicy(**{kind: plan(**wrong)})


def test_what_is_trained_or_shared_by_blocks_stays() -> None:
    model = tiny_model(layers=3, hidden=64)
    assert HostWeights(blocks_of(model)).block_bytes == (0, 0, 0)
    model.requires_grad_(False)
    first, second, _ = blocks_of(model)
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    one, other, third = HostWeights(blocks_of(model)).block_bytes
    assert one == other == third - first.mlp.up_proj.weight.nbytes


def peaks(trainer: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for record in trainer.history:
        for name, value in record.items():
            if name.endswith("_peak_bytes"):
                found[name] = max(value, found.get(name, 0))
    return found


def run(folder: Path, policy: Any, model: Any = None, **settings: Any) -> Any:
    model = model or adapted()
    with SimulatedMemory(2**34):
        trainer = make_trainer(
            folder, model=model, policy=policy, **{"beta": 0.04, "max_steps": 3, "learning_rate": 1e-3, **settings}
        )
        trainer.train()
    return trainer


LEAN: dict[str, Any] = {"micro_batch_tokens": 16, "logprob_tile": 4, "checkpointing": True}


@pytest.mark.slow
@pytest.mark.parametrize("update", [LEAN, {**LEAN, "offload_activations": True}, {"pack_prompts": True}])
def test_a_run_learns_the_same_bits_within_less(tmp_path: Path, update: dict[str, Any]) -> None:
    plain = run(tmp_path / "plain", FixedPolicy(RolloutPlan(), UpdatePlan(**update)), max_steps=2)
    (size,) = {*plain.setup.adapter.geometry.frozen_block_bytes}
    originals = [weight for weight in plain.model.parameters() if not weight.requires_grad]
    for resident in (0, 2):
        plans = RolloutPlan(resident_blocks=resident), UpdatePlan(resident_blocks=resident, **update)
        lean = run(tmp_path / f"lean-{resident}", FixedPolicy(*plans), max_steps=2)
        assert torch.equal(weights(lean), weights(plain))
        saved = (BLOCKS - resident - 2) * size
        before, after = peaks(plain), peaks(lean)
        for phase in ("score", "reward", "update"):
            assert before[f"memory/{phase}_peak_bytes"] - after[f"memory/{phase}_peak_bytes"] >= saved
        # whole again
        frozen = [weight for weight in lean.model.parameters() if not weight.requires_grad]
        assert all(torch.equal(one, other) for one, other in zip(frozen, originals, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.4])
def test_a_budget_below_the_size_of_the_weights_trains_without_a_failure(tmp_path: Path, share: float) -> None:
    wide: dict[str, Any] = {"layers": 10, "hidden": 128, "r": 2, "target_modules": ["q_proj", "v_proj"]}
    plain = run(tmp_path / "plain", AdaptivePolicy(), adapted(**wide))
    budget = int(share * sum(weight.nbytes for weight in plain.model.parameters()))
    lean = run(tmp_path / "lean", AdaptivePolicy(), adapted(**wide), memory_budget=budget)
    assert relative(weights(lean), weights(plain)) < 2e-5
    assert max(peaks(lean).values()) <= budget
    assert not [event for event in lean.memory_events if event["event"] == "failure"]
    assert {event["resident_blocks"] for event in lean.memory_events if event["event"] == "plan"} <= {*range(10)}


@pytest.mark.slow
def test_at_the_end_weights_without_room_lie_on_the_host_and_a_second_run_takes_them_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=adapted(), policy=FixedPolicy(RolloutPlan(resident_blocks=1), UpdatePlan()))
    adapter = trainer.setup.adapter
    before = [weight.clone() for weight in trainer.model.parameters()]
    adapter.host_weights.place(1, adapter.device)
    adapter.host_weights.settle_on_host()
    assert all(torch.equal(one, other) for one, other in zip(trainer.model.parameters(), before, strict=True))
    assert adapter.host_weights.resident == BLOCKS
    for resident in (2, None):
        adapter.host_weights.place(resident, adapter.device)
        pass_of(trainer.model, recompute=False)
    assert all(torch.equal(one, other) for one, other in zip(trainer.model.parameters(), before, strict=True))


@pytest.mark.slow
def test_blocks_of_encoder_and_decoder_come_and_go(tmp_path: Path) -> None:
    def trained(resident: int | None) -> torch.Tensor:
        config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_2_SEQ_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(build("t5v1.1", torch.float32), config)
        plans = RolloutPlan(resident_blocks=resident), UpdatePlan(resident_blocks=resident)
        trainer = make_trainer(tmp_path / str(resident), model=model, policy=FixedPolicy(*plans), beta=0.04)
        assert sum(trainer.setup.adapter.geometry.frozen_block_bytes) > 0
        trainer.train()
        return weights(trainer)

    assert torch.equal(trained(0), trained(None))


class Between(TrainerCallback):
    """Runs a function on the model between steps, when no block runs."""

    def __init__(self, run: Callable[[Any], object]) -> None:
        self._run = run

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self._run(model)


AWAY = FixedPolicy(RolloutPlan(resident_blocks=0), UpdatePlan(resident_blocks=0))


def total(model: Any) -> float:
    return float(sum(value.double().abs().sum() for value in model.state_dict().values()))


@pytest.mark.slow
def test_callbacks_read_merge_and_copy_weights_that_are_away(tmp_path: Path) -> None:
    ids = torch.arange(15).reshape(3, 5)
    seen: dict[int | None, list[float]] = {None: [], 0: []}
    for resident, found in seen.items():

        def look(model: Any, found: list[float] = found) -> None:
            found.append(total(model))
            model.merge_adapter()
            merged = copy.deepcopy(model)
            model.unmerge_adapter()
            with torch.no_grad():
                found.extend(float(one(ids).logits.double().abs().sum()) for one in (merged, model))
                for weight in merged.parameters():
                    weight.zero_()
                assert not merged(ids).logits.any()  # nothing of the copy is the original's
            found.append(total(model))

        plans = FixedPolicy(RolloutPlan(resident_blocks=resident), UpdatePlan(resident_blocks=resident))
        make_trainer(tmp_path / str(resident), model=adapted(), policy=plans, callbacks=[Between(look)]).train()
    assert seen[0] == seen[None]
    assert len(seen[0]) == 8


@pytest.mark.slow
def test_a_checkpoint_of_a_model_that_is_frozen_in_part_holds_weights_that_are_away(tmp_path: Path) -> None:
    def trainer(policy: Any, **settings: Any) -> Any:
        model = tiny_model(layers=4, hidden=64, scale=4.0)
        model.model.layers[:3].requires_grad_(False)
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, **settings}
        return make_trainer(tmp_path / "run", model=model, policy=policy, **settings)

    plain = trainer(FixedPolicy(RolloutPlan(), UpdatePlan()))
    plain.train()
    trainer(AWAY, max_steps=2, overwrite_output_dir=True).train()
    resumed = trainer(AWAY)
    resumed.train(resume_from_checkpoint=True)
    for one, other in zip(plain.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_weights_are_back_after_an_evaluation_and_after_a_callback_that_fails_at_the_end(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_run_closed(self) -> None:
            raise RuntimeError("the file is gone")

    trainer = make_trainer(tmp_path, model=adapted(), policy=AWAY, callbacks=[Failing()], eval_dataset=prompts())
    with pytest.raises(RuntimeError, match="the file is gone"):
        trainer.train()
    assert trainer.adapter.host_weights.resident == BLOCKS
    trainer.evaluate()
    assert trainer.adapter.host_weights.resident == BLOCKS


def test_a_reference_that_shares_weights_with_the_model_leaves_them_on_the_device() -> None:
    model, copied = tiny_model(layers=4, hidden=64, scale=4.0), tiny_model(layers=4, hidden=64, seed=3, scale=4.0)
    model.model.layers[:2].requires_grad_(False)
    copied.requires_grad_(False)
    for one, other in zip(model.model.layers[:2].parameters(), copied.model.layers[:2].parameters(), strict=True):
        other.data = one.data
    ids = torch.arange(15).reshape(3, 5)
    before = [network(ids).logits for network in (model, copied)]
    host = host_weights_of(model, copied)
    assert [bool(size) for size in host.block_bytes] == [False, False, True, True]
    host.place(0)
    assert all(torch.equal(network(ids).logits, one) for network, one in zip((model, copied), before, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_somebodys_own_passes_between_ours_have_the_same_gradients(recompute: bool) -> None:
    model = adapted()
    logits, gradients = pass_of(model, recompute=recompute)
    host = HostWeights(blocks_of(model))
    host.place(0)
    host.release()
    for _ in range(2):
        found, others = pass_of(model, recompute=recompute)
        assert torch.equal(found, logits)
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


def test_what_is_written_after_somebodys_own_pass_stays() -> None:
    model, ids = adapted(), torch.arange(15).reshape(3, 5)
    host = HostWeights(blocks_of(model))
    host.place(0)
    host.release()
    before = model(ids).logits
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    after = model(ids).logits
    assert not torch.equal(before, after)
    host.place(None)
    assert torch.equal(model(ids).logits, after)


@pytest.mark.slow
def test_what_is_written_to_frozen_weights_between_two_runs_stays(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=adapted(), policy=AWAY, overwrite_output_dir=True)
    trainer.train()
    frozen = [weight for weight in trainer.model.parameters() if not weight.requires_grad]
    with torch.no_grad():
        for weight in frozen:
            weight.data *= 1.5
    before = [weight.clone() for weight in frozen]
    trainer.train()
    assert all(torch.equal(one, other) for one, other in zip(frozen, before, strict=True))
    trainer.model.requires_grad_(True)
    trainer.train()
    assert not any(torch.equal(one, other) for one, other in zip(frozen, before, strict=True) if one.dim() > 1)


@pytest.mark.parametrize("place", [1, 8, 29])
def test_a_refused_allocation_while_mapped_weights_leave_the_device_is_repeated(place: int) -> None:
    model, kept = adapted(), []
    logits, _ = pass_of(model, recompute=False)
    for weight in model.parameters():
        if not weight.requires_grad:
            kept.append(weight.detach().numpy().copy())
            weight.data = torch.from_numpy(kept[-1])  # cannot be emptied, like one mapped from a file
    with SimulatedMemory(2**40) as memory:
        put_on(model, CPU)
        host = host_weights_of(model)
        memory.fail_after(place)
        with pytest.raises(torch.OutOfMemoryError):
            host.place(0)
        host.place(0)
        assert torch.equal(pass_of(model, recompute=False)[0], logits)


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS[:4]})
