"""A run that is killed again and again, at moments that were chosen, ends like an unbroken one."""

import random
import signal
from pathlib import Path

import pytest

from memsafe_rl.checkpoint.store import checkpoint_folder
from tests.faults.kills import CALLS, SCENES, Blow, Found, Scene, draw_blows, storm_over, unsaved, violations_of

STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_nothing_is_lost(tmp_path: Path, background: bool) -> None:
    scene = Scene("tested", 1.0, settings={"save_total_limit": 2, "save_in_background": background})
    blows = [  # the last falls first
        Blow(signal.SIGTERM, steps=1),
        Blow(signal.SIGKILL, call="torch.save", count=1, moment="halfway"),
        Blow(signal.SIGKILL, call="os.unlink", count=2, moment="after"),
        Blow(signal.SIGKILL, steps=1, delay=0.02),
        Blow(signal.SIGKILL, call="os.write", count=4, moment="halfway"),
        Blow(signal.SIGKILL, call="os.rename", count=2, moment="before"),
    ]
    found = storm_over(scene, blows, tmp_path, STEPS)
    assert found.violations == []
    assert found.blows.total() == len(blows)
    assert found.steps_redone > 0
    assert found.passed_over == 0
    for damage in (
        lambda run: (run / "steps.jsonl").write_bytes((run / "steps.jsonl").read_bytes()[:-20]),
        lambda run: (checkpoint_folder(run, STEPS) / "loop.json").write_text("{}"),
        lambda run: (run / ".checkpoint-3.part").mkdir(),
    ):
        damage(tmp_path / "run-0")
        before = found.violations
        found.violations = violations_of(tmp_path / "run-0", tmp_path / "whole", STEPS)
        assert len(found.violations) > len(before), "a loss would not be noticed"
    assert unsaved(tmp_path / "run-0")


def test_a_third_of_the_kills_is_aimed() -> None:
    blows = [blow for scene in SCENES for blow in draw_blows(random.Random(0), scene, 60, 10)]
    kills = [blow for blow in blows if blow.number == signal.SIGKILL]
    aimed = [blow for blow in kills if blow.call]
    assert 3 * len(aimed) == len(kills) == 60 * len(SCENES)
    assert {blow.call for blow in aimed} == CALLS.keys()
    assert {blow.rank for blow in draw_blows(random.Random(0), SCENES[-1], 20, 0)} == {0, 1}
    assert sum(scene.share for scene in SCENES) == pytest.approx(1)
    assert Found().violations == []
