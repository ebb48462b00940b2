"""Reward models: chunks, padding, templates, names."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2ForSequenceClassification,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from memsafe_rl.errors import ConfigError, DataError
from memsafe_rl.rewards import RewardModel, RewardRunner
from tests.tiny import CHAT_TEMPLATE, tiny_config, tiny_tokenizer

PROMPTS = ["What is 2 + 2? ", "Hi", "Name a colour that is not red, please. ", "x", "One more: "]
COMPLETIONS = ["4", " there, how are you today? I am fine.", "blue", "", "three words here"]


def classifier(kind="qwen3", labels=1):
    torch.manual_seed(0)
    config = tiny_config("qwen3" if kind == "bert" else kind)
    config.num_labels = labels
    if kind == "bert":
        config = BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=labels,
        )
    classes = {
        "qwen3": Qwen3ForSequenceClassification,
        "gpt2": GPT2ForSequenceClassification,
        "bert": BertForSequenceClassification,
    }
    # Random weights score everything alike; larger ones make rows differ.
    model = classes[kind](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def one_by_one(model, tokenizer, texts):
    """The naive form: each row alone, without padding."""
    model.eval()
    with torch.no_grad():
        inputs = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
        return torch.stack([model(**row).logits[0, 0] for row in inputs])


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "bert"])
@pytest.mark.parametrize("reward_rows", [1, 2, 64])
def test_chunks_score_as_single_rows_do(kind, reward_rows):
    model, tokenizer = classifier(kind), tiny_tokenizer()
    scores = (
        RewardRunner(model, tokenizer)
        .begin(PROMPTS, COMPLETIONS, [[0]] * 5, attempt=lambda unit: unit(reward_rows))
        .result()
    )
    expected = one_by_one(model, tokenizer, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    assert expected.std() > 1e-2
    assert scores.rewards_BF.dtype == torch.float32
    torch.testing.assert_close(scores.rewards_BF[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_conversations_go_through_the_chat_template():
    model, tokenizer = classifier(), tiny_tokenizer()
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    completions = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    tokenizer.chat_template = CHAT_TEMPLATE
    scores = (
        RewardRunner([model], [tokenizer]).begin(prompts, completions, [[0]] * 5, attempt=lambda unit: unit(2)).result()
    )
    texts = [f"user: {p}\nassistant: {c}\n" for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(scores.rewards_BF[:, 0], one_by_one(model, tokenizer, texts), rtol=1e-5, atol=1e-5)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        RewardRunner(model, tokenizer).begin(prompts, completions, [[0]] * 5).result()


def test_forward_passes_hold_the_planned_rows_longest_first_without_gradient_or_dropout():
    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.shapes = []

        def forward(self, input_ids, attention_mask):
            assert not self.training
            assert not torch.is_grad_enabled()
            self.shapes.append((tuple(input_ids.shape), int(attention_mask.sum())))
            return SequenceClassifierOutput(logits=input_ids.double().sum(1, keepdim=True))

    model = Recorder().train()
    texts = ["a" * n for n in (3, 9, 1, 5, 7)]
    RewardRunner(model, tiny_tokenizer()).begin(texts, [""] * 5, [[0]] * 5, attempt=lambda unit: unit(2)).result()
    assert model.shapes == [((2, 9), 16), ((2, 5), 8), ((1, 1), 1)]


def test_without_a_pad_token_the_end_of_sequence_pads_and_the_model_is_told():
    model, tokenizer = classifier(), tiny_tokenizer()
    model.config.pad_token_id = tokenizer.pad_token = None
    reward = RewardModel(model, tokenizer)
    assert tokenizer.pad_token == tokenizer.eos_token
    assert model.config.pad_token_id == tokenizer.eos_token_id
    assert reward.score(PROMPTS, COMPLETIONS, 5).shape == (5,)
    bare = tiny_tokenizer()
    bare.pad_token = bare.eos_token = None
    with pytest.raises(ConfigError, match="neither a pad token nor"):
        RewardModel(model, bare)


def test_a_model_is_loaded_by_name_with_its_tokenizer(tmp_path):
    folder = tmp_path / "my-reward-model"
    classifier().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    runner = RewardRunner([str(folder), classifier()], [None, tiny_tokenizer()])
    runner.to("cpu")
    assert runner.names == ("my-reward-model", "Qwen3ForSequenceClassification")
    rewards_BF = runner.begin(PROMPTS, COMPLETIONS, [[0]] * 5).result().rewards_BF
    torch.testing.assert_close(rewards_BF[:, 0], rewards_BF[:, 1])
    assert len(runner.models) == 2


def test_a_name_without_a_model_or_tokenizer_ends_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"reward model 'no/such/reward' cannot be loaded \(.*\)\. ") as caught:
        RewardRunner("no/such/reward")
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"Did you mean memsafe_rl\.rewards\.accuracy_reward\? Pass the function itself"
    ):
        RewardRunner("acuracy_reward")
    classifier().save_pretrained(tmp_path / "bare")
    with pytest.raises(
        ConfigError, match=r"tokenizer of reward model 'bare' cannot be loaded.*reward_processing_classe"
    ):
        RewardRunner(str(tmp_path / "bare"))


def test_models_come_before_functions_so_that_a_failed_model_can_be_repeated():
    class Fails(nn.Module):
        def forward(self, **inputs):
            raise torch.OutOfMemoryError("too many rows")

    calls = []

    def reward(**kwargs):
        calls.append(1)

    with pytest.raises(torch.OutOfMemoryError):
        RewardRunner([reward, Fails()], [None, tiny_tokenizer()]).begin(PROMPTS, COMPLETIONS, [[0]] * 5).result()
    assert not calls


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.tensor([[1.0], [float("nan")]]), "gave nan for row 1 of 2"),
        (torch.zeros(2), r"gave \(2,\)"),
        (None, "gave no logits"),
    ],
)
def test_a_model_that_gives_no_reward_is_refused(logits, message):
    class Broken(nn.Module):
        def forward(self, **inputs):
            return SequenceClassifierOutput(logits=logits)

    with pytest.raises(DataError, match=f"Reward model 'Broken' {message}"):
        RewardRunner(Broken(), tiny_tokenizer()).begin(["a", "b"], ["", ""], [[0]] * 2).result()


def test_rows_beyond_a_table_of_positions_are_refused_and_computed_positions_are_not():
    for kind in ("gpt2", "qwen3"):
        model = classifier(kind)
        positions = model.config.max_position_embeddings
        reward = RewardModel(model, tiny_tokenizer())
        if kind == "gpt2":
            with pytest.raises(DataError, match=f"reads {positions} tokens at most, and .* has {positions + 1}"):
                reward.score(["x"], ["y" * positions], 1)
        assert reward.score(["x"], ["y" * (positions if kind == "qwen3" else positions - 1)], 1).isfinite().all()


def test_tables_that_are_none_of_positions_limit_nothing_and_rows_kept_for_padding_count():
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "num_labels": 1, "max_position_embeddings": 34}
    relative = {"position_buckets": 17, "position_biased_input": False, "relative_attention": True}
    deberta = DebertaV2ForSequenceClassification(DebertaV2Config(**sizes, **relative))
    assert RewardModel(deberta, tiny_tokenizer()).score(["x"], ["y" * 60], 1).isfinite().all()
    roberta = RobertaForSequenceClassification(RobertaConfig(**sizes, pad_token_id=1))
    assert RewardModel(roberta, tiny_tokenizer()).score(["x"], ["y" * 31], 1).isfinite().all()
    with pytest.raises(DataError, match=r"reads 32 tokens at most, and .* has 33"):
        RewardModel(roberta, tiny_tokenizer()).score(["x"], ["y" * 32], 1)


def test_an_empty_row_and_a_missing_tokenizer_are_refused():
    with pytest.raises(DataError, match="Row 1 has no tokens"):
        RewardRunner(classifier(), tiny_tokenizer()).begin(["a", ""], ["", ""], [[0]] * 2).result()
    with pytest.raises(ConfigError, match="which tokenizer belongs to it"):
        RewardRunner(classifier())
