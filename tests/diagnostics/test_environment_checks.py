"""`memsafe-rl doctor`: every planted fault is found, and a healthy machine is told so in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, PrecisionType
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from typer.testing import CliRunner

from memsafe_rl.cli import app
from memsafe_rl.cli import doctor as doctor_module
from memsafe_rl.diagnostics.environment_checks import (
    ALLOCATOR_VARIABLES,
    Environment,
    Finding,
    Severity,
    allocator_settings,
    check_environment,
    check_expectations,
    check_script,
    check_settings,
)
from memsafe_rl.diagnostics.launch_checks import check_launch_file, check_run_file
from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.runtime.cards import Card, CardProcess

GIB = 2**30
RUNNER = CliRunner()


def card(name: str, free_bytes: int, *others: CardProcess) -> Card:
    return Card(0, f"GPU-{name}", name, "9.0", 80 * GIB, 80 * GIB - free_bytes, free_bytes, None, others)


MACHINE = Environment(
    variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "4"},
    versions={"torch": "2.13.0+cu130", "accelerate": "1.15.0", "bitsandbytes": "0.50.2"},
    requirements=("torch>=2.11", "accelerate>=1.13"),
    optional=("bitsandbytes>=0.50",),
    backend="cuda",
    usable_gpus=2,
    cards=(card("NVIDIA H100", 79 * GIB), card("NVIDIA H100", 79 * GIB)),
    cores=16,
    host_bytes=64 * GIB,
    host_free_bytes=60 * GIB,
)
LAPTOP = Environment(versions={"torch": "2.13.0+cpu"}, requirements=("torch>=2.11",), cores=2, host_free_bytes=8 * GIB)


def codes(findings: Any) -> list[str]:
    return [finding.code for finding in findings]


def with_variables(**variables: str) -> Environment:
    return replace(MACHINE, variables={**MACHINE.variables, **variables})


@pytest.mark.parametrize("machine", [MACHINE, LAPTOP, replace(MACHINE, backend="hip")], ids=["H100", "laptop", "ROCm"])
def test_a_healthy_machine_has_no_findings(machine: Environment) -> None:
    assert check_environment(machine) == ()


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (with_variables(PYTORCH_CUDA_ALLOCATOR_CONF="expandable_segments:True"), "allocator-name"),
        (with_variables(CUDA_ALLOC_CONF="expandable_segments:True"), "allocator-name"),
        (with_variables(PYTORCH_HIP_ALLOC_CONF="expandable_segments:True"), "allocator-other-backend"),
        (with_variables(PYTORCH_ALLOC_CONF="expandable_segments:False"), "allocator-two-names"),
        (with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split:64"), "allocator-key"),
        (with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments=True"), "allocator-key"),
        (with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:true"), "allocator-value"),
        (
            with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False,expandable_segments:True"),
            "allocator-contradiction",
        ),
        (
            with_variables(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync,expandable_segments:True"),
            "allocator-contradiction",
        ),
        (with_variables(PYTORCH_CUDA_ALLOC_CONF=""), "segments-fixed"),
        (with_variables(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128"), "segments-fixed"),
        (with_variables(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), "allocator-off"),
        (with_variables(OMP_NUM_THREADS="64"), "threads"),
        (with_variables(OMP_NUM_THREADS="all"), "threads"),
        (with_variables(CUDA_VISIBLE_DEVICES="0,0"), "cards-twice"),
        (with_variables(CUDA_VISIBLE_DEVICES="0,2"), "cards-missing"),
        (with_variables(CUDA_VISIBLE_DEVICES="-1"), "cards-hidden"),
        (replace(MACHINE, cards=(card("H100", 40 * GIB, CardProcess(77, "python", 39 * GIB)),)), "card-shared"),
        (replace(MACHINE, backend="cpu", usable_gpus=0), "card-unusable"),
        (replace(MACHINE, versions={**MACHINE.versions, "torch": "2.9.1"}), "version"),
        (replace(MACHINE, versions={**MACHINE.versions, "bitsandbytes": "0.43"}), "version"),
        (replace(MACHINE, versions={**MACHINE.versions, "accelerate": None}), "package-missing"),
    ],
)
def test_a_fault_planted_in_an_environment_is_found(machine: Environment, code: str) -> None:
    found = check_environment(machine)
    assert code in codes(found)
    assert set(codes(found)) <= {code, "segments-fixed"}
    assert all(finding.what and finding.where and finding.why and finding.remedy for finding in found)


def test_an_optional_package_may_be_missing() -> None:
    assert check_environment(replace(MACHINE, versions={**MACHINE.versions, "bitsandbytes": None})) == ()


def test_segments_are_no_matter_without_a_gpu() -> None:
    assert check_environment(replace(LAPTOP, variables={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})) == ()


def test_a_list_in_brackets_is_one_setting() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,>:4], expandable_segments : True"
    assert allocator_settings(text) == [
        ("roundup_power2_divisions", "[256:1,512:2,>:4]"),
        ("expandable_segments", "True"),
    ]


@pytest.fixture
def torch_settings() -> Iterator[Any]:
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "expandable_segments:true",
        "expandable_segments=True",
        "max_split_size_mb:10",
        "max_split_size_mb:64",
        "garbage_collection_threshold:0.8",
        "garbage_collection_threshold:1.5",
        "max_non_split_rounding_mb:10",
        " expandable_segments : True , max_split_size_mb : 64",
    ],
)
def test_values_are_refused_where_torch_refuses_them(torch_settings: Any, text: str) -> None:
    refused = False
    try:
        torch_settings(text)
    except (RuntimeError, ValueError):
        refused = True
    assert bool(list(check_settings("PYTORCH_ALLOC_CONF", text))) is refused


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
        "os.environ.setdefault('PYTORCH_ALLOC_CONF', 'expandable_segments:True')",
        "os.environ.update(PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True')",
        "os.environ.update({'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'})",
        "os.putenv('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')",
    ],
)
def test_a_script_that_sets_the_allocator_too_late_is_found(line: str) -> None:
    assert codes(check_script(f"import os\nfrom trl import GRPOTrainer\n{line}\n", "a.py")) == ["allocator-late"]
    assert check_script(f"import os\n{line}\nfrom trl import GRPOTrainer\n", "a.py") == ()


def test_a_script_with_a_wrong_name_or_value_is_found() -> None:
    text = "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONFIG'] = 'x'\nos.environ['PYTORCH_ALLOC_CONF'] = 'y:1'\n"
    assert codes(check_script(text, "a.py")) == ["allocator-name", "allocator-key"]
    with pytest.raises(ConfigError, match="not Python"):
        check_script("def", "a.py")


HEALTHY_LAUNCH = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "bf16"}
PAIR = {"distributed_type": "MULTI_GPU", "num_processes": 2}


def of_launch(content: object, machine: Environment = MACHINE, parameters: int | None = None) -> tuple[Finding, ...]:
    return check_launch_file(
        content,
        "launch.yaml",
        machine,
        keys=tuple(ClusterConfig.__dataclass_fields__),
        distributed_types=tuple(kind.value for kind in DistributedType),
        precisions=tuple(kind.value for kind in PrecisionType),
        parameters=parameters,
    )


def accelerate_refuses(text: str, folder: Path) -> bool:
    """Returns whether accelerate's own launcher ends with an error on a file."""
    file = folder / "launch.yaml"
    file.write_text(text)
    try:
        arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
        arguments, *_ = _validate_launch_command(arguments)
        (prepare_multi_gpu_env if arguments.multi_gpu else prepare_simple_launcher_cmd_env)(arguments)
    except (AttributeError, ValueError):
        return True
    return False


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n",
        "distributed_type: 'NO'\nmixed_precision: 'no'\ngpu_ids: '0'\n",
        "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\nmachine_rank: 0\n",
        "distributed_type: 'NO'\nfp16: true\n",
    ],
)
def test_a_healthy_launch_file_has_no_findings(text: str, tmp_path: Path) -> None:
    assert of_launch(yaml.safe_load(text)) == ()
    assert not accelerate_refuses(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "code", "refused"),
    [
        ("distributed_type: 'NO'\ngradient_accumulation_steps: 4\n", "accelerate-key", True),
        ("distributed_type: 'NO'\nmixed_precison: bf16\n", "accelerate-key", True),
        ("distributed_type: 'NO'\ngpu_ids: [0]\n", "accelerate-gpu-ids", True),
        ("distributed_type: 'NO'\ngpu_ids: 0\n", "accelerate-gpu-ids", True),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '0'\n", "accelerate-gpu-ids", True),
        ("distributed_type: 'NO'\ngpu_ids: '7'\n", "accelerate-gpu-ids", False),
        ("distributed_type: MULTI_GPU\nnum_processes: 1\n", "accelerate-one-process", False),
        ("distributed_type: MULTI_GPU\n", "accelerate-processes", True),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\n", "accelerate-processes", False),
        ("distributed_type: 'NO'\nnum_processes: 2\n", "accelerate-processes", False),
        ("distributed_type: 'NO'\nnum_processes: two\n", "accelerate-processes", False),
        ("distributed_type: NO\nnum_processes: 1\n", "accelerate-distributed", False),
        ("distributed_type: MULTIGPU\nnum_processes: 2\n", "accelerate-distributed", True),
        ("num_processes: 1\n", "accelerate-distributed", True),
        ("distributed_type: 'NO'\nmixed_precision: no\n", "accelerate-precision", True),
        ("distributed_type: 'NO'\nmixed_precision: bfloat16\n", "accelerate-precision", True),
        ("distributed_type: 'NO'\nmixed_precision: fp8\n", "accelerate-precision", False),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\n", "accelerate-sharded", False),
        ("distributed_type: MULTI_NPU\nnum_processes: 2\n", "accelerate-sharded", False),
        ("distributed_type: 'NO'\nfsdp_config: {fsdp_version: 2}\n", "accelerate-section", False),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n", "accelerate-cpu", False),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n", "accelerate-machines", False),
        ("- a\n", "file", True),
        ("", "file", True),
    ],
)
def test_a_fault_planted_in_a_launch_file_is_found(text: str, code: str, refused: bool, tmp_path: Path) -> None:
    found = of_launch(yaml.safe_load(text))
    assert codes(found) == [code]
    if refused:
        assert accelerate_refuses(text, tmp_path)
        assert found[0].severity is Severity.ERROR


def test_the_file_of_the_case_has_its_three_faults() -> None:
    # tau2's accelerate_config.yaml as its guide gives it.
    text = "distributed_type: MULTI_GPU\nnum_processes: 1\ngpu_ids: [0]\ngradient_accumulation_steps: 4\n"
    assert set(codes(of_launch(yaml.safe_load(text)))) == {
        "accelerate-key",
        "accelerate-one-process",
        "accelerate-gpu-ids",
    }


def test_threads_of_all_processes_count() -> None:
    machine = with_variables(OMP_NUM_THREADS="16")
    assert of_launch(HEALTHY_LAUNCH, machine) == ()
    assert codes(of_launch(PAIR, machine)) == ["threads"]


BILLION = 10**9


@pytest.mark.parametrize(
    ("run", "processes", "code"),
    [
        ({"quantization": "4bit"}, 1, "quantized-without-adapter"),
        ({"load_in_4bit": True}, 1, "quantized-without-adapter"),
        ({"quantization": {"load_in_8bit": True}}, 1, "quantized-without-adapter"),
        ({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, 1, "quantized-without-adapter"),
        ({"model_init_kwargs": {"device_map": "auto"}}, 1, "device-map"),
        ({"model_init_kwargs": {"device_map": {"": 0}}}, 2, "device-map"),
        ({"optim": "paged_adamw_32bit"}, 1, "host-memory"),
        ({"vllm_enable_sleep_mode": True}, 8, "host-memory"),
        ({"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}, 1, "host-memory"),
    ],
)
def test_a_fault_planted_in_a_run_file_is_found(run: dict[str, Any], processes: int, code: str) -> None:
    found = check_run_file(run, "run.yaml", MACHINE, parameters=9 * BILLION, processes=processes)
    assert codes(found) == [code]


@pytest.mark.parametrize(
    "run",
    [
        {},
        {"quantization": "4bit", "peft": "lora:16"},
        {"load_in_4bit": True, "use_peft": True},
        {"model_init_kwargs": {"device_map": {"": 0}}},
        {"optim": "paged_adamw_8bit"},
        {"optim": "paged_adamw_32bit", "peft": "lora:16"},
        {"vllm_enable_sleep_mode": True},
    ],
)
def test_a_healthy_run_file_has_no_findings(run: dict[str, Any]) -> None:
    assert check_run_file(run, "run.yaml", MACHINE, parameters=8 * BILLION) == ()


def test_a_quantized_run_needs_bitsandbytes() -> None:
    machine = replace(MACHINE, versions={**MACHINE.versions, "bitsandbytes": None})
    run = {"quantization": "4bit", "peft": "lora:16"}
    assert codes(check_run_file(run, "run.yaml", machine, parameters=None)) == ["package-missing"]


def test_offloading_that_a_launch_file_asks_for_must_fit() -> None:
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "cpu"}}
    fitting = codes(of_launch(content, parameters=BILLION))
    assert "host-memory" not in fitting
    assert sorted(codes(of_launch(content, parameters=8 * BILLION))) == sorted([*fitting, "host-memory"])


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ("torch=2.13.0", True),
        ("torch=2.13.0+cu130", True),
        ("torch=2.13.0+cpu", False),
        ("torch>=2.11", True),
        ("torch<=2.12", False),
        ("gpus=2", True),
        ("gpus>=3", False),
        ("ram>=60GiB", True),
        ("ram>=128GiB", False),
        ("distributed_type=no", True),
        ("use_cpu=false", True),
        ("nothing=1", False),
    ],
)
def test_expectations(wanted: str, met: bool) -> None:
    facts = {"torch": "2.13.0+cu130", "gpus": 2, "ram": "64.00 GiB", "distributed_type": "NO", "use_cpu": False}
    assert [expectation.met for expectation in check_expectations([wanted], facts)] == [met]


def test_an_expectation_must_be_written_as_one() -> None:
    with pytest.raises(ConfigError, match="key=value"):
        check_expectations(["torch"], {})


def invoke(*words: object) -> Any:
    return RUNNER.invoke(app, ["doctor", *(str(word) for word in words)], env={"COLUMNS": "200"})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(environment: Environment) -> None:
        monkeypatch.setattr(doctor_module, "gather", lambda: environment)

    set_to(MACHINE)
    return set_to


def test_the_command_says_healthy_in_one_line(machine: Any, tmp_path: Path) -> None:
    launch, run, script = tmp_path / "launch.yaml", tmp_path / "run.yaml", tmp_path / "train.py"
    launch.write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    run.write_text("model: somewhere\nreward_funcs: [think_format_reward]\npeft: lora:16\nquantization: 4bit\n")
    script.write_text("import torch\n")
    shown = invoke("accelerate", launch, "--config", run, "--script", script, "--expect", "distributed_type=NO")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("healthy: torch 2.13.0+cu130 for cuda, 2 GPU(s): NVIDIA H100, 16 cores")
    assert shown.output.count("\n") == 1


def test_the_command_without_a_gpu_says_so(machine: Any) -> None:
    machine(LAPTOP)
    shown = invoke()
    assert shown.exit_code == 0
    assert "healthy" in shown.output
    assert "no GPU" in shown.output


def test_the_command_names_what_where_why_and_remedy(machine: Any, tmp_path: Path) -> None:
    launch, run = tmp_path / "launch.json", tmp_path / "run.yaml"
    launch.write_text(json.dumps({"distributed_type": "MULTI_GPU", "num_processes": 1, "gpu_ids": [0]}))
    run.write_text("model: x\nquantization: 4bit\nnum_generation: 8\nmodel_init_kwargs: {device_map: auto}\n")
    shown = invoke("accelerate", launch, "--config", run, "--expect", "gpus=8")
    assert shown.exit_code == 1
    for part in (
        "MULTI_GPU with one process",
        "gpu_ids: '0'",
        "peft: lora:16",
        "device_map is 'auto'",
        "num_generation",
    ):
        assert part in shown.output
    assert "gpus" in shown.output
    assert "Not as expected" in shown.output


def test_the_command_writes_json(machine: Any, tmp_path: Path) -> None:
    machine(with_variables(PYTORCH_CUDA_ALLOC_CONF="expandable_segment:True", SECRET="hidden"))
    shown = invoke("--json", "--expect", "gpus=2")
    written = json.loads(shown.output)
    assert shown.exit_code == 1
    assert not written["healthy"]
    assert codes([Finding(**finding) for finding in written["findings"]]) == ["allocator-key", "segments-fixed"]
    assert written["expectations"][0]["met"]
    assert "hidden" not in shown.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["accelerate", "/no/such.yaml"], "There is no file"),
        (["accelerate"], "Write `memsafe-rl doctor accelerate FILE`"),
        (["launch.yaml"], "Write `memsafe-rl doctor accelerate FILE`"),
        (["--config", "/no/such.yaml"], "There is no run file"),
        (["--script", "/no/such.py"], "cannot be read"),
        (["--expect", "torch"], "not key=value"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(machine: Any, words: list[str], told: str) -> None:
    shown = invoke(*words)
    assert shown.exit_code == 2
    assert told in shown.output


def test_this_machine_is_looked_at_without_an_error() -> None:
    found = doctor_module.gather()
    assert found.versions["torch"] is not None
    assert any(requirement.startswith("torch") for requirement in found.requirements)
    assert found.cores >= 1
    assert found.host_free_bytes > 0
    assert set(ALLOCATOR_VARIABLES) & set(doctor_module.facts_of(found)) == set(ALLOCATOR_VARIABLES) & set(
        found.variables
    )


def test_weights_are_counted_from_the_sizes() -> None:
    # Qwen3-0.6B has 596,049,920 weights; norms are left out.
    assert doctor_module.parameters_of("Qwen/Qwen3-0.6B") == pytest.approx(596_049_920, rel=0.001)
    assert doctor_module.parameters_of("no/such-model") is None
