"""One thread per test process, and one seed per test: neither the number of workers nor the order changes a result."""

import gc
import os
import tempfile
from collections import Counter

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


def pytest_configure(config: pytest.Config) -> None:
    """Loads torch wherever tests run; the process that hands them out to others would only make these wait for it."""
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("tests.isolation")


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
