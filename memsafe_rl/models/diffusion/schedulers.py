"""Denoising steps as Gaussians: what a scheduler makes of a denoiser's output, with enough noise to learn from.

Steps are numbered as they are taken: column 0 leads away from pure noise, column S - 1 to the sample.

Axes: ``M`` entries, that is (row, column) pairs laid end to end, ``S`` denoising steps; ``...`` stands for the axes of
a state.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memsafe_rl.models import refusal


class DenoisingScheduler(Protocol):
    """What the library asks of a scheduler; names are those of the diffusers library where it has them.

    Attributes:
        timesteps: (S,), what the denoiser is told at each step, in the order of the steps.
        stds: (S,) float64 on the host, deviation of each step's noise; 0 for a step without.
    """

    timesteps: Tensor
    stds: Tensor

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Lays the steps of a chain out; called once, before anything else.

        Args:
            num_inference_steps: S.
        """

    def mean(self, model_output: Tensor, columns: Sequence[int], sample: Tensor) -> Tensor:
        """Returns the mean of the next states.

        Args:
            model_output: (M, ...), at least float32, what the denoiser answered.
            columns: the step of each of the M entries.
            sample: (M, ...), of the same type, the states that the denoiser saw.

        Returns:
            (M, ...), with the graph of ``model_output``.
        """


class Step(NamedTuple):
    """One step that is linear in state and output: ``x' ~ N(state · x + output · f(x), std^2)``.

    Args:
        state: factor of the state.
        output: factor of the denoiser's output.
        std: deviation of the noise; 0 for none.
    """

    state: float
    output: float
    std: float


_CHOICES = {
    "prediction_type": ("epsilon", "sample", "v_prediction"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "variance_type": ("fixed_small", "fixed_large"),
    "noise_shape": ("rising", "constant"),
}
"""What a scheduler's field may be, by its name."""


class LinearScheduler(ABC):
    """A scheduler of linear steps; a kind of it says what the steps are."""

    timesteps: Tensor
    stds: Tensor
    _steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name, allowed[0]) not in allowed:
                raise refusal("scheduler/choice", name=name, value=getattr(self, name), allowed=", ".join(allowed))
        for name in ("eta", "noise_level"):
            if hasattr(self, name) and not _is_positive(getattr(self, name)):
                raise refusal("scheduler/noise", name=name, value=getattr(self, name))

    @abstractmethod
    def set_timesteps(self, num_inference_steps: int) -> None:
        """Lays the steps of a chain out."""

    def mean(self, model_output: Tensor, columns: Sequence[int], sample: Tensor) -> Tensor:
        """Returns the mean of the next states, ``a_s x + b_s f(x)``."""
        shape = (-1, *(1,) * (sample.dim() - 1))
        chosen = torch.tensor([self._steps[column][:2] for column in columns], dtype=torch.float64)
        state_M, output_M = chosen.to(dtype=sample.dtype).to(sample.device).unbind(1)
        return state_M.view(shape) * sample + output_M.view(shape) * model_output

    def _lay_out(self, timesteps: Tensor, steps: Sequence[Step]) -> None:
        self.timesteps, self._steps = timesteps, tuple(steps)
        self.stds = torch.tensor([step.std for step in steps], dtype=torch.float64)


@dataclass(eq=False)
class DiffusionScheduler(LinearScheduler):
    """What DDIM and DDPM share: a table of cumulative alphas, and the timesteps that a chain visits."""

    num_train_timesteps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.steps_offset, int) or self.steps_offset < 0:
            raise refusal("steps_offset", offset=self.steps_offset)
        if not isinstance(self.num_train_timesteps, int) or self.num_train_timesteps < 1:
            raise refusal("num_train_timesteps", count=self.num_train_timesteps)
        if not (0 <= self.beta_start < 1 and 0 <= self.beta_end < 1):
            raise refusal("betas", start=self.beta_start, end=self.beta_end)
        self.alphas_cumprod = cumulative_alphas(
            self.num_train_timesteps, self.beta_start, self.beta_end, self.beta_schedule
        )

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Lays the steps of a chain out; refuses more than there are timesteps."""
        most = self.num_train_timesteps
        if not 1 <= num_inference_steps <= most:
            raise refusal("num_inference_steps/most", steps=num_inference_steps, most=most)
        visited = _visited(self.num_train_timesteps, num_inference_steps, self.timestep_spacing, self.steps_offset)
        alphas = [float(self.alphas_cumprod[timestep]) for timestep in visited]
        self._lay_out(torch.tensor(visited), [self._step(alpha, after) for alpha, after in pairwise([*alphas, 1.0])])

    @abstractmethod
    def _step(self, alpha: float, after: float) -> Step:
        """Returns the step from one cumulative alpha to the next."""


@dataclass(eq=False)
class DDIMScheduler(DiffusionScheduler):
    """Denoising diffusion implicit models with noise (Song et al. 2020, arXiv:2010.02502, eq. 12 and 16).

    ``x' = sqrt(p) x_0 + sqrt(1 - p - s^2) e + s z`` with ``s = eta sqrt((1 - p) / (1 - a)) sqrt(1 - a / p)``; a and p
    are the cumulative alphas of this timestep and the next, x_0 and e what the denoiser says of them.

    Args:
        num_train_timesteps: timesteps that the denoiser was trained with.
        beta_start: the first beta.
        beta_end: the last beta.
        beta_schedule: "linear", "scaled_linear" (linear in the root) or "squaredcos_cap_v2" (the cosine schedule of
            Nichol and Dhariwal 2021, arXiv:2102.09672, eq. 17), which takes no betas.
        prediction_type: what the denoiser predicts: the noise ("epsilon"), x_0 ("sample") or "v_prediction".
        timestep_spacing: "leading", "trailing" or "linspace": which timesteps a chain visits.
        steps_offset: added to the timesteps of "leading".
        eta: noise, above 0; at 1 the chain is DDPM's.

    Raises:
        ConfigError: a value is not one of those, or eta is not above 0.
    """

    eta: float = 1.0

    def _step(self, alpha: float, after: float) -> Step:
        return diffusion_step(alpha, after, self.eta, self.prediction_type)


@dataclass(eq=False)
class DDPMScheduler(DiffusionScheduler):
    """Denoising diffusion probabilistic models (Ho et al. 2020, arXiv:2006.11239, eq. 6 and 7), at any spacing.

    Args:
        num_train_timesteps: this and what else has the name of an argument of `DDIMScheduler` is as there.
        variance_type: "fixed_small", the posterior's variance, or "fixed_large", beta.

    Raises:
        ConfigError: a value is not one of those.
    """

    variance_type: str = "fixed_small"

    def _step(self, alpha: float, after: float) -> Step:
        return diffusion_step(alpha, after, 1.0, self.prediction_type, large=self.variance_type == "fixed_large")


@dataclass(eq=False)
class FlowSDEScheduler(LinearScheduler):
    """Rectified flow sampled as a stochastic differential equation (Liu et al. 2025, Flow-GRPO, arXiv:2505.05470).

    With ``x_t = (1 - t) x_0 + t e`` and a denoiser that gives the velocity ``v = e - x_0``, a step from t to t - d is
    ``x' = x - d [v + s^2 / (2 t) (x + (1 - t) v)] + s sqrt(d) z``: every s leaves the marginals those of the flow. The
    last step, and those outside of ``noisy_steps``, have no noise: ``x' = x - d v``.

    Args:
        noise_level: a, above 0.
        noise_shape: "rising" for ``s = a sqrt(t / (1 - t))`` (Flow-GRPO; at t = 1, where it is infinite, the
            denominator is the second timestep's), or "constant" for ``s = a`` (Xue et al. 2025, DanceGRPO,
            arXiv:2505.07818).
        shift: bends the timesteps towards noise, ``t <- shift t / (1 + (shift - 1) t)`` (Esser et al. 2024,
            arXiv:2403.03206, eq. 23); 1 leaves them even.
        time_scale: the denoiser is told ``time_scale · t``.
        noisy_steps: first step with noise and the step after the last one with noise, as MixGRPO's window
            (arXiv:2507.21802); None for all but the last.

    Raises:
        ConfigError: a value is out of its range.
    """

    noise_level: float = 0.7
    noise_shape: str = "rising"
    shift: float = 1.0
    time_scale: float = 1000.0
    noisy_steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refusal.when(not _is_positive(self.shift), "shift", shift=self.shift)
        refusal.when(not _is_positive(self.time_scale), "time_scale", time_scale=self.time_scale)

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Lays the steps of a chain out, from t = 1 to t = 0; refuses fewer than 2, of which none would have noise."""
        refusal.when(num_inference_steps < 2, "num_inference_steps/flow", num_inference_steps=num_inference_steps)
        even = [1 - step / num_inference_steps for step in range(num_inference_steps + 1)]
        times = [self.shift * time / (1 + (self.shift - 1) * time) for time in even]
        told = torch.tensor(times[:-1], dtype=torch.float64) * self.time_scale
        self._lay_out(told.float(), flow_steps(times, self.noise_level, self.noise_shape, self.noisy_steps))


@dataclass(eq=False)
class DiffusersScheduler(LinearScheduler):
    """A scheduler object of the diffusers library, whose tables are read and whose ``step`` is not called.

    Those with ``alphas_cumprod`` become DDIM with noise, those with ``sigmas`` between 1 and 0 (flow matching) the SDE
    of `FlowSDEScheduler`; the timesteps are those that the object itself lays out.

    Args:
        scheduler: the object, such as `DDIMScheduler` or `FlowMatchEulerDiscreteScheduler` of diffusers.
        eta: noise of a diffusion, above 0.
        noise_level: noise of a flow, above 0.
        noise_shape: as for `FlowSDEScheduler`.

    Raises:
        ConfigError: it has no table that can be read, clips what the denoiser predicts, or learns its variance.
    """

    scheduler: Any
    eta: float = 1.0
    noise_level: float = 0.7
    noise_shape: str = "rising"

    def __post_init__(self) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        for name in ("clip_sample", "thresholding"):
            refusal.when(getattr(config, name, False), "scheduler/nonlinear", name=name, kind=type(scheduler).__name__)
        if str(getattr(config, "variance_type", None) or "fixed").startswith("learned"):
            raise refusal("variance_type", kind=type(scheduler).__name__, config=config)
        if hasattr(scheduler, "alphas_cumprod"):
            self.prediction_type = config.prediction_type
        elif not hasattr(scheduler, "sigmas"):
            raise refusal("scheduler/unknown", kind=type(scheduler).__name__)
        super().__post_init__()

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Has the object lay the steps out, and reads them; refuses sigmas that do not lead from 1 to 0."""
        inner = self.scheduler
        inner.set_timesteps(num_inference_steps)
        timesteps = inner.timesteps.cpu()
        if hasattr(inner, "alphas_cumprod"):
            alphas = [float(alpha) for alpha in inner.alphas_cumprod.cpu().double()[timesteps.long()]]
            final = float(getattr(inner, "final_alpha_cumprod", 1.0))
            large = str(getattr(inner.config, "variance_type", None)).startswith("fixed_large")
            step = partial(diffusion_step, eta=self.eta, prediction_type=self.prediction_type, large=large)
            self._lay_out(timesteps, [step(alpha, after) for alpha, after in pairwise([*alphas, final])])
            return
        times = [float(sigma) for sigma in inner.sigmas]
        if not (0 < times[0] <= 1 and times[-1] == 0):
            raise refusal("sigmas", kind=type(inner).__name__, times=times, last=times[-1])
        self._lay_out(timesteps, flow_steps(times, self.noise_level, self.noise_shape, None))


def as_scheduler(scheduler: Any) -> DenoisingScheduler:
    """Returns a scheduler that the library can use."""
    if isinstance(scheduler, type) or not (hasattr(scheduler, "set_timesteps") or hasattr(scheduler, "config")):
        shown = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else repr(scheduler)[:80]
        raise refusal("scheduler/object", shown=shown)
    if isinstance(scheduler, LinearScheduler):
        return copy.copy(scheduler)  # its steps are laid out for one policy
    if hasattr(scheduler, "mean"):
        return scheduler  # type: ignore[no-any-return]
    refusal.when(not hasattr(scheduler, "config"), "scheduler/methods", kind=type(scheduler).__name__)
    return DiffusersScheduler(scheduler)


def diffusion_step(alpha: float, after: float, eta: float, prediction_type: str, *, large: bool = False) -> Step:
    """Returns one step of DDIM as a linear function of state and prediction; ``large`` noise has beta's variance."""
    kept, lost = math.sqrt(alpha), math.sqrt(1 - alpha)
    # x_0 and the noise, each as factors of (state, prediction)
    known = {
        "epsilon": ((1 / kept, -lost / kept), (0.0, 1.0)) if kept else None,
        "sample": ((0.0, 1.0), (1 / lost, -kept / lost)) if lost else None,
        "v_prediction": ((kept, -lost), (lost, kept)),
    }[prediction_type]
    if known is None:
        raise refusal("prediction_type", alpha=alpha, prediction_type=prediction_type)
    clean, noise = known
    variance = eta**2 * (1 - after) / (1 - alpha) * (1 - alpha / after) if after < 1 else 0.0
    refusal.when(variance > 1 - after + 1e-9, "eta/large", eta=eta)
    to_clean, to_noise = math.sqrt(after), math.sqrt(max(0.0, 1 - after - variance))
    state, output = (to_clean * clean[part] + to_noise * noise[part] for part in range(2))
    return Step(state, output, math.sqrt(1 - alpha / after if large and variance else variance))


def flow_steps(times: Sequence[float], level: float, shape: str, noisy: tuple[int, int] | None) -> list[Step]:
    """Returns the steps of a rectified flow as linear functions of state and velocity."""
    count = len(times) - 1
    pair = (0, count - 1) if noisy is None else noisy
    right = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(end, int) for end in pair)
    if not right or not 0 <= pair[0] < pair[1] <= count - 1:
        raise refusal("noisy_steps", pair=pair, count=count, most=count - 1)
    first, end = pair
    steps = []
    for column, (time, after) in enumerate(pairwise(times)):
        length, drift, std = time - after, 0.0, 0.0
        if first <= column < end:
            # the first time is 1 only up to rounding, with some shifts and in float32
            told = times[1] if math.isclose(time, 1, rel_tol=1e-6) else time
            noise = level if shape == "constant" else level * math.sqrt(time / (1 - told))
            drift, std = noise**2 / (2 * time), noise * math.sqrt(length)
        steps.append(Step(1 - length * drift, -length * (1 + drift * (1 - time)), std))
    return steps


def cumulative_alphas(count: int, beta_start: float, beta_end: float, beta_schedule: str) -> Tensor:
    """Returns the products of alphas, ``prod_{u <= t} (1 - beta_u)``."""
    if beta_schedule == "linear":
        betas = torch.linspace(beta_start, beta_end, count, dtype=torch.float64)
    elif beta_schedule == "scaled_linear":
        betas = torch.linspace(beta_start**0.5, beta_end**0.5, count, dtype=torch.float64).square()
    else:
        bars = [math.cos((step / count + 0.008) / 1.008 * math.pi / 2) ** 2 for step in range(count + 1)]
        betas = torch.tensor([min(1 - after / before, 0.999) for before, after in pairwise(bars)], dtype=torch.float64)
    return (1 - betas).cumprod(0)


def _visited(count: int, steps: int, spacing: str, offset: int) -> list[int]:
    """Returns the timesteps of a chain, the noisiest first."""
    if spacing == "leading":
        chosen = [step * (count // steps) + offset for step in range(steps)]
    elif spacing == "trailing":
        chosen = [round(count - step * count / steps) - 1 for step in reversed(range(steps))]
    else:
        chosen = [round(step * (count - 1) / max(1, steps - 1)) for step in range(steps)]
    return [min(timestep, count - 1) for timestep in reversed(chosen)]


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf
