"""A catalogue of policy losses, one file each: equation, paper and registration. A file added here is a loss added.

What most share, the clipped ratio, is in `core`; GSPO is `grpo` with ``importance_sampling_level="sequence"``.

`policy_loss` is what a micro-batch goes through whichever loss is chosen; a loss of your own can also be passed from
outside as ``loss_type``.
"""

from importlib import import_module
from pkgutil import iter_modules

from memsafe_rl.ops.losses.core import (
    LOSSES,
    Loss,
    LossTraits,
    Measures,
    Ratios,
    needs_whole_rows,
    policy_loss,
    register_loss,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["LOSSES", "Loss", "LossTraits", "Measures", "Ratios", "needs_whole_rows", "policy_loss", "register_loss"]
