"""Draws the README's picture and writes its table from result files: memory on ever smaller devices, and beside TRL.

    python -m benchmarks.front_page

`tests/test_docs.py` holds the README to what this gives.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README, PICTURES = ROOT / "README.md", ROOT / "docs" / "figures"
LAYOUTS: dict[str, dict[str, Any]] = {  # one picture beside the text, and one whose lettering a phone can show
    "front_page.png": {"nrows": 1, "ncols": 2, "figsize": (11, 3.6), "width_ratios": (1.15, 1)},
    "front_page_narrow.png": {"nrows": 2, "ncols": 1, "figsize": (4.4, 6.4)},
}
MARKER = re.compile(r"(<!-- beside-trl -->\n).*?(<!-- /beside-trl -->)", re.S)
SETTINGS = {
    "ragged-lora": "Qwen3 17M, LoRA, completions of uneven length",
    "even-lora": "Qwen3 17M, LoRA, all of full length",
    "ragged-full": "Qwen3 17M, all weights, uneven length",
    "smollm2": "SmolLM2-135M, LoRA, six-shot prompts",
}
OURS, THEIRS, REFUSED = "#2563eb", "#9ca3af", "#dc2626"


def results(name: str) -> dict[str, Any]:
    """Reads a result file."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def table() -> str:
    """Returns the rows of the README's table, as Markdown."""
    lines = ["| peak memory above the weights | here | TRL 1.16 | ratio | ratio of times |", "|---|---|---|---|---|"]
    for name, text in SETTINGS.items():
        sides = results("step")["results"][name]["sides"]
        ours, theirs = sides["memsafe_rl"], sides["TRL, defaults"]
        peaks = [side["peak_bytes"] / 1e6 for side in (ours, theirs)]
        seconds = ours["cpu_ms_per_token"] / theirs["cpu_ms_per_token"]
        lines.append(
            f"| {text} | **{peaks[0]:,.0f} MB** | {peaks[1]:,.0f} MB | {peaks[0] / peaks[1]:.2f} | {seconds:.2f} |"
        )
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """Returns a README with the table that follows from the result files."""
    return MARKER.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", readme)


def draw(name: str) -> None:
    """Draws a run on ever smaller devices beside its peak, and the peaks of a step beside TRL's."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(**LAYOUTS[name], layout="constrained")
    run = results("capacity_sweep")["full"]
    rows = [row for row in run["rows"] if row["share"] not in ("80%", "60%", "30%")]
    places = range(len(rows))
    left.bar(places, [row["capacity_bytes"] / 1e6 for row in rows], color="none", edgecolor="#374151", label="device")
    colors = [OURS if row["finished"] else REFUSED for row in rows]
    left.bar(places, [row["peak_bytes"] / 1e6 for row in rows], width=0.62, color=colors, label="peak of the run")
    for place, row in zip(places, rows, strict=True):
        if row["tokens_equal"]:
            left.text(place, row["capacity_bytes"] / 1e6 + 1, "✓", ha="center", color=OURS, fontsize=15)
        else:
            left.text(place, 2, "refused", ha="center", color="white", fontsize=9, rotation=90)
    left.text(1.0, 98, "✓ the same tokens, weights within 3e-5", color=OURS)
    left.axhline(run["state_bytes"] / 1e6, color="#374151", linestyle=":", linewidth=1)
    state = run["state_bytes"] / 1e6
    left.text(len(rows) - 0.4, state + 2, "weights,\ngradients,\noptimizer state", fontsize=9, va="bottom")
    left.set_xticks(places, [f"{row['capacity_bytes'] / 1e6:.0f}" for row in rows])
    left.set(ylabel="MB", xlabel="memory of the device, MB", ylim=(0, 112), xlim=(-0.6, len(rows) + 0.8))
    left.set_title("One run on ever smaller devices", loc="left", fontweight="bold")
    steps = results("step")["results"]
    names = list(reversed(SETTINGS))
    for offset, side, color, label in (
        (0.05, "memsafe_rl", OURS, "memsafe_rl"),
        (-0.25, "TRL, defaults", THEIRS, "TRL 1.16"),
    ):
        sizes = [steps[name]["sides"][side]["peak_bytes"] / 1e6 for name in names]
        bars = right.barh([place + offset for place in range(len(names))], sizes, height=0.28, color=color, label=label)
        right.bar_label(bars, [f" {size:,.0f}" for size in sizes], fontsize=9)
    for place, setting in enumerate(names):  # above its bars, where a narrow picture has room for it
        right.text(0, place + 0.24, f" {SETTINGS[setting]}", fontsize=9, va="bottom")
    right.set_yticks([])
    right.set(xlabel="peak above the weights, MB", xlim=(0, 2450), ylim=(-0.5, len(names) - 0.3))
    right.set_title("One step beside TRL", loc="left", fontweight="bold")
    right.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(PICTURES / name, dpi=160, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Writes pictures and table."""
    for name in LAYOUTS:
        draw(name)
    README.write_text(with_table(README.read_text()))
    print(f"{', '.join(LAYOUTS)} and the table of {README.name} are written")


if __name__ == "__main__":
    main()
