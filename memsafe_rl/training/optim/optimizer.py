"""The optimizer, its schedule and the one moment at which weights move."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from inspect import signature
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import Trainer, get_scheduler

from memsafe_rl.accounting import charge, device_type_of
from memsafe_rl.memory.runtime.tracker import optimizer_tensors
from memsafe_rl.training import failure, refusal
from memsafe_rl.training.optim.state import (
    ClipFactors,
    LocalParts,
    OptimizerOffload,
    Snapshot,
    SteppedWeights,
    make_missing_state,
    ready_scalars,
    steps_without_allocating,
)
from memsafe_rl.types import Component

logger = logging.getLogger(__name__)


def trained_names(model: nn.Module) -> list[str]:
    """Returns the names of a model's trained parameters, in its order; FSDP2 exchanges the parameters themselves."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters that receive gradients, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def given_optimizers(given: Any) -> tuple[torch.optim.Optimizer | None, Any]:
    """Reads a trainer's argument `optimizers`."""
    if given is None:
        return None, None
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    refusal.when(not is_pair, "optimizers/pair", kind=type(given).__name__, given=given)
    optimizer, schedule = given
    lacks = optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer)
    refusal.when(lacks, "optimizers/kind", value=optimizer)  # whose step could not be undone
    lacks = schedule is not None and (isinstance(schedule, type) or not hasattr(schedule, "get_last_lr"))
    refusal.when(lacks, "optimizers/part", value=schedule, needed="get_last_lr")
    asks = isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "eval")
    refusal.when(asks, "optimizers/step", kind=type(optimizer).__name__)
    asks = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    refusal.when(asks, "optimizers/step", kind=type(schedule).__name__)
    return optimizer, schedule


def check_holds(optimizer: torch.optim.Optimizer, networks: Mapping[str, nn.Module]) -> None:
    """Refuses an optimizer that holds no trained weight of a network, and says it where some are left out."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, network in networks.items():
        trained = trained_parameters(network)
        left_out = [parameter for parameter in trained if id(parameter) not in held]
        if trained and len(left_out) == len(trained):
            kind, where = type(optimizer).__name__, _WHERE[name]
            raise refusal("optimizers/none", kind=kind, count=len(trained), network=name, where=where)
        if left_out:
            logger.warning(
                "%d of %d trained tensors of the %s are in none of the optimizer's groups, and stay as they are.",
                len(left_out),
                len(trained),
                name,
            )


_WHERE = {"model": "model", "critic": "critic.beside"}


def build_optimizer(model: nn.Module, config: Any, half: SteppedWeights | None = None) -> torch.optim.Optimizer:
    """Makes the optimizer that `optim` names, with weight decay on everything but biases and norms."""
    half = half or SteppedWeights(LocalParts(trained_parameters(model)))
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trained = [(name, half.stepped(weight)) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    try:
        optimizer_class, arguments = Trainer.get_optimizer_cls_and_kwargs(config, model)
        if optimizer_class is torch.optim.SGD and all(_has_fused_sgd(parameter) for _, parameter in trained):
            arguments = {**arguments, "fused": True}  # the only form whose step allocates nothing
        of_torch = optimizer_class.__module__.startswith("torch.")
        has_foreach = of_torch and "foreach" in signature(optimizer_class).parameters
        if device_type_of(trained[0][1]) == "cuda" and not arguments.get("fused") and has_foreach:
            arguments = {"foreach": True, **arguments}  # as PyTorch chooses on CUDA, but not for fake tensors
        optimizer: Any = optimizer_class([group for group in groups if group["params"]], **arguments)
        if arguments.get("optim_bits") == 8:  # of bitsandbytes; embeddings keep 32, as under transformers' trainer
            tables = [one for part in model.modules() if isinstance(part, nn.Embedding) for one in part.parameters()]
            wide = {id(half.stepped(table)): {"optim_bits": 32} for table in tables}
            optimizer.mng = copy(optimizer.mng)  # which is otherwise one for all optimizers
            optimizer.mng.pid2config = wide | optimizer.mng.pid2config  # whose user may have said otherwise
    except (TypeError, ValueError) as error:
        raise refusal("optim_args", given=config.optim_args, optim=config.optim.value, error=error) from error
    return cast(torch.optim.Optimizer, optimizer)


def _has_fused_sgd(parameter: nn.Parameter) -> bool:
    """Whether there is a fused SGD that can be trusted: on a CPU, PyTorch's goes wrong in half precision."""
    device = device_type_of(parameter)
    if device == "cpu":
        return parameter.dtype in (torch.float32, torch.float64)
    return device in ("cuda", "mps", "xpu") and parameter.is_floating_point()


def build_scheduler(optimizer: torch.optim.Optimizer, config: Any, max_steps: int) -> Any:
    """Makes the learning-rate schedule that `lr_scheduler_type` names."""
    return get_scheduler(
        config.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=config.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )


class Committer:
    """Moves everything that a committed step moves: weights, optimizer state, schedule and loss scale.

    `measure`, `clip`, `prepare_commit` and `commit`, in this order, may each run out of memory and be called again, the
    last after `roll_back`: a step that broke off half way would else move some weights twice.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        max_grad_norm: float,
        scaler: torch.amp.GradScaler | None,
        warmup_steps: int = 0,
        half: SteppedWeights | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.warmup_steps = warmup_steps
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        weights = trained_parameters(model)
        self.half = half or SteppedWeights(LocalParts(weights))
        self.parameters = self.half.parts.parameters
        self.stepped = [self.half.stepped(weight) for weight in weights]
        self._max_grad_norm = max_grad_norm
        self._unscaled = 0
        self._clipped = 0
        self._measured: _Measured | None = None
        self._snapshot: Snapshot | None = None
        self._moving = False
        self.uncounted = False  # whether weights may have moved for a step that the run has not counted yet
        self._parking = OptimizerOffload(optimizer)
        named = model.named_parameters()
        half_named = [name for name, weight in named if weight.requires_grad and weight.dtype == torch.float16]
        if self.scaler is not None and half_named:
            raise refusal("fp16", count=len(half_named), name=half_named[0])

    def tensors(self) -> list[Tensor]:
        """Returns all that is held between steps to move the weights."""
        return [*optimizer_tensors(self.optimizer), *self.half.tensors()]

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def read_loss_scale(self) -> float:
        """Returns what losses are multiplied by before their backward; 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.state_dict()["scale"])

    def scaled(self, loss: Tensor) -> Tensor:
        """Scales a loss for fp16; the loss itself otherwise."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def make_state(self) -> None:
        """Makes a fused optimizer's state before its first step, as others do in it; may be repeated."""
        with charge(Component.OPTIMIZER):
            make_missing_state(self.optimizer, self.stepped)

    def park(self) -> None:
        """Moves the optimizer's state to host memory; may be repeated."""
        self._parking.park()
        for wide in self.half.wide:
            wide.park()

    def unpark(self) -> None:
        """Moves optimizer state that `park` sent to the host back to its device; may be repeated."""
        for wide in self.half.wide:
            wide.unpark()
        self._parking.unpark()

    def drop_gradients(self) -> None:
        """Frees every gradient, and forgets what was measured of them; undoes a commit that broke off, if it can."""
        if self._moving and self._snapshot is not None:
            self.roll_back()
        self.half.parts.drop_gradients()
        for parameter in self._held:
            parameter.grad = None
        self.half.close()
        self._unscaled = self._clipped = 0
        self._measured = self._snapshot = None
        self._moving = False

    def complete_gradients(self) -> None:
        """Gives zeros to what no row reached: momentum and decay act as if rows of zero advantage had been run."""
        self.half.parts.take_gradients()
        with charge(Component.GRADIENTS):
            missing = [one for one in self.parameters if one.grad is None and one.requires_grad]  # none frozen since
            for parameter, zeros in zip(missing, [torch.zeros_like(parameter) for parameter in missing], strict=True):
                parameter.grad = zeros

    def norms(self) -> tuple[float, float]:
        """Returns the norm of this rank's part of divided gradients, and that of whole ones; may be repeated."""
        self.complete_gradients()
        self._unscale()
        known = {id(parameter) for parameter in self.half.parts.whole}
        apart: tuple[list[Tensor], list[Tensor]] = [], []
        for parameter in self.parameters:
            if parameter.grad is not None:
                apart[id(parameter) in known].append(parameter.grad)
        divided, whole = (float(get_total_norm(gradients)) for gradients in apart)
        return divided, whole

    def measure(self, known_norm: float | None = None) -> Tensor:
        """Unscales the gradients in place, once, and measures their norm and the factor that clips; may be repeated."""
        self.complete_gradients()
        scale = self._unscale()
        gradients = self._gradients
        norm = get_total_norm(gradients) if known_norm is None else gradients[0].new_tensor(known_norm)
        # a norm may be infinite without any gradient that is, when only its square overflowed
        overflowed = bool(scale) and not bool(norm.isfinite()) and not bool(get_total_norm(gradients, inf).isfinite())
        self._measured = _Measured(
            clip_factors=_clip_factors([*gradients, *self.stepped], norm, self._max_grad_norm),
            one=torch.ones(()),
            scale=scale,
            overflowed=overflowed,
        )
        return norm

    def clip(self) -> None:
        """Multiplies each gradient that is stepped by directly by its factor, once; may be repeated."""
        measured = self._checked()
        if measured.overflowed or not measured.clip_factors:
            return
        for gradient in [weight.grad for weight in self.half.plain if weight.grad is not None][self._clipped :]:
            gradient.mul_(measured.clip_factors[gradient.device, gradient.dtype])
            self._clipped += 1

    def prepare_commit(self) -> None:
        """Takes back what was parked, makes room for the step, and copies what it may leave half done; repeatable."""
        self.unpark()
        if self._checked().overflowed:
            return
        if len(self.half.parts.whole) < len(self.parameters):
            self.complete_gradients()  # a callback may have replaced those of weights that are divided
        self.half.open()
        if not steps_without_allocating(self.optimizer, self.stepped):
            self._snapshot = Snapshot(self.optimizer, self.scheduler, self.parameters)

    def commit(self) -> None:
        """Moves weights, rate and loss scale, after an overflow the last alone; after a failure, `roll_back` first."""
        measured = self._checked()
        self.uncounted = True
        if not measured.overflowed:
            self._moving = True
            with ready_scalars(self.parameters, measured.one):
                self.half.step(self.optimizer, measured.clip_factors)
            self.scheduler.step()
        if self.scaler is not None:
            self.scaler.load_state_dict(next_scale(measured.scale, overflowed=measured.overflowed))
        self._moving = False
        for wide in () if measured.overflowed else self.half.wide:
            wide.committed()
        self.drop_gradients()

    def roll_back(self) -> None:
        """Puts everything back as it was before a `commit` that failed, bit for bit, so that it can be called again."""
        if not self._moving:
            return
        if self._snapshot is None:
            raise failure("commit", kind=type(self.optimizer).__name__)
        self._snapshot.restore()
        self.half.undone()
        self._moving = self.uncounted = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of optimizer, schedule and scale."""
        parts = self.half.parts
        held = parts.each(self.optimizer.state_dict(), self._parts, parts.marked)
        state = {"optimizer": held, "scheduler": self.scheduler.state_dict()}
        state |= self.half.state_dict()
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, after the weights; the state before goes first. May be repeated."""
        self._parking.forget()
        self.optimizer.state.clear()
        parts = self.half.parts
        saved = parts.each(state["optimizer"], self._parts, parts.cut)
        own, names = (set().union(*one) for one in (self.optimizer.param_groups, saved["param_groups"]))
        if own - names and names - own:  # settings of another class; a version of torch adds or drops some
            kind, told = type(self.optimizer).__name__, f"it has {min(names - own)!r}"
            raise refusal("checkpoint/optimizer", kind=kind, error=told)
        try:
            self.optimizer.load_state_dict(saved)
        except ValueError as error:
            raise refusal("checkpoint/optimizer", kind=type(self.optimizer).__name__, error=error) from error
        for place, parameter in enumerate(self._held):  # torch has rounded it to the weights' type
            own = self.optimizer.state.get(parameter, {})
            for name, value in saved["state"].get(place, {}).items():
                if isinstance(value, Tensor) and value.itemsize > own[name].itemsize:
                    own[name] = value.to(own[name].device, copy=True)
        self.half.load_state_dict(state)
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def resume_schedule(self, schedule: Mapping[str, Any]) -> None:
        """Continues the schedule of another optimizer."""
        self.scheduler.load_state_dict(dict(schedule))
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    @property
    def _held(self) -> list[nn.Parameter]:
        """What the optimizer holds, in the order of its state."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def _parts(self) -> list[nn.Parameter]:
        return [self.half.part_of(parameter) for parameter in self._held]

    @property
    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _checked(self) -> _Measured:
        assert self._measured is not None, "the gradients have not been measured"
        return self._measured

    def _unscale(self) -> dict[str, Any]:
        """Divides each gradient by the loss scale, if any, once: a count says where a repeated call goes on."""
        if self.scaler is None:
            return {}
        scale: dict[str, Any] = self.scaler.state_dict()
        for gradient in self._gradients[self._unscaled :]:
            gradient.mul_(1.0 / scale["scale"])
            self._unscaled += 1
        return scale


@dataclass(frozen=True)
class _Measured:
    """What is known of the gradients when the commit begins."""

    clip_factors: ClipFactors  # scalar by device and dtype; empty for no clipping
    one: Tensor  # scalar float32 on the CPU, 1
    scale: Mapping[str, Any]  # state of the loss scaler, on the host; empty without one
    overflowed: bool  # whether an fp16 gradient is infinite or NaN


def next_scale(state: Mapping[str, Any], *, overflowed: bool) -> dict[str, Any]:
    """Moves the state of a `GradScaler` as its `update` does, on the host (Micikevicius et al. 2018, section 3.2)."""
    scale, grown = state["scale"], state["scale"] * state["growth_factor"]
    if overflowed:
        return {**state, "scale": scale * state["backoff_factor"], "_growth_tracker": 0}
    steps = state["_growth_tracker"] + 1
    if steps != state["growth_interval"]:
        return {**state, "_growth_tracker": steps}
    return {**state, "scale": grown if (grown <= torch.finfo(torch.float32).max) else scale, "_growth_tracker": 0}


class ReferenceMix:
    """Moves a reference to ``alpha * model + (1 - alpha) * reference``, once (Gorbatovski et al. 2024, eq. 4)."""

    def __init__(self, reference: nn.Module, model: nn.Module, alpha: float) -> None:
        self._waiting = deque(zip(reference.parameters(), model.parameters(), strict=True))
        self._alpha = alpha

    @torch.no_grad()
    def finish(self) -> None:
        """Mixes the parameters that are not mixed yet; after a failure, call it again."""
        while self._waiting:
            old, new = self._waiting[0]
            old.lerp_(new.to(old), self._alpha)  # which may wait on the host
            self._waiting.popleft()


def _clip_factors(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> ClipFactors:
    """Returns min(1, max_norm / norm) by device and dtype of what is clipped, as PyTorch's clipping has it."""
    if max_norm <= 0:
        return {}
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    return {(device, dtype): factor.to(device, dtype) for device, dtype in kinds}
