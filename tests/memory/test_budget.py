import pytest

from memsafe_rl.errors import ConfigError
from memsafe_rl.memory.budget import MemoryBudget
from memsafe_rl.units import format_bytes, parse_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 16 * GIB), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2 mib", 2 * 2**20), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "16 gigs", "-3GiB", "1e9"])
def test_a_size_that_is_none_names_itself_and_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a byte count"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (-GIB, "-1.00 GiB"), (3 * 2**40, "3.00 TiB")]
)
def test_bytes_are_printed_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("written", "expected"),
    [("auto", int(0.9 * 10 * GIB)), ("50%", 12 * GIB), ("16GiB", 16 * GIB), (GIB, GIB)],
)
def test_a_budget_becomes_bytes_of_a_device(written: str | int, expected: int) -> None:
    assert MemoryBudget.parse(written).resolve(total_bytes=24 * GIB, free_bytes=10 * GIB) == expected


def test_a_budget_above_the_device_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"memory_budget is 80.00 GiB but the device has 24.00 GiB"):
        MemoryBudget.parse("80GiB").resolve(total_bytes=24 * GIB, free_bytes=GIB)


def test_a_full_device_leaves_no_budget() -> None:
    with pytest.raises(ConfigError, match=r"comes to 0 bytes: the device has 24.00 GiB, of which 1 B are free"):
        MemoryBudget.parse("auto").resolve(total_bytes=24 * GIB, free_bytes=1)


@pytest.mark.parametrize("written", [24, "24", " 24576 "])
def test_a_number_whose_unit_was_forgotten_is_refused(written: str | int) -> None:
    with pytest.raises(ConfigError, match=r"a number without a unit is bytes\. Write the unit, such as '24(576)?GiB'"):
        MemoryBudget.parse(written)
    assert MemoryBudget.parse("24B").limit_bytes == 24


@pytest.mark.parametrize("written", ["0%", "120%", "x%", 0, -5, "0GiB", 0.5, "0.5", float("nan"), True, ""])
def test_an_impossible_budget_is_refused(written: str | int) -> None:
    with pytest.raises(ConfigError, match="memory_budget"):
        MemoryBudget.parse(written)
