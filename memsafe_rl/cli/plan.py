"""`memsafe-rl plan`: a run's memory, the plan it would choose, and what else would fit."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from memsafe_rl.cli.arguments import RunRequest, refusal
from memsafe_rl.cli.train import Run, adapter, prepare, prompts, quantization
from memsafe_rl.errors import ConfigError, MemsafeError, kind_and_line
from memsafe_rl.memory.planning.policies import MemoryPolicy
from memsafe_rl.memory.runtime.headroom import headroom_of
from memsafe_rl.models.loading import load_tokenizer
from memsafe_rl.preflight.cards import NamedCard
from memsafe_rl.preflight.fake.families import known_config
from memsafe_rl.preflight.forecast import forecast_memory
from memsafe_rl.preflight.outcome import MemoryForecast
from memsafe_rl.preflight.speed import DeviceSpeed, speed_of_card
from memsafe_rl.preflight.what_fits import Job, Scout
from memsafe_rl.training.assembly.inputs import chosen_policy
from memsafe_rl.types import Component, Phase, UpdatePlan
from memsafe_rl.units import format_bytes

_COMPONENTS = {
    **{Component.WEIGHTS: "weights", Component.GRADIENTS: "grads", Component.OPTIMIZER: "optim"},
    **{Component.ACTIVATIONS: "activ", Component.KV_CACHE: "cache", Component.LOGITS: "logits"},
}
_PROOFS = 4  # forecasts spent at most on confirming one answer of a search
_RANK_PROOFS = 2  # the same for one rank of an adapter
_PROVING_SECONDS = 40.0  # time limit for confirming ranks, including the forecast then running
_STEP_BACK = 0.85  # factor by which a length that does not fit is lowered
_RANKS = (8, 16, 64, 256)


@dataclass(frozen=True)
class Wish:
    """What the user asks."""

    run: Run
    device_bytes: int
    prompt_tokens: int | None = None  # longest prompt; None: from the dataset or the settings
    reward_models: tuple[str, ...] = ()
    ranks: int = 1
    sharding: str = "none"  # what the ranks shard
    speed: DeviceSpeed | None = None  # the card's; None where only its memory was named


@dataclass(frozen=True)
class Findings:
    """The results beside the forecast itself."""

    longest_completion: int
    largest_group: int
    lever: str  # what would lower the peak most
    # estimated peak and whether the run fits, by GiB; empty without --find
    cards: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    frontier: Sequence[tuple[int, int | None, int]] = ()  # group, LoRA rank, longest completion; empty without --find
    proved: bool = False  # whether forecasts confirmed the longest completion
    smallest_card: int | None = None  # GiB of the smallest card that fits; None if none does, or without --find
    confirmed: frozenset[tuple[int, int | None]] = frozenset()  # entries of the frontier that forecasts confirmed


def wish(request: RunRequest, *, card: NamedCard, reward_models: Sequence[str] = (), **more: Any) -> Wish:
    """Reads the user's request."""
    settings = {"report_to": "none", **request.settings, "use_cpu": True}
    if not settings.get("fp16"):
        settings.setdefault("bf16", True)  # the default on a card, which this machine may lack
    run = prepare(replace(request, settings=settings))
    named = (entry for entry in run.fields.reward_funcs or () if isinstance(entry, str))
    judges = (*(entry for entry in named if Path(entry).exists() or "/" in entry), *reward_models)  # as `train.reward`
    speed = speed_of_card(card.name, run.config.autocast_dtype or torch.float32) if card.name else None
    return Wish(run, card.total_bytes, reward_models=tuple(dict.fromkeys(judges)), speed=speed, **more)


def plan(wanted: Wish, console: Console | None, *, find: bool) -> tuple[MemoryForecast, Findings]:
    """Forecasts a run, and searches for what else would fit."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=console is None) as bar:
        task = bar.add_task("running a step on tensors without bytes")
        search = _Search(wanted, _ingredients(wanted), lambda text: bar.update(task, description=text))
        forecast = search.first_forecast()
        search.tell("searching for what else fits")
        policy: MemoryPolicy = chosen_policy(wanted.run.fields.memory_policy, wanted.run.config)
        scout = Scout(policy, "cuda", forecast.budget_bytes, dict(forecast.corrections), forecast.stranded_bytes)
        findings = Findings(
            longest_completion=scout.longest_completion(forecast.job),
            largest_group=scout.largest_group(forecast.job),
            lever=_lever(forecast, wanted),
        )
        if find and forecast.refusal is None:
            findings = search.further(findings, forecast, scout)
    return forecast, findings


def as_json(forecast: MemoryForecast, findings: Findings) -> str:
    """Writes the results as one JSON object, ``predicted_peak_bytes`` first."""
    names = ("num_generations", "lora_rank", "longest_completion", "proved")
    more = {
        "band": headroom_of(forecast.peak_bytes, forecast.budget_bytes).value,
        "lever": findings.lever,
        "longest_completion": findings.longest_completion,
        "largest_group": findings.largest_group,
        "proved": findings.proved,
        "smallest_card_gib": findings.smallest_card,
        "cards": {str(size): {"peak_bytes": peak, "fits": fits} for size, (peak, fits) in findings.cards.items()},
        "frontier": [
            dict(zip(names, (*entry, entry[:2] in findings.confirmed), strict=True)) for entry in findings.frontier
        ],
    }
    return json.dumps({**forecast.plain(), **more}, indent=1)


def show(wanted: Wish, forecast: MemoryForecast, findings: Findings, console: Console) -> None:
    """Prints the results."""
    console.print(_table(wanted, forecast))
    style = "bold green" if forecast.fits else "bold red"
    told = forecast.sentence().partition(" To change:")[0]  # what follows names arguments, not flags
    console.print(Text(told, style=style))
    if forecast.refusal is None:
        console.print(_plan_lines(forecast))
    for line in _finding_lines(forecast, findings):
        console.print(line, highlight=False)
    if findings.cards:
        console.print(Group(_card_table(findings), _frontier_table(findings)))
    if forecast.step_seconds is not None:
        console.print(forecast.step_seconds.sentence(), highlight=False)
    if forecast.host_bytes:
        console.print(f"on the host: {format_bytes(forecast.host_bytes)} to write checkpoints in the background")
    for assumption in forecast.assumptions:
        console.print(f"assumed: {assumption}", style="dim", highlight=False)
    console.print(f"took {forecast.seconds:.1f} s; no weight was loaded", style="dim", highlight=False)


def longest_text(forecast: MemoryForecast, findings: Findings) -> str:
    """Writes the longest completion that fits."""
    most = forecast.job.geometry.max_positions
    whole = most is not None and findings.longest_completion + forecast.job.prompt_tokens >= most
    return f"{findings.longest_completion:,} tokens" + (", all that the model takes" if whole else "")


def _ingredients(wanted: Wish) -> dict[str, Any]:
    chosen, config = wanted.run.fields, wanted.run.config
    given: dict[str, Any] = {
        "peft_config": adapter(chosen.peft),
        "quantization_config": quantization(chosen.quantization, bf16=bool(config.bf16)),
        "memory_policy": chosen_policy(chosen.memory_policy, config),
        "critic": chosen.critic,
        "reward_models": wanted.reward_models,
        "ranks": wanted.ranks,
        "sharding": wanted.sharding,
    }
    if wanted.prompt_tokens is None and chosen.dataset is not None:
        given["train_dataset"], given["eval_dataset"] = prompts(chosen)
        model = str(chosen.model)
        try:
            given["processing_class"] = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
        except ConfigError as error:
            if known_config(model) is None:
                raise
            raise refusal("plan/tokenizer", model=model) from error
    return given


@dataclass(frozen=True)
class _Search:
    """Forecasts of a run, and of what would fit beside it."""

    wanted: Wish
    given: Mapping[str, Any]  # arguments of every forecast
    tell: Callable[[str], None]  # shows what is being done

    @property
    def rank(self) -> int | None:
        """The rank of the adapter that is trained."""
        return getattr(self.given["peft_config"], "r", None)

    def forecast(self, *, settings: Mapping[str, Any] | None = None, **changes: Any) -> MemoryForecast:
        """Forecasts the run, or the run with some settings and arguments changed."""
        config = copy.copy(self.wanted.run.config)
        for name, value in (settings or {}).items():
            setattr(config, name, value)
        given = {"device_bytes": self.wanted.device_bytes, "prompt_tokens": self.wanted.prompt_tokens, **self.given}
        given["card"] = self.wanted.speed and self.wanted.speed.name
        return forecast_memory(str(self.wanted.run.fields.model), config, **{**given, **changes})

    def first_forecast(self) -> MemoryForecast:
        """Forecasts the run as it was asked for."""
        try:
            return self.forecast(speed=self.wanted.speed)
        except MemsafeError:
            raise
        except Exception as error:  # of any kind: it comes from inside a network whose config may say anything
            raise MemsafeError(
                f"{self.wanted.run.fields.model} does not run on tensors without bytes ({kind_and_line(error)}), so it "
                "cannot be forecast. Check the sizes in its config.json, and the adapter; if all is right, use "
                "probe_worst_case in the run itself."
            ) from error

    def further(self, findings: Findings, forecast: MemoryForecast, scout: Scout) -> Findings:
        """Searches cards, groups and ranks by estimates, and confirms them by forecasts while time allows."""
        until = time.perf_counter() + _PROVING_SECONDS - 2 * forecast.seconds
        cards, longest, proofs = scout.cards(forecast.job), findings.longest_completion, 0
        while longest > 1 and proofs < _PROOFS:
            self.tell(f"proving completions of {longest:,} tokens")
            if self.forecast(settings={"max_completion_length": longest}).fits:
                break
            longest, proofs = int(_STEP_BACK * longest), proofs + 1
        smallest = None
        for size in [size for size, (_, fits) in cards.items() if fits][:_PROOFS]:
            self.tell(f"proving a card of {size} GiB")
            on_card = self.forecast(device_bytes=size * 2**30)
            cards[size] = (on_card.peak_bytes, on_card.fits)
            if on_card.fits:
                smallest = size
                break
        frontier, group, proved = self._frontier(forecast.job, scout), forecast.job.group_size, proofs < _PROOFS
        known = {(group, self.rank): longest} if proved else {}
        known |= self._proved_ranks([entry for entry in frontier if entry[0] == group], until)
        return replace(
            findings,
            longest_completion=longest,
            cards=cards,
            frontier=[(group, rank, known.get((group, rank), tokens)) for group, rank, tokens in frontier],
            proved=proved,
            smallest_card=smallest,
            confirmed=frozenset(known),
        )

    def _frontier(self, job: Job, scout: Scout) -> list[tuple[int, int | None, int]]:
        """Returns the longest completion by group size and, under an adapter, by rank."""
        groups, own = sorted({4, 8, 16, 32, job.group_size}), self.rank
        ranks: Sequence[int | None] = [None] if own is None else sorted({*_RANKS, own})
        found = []
        for rank in ranks:
            ranked = job if rank is None or own is None else _of_rank(job, rank / own)
            found += [(group, rank, scout.longest_completion(replace(ranked, group_size=group))) for group in groups]
        return found

    def _proved_ranks(
        self, frontier: Sequence[tuple[int, int | None, int]], until: float
    ) -> dict[tuple[int, int | None], int]:
        """Confirms the longest completions of other ranks by forecasts, largest rank first."""
        found: dict[tuple[int, int | None], int] = {}
        for group, rank, tokens in sorted(frontier, key=lambda entry: -(entry[1] or 0)):
            if rank in (None, self.rank):
                continue
            ranked = copy.deepcopy(self.given["peft_config"])
            ranked.r = rank
            for _ in range(_RANK_PROOFS):
                if tokens < 1 or time.perf_counter() > until:
                    break
                self.tell(f"proving rank {rank} with completions of {tokens:,} tokens")
                if self.forecast(peft_config=ranked, settings={"max_completion_length": tokens}).fits:
                    found[group, rank] = tokens
                    break
                tokens = int(_STEP_BACK * tokens)
        return found


def _of_rank(job: Job, factor: float) -> Job:
    """Scales a job's adapter, with its gradients and optimizer state, by a factor."""
    geometry, own = job.geometry, job.geometry.trainable_bytes
    more, state = int((factor - 1) * own), int((factor - 1) * job.optimizer_bytes)
    return replace(
        job,
        geometry=replace(geometry, trainable_bytes=own + more, parameter_bytes=geometry.parameter_bytes + more),
        held_bytes=job.held_bytes + more + state,
        optimizer_bytes=job.optimizer_bytes + state,
    )


def _lever(forecast: MemoryForecast, wanted: Wish) -> str:
    """Says what would lower the peak most, by the largest component that can be reduced."""
    parts = forecast.phases.get(forecast.peak_phase, {})
    chosen, config = wanted.run.fields, wanted.run.config
    ideas: list[tuple[int, str]] = []

    def idea(text: str, **shares: float) -> None:
        ideas.append((int(sum(share * parts.get(Component[part], 0) for part, share in shares.items())), text))

    if chosen.peft is None:
        base = "its base stays in bf16, without gradients and optimizer state, and may wait on the host"
        idea(f"train an adapter (--peft lora:16): {base}", GRADIENTS=1, OPTIMIZER=1)
    elif chosen.quantization is None:
        idea("a base in 4 bits (--load-in-4bit)", WEIGHTS=0.7)
    if forecast.refusal is not None and parts.get(Component.WEIGHTS, 0) > forecast.budget_bytes:
        return "; or ".join(text for _, text in ideas) or "a smaller model (--model)"  # all else comes on top
    if chosen.peft is None and "8bit" not in str(config.optim):
        idea("optimizer state in 8 bits (--optim adamw_bnb_8bit)", OPTIMIZER=0.75)
    if not config.caches_in_8_bits:
        idea("a cache in 8 bits (--cache-implementation quantized), which is lossy", KV_CACHE=0.45)
    shorter = "completions half as long (--max-completion-length)"
    idea(shorter, KV_CACHE=0.5)
    idea(shorter, ACTIVATIONS=0.5)
    if forecast.refusal is not None:  # what later phases hold, and what each would save, is not known
        return "; or ".join(dict.fromkeys(text for _, text in ideas))
    saved, text = max(ideas, default=(0, ""))
    return f"{text}; saves about {format_bytes(saved)} of the peak" if saved else "none that this run could change"


def _table(wanted: Wish, forecast: MemoryForecast) -> Table:
    card, budget = format_bytes(wanted.device_bytes), format_bytes(forecast.budget_bytes)
    how = "" if wanted.sharding == "none" else f" under {wanted.sharding}"
    rank = "" if wanted.ranks == 1 else f", one of {wanted.ranks:,} ranks{how}"
    unit, unit_bytes = ("GiB", 2**30) if forecast.peak_bytes >= 2**28 else ("MiB", 2**20)
    title = f"{wanted.run.fields.model} on a card of {card} (budget {budget}){rank}; {unit}"
    table = Table(padding=0, title=title, title_justify="left")
    table.add_column("phase", no_wrap=True)
    shown = [part for part in _COMPONENTS if any(parts.get(part) for parts in forecast.phases.values())]
    for part in shown:
        table.add_column(_COMPONENTS[part], justify="right", no_wrap=True)
    table.add_column("other", justify="right")
    table.add_column("peak", justify="right", style="bold")
    if forecast.reserved:
        table.add_column("reserved", justify="right")
    for phase in (phase for phase in Phase if phase in forecast.phases):
        parts = forecast.phases[phase]
        other = sum(size for part, size in parts.items() if part not in shown)
        sizes = [parts.get(part, 0) for part in shown]
        style = "bold" if phase is forecast.peak_phase else ""
        held = (*sizes, other, sum(parts.values()), *filter(None, [forecast.reserved_bytes.get(phase)]))
        cells = ("" if part < unit_bytes / 200 else f"{part / unit_bytes:.2f}" for part in held)
        table.add_row(phase.value, *cells, style=style)
    return table


def _plan_lines(forecast: MemoryForecast) -> Text:
    rollout, update = forecast.rollout_plan, forecast.update_plan
    extras = [
        name
        for name, taken in {
            "activations recomputed": update.checkpointing,
            "activations offloaded": update.offload_activations,
            "prompts packed": update.pack_prompts,
            "optimizer offloaded between updates": update.park_optimizer or rollout.park_optimizer,
            "trajectory on the device": update.trajectory_device != UpdatePlan().trajectory_device,
            "cache in 8 bits": rollout.cache_dtype is not None,
            "steps and blocks compiled": rollout.compile is not None or update.compile is not None,
        }.items()
        if taken
    ]
    return Text(
        f"plan: rollouts of {rollout.rows_in_flight} rows in flight, prompts read {rollout.prefill_tokens:,} tokens at "
        f"a time; updates of {update.micro_batch_tokens:,} tokens, logits of {update.logprob_tile:,}"
        + (f"; {', '.join(extras)}" if extras else "")
    )


def _finding_lines(forecast: MemoryForecast, findings: Findings) -> list[str]:
    if forecast.refusal is not None:
        return [f"what would need less: {findings.lever}; or a larger card (--gpu)"]
    share = forecast.peak_bytes / max(1, forecast.budget_bytes)
    band = headroom_of(forecast.peak_bytes, forecast.budget_bytes)
    known = "" if findings.proved else "; estimated, --find proves it"
    group = f"{findings.largest_group}" + (" or more" if findings.largest_group >= 1024 else "")
    flags = f"--max-completion-length {findings.longest_completion}", f"--num-generations {findings.largest_group}"
    lines = [
        f"headroom: {band.value}, {share:.0%} of the budget used",
        f"biggest lever left: {findings.lever}",
        f"longest completion that fits: {longest_text(forecast, findings)} ({flags[0]}{known})",
        f"largest group that fits: {group} completions a prompt ({flags[1]}, where it divides the batch; estimated)",
    ]
    if findings.smallest_card is not None:
        lines.append(f"smallest card that holds this run: {findings.smallest_card} GiB")
    return lines


def _card_table(findings: Findings) -> Table:
    table = Table("card, GiB", "peak, GiB", "fits", title="cards (estimates; the smallest that fits is forecast)")
    for size, (peak, fits) in findings.cards.items():
        table.add_row(str(size), f"{peak / 2**30:.1f}", "yes" if fits else "no", style="" if fits else "dim")
    return table


def _frontier_table(findings: Findings) -> Table:
    groups = sorted({group for group, _, _ in findings.frontier})
    title = "longest completion, tokens (estimates; * proved by a forecast)"
    table = Table("LoRA rank", *(f"G = {group}" for group in groups), title=title)
    for rank in list(dict.fromkeys(rank for _, rank, _ in findings.frontier)):
        found = {group: tokens for group, other, tokens in findings.frontier if other == rank}
        cells = [f"{found[group]:,}" + "*" * ((group, rank) in findings.confirmed) for group in groups]
        table.add_row("all weights" if rank is None else str(rank), *cells)
    return table
