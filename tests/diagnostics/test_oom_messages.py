"""`memsafe-rl explain-oom`: real messages of PyTorch's versions, each with its cause and its first remedy."""

# ruff: noqa: E501  (messages stand as they were printed)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memsafe_rl.cli import app
from memsafe_rl.diagnostics.known_tensors import Configuration, Kind, guesses, matching, span_of
from memsafe_rl.diagnostics.oom_causes import Cause, Explanation, explain_message, own_process
from memsafe_rl.diagnostics.oom_messages import Allocator, Place, Printed, find_message, read_printed
from memsafe_rl.errors import MemoryBudgetError
from memsafe_rl.memory.runtime.explanation import explain
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.types import MemoryFailure, Phase, UpdatePlan

GIB, MIB = 2**30, 2**20
RUNNER = CliRunner()

CASE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.23 GiB. \n"
    "GPU 0 has a total capacity of 19.58 GiB of which 1.06 GiB is free. \n"
    "Including non-PyTorch memory, this process has 18.50 GiB memory in use. \n"
    "Of the allocated memory 14.94 GiB is allocated by PyTorch, and 3.18 GiB is reserved by PyTorch but unallocated."
)
"""github.com/ylan2009/ChatLM-mini-Chinese, GPU_OOM_FIX.md: T5, 32 x 252 tokens, V = 40,960."""

REAL: tuple[tuple[str, str, Cause, str, Configuration], ...] = (
    (  # torch 1.0
        "github.com/pytorch/pytorch/issues/16417",
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already "
        "allocated; 9.28 GiB free; 4.68 MiB cached)",
        Cause.ROOM_REFUSED,
        "Find what limits the process",
        Configuration(),
    ),
    (  # torch 1.4 to 1.9
        "github.com/rshaojimmy/MADDoG/issues/11",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity; 8.77 GiB already "
        "allocated; 19.75 MiB free; 13.71 GiB reserved in total by PyTorch)",
        Cause.FRAGMENTS,
        "Let the allocator's pieces grow",
        Configuration(),
    ),
    (  # torch 1.10 to 2.0
        "github.com/vllm-project/vllm/issues/783",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.63 GiB (GPU 0; 44.56 GiB total capacity; "
        "27.91 GiB already allocated; 565.31 MiB free; 27.93 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.",
        Cause.NEIGHBOURS,
        "Free the card of other processes",
        Configuration(),
    ),
    (  # torch 1.10 to 2.0
        "github.com/RistoranteRist/FastFlow/issues/4",
        "RuntimeError: CUDA out of memory. Tried to allocate 74.00 MiB (GPU 0; 11.91 GiB total capacity; 10.79 GiB already "
        "allocated; 12.94 MiB free; 11.21 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory",
        Cause.FULL,
        "Use smaller micro-batches",
        Configuration(),
    ),
    (  # torch 2.1, which writes "capacty"
        "github.com/kerrj/lerf/issues/73",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 "
        "GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the "
        "allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.",
        Cause.FRAGMENTS,
        "Let the allocator's pieces grow",
        Configuration(),
    ),
    (  # torch 2.2 to 2.8; the tensor was [30688, 151936] in float32, as its thread says
        "github.com/mgmalek/efficient_cross_entropy/issues/9",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 17.37 GiB. GPU 0 has a total capacity of 31.50 GiB "
        "of which 9.48 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the allocated "
        "memory 20.91 GiB is allocated by PyTorch, and 833.28 MiB is reserved by PyTorch but unallocated.",
        Cause.TENSOR,
        "Do not build [B, T, V]",
        Configuration(vocab=151_936, batch=(1,), seq_len=(30_688,)),
    ),
    (  # torch 2.5 to 2.8, private pools
        "github.com/vllm-project/vllm/issues/14452",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total capacity of 15.48 GiB "
        "of which 953.94 MiB is free. Including non-PyTorch memory, this process has 14.53 GiB memory in use. Of the "
        "allocated memory 12.19 GiB is allocated by PyTorch, with 81.88 MiB allocated in private pools (e.g., CUDA "
        "Graphs), and 368.65 MiB is reserved by PyTorch but unallocated.",
        Cause.OUTSIDE,
        "Leave room for what PyTorch does not count",
        Configuration(),
    ),
    (  # torch 2.10, in a container, where processes have the host's numbers
        "github.com/huggingface/trl/issues/5207",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 14.74 GiB "
        "of which 42.19 MiB is free. Process 21219 has 284.00 MiB memory in use. Process 21222 has 3.40 GiB memory in "
        "use. Process 21213 has 258.00 MiB memory in use. Process 21216 has 10.77 GiB memory in use. Of the allocated "
        "memory 10.59 GiB is allocated by PyTorch, and 42.18 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        Cause.NEIGHBOURS,
        "Free the card of other processes",
        Configuration(),
    ),
    (  # torch 2.9 on ROCm, a limited process
        "github.com/ROCm/TheRock/issues/2118",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 287.98 GiB "
        "of which 275.86 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with "
        "17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.",
        Cause.LIMIT,
        "Raise or remove the limit",
        Configuration(),
    ),
    (  # ROCm, an integrated GPU
        "github.com/ROCm/TheRock/issues/1054",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB "
        "of which 15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated.",
        Cause.TOO_LARGE,
        "Use smaller micro-batches",
        Configuration(),
    ),
    (  # torch 2.12 on XPU
        "github.com/intel/torch-xpu-ops/issues/3011",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of "
        "which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by "
        "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        Cause.ROOM_REFUSED,
        "Find what limits the process",
        Configuration(),
    ),
    (  # MPS, in the log-probs of GRPO
        "github.com/gensyn-ai/rl-swarm/issues/355",
        "    logits = logits / self.temperature\n             ~~~~~~~^~~~~~~~~~~~~~~~~~\nRuntimeError: MPS backend out of "
        "memory (MPS allocated: 12.74 GB, other allocations: 4.39 GB, max allowed: 18.13 GB). Tried to allocate 1.02 GB on "
        "private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit",
        Cause.LIMIT,
        "Use less memory rather than lift the limit",
        Configuration(),
    ),
    (  # a library's own workspace
        "github.com/QwenLM/Qwen3/issues/873",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        Cause.LIBRARY,
        "Free the card of other processes",
        Configuration(),
    ),
    (  # the CPU's allocator
        "github.com/JingyunLiang/VRT/issues/49",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)",
        Cause.HOST,
        "Use less RAM",
        Configuration(),
    ),
    (  # vLLM, when its engine starts
        "github.com/vllm-project/vllm/issues/2248",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
        "the engine.",
        Cause.VLLM,
        "Give vLLM's KV cache room",
        Configuration(),
    ),
    (  # under WSL, where the driver reports 2**64 bytes
        "github.com/linkedin/Liger-Kernel/pull/47",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 8.00 "
        "GiB of which 0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of "
        "the allocated memory 13.67 GiB is allocated by PyTorch, and 9.62 MiB is reserved by PyTorch but unallocated.",
        Cause.FULL,
        "Use smaller micro-batches",
        Configuration(),
    ),
)
"""Where a message stands, the message, its cause, the first remedy, and what is known of the configuration."""


def explained(log: str, configuration: Configuration | None = None) -> Explanation:
    message = find_message(log)
    assert message is not None
    return explain_message(message, configuration or Configuration(), log)


def invoke(*words: object, **settings: Any) -> Any:
    return RUNNER.invoke(app, ["explain-oom", *(str(word) for word in words)], env={"COLUMNS": "200"}, **settings)


@pytest.mark.parametrize(("source", "text", "cause", "remedy", "known"), REAL, ids=[row[0] for row in REAL])
def test_a_real_message_is_told_its_cause_and_its_remedy(
    source: str, text: str, cause: Cause, remedy: str, known: Configuration
) -> None:
    found = explained(text, known)
    assert found.reasons[0].cause is cause
    assert found.remedies[0].action == remedy


def test_the_case_is_stranded_memory_and_the_logits() -> None:
    found = explained(CASE, Configuration(vocab=40_960, batch=(32,), seq_len=(252,)))
    assert found.stranded_share == pytest.approx(3.18 / (14.94 + 3.18))
    assert [reason.cause for reason in found.reasons] == [Cause.FRAGMENTS, Cause.TENSOR]
    assert found.reasons[0].decisive
    tensor = found.tensors[0]
    assert (tensor.kind, tensor.shape, tensor.dtype) == (Kind.LOGITS, "32 x 252 x 40,960", "float32")
    assert tensor.bytes == 32 * 252 * 40_960 * 4
    assert tensor.exact
    assert [remedy.action for remedy in found.remedies[:2]] == [
        "Let the allocator's pieces grow",
        "Do not build [B, T, V]",
    ]
    assert found.neighbours_bytes == 0
    assert found.outside_bytes == pytest.approx(0.38 * GIB, abs=0.02 * GIB)


def test_a_shorter_batch_than_configured_is_solved_for() -> None:
    span = span_of(Printed(round(1.23 * GIB), round(0.005 * GIB)), rounded_up=True)
    found = matching(span, Configuration(vocab=40_960, batch=(32,), seq_len=(256,)))
    assert "T = 252" in found[0].shape
    assert not found[0].exact
    # 24 rows of at most 256 tokens can never have been that many bytes in float32.
    lone = Configuration(vocab=40_960, batch=(24,), seq_len=(256,), dtypes=(("float32", 4),))
    assert matching(span, lone) == ()


def test_without_a_configuration_it_guesses_and_says_so() -> None:
    found = explained(CASE)
    assert all(tensor.guessed for tensor in found.tensors)
    assert "logits of V = 40,960 (ChatLM-mini), B*T = 8,064 rows, such as 32 x 252 in float32" in map(
        str, found.tensors
    )
    assert "guess" in next(reason.sentence for reason in found.reasons if reason.cause is Cause.TENSOR)


def test_a_network_that_the_log_names_is_the_one_that_is_guessed() -> None:
    found = explained(f"loading Qwen/Qwen2.5-1.5B-Instruct\n{CASE}")
    assert [tensor.name for tensor in found.tensors] == ["logits of V = 151,936 (Qwen2, Qwen3)"]


def test_small_requests_are_not_guessed_at() -> None:
    assert guesses(span_of(Printed(20 * MIB, 5_243), rounded_up=True), "") == ()


@pytest.mark.parametrize(
    ("text", "count", "slack"),
    [
        ("1.23 GiB", 1_320_702_444, 5_368_710),
        ("8.00 GB", 8 * GIB, 5_368_710),
        ("512.00 MiB", 512 * MIB, 5_243),
        ("256 bytes", 256, 0),
        ("72GB", 72 * GIB, GIB // 2),
    ],
)
def test_a_printed_size_is_read_with_the_rounding_it_hides(text: str, count: int, slack: int) -> None:
    assert read_printed(text) == Printed(count, slack)


def test_an_impossible_size_is_none() -> None:
    assert read_printed("17179869184.00 GiB") is None


def test_a_caching_allocator_prints_pieces_not_tensors() -> None:
    # 2 MiB stand for anything up to 1 MiB, 20 MiB for anything up to 10, more for the next multiple of 2 MiB.
    assert span_of(Printed(2 * MIB, 5_243), rounded_up=True)[0] == 1
    assert span_of(Printed(20 * MIB, 5_243), rounded_up=True)[0] == MIB + 1
    low, high = span_of(Printed(100 * MIB, 5_243), rounded_up=True)
    assert (low, high) == (98 * MIB + 1, 100 * MIB)
    assert span_of(Printed(100 * MIB), rounded_up=False) == (100 * MIB, 100 * MIB)


@pytest.mark.parametrize(
    ("kind", "elements", "size"),
    [
        (Kind.LOGITS, 8 * 512 * 32_000, 2),
        (Kind.SCORES, 8 * 16 * 512 * 512, 4),
        (Kind.CACHE, 8 * 4 * 512 * 64, 2),
        (Kind.HIDDEN, 8 * 512 * 1024, 2),
        (Kind.WEIGHT, 32_000 * 1024, 4),
    ],
)
def test_tensors_of_a_configuration_are_recognised_by_their_bytes(kind: Kind, elements: int, size: int) -> None:
    known = Configuration(
        vocab=32_000, batch=(8,), seq_len=(512,), hidden=1024, inner=2816, heads=16, kv_heads=4, layers=24
    )
    found = matching((elements * size, elements * size), known)
    assert kind in {tensor.kind for tensor in found if tensor.exact}
    assert found[0].bytes == elements * size


def test_own_process_is_found_by_what_it_holds() -> None:
    text = next(text for source, text, *_ in REAL if source.endswith("trl/issues/5207"))
    message = find_message(text)
    assert message is not None
    assert own_process(message) == 21_216
    assert explained(text).neighbours_bytes == pytest.approx((284 + 3.4 * 1024 + 258) * MIB, rel=0.001)


def test_the_last_message_of_a_log_counts_with_its_place_and_line() -> None:
    first = CASE.replace("1.23", "5.00")
    frames = "Traceback (most recent call last):\n  File 'a.py', line 3\n    return F.log_softmax(logits, dim=-1)\n"
    message = find_message(f"\x1b[31mstep 1\x1b[0m\n{first}\nstep 2\n{frames}{CASE}\nbye")
    assert message is not None
    assert (message.found, message.line, message.place) == (2, 10, Place.LOGITS)
    assert str(message.requested) == "1.23 GiB"


def test_a_message_that_a_terminal_has_wrapped_into_a_box_is_read() -> None:
    boxed = "\n".join(f"│ {line:<60} │" for line in _wrapped(" ".join(CASE.split()), 60))
    message = find_message(boxed)
    assert message is not None
    assert message.total == read_printed("19.58 GiB")
    assert message.stranded == read_printed("3.18 GiB")


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


@pytest.mark.parametrize(
    ("text", "allocator"),
    [
        ("RuntimeError: CUDA error: out of memory", Allocator.DRIVER),
        ("RuntimeError: Triton Error [CUDA]: out of memory", Allocator.DRIVER),
        ("NCCL error in: x.cpp:1, Cuda failure 2 'out of memory'", Allocator.LIBRARY),
        ("[1] Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:1048576kB, x", Allocator.KERNEL),
        ("[1] Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB", Allocator.KERNEL),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch. Some of the tasks", Allocator.KERNEL),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in step 1.0 cgroup.", Allocator.KERNEL),
        ("std::bad_alloc", Allocator.HOST),
        (
            "Free memory on device (8.92/23.68 GiB) on startup is less than desired GPU memory utilization",
            Allocator.VLLM,
        ),
        ("(4.0 GiB KV cache is needed, which is larger than the available KV cache memory (2.57 GiB)", Allocator.VLLM),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", Allocator.CUDA),
        ("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 29.50 GiB total capacity)", Allocator.OTHER),
        ("RuntimeError: Invalid buffer size: 32.00 GB", Allocator.MPS),
        ("numpy: Unable to allocate 3.50 GiB for an array with shape (1,)", Allocator.HOST),
    ],
)
def test_other_wordings_are_attributed(text: str, allocator: Allocator) -> None:
    found = explained(text)
    assert found.message.allocator is allocator
    assert found.remedies


def test_what_this_library_raises_is_explained() -> None:
    with SimulatedMemory(MIB), pytest.raises(torch.OutOfMemoryError) as simulated:
        torch.empty(2 * MIB, dtype=torch.uint8)
    found = explained(str(simulated.value))
    assert (found.message.allocator, found.reasons[0].cause) == (Allocator.SIMULATED, Cause.SIMULATED)
    assert found.message.requested == Printed(2 * MIB)

    failure = MemoryFailure(
        phase=Phase.UPDATE,
        step=0,
        message=str(simulated.value),
        requested_bytes=2 * MIB,
        live_bytes=MIB // 2,
        attempt=1,
    )
    told = explain(failure, {"weights": MIB // 2, "other": 100}, [UpdatePlan(64)], limit_bytes=MIB, policy="x")
    found = explained(f"error: {MemoryBudgetError(told)}")
    assert found.message.allocator is Allocator.BUDGET
    assert found.message.found == 1
    assert dict(found.message.held) == {"weights": Printed(MIB // 2, 6), "other": Printed(100)}
    assert "weights" in found.reasons[0].sentence


def test_the_command_prints_cause_tensor_and_remedies(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(CASE)
    shown = invoke(log, "--vocab", 40_960, "--batch", 32, "--seq-len", 252)
    assert shown.exit_code == 0
    for part in ("1.23 GiB", "17.5%", "32 x 252 x 40,960 in float32", "expandable_segments:True", "Do not build"):
        assert part in shown.output
    assert "guess" not in shown.output
    assert "guess: logits of V = 40,960" in invoke("-", input=CASE).output


def test_the_command_writes_json(tmp_path: Path) -> None:
    written = json.loads(invoke("-", "--json", "--vocab", 40_960, input=CASE).output)
    assert written["message"]["requested"] == 1_320_702_444
    assert written["reasons"][0]["cause"] == "stranded memory"
    assert "8,064" in written["tensors"][0]["text"]


@pytest.mark.parametrize("kind", ["folder", "config.json", "run file"])
def test_sizes_come_from_a_configuration(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    network = {"vocab_size": 40_960, "d_model": 768, "num_heads": 12, "num_layers": 10, "d_ff": 3072, "d_kv": 64}
    (model / "config.json").write_text(json.dumps(network))
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {model}\nper_device_train_batch_size: 32\nmax_completion_length: 252\n")
    given = {"folder": model, "config.json": model / "config.json", "run file": run}[kind]
    found = json.loads(invoke("-", "--json", "--config", given, input=CASE).output)
    shape = "32 x 252 x 40,960" if kind == "run file" else "B*T = 8,064"
    assert found["tensors"][0]["shape"].startswith(shape)


@pytest.mark.parametrize("is_over", [True, False])
def test_sizes_come_from_the_folder_of_a_run_dead_or_over(tmp_path: Path, is_over: bool) -> None:
    network = {"vocab_size": 40_960, "d_model": 768, "num_heads": 12, "num_layers": 10, "d_ff": 3072, "d_kv": 64}
    for folder, vocab in (("checkpoint-9", 11), ("checkpoint-10", 40_960), ("", 40_960))[: 3 if is_over else 2]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps({**network, "vocab_size": vocab}))
    settings = {"per_device_train_batch_size": 32, "max_completion_length": 252}
    (tmp_path / "run.json").write_text(json.dumps({"facts": {"model": "no/such"}, "config": settings}))
    found = json.loads(invoke("-", "--json", "--config", tmp_path, input=CASE).output)
    assert found["tensors"][0]["shape"].startswith("32 x 252 x 40,960")


def test_small_pieces_of_a_large_card_come_first_where_they_were_enough() -> None:
    """11.8 % of 79 GiB are sixteen times the request: the batch was called too large for the card."""
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.11 GiB of "
        "which 90.00 MiB is free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the allocated "
        "memory 69.20 GiB is allocated by PyTorch, and 9.30 GiB is reserved by PyTorch but unallocated."
    )
    found = json.loads(invoke("-", "--json", input=text).output)
    assert found["reasons"][0]["cause"] == "stranded memory"
    assert "fine" not in invoke("-", input=text).output


def test_a_known_name_needs_no_file(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: Qwen/Qwen3-0.6B\nper_device_train_batch_size: 8\nmax_completion_length: 512\n")
    size = 8 * 512 * 151_936 * 4
    text = f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB."
    found = json.loads(invoke("-", "--json", "--config", run, input=text).output)
    assert found["tensors"][0]["shape"] == "8 x 512 x 151,936"


@pytest.mark.parametrize(
    ("words", "text", "told"),
    [
        (["-"], "all is well\n", "no out-of-memory message in its 1 lines"),
        (["-"], "", "no out-of-memory message in its 0 lines"),
        (["/no/such.log"], "", "cannot be read: No such file"),
        (["-", "--vocab", "0"], CASE, "--vocab is 0"),
        (["-", "--dtype", "int4"], CASE, "--dtype is 'int4'"),
        (["-", "--config", "/no/such.json"], CASE, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(words: list[str], text: str, told: str) -> None:
    shown = invoke(*words, input=text)
    assert shown.exit_code == 2
    assert told in shown.output
    assert "Traceback" not in shown.output


def test_a_log_of_windows_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(CASE.encode("utf-16"))
    assert "1.23 GiB" in invoke(log).output
