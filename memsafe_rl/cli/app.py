"""The commands and their flags; each imports its module when it runs, since torch and transformers take seconds."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from memsafe_rl.cli.arguments import RunFields, of_a_plan, read_request, refusal, require
from memsafe_rl.config.declaring import Setting, check_choice, grouped
from memsafe_rl.config.settings import ALGORITHMS, GROUPS, GRPOSettings
from memsafe_rl.errors import INTERRUPTED_CODE, MemsafeError, TrainingInterrupted, texts_beside
from memsafe_rl.preflight.cards import read_card

_TEXTS: dict[str, Any] = texts_beside(__file__, "templates/help.yaml")
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
            console.print(_panel(f"With 'trainer: {trainer.lower()}', in place of what GRPO alone has", _table(own)))
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
            shown = str(one.default).lower() if isinstance(one.default, bool) else one.default
            text.append(f" [default: {shown}]", style="dim")
        table.add_row(f"--{one.name.replace('_', '-')}", text)
    return table


DIFFERENT, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes."""

_Misuse: Any = typer.BadParameter.__base__  # typer has a copy of click of its own, or uses click's, by its version


class Commands(TyperGroup):
    """The commands; a wrong one, or a wrong option, ends in one line like every mistake of a user."""

    def main(self, *words: Any, **more: Any) -> Any:
        """Runs a command, and ends the process."""
        try:
            code = super().main(*words, **{**more, "standalone_mode": False})
        except _Misuse as error:
            if text := " ".join(error.format_message().split()):  # empty where the help has just been shown
                path = self.name if error.ctx is None else error.ctx.command_path
                show_error(f"{text.rstrip('.')}. See `{path} --help`.")
            code = MISUSED
        except typer.Abort:
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="memsafe-rl",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a docstring's paragraph
    pretty_exceptions_enable=False,
)


def command(name: str, room: str = "cli") -> Any:
    """Imports the module of a command; what it brings along stays, and no later search for garbage looks at it."""
    module = importlib.import_module(f"memsafe_rl.{room}.{name}")
    if not gc.isenabled():  # by `main`, whose process holds nothing else yet
        gc.freeze()
        gc.enable()
    return module


def show_version(requested: bool) -> None:
    """Prints the version and exits, if requested."""
    if requested:
        typer.echo(f"memsafe-rl {importlib.import_module('memsafe_rl').__version__}")
        raise typer.Exit


def option(words: str, *flags: str, **more: Any) -> Any:
    """Declares an option whose words `templates/help.yaml` has."""
    return typer.Option(*flags, **OPTIONS[words], **more)  # type: ignore[misc]


@app.callback()
def main(show: Annotated[bool, option("version", "--version", callback=show_version, is_eager=True)] = False) -> None:
    """Train models with GRPO, RLOO and PPO within a memory budget, without changing the mathematics."""


class RunCommand(TyperCommand):
    """A command whose help is about the settings of a run rather than options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (the interface of a command)
        """Prints the help."""
        (show_train_help if self.name == "train" else show_verify_help)(Console())


_TAKES_SETTINGS: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}
Words = Annotated[list[str] | None, typer.Argument(metavar="--name value", hidden=True)]
Json = Annotated[bool, option("json", "--json")]
Simulate = Annotated[str | None, option("simulate")]


def tell(module: Any, as_json: bool, found: Any) -> None:
    """Prints what a command found, as JSON or as text."""
    if as_json:
        typer.echo(module.as_json(found))
    else:
        module.show(found, Console())


def show_error(text: str) -> None:
    """Prints an error as one red line."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), (" ".join(text.split()), "red")))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Prints a user's error as one red line, and a warning as one line; exits with the matching code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries; a user can do nothing about them
            warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
            yield
    except TrainingInterrupted:
        raise typer.Exit(INTERRUPTED_CODE) from None  # the run has said what was saved
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        text = str(error) if isinstance(error, MemsafeError) else _of_a_reward(error)
        if not text:  # a defect of this library keeps its traceback
            raise
        show_error(text)
        raise typer.Exit(MISUSED) from None


def _of_a_reward(error: Exception) -> str:
    """Says where a reward function raised an error; empty where it was not one."""
    text = ""
    for caller, one in pairwise(extract_tb(error.__traceback__)):
        if Path(caller.filename).parts[-2:] == ("rewards", "calls.py") and one.filename != caller.filename:
            text = (
                f"reward function {one.name!r} raised {type(error).__name__}: {error} ({one.filename}:{one.lineno}). "
                "Mend it there, or catch the error and return None to leave a row out."
            )
    return text


@app.command(cls=RunCommand, **_TAKES_SETTINGS, options_metavar="[CONFIG.yaml]")
def train(
    words: Words = None,
    print_config: Annotated[bool, option("print config", "--print-config")] = False,
    simulate: Simulate = None,
) -> None:
    """Train a model: a run file, flags that override it, or both."""
    with plain_errors():
        request = read_request(words or [])
        if not print_config:
            require(request)
        module = command("train")
        run = module.prepare(request, simulate)
        if print_config:
            typer.echo(module.written(run), nl=False)
        else:
            module.train(run, Console())


@app.command(cls=RunCommand, **_TAKES_SETTINGS, options_metavar="[CONFIG.yaml]")
def verify(words: Words = None, simulate: Simulate = None) -> None:
    """Prove on the run's own model that its memory plan changes neither tokens nor gradients; trains nothing."""
    with plain_errors():
        request = read_request(words or [])
        require(request)
        if not (module := command("train")).verify(module.prepare(request, simulate), Console()):
            raise typer.Exit(DIFFERENT)


@app.command("plan", **_TAKES_SETTINGS, options_metavar="--model NAME --gpu 24GiB [CONFIG.yaml]", no_args_is_help=True)
def plan(
    words: Words = None,
    gpu: Annotated[str, option("gpu of a plan")] = "24GiB",
    prompt_tokens: Annotated[int | None, option("prompt tokens", min=1)] = None,
    load_in_4bit: Annotated[bool, option("load in 4 bits", "--load-in-4bit")] = False,
    reward_model: Annotated[list[str] | None, option("reward model")] = None,
    ranks: Annotated[int, option("ranks", min=1)] = 1,
    sharding: Annotated[str, option("sharding")] = "none",
    servers: Annotated[bool, option("servers", "--servers")] = False,
    find: Annotated[bool, option("find", "--find")] = False,
    as_json: Json = False,
) -> None:
    """Forecast a run's memory before it starts: no GPU, no weights, no hub.

    Takes the run file and the flags of `memsafe-rl train`, runs one step on tensors without bytes under the run's own
    plans, and counts every phase.

    Example: memsafe-rl plan --model Qwen/Qwen3-4B --gpu 24GiB --num-generations 8 --max-completion-length 1024 --peft
    lora:16
    """
    with plain_errors():
        asked = of_a_plan(read_request(words or []), load_in_4bit=load_in_4bit, servers=servers)
        card = read_card(gpu)
        module = command("plan")
        given = {"prompt_tokens": prompt_tokens, "reward_models": reward_model or (), "ranks": ranks}
        wish = module.wish(asked, card=card, sharding=sharding, **given)
        forecast, findings = module.plan(wish, None if as_json else Console(stderr=True), find=find)
        if as_json:
            typer.echo(module.as_json(forecast, findings))
        else:
            module.show(wish, forecast, findings, Console())
        if not forecast.fits:
            raise typer.Exit(DIFFERENT)


@app.command(**_TAKES_SETTINGS, options_metavar="--model NAME --dataset FILE --reward-funcs NAME")
def init(
    words: Words = None,
    gpu: Annotated[str, option("gpu")] = "24GiB",
    output: Annotated[str, option("output of init", "--output", "-o")] = "run.yaml",
) -> None:
    """Write a commented run file that fits a card: all weights if the forecast allows, else LoRA, else 4 bits.

    Asks for what is missing when run on a terminal; any setting of `memsafe-rl train` may be given as a flag.

    Example: memsafe-rl init --model Qwen/Qwen3-4B --dataset prompts.jsonl --reward-funcs my_rewards:exact --gpu 24GiB
    """
    with plain_errors():
        request, card = read_request(words or []), read_card(gpu)
        command("init").init(request, card, Path(output), Console())


@app.command("explain-oom", no_args_is_help=True)
def explain_oom(
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="Log, traceback or message; - reads standard input.")],
    config: Annotated[str | None, option("config of a failure")] = None,
    vocab: Annotated[int | None, typer.Option(help="Rows of the output head.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per micro-batch.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    as_json: Json = False,
) -> None:
    """Explain an out-of-memory message: why it failed, which tensor it was, and what to change, best first.

    Reads the messages of PyTorch 1.x to 2.13 on CUDA, ROCm, XPU, MPS and the CPU; in a whole log, the last one.

    Example: memsafe-rl explain-oom train.log --vocab 40960 --batch 32 --seq-len 252
    """
    with plain_errors():
        module = command("explain_oom")
        sizes = {"vocab": vocab, "batch": batch, "seq_len": seq_len, "hidden": hidden, "heads": heads, "layers": layers}
        tell(module, as_json, module.explain(source, config, dtype, sizes))


@app.command(epilog="Exit code: 0 if healthy, 1 if something is wrong or not as expected, 2 if a file cannot be read.")
def doctor(
    files: Annotated[list[str] | None, typer.Argument(**OPTIONS["accelerate"])] = None,
    config: Annotated[str | None, option("config to check")] = None,
    script: Annotated[str | None, option("script")] = None,
    expect: Annotated[list[str] | None, option("expect")] = None,
    as_json: Json = False,
) -> None:
    """Check the environment for what costs memory, time or a run: allocator, cards, versions, threads, files.

    Prints "healthy", or what is wrong, where, why it matters and what to do. Needs no GPU.

    Example: memsafe-rl doctor accelerate launch.yaml --config run.yaml --expect gpus=2
    """
    with plain_errors():
        words = files or []
        refusal.when(words and (words[0] != "accelerate" or len(words) != 2), "doctor", words=" ".join(words))
        module = command("doctor")
        found = module.examine(words[1] if words else None, config, script, expect or [])
        tell(module, as_json, found)
        if not found.healthy:
            raise typer.Exit(DIFFERENT)


@app.command()
def monitor(
    pid: Annotated[int | None, option("pid", min=1)] = None,
    run: Annotated[str | None, option("run")] = None,
    as_json: Json = False,
    watch: Annotated[bool, option("watch", "--watch")] = False,
) -> None:
    """Show a run's status: card, budget, peaks by phase, retries, other processes, and advice.

    Without --pid or --run: your only live run on this machine, or a list if there are several.

    Example: memsafe-rl monitor --run outputs/run --watch
    """
    with plain_errors():
        command("monitor").monitor(pid, run, json_output=as_json, watch=watch, console=Console())


@app.command(no_args_is_help=True)
def report(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run's output_dir.")],
    output: Annotated[str | None, option("output of report", "--output", "-o")] = None,
) -> None:
    """Write a run's memory and learning as one self-contained HTML page; works during training too.

    Example: memsafe-rl report outputs/run
    """
    with plain_errors():
        typer.echo(str(command("report").report(run_dir, output)))


@app.command(no_args_is_help=True)
def export(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's output_dir, or a checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="A new folder.")],
    dtype: Annotated[str | None, option("dtype of export")] = None,
    trust_remote_code: Annotated[bool, option("trust_remote_code of export", "--trust-remote-code")] = False,
) -> None:
    """Write a run's weights as one folder that transformers and vLLM load: adapter merged, with a model card.

    Example: memsafe-rl export outputs/run outputs/merged --dtype bfloat16
    """
    with plain_errors():
        if dtype is not None:
            check_choice("--dtype", dtype, ("float32", "bfloat16", "float16"))
        refusal.when(not Path(source).is_dir(), "export", source=source)
        chosen = {"trust_remote_code": trust_remote_code}
        typer.echo(str(command("export", "checkpoint").export(source, target, dtype, **chosen)))
