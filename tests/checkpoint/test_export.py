"""A run's adapter, merged into its base for others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from memsafe_rl.checkpoint.export import export
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.helpers import make_trainer


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
