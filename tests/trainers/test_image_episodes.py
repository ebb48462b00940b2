"""Episodes whose prompts, environments and tools show images: tokens and gradients are those of a forward on pixels."""

from __future__ import annotations

import json
import os
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from memsafe_rl import ConfigError, DataError, SimulatedMemory
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Rewritten, Step
from memsafe_rl.rollout.multi_turn.users import ModelUser
from tests.images import FAMILIES, never_drawn, own_arguments, picture, processor, rows, small
from tests.rollout.multi_turn.helpers import chat_tokenizer
from tests.tiny import tiny_model
from tests.trainers.helpers import cut, gradient_of, relative, weights
from tests.trainers.test_images import family_of, make


class Gallery(Environment):
    """Says a word, then shows a picture, then says another; pays for long words."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def reset(self, example: Any) -> Any:
        self.said, self.goal = [], int(example["goal"])
        return (
            [{"role": "user", "content": [{"type": "image", "image": picture(16, 16, 9)}]}] if self.goal == 3 else None
        )

    def step(self, action: Action) -> Any:
        self.said.append(action.text)
        shown = [{"type": "image", "image": picture(16, 24, self.goal)}, {"type": "text", "text": "w8"}]
        turns = ["w9", [{"role": "user", "content": shown}], "w10"]
        return Step(turns[len(self.said) - 1], done=len(self.said) == 3)

    def reward(self) -> Any:
        return self.goal + sum(map(len, self.said)) / 7


class Watched(Gallery):
    def step(self, action: Action) -> Any:
        assert max(action.prompt_ids) < 64, "what an agent has read is told as tokens"
        return super().step(action)


def play(output_dir: Path, **more: Any) -> Any:
    given = {"environment_factory": Gallery, "reward_funcs": None, "max_completion_length": 60}
    given["generation_kwargs"] = {"eos_token_id": [2, *range(5, 40)]}  # so that turns end soon
    return make(output_dir, **{"loss_type": "dapo", "batch_invariant": False, **given, **more})


def own_logits(model: Any, reader: Any, condition: list[int], actions: list[int], known: Any = None) -> Tensor:
    """Returns the logits of a row's completion by the model's own forward on the pixels of its context."""
    read = reader.read_in_contexts()
    plain = reader.plain(condition)
    images = next(([read["images"][one] for one in shown] for ids, shown in read["contexts"] if ids == plain), [])
    pixels = {}
    if images:
        opened = [restored(image) for image in images]
        pixels = dict((known or processor(family_of(model))).image_processor(images=opened, return_tensors="pt"))
        pixels.pop("num_crops", None)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    output: Tensor = model(**own_arguments(family_of(model), [*plain, *actions], pixels)).logits
    return output[0, len(plain) - 1 : -1]


def taken(logits_TV: Tensor, actions_T: Tensor, never: list[int]) -> Tensor:
    """Returns the log-probs of actions, where some tokens are never drawn."""
    logits_TV = logits_TV.index_fill(1, torch.tensor(never, dtype=torch.int64), -torch.inf)
    return logits_TV.log_softmax(-1).gather(1, actions_T[:, None])[:, 0]


def restored(image: str) -> Any:
    return Image.open(BytesIO(b64decode(image)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learnt_is_what_the_own_forward_on_pixels_says(family: str, tmp_path: Path) -> None:
    found = []
    for place, policy in enumerate((None, cut(60, 3), cut(8192, 64, checkpointing=True), cut(100, pack_prompts=True))):
        trainer = play(tmp_path / str(place), model=small(family), policy=policy, environment_factory=Watched)
        found.append(gradient_of(trainer))
    rollout, reader, model = trainer.loop.state.rollout.trajectory, trainer.setup.models.reader, small(family)
    conditions = [rollout.conditions.rows()[owner].tolist() for owner in rollout.condition_of_row]
    assert len(conditions) == 2 * 16, "the picture in the middle begins a sequence of its own"
    model.zero_grad()
    drawn = sum(int(mask.sum()) for mask in rollout.loss_mask.rows())
    for row, (actions, mask) in enumerate(zip(rollout.actions.rows(), rollout.loss_mask.rows(), strict=True)):
        logits, kept = own_logits(model, reader, conditions[row], actions.tolist()), mask.bool()
        sampled, logprobs = rollout.sampling_logprobs.rows()[row], taken(logits, actions, [])
        assert torch.allclose(taken(logits, actions, never_drawn(family))[kept], sampled[kept], atol=1e-5)
        (-rollout.advantages[row] * logprobs[kept].sum() / drawn).backward()
    wanted = torch.cat([w.grad.flatten().double() for w in model.parameters() if w.requires_grad])
    for gradient in found:
        assert relative(gradient, wanted) < 1e-6


def steps(output_dir: Path, **more: Any) -> Any:
    return play(output_dir, max_steps=3, num_iterations=2, save_strategy="steps", save_steps=1, **more)


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True], ids=["frozen tower", "learning tower"])
def test_a_resumed_run_reads_what_environments_showed_again(learns: bool, tmp_path: Path) -> None:
    def network() -> Any:
        return small().requires_grad_() if learns else small()

    through = steps(tmp_path / "through", model=network())
    through.train()
    assert through.history[0]["episodes/sequences"] == 2
    judged = steps(tmp_path / "judged", model=network(), eval_strategy="steps", eval_steps=1, eval_dataset=rows())
    judged.train()
    left, kept = (one.setup.models.reader.read_in_contexts() for one in (judged, through))
    assert left == kept, "an evaluation leaves what the rollout keeps, and nothing else"
    assert torch.equal(weights(judged), weights(through))
    for run, step in (("through", 1), ("through", 2), ("judged", 1)):  # in the middle of a rollout, and between two
        resumed = steps(tmp_path / f"{run} {step}", model=network())
        resumed.train(resume_from_checkpoint=str(tmp_path / run / f"checkpoint-{step}"))
        assert torch.equal(weights(resumed), weights(through))


@pytest.mark.slow
def test_allocations_refused_in_the_tower_and_elsewhere_change_nothing(tmp_path: Path) -> None:
    plain = steps(tmp_path / "plain")
    with SimulatedMemory() as memory:
        plain.train()
    total = memory.allocations
    for place in torch.randint(total // 20, total, (8,), generator=torch.Generator().manual_seed(5)).tolist():
        with SimulatedMemory(fail_at=place) as memory:
            again = steps(tmp_path / str(place))
            again.train()
        assert memory.refusals == 1
        assert relative(weights(again), weights(plain)) < 1e-6


CALLS = {
    f'"w{place}"': json.dumps(f'<tool_call>{{"name":"look","arguments":{{"place":{place}}}}}</tool_call>')
    for place in range(10, 20)
}
"""Words of a vocabulary, and calls that stand in their place: a network that knows nothing draws some."""


def looking(called: list[int]) -> Any:
    """Returns a tool that shows a picture, and notes where it was looked."""

    def look(place: int) -> Any:
        """Looks closer.

        Args:
            place: where.

        Returns:
            What is there.
        """
        called.append(place)
        return [{"type": "image", "image": picture(16, 16, place)}, {"type": "text", "text": "w5"}]

    return look


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_what_a_tool_shows_is_seen(family: str, tmp_path: Path) -> None:
    called: list[int] = []

    def judge(completions: list[Any], **_: Any) -> list[float]:
        shown = [part for said in completions for turn in said if turn["role"] == "tool" for part in turn["content"]]
        # of which an episode without room for what it is shown ends before
        assert len(called) >= sum("image" in part for part in shown) > 0
        return [float(len(str(said))) for said in completions]

    trainer = make(
        tmp_path,
        model=small(family),
        processing_class=calling(family),
        tools=[looking(called)],
        reward_funcs=judge,
        max_completion_length=60,
        generation_kwargs={"eos_token_id": [2, *range(30, 40)]},
    )
    gradient_of(trainer)
    assert called
    assert set(called) <= set(range(10, 20))
    assert_seen(trainer, family)


def assert_seen(trainer: Any, family: str = "qwen2_vl") -> None:
    """Holds the log-probs of what was drawn to the network's own forward on what was shown."""
    rollout, reader = trainer.loop.state.rollout.trajectory, trainer.setup.models.reader
    owners, contexts = rollout.condition_of_row, rollout.conditions.rows()
    sequences = zip(owners, rollout.actions.rows(), rollout.loss_mask.rows(), strict=True)
    for row, (owner, actions, mask) in enumerate(sequences):
        logits = own_logits(small(family), reader, contexts[owner].tolist(), actions.tolist(), processor(family))
        found = taken(logits, actions, never_drawn(family))[mask.bool()]
        assert torch.allclose(found, rollout.sampling_logprobs.rows()[row][mask.bool()], atol=1e-5)


class Repainted(Gallery):
    """Shows a canvas and a file that it overwrites at every turn."""

    def step(self, action: Action) -> Any:
        self.said.append(action.text)
        if len(self.said) == 1:
            self.canvas = picture(16, 16, self.goal)
        path = Path(os.environ["PAINTED"]) / f"{self.goal}.png"
        self.canvas.paste((80 * len(self.said), 10, 10), (0, 0, 8, 8))
        self.canvas.convert("P").save(path)
        shown = [{"type": "image", "image": self.canvas}, {"type": "image", "image": str(path)}]
        return Step([{"role": "user", "content": shown}], done=len(self.said) == 3)


@pytest.mark.slow
def test_what_was_shown_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAINTED", str(tmp_path))
    trainer = play(tmp_path / "run", environment_factory=Repainted, max_completion_length=90)
    gradient_of(trainer)
    assert_seen(trainer)
    read = trainer.setup.models.reader.read_in_contexts()
    assert sum(len(set(shown)) == len(shown) >= 4 for _, shown in read["contexts"]), "each turn its own"
    assert len(read["images"]) == len(set(read["images"])), "equal images are kept once"


@pytest.mark.slow
def test_a_network_of_a_dataset_of_texts_sees_what_tools_show(tmp_path: Path) -> None:
    called: list[int] = []
    small("qwen2_vl").save_pretrained(tmp_path / "model")
    calling("qwen2_vl").save_pretrained(tmp_path / "model")
    trainer = make(
        tmp_path / "run",
        model=str(tmp_path / "model"),
        processing_class=None,
        tools=[looking(called)],
        reward_funcs=lambda completions, **_: [float(len(str(said))) for said in completions],
        train_dataset=Dataset.from_list(tasks()),
        max_completion_length=60,
        generation_kwargs={"eos_token_id": [2, *range(30, 40)]},
        max_steps=1,
        learning_rate=0.1,
    )
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert called
    assert not any(torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())


def calling(family: str) -> Any:
    """Returns a processor some of whose words are calls, and whose template names tools."""
    known = processor(family)
    plain = known.tokenizer.backend_tokenizer.to_str()
    for word, call in CALLS.items():
        plain = plain.replace(word, call)
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + known.tokenizer.chat_template
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": template}
    return replace(known, tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(plain), **named))


@pytest.mark.slow
def test_what_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    class Anew(Gallery):
        def step(self, action: Action) -> Any:
            return Step(Rewritten([{"role": "user", "content": [{"type": "image", "image": picture(16, 16)}]}]))

    class Painter(Gallery):
        def step(self, action: Action) -> Any:
            return Step([{"role": "user", "content": [{"type": "image", "image": "no such file"}]}])

    class Asked(Gallery):
        user = ModelUser("w1 w2", role="agent", max_tokens=4)

    with pytest.raises(DataError, match="Give what is new as messages, without Rewritten"):
        gradient_of(play(tmp_path / "anew", environment_factory=Anew))
    with pytest.raises(DataError, match="'no such file' cannot be read"):
        gradient_of(play(tmp_path / "painter", environment_factory=Painter))
    with pytest.raises(ConfigError, match="models that play users read text alone"):
        gradient_of(play(tmp_path / "asked", environment_factory=Asked))
    plain = [{"prompt": f"w{goal}", "goal": goal} for goal in (1, 2, 4, 5)]
    with pytest.raises(DataError, match="Give prompts as messages"):
        gradient_of(play(tmp_path / "plain", train_dataset=plain))
    blind = {"model": tiny_model(positions=512), "processing_class": chat_tokenizer(), "train_dataset": tasks()}
    with pytest.raises(DataError, match="conversations of this run are text alone"):
        gradient_of(play(tmp_path / "blind", **blind))
    with pytest.raises(ConfigError, match=r"loss_type.*sequences|sequences"):
        gradient_of(play(tmp_path / "loss", importance_sampling_level="sequence", loss_type="grpo"))


def tasks() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"w{goal}"}], "goal": goal} for goal in (1, 2, 4, 5)]
