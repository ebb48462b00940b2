"""Loading of models and tokenizers, and what is refused on the way."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import ArrowConfig, LoraConfig, PolyConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BitsAndBytesConfig,
    MarianConfig,
    MarianMTModel,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3ForSequenceClassification,
    T5Config,
    T5EncoderModel,
    T5Model,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from memsafe_rl.errors import ConfigError
from memsafe_rl.models import loading
from memsafe_rl.models.geometry import read_geometry
from memsafe_rl.models.loading import eos_token_ids, load_model, load_tokenizer, read_config
from memsafe_rl.models.routing import RouterLosses
from memsafe_rl.models.vision.families import vision_family
from tests.images import small
from tests.tiny import EOS_ID, PAD_ID, tiny_config, tiny_model, tiny_tokenizer

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", dtype=torch.bfloat16).save_pretrained(path)
    tiny_tokenizer(pad=False).save_pretrained(path)
    return str(path)


def dtypes(model: nn.Module, trainable: bool) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters() if weight.requires_grad is trainable}


def test_everything_is_fp32_on_a_cpu_unless_told_otherwise(folder: str) -> None:
    full = load_model(folder, with_reference=True)
    assert dtypes(full.model, True) == {torch.float32}
    assert dtypes(full.reference_model, False) == {torch.float32}
    assert not full.model.training
    adapted = load_model(folder, peft_config=LoraConfig(**LORA))
    assert dtypes(adapted.model, False) == dtypes(adapted.model, True) == {torch.float32}
    for key in ("dtype", "torch_dtype"):
        told = load_model(
            folder, peft_config=LoraConfig(**LORA), model_init_kwargs={key: "bfloat16"}, with_reference=True
        )
        assert dtypes(told.model, False) == {torch.bfloat16}
        assert dtypes(told.model, True) == {torch.float32}
        assert told.reference_model is None


def test_frozen_weights_are_bf16_on_cuda(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(name: str, **settings: Any) -> Any:
        asked.append(settings["dtype"])
        model = tiny_model()
        model.to = lambda _: model
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    load_model(folder, device="cuda", with_reference=True)
    load_model(folder, device="cuda", peft_config=LoraConfig(**LORA))
    load_model(folder, device="cuda", peft_config=LoraConfig(**LORA), half=torch.float16)
    assert asked == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float16]


def test_a_reference_by_name_is_a_second_load(folder: str) -> None:
    loaded = load_model(folder, with_reference=True)
    for own, frozen in zip(loaded.model.parameters(), loaded.reference_model.parameters(), strict=True):
        assert torch.equal(own, frozen)
        assert own.data_ptr() != frozen.data_ptr()
        assert not frozen.requires_grad


def test_a_config_is_read_without_weights(folder: str, tmp_path: Path) -> None:
    facts = read_config(folder)
    assert (facts.max_positions, facts.vocab_size, facts.router_losses) == (256, 258, RouterLosses())
    assert read_config(tiny_model("gpt2", positions=99)).max_positions == 99
    assert read_config(get_peft_model(tiny_model(), LoraConfig(**LORA))).max_positions == 256
    given = {"max_position_embeddings": 40, "dtype": "bfloat16"}  # as from_pretrained takes them
    assert read_config(folder, model_init_kwargs=given).max_positions == 40
    MixtralConfig(router_aux_loss_coef=0.02).save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).router_losses == RouterLosses(0.02)


def test_code_of_the_models_own_may_be_trusted_among_its_arguments(folder: str) -> None:
    """TRL's own scripts write it there."""
    facts = read_config(folder, model_init_kwargs={"trust_remote_code": False, "dtype": "float32"})
    assert facts == read_config(folder)


def test_what_a_config_shows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config that can be read"):
        read_config(str(tmp_path / "nothing"))


def test_where_an_encoder_reads_the_prompts_they_take_no_room_from_completions(tmp_path: Path) -> None:
    T5Config(d_model=16).save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).room_for_prompt(500) is None
    BartConfig(d_model=16, max_position_embeddings=64).save_pretrained(tmp_path)
    facts = read_config(str(tmp_path))
    assert [facts.room_for_prompt(tokens) for tokens in (1, 64, 65)] == [64, 64, -1]
    assert read_config(tiny_model(positions=64)).room_for_prompt(60) == 4


QUANTISED = BitsAndBytesConfig(load_in_4bit=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "dtype cannot apply to a model that is already loaded"),
        ({"quantization_config": QUANTISED, "peft_config": LoraConfig(**LORA)}, "already loaded"),
        ({"model": "name", "quantization_config": QUANTISED}, "without peft_config"),
        ({"model": "name", "model_init_kwargs": {"quantization_config": QUANTISED}}, "without peft_config"),
        (
            {
                "model": "name",
                "quantization_config": QUANTISED,
                "model_init_kwargs": {"quantization_config": QUANTISED},
            },
            "given twice",
        ),
        ({"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, "PROMPT_TUNING"),
        ({"peft_config": LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5])}, "LORA with alora_invocation"),
        ({"peft_config": LoraConfig(arrow_config=ArrowConfig())}, "LORA with arrow_config"),
        ({"peft_config": PolyConfig()}, "POLY with n_tasks"),
        ({"model": nn.Linear(2, 2)}, "Linear"),
        ({"peft_config": {}}, r"peft_config is \{\} \(dict\).*LoraConfig\("),
        ({"peft_config": "lora:16"}, "peft_config is 'lora:16' \\(str\\)"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "read_config", lambda *_, **__: pytest.fail("loaded something first"))
    with pytest.raises(ConfigError, match=message):
        load_model(arguments.pop("model", None) or tiny_model(), **arguments)


@pytest.mark.parametrize("model", [None, nn.Linear(2, 2), Path("a/folder")])
def test_what_is_no_model_is_refused_before_anything_is_read(model: Any) -> None:
    message = rf"model is a {type(model).__name__}; give a name, a path \(as text\), a transformers model"
    for use in (read_config, load_model, load_tokenizer, lambda given: load_tokenizer(given, tiny_tokenizer())):
        with pytest.raises(ConfigError, match=message):
            use(model)


@pytest.mark.parametrize("is_copy", [True, False])
def test_only_a_copy_of_the_model_shares_its_frozen_tower(is_copy: bool) -> None:
    model = small()
    family = vision_family(model.config)
    other = None if is_copy else copy.deepcopy(model)
    nn.ModuleList(family.modules_of(model)).requires_grad_(False)
    reference = load_model(model, with_reference=True, ref_model=other, sees_images=True).reference_model
    pairs = zip(family.modules_of(model), family.modules_of(reference), strict=True)
    assert all((mine is theirs) is is_copy for mine, theirs in pairs)


def test_adapters_that_cannot_be_trained_are_refused() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="another adapter"):
        load_model(model, peft_config=LoraConfig(**LORA))
    model.merge_adapter()
    with pytest.raises(ConfigError, match=r"Call model.unmerge_adapter\(\) first"):
        load_model(model)
    model.unmerge_adapter()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="is_trainable=True"):
        load_model(model)
    model = tiny_model()
    model.add_adapter(LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="its config as peft_config"):
        load_model(model)


def test_positions_by_a_formula_are_not_trained(tmp_path: Path) -> None:
    """Marian's; transformers freezes them where it makes them, and not where it loads them."""
    sizes = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = MarianConfig(**sizes, d_model=8, vocab_size=12, pad_token_id=0, decoder_start_token_id=0)
    MarianMTModel(config).save_pretrained(tmp_path)
    for model in (str(tmp_path), MarianMTModel.from_pretrained(tmp_path)):
        weights = load_model(model).model.named_parameters()
        assert {name.split(".")[1] for name, one in weights if not one.requires_grad} == {"encoder", "decoder"}


def test_a_model_object_keeps_its_types() -> None:
    assert dtypes(load_model(tiny_model(dtype=torch.bfloat16)).model, True) == {torch.bfloat16}


def test_a_missing_pad_token_becomes_the_eos(folder: str) -> None:
    loaded = load_tokenizer(folder)
    assert (loaded.pad_token_id, loaded.padding_side) == (EOS_ID, "left")
    own = tiny_tokenizer()
    own.padding_side = "right"
    assert load_tokenizer("unused", own) is own
    assert (own.pad_token_id, own.padding_side) == (PAD_ID, "left")


def test_tokenizers_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a pad nor an eos"):
        load_tokenizer("name", tiny_tokenizer(pad=False, eos=False))
    with pytest.raises(ConfigError, match=r"model='.*' has no config that can be read"):
        load_tokenizer(str(tmp_path))  # the model is missing, not its tokenizer alone
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Pass processing_class"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a tokenizer nor a processor"):
        load_tokenizer("name", object())


@pytest.mark.parametrize(
    ("declared", "wanted"), [(None, (EOS_ID,)), (5, (EOS_ID, 5)), ([7, EOS_ID, 9], (EOS_ID, 7, 9))]
)
def test_every_declared_eos_ends_a_completion(declared: Any, wanted: tuple[int, ...]) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = declared
    assert eos_token_ids(tiny_tokenizer(), model) == wanted
    assert eos_token_ids(tiny_tokenizer(), get_peft_model(model, LoraConfig(**LORA))) == wanted


SMALL: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
SMALL_T5 = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: tiny_model().model, "model is a Qwen3Model, which has no head that gives tokens' log-probs"),
        (lambda: tiny_model("gpt2").transformer, "model is a GPT2Model, which has no head"),
        (lambda: T5EncoderModel(SMALL_T5), "model is a T5EncoderModel, which has no head .* AutoModelForSeq2SeqLM"),
        (lambda: T5Model(SMALL_T5), "model is a T5Model, which has no head"),
        (lambda: Qwen3ForSequenceClassification(tiny_config()), "Qwen3ForSequenceClassification, which has no head"),
        (
            lambda: get_peft_model(tiny_model().model, LoraConfig(r=2, target_modules=["q_proj"])),
            "Qwen3Model, which has no head",
        ),
        (
            lambda: WhisperForConditionalGeneration(
                WhisperConfig(d_model=12, encoder_layers=1, decoder_layers=1, vocab_size=20, pad_token_id=0)
            ),
            "model is a WhisperForConditionalGeneration, which reads input_features and no tokens of a text prompt",
        ),
        (lambda: ViTModel(ViTConfig(**SMALL, image_size=4, patch_size=2)), "ViTModel, which reads pixel_values and"),
    ],
)
def test_what_reads_or_draws_no_tokens_is_refused_before_anything_runs(make: Any, told: str) -> None:
    for ask in (read_config, load_model):
        with pytest.raises(ConfigError, match=told):
            ask(make())


def test_a_config_without_a_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    ViTConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"critic=.* has a ViTConfig, which names no vocab_size: it draws no tokens"):
        read_config(str(tmp_path), told="critic")


def test_no_eos_at_all_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = None
    assert eos_token_ids(tiny_tokenizer(eos=False), model) == ()
    assert "full length" in caplog.text


def test_geometry_of_configs() -> None:
    from memsafe_rl.models.language.causal_lm import CausalLMAdapter

    model = tiny_model("qwen3", tied=False)
    geometry = CausalLMAdapter(model, pad_token_id=0).geometry
    assert (geometry.layers, geometry.hidden_size, geometry.intermediate_size) == (2, 32, 64)
    assert (geometry.heads, geometry.kv_heads, geometry.head_dim, geometry.vocab_size) == (4, 2, 16, 258)
    assert (geometry.windows, geometry.max_positions) == ((None, None), 256)
    assert geometry.trainable_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    assert (geometry.compute_bytes, geometry.cache_bytes, geometry.head_trainable) == (4, 4, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert CausalLMAdapter(model, pad_token_id=0).geometry.compute_bytes == 2
    gpt2 = CausalLMAdapter(tiny_model("gpt2"), pad_token_id=0).geometry
    assert (gpt2.intermediate_size, gpt2.kv_heads, gpt2.head_dim, gpt2.max_positions) == (128, 4, 8, 256)
    adapted = get_peft_model(tiny_model("qwen3"), LoraConfig(**LORA))
    lora = CausalLMAdapter(adapted, pad_token_id=0).geometry
    assert not lora.head_trainable
    # Two layers; A is (4, 32), B (64, 4) for queries and (32, 4) for values.
    assert lora.trainable_bytes == 4 * 2 * (2 * 4 * 32 + 64 * 4 + 32 * 4)
    assert tiny_config("gemma3").layer_types == ["sliding_attention", "full_attention"]


def test_a_critic_that_is_no_model_is_told_what_else_it_may_be() -> None:
    with pytest.raises(ConfigError, match=r"critic='trunk' has no config .*leave critic out, .* write 'adapter'"):
        read_config("trunk", told="critic")


def test_a_config_with_names_of_its_own_is_told_to_map_them() -> None:
    own = SimpleNamespace(config=PreTrainedConfig(d_model=8, n_blocks=2))
    with pytest.raises(ConfigError, match=r"PreTrainedConfig has no hidden_size or num_hidden_layers.*attribute_map"):
        read_geometry(own)
