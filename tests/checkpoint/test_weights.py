"""Copies on the host from which checkpoints are written while training goes on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import MarianConfig, MarianMTModel

from memsafe_rl.checkpoint.weights import HostCopies, bytes_of, read_weights, write_weights


def held() -> dict[str, object]:
    """Returns nested tensors, two of which are tied."""
    tied = torch.arange(6.0).view(2, 3)
    return {"a": tied, "b": [tied, (torch.ones(4, dtype=torch.int64), "text", None)]}


class TestHostCopies:
    def test_they_are_equal_tied_and_apart_from_what_they_copy(self) -> None:
        value = held()
        copied = HostCopies().copy(value)
        assert torch.equal(copied["a"], value["a"])
        assert copied["b"][0] is copied["a"]
        assert copied["b"][1][1:] == ("text", None)
        value["a"].fill_(7.0)
        assert copied["a"].max() == 5.0
        assert bytes_of(copied) == bytes_of(value) == 6 * 4 + 4 * 8

    def test_the_next_ones_take_the_same_memory(self) -> None:
        copies, value = HostCopies(), held()
        copies.prepared(value)()
        first = copies.copy(value)
        places = first["a"].data_ptr(), first["b"][1][0].data_ptr()
        value["a"].fill_(7.0)
        again = copies.copy(value)
        assert (again["a"].data_ptr(), again["b"][1][0].data_ptr()) == places
        assert again["a"].min() == 7.0

    def test_what_has_grown_gets_memory_of_its_own(self) -> None:
        copies, value = HostCopies(), held()
        copies.copy(value)
        value["a"] = torch.zeros(5)
        assert copies.copy(value)["a"].shape == (5,)


def test_weights_that_a_family_never_writes_stay_as_they_are(tmp_path: Path) -> None:
    """Marian makes its positions anew wherever a model is loaded; whoever made the model may have changed them."""
    stacks = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_model": 8, "vocab_size": 12, "pad_token_id": 0}
    model = MarianMTModel(MarianConfig(**stacks, **widths, max_position_embeddings=16, decoder_start_token_id=0))
    with torch.no_grad():
        model.model.encoder.embed_positions.weight.mul_(0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_weights(model, None, tmp_path)
    with torch.no_grad():
        model.model.shared.weight.add_(1.0)
    read_weights(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
