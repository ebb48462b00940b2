"""A run holds and writes as much at its end as when it had settled; figures of saving are what they say."""

from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import saving
from benchmarks.soak import LIMITS, Sample, growth, soak
from memsafe_rl.records import read_lines


@pytest.mark.slow
def test_a_run_that_has_settled_neither_grows_nor_writes_more(tmp_path: Path) -> None:
    samples, seconds, folder = soak(tmp_path, 140, 20)
    found = growth(samples, seconds, settled=60)
    timed = ("step_seconds_ratio",)  # tests share their machine
    assert {name: value for name, value in found.items() if value > LIMITS[name] and name not in timed} == {}
    assert [line["step"] for line in read_lines(folder / "steps.jsonl")[0]] == list(range(1, 141))
    assert [sample.step for sample in samples] == list(range(20, 141, 20))


def test_growth_is_noticed() -> None:
    samples = [Sample(step, step, 4 * step, 10_000 * step, 0, 9 * step, 1000 + step) for step in range(0, 400, 20)]
    found = growth(samples, [0.1] * 200 + [0.2] * 200)
    assert found == {
        "tensors": 280,
        "tensor_bytes": 1120,
        "python_bytes": 2_800_000,
        "resident_bytes": 2520,
        "share_of_bytes_saved": pytest.approx(1380 / 1100 - 1),
        "step_seconds_ratio": pytest.approx(2),
    }


@pytest.mark.slow
def test_what_a_save_takes_is_timed(tmp_path: Path) -> None:
    tiny = {**saving.SIZES["small"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}
    found = {way: saving.Timed() for way in saving.WAYS}
    with patch.dict(saving.SIZES, small={**tiny, "num_hidden_layers": 1}):
        for way, timed in found.items():
            saving.timed_run("small", way, 3, 2, 4, tmp_path / way, timed)
    assert {way: (len(timed.seconds), len(timed.stalls)) for way, timed in found.items()} == {
        "not": (1, 0),
        "at once": (1, 1),
        "in the background": (1, 1),
    }
    assert not list(tmp_path.iterdir())
    found = {
        "not": saving.Timed([10.0, 20.0]),
        "at once": saving.Timed([14.0, 24.0], [2.0, 2.0], [1.0, 1.0]),
        "in the background": saving.Timed([11.0, 21.0], [0.2, 0.2], [0.1, 0.1]),
    }
    figures = saving.compare(found, saves=2)
    assert (figures["stall"], figures["lost"]) == (pytest.approx(0.1), pytest.approx(0.25))
