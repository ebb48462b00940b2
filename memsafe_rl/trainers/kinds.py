"""Kinds of model, as a trainer knows them: how prompts are read, weights loaded, samples drawn, shown and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor

from memsafe_rl.checkpoint.weights import read_weights, write_weights
from memsafe_rl.config.base import TrainerConfig
from memsafe_rl.config.generation_options import say_what_is_left_out
from memsafe_rl.data.prompts import PromptReader, Prompts
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.models.diffusion.policy import DiffusionPolicy
from memsafe_rl.models.language.base import language_model_of
from memsafe_rl.models.language.factory import LanguageModelAdapter, adapter_for, check_adapter
from memsafe_rl.models.loading import LoadedModel, eos_token_ids, load_model, load_tokenizer
from memsafe_rl.rollout.engine import RolloutEngine
from memsafe_rl.rollout.sampling_checks import check_settings
from memsafe_rl.trainers.denoising import DenoisingKind
from memsafe_rl.trainers.inputs import model_facts, prompt_reader, rollout_engine
from memsafe_rl.types import Completion, SamplingSettings


class Kind(Protocol):
    """What differs between language models and denoisers for a trainer.

    Attributes:
        processing_class: the tokenizer; None where there is none.
        reader: turns prompts into what the network is conditioned on.
    """

    processing_class: Any
    reader: PromptReader

    def __init__(self, config: TrainerConfig, model: Any, processing_class: Any) -> None:
        """Reads what must be known before any weight is loaded, and refuses what cannot be trained."""

    def load(self, model: Any, device: torch.device, *, quantization_config: Any, peft_config: Any) -> LoadedModel:
        """Loads what is trained, and a frozen copy where the reference needs one.

        Args:
            model: as the trainer takes it.
            device: where the weights go.
            quantization_config: of the base; None for none.
            peft_config: of a new adapter; None for none.

        Returns:
            The model, its reference copy if it needs one.
        """

    def adapt(self, loaded: LoadedModel) -> Any:
        """Wraps a loaded model for the loops.

        Args:
            loaded: from `load`.

        Returns:
            The adapter, a `ScoringAdapter` with what the engine of this kind needs besides, not checked yet.
        """

    def check(self, adapter: Any) -> None:
        """Compares an adapter's own paths with the network's.

        Args:
            adapter: from `adapt`; it may take another path.
        """

    def sampling_settings(self, adapter: Any) -> SamplingSettings:
        """Gives how samples are drawn.

        Args:
            adapter: from `adapt`.

        Returns:
            The settings.
        """

    def engine(self, adapter: Any, tracker: MemoryTracker) -> RolloutEngine:
        """Gives the engine that draws samples.

        Args:
            adapter: from `adapt`.
            tracker: knows what the run may still hold.

        Returns:
            The engine, not started yet.
        """

    def shown(self, prompts: Prompts, completions: Sequence[Completion]) -> list[Any]:
        """Gives samples as reward functions and people see them.

        Args:
            prompts: the rollout's prompts.
            completions: the samples.

        Returns:
            One entry a sample.
        """

    def plain(self, completions: Sequence[Completion]) -> list[Any]:
        """Gives samples as reward functions get them by the name ``completion_ids``.

        Args:
            completions: the samples.

        Returns:
            One entry a sample.
        """

    def told(self, shown: Any) -> Any:
        """Gives a sample as tables and files can hold it.

        Args:
            shown: an entry of `shown`.

        Returns:
            Text, messages or numbers.
        """

    def run_facts(self) -> dict[str, Any]:
        """Says what of the model's own settings a resumed run must share with the one that wrote its checkpoint.

        Returns:
            Values that JSON has a form for, by name.
        """

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuses arguments of the trainer that this kind has no use for.

        Args:
            given: values by name, those that were left out too.

        Raises:
            ConfigError: one of them is given and cannot be used.
        """

    def facts(self) -> dict[str, str]:
        """Says what the start banner says of samples.

        Returns:
            Sentences by name.
        """

    def save(self, model: Any, folder: Path) -> None:
        """Writes the trained weights in the form that users load.

        Args:
            model: the trained model.
            folder: made if missing.
        """

    def restore(self, model: Any, folder: Path) -> None:
        """Copies saved weights into a model, in place and bit for bit.

        Args:
            model: the trained model.
            folder: written by `save`.
        """


class LanguageKind:
    """Causal LMs and encoder-decoders of transformers."""

    def __init__(self, config: TrainerConfig, model: Any, processing_class: Any) -> None:
        self._config = config
        facts = model_facts(config, model)
        revision = (config.model_init_kwargs or {}).get("revision")
        self.processing_class = load_tokenizer(
            model,
            processing_class,
            trust_remote_code=config.trust_remote_code,
            **({"revision": revision} if revision else {}),
        )
        self.reader: PromptReader = prompt_reader(config, self.processing_class, facts)

    def load(self, model: Any, device: torch.device, *, quantization_config: Any, peft_config: Any) -> LoadedModel:
        """Loads a model by name, or prepares a given one; see `Kind.load`."""
        return load_model(
            model,
            model_init_kwargs=self._config.model_init_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            trust_remote_code=self._config.trust_remote_code,
            device=device,
            with_reference=self._config.has_reference,
        )

    def adapt(self, loaded: LoadedModel) -> LanguageModelAdapter:
        """Wraps a causal LM or an encoder-decoder; see `Kind.adapt`."""
        pad = self.processing_class.pad_token_id
        return adapter_for(loaded.model, pad_token_id=pad, reference_model=loaded.reference_model)

    def check(self, adapter: LanguageModelAdapter) -> None:
        """Compares log-probs and decoding with the model's own logits; see `Kind.check`."""
        check_adapter(adapter)

    def sampling_settings(self, adapter: LanguageModelAdapter) -> SamplingSettings:
        """Gives how tokens are drawn; what the configuration leaves open, the model's generation config says."""
        declared = getattr(language_model_of(adapter.model), "generation_config", None)
        say_what_is_left_out(declared)
        ends = eos_token_ids(self.processing_class, adapter.model)
        settings = self._config.sampling_settings(ends, tokenizer=self.processing_class, declared=declared)
        check_settings(settings, adapter.geometry.vocab_size)
        return settings

    def engine(self, adapter: LanguageModelAdapter, tracker: MemoryTracker) -> RolloutEngine:
        """Gives the engine that the configuration names; see `Kind.engine`."""
        return rollout_engine(self._config, adapter, tracker)

    def shown(self, prompts: Prompts, completions: Sequence[Completion]) -> list[Any]:
        """Gives texts, or one message each where prompts are conversations."""
        ids: list[Tensor] = [completion.ids for completion in completions]
        texts = self.processing_class.batch_decode([row.tolist() for row in ids], skip_special_tokens=True)
        if isinstance(prompts.prompts[0], str):
            return list(texts)
        return [[{"role": "assistant", "content": text}] for text in texts]

    def plain(self, completions: Sequence[Completion]) -> list[Any]:
        """Gives token ids."""
        return [completion.ids.tolist() for completion in completions]

    def told(self, shown: Any) -> Any:
        """Gives texts and messages as they are."""
        return shown

    def run_facts(self) -> dict[str, Any]:
        """Adds nothing: all is in the configuration."""
        return {}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuses nothing: where they do not fit together, others say so."""

    def facts(self) -> dict[str, str]:
        """Says how long completions can become, for the start banner."""
        return {"completion length": f"at most {self._config.max_completion_length} tokens"}

    def save(self, model: Any, folder: Path) -> None:
        """Writes weights, or an adapter's, and the tokenizer."""
        write_weights(model, self.processing_class, folder)

    def restore(self, model: Any, folder: Path) -> None:
        """Reads them back; see `Kind.restore`."""
        read_weights(model, folder)


def kind_of(model: Any) -> type[Kind]:
    """Gives the kind of a model."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return DenoisingKind if isinstance(inner, DiffusionPolicy) else LanguageKind
