"""GRPO on prompts with images: tokens and gradients of a naive run, however memory is cut, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Image
from peft import LoraConfig
from PIL import Image as Pillow
from torch import Tensor
from transformers import Idefics3Processor
from transformers.image_utils import load_image
from trl.data_utils import prepare_multimodal_messages

from examples import count_squares
from memsafe_rl import ConfigError, DataError, GRPOConfig, PPOConfig, PPOTrainer, SimulatedMemory
from memsafe_rl.data.image_reader import opened, size_of
from memsafe_rl.data.prompts import images_of, with_images
from memsafe_rl.rollout.native.sequences import key_tensor
from memsafe_rl.types import Component, Phase, SequenceKey
from tests.images import (
    FAMILIES,
    TOWERS,
    TWO_WAY,
    blocks_of,
    in_tower,
    larger,
    never_drawn,
    own_inputs,
    picture,
    processor,
    rows,
    small,
    tower_of,
)
from tests.ops.test_sampling import sample_tokens
from tests.preflight.beside import alternating
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, gradient_of, gradient_under, make_trainer, relative, weights

GROUP, LENGTH = 4, 6
NO_TOWER = rf".*({'|'.join(TOWERS)})\..*"


def pay(completions: list[Any], goal: list[int], images: list[Any], **_: Any) -> list[float]:
    """Pays for long and for early words, and for what the row says."""
    texts = [completion[0]["content"].split() for completion in completions]
    return [
        len(words) / 7 + sum(len(word) for word in words) / 5 + own * len(shown or ())
        for words, own, shown in zip(texts, goal, images, strict=True)
    ]


def make(output_dir: Path, *, model: Any = None, **more: Any) -> Any:
    """Makes a trainer of a network that reads images, with its own processor."""
    model = small() if model is None else model
    given: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "shuffle_dataset": False,
        "reward_funcs": pay,
        "train_dataset": rows(),
        "processing_class": processor(family_of(model)),
        "bf16": False,
        "router_aux_loss_coef": 0.0,
    }
    return make_trainer(output_dir, model=model, **{**given, **more})


def family_of(model: Any) -> str:
    """Names a network's family; that of any other object is Qwen2-VL."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    return kind if kind in FAMILIES else "qwen2_vl"


def own_logits(model: Any, row: dict[str, Any], completion: list[int]) -> Tensor:
    """Returns logits at and after the prompt's end by the model's own forward, one row alone; images as pixels."""
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    output = model(**own_inputs(family_of(model), row, completion))
    return output.logits[0, -len(completion) - 1 :]


def naive_tokens(model: Any, row: dict[str, Any], prompt: int, sample: int) -> list[int]:
    """Draws a completion by whole forwards, one token at a time."""
    drawn: list[int] = []
    while len(drawn) < LENGTH and 2 not in drawn:
        with torch.no_grad():
            logits_1V = own_logits(model, row, drawn)[-1:].clone()
        logits_1V[:, never_drawn(family_of(model))] = -torch.inf
        keys_14 = key_tensor([SequenceKey(42, 0, prompt, sample)])
        drawn.append(int(sample_tokens(logits_1V, keys_14, torch.tensor([len(drawn)])).tokens_B))
    return drawn


def naive_run(model: Any) -> tuple[list[list[int]], Tensor]:
    """Returns the tokens of a whole batch and the gradient of their first step."""
    tokenizer = processor(family_of(model)).tokenizer
    drawn = [naive_tokens(model, row, place, one) for place, row in enumerate(rows()) for one in range(GROUP)]
    owners = [row for row in rows() for _ in range(GROUP)]
    texts = [[{"content": tokenizer.decode(ids, skip_special_tokens=True)}] for ids in drawn]
    rewards = torch.tensor(pay(texts, [row["goal"] for row in owners], [row["images"] for row in owners]))
    rewards_PG = rewards.view(-1, GROUP)
    advantages = (rewards_PG - rewards_PG.mean(1, True)) / (rewards_PG.std(1, keepdim=True) + 1e-4)
    model.zero_grad()
    for row, ids, advantage in zip(owners, drawn, advantages.flatten(), strict=True):
        logprobs = own_logits(model, row, ids)[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
        (-advantage * logprobs.sum() / sum(map(len, drawn))).backward()
    return drawn, torch.cat([w.grad.flatten().double() for w in model.parameters() if w.requires_grad])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_first_step_is_the_naive_one_however_it_is_cut(tmp_path: Path, family: str) -> None:
    tokens, wanted = naive_run(small(family))
    packed, recomputed = cut(100, pack_prompts=True), cut(8192, 64, checkpointing=True)
    for index, (policy, more) in enumerate([(None, {}), (cut(40, 3), {}), (packed, {"batch_invariant": True})]):
        trainer = make(tmp_path / str(index), model=small(family), policy=policy, **more)
        found = [gradient_of(trainer)]
        drawn = [ids.tolist() for ids in trainer.loop.state.rollout.trajectory.actions.rows()]
        assert drawn == tokens
        if policy is None:
            found += [gradient_under(trainer, recomputed), gradient_under(trainer, packed)]
        assert all(relative(gradient, wanted) < 1e-6 for gradient in found)


@pytest.mark.slow
def test_experts_are_balanced_over_images_however_rows_are_cut(tmp_path: Path) -> None:
    makes = [
        make(tmp_path / str(coef), model=small("qwen3_vl_moe"), router_aux_loss_coef=coef, policy=cut())
        for coef in (0.0, 0.5)
    ]
    unbalanced, balanced = (gradient_of(trainer) for trainer in makes)
    assert relative(balanced, unbalanced) > 1e-2
    for tokens in (40, 1):
        assert relative(gradient_under(makes[1], cut(tokens)), balanced) < 1e-6


def steps(output_dir: Path, **more: Any) -> Any:
    return make(output_dir, **{"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1, **more})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_reads_its_images_again_and_goes_on_bitwise(tmp_path: Path, family: str) -> None:
    whole = steps(tmp_path / "whole", model=small(family), beta=0.05)
    towers: list[int] = []
    tower_of(whole.model)[0].register_forward_pre_hook(lambda *_: towers.append(1))
    whole.train()
    assert len(towers) == 1 + 2 * 3  # the check at start; then each prompt once a rollout, not once a completion
    assert tower_of(whole.ref_model) == tower_of(whole.model)
    steps(tmp_path / "parts", model=small(family), beta=0.05, max_steps=3).train()
    second = steps(tmp_path / "parts", model=small(family), beta=0.05)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(weights(second), weights(whole))
    if family != "qwen2_vl":  # of others, no more than the sizes of the images differs
        return
    swapped = [{**row, "images": row["images"] and [picture(16, 16, 9), *row["images"][1:]]} for row in rows()]
    third = steps(tmp_path / "parts", beta=0.05, max_steps=6, train_dataset=swapped)
    with pytest.raises(ConfigError, match="first prompts of train_dataset was"):
        third.train(resume_from_checkpoint=True)
    grown = [*rows()[:2], {**rows()[2], "images": [picture(24, 24)]}, rows()[3]]
    third = steps(tmp_path / "parts", beta=0.05, max_steps=6, train_dataset=grown)
    with pytest.raises(ConfigError, match="drawn from other prompts than train_dataset has"):
        third.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_that_runs_out_of_memory_is_run_again(tmp_path: Path, family: str) -> None:
    seen: list[int] = []

    def ended(fail_at: int | None) -> tuple[Any, SimulatedMemory]:
        with SimulatedMemory(fail_at=fail_at) as memory:
            trainer = make(tmp_path / str(fail_at), model=small(family), max_steps=2)
            blocks_of(trainer.model)[1].register_forward_pre_hook(lambda *_: seen.append(memory.allocations))
            trainer.train()
        return trainer, memory

    plain, _ = ended(None)
    for entered in (seen[0], seen[2], seen[-1]):  # the first prompt, the last of its rollout, and of the next one
        for later in (1, 20):
            found, memory = ended(entered + later)
            assert memory.refusals == 1
            retries = [str(event["phase"]) for event in found.memory_events if event["event"] == "retry"]
            assert retries == ["rollout"]
            assert torch.equal(weights(found), weights(plain))


@pytest.mark.slow
def test_a_group_shares_the_bytes_of_its_images(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "w1"}], "image": picture(64, 64), "goal": 1}

    def peak(policy: Any, group: int) -> int:
        more = {"num_generations": group, "per_device_train_batch_size": group, "reward_funcs": pay_words}
        trainer = make(tmp_path / str(len(list(tmp_path.iterdir()))), policy=policy, train_dataset=[row], **more)
        with SimulatedMemory() as memory:
            gradient_of(trainer)
        return memory.peak_bytes

    shared, copied = peak(cut(4096, 64, pack_prompts=True), 8), peak(cut(4096, 64, pack_prompts=False), 8)
    assert shared < copied / 2


def pay_words(completions: list[Any], image: list[Any], **_: Any) -> list[float]:
    assert all(one.size == (64, 64) for one in image)
    return [float(len(completion[0]["content"])) for completion in completions]


@pytest.mark.slow
def test_a_network_is_loaded_by_name_and_saved_with_its_processor(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    within = [{"type": "image", "image": picture(16, 16)}, {"type": "text", "text": "w1"}]
    data = [{"prompt": [{"role": "user", "content": within}], "goal": place, "images": None} for place in range(4)]
    shown: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        shown.extend(prompt[0]["content"][0]["image"].size for prompt in prompts)
        return [float(len(completion[0]["content"])) for completion in completions]

    made = make(
        tmp_path / "run", model=str(tmp_path / "model"), processing_class=None, train_dataset=data, reward_funcs=reward
    )
    assert all(weight.requires_grad for weight in made.model.parameters())
    made.train()
    assert set(shown) == {(16, 16)}
    made.save_model(str(tmp_path / "saved"))
    again = make(tmp_path / "again", model=str(tmp_path / "saved"), processing_class=None)
    assert torch.equal(weights(again), weights(made))


def test_images_that_a_transform_makes_are_seen(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    shown = [picture(16, 16, seed) for seed in range(4)]
    said = [{"prompt": [{"role": "user", "content": "w1"}], "goal": place} for place in range(4)]
    data = Dataset.from_list(said).with_transform(
        lambda batch: {**batch, "images": [[shown[goal]] for goal in batch["goal"]]}
    )
    made = make(tmp_path / "run", model=str(tmp_path / "model"), processing_class=None, train_dataset=data)
    made.train()
    assert made.state.global_step


def test_the_processors_own_template_counts(tmp_path: Path) -> None:
    known = processor("idefics3")
    own = Idefics3Processor(known.image_processor, known.tokenizer, image_seq_len=4)
    own.chat_template = "w9 " + known.tokenizer.chat_template
    made = make(tmp_path, model=small("idefics3"), processing_class=own)
    written = [{"role": "user", "content": "w4"}]
    wanted = own.apply_chat_template(written, add_generation_prompt=True, tokenize=True)
    assert made.setup.models.reader.ids([written]) == wanted


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_on_its_side_is_turned(tmp_path: Path, kind: str) -> None:
    said = Pillow.Exif()
    said[0x0112] = 6
    picture(32, 16).save(tmp_path / "one", format=kind, exif=said)
    assert opened(str(tmp_path / "one")).size == load_image(str(tmp_path / "one")).size == (16, 32)
    assert size_of(str(tmp_path / "one")) == (32, 16)


def pay_text(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("told", ["by its tokenizer", "by the dataset"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_that_no_prompt_needs_stays_frozen(tmp_path: Path, family: str, told: str) -> None:
    small(family).save_pretrained(tmp_path / "model")
    processor(family).save_pretrained(tmp_path / "model")
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{one}"}], "goal": one} for one in range(4)])
    tokenizer = processor(family).tokenizer if told == "by its tokenizer" else None
    read = {"processing_class": tokenizer, "train_dataset": data, "reward_funcs": pay_text}
    made = make(tmp_path / "run", model=str(tmp_path / "model"), beta=0.1, **read)
    frozen = {name for name, weight in made.model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name, _ in made.model.named_parameters() if in_tower(name)}
    assert tower_of(made.ref_model) == tower_of(made.model)


@pytest.mark.slow
def test_an_adapter_learns_on_the_language_alone(tmp_path: Path) -> None:
    language = LoraConfig(r=2, target_modules="all-linear", exclude_modules=NO_TOWER)
    trainer = make(tmp_path / "b", peft_config=language, beta=0.1)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)


@pytest.mark.slow
def test_ppo_has_a_critic_of_the_same_states(tmp_path: Path) -> None:
    config = PPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_completion_length=LENGTH,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
    )
    found = []
    for policy in (cut(), cut(30, 2)):
        model = small()
        trainer = PPOTrainer(model, pay, config, rows(), processing_class=processor(), memory_policy=policy)
        found.append(gradient_of(trainer))
    assert relative(found[1], found[0]) < 1e-6
    with pytest.raises(ConfigError, match="reads no images"):
        PPOTrainer(small(), pay, config, rows(), processing_class=processor(), critic=small())


@pytest.mark.slow
def test_evaluation_leaves_what_the_rollout_keeps(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1}
    plain, evaluating = make(tmp_path / "a", max_steps=4, num_iterations=2), None
    plain.train()
    others = [{**row, "images": [picture(40, 24, 7)]} for row in rows()]
    evaluating = make(tmp_path / "b", eval_dataset=others, **settings)
    evaluating.train()
    assert torch.equal(weights(evaluating), weights(plain))
    assert "eval_loss" in evaluating.state.log_history[0] | evaluating.state.log_history[1]


EVERYWHERE = LoraConfig(r=2, target_modules="all-linear")
LANGUAGE = LoraConfig(r=2, target_modules="all-linear", exclude_modules=NO_TOWER)
FORECAST: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    (FAMILIES, {"beta": 0.1, "num_iterations": 2}, {"micro_batch_tokens": 40, "pack_prompts": True}),
    (("smolvlm", TWO_WAY), {"beta": 0.1, "bf16": True}, {"checkpointing": True}),
    (("qwen2_vl", "qwen3_vl"), {"beta": 0.1, "peft_config": EVERYWHERE}, {}),
    (("qwen3_vl", TWO_WAY), {"peft_config": LANGUAGE}, {"micro_batch_tokens": 40}),
]
"""Families, settings and a plan; each of those that read features in a way of its own has two at least."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more", "told"), [(family, *given) for families, *given in FORECAST for family in families]
)
def test_a_forecast_counts_the_tower_and_what_it_leaves(tmp_path: Path, family: str, more: Any, told: Any) -> None:
    larger(family).save_pretrained(tmp_path / "model")
    processor(family).save_pretrained(tmp_path / "model")
    data = [{"prompt": [{"role": "user", "content": f"w{one}"}], "image": picture(64, 64, one)} for one in range(4)]
    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "max_completion_length": 3, "max_steps": 2}
    settings |= {
        "memory_forecast": True,
        "generation_kwargs": {"min_new_tokens": 3},
        "policy": cut(**told),
        **copy.deepcopy(more),
    }
    with SimulatedMemory(2**30, exact=True) as memory:
        given = {"train_dataset": data, "processing_class": None, "reward_funcs": alternating}
        trainer = make(tmp_path / "run", model=str(tmp_path / "model"), **settings, **given)
        trainer.train()
        held = {phase: sum(parts.values()) for phase, parts in memory.phase_peaks().items()}
        activations = {phase: parts[Component.ACTIVATIONS] for phase, parts in memory.phase_peaks().items()}
    foreseen = {phase: sum(parts.values()) for phase, parts in trainer.forecast.phases.items()}
    assert {Phase.LOAD, Phase.ROLLOUT, Phase.UPDATE, Phase.OPTIMIZER} <= foreseen.keys()
    assert all(abs(foreseen[phase] / held[phase] - 1) < 0.01 for phase in foreseen), (foreseen, held)
    assert activations[Phase.ROLLOUT] > 2 * 2**20  # the tower's, which decoding has not
    learns = any(weight.requires_grad for name, weight in trainer.model.named_parameters() if in_tower(name))
    assert (activations[Phase.UPDATE] > 4 * 2**20) is learns  # and its graph's


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"processing_class": processor().tokenizer}, r"column 'images' of images\. Images are read by Qwen2-VL"),
        ({"model": tiny_model()}, "reads images, but the model a 'qwen3'"),
        (
            {"partial_rollout_tokens": 3},
            "partial_rollout_tokens is set, which is not supported beside",
        ),
        ({"rollout_func": print}, "rollout_func is set"),
        ({"torch_compile": True}, "torch_compile is set"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching is set"),
        ({"repetition_penalty": 1.2}, r"repetition_penalty is 1\.2, which reads the tokens of a prompt"),
        ({"max_prompt_length": 12, "overlong_prompts": "truncate"}, r"train_dataset\[1\]: .* would cut an image"),
    ],
)
def test_what_images_do_not_support_is_refused(more: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make(tmp_path, **more).train()


def test_ranks_that_share_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "sharded", True)
    with pytest.raises(ConfigError, match="fsdp is set, which is not supported beside prompts with images"):
        make(tmp_path)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    assert len(count_squares.main(2, str(tmp_path))) == 2


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    picture(64, 64).save(tmp_path / "good.png")
    (tmp_path / "none.png").write_bytes(b"text")
    row = {"prompt": [{"role": "user", "content": "w1"}], "goal": 1}

    def data(*images: Any) -> Dataset:
        return Dataset.from_list([{**row, "image": image} for image in images]).cast_column("image", Image())

    settings = {"per_device_train_batch_size": 4, "reward_funcs": pay_words}
    for name in ("none.png", "missing.png"):
        with pytest.raises(DataError, match=r"train_dataset\[1\]: image .* cannot be read"):
            make(tmp_path / "run", train_dataset=data(str(tmp_path / "good.png"), str(tmp_path / name)), **settings)
    cut_short = {"bytes": (tmp_path / "good.png").read_bytes()[:200], "path": None}
    trainer = make(tmp_path / "run", train_dataset=data(cut_short), **settings)  # its head is whole
    with pytest.raises(DataError, match=r"train_dataset\[0\] cannot be read"):
        trainer.train()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("w1", r"train_dataset\[0\]: .* is no conversation"),
        ([{"role": "user", "content": [{"type": "image"}] * 2}], r"has 2 image placeholder\(s\) and its row 1 image"),
        ([{"role": "user", "content": "<|image_pad|>"}], r"writes 2 image token\(s\) into a prompt of 1 image"),
        (
            [{"role": "user", "content": "<|video_pad|>"}],
            r"train_dataset\[0\]: .* videos are not read yet",
        ),
        ([], r"prompt \[\] is a conversation without messages"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "image"}]}],
            r"train_dataset\[0\]: a message has the part {'type': 'video', 'video': 'a.mp4'}\. Texts and images",
        ),
    ],
)
def test_a_prompt_whose_images_are_miscounted_is_refused(prompt: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        make(tmp_path, train_dataset=[{"prompt": prompt, "image": picture(8, 8)}])


@pytest.mark.parametrize(
    "part", [{"type": "image", "url": "a.png"}, {"type": "audio", "audio": "a.mp3"}, {"type": "image"}]
)
def test_what_is_neither_a_text_nor_an_image_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "w1"}, part]}], "goal": 1}
    with pytest.raises(
        DataError, match=rf"train_dataset\[0\]: a message has the part .*{part['type']}.* write an image as"
    ):
        make(tmp_path, train_dataset=[row] * 4)


def test_a_column_of_one_image_holds_no_list(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "w1"}], "image": [picture(16, 16)], "goal": 1}
    with pytest.raises(DataError, match="Call the column 'images', or give one image a row"):
        make(tmp_path, train_dataset=[row] * 4)


@pytest.mark.parametrize("images", [picture(8, 8), [picture(8, 8), None]])
def test_a_column_of_images_holds_lists(images: Any, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "w1"}], "goal": 1}
    with pytest.raises(DataError, match=r"no list of images\. Give a list without|differ in kind .* one kind"):
        make(tmp_path, train_dataset=[{**row, "images": images}])
    with pytest.raises(DataError, match=r"no list of images\. Give a list without None"):
        with_images(row["prompt"], images_of({**row, "images": images}))


@pytest.mark.parametrize(("size", "known"), [("patch_size", 4), ("merge_size", 2), ("temporal_patch_size", 2)])
def test_a_processor_of_another_tower_is_refused(size: str, known: int, tmp_path: Path) -> None:
    other = processor()
    setattr(other.image_processor, size, 1)
    with pytest.raises(ConfigError, match=rf"has {size}=1, .*{size}={known}: .* Pass the model's own processor"):
        make(tmp_path, processing_class=other)


def test_messages_are_trls() -> None:
    image, other = picture(8, 8), picture(16, 8)
    parts = [{"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    for turns, images in (
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], [image, other]),
        ([{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}], [image, other]),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], [image]),
    ):
        assert with_images(turns, images) == prepare_multimodal_messages(turns, images)
