"""The optimizer, its schedule and the one moment at which weights move."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, get_scheduler


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters that receive gradients, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Makes the optimizer that `optim` names, with weight decay on everything but biases and norms.

    Args:
        model: the model to train.
        config: has transformers' optimizer fields (`optim`, `learning_rate`, `adam_beta1` ...).

    Returns:
        The optimizer.
    """
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer_class, arguments = Trainer.get_optimizer_cls_and_kwargs(config, model)
    optimizer: torch.optim.Optimizer = optimizer_class([group for group in groups if group["params"]], **arguments)
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: Any, max_steps: int) -> Any:
    """Makes the learning-rate schedule that `lr_scheduler_type` names.

    Args:
        optimizer: whose rate is scheduled.
        config: has transformers' scheduler fields.
        max_steps: optimizer steps of the run.

    Returns:
        A scheduler with transformers' interface.
    """
    return get_scheduler(
        config.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=config.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )


class Committer:
    """Holds everything that moves when a step is committed: weights, optimizer state, schedule and loss scale.

    Args:
        model: the model to train.
        optimizer: moves its weights.
        scheduler: moves the learning rate.
        max_grad_norm: largest gradient norm; 0 or less for no clipping.
        scaler: loss scaler for fp16, None otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        max_grad_norm: float,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self._parameters = trained_parameters(model)
        self._max_grad_norm = max_grad_norm

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return self._parameters

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def scaled(self, loss: Tensor) -> Tensor:
        """Scales a loss for fp16; the loss itself otherwise."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def drop_gradients(self) -> None:
        """Frees every gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> Tensor:
        """Unscales the gradients in place and measures their global norm.

        A parameter that no row reached gets a zero gradient, so that the optimizer's momentum and weight decay act on
        it as they would had the row of zero advantage been run.

        Returns:
            Scalar; infinite or NaN when an fp16 gradient overflowed.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def commit(self, norm: Tensor) -> None:
        """Clips by a norm already measured, moves weights, rate and scale, and frees the gradients.

        Args:
            norm: the gradients' global norm.
        """
        if self._max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        if self._moves_weights():
            self.scheduler.step()
        self.drop_gradients()

    def _moves_weights(self) -> bool:
        """Steps the optimizer; False where an fp16 gradient overflowed and the scaler left the step out."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def state_dict(self) -> dict[str, Any]:
        """Gives the state of optimizer, schedule and scale."""
        state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl+C back until the block is done, so that a step is never half committed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught and callable(previous):
        previous(*caught[0])
