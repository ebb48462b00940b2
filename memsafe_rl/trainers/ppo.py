"""PPO: a critic and one advantage per action over the training loop of `base`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.data.external_rollout import RolloutFunction
from memsafe_rl.data.prompts import PromptReader, PromptTokenizer
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.recovery import Recovery
from memsafe_rl.memory.runtime.tracker import MemoryTracker
from memsafe_rl.models.critic import Critic, OwnModel, SecondAdapter, SharedTrunk
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.state_critic import StateCritic
from memsafe_rl.models.language.base import LanguageAdapter
from memsafe_rl.models.language.factory import adapter_for
from memsafe_rl.models.loading import load_model, read_config
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.trainers.inputs import prompt_room
from memsafe_rl.trainers.policy_trainer import PolicyTrainer
from memsafe_rl.training.critic_advantages import CriticAdvantages


class PPOTrainer(PolicyTrainer):
    """Trains a model with Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347).

    A critic foresees what is still to come of a completion, so that each action has an advantage of its own
    (generalized advantages, arXiv 1506.02438) and a prompt needs no group. Everything else, from the arguments to what
    happens when memory runs out, is as in `GRPOTrainer`.

    Args:
        model: a name or path, or a model (a `PeftModel` too); a causal LM, an encoder-decoder, or a `DiffusionPolicy`,
            whose denoising steps are then the actions (DPPO, arXiv 2409.00588).
        reward_funcs: a reward function or a list of them: callables, sync or async, reward models, or their names.
        args: the configuration; None for the defaults.
        train_dataset: a `datasets` dataset with a `prompt` column, plain or conversational.
        eval_dataset: prompts for evaluation, or a dict of such datasets.
        processing_class: the tokenizer; None to load it with the model.
        reward_processing_classes: tokenizers of the reward models.
        callbacks: callbacks of transformers' `TrainerCallback` form.
        optimizers: an optimizer and a schedule; None for those the configuration names. A given optimizer must hold
            the critic's weights too.
        quantization_config: quantises the base model while it is loaded; needs `peft_config`.
        peft_config: adds an adapter, which alone is trained.
        tools: functions that the model may call, as for `GRPOTrainer`.
        rollout_func: `(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", ...}`, draws completions in
            place of the library.
        environment_factory: makes environments, as for `GRPOTrainer`.
        memory_policy: cuts the work to fit memory, as in `GRPOTrainer`.
        critic: None for a head on the model's own hidden states (one forward gives log-probs and values); "adapter"
            for a second adapter on the model's base, made as `peft_config` says; or another model with the same
            tokenizer, perhaps a smaller one: its name, its path, or the model itself, which is then trained in place.
            Of a `DiffusionPolicy`: None for a small network on state, timestep and condition, or a module that is
            called as the denoiser is and gives one value for each state.

    Raises:
        ConfigError: a setting cannot work; the message names it, its value and the remedy.
        DataError: the dataset cannot be used.
    """

    config_class = PPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] | None = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Any = None,
        memory_policy: MemoryPolicy | str | None = None,
        critic: Any = None,
    ) -> None:
        if critic is not None and critic is model:
            raise ConfigError(
                "critic is the model itself. Leave critic out for a head on the model's own hidden states, or give a "
                "copy of the model."
            )
        self._wanted_critic = critic
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            tools,
            rollout_func,
            environment_factory,
            memory_policy,
        )

    @property
    def critic(self) -> Critic:
        """What foresees rewards."""
        return cast(CriticAdvantages, self.credit).critic

    def _bound_prompts(self, reader: PromptReader) -> None:
        """Keeps prompts to the context of a critic that is a network of its own."""
        wanted = self._wanted_critic
        shares_base = wanted is None or (isinstance(wanted, str) and wanted == "adapter")
        if shares_base or not isinstance(reader, PromptTokenizer):
            return
        if not isinstance(wanted, (str, PreTrainedModel, PeftModel)):
            raise ConfigError(
                f"critic is {wanted!r:.100} ({type(wanted).__name__}). Give None for a head on the model's own hidden "
                "states, 'adapter', or another model: its name, its path, or the model itself."
            )
        facts = read_config(wanted, trust_remote_code=self.args.trust_remote_code, told="critic")
        reader.bound(*prompt_room(self.args, facts, "critic"))

    def _foresee(self, tracker: MemoryTracker, model: Any, eval_dataset: Any, **given: Any) -> MemoryForecast | None:
        """Forecasts the critic too."""
        return super()._foresee(tracker, model, eval_dataset, critic=self._wanted_critic, **given)

    def _make_credit(self, recovery: Recovery) -> CriticAdvantages:
        """Loads the critic."""
        wanted = self._wanted_critic
        made = recovery.repeat(self._make_critic) if wanted is None or isinstance(wanted, str) else self._make_critic()
        self._wanted_critic = None  # or a model that was given would be held twice
        return CriticAdvantages(cast(PPOConfig, self.args), made)

    def _make_critic(self) -> Critic:
        wanted = self._wanted_critic
        adapter: Any = self.adapter
        if isinstance(adapter, DiffusionAdapter):
            return self._make_state_critic(adapter)
        if not isinstance(adapter, LanguageAdapter):
            raise AssertionError("models are language models or denoisers")
        if wanted is None:
            return SharedTrunk(adapter)
        if wanted == "adapter":
            return SecondAdapter(adapter)
        loaded = load_model(wanted, trust_remote_code=self.args.trust_remote_code, device=self.accelerator.device).model
        if loaded.get_output_embeddings() is None:
            raise ConfigError(
                f"critic is a {type(loaded).__name__}, which has no language-model head. Pass the same network as "
                "AutoModelForCausalLM (or AutoModelForSeq2SeqLM); its value head is made here."
            )
        if {id(weight) for weight in loaded.parameters()} & {id(weight) for weight in adapter.model.parameters()}:
            raise ConfigError(
                "critic shares weights with the model. Leave critic out for a head on the model's own hidden states, "
                "set critic='adapter', or give a copy (copy.deepcopy)."
            )
        own = adapter_for(loaded, pad_token_id=self.processing_class.pad_token_id)
        self._check(own)
        return OwnModel(own, vocab_size=adapter.geometry.vocab_size)

    def _make_state_critic(self, adapter: DiffusionAdapter) -> StateCritic:
        wanted = self._wanted_critic
        if wanted is not None and not isinstance(wanted, nn.Module):
            raise ConfigError(
                f"critic is {wanted!r:.100} and the model a DiffusionPolicy, whose denoiser shows no hidden states "
                "that a head or a second adapter could read. Leave critic out for a small network of its own, or pass "
                "a torch.nn.Module called critic(x, t, condition) that gives a value for each state."
            )
        critic = StateCritic(adapter, wanted)
        self._check(critic.network)
        return critic
