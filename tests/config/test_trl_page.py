"""The page of TRL's settings says what the code does."""

import dataclasses

import pytest
import trl

from benchmarks import settings_page, trl_page
from memsafe_rl import ConfigError, GRPOConfig, RLOOConfig


def test_the_page_is_what_the_declarations_give() -> None:
    told = "the page is old: run python -m benchmarks.trl_page"
    assert trl_page.PAGE.read_text(encoding="utf-8") == trl_page.page(), told


def test_every_setting_and_argument_has_one_row() -> None:
    page = trl_page.page()
    fields = {field.name for config in (trl.GRPOConfig, trl.RLOOConfig) for field in dataclasses.fields(config)}
    for name in fields:
        assert page.count(f"\n| `{name}`") == 1, name
    assert "| `tools` (GRPO) |" in page
    assert "| `reward_clip_range` (RLOO) | same |" in page


def test_the_page_of_settings_is_what_is_declared() -> None:
    written = settings_page.PAGE.read_text()
    assert written == settings_page.page(), "run `python -m benchmarks.settings_page`"
    assert "| `memory_budget` | 'auto' |" in written


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_a_row_that_says_refused_is(config: type) -> None:
    rows = dict(line.split(" | ", 1) for line in trl_page.settings())
    assert "**refused**" in rows["| `deepspeed`"]
    with pytest.raises(ConfigError, match=r"deepspeed is 'ds\.json', which is refused"):
        config(deepspeed="ds.json", use_cpu=True)
    assert rows["| `ddp_backend`"].startswith("accepted, changes nothing")
    config(ddp_backend="gloo", use_cpu=True)
