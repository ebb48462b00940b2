"""GRPO trains an image tower too: gradients of the network's own forward on pixels, however memory is cut."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from memsafe_rl import ConfigError, GRPOTrainer, PPOConfig, PPOTrainer, RLOOTrainer, SimulatedMemory
from tests.images import (
    FAMILIES,
    SQUARES,
    TWO_WAY,
    UNLIKE,
    blocks_of,
    in_tower,
    never_drawn,
    picture,
    processor,
    rows,
    small,
    tower_of,
)
from tests.models.language.test_packing import InDouble
from tests.trainers.helpers import cut, gradient_of, gradient_under, relative, weights
from tests.trainers.test_images import GROUP, family_of, make, own_logits, pay

CUTS = {
    "row by row": {"micro_batch_tokens": 1, "pack_prompts": False},
    "pairs of rows": {"micro_batch_tokens": 50, "pack_prompts": False},
    "whole, padded": {"micro_batch_tokens": 8192, "pack_prompts": False},
    "packed": {"micro_batch_tokens": 8192, "pack_prompts": True},
    "packed, behind trunks": {"micro_batch_tokens": 30, "pack_prompts": True},
}


def learner(family: str = "qwen2_vl", dtype: torch.dtype = torch.float32) -> Any:
    """Makes a network whose tower learns."""
    return small(family, dtype).requires_grad_(True)


def shown() -> list[dict[str, Any]]:
    """Returns rows two of which show the same image, and one of which shows none."""
    return [*rows()[:3], {**rows()[3], "images": rows()[0]["images"]}]


def logprobs_of(model: Any, row: dict[str, Any], ids: Tensor) -> Tensor:
    """Returns log-probs of a completion by the model's own forward on pixels."""
    return own_logits(model, row, ids.tolist())[:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0]


def naive_gradient(model: Any, data: list[dict[str, Any]], trainer: Any, reference: Any, beta: float) -> Tensor:
    """Differentiates the plain loss of a rollout, each row by a forward of its own."""
    trajectory = trainer.loop.state.rollout.trajectory
    model.zero_grad()
    actions, total = trajectory.actions.rows(), len(trajectory.actions.flat)
    for place, ids in enumerate(actions):
        row, advantage = data[place // GROUP], trajectory.advantages[place].double()
        own = logprobs_of(model, row, ids)
        old = trajectory.old_logprobs.rows()[place].double() if trajectory.has_old[place] else own.detach()
        ratio = (own - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if beta:
            with torch.no_grad():
                gap = logprobs_of(reference, row, ids)
            loss = loss + beta * ((gap - own).exp() - (gap - own) - 1) * ratio
        (loss.sum() / total).backward()
    return torch.cat([weight.grad.flatten().double() for weight in model.parameters() if weight.requires_grad])


def made(tmp_path: Path, model: Any, **more: Any) -> Any:
    """Makes a trainer of a copy of a network."""
    return make(tmp_path, model=copy.deepcopy(model), **{"train_dataset": shown(), **more})


STEPS_OF: list[tuple[str, float, int]] = [
    *product(UNLIKE, [0.0, 0.5], [1]),
    *product(UNLIKE, [0.0, 0.5], [3]),
    ("qwen2_vl", 0.5, 2),
    *((family, 0.5, 3) for family in FAMILIES if family not in UNLIKE),
]
"""A family, a weight of the KL term, and a step."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "beta", "steps", "cut_as"),
    [(*case, list(CUTS)[place % len(CUTS)]) for place, case in enumerate(STEPS_OF)],
)
def test_a_step_has_the_gradient_of_forwards_on_pixels(
    tmp_path: Path, family: str, beta: float, steps: int, cut_as: str
) -> None:
    """In the second step weights have moved since the rollout; the third has a rollout of its own.

    Steps before are cut in one way, the gradient in all ways.
    """
    with InDouble():
        start = learner(family, torch.float64)
        trainer = made(
            tmp_path, start, policy=cut(**CUTS[cut_as]), num_iterations=2, beta=beta, max_steps=4, learning_rate=1e-3
        )
        found = {cut_as: gradient_of(trainer, steps)}
        found |= {name: gradient_under(trainer, cut(**told)) for name, told in CUTS.items() if name != cut_as}
        wanted = naive_gradient(copy.deepcopy(trainer.model), shown(), trainer, start, beta)
    towers = torch.cat([torch.full((weight.numel(),), in_tower(name)) for name, weight in start.named_parameters()])
    assert wanted[towers].norm() > wanted.norm() / 100
    for name, gradient in found.items():
        assert relative(gradient[towers], wanted[towers]) < 1e-12, name
        assert relative(gradient, wanted) < 1e-12, name


@pytest.mark.parametrize(("learns", "autocast"), [(False, False), (True, False), (True, True)])
def test_gradients_of_a_half_precision_network_gather_in_float32(tmp_path: Path, learns: bool, autocast: bool) -> None:
    model = learner(dtype=torch.float32 if autocast else torch.bfloat16)
    model.model.visual.requires_grad_(learns)
    trainer = made(tmp_path, model, max_steps=1, bf16=autocast)
    trainer.train()
    wanted = torch.float32 if learns or autocast else torch.bfloat16
    assert [one.values.dtype for one in features_of(trainer)] == [wanted]


def test_features_of_an_autocast_run_are_those_of_a_forward_under_autocast(tmp_path: Path) -> None:
    trainer = made(tmp_path, learner(), bf16=True)
    trainer.loop.begin(None)
    trainer.loop.collect()
    read = processor().image_processor(images=shown()[0]["images"], return_tensors="pt")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        own_ND = trainer.model.model.get_image_features(read["pixel_values"], read["image_grid_thw"]).pooler_output[0]
    found_FD = features_of(trainer)[0].values
    assert torch.equal(found_FD[1 : 1 + len(own_ND)], own_ND.float())


@pytest.mark.slow
def test_recomputed_blocks_give_the_same_gradient(tmp_path: Path) -> None:
    found, runs = [], []
    for place, policy in enumerate((cut(40), cut(40, checkpointing=True))):
        trainer = made(tmp_path / str(place), learner(), policy=policy)
        norm, known = trainer.model.model.visual.blocks[0].norm1, len(runs)
        norm.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
        found.append(gradient_of(trainer))
        assert sum(runs[known:]) == 3 + 3 * place
    assert torch.equal(*found)


@pytest.mark.slow
def test_tokens_are_those_of_the_network_as_it_has_become(tmp_path: Path) -> None:
    trainer = made(tmp_path, learner(), max_steps=2, learning_rate=1e-2)
    trainer.loop.begin(None)
    trainer.loop.step()
    moved = copy.deepcopy(trainer.model)
    trainer.loop.state.rollout = None
    trajectory = trainer.loop.collect().trajectory
    for place, ids in enumerate(trajectory.actions.rows()):
        logits_TV = own_logits(moved, shown()[place // GROUP], ids.tolist())[:-1]
        logits_TV[:, never_drawn(family_of(moved))] = -torch.inf
        own = logits_TV.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(trajectory.sampling_logprobs.rows()[place], own.float(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_step_reads_with_weights_that_moved_since_the_rollout(tmp_path: Path) -> None:
    start = learner()

    def moving(completions: list[Any], **columns: Any) -> list[float]:
        with torch.no_grad():
            for weight in trainer.model.model.visual.parameters():
                weight.mul_(1.1)
        return pay(completions, **columns)

    trainer = made(tmp_path, start, reward_funcs=moving)
    found = gradient_of(trainer)
    wanted = naive_gradient(copy.deepcopy(trainer.model), shown(), trainer, start, 0.0)
    assert relative(found, wanted) < 1e-6


def passes_of(trainer: Any) -> list[bool]:
    """Notes each forward of a trainer's tower, and whether it keeps a graph."""
    found: list[bool] = []
    tower_of(trainer.model)[0].register_forward_pre_hook(lambda *_: found.append(torch.is_grad_enabled()))
    return found


def features_of(trainer: Any) -> list[Any]:
    """Returns the features that are kept."""
    return list(trainer.setup.models.reader.kept()[0].features.values())


@pytest.mark.slow
def test_a_tower_runs_once_a_prompt_and_once_more_to_learn(tmp_path: Path) -> None:
    trainer = made(tmp_path / "a", learner(), max_steps=2, policy=cut(1))
    found = passes_of(trainer)
    trainer.train()
    assert found == [False] + 2 * ([False] * 3 + [True] * 3)  # the check at start; then in each rollout
    assert [(one.values.requires_grad, one.values.grad) for one in features_of(trainer)] == [(False, None)]
    assert not features_of(trainer)[0].learnt  # else the next step's backward would run for these as well
    later = made(tmp_path / "b", learner(), max_steps=2, num_iterations=2)
    found = passes_of(later)
    later.train()
    assert found == [False] + [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3


def test_a_table_that_grows_keeps_what_is_read(tmp_path: Path) -> None:
    trainer = made(tmp_path, learner())
    trainer.loop.begin(None)
    trainer.loop.collect()
    known = features_of(trainer)[0]
    fresh, found = set(known.fresh), passes_of(trainer)
    trainer.setup.models.reader([shown()[0], {**shown()[0], "images": [picture(24, 24, 9)]}])
    grown = features_of(trainer)[0]
    assert found == [False]
    assert known.fresh == fresh < grown.fresh
    assert torch.equal(grown.values[: len(known.values)], known.values)


def test_rows_have_their_own_images_read_and_no_others(tmp_path: Path) -> None:
    trainer = made(tmp_path, learner())
    trainer.loop.begin(None)
    adapter, trajectory = trainer.setup.adapter, trainer.loop.collect().trajectory
    features_of(trainer)[0].fresh.clear()
    found = passes_of(trainer)
    for prompt, runs in ((0, 1), (0, 1), (2, 1), (3, 2)):  # the third shows no image
        adapter.inputs.make_ready(adapter.lm, trajectory, range(prompt * GROUP, (prompt + 1) * GROUP))
        assert len(found) == runs


def test_a_frozen_tower_keeps_no_pixels_and_gathers_no_gradient(tmp_path: Path) -> None:
    trainer = made(tmp_path, small(), max_steps=2, num_iterations=2)
    found = passes_of(trainer)
    trainer.train()
    table, *_ = trainer.setup.models.reader.kept()
    assert found == [False] * 4
    assert not table.shown
    assert [(one.values.requires_grad, one.values.grad) for one in features_of(trainer)] == [(False, None)]


STEPS = {"max_steps": 3, "num_iterations": 2, "beta": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])  # storms go over others
def test_an_allocation_that_fails_anywhere_leaves_no_trace(tmp_path: Path, family: str) -> None:
    places: dict[str, list[int]] = {"forward": [], "backward": []}

    def ended(fail_at: int | None) -> tuple[Any, SimulatedMemory]:
        with SimulatedMemory(fail_at=fail_at) as memory:
            trainer = made(tmp_path / str(fail_at), learner(family), **STEPS, policy=cut(40, pack_prompts=True))
            for network in (trainer.model, trainer.ref_model):
                blocks_of(network)[1].register_forward_pre_hook(lambda *_: places["forward"].append(memory.allocations))
            blocks = blocks_of(trainer.model)
            blocks[1].mlp.register_full_backward_hook(lambda *_: places["backward"].append(memory.allocations))
            trainer.train()
        return trainer, memory

    plain, _ = ended(None)
    known = {name: list(found) for name, found in places.items()}
    assert [len(found) for found in known.values()] == [1 + 3 * 8, 9]
    # While read, for the reference, in the last pass, again after weights moved, in that pass, and in the next rollout.
    tried = [known["forward"][place] for place in (1, 4, 8, 11, 15, 20)]
    tried += [known["backward"][place] for place in (0, 4, 8)]
    for entered in tried:
        for later in (1, 25):
            found, memory = ended(entered + later)
            assert memory.refusals == 1
            assert torch.equal(weights(found), weights(plain)), entered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((family, {}) for family in FAMILIES),
        (FAMILIES[0], {"batch_invariant": True}),
        (FAMILIES[0], {"top_entropy_quantile": 0.5}),
    ],
)
def test_a_resumed_run_goes_on_bitwise(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    whole = made(tmp_path / "whole", learner(family), **STEPS, **more)
    whole.train()
    kept = {**STEPS, "save_strategy": "steps", "save_steps": 1, **more}
    for stop in (1, 2, 3):  # each goes on from where the one before stopped
        part = made(tmp_path / "parts", learner(family), **{**kept, "max_steps": stop})
        part.train(resume_from_checkpoint=stop > 1)
    assert torch.equal(weights(part), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_network_moves_as_with_trl(tmp_path: Path, family: str, kind: Any) -> None:
    learner(family).save_pretrained(tmp_path / "model")
    processor(family).save_pretrained(tmp_path / "model")
    settings = {"per_device_train_batch_size": 16, "num_generations": GROUP, "max_completion_length": 6, "max_steps": 1}
    settings |= {"learning_rate": 0.1, "beta": 0.1, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    trainer = kind(
        str(tmp_path / "model"),
        reward_funcs=pay,
        args=kind.config_class(str(tmp_path / "run"), disable_tqdm=True, bf16=False, **settings),
        train_dataset=shown(),
    )
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert any(in_tower(name) for name in before)
    for name, weight in trainer.model.named_parameters():
        assert not torch.equal(before[name], weight), name


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **more)


def partly_whole(family: str) -> LoraConfig:
    saved = "connector" if family in SQUARES else "multi_modal_projector" if family == TWO_WAY else "merger"
    return LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[saved], init_lora_weights=False)


@pytest.mark.slow
def test_a_tower_is_frozen_or_not_when_a_trainer_is_made(tmp_path: Path) -> None:
    trainer = made(tmp_path / "a", learner(), max_steps=1)
    trainer.model.model.visual.requires_grad_(False)
    before = trainer.model.model.visual.merger.mlp[0].weight.clone()
    trainer.train()
    assert torch.equal(trainer.model.model.visual.merger.mlp[0].weight, before)
    trainer = made(tmp_path / "b", small(), max_steps=1)
    trainer.model.requires_grad_(True)
    with pytest.raises(
        ConfigError, match=r"tower was unfrozen after the trainer was made.* Call requires_grad_\(True\)"
    ):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "cut_as"), [(1, "row by row"), (2, "row by row"), (2, "packed, behind trunks")])
@pytest.mark.parametrize("where", ["all-linear", "modules_to_save"])
@pytest.mark.parametrize("family", UNLIKE)
def test_an_adapter_in_the_tower_learns_beside_a_reference_without_it(
    tmp_path: Path, family: str, where: str, steps: int, cut_as: str
) -> None:
    with InDouble():
        start = learner(family, torch.float64)
        trainer = made(
            tmp_path,
            start,
            peft_config=lora() if where == "all-linear" else partly_whole(family),
            policy=cut(**CUTS[cut_as]),
            beta=0.5,
            num_iterations=2,
            max_steps=2,
        )
        names = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
        trainer.model.double()
        found = [gradient_of(trainer, steps)]
        if steps == 1:
            found.append(gradient_under(trainer, cut(**CUTS["packed, behind trunks"])))
        adapted = copy.deepcopy(trainer.model).get_base_model()
        wanted = naive_gradient(adapted, shown(), trainer, start, 0.5)
    assert any(in_tower(name) for name in names)
    assert all(relative(gradient, wanted) < 1e-12 for gradient in found)


@pytest.mark.slow
@pytest.mark.parametrize("family", UNLIKE)
@pytest.mark.parametrize("where", ["all-linear", "modules_to_save"])
def test_a_second_adapter_as_critic_has_features_of_its_own(tmp_path: Path, family: str, where: str) -> None:
    """A critic's adapter has no whole modules, so that the second tower does not learn from values."""
    config = PPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        max_completion_length=6,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        shuffle_dataset=False,
    )
    adapter = lora() if where == "all-linear" else partly_whole(family)
    more = {"peft_config": adapter, "critic": "adapter", "memory_policy": cut(), "processing_class": processor(family)}
    with InDouble():
        trainer = PPOTrainer(learner(family, torch.float64), pay, config, shown(), **more)
        trainer.setup.trained.double()
        for weight in trainer.setup.advantages.critics[0].head.parameters():
            weight.data.fill_(0.1)
        found = gradient_of(trainer)
        for policy in (None, cut(30, pack_prompts=True), cut(1)):
            assert relative(gradient_under(trainer, policy), found) < 1e-12
            gradients = {name: w.grad for name, w in trainer.model.named_parameters() if w.grad is not None}
            critic = {name: grad for name, grad in gradients.items() if ".critic." in name and in_tower(name)}
            assert critic if where == "all-linear" else all("lora_" in name for name in critic)
            assert all(grad.norm() > 0 for grad in critic.values())


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"top_entropy_quantile": 0.5, "beta": 0.1},
        {"batch_invariant": True},
        {"bf16": True},
        {"eval_dataset": shown(), "eval_strategy": "steps", "eval_steps": 1},
        {"probe_worst_case": True},
        {"dynamic_sampling": True},
        {
            "reward_funcs": [pay, length],
            "objectives": {"a": {"rewards": ["pay"]}, "b": {"rewards": ["length"], "beta": 0.1}},
        },
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("family", UNLIKE)
def test_cuts_agree_beside_other_settings(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    settings = {"num_iterations": 2, "max_steps": 3, "learning_rate": 1e-4, **more}
    plain = made(tmp_path / "plain", learner(family), policy=cut(), **settings)
    found = gradient_of(plain, 2)
    assert relative(gradient_under(plain, cut(offload_activations=True)), found) < 1e-6
    packed = made(tmp_path / "packed", learner(family), policy=cut(30, pack_prompts=True), **settings)
    assert relative(gradient_of(packed, 2), found) < (2e-2 if "bf16" in more else 1e-5)


@pytest.mark.slow
def test_dropout_leaves_the_tower_alone(tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy, adapter = cut(checkpointing=checkpointing), lora(lora_dropout=0.5)
        found.append(gradient_of(made(tmp_path, learner(), policy=policy, peft_config=adapter, disable_dropout=False)))
    assert torch.equal(*found)


@pytest.mark.slow
def test_dropout_of_the_tower_is_off_wherever_it_runs(tmp_path: Path) -> None:
    found = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        adapter = LoraConfig(r=2, target_modules=r".*visual\..*fc\d", init_lora_weights=False, lora_dropout=dropout)
        trainer = made(tmp_path, learner(), peft_config=adapter, disable_dropout=False, num_iterations=2, max_steps=2)
        found.append(gradient_of(trainer, 2))
    assert found[0].norm() > 0
    assert torch.equal(*found)


@pytest.mark.slow
def test_an_evaluation_reads_with_the_weights_as_they_are(tmp_path: Path) -> None:
    trainer = made(tmp_path / "a", learner(), max_steps=1)
    trainer.train()
    rewards = set()
    for round_ in range(2):  # of which the second has known prompts
        with torch.no_grad():
            for weight in trainer.model.model.visual.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * round_)
        found = trainer.evaluate(shown())
        other = made(tmp_path / str(round_), trainer.model, max_steps=1).evaluate(shown())
        assert {name: found[name] for name in ("eval_reward", "eval_loss")} == {
            name: other[name] for name in ("eval_reward", "eval_loss")
        }
        rewards.add(found["eval_reward"])
    assert len(rewards) == 2


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_teacher_reads_images_with_its_own_tower(tmp_path: Path, family: str, learns: bool) -> None:
    torch.manual_seed(1)
    teacher = learner(family)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    teacher.save_pretrained(tmp_path / "teacher")
    model = learner(family) if learns else small(family)
    trainer = made(tmp_path / "run", model, teacher_model_name_or_path=str(tmp_path / "teacher"))
    gradient_of(trainer)
    trajectory = trainer.loop.state.rollout.trajectory
    for place, ids in enumerate(trajectory.actions.rows()):
        own = logprobs_of(teacher, shown()[place // GROUP], ids).detach()
        torch.testing.assert_close(trajectory.ref_logprobs.rows()[place], own, rtol=0, atol=1e-5)
