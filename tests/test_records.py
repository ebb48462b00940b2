"""Records are read back as they were appended, whatever happens to the file."""

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memsafe_rl.records import RECENT, Lineage, RecordLog, read_lines, records_until

STAMP = {"run_id": "ours", "start": 0}


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "value": step / 3, **values}


def opened(path: Path, **options: Any) -> RecordLog:
    log = RecordLog()
    log.open(path, STAMP | {"start": options.pop("start", 0)}, **options)
    return log


def test_only_the_newest_are_in_memory_and_all_can_be_read(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    records = [record(step) for step in range(3 * RECENT)]
    for one in records:
        log.append(one)
        log.flush()
    assert log == records
    assert log[-1] is records[-1]
    assert log[0] is not records[0]
    assert log[5:9] == records[5:9]
    assert log[-3:] == records[-3:]
    assert sum(map(len, (log._recent, log._waiting))) == RECENT
    assert copy.deepcopy(log) == pickle.loads(pickle.dumps(log)) == records
    with pytest.raises(IndexError):
        log[len(records)]


def test_what_came_before_the_file_moves_into_it(tmp_path: Path) -> None:
    log = RecordLog()
    for step in range(2 * RECENT):
        log.append(record(step))
        log.flush()
    log.open(tmp_path / "log", STAMP)
    log.flush()
    assert [line["step"] for line in read_lines(tmp_path / "log")[0]] == list(range(2 * RECENT))
    assert log == [record(step) for step in range(2 * RECENT)]


def test_numbers_that_json_lacks_are_null_for_other_readers(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    log.append({"step": 1, "kl": float("nan"), "ratio": float("inf")})
    log.flush()
    assert json.loads((tmp_path / "log").read_text(), parse_constant=pytest.fail)["kl"] is None


@pytest.mark.parametrize("torn", [b"", b'{"step": 4, "start": 0, "val', b"\xff\x00"])
def test_half_a_line_spoils_no_other(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log"
    first = opened(path)
    for step in (1, 2, 3):
        first.append(record(step))
    first.flush()
    path.write_bytes(path.read_bytes() + torn)
    second = opened(path, start=1, lineage=Lineage().resumed(1, 3), step=3)
    assert [one["step"] for one in second] == [1, 2, 3]
    second.append(record(4))
    second.flush()
    lines, unreadable = read_lines(path)
    assert [(line["step"], line.get("redone", False)) for line in lines] == [(s, False) for s in (1, 2, 3, 4)]
    assert unreadable == bool(torn)
    third = opened(path, start=2, lineage=Lineage().resumed(2, 4), step=4)
    assert [one["step"] for one in third] == [1, 2, 3]  # the fourth is of a start that this lineage leaves out
    third.append(record(5))
    third.flush()
    assert read_lines(path)[0][-1].get("redone") is None


def test_half_a_line_is_no_record_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"step": 1, "start": 0, "value": {"a": 1}')
    opened(path)  # ends the line, and is killed before it writes
    log = opened(path, start=2)
    log.append(record(1))
    log.flush()
    assert [line.get("redone") for line in read_lines(path)[0]] == [None]


def test_of_several_starts_the_steps_that_count_are_found(tmp_path: Path) -> None:
    path, lineage = tmp_path / "log", Lineage()
    for start, (resumed, last) in enumerate([(0, 8), (4, 6), (8, 9), (5, 7)]):
        lineage = Lineage(((0, 0),)).resumed(start, resumed) if start != 2 else Lineage().resumed(2, 8)
        log = opened(path, start=start, step=resumed)
        for step in range(resumed + 1, last + 1):
            log.append({"step": step, "by": start})
        log.flush()
    assert lineage == Lineage(((0, 0), (3, 5)))
    assert [one["by"] for one in records_until(path, lineage, 7)] == [0, 0, 0, 0, 0, 3, 3]
    unmarked = [line["step"] for line in read_lines(path)[0] if not line.get("redone")]
    assert unmarked == list(range(1, 10))


def test_several_records_of_the_last_step_are_marked_as_often_as_they_stood_there(tmp_path: Path) -> None:
    first = opened(tmp_path / "log")
    for name in ("logged", "evaluated"):
        first.append({"step": 2, "what": name})
    first.flush()
    second = opened(tmp_path / "log", start=1, step=1)
    for name in ("logged", "evaluated", "saved"):
        second.append({"step": 2, "what": name})
    second.flush()
    lines = read_lines(tmp_path / "log")[0]
    assert [line["what"] for line in lines if not line.get("redone")] == ["logged", "evaluated", "saved"]


def test_records_behind_the_checkpoint_of_their_step_count_once(tmp_path: Path) -> None:
    """Those of a killed start are left behind, those of the start that resumed there are not."""
    path = tmp_path / "log"
    first = opened(path)
    for name in ("logged", "behind the checkpoint"):
        first.append({"step": 2, "what": name})
    first.flush()
    at_two = Lineage(logged=(1,))
    second = opened(path, start=1, lineage=at_two.resumed(1, 2), step=2)
    assert [one["what"] for one in second] == ["logged"]
    second.append({"step": 2, "what": "behind the checkpoint"})
    second.append({"step": 2, "what": "further"})
    second.append({"step": 3, "what": "third"})
    second.flush()
    expected = ["logged", "behind the checkpoint", "further", "third"]
    assert list(map(second.__getitem__, range(4))) == list(second)
    assert [one["what"] for one in second] == expected
    assert [line["what"] for line in read_lines(path)[0] if not line.get("redone")] == expected
    at_three = at_two.resumed(1, 2)._replace(logged=(1, 4))
    assert [one["what"] for one in records_until(path, at_three, 3)] == expected
    third = opened(path, start=2, lineage=at_three.resumed(2, 3), step=3)
    assert [one["what"] for one in third] == expected
    of_an_earlier_version = opened(path, start=2, lineage=Lineage(logged=(-1,)).resumed(2, 2), step=2)
    assert [one["what"] for one in of_an_earlier_version] == expected[:2]


def test_only_what_stands_there_already_is_marked_as_done_again(tmp_path: Path) -> None:
    first = opened(tmp_path / "log")
    for step in (2, 5):
        first.append({"step": step})
    first.flush()
    second = opened(tmp_path / "log", start=1, lineage=Lineage().resumed(1, 2), step=2)
    for step in (3, 4, 5, 6):
        second.append({"step": step})
    second.flush()
    assert [line["step"] for line in read_lines(tmp_path / "log")[0] if line.get("redone")] == [5]


def test_a_full_disk_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, write, full = opened(tmp_path / "log"), os.write, [True]

    def some(descriptor: int, content: bytes) -> int:
        if full[0] and len(content) > 10:
            return write(descriptor, content[:10])
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", some)
    for step in (1, 2, 3):
        log.append(record(step))
        assert not log.flush()
    assert (tmp_path / "log").read_bytes() == b""
    assert [one["step"] for one in log] == [1, 2, 3]
    assert caplog.text.count("No space left on device") == 1
    full[0] = False
    assert log.flush(durable=True)
    assert [line["step"] for line in read_lines(tmp_path / "log")[0]] == [1, 2, 3]


def test_logs_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"event": "plan", "step": 1}\n{"step": 2, "seconds": 1.5, "loss": 0.5}\n')
    log = opened(path, start=1, lineage=Lineage().resumed(1, 2), step=2)
    assert [one["step"] for one in log] == [1, 2]


def test_odd_records_neither_stop_the_log_nor_change_their_kind(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    odd = {("a", 1): np.float32(1.5), "count": np.int64(3), "loss": torch.tensor(2.5), "list": [float("nan"), 1]}
    log.append({"step": None, **odd, "many": np.zeros(3), "text": "\ud800"})
    log.append(record(2))
    assert log.flush()
    first, second = (
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log").read_text().splitlines()
    )
    assert (first["('a', 1)"], first["count"], first["loss"], first["list"]) == (1.5, 3, 2.5, [None, 1])
    assert second["step"] == 2


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_file_that_is_cut_while_it_is_written_loses_no_more_than_what_was_cut(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As `logrotate` does with copytruncate; a run ended in a JSONDecodeError after its last step."""
    path = tmp_path / "log"
    log = opened(path)
    for step in (1, 2, 3):
        log.append(record(step))
        log.flush()
    ends = [place + 1 for place, byte in enumerate(path.read_bytes()) if byte == 10]
    os.truncate(path, ends[left] - 5)  # in the middle of a line
    for step in (4, 5):
        log.append(record(step))
        log.flush()
    kept = [*range(1, left + 1), 4, 5]
    assert [one["step"] for one in log] == [line["step"] for line in read_lines(path)[0]] == kept
    assert caplog.text.count("was cut during the run") == 1
