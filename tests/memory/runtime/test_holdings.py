"""What bytes are for: marks, claims, phases, and owners; on both counters, with and without faults."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from memsafe_rl import accounting
from memsafe_rl.accounting import charge, claim, hold, host_memory, in_phase, is_on_host, weights_of
from memsafe_rl.memory.runtime.host_memory import offloaded
from memsafe_rl.memory.runtime.tracker import held_by, optimizer_tensors, watch_gradients
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.memory.simulated.ledger import Held
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.models.loading import load_model
from memsafe_rl.ops.logprobs import token_logprobs
from memsafe_rl.types import Component, Phase, Ragged, Trajectory
from tests.tiny import PAD_ID, tiny_model

KIB = 1024
EXACT = pytest.mark.parametrize("exact", [True, False])


def floats(kib: int) -> Tensor:
    return torch.empty(kib * KIB // 4)


def runs_out(work: Callable[[], object]) -> bool:
    """Runs something and says whether it ran out of memory; its frames are gone when this returns."""
    try:
        work()
    except torch.OutOfMemoryError:
        return True
    return False


def parts(memory: SimulatedMemory) -> dict[str, int]:
    """Returns the components that hold anything, in KiB, and checks that they sum to the total."""
    split = memory.live_by_component()
    assert list(split) == list(Component)
    assert sum(split.values()) == memory.live_bytes
    return {component.value: held // KIB for component, held in split.items() if held}


@pytest.mark.parametrize("mark", [lambda: charge(Component.LOGITS), lambda: in_phase(Phase.LOAD), host_memory])
def test_a_mark_nobody_hears_makes_nothing(mark: Any) -> None:
    assert mark() is mark()


@pytest.mark.parametrize("claimed", [claim, hold])
def test_a_claim_nobody_hears_reads_nothing(claimed: Any) -> None:
    tensors = iter([torch.ones(1)])
    claimed(Component.LOGITS, tensors)
    assert next(tensors) == 1


@EXACT
def test_bytes_count_for_the_innermost_mark_until_they_die(exact: bool) -> None:
    with SimulatedMemory(exact=exact) as memory:
        a = floats(1)
        with charge(Component.WEIGHTS):
            b = floats(2)
            with charge(Component.LOGITS):
                c = floats(4)
            d = floats(8)
        assert parts(memory) == {"weights": 10, "logits": 4, "other": 1}
        with charge(Component.OPTIMIZER):
            del b, c
        assert parts(memory) == {"weights": 8, "other": 1}
        with pytest.raises(ValueError, match="inside"), charge(Component.TRAJECTORY):
            raise ValueError("inside")
        e = floats(16)
        assert parts(memory) == {"weights": 8, "other": 17}
        del a, d, e
        assert parts(memory) == {}
    assert parts(memory) == {}


def test_component_and_host_marks_hold_for_their_thread_and_phases_for_all() -> None:
    made: list[Tensor] = []
    with SimulatedMemory(exact=True) as memory, in_phase(Phase.UPDATE):
        with charge(Component.LOGITS), host_memory():
            thread = threading.Thread(target=lambda: made.append(floats(8)))
            thread.start()
            thread.join()
        assert parts(memory) == {"activations": 8}
        thread = threading.Thread(target=made.clear)
        thread.start()
        thread.join()
        assert parts(memory) == {}


@EXACT
def test_host_memory_is_counted_apart_and_never_refused(exact: bool) -> None:
    with SimulatedMemory(capacity_bytes=4 * KIB, fail_at=1, exact=exact) as memory:
        with host_memory(), charge(Component.TRAJECTORY):
            x = floats(16)
            del x
            x = floats(8)
        assert (memory.live_bytes, memory.peak_bytes, memory.allocations) == (0, 0, 0)
        assert (memory.host_live_bytes, memory.host_peak_bytes) == (8 * KIB, 16 * KIB)
        assert is_on_host(x[3:])
        claim(Component.WEIGHTS, [x])
        assert parts(memory) == {}
        with pytest.raises(torch.OutOfMemoryError):
            floats(1)
        y = floats(1)
        assert not is_on_host(y)
        del x
        assert (memory.live_bytes, memory.host_live_bytes) == (KIB, 0)


@EXACT
def test_a_claim_moves_whole_storages_that_count_and_passes_over_others(exact: bool, tmp_path: Path) -> None:
    before = floats(1)
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=1024)
    foreign = [before, mapped, torch.from_numpy(numpy.ones(9)), torch._lazy_clone(before), torch.ones(2).to_sparse()]
    with SimulatedMemory(exact=exact) as memory:
        a, b = floats(4), floats(2)
        claim(Component.KV_CACHE, [a[5:9], a])
        claim(Component.GRADIENTS, [*foreign, torch.empty(0), torch.empty(9, device="meta")])
        assert parts(memory) == {"kv_cache": 4, "other": 2}
        claim(Component.WEIGHTS, [b])
        del a
        assert parts(memory) == {"weights": 2}


@EXACT
def test_what_was_made_elsewhere_can_be_held(exact: bool, tmp_path: Path) -> None:
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=1024).fill_(3.0)
    older, too_much = floats(2), torch.from_numpy(numpy.ones(1024, dtype="float32"))
    for _ in range(2):
        with SimulatedMemory(capacity_bytes=8 * KIB, exact=exact) as memory:
            hold(Component.WEIGHTS, [mapped, mapped[10:], older])
            assert parts(memory) == {"weights": 6}
            hold(Component.OTHER, [older])
            assert parts(memory) == {"weights": 4, "other": 2}
            with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4096 bytes\. 6144 bytes are"):
                hold(Component.WEIGHTS, [too_much])
            assert (memory.refusals, memory.live_bytes, memory.peak_bytes) == (1, 6 * KIB, 6 * KIB)
            memory.fail_after(1)
            with pytest.raises(torch.OutOfMemoryError, match="chosen to fail"):
                hold(Component.WEIGHTS, [too_much])
            assert mapped.sum() == 3 * 1024
    with SimulatedMemory(exact=exact) as memory:
        hold(Component.WEIGHTS, [mapped, older])
        del mapped, older
        assert parts(memory) == {}


@EXACT
def test_phases_know_their_peak_and_what_made_it(exact: bool) -> None:
    with SimulatedMemory(exact=exact) as memory:
        with charge(Component.WEIGHTS):
            weights = floats(4)
        with in_phase(Phase.ROLLOUT):
            with charge(Component.KV_CACHE):
                cache = floats(16)
            del cache
            hidden = floats(2)
            assert memory.phase_peaks()[Phase.ROLLOUT][Component.KV_CACHE] == 16 * KIB
        del hidden
        with in_phase(Phase.UPDATE):
            a = floats(8)
            memory.reset_peak()
            claim(Component.GRADIENTS, [a])
            with in_phase(Phase.SCORE):
                b = floats(32)
            del b
        with in_phase(Phase.ROLLOUT):
            floats(1)
        memory.reset_peak()
        assert memory.peak_bytes == 12 * KIB
    del weights, a
    seen = {
        phase.value: {component.value: held // KIB for component, held in split.items() if held}
        for phase, split in memory.phase_peaks().items()
    }
    assert seen == {
        "rollout": {"weights": 4, "kv_cache": 16},
        "score": {"weights": 4, "gradients": 8, "activations": 32},
        "update": {"weights": 4, "gradients": 8, "activations": 32},
    }
    records = [
        (record.phase.value, record.live_bytes // KIB, record.peak_bytes // KIB, sum(record.components.values()))
        for record in memory.timeline
    ]
    assert records == [
        ("rollout", 6, 20, 20 * KIB),
        ("score", 44, 44, 44 * KIB),
        ("update", 12, 44, 44 * KIB),
        ("rollout", 12, 13, 13 * KIB),
    ]
    times = [(record.start_seconds, record.end_seconds) for record in memory.timeline]
    assert all(0 <= start <= end for start, end in times)
    assert [end for _, end in times] == sorted(end for _, end in times)


@EXACT
def test_a_claim_right_at_the_peak_is_part_of_it_and_a_phase_ends_with_its_default(exact: bool) -> None:
    with SimulatedMemory(exact=exact) as memory:
        with in_phase(Phase.UPDATE):
            a = floats(4)
            claim(Component.GRADIENTS, [a])
            with in_phase(Phase.LOAD):
                b = floats(1)
            c = floats(2)
        d = floats(8)
        assert parts(memory) == {"gradients": 4, "other": 9, "activations": 2}
        del b, c, d
    load, update = memory.phase_peaks()[Phase.LOAD], memory.phase_peaks()[Phase.UPDATE]
    assert load == dict.fromkeys(Component, 0) | {Component.GRADIENTS: 4 * KIB, Component.OTHER: KIB}
    assert update == load | {Component.ACTIVATIONS: 2 * KIB}
    with SimulatedMemory(exact=exact) as memory, in_phase(Phase.UPDATE):
        a = floats(4)
        claim(Component.GRADIENTS, [a])
    assert memory.phase_peaks()[Phase.UPDATE][Component.GRADIENTS] == 4 * KIB


@EXACT
def test_nested_simulations_keep_their_own_counts(exact: bool) -> None:
    with SimulatedMemory(exact=exact) as outer, in_phase(Phase.UPDATE):
        with charge(Component.WEIGHTS):
            a = floats(8)
        with SimulatedMemory(exact=exact) as inner:
            with in_phase(Phase.ROLLOUT), charge(Component.LOGITS):
                b = floats(2)
            with host_memory():
                c = floats(4)
            assert parts(inner) == {"logits": 2}
            if exact:
                claim(Component.GRADIENTS, [a])
                assert inner.live_by_component()[Component.WEIGHTS] == -8 * KIB
        assert parts(outer) == {"gradients" if exact else "weights": 8, "logits": 2}
        assert (outer.host_live_bytes, inner.host_peak_bytes) == (4 * KIB, 4 * KIB)
        del a, b, c
        assert parts(outer) == {}
    assert sum(outer.phase_peaks()[Phase.ROLLOUT].values()) == 10 * KIB
    assert sum(inner.phase_peaks()[Phase.ROLLOUT].values()) == 2 * KIB


def rows_of(lengths: list[tuple[int, int]]) -> Trajectory:
    prompts, actions = zip(*lengths, strict=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 250, (sum(prompts) + sum(actions),), generator=generator)
    return Trajectory(
        conditions=Ragged(ids[: sum(prompts)], prompts),
        condition_of_row=tuple(range(len(prompts))),
        actions=Ragged(ids[sum(prompts) :], actions),
        loss_mask=Ragged(torch.ones(sum(actions)), actions),
        sampling_logprobs=None,
        advantages=torch.zeros(len(prompts)),
        group_of_row=tuple(range(len(prompts))),
        finished=(True,) * len(prompts),
    )


class Run:
    """A model that learns in one update phase and one optimizer phase, all made inside the simulation."""

    def __init__(self, *, checkpointed: bool, offload: bool) -> None:
        self.checkpointed, self.offload = checkpointed, offload
        with in_phase(Phase.LOAD), charge(Component.WEIGHTS):
            torch.manual_seed(0)
            self.model = tiny_model("qwen3", layers=3, hidden=64)
        self.adapter = CausalLMAdapter(self.model, pad_token_id=PAD_ID)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        with charge(Component.TRAJECTORY):
            self.trajectory = rows_of([(20, 30), (10, 40)])

    def step(self) -> None:
        with in_phase(Phase.UPDATE), watch_gradients(self.model.parameters()):
            with self.adapter.recompute(self.checkpointed), self.kept():
                distribution = self.adapter.distribution(self.trajectory, [0, 1])
                logprobs, _ = token_logprobs(distribution, temperature=1.0, tile=16, with_entropy=False)
            logprobs.sum().backward()
        with in_phase(Phase.OPTIMIZER), charge(Component.OPTIMIZER):
            self.optimizer.step()

    def kept(self) -> Any:
        return offloaded([*self.model.parameters(), *self.model.buffers()]) if self.offload else nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_two_counters_agree_on_what_a_training_step_holds(checkpointed: bool, offload: bool) -> None:
    Run(checkpointed=checkpointed, offload=offload).step()  # some libraries keep tensors of their first use
    lives, peaks, hosts, owners = [], [], [], []
    for exact in (True, False):
        with SimulatedMemory(exact=exact) as memory:
            run = Run(checkpointed=checkpointed, offload=offload)
            run.step()
            run.step()
            gc.collect()
            lives.append(memory.live_by_component())
            peaks.append(memory.phase_peaks())
            hosts.append((memory.host_live_bytes, memory.host_peak_bytes))
            stored = [run.trajectory.conditions.flat, run.trajectory.actions.flat, run.trajectory.loss_mask.flat]
            owners.append(
                held_by(
                    "cpu",
                    weights=weights_of(run.model),
                    optimizer=optimizer_tensors(run.optimizer),
                    trajectory=[*stored, run.trajectory.advantages],
                )
            )
            del run, stored
            gc.collect()
            assert (memory.live_bytes, memory.host_live_bytes) == (0, 0)
            assert set(memory.live_by_component().values()) == {0}
    assert lives[0] == lives[1]
    assert owners[0] == owners[1]
    assert {component: held for component, held in lives[0].items() if component in owners[0]} == owners[0]
    assert sum(lives[0].values()) == sum(owners[0].values())
    assert hosts[0] == hosts[1]
    assert (hosts[0][1] > 0) is offload
    for phase, split in peaks[0].items():
        # Scratch inside kernels is all they may differ by.
        assert sum(split.values()) == pytest.approx(sum(peaks[1][phase].values()), rel=5e-3, abs=8 * KIB), phase
        for component, held in split.items():
            assert held == pytest.approx(peaks[1][phase][component], rel=2e-2, abs=16 * KIB), (phase, component)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_fault_corrupts_the_counts(checkpointed: bool) -> None:
    with SimulatedMemory() as memory:
        run = Run(checkpointed=checkpointed, offload=True)
        run.step()
        run.model.zero_grad()
        started, before, host_before = memory.allocations, memory.live_by_component(), memory.host_live_bytes
        run.step()
        number = memory.allocations - started
        run.model.zero_grad()
        assert memory.live_by_component() == before
        for fault in range(1, number + 1, max(1, number // 40)):
            memory.fail_after(fault)
            assert runs_out(run.step)
            run.model.zero_grad()
            torch.ones(1, requires_grad=True).sum().backward()  # empties the queue that a failed backward left full
            assert (memory.live_by_component(), memory.host_live_bytes) == (before, host_before), f"allocation {fault}"


def test_counts_stay_whole_while_threads_allocate_claim_and_free() -> None:
    def work(component: Component) -> None:
        held: list[Tensor] = []
        for number in range(300):
            with charge(component), host_memory() if number % 5 == 0 else ExitStack():
                held.append(torch.empty(number % 37 + 1))
            if number % 3 == 0:
                claim(Component.OTHER, held[-2:])
            if number % 7 == 0:
                del held[::2]

    with SimulatedMemory(exact=True) as memory:
        threads = [threading.Thread(target=work, args=(component,)) for component in (*Component, *Component)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            memory.phase_peaks()
            held, parts_held = memory._counter.split(Held.NOW)
            assert sum(parts_held.values()) == held >= 0
        assert parts(memory) == {}
        assert memory.host_live_bytes == 0


def test_marks_of_an_earlier_count_are_void() -> None:
    context = host_memory()
    with SimulatedMemory():
        context = host_memory()
        context.__enter__()
    with SimulatedMemory() as memory:
        x = floats(1)
        assert (memory.live_bytes, memory.host_live_bytes) == (KIB, 0)
    context.__exit__(None, None, None)
    assert x.numel() == 256


def test_gradients_are_watched_only_while_somebody_counts() -> None:
    weight = torch.ones(256, requires_grad=True)
    assert not watch_gradients([weight])._exit_callbacks
    with SimulatedMemory() as memory:
        with watch_gradients([weight, torch.ones(2)]) as watch:
            (weight * 2).sum().backward()
            assert parts(memory) == {"gradients": 1}
            watch.close()
        weight.grad = None
        (weight * 2).sum().backward()
        assert parts(memory) == {"other": 1}
    assert accounting._listeners == []


def test_owners_by_hand() -> None:
    with SimulatedMemory():
        layer = nn.Linear(16, 8)
        layer.register_buffer("tied", layer.weight.detach())
        optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
        held = held_by("cpu", weights=weights_of(layer), optimizer=optimizer_tensors(optimizer))
        assert list(held.values()) == [4 * (16 * 8 + 8), 0, 0, 0]
        layer(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        with host_memory():
            parked = torch.ones(100)
        rows = torch.ones(10)
        held = held_by(
            "cpu",
            weights=weights_of(layer),
            optimizer=optimizer_tensors(optimizer),
            trajectory=[rows, rows[2:], parked],
        )
        size = 4 * (16 * 8 + 8)
        assert held == {
            Component.WEIGHTS: size,
            Component.GRADIENTS: size,
            Component.OPTIMIZER: size,
            Component.TRAJECTORY: 40,
        }
        assert set(held_by("cuda", weights=weights_of(layer), optimizer=optimizer_tensors(optimizer)).values()) == {0}
        assert len(optimizer_tensors(optimizer)) == 2


def test_the_state_of_quantised_layers_is_theirs() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with SimulatedMemory() as memory:
        before = memory.live_bytes
        four = bitsandbytes.nn.Linear4bit(256, 256, bias=False, compress_statistics=True, quant_type="nf4").to("cpu")
        gc.collect()
        held = held_by("cpu", weights=weights_of(four))
        state = four.weight.quant_state
        nested = state.state2
        tensors = [state.absmax, state.code, state.offset, nested.absmax, nested.code]
        assert held[Component.WEIGHTS] == 256 * 256 // 2 + sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert held[Component.WEIGHTS] == pytest.approx(memory.live_bytes - before, abs=4 * KIB)
        eight = bitsandbytes.nn.Linear8bitLt(256, 256, bias=False, has_fp16_weights=False).to("cpu")
        assert held_by("cpu", weights=weights_of(eight))[Component.WEIGHTS] == 256 * 256 + 4 * 256
        eight(torch.randn(2, 256))
        assert held_by("cpu", weights=weights_of(eight))[Component.WEIGHTS] == 256 * 256 + 4 * 256


@pytest.mark.slow
@EXACT
def test_weights_mapped_from_a_file_are_charged_when_loaded(exact: bool, tmp_path: Path) -> None:
    tiny_model("llama", layers=2, hidden=64).save_pretrained(tmp_path)
    with SimulatedMemory(exact=exact) as memory, in_phase(Phase.LOAD):
        loaded = load_model(str(tmp_path), with_reference=True)
        gc.collect()
        both = held_by("cpu", weights=weights_of(loaded.model, loaded.reference_model))
        assert memory.live_by_component()[Component.WEIGHTS] == both[Component.WEIGHTS]
        assert memory.live_bytes - both[Component.WEIGHTS] <= KIB
        size = memory.live_bytes // 2
        del loaded
        gc.collect()
        assert memory.live_bytes <= KIB
        memory.set_capacity(size // 2)
        with pytest.raises(torch.OutOfMemoryError):
            load_model(str(tmp_path))
        gc.collect()
        assert memory.live_bytes <= KIB


def test_logits_and_caches_are_seen_at_the_peak_of_their_phase() -> None:
    model = tiny_model("llama", vocab_size=2000, layers=2, hidden=32)
    adapter = CausalLMAdapter(model, pad_token_id=PAD_ID)
    trajectory = rows_of([(40, 60)] * 4)
    with SimulatedMemory() as memory:
        with in_phase(Phase.SCORE), torch.no_grad():
            token_logprobs(adapter.distribution(trajectory, range(4)), temperature=1.0, tile=128, with_entropy=True)
        with in_phase(Phase.UPDATE), watch_gradients(model.parameters()):
            scores = token_logprobs(
                adapter.distribution(trajectory, range(4)), temperature=1.0, tile=128, with_entropy=False
            )
            scores[0].sum().backward()
        with in_phase(Phase.ROLLOUT):
            logits, state = adapter.prefill(trajectory.conditions.rows())
            state = state.select([row // 3 for row in range(12)])
            logits = adapter.decode_step(state, torch.zeros(12, dtype=torch.long))
            assert memory.live_by_component()[Component.KV_CACHE] == state.nbytes()
            assert memory.live_by_component()[Component.LOGITS] == logits.untyped_storage().nbytes()
    peaks = memory.phase_peaks()
    tile = 128 * 2000 * 4
    for phase in (Phase.SCORE, Phase.UPDATE):
        assert tile <= peaks[phase][Component.LOGITS] <= 1.3 * tile
    head = model.get_output_embeddings().weight.nbytes
    assert head <= peaks[Phase.UPDATE][Component.GRADIENTS] <= 1.1 * sum(w.nbytes for w in model.parameters())
    assert peaks[Phase.ROLLOUT][Component.KV_CACHE] >= 0.9 * state.nbytes()
