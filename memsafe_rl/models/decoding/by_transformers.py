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
    ended_B = torch.zeros(len(ids_BL), dtype=torch.bool, device=ids_BL.device)

    def leave_no_choice(_ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        tokens_B, ends_B = choose(scores_BV)
        ended_B.logical_or_(ends_B.to(ended_B.device))
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)

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
            logits_processor=[leave_no_choice],
            stopping_criteria=[lambda *_, **__: ended_B],
            **begun,
        )
