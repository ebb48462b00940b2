"""`memsafe-rl report` behind its flags: a run's memory and learning as one HTML page that stands alone."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from memsafe_rl.cli.charts import Limit, Mark, Series, chart
from memsafe_rl.cli.curves import learning_sections
from memsafe_rl.cli.page import document
from memsafe_rl.cli.pieces import (
    Plot,
    bytes_or_dash,
    bytes_text,
    duration,
    grid,
    in_seconds,
    legend,
    line,
    percent,
    short,
    table,
)
from memsafe_rl.cli.run_folder import Record, RunFolder, read_run
from memsafe_rl.diagnostics.run_figures import RunFigures, known, number, phase_peaks, run_figures
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.headroom import headroom_of
from memsafe_rl.units import format_bytes

REPORT_FILE = "report.html"

PHASES = ("load", "rollout", "reward", "score", "update", "optimizer", "evaluate", "checkpoint")
COMPONENTS = ("weights", "optimizer", "gradients", "trajectory", "kv_cache", "logits", "activations", "other")
"""From what stays to what comes and goes, so that the layers below lie still."""

_MOST_MARKS = 200
_MOST_EVENTS = 200
_MOST_NOTES = 12
_NOTABLE_FACTOR = 2.0
"""Change of a plan's sizes from which on it is marked; lengths alone move them by less from step to step."""
_SAMPLES_SHOWN = 3
_COMPLETION_CHARACTERS = 1500
_PLAN_FIELDS_LEFT_OUT = ("event", "step", "kind", "predicted_bytes")


def report(run_dir: str, output: str | None) -> Path:
    """Writes the report of a run."""
    folder = read_run(Path(run_dir))
    target = folder.path / REPORT_FILE if output is None else Path(output)
    try:
        target.write_text(page(folder), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{str(target)!r} cannot be written: {error.strerror}. Give another file with --output."
        ) from None
    return target


def page(folder: RunFolder) -> str:
    """Sets a run's records as a page."""
    rows, events = _rollout_rows(folder), _placed(folder.events)
    figures = run_figures(folder.steps, folder.events, rollout_rows=rows)
    name = folder.path.resolve().name
    sections = (
        ("", _figures(folder, figures)),
        ("Memory", _memory(folder, events)),
        ("Forecast against measured", _forecast(folder)),
        ("What happened", _events(events)),
        *learning_sections(folder),
        ("Throughput", _throughput(folder, events)),
        ("Completions", _completions(folder)),
        ("Plans", _plans(events)),
        ("Configuration", _configuration(folder)),
    )
    return document(f"{name}: report", _heading(folder, name), sections)


# ---------------------------------------------------------------------- head


def _heading(folder: RunFolder, name: str) -> str:
    state, began = str(folder.status.get("state", "")), number(folder.run.get("began"))
    device = folder.run.get("device") or {}
    facts = [str(folder.path.resolve())]
    if began is not None:
        facts.append("begun " + time.strftime("%Y-%m-%d %H:%M", time.localtime(began)))
    if device:
        facts.append(f"{device.get('name')}, {format_bytes(int(device.get('total_bytes', 0)))}")
    if folder.damaged:
        facts.append(f"{folder.damaged} unreadable line(s) left out")
    why = str(folder.status.get("ended_by") or "")
    told = f'<p class="note failure">Stopped by {escape(why)}</p>' if why else ""
    badge = f' <span class="badge {escape(state)}">{escape(state)}</span>' if state else ""
    return f"<h1>{escape(name)}{badge}</h1><p class='dim'>{escape(' · '.join(facts))}</p>{told}"


def _figures(folder: RunFolder, figures: RunFigures) -> str:
    share, error = figures.budget_share, figures.forecast_error
    wanted = number(folder.run.get("max_steps"))
    of_all = f"of {wanted:g}" if wanted else ""
    band = (
        None
        if share is None or figures.budget_bytes is None
        else headroom_of(figures.peak_bytes or 0, figures.budget_bytes)
    )
    of_budget = (
        "" if share is None else f"in {figures.peak_phase}, {share:.1%} of {format_bytes(figures.budget_bytes or 0)}"
    )
    lost = figures.seconds_lost / figures.seconds if figures.seconds else 0.0
    rewards = None if figures.last_reward is None else f"{figures.last_reward:.3f}"
    cards = (
        ("steps", f"{figures.steps}", f"{of_all} in {duration(figures.seconds)}", ""),
        ("peak", bytes_or_dash(figures.peak_bytes), of_budget, "" if band is None else f"band-{band.value}"),
        (
            "forecast",
            bytes_or_dash(figures.forecast_bytes),
            "none was made" if error is None else f"{error:+.1%} off",
            "",
        ),
        (
            "failures survived",
            f"{figures.failures}",
            f"{figures.leaner_plans} leaner plans",
            "warn" if figures.failures else "",
        ),
        ("lost to memory", duration(figures.seconds_lost), f"{lost:.1%} of the time", "warn" if lost > 0.05 else ""),
        (
            "samples a second",
            short(figures.samples_per_second),
            f"{short(figures.tokens_per_second)} tokens a second",
            "",
        ),
        ("reward", rewards or "-", "" if rewards is None else f"from {figures.first_reward:.3f}", ""),
    )
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card {kind}"><b>{escape(title)}</b><span>{escape(value)}</span><i>{escape(note)}</i></div>'
            for title, value, note, kind in cards
        )
        + "</div>"
    )


# ---------------------------------------------------------------------- memory


def _memory(folder: RunFolder, events: Sequence[Record]) -> str:
    records = folder.steps
    if not records:
        return "<p>No step was done.</p>"
    steps = [float(record["step"]) for record in records]
    budget = number(records[-1].get("memory/budget_bytes"))
    limit = None if budget is None else Limit(budget, f"budget {format_bytes(int(budget))}")
    marks = _memory_marks(events, steps)
    layers, about = _layers(folder)
    parts = [f"<h3>Highest moment of each step, {about}</h3>", legend(layers), _mark_legend(marks)]
    parts.append(
        chart(
            steps, layers, write=bytes_text, label="memory over steps", stacked=True, limit=limit, marks=marks, base=2.0
        )
    )
    parts.append(_phases_apart(folder, limit))
    phases = _phase_lines(records)
    parts += [f"<h3>Peak of each phase</h3>{legend(phases)}"]
    parts.append(chart(steps, phases, write=bytes_text, label="peaks by phase", limit=limit, base=2.0, height=240))
    return "".join(parts)


def _layers(folder: RunFolder) -> tuple[list[Series], str]:
    """Gives who held the bytes at each step's highest moment; where nobody wrote it down, the moment alone."""
    held = [_held_at_highest(record) for record in folder.steps]
    if any(held):
        return _parts(folder, held), "by what the bytes are for"
    peaks = [number(record.get("memory/peak_bytes")) for record in folder.steps]
    return [Series("peak", peaks, 7)], "whoever held it"


def _parts(folder: RunFolder, held: Sequence[Mapping[str, int]]) -> list[Series]:
    """Gives a layer for each component."""
    counted = (folder.run.get("device") or {}).get("kind", "simulated") == "simulated"
    rest = "other" if counted else "the rest: activations, caches, logits, gradients"
    if not folder.run.get("counts_tensors", True):
        rest += ", and whatever else the process holds"
    names = [name for name in COMPONENTS if any(parts.get(name) for parts in held)]
    labels = {name: rest if name == "other" else name.replace("_", " ") for name in names}
    return [
        Series(labels[name], [float(parts.get(name, 0)) for parts in held], COMPONENTS.index(name)) for name in names
    ]


def _phases_apart(folder: RunFolder, limit: Limit | None) -> str:
    """Draws the two phases that plans cut, each by what its bytes are for."""
    cells = []
    for phase in ("rollout", "update"):
        there = [record for record in folder.steps if (record.get("held_at_peak") or {}).get(phase)]
        if there:
            layers = _parts(folder, [record["held_at_peak"][phase] for record in there])
            steps = [float(record["step"]) for record in there]
            shape: dict[str, Any] = {"width": 530, "height": 230, "base": 2.0, "limit": limit, "stacked": True}
            drawn = chart(steps, layers, write=bytes_text, label=f"memory of the {phase}", **shape)
            cells.append(f"<figure><h3>Peak of the {phase}, by what it is for</h3>{legend(layers)}{drawn}</figure>")
    return f'<div class="grid2">{"".join(cells)}</div>'


def _held_at_highest(record: Record) -> Mapping[str, int]:
    held, peaks = record.get("held_at_peak") or {}, phase_peaks(record)
    there = [phase for phase in peaks if phase in held]
    return held[max(there, key=lambda phase: peaks[phase])] if there else {}


def _phase_lines(records: Sequence[Record]) -> list[Series]:
    peaks = [phase_peaks(record) for record in records]
    names = [name for name in PHASES if any(name in found for found in peaks)]
    return [
        Series(name, [float(found[name]) if name in found else None for found in peaks], PHASES.index(name))
        for name in names
        if name != "load" or len(peaks) == 1
    ]


def _placed(events: Sequence[Record]) -> list[Record]:
    """Gives events the number of the step they belong to."""
    return [{**event, "at": event["step"] + (0 if _is_after_its_step(event) else 1)} for event in events]


def _is_after_its_step(event: Record) -> bool:
    """Tells whether an event was written once its step was done; most carry the number of steps done before."""
    kind = event.get("event")
    return kind in ("kl_stop", "forecast") or (kind == "alarm" and event.get("kind") != "allocator_retries")


def _memory_marks(events: Sequence[Record], steps: Sequence[float]) -> list[Mark]:
    """Marks failures, alarms, changes of the task, and plans that differ from the one before."""
    found: dict[tuple[float, str], list[str]] = {}
    plans = [plan for plan in _changed_plans(events) if plan["first"] or _notable(plan["changes"])]
    for event in [*plans, *(event for event in events if event.get("event") != "plan")]:
        kind = _kind_of_mark(event)
        if kind is not None and steps[0] - 1 <= event["at"] <= steps[-1] + 1:
            found.setdefault((event["at"], kind), []).append(_sentence(event))
    marks = [Mark(at, kind, f"step {at:g}: " + "\n".join(texts)) for (at, kind), texts in sorted(found.items())]
    urgent = [mark for mark in marks if mark.kind != "plan"]
    return marks if len(marks) <= _MOST_MARKS else urgent[:_MOST_MARKS]


_UNLISTED = ("plan", "forecast")
_MARKED = {
    "plan": "plan",
    "failure": "failure",
    "alarm": "alarm",
    "band": "alarm",
    "degradation": "lossy",
    "kl_stop": "alarm",
}


def _notable(changes: Mapping[str, tuple[Any, Any]]) -> bool:
    """Tells whether a plan works otherwise than before, not only in somewhat larger or smaller pieces."""
    for old, new in changes.values():
        before, after = number(old), number(new)
        if before is None or after is None:
            return True
        if max(before, after) >= _NOTABLE_FACTOR * max(1.0, min(before, after)):
            return True
    return False


def _changed_plans(events: Sequence[Record]) -> list[Record]:
    """Lists plans that cut the work otherwise than the one before of their kind, with what changed."""
    last: dict[str, Record] = {}
    changed: list[Record] = []
    for event in events:
        if event.get("event") != "plan":
            continue
        kind = str(event.get("kind"))
        now = {name: value for name, value in event.items() if name not in (*_PLAN_FIELDS_LEFT_OUT, "at")}
        before = last.get(kind)
        if before is None or before != now:
            differing = {} if before is None else {n: (before.get(n), v) for n, v in now.items() if before.get(n) != v}
            changed.append({**event, "changes": differing, "first": before is None})
        last[kind] = now
    return changed


# ---------------------------------------------------------------------- forecast


def _forecast(folder: RunFolder) -> str:
    highest: dict[str, int] = {}
    for record in folder.steps:
        for name, peak in phase_peaks(record).items():
            highest[name] = max(peak, highest.get(name, 0))
    told = [event for event in folder.events if event.get("event") == "forecast"]
    forecast = (told[-1] if told else folder.run.get("forecast") or {}).get("phases", {})
    rows = []
    for name in (name for name in PHASES if name in highest or name in forecast):
        measured, foreseen = highest.get(name), number(forecast.get(name))
        pairs = _plan_errors(folder.steps, name)
        rows.append(
            (
                name,
                bytes_or_dash(foreseen),
                bytes_or_dash(measured),
                "-" if foreseen is None or not measured else f"{foreseen / measured - 1:+.1%}",
                *_plan_cells(pairs),
            )
        )
    head = (
        "phase",
        "forecast before loading",
        "highest measured",
        "error",
        "steps planned",
        "median error",
        "from",
        "to",
    )
    note = (
        ""
        if forecast
        else ("<p class='dim'>No forecast was made before loading (memory_forecast); plans predicted each step.</p>")
    )
    explained = (
        "<p class='dim'>Error: predicted over measured, less one; above zero more was predicted than was needed. The "
        "right half compares each step's plan with that step.</p>"
    )
    return note + table(head, rows) + explained + _prediction_chart(folder.steps)


def _plan_errors(records: Sequence[Record], phase: str) -> list[float]:
    pairs = (
        (number(record.get(f"memory/{phase}_predicted_bytes")), number(record.get(f"memory/{phase}_peak_bytes")))
        for record in records
    )
    return [predicted / measured - 1 for predicted, measured in pairs if predicted is not None and measured]


def _plan_cells(errors: Sequence[float]) -> tuple[str, ...]:
    if not errors:
        return ("-",) * 4
    return (str(len(errors)), *(f"{value:+.1%}" for value in (statistics.median(errors), min(errors), max(errors))))


def _prediction_chart(records: Sequence[Record]) -> str:
    series = []
    for phase in ("rollout", "score", "update"):
        errors = [
            None if predicted is None or not measured else predicted / measured - 1
            for record in records
            for predicted, measured in [
                (
                    number(record.get(f"memory/{phase}_predicted_bytes")),
                    number(record.get(f"memory/{phase}_peak_bytes")),
                )
            ]
        ]
        if any(error is not None for error in errors):
            series.append(Series(phase, errors, PHASES.index(phase)))
    if not series:
        return ""
    steps = [float(record["step"]) for record in records]
    drawn = chart(steps, series, write=percent, label="error of predictions", height=200)
    return f"<h3>Error of each step's prediction</h3>{legend(series)}{drawn}"


# ---------------------------------------------------------------------- events


def _events(events: Sequence[Record]) -> str:
    urgent: dict[tuple[str, ...], list[Record]] = {}
    for event in events:
        if _kind_of_mark(event) not in (None, "plan", "failure"):
            urgent.setdefault(_sort(event), []).append(event)
    parts = [_note(alike) for alike in list(urgent.values())[:_MOST_NOTES]]
    failures = [event for event in events if event.get("event") == "failure"]
    total = sum(number(event.get("seconds_lost")) or 0.0 for event in failures)
    if not urgent:
        parts.append("<p>No alarm was raised.</p>")
    if failures:
        many = "1 allocation" if len(failures) == 1 else f"{len(failures)} allocations"
        parts.append(f"<p>{many} failed; the work was done again, which cost {duration(total)}.</p>")
    else:
        parts.append("<p>No allocation failed.</p>")
    listed = [event for event in events if event.get("event") not in _UNLISTED]
    if listed:
        rows = [_event_row(event) for event in listed[:_MOST_EVENTS]]
        more = f"the first {_MOST_EVENTS} of " if len(listed) > _MOST_EVENTS else ""
        told = table(("step", "event", "phase", "what"), rows, text_columns=(1, 2, 3))
        parts.append(f"<details><summary>Events besides plans: {more}{len(listed)}</summary>{told}</details>")
    return "".join(parts)


def _sort(event: Record) -> tuple[str, ...]:
    """Gives what makes two events say the same of different steps."""
    return tuple(str(event.get(name)) for name in ("event", "kind", "band", "remedy", "rule", "component"))


def _note(alike: Sequence[Record]) -> str:
    first, last = alike[0], alike[-1]
    kind = "failure" if first.get("band") == "danger" else _kind_of_mark(first)
    when = f"step {first['at']:g}"
    if len(alike) > 1:
        when = f"{len(alike)} times, from step {first['at']:g} to {last['at']:g}, first:"
    return f'<p class="note {kind}"><b>{when}</b> {escape(_sentence(first))}</p>'


def _event_row(event: Record) -> tuple[str, ...]:
    return (f"{event['at']:g}", str(event.get("event")), str(event.get("phase", "")), _sentence(event))


def _kind_of_mark(event: Record) -> str | None:
    """Tells how an event is marked; a band is worth a mark where it is one of danger."""
    kind = str(event.get("event"))
    return None if kind == "band" and event.get("band") != "danger" else _MARKED.get(kind)


def _sentence(event: Record) -> str:
    kind = str(event.get("event"))
    if "sentence" in event:
        return str(event["sentence"])
    if kind == "plan":
        changes = event.get("changes") or {}
        what = "first plan" if event.get("first") else _changes(changes)
        return f"{event.get('kind')}: {what}"
    if kind == "failure":
        asked = number(event.get("requested_bytes"))
        size = "an allocation" if asked is None else format_bytes(int(asked))
        lost = number(event.get("seconds_lost")) or 0.0
        return f"{size} refused in {event.get('phase')}, try {event.get('tries')}; {lost:.2f} s lost"
    if kind == "fallback":
        return f"leaner plan in {event.get('phase')}: {_changes(event.get('changes') or {})}"
    if kind == "retry":
        return f"the same work again in {event.get('phase')}"
    if kind == "degradation":
        return f"the task was changed, as allow_lossy allows: {_changes(event.get('changes') or {})}"
    if kind == "kl_stop":
        measured, target = (short(number(event.get(name))) for name in ("measured", "target"))
        return f"the KL of {measured} passed its bound of {target}: the passes over this rollout ended"
    return kind


def _changes(changes: Mapping[str, Any]) -> str:
    told = []
    for name, change in changes.items():
        old, new = change if isinstance(change, (list, tuple)) and len(change) == 2 else (None, change)
        told.append(f"{name} {_value(name, old)} → {_value(name, new)}")
    return ", ".join(told) or "nothing but its prediction"


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and number(value) is not None:
        return format_bytes(int(value))
    if value is None:
        return "-"
    return "yes" if value is True else "no" if value is False else str(value)


# ---------------------------------------------------------------------- throughput


def _throughput(folder: RunFolder, events: Sequence[Record]) -> str:
    records = folder.steps
    if not records:
        return ""
    steps = [float(record["step"]) for record in records]
    names = [name for name in PHASES if known(records, f"time/{name}_seconds")]
    layers = [
        Series(name, [number(record.get(f"time/{name}_seconds")) or 0.0 for record in records], PHASES.index(name))
        for name in names
    ]
    lost = dict.fromkeys(steps, 0.0)
    for event in events:
        if event.get("event") == "failure" and event["at"] in lost:
            lost[event["at"]] += number(event.get("seconds_lost")) or 0.0
    waste = Series("lost to failed work", [lost[step] for step in steps], 1)
    plots = [Plot("Tokens a second", [Series("prompts and completions", _token_rates(records), 0)])]
    if any(lost.values()):
        plots.append(Plot("Seconds lost to memory", [waste]))
    judges = sorted({name for record in folder.logs for name in record if name.startswith("time/reward/")})
    logged = [record for record in folder.logs if any(name in record for name in judges)]
    called = [
        line(logged, name, name.removeprefix("time/reward/").removesuffix("_seconds"), n)
        for n, name in enumerate(judges)
    ]
    drawn = chart(steps, layers, write=in_seconds, label="seconds by phase", stacked=True, height=220)
    timed = f"<h3>Seconds of each step, by phase</h3>{legend(layers)}{drawn}" if layers else ""
    return timed + grid(records, plots) + grid(logged, [Plot("Seconds of reward functions", called)])


def _token_rates(records: Sequence[Record]) -> list[float | None]:
    """Gives tokens a second of each rollout: those it added, over the time up to the next one."""
    rates, last = list[float | None](), 0.0
    if records and records[0].get("step") != 1:
        last = number(records[0].get("num_tokens")) or 0.0
    seconds = 0.0
    for record in records:
        seconds += number(record.get("step_time")) or 0.0
        tokens = number(record.get("num_tokens")) or last
        rates.append((tokens - last) / seconds if tokens > last and seconds else None)
        if tokens > last:
            last, seconds = tokens, 0.0
    return rates


# ---------------------------------------------------------------------- completions, plans, configuration


def _completions(folder: RunFolder) -> str:
    if not folder.completions:
        return "<p class='dim'>None were kept; log_completions=True keeps them.</p>"
    steps = sorted(folder.completions)
    parts = []
    for step in dict.fromkeys((steps[-1], steps[0])):
        rows = folder.completions[step]
        ranked = sorted(rows, key=lambda row: number(row.get("advantage")) or 0.0, reverse=True)
        shown = ranked if len(ranked) <= 2 * _SAMPLES_SHOWN else [*ranked[:_SAMPLES_SHOWN], *ranked[-_SAMPLES_SHOWN:]]
        which = "" if len(shown) == len(ranked) else f", the best {_SAMPLES_SHOWN} and the worst {_SAMPLES_SHOWN} of"
        names = [name for name in rows[0] if name not in ("step", "prompt", "completion")]
        body = [
            (_text(row.get("prompt")), _text(row.get("completion")), *(_cell(row.get(n)) for n in names))
            for row in shown
        ]
        parts.append(f"<h3>Step {step}{which or ':'} {len(rows)}, by advantage</h3>")
        parts.append(table(("prompt", "completion", *names), body, text_columns=(0, 1), wide=True))
    return "".join(parts)


def _text(value: Any) -> str:
    """Writes a prompt or a completion, a conversation turn by turn; what cannot be printed as its code."""
    if isinstance(value, list):
        turns = (turn if isinstance(turn, Mapping) else {"content": turn} for turn in value)
        value = "\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in turns)
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", str(value))
    return text if len(text) <= _COMPLETION_CHARACTERS else text[:_COMPLETION_CHARACTERS] + " …"


def _cell(value: Any) -> str:
    found = number(value)
    return str(value) if found is None else f"{found:.3f}"


def _plans(events: Sequence[Record]) -> str:
    parts = []
    for kind in ("rollout", "update"):
        plans = [event for event in events if event.get("event") == "plan" and event.get("kind") == kind]
        if not plans:
            continue
        first, last = plans[0], plans[-1]
        names = [name for name in last if name not in (*_PLAN_FIELDS_LEFT_OUT, "at")]
        rows = [(name, _value(name, first.get(name)), _value(name, last.get(name))) for name in names]
        parts.append(f"<figure><h3>Plan of the {kind}</h3>{table(('', 'first', 'last'), rows)}</figure>")
    return f'<div class="grid2">{"".join(parts)}</div>' if parts else "<p class='dim'>No plan was recorded.</p>"


def _configuration(folder: RunFolder) -> str:
    run = folder.run
    if not run:
        return "<p class='dim'>This run wrote no run.json.</p>"
    facts = {**run.get("facts", {}), "command": run.get("command", "")}
    parts = [table(("", ""), [(name, str(value)) for name, value in facts.items()], text_columns=(1,))]
    versions = run.get("versions", {})
    parts.append(table(("", ""), [(name, str(value)) for name, value in versions.items()], text_columns=(1,)))
    settings = [(name, str(value)) for name, value in sorted((run.get("config") or {}).items())]
    listed = table(("setting", "value"), settings, text_columns=(1,))
    parts.append(f"<details><summary>All {len(settings)} settings</summary>{listed}</details>")
    return "".join(parts)


def _rollout_rows(folder: RunFolder) -> int | None:
    rows = number(folder.run.get("rollout_rows"))
    return None if rows is None else int(rows)


def _mark_legend(marks: Sequence[Mark]) -> str:
    words = {"plan": "| another plan", "failure": "▼ failure", "alarm": "● alarm", "lossy": "◆ task changed"}
    there = [kind for kind in words if any(mark.kind == kind for mark in marks)]
    items = (f'<span class="key {kind}">{words[kind]}</span>' for kind in there)
    return f'<p class="legend">{"".join(items)}</p>' if there else ""
