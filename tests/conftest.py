"""One thread per test process, and one seed per test: neither the number of workers nor the order changes a result."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before torch is loaded, here and in processes that tests start: threads of several ranks would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Hides modules and collected tests from the garbage collector, whose full rounds were half of many a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
