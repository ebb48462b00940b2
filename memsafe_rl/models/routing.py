"""The losses on the routers of a mixture of experts, over a whole optimizer step, whatever its micro-batches.

For tokens ``t`` of all layers, ``f_e`` the share of choices that fall on expert ``e`` and ``P_e`` the mean of the
router's probabilities, the balance loss is ``E * sum_e f_e P_e`` (Fedus et al. 2021, arXiv 2101.03961, eqs. 4-6). The
shares carry no gradient: counted over the step before its first backward, they leave a loss that is a sum over tokens.
The z-loss is the mean of ``logsumexp_e(x_te)^2``, ``x`` a router's logits (Zoph et al. 2022, arXiv 2202.08906, eq. 5).

Axes: ``N`` tokens of a forward, padding included, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memsafe_rl.models import refusal

Hearer = Callable[[Tensor, Tensor], None]
"""Takes a router's logits (N, E) in float32 at least, and which tokens are none of the padding (N, 1)."""


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients of the losses on the routers of a mixture of experts."""

    router_aux_loss_coef: float = 0.0  # of the balance loss
    router_z_loss_coef: float = 0.0

    @property
    def off(self) -> str:
        """The settings that leave out what is asked for; empty where nothing is."""
        return ", ".join(f"{name}=0.0" for name, coef in vars(self).items() if coef)


class Routers:
    """The routers of a network, whose choices can be heard while it runs over padded rows."""

    def __init__(self, lm: Any, losses: RouterLosses) -> None:
        """Finds them where transformers records their logits."""
        recorded = (getattr(lm.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        self._places: dict[nn.Module, int] = {
            module: int(one.index)
            for one in (recorded if isinstance(recorded, (list, tuple)) else [recorded])
            if one is not None
            for module in lm.modules()
            if isinstance(module, one.target_class)
        }
        counts = lm if hasattr(lm, "num_experts") else lm.config.get_text_config(decoder=True)
        # others choose by group or by bias (GLM-4.5, DeepSeek-V3), or show probabilities as their logits (Gemma 4)
        told = hasattr(counts, "num_experts") and hasattr(counts, "num_experts_per_tok")
        refusal.when(not self._places or not told, "routers", off=losses.off, kind=type(lm).__name__)
        self.losses = losses
        self.experts, self._chosen = int(counts.num_experts), int(counts.num_experts_per_tok)
        self.row_lengths: Sequence[int] = ()  # of the rows that the network reads next, padded on the right

    @contextmanager
    def heard(self, hear: Hearer) -> Iterator[None]:
        """Hands on what every router gives, also when a forward is repeated for its backward."""

        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            logits_NE = output[self._places[module]].flatten(0, -2)
            logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
            hear(logits_NE, self._mask(logits_NE))

        with ExitStack() as stack:
            for module in self._places:
                stack.callback(module.register_forward_hook(hook).remove)
            yield

    def _mask(self, like_NE: Tensor) -> Tensor:
        ends_B1 = torch.tensor(self.row_lengths, device=like_NE.device)[:, None]
        slots_L = torch.arange(len(like_NE) // len(ends_B1), device=like_NE.device)
        return (slots_L < ends_B1).flatten()[:, None].to(like_NE.dtype)

    @contextmanager
    def counting(self) -> Iterator[list[Tensor]]:
        """Counts choices, (E + 1,) float64, the last the number of tokens, by layer and forward, while a block runs."""
        counts: list[Tensor] = []

        def hear(logits_NE: Tensor, mask_N1: Tensor) -> None:
            chosen_NK = torch.softmax(logits_NE, -1).topk(self._chosen, -1).indices
            picked_NE = torch.zeros_like(logits_NE).scatter_(1, chosen_NK, 1.0)
            counts.append(torch.cat([picked_NE * mask_N1, mask_N1], 1).sum(0, dtype=torch.float64))

        with self.heard(hear):
            yield counts

    @contextmanager
    def weighing(self, counts_E1: Tensor) -> Iterator[list[Tensor]]:
        """Gives a micro-batch's shares of both losses (2,) by layer, from a step's counts; lasts until its backward."""
        shares: list[Tensor] = []
        tokens = counts_E1[-1].clamp(min=1)  # where no row counts
        weights_E = self.experts * counts_E1[:-1] / tokens.square()

        def hear(logits_NE: Tensor, mask_N1: Tensor) -> None:
            balance = (torch.softmax(logits_NE, -1) * mask_N1 * weights_E.to(mask_N1)).sum()
            z = balance.detach() * 0
            if self.losses.router_z_loss_coef:
                z = (logits_NE.logsumexp(-1, keepdim=True).square() * mask_N1).sum() / tokens.to(mask_N1)
            shares.append(torch.stack([balance, z]))

        with self.heard(hear):
            yield shares
