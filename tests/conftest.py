"""One thread per test process, and one seed per test: neither the number of workers nor the order changes a result."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Inductor's cache does not tell one processor's code from another's: loaded under another capability, it gives NaN.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/inductor_of_tests_{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}",
)

# Before torch is loaded, here and in processes that tests start: threads of several ranks would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from memsafe_rl.config.validation import REGISTRIES
from memsafe_rl.models.adapter import ADAPTERS
from memsafe_rl.training.assembly import factory as _factory  # noqa: F401 - with which the library's own parts register themselves
from memsafe_rl.training.assembly.protocol import MODEL_FAMILIES

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before what is not wanted is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has a test marked ``slow_after(n)`` keep its first n cases in the quick run."""
    seen: Counter[tuple[object, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("slow_after")
        if mark is not None and isinstance(item, pytest.Function):
            case = (item.parent, item.originalname)
            seen[case] += 1
            if seen[case] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Hides modules and collected tests from the garbage collector, whose full rounds were half of many a test."""
    gc.collect()
    gc.freeze()


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
