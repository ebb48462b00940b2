"""`memsafe-rl monitor`: finds a run and shows what it and the driver report."""

from __future__ import annotations

import importlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from memsafe_rl.diagnostics.run_figures import PHASES
from memsafe_rl.diagnostics.status import STATUS_FILE, process_started, run_of, runs_alive, status_file
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.cards import Card, CardProcess, CardsRead, read_cards
from memsafe_rl.memory.runtime.headroom import SAFE_SHARE, Headroom, headroom_of
from memsafe_rl.records import read_json
from memsafe_rl.units import duration, format_bytes

_FRESH_SECONDS = 10.0  # age of a status file from which on the run's process is checked; a live run writes every second
_REFRESH_SECONDS = 1.0
_CROWDED_SHARE = 0.05  # share of a card held by other processes that is worth advice
_STRANDED_SHARE = 0.2  # share of reserved bytes without a tensor that counts as fragmentation
_ROOMY_SHARE = 0.5  # share of the budget below which a larger model or longer completions would fit
_BAR_CELLS = 24
_STYLES = {Headroom.SAFE: "green", Headroom.EDGE: "yellow", Headroom.DANGER: "bold red"}


class Liveness(StrEnum):
    """Whether a process still writes a status file."""

    ALIVE = "alive"
    SILENT = "silent"
    GONE = "gone"
    ENDED = "ended"


@dataclass(frozen=True)
class Sighting:
    """A run's last status."""

    status: Mapping[str, Any]
    age_seconds: float
    liveness: Liveness  # whether its process still exists


@dataclass(frozen=True)
class View:
    """Everything that is shown at one moment."""

    cards: CardsRead
    ranks: tuple[Sighting, ...] = ()  # the run's processes in order; empty without a run
    runs: tuple[tuple[int, str], ...] = ()  # process and folder of this user's live runs

    @property
    def run(self) -> Sighting | None:
        """The run's first process."""
        return self.ranks[0] if self.ranks else None


def find_run(pid: int | None, run: str | None) -> Path | None:
    """Finds the folder of the requested run."""
    if pid is not None and run is not None:
        raise ConfigError("--pid and --run are both given. Give one of them.")
    if pid is not None:
        return _run_of_process(pid)
    if run is None:
        alive = list(runs_alive())
        return alive[0][1] if len(alive) == 1 else None
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"--run is {run!r}, and there is no such folder. Give the run's output_dir.")
    if read_json(folder / STATUS_FILE) is None:
        raise ConfigError(
            f"{run!r} has no readable {STATUS_FILE}, which a run writes from its first step on. Give the output_dir of "
            "a run of this library, once it has loaded its model."
        )
    return folder


def _run_of_process(pid: int) -> Path:
    found = run_of(pid)
    if found is not None:
        return found
    if process_started(pid) is None:
        known = ", ".join(str(number) for number, _ in runs_alive()) or "none"
        raise ConfigError(f"--pid is {pid}, and there is no such process. Your live runs: {known}.")
    raise ConfigError(
        f"Process {pid} has registered no run: it is not a training run of this library, has not loaded its model "
        "yet, or belongs to another user. Give its output_dir with --run."
    )


def look(run_dir: Path | None) -> View:
    """Reads the current status of a run and of the machine's cards."""
    cards = read_cards()
    if run_dir is None:
        return View(cards, runs=tuple((pid, str(folder)) for pid, folder in runs_alive()))
    first = read_json(run_dir / STATUS_FILE) or {}
    others = (read_json(run_dir / status_file(rank)) for rank in range(1, int(first.get("world_size", 1))))
    now = time.time()
    return View(cards, tuple(_seen(status, now) for status in (first, *others) if status))


def _seen(status: Mapping[str, Any], now: float) -> Sighting:
    age = max(0.0, now - float(status.get("written", 0.0)))
    return Sighting(status, age, _liveness(status, age))


def _liveness(status: Mapping[str, Any], age_seconds: float) -> Liveness:
    """Decides by the file's age, and by the process if it is on this machine."""
    if status.get("state") != "training":
        return Liveness.ENDED
    here = status.get("host") == socket.gethostname()
    if here and process_started(int(status.get("pid", -1))) != status.get("process_started"):
        return Liveness.GONE
    return Liveness.ALIVE if age_seconds < _FRESH_SECONDS else Liveness.SILENT


def card_of(status: Mapping[str, Any], cards: Sequence[Card]) -> Card | None:
    """Finds a run's card."""
    uuid = str(status.get("device", {}).get("uuid") or "")
    return next((card for card in cards if uuid and card.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-")), None)


def neighbours(status: Mapping[str, Any], cards: Sequence[Card]) -> tuple[CardProcess, ...]:
    """Lists the other processes on a run's card."""
    card = card_of(status, cards)
    return () if card is None else tuple(found for found in card.processes if found.pid != status.get("pid"))


def step_peak_bytes(status: Mapping[str, Any]) -> int:
    """Gives the peak to compare with the budget: the last step's, else the highest so far."""
    last = status.get("last_step_peak_bytes") or {}
    return int(max(last.values(), default=status.get("peak_bytes", 0)))


def band(status: Mapping[str, Any]) -> Headroom:
    """Gives the headroom of a run's last step."""
    return headroom_of(step_peak_bytes(status), max(1, int(status.get("budget_bytes", 1))))


def advice(seen: Sighting, cards: Sequence[Card]) -> str:
    """Advises in one sentence on what matters most."""
    return _advice_on_life(seen) or _advice_on_allocator(seen.status, cards) or _advice_on_budget(seen.status)


def _advice_on_life(seen: Sighting) -> str:
    status, ago = seen.status, duration(round(seen.age_seconds), decimals=0)
    if seen.liveness is Liveness.GONE:
        return (
            f"Process {status.get('pid')} died without an error, {ago} after its last status: the system killed it "
            f"or the machine restarted; look for the kernel's out-of-memory killer in dmesg. {_way_on(status)}"
        )
    if seen.liveness is Liveness.SILENT:
        return f"The run has written no status for {ago}, though it should every second: it is suspended or hangs."
    if seen.liveness is Liveness.ENDED and status.get("state") == "finished":
        return "The run has finished; memsafe-rl report shows its results."
    if seen.liveness is Liveness.ENDED:
        why = str(status.get("ended_by") or "").split("\n")[0]
        return f"The run was stopped{f' by {why}' if why else ''}. {_way_on(status)}"
    return ""


def _way_on(status: Mapping[str, Any]) -> str:
    """Says from where a run can be resumed, if from anywhere."""
    store = importlib.import_module("memsafe_rl.checkpoint.store")  # with torch, which watching a live run spares
    saved = store.own_checkpoints(Path(str(status.get("run_dir", "."))))
    if not saved:
        return "It left no checkpoint; start it again."
    return f"Resume it with resume_from_checkpoint=True: {saved[-1].name} is there."


def _advice_on_allocator(status: Mapping[str, Any], cards: Sequence[Card]) -> str:
    total = max(1, int(status.get("device", {}).get("total_bytes", 1)))
    crowd = sum(found.used_bytes or 0 for found in neighbours(status, cards))
    if crowd >= _CROWDED_SHARE * total:
        return (
            f"Other processes hold {format_bytes(crowd)} of this card: end them, or lower memory_budget by that much."
        )
    reserved, allocated = status.get("reserved_bytes"), int(status.get("allocated_bytes", 0))
    if status.get("allocator_retries"):
        return (
            f"The allocator emptied its cache {status['allocator_retries']} times to find a block, which costs "
            "speed: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start, or lower memory_budget."
        )
    stranded = (reserved or 0) - allocated
    worth_telling = reserved and stranded >= max(_STRANDED_SHARE * reserved, _CROWDED_SHARE * total)
    if worth_telling and band(status) is not Headroom.SAFE:
        return (
            f"{format_bytes(stranded)} are reserved but hold no tensor: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start."
        )
    return ""


def _advice_on_budget(status: Mapping[str, Any]) -> str:
    peak, budget = step_peak_bytes(status), max(1, int(status.get("budget_bytes", 1)))
    found, failures = band(status), int(status.get("failures", 0))
    if found is Headroom.DANGER:
        return (
            "The last step came close to the budget: a longer batch may fail once before a leaner plan takes over. "
            "If that happens often, lower max_completion_length or raise memory_budget."
        )
    if failures:
        return (
            f"{failures} allocations failed and their work was repeated: only time was lost, and later plans take "
            "it into account."
        )
    if found is Headroom.EDGE:
        return "Little room is left, but the plans keep within it; nothing needs to be done."
    if step_peak_bytes(status) and peak < _ROOMY_SHARE * budget:
        spare = format_bytes(int(SAFE_SHARE * budget) - peak)
        return f"{spare} are free before it gets tight: longer completions or a larger model would fit."
    return "The run stays well within its budget; nothing needs to be done."


def as_json(view: View) -> str:
    """Writes a view as one JSON object, sizes in bytes."""
    run = view.run
    content: dict[str, Any] = {
        "time": time.time(),
        "cards": [asdict(card) for card in view.cards.cards],
        "cards_source": view.cards.source,
        "run": None if run is None else _plain(run),
        "ranks": [_plain(seen) for seen in view.ranks[1:]],
        "runs": [{"pid": pid, "run_dir": run_dir} for pid, run_dir in view.runs],
    }
    if run is not None:
        content |= {
            "band": str(band(run.status)),
            "neighbours": [asdict(found) for found in neighbours(run.status, view.cards.cards)],
            "advice": advice(run, view.cards.cards),
        }
    return json.dumps(content)


def _plain(seen: Sighting) -> dict[str, Any]:
    return {**seen.status, "liveness": str(seen.liveness), "age_seconds": round(seen.age_seconds, 3)}


def monitor(pid: int | None, run: str | None, *, json_output: bool, watch: bool, console: Console) -> None:
    """Shows a run once, or every second until Ctrl+C."""
    folder = find_run(pid, run)
    if not watch and not json_output:
        console.print(render(look(folder)))
        return
    try:
        while json_output:
            print(as_json(look(folder)), flush=True)
            if not watch:
                return
            time.sleep(_REFRESH_SECONDS)
        with Live(render(look(folder)), console=console, auto_refresh=False, transient=False) as live:
            while True:
                time.sleep(_REFRESH_SECONDS)
                live.update(render(look(folder)), refresh=True)
    except KeyboardInterrupt:
        return


# ---------------------------------------------------------------------- what is printed


def render(view: View) -> RenderableType:
    """Renders a view as text."""
    run = view.run
    parts = [_about_others(view.runs)] if run is None else _about_run(run, view)
    parts.append(_about_cards(view, run))
    if run is not None:
        style = _STYLES[band(run.status)] if run.liveness is Liveness.ALIVE else "bold"
        parts.append(Text.assemble(("\n→ ", style), advice(run, view.cards.cards)))
    return Group(*parts)


def _about_run(seen: Sighting, view: View) -> list[RenderableType]:
    status = seen.status
    parts: list[RenderableType] = [_heading(seen), _progress(seen), Text(""), _device(status)]
    parts += [Text(""), _phases(status), Text(""), _counters(status)]
    beside = neighbours(status, view.cards.cards)
    for found in beside:
        held = "an unknown amount" if found.used_bytes is None else format_bytes(found.used_bytes)
        parts.append(Text(f"also on this card: process {found.pid} {found.name}, {held}", style="yellow"))
    if len(view.ranks) > 1:
        parts.append(_ranks(view.ranks))
    return parts


def _heading(seen: Sighting) -> Text:
    status = seen.status
    words = {
        Liveness.ALIVE: ("training", "green"),
        Liveness.SILENT: ("silent", "yellow"),
        Liveness.GONE: ("process gone", "bold red"),
        Liveness.ENDED: (str(status.get("state")), "bold"),
    }
    place = "" if status.get("host") == socket.gethostname() else f" on {status.get('host')}"
    return Text.assemble(
        words[seen.liveness],
        ("  ", ""),
        (str(status.get("run_dir")), "bold"),
        f"  process {status.get('pid')}{place}, {duration(round(seen.age_seconds), decimals=0)} ago",
    )


def _progress(seen: Sighting) -> Text:
    status, metrics = seen.status, seen.status.get("metrics", {})
    facts = [f"step {status.get('step', 0)} of {status.get('max_steps', '?')}"]
    if seen.liveness in (Liveness.ALIVE, Liveness.SILENT):
        sampling = status.get("sampling")
        done = f" ({sampling[0]} of {sampling[1]} completions ended)" if sampling else ""
        phase = str(status.get("phase"))
        facts.append("between phases" if phase == "load" else f"in {phase}{done}")
    if "step_time" in metrics:
        facts.append(f"{metrics['step_time']:.2f} s a step")
    if "reward" in metrics:
        facts.append(f"reward {metrics['reward']:.3f}")
    if "completions/mean_length" in metrics:
        facts.append(f"{metrics['completions/mean_length']:.0f} tokens a completion")
    return Text(" · ".join(facts))


def _device(status: Mapping[str, Any]) -> Table:
    columns = Column(style="cyan", no_wrap=True), Column(justify="right", no_wrap=True), Column(style="dim")
    device, table = status.get("device", {}), Table.grid(*columns, padding=(0, 2))
    capability = device.get("capability")
    about = device.get("name", "") if capability is None else f"{device.get('name')}, capability {capability}"
    table.add_row("device", format_bytes(int(device.get("total_bytes", 0))), about)
    budget, peak, found = int(status.get("budget_bytes", 0)), step_peak_bytes(status), band(status)
    share = f"the last step's peak is {peak / max(1, budget):.1%} of it: "
    table.add_row("budget", format_bytes(budget), Text.assemble(share, (found.value, _STYLES[found])))
    exact = status.get("counts_tensors", True)
    whose = "live tensors" if exact else "the whole process, Python and libraries included"
    table.add_row("allocated", format_bytes(int(status.get("allocated_bytes", 0))), whose)
    if status.get("reserved_bytes") is not None:
        table.add_row("reserved", format_bytes(int(status["reserved_bytes"])), "by PyTorch's allocator")
    table.add_row("peak", format_bytes(int(status.get("peak_bytes", 0))), "since the run began")
    if status.get("free_bytes") is not None:
        whom = {"cuda": "for the driver", "host": "for the operating system"}.get(device.get("kind"), "on the device")
        table.add_row("free", format_bytes(int(status["free_bytes"])), f"{whom}, after the last step")
    return table


def _phases(status: Mapping[str, Any]) -> Table:
    table = _table("phase", "highest peak", "last step", "planned", "of the budget", left=("phase", "of the budget"))
    last, planned = status.get("last_step_peak_bytes") or {}, status.get("predicted_bytes") or {}
    budget = max(1, int(status.get("budget_bytes", 1)))
    peaks = status.get("phase_peak_bytes") or {}
    for name in sorted(peaks, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES)):
        peak = peaks[name]
        table.add_row(
            name,
            format_bytes(int(peak)),
            format_bytes(int(last[name])) if name in last else "-",
            format_bytes(int(planned[name])) if name in planned else "-",
            _bar(peak / budget, _STYLES[headroom_of(int(peak), budget)]),
        )
    return table


def _table(*titles: str, left: Sequence[str] = (), no_wrap: bool = True) -> Table:
    columns = (Column(title, justify="left" if title in left else "right", no_wrap=no_wrap) for title in titles)
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _bar(share: float, style: str) -> Text:
    filled = min(_BAR_CELLS, round(share * _BAR_CELLS))
    return Text.assemble(("█" * filled, style), ("░" * (_BAR_CELLS - filled), "dim"), f" {share:.0%}")


def _counters(status: Mapping[str, Any]) -> Text:
    retries, ooms = int(status.get("allocator_retries", 0)), int(status.get("allocator_ooms", 0))
    failures, repeated = int(status.get("failures", 0)), int(status.get("retries", 0))
    if not any((retries, ooms, failures, repeated)):
        return Text("no allocation was refused or retried", style="dim")
    counts = f"allocator: {retries} retries, {ooms} out-of-memory errors · run: {failures} failures, {repeated} repeats"
    return Text(counts, style="yellow")


def _ranks(ranks: Sequence[Sighting]) -> Table:
    table = _table("rank", "process", "allocated", "last step's peak", "band")
    for number, seen in enumerate(ranks):
        found = band(seen.status)
        state = Text(found.value, style=_STYLES[found]) if seen.liveness is Liveness.ALIVE else Text(seen.liveness)
        allocated = format_bytes(int(seen.status.get("allocated_bytes", 0)))
        rank = str(seen.status.get("rank", number))
        table.add_row(rank, str(seen.status.get("pid")), allocated, format_bytes(step_peak_bytes(seen.status)), state)
    return table


def _about_others(runs: Sequence[tuple[int, str]]) -> RenderableType:
    if not runs:
        return Text("You have no live run on this machine; --run DIR shows one that has ended.\n")
    listed = "\n".join(f"  --pid {pid}   {run_dir}" for pid, run_dir in runs)
    return Text(f"You have several live runs; choose one:\n{listed}\n")


def _about_cards(view: View, run: Sighting | None) -> RenderableType:
    if not view.cards.cards:
        kind = "" if run is None else str(run.status.get("device", {}).get("kind"))
        counted = {
            "simulated": " The run's figures are those of a simulated device.",
            "host": " The run's figures are those of host memory.",
        }.get(kind, "")
        return Text(f"\nNo card: {view.cards.source}.{counted}", style="dim")
    titles = ("card", "name", "capability", "total", "used", "free", "busy", "processes")
    table = _table(*titles, left=("card", "name", "processes"), no_wrap=False)
    table.title, table.title_justify, table.title_style = "\nCards, by " + view.cards.source, "left", "dim"
    own = None if run is None else card_of(run.status, view.cards.cards)
    for card in view.cards.cards:
        table.add_row(
            f"{card.index}{' *' if own is not None and own.uuid == card.uuid else ''}",
            card.name,
            card.capability or "-",
            *(format_bytes(size) for size in (card.total_bytes, card.used_bytes, card.free_bytes)),
            "-" if card.utilization is None else f"{card.utilization} %",
            ", ".join(str(found.pid) for found in card.processes) or "none",
        )
    return table
