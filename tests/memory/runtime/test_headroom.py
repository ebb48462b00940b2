"""The band of the peak is said when it changes, the allocator's retries when they grow."""

import pytest

from memsafe_rl.memory.runtime.headroom import Headroom, HeadroomWatch, headroom_of

GIB = 2**30


@pytest.mark.parametrize(
    ("peak", "band"),
    [(0, "safe"), (849, "safe"), (850, "edge"), (900, "edge"), (901, "danger"), (1000, "danger"), (1200, "danger")],
)
def test_bands_end_at_85_and_90_per_cent(peak: int, band: str) -> None:
    assert headroom_of(peak, 1000) == band


def test_one_event_for_each_change_and_none_in_between() -> None:
    watch = HeadroomWatch()
    bands = []
    for step, peak in enumerate([100, 200, 870, 880, 950, 960, 300, 100]):
        bands += [
            (event["step"], event["band"]) for event in watch.observe(step=step, peak_bytes=peak, budget_bytes=1000)
        ]
    assert bands == [(2, "edge"), (4, "danger"), (6, "safe")]


def test_the_event_states_the_numbers_in_one_sentence() -> None:
    (event,) = HeadroomWatch().observe(step=3, peak_bytes=int(9.5 * GIB), budget_bytes=10 * GIB)
    sentence = event.pop("sentence")
    assert event == {
        "event": "band",
        "step": 3,
        "band": "danger",
        "peak_bytes": int(9.5 * GIB),
        "budget_bytes": 10 * GIB,
        "share": 0.95,
    }
    assert sentence.startswith("The peak of 9.50 GiB is 95.0% of the budget of 10.00 GiB: ")
    assert "raise memory_budget" in sentence


def test_retries_before_the_run_are_not_its_own() -> None:
    watch = HeadroomWatch()
    counts = [7, 7, 8, 8, 12]
    events = [watch.observe(step=n, peak_bytes=1, budget_bytes=10, allocator_retries=c) for n, c in enumerate(counts)]
    assert [[event["retries"] for event in found] for found in events] == [[], [], [1], [], [4]]
    alarm = events[4][0]
    assert (alarm["event"], alarm["kind"], alarm["step"]) == ("alarm", "allocator_retries", 4)
    assert "no block large enough 4 times" in alarm["sentence"]
    assert "expandable_segments" in alarm["sentence"]


def test_band_and_retries_are_two_events_of_one_step() -> None:
    watch = HeadroomWatch()
    watch.observe(step=0, peak_bytes=1, budget_bytes=10)
    events = watch.observe(step=1, peak_bytes=10, budget_bytes=10, allocator_retries=1)
    assert [event["event"] for event in events] == ["band", "alarm"]
    assert events[0]["band"] == Headroom.DANGER
