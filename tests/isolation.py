"""What every test begins with: a seed, one thread, and no parts but the library's own; loaded by `conftest.py`."""

from collections.abc import Iterator

import pytest
import torch

from memsafe_rl.config.validation import REGISTRIES
from memsafe_rl.models.adapter import ADAPTERS
from memsafe_rl.training.assembly import factory as _factory  # noqa: F401 - with which the library's own parts register themselves
from memsafe_rl.training.assembly.protocol import MODEL_FAMILIES

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _parts_of_ones_own() -> Iterator[None]:
    """Forgets losses, estimators, engines and networks that a test registers."""
    registries = [*REGISTRIES.values(), ADAPTERS, MODEL_FAMILIES]
    before = [dict(registry) for registry in registries]
    yield
    for registry, parts in zip(registries, before, strict=True):
        if dict(registry) != parts:
            registry.clear()
            registry.update(parts)
