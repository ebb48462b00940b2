"""An agent learns to serve a simulated guest with a tool, in minutes: `python -m examples.agent_user_grpo`.

Guests want to know the room, the day or the price of their booking. The agent sees neither: it must look the guest up
by name with `find`, and tell what was asked for. Agent, guest and reference are one set of weights. A small Qwen3 is
made on the spot and warmed up with supervision, as a guest and, with many mistakes, as an agent; then its weights stay
as they are: a LoRA adapter, on when the agent speaks and off when the guest does, is all that GRPO trains. A tenth of
the bookings, picked by a hash, is never trained on; the reward is measured on those.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tasks import draw_learning_curve, is_held_out
from memsafe_rl import GRPOConfig, GRPOTrainer, ModelUser, ToolEnvironment

_NAMES = "ada bob cleo dan eva finn gus hana ivo june kai lea max nora otto pia quin rosa sam tess uma vera wim zoe"
GUESTS = _NAMES.split()
WISHES = ("room", "day", "price")
STOP = "###STOP###"
TEMPLATE = (
    "{% if tools %}<system>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}<eos>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Renders every message the same way whatever follows it, so that an episode is one sequence."""


class FrontDesk(ToolEnvironment):
    """A hotel's front desk: one booking, a guest who asks for it, and a tool that looks bookings up."""

    def __init__(self) -> None:
        super().__init__([self.find])

    def reset(self, example: Mapping[str, Any]) -> str | None:
        """Takes a booking and its guest.

        Args:
            example: "guest", "wish" and the booking's "room", "day" and "price".

        Returns:
            Nothing: the guest begins.
        """
        self.booking = dict(example)
        self.looked_up = False
        self.user = ModelUser(guest_told(example), max_tokens=16, stops=(STOP,))
        return None

    def find(self, guest: str) -> str:
        """Finds a booking.

        Args:
            guest: whose booking it is.
        """
        if guest != self.booking["guest"]:
            return "none"
        self.looked_up = True
        return told_by_tool(self.booking)

    def ended(self, messages: list[dict[str, Any]]) -> None:
        """Remembers what the agent said last.

        Args:
            messages: the conversation.
        """
        said = [message["content"] for message in messages if message["role"] == "assistant" and message["content"]]
        self.answer = said[-1] if said else ""

    def reward(self) -> float:
        """Pays 0.2 for looking the right guest up, and 0.8 for the right answer besides.

        Returns:
            The reward.
        """
        right = self.answer == answer_to(self.booking, self.booking["wish"])
        return 0.2 * self.looked_up + 0.8 * (right and self.looked_up)


def guest_told(booking: Mapping[str, Any]) -> str:
    """Says what a guest knows of itself."""
    return f"you are {booking['guest']} , ask for {booking['wish']}"


def guest_says(booking: Mapping[str, Any]) -> str:
    """Says how a guest begins."""
    return f"i am {booking['guest']} , which {booking['wish']} ?"


def told_by_tool(booking: Mapping[str, Any]) -> str:
    """Says what is booked."""
    return " ".join(f"{wish} {booking[wish]}" for wish in WISHES)


def answer_to(booking: Mapping[str, Any], wish: str) -> str:
    """Says what a guest wants to hear."""
    return f"your {wish} is {booking[wish]}"


def bookings(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Draws bookings.

    Args:
        count: how many.
        draw: draws them.

    Returns:
        Mappings with "guest", "wish", "room", "day" and "price".
    """
    return [
        {"guest": draw.choice(GUESTS), "wish": draw.choice(WISHES), **{wish: draw.randint(1, 9) for wish in WISHES}}
        for _ in range(count)
    ]


def divided(count: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draws bookings and holds a tenth out.

    Args:
        count: bookings drawn.
        seed: of the draws.

    Returns:
        Bookings to learn from, bookings held out.
    """
    drawn = bookings(count, random.Random(seed))
    marks = [is_held_out(json.dumps(booking), one_in=10) for booking in drawn]
    parts = ([b for b, mark in zip(drawn, marks, strict=True) if mark is wanted] for wanted in (False, True))
    train, held_out = parts
    return train, held_out


def as_dataset(items: Sequence[Mapping[str, Any]]) -> Dataset:
    """Puts bookings into a dataset.

    Args:
        items: from `bookings`.

    Returns:
        A dataset whose prompts say nothing of the booking.
    """
    return Dataset.from_list([{"prompt": [{"role": "system", "content": "serve guests"}], **item} for item in items])


# ------------------------------------------------------------------ the model and its warm-up


@dataclass(frozen=True)
class WarmUp:
    """Supervision before GRPO.

    Args:
        steps: of the optimizer.
        batch: conversations a step, half of them as the guest.
        mistakes: share of the agent's conversations that go wrong.
        wrong_from: step from which any do: first the task is learnt.
        learning_rate: at its highest; it falls to 0.
    """

    steps: int = 1200
    batch: int = 32
    mistakes: float = 0.75
    wrong_from: int = 1000
    learning_rate: float = 2e-3


def call_of(guest: str) -> str:
    """Writes a tool call as the template does."""
    return f"<tool_call>{json.dumps({'name': 'find', 'arguments': {'guest': guest}})}</tool_call>"


def agents_view(booking: Mapping[str, Any], draw: random.Random, mistakes: float) -> list[tuple[str, bool]]:
    """Writes a conversation as the agent sees it.

    Args:
        booking: what it is about.
        draw: draws mistakes.
        mistakes: share of conversations that go wrong: another guest is looked up, another thing is told, or none is
            looked up.

    Returns:
        Texts, and whether each is the agent's.
    """
    wrong = draw.choice(("guest", "wish", "lazy")) if draw.random() < mistakes else ""
    guest = draw.choice(GUESTS) if wrong == "guest" else booking["guest"]
    wish = draw.choice(WISHES) if wrong == "wish" else booking["wish"]
    found = told_by_tool(booking) if guest == booking["guest"] else "none"
    known = booking if found != "none" and wrong != "lazy" else bookings(1, draw)[0]
    looked_up = [(f"{call_of(guest)}<eos>", True), (f"<tool>{found}<eos><assistant>", False)]
    return [
        (f"<system>tools find<eos><system>serve guests<eos><user>{guest_says(booking)}<eos><assistant>", False),
        *(looked_up if wrong != "lazy" else []),
        (f"{answer_to(known, wish)}<eos>", True),
    ]


def guests_view(booking: Mapping[str, Any], draw: random.Random) -> list[tuple[str, bool]]:
    """Writes a conversation as the guest sees it.

    Args:
        booking: what it is about.
        draw: draws the answer.

    Returns:
        Texts, and whether each is the guest's.
    """
    heard = answer_to(bookings(1, draw)[0], draw.choice(WISHES))
    return [
        (f"<system>{guest_told(booking)}<eos><assistant>", False),
        (f"{guest_says(booking)}<eos>", True),
        (f"<user>{heard}<eos><assistant>", False),
        (f"thanks {STOP}<eos>", True),
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-pair tokenizer of at most 512 tokens on conversations.

    Returns:
        The tokenizer.
    """
    draw = random.Random(0)
    texts = [text for b in bookings(2_000, draw) for text, _ in (*agents_view(b, draw, 0.5), *guests_view(b, draw))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = [f"<{role}>" for role in ("system", "user", "assistant", "tool")]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<pad>", "<eos>", *roles],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Makes a random Qwen3 of two blocks.

    Args:
        tokenizer: gives the vocabulary.
        seed: of the weights.

    Returns:
        The model, fp32.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_up(model: Any, tokenizer: Any, train: Sequence[Mapping[str, Any]], settings: WarmUp, seed: int) -> None:
    """Teaches the model both roles: the guest's well, the agent's with mistakes.

    Args:
        model: is changed in place.
        tokenizer: its tokenizer.
        train: bookings.
        settings: how long and how wrong.
        seed: of batches and mistakes.
    """
    draw, steps = random.Random(seed), settings.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / steps))
    model.train()
    for step in track(range(steps), description="Warm-up", transient=True):
        mistakes = settings.mistakes if step >= settings.wrong_from else 0.0
        half = draw.choices(train, k=settings.batch // 2)
        views = [view for b in half for view in (agents_view(b, draw, mistakes), guests_view(b, draw))]
        optimizer.zero_grad()
        torch.autograd.backward(own_loss(model, tokenizer, views))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def own_loss(model: Any, tokenizer: Any, views: Sequence[Sequence[tuple[str, bool]]]) -> torch.Tensor:
    """Computes the mean cross-entropy of what a role itself says, every text of a conversation counting the same.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        views: conversations, as texts and whether each is the role's own.

    Returns:
        A scalar with gradient, nats.
    """
    rows, weights = [], []
    for view in views:
        parts = [(tokenizer(text)["input_ids"], own) for text, own in view]
        rows.append(torch.tensor([token for ids, _ in parts for token in ids]))
        weights.append(torch.tensor([own / len(ids) for ids, own in parts for _ in ids]))
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    weights_BL = torch.nn.utils.rnn.pad_sequence(weights, batch_first=True)
    # Padding stands on the right, where a causal model's earlier positions do not see it.
    logits = model(input_ids=ids_BL, attention_mask={"full_attention": None}, use_cache=False).logits
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten(), reduction="none")
    return (losses * weights_BL[:, 1:].flatten()).sum() / weights_BL.sum()


# ------------------------------------------------------------------ the run


def settings(output_dir: Path, seed: int, steps: int) -> GRPOConfig:
    """Returns the configuration: 128 episodes a step, eight a booking.

    Args:
        output_dir: folder of the run.
        seed: of the run.
        steps: optimizer steps.

    Returns:
        The configuration.
    """
    return GRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=128,
        num_generations=8,
        num_iterations=2,
        max_completion_length=96,
        max_turn_length=24,
        max_episode_turns=4,
        max_tool_calling_iterations=2,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=5,
        eval_strategy="steps",
        eval_steps=max(1, steps // 6),
        eval_on_start=True,
        num_generations_eval=2,
        save_steps=steps,
        overwrite_output_dir=True,
        use_cpu=True,
    )


def run(output_dir: Path, seed: int, steps: int, warming: WarmUp, judged: int = 150) -> dict[str, float]:
    """Warms up, trains, and measures on bookings held out.

    Args:
        output_dir: folder of the run.
        seed: of everything random.
        steps: optimizer steps of GRPO.
        warming: supervision before them.
        judged: held-out bookings used.

    Returns:
        Held-out rewards before and after, the standard error of their difference, and the guest's largest change.
    """
    torch.set_num_threads(1)  # a model this small gains nothing from a second one, and results repeat anywhere
    train, held_out = divided(12_000, seed=0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    warm_up(model, tokenizer, train, warming, seed)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = GRPOTrainer(
        model,
        None,
        args=settings(output_dir, seed, steps),
        train_dataset=as_dataset(train),
        eval_dataset=as_dataset(held_out[:judged]),
        processing_class=tokenizer,
        peft_config=adapter,
        environment_factory=FrontDesk,
    )
    heard = tokenizer(guest_told(held_out[0]), return_tensors="pt")["input_ids"]

    @torch.inference_mode()
    def guest() -> torch.Tensor:
        with trainer.roles.acting("base") as base:
            logits: torch.Tensor = base.model(input_ids=heard).logits
            return logits.clone()

    before = guest()
    trainer.train()
    changed = float((guest() - before).abs().max())
    log = [record for record in trainer.state.log_history if "eval_reward" in record]
    draw_learning_curve(
        trainer.state.log_history,
        output_dir / "learning_curve.png",
        title=f"An agent at a front desk, {judged} held out",
    )
    # Completions of one booking are alike: only bookings are counted as draws.
    errors = [record["eval_reward_std"] / math.sqrt(judged) for record in (log[0], log[-1])]
    return {
        "reward_before": log[0]["eval_reward"],
        "reward_after": log[-1]["eval_reward"],
        "standard_error": math.hypot(*errors),
        "guest_changed": changed,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example from a command line.

    Args:
        arguments: command line, None for the process's own.

    Returns:
        What `run` found.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of GRPO (default: 60)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/agent_user"), help="where files go")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    found = run(given.output_dir, given.seed, given.steps, WarmUp())
    print(f"held-out reward {found['reward_before']:.3f} -> {found['reward_after']:.3f}")
    print(f"standard error of the difference {found['standard_error']:.3f}")
    print(f"the guest's logits changed by {found['guest_changed']:g}")
    print(f"{time.perf_counter() - started:.0f} s; checkpoint, metrics.jsonl, learning_curve.png in {given.output_dir}")
    return found


if __name__ == "__main__":
    main()
