"""`memsafe-rl monitor`: finds a run and shows what it and the driver report."""

from __future__ import annotations

import importlib
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from memsafe_rl.cli.arguments import refusal
from memsafe_rl.diagnostics.run_figures import PHASES
from memsafe_rl.diagnostics.status import STATUS_FILE, process_started, run_of, runs_alive, status_file
from memsafe_rl.memory.runtime.cards import Card, CardProcess, CardsRead, read_cards
from memsafe_rl.memory.runtime.headroom import SAFE_SHARE, Headroom, headroom_of
from memsafe_rl.records import plain, read_json
from memsafe_rl.units import format_bytes, format_seconds

_FRESH_SECONDS = 10.0  # age of a status file from which on the run's process is checked; a live run writes every second
_REFRESH_SECONDS = 1.0
_CROWDED_SHARE = 0.05  # share of a card held by other processes that is worth advice
_STRANDED_SHARE = 0.2  # share of reserved bytes without a tensor that counts as fragmentation
_ROOMY_SHARE = 0.5  # share of the budget below which a larger model or longer completions would fit
_BAR_CELLS = 24
_METRICS = {
    "step_time": "{:.2f} s a step",
    "reward": "reward {:.3f}",
    "completions/mean_length": "{:.0f} tokens a completion",
}
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

    def count(self, name: str) -> int:
        """Returns a number of the status; 0 where it has none."""
        return int(self.status.get(name) or 0)

    @property
    def device(self) -> Mapping[str, Any]:
        """What the run's device is."""
        return self.status.get("device") or {}

    @property
    def budget_bytes(self) -> int:
        """What the run may hold, at least 1, to divide by."""
        return max(1, self.count("budget_bytes"))

    @property
    def peak_bytes(self) -> int:
        """The peak to compare with the budget: the last step's, else the highest so far."""
        return int(max((self.status.get("last_step_peak_bytes") or {}).values(), default=self.count("peak_bytes")))

    @property
    def band(self) -> Headroom:
        """The headroom of the last step."""
        return headroom_of(self.peak_bytes, self.budget_bytes)

    def card(self, cards: Sequence[Card]) -> Card | None:
        """Finds the run's card."""
        uuid = str(self.device.get("uuid") or "").removeprefix("GPU-")
        return next((card for card in cards if uuid and card.uuid.removeprefix("GPU-") == uuid), None)

    def neighbours(self, cards: Sequence[Card]) -> tuple[CardProcess, ...]:
        """Lists the other processes on the run's card."""
        card = self.card(cards)
        return () if card is None else tuple(found for found in card.processes if found.pid != self.status.get("pid"))


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
    refusal.when(pid is not None and run is not None, "monitor/both")
    if pid is not None:
        found = run_of(pid)
        if found is None:
            known = ", ".join(str(number) for number, _ in runs_alive()) or "none"
            refusal.when(process_started(pid) is None, "monitor/process", pid=pid, known=known)
            raise refusal("monitor/registered", pid=pid)
        return found
    if run is None:
        alive = list(runs_alive())
        return alive[0][1] if len(alive) == 1 else None
    folder = Path(run)
    refusal.when(not folder.is_dir(), "monitor/folder", run=run)
    refusal.when(read_json(folder / STATUS_FILE) is None, "monitor/status", run=run, file=STATUS_FILE)
    return folder


def look(run_dir: Path | None) -> View:
    """Reads the current status of a run and of the machine's cards."""
    cards = read_cards()
    if run_dir is None:
        return View(cards, runs=tuple((pid, str(folder)) for pid, folder in runs_alive()))
    first = read_json(run_dir / STATUS_FILE) or {}
    others = (read_json(run_dir / status_file(rank)) for rank in range(1, int(first.get("world_size", 1))))
    here = {"run_dir": str(run_dir.resolve())}  # a folder may have been moved since
    return View(cards, tuple(_seen({**status, **here}) for status in (first, *others) if status))


def _seen(status: Mapping[str, Any]) -> Sighting:
    """Judges a status by its age, and by the process if it is on this machine."""
    age = max(0.0, time.time() - float(status.get("written", 0.0)))
    here = status.get("host") == socket.gethostname()
    liveness = Liveness.ALIVE if age < _FRESH_SECONDS else Liveness.SILENT
    if status.get("state") != "training":
        liveness = Liveness.ENDED
    elif here and process_started(int(status.get("pid", -1))) != status.get("process_started"):
        liveness = Liveness.GONE
    return Sighting(status, age, liveness)


def advice(seen: Sighting, cards: Sequence[Card]) -> str:
    """Advises in one sentence on what matters most."""
    return next(_advice_on_life(seen), "") or next(_advice_on_memory(seen, cards))


def _advice_on_life(seen: Sighting) -> Iterator[str]:
    """Yields what is to be said of a run that no longer trains."""
    if seen.liveness is Liveness.ALIVE:
        return
    status, ago = seen.status, format_seconds(round(seen.age_seconds))
    store = importlib.import_module("memsafe_rl.checkpoint.store")  # with torch, which watching a live run spares
    saved = store.own_checkpoints(Path(str(status.get("run_dir", "."))))
    way_on = "It left no checkpoint; start it again."
    if saved:
        way_on = f"Resume it with resume_from_checkpoint=True: {saved[-1].name} is there."
    if seen.liveness is Liveness.GONE:
        yield (
            f"Process {status.get('pid')} died without an error, {ago} after its last status: the system killed it "
            f"or the machine restarted; look for the kernel's out-of-memory killer in dmesg. {way_on}"
        )
    if seen.liveness is Liveness.SILENT:
        yield f"The run has written no status for {ago}, though it should every second: it is suspended or hangs."
    if seen.liveness is Liveness.ENDED and status.get("state") == "finished":
        yield "The run has finished; memsafe-rl report shows its results."
    if seen.liveness is Liveness.ENDED:
        why = str(status.get("ended_by") or "").split("\n")[0]
        yield f"The run was stopped{f' by {why}' if why else ''}. {way_on}"


def _advice_on_memory(seen: Sighting, cards: Sequence[Card]) -> Iterator[str]:
    """Yields what is to be said of a run's memory, what matters most first."""
    total, peak, budget = max(1, int(seen.device.get("total_bytes", 1))), seen.peak_bytes, seen.budget_bytes
    crowd = sum(found.used_bytes or 0 for found in seen.neighbours(cards))
    if crowd >= _CROWDED_SHARE * total:
        yield f"Other processes hold {format_bytes(crowd)} of this card: end them, or lower memory_budget by that much."
    if retries := seen.count("allocator_retries"):
        yield (
            f"The allocator emptied its cache {retries} times to find a block, which costs speed: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start, or lower memory_budget."
        )
    reserved = seen.count("reserved_bytes")
    stranded = reserved - seen.count("allocated_bytes")
    fragmented = reserved and stranded >= max(_STRANDED_SHARE * reserved, _CROWDED_SHARE * total)
    if fragmented and seen.band is not Headroom.SAFE:
        yield (
            f"{format_bytes(stranded)} are reserved but hold no tensor: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start."
        )
    if seen.band is Headroom.DANGER:
        yield (
            "The last step came close to the budget: a longer batch may fail once before a leaner plan takes over. "
            "If that happens often, lower max_completion_length or raise memory_budget."
        )
    if failures := seen.count("failures"):
        yield (
            f"{failures} allocations failed and their work was repeated: only time was lost, and later plans take "
            "it into account."
        )
    if seen.band is Headroom.EDGE:
        yield "Little room is left, but the plans keep within it; nothing needs to be done."
    if not seen.count("step"):
        yield "No step is done yet; what the run needs is known after the first."
    if 0 < peak < _ROOMY_SHARE * budget:
        spare = format_bytes(int(SAFE_SHARE * budget) - peak)
        yield f"{spare} are free before it gets tight: longer completions or a larger model would fit."
    yield "The run stays well within its budget; nothing needs to be done."


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
            "band": str(run.band),
            "neighbours": [asdict(found) for found in run.neighbours(view.cards.cards)],
            "advice": advice(run, view.cards.cards),
        }
    return json.dumps(plain(content))


def _plain(seen: Sighting) -> dict[str, Any]:
    return {**seen.status, "liveness": str(seen.liveness), "age_seconds": round(seen.age_seconds, 3)}


def monitor(pid: int | None, run: str | None, *, json_output: bool, watch: bool, console: Console) -> None:
    """Shows a run once, or every second until Ctrl+C."""
    folder = find_run(pid, run)
    if not watch:
        if json_output:
            print(as_json(look(folder)), flush=True)
        else:
            console.print(render(look(folder)))
        return
    with suppress(KeyboardInterrupt):
        while json_output:
            print(as_json(look(folder)), flush=True)
            time.sleep(_REFRESH_SECONDS)
        with Live(render(look(folder)), console=console, auto_refresh=False, transient=False) as live:
            while True:
                time.sleep(_REFRESH_SECONDS)
                live.update(render(look(folder)), refresh=True)


def render(view: View) -> RenderableType:
    """Renders a view as text."""
    run, cards = view.run, view.cards.cards
    if run is None:
        return Group(_about_others(view.runs), _about_cards(view))
    parts: list[RenderableType] = [_heading(run), _progress(run), Text(""), _device(run)]
    parts += [Text(""), _phases(run), Text(""), _counters(run)]
    for found in run.neighbours(cards):
        held = "an unknown amount" if found.used_bytes is None else format_bytes(found.used_bytes)
        parts.append(Text(f"also on this card: process {found.pid} {found.name}, {held}", style="yellow"))
    if len(view.ranks) > 1:
        parts.append(_ranks(view.ranks))
    style = _STYLES[run.band] if run.liveness is Liveness.ALIVE else "bold"
    return Group(*parts, _about_cards(view), Text.assemble(("\n→ ", style), advice(run, cards)))


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
        f"  process {status.get('pid')}{place}, {format_seconds(round(seen.age_seconds))} ago",
    )


def _progress(seen: Sighting) -> Text:
    status, metrics = seen.status, seen.status.get("metrics", {})
    facts = [f"step {status.get('step', 0)} of {status.get('max_steps', '?')}"]
    if seen.liveness in (Liveness.ALIVE, Liveness.SILENT):
        sampling = status.get("sampling")
        done = f" ({sampling[0]} of {sampling[1]} completions ended)" if sampling else ""
        phase = str(status.get("phase"))
        facts.append("between phases" if phase == "load" else f"in {phase}{done}")
    facts += [form.format(metrics[name]) for name, form in _METRICS.items() if metrics.get(name) is not None]
    return Text(" · ".join(facts))


def _device(seen: Sighting) -> Table:
    columns = Column(style="cyan", no_wrap=True), Column(justify="right", no_wrap=True), Column(style="dim")
    status, device, table = seen.status, seen.device, Table.grid(*columns, padding=(0, 2))
    name, capability = device.get("name", ""), device.get("capability")
    share = f"the last step's peak is {seen.peak_bytes / seen.budget_bytes:.1%} of it: "
    exact = status.get("counts_tensors", True)
    whom = {"cuda": "for the driver", "host": "for the operating system"}.get(str(device.get("kind")), "on the device")
    rows: tuple[tuple[str, Any, str | Text], ...] = (
        ("device", device.get("total_bytes", 0), name if capability is None else f"{name}, capability {capability}"),
        ("budget", seen.count("budget_bytes"), Text.assemble(share, (seen.band.value, _STYLES[seen.band]))),
        (
            "allocated",
            seen.count("allocated_bytes"),
            "live tensors" if exact else "the whole process, Python and libraries included",
        ),
        ("reserved", status.get("reserved_bytes"), "by PyTorch's allocator"),
        ("peak", seen.count("peak_bytes"), "since the run began"),
        ("free", status.get("free_bytes"), f"{whom}, after the last step"),
    )
    for title, size, about in rows:
        if size is not None:
            table.add_row(title, format_bytes(int(size)), about)
    return table


def _phases(seen: Sighting) -> Table:
    table = _table("phase", "highest peak", "last step", "planned", "of the budget", left=("phase", "of the budget"))
    peaks, *others = (
        seen.status.get(name) or {} for name in ("phase_peak_bytes", "last_step_peak_bytes", "predicted_bytes")
    )
    for name in sorted(peaks, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES)):
        peak = int(peaks[name])
        sizes = (format_bytes(int(sizes[name])) if name in sizes else "-" for sizes in others)
        bar = _bar(peak / seen.budget_bytes, _STYLES[headroom_of(peak, seen.budget_bytes)])
        table.add_row(name, format_bytes(peak), *sizes, bar)
    return table


def _table(*titles: str, left: Sequence[str] = (), no_wrap: bool = True) -> Table:
    columns = (Column(title, justify="left" if title in left else "right", no_wrap=no_wrap) for title in titles)
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def _bar(share: float, style: str) -> Text:
    filled = min(_BAR_CELLS, round(share * _BAR_CELLS))
    return Text.assemble(("█" * filled, style), ("░" * (_BAR_CELLS - filled), "dim"), f" {share:.0%}")


def _counters(seen: Sighting) -> Text:
    names = ("allocator_retries", "allocator_ooms", "failures", "retries")
    retries, ooms, failures, repeated = counts = [seen.count(name) for name in names]
    if not any(counts):
        return Text("no allocation was refused or retried", style="dim")
    return Text(
        f"allocator: {retries} retries, {ooms} out-of-memory errors · run: {failures} failures, {repeated} repeats",
        style="yellow",
    )


def _ranks(ranks: Sequence[Sighting]) -> Table:
    table = _table("rank", "process", "allocated", "last step's peak", "band")
    for number, seen in enumerate(ranks):
        alive = seen.liveness is Liveness.ALIVE
        state = Text(seen.band.value, style=_STYLES[seen.band]) if alive else Text(seen.liveness)
        names = str(seen.status.get("rank", number)), str(seen.status.get("pid"))
        table.add_row(*names, *map(format_bytes, (seen.count("allocated_bytes"), seen.peak_bytes)), state)
    return table


def _about_others(runs: Sequence[tuple[int, str]]) -> RenderableType:
    if not runs:
        return Text("You have no live run on this machine; --run DIR shows one that has ended.\n")
    listed = "\n".join(f"  --pid {pid}   {run_dir}" for pid, run_dir in runs)
    return Text(f"You have several live runs; choose one:\n{listed}\n")


def _about_cards(view: View) -> RenderableType:
    run = view.run
    if not view.cards.cards:
        counted = {
            "simulated": " The run's figures are those of a simulated device.",
            "host": " The run's figures are those of host memory.",
        }.get("" if run is None else str(run.device.get("kind")), "")
        return Text(f"\nNo card: {view.cards.source}.{counted}", style="dim")
    titles = ("card", "name", "capability", "total", "used", "free", "busy", "processes")
    table = _table(*titles, left=("card", "name", "processes"), no_wrap=False)
    table.title, table.title_justify, table.title_style = "\nCards, by " + view.cards.source, "left", "dim"
    own = None if run is None else run.card(view.cards.cards)
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
