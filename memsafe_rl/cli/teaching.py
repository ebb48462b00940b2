"""The help of `memsafe-rl train` (an example, then every setting with its default, in groups) and of `verify`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

import yaml
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from memsafe_rl.cli.arguments import RunFields
from memsafe_rl.config.declaring import Setting, grouped
from memsafe_rl.config.settings import ALGORITHMS, GROUPS, GRPOSettings

_TEXTS: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("templates/help.yaml").read_text("utf-8"))
EXAMPLE: str = _TEXTS["example"]
"""A run file."""
OPTIONS: dict[str, dict[str, Any]] = _TEXTS["options"]
"""Help, and the name of the value, of each option and argument that `app` declares."""


def show_verify_help(console: Console) -> None:
    """Prints the help of `memsafe-rl verify`."""
    _begin(console, "verify_usage", "proof")
    console.print(_panel("Beside the settings of a run", _own_flags()))
    console.print(_TEXTS["exit_codes"], highlight=False)


def show_train_help(console: Console) -> None:
    """Prints the help of `memsafe-rl train`."""
    _begin(console, "train_usage", "story")
    console.print(_panel("Example of a run file", Syntax(EXAMPLE, "yaml", background_color="default", word_wrap=True)))
    console.print(_panel("What to train, and on what", _table(RunFields.declared.values())))
    groups = grouped(GRPOSettings)
    for title in GROUPS:
        console.print(_panel(title, _table(groups[title])))
    grpo = GRPOSettings.declared
    for trainer, settings in ALGORITHMS.items():
        own = [one for name, one in settings.declared.items() if name not in grpo or one.default != grpo[name].default]
        if own:
            told = f"With 'trainer: {trainer.lower()}', in place of what GRPO alone has"
            console.print(_panel(told, _table(own)))
    printing = ("--print-config", "Print the run with every setting resolved, as a run file, and leave.")
    console.print(_panel("Other flags", _own_flags(printing)))
    console.print("A setting of TRL that is missing here is refused by name, with the reason and the nearest way.")


def _begin(console: Console, usage: str, text: str) -> None:
    console.print(Text.assemble(("Usage: ", "bold"), _TEXTS[usage]), "", sep="\n")
    console.print(_TEXTS[text], "", sep="\n", highlight=False)


def _own_flags(*own: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in (("--simulate SIZE", _TEXTS["simulate"]), *own, ("--help", "Show this.")):
        table.add_row(*row)
    return table


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
