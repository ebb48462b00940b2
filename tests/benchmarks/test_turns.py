"""The benchmarks of rollouts and steps measure what they say, on the smallest work there is and in one process."""

from typing import Any

import pytest

from benchmarks import rollout, step
from benchmarks.turns import take_turns


class Referee:
    """Calls so many turns and keeps what was reported."""

    def __init__(self, turns: int, order: Any = None) -> None:
        self.left, self.order, self.records = turns, order, []

    def wait(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def report(self, **figures: Any) -> None:
        self.records.append(figures)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["memsafe_rl", "generate"])
def test_an_engine_samples_every_row_to_its_end(engine: str) -> None:
    row = rollout.Row(2, 3, (4, 9), 5, ragged=False)
    referee = Referee(2, (row, 0))
    rollout.play(referee, "gpt2", engine)
    assert [record["tokens"] for record in referee.records] == [30, 30]
    assert all(record["peak_bytes"] > 0 for record in referee.records)


@pytest.mark.slow
def test_half_of_the_ragged_completions_are_short() -> None:
    row = rollout.Row(2, 32, (4, 9), 64, ragged=True)
    tokens = rollout.sample_here(rollout.build_model("gpt2", ragged=True), rollout.build_prompts(row), row, 0)
    # 48 (1 - exp(-64 / 48)) = 35 of 64 tokens on average, with a deviation of about 3 over 64 rows.
    assert 22 * row.rows < tokens < 48 * row.rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["memsafe_rl", "TRL, fast"])
def test_a_turn_is_a_rollout_and_its_updates(side: str) -> None:
    setting = step.Setting(prompts=2, group_size=2, new_tokens=4, layers=1, vocab_size=512)
    referee = Referee(1)
    step.play(referee, setting, side)
    (record,) = referee.records
    assert record["tokens"] == 16
    assert record["peak_bytes"] > record["state_bytes"] > 0


def test_shares_are_ours_over_theirs() -> None:
    ours = {"ms_per_token": 1.0, "cpu_ms_per_token": 1.0, "peak_bytes": 30, "state_bytes": 10}
    theirs = {"ms_per_token": 4.0, "cpu_ms_per_token": 2.0, "peak_bytes": 90, "state_bytes": 10}
    share = step.beside(theirs, ours)["our_share"]
    assert share == {"time": 0.25, "cpu_time": 0.5, "peak": 1 / 3, "peak_above_state": 0.25}


def test_turns_are_turned_round_and_warm_ups_dropped() -> None:
    calls: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def turn(self) -> dict[str, Any]:
            calls.append(self.name)
            return {"error": "broken"} if self.name == "c" else {"number": len(calls)}

        def close(self) -> None:
            calls.append(f"{self.name} closed")

    sides = {name: lambda name=name: Fake(name) for name in "abc"}
    records = take_turns(sides, 1)  # type: ignore[arg-type]
    assert calls == ["a", "b", "c", "c", "b", "a", "a closed", "b closed", "c closed"]
    assert records == {"a": [{"number": 6}], "b": [{"number": 5}], "c": [{"error": "broken"}]}
