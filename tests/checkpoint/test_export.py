"""A run's adapter, merged into its base for others."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from memsafe_rl.checkpoint.export import export
from memsafe_rl.errors import ConfigError
from tests.images import processor, small
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import make_trainer
from tests.trainers.test_encoder_decoder import tiny_t5


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers")  # which PEFT says as it writes
def test_an_adapter_of_any_name_over_a_grown_vocabulary(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    model.resize_token_embeddings(len(tokenizer))
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    adapted = get_peft_model(model, lora, adapter_name="reasoning")
    trainer = make_trainer(tmp_path / "run", model=adapted, processing_class=tokenizer, max_steps=1)
    trainer.train()
    trainer.save_model()
    for other in ("before", ".checkpoint-1.part"):  # a model saved there, and what a killed run left
        folder = shutil.copytree(tmp_path / "run" / "reasoning", tmp_path / "run" / other)
        (folder / "adapter_model.safetensors").write_bytes(b"")
    tokenizer.save_pretrained(tmp_path / "run" / "before")
    ids = torch.arange(8)[None] + len(tokenizer) - 8
    with torch.no_grad():
        trained = trainer.model(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(export(str(tmp_path / "run"), str(tmp_path / "out"), None))
        assert merged.config.vocab_size == len(tokenizer)
        assert torch.allclose(merged(ids).logits, trained, atol=1e-5)


def adapted(folder: Path, model: Any, config: Any) -> Any:
    """Saves a network, and an adapter that changes what it gives by much."""
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "adapter")
    model.name_or_path = str(folder / "base")
    changed = get_peft_model(model, config)
    with torch.no_grad():
        for weight in changed.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    changed.save_pretrained(folder / "adapter")
    return changed


@pytest.mark.filterwarnings("ignore:Model with .tie_word_embeddings")
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers")
@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj", "lm_head"]),
        LoraConfig(target_modules=["q_proj", "embed_tokens"]),
        LoraConfig(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
        LoHaConfig(target_modules=["q_proj", "lm_head"]),
    ],
)
def test_layers_that_share_their_weights_are_merged_apart(tmp_path: Path, config: Any, grown: bool) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if grown and not isinstance(config, LoraConfig):
        pytest.skip("PEFT keeps grown embeddings of LoRA alone")
    if grown:
        model.resize_token_embeddings(model.config.vocab_size + 8)
    changed = adapted(tmp_path, model, copy.copy(config))
    merged = AutoModelForCausalLM.from_pretrained(export(str(tmp_path / "adapter"), str(tmp_path / "out"), None))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, changed.eval()(ids).logits, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Model with .tie_word_embeddings", "ignore:Setting .save_embedding_layers")
def test_what_cannot_be_merged_as_it_was_trained_is_refused(tmp_path: Path) -> None:
    adapted(tmp_path / "t5", tiny_t5(), LoraConfig(target_modules=["q", "lm_head"]))
    with pytest.raises(ConfigError, match=r"^The adapter in .* share their weights, which this model ties again"):
        export(str(tmp_path / "t5/adapter"), str(tmp_path / "out"), None)
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_model().save_pretrained(tmp_path / "base/v2")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora, place = LoraConfig(target_modules=["q_proj"]), {"subfolder": "v2", "revision": "main"}
    trainer = make_trainer(
        tmp_path / "run", model=str(tmp_path / "base"), peft_config=lora, model_init_kwargs=place, max_steps=1
    )
    trainer.train()
    trainer.save_model()
    assert (trainer.model.peft_config["default"].revision, lora.revision) == ("main", None)
    with pytest.raises(ConfigError, match=r"^The adapter in .* was trained on a subfolder of"):
        export(str(tmp_path / "run"), str(tmp_path / "out"), None)


def test_the_latest_weights_of_a_run_are_taken(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    first = make_trainer(tmp_path / "run", max_steps=1, **settings)
    first.train()
    first.save_model()

    def paid(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 2:
            raise ValueError("the judge is gone")
        return [float(len(text)) for text in completions]

    second = make_trainer(tmp_path / "run", max_steps=3, resume_from_checkpoint=True, reward_funcs=paid, **settings)
    with pytest.raises(Exception, match="the judge is gone"):
        second.train()
    for out, latest in (("first", "run/checkpoint-2"), ("second", "run")):
        taken = AutoModelForCausalLM.from_pretrained(export(str(tmp_path / "run"), str(tmp_path / out), None))
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / latest)
        assert all(torch.equal(*pair) for pair in zip(taken.parameters(), wanted.parameters(), strict=True))
        with torch.no_grad():
            next(second.model.parameters()).add_(1.0)
        second.save_model()  # by hand, after the run was stopped


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl"])
@pytest.mark.parametrize("reads", ["images", "text"])
def test_a_network_that_reads_images_is_written_with_what_reads_its_prompts(
    tmp_path: Path, family: str, reads: str
) -> None:
    small(family).save_pretrained(tmp_path / "model")
    own = processor(family)
    (own if reads == "images" else own.tokenizer).save_pretrained(tmp_path / "model")
    export(str(tmp_path / "model"), str(tmp_path / "out"), None)
    assert (tmp_path / "out/preprocessor_config.json").is_file() == (reads == "images")
    assert (tmp_path / "out/tokenizer.json").is_file()
