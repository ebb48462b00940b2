"""One thread per test process: the suite runs several processes and must not fight over cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before torch is loaded, here and in processes that tests start: threads of several ranks would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
