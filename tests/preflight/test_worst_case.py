"""Worst case first: a run that would fail at a late, long step fails at once, and one that fits is left alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from memsafe_rl.errors import DataError, MemoryBudgetError
from memsafe_rl.memory.planning.policies import AdaptivePolicy, FixedPolicy
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.decoding.padded import PaddedState
from memsafe_rl.models.language.causal_lm import CausalLMAdapter
from memsafe_rl.preflight import worst_case as probe_module
from memsafe_rl.preflight.worst_case import check_worst_case, find_longest
from memsafe_rl.types import RolloutPlan, SamplingSettings, UpdatePlan
from tests.parallel.test_ranks import outcome_of, run_ranks, set_up_rank
from tests.tiny import tiny_model
from tests.trainers.helpers import PROMPTS, cut, make_trainer, weights

LATE = [*PROMPTS[:15], "1+1=" + " " * 120]
"""Fifteen short prompts and, last, a long one."""
VOCABULARY = 1000


def late_run(output_dir: Path, **settings: Any) -> Any:
    """Two prompts a step, the long one in the last of eight steps."""
    given: dict[str, Any] = {
        "model": tiny_model(vocab_size=VOCABULARY),
        "train_dataset": Dataset.from_dict({"prompt": LATE}),
        "shuffle_dataset": False,
        "max_steps": 8,
        "policy": cut(128, 8),
        "learning_rate": 1e-3,
    }
    return make_trainer(output_dir, **{**given, **settings})


def highest(device: SimulatedMemory) -> int:
    """The peak over a whole run, whose tracker starts a new one in every phase."""
    return max(sum(parts.values()) for parts in device.phase_peaks().values())


def without_times(history: list[dict[str, float]]) -> list[dict[str, float]]:
    bytes_and_times = ("step_time", "time/", "memory/")
    return [{k: v for k, v in record.items() if not k.startswith(bytes_and_times)} for record in history]


# What does not fit


def test_a_run_that_fails_at_its_last_step_fails_at_the_probe(tmp_path: Path) -> None:
    with SimulatedMemory() as device:
        late_run(tmp_path / "peaks", max_steps=7).train()
        before_the_long_one = highest(device)
    capacity = int(1.05 * before_the_long_one)
    with SimulatedMemory(capacity):
        trainer = late_run(tmp_path / "late")
        with pytest.raises(MemoryBudgetError) as caught:
            trainer.train()
        assert trainer.state.global_step == 7
        assert "worst case" not in str(caught.value)
    with SimulatedMemory(capacity):
        trainer = late_run(tmp_path / "early", probe_worst_case=True)
        with pytest.raises(MemoryBudgetError) as caught:
            trainer.train()
    assert (trainer.state.global_step, trainer.history) == (0, [])
    assert torch.equal(weights(trainer), weights(late_run(tmp_path / "fresh")))
    told = str(caught.value)
    assert "The worst case does not fit: a prompt of 124 tokens (the longest of train_dataset)" in told
    assert "a completion of 6 tokens (max_completion_length), tried before the first step" in told
    assert caught.value.failure.phase == "update"
    assert {event["during"] for event in trainer.memory_events if event["event"] == "failure"} == {"probe"}


def test_a_rollout_that_cannot_fit_is_found_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    with SimulatedMemory() as device:
        trainer = late_run(tmp_path, max_completion_length=100)
        trainer.loop.make_optimizer()
        original = trainer.adapter.decode_step
        monkeypatch.setattr(
            trainer.adapter, "decode_step", lambda state, tokens: steps.append(state.rows) or original(state, tokens)
        )
        peaks = check_worst_case(trainer.loop)
        assert steps == [8, 8]  # the one before the cache grows for the last time, and the last
        # The update's peak is higher, so the rollout alone is refused by refusing all its caches.
        device.set_capacity(peaks["rollout"] - 2**12)
        with pytest.raises(MemoryBudgetError, match="The rollout does not fit"):
            check_worst_case(trainer.loop)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("prompt", "completion"), [(60, 40), (10, 90), (90, 2), (3, 1)])
def test_the_last_moment_is_as_high_as_the_rollouts_own_peak(tmp_path: Path, prompt: int, completion: int) -> None:
    """Against a real rollout of the same lengths in which nobody ends early."""
    with SimulatedMemory():
        trainer = late_run(
            tmp_path,
            train_dataset=Dataset.from_dict({"prompt": ["1" * prompt] * 8}),
            max_completion_length=completion,
            generation_kwargs={"eos_token_id": []},
            probe_worst_case=True,
            max_steps=1,
        )
        trainer.train()
    (probed,) = [event["peak_bytes"] for event in trainer.memory_events if event["event"] == "probe"]
    (step,) = trainer.history
    assert probed["rollout"] == pytest.approx(step["memory/rollout_peak_bytes"], rel=0.02)
    assert probed["update"] == pytest.approx(step["memory/update_peak_bytes"], rel=0.02)


@pytest.mark.slow
def test_a_rollout_holds_most_as_its_cache_grows(tmp_path: Path) -> None:
    """With one block and a small vocabulary, the old store and random numbers are a third of what the new cache is."""
    with SimulatedMemory():
        trainer = late_run(
            tmp_path,
            model=tiny_model(layers=1),
            train_dataset=Dataset.from_dict({"prompt": ["1" * 8] * 8}),
            max_completion_length=100,
            generation_kwargs={"eos_token_id": []},
            probe_worst_case=True,
            max_steps=1,
        )
        trainer.train()
    (probed,) = [event["peak_bytes"] for event in trainer.memory_events if event["event"] == "probe"]
    assert probed["rollout"] == pytest.approx(trainer.history[0]["memory/rollout_peak_bytes"], rel=0.001)


@pytest.mark.slow
def test_mixed_lengths_are_padded_as_in_the_run(tmp_path: Path) -> None:
    """Padded rows repeat a layer's keys and values for grouped heads, which rows of one length do not."""
    prompts = ["1" * 60, "1" * 59] * 4
    with SimulatedMemory():
        trainer = late_run(
            tmp_path,
            model=tiny_model(vocab_size=VOCABULARY, layers=8),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            max_completion_length=100,
            generation_kwargs={"eos_token_id": []},
            probe_worst_case=True,
            max_steps=1,
        )
        trainer.train()
    (probed,) = [event["peak_bytes"] for event in trainer.memory_events if event["event"] == "probe"]
    assert probed["rollout"] == pytest.approx(trainer.history[0]["memory/rollout_peak_bytes"], rel=0.02)


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("width", [5, 40])
def test_a_stretched_cache_is_as_large_as_a_read_one(arch: str, width: int) -> None:
    """Gemma-3's windows hold five slots of six, the present token's being the sixth."""
    adapter = CausalLMAdapter(tiny_model(arch), pad_token_id=0)
    adapter.joins = False
    _, short = adapter.prefill([torch.arange(2, 6), torch.arange(2, 5)])
    assert short.stretch(width - 4)
    _, read = adapter.prefill([torch.arange(2, 2 + width), torch.arange(2, 1 + width)])
    for state in (short, read):
        assert state.width == width
        assert adapter.decode_step(state, torch.tensor([2, 3])).isfinite().all()
        assert state.width == width + 1
    shapes = [[layer.keys.shape for layer in state.cache.layers] for state in (short, read)]
    assert shapes[0] == shapes[1]
    assert [layer.get_seq_length() for layer in short.cache.layers] == [width + 1] * 2


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("width", [30, 70])
def test_stretched_rows_are_as_large_as_decoded_ones(arch: str, width: int) -> None:
    adapter = CausalLMAdapter(tiny_model(arch), pad_token_id=0)
    assert adapter.joins
    short, read = (adapter.prefill([torch.arange(2, 12), torch.arange(2, 11)])[1] for _ in range(2))
    assert short.stretch(width - 10)
    for _ in range(width - 10):
        adapter.decode_step(read, torch.tensor([2, 3]))
    assert adapter.decode_step(short, torch.tensor([2, 3])).isfinite().all()
    adapter.decode_step(read, torch.tensor([2, 3]))
    assert [part.shape for part in (*short.keys, *short.values)] == [part.shape for part in (*read.keys, *read.values)]
    assert short.positions[0] == read.positions[0] == width + 1


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("chunk", [3, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 7))])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_chunks_between_the_first_and_the_last_are_not_read_and_change_no_byte(
    arch: str, chunk: int, in_8_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, shapes, forwards = [], [], []
    read, longest = CausalLMAdapter._attend_grouped, probe_module.Longest((1,) * 50, 10, "here")
    monkeypatch.setattr(CausalLMAdapter, "_attend_grouped", lambda *given: (forwards.append(0), read(*given))[1])
    for wrapped in (False, True):
        with SimulatedMemory() as memory:
            adapter = reader = CausalLMAdapter(tiny_model(arch), pad_token_id=0)
            adapter.in_8_bits = in_8_bits
            if wrapped:
                reader = probe_module._AtTheEnd(adapter, longest, SamplingSettings(10, ()))
            memory.reset_peak()
            before = memory.peak_bytes
            logits_BV, state = reader.prefill([torch.arange(2, 52)], chunk)
            assert logits_BV.isfinite().all()
            held.append(memory.peak_bytes - before)
            block = state.origins[0].block
            shapes.append(([part.shape for part in block.tensors()], block.dropped, block.lengths, state.positions))
    assert shapes[0] == shapes[1]
    assert held[0] == held[1] > 0
    assert len(forwards) == -(-50 // chunk) - 1 + 3


@pytest.mark.slow
def test_a_cache_that_only_grows_by_reading_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalLMAdapter, "joins", property(lambda _: False, lambda *_: None))
    monkeypatch.setattr(PaddedState, "stretch", lambda *_: False)
    with SimulatedMemory():
        trainer = late_run(
            tmp_path,
            train_dataset=Dataset.from_dict({"prompt": ["1" * 20] * 8}),
            max_completion_length=100,
            generation_kwargs={"eos_token_id": []},
            probe_worst_case=True,
            max_steps=1,
        )
        trainer.train()
    (probed,) = [event["peak_bytes"] for event in trainer.memory_events if event["event"] == "probe"]
    assert probed["rollout"] == pytest.approx(trainer.history[0]["memory/rollout_peak_bytes"], rel=0.05)


# Plans that shrink


class Halving(FixedPolicy):
    """Halves what failed, and begins with what is left of it."""

    def before_rollout(self, work: Any, memory: Any) -> RolloutPlan:
        return self._leanest(RolloutPlan, memory) or self.rollout

    def before_update(self, work: Any, memory: Any) -> UpdatePlan:
        return self._leanest(UpdatePlan, memory) or self.update

    def after_oom(self, plan: Any, failure: Any) -> Any:
        name = "rows_in_flight" if isinstance(plan, RolloutPlan) else "micro_batch_tokens"
        left = getattr(plan, name) // 2
        return replace(plan, **{name: left}) if left else None

    def _leanest(self, kind: type, memory: Any) -> Any:
        failed = [failure.plan for failure in memory.failures if isinstance(failure.plan, kind)]
        return self.after_oom(failed[-1], None) if failed else None


@pytest.mark.slow
def test_a_plan_shrinks_at_the_probe_and_not_again(tmp_path: Path) -> None:
    policy = Halving(RolloutPlan(rows_in_flight=8), UpdatePlan(micro_batch_tokens=1024))
    with SimulatedMemory() as device:
        late_run(tmp_path / "peaks", policy=cut(260, 8)).train()
        capacity = highest(device) + 2**14
    with SimulatedMemory(capacity):
        trainer = late_run(tmp_path / "run", policy=policy, probe_worst_case=True)
        trainer.train()
    assert trainer.state.global_step == 8
    failures = [event for event in trainer.memory_events if event["event"] == "failure"]
    assert failures
    assert {event.get("during") for event in failures} == {"probe"}
    assert trainer.history[0]["plan/micro_batch_tokens"] < 1024


@pytest.mark.slow
def test_concessions_that_the_user_allows_are_made_at_the_probe(tmp_path: Path) -> None:
    with SimulatedMemory():
        trainer = late_run(tmp_path / "short", max_completion_length=32, policy=cut(64, 8))
        trainer.loop.make_optimizer()
        short = max(check_worst_case(trainer.loop).values())
    del trainer
    with SimulatedMemory(short + 2**14):
        run = late_run(
            tmp_path / "long",
            max_completion_length=128,
            policy=cut(64, 8),
            allow_lossy=("max_completion_length",),
            probe_worst_case=True,
            max_steps=1,
        )
        run.train()
    assert run.args.max_completion_length == 32
    assert [event["event"] for event in run.memory_events if event["event"] in ("degradation", "probe")] == [
        "degradation",
        "degradation",
        "probe",
    ]


# No trace


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"policy": AdaptivePolicy()}, id="adaptive"),
        pytest.param({"policy": cut(40, 3, checkpointing=True), "beta": 0.1, "num_iterations": 2}, id="reference"),
        pytest.param({"steps_per_generation": 2, "optim": "adamw_torch", "top_entropy_quantile": 0.5}, id="old"),
        pytest.param({"num_iterations": 2, "loss_type": "kl_cov", "cov_fraction": 0.2}, id="marks"),
        pytest.param({"peft_config": LoraConfig(r=2, target_modules="all-linear"), "beta": 0.1}, id="lora"),
        pytest.param({"policy": cut(40, 3, park_optimizer=True, offload_activations=True)}, id="parked"),
    ],
)
def test_a_probed_run_learns_bitwise_what_another_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    runs = []
    for probed in (False, True):
        trainer = make_trainer(tmp_path / str(probed), probe_worst_case=probed, max_steps=3, **settings)
        trainer.train()
        runs.append(trainer)
    plain, other = runs
    assert torch.equal(weights(plain), weights(other))
    assert without_times(plain.history) == without_times(other.history)
    events = [(event["event"], event["step"]) for event in other.memory_events]
    assert events[0] == ("probe", 0)
    assert events[1:] == [(event["event"], event["step"]) for event in plain.memory_events]


@pytest.mark.slow
def test_plans_on_a_simulated_device_stay_the_same(tmp_path: Path) -> None:
    """There corrections are learnt from peaks; the probe must not add its own."""
    finals = []
    for probed in (False, True):
        with SimulatedMemory(2**25):
            trainer = late_run(tmp_path / str(probed), policy=AdaptivePolicy(), probe_worst_case=probed, max_steps=3)
            trainer.train()
        plans = [
            {name: value for name, value in event.items() if name != "predicted_bytes"}
            for event in trainer.memory_events
            if event["event"] == "plan"
        ]
        finals.append((weights(trainer), plans))
    assert torch.equal(finals[0][0], finals[1][0])
    assert finals[0][1] == finals[1][1]


def test_nothing_is_left_on_the_device(tmp_path: Path) -> None:
    with SimulatedMemory() as device:
        trainer = late_run(tmp_path, beta=0.1)
        trainer.loop.make_optimizer()
        live, host = device.live_bytes, device.host_live_bytes
        check_worst_case(trainer.loop)
        assert (device.live_bytes, device.host_live_bytes) == (live, host)


@pytest.mark.slow
def test_a_resumed_run_may_be_probed(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, policy=cut(40, 3), max_steps=2, save_strategy="steps", save_steps=1)
    first.train()
    resumed = make_trainer(tmp_path, policy=cut(40, 3), max_steps=2, probe_worst_case=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(weights(first), weights(resumed))


# What is tried


def test_the_answer_is_one_event_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, policy=cut(40, 3), beta=0.1, probe_worst_case=True, max_steps=1)
    with caplog.at_level(logging.WARNING, logger="memsafe_rl.preflight.worst_case"):
        trainer.train()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "memsafe_rl.preflight.worst_case"]
    assert line.startswith("the worst case fits: prompt 6 (the longest of train_dataset) + completion 6 tokens, peak ")
    (event,) = [event for event in trainer.memory_events if event["event"] == "probe"]
    assert set(event["peak_bytes"]) == {"rollout", "score", "update", "optimizer"}
    assert (event["prompt_tokens"], event["completion_tokens"]) == (6, 6)
    assert (event["rows_in_flight"], event["micro_batch_tokens"]) == (3, 40)
    assert event["seconds"] > 0


def test_a_peak_above_a_budget_that_nobody_enforces_is_told() -> None:
    longest = probe_module.Longest((5, 6, 7), 4, "here")
    told = probe_module._sentence(longest, {"rollout": 3 * 2**20, "update": 2**20}, 2 * 2**20)
    assert told == (
        "the worst case runs, but holds more than the budget: prompt 3 (here) + completion 4 tokens, peak 3.00 MiB of "
        "a budget of 2.00 MiB (rollout 3.00 MiB, update 1.00 MiB)"
    )
    assert probe_module._sentence(longest, {"rollout": 2**20}, 2**20).startswith("the worst case fits: prompt 3")


def test_a_rollout_function_is_not_probed(tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        raise AssertionError("called")

    trainer = make_trainer(tmp_path, policy=cut(40, 3), rollout_func=rollout)
    trainer.loop.make_optimizer()
    assert set(check_worst_case(trainer.loop)) == {"update", "optimizer"}


@pytest.mark.parametrize(
    ("settings", "tokens", "source"),
    [
        ({}, 124, "the longest of train_dataset"),
        ({"max_prompt_length": 20, "overlong_prompts": "filter"}, 6, "the longest of train_dataset"),
        ({"max_prompt_length": 20, "overlong_prompts": "truncate"}, 20, "the longest of train_dataset"),
        ({"stream": True}, 124, "the longest of the stream's first 512"),
        ({"stream": True, "max_prompt_length": 130}, 130, "max_prompt_length"),
    ],
)
def test_the_longest_prompt(tmp_path: Path, settings: dict[str, Any], tokens: int, source: str) -> None:
    dataset = Dataset.from_dict({"prompt": LATE})
    stream = settings.pop("stream", False)
    trainer = make_trainer(tmp_path, train_dataset=dataset.to_iterable_dataset() if stream else dataset, **settings)
    longest = find_longest(trainer.setup)
    assert (len(longest.prompt), longest.source) == (tokens, source)
    assert longest.row_tokens == tokens + 6


@pytest.mark.slow
def test_a_stream_without_a_usable_prompt_is_refused(tmp_path: Path) -> None:
    stream = Dataset.from_dict({"prompt": ["1" * 30] * 4}).to_iterable_dataset()
    trainer = make_trainer(tmp_path, train_dataset=stream, max_prompt_length=20)
    with pytest.raises(DataError, match="at most 20 tokens"):
        find_longest(trainer.setup)


def test_ids_of_any_length() -> None:
    longest = probe_module.Longest((5, 6, 7), 4, "here")
    assert longest.ids(2).tolist() == [5, 6]
    assert longest.ids(7).tolist() == [5, 6, 7, 5, 6, 7, 5]


def test_every_row_of_a_made_up_rollout_counts() -> None:
    prompts = [torch.tensor([1, 2]), torch.tensor([3])]
    completions = [torch.tensor([1] * length) for length in (2, 1, 3, 1)]
    made = probe_module.lay_down(prompts, completions, 2, 0)
    assert made.advantages.tolist() == [0.5, -0.75, 1.0, -1.25]
    assert made.counted_actions == (2, 1, 3, 1)
    assert made.condition_of_row == made.group_of_row == (0, 0, 1, 1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Several ranks


LATE_RANKS: dict[str, dict[str, Any]] = {"whole": {}, "divided": {"fsdp": "full_shard"}}


def probe_on_a_rank(rank: int, port: int, folder: str) -> None:
    set_up_rank(rank, port)
    found: dict[str, Any] = {}
    for checked in (False, True):
        trainer = make_trainer(Path(folder) / str(checked), verify_plan=checked, probe_worst_case=checked, beta=0.1)
        trainer.train()
        found[str(checked)] = weights(trainer)
        found["events"] = [event["event"] for event in trainer.memory_events][:2]
    # Last, for it ends the group: the worst case fits on rank 0 alone.
    for name, settings in LATE_RANKS.items():
        with SimulatedMemory() as device:
            trainer = late_run(Path(folder) / name, probe_worst_case=True, **settings)
            device.set_capacity(device.live_bytes + (2**30 if rank == 0 else 2**19))
            found[name] = outcome_of(trainer.train)
            device.set_capacity(None)
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_are_checked_alone_and_end_together(tmp_path: Path) -> None:
    zero, one = run_ranks(probe_on_a_rank, tmp_path, patience_seconds=180)
    for found in (zero, one):
        assert torch.equal(found["True"], found["False"])
        assert found["events"] == ["verify", "probe"]
    assert torch.equal(zero["True"], one["True"])
    for name in LATE_RANKS:
        assert one[name].startswith("MemoryBudgetError: The worst case does not fit: a prompt of 124 tokens")
        assert zero[name].startswith("MemsafeError: Rank 1 ended the run: MemoryBudgetError: The worst case does not")


def test_of_many_prompts_those_with_the_most_characters_are_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsafe_rl.preflight.worst_case._TOKENIZED", 3)
    prompts = ["a" * (1 + length % 17) for length in range(40)]
    found = find_longest(make_trainer(tmp_path, train_dataset=Dataset.from_dict({"prompt": prompts})).setup)
    assert len(found.prompt) == 17
    assert found.source == "of the 3 longest texts of train_dataset"
