"""Names of a user's own parts: what a name may stand for, and when another part may take it."""

import pytest

from memsafe_rl.errors import ConfigError
from memsafe_rl.ops.advantages import AdvantageEstimator
from memsafe_rl.ops.losses import LOSSES, Loss, LossTraits, needs_whole_rows
from memsafe_rl.ops.registry import Registry
from memsafe_rl.types import LossSettings


def mine(ratios):
    return -ratios.ratio * ratios.advantages


@pytest.fixture
def losses():
    registry = Registry("loss_type", Loss)
    registry.add(LOSSES["grpo"])
    return registry


def test_a_function_is_entered_under_its_name_and_a_second_definition_replaces_it(losses):
    def cell():
        def again(ratios):
            return -ratios.ratio

        return again

    assert losses.name_of("grpo") == "grpo"
    for function in (cell(), cell()):
        assert losses.name_of(function) == "again"
        assert losses["again"].function is function


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Loss("grpo", mine), "'grpo' is taken by the built-in one"),
        (Loss("grpo", LOSSES["grpo"].function), "'grpo' is taken by the built-in one"),
        (Loss("mine", lambda _: None), "'mine' is taken by another one. Give yours another name"),
        (Loss("mine", mine, LossTraits(separable=True)), "'mine' is taken by"),
        (lambda _: None, r"no name for logs and checkpoints. Pass Loss\('name', it\)"),
        (
            Loss,
            r"loss_type is <class .*Loss'>; it must be one of grpo, mine, a function, or Loss\('mine', my_function\)",
        ),
        (None, "loss_type is None; it must be one of grpo"),
        (3, "loss_type is 3; it must be one of grpo"),
    ],
)
def test_a_name_stands_for_one_part(losses, given, words):
    losses.add(Loss("mine", mine))
    with pytest.raises(ConfigError, match=words):
        losses.name_of(given)
    assert losses["mine"] == Loss("mine", mine)


def test_closures_that_hold_different_things_are_different_parts():
    def raised(power):
        def powered(rewards_PG):
            return rewards_PG**power

        return powered

    estimators = Registry("advantage_estimator", AdvantageEstimator)
    assert estimators.name_of(raised(2)) == "powered"
    with pytest.raises(ConfigError, match="advantage_estimator 'powered' is taken"):
        estimators.name_of(raised(3))


def test_traits_are_declared_and_never_assumed():
    assert needs_whole_rows(LossSettings(LOSSES.add(Loss("whole rows", mine)).name)) == ["loss_type"]
    assert needs_whole_rows(LossSettings("dapo", "sequence", off_policy_mask_threshold=1.0)) == [
        "importance_sampling_level",
        "off_policy_mask_threshold",
    ]
    with pytest.raises(ConfigError, match=r"aggregation of a loss is 'mean'.*token-mean"):
        LossTraits(aggregation="mean")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Loss("", mine), r"Loss\('', .*\) is not a name and a function. Write Loss\('mine', my_function\)"),
        (lambda: Loss("nc", 3), r"Loss\('nc', 3\) is not a name and a function"),
        (lambda: Loss("nc", Loss), r"Loss\('nc', <class .* is not a name and a function"),
        (lambda: Loss("m", mine, measure=3), "loss 'm' has .* measure 3 and .*; give .* a function and a mapping"),
        (lambda: Loss("m", mine, metrics=None), "loss 'm' has .* metrics None; give"),
        (lambda: Loss("m", mine, "token"), r"loss 'm' has traits 'token', .*; give LossTraits"),
        (
            lambda: LossTraits(levels=("row",)),
            r"levels of a loss are \('row',\); write a tuple of sequence, ",
        ),
        (lambda: LossTraits(levels="token"), "levels of a loss are 'token'"),
        (lambda: LossTraits(levels=()), r"levels of a loss are \(\)"),
        (lambda: AdvantageEstimator("e", None), r"AdvantageEstimator\('e', None\) is not a name and a function"),
        (lambda: AdvantageEstimator("e", mine, least_group=0), "least_group of estimator 'e' is 0; .* at least 1"),
        (lambda: AdvantageEstimator("e", mine, least_group=True), "least_group of estimator 'e' is True"),
    ],
)
def test_a_part_that_cannot_work_is_refused_when_it_is_built(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
