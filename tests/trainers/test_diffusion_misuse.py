"""What a user may get wrong with a diffusion policy: nothing is learnt from the wrong thing, and messages say why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

from memsafe_rl.config.declaring import grouped
from memsafe_rl.config.grpo import GRPOConfig
from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.models.diffusion.adapter import DiffusionAdapter
from memsafe_rl.models.diffusion.policy import Condition, TrainedSteps, prompt_key
from memsafe_rl.models.diffusion.schedulers import DDIMScheduler, FlowSDEScheduler
from memsafe_rl.rewards.runner import RewardRunner
from memsafe_rl.trainers.grpo import GRPOTrainer
from memsafe_rl.training.assembly.denoisers import Denoisers
from tests.models.diffusion.small import PROMPTS, SHAPE, WIDTH, Denoiser, draw, make_policy


class Word:
    def __init__(self, number: float) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Word()"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(2000.0), torch.arange(2000.0).index_fill(0, torch.tensor([1000]), 7.0)),
        (np.arange(2000.0), np.where(np.arange(2000) == 1000, 7.0, np.arange(2000.0))),
        (torch.tensor([1.00001]), torch.tensor([1.00002])),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0])),
        (torch.zeros(2, 1, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16)),
        ([1, "a"], (1, "a")),
        (1, True),
        ({"a": torch.tensor(1.00001)}, {"a": torch.tensor(1.00002)}),
    ],
)
def test_prompts_are_told_apart_by_value(one: Any, other: Any) -> None:
    assert prompt_key(one) is not None
    assert prompt_key(one) != prompt_key(other)
    again = one.clone() if isinstance(one, Tensor) else one
    assert prompt_key(again) == prompt_key(one)


def test_objects_are_not_kept_across_calls() -> None:
    asked = []

    def embed(word: Word) -> Tensor:
        asked.append(word.number)
        return torch.full((WIDTH,), word.number)

    policy = make_policy(embed=embed)
    found = policy.embed([Word(1.0), Word(2.0)])
    assert [float(one[0, 0]) for one in found] == [1.0, 2.0]
    word = Word(3.0)
    policy.embed([word, word])
    policy.embed([word])
    assert asked == [1.0, 2.0, 3.0, 3.0]
    assert prompt_key([word]) is None


def test_an_embed_may_use_its_buffer_again() -> None:
    buffer = torch.zeros(1, WIDTH)
    policy = make_policy(embed=lambda prompt: buffer.fill_(prompt))
    found = policy.embed([1.0, 2.0])
    assert [float(one[0, 0]) for one in found] == [1.0, 2.0]
    assert float(policy.embed([1.0])[0][0, 0]) == 1.0


def test_neither_decode_nor_rewards_change_what_was_drawn() -> None:
    policy = make_policy(decode=lambda sample: sample.zero_())
    drawn = draw(DiffusionAdapter(policy))
    kind = Denoisers(GRPOConfig("unused", use_cpu=True, report_to="none"), policy, None)
    before = drawn[0].ids.clone()
    kind.decoded(None, [], drawn)  # type: ignore[arg-type]
    plain = kind.completion_ids(drawn)
    plain[0].fill_(5.0)
    assert torch.equal(drawn[0].ids, before)
    assert plain[0].untyped_storage().nbytes() == plain[0].nbytes


def test_a_reward_function_sees_samples_as_they_were_drawn() -> None:
    def spoil(completions: list[Tensor], completion_ids: list[Any], **_: Any) -> list[float]:
        completions[0].fill_(9.0)
        completion_ids[0][:] = 9.0
        return [0.0]

    def read(completions: list[Tensor], completion_ids: list[Any], **_: Any) -> list[float]:
        return [float(completions[0].sum() + completion_ids[0].sum())]

    samples, arrays = [torch.ones(2)], [np.ones(3)]
    scores = RewardRunner([spoil, read]).begin([1], samples, arrays, {}).result()  # type: ignore[arg-type]
    assert scores.rewards_BF.tolist() == [[0.0, 5.0]]
    assert float(samples[0].sum() + arrays[0].sum()) == 5.0


def make_trainer(folder: Path, policy: Any = None, given: Any = None, **settings: Any) -> Any:
    usual: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "report_to": "none"}
    usual |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    return GRPOTrainer(
        make_policy() if policy is None else policy,
        lambda completions, **_: [float(sample.mean()) for sample in completions],
        GRPOConfig(str(folder), **{**usual, **settings}),
        Dataset.from_dict({"prompt": list(PROMPTS)}),
        **(given or {}),
    )


@pytest.mark.slow
def test_a_resumed_run_has_the_same_policy(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    scheduler = DDIMScheduler(prediction_type="sample", timestep_spacing="trailing", eta=0.5)
    for options, words in [
        ({"guidance_scale": 2.0}, r"guidance_scale of the policy was 1\.0 and is 2\.0"),
        ({"reduce": "sum"}, "reduce of the policy was 'mean' and is 'sum'"),
        ({"state_dtype": torch.bfloat16}, "state_dtype of the policy"),
        ({"shared_noise": True}, "shared_noise of the policy"),
        ({"trained_steps": TrainedSteps(0.5)}, "trained_steps of the policy"),
        ({"scheduler": scheduler}, "scheduler of the policy was 'DDIMScheduler, "),
        ({"steps": 5}, "num_inference_steps of the policy was 6 and is 5"),
        ({"null_condition": torch.ones(2, WIDTH)}, "null_condition of the policy was"),
        ({"scheduler": DDIMScheduler(timestep_spacing="trailing")}, "means of the policy was"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_trainer(tmp_path, make_policy(**options), max_steps=2).train(resume_from_checkpoint=True)
    make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def test_a_users_scheduler_may_look_at_single_elements_and_learn(tmp_path: Path) -> None:
    class Mixing(DDIMScheduler):
        def mean(self, model_output: Tensor, columns: Any, sample: Tensor) -> Tensor:
            self.factor = torch.nn.Parameter(torch.ones(()))
            mixed = model_output @ torch.eye(SHAPE[-1]).to(model_output)
            mixed[:, 2] = sample[:, 2]
            return super().mean(self.factor * mixed, columns, sample)

    settings = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, make_policy(scheduler=Mixing()), max_steps=1, **settings).train()
    again = make_trainer(tmp_path, make_policy(scheduler=Mixing()), max_steps=2, **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 2


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_what_draws_texts_is_refused_by_name(name: str, tmp_path: Path) -> None:
    def function(*_: Any) -> None: ...

    with pytest.raises(ConfigError, match=f"{name} is given, which is for models that draw tokens"):
        make_trainer(tmp_path, given={name: [function] if name == "tools" else function})


OF_TOKENS: dict[str, Any] = {
    "cache_implementation": "static",
    "max_turn_length": 5,
    "max_episode_turns": 3,
    "overlong_prompts": "truncate",
    "chat_template_kwargs": {"enable_thinking": False},
    "pad_to_multiple_of": 8,
    "model_init_kwargs": {"dtype": "bfloat16"},
    "entropy_coef_max": 0.5,
    "vllm_importance_sampling_correction": False,
    "vllm_max_model_length": 512,
    "allow_lossy": ["num_iterations", "max_completion_length"],
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_no_setting_of_tokens_is_passed_over_in_silence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} (is|names) .*Leave it out"):
        make_trainer(tmp_path, **{name: OF_TOKENS[name]})


def test_a_length_that_a_chain_does_not_have_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, max_completion_length=6)
    assert not caplog.records
    trainer = make_trainer(tmp_path, max_completion_length=64)
    assert trainer.args.max_completion_length == 6
    assert "max_completion_length is 64, but a chain of this DiffusionPolicy has 6 steps" in caplog.text


def test_every_setting_is_either_used_by_chains_or_known_to_be_of_tokens() -> None:
    """Whoever adds a setting to the groups that speak of tokens says what a chain makes of it."""
    groups = grouped(GRPOConfig)
    of_tokens = [one for title in ("Sampling", "Rollout engine", "Prompts") for one in groups[title]]
    used = {"shuffle_dataset", "remove_unused_columns", "max_completion_length"}
    assert {one.name for one in of_tokens if not one.tokens_only} <= used


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample_shape": 5}, "sample_shape is 5"),
        ({"sample_shape": (3, -5)}, r"sample_shape is \(3, -5\)"),
        ({"condition_shape": 4}, "condition_shape is 4"),
        ({"condition_shape": (0, 4)}, r"condition_shape is \(0, 4\)"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5"),
        ({"guidance_scale": "2"}, "guidance_scale is '2'"),
        ({"guidance_gradient": "False"}, "guidance_gradient is 'False'. Set it to True or False"),
        ({"guidance_scale": float("nan")}, "guidance_scale is nan"),
        ({"state_dtype": "bfloat16"}, "state_dtype is 'bfloat16'"),
        ({"state_dtype": torch.float8_e4m3fn}, "state_dtype is torch.float8"),
        ({"trained_steps": 0.5}, "trained_steps is 0.5"),
        ({"scheduler": None}, "scheduler is None"),
        ({"scheduler": DDIMScheduler}, "scheduler is the class DDIMScheduler"),
        ({"denoiser": lambda x, *_: x}, "denoiser is a function"),
        ({"embed": "clip"}, "embed is a str"),
    ],
)
def test_settings_of_a_policy_are_checked(options: dict[str, Any], words: str) -> None:
    from_small = {"denoiser": Denoiser(), "scheduler": DDIMScheduler(), "sample_shape": SHAPE}
    given = {**from_small, "condition_shape": (2, WIDTH), "num_inference_steps": 6, **options}
    with pytest.raises(ConfigError, match=words):
        type(make_policy())(**given)


def test_settings_beside_a_policy_are_checked() -> None:
    with pytest.raises(ConfigError, match="fraction is '1'"):
        TrainedSteps(fraction="1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window is 3"):
        TrainedSteps(window=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window is \(-1, 2\)"):
        TrainedSteps(window=(-1, 2))
    with pytest.raises(ConfigError, match="noise_level is inf"):
        FlowSDEScheduler(noise_level=float("inf"))
    with pytest.raises(ConfigError, match="noisy_steps is 3"):
        make_policy(scheduler=FlowSDEScheduler(noisy_steps=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps_offset is -3"):
        DDIMScheduler(steps_offset=-3)


@pytest.mark.parametrize("prompt", ["a horse", None, [{"role": "user", "content": "a horse"}]])
def test_prompts_that_are_no_numbers_need_an_embed(prompt: Any) -> None:
    with pytest.raises(DataError, match=r"no list of numbers.*Pass embed="):
        make_policy().embed([prompt])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([0.0] * WIDTH, "is a list"),
        (None, "is a NoneType"),
        (torch.full((1, WIDTH), float("nan")), "not finite"),
        (torch.zeros(1, WIDTH, dtype=torch.complex64), "is torch.complex64"),
    ],
)
def test_an_embedding_is_a_tensor_of_numbers(given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_policy(embed=lambda _: given).embed(["x"])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(5), "from 0 to 0"),
        (torch.tensor([1.0, 1, -1, 1, 1]), "from -1 to 1"),
        (torch.tensor([1.0, 1, float("nan"), 1, 1]), "from nan"),
        ([1, 1, 1, 1, 1], "of type list"),
        (torch.ones(1, 1, 1, 5), r"shape \(1, 1, 1, 5\)"),
    ],
)
def test_elements_are_weights_of_which_one_counts(mask: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_policy(elements=lambda _: mask).embed([[1.0] * WIDTH])


class Wrapped(Denoiser):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor, timesteps: Tensor, condition: Condition) -> Any:
        return self.wrap(super().forward(x, timesteps, condition))


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda output: (output,), r"gave a tuple. Return the tensor.*output\.sample"),
        (lambda output: SimpleNamespace(sample=output), "gave a SimpleNamespace"),
        (lambda output: output.detach(), "carries no gradient"),
    ],
)
def test_what_a_denoiser_gives_is_checked(wrap: Any, words: str, guidance_scale: float) -> None:
    adapter = DiffusionAdapter(make_policy(denoiser=Wrapped(wrap), guidance_scale=guidance_scale).eval())
    with pytest.raises(ConfigError, match=words):
        adapter.check()


def test_a_frozen_denoiser_needs_no_gradient() -> None:
    DiffusionAdapter(make_policy().eval().requires_grad_(False)).check()


class Odd(DDIMScheduler):
    def mean(self, *given: Any) -> Tensor:
        return super().mean(*given).sum(-1)


class Short(DDIMScheduler):
    def set_timesteps(self, num_inference_steps: int) -> None:
        super().set_timesteps(num_inference_steps - 1)


def test_what_a_scheduler_gives_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"mean of Odd gave \(3, 3\) for states of shape \(3, 3, 5\)"):
        DiffusionAdapter(make_policy(scheduler=Odd())).check()
    with pytest.raises(ConfigError, match=r"timesteps of Short is of shape \(5,\)"):
        make_policy(scheduler=Short())
