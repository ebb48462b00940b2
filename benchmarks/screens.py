"""What commands print that the pages show, where a test would take too long.

    python -m benchmarks.screens [--only verify]

Runs `memsafe-rl verify` on SmolLM2-135M-Instruct (see `examples.smollm2_grpo`) with the run file of `docs/verify.md`,
and `memsafe-rl plan` for networks larger than their cards. Writes down what each printed, and its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from examples.smollm2_grpo import unpack_model

RESULTS = Path("benchmarks/results/screens.json")
MODEL = Path("outputs/models/SmolLM2-135M-Instruct")
PLAN = "plan --num-generations 8 --prompt-tokens 256 --max-completion-length 1024 --peft lora:16 --json"
COMMANDS = {
    "verify": "verify run.yaml --simulate 4GiB",
    "Qwen3-8B, bf16": f"{PLAN} --model Qwen/Qwen3-8B --gpu 16GiB",
    "Qwen3-14B, bf16": f"{PLAN} --model Qwen/Qwen3-14B --gpu 24GiB",
    "Qwen3-32B, 4 bits": f"{PLAN} --model Qwen/Qwen3-32B --gpu 16GiB --load-in-4bit",
}
TOPICS = ("the sea", "rain", "bread", "clocks", "maps", "bees", "glass", "wind")
REWARDS = "def varied(completions, **columns):\n    return [float(len(str(text)) % 7) for text in completions]\n"


def files_of_the_page(folder: Path) -> None:
    """Writes the run file of the page, the questions and the reward that it names, and a way to the model."""
    page = Path("docs/verify.md").read_text()
    (run_file,) = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "run.yaml").write_text(run_file)
    (folder / "my_rewards.py").write_text(REWARDS)
    asked = [
        f"Explain in a few sentences what people have learnt about {topic} over the centuries." for topic in TOPICS
    ]
    lines = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in asked]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (folder / MODEL.parent).mkdir(parents=True)
    (folder / MODEL).symlink_to(unpack_model(MODEL).resolve())


def shown(command: str, folder: str) -> dict[str, Any]:
    """Runs a command in a folder, and gives what it printed: as a value where that is JSON, else line by line."""
    started = time.perf_counter()
    words = [str(Path(sys.executable).with_name("memsafe-rl")), *command.split()]
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": path}
    done = subprocess.run(words, cwd=folder, env=given, capture_output=True, text=True, check=False)
    one: dict[str, Any] = {"command": f"memsafe-rl {command}", "seconds": time.perf_counter() - started}
    one["exit code"] = done.returncode
    if not command.startswith("plan"):
        return {**one, "lines": [line.rstrip() for line in done.stdout.splitlines()]}
    plan = json.loads(done.stdout)
    kept = ("fits", "predicted_peak_bytes", "reserved_peak_bytes")
    blocks = {name: plan[name]["resident_blocks"] for name in ("rollout_plan", "update_plan")}
    return {**one, **{name: plan[name] for name in kept}, "resident_blocks": blocks}


def main() -> None:
    """Runs the commands, prints what they printed and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    screens = json.loads(given.results.read_text())["screens"] if given.results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        files_of_the_page(Path(folder))
        for name in (name for name in COMMANDS if given.only in name):
            screens[name] = shown(COMMANDS[name], folder)
            print("\n".join(screens[name].get("lines", [json.dumps(screens[name])])))
            found = {"machine": describe_machine(), "screens": screens}
            given.results.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
