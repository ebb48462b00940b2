"""What caches that are kept between turns save: `python -m benchmarks.rereading`.

Episodes of a fixed number of turns with answers of a fixed length, drawn by a random Qwen3, with caches dropped after
each turn and with caches kept: tokens read, processor time, and the most bytes of keys and values at any moment. Writes
``benchmarks/results/rereading.json``, where runs of other sizes stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.small import EOS_ID, PAD_ID, byte_tokenizer, small_qwen3
from memsafe_rl.memory.runtime.recovery import under
from memsafe_rl.memory.simulated.device import SimulatedMemory
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.rollout.multi_turn.episode import EpisodeLimits
from memsafe_rl.rollout.multi_turn.lockstep import Beginning, Caller, EpisodeSettings, play
from memsafe_rl.rollout.multi_turn.protocol import Action, Environment, Step
from memsafe_rl.rollout.native.kv_retention import KeptCaches
from memsafe_rl.rollout.native.running_batch import generate
from memsafe_rl.types import Completion, RolloutPlan, SamplingSettings, SequenceKey

_ANY_BYTES = 2**40
RESULTS = Path(__file__).parent / "results" / "rereading.json"

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


class Teller(Environment):
    """Answers every turn with so many characters.

    Args:
        turns: of an episode.
        answer: characters of an answer.
    """

    def __init__(self, turns: int, answer: int) -> None:
        self._turns, self._answer, self._seen = turns, answer, 0

    def reset(self, example: Mapping[str, Any]) -> None:
        """Begins an episode."""
        del example
        self._seen = 0

    def step(self, action: Action) -> Step:
        """Answers a turn."""
        del action
        self._seen += 1
        return Step("x" * self._answer, done=self._seen >= self._turns)


class _Clock:
    """Notes what an adapter reads, and for how long."""

    def __init__(self, adapter: CausalLMAdapter) -> None:
        self.seconds, self.tokens = 0.0, 0
        adapter.prefill = self._timed(adapter.prefill, 0)  # type: ignore[method-assign]
        adapter.resume = self._timed(adapter.resume, 2)  # type: ignore[method-assign]

    def _timed(self, read: Any, place: int) -> Any:
        def timed(*given: Any) -> Any:
            started = time.process_time()
            found = read(*given)
            self.seconds += time.process_time() - started
            self.tokens += sum(len(tokens) for tokens in given[place])
            return found

        return timed


def measure(
    turns: int, *, keeps: bool, episodes: int, prompt: int, turn: int, answer: int, hidden: int, layers: int
) -> dict[str, Any]:
    """Plays episodes and counts what was read.

    Args:
        turns: of an episode.
        keeps: whether caches are kept between turns.
        episodes: played together, one a prompt.
        prompt: characters of the first prompt.
        turn: tokens of a turn of the agent.
        answer: characters of an answer.
        hidden: width of the network.
        layers: of the network.

    Returns:
        Tokens and seconds.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    adapter = CausalLMAdapter(
        small_qwen3(8192, hidden=hidden, layers=layers, head_dim=32, max_position_embeddings=8192).eval(),
        pad_token_id=PAD_ID,
    )
    check_head(adapter)
    clock, kept = _Clock(adapter), KeptCaches()
    plan = under(RolloutPlan(rows_in_flight=episodes, prefill_tokens=2048, kept_kv_bytes=_ANY_BYTES if keeps else 0))

    def draw(prompts: list[Tensor], keys: list[list[SequenceKey]], limits: list[int]) -> list[Completion]:
        # The eos is drawn last, so that every turn has its full length.
        sampling = SamplingSettings(turn, (EOS_ID,), min_new_tokens=turn - 1, forced_eos_token_ids=(EOS_ID,))
        return generate(adapter, prompts, keys, sampling, plan, limits=limits, kept=kept)

    beginnings = [
        Beginning(
            SequenceKey(0, 0, number, 0),
            {},
            [{"role": "u", "content": f"{number:04d}" + "p" * prompt}],
            Teller(turns, answer),
        )
        for number in range(episodes)
    ]
    table = EpisodeSettings(
        tokenizer, EpisodeLimits(turns * (turn + answer + 32), turn_tokens=turn), draw, None, Caller()
    )
    with SimulatedMemory() as memory:
        started = time.process_time()
        play(beginnings, table)
        seconds = time.process_time() - started
        kept.clear()
    return {
        "turns": turns,
        "keeps": keeps,
        "tokens_read": clock.tokens,
        "seconds": seconds,
        "reading": clock.seconds,
        "peak_bytes": memory.peak_bytes,
    }


def main() -> None:
    """Prints one line for each number of turns, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("episodes", 16),
        ("prompt", 200),
        ("turn", 32),
        ("answer", 64),
        ("hidden", 256),
        ("layers", 6),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8])
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    turns_tried, results = given.pop("turns"), []
    for turns in turns_tried:
        for keeps in (False, True):
            results.append(measure(turns, keeps=keeps, **given))
            print(json.dumps(results[-1]))
    written = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
    written[", ".join(f"{name} {size}" for name, size in given.items())] = results
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "runs": written}, indent=1) + "\n")


if __name__ == "__main__":
    main()
