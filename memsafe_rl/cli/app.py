"""The commands. What they run is imported when they run, for seconds go by before torch and transformers are there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from memsafe_rl.cli.arguments import read_request, require
from memsafe_rl.cli.teaching import show_train_help, show_verify_help
from memsafe_rl.errors import ConfigError, MemsafeError

DIFFERENT, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes."""

app = typer.Typer(
    name="memsafe-rl",
    help="Train language models with GRPO inside a memory budget, without changing what is learnt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    """Prints the version and leaves, if wanted."""
    if wanted:
        typer.echo(f"memsafe-rl {importlib.import_module('memsafe_rl').__version__}")
        raise typer.Exit


@app.callback()
def main(
    show: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Train language models with GRPO inside a memory budget, without changing what is learnt."""


class TrainCommand(TyperCommand):
    """A command whose help lists settings instead of options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (the interface of a command)
        """Prints the help."""
        show_train_help(Console())


class VerifyCommand(TyperCommand):
    """A command that takes what `train` takes, and says so instead of listing it again."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (the interface of a command)
        """Prints the help."""
        show_verify_help(Console())


Words = Annotated[list[str] | None, typer.Argument(metavar="", show_default=False)]
Simulate = Annotated[
    str | None, typer.Option("--simulate", help="Run on a simulated device of this size, such as 2GiB, on the CPU.")
]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns what a user can mend into one red line, and an interruption into its exit code."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        yield
    except MemsafeError as error:
        console.print(Text.assemble(("error: ", "bold red"), (" ".join(str(error).split()), "red")))
        raise typer.Exit(MISUSED) from None
    except KeyboardInterrupt:
        console.print("interrupted; go on with --resume-from-checkpoint true")
        raise typer.Exit(INTERRUPTED) from None


@app.command(
    cls=TrainCommand,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[CONFIG.yaml] [--name value ...]",
)
def train(
    words: Words = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved run and leave.")] = False,
    simulate: Simulate = None,
) -> None:
    """Train a model: a run file, flags that override it, or both."""
    with plain_errors():
        request = read_request(words or [])
        if not print_config:
            require(request)
        training = importlib.import_module("memsafe_rl.cli.train")
        run = training.prepare(request, simulate)
        if print_config:
            typer.echo(training.written(run), nl=False)
        else:
            training.train(run, Console())


@app.command(
    cls=VerifyCommand,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[CONFIG.yaml] [--name value ...]",
)
def verify(words: Words = None, simulate: Simulate = None) -> None:
    """Prove on a run's own model that its memory plan changes neither tokens nor gradient; train nothing."""
    with plain_errors():
        request = read_request(words or [])
        require(request)
        training = importlib.import_module("memsafe_rl.cli.train")
        verifying = importlib.import_module("memsafe_rl.cli.verify")
        if not verifying.verify(training.prepare(request, simulate), Console()):
            raise typer.Exit(DIFFERENT)


@app.command(
    "plan",
    context_settings={"ignore_unknown_options": True},
    options_metavar="--model NAME --gpu 24GiB [CONFIG.yaml] [--name value ...]",
    no_args_is_help=True,
)
def plan(
    words: Words = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="SIZE", help="Memory of the card, such as 24GiB.")] = "24GiB",
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", min=1, help="Longest prompt; else the dataset's, max_prompt_length, or 512."),
    ] = None,
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="The base in 4 bits (needs --peft).")] = False,
    reward_model: Annotated[
        list[str] | None,
        typer.Option(
            "--reward-model",
            metavar="NAME",
            help="A sequence classifier that rewards: a known name, a folder or a config.json; may be repeated. Those "
            "among reward_funcs count by themselves.",
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Ranks of the run; the table is that of one of them.")
    ] = 1,
    sharding: Annotated[
        str,
        typer.Option(
            "--sharding",
            metavar="none|zero1|zero2|zero3|fsdp",
            help="What the ranks would share; this library's trainers run under none only.",
        ),
    ] = "none",
    find: Annotated[
        bool, typer.Option("--find", help="Search cards, lengths, groups and ranks too, and prove what is found.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what a run will hold before it starts: no GPU, no weights, no hub.

    Takes the run file and the flags of `memsafe-rl train`. A step is run on tensors that hold no bytes, under the plans
    that the run would make, and every phase is counted.

    Example: memsafe-rl plan --model Qwen/Qwen3-4B --gpu 24GiB --num-generations 8 --max-completion-length 1024 --peft
    lora:16
    """
    with plain_errors():
        request = read_request(words or [])
        planning = importlib.import_module("memsafe_rl.cli.plan")
        wanted = planning.wish(
            request,
            gpu=gpu,
            prompt_tokens=prompt_tokens,
            load_in_4bit=load_in_4bit,
            reward_models=reward_model or (),
            ranks=ranks,
            sharding=sharding,
        )
        forecast, findings = planning.plan(wanted, None if as_json else Console(stderr=True), find=find)
        if as_json:
            typer.echo(planning.as_json(forecast, findings))
        else:
            planning.show(wanted, forecast, findings, Console())
        if not forecast.fits:
            raise typer.Exit(DIFFERENT)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command("explain-oom", no_args_is_help=True)
def explain_oom(
    source: Annotated[
        str, typer.Argument(metavar="FILE|-", help="Log, traceback or message; - reads what is piped or pasted in.")
    ],
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="PATH",
            help="Run folder, run file or config.json that the run had: names the tensor that was asked for.",
        ),
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Rows of the output head.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a micro-batch.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    as_json: Json = False,
) -> None:
    """Say what an out-of-memory message means, which tensor it was, and what to change, best first.

    Reads the wordings of PyTorch 1.x to 2.13 on CUDA, ROCm, XPU, MPS and the CPU; of a whole log, the last message.

    Example: memsafe-rl explain-oom train.log --vocab 40960 --batch 32 --seq-len 252
    """
    with plain_errors():
        explaining = importlib.import_module("memsafe_rl.cli.explain_oom")
        sizes = explaining.Sizes(vocab, batch, seq_len, hidden, heads, layers, dtype)
        found = explaining.explain(source, config, sizes)
        if as_json:
            typer.echo(explaining.as_json(found))
        else:
            explaining.show(found, Console())


@app.command(
    epilog="Exit code: 0 if healthy, 1 if something is wrong or not as expected, 2 if a file cannot be read.",
)
def doctor(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[accelerate FILE]", help="Check a file of `accelerate launch --config_file` as well."),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="RUN.yaml", help="Check a run file of `memsafe-rl train` as well.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option("--script", metavar="TRAIN.py", help="Check whether a script sets PyTorch's allocator in time."),
    ] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            "--expect",
            metavar="KEY=VALUE",
            help="A fact that must hold: torch=2.13.0, gpus>=1, gpu_free>=20GiB, ram>=64GiB, cores, python, a variable "
            "of the environment, or a key of the files, such as distributed_type=NO. May be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for what costs memory, time or a run before it starts: allocator, cards, versions, threads, files.

    Says "healthy" in one line, or what is wrong, where, why it hurts and what to do. Needs no GPU.

    Example: memsafe-rl doctor accelerate launch.yaml --config run.yaml --expect gpus=2
    """
    with plain_errors():
        words = files or []
        if words and (words[0] != "accelerate" or len(words) != 2):
            raise ConfigError(
                f"'doctor {' '.join(words)}' is not understood. Write `memsafe-rl doctor accelerate FILE`."
            )
        examining = importlib.import_module("memsafe_rl.cli.doctor")
        found = examining.examine(words[1] if words else None, config, script, expect or [])
        if as_json:
            typer.echo(examining.as_json(found))
        else:
            examining.show(found, Console())
        if not found.healthy:
            raise typer.Exit(DIFFERENT)


@app.command()
def monitor(
    pid: Annotated[int | None, typer.Option("--pid", min=1, help="Process of the run.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="The run's output_dir.")] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl+C.")] = False,
) -> None:
    """Show how a run stands: card, budget, peaks by phase, retries, other processes, and what to do, if anything.

    With neither --pid nor --run, your only run that is alive on this machine; with several, a list of them.

    Example: memsafe-rl monitor --run outputs/run --watch
    """
    with plain_errors():
        monitoring = importlib.import_module("memsafe_rl.cli.monitor")
        monitoring.monitor(pid, run, json_output=as_json, watch=watch, console=Console())


@app.command(no_args_is_help=True)
def report(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run's output_dir.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write; report.html in RUN_DIR if left out."),
    ] = None,
) -> None:
    """Write a run's memory and learning as one HTML page that needs no network; works while the run trains, too.

    Example: memsafe-rl report outputs/run
    """
    with plain_errors():
        reporting = importlib.import_module("memsafe_rl.cli.report")
        typer.echo(str(reporting.report(run_dir, output)))
