"""Small local stand-ins for the models and data sets that TRL's tests take from the hub, in folders of the hub's names.

A working directory that holds them answers `from_pretrained("trl-internal-testing/...")` and `load_dataset(...)` alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, DatasetDict, Features, List
from datasets import Image as Picture
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import is_torchvision_available

if is_torchvision_available():
    from transformers import (
        Gemma3ImageProcessor,
        Gemma3Processor,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

OWNER = "trl-internal-testing"
VOCAB = 4096  # of 151,936: a test takes seconds
_FIRST_MOVED = 3500


def own_id(place: int) -> int:
    """Returns the stand-in's id of a token whose id in Qwen's vocabulary TRL's tests write."""
    return place if place < VOCAB else _FIRST_MOVED + sorted({*SPECIAL, *MARKS, *PIECES}).index(place)


SPECIAL = {
    151_643: "<|endoftext|>",
    151_644: "<|im_start|>",
    151_645: "<|im_end|>",
    151_652: "<|vision_start|>",
    151_653: "<|vision_end|>",
    151_655: "<|image_pad|>",
    151_656: "<|video_pad|>",
}
MARKS = {
    151_657: "<tool_call>",
    151_658: "</tool_call>",
    151_665: "<tool_response>",
    151_666: "</tool_response>",
    151_667: "<think>",
    151_668: "</think>",
}
PIECES = {
    **{4913: '{"', 606: "name", 788: '":', 330: ' "', 497: '",', 16370: "arguments", 5212: ' {"', 11248: "}}\n"},
    **{64648: "multiply", 22785: "_tool", 7692: "async", 93054: "_multiply", 95642: '"}}\n', 17453: "Done"},
    **{1513: " don", 944: "'t", 1414: " know", 894: " any", 5392: " tool", 2765: " won", 16252: " increment"},
    **{35744: "increment", 9520: "step", 927: "sh", 411: "out", 1318: "text", 6023: "hi", 450: "de", 13477: "crement"},
    **{14172: "tool", 6659: "call", 397: ">\n", 522: "</", 314: " {", 293: " b"},
}
"""Tokens of Qwen's vocabulary that TRL's tests write as ids."""
GEMMA = {
    "bos_token": "<bos>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "sot_token": "<start_of_turn>",
    "eot_token": "<end_of_turn>",
}
"""Tokens of Gemma's chat template and images, whose ids no test writes."""
GEMMA_IDS = {name: 3400 + place for place, name in enumerate(GEMMA)}
PAD, EOS = own_id(151_643), own_id(151_645)

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


SIGNS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The signs of bytes in the order of Qwen's first 256 ids: printable ones first."""
_PRINTABLE = [byte for byte in range(256) if chr(byte) in SIGNS]
_SIGN_OF = dict(zip([*_PRINTABLE, *(byte for byte in range(256) if byte not in _PRINTABLE)], SIGNS, strict=True))


def qwen_tokenizer(template: str, named: Mapping[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Makes a tokenizer that writes bytes, and reads a word behind every other id, Qwen's where the tests need one.

    Args:
        template: chat template.
        named: what else is special, of `GEMMA`.
    """
    named = named or {}
    vocab = {sign: place for place, sign in enumerate(SIGNS)}
    vocab |= {"".join(_SIGN_OF[byte] for byte in text.encode()): own_id(place) for place, text in PIECES.items()}
    vocab |= {text: own_id(place) for place, text in {**SPECIAL, **MARKS}.items()}
    vocab |= {text: GEMMA_IDS[name] for name, text in named.items()}
    vocab |= {f"w{place}": place for place in sorted({*range(VOCAB)} - {*vocab.values()})}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*SPECIAL.values(), *named.values())])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template,
        model_max_length=32_768,
        **named,
    )


def _models() -> Mapping[str, Any]:
    """Returns what makes each network, by the hub's name of it."""
    ids: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    one = {"num_labels": 1}
    moe = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    nemotron = {"hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"], "use_mamba_kernels": False}
    nemotron |= {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16}
    nemotron |= {"mamba_d_conv": 4, "mamba_expand": 2, "moe_shared_expert_intermediate_size": 32}
    sizes = {**SIZES, **ids}
    hybrid = {name: value for name, value in sizes.items() if name != "num_hidden_layers"}
    return {
        "tiny-Qwen2ForCausalLM-2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        "tiny-Qwen3ForCausalLM": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8)),
        "tiny-LlamaForCausalLM-3.2": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "tiny-Gemma2ForCausalLM": lambda: Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8)),
        "tiny-Cohere2ForCausalLM": lambda: Cohere2ForCausalLM(Cohere2Config(**sizes, logit_scale=1.0)),
        "tiny-Qwen3MoeForCausalLM": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, **moe, num_experts=4, head_dim=8, norm_topk_prob=True)
        ),
        "tiny-GptOssForCausalLM": lambda: GptOssForCausalLM(
            GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        ),
        "tiny-Glm4MoeForCausalLM": lambda: Glm4MoeForCausalLM(
            Glm4MoeConfig(**sizes, **moe, n_routed_experts=4, head_dim=2, attention_bias=True, use_qk_norm=True)
        ),
        "tiny-NemotronHForCausalLM-nano": lambda: NemotronHForCausalLM(
            NemotronHConfig(**{**hybrid, **moe, **nemotron}, n_routed_experts=4)
        ),
        "tiny-Qwen2ForSequenceClassification-2.5": lambda: Qwen2ForSequenceClassification(Qwen2Config(**sizes, **one)),
        "tiny-Qwen3ForSequenceClassification": lambda: Qwen3ForSequenceClassification(
            Qwen3Config(**sizes, **one, head_dim=8)
        ),
        "tiny-LlamaForSequenceClassification-3.2": lambda: LlamaForSequenceClassification(LlamaConfig(**sizes, **one)),
    }


def _models_of_images() -> Mapping[str, Any]:
    """Returns what makes each network that reads images, by the hub's name of it."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    sizes = {**SIZES, "hidden_size": 32, "vocab_size": VOCAB, "rope_parameters": rope}
    sizes |= {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    ids = {f"{name}_token_id": own_id(place) for name, place in IMAGE_IDS.items()}
    tower: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "in_channels": 3}
    first = {**tower, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    second = {**tower, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    second |= {"window_size": 56, "fullatt_block_indexes": [1]}
    return {
        "tiny-Gemma3ForConditionalGeneration": _gemma3,
        "tiny-Qwen2VLForConditionalGeneration": lambda: Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=sizes, vision_config=first, **ids)
        ),
        "tiny-Qwen2_5_VLForConditionalGeneration": lambda: Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=sizes, vision_config=second, **ids)
        ),
    }


def _gemma3() -> Gemma3ForConditionalGeneration:
    """Makes a network with one layer of each kind of attention, that shows 4 features of each image's 16 patches."""
    text: dict[str, Any] = {**SIZES, "hidden_size": 16, "head_dim": 8, "vocab_size": VOCAB}
    text |= {"pad_token_id": PAD, "eos_token_id": EOS}
    text |= {"bos_token_id": GEMMA_IDS["bos_token"], "layer_types": ["sliding_attention", "full_attention"]}
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower |= {"image_size": 56, "patch_size": 14, "vision_use_head": False}
    ids = {f"{name}_token_index": GEMMA_IDS[f"{name}_token"] for name in ("boi", "eoi", "image")}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **ids)
    )


def _processor(name: str, checkout: Path) -> Any:
    """Makes the processor of a network that reads images, by the hub's name of it."""
    gemma = "Gemma3" in name
    template = (checkout / "trl" / "chat_templates" / f"{'gemma3' if gemma else 'qwen2_5_vl'}.jinja").read_text()
    if gemma:
        images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
        return Gemma3Processor(images, qwen_tokenizer(template, GEMMA), chat_template=template, image_seq_length=4)
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    parts = Qwen2VLImageProcessor(size=sizes), qwen_tokenizer(template), Qwen2VLVideoProcessor()
    return (Qwen2VLProcessor if "Qwen2VL" in name else Qwen2_5_VLProcessor)(*parts, chat_template=template)


IMAGE_IDS = {"vision_start": 151_652, "vision_end": 151_653, "image": 151_655, "video": 151_656}


def make_models_of_images(folder: Path, checkout: Path) -> None:
    """Writes every network that reads images, with its processor, where torchvision is there to make one.

    Args:
        folder: of the owner.
        checkout: TRL's folder.
    """
    for name, make in _models_of_images().items():
        if is_torchvision_available() and not (folder / name / "config.json").exists():
            torch.manual_seed(0)
            model = make()
            _initialise(model)
            model.to(torch.bfloat16).save_pretrained(folder / name)
            GenerationConfig(do_sample=True, pad_token_id=PAD, eos_token_id=[EOS, PAD]).save_pretrained(folder / name)
            _processor(name, checkout).save_pretrained(folder / name)


def _template(checkout: Path, name: str) -> str:
    kind = "qwen3" if "Qwen3" in name else "qwen2_5"
    return (checkout / "trl" / "chat_templates" / f"{kind}.jinja").read_text()


def _initialise(model: torch.nn.Module) -> None:
    """Draws weights wide enough that no gradient of a parameter vanishes in so small a network."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embed" in name else 0.4)


def make_models(folder: Path, checkout: Path) -> None:
    """Writes every network with its tokenizer.

    Args:
        folder: of the owner.
        checkout: TRL's folder, whose chat templates are those of the families.
    """
    for name, make in _models().items():
        if not (folder / name / "config.json").exists():
            torch.manual_seed(0)
            model = make()
            _initialise(model)
            model.to(torch.bfloat16).save_pretrained(folder / name)
            GenerationConfig(do_sample=True, pad_token_id=PAD, eos_token_id=[EOS, PAD]).save_pretrained(folder / name)
            qwen_tokenizer(_template(checkout, name)).save_pretrained(folder / name)


REMOTE = """\
from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def make_remote(folder: Path, checkout: Path) -> None:
    """Writes a network whose class is code beside its weights.

    Args:
        folder: of the owner.
        checkout: TRL's folder.
    """
    place = folder / "tiny-RemoteForCausalLM"
    config = LlamaConfig(**SIZES, vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(place)
    settings = json.loads((place / "config.json").read_text())
    settings |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    settings["auto_map"] = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    (place / "config.json").write_text(json.dumps(settings))
    (place / "remote.py").write_text(REMOTE)
    qwen_tokenizer(_template(checkout, place.name)).save_pretrained(place)


def make_data(folder: Path) -> None:
    """Writes the prompts: 6 to train on and 2 to evaluate on, as text and as conversations.

    Args:
        folder: of the data set.
    """
    prompts = [f"A short line is better than {word}" for word in COMPARED]
    forms = {
        "standard_prompt_only": {"prompt": prompts},
        "conversational_prompt_only": {"prompt": [[{"role": "user", "content": text}] for text in prompts]},
    }
    listed = []
    for name, columns in forms.items():
        parts: DatasetDict = Dataset.from_dict(columns).train_test_split(test_size=2, shuffle=False)
        for split, rows in parts.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            rows.to_parquet(folder / name / f"{split}.parquet")
        files = [{"split": split, "path": f"{name}/{split}.parquet"} for split in parts]
        listed.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n")


def make_images(folder: Path, *, several: bool) -> None:
    """Writes conversations with one picture a row, or with none to two.

    Args:
        folder: of the data set.
        several: whether the column is a list.
    """
    pictures = [Image.new("RGB", (56, 28 + 28 * (place % 2)), (40 * place, 90, 10)) for place in range(6)]
    lists = [pictures[place : place + place % 3] for place in range(6)]
    column, feature = ("images", List(Picture())) if several else ("image", Picture())
    text = {"type": "text", "text": "What is in it?"}

    def prompt(place: int) -> list[dict[str, Any]]:
        places = len(lists[place]) if several else 1
        return [{"role": "user", "content": [*[{"type": "image", "text": None}] * places, text]}]

    rows = Dataset.from_dict({"prompt": [prompt(place) for place in range(6)], column: [None] * 6})
    features = Features({**rows.features, column: feature})
    rows = Dataset.from_dict({"prompt": rows["prompt"], column: lists if several else pictures}, features=features)
    place = folder / "conversational_prompt_only"
    place.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(place / "train.parquet")
    files = [{"split": "train", "path": f"{place.name}/train.parquet"}]
    listed = [{"config_name": place.name, "data_files": files}]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n")


COMPARED = ("two", "none", "noise", "a riddle", "ten pages", "a maze", "a shout", "silence")


def make_stand_ins(root: Path, checkout: Path) -> None:
    """Makes what is not there yet.

    Args:
        root: folder that stands for the hub.
        checkout: TRL's folder.
    """
    folder = root / OWNER
    make_models(folder, checkout)
    if not (folder / "zen" / "README.md").exists():
        make_remote(folder, checkout)
        make_data(folder / "zen")
    make_models_of_images(folder, checkout)
    for name, several in {"zen-image": False, "zen-multi-image": True}.items():
        if not (folder / name / "README.md").exists():
            make_images(folder / name, several=several)
