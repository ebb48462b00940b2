"""Steps and blocks through `torch.compile`: same tokens and gradients, few forms, and every failure survived."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import T5Config, T5ForConditionalGeneration

from memsafe_rl import FixedPolicy, GRPOConfig, GRPOTrainer, RolloutPlan, SimulatedMemory, UpdatePlan
from memsafe_rl.memory.simulated.counting import compiler_available
from memsafe_rl.models import compiling
from memsafe_rl.models.compiling import Compiled
from memsafe_rl.models.language.factory import adapter_for, check_adapter
from memsafe_rl.types import Completion, Phase, SamplingSettings, SequenceKey
from tests.rollout.plainly import generate
from tests.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.skipif(not compiler_available(), reason="inductor needs a C++ compiler on a CPU"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() == "DEFAULT",
        reason="without vector instructions inductor writes C++ that g++ refuses: 'at::vec' has not been declared",
    ),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # dynamo's own look at an input
]
ENDS = (EOS_ID, *range(2, 30))
"""Tokens that end a completion: an eighth of all, so that rows leave at many steps."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def network(arch: str) -> Any:
    """A network of one block, whose code all blocks share."""
    if arch != "t5":
        return tiny_model(arch, layers=1)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 258}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "decoder_start_token_id": PAD_ID}
    return T5ForConditionalGeneration(T5Config(**sizes, **ids)).eval()


def drawn(adapter: Any, **plan: Any) -> list[Completion]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 258, (length,), generator=generator) for length in (3, 11, 7)]
    keys = [[SequenceKey(3, 1, prompt, sample) for sample in range(4)] for prompt in range(3)]
    return generate(adapter, prompts, keys, SamplingSettings(40, ENDS, temperature=1.5), RolloutPlan(**plan))


def require_alike(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids.tolist() == other.ids.tolist() or one.ties or other.ties
        if one.ids.tolist() == other.ids.tolist():
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=5e-5)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs the captured graphs: inductor, whose C++ takes a minute a case, or PyTorch's own operators one by one.

    What is captured, differentiated and captured again for other shapes is the same under both, and is what a network
    can break; inductor translates all of qwen3, and a step of T5.
    """
    if request.param != "inductor":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("arch", "backend"),
    [("qwen3", "inductor"), ("gemma3", "aot_eager"), ("gpt2", "aot_eager"), ("t5", "inductor")],
    indirect=["backend"],
)
def test_compiled_steps_draw_the_tokens_of_eager_ones(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_for(network(arch), pad_token_id=PAD_ID)
    check_adapter(adapter)
    plain = drawn(adapter)
    assert len({len(row.ids) for row in plain}) > 4  # rows fall away at many steps
    with caplog.at_level(logging.WARNING):
        require_alike(drawn(adapter, compile="default"), plain)
        assert 1 <= counters["stats"]["unique_graphs"] <= 2  # one row, and any other number
        require_alike(drawn(adapter, compile="default", rows_in_flight=5), plain)
    assert counters["stats"]["unique_graphs"] <= 2
    assert "without torch.compile" not in caplog.text


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_for(tiny_model(), pad_token_id=PAD_ID)
    check_adapter(adapter)
    plain = drawn(adapter)
    own = adapter.lm.base_model.norm.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden.sum().item()
        torch._dynamo.graph_break()
        return own(hidden)

    adapter.lm.base_model.norm.forward = forward
    with caplog.at_level(logging.WARNING):
        require_alike(drawn(adapter, compile="default"), plain)
    assert caplog.text.count("runs without torch.compile") == 1
    assert "Qwen3Model" in caplog.text


@pytest.mark.slow
def test_more_forms_than_the_bound_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(compiling._BOUND, "recompile_limit", 2)
    words = {"one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0}  # each is a form of its own
    function = Compiled(lambda values, word: values * words[word], "a product")
    with caplog.at_level(logging.WARNING):
        found = [function.run("default", torch.ones(3), word) for word in words]
    assert [float(row[0]) for row in found] == [1.0, 2.0, 3.0, 4.0]
    assert counters["stats"]["unique_graphs"] == 2
    assert caplog.text.count("a product runs without torch.compile: FailOnRecompileLimitHit") == 1


def test_what_is_known_not_to_compile_is_compiled_in_no_mode(caplog: pytest.LogCaptureFixture) -> None:
    function = Compiled(torch.sin, "a sine", "its cache grows")
    with caplog.at_level(logging.WARNING):
        for mode in ("default", "reduce-overhead"):
            assert function.run(mode, torch.zeros(1)) == 0
    assert counters["stats"]["unique_graphs"] == 0
    assert caplog.text.count("a sine runs without torch.compile: its cache grows") == 1


def test_a_refused_allocation_while_compiling_is_one_to_be_repeated() -> None:
    refused = torch.OutOfMemoryError("no room")

    def failing(*_: Any) -> Any:
        raise BackendCompilerFailed(lambda: None, refused, None)

    function = Compiled(torch.sin, "a sine")
    function._made["default"] = failing
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        function.run("default", torch.ones(1))
    assert function._made["default"] is failing  # it is tried again


# ------------------------------------------------------------------ whole runs


def learnt(trainer: GRPOTrainer) -> torch.Tensor:
    """Runs a trainer and gives the gradients of its first step, flat."""
    found: list[torch.Tensor] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        found.append(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))

    hook = register_optimizer_step_pre_hook(note)
    try:
        trainer.train()
    finally:
        hook.remove()
    return found[0]


def spread(completions: Any, **_: Any) -> list[float]:
    return [float(place % 7) for place, _ in enumerate(completions)]


def trainer_of(
    folder: Path, rollout: RolloutPlan, update: UpdatePlan, arch: str = "qwen3", **config: Any
) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 1e-3,
    }
    return GRPOTrainer(
        network(arch),
        spread,
        args=GRPOConfig(output_dir=str(folder), **{**settings, **config}),
        train_dataset=Dataset.from_dict({"prompt": ["a" * length for length in (3, 9, 14, 5)]}),
        processing_class=tiny_tokenizer(),
        memory_policy=FixedPolicy(rollout, update),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("arch", "backend", "cut"),
    [
        ("qwen3", "inductor", {"pack_prompts": True, "micro_batch_tokens": 60}),
        ("qwen3", "aot_eager", {"checkpointing": True}),
        ("gemma3", "aot_eager", {"micro_batch_tokens": 60}),
        ("t5", "aot_eager", {}),
    ],
    indirect=["backend"],
)
def test_compiled_blocks_give_the_gradients_of_eager_ones(arch: str, cut: dict[str, Any], tmp_path: Path) -> None:
    plain = learnt(trainer_of(tmp_path, RolloutPlan(), UpdatePlan(**cut), arch, max_steps=1))
    compiled = learnt(trainer_of(tmp_path, RolloutPlan(), UpdatePlan(compile="default", **cut), arch, max_steps=1))
    assert counters["stats"]["unique_graphs"] >= 1
    assert float((compiled - plain).norm() / plain.norm()) <= 1e-6


@pytest.mark.slow
def test_refused_allocations_of_a_compiled_run_change_neither_tokens_nor_weights(tmp_path: Path) -> None:
    """One refused allocation a run, anywhere: while compiling, in compiled steps and blocks, and around them."""

    def run(place: int | None = None) -> tuple[Any, int, int]:
        plans = RolloutPlan(compile="default"), UpdatePlan(compile="default", micro_batch_tokens=60)
        with SimulatedMemory(exact=True) as memory:
            trainer = trainer_of(tmp_path, *plans, max_steps=2, optim="sgd")
            if place is not None:
                memory.fail_after(place)
            before = memory.allocations
            trainer.train()
            weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
            return weights, memory.allocations - before, memory.refusals

    plain, allocations, _ = run()
    for part in (1, 3):
        torch._dynamo.reset()  # compiling is part of each run
        found, _, refusals = run(part * allocations // 4)
        assert refusals == 1
        assert float((found - plain).norm() / plain.norm()) <= 1e-6


@pytest.mark.slow
def test_a_compiled_run_holds_what_is_forecast(tmp_path: Path) -> None:
    def peaks(mode: str | None) -> dict[Any, int]:
        plans = RolloutPlan(compile=mode), UpdatePlan(compile=mode)
        with SimulatedMemory(exact=True) as memory:
            trainer_of(tmp_path, *plans, max_steps=2).train()
            return {
                phase: max(record.peak_bytes for record in memory.timeline if record.phase is phase)
                for phase in (Phase.ROLLOUT, Phase.UPDATE)
            }

    eager, compiled = peaks(None), peaks("default")  # forecasts are exact for the operators as they are
    for phase, size in eager.items():
        assert compiled[phase] <= 1.01 * size
