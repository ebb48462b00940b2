"""A committed step: what it moves, what it allocates, and that a failure at any allocation leaves no trace in it."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.config.settings import OPTIMIZERS
from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.memory.simulated.counting import CountingAllocator, compiler_available
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.training.optim import state as parking
from memsafe_rl.training.optim.optimizer import Committer, ReferenceMix, build_optimizer, next_scale
from memsafe_rl.training.optim.state import ReadyScalars, Snapshot, steps_without_allocating
from tests.trainers.helpers import make_trainer, weights

pytestmark = [
    pytest.mark.skipif(not compiler_available(), reason="counts and faults come from the C++ allocator"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]

NEVER = 10**9
STEPS = 3
NAMES = [name for name, package in OPTIMIZERS.items() if package != "torchao"]
FUSED: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """4,480 weights in one matrix, enough for 8-bit state, and biases and a norm, which do not decay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 70), nn.LayerNorm(70), nn.Linear(70, 3, bias=False)).to(dtype)


def named_optimizer(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    # a folder is named, never written
    config = GRPOConfig(output_dir="unused", optim=name, learning_rate=1e-2, weight_decay=0.1, use_cpu=True)
    return lambda model: build_optimizer(model, config)


def fused_optimizer(kind: type, settings: dict[str, Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = list(model.parameters())
        return kind([{"params": weights[:2]}, {"params": weights[2:]}], lr=1e-2, fused=True, **settings)

    return make


def make_committer(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 1.0,
) -> tuple[nn.Module, Committer]:
    model = make_model(dtype)
    made = optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1 + step))
    return model, Committer(model, made, schedule, max_grad_norm=max_grad_norm, scaler=scaler)


def set_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """Gives gradients of a norm that is clipped; one parameter goes without in the first step."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = None if (step, index) == (0, 1) else drawn.to(parameter.dtype)


def untroubled(model: nn.Module, committer: Committer, steps: int = STEPS, scale: float = 1.0) -> dict[str, Any]:
    committer.make_state()
    for step in range(steps):
        set_gradients(model, step, scale)
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        committer.commit()
    return everything(model, committer)


def everything(model: nn.Module, committer: Committer) -> dict[str, Any]:
    return copy.deepcopy({"weights": dict(model.named_parameters()), **committer.state_dict()})


def persist(memory: Any, unit: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> int:
    """Runs a unit with its first allocation failing, then its second, and so on until it succeeds."""
    for allocation in itertools.count(1):
        memory.fail_after(allocation)
        failed = False
        try:
            unit()
        except torch.OutOfMemoryError:
            failed = True
        memory.fail_after(NEVER)
        if not failed:
            return allocation - 1
        undo()
    raise AssertionError("unreachable")


def same(left: Any, right: Any) -> bool:
    """Bitwise, through every container."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.fixture
def counter() -> Iterator[CountingAllocator]:
    with CountingAllocator() as counted:
        yield counted


# ---------------------------------------------------------------------- faults at every allocation


def faulty_run(
    model: nn.Module, committer: Committer, counter: CountingAllocator, *, scale: float = 1.0
) -> tuple[dict[str, Any], dict[str, int]]:
    """Three steps in which every call fails at every one of its allocations before it succeeds."""
    faults = {"make_state": persist(counter, committer.make_state), "measure": 0, "prepare_commit": 0, "commit": 0}
    for step in range(STEPS):
        set_gradients(model, step, scale)
        faults["measure"] += persist(counter, committer.measure)
        faults["measure"] += persist(counter, committer.clip)
        faults["prepare_commit"] += persist(counter, committer.prepare_commit)
        faults["commit"] += persist(counter, committer.commit, committer.roll_back)
    return everything(model, committer), faults


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_at_any_allocation_of_a_step_leaves_no_trace(name: str, counter: CountingAllocator) -> None:
    expected = untroubled(*make_committer(named_optimizer(name)))
    found, faults = faulty_run(*make_committer(named_optimizer(name)), counter)
    assert same(found, expected)
    assert faults["measure"] > 0
    fused = name in ("adamw_torch_fused", "sgd")
    assert (faults["commit"] == 0) is fused
    assert (faults["prepare_commit"] == 0) is fused


@pytest.mark.parametrize(("kind", "settings"), FUSED)
def test_a_fused_step_survives_faults_too(kind: type, settings: dict[str, Any], counter: CountingAllocator) -> None:
    expected = untroubled(*make_committer(fused_optimizer(kind, settings)))
    found, _ = faulty_run(*make_committer(fused_optimizer(kind, settings)), counter)
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adafactor"])
def test_with_a_loss_scale_no_fault_unscales_or_clips_twice(name: str, counter: CountingAllocator) -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    expected = untroubled(*make_committer(named_optimizer(name), scaler=scaler()), scale=1024.0)
    found, faults = faulty_run(*make_committer(named_optimizer(name), scaler=scaler()), counter, scale=1024.0)
    assert same(found, expected)
    assert faults["measure"] > 3 * 5, "a scalar is allocated for every gradient that is unscaled"
    assert found["scaler"]["scale"] == 2048.0


class Rude(torch.optim.Optimizer):
    """Does what others do not: writes to gradients, draws at random, holds tensors and an optimizer of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.average = torch.zeros(())
        self.steps = 0
        self.past: list[float] = []
        self.inner = torch.optim.RMSprop(self.param_groups, lr=0.01, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter, alpha=0.1)
                parameter.data = parameter - torch.rand_like(parameter) * group["lr"] * parameter.grad
                self.state[parameter]["drawn"] = torch.rand(2)
                self.average += parameter.grad.norm()
            self.past.append(float(self.average))
        self.inner.step()


@pytest.mark.slow
def test_an_optimizer_of_unknown_make_is_undone_too(counter: CountingAllocator) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Rude(model.parameters())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected_model, expected_committer = make_committer(make)
        expected = untroubled(expected_model, expected_committer)
        torch.manual_seed(0)
        model, committer = make_committer(make)
        found, faults = faulty_run(model, committer, counter)
    assert same(found, expected)
    assert faults["commit"] > 20
    theirs, ours = expected_committer.optimizer, committer.optimizer
    assert isinstance(theirs, Rude)
    assert isinstance(ours, Rude)
    assert same([ours.average, ours.steps, ours.past], [theirs.average, theirs.steps, theirs.past])
    assert same(ours.inner.state_dict(), theirs.inner.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_known_optimizers_leave_gradients_as_they_are(name: str) -> None:
    model = make_model()
    optimizer = named_optimizer(name)(model)
    set_gradients(model, 1)
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    assert same([parameter.grad for parameter in model.parameters()], before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "adafactor", "lion_8bit"])
def test_simply_stepping_again_would_be_wrong(name: str, counter: CountingAllocator) -> None:
    def stepped(fail_at: int | None) -> tuple[list[Tensor], bool]:
        model = make_model()
        optimizer = named_optimizer(name)(model)
        set_gradients(model, 1)
        failed = False
        if fail_at is not None:
            counter.fail_after(fail_at)
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                failed = True
            counter.fail_after(NEVER)
        if fail_at is None or failed:
            # where some of a parameter's state was made, the next step may not even run
            with contextlib.suppress(KeyError):
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()], failed

    right, _ = stepped(None)
    tries = list(itertools.takewhile(lambda outcome: outcome[1], map(stepped, itertools.count(1))))
    wrong = sum(not same(weights, right) for weights, _ in tries)
    assert wrong > len(tries) // 3


# ---------------------------------------------------------------------- what a step equals


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, max_grad_norm: float
) -> bool:
    """The step as PyTorch's documentation has it; tells whether it was taken."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if scaler is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        return True
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


@pytest.mark.parametrize(
    ("kind", "settings", "dtype"),
    # without SGD in bf16, which PyTorch 2.13 gets wrong on a CPU, and not twice alike
    [(*each, torch.float32) for each in FUSED]
    + [(*each, torch.bfloat16) for each in FUSED if each[0] is not torch.optim.SGD],
)
def test_early_state_trains_as_lazy_state_does(kind: type, settings: dict[str, Any], dtype: torch.dtype) -> None:
    model, committer = make_committer(fused_optimizer(kind, settings), dtype=dtype)
    plain = make_model(dtype)
    optimizer = fused_optimizer(kind, settings)(plain)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    committer.make_state()
    for step in range(STEPS):
        for each in (model, plain):
            set_gradients(each, step)
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        committer.commit()
        plain_step(plain, optimizer, None, 1.0)
        schedule.step()
    assert same(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert same(committer.optimizer.state_dict(), optimizer.state_dict())


def test_a_loss_scale_moves_as_pytorch_moves_it() -> None:
    """Through an overflow, growth after two good steps, and a scale that is no power of two."""
    settings: dict[str, Any] = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
    ours, theirs = torch.amp.GradScaler("cpu", **settings), torch.amp.GradScaler("cpu", **settings)
    model, committer = make_committer(named_optimizer("adamw_torch_fused"), scaler=ours)
    plain = make_model()
    optimizer = named_optimizer("adamw_torch_fused")(plain)
    committer.make_state()
    moves = 0
    for step in range(8):
        for each, scaler in ((model, ours), (plain, theirs)):
            scaler.scale(torch.zeros(()))
            set_gradients(each, step, scaler.get_scale())
            if step in (2, 5):
                next(each.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        committer.commit()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + moves)
        moves += plain_step(plain, optimizer, theirs, 1.0)
        assert ours.state_dict() == theirs.state_dict()
    assert moves == 6
    assert committer.scheduler.last_epoch == moves
    assert same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_a_scale_does_not_grow_beyond_float32() -> None:
    state = {"scale": 2.0**127, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0}
    assert next_scale(state, overflowed=False) == state


def test_finite_gradients_whose_squares_overflow_are_no_overflow() -> None:
    model, committer = make_committer(named_optimizer("sgd"), scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
    set_gradients(model, 1, 1e30)
    assert not committer.measure().isfinite()
    committer.clip()
    committer.prepare_commit()
    committer.commit()
    assert committer.scheduler.last_epoch == 1


def test_a_loss_scale_refuses_fp16_weights() -> None:
    with pytest.raises(ConfigError, match=r"5 trained weights are float16, such as '0.weight'.*dtype='float32'"):
        make_committer(named_optimizer("sgd"), dtype=torch.float16, scaler=torch.amp.GradScaler("cpu"))


def test_commit_frees_gradients_also_of_parameters_the_optimizer_does_not_know() -> None:
    model, committer = make_committer(lambda model: torch.optim.SGD([next(model.parameters())], lr=0.1))
    untroubled(model, committer)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------------- what a step allocates


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "settings"), FUSED)
def test_the_commit_of_a_fused_step_allocates_nothing(
    kind: type, settings: dict[str, Any], dtype: torch.dtype, scaled: bool, counter: CountingAllocator
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if scaled else None
    model, committer = make_committer(fused_optimizer(kind, settings), dtype=dtype, scaler=scaler)
    if scaler is not None:
        scaler.scale(torch.zeros(()))
    committer.make_state()
    first = 1 if settings.get("dampening") else 0
    for step in range(STEPS):
        set_gradients(model, step, 4.0)
        committer.measure()
        committer.clip()
        start = counter.allocations
        committer.prepare_commit()
        committer.commit()
        assert (counter.allocations == start) is (step >= first)


def test_what_may_allocate_is_told_from_what_does_not() -> None:
    def free(
        make: Callable[[nn.Module], torch.optim.Optimizer], prepare: Callable[[Any], Any] = lambda _: None
    ) -> bool:
        _, committer = make_committer(make)
        committer.make_state()
        prepare(committer.optimizer)
        return steps_without_allocating(committer.optimizer, committer.parameters)

    adam = fused_optimizer(torch.optim.AdamW, {})
    assert free(adam)
    assert not free(adam, lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None))
    assert not free(adam, lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1)))
    assert not free(adam, lambda optimizer: optimizer.state.clear())
    assert not free(fused_optimizer(type("Mine", (torch.optim.AdamW,), {}), {}))
    assert not free(named_optimizer("adamw_torch"))
    assert not free(named_optimizer("rmsprop"))


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.bfloat16, None)])
def test_sgd_is_fused_where_that_can_be_trusted(dtype: torch.dtype, fused: bool | None) -> None:
    _, committer = make_committer(named_optimizer("sgd"), dtype=dtype)
    assert {group["fused"] for group in committer.optimizer.param_groups} == {fused}


def test_ready_scalars_leave_other_sums_alone() -> None:
    values = [torch.ones(2, dtype=torch.float64), torch.ones((), dtype=torch.float32)]
    with ReadyScalars(torch.ones(())):
        torch._foreach_add_(values, 1)
        torch._foreach_add_(values[1:], 1)
        torch._foreach_add_(values[1:], values[1:], alpha=2)
    assert same(values, [torch.full((2,), 2.0, dtype=torch.float64), torch.tensor(9.0)])


def test_state_is_made_for_trained_parameters_only() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    frozen = next(model.parameters()).requires_grad_(False)
    committer = Committer(model, optimizer, None, max_grad_norm=0.0, scaler=None)
    committer.make_state()
    assert frozen not in optimizer.state
    assert len(optimizer.state) == 4


@pytest.mark.parametrize(("kind", "settings"), FUSED)
def test_loaded_state_is_kept_and_goes_on(kind: type, settings: dict[str, Any]) -> None:
    expected = untroubled(*make_committer(fused_optimizer(kind, settings)), steps=4)
    model, committer = make_committer(fused_optimizer(kind, settings))
    saved = untroubled(model, committer, steps=2)
    model, committer = make_committer(fused_optimizer(kind, settings))
    committer.make_state()
    model.load_state_dict({name: weight.detach() for name, weight in saved["weights"].items()})
    committer.load_state_dict(saved)
    committer.make_state()
    for step in (2, 3):
        set_gradients(model, step)
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        committer.commit()
    assert same(everything(model, committer), expected)


# ---------------------------------------------------------------------- undoing


def test_without_a_copy_a_broken_step_is_called_half_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, committer = make_committer(named_optimizer("adamw_torch_fused"))
    committer.make_state()
    set_gradients(model, 1)
    committer.measure()
    committer.clip()
    committer.prepare_commit()

    def break_off() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(committer.optimizer, "step", break_off)
    with pytest.raises(torch.OutOfMemoryError):
        committer.commit()
    with pytest.raises(MemsafeError, match=r"AdamW broke off.*half applied.*resume_from_checkpoint"):
        committer.roll_back()


@pytest.mark.parametrize("breaks", ["the reference", "a fused step"])
def test_a_step_that_is_half_taken_is_not_saved_as_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """A run resumed from what was saved before it ends as the unbroken one."""
    settings = {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1, "optim": "adamw_torch_fused"}
    settings |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    broken, calls = make_trainer(tmp_path / "broken", **settings), []
    place, name = (ReferenceMix, "finish") if breaks == "the reference" else (torch.optim.AdamW, "step")
    done = getattr(place, name)

    def breaking(*given: Any) -> None:
        done(*given)
        calls.append(1)
        if len(calls) > 3 - (breaks == "the reference"):  # a fused optimizer's state is made by a step of its own
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(place, name, breaking)
        with pytest.raises(MemsafeError):
            broken.train()
    assert [path.name for path in (tmp_path / "broken").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = make_trainer(tmp_path / "broken", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(whole))


class Box:
    """Holds numbers of an optimizer's."""


class Odd(torch.optim.Optimizer):
    """Keeps its state in places of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.noise, self.past, self.box = torch.Generator().manual_seed(1), deque[torch.Tensor](maxlen=3), Box()
        self.box.steps, self.seen, self.log = {}, set[int](), np.zeros(2)  # type: ignore[attr-defined]
        self.ones = np.broadcast_to(np.float32(1.0), (3,))  # which cannot be written to

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.past.append(torch.rand(1, generator=self.noise))
            self.box.steps["count"] = self.box.steps.get("count", 0) + 1  # type: ignore[attr-defined]
            self.seen.add(len(self.seen))
            self.log += 1
            state = sum(self.past) * self.box.steps["count"] * len(self.seen) * float(self.log[0])  # type: ignore[attr-defined]
            parameter.add_(state * -1e-3)


def test_a_step_of_an_optimizer_with_state_in_places_of_its_own_is_undone() -> None:
    model = nn.Linear(2, 3)
    optimizer = Odd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()
    taken = Snapshot(optimizer, scheduler, list(model.parameters()))
    ends = []
    for _ in range(2):
        optimizer.step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        taken.restore()
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_dropping_gradients_after_a_broken_step_undoes_it(counter: CountingAllocator) -> None:
    model, committer = make_committer(named_optimizer("adamw_torch"))
    before = everything(model, committer)
    set_gradients(model, 1)
    committer.measure()
    committer.clip()
    committer.prepare_commit()
    counter.fail_after(40)
    with pytest.raises(torch.OutOfMemoryError):
        committer.commit()
    counter.fail_after(NEVER)
    assert not same(everything(model, committer), before)
    committer.drop_gradients()
    assert same(everything(model, committer), before)


def test_a_schedule_that_breaks_off_is_undone_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = untroubled(*make_committer(named_optimizer("rmsprop")), steps=1)
    model, committer = make_committer(named_optimizer("rmsprop"))
    step = committer.scheduler.step

    def break_off() -> None:
        step()
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(committer.scheduler, "step", break_off)
    with pytest.raises(torch.OutOfMemoryError):
        untroubled(model, committer, steps=1)
    committer.roll_back()
    monkeypatch.undo()
    committer.commit()
    assert same(everything(model, committer), expected)


def test_undoing_allocates_nothing(counter: CountingAllocator) -> None:
    model, committer = make_committer(named_optimizer("adamw_torch"))
    set_gradients(model, 1)
    committer.measure()
    committer.clip()
    committer.prepare_commit()
    counter.fail_after(40)
    with pytest.raises(torch.OutOfMemoryError):
        committer.commit()
    counter.fail_after(NEVER)
    start = counter.allocations
    committer.roll_back()
    assert counter.allocations == start


def test_the_copy_is_host_memory_and_goes_with_the_commit() -> None:
    with SimulatedMemory() as memory:
        model, committer = make_committer(named_optimizer("adamw_torch"))
        for step in range(2):
            set_gradients(model, step)
            committer.measure()
            committer.clip()
            held = memory.live_bytes
            committer.prepare_commit()
            assert memory.live_bytes == held
            committer.commit()
        assert memory.live_bytes < held
        assert memory.host_live_bytes == 0


# ---------------------------------------------------------------------- parking, reference, a new optimizer


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "rmsprop"])
def test_parked_state_trains_the_same(name: str) -> None:
    expected = untroubled(*make_committer(named_optimizer(name)))
    with SimulatedMemory() as memory:
        model, committer = make_committer(named_optimizer(name))
        committer.make_state()
        for step in range(STEPS):
            before = copy.deepcopy(committer.state_dict())
            held = memory.live_bytes
            committer.park()
            committer.park()
            assert same(committer.state_dict(), before)
            # 2 x 4,480 values of one byte each are the least state among these optimizers
            assert memory.host_live_bytes == held - memory.live_bytes >= (8960 if step else 0)
            committer.unpark()
            assert (memory.live_bytes, memory.host_live_bytes) == (held, 0)
            del before
            committer.park()
            set_gradients(model, step)
            committer.measure()
            committer.clip()
            committer.prepare_commit()
            committer.commit()
            assert memory.host_live_bytes == 0
        found = everything(model, committer)
    assert same(found, expected)


def test_parking_may_fail_anywhere(monkeypatch: pytest.MonkeyPatch, counter: CountingAllocator) -> None:
    monkeypatch.setattr(parking, "to_host", lambda tensor: tensor.detach().clone())
    monkeypatch.setattr(parking, "to_device", lambda tensor, _: tensor.detach().clone())
    model, committer = make_committer(named_optimizer("adamw_bnb_8bit"))
    untroubled(model, committer, steps=1)
    one, other, *_ = committer.optimizer.state.values()
    one["shared"] = other["shared"] = torch.arange(4096.0)
    before = everything(model, committer)
    # three tensors are moved; the third try needs but two, because the second left one there
    assert persist(counter, committer.park) == 2
    assert same(everything(model, committer), before)
    assert persist(counter, committer.unpark) == 2
    assert same(everything(model, committer), before)
    assert one["shared"] is other["shared"]


def test_loading_state_holds_it_once_and_may_fail_anywhere() -> None:
    first = untroubled(*make_committer(named_optimizer("adamw_torch_fused")), steps=1)
    for state in first["optimizer"]["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].bfloat16()  # so that loading makes tensors, as it does on a device
    with SimulatedMemory() as memory:
        _, committer = make_committer(named_optimizer("adamw_torch_fused"))
        committer.make_state()
        held = memory.live_bytes
        memory.reset_peak()
        assert persist(memory, lambda: committer.load_state_dict(first)) == 10
        assert memory.peak_bytes <= held
    for state, loaded in zip(first["optimizer"]["state"].values(), committer.optimizer.state.values(), strict=True):
        assert same(loaded, {name: value.float() for name, value in state.items()})


def test_state_loaded_while_parked_replaces_what_was_parked() -> None:
    with SimulatedMemory() as memory:
        model, committer = make_committer(named_optimizer("adamw_torch_fused"))
        first = untroubled(model, committer, steps=1)
        set_gradients(model, 1)
        committer.measure()
        committer.clip()
        committer.prepare_commit()
        committer.commit()
        committer.park()
        assert memory.host_live_bytes > 0
        committer.load_state_dict(first)
        assert memory.host_live_bytes == 0
        committer.unpark()
        assert same(committer.state_dict()["optimizer"], first["optimizer"])


def test_a_reference_is_mixed_once_whatever_fails(counter: CountingAllocator) -> None:
    reference, model = make_model(torch.bfloat16), make_model()
    set_gradients(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    expected = [
        old.detach().lerp(new.detach().to(old.dtype), 0.6)
        for old, new in zip(reference.parameters(), model.parameters(), strict=True)
    ]
    assert persist(counter, ReferenceMix(reference, model, 0.6).finish) >= 3
    assert same([parameter.detach() for parameter in reference.parameters()], expected)


def test_another_optimizer_goes_on_at_the_rate_of_the_first() -> None:
    model, committer = make_committer(named_optimizer("adamw_torch_fused"))
    untroubled(model, committer)
    _, other = make_committer(named_optimizer("adamw_bnb_8bit"))
    other.resume_schedule(committer.scheduler.state_dict())
    assert other.learning_rate == committer.learning_rate == pytest.approx(1e-2 / 4)
    other.scheduler.step()
    assert other.learning_rate == pytest.approx(1e-2 / 5)


def test_eight_bit_optimizers_keep_the_state_of_embeddings_in_float32() -> None:
    """As transformers' trainer has it, and bitsandbytes advises; no other optimizer of the process is told of it."""
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128))
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    before = dict(manager.pid2config)
    optimizer: Any = build_optimizer(model, GRPOConfig(optim="adamw_bnb_8bit"))
    (model(torch.arange(4)).sum()).backward()
    optimizer.step()
    assert [optimizer.state[weight]["state1"].dtype for weight in model.parameters()] == [
        torch.float32,
        torch.uint8,
        torch.float32,  # a bias, smaller than bitsandbytes packs
    ]
    assert manager.pid2config == before


def test_an_argument_that_the_optimizer_cannot_use_is_refused() -> None:
    for value in ("-1", "much"):
        config = GRPOConfig(optim="sgd", optim_args=f"momentum={value}")
        with pytest.raises(
            ConfigError, match=f"optim_args is 'momentum={value}', which optim 'sgd' cannot use: .*{value}"
        ):
            build_optimizer(nn.Linear(2, 2), config)
