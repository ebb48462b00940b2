"""Which adapter a network that draws tokens needs; the files of this folder register their families."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from peft import PeftModel
from torch import nn

from memsafe_rl.models import refusal
from memsafe_rl.models.adapter import ADAPTERS, Adapter, ModelAdapter
from memsafe_rl.models.language.path_check import check_rows_alone
from memsafe_rl.ops.registry import refuse_incomplete

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f"{__package__}.{_module.name}")


def family_of(model: Any) -> Adapter | None:
    """Returns the family of a network, the one registered last where several match; None where none does."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return next((family for family in reversed(ADAPTERS.values()) if family.matches(inner)), None)


def adapter_for(
    model: nn.Module, *, pad_token_id: int, reference_model: nn.Module | None = None, inputs: Any = None
) -> Any:
    """Wraps a network by its family; ``inputs`` turns stored ids into what it reads, None for tokens as they are."""
    family = family_of(model)
    if family is None:
        raise refusal("family", kind=type(model).__name__)
    more = {} if inputs is None else {"inputs": inputs}
    adapter = family.function(model, pad_token_id=pad_token_id, reference_model=reference_model, **more)
    refuse_incomplete(adapter, ModelAdapter, f"adapter {family.name!r}")
    return adapter


def check_adapter(adapter: ModelAdapter) -> None:
    """Compares an adapter's own paths with its model's logits, as its family does."""
    family = family_of(adapter.model)
    if family is not None:
        (family.check or check_rows_alone)(adapter)
