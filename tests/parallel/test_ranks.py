"""Two processes over gloo learn what one process learns, and neither waits for one that has failed."""

import faulthandler
import gc
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from memsafe_rl.errors import MemsafeError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.parallel.replicas import Replicas
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer, weights

SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "num_iterations": 2,
    "beta": 0.1,
    "max_steps": 4,
    "top_entropy_quantile": 0.8,
}


def set_up_rank(rank: int, port: int, world_size: int = 2) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
    }
    torch.set_num_threads(1)
    gc.freeze()
    for collective in (DefaultAllGather, DefaultReduceScatter):
        collective.__call__ = _until_let_go(collective.__call__)  # type: ignore[method-assign]


def _until_let_go(communicate: Callable[..., Any]) -> Callable[..., Any]:
    """Waits until gloo's worker has dropped a collective's buffers, so that no count of bytes depends on when it runs.

    The worker reports a collective as done first, and drops its buffers up to 10 ms later (it needs the interpreter's
    lock for that): in one gathering out of eight, the next one begins with the last one's buffer still held.
    """

    def waited(self: Any, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **rest: Any) -> Any:
        buffers = (output_tensor, input_tensor)
        before = [buffer._use_count() for buffer in buffers]  # type: ignore[attr-defined]
        work = communicate(self, output_tensor=output_tensor, input_tensor=input_tensor, **rest)
        patience = time.monotonic() + 10
        while work is None and [buffer._use_count() for buffer in buffers] > before and time.monotonic() < patience:  # type: ignore[attr-defined]
            time.sleep(0.0001)
        return work

    return waited


def free_port() -> int:
    """Finds a port below those that the system hands out by itself: one of these may be gone when a rank binds it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


class Pulse:
    """Tells `run_ranks` that this rank gets on.

    Args:
        folder: where `run_ranks` works.
        rank: this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.longest_seconds = 0.0  # without a beat
        self._path, self._last = _pulse_of(folder, rank), time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        self.longest_seconds, self._last = max(self.longest_seconds, now - self._last), now
        self._path.touch()


def _pulse_of(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pulse"


def _stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stacks"


def _work_within_reach(rank: int, work: Callable[[int, int, str], None], port: int, folder: str) -> None:
    """Works, ready to write down where this rank stands when it is asked to."""
    Pulse(Path(folder), rank)()
    with _stacks_of(Path(folder), rank).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)  # written by the handler itself, whatever C++ waits for
        work(rank, port, folder)


def run_ranks(
    work: Callable[[int, int, str], None], folder: Path, patience_seconds: float, count: int = 2
) -> list[Any]:
    """Runs the same work on several ranks; where one hangs, all say where they stand and are killed.

    Ranks are forks of a process that has imported this module and nothing else: imports are most of what a rank costs.

    Args:
        work: is given rank, port and folder, and saves what it found in the folder as ``{rank}.pt``.
        folder: where it works.
        patience_seconds: what each rank has until it ends, or until its next `Pulse`.
        count: of ranks.

    Returns:
        What each rank saved.
    """
    mp.set_forkserver_preload([__name__])
    given = work, free_port(), str(folder)
    context = mp.start_processes(_work_within_reach, given, count, join=False, start_method="forkserver")
    ranks, started = range(count), time.time()
    while not context.join(timeout=1):
        beats = [max([started, *(path.stat().st_mtime for path in folder.glob(f"{rank}.pulse"))]) for rank in ranks]
        alive = [rank for rank in ranks if context.processes[rank].is_alive()]
        silent = [rank for rank in alive if time.time() - beats[rank] > patience_seconds]
        if silent:
            pytest.fail(_stop_hung(context.processes, silent, folder, patience_seconds))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in ranks]


def _stop_hung(processes: list[Any], silent: list[int], folder: Path, patience_seconds: float) -> str:
    """Kills ranks of which one hangs, and says where each stood."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)
    for process in alive:
        process.kill()
        process.join()
    told = [f"rank {silent[0]} did not get on within {patience_seconds} seconds: one waits for another"]
    for rank in range(len(processes)):
        stacks = _stacks_of(folder, rank)
        told.append(f"rank {rank}:\n{stacks.read_text() if stacks.exists() else 'did not begin'}")
    return "\n".join(told)


def train_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    trainer = make_trainer(Path(folder) / "two", per_device_train_batch_size=6, num_generations=4, **rest(folder))
    trainer.train()
    torch.save(
        {"weights": weights(trainer), "history": trainer.history, "events": len(trainer.memory_events)},
        Path(folder) / f"{rank}.pt",
    )
    torch.distributed.destroy_process_group()


def rest(folder: str | Path) -> dict[str, Any]:
    """Returns the settings of a run; beside a folder "teacher", of one that learns from the network in it."""
    found = {name: value for name, value in SETTINGS.items() if name != "num_generations"}
    teacher = Path(folder) / "teacher"
    if teacher.exists():
        found |= {"beta": 0.0, "teacher_model_name_or_path": str(teacher), "distillation_top_k": 3}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("taught", [False, True], ids=["rewards", "a teacher"])
def test_two_ranks_learn_what_one_does(tmp_path: Path, taught: bool) -> None:
    if taught:
        tiny_model(layers=3, hidden=48, seed=7, scale=4.0).save_pretrained(tmp_path / "teacher")
    ranks = run_ranks(train_rank, tmp_path, PATIENCE_SECONDS)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    one = make_trainer(tmp_path / "one", per_device_train_batch_size=12, num_generations=4, **rest(tmp_path))
    one.train()
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    start = make_trainer(tmp_path / "start", per_device_train_batch_size=12, num_generations=4, **rest(tmp_path))
    travelled = (weights(one) - weights(start)).norm()
    assert (ranks[0]["weights"] - weights(one)).norm() < 1e-4 * travelled
    for mine, theirs in zip(ranks[0]["history"], one.history, strict=True):
        assert mine.keys() == theirs.keys()
        for name in {"loss", "kl", "distillation/kl", "entropy", "num_tokens", "grad_norm"} & theirs.keys():
            assert abs(mine[name] - theirs[name]) <= 1e-4 * max(1e-3, abs(theirs[name])), name


PATIENCE_SECONDS = 300
"""Far above what all scenarios take on a busy machine (ten seconds on a quiet one), far below gloo's half hour."""

Found = dict[str, Any]


def get_on_slowly(rank: int, port: int, folder: str) -> None:
    pulse = Pulse(Path(folder), rank)
    for _ in range(30):
        time.sleep(0.5)
        pulse()
    torch.save(rank, Path(folder) / f"{rank}.pt")


def wait_for_ever(rank: int, port: int, folder: str) -> None:
    pulse = Pulse(Path(folder), rank)
    while rank == 0:
        time.sleep(0.5)
        pulse()
    time.sleep(10_000)


@pytest.mark.slow
def test_ranks_that_get_on_have_all_the_time_they_need(tmp_path: Path) -> None:
    assert run_ranks(get_on_slowly, tmp_path, 10) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_where_all_of_them_stand(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 1 did not get on within 10 seconds") as error:
        run_ranks(wait_for_ever, tmp_path, 10)
    assert str(error.value).count("in wait_for_ever") == 2


def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def parameters(rank: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))]
    made[0].grad = torch.full((3, 2), float(rank + 1))
    made[1].grad = torch.arange(5.0) * rank
    return made


COLLECTIVES: dict[str, Callable[[Replicas], Any]] = {
    "gather": lambda ranks: ranks.gather([ranks.rank]),
    "sum_gradients": lambda ranks: ranks.sum_gradients(parameters(ranks.rank)),
    "wait": lambda ranks: ranks.wait(),
}


def outcome_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def bring_together(ranks: Replicas) -> Found:
    half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    item = {"rank": ranks.rank, "row": half[1], "none": torch.empty(0, 4), "one": torch.tensor(True)}
    gathered = ranks.gather([item] * (1 + ranks.rank))
    summed = parameters(ranks.rank)
    ranks.sum_gradients(summed)
    ranks.wait()
    return {"gathered": gathered, "gradients": [parameter.grad for parameter in summed]}


def count_allocations(ranks: Replicas) -> Found:
    """Of a second round, so that what gloo makes once is made."""
    counts = {}
    summed, rows = parameters(ranks.rank), [torch.ones(100)]
    ranks.sum_gradients(summed)
    with SimulatedMemory() as device:
        for name, work in {
            "sum_gradients": lambda: ranks.sum_gradients(summed),
            "wait": ranks.wait,
            "gather": lambda: ranks.gather(rows),
            "fail": lambda: ranks.fail("it is over"),
        }.items():
            before = device.allocations
            work()
            counts[name] = device.allocations - before
    return counts


def fail_before(name: str) -> Callable[[Replicas], Found]:
    def scenario(ranks: Replicas) -> Found:
        start = time.monotonic()
        if ranks.rank == 1:
            ranks.fail("MemoryBudgetError: one row does not fit")
            now = "failed"
        else:
            now = outcome_of(lambda: COLLECTIVES[name](ranks))
        ranks.fail("everybody knows already")
        ranks.wait()
        later = outcome_of(lambda: ranks.gather([1]))
        return {"now": now, "later": later, "seconds": time.monotonic() - start}

    return scenario


def fail_together(ranks: Replicas) -> str:
    ranks.fail(f"reason {ranks.rank} " + "é" * 2000)
    return outcome_of(ranks.wait)


def gather_what_cannot_be_sent(ranks: Replicas) -> str:
    try:
        ranks.gather([lambda: None] if ranks.rank == 0 else [1])
    except Exception as error:
        ranks.fail(type(error).__name__)
        return f"{type(error).__name__}: {error}"
    return "no error"


def interrupt_inside_a_collective(ranks: Replicas) -> list[str]:
    found, armed = [], Path("armed")
    if ranks.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        armed.touch()
    else:
        while not armed.exists():  # on a busy machine the other rank may begin seconds later
            time.sleep(0.01)
        time.sleep(1.5)
    try:
        found.append(str(ranks.gather([ranks.rank])))
        ranks.wait()
    except KeyboardInterrupt:
        ranks.fail("KeyboardInterrupt: ")
        found.append("interrupted")
    except MemsafeError as error:
        found.append(str(error))
    return found


def sum_without_gradients(ranks: Replicas) -> str:
    return outcome_of(lambda: ranks.sum_gradients([nn.Parameter(torch.zeros(2))]))


def leave_without_a_word(ranks: Replicas) -> list[str]:
    if ranks.rank == 1:
        torch.distributed.destroy_process_group()
        return []
    found = outcome_of(ranks.wait)
    ranks.fail("they are gone")
    return [found, outcome_of(lambda: ranks.gather([1]))]


SCENARIOS: dict[str, Callable[[Replicas], Any]] = {
    "together": bring_together,
    "allocations": count_allocations,
    **{f"fail before {name}": fail_before(name) for name in COLLECTIVES},
    "fail together": fail_together,
    "cannot be sent": gather_what_cannot_be_sent,
    "interrupt": interrupt_inside_a_collective,
    "no gradients": sum_without_gradients,
    "leave": leave_without_a_word,
}


def run_scenarios(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    os.chdir(folder)
    torch.save({name: play(Replicas(accelerator())) for name, play in SCENARIOS.items()}, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What every scenario gave on each of two ranks; each has groups of its own."""
    return run_ranks(run_scenarios, tmp_path_factory.mktemp("ranks"), PATIENCE_SECONDS)


@pytest.mark.slow
def test_ranks_gather_in_order_and_sum_in_place(outcomes: list[Found]) -> None:
    for found in outcomes:
        assert [item["rank"] for item in found["together"]["gathered"]] == [0, 1, 1]
        for item in found["together"]["gathered"]:
            assert torch.equal(item["row"], torch.tensor([3, 4, 5], dtype=torch.bfloat16))
            assert (item["none"].shape, item["one"].item()) == ((0, 4), True)
        assert torch.equal(found["together"]["gradients"][0], torch.full((3, 2), 3.0))
        assert torch.equal(found["together"]["gradients"][1], torch.arange(5.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_fails_is_named_with_its_reason_at_whatever_comes_next(outcomes: list[Found], name: str) -> None:
    other, failed = (found[f"fail before {name}"] for found in outcomes)
    assert other["now"].startswith(
        "MemsafeError: Rank 1 ended the run: MemoryBudgetError: one row does not fit. This rank stopped with it"
    )
    assert other["later"] == other["now"]
    assert failed["later"].startswith("MemsafeError: This rank has ended already: MemoryBudgetError")
    # Milliseconds when nothing else runs; a rank left waiting would stay for minutes.
    assert max(other["seconds"], failed["seconds"]) < 10


@pytest.mark.slow
def test_ranks_that_fail_at_once_do_not_wait_for_each_other(outcomes: list[Found]) -> None:
    assert [found["fail together"] for found in outcomes] == ["no error", "no error"]


@pytest.mark.slow
def test_objects_that_cannot_be_sent_fail_before_anybody_waits_for_them(outcomes: list[Found]) -> None:
    failed, other = (found["cannot be sent"] for found in outcomes)
    assert "pickle" in failed.lower()
    assert other.startswith("MemsafeError: Rank 0 ended the run: ")


@pytest.mark.slow
def test_ctrl_c_waits_for_the_collective_it_hits(outcomes: list[Found]) -> None:
    interrupted, other = (found["interrupt"] for found in outcomes)
    assert interrupted == ["interrupted"]
    assert other[0] == "[0, 1]"
    assert other[1].startswith("Rank 0 ended the run: KeyboardInterrupt. This rank")


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_word_ends_the_others_too(outcomes: list[Found]) -> None:
    (found, _) = (found["leave"] for found in outcomes)
    assert found[0].startswith("MemsafeError: rank 0 lost the others (")
    assert found[1].startswith("MemsafeError: An earlier collective of this rank did not complete")


@pytest.mark.slow
def test_a_collective_allocates_nothing_that_could_be_refused(outcomes: list[Found]) -> None:
    for found in outcomes:
        assert found["allocations"] == {"sum_gradients": 0, "wait": 0, "gather": 0, "fail": 0}


@pytest.mark.slow
def test_gradients_must_be_there_before_the_sum(outcomes: list[Found]) -> None:
    for found in outcomes:
        assert found["no gradients"] == "AssertionError: complete the gradients before they are summed"
