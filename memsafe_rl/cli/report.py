"""`memsafe-rl report`: a run's memory and learning as one self-contained HTML page."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from memsafe_rl import units
from memsafe_rl.cli.arguments import refusal
from memsafe_rl.cli.charts import COLORS, Drawing, Limit, Mark, Plot, Series, draw_all, learning_sections
from memsafe_rl.diagnostics.run_figures import PHASES, Record, RunFolder, by_phase, column, known, number, read_run
from memsafe_rl.memory.runtime.headroom import headroom_of
from memsafe_rl.units import chat_text, format_bytes

REPORT_FILE = "report.html"
COMPONENTS = (
    *("weights", "optimizer", "gradients", "trajectory", "kv_cache", "logits", "activations", "other", "process"),
)
"""From what stays to what comes and goes, so that the lower layers lie still; each has the colour of its place."""
_PLANNED = ("gradients", "kv_cache", "logits", "activations")
"""What only a plan tells of devices that do not count by component."""

_MOST_MARKS = _MOST_EVENTS = 200
_MOST_NOTES = 12
_NOTABLE_FACTOR = 2.0
"""Change of a plan's sizes from which on it is marked; lengths alone move them by less from step to step."""
_SAMPLES_SHOWN = 3
_COMPLETION_CHARACTERS = 1500
_NOT_OF_THE_PLAN = ("event", "step", "kind", "predicted_bytes", "at")
_MARKED = {"plan": "plan", "failure": "failure", "alarm": "alarm", "band": "alarm", "degradation": "lossy"}
_MARKED |= {"kl_stop": "alarm"}
_SENTENCES = {
    "plan": "{kind}: {what}",
    "failure": "{size} refused in {phase}, try {tries}; {lost:.2f} s lost",
    "fallback": "leaner plan in {phase}: {what}",
    "retry": "the same work again in {phase}",
    "degradation": "the task was changed, as allow_lossy allows: {what}",
    "kl_stop": "the KL of {measured} passed its bound of {target}: the passes over this rollout ended",
}


def report(run_dir: str, output: str | None) -> Path:
    """Writes the report of a run."""
    folder = read_run(Path(run_dir))
    target = folder.path / REPORT_FILE if output is None else Path(output)
    refusal.when(
        target.is_file() and target.suffix.lower() not in (".html", ".htm"), "report/exists", target=str(target)
    )
    try:
        target.write_text(page(folder), encoding="utf-8")
    except OSError as error:
        raise refusal("report/output", target=str(target), error=error) from None
    return target


def page(folder: RunFolder) -> str:
    """Renders a run's records as a page."""
    loader = PackageLoader("memsafe_rl.cli")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    writers = (units.plain, units.percent, units.format_seconds, units.bytes_or_dash, sentence, plan_value, cell)
    environment.filters |= {writer.__name__: writer for writer in writers}
    figures, events = folder.figures, _placed(folder.events)
    budget, failures = figures.budget_bytes, [event for event in events if event.get("event") == "failure"]
    listed = [event for event in events if event.get("event") not in ("plan", "forecast")]
    first, *later = folder.run.get("starts") or [folder.run]
    began = number(first.get("began"))
    return environment.get_template("report.html.j2").render(
        folder=folder,
        run=folder.run,
        name=folder.path.resolve().name,
        path=folder.path.resolve(),
        began=None if began is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        resumed=[number(start.get("first_step")) for start in later],
        device=folder.run.get("device") or {},
        figures=figures,
        lost_share=figures.seconds_lost / figures.seconds if figures.seconds else 0.0,
        headroom=headroom_of(figures.peak_bytes or 0, budget).value if budget and figures.peak_bytes else "",
        memory=_memory(folder, events) if folder.steps else (),
        forecast=_forecast(folder),
        notes=_notes(events),
        failures=len(failures),
        events=listed[:_MOST_EVENTS],
        all_events=len(listed),
        learning=learning_sections(folder),
        throughput=_throughput(folder, failures) if folder.steps else (),
        completions=_completions(folder),
        plans=_plans(events),
    )


def _memory(folder: RunFolder, events: Sequence[Record]) -> list[Drawing]:
    """Draws each step's highest moment, the peak of each phase, and the two phases that plans cut."""
    records = folder.steps
    budget = number(records[-1].get("memory/budget_bytes"))

    def plot(title: str, layers: Sequence[Series], below: int = 0, **more: Any) -> Plot:
        limit = None if budget is None else Limit(budget - below, f"budget {format_bytes(int(budget))}")
        return Plot(title, layers, units.bytes_text, from_zero=True, binary=True, limit=limit, **more)

    def by_use(title: str, held: Sequence[Mapping[str, int]], **more: Any) -> Plot:
        process = max((parts.get("process", 0) for parts in held), default=0)
        # Where that is more than half, all else would be a thin line on its block.
        own = process if 2 * process > max((sum(parts.values()) for parts in held), default=0) else 0
        note = f"Above the {format_bytes(own)} that the process itself holds: Python and libraries." if own else ""
        layers = _layers(folder, [{**parts, "process": 0} for parts in held] if own else held)
        return plot(f"{title}, by use", layers, own, stacked=True, note=note, **more)

    title, marks = "Highest moment of each step", _marks(events, records)
    highest = by_use(title, [_held_at_highest(record) for record in records], marks=marks)
    if not highest.series:
        together = [Series("peak", column(records, "memory/peak_bytes"), 7)]
        highest = plot(f"{title}, all uses together", together, stacked=True, marks=marks)
    peaks = [by_phase(record) for record in records]
    lines = [
        Series(name, [number(found.get(name)) for found in peaks], color)
        for color, name in enumerate(PHASES)
        if name != "load" or len(peaks) == 1
    ]
    drawings = draw_all(records, [highest, plot("Peak of each phase", lines)])
    for phase in ("rollout", "update"):
        there = [record for record in records if (record.get("held_at_peak") or {}).get(phase)]
        held = [record["held_at_peak"][phase] for record in there]
        drawings += draw_all(there, [by_use(f"Peak of the {phase}", held)])
    return drawings


def _layers(folder: RunFolder, held: Sequence[Mapping[str, int]]) -> list[Series]:
    """Returns a layer of each component: the process itself lowest, then from what stays to what comes and goes."""
    counted = (folder.run.get("device") or {}).get("kind", "simulated") == "simulated"
    rest = "the rest" if folder.counts_tensors else "the rest, and whatever else the process holds"
    labels = {"process": "the process itself: Python and libraries", "other": "other" if counted else rest}
    labels |= {} if counted else {name: f"{name.replace('_', ' ')}, as planned" for name in _PLANNED}
    return [
        Series(labels.get(name, name.replace("_", " ")), [float(parts.get(name, 0)) for parts in held], color)
        for color, name in sorted(enumerate(COMPONENTS), key=lambda entry: entry[1] != "process")
        if any(parts.get(name) for parts in held)
    ]


def _held_at_highest(record: Record) -> Mapping[str, int]:
    held, peaks = record.get("held_at_peak") or {}, by_phase(record)
    there = [phase for phase in peaks if phase in held]
    return held[max(there, key=lambda phase: peaks[phase])] if there else {}


def _placed(events: Sequence[Record]) -> list[Record]:
    """Returns events the number of the step they belong to; most carry the number of steps done before."""

    def done(event: Record) -> bool:
        kind = event.get("event")
        return kind in ("kl_stop", "forecast") or (kind == "alarm" and event.get("kind") != "allocator_retries")

    return [{**event, "at": event["step"] + (0 if done(event) else 1)} for event in events]


def _marks(events: Sequence[Record], records: Sequence[Record]) -> list[Mark]:
    """Marks failures, alarms, changes of the task, and plans that differ notably from the one before."""
    found: dict[tuple[float, str], list[str]] = {}
    for event in [*_changed_plans(events), *(event for event in events if event.get("event") != "plan")]:
        kind = _kind_of_mark(event)
        if kind is not None and records[0]["step"] - 1 <= event["at"] <= records[-1]["step"] + 1:
            found.setdefault((event["at"], kind), []).append(sentence(event))
    marks = [Mark(at, kind, f"step {at:g}: " + "\n".join(texts)) for (at, kind), texts in sorted(found.items())]
    return marks if len(marks) <= _MOST_MARKS else [mark for mark in marks if mark.kind != "plan"][:_MOST_MARKS]


def _changed_plans(events: Sequence[Record]) -> list[Record]:
    """Lists the plans that differ notably from the one before of their kind, with what changed."""
    last: dict[str, Record] = {}
    changed: list[Record] = []
    for event in (event for event in events if event.get("event") == "plan"):
        kind = str(event.get("kind"))
        now = {name: value for name, value in event.items() if name not in _NOT_OF_THE_PLAN}
        first, before = kind not in last, last.get(kind, {})
        last[kind] = now
        differing = {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}
        if first or any(_notable(*change) for change in differing.values()):
            changed.append({**event, "changes": differing, "first": first})
    return changed


def _notable(old: Any, new: Any) -> bool:
    """Returns whether a value differs in more than a somewhat larger or smaller size."""
    before, after = number(old), number(new)
    if before is None or after is None:
        return True
    return max(before, after) >= _NOTABLE_FACTOR * max(1.0, min(before, after))


def _kind_of_mark(event: Record) -> str | None:
    """Tells how an event is marked; of headroom, only danger is."""
    kind = str(event.get("event"))
    return None if kind == "band" and event.get("band") != "danger" else _MARKED.get(kind)


def _notes(events: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Puts alarms into words, as class, step and sentence; those that say the same are put once."""
    alike: dict[tuple[str, ...], list[Record]] = {}
    for event in events:
        if _kind_of_mark(event) not in (None, "plan", "failure"):
            same = tuple(str(event.get(name)) for name in ("event", "kind", "band", "remedy", "rule", "component"))
            alike.setdefault(same, []).append(event)
    notes = []
    for group in list(alike.values())[:_MOST_NOTES]:
        first, last = group[0], group[-1]
        times = f"{len(group)} times, from step {first['at']:g} to {last['at']:g}, first:"
        when = times if len(group) > 1 else f"step {first['at']:g}"
        notes.append(("failure" if first.get("band") == "danger" else str(_kind_of_mark(first)), when, sentence(first)))
    return notes


def sentence(event: Record) -> str:
    """Says what an event was."""
    kind = str(event.get("event"))
    if "sentence" in event or kind not in _SENTENCES:
        return str(event.get("sentence", kind))
    asked = number(event.get("requested_bytes"))
    return _SENTENCES[kind].format(
        kind=event.get("kind"),
        phase=event.get("phase"),
        tries=event.get("tries"),
        what="first plan" if event.get("first") else _changes(event.get("changes") or {}),
        size="an allocation" if asked is None else format_bytes(int(asked)),
        lost=number(event.get("seconds_lost")) or 0.0,
        measured=units.plain(number(event.get("measured"))),
        target=units.plain(number(event.get("target"))),
    )


def _changes(changes: Mapping[str, Any]) -> str:
    words = []
    for name, change in changes.items():
        old, new = change if isinstance(change, (list, tuple)) and len(change) == 2 else (None, change)
        words.append(f"{name} {plan_value(old, name)} → {plan_value(new, name)}")
    return ", ".join(words) or "nothing but its prediction"


def plan_value(value: Any, name: str) -> str:
    """Writes a field of a plan."""
    if name.endswith("_bytes") and number(value) is not None:
        return format_bytes(int(value))
    return {None: "-", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _plans(events: Sequence[Record]) -> list[tuple[str, Record, Record, list[str]]]:
    """Returns the first and the last plan of each kind, and the fields to show."""
    found = []
    for kind in ("rollout", "update"):
        plans = [event for event in events if event.get("event") == "plan" and event.get("kind") == kind]
        if plans:
            found.append((kind, plans[0], plans[-1], [name for name in plans[-1] if name not in _NOT_OF_THE_PLAN]))
    return found


def _forecast(folder: RunFolder) -> dict[str, Any]:
    """Compares forecast and plans with what was measured, phase by phase."""
    forecasts = [event for event in folder.events if event.get("event") == "forecast"]
    predicted = (forecasts[-1] if forecasts else folder.run.get("forecast") or {}).get("phases", {})
    rows, lines = [], []
    for color, phase in enumerate(PHASES):
        peaks = known(folder.steps, f"memory/{phase}_peak_bytes")
        if peaks or phase in predicted:
            measured, foreseen = max(peaks, default=None), number(predicted.get(phase))
            pairs = [[r.get(f"memory/{phase}_{what}_bytes") for what in ("predicted", "peak")] for r in folder.steps]
            errors = [_error(number(plan), number(peak)) for plan, peak in pairs]
            found = [error for error in errors if error is not None]
            summary = (statistics.median(found), min(found), max(found)) if found else (None,) * 3
            sizes = map(units.bytes_or_dash, (foreseen, measured))
            shares = map(signed, (_error(foreseen if folder.counts_tensors else None, measured), *summary))
            rows.append((phase, *sizes, next(shares), len(found) or "-", *shares))
            lines.append(Series(phase, errors, color))
    plot = Plot("Prediction error of each step", lines, units.percent, from_zero=True)
    return {"made": bool(predicted), "rows": rows, "drawings": draw_all(folder.steps, [plot])}


def _error(predicted: float | None, measured: float | None) -> float | None:
    """Returns how far a prediction lies above what was measured, as a share of that."""
    return None if predicted is None or not measured else predicted / measured - 1


def signed(share: float | None) -> str:
    """Writes a difference as a share with its sign, or a dash for none."""
    return "-" if share is None else f"{share:+.1%}"


def _throughput(folder: RunFolder, failures: Sequence[Record]) -> list[Drawing]:
    records = folder.steps
    lost = dict.fromkeys((float(record["step"]) for record in records), 0.0)
    for event in failures:
        if event["at"] in lost:
            lost[event["at"]] += number(event.get("seconds_lost")) or 0.0
    layers = [Series(name, column(records, f"time/{name}_seconds"), color) for color, name in enumerate(PHASES)]
    waste = Series("lost to failed work", list(lost.values()) if any(lost.values()) else [], 1)
    plots = [
        Plot("Seconds of each step, by phase", layers, "{:.3g} s".format, stacked=True, from_zero=True),
        Plot("Tokens a second", [Series("prompts and completions", _token_rates(records), 0)]),
        Plot("Seconds lost to memory", [waste]),
    ]
    prefix = "time/reward/"
    rewards = sorted({name for record in folder.logs for name in record if name.startswith(prefix)})
    logged = [record for record in folder.logs if any(name in record for name in rewards)]
    called = [
        Series(name.removeprefix(prefix).removesuffix("_seconds"), column(logged, name), place % COLORS)
        for place, name in enumerate(rewards)
    ]
    return draw_all(records, plots) + draw_all(logged, [Plot("Seconds of reward functions", called)])


def _token_rates(records: Sequence[Record]) -> list[float | None]:
    """Returns tokens a second of each rollout: those it added, over the time up to the next one."""
    rates, last, seconds = list[float | None](), 0.0, 0.0
    if records[0].get("step") != 1:
        last = number(records[0].get("num_tokens")) or 0.0
    for record in records:
        seconds += number(record.get("step_time")) or 0.0
        tokens = number(record.get("num_tokens")) or last
        rates.append((tokens - last) / seconds if tokens > last and seconds else None)
        if tokens > last:
            last, seconds = tokens, 0.0
    return rates


def _completions(folder: RunFolder) -> list[tuple[str, list[str], list[list[str]]]]:
    """Returns the best and worst completions of the last and the first logged step: title, columns and rows."""
    found = []
    for step in dict.fromkeys((max(folder.completions), min(folder.completions)) if folder.completions else ()):
        rows = folder.completions[step]
        ranked = sorted(rows, key=lambda row: number(row.get("advantage")) or 0.0, reverse=True)
        shown, which = ranked, ":"
        if len(ranked) > 2 * _SAMPLES_SHOWN:
            shown = [*ranked[:_SAMPLES_SHOWN], *ranked[-_SAMPLES_SHOWN:]]
            which = f", the best {_SAMPLES_SHOWN} and the worst {_SAMPLES_SHOWN} of"
        names = ["prompt", "completion", *(name for name in rows[0] if name not in ("step", "prompt", "completion"))]
        body = [[cell(row.get(name), text=column < 2) for column, name in enumerate(names)] for row in shown]
        found.append((f"Step {step}{which} {len(rows)}, by advantage", names, body))
    return found


def cell(value: Any, *, text: bool = False) -> str:
    """Writes a number with three decimals, or a text: a conversation turn by turn, control characters as codes."""
    if not text:
        return str(value) if number(value) is None else f"{value:.3f}"
    printable = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", chat_text(value))
    return printable if len(printable) <= _COMPLETION_CHARACTERS else printable[:_COMPLETION_CHARACTERS] + " …"
