"""Random runs and the limits that forecasts of them are held to."""

from __future__ import annotations

import pytest

from benchmarks.forecast_error import Limits, main
from benchmarks.random_runs import FAMILIES, RandomRun, draw_run
from tests.device import build


def test_limits_by_hand() -> None:
    within = {"peak": 0.0, "update": 0.04}
    assert Limits().passed([within, within, {"peak": 0.049}]) == []
    low, middle = Limits().passed([{"peak": -0.02, "update": 0.0}])
    assert low == "a peak is forecast 2.00% too low, and at most 1.00% is allowed"
    assert middle == "the median error of peaks is 2.000%, and at most 0.100% is allowed"
    (high,) = Limits().passed([within, within, {"peak": 0.06}])
    assert high.startswith("a peak is forecast 6.00% too high")
    (phase,) = Limits().passed([within, {"peak": 0.0, "score": -0.07}])
    assert phase == "the forecast of score is 7.00% off, and at most 5.00% is allowed"


def test_runs_are_the_same_for_the_same_seed_and_reach_every_family() -> None:
    runs = [draw_run(0, index) for index in range(200)]
    assert runs == [draw_run(0, index) for index in range(200)]
    assert runs != [draw_run(1, index) for index in range(200)]
    assert {run.family for run in runs} == set(FAMILIES)


@pytest.mark.parametrize("run", [draw_run(0, index) for index in range(40)], ids=lambda run: run.family)
def test_a_run_is_cut_into_whole_batches(run: RandomRun) -> None:
    assert run.prompts * run.group % (run.parts * run.accumulation) == 0
    assert len(run.prompt_tokens) > run.prompts * run.steps // (run.parts * run.iterations)
    assert run.sizes.hidden % run.sizes.heads == 0


def test_a_pretend_device_is_refused_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "missing", lambda: "no g++")
    with pytest.raises(SystemExit):
        main(["--random", "1", "--device", "pretend"])
    assert "--device pretend: no g++. Use cpu." in capsys.readouterr().err


def test_settings_made_by_hand_run_on_the_cpu_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "pretend"])
    assert "write --random N too" in capsys.readouterr().err
