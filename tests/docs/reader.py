"""What a reader of the pages has: models on a hub, and files in the working folder."""

from __future__ import annotations

import json
import re
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from datasets import Dataset

from memsafe_rl.cli.arguments import FILE_TYPES
from memsafe_rl.config.base import TrainerConfig
from tests import images

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMIT = "0" * 40
TEXT_MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")
IMAGE_MODEL = "Qwen/Qwen2-VL-2B-Instruct"

TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"

REWARDS = """
from types import SimpleNamespace


def short_answers(completions, **columns):
    return [-len(str(text)) / 100 for text in completions]


async def ask(prompt, completion, answer):
    return SimpleNamespace(score=float(answer in completion), dollars=0.01)


exact = varied = short_answers
client = SimpleNamespace(ask=ask)
"""

SERVER = '''
from mcp.server import MCPServer

server = MCPServer("library")


@server.tool()
def search(words: str) -> str:
    """Searches."""
    return "a page"


@server.tool()
def fetch(page: str) -> str:
    """Fetches."""
    return "its text"


@server.tool()
def delete(page: str) -> str:
    """Deletes."""
    return "gone"


server.run()
'''


def blocks(page: Path, *languages: str) -> list[str]:
    """Returns the fenced blocks of a page in some languages."""
    named = "|".join(languages)
    return re.findall(rf"^```(?:{named})\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def on_the_hub(root: Path, name: str, *parts: Any) -> None:
    """Puts a model into a cache of the hub's, as a download leaves it."""
    repository = root / f"models--{name.replace('/', '--')}"
    for part in parts:
        part.save_pretrained(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def files_of_a_reader(folder: Path) -> None:
    """Writes the files that the pages name."""
    asked = {"prompt": [{"role": "user", "content": "w1 w2"}], "image": "street.png", "answer": "3"}
    (folder / "questions.jsonl").write_text(json.dumps(asked) + "\n")
    sums = [json.dumps({"prompt": f"{a} + {b} =", "answer": str(a + b)}) for a in range(8) for b in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(sums))
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "server.py").write_text(SERVER)
    images.picture(128, 128).save(folder / "street.png")
    (run_file,) = blocks(ROOT / "README.md", "yaml")
    for name in ("run.yaml", "config.yaml"):
        (folder / name).write_text(run_file)
    for name in ("qwen_grpo.yaml", "qwen_grpo.py"):
        shutil.copy(ROOT / "examples" / name, folder)


def cut_short(config: TrainerConfig, real: Any) -> None:
    """Trains one step on short completions where a page leaves that to the defaults."""
    short = {"max_steps": 1, "max_completion_length": 16, "disable_tqdm": True}
    for name, value in short.items():
        if getattr(config, name) == getattr(type(config), name):
            setattr(config, name, value)
    real(config)


def load_dataset(real: Any, name: str, **given: Any) -> Any:
    """Loads files as `datasets` does, and for a name of the hub a row of its columns."""
    if name in FILE_TYPES.values():
        return real(name, **given)
    return Dataset.from_dict({"prompt": ["SUBREDDIT: r/x\n\nTL;DR:"], "completion": [" y"]})


def find_spec(real: Any, name: str, *package: Any) -> Any:
    """Finds vLLM too, of which the pages' settings ask only whether it is there."""
    return ModuleSpec(name, None) if name == "vllm" else real(name, *package)
