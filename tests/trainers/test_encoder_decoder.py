"""GRPO on encoder-decoders: the same loop, the same exactness, and prompts that an encoder reads."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BartConfig, BartForConditionalGeneration

from benchmarks.small import small_t5
from memsafe_rl.config.ppo import PPOConfig
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.seq2seq import Seq2SeqAdapter
from memsafe_rl.preflight.synthetic import lay_down
from memsafe_rl.trainers.ppo import PPOTrainer
from memsafe_rl.training.gradient import StepTerms, accumulate_gradient
from memsafe_rl.training.scorer import Scorer
from memsafe_rl.types import Denominators, LossSettings, Phase, Trajectory, UpdatePlan
from tests.models.helpers import exact_norms
from tests.tiny import tiny_tokenizer
from tests.trainers.helpers import PROMPTS, count_digits, cut, make_trainer, relative, rewire, weights

VOCAB_SIZE = 258
LORA = {"r": 4, "target_modules": ["q", "v", "wo"], "task_type": "SEQ_2_SEQ_LM"}


def tiny_t5(**config: Any) -> Any:
    model = small_t5(VOCAB_SIZE, hidden=32, head_dim=8, **config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(2.0)
    return model


def tiny_bart() -> Any:
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "forced_eos_token_id": None}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCAB_SIZE, decoder_start_token_id=2, **sizes, **widths, **ids)
    )


MODELS = {"t5": tiny_t5, "bart": tiny_bart}


def gradient_of(trainer: Any) -> torch.Tensor:
    """Weights moved by one plain SGD step are the gradient."""
    before = weights(trainer)
    trainer.train()
    return weights(trainer) - before


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_a_run_learns_and_resumes_bitwise(kind: str, beta: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "num_iterations": 2, "beta": beta, "save_strategy": "steps"}
    settings |= {"save_steps": 1}
    whole = make_trainer(tmp_path / "whole", model=MODELS[kind](), **settings)
    assert isinstance(whole.adapter, Seq2SeqAdapter)
    whole.train()
    assert whole.history[0]["approx_kl/k3_token"] == 0.0  # the first ratio is exactly 1
    assert whole.history[1]["approx_kl/k3_token"] > 0.0
    first = make_trainer(tmp_path / "parts", model=MODELS[kind](), **{**settings, "max_steps": 3})
    first.train()
    second = make_trainer(tmp_path / "parts", model=MODELS[kind](), **settings)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_no_cut_changes_the_gradient(dtype: torch.dtype, peft: Any, tmp_path: Path) -> None:
    bound = 1e-6 if dtype is torch.float32 else 1e-12
    settings: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 1.0}
    settings |= {"beta": 0.04, "num_generations": 4, "per_device_train_batch_size": 8}
    plans = {
        "whole": cut(),
        "one row": cut(1),
        "few": cut(40),
        "recomputed": cut(24, checkpointing=True),
        "on the host": cut(24, offload_activations=True, trajectory_device="device"),
        "two in flight": cut(64, rows_in_flight=2),
    }
    found = {}
    for name, policy in plans.items():
        adapter = None if peft is None else LoraConfig(**peft)
        torch.manual_seed(0)
        model = tiny_t5().to(dtype)
        if dtype is torch.float64:
            exact_norms(model)
        trainer = make_trainer(tmp_path / name, model=model, policy=policy, peft_config=adapter, **settings)
        if peft is not None:
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for weight_name, weight in trainer.model.named_parameters():
                    if "lora_B" in weight_name:
                        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        if dtype is torch.float64:
            trainer.model.to(dtype)
        found[name] = gradient_of(trainer)
    whole = found.pop("whole")
    assert whole.norm() > 0
    for name, other in found.items():
        assert relative(other, whole) <= bound, name


class Calls:
    """Prompts that an encoder reads, one entry a call."""

    def __init__(self, trainer: Any) -> None:
        self.rows: list[int] = []
        encoder = trainer.adapter.lm.get_encoder()
        encoder.register_forward_hook(self._note)

    def _note(self, _: Any, __: Any, output: Any) -> None:
        self.rows.append(output[0].shape[0])


@pytest.mark.parametrize("tokens", [1, 24, 8192])
def test_an_update_reads_each_prompt_once(tokens: int, tmp_path: Path) -> None:
    """However small the micro-batches: 4 prompts of 4 completions each."""
    trainer = make_trainer(
        tmp_path, model=tiny_t5(), policy=cut(tokens), per_device_train_batch_size=16, num_generations=4, max_steps=1
    )
    calls = Calls(trainer)
    found: list[int] = []

    def wrap(learn: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            before = len(calls.rows)
            result = learn(*arguments, **named)
            found.append(sum(calls.rows[before:]))
            return result

        return counted

    rewire(trainer, "learner", "gradient", wrap)
    trainer.train()
    useful = trainer.history[0]["plan/micro_batches"]
    assert found == [4]
    assert useful == (16 if tokens == 1 else useful)


@pytest.mark.slow
def test_a_frozen_encoder_reads_a_rollouts_prompts_once_for_all_updates(tmp_path: Path) -> None:
    def frozen() -> Any:
        model = tiny_t5()
        model.shared.requires_grad_(False)
        model.encoder.requires_grad_(False)
        return model

    settings: dict[str, Any] = {"num_iterations": 3, "max_steps": 3, "beta": 0.05}
    trainer = make_trainer(tmp_path / "a", model=frozen(), policy=cut(24), **settings)
    calls = Calls(trainer)
    drawn: list[int] = []

    def wrap(generate: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            completions = generate(*arguments, **named)
            drawn.append(len(calls.rows))
            return completions

        return counted

    rewire(trainer, "collector", "generate", wrap)
    trainer.train()
    assert sum(calls.rows[drawn[0] :]) == 2  # two prompts, for the reference and three updates
    anew = make_trainer(tmp_path / "b", model=frozen(), policy=cut(24), **settings)
    rewire(anew, "collector.scorer", "with_sources", lambda _: lambda trajectory: trajectory)
    anew.train()
    assert relative(weights(anew), weights(trainer)) < 1e-6
    assert trainer.loop.collector.scorer.keeps_sources
    assert not make_trainer(tmp_path / "c", model=tiny_t5(), num_iterations=3).loop.collector.scorer.keeps_sources


def test_a_group_holds_less_than_copies_of_its_prompt(tmp_path: Path) -> None:
    """The encoder's activations of one prompt for 8 completions, against 8 prompts with one completion each."""
    prompts = [{"prompt": "7" * 200} for _ in range(16)]

    def peak(group: int, name: str) -> int:
        with SimulatedMemory() as memory:
            trainer = make_trainer(
                tmp_path / name,
                model=tiny_t5(),
                policy=cut(100_000),
                train_dataset=prompts,
                per_device_train_batch_size=8,
                num_generations=group,
                max_steps=1,
                beta=0.0,
            )
            trainer.train()
        return sum(memory.phase_peaks()[Phase.UPDATE].values())

    shared = peak(8, "shared")
    trainer = make_trainer(tmp_path / "x", model=tiny_t5())
    with SimulatedMemory() as memory:
        copies = lay_down([torch.full((200,), 7 + row) for row in range(8)], [torch.arange(2, 8)] * 8, 1, 0)
        terms = StepTerms(LossSettings(), Denominators(8, 48, 48), temperature=1.0, with_entropy=True)
        accumulate_gradient(
            trainer.adapter,
            copies,
            range(8),
            UpdatePlan(100_000),
            terms,
            autocast=nullcontext,
            scale=lambda loss: loss,
        )
    apart = memory.peak_bytes
    assert shared < 0.5 * apart


@pytest.mark.slow
def test_a_model_is_loaded_by_its_folder(tmp_path: Path) -> None:
    tiny_t5().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    trainer = make_trainer(tmp_path / "run", model=str(tmp_path / "model"), processing_class=None, max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    again = make_trainer(tmp_path / "more", model=str(tmp_path / "saved"), max_steps=1)
    assert torch.equal(weights(again), weights(trainer))


def test_a_prompt_may_be_as_long_as_the_encoder_takes(tmp_path: Path) -> None:
    """Encoder and decoder have positions of their own."""
    prompts = [{"prompt": "1" * 64} for _ in range(4)]
    trainer = make_trainer(tmp_path, model=tiny_bart(), max_steps=1, max_completion_length=60, train_dataset=prompts)
    assert trainer.train().global_step == 1
    with pytest.raises(ConfigError, match=r"max_completion_length is 65.*64 tokens"):
        make_trainer(tmp_path, model=tiny_bart(), max_completion_length=65)


def test_other_engines_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use_transformers_continuous_batching is True, but T5\w+ is no causal"):
        make_trainer(tmp_path, model=tiny_t5(), use_transformers_continuous_batching=True)


def frozen_t5(**config: Any) -> Any:
    model = tiny_t5(**config)
    model.shared.requires_grad_(False)
    model.encoder.requires_grad_(False)
    return model


def test_a_teacher_with_another_encoder_reads_prompts_itself(tmp_path: Path) -> None:
    """What the policy's frozen encoder made of them is not what the teacher's would; a copy's is."""
    teacher = tiny_t5()
    with torch.no_grad():
        for weight in teacher.encoder.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    for settings, shared in (
        ({"teacher_model_name_or_path": str(tmp_path / "teacher")}, False),
        ({"beta": 0.1}, True),
    ):
        scored: list[Any] = []

        def wrap(score: Any, scored: list[Any] = scored) -> Any:
            return lambda *given, **named: scored.append(score(*given, **named)) or scored[-1]

        trainer = make_trainer(tmp_path / f"run {shared}", model=frozen_t5(), max_steps=1, **settings)
        adapter = trainer.setup.adapter
        rewire(trainer, "collector.scorer", "score_unrewarded", wrap)
        trainer.train()
        (trajectory,) = scored
        assert trajectory.sources is not None
        assert adapter.takes_sources
        assert adapter.reference_adapter.takes_sources is shared
        logits = adapter.reference_adapter.row_logits(trainer.setup.reference_model, trajectory, range(len(trajectory)))
        wanted = logits.log_softmax(-1).gather(-1, trajectory.actions.flat[:, None])[:, 0]
        assert torch.allclose(trajectory.ref_logprobs.flat, wanted, atol=1e-5)


def test_a_critic_of_its_own_reads_prompts_itself(tmp_path: Path) -> None:
    """What the policy's frozen encoder made of them is not what the critic's would."""
    critic = tiny_t5(seed=5)
    trainer = PPOTrainer(
        frozen_t5(),
        count_digits,
        PPOConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            max_completion_length=6,
            max_steps=2,
            num_iterations=2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        critic=critic,
    )
    assert trainer.loop.collector.scorer.keeps_sources
    calls: list[int] = []
    critic.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    before = [weight.detach().clone() for weight in critic.get_encoder().parameters()]
    trainer.train()
    assert calls
    after = list(critic.get_encoder().parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_encoder_with_an_adapter_on_it_is_not_kept(tmp_path: Path) -> None:
    """A frozen adapter may still say something else than the base."""
    model = get_peft_model(tiny_t5(), LoraConfig(**LORA))
    for name, weight in model.named_parameters():
        if ".encoder." in name:
            weight.requires_grad_(False)
    trainer = make_trainer(tmp_path, model=model, num_iterations=2)
    assert not trainer.loop.collector.scorer.keeps_sources
    assert make_trainer(tmp_path / "b", model=frozen_t5(), num_iterations=2).loop.collector.scorer.keeps_sources
    with_dropout = make_trainer(tmp_path / "c", model=frozen_t5(), num_iterations=2, disable_dropout=False)
    assert not with_dropout.loop.collector.scorer.keeps_sources


def test_room_for_what_an_encoder_says_is_of_its_size_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, room, read = Scorer.with_sources, [], []

    def noted(scorer: Scorer, trajectory: Trajectory) -> Trajectory:
        room.append(scorer.with_room_for_sources(trajectory).sources.flat)
        read.append((found := known(scorer, trajectory)).sources.flat)
        return found

    monkeypatch.setattr(Scorer, "with_sources", noted)
    make_trainer(tmp_path, model=frozen_t5(), num_iterations=2, bf16=True, max_steps=1).train()
    assert [one.nbytes for one in room] == [one.nbytes for one in read] != []


def test_a_critic_that_shares_weights_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(tiny_t5(), LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="shares weights"):
        PPOTrainer(
            model,
            count_digits,
            PPOConfig(str(tmp_path), report_to="none", use_cpu=True),
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            critic=model.get_base_model(),
        )


def test_float16_weights_are_not_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        make_trainer(tmp_path, model=tiny_t5().half())


@pytest.mark.slow
def test_what_a_frozen_encoder_read_is_gone_on_with(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "num_iterations": 2, "beta": 0.05, "save_strategy": "steps"}
    settings |= {"save_steps": 1, "policy": cut(24)}
    whole = make_trainer(tmp_path / "whole", model=frozen_t5(), **settings)
    whole.train()
    make_trainer(tmp_path / "parts", model=frozen_t5(), **{**settings, "max_steps": 3}).train()
    second = make_trainer(tmp_path / "parts", model=frozen_t5(), **settings)
    calls = Calls(second)
    second.train(resume_from_checkpoint=True)
    assert calls.rows == []
    assert torch.equal(weights(second), weights(whole))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"token id \d+, but the model knows 20 tokens"):
        make_trainer(tmp_path, model=small_t5(20, hidden=32, head_dim=8))
