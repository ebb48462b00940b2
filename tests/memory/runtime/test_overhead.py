"""What watches memory holds none of it while nothing fails; what it costs in time is measured by the benchmark."""

from pathlib import Path

import pytest

from benchmarks.memory_overhead import Bench
from memsafe_rl.memory.simulated.counting import compiler_available


@pytest.mark.slow
@pytest.mark.skipif(not compiler_available(), reason="only the C++ allocator counts in every thread")
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_watching_memory_adds_no_byte_to_the_peak(tmp_path: Path, lora: bool) -> None:
    bench = Bench(str(tmp_path), lora=lora, new_tokens=8)
    for bare_of_memory in (False, True):
        bench.turn(bare_of_memory=bare_of_memory)
    assert bench.trainer.memory_events == []
    assert bench.peak_bytes(bare_of_memory=False) == bench.peak_bytes(bare_of_memory=True)
    assert bench.turn(bare_of_memory=False) > 0
    assert [event["event"] for event in bench.trainer.memory_events] == ["plan"] * 3
