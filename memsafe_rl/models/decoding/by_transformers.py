"""Decoding by transformers' own `generate`, for networks whose cache this library's own decoding cannot handle.

Axes: ``B`` rows, ``L`` tokens of a row, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from memsafe_rl.models.module_state import replaced

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes logits (B, V) float32 of the next token; gives tokens (B,) int64, and (B,) bool, whether a row ends there."""


def generate_plainly(
    lm: Any, ids_BL: Tensor, choose: Choose, *, max_new_tokens: int, cached: bool, decoder_ids_BN: Tensor | None = None
) -> None:
    """Runs `generate`, with tokens chosen by the caller in place of its own search.

    Rows have one length, so the network's padding does not matter. Rows that have ended are still read until
    the last one ends, as `generate` has it. The model's own generation config is put aside meanwhile.
    """
    chooser = _Chooser(choose, len(ids_BL), ids_BL.device)
    plain = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=cached, disable_compile=True
    )
    begun = {}
    if decoder_ids_BN is not None:
        plain.decoder_start_token_id = int(decoder_ids_BN[0, 0])
        begun["decoder_input_ids"] = decoder_ids_BN
    with replaced([(lm, "generation_config", plain)]):  # from which `generate` takes whatever it is not given
        lm.generate(
            input_ids=ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            generation_config=plain,
            logits_processor=[chooser],
            stopping_criteria=[chooser.ended],
            **begun,
        )


class _Chooser:
    """A processor that leaves the greedy search no choice, and the criterion that ends rows."""

    def __init__(self, choose: Choose, rows: int, device: torch.device) -> None:
        self._choose = choose
        self._ended_B = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        tokens_B, ended_B = self._choose(scores)
        self._ended_B |= ended_B.to(self._ended_B.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)

    def ended(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        return self._ended_B
