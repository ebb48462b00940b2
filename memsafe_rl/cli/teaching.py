"""The help of `memsafe-rl train` (an example, then every setting with its default, in groups) and of `verify`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from memsafe_rl.cli.arguments import RunFields
from memsafe_rl.config.declaring import Setting, grouped
from memsafe_rl.config.settings import GROUPS, GRPOSettings, PPOSettings

EXAMPLE = """\
model: Qwen/Qwen3-0.6B              # or a folder
dataset: prompts.jsonl              # column 'prompt'; the others reach the rewards
reward_funcs:
  - my_rewards:exact_answer         # (prompts, completions, **columns) -> list of numbers
  - think_format_reward
peft: lora:16

output_dir: runs/first
num_generations: 8                  # completions per prompt
per_device_train_batch_size: 8      # completions per rank and accumulation step
gradient_accumulation_steps: 4      # 32 completions per optimizer step
max_completion_length: 512          # tokens
learning_rate: 1e-5
memory_budget: 16GiB                # how it is spent is the library's business
"""

_USAGE = "memsafe-rl train [CONFIG.yaml] [--name value ...] [--print-config] [--simulate SIZE]"
_VERIFY_USAGE = "memsafe-rl verify [CONFIG.yaml] [--name value ...] [--simulate SIZE]"

_SIMULATE = (
    "Run on a simulated device of this size, such as 2GiB, on the CPU, and print at the end what it held: for trying "
    "a memory policy on a laptop."
)

_STORY = (
    "Trains a language model with GRPO inside a memory budget. Everything below may stand in the run file, as "
    "'name: value', or be given as a flag, which overrides the file. You say what to learn; the library decides how "
    "it is cut to fit memory, which never changes the result."
)


_PROOF = (
    "Samples completions for the first prompts of a run and takes their gradient three times: under the plain plan "
    "(everything at once), under the plan that the memory policy chooses, and under that plan with an out-of-memory "
    "error in the rollout and one in the backward pass. Prints tokens, gradients, bytes and seconds side by side. "
    "Advantages are made up; no reward function is called, no weight moves, and nothing is written. Takes the run file "
    "and flags of `memsafe-rl train`."
)

_EXIT_CODES = "Exit code: 0 if the plans are equal within the tolerance, 1 if they are not, 2 if the run cannot work."


def show_verify_help(console: Console) -> None:
    """Prints the help of `memsafe-rl verify`."""
    console.print(Text.assemble(("Usage: ", "bold"), _VERIFY_USAGE))
    console.print()
    console.print(_PROOF, highlight=False)
    console.print()
    own = Table.grid(padding=(0, 2))
    own.add_row("--simulate SIZE", _SIMULATE)
    own.add_row("--help", "Show this.")
    console.print(_panel("Beside the settings of a run", own))
    console.print(_EXIT_CODES, highlight=False)


def show_train_help(console: Console) -> None:
    """Prints the help of `memsafe-rl train`."""
    console.print(Text.assemble(("Usage: ", "bold"), _USAGE))
    console.print()
    console.print(_STORY, highlight=False)
    console.print()
    console.print(_panel("Example of a run file", Syntax(EXAMPLE, "yaml", background_color="default")))
    console.print(_panel("What to train, and on what", _table(RunFields.declared.values())))
    groups = grouped(GRPOSettings)
    for title in GROUPS:
        console.print(_panel(title, _table(groups[title])))
    grpo = GRPOSettings.declared
    ppo = [one for name, one in PPOSettings.declared.items() if name not in grpo or one.default != grpo[name].default]
    console.print(_panel("With 'trainer: ppo', in place of a group's advantages and losses", _table(ppo)))
    own = Table.grid(padding=(0, 2))
    own.add_row("--simulate SIZE", _SIMULATE)
    own.add_row("--print-config", "Print the run with every setting resolved, as a run file, and leave.")
    own.add_row("--help", "Show this.")
    console.print(_panel("Other flags", own))
    console.print("A setting of TRL that is missing here is refused by name, with the reason and the nearest way.")


def _panel(title: str, body: RenderableType) -> Panel:
    return Panel(Group(body), title=escape(title), title_align="left", border_style="dim")


def _table(settings: Iterable[Setting]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for one in settings:
        text = Text(one.help)
        if one.default not in (None, ()):
            text.append(f" [default: {_shown(one.default)}]", style="dim")
        table.add_row(f"--{one.name.replace('_', '-')}", text)
    return table


def _shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)
