"""`memsafe-rl doctor`: examines machine and files, and prints what is wrong and what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from memsafe_rl.cli.arguments import read_request, read_run_file, refusal
from memsafe_rl.cli.explain_oom import read_log, sizes_of_model
from memsafe_rl.diagnostics.environment_checks import (
    Environment,
    Expectation,
    Finding,
    Severity,
    check_environment,
    check_expectations,
    check_script,
    in_order,
)
from memsafe_rl.diagnostics.launch_checks import check_launch_file, check_run_file
from memsafe_rl.diagnostics.status import version_of
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.cards import read_cards
from memsafe_rl.units import format_bytes

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "trl", "vllm")
"""Packages whose versions are reported, installed or not."""

_NAME = "memsafe-rl"


@dataclass(frozen=True)
class Examination:
    """The result of an examination."""

    findings: tuple[Finding, ...]  # errors first
    expectations: tuple[Expectation, ...]
    facts: Mapping[str, Any]  # by the names that --expect takes; only a few environment variables
    summary: str

    @property
    def healthy(self) -> bool:
        """Returns whether nothing is wrong and every expectation is met."""
        return not self.findings and all(expectation.met for expectation in self.expectations)


def examine(launch: str | None, run: str | None, script: str | None, expect: Sequence[str]) -> Examination:
    """Examines the machine and the given files."""
    launched = None if launch is None else read_launch_file(Path(launch))  # before torch is imported
    settings = {} if run is None else read_run_file(Path(run))
    of_script = () if script is None else check_script(read_log(script), script)
    environment = gather()
    facts = dict(facts_of(environment))
    findings = list(check_environment(environment))
    parameters = None if settings.get("model") is None else parameters_of(str(settings["model"]))
    content = launched if isinstance(launched, Mapping) else {}
    count = content.get("num_processes")
    processes = count if isinstance(count, int) and count > 0 else 1
    if launch is not None:
        findings += _of_launch_file(launched, launch, environment, parameters)
        facts |= _spelled(content)
    if run is not None:
        findings += check_run_file(settings, run, environment, parameters=parameters, processes=processes)
        try:
            read_request([run])
        except ConfigError as error:  # the trainer itself would refuse it
            what, _, remedy = " ".join(str(error).split()).rpartition(". ")
            what, remedy = (what, remedy) if what else (remedy, "Correct it.")
            findings.append(Finding("run-file", Severity.ERROR, what, run, "Training ends with this error.", remedy))
        facts |= _spelled(settings)
    distinct = tuple(dict.fromkeys((*findings, *of_script)))
    # The rest of the environment stays private: it holds keys and tokens.
    private = {key for key in environment.variables if not key.startswith(("PYTORCH_", "CUDA_", "OMP_", "MKL_"))}
    public = {key: value for key, value in facts.items() if key not in private}
    return Examination(in_order(distinct), check_expectations(expect, facts), public, summary_of(environment))


def _spelled(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the entries of a file as facts; YAML reads an unquoted NO as false, which is undone here."""
    meant = {"distributed_type": "NO", "mixed_precision": "no"}
    return {
        str(key): meant[key] if value is False and key in meant else value
        for key, value in content.items()
        if isinstance(value, (str, int, float, bool))
    }


def _of_launch_file(content: object, name: str, machine: Environment, parameters: int | None) -> tuple[Finding, ...]:
    # accelerate takes seconds to import.
    config = importlib.import_module("accelerate.commands.config.config_args")
    utils = importlib.import_module("accelerate.utils")
    cloud = isinstance(content, Mapping) and content.get("compute_environment") == "AMAZON_SAGEMAKER"
    known = config.SageMakerConfig if cloud else config.ClusterConfig
    kinds = utils.SageMakerDistributedType if cloud else utils.DistributedType
    return check_launch_file(
        content,
        name,
        machine,
        keys=tuple(known.__dataclass_fields__),
        distributed_types=tuple(kind.value for kind in kinds),
        precisions=tuple(kind.value for kind in utils.PrecisionType),
        parameters=parameters,
    )


def read_launch_file(path: Path) -> object:
    """Reads a file of accelerate."""
    refusal.when(not path.is_file(), "accelerate/missing", path=str(path))
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise refusal("accelerate/text", path=path, reason=" ".join(str(error).split())) from None


def parameters_of(model: str) -> int | None:
    """Counts the weights of a network from its sizes."""
    try:
        sizes = sizes_of_model(model)
    except ConfigError:
        return None
    width, hidden, inner, heads = sizes.width_of_head, sizes.hidden, sizes.inner, sizes.heads
    if not (width and hidden and inner and heads and sizes.vocab and sizes.layers):
        return None
    attention = hidden * width * (2 * heads + 2 * (sizes.kv_heads or heads))
    return sizes.vocab * hidden + sizes.layers * (attention + 3 * hidden * inner)


def gather() -> Environment:
    """Reads the machine and its software; needs neither a GPU nor the optional ``nvidia-ml-py``."""
    memory = psutil.virtual_memory()
    required, optional = _requirements()
    packages = (*PACKAGES, *(Requirement(written).name for written in (*required, *optional)))
    backend, usable = _torch()
    return Environment(
        variables=dict(os.environ),
        versions={name: version_of(name) for name in dict.fromkeys(packages)},
        requirements=required,
        optional=optional,
        backend=backend,
        usable_gpus=usable,
        cards=tuple(
            replace(card, processes=tuple(process for process in card.processes if process.pid != os.getpid()))
            for card in read_cards().cards
        ),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_bytes=memory.total,
        host_free_bytes=memory.available,
    )


def _requirements() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reads this library's requirements from its metadata or, if not installed, from the pyproject beside it."""
    try:
        written = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        file = Path(__file__).parents[2] / "pyproject.toml"
        if not file.is_file():
            return (), ()
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return tuple(project["dependencies"]), tuple(project["optional-dependencies"]["quantization"])
    needed = tuple(line for line in written if "extra ==" not in line)
    return needed, tuple(line.partition(";")[0].strip() for line in written if "quantization" in line)


def _torch() -> tuple[str, int]:
    """Returns PyTorch's backend and the number of GPUs it can use."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return "cpu", 0
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "cuda" if torch.version.hip is None else "hip", int(torch.cuda.device_count())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu", int(torch.xpu.device_count())
    return ("mps", 1) if torch.backends.mps.is_available() else ("cpu", 0)


def facts_of(environment: Environment) -> Mapping[str, Any]:
    """Returns the facts that `--expect` may name."""
    cards = environment.cards
    own = {
        "python": platform.python_version(),
        "memsafe_rl": importlib.import_module("memsafe_rl").__version__,
        "backend": environment.backend,
        "gpus": environment.usable_gpus,
        "gpu": cards[0].name if cards else "none",
        "gpu_memory": format_bytes(cards[0].total_bytes) if cards else "0 B",
        "gpu_free": format_bytes(cards[0].free_bytes) if cards else "0 B",
        "cores": environment.cores,
        "ram": format_bytes(environment.host_bytes),
        "ram_free": format_bytes(environment.host_free_bytes),
    }
    versions = {name: version for name, version in environment.versions.items() if version is not None}
    return {**environment.variables, **versions, **own}


def summary_of(environment: Environment) -> str:
    """Describes the machine in a few words."""
    if environment.usable_gpus:
        kinds = ", ".join(dict.fromkeys(card.name for card in environment.cards)) or environment.backend
        gpus = f"{environment.usable_gpus} GPU(s): {kinds}"
    else:
        gpus = "no GPU"
    return (
        f"torch {environment.versions.get('torch')} for {environment.backend}, {gpus}, {environment.cores} cores, "
        f"{format_bytes(environment.host_free_bytes)} of {format_bytes(environment.host_bytes)} RAM free"
    )


def as_json(found: Examination) -> str:
    """Writes an examination as JSON."""
    content = {name: value for name, value in asdict(found).items() if name != "summary"}
    return json.dumps({"healthy": found.healthy, **content}, indent=2)


def show(found: Examination, console: Console) -> None:
    """Prints an examination: one line if healthy, else each finding with its remedy, and unmet expectations."""
    if found.healthy:
        console.print(Text.assemble(("healthy", "bold green"), f": {found.summary}"), soft_wrap=True)
        return
    for finding in found.findings:
        style = "bold red" if finding.severity is Severity.ERROR else "bold yellow"
        console.print(Text.assemble((f"{finding.severity} ", style), (finding.what, "bold")), highlight=False)
        table = Table.grid(Column(style="cyan", no_wrap=True, min_width=8, justify="right"), "", padding=(0, 1))
        for name, text in (("where", finding.where), ("why", finding.why), ("do", finding.remedy)):
            table.add_row(name, Text(text))
        console.print(table)
        console.print()
    differing = [expectation for expectation in found.expectations if not expectation.met]
    if differing:
        table = Table("fact", "expected", "is", title="Not as expected", title_justify="left")
        for fact in differing:
            relation = "" if fact.relation == "=" else f"{fact.relation} "
            table.add_row(fact.key, f"{relation}{fact.value}", "unknown" if fact.actual is None else fact.actual)
        console.print(table)
    console.print(Text(_count(found, len(differing)), style="bold"), highlight=False)
    console.print(found.summary, style="dim", highlight=False, soft_wrap=True)


def _count(found: Examination, differing: int) -> str:
    errors = sum(finding.severity is Severity.ERROR for finding in found.findings)
    named = (
        (errors, "error", "errors"),
        (len(found.findings) - errors, "warning", "warnings"),
        (differing, "fact not as expected", "facts not as expected"),
    )
    return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in named if count)
