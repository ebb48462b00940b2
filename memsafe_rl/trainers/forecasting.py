"""Forecasts a run by running its own step on fake tensors: the longest rows, under the plans it would choose.

Nothing of the step is modelled. The trainer is built around a network of fake weights, its policy makes the plans, and
every phase is tried as `probe_worst_case` tries it; storages count as on a device of the size asked for, which refuses
what does not fit, so that plans are made again as in the run.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast

from memsafe_rl.accounting import charge, in_phase, listen, weights_of
from memsafe_rl.errors import ConfigError, MemoryBudgetError
from memsafe_rl.forecast.device import fake_device, give_fake_weights, nothing_differs
from memsafe_rl.forecast.families import config_for
from memsafe_rl.forecast.networks import fake_language_model, fake_reward_model, hollow_copy, shallow_copy
from memsafe_rl.forecast.outcome import MemoryForecast
from memsafe_rl.forecast.search import Job
from memsafe_rl.forecast.sharding import Gathering, Sharding, parts_of, read_sharding
from memsafe_rl.memory.budget import MemoryBudget
from memsafe_rl.memory.randomness import capture_random_state, set_random_state
from memsafe_rl.memory.simulated import SimulatedMemory, open_simulations
from memsafe_rl.memory.tracker import MemoryTracker
from memsafe_rl.models.causal_lm import autocast
from memsafe_rl.models.choice import LanguageModelAdapter, adapter_for, check_adapter
from memsafe_rl.models.critic import CRITIC_ADAPTER
from memsafe_rl.models.diffusion import prepare_policy
from memsafe_rl.models.language import ScoringPath
from memsafe_rl.models.loading import LoadedModel
from memsafe_rl.rewards.scoring import reward_model_name
from memsafe_rl.trainers.probe import (
    Drawing,
    Longest,
    evaluates,
    find_longest,
    longest_evaluation,
    longest_work,
    plans_now,
    try_longest,
)
from memsafe_rl.trainers.worst_rows import meets_gradients
from memsafe_rl.types import Component, Phase, UpdatePlan, UpdateWork

logger = logging.getLogger(__name__)

_MOST_ROUNDS = 3
"""Rounds after which plans are taken as they are, should corrections still change them."""
_UNLIMITED_BYTES = 2**60
_ANY_PROMPT = 512
"""Tokens of the longest prompt where nobody says."""


def forecast_run(
    trainer_class: type[Any],
    model: Any,
    args: Any,
    *,
    device_bytes: int,
    device: str = "cuda",
    prompt_tokens: int | None = None,
    train_dataset: Any = None,
    processing_class: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    memory_policy: Any = None,
    critic: Any = None,
    eval_dataset: Any = None,
    reward_models: Sequence[Any] = (),
    ranks: int = 1,
    sharding: str = "none",
) -> MemoryForecast:
    """Forecasts the peak of every phase of a trainer's run, without its weights and without its device.

    Args:
        trainer_class: class of the trainer.
        model: a name known here or on a hub that can be reached, or a folder with a ``config.json``; or a
            `DiffusionPolicy`, whose weights are only looked at.
        args: the run's settings; not changed.
        device_bytes: int, bytes of the device.
        device: "cuda" for the types and the granularity of a CUDA device, "cpu" for those of a CPU.
        prompt_tokens: longest prompt, in tokens; None for the longest of ``train_dataset``, else
            ``args.max_prompt_length``, else 512.
        train_dataset: the run's prompts; needs ``processing_class``.
        processing_class: the run's tokenizer.
        peft_config: config of a new adapter.
        quantization_config: transformers' `BitsAndBytesConfig` with ``load_in_4bit``.
        memory_policy: as the trainer takes it.
        critic: as `PPOTrainer` takes it; None for other trainers.
        eval_dataset: the run's evaluation prompts; None to assume as many as a rollout has completions.
        reward_models: sequence classifiers among the rewards: names, folders, ``config.json`` or models.
        ranks: ranks of the run, of which one is forecast; 1 for as many as the launcher says.
        sharding: what they share, see `Sharding`.

    Returns:
        The forecast; ``refusal`` says why where the run cannot fit.

    Raises:
        ConfigError: the model has no config that can be read, or settings contradict each other.
    """
    started = time.perf_counter()
    settings, shared = _settings(args, device, ranks), _Shared(read_sharding(sharding, ranks), ranks)
    if not isinstance(model, str):
        if processing_class is not None or prompt_tokens is not None or quantization_config is not None:
            raise ConfigError("A DiffusionPolicy has no tokens. Leave processing_class and the like out.")
        found = _forecast_chains(
            trainer_class, model, settings, device_bytes, device, peft_config, memory_policy, critic, shared
        )
        return replace(found, seconds=time.perf_counter() - started)
    init = dict(settings.model_init_kwargs or {})
    given = init.pop("config", None)
    places = {name: init[name] for name in ("revision", "cache_dir", "token", "local_files_only") if name in init}
    config = given or config_for(model, trust_remote_code=settings.trust_remote_code, **places)
    quantization_config = quantization_config or init.get("quantization_config") or _declared_quantization(config)
    if quantization_config is not None and peft_config is None:
        raise ConfigError("A 4-bit base cannot be trained. Pass a peft_config such as LoraConfig(r=16), or no 4 bits.")
    settings.model_init_kwargs = None

    def network(*, frozen: bool = False, shallow: bool = False) -> Any:
        return fake_language_model(
            shallow_copy(config) if shallow else config,
            dtype=_base_dtype(init, config, device, frozen=frozen or peft_config is not None),
            peft_config=None if frozen else peft_config,
            quantization_config=quantization_config,
            trust_remote_code=settings.trust_remote_code,
            frozen=frozen,
            with_critic=critic == "adapter" and not frozen,
        )

    def further() -> dict[str, Any]:
        if critic is None or critic == "adapter":
            return {} if critic is None else {"critic": critic}
        trusted = settings.trust_remote_code
        own = config_for(critic, trust_remote_code=trusted) if isinstance(critic, str) else critic.config
        kind = _base_dtype({}, own, device, frozen=False) if isinstance(critic, str) else critic.dtype
        return {"critic": fake_language_model(own, dtype=kind, trust_remote_code=trusted)}

    rehearsed = _Rehearsed(
        _faked(trainer_class),
        device,
        settings,
        train_dataset,
        processing_class,
        prompt_tokens,
        memory_policy,
        further,
        eval_dataset,
        lambda: [_fake_reward_model(one, settings) for one in reward_models],
        shared,
    )
    with _rehearsing_on(device) as memory:
        memory.divide(shared.parts)
        found = rehearsed.run(network, memory, device_bytes, copies=settings.has_reference and peft_config is None)
    dtype = _base_dtype(init, config, device, frozen=peft_config is not None)
    base = f"weights of the base are {str(dtype).removeprefix('torch.')}"
    assumed = (
        *shared.sentences(),
        rehearsed.about_prompts,
        *(() if not reward_models else ("reward models read as many tokens as prompt and completion have",)),
        base if quantization_config is None else f"{base}, in 4 bits where bitsandbytes quantises",
        *(_ABOUT_CUDA if device == "cuda" else ()),
    )
    return replace(found, assumptions=assumed, seconds=time.perf_counter() - started)


@contextmanager
def _rehearsing_on(device: str) -> Iterator[SimulatedMemory]:
    """Stands for a device; the budget is kept from the optimizer's state on, and before that nothing is refused."""
    with _random_state_kept(), fake_device(_UNLIMITED_BYTES, stands_for=device) as memory:
        yield memory


def _forecast_chains(
    trainer_class: type[Any],
    model: Any,
    settings: Any,
    device_bytes: int,
    device: str,
    peft_config: Any,
    memory_policy: Any,
    critic: Any,
    shared: _Shared,
) -> MemoryForecast:
    """Forecasts a run of a diffusion policy."""

    def further() -> dict[str, Any]:
        if not isinstance(critic, nn.Module):
            return {} if critic is None else {"critic": critic}
        judge = hollow_copy(critic)
        give_fake_weights(judge)
        return {"critic": judge}

    rehearsed = _Rehearsed(
        _faked(trainer_class), device, settings, None, None, None, memory_policy, further, shared=shared
    )
    with _rehearsing_on(device) as memory:
        memory.divide(shared.parts)
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            with torch.device("meta"):
                trained, reference = prepare_policy(
                    hollow_copy(model),
                    peft_config=copy.deepcopy(peft_config),
                    device="meta",
                    with_reference=settings.has_reference,
                )
            for network in (trained, reference):
                if network is not None:
                    give_fake_weights(network)
        found = rehearsed.run_trainer(trained, reference, None, memory, device_bytes)
    about = _ABOUT_CUDA if device == "cuda" else ()
    return replace(found, assumptions=(*shared.sentences(), "all chains are alike", *about))


def wants_forecast(args: Any, model: Any) -> bool:
    """Whether a trainer forecasts its run before it loads weights.

    Args:
        args: the run's settings; `memory_forecast` says so, or leaves it open.
        model: as the trainer takes it.

    Returns:
        Whether it does.

    Raises:
        ConfigError: a forecast is wanted of a network that is loaded already.
    """
    named = isinstance(model, str)
    if args.memory_forecast and not named:
        raise ConfigError(
            f"memory_forecast is True, but model is a {type(model).__name__} whose weights are there already. Give its "
            "name or folder, or use probe_worst_case."
        )
    if args.memory_forecast is None:
        return named and (args.device.type == "cuda" or args.memory_budget != "auto")
    return bool(args.memory_forecast)


def foresee(
    trainer_class: type[Any], model: str, args: Any, tracker: MemoryTracker, **given: Any
) -> MemoryForecast | None:
    """Forecasts a run that is about to load its weights, and refuses one that cannot fit.

    Args:
        trainer_class: class of the trainer.
        model: name or folder.
        args: the run's settings.
        tracker: knows device and budget.
        given: further arguments of `forecast_run`.

    Returns:
        The forecast; None where it failed, which is said in a warning and keeps no run from training.

    Raises:
        MemoryBudgetError: the run cannot fit, and `allow_lossy` names no remedy that could be taken.
    """
    settings = copy.copy(args)
    settings.memory_budget = tracker.budget_bytes
    device = args.device.type
    try:
        found = forecast_run(
            trainer_class, model, settings, device_bytes=tracker.meter.total_bytes(), device=device, **given
        )
    except Exception as error:  # fake tensors do not run every network, and a run needs no forecast
        logger.warning("no forecast of this run's memory: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return None
    tracker.record("forecast", **found.plain())
    if found.fits:
        logger.info("forecast: %s", found.sentence())
    elif args.allow_lossy:
        logger.warning("forecast: %s; going on, for allow_lossy names remedies", found.sentence())
    else:
        raise MemoryBudgetError(f"Forecast before loading weights: the run {found.sentence()}")
    return found


_ABOUT_CUDA = (
    "CPU kernels stand for CUDA's: what the driver, cuBLAS and other CUDA kernels hold besides is not counted and has "
    "not been measured yet",
)


@dataclass(frozen=True)
class _Shared:
    """How ranks share a run's state.

    Args:
        sharding: the way of dividing.
        ranks: how many ranks there are.
    """

    sharding: Sharding
    ranks: int

    @property
    def parts(self) -> dict[Component, int]:
        """Ranks that share each component."""
        return parts_of(self.sharding, self.ranks)

    def gathering(self, trainer: Any) -> Gathering | None:
        """Gives what lays down weights that are gathered for a while; None where they are whole on every rank."""
        if Component.WEIGHTS not in self.parts:
            return None
        copies = [] if trainer._reference_model is None else [trainer._reference_model]
        return Gathering([trainer.model, *copies], self.ranks, trainer.rewards.models)

    def sentences(self) -> tuple[str, ...]:
        """Says what is forecast, where it is one of several ranks."""
        if self.ranks == 1:
            return ()
        one = f"this is what one of {self.ranks} ranks would hold"
        if self.sharding is Sharding.NONE:
            return (
                f"{one}, each with whole weights; gradients are added up in place, and buffers of NCCL not counted",
            )
        own = "buckets of DeepSpeed (by default up to 500 million elements each)"
        return (
            f"{one} under {self.sharding.value}; this library's trainers do not run under it yet",
            *(() if self.sharding is Sharding.FSDP else (f"{own} come on top",)),
            *(("rollouts gather the whole weights, as TRL's do",) if Component.WEIGHTS in self.parts else ()),
        )


class _Rehearsed:
    """One trainer of fake weights, and what is known before it is built.

    Args:
        trainer_class: class of the trainer.
        device: kind of device.
        settings: the run's settings, made ready.
        dataset: the run's prompts, or None.
        tokenizer: the run's tokenizer, or None.
        prompt_tokens: longest prompt, in tokens, or None.
        policy: makes the plans.
        further: gives further arguments of the trainer, inside of the simulated device.
    """

    def __init__(
        self,
        trainer_class: type[Any],
        device: str,
        settings: Any,
        dataset: Any,
        tokenizer: Any,
        prompt_tokens: int | None,
        policy: Any,
        further: Callable[[], dict[str, Any]],
        evaluation: Any = None,
        reward_models: Callable[[], list[Any]] = list,
        shared: _Shared | None = None,
    ) -> None:
        if dataset is not None and tokenizer is None:
            raise ConfigError("train_dataset is given without processing_class. Pass the tokenizer, or prompt_tokens.")
        if prompt_tokens is not None and prompt_tokens < 1:
            raise ConfigError(f"prompt_tokens is {prompt_tokens}; the longest prompt has at least 1 token.")
        self._settings, self._dataset, self._tokenizer, self._policy = settings, dataset, tokenizer, policy
        self._class, self._device, self._prompt_tokens = trainer_class, device, prompt_tokens
        self._further, self._evaluation, self._reward_models = further, evaluation, reward_models
        self.about_prompts = ""
        self._assumes_evaluation = False
        self._shared = shared or _Shared(Sharding.NONE, 1)

    def run(self, network: Any, memory: SimulatedMemory, device_bytes: int, *, copies: bool) -> MemoryForecast:
        """Builds the trainer and tries its longest rows; where they do not fit, says why.

        Args:
            network: builds the network, or a frozen copy.
            memory: the simulated device.
            device_bytes: int, bytes of the device.
            copies: whether a frozen copy answers for the reference.

        Returns:
            What was found.
        """
        checked = _check_shallow(network(shallow=True), self._settings, memory)
        gc.collect()  # some networks hold themselves, and the shallow one would count beside the whole
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            model, reference = network(), network(frozen=True) if copies else None
        checked = checked._replace(extra_bytes=checked.extra_bytes + _narrow_bytes(model, self._settings))
        return self.run_trainer(model, reference, checked, memory, device_bytes)

    def run_trainer(
        self, model: Any, reference: Any, checked: _Checked | None, memory: SimulatedMemory, device_bytes: int
    ) -> MemoryForecast:
        """Builds the trainer of a network of fake weights, and tries its longest rows.

        Args:
            model: the network.
            reference: a frozen copy that answers for the reference; None for none.
            checked: what the check at start found of a shallow network; None where it is done on the network itself.
            memory: the simulated device.
            device_bytes: int, bytes of the device.

        Returns:
            What was found.
        """
        budget = MemoryBudget.parse(self._settings.memory_budget)
        self._settings.memory_budget = budget.resolve(total_bytes=device_bytes, free_bytes=device_bytes)
        trainer = self._trainer(model, reference, checked)
        tracker, refusal = trainer._tracker, None
        longest = self._longest(trainer)
        trainer.share(self._shared.parts)
        gathering = self._shared.gathering(trainer)
        if gathering is not None:
            listen(gathering)  # until the fake device is left
        try:
            rehearse(trainer, longest, memory, self._drawn_for_evaluation(trainer, longest))
        except MemoryBudgetError as error:
            refusal = str(error)
        return MemoryForecast(
            phases=_phases(memory, trainer.loaded, checked),
            budget_bytes=tracker.budget_bytes,
            device_bytes=device_bytes,
            rollout_plan=tracker.rollout_plan,
            update_plan=tracker.update_plan,
            corrections=dict(tracker.state().corrections),
            prompt_tokens=len(longest.prompt),
            completion_tokens=longest.completion_tokens,
            job=_job(trainer, longest, memory),
            refusal=refusal,
            ranks=self._settings.world_size,
            sharding=self._shared.sharding.value,
        )

    def _trainer(self, model: Any, reference: Any, checked: _Checked | None) -> Any:
        dataset = self._dataset
        if dataset is None:
            dataset = Dataset.from_dict({"prompt": ["a"] * max(2, self._settings.prompts_per_rollout)})
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            further, reward_models = self._further(), self._reward_models()
        if evaluates(self._settings) and self._evaluation is None:
            self._evaluation = Dataset.from_dict({"prompt": ["a"] * self._settings.rollout_rows})
            self._assumes_evaluation = True
        return self._class(
            model,
            reference,
            checked,
            self._device,
            self._settings,
            reward_models,
            train_dataset=dataset,
            eval_dataset=self._evaluation,
            processing_class=None if checked is None else self._tokenizer or _stand_in_tokenizer(),
            memory_policy=self._policy,
            **further,
        )

    def _drawn_for_evaluation(self, trainer: Any, longest: Longest) -> Drawing | None:
        """Gives what evaluations draw: of a dataset its own longest prompt, else that of the run."""
        if not evaluates(self._settings):
            return None
        found = None
        if not self._assumes_evaluation and self._prompt_tokens is None and self._dataset is not None:
            found = longest_evaluation(trainer)
        if found is None:
            rows = self._settings.rollout_rows if self._assumes_evaluation else len(self._evaluation)
            found = Drawing(longest, rows, self._settings.eval_generations, Phase.EVALUATE)
        many = " or more" if self._assumes_evaluation else ""
        self.about_prompts += f"; evaluations draw {found.group_size} completion(s) of {found.prompts}{many} prompts"
        return found

    def _longest(self, trainer: Any) -> Longest:
        completion = self._settings.max_completion_length
        if trainer.adapter.time_separable:
            return Longest((0,), completion, "chains are alike")
        if self._prompt_tokens is None and self._dataset is not None:
            longest = find_longest(trainer)
            self.about_prompts = f"the longest prompt has {len(longest.prompt)} tokens ({longest.source})"
            return longest
        tokens, source = self._prompt_tokens, "as given"
        if tokens is None:
            tokens, source = self._settings.max_prompt_length, "max_prompt_length"
        if tokens is None:
            tokens, source = _ANY_PROMPT, "assumed, for nothing says how long prompts are"
        self.about_prompts = f"the longest prompt has {tokens} tokens ({source})"
        return Longest((1,) * tokens, completion, source)


class _Checked(NamedTuple):
    """What the check at start finds, as far as fake tensors tell: everything that runs agrees.

    Args:
        path: how rows are scored and decoded.
        joins: whether prompts are kept once for their groups.
        packs_prompts: whether completions can share one copy of their prompt.
        extra_bytes: int, bytes that the check holds besides the weights; of a network that is checked in place of a
            deeper one, narrow copies of the weights left out.
    """

    path: ScoringPath
    joins: bool
    packs_prompts: bool
    extra_bytes: int


def _check_shallow(model: Any, settings: Any, memory: SimulatedMemory) -> _Checked:
    """Checks a network with a block of each kind; a deeper one holds little more while it is checked."""
    held = memory.live_bytes
    adapter = adapter_for(model, pad_token_id=0)
    with in_phase(Phase.ROLLOUT), nothing_differs(), autocast(adapter.device, settings.autocast_dtype):
        check_adapter(adapter)
    extra = sum(memory.phase_peaks()[Phase.ROLLOUT].values()) - held - _narrow_bytes(model, settings)
    memory.forget_phases()
    return _Checked(adapter.path, adapter.joins, adapter.packs_prompts, extra)


def _narrow_bytes(model: Any, settings: Any) -> int:
    """Counts the narrow copies that autocast keeps of trained weights until a forward is over."""
    dtype = settings.autocast_dtype
    kept = [weight.numel() for weight in model.parameters() if weight.requires_grad and weight.dim() > 1]
    return 0 if dtype is None else dtype.itemsize * sum(kept)


def _phases(
    memory: SimulatedMemory, loaded: Mapping[Component, int], checked: _Checked | None
) -> dict[Phase, dict[Component, int]]:
    """Gives the peaks of phases, that of the load held against the moment of the check at start."""
    found = memory.phase_peaks()
    if checked is None:
        return found
    check = {**loaded, Component.OTHER: loaded[Component.OTHER] + checked.extra_bytes}
    return {**found, Phase.LOAD: max(found[Phase.LOAD], check, key=lambda parts: sum(parts.values()))}


def _loaded_before(model: Any, critic: Any) -> dict[Component, int]:
    """Divides what is held when a network is checked; critics are made after it, though here they are there."""
    (memory,) = open_simulations()[-1:]
    held = memory.live_by_component()
    within = [weight for name, weight in model.named_parameters() if f".{CRITIC_ADAPTER}." in name]
    beside = list(weights_of(critic)) if isinstance(critic, nn.Module) else []
    held[Component.WEIGHTS] -= sum(weight.nbytes for weight in (*within, *beside))
    return held


class _Faked:
    """Makes a trainer one whose network has no weights, alone on its device, which tells nobody and rewards nothing.

    Args:
        model: the network.
        reference: a frozen copy that answers for the reference; None for none.
        checked: what the check at start would find.
        device: kind of device that the CPU stands for.
        settings: the run's settings.
        reward_models: networks of fake weights that score completions.
        others: further arguments of the trainer.
    """

    def __init__(
        self,
        model: Any,
        reference: Any,
        checked: _Checked | None,
        device: str,
        settings: Any,
        reward_models: list[Any],
        **others: Any,
    ) -> None:
        self._reference, self._checked, self._stands_for, self._settings = reference, checked, device, settings
        self._parts: Mapping[Component, int] = {}
        self._critic = others.get("critic")
        functions = _no_rewards(settings, [reward_model_name(one) for one in reward_models])
        tokenizers = [*(None for _ in functions), *(_stand_in_tokenizer() for _ in reward_models)]
        others["reward_processing_classes"] = tokenizers
        super().__init__(model, [*functions, *reward_models], settings, **others)  # type: ignore[call-arg]

    def share(self, parts: Mapping[Component, int]) -> None:
        """Has estimates know what of a component is this rank's.

        Args:
            parts: ranks that share each.
        """
        self._parts = parts

    def _work(self, *rows: Any) -> UpdateWork:
        """Counts this rank's part of the gradients."""
        work = cast(UpdateWork, super()._work(*rows))  # type: ignore[misc]
        own = -(-work.geometry.trainable_bytes // self._parts.get(Component.GRADIENTS, 1))
        return replace(work, geometry=replace(work.geometry, trainable_bytes=own))

    def _optimizer_bytes(self) -> tuple[int, int]:
        """Counts this rank's part of the optimizer's state."""
        held, parked = super()._optimizer_bytes()  # type: ignore[misc]
        parts = self._parts.get(Component.OPTIMIZER, 1)
        return held // parts, parked // parts

    def _make_accelerator(self) -> Accelerator:
        alone = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": 0}
        seen = {"is_main_process": True, "is_local_main_process": True, "device": torch.device("cpu")}
        return cast(Accelerator, SimpleNamespace(**alone, **seen))

    def _load_model(self, model: Any, *_: Any) -> LoadedModel:
        return LoadedModel(model, self._reference, 0.0)

    def _check(self, adapter: LanguageModelAdapter) -> None:
        """Takes over what the check of a shallow network found, and sizes the cache."""
        checked = self._checked
        self.loaded = _loaded_before(adapter.model, self._critic)
        if checked is None:
            with nothing_differs():
                super()._check(adapter)  # type: ignore[misc]
            return
        for other in (adapter, adapter.reference_adapter):
            if other is not None:
                other.path, other.joins, other.packs_prompts = checked.path, checked.joins, checked.packs_prompts
        if checked.path.decodes:
            with autocast(adapter.device, self._settings.autocast_dtype), torch.no_grad():
                adapter.measure_cache(adapter.prefill([torch.ones(2, dtype=torch.int64)])[1])

    def _kind_of_device(self) -> str:
        return self._stands_for

    def rehearse_on(self, work: UpdateWork) -> None:
        """Says of what shape the optimizer step is whose first micro-batch stands for all.

        Args:
            work: the whole step.
        """
        self._rehearsed = work

    def _make_room(self, plan: UpdatePlan) -> None:
        """Makes the gradients that earlier micro-batches would have left, where the plan has such."""
        super()._make_room(plan)  # type: ignore[misc]
        if meets_gradients(self._rehearsed, plan):
            self._committed.complete_gradients()  # type: ignore[attr-defined]

    def _own_callbacks(self, *_: Any) -> list[Any]:
        return []


def _faked(trainer_class: type[Any]) -> type[Any]:
    """Gives a class of trainers like another, without weights."""
    return type(trainer_class.__name__, (_Faked, trainer_class), {})


def rehearse(trainer: Any, longest: Longest, memory: SimulatedMemory, evaluation: Drawing | None = None) -> None:
    """Tries the longest rows until the plans are those that a run would make of what it measures.

    Args:
        trainer: the trainer.
        longest: the longest row.
        memory: the simulated device; its peaks are those of the last round, and of the load.
        evaluation: what evaluations draw at most; None where there are none.
    """
    tracker = trainer._tracker
    tracker.enforce()
    try:
        trainer._make_optimizer(trainer._max_steps())
        for _ in range(_MOST_ROUNDS):
            memory.forget_phases({Phase.LOAD})
            held = memory.live_bytes
            trainer.rehearse_on(longest_work(trainer, longest))
            try_longest(trainer, longest, micro_batches=1, evaluation=evaluation)
            with tracker.phase(Phase.OPTIMIZER):
                trainer._committed.commit()
            planned = tracker.rollout_plan, tracker.update_plan
            same = [_bare(plan) for plan in planned] == [_bare(plan) for plan in plans_now(trainer, longest)]
            if same and memory.live_bytes == held:  # no optimizer has just made its state
                return
    finally:
        tracker.release()


def _job(trainer: Any, longest: Longest, memory: SimulatedMemory) -> Job:
    """Sums up what decides the bytes of a trainer's run."""
    args, optimizer_bytes = trainer.args, trainer._optimizer_bytes()[0]
    return Job(
        geometry=trainer.adapter.geometry,
        prompts=-(-args.prompts_per_rollout // args.world_size),
        group_size=args.num_generations,
        prompt_tokens=len(longest.prompt),
        completion_tokens=longest.completion_tokens,
        step_share=args.step_rows / args.rollout_rows,
        scored=args.has_reference,
        packs_prompts=trainer.adapter.packs_prompts,
        held_bytes=memory.live_bytes,
        optimizer_bytes=optimizer_bytes,
        gradients_aside=args.gradients_aside,
    )


def _bare(plan: Any) -> Any:
    return replace(plan, predicted_bytes={})


def _settings(args: Any, device: str, ranks: int) -> Any:
    """Gives a run's settings as a forecast takes them: silent, on the CPU, but in the device's types."""
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device is {device!r}; write 'cuda' or 'cpu'.")
    settings = copy.copy(args)
    if ranks != 1:
        kind = type(args)  # its world_size asks the launcher
        settings.__class__ = type(kind.__name__, (kind,), {"world_size": property(lambda _: ranks)})
    left_open = "bf16" in settings._filled
    settings.use_cpu, settings.report_to, settings.disable_tqdm = True, "none", True
    settings.verify_plan = settings.probe_worst_case = settings.memory_forecast = False
    settings.reward_weights = settings.eval_pass_reward = None  # rewards are made up
    settings.load_best_model_at_end = False
    settings.use_vllm = settings.use_transformers_continuous_batching = False
    if device == "cuda" and left_open and not settings.fp16:
        settings.bf16 = True
    return settings


def _declared_quantization(config: Any) -> Any:
    """Gives what a config says of how its weights were saved: 4 bits of bitsandbytes, or nothing."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    plain = declared if isinstance(declared, dict) else declared.to_dict()
    if not plain.get("load_in_4bit"):
        raise ConfigError(
            f"the model is saved quantised ({plain.get('quant_method', 'unknown')}), in a way that cannot be forecast. "
            "Use probe_worst_case in the run itself."
        )
    known = inspect.signature(BitsAndBytesConfig).parameters
    return BitsAndBytesConfig(**{name: value for name, value in plain.items() if name in known})


def _base_dtype(init: Mapping[str, Any], config: Any, device: str, *, frozen: bool) -> torch.dtype:
    """Gives the type in which a named model's weights are loaded, as `load_model` does."""
    given = init.get("dtype", init.get("torch_dtype"))
    if given == "auto":
        given = config.dtype or torch.float32
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, str):
        return cast(torch.dtype, getattr(torch, given))
    return torch.bfloat16 if device == "cuda" and frozen else torch.float32


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Puts random generators back: building a trainer seeds them."""
    state = capture_random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _stand_in_tokenizer() -> PreTrainedTokenizerFast:
    """Gives a tokenizer of three tokens, for a run whose prompts only have a length."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _fake_reward_model(model: Any, settings: Any) -> Any:
    """Gives a reward model with fake weights, of the types in which it would be loaded."""
    if not isinstance(model, str):
        fake = hollow_copy(model)
        give_fake_weights(fake)
        return fake
    init = dict(settings.model_init_kwargs or {})
    config = config_for(model, trust_remote_code=settings.trust_remote_code)
    given = init.get("dtype", init.get("torch_dtype", "auto"))
    own = config.dtype if given == "auto" else getattr(torch, given) if isinstance(given, str) else given
    return fake_reward_model(
        config, name=model, dtype=own or torch.float32, trust_remote_code=settings.trust_remote_code
    )


def _no_rewards(settings: Any, models: Sequence[str]) -> list[Any]:
    """Gives reward functions that pay nothing, under the names that the settings call them by, models left out."""
    wanted = {reward: None for objective in settings.objective_list for reward in objective.rewards}
    return [_named(name) for name in wanted if name not in models] or ([] if models else [_no_reward])


def _named(name: str) -> Any:
    def pay_nothing(completions: list[Any], **_: Any) -> list[float]:
        return _no_reward(completions)

    pay_nothing.__name__ = name
    return pay_nothing


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
