import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, Value

from memsafe_rl.data.prompts import (
    IndexedPrompts,
    PromptTokenizer,
    StreamedPrompts,
    check_dataset,
    columns_of,
    own_row,
    usable_prompts,
)
from memsafe_rl.errors import DataError
from tests.tiny import tiny_tokenizer


def reader(limit: int | None = None, truncate: bool = False, chat: bool = False) -> PromptTokenizer:
    return PromptTokenizer(tiny_tokenizer(chat=chat), template_kwargs=None, limit=limit, truncate=truncate)


def talk(*contents: str | None) -> list[dict[str, str | None]]:
    return [{"role": "user", "content": content} for content in contents]


class Mixed(list[Any]):
    """Prompts of kinds that no table would hold together."""

    column_names = ("prompt",)

    def __getitem__(self, place: Any) -> Any:
        return {"prompt": super().__getitem__(place)}


def examples(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{i}"} for i in range(count)]


def test_rows_that_draw_random_numbers_are_the_same_for_every_reader_and_leave_the_generators_alone() -> None:
    def drawn() -> dict[str, str]:
        return {"prompt": f"{random.random()} {np.random.rand()} {float(torch.rand(()))}"}

    class Mapped:
        def __getitem__(self, index: int) -> dict[str, str]:
            return drawn()

    class Streamed:
        def __iter__(self) -> Any:
            for _ in range(5):
                yield drawn()

    sources: list[Any] = [
        lambda: IndexedPrompts(Mapped(), batch=2, seed=3, shuffle=True, keep=range(6)),  # type: ignore[arg-type]
        lambda: StreamedPrompts(Streamed(), seed=3),
    ]
    for make in sources:
        random.seed(0)
        before, one = random.getstate(), make().take(0, 8)
        assert random.getstate() == before
        random.seed(1)
        source = make()
        assert [*source.take(0, 3), *source.take(3, 5)] == one
        assert make().take(6, 2) == one[6:]
        assert len({row["prompt"] for row in one}) == 8


def test_a_shuffled_stream_takes_another_order_in_every_pass_and_is_read_again_alike() -> None:
    rows = IterableDataset.from_generator(lambda: ({"prompt": str(one)} for one in range(8))).shuffle(seed=1)
    source = StreamedPrompts(rows, seed=1)
    passes = [[row["prompt"] for row in source.take(8 * epoch, 8)] for epoch in range(3)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len(set(map(tuple, passes))) == 3
    assert [row["prompt"] for row in StreamedPrompts(rows, seed=1).take(8, 8)] == passes[1]


def test_rows_are_copied_and_what_cannot_be_copied_is_shared() -> None:
    handle = threading.Lock()
    row = {"prompt": "a", "tests": [["x"]], "client": handle}
    own = own_row(row)
    own["tests"][0].clear()
    assert row["tests"] == [["x"]]
    assert own["client"] is handle


def test_every_epoch_reads_each_prompt_once_in_its_own_order() -> None:
    source = IndexedPrompts(examples(7), batch=3, seed=1, shuffle=True, keep=range(7))
    assert source.prompts_per_epoch == 6
    first = [row["prompt"] for row in source.take(0, 6)]
    second = [row["prompt"] for row in source.take(6, 6)]
    assert len(set(first)) == len(set(second)) == 6
    assert first != second
    assert [row["prompt"] for row in source.take(4, 4)] == first[4:] + second[:2]


def test_a_position_is_all_the_state_there_is() -> None:
    a = IndexedPrompts(examples(9), batch=2, seed=5, shuffle=True, keep=range(9))
    b = IndexedPrompts(examples(9), batch=2, seed=5, shuffle=True, keep=range(9))
    a.take(0, 13)
    assert a.take(13, 4) == b.take(13, 4)


def test_a_stream_goes_back_and_starts_over() -> None:
    source = StreamedPrompts(examples(5), seed=0)
    assert [row["prompt"] for row in source.take(0, 3)] == ["p0", "p1", "p2"]
    assert [row["prompt"] for row in source.take(3, 4)] == ["p3", "p4", "p0", "p1"]
    assert [row["prompt"] for row in source.take(1, 2)] == ["p1", "p2"]
    with pytest.raises(DataError, match="yields no examples"):
        StreamedPrompts([], seed=0).take(0, 1)


def test_too_few_prompts_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="has 2 usable prompts but one rollout takes 3"):
        IndexedPrompts(examples(2), batch=3, seed=0, shuffle=False, keep=range(2))


def test_plain_and_conversational_prompts_become_ids() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    plain = reader()([{"prompt": "1+2="}])
    assert plain.ids[0].tolist() == tiny_tokenizer()("1+2=")["input_ids"]
    turns = [{"role": "user", "content": "1+2="}]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert reader(chat=True)([{"prompt": turns}]).ids[0].tolist() == rendered["input_ids"]


def test_long_prompts_are_refused_filtered_or_cut_on_the_left() -> None:
    dataset = Dataset.from_dict({"prompt": ["1+2=", "1+2+3+4+5+6="]})
    short = len(reader().ids(["1+2="])[0])
    with pytest.raises(
        DataError, match=r"1 prompt\(s\) \(the first: train_dataset\[1\]\) are longer than .* Set overlong_prompts"
    ):
        usable_prompts(dataset, reader(limit=short), overlong="error")
    assert usable_prompts(dataset, reader(limit=short), overlong="filter") == [0]
    assert usable_prompts(dataset, reader(limit=short), overlong="truncate") == [0, 1]
    cut = reader(limit=short, truncate=True)([dataset[1]]).ids[0]
    assert torch.equal(cut, torch.tensor(reader().ids([dataset[1]["prompt"]])[0][-short:]))
    with pytest.raises(DataError, match="longer than"):
        reader(limit=short)([dataset[1]])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "^train_dataset is empty"),
        (["a", ""], r"^train_dataset\[1\]: prompt '' has no tokens. Remove"),
        ([[True, False]], r"^train_dataset\[0\]: prompt \[True, False\] is neither text nor a list of messages"),
        (["a", "b", None], r"^train_dataset\[2\]: prompt None is neither text nor a list of messages"),
        ([*["a"] * 600, ""], r"^train_dataset\[600\]: prompt '' has no tokens"),
        ([talk("a"), []], r"^train_dataset\[1\]: prompt \[\] is a conversation without messages"),
        ([talk("a"), [{"content": "b"}]], r"^train_dataset\[1\]: message 0 is {'content': 'b'}, without a 'role'"),
        (
            [talk("a"), talk("b", None)],
            r"^train_dataset\[1\]: message 1 is {'role': 'user'}, without a 'content'. Give",
        ),
        ([talk("a"), talk("no")], r"^train_dataset\[1\]: the chat template cannot render prompt .*refused"),
    ],
)
def test_bad_prompts_are_refused_with_their_row(prompts: list[Any], message: str) -> None:
    read = reader(chat=bool(prompts) and not isinstance(prompts[0], str))
    if read.tokenizer.chat_template:
        read.tokenizer.chat_template += (
            "{% if messages[0].content == 'no' %}{{ raise_exception('refused') }}{% endif %}"
        )
    with pytest.raises(DataError, match=message):
        usable_prompts(Dataset.from_dict({"prompt": prompts}), read, overlong="error")


def test_a_dataset_without_prompts_and_a_late_change_of_kind_are_refused() -> None:
    with pytest.raises(DataError, match="no 'prompt'"):
        usable_prompts(Dataset.from_dict({"question": ["x"]}), reader(), overlong="error")
    mixed = Mixed([talk("a")] * 512 + ["b"])
    with pytest.raises(DataError, match=r"^train_dataset\[512\]: prompt 'b' is not of the same kind"):
        usable_prompts(mixed, reader(chat=True), overlong="error")


def test_a_message_with_tool_calls_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    read = reader(chat=True)
    read.tokenizer.chat_template = "{% for turn in messages %}{{ turn.role }}{{ turn.content or 'called' }}{% endfor %}"
    assert read.ids([[*talk("a"), call]]) == [read.tokenizer("useraassistantcalled")["input_ids"]]


def test_repeated_and_long_prompts_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Dataset.from_dict({"prompt": ["1", "2", "1+2+3+4+5+6=", "1", "2"]})
    assert usable_prompts(dataset, reader(limit=4), overlong="truncate") == [0, 1, 2, 3, 4]
    assert caplog.messages == [
        "train_dataset: 2 of 5 prompts repeat an earlier one, the first of them at row 3; duplicates are kept",
        "train_dataset: 1 of 5 prompts are longer than 4 tokens and are cut to their end, the first at row 2",
    ]


def test_prompts_of_two_kinds_or_none_are_refused() -> None:
    with pytest.raises(DataError, match="neither text nor a list of messages"):
        reader().ids([3])
    with pytest.raises(DataError, match="not of the same kind"):
        reader(chat=True).ids(["a", [{"role": "user", "content": "a"}]])
    with pytest.raises(DataError, match="no chat template"):
        reader().ids([[{"role": "user", "content": "a"}]])
    with pytest.raises(DataError, match="a conversation without messages"):
        reader(chat=True).ids([[{"role": "user", "content": "a"}], []])
    with pytest.raises(DataError, match=r"holds an image\. Images are read by Qwen2-VL"):
        reader(chat=True).ids([[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]])


def test_datasets_streams_and_lists_of_dicts_are_taken() -> None:
    dataset = Dataset.from_list(examples(3))
    stream = dataset.to_iterable_dataset()
    nameless = stream.map(lambda row: row)
    assert nameless.column_names is None
    for given in (dataset, stream, nameless):
        assert check_dataset(given, "train_dataset") is given
    made = check_dataset(examples(3), "train_dataset")
    assert isinstance(made, Dataset)
    assert made[1] == {"prompt": "p1"}


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow"])
def test_rows_that_are_arrays_or_tables_are_read_as_plain_ones(kind: str) -> None:
    for prompts in (["a", "b"], [[3, 4], [5]]):
        given = Dataset.from_dict({"prompt": prompts, "size": [1, 2]}).with_format(kind)
        made: Any = check_dataset(given, "train_dataset")
        assert usable_prompts(made, reader(), overlong="error") == [0, 1]
        assert made[1] == {"prompt": prompts[1], "size": 2}


def test_a_transform_may_make_the_prompts() -> None:
    stored = Dataset.from_dict({"question": ["a", "b"]})
    asked = stored.with_transform(lambda rows: {"prompt": [f"{one}?" for one in rows["question"]], "size": [1, 1]})
    assert check_dataset(asked, "train_dataset") is asked
    assert columns_of(asked) == ["prompt", "size"]
    assert usable_prompts(asked, reader(), overlong="error") == [0, 1]
    with pytest.raises(DataError, match=r"has the columns \['answer'\] but no 'prompt'"):
        usable_prompts(stored.with_transform(lambda rows: {"answer": rows["question"]}), reader(), overlong="error")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            DatasetDict(test=Dataset.from_list(examples(1))),
            r"DatasetDict of 'test'. Pass .* train_dataset=data\['test'\]",
        ),
        ({}, "a dict of nothing"),
        (["1+2="], r"train_dataset\[0\] is '1\+2='"),
        ([{"prompt": "a"}, {"prompt": "b", "answer": "3"}], r"train_dataset\[1\] has the keys \['answer', 'prompt'\]"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}], "values differ in kind"),
        ([{"prompt": "a", "x": 2**80}], r"cannot be stored \(.*\)\. .* whole numbers of at most 64 bits"),
        ([{"prompt": "a\ud800"}], "cannot be stored .*surrogates not allowed.* without halves of surrogate pairs"),
        ("prompts.jsonl", "datasets.Dataset or IterableDataset with a 'prompt' column"),
        (None, "train_dataset is None"),
        ([{"prompt": "a", "image": "a.png"}], "column 'image' of images. Images are read by Qwen2-VL"),
        ([{"prompt": "a", "images": ["a.png"]}], "column 'images' of images. Images are read by"),
    ],
)
def test_other_forms_are_refused_with_the_way_out(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_dataset(dataset, "train_dataset")


def test_a_picture_under_any_name_is_refused_in_datasets_and_streams() -> None:
    features = Features({"prompt": Value("string"), "photo": Image()})
    dataset = Dataset.from_dict({"prompt": ["a"], "photo": [None]}, features=features)
    for given in (dataset, dataset.to_iterable_dataset()):
        with pytest.raises(DataError, match="column 'photo' of images"):
            check_dataset(given, "eval_dataset")


def test_what_a_checkpoint_tells_runs_apart_by_does_not_move_a_stream() -> None:
    """Every checkpoint read the stream again up to where it was."""
    read: list[str] = []

    class Rows:
        def __iter__(self) -> Any:
            for row in examples(50):
                read.append(row["prompt"])
                yield row

    source = StreamedPrompts(Rows(), seed=0)
    first = source.take(0, 2)
    for position in range(2, 42, 4):
        source.take(position, 4)
        assert source.take(0, 2) == first
    assert len(read) == 42
    assert [row["prompt"] for row in source.take(0, 3)] == ["p0", "p1", "p2"]


def test_a_template_that_reads_parts_alone_sees_texts() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    shown = "{% for part in turn['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    tokenizer.chat_template = "{% for turn in messages %}" + shown + "{% endfor %}"
    read = PromptTokenizer(tokenizer, template_kwargs=None, limit=None, truncate=False)
    texts = [[{"role": "user", "content": text}] for text in ("1+2=", "3+4=")]
    parts = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in ("1+2=", "3+4=")]
    assert read.ids(texts) == read.ids(parts) == [tokenizer(text)["input_ids"] for text in ("1+2=", "3+4=")]
