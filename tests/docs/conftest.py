"""A reader of the pages: a hub, runs, files and packages that they name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from huggingface_hub import constants
from peft import LoraConfig

from memsafe_rl import GRPOConfig, GRPOTrainer
from memsafe_rl.config.base import TrainerConfig
from tests import images
from tests.docs.reader import (
    IMAGE_MODEL,
    TEXT_MODELS,
    TOOLS,
    cut_short,
    files_of_a_reader,
    find_spec,
    load_dataset,
    on_the_hub,
)
from tests.rollout.multi_turn.helpers import chat_tokenizer
from tests.tiny import tiny_model
from tests.trainers.helpers import PROMPTS, count_digits


@pytest.fixture(scope="session")
def cache_of_the_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a tiny network under each name that the pages load."""
    root = tmp_path_factory.mktemp("hub")
    for name in TEXT_MODELS:
        on_the_hub(root, name, tiny_model(positions=4096), chat_tokenizer())
    sees = images.processor()
    sees.tokenizer.chat_template = TOOLS + sees.tokenizer.chat_template
    on_the_hub(root, IMAGE_MODEL, images.small(max_position_embeddings=4096), sees)
    return root


@pytest.fixture(scope="session")
def outputs(cache_of_the_hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: all weights were trained in one, an adapter in the other."""
    root = tmp_path_factory.mktemp("outputs")
    given = {"max_steps": 1, "max_completion_length": 4, "save_strategy": "no", "disable_tqdm": True}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Could not find a config file")  # of peft, which asks the hub itself
        patch.setattr(constants, "HF_HUB_CACHE", str(cache_of_the_hub))
        for name, peft in (("run", None), ("lora", LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))):
            args = GRPOConfig(str(root / name), **given)
            dataset = Dataset.from_dict({"prompt": PROMPTS})
            trainer = GRPOTrainer(TEXT_MODELS[0], count_digits, args=args, train_dataset=dataset, peft_config=peft)
            trainer.train()
            trainer.save_model(args.output_dir)
    return root


@pytest.fixture
def reader(tmp_path: Path, cache_of_the_hub: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the working folder of a reader who has the pages' models, runs, files and packages."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache_of_the_hub))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets, "load_dataset", partial(load_dataset, datasets.load_dataset))
    monkeypatch.setattr(TrainerConfig, "__post_init__", partialmethod(cut_short, TrainerConfig.__post_init__))
    monkeypatch.setattr(importlib.util, "find_spec", partial(find_spec, importlib.util.find_spec))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(outputs, tmp_path / "outputs")
    files_of_a_reader(tmp_path)
    yield tmp_path
    sys.modules.pop("my_rewards", None)
