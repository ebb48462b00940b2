"""Checks an accelerate file and a run file for what cannot load, cannot run here, or misleads; pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from memsafe_rl.diagnostics.environment_checks import Environment, Finding, Severity, check_threads, in_order
from memsafe_rl.units import format_bytes

_OLD_KEYS = ("fp16", "dynamo_backend")
"""Keys of earlier versions that accelerate still converts."""

_REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")
_SEVERAL = "MULTI_"
_SHARDED = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA (TPU)"}
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
) -> tuple[Finding, ...]:
    """Checks a file of `accelerate launch --config_file`."""
    if not isinstance(content, Mapping):
        kind = "is empty" if content is None else f"holds {type(content).__name__}, not keys and values"
        return (_error("file", f"the file {kind}", name, "accelerate cannot load it.", "Write lines 'key: value'."),)
    return in_order(
        (
            *_unknown_keys(content, name, keys),
            *_distribution(content, name, distributed_types),
            *_processes(content, name, environment),
            *_gpu_ids(content, name, environment),
            *_precision(content, name, precisions),
            *_sections(content, name),
            *check_threads(environment, _count(content)),
        )
    )


def _error(code: str, what: str, where: str, why: str, remedy: str) -> Finding:
    return Finding(code, Severity.ERROR, what, where, why, remedy)


def _warning(code: str, what: str, where: str, why: str, remedy: str) -> Finding:
    return Finding(code, Severity.WARNING, what, where, why, remedy)


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
        near = difflib.get_close_matches(str(key), list(keys), n=1, cutoff=0.75)
        remedy = _MOVED.get(str(key)) or (f"Write {near[0]}." if near else "Remove it.")
        yield _error(
            "accelerate-key",
            f"accelerate has no key {key!r}",
            f"{name}: {key}",
            "accelerate refuses the whole file, and the launch fails before the script starts.",
            remedy,
        )


def _distribution(content: Mapping[Any, Any], name: str, known: Collection[str]) -> Iterator[Finding]:
    kind, where = content.get("distributed_type"), f"{name}: distributed_type"
    if kind is None:
        yield _error(
            "accelerate-distributed",
            "distributed_type is missing",
            where,
            "accelerate refuses the file.",
            "Write distributed_type: 'NO' for one process, MULTI_GPU for several.",
        )
    elif kind is False:
        yield _error(
            "accelerate-distributed",
            "distributed_type is false: YAML reads NO without quotes as false",
            where,
            "accelerate does not recognise the launch type, and the defaults for one process do not apply.",
            "Write distributed_type: 'NO', with quotes.",
        )
    elif str(kind) in _SHARDED:
        yield _error(
            "accelerate-sharded",
            f"distributed_type is {kind}",
            where,
            f"{_SHARDED[str(kind)]} shards weights, which is not supported: every rank holds them all.",
            "Launch with 'NO' or MULTI_GPU; make the model smaller with peft and quantization.",
        )
    elif str(kind) not in known:
        near = difflib.get_close_matches(str(kind).upper(), list(known), n=1, cutoff=0.5)
        yield _error(
            "accelerate-distributed",
            f"distributed_type is {kind!r}, which accelerate does not know",
            where,
            "accelerate refuses the file.",
            f"Write {near[0]}." if near else "Write 'NO' or MULTI_GPU.",
        )
    elif str(kind) not in _REPLICATED:
        yield _error(
            "accelerate-sharded",
            f"distributed_type is {kind}",
            where,
            "This library runs one process, or replicated data parallelism on GPUs and CPUs.",
            "Write 'NO', MULTI_GPU or MULTI_CPU.",
        )


def _processes(content: Mapping[Any, Any], name: str, environment: Environment) -> Iterator[Finding]:
    kind, count, where = str(content.get("distributed_type")), content.get("num_processes"), f"{name}: num_processes"
    if count is None:
        if kind != "NO":
            yield _error(
                "accelerate-processes",
                f"num_processes is missing with distributed_type {kind}",
                where,
                "accelerate requires it.",
                "Write the number of GPUs, such as num_processes: 2.",
            )
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        yield _error(
            "accelerate-processes",
            f"num_processes is {count!r}, not a number of 1 or more",
            where,
            "No process can start.",
            "Write the number of processes, such as 1.",
        )
        return
    if kind.startswith(_SEVERAL) and count == 1:
        yield _error(
            "accelerate-one-process",
            f"distributed_type is {kind} with one process",
            where,
            "The file asks for several processes, but only one card works.",
            "Write distributed_type: 'NO', or the intended number of processes.",
        )
    if kind == "NO" and count > 1:
        yield _error(
            "accelerate-processes",
            f"num_processes is {count} with distributed_type NO",
            where,
            "Only one process starts, whatever the number.",
            "Write distributed_type: MULTI_GPU, or num_processes: 1.",
        )
    here = _count(content)
    if kind == "MULTI_GPU" and environment.usable_gpus and here > environment.usable_gpus:
        yield _error(
            "accelerate-processes",
            f"{here} processes per machine on {environment.usable_gpus} usable GPU(s)",
            where,
            "Two processes would share a card, or the launch fails.",
            f"Write num_processes: {environment.usable_gpus}.",
        )
    machines = content.get("num_machines")
    if isinstance(machines, int) and machines > 1 and not content.get("main_process_ip"):
        yield _warning(
            "accelerate-machines",
            f"num_machines is {machines}, but main_process_ip is missing",
            f"{name}: num_machines",
            "The machines cannot find each other.",
            "Write main_process_ip and main_process_port, or num_machines: 1.",
        )


def _gpu_ids(content: Mapping[Any, Any], name: str, environment: Environment) -> Iterator[Finding]:
    ids, where = content.get("gpu_ids"), f"{name}: gpu_ids"
    if ids is None:
        return
    if not isinstance(ids, str):
        text = ",".join(str(part) for part in ids) if isinstance(ids, (list, tuple)) else str(ids)
        yield _error(
            "accelerate-gpu-ids",
            f"gpu_ids is {ids!r}, a {type(ids).__name__} instead of a string",
            where,
            "accelerate splits it as a string, and the launch fails with AttributeError.",
            f"Write gpu_ids: '{text}'.",
        )
    else:
        text = ids
    named = [part.strip() for part in text.split(",") if part.strip().isdigit()]
    kind = str(content.get("distributed_type"))
    if isinstance(ids, str) and ids != "all" and kind.startswith(_SEVERAL) and len(named) < _count(content):
        yield _error(
            "accelerate-gpu-ids",
            f"gpu_ids names {len(named)} card(s) for {_count(content)} processes",
            where,
            "Every process needs its own card.",
            "Name as many cards as processes, or write gpu_ids: all.",
        )
    cards = max(len(environment.cards), environment.usable_gpus)
    missing = [part for part in named if cards and int(part) >= cards]
    if missing:
        yield _error(
            "accelerate-gpu-ids",
            f"gpu_ids names card {missing[0]}, and there are {cards}, counted from 0",
            where,
            "CUDA reports only the cards before the first missing one.",
            f"Name cards from 0 to {cards - 1}.",
        )


def _precision(content: Mapping[Any, Any], name: str, known: Collection[str]) -> Iterator[Finding]:
    precision, where = content.get("mixed_precision"), f"{name}: mixed_precision"
    if precision is None:
        return
    if precision is False:
        yield _error(
            "accelerate-precision",
            "mixed_precision is false: YAML reads no without quotes as false",
            where,
            "The launch fails with AttributeError.",
            "Write mixed_precision: 'no', with quotes.",
        )
    elif str(precision).lower() not in known:
        near = difflib.get_close_matches(str(precision).lower(), list(known), n=1, cutoff=0.4)
        yield _error(
            "accelerate-precision",
            f"mixed_precision is {precision!r}",
            where,
            f"accelerate knows {', '.join(known)}.",
            f"Write {near[0]}." if near else "Write bf16, fp16 or 'no'.",
        )
    elif str(precision).lower() == "fp8":
        yield _error(
            "accelerate-precision",
            "mixed_precision is fp8",
            where,
            "This library computes in float32, bfloat16 or float16.",
            "Write bf16.",
        )


def _sections(content: Mapping[Any, Any], name: str) -> Iterator[Finding]:
    for key, whose in _SECTIONS.items():
        if content.get(key) and str(content.get("distributed_type")) not in _SHARDED:
            yield _warning(
                "accelerate-section",
                f"{key} is set, but distributed_type is {content.get('distributed_type')}",
                f"{name}: {key}",
                f"{whose} does not start, so the section has no effect; sharding is not supported.",
                f"Remove {key}.",
            )
    if content.get("use_cpu") in _TRUE and str(content.get("distributed_type")) == "MULTI_GPU":
        yield _error(
            "accelerate-cpu",
            "use_cpu is true with distributed_type MULTI_GPU",
            f"{name}: use_cpu",
            "The two contradict each other.",
            "Write use_cpu: false, or distributed_type: MULTI_CPU.",
        )


def check_run_file(
    run: Mapping[str, Any], name: str, environment: Environment, *, parameters: int | None, processes: int = 1
) -> tuple[Finding, ...]:
    """Checks a run file for contradictions, and for what this machine cannot run."""
    return in_order(
        (
            *_quantization(run, name, environment),
            *_device_map(run, name, processes),
            *_host_memory(run, name, environment, parameters, processes),
        )
    )


def _model_arguments(run: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = run.get("model_init_kwargs")
    return arguments if isinstance(arguments, Mapping) else {}


def _bits(run: Mapping[str, Any]) -> str | None:
    """Gives the bits in which the base is loaded, wherever they are set; None if unquantised."""
    arguments = _model_arguments(run)
    for bits in ("4bit", "8bit"):
        nested = arguments.get("quantization_config")
        places = (run, arguments, nested if isinstance(nested, Mapping) else {})
        given = run.get("quantization")
        if given == bits or (isinstance(given, Mapping) and given.get(f"load_in_{bits}") in _TRUE):
            return bits
        if any(place.get(f"load_in_{bits}") in _TRUE for place in places):
            return bits
    return None


def _has_adapter(run: Mapping[str, Any]) -> bool:
    return any(run.get(name) not in (None, False, "", 0) for name in _ADAPTER_NAMES)


def _quantization(run: Mapping[str, Any], name: str, environment: Environment) -> Iterator[Finding]:
    bits = _bits(run)
    if bits is not None and not _has_adapter(run):
        yield _error(
            "quantized-without-adapter",
            f"the base is loaded in {bits}, without an adapter",
            f"{name}: quantization",
            "Quantised weights receive no gradient: there is nothing to train.",
            "Write peft: lora:16, or leave quantization out.",
        )
    paged = any(part in str(run.get("optim", "")) for part in ("bnb", "paged", "8bit"))
    if (bits is not None or paged) and environment.versions.get("bitsandbytes", "") is None:
        yield _error(
            "package-missing",
            "bitsandbytes is not installed",
            f"{name}: {'quantization' if bits is not None else 'optim'}",
            "Quantised bases and 8-bit or paged optimizers need it.",
            "pip install bitsandbytes",
        )


def _device_map(run: Mapping[str, Any], name: str, processes: int) -> Iterator[Finding]:
    places = _model_arguments(run).get("device_map", run.get("device_map"))
    where = f"{name}: model_init_kwargs.device_map"
    if isinstance(places, str) and places in ("auto", "balanced", "balanced_low_0", "sequential"):
        yield _error(
            "device-map",
            f"device_map is {places!r}",
            where,
            "It spreads one copy over all cards, the CPU and the disk, for inference: layers wait for each other, and "
            "data-parallel training is refused.",
            "Remove device_map: each process places its copy on its own card.",
        )
    elif isinstance(places, Mapping) and processes > 1 and len({str(place) for place in places.values()}) == 1:
        yield _error(
            "device-map",
            f"device_map puts everything on {next(iter(places.values()))}, in each of {processes} processes",
            where,
            "All copies end up on one card.",
            "Remove device_map: each process places its copy on its own card.",
        )


def _host_memory(
    run: Mapping[str, Any], name: str, environment: Environment, parameters: int | None, processes: int
) -> Iterator[Finding]:
    if parameters is None or not environment.host_free_bytes:
        return
    for key, what, size in _offloads(run):
        needed = size * parameters * processes
        if needed > environment.host_free_bytes:
            yield _error(
                "host-memory",
                f"{what} takes {format_bytes(needed)} of RAM, and {format_bytes(environment.host_free_bytes)} are free",
                f"{name}: {key}",
                "The operating system kills the process, or swaps until it stalls.",
                "Train an adapter (peft: lora:16), or use an optimizer with less state (optim: adamw_bnb_8bit) or a "
                "machine with more RAM.",
            )


def _offloads(run: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yields what a run file keeps on the host: key, words, bytes per weight of the model."""
    optimizer = str(run.get("optim", ""))
    if "paged" in optimizer and not _has_adapter(run):
        bits = "8bit" if "8bit" in optimizer else "32bit"
        yield "optim", f"the state of {optimizer}, when it is paged out,", _PAGED_BYTES[bits]
    if run.get("vllm_enable_sleep_mode") in _TRUE:
        yield "vllm_enable_sleep_mode", "vLLM's copy of the weights, while it sleeps,", _HALF_BYTES
    sharded = run.get("deepspeed") if isinstance(run.get("deepspeed"), Mapping) else {}
    zero = sharded.get("zero_optimization", sharded) if isinstance(sharded, Mapping) else {}
    if isinstance(zero, Mapping) and "cpu" in str(
        zero.get("offload_optimizer", zero.get("offload_optimizer_device", ""))
    ):
        yield "deepspeed", "the optimizer's state, offloaded to the CPU,", _SHARDED_OPTIMIZER_BYTES


def check_launch_memory(
    content: Mapping[str, Any], name: str, environment: Environment, *, parameters: int | None
) -> tuple[Finding, ...]:
    """Checks that the RAM holds what an accelerate file offloads."""
    found = []
    for section, key in (("deepspeed_config", "offload_optimizer_device"), ("fsdp_config", "fsdp_offload_params")):
        inside = content.get(section)
        asked = isinstance(inside, Mapping) and (inside.get(key) == "cpu" or inside.get(key) in _TRUE)
        if not asked or parameters is None or not environment.host_free_bytes:
            continue
        # Sharded or not, the processes of a machine together hold one optimizer state.
        needed = _SHARDED_OPTIMIZER_BYTES * parameters
        if needed > environment.host_free_bytes:
            found.append(
                _error(
                    "host-memory",
                    f"offloading takes {format_bytes(needed)} of RAM, and {format_bytes(environment.host_free_bytes)} "
                    "are free",
                    f"{name}: {section}.{key}",
                    "The operating system kills the process, or swaps until it stalls.",
                    "Train an adapter (peft: lora:16) without offloading.",
                )
            )
    return tuple(found)
