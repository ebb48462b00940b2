"""Copies on the host from which checkpoints are written while training goes on."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import MarianConfig, MarianMTModel

from memsafe_rl.checkpoint.weights import HostCopies, bytes_of, read_weights, saved_weights, write_weights
from memsafe_rl.errors import ConfigError
from tests.tiny import tiny_model
from tests.trainers.helpers import make_trainer


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


def test_weights_of_several_types_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=False, dtype=torch.bfloat16)
    model.lm_head.float()
    with torch.no_grad():
        model.lm_head.weight.normal_()  # numbers that bfloat16 does not hold
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_weights(model, None, tmp_path)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    read_weights(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")  # of PEFT as it writes
def test_copies_of_an_adapters_weights_have_the_embedding_that_peft_saves_beside_it(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
    write_weights(model, None, tmp_path / "now")
    with warnings.catch_warnings(action="error"):
        copies = saved_weights(model)
    write_weights(model, None, tmp_path / "copied", copies)
    now, copied = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("now", "copied"))
    assert any(name.endswith("embed_tokens.base_layer.weight") for name in now)
    assert now.keys() == copied.keys()
    read_weights(model, tmp_path / "copied")


class Widened(nn.Module):
    """A LoRA written by hand, as users put one in place of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


def test_a_model_with_layers_put_in_by_hand_is_read_back(tmp_path: Path) -> None:
    """transformers' own class of the model knows nothing of them."""

    def widened() -> nn.Module:
        model = tiny_model("llama")
        for block in model.model.layers:
            block.self_attn.q_proj = Widened(block.self_attn.q_proj)
        return model

    model, other = widened(), widened()
    write_weights(model, None, tmp_path)
    assert not torch.equal(
        model.model.layers[0].self_attn.q_proj.up.weight, other.model.layers[0].self_attn.q_proj.up.weight
    )
    read_weights(other, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(ConfigError, match="weights differ"):
        read_weights(tiny_model("llama"), tmp_path)


def test_what_would_be_trained_and_not_saved_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    make_trainer(tmp_path, model=model)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    told = "1 trainable weights are not saved with the adapter 'default', such as '.*norm.weight'.*modules_to_save"
    with pytest.raises(ConfigError, match=told):
        make_trainer(tmp_path, model=model)
