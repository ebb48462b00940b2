"""What every kind of model gives to the one place that builds a training setup."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.checkpoint.weights import Weights, read_weights, write_weights
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.data.prompts import PromptReader, Prompts
from memsafe_rl.models.critic import Critic
from memsafe_rl.models.loading import LoadedModel
from memsafe_rl.ops.registry import Registry
from memsafe_rl.types import Completion, SamplingSettings


@dataclass(frozen=True)
class TrainingRequest:
    """What a user passes to a trainer, under the trainer's names."""

    model: Any  # a name, a folder, or a model
    reward_funcs: Any  # reward functions and reward models
    train_dataset: Any = None  # prompts; None where environments give them
    eval_dataset: Any = None  # prompts for evaluation, or a mapping of such
    processing_class: Any = None  # the tokenizer; None to load it with the model
    reward_processing_classes: Any = None  # tokenizers of the reward models
    quantization_config: Any = None  # of the base; None for none
    peft_config: Any = None  # of a new adapter; None for none
    tools: Sequence[Callable[..., Any]] | None = None  # functions the model may call
    rollout_func: Any = None  # draws completions; None for the run's engine
    environment_factory: Any = None  # makes environments
    memory_policy: Any = None  # a policy, or the name of one
    critic: Any = None  # as `PPOTrainer` takes it
    ref_model: Any = None  # as `PPOTrainer` takes it


class ModelFactory(ABC):
    """One kind of model: how its prompts are read, its weights loaded and written, its samples drawn and shown.

    Attributes:
        processing_class: the tokenizer; None where there is none.
        reader: turns prompts into what the network is conditioned on.
        own_engine: name of the rollout engine that draws samples where the configuration names none.
    """

    own_engine: str
    processing_class: Any
    reader: PromptReader

    @abstractmethod
    def __init__(self, config: TrainerConfig, model: Any, processing_class: Any) -> None:
        """Reads what must be known before any weight is loaded, and refuses what cannot be trained."""

    @abstractmethod
    def load(self, request: TrainingRequest, device: torch.device, room_bytes: int) -> LoadedModel:
        """Loads what is trained, and a frozen copy where the reference needs one.

        Args:
            request: the model, how its base is quantised, its new adapter, and what takes the place of a copy.
            device: where the weights go.
            room_bytes: int, bytes that all weights may take; of more, frozen ones that can stay in host memory.

        Returns:
            The model, its reference copy if it needs one.
        """

    @abstractmethod
    def adapt(self, loaded: LoadedModel) -> Any:
        """Wraps a loaded model for the loops.

        Args:
            loaded: from `load`.

        Returns:
            The adapter, a `ScoringAdapter` with what the engine of this kind needs besides, not checked yet.
        """

    @abstractmethod
    def check(self, adapter: Any) -> None:
        """Compares an adapter's own paths with the network's.

        Args:
            adapter: from `adapt`; it may take another path.
        """

    @abstractmethod
    def sampling_settings(self, adapter: Any) -> SamplingSettings:
        """Returns how samples are drawn.

        Args:
            adapter: from `adapt`.

        Returns:
            The settings.
        """

    @abstractmethod
    def critic(self, adapter: Any, wanted: Any, check: Callable[[Any], None]) -> Critic:
        """Makes the critic that the user wants.

        Args:
            adapter: from `adapt`.
            wanted: as `PPOTrainer` takes it.
            check: compares the paths of an adapter of its own with its network's.

        Returns:
            The critic.

        Raises:
            ConfigError: this model cannot have such a critic.
        """

    @abstractmethod
    def decoded(self, prompts: Prompts, conditions: Sequence[Tensor], completions: Sequence[Completion]) -> list[Any]:
        """Returns samples as reward functions and people see them.

        Args:
            prompts: the rollout's prompts.
            conditions: what each sample was drawn from, its context's token ids say.
            completions: the samples.

        Returns:
            One entry a sample.
        """

    @abstractmethod
    def completion_ids(self, completions: Sequence[Completion]) -> list[Any]:
        """Returns samples as reward functions get them by the name ``completion_ids``.

        Args:
            completions: the samples.

        Returns:
            One entry a sample.
        """

    @abstractmethod
    def loggable(self, sample: Any) -> Any:
        """Returns a sample as tables and files can hold it.

        Args:
            sample: an entry of `decoded`.

        Returns:
            Text, messages or numbers.
        """

    @abstractmethod
    def run_facts(self) -> dict[str, Any]:
        """Says what of the model's own settings a resumed run must share with the one that wrote its checkpoint.

        Returns:
            Values that JSON has a form for, by name.
        """

    def read_text_alone(self) -> None:
        """Hears that no prompt holds an image, so that nothing need be read or kept for images."""
        return

    @abstractmethod
    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuses arguments of the trainer that this kind has no use for.

        Args:
            given: values by name, those that were left out too.

        Raises:
            ConfigError: one of them is given and cannot be used.
        """

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Says what the start banner says of samples.

        Returns:
            Sentences by name.
        """

    def save(self, model: Any, folder: Path, weights: Weights | None = None) -> None:
        """Writes the trained weights, or an adapter's, and the tokenizer in the form that users load.

        Args:
            model: the trained model.
            folder: made if missing.
            weights: copies to write in place of the model's own, by their name in its `state_dict`.
        """
        write_weights(model, self.processing_class, folder, weights)

    def restore(self, model: Any, folder: Path) -> None:
        """Copies saved weights into a model, in place and bit for bit.

        Args:
            model: the trained model.
            folder: written by `save`.
        """
        read_weights(model, folder)


@dataclass(frozen=True)
class ModelFamily:
    """What can be passed as ``model``: networks that draw tokens, denoisers, or something else."""

    name: str  # its name in messages
    # makes the factory of a model, from configuration, model and ``processing_class``
    function: Callable[[TrainerConfig, Any, Any], ModelFactory]
    matches: Callable[[Any], bool]  # whether a model, or its name, without PEFT around it, is of the family


MODEL_FAMILIES: Registry[ModelFamily] = Registry("model", ModelFamily)
"""Every family by name; where several match, the last."""

register_model_family = MODEL_FAMILIES.add
"""Makes a family known."""
