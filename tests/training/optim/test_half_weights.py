"""Weights in bfloat16 that an optimizer steps on in float32: what arrives, what is held, what a failure leaves."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.memory.simulated.counting import CountingAllocator, compiler_available
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.training.optim.half_weights import StochasticRounding, half_weights_for
from memsafe_rl.training.optim.optimizer import Committer, build_optimizer
from memsafe_rl.training.optim.state import Layout, LocalParts, SteppedWeights
from memsafe_rl.types import Component
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, make_trainer, weights
from tests.training.optim.test_commit import NAMES, NEVER, STEPS, make_model, persist, same, set_gradients

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
counted = pytest.mark.skipif(not compiler_available(), reason="counts and faults come from the C++ allocator")

CHOICES = [True, "stochastic_rounding"]


def config_for(choice: Any = True, optim: str = "adamw_torch_fused", **settings: Any) -> GRPOConfig:
    given = {"learning_rate": 1e-2, "weight_decay": 0.1, "use_cpu": True, **settings}
    return GRPOConfig(output_dir="unused", optim=optim, master_weights=choice, **given)  # a folder is named, never made


def half_model(*, mixed: bool = False) -> nn.Module:
    """A matrix in bfloat16 and what else a model has; its norm in float32 where it is mixed."""
    model = make_model(torch.bfloat16)
    if mixed:
        model[1].float()
    return model


def committer_of(model: nn.Module, config: GRPOConfig) -> Committer:
    half = half_weights_for(model, config, None)
    optimizer = build_optimizer(model, config, half)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return Committer(model, optimizer, schedule, max_grad_norm=config.max_grad_norm, scaler=None, half=half)


def step(model: nn.Module, committer: Committer, number: int) -> None:
    set_gradients(model, number)
    committer.measure()
    committer.clip()
    committer.prepare_commit()
    committer.commit()


def trained(model: nn.Module, committer: Committer, steps: int = STEPS) -> dict[str, Any]:
    committer.make_state()
    for number in range(steps):
        step(model, committer, number)
    return everything(model, committer)


def everything(model: nn.Module, committer: Committer) -> dict[str, Any]:
    return copy.deepcopy({"weights": dict(model.named_parameters()), **committer.state_dict()})


def naive(config: GRPOConfig, model: nn.Module, steps: int = STEPS) -> nn.Module:
    """The same steps of the same optimizer on a float32 network, by gradients in the types of the other."""
    wide = copy.deepcopy(model).float()
    optimizer = build_optimizer(wide, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for number in range(steps):
        set_gradients(model, number)
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
        factor = torch.clamp(config.max_grad_norm / (torch.nn.utils.get_total_norm(gradients) + 1e-6), max=1.0)
        for weight, gradient in zip(wide.parameters(), gradients, strict=True):
            weight.grad = gradient.float() * factor.float()
        optimizer.step()
        schedule.step()
    return wide


# ---------------------------------------------------------------------- float32 copies


@pytest.mark.parametrize("mixed", [False, True], ids=["all in bfloat16", "norms in float32"])
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_what_the_optimizer_makes_of_a_float32_network(name: str, mixed: bool) -> None:
    config, model = config_for(optim=name), half_model(mixed=mixed)
    expected = naive(config, half_model(mixed=mixed))
    committer = committer_of(model, config)
    trained(model, committer)
    for weight, wide in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(committer.half.stepped(weight), wide)
        assert torch.equal(weight, wide.to(weight.dtype))


def test_groups_keep_their_order_and_their_decay() -> None:
    model, config = half_model(mixed=True), config_for()
    half = half_weights_for(model, config, None)
    plain, other = build_optimizer(model, config), build_optimizer(model, config, half)
    for group, held in zip(plain.param_groups, other.param_groups, strict=True):
        assert group["weight_decay"] == held["weight_decay"]
        assert [id(half.stepped(weight)) for weight in group["params"]] == [id(one) for one in held["params"]]
    assert [weight.shape for weight in half.plain] == [(70,), (70,)]


def test_tensors_are_stepped_as_far_as_the_largest_one_reaches() -> None:
    layout = Layout.of([10, 1000, 64, 900, 64, 100, 1])
    assert layout.elements == 1024
    assert layout.chunks == (range(1), range(1, 2), range(2, 4), range(4, 7))
    assert layout.offsets == (0, 0, 0, 64, 0, 64, 192)
    assert Layout.of([]) == Layout((), (), 0)


def learned(choice: Any, dtype: torch.dtype = torch.bfloat16, steps: int = 300) -> tuple[Tensor, Tensor, float]:
    """Learns numbers a little beside those it has, at 2e-6; gives the steps' numbers, the weights, the loss."""
    start = make_model(torch.bfloat16)[0].weight.detach().double()
    target = start + 2e-3 * torch.where(torch.arange(start.numel()).view_as(start) % 3 == 0, 1.0, -1.0)
    model = nn.ParameterList([nn.Parameter(start.to(dtype))])
    committer = committer_of(model, config_for(choice, learning_rate=2e-6, weight_decay=0.0, max_grad_norm=0.0))
    committer.scheduler.lr_lambdas = [lambda _: 1.0]
    committer.scheduler.base_lrs = [2e-6]
    for _ in range(steps):
        (weight,) = model.parameters()
        weight.grad = (weight.detach().double() - target).to(dtype)
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        committer.commit()
    end = weight.detach().double()
    loss = float((end - target).square().mean() / (start - target).square().mean())
    return committer.half.stepped(weight).detach().double(), end, loss


@pytest.mark.slow
def test_at_small_rates_only_steps_in_float32_learn() -> None:
    _, exact, best = learned(None, torch.float32)
    _, plain, unlearned = learned(False)
    copies, by_copies, _ = learned(True)
    _, at_random, _ = learned("stochastic_rounding")

    def distance(one: Tensor) -> float:
        return float((one - exact).norm() / (plain - exact).norm())

    assert best < 0.6 < 0.95 < unlearned
    assert distance(copies) < 0.02
    assert distance(by_copies) < 0.3, "the last rounding alone"
    # Rounding at random adds noise and no bias: the mean of all weights has gone where it should.
    start = make_model(torch.bfloat16)[0].weight.detach().double()
    went = (exact - start).sign()
    drifts = [float(((end - start) * went).mean()) for end in (exact, plain, at_random)]
    assert drifts[1] < 0.2 * drifts[0]
    assert drifts[2] == pytest.approx(drifts[0], rel=0.1)


# ---------------------------------------------------------------------- rounding at random


def rounded(numbers: Tensor, *, seed: int = 0, steps: int = 0, before: int = 0) -> Tensor:
    """Rounds numbers as a step would that has made them."""
    weights = [nn.Parameter(torch.zeros(len(numbers), dtype=torch.bfloat16)) for _ in range(before + 1)]
    store = StochasticRounding(weights, seed)
    store.load_state_dict({"steps": steps})
    store.open(Layout.of([len(numbers)] * (before + 1)))
    with torch.no_grad():
        store.parameters[before].copy_(numbers)
    store.write(range(before, before + 1))
    return weights[before].detach().float()


def test_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(64, generator=generator) * torch.logspace(-6, 3, 64)
    draws = 4000
    found = rounded(numbers.repeat(draws)).view(draws, 64).double()
    low, high = found.amin(0), found.amax(0)
    below = (numbers.view(torch.int32) & -(2**16)).view(torch.float32)
    above = ((numbers.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    for place in range(64):
        ends = {float(below[place]), float(above[place])}
        assert {float(low[place]), float(high[place])} <= ends
    gap = (above - below).abs().double()
    share = (numbers.double() - below.double()).abs() / gap
    sigma = gap * (share * (1 - share)).sqrt() / math.sqrt(draws)
    assert bool(((found.mean(0) - numbers.double()).abs() <= 5 * sigma + 1e-12 * gap).all())


def test_what_bfloat16_has_stays_what_it_is() -> None:
    numbers = torch.randn(4096).bfloat16().float()
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 2.0**-126, 3.3895e38]).bfloat16().float()
    numbers[: len(special)] = special
    assert torch.equal(rounded(numbers), numbers)


def test_draws_follow_from_seed_step_and_tensor_alone() -> None:
    numbers = torch.full((4096,), 1.0 + 2**-9)
    before = torch.get_rng_state()
    first = rounded(numbers)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(rounded(numbers), first)
    for other in ({"seed": 1}, {"steps": 1}, {"before": 1}):
        assert 0.3 < float((rounded(numbers, **other) == first).float().mean()) < 0.7


def test_nothing_is_held_between_steps_but_the_state() -> None:
    with SimulatedMemory() as memory:
        held = {}
        for choice in (False, True, "stochastic_rounding"):
            model = half_model()
            before = memory.live_bytes
            committer = committer_of(model, config_for(choice, optim="sgd", max_grad_norm=0.0))
            trained(model, committer, steps=2)
            held[choice] = memory.live_bytes - before
            assert sum(one.nbytes for one in committer.half.tensors()) == (4 * 4900 if choice is True else 0)
            del model, committer
        assert held[True] - held[False] == pytest.approx(4 * 4900, abs=256)
        assert held["stochastic_rounding"] == pytest.approx(held[False], abs=256)


# ---------------------------------------------------------------------- failures, parking, checkpoints


@pytest.mark.slow_after(1)
@counted
@pytest.mark.parametrize("mixed", [False, True], ids=["all in bfloat16", "norms in float32"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit"])
def test_a_fault_at_any_allocation_of_a_step_leaves_no_trace(name: str, choice: Any, mixed: bool) -> None:
    model = half_model(mixed=mixed)
    expected = trained(model, committer_of(model, config_for(choice, name)))
    with CountingAllocator() as counter:
        model = half_model(mixed=mixed)
        committer = committer_of(model, config_for(choice, name))
        persist(counter, committer.make_state)
        faults = 0
        for number in range(STEPS):
            set_gradients(model, number)
            persist(counter, committer.measure)
            persist(counter, committer.clip)
            assert persist(counter, committer.prepare_commit) > 0, "the buffers of the step"
            faults += persist(counter, committer.commit, committer.roll_back)
        assert same(everything(model, committer), expected)
        assert (faults == 0) is (name == "adamw_torch_fused")


@counted
@pytest.mark.parametrize("choice", CHOICES)
def test_a_step_that_is_given_up_leaves_the_weights_as_they_were(choice: Any) -> None:
    with CountingAllocator() as counter:
        model = half_model()
        committer = committer_of(model, config_for(choice, "adamw_torch"))
        before = trained(model, committer)
        set_gradients(model, STEPS)
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        counter.fail_after(20)
        with pytest.raises(torch.OutOfMemoryError):
            committer.commit()
        counter.fail_after(NEVER)
        committer.drop_gradients()
        assert same(everything(model, committer), before)


@pytest.mark.parametrize("choice", CHOICES)
def test_parked_copies_train_the_same(choice: Any) -> None:
    model = half_model()
    expected = trained(model, committer_of(model, config_for(choice)))
    with SimulatedMemory() as memory:
        model = half_model()
        committer = committer_of(model, config_for(choice))
        committer.make_state()
        for number in range(STEPS):
            before, held = everything(model, committer), memory.live_by_component()[Component.OPTIMIZER]
            committer.park()
            committer.park()
            assert same(everything(model, committer), before)
            state = 2 * 4 * 64 * 70
            assert memory.host_live_bytes >= (state + 4 * 4900 if choice is True else state)
            committer.unpark()
            assert (memory.live_by_component()[Component.OPTIMIZER], memory.host_live_bytes) == (held, 0)
            committer.park()
            del before
            step(model, committer, number)
            assert memory.host_live_bytes == 0
        assert same(everything(model, committer), expected)


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_loaded_state_continues_bit_for_bit(choice: Any, parked: bool) -> None:
    model = half_model()
    committer = committer_of(model, config_for(choice))
    saved = trained(model, committer)
    step(model, committer, STEPS)
    other = half_model()
    other.load_state_dict(saved["weights"])
    resumed = committer_of(other, config_for(choice))
    resumed.make_state()
    if parked:
        resumed.park()
    resumed.load_state_dict(saved)
    assert same(everything(other, resumed), saved)
    step(other, resumed, STEPS)
    assert same(everything(other, resumed), everything(model, committer))


def test_without_saved_copies_they_are_made_of_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = half_model()
    saved = trained(model, committer_of(model, config_for(False)))
    assert "master_weights" not in saved
    resumed = committer_of(model, config_for(True))
    for parameter in resumed.stepped:
        parameter.data.zero_()
    resumed.load_state_dict(saved)
    assert caplog.text.count("the checkpoint has no float32 copies") == 1
    assert all(torch.equal(resumed.half.stepped(one), one.float()) for one in model.parameters())
    assert all(state["exp_avg"].dtype == torch.float32 for state in resumed.optimizer.state.values())


def test_weights_that_are_not_their_copies_rounded_are_used(caplog: pytest.LogCaptureFixture) -> None:
    model = half_model()
    committer = committer_of(model, config_for(True))
    saved = trained(model, committer)
    assert committer.half.state_dict()["master_weights"]["copies"][0].dtype == torch.float32
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # as somebody does who loads other weights in the middle of a run
    step(model, committer, STEPS)
    assert caplog.text.count("weights were written to between two steps") == 1
    assert float(model[0].weight.detach().min()) > 0.4
    committer.load_state_dict(saved)
    assert caplog.text.count("the checkpoint's weights are not its float32 copies") == 1
    assert torch.equal(committer.half.stepped(model[0].weight), model[0].weight.float())


# ---------------------------------------------------------------------- what is chosen, and what a trainer says


def test_nothing_replaces_float32_weights_or_those_of_a_users_optimizer() -> None:
    wide, half = make_model(), half_model()
    own = torch.optim.AdamW(half.parameters())
    for choice in (None, True, False, "stochastic_rounding"):
        for given in (None, torch.optim.AdamW(wide.parameters())):
            assert not half_weights_for(wide, config_for(choice), given).replaces_any
    for choice in (None, False):
        assert not half_weights_for(half, config_for(choice), own).replaces_any
    for choice in CHOICES:
        with pytest.raises(ConfigError, match=r"AdamW in optimizers.*Name an optimizer by optim"):
            half_weights_for(half, config_for(choice), own)


def test_an_optimizer_of_torchao_is_not_rounded_at_random() -> None:
    config = config_for("stochastic_rounding")
    config.optim = "adamw_torch_8bit"
    with pytest.raises(ConfigError, match=r"'adamw_torch_8bit'.*adamw_bnb_8bit"):
        half_weights_for(half_model(), config, None)


@pytest.mark.parametrize(
    ("written", "read"), [("true", "on"), (False, "off"), ("Stochastic_Rounding", None), ("none", None), (None, None)]
)
def test_the_setting_is_read(written: Any, read: str | None) -> None:
    if written == "Stochastic_Rounding":
        with pytest.raises(ConfigError, match="master_weights"):
            config_for(written)
    else:
        assert config_for(written).master_weights == read


def half_trainer(folder: Path, **settings: Any) -> Any:
    given = {"model": tiny_model(dtype=torch.bfloat16, scale=1.0), "learning_rate": 2e-6, **settings}
    return make_trainer(folder, **given)


def test_a_model_in_bfloat16_is_given_copies_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SimulatedMemory() as memory:
        trainer = half_trainer(tmp_path)
        trainer.train()
        held, counted_bytes = trainer.setup.holdings.by_component(), memory.live_by_component()
        assert held[Component.OPTIMIZER] == counted_bytes[Component.OPTIMIZER]
    assert caplog.text.count("24 trained weights are held in bfloat16") == 1
    assert "129.12 KiB more" in caplog.text
    assert "master_weights='stochastic_rounding'" in caplog.text
    assert "lost_updates" not in trainer.history[0]
    assert [event for event in trainer.memory_events if event.get("kind") == "lost_updates"] == []
    half = trainer.setup.committed.half
    start = tiny_model(dtype=torch.bfloat16, scale=1.0)
    moved = [
        float((half.stepped(weight) != old.float()).float().mean())
        for weight, old in zip(trainer.model.parameters(), start.parameters(), strict=True)
        if weight.ndim > 1
    ]
    assert min(moved[1:]) > 0.9, "every weight but those of unused tokens"


def test_a_users_optimizer_on_half_weights_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(dtype=torch.bfloat16, scale=1.0)
    trainer = half_trainer(tmp_path, model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=2e-6), None))
    trainer.train()
    assert caplog.text.count("the AdamW in optimizers holds weights in half precision") == 1
    assert trainer.history[0]["lost_updates"] > 0.9


@pytest.mark.parametrize("choice", CHOICES)
def test_a_critic_is_stepped_on_like_the_model(choice: Any, tmp_path: Path) -> None:
    args = PPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        max_completion_length=6,
        max_steps=2,
        master_weights=choice,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        tiny_model(dtype=torch.bfloat16, scale=1.0),
        count_digits,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        critic=tiny_model(dtype=torch.bfloat16, scale=1.0),
    )
    trainer.train()
    committer = trainer.setup.committed
    held = {id(one) for group in committer.optimizer.param_groups for one in group["params"]}
    critics = [one for module in trainer.setup.beside.values() for one in module.parameters()]
    half = [one for one in critics if one.dtype == torch.bfloat16]
    assert len(half) > 20
    for one in half:
        assert id(one) not in held
        assert id(committer.half.stepped(one)) in held
        assert committer.half.stepped(one).dtype == torch.float32


IN_FLOAT32 = [
    {"master_weights": False, "learning_rate": 1e-2, "optim": optim} for optim in ("adafactor", "adamw_torch")
]
"""Optimizers on the weights themselves; the first keeps its state in float32, which torch would round when it loads."""


@pytest.mark.slow
@pytest.mark.parametrize("own", [*({"master_weights": one, "learning_rate": 1e-4} for one in CHOICES), *IN_FLOAT32])
def test_resuming_is_bitwise(own: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **own}
    whole = half_trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = half_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(resumed))
    assert same(whole.setup.committed.state_dict(), resumed.setup.committed.state_dict())


@pytest.mark.parametrize("choice", CHOICES)
def test_a_budget_without_room_for_a_step_is_refused_with_remedies(choice: Any, tmp_path: Path) -> None:
    budget = 550_000 if choice is True else 420_000
    with SimulatedMemory(), pytest.raises(MemoryBudgetError, match="A step of the optimizer needs") as caught:
        half_trainer(tmp_path, master_weights=choice, memory_budget=budget).train()
    for words in ("weights 64.59 KiB", "gradients 64.56 KiB", "peft_config", "adamw_bnb_8bit", "master_weights=False"):
        assert words in str(caught.value)
    assert ("'stochastic_rounding'" in str(caught.value)) is (choice is True)


def test_a_device_without_room_for_copies_is_refused_with_remedies(tmp_path: Path) -> None:
    with SimulatedMemory(), pytest.raises(MemoryBudgetError, match="no copies") as caught:
        half_trainer(tmp_path, memory_budget=150_000).train()
    assert caught.value.failure is not None


def test_weights_without_stand_ins_are_the_identity() -> None:
    half = SteppedWeights(LocalParts([]))
    half.open()
    half.close()
    assert (half.state_dict(), half.tensors(), half.scratch_bytes, half.replaces_any) == ({}, [], 0, False)
