"""Scores completions with a reward model, a few rows at a time."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from memsafe_rl.errors import first_line
from memsafe_rl.hub import loading_places_for, read_tokenizer
from memsafe_rl.rewards.refusals import refusal, unusable
from memsafe_rl.rewards.registry import REWARD_FACTORIES, REWARD_FUNCTIONS

_TABLES_OF_POSITIONS = ("wpe", "position_embeddings", "embed_positions")
_PADDED = ("input_ids", "attention_mask", "token_type_ids")


def load_reward_model(name: str, model_init_kwargs: Mapping[str, Any], trust_remote_code: bool) -> nn.Module:
    """Loads a sequence classifier with one output."""
    arguments = {"trust_remote_code": trust_remote_code, **model_init_kwargs}
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, output_loading_info=True, **loading_places_for(name, **arguments)
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        ready = difflib.get_close_matches(name, [*REWARD_FUNCTIONS, *REWARD_FACTORIES], n=1)
        hint = f" Did you mean memsafe_rl.rewards.{ready[0]}? Pass the function itself." if ready else ""
        raise refusal("model/load", name=name, reason=first_line(error).rstrip("."), hint=hint) from error
    refusal.when(missing := sorted(info["missing_keys"]), "model/head", name=name, missing=missing)
    return cast(nn.Module, model)


def reward_model_name(model: nn.Module) -> str:
    """Returns the last part of the model's identifier, or its class name where it has none."""
    identifier = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return identifier.rstrip("/").split("/")[-1] or type(model).__name__


def _positions_of(model: nn.Module) -> int | None:
    """Returns the longest row that a table of absolute positions has numbers for; None where there is no such table."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in _TABLES_OF_POSITIONS:
            kept_for_padding = getattr(part, "offset", 0 if part.padding_idx is None else part.padding_idx + 1)
            return part.num_embeddings - int(kept_for_padding)
    return None


class RewardModel:
    """A sequence classifier whose first logit is the reward of a prompt with its completion."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.model = model
        self.name = reward_model_name(model)
        self.tokenizer = self._own_tokenizer(revision, trust_remote_code) if tokenizer is None else tokenizer
        self._positions = _positions_of(model)
        self._may_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        if self.tokenizer.pad_token_id is None:
            refusal.when(self.tokenizer.eos_token is None, "model/pad", name=self.name)
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # told which token pads, because it reads the reward at the last one that is not padding
        if (config := getattr(model, "config", None)) is not None:
            config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def score(self, prompts: Sequence[Any], completions: Sequence[Any], reward_rows: int) -> Tensor:
        """Scores every completion once, as one by one up to the rounding of padded batches, without dropout."""
        encoded = self.tokenizer(self._texts(prompts, completions), add_special_tokens=False)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        if 0 in lengths:
            raise unusable("model/row", row=lengths.index(0), name=self.name)
        if self._positions is not None and max(lengths) > self._positions:
            raise unusable("model/long", name=self.name, tokens=max(lengths), positions=self._positions)
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        rewards_B = torch.empty(len(lengths))
        self.model.eval()
        for start in range(0, len(order), reward_rows):
            rows = order[start : start + reward_rows]
            rewards_B[rows] = self._forward({key: [encoded[key][row] for row in rows] for key in encoded})
        if not (finite := rewards_B.isfinite()).all():
            row = int((~finite).nonzero()[0])
            raise unusable("model/infinite", name=self.name, value=rewards_B[row].item(), row=row, rows=len(rewards_B))
        return rewards_B

    def rehearse(self, tokens: int, rows: int, reward_rows: int) -> Tensor:
        """Scores as many of so many rows as are scored together once, all of them as long as can be but one."""
        limit = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        tokens = max(1, tokens if limit is None else min(tokens, limit))
        some = int(self.tokenizer.pad_token_id == 0)  # a token that is no padding
        count = min(rows, reward_rows)
        ids = [[some] * max(1, tokens - (row > 0 and row + 1 == count)) for row in range(count)]
        fields = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
        if "token_type_ids" in self.tokenizer.model_input_names:
            fields["token_type_ids"] = [[0] * len(row) for row in ids]
        self.model.eval()
        return self._forward(fields)

    def _own_tokenizer(self, revision: str | None, trust_remote_code: bool) -> Any:
        identifier = getattr(getattr(self.model, "config", None), "_name_or_path", "")
        refusal.when(not identifier, "model/tokenizer", name=self.name)
        try:
            return read_tokenizer(identifier, revision=revision, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise refusal("model/tokenizer_load", name=self.name, reason=first_line(error).rstrip(".")) from error

    def _texts(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[str]:
        joined = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if isinstance(joined[0], str):
            return joined
        refusal.when(getattr(self.tokenizer, "chat_template", None) is None, "model/template", name=self.name)
        render = self.tokenizer.apply_chat_template
        return [render(messages, tokenize=False, **self._chat_template_kwargs) for messages in joined]

    def _forward(self, fields: dict[str, list[list[int]]]) -> Tensor:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        fill = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": self.tokenizer.pad_token_type_id}
        inputs: dict[str, Any] = {
            key: pad_sequence([*map(torch.tensor, fields[key])], True, fill.get(key, 0)).to(device)
            for key in _PADDED
            if key in fields
        }
        if self._may_cache:  # nobody reads on from these rows, and decoders would keep their keys and values
            inputs["use_cache"] = False
        with torch.inference_mode():
            logits: Tensor | None = getattr(self.model(**inputs), "logits", None)
        if logits is None or logits.ndim != 2:
            raise unusable("model/logits", name=self.name, given="no logits" if logits is None else tuple(logits.shape))
        return logits[:, 0].float().cpu()
