"""Copies on the host from which checkpoints are written while training goes on."""

from __future__ import annotations

import torch

from memsafe_rl.checkpoint.weights import HostCopies, bytes_of


def held() -> dict[str, object]:
    """Gives nested tensors, two of which are tied."""
    tied = torch.arange(6.0).view(2, 3)
    return {"a": tied, "b": [tied, (torch.ones(4, dtype=torch.int64), "text", None)]}


class TestHostCopies:
    def test_they_are_equal_tied_and_apart_from_what_they_copy(self) -> None:
        value = held()
        copied = HostCopies().copy(value)
        assert torch.equal(copied["a"], value["a"])
        assert copied["b"][0] is copied["a"]
        assert copied["b"][1][1:] == ("text", None)
        value["a"].fill_(7.0)
        assert copied["a"].max() == 5.0
        assert bytes_of(copied) == bytes_of(value) == 6 * 4 + 4 * 8

    def test_the_next_ones_take_the_same_memory(self) -> None:
        copies, value = HostCopies(), held()
        copies.prepared(value)()
        first = copies.copy(value)
        places = first["a"].data_ptr(), first["b"][1][0].data_ptr()
        value["a"].fill_(7.0)
        again = copies.copy(value)
        assert (again["a"].data_ptr(), again["b"][1][0].data_ptr()) == places
        assert again["a"].min() == 7.0

    def test_what_has_grown_gets_memory_of_its_own(self) -> None:
        copies, value = HostCopies(), held()
        copies.copy(value)
        value["a"] = torch.zeros(5)
        assert copies.copy(value)["a"].shape == (5,)
