"""Which adapter a network of transformers needs."""

from __future__ import annotations

from torch import nn

from memsafe_rl.models.language.base import is_encoder_decoder, language_model_of
from memsafe_rl.models.language.causal_lm import CausalLMAdapter, check_head
from memsafe_rl.models.language.seq2seq import Seq2SeqAdapter, check_seq2seq

LanguageModelAdapter = CausalLMAdapter | Seq2SeqAdapter


def adapter_for(
    model: nn.Module, *, pad_token_id: int, reference_model: nn.Module | None = None
) -> LanguageModelAdapter:
    """Wraps a causal LM or an encoder-decoder."""
    kind = Seq2SeqAdapter if is_encoder_decoder(language_model_of(model)) else CausalLMAdapter
    return kind(model, pad_token_id=pad_token_id, reference_model=reference_model)


def check_adapter(adapter: LanguageModelAdapter) -> None:
    """Compares an adapter's own paths with its model's logits; see `check_head` and `check_seq2seq`."""
    if isinstance(adapter, Seq2SeqAdapter):
        check_seq2seq(adapter)
    else:
        check_head(adapter)
