"""Checks an accelerate file and a run file for what cannot load, cannot run here, or misleads; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from memsafe_rl.diagnostics.environment_checks import Environment, Finding, check_threads, finding, in_order, nearest
from memsafe_rl.units import format_bytes

_OLD_KEYS = ("fp16", "dynamo_backend")  # keys of earlier versions that accelerate still converts

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
_SEVERAL = "MULTI_"
_SHARDED = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA (TPU)"}
_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DeepSpeed", "megatron_lm_config": "Megatron-LM"}
_MOVED = {
    "gradient_accumulation_steps": "Set gradient_accumulation_steps in the run file or GRPOConfig, where it counts.",
    "gradient_clipping": "Set max_grad_norm in the run file or GRPOConfig.",
    "zero_stage": "It belongs under deepspeed_config, and sharded weights are not supported: remove it.",
    "main_process_ports": "It is called main_process_port.",
    "gpus": "It is called gpu_ids, a string such as '0,1'.",
}

_TRUE = (True, "true", "True", "yes", 1)
_PAGED_BYTES = {"8bit": 2, "32bit": 8}
_SHARDED_OPTIMIZER_BYTES, _HALF_BYTES = 12, 2
_ADAPTER_NAMES = ("peft", "peft_config", "use_peft", "use_lora", "lora_r")


def check_launch_file(
    content: object,
    name: str,
    environment: Environment,
    *,
    keys: Collection[str],
    distributed_types: Collection[str],
    precisions: Collection[str],
    parameters: int | None,
) -> tuple[Finding, ...]:
    """Checks a file of `accelerate launch --config_file`."""
    if not isinstance(content, Mapping):
        kind = "is empty" if content is None else f"holds {type(content).__name__}, not keys and values"
        return (finding("file", kind=kind, name=name),)
    found = [*_unknown_keys(content, name, keys), *_distribution(content, name, distributed_types)]
    found += (*_processes(content, name, environment), *_gpu_ids(content, name, environment))
    found += (*_precision(content, name, precisions), *_sections(content, name))
    found += (*check_threads(environment, _count(content)), *_offloaded_by(content, name, environment, parameters))
    return in_order(found)


def _count(content: Mapping[Any, Any]) -> int:
    count = content.get("num_processes")
    machines = content.get("num_machines") or 1
    if isinstance(count, bool) or not isinstance(count, int) or not isinstance(machines, int):
        return 1
    return max(1, count // max(1, machines))


def _unknown_keys(content: Mapping[Any, Any], name: str, keys: Collection[str]) -> Iterator[Finding]:
    for key in content:
        if key in keys or key in _OLD_KEYS:
            continue
        remedy = _MOVED.get(str(key)) or nearest(str(key), keys, 0.75, "Remove it.")
        yield finding("accelerate-key", key=key, name=name, remedy=remedy)


def _distribution(content: Mapping[Any, Any], name: str, known: Collection[str]) -> Iterator[Finding]:
    kind = content.get("distributed_type")
    if kind is None:
        yield finding("accelerate-distributed/missing", name=name)
    elif kind is False:
        yield finding("accelerate-distributed/unquoted", name=name)
    elif str(kind) in _SHARDED:
        yield finding("accelerate-sharded", kind=kind, name=name, whose=_SHARDED[str(kind)])
    elif str(kind) not in known:
        remedy = nearest(str(kind).upper(), known, 0.5, "Write 'NO' or MULTI_GPU.")
        yield finding("accelerate-distributed/unknown", kind=kind, name=name, remedy=remedy)
    elif str(kind) not in _SUPPORTED:
        yield finding("accelerate-sharded/other", kind=kind, name=name)


def _processes(content: Mapping[Any, Any], name: str, environment: Environment) -> Iterator[Finding]:
    kind, count = str(content.get("distributed_type")), content.get("num_processes")
    if count is None:
        if kind != "NO":
            yield finding("accelerate-processes/missing", kind=kind, name=name)
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        yield finding("accelerate-processes/unreadable", count=count, name=name)
        return
    if kind.startswith(_SEVERAL) and count == 1:
        yield finding("accelerate-one-process", kind=kind, name=name)
    if kind == "NO" and count > 1:
        yield finding("accelerate-processes/one", count=count, name=name)
    here = _count(content)
    if kind == "MULTI_GPU" and environment.usable_gpus and here > environment.usable_gpus:
        yield finding("accelerate-processes/gpus", here=here, gpus=environment.usable_gpus, name=name)
    machines = content.get("num_machines")
    if isinstance(machines, int) and machines > 1 and not content.get("main_process_ip"):
        yield finding("accelerate-machines", machines=machines, name=name)


def _gpu_ids(content: Mapping[Any, Any], name: str, environment: Environment) -> Iterator[Finding]:
    ids = content.get("gpu_ids")
    if ids is None:
        return
    text = ",".join(str(part) for part in ids) if isinstance(ids, (list, tuple)) else str(ids)
    if not isinstance(ids, str):
        yield finding("accelerate-gpu-ids/type", ids=ids, type_name=type(ids).__name__, name=name, text=text)
    named = [part.strip() for part in text.split(",") if part.strip().isdigit()]
    kind = str(content.get("distributed_type"))
    if isinstance(ids, str) and ids != "all" and kind.startswith(_SEVERAL) and len(named) < _count(content):
        yield finding("accelerate-gpu-ids/few", named=len(named), processes=_count(content), name=name)
    cards = max(len(environment.cards), environment.usable_gpus)
    missing = [part for part in named if cards and int(part) >= cards]
    if missing:
        yield finding("accelerate-gpu-ids/missing", missing=missing[0], cards=cards, name=name, last=cards - 1)


def _precision(content: Mapping[Any, Any], name: str, known: Collection[str]) -> Iterator[Finding]:
    precision = content.get("mixed_precision")
    if precision is None:
        return
    if precision is False:
        yield finding("accelerate-precision/unquoted", name=name)
    elif str(precision).lower() not in known:
        remedy = nearest(str(precision).lower(), known, 0.4, "Write bf16, fp16 or 'no'.")
        listed = ", ".join(known)
        yield finding("accelerate-precision/unknown", precision=precision, name=name, known=listed, remedy=remedy)
    elif str(precision).lower() == "fp8":
        yield finding("accelerate-precision/fp8", name=name)


def _sections(content: Mapping[Any, Any], name: str) -> Iterator[Finding]:
    for key, whose in _SECTIONS.items():
        if content.get(key) and str(content.get("distributed_type")) not in _SHARDED:
            yield finding("accelerate-section", key=key, kind=content.get("distributed_type"), name=name, whose=whose)
    if content.get("use_cpu") in _TRUE and str(content.get("distributed_type")) == "MULTI_GPU":
        yield finding("accelerate-cpu", name=name)


def check_run_file(
    run: Mapping[str, Any], name: str, environment: Environment, *, parameters: int | None, processes: int = 1
) -> tuple[Finding, ...]:
    """Checks a run file for contradictions, and for what this machine cannot run."""
    offloads = _host_memory(run, name, environment, parameters, processes)
    return in_order((*_quantization(run, name, environment), *_device_map(run, name, processes), *offloads))


def _model_arguments(run: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = run.get("model_init_kwargs")
    return arguments if isinstance(arguments, Mapping) else {}


def _bits(run: Mapping[str, Any]) -> str | None:
    """Returns the bits in which the base is loaded, wherever they are set; None if unquantised."""
    arguments, given = _model_arguments(run), run.get("quantization")
    possible = (run, arguments, arguments.get("quantization_config"), given)
    places = [place for place in possible if isinstance(place, Mapping)]
    for bits in ("4bit", "8bit"):
        if given == bits or any(place.get(f"load_in_{bits}") in _TRUE for place in places):
            return bits
    return None


def _has_adapter(run: Mapping[str, Any]) -> bool:
    return any(run.get(name) not in (None, False, "", 0) for name in _ADAPTER_NAMES)


def _quantization(run: Mapping[str, Any], name: str, environment: Environment) -> Iterator[Finding]:
    bits = _bits(run)
    if bits is not None and not _has_adapter(run):
        yield finding("quantized-without-adapter", bits=bits, name=name)
    paged = any(part in str(run.get("optim", "")) for part in ("bnb", "paged", "8bit"))
    if (bits is not None or paged) and environment.versions.get("bitsandbytes", "") is None:
        setting = "quantization" if bits is not None else "optim"
        yield finding("package-missing/quantization", name=name, setting=setting)


def _device_map(run: Mapping[str, Any], name: str, processes: int) -> Iterator[Finding]:
    places = _model_arguments(run).get("device_map", run.get("device_map"))
    if isinstance(places, str) and places in ("auto", "balanced", "balanced_low_0", "sequential"):
        yield finding("device-map/spread", places=places, name=name)
    elif isinstance(places, Mapping) and processes > 1 and len({str(place) for place in places.values()}) == 1:
        yield finding("device-map/one-card", place=next(iter(places.values())), processes=processes, name=name)


def _host_memory(
    run: Mapping[str, Any], name: str, environment: Environment, parameters: int | None, processes: int
) -> Iterator[Finding]:
    free = environment.host_free_bytes
    for key, what, size in _offloads(run):
        needed = size * (parameters or 0) * processes
        if needed > free > 0:
            sizes = {"needed": format_bytes(needed), "free": format_bytes(free)}
            yield finding("host-memory", what=what, **sizes, name=name, key=key)


def _offloads(run: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yields what a run file keeps on the host: key, words, bytes per weight of the model."""
    optimizer = str(run.get("optim", ""))
    if "paged" in optimizer and not _has_adapter(run):
        bits = "8bit" if "8bit" in optimizer else "32bit"
        yield "optim", f"the state of {optimizer}, when it is paged out,", _PAGED_BYTES[bits]
    if run.get("vllm_enable_sleep_mode") in _TRUE:
        yield "vllm_enable_sleep_mode", "vLLM's copy of the weights, while it sleeps,", _HALF_BYTES
    sharded = run.get("deepspeed")
    zero = sharded.get("zero_optimization", sharded) if isinstance(sharded, Mapping) else {}
    where = zero.get("offload_optimizer", zero.get("offload_optimizer_device")) if isinstance(zero, Mapping) else None
    if "cpu" in str(where):
        yield "deepspeed", "the optimizer's state, offloaded to the CPU,", _SHARDED_OPTIMIZER_BYTES


def _offloaded_by(
    content: Mapping[Any, Any], name: str, environment: Environment, parameters: int | None
) -> Iterator[Finding]:
    """Checks that the RAM holds what an accelerate file offloads."""
    # Sharded or not, the processes of a machine together hold one optimizer state.
    needed, free = _SHARDED_OPTIMIZER_BYTES * (parameters or 0), environment.host_free_bytes
    sizes = {"needed": format_bytes(needed), "free": format_bytes(free)}
    for section, key in (("deepspeed_config", "offload_optimizer_device"), ("fsdp_config", "fsdp_offload_params")):
        inside = content.get(section)
        asked = isinstance(inside, Mapping) and (inside.get(key) == "cpu" or inside.get(key) in _TRUE)
        if asked and needed > free > 0:
            yield finding("host-memory/offload", **sizes, name=name, section=section, key=key)
