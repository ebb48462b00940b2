"""Frozen records that the rooms exchange; this package knows shapes, names and bytes and nothing else.

Axes, as suffixes of tensor names throughout the library: ``B`` sequences (rows), ``P`` prompts, ``G`` samples per
prompt, ``L`` prompt plus completion tokens, ``T`` completion tokens, ``S`` denoising steps, ``V`` vocabulary,
``D`` hidden width, ``M`` completion tokens of several rows laid end to end, ``F`` reward functions.
"""

from memsafe_rl.types.learning import (
    AdvantageResult,
    Denominators,
    Distribution,
    GaussianDistribution,
    LinearHead,
    LogitsHead,
    LossInputs,
    LossResult,
    LossSettings,
    StateFeatures,
    TokenDistribution,
    TokenScores,
    ValueHead,
)
from memsafe_rl.types.plans import (
    CACHE_SCALE_BYTES,
    COMPILE_MODES,
    KV_BLOCK_SLOTS,
    SCORE_ELEMENTS,
    Component,
    MemoryFailure,
    MemoryState,
    ModelGeometry,
    Phase,
    RolloutPlan,
    RolloutWork,
    UnitBytes,
    UpdatePlan,
    UpdateWork,
    blocks_on_host,
    room_for_prompt,
    whole_blocks,
)
from memsafe_rl.types.trajectory import Completion, Ragged, SamplingSettings, SequenceKey, TextStops, Trajectory, Turn
