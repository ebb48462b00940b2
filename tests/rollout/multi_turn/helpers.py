"""A chat template with tools, environments that count what happens to them, and scripted draws."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memsafe_rl.memory.runtime.recovery import Attempt, under
from memsafe_rl.models.adapter import ModelAdapter
from memsafe_rl.rollout.multi_turn.episode import EpisodeLimits, turn_key
from memsafe_rl.rollout.multi_turn.lockstep import AgentDraw, Beginning, Caller, EpisodeSettings
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Step
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey
from tests.tiny import EOS_ID, tiny_tokenizer

TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<eos>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Renders every message the same way whatever follows it."""

FORGETFUL = TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}"
)
"""Leaves out what the assistant said as soon as something follows, like templates that drop old thinking."""


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


class Echo(Environment):
    """Answers with the number of the step and what was said; done after `steps` steps. Counts its calls."""

    def __init__(self, steps: int = 2, user: Any = None, tools: Sequence[Any] = ()) -> None:
        self.steps, self.user, self.tools = steps, user, tools
        self.resets, self.seen, self.judged, self.heard = 0, list[Action](), 0, list[Any]()

    def reset(self, example: Mapping[str, Any]) -> Any:
        self.resets += 1
        self.seen.clear()
        return f" [{example['task']}]" if "task" in example else None

    def step(self, action: Action) -> Any:
        self.seen.append(action)
        count = len(self.seen)
        return Step(f"{count}: {action.text[:2]}", done=count >= self.steps)

    def ended(self, messages: list[Any]) -> None:
        self.heard = messages

    def reward(self) -> Any:
        self.judged += 1
        return float(sum(len(action.text) for action in self.seen))


class AsyncEcho(Echo):
    async def reset(self, example: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0)
        return super().reset(example)

    async def step(self, action: Action) -> Any:
        await asyncio.sleep(0.001 * (len(action.text) % 3))
        return super().step(action)

    async def reward(self) -> Any:
        return super().reward()


class ThreadedEcho(Echo):
    blocking = True

    def step(self, action: Action) -> Any:
        time.sleep(0.001 * (len(action.text) % 3))
        return super().step(action)


def says(tokenizer: Any, texts: Mapping[SequenceKey, str], *, ends: bool = True) -> AgentDraw:
    """Draws scripted turns; a key that is not in the script says "ok"."""
    calls: list[list[int]] = []

    def draw(prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]) -> list[Completion]:
        calls.append([len(prompt) for prompt in prompts])
        drawn = []
        for group, limit in zip(keys, limits, strict=True):
            for key in group:
                ids = tokenizer(texts.get(key, "ok"))["input_ids"] + [EOS_ID] * ends
                cut = torch.tensor(ids[:limit])
                logprobs = -torch.arange(1, len(cut) + 1, dtype=torch.float32)
                drawn.append(Completion(cut, logprobs, logprobs, finished=ends and len(ids) <= limit))
        return drawn

    draw.calls = calls  # type: ignore[attr-defined]
    return draw


def script(key: SequenceKey, *turns: str) -> dict[SequenceKey, str]:
    return {turn_key(key, place): text for place, text in enumerate(turns)}


ENDS = (EOS_ID, *range(2, 80))
"""So many tokens end a turn that random networks end theirs soon."""


def sampler(adapter: ModelAdapter, *, attempt: Attempt[RolloutPlan] | None = None) -> AgentDraw:
    def draw(prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]) -> list[Completion]:
        settings = SamplingSettings(max(limits), ENDS)
        return generate(adapter, prompts, keys, settings, attempt or under(RolloutPlan()), limits=limits)

    return draw


def table(tokenizer: Any, agent: AgentDraw, user: Any = None, **limits: Any) -> EpisodeSettings:
    bounds = EpisodeLimits(**{"completion_tokens": 200, **limits})
    return EpisodeSettings(tokenizer, bounds, agent, user, Caller())


def beginning(environment: Environment, *, prompt: int = 0, sample: int = 0, **example: Any) -> Beginning:
    asked = example.pop("asked", [{"role": "user", "content": f"q{prompt}"}])
    return Beginning(SequenceKey(0, 0, prompt, sample), example, asked, environment)
