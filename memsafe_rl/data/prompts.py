"""Prompts by position: which come next, read from a dataset, checked and turned into token ids."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import count, islice
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from datasets import Dataset, Image, IterableDataset, Value
from jinja2 import TemplateError
from rich.progress import track
from torch import Tensor

from memsafe_rl.accounting import host_memory
from memsafe_rl.data import unusable
from memsafe_rl.errors import DataError
from memsafe_rl.memory.runtime.recovery import capture_random_state, set_random_state
from memsafe_rl.micro_batches import prompt_order
from memsafe_rl.models.adapter import Context
from memsafe_rl.models.vision.families import KNOWN
from memsafe_rl.rollout.multi_turn.chat import check_template, contents_for, in_parts, parts_of, shows_image
from memsafe_rl.rollout.multi_turn.protocol import ImageContexts

Repeat = Callable[..., Any]
"""Runs a function on its arguments, again where memory runs out, and gives what it gives."""

PLACEHOLDER: list[dict[str, str]] = [{"role": "user", "content": ""}]
"""Prompt of datasets that have none, as in TRL: their environments give it."""

COLUMNS = ("image", "images")
"""Columns of a row that hold its images, as in TRL."""

_TOKENIZE_BATCH = 512
_SHOW_PROGRESS_FROM = 20_000  # prompts whose tokenization takes over two seconds

_SAID = {"content", "tool_calls", "reasoning_content", "thinking"}
"""Of which a message has one at least."""

logger = logging.getLogger(__name__)


class PromptError(DataError):
    """One of several prompts cannot be used."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place  # among the prompts that were read together


class PromptSource(Protocol):
    """A dataset read by position; positions count the prompts consumed since the run began."""

    @property
    def prompts_per_epoch(self) -> int | None:
        """Prompts of one pass over the dataset; None for a stream of unknown length."""

    def take(self, position: int, count: int) -> list[dict[str, Any]]:
        """Returns `count` examples from `position` on."""


@contextmanager
def _drawn_alike(seed: int, place: int) -> Iterator[None]:
    """Has a dataset that draws random numbers give a place the same row on all ranks and whenever it is read."""
    state = capture_random_state()
    draws = random.Random(f"{seed} {place}").getrandbits(32)
    random.seed(draws)
    np.random.seed(draws)
    torch.default_generator.manual_seed(draws)
    try:
        yield
    finally:
        set_random_state(state)


def read_alike(rows: Iterable[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Reads rows so that each is the same on all ranks, whatever random numbers it takes."""
    iterator = iter(rows)
    for place in count():
        with _drawn_alike(seed, place):
            row = next(iterator, None)
        if row is None:
            return
        yield row


class IndexedPrompts:
    """A map-style dataset, reshuffled each epoch as a pure function of the seed."""

    def __init__(
        self, examples: Sequence[dict[str, Any]], *, batch: int, seed: int, shuffle: bool, keep: Sequence[int]
    ) -> None:
        self._examples = examples
        self._keep = keep
        unusable.when(len(keep) < batch, "train_dataset/few", count=len(keep), batch=batch)
        self.prompts_per_epoch = len(keep) // batch * batch
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, position: int, count: int) -> list[dict[str, Any]]:
        """Returns `count` examples from `position` on, across epochs if need be."""
        taken = []
        for place in range(position, position + count):
            index = self._index(place)
            try:
                with _drawn_alike(self._seed, place):
                    taken.append(self._examples[index])
            except (OSError, SyntaxError) as error:  # how an image that cannot be read complains
                raise unusable("train_dataset/read", index=index, error=error) from error
        return taken

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.prompts_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, prompt_order(len(self._keep), self._seed, epoch, shuffle=self._shuffle))
        return self._keep[self._order[1][place]]


class StreamedPrompts:
    """An iterable dataset; a position behind or ahead of the stream is reached by reading it again from the start."""

    prompts_per_epoch = None

    def __init__(self, examples: Iterable[dict[str, Any]], seed: int) -> None:
        self._examples, self._seed = examples, seed
        self._iterator: Iterator[dict[str, Any]] = iter(())
        self._position = -1
        self._first: list[dict[str, Any]] = []  # as last read from the start: every checkpoint tells runs apart by two

    def take(self, position: int, count: int) -> list[dict[str, Any]]:
        """Returns `count` examples from `position` on; the stream starts over when it ends."""
        if position == 0 and count <= len(self._first):
            return self._first[:count]
        if position != self._position:
            self._iterator = read_alike(self._endless(), self._seed)
            next(islice(self._iterator, position, position), None)
        self._position = -1  # until all are there: a stream that raised half way is read again from the start
        taken = list(islice(self._iterator, count))
        self._position = position + count
        self._first = taken if position == 0 else self._first
        return taken

    def _endless(self) -> Iterator[dict[str, Any]]:
        for epoch in count():
            empty = True
            if hasattr(self._examples, "set_epoch"):
                self._examples.set_epoch(epoch)  # by which a shuffled stream takes another order, as under transformers
            for example in self._examples:
                empty = False
                yield dict(example)
            unusable.when(empty, "train_dataset/empty")


@dataclass(frozen=True)
class Prompts:
    """The prompts of one rollout."""

    examples: tuple[dict[str, Any], ...]  # the dataset's rows
    prompts: tuple[Any, ...]  # what the reward functions see: text, or a list of messages
    ids: tuple[Tensor, ...]  # token ids of each prompt, (length,) int64


class PromptReader(Protocol):
    """Turns prompts into what a network is conditioned on.

    Attributes:
        limit: longest prompt, in tokens; None for no limit.
        why_limited: what the limit comes from, as the end of a sentence about prompts over it.
        columns: columns of a row that it reads.
    """

    limit: int | None
    why_limited: str
    columns: ClassVar[tuple[str, ...]] = ("prompt",)

    def kept(self) -> Any:
        """Returns what is kept on the device of the prompts read so far; None where they are nothing but their ids."""
        return None

    def forget(self, kept: Any = None) -> None:  # noqa: ARG002
        """Frees what is kept of prompts, whose ids stand for nothing from then on.

        Args:
            kept: from `kept`, what stays; None for nothing.
        """
        return

    def rehearse(self, prompts: Sequence[Tensor], around: Context) -> None:  # noqa: ARG002
        """Keeps as much as reading such prompts would keep, to be measured.

        Args:
            prompts: token ids (length,) int64 of each, from `ids`, on the host.
            around: gives a context in which they may be read again.
        """
        return

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of `kept`."""
        return []

    def contexts(self, repeat: Repeat) -> ImageContexts | None:  # noqa: ARG002
        """Returns what reads images in conversations that grow; None where they are text alone.

        Args:
            repeat: runs a function on its arguments, again where memory runs out.

        Returns:
            The reader.
        """
        return None

    def read_in_contexts(self) -> dict[str, Any] | None:
        """Returns what `contexts` has read and ids stand for, in plain values; None where they are text alone."""
        return None

    def read_contexts_again(self, saved: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Reads again what a checkpoint tells of.

        Args:
            saved: from `read_in_contexts`.
        """
        return

    def measured(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Reads prompts that environments put into contexts of their own, so that only their lengths count here.

        Args:
            examples: rows of the dataset.

        Returns:
            The prompts.
        """
        return self(examples)

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Returns the tokens of prompts, without a limit; their number is what counts.

        Args:
            prompts: of one kind.

        Returns:
            Token ids of each.
        """

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Reads the prompts of some examples.

        Args:
            examples: rows of the dataset.

        Returns:
            The prompts.
        """


@dataclass
class PromptTokenizer(PromptReader):
    """Turns plain or conversational prompts into token ids."""

    tokenizer: Any
    _: KW_ONLY
    template_kwargs: Mapping[str, Any] | None  # of the chat template
    limit: int | None  # longest prompt, in tokens
    truncate: bool  # whether a longer one keeps its end; it is refused otherwise
    vocab_size: int | None = None  # of the model
    why_limited: str = "the limit"
    shows_images: bool = False  # whether messages may hold placeholders of images
    spelled: Callable[[str], str] | None = None  # what a template's text is changed to before it becomes tokens

    def bound(self, limit: int | None, why: str) -> None:
        """Lowers the limit."""
        if limit is not None and (self.limit is None or limit < self.limit):
            self.limit, self.why_limited = limit, why

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Tokenizes prompts as they are, without a limit."""
        if not prompts:
            return []
        for place, prompt in enumerate(prompts):
            with _at(place):
                _check_kind(prompt, prompts[0], shows_images=self.shows_images)
        if _is_tokens(prompts[0]):
            ids = prompts
        elif isinstance(prompts[0], str):
            ids = self.tokenizer(text=list(prompts))["input_ids"]
        else:
            ids = self._templated(prompts)
        for place, (prompt, row) in enumerate(zip(prompts, ids, strict=True)):
            with _at(place):
                unusable.when(not row, "prompt/empty", prompt=prompt)
                stray = min(row) if min(row) < 0 else max(row)
                if self.vocab_size is not None and not 0 <= stray < self.vocab_size:
                    raise unusable("prompt/vocabulary", prompt=prompt, stray=stray, known=self.vocab_size)
        return [list(row) for row in ids]

    def __call__(self, examples: Sequence[dict[str, Any]]) -> Prompts:
        """Tokenizes the prompts of some examples."""
        prompts = [prompt_of(example) for example in examples]
        rows = within_limit(self.ids(prompts), self, truncates=self.truncate)
        if _is_tokens(prompts[0]):  # what reward functions see is text
            prompts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return Prompts(tuple(examples), tuple(prompts), tuple(torch.tensor(row, dtype=torch.int64) for row in rows))

    def _templated(self, prompts: Sequence[Any]) -> list[list[int]]:
        check_template(self.tokenizer)
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **(self.template_kwargs or {})}
        text = {**how, "tokenize": False, "return_dict": False}
        prompts = list(map(contents_for(self.tokenizer, self.template_kwargs or {}), prompts))
        try:
            if self.spelled is not None:
                texts = map(self.spelled, self.tokenizer.apply_chat_template(list(prompts), **text))
                return list(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])
            return list(self.tokenizer.apply_chat_template(list(prompts), **how)["input_ids"])
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            if len(prompts) == 1:
                raise unusable("prompt/template", prompts=prompts, error=error) from error
            rows = []
            for place, prompt in enumerate(prompts):
                with _at(place):
                    rows += self._templated([prompt])
            return rows


def within_limit(rows: list[list[int]], reader: PromptReader, *, truncates: bool) -> list[list[int]]:
    """Cuts prompts to their reader's limit from the left, where that is asked for; else refuses one that is longer."""
    if reader.limit is None:
        return rows
    longest = max(map(len, rows))
    if longest > reader.limit and not truncates:
        raise DataError(overlong_message(longest, reader, 1))
    return [row[-reader.limit :] for row in rows]


def check_dataset(dataset: Any, name: str, columns: Sequence[str] = PromptReader.columns) -> Dataset | IterableDataset:
    """Refuses what is no dataset of prompts, by its form and by ``columns`` read; no row of a stream is read."""
    if isinstance(dataset, (list, tuple)):
        dataset = _from_rows(dataset, name)
    if isinstance(dataset, Mapping):
        splits, first = ", ".join(repr(str(split)) for split in dataset), str(next(iter(dataset), "train"))
        form = type(dataset).__name__
        raise unusable("dataset/splits", name=name, kind=form, splits=splits or "nothing", first=first)
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise unusable("dataset/kind", name=name, dataset=dataset, kind=type(dataset).__name__)
    if isinstance(dataset, Dataset) and dataset.format["type"] not in (None, "torch", "custom"):
        dataset = dataset.with_format(None)  # arrays and tables are no prompts
    if "input_ids" in (names := dataset.column_names or ()) and "prompt" not in names:
        dataset = dataset.rename_column("input_ids", "prompt")  # prompts that are tokens already, as for TRL's PPO
    for column, feature in (dataset.features or dict.fromkeys(dataset.column_names or ())).items():
        kind = getattr(feature, "feature", feature)
        if columns == PromptReader.columns and (column in COLUMNS or isinstance(kind, Image)):
            raise unusable("dataset/images", name=name, column=column, known=KNOWN)
    return dataset


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """Lists the columns that rows have, those that the dataset's transform makes among them."""
    known = dataset.column_names or []
    return list(dataset[0]) if isinstance(dataset, Dataset) and dataset.format["type"] and len(dataset) else known


def holds_text_alone(dataset: Any) -> bool:
    """Whether no prompt can hold an image, by the types of columns, which streams and transforms do not tell."""
    known = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    features = (dataset.features or {}) if known else {}
    prompt = features.get("prompt")
    turn = getattr(prompt, "feature", prompt)
    said = turn.get("content") if isinstance(turn, Mapping) else turn
    kinds = [(name, getattr(kind, "feature", kind)) for name, kind in features.items()]
    return isinstance(said, Value) and not any(name in COLUMNS or isinstance(kind, Image) for name, kind in kinds)


def _from_rows(rows: Sequence[Any], name: str) -> Dataset:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise unusable("dataset/row", name=name, index=index, row=row, kind=type(row).__name__)
        if row.keys() != rows[0].keys():
            own, first = sorted(map(str, row)), sorted(map(str, rows[0]))
            raise unusable("dataset/keys", name=name, index=index, own=own, first=first)
    try:
        return Dataset.from_list([dict(row) for row in rows])
    except (TypeError, ValueError, OverflowError, OSError, AttributeError) as error:  # the last two of images
        raise unusable("dataset/values", name=name, reason=" ".join(str(error).split())) from error


def prompt_of(example: Mapping[str, Any], whose: str = "an example") -> Any:
    """Returns an example's prompt."""
    if "prompt" not in example:
        raise unusable("dataset/prompt", whose=whose, columns=sorted(example))
    images = images_of(example)
    return with_images(example["prompt"], images) if images else example["prompt"]


def prompt_batches(dataset: Any, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yields the prompts of a map-style dataset, several at once, or one by one where they may hold images."""
    if columns == PromptReader.columns:
        for start in range(0, len(dataset), _TOKENIZE_BATCH):
            yield dataset[start : start + _TOKENIZE_BATCH]["prompt"]
        return
    found = [name for name in columns if name in dataset.column_names]
    rows = dataset if dataset.format["type"] == "custom" else dataset.select_columns(found).with_format("arrow")
    for index in range(len(rows)):  # as they are stored: no image is decoded
        row = rows[index]
        yield [prompt_of(row if isinstance(row, Mapping) else row.to_pylist()[0])]


def usable_prompts(examples: Any, tokenizer: PromptReader, *, overlong: str, name: str = "train_dataset") -> list[int]:
    """Checks every prompt of a map-style dataset before any weight is loaded."""
    unusable.when(len(examples) == 0, "dataset/none", name=name)
    prompt_of(dict.fromkeys(columns_of(examples)), name)
    lengths: list[int] = []
    batches: Iterable[list[Any]] = prompt_batches(examples, tokenizer.columns)
    if len(examples) >= _SHOW_PROGRESS_FROM:
        batches = track(batches, description="Reading prompts", transient=True, total=None)
    first: Any = None
    marks: dict[int, int] = {}  # hash of a prompt's tokens, and the row that has it first
    repeats: list[int] = []
    one_by_one = tokenizer.columns != PromptReader.columns
    try:
        for prompts in batches:
            first = first if lengths else prompts[0]
            rows = tokenizer.ids(prompts)
            with _at(0):
                _check_alike(prompts[0], first)
            repeats += [at for at, row in enumerate(rows, len(lengths)) if marks.setdefault(hash(tuple(row)), at) != at]
            lengths += map(len, rows)
    except DataError as error:
        if not (one_by_one or isinstance(error, PromptError)):
            raise
        raise DataError(f"{name}[{len(lengths) + getattr(error, 'place', 0)}]: {error}") from error
    # images differ where their tokens do not, and what environments ask where the dataset asks nothing
    if repeats and isinstance(tokenizer, PromptTokenizer) and first != PLACEHOLDER:
        told = "%s: %d of %d prompts repeat an earlier one, the first of them at row %d; duplicates are kept"
        logger.warning(told, name, len(repeats), len(lengths), repeats[0])
    return _within(lengths, tokenizer, overlong, name)


def fits(row: Mapping[str, Any], reader: PromptReader) -> bool:
    """Says whether a row's prompt is within its reader's limit."""
    return reader.limit is None or len(reader.ids([prompt_of(row)])[0]) <= reader.limit


def _within(lengths: Sequence[int], reader: PromptReader, overlong: str, name: str) -> list[int]:
    """Returns the rows that are used, of prompts so long; tells what is done with those over the limit."""
    over = [] if reader.limit is None else [index for index, length in enumerate(lengths) if length > reader.limit]
    if not over:
        return list(range(len(lengths)))
    if overlong == "error":
        raise DataError(overlong_message(max(lengths), reader, len(over), f" (the first: {name}[{over[0]}])"))
    dropped = set(over) if overlong == "filter" else set()
    told = "%s: %d of %d prompts are longer than %d tokens and are %s, the first at row %d"
    done = "left out" if dropped else "cut to their end"
    logger.warning(told, name, len(over), len(lengths), reader.limit, done, over[0])
    return [index for index in range(len(lengths)) if index not in dropped]


def overlong_message(longest: int, reader: PromptReader, count: int, where: str = "") -> str:
    """Writes the error for prompts over a reader's limit."""
    return (
        f"{count} prompt(s){where} are longer than {reader.limit} tokens (the longest has {longest}), "
        f"{reader.why_limited}. Set overlong_prompts to 'filter' or 'truncate', or raise that limit."
    )


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)  # True is no token


@contextmanager
def _at(place: int) -> Iterator[None]:
    """Notes at which of several prompts an error arose."""
    try:
        yield
    except DataError as error:
        raise PromptError(place, str(error)) from error


def _check_kind(prompt: Any, first: Any, *, shows_images: bool) -> None:
    """Refuses what is neither text nor messages nor tokens, or is another of these than the first prompt."""
    if _is_tokens(prompt) and prompt and _is_tokens(first):
        return
    unusable.when(not isinstance(prompt, str) and not is_chat(prompt), "prompt/kind", prompt=prompt)
    _check_alike(prompt, first)
    if isinstance(prompt, str):
        return
    unusable.when(not prompt, "prompt/chat")
    for place, turn in enumerate(prompt):
        known = {name: value for name, value in turn.items() if value not in (None, [])}  # as tables fill up
        unusable.when(not isinstance(turn.get("role"), str), "message/role", place=place, known=known)
        unusable.when(not known.keys() & _SAID, "message/content", place=place, known=known)
    unusable.when(not shows_images and any(map(shows_image, prompt)), "prompt/image", prompt=prompt, known=KNOWN)


def _check_alike(prompt: Any, first: Any) -> None:
    unusable.when(isinstance(prompt, str) != isinstance(first, str), "prompt/alike", prompt=prompt)


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Returns the images of a row's columns, as they are stored."""
    several = row.get("images")
    if several is not None:
        unusable.when(
            not isinstance(several, (list, tuple)) or any(one is None for one in several), "images/list", images=several
        )
        return list(several)
    unusable.when(isinstance(row.get("image"), list), "images/one", image=row.get("image"))
    return [] if row.get("image") is None else [row["image"]]


def with_images(prompt: Any, images: Sequence[Any]) -> Any:
    """Puts images into the messages of a prompt: into their placeholders, else before the first text of the user."""
    unusable.when(not is_chat(prompt), "images/chat", prompt=prompt, count=len(images))
    unusable.when(not prompt, "prompt/chat")
    turns = in_parts(prompt)
    if not any(_waits(part) for turn in turns for part in turn["content"]):
        first = next((turn for turn in turns if turn.get("role") == "user"), turns[0])
        first["content"] = [{"type": "image"} for _ in images] + first["content"]
    waiting = sum(_waits(part) for turn in turns for part in turn["content"])
    unusable.when(waiting != len(images), "images/placeholders", prompt=prompt, waiting=waiting, count=len(images))
    queue = iter(images)
    for turn in turns:
        turn["content"] = [{**part, "image": next(queue)} if _waits(part) else part for part in turn["content"]]
    return turns


def parts_in(prompt: Any) -> Iterator[Mapping[str, Any]]:
    """Walks the parts of the messages of a prompt; a message of plain text has none."""
    for turn in prompt if is_chat(prompt) else ():
        yield from turn["content"] if isinstance(turn.get("content"), list) else ()


def images_in(prompt: Any) -> Iterator[Any]:
    """Walks the images inside the messages of a prompt."""
    return (part["image"] for part in parts_in(prompt) if part.get("image") is not None)


def hollow(prompt: Any) -> Any:
    """Returns a prompt whose images are placeholders, as chat templates and tables show it."""
    return with_image_parts(prompt, lambda _: {"type": "image"})


def copied(prompt: Any) -> Any:
    """Copies a prompt; images are shared."""
    return copy.deepcopy(prompt, {id(image): image for image in images_in(prompt)})


def own_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a row, so that whoever writes into it disturbs none of its other completions; images are shared."""
    images = *images_of(row), *images_in(row.get("prompt", ""))
    own = {}
    for name, value in row.items():
        try:
            with host_memory():
                own[name] = copy.deepcopy(value, {id(image): image for image in images})
        except (TypeError, RuntimeError):  # a handle, such as a client's, or a tensor with a graph
            own[name] = value
    return own


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and all(isinstance(turn, Mapping) for turn in prompt)


def with_image_parts(prompt: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Changes the parts of messages that hold an image; what a table filled with None is left out."""
    if not is_chat(prompt) or not any(isinstance(turn.get("content"), list) for turn in prompt):
        return prompt
    return [
        {**turn, "content": [change(part) if "image" in part else part for part in parts_of(turn["content"])]}
        if isinstance(turn.get("content"), list)
        else turn
        for turn in prompt
    ]


def _waits(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image" and part.get("image") is None
