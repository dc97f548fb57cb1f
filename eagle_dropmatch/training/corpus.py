"""Training examples: conversations as token ids with the spans that the assistant wrote.

A corpus is a JSON-lines file; a line is ``{"id", "source", "ids": [...], "spans": [[a, b), ...]}``.
Ids, not text: an answer that the target wrote is kept as the very tokens it wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_dropmatch.errors import UserError


@dataclass(frozen=True)
class Example:
    """One conversation. ``spans`` are half-open ranges of assistant tokens, stop token included."""

    id: str  # of the conversation; later turns have the turn's number behind a "#"
    source: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def conversation_of(example: Example) -> str:
    """The conversation that an example is a turn of."""
    return example.id.partition("#")[0]


def read_examples(path: Path) -> Iterator[Example]:
    """Read a corpus; a line that cannot be read is an error with its number.

    A last line without its end is what a killed run left: it is passed over.
    """
    if not path.is_file():
        raise UserError(f"no corpus at {path}: make one with scripts/make_corpus.py")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _parse(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith("\n"):
                    return
                raise UserError(
                    f"{path}, line {number}: not a corpus line ({error}); expected an object with "
                    "id, source, ids and spans"
                ) from None


def _parse(row: dict[str, Any]) -> Example:
    ids, spans = row["ids"], [(int(a), int(b)) for a, b in row["spans"]]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError("ids are not all token ids")
    if not all(0 <= start < end <= len(ids) for start, end in spans):
        raise ValueError("a span lies outside its ids")
    return Example(str(row["id"]), str(row["source"]), list(ids), spans)


def mostly_ascii(text: str, share: float = 0.95) -> bool:
    """Whether a text is in a language that the reference target was trained on, roughly."""
    return sum(ch.isascii() for ch in text) >= share * len(text)


def render(
    tokenizer: Any, messages: list[dict[str, str]], stop_ids: Collection[int]
) -> Example | None:
    """A whole conversation through the tokenizer's chat template, with the assistant's spans.

    Spans are found by rendering the conversation up to each answer and after it: no template's
    own markers are needed. None where no answer is left. The example's id is the caller's to set.
    """
    spans: list[tuple[int, int]] = []
    ids: list[int] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template_ids(tokenizer, messages[:turn], add_generation_prompt=True)
        whole = template_ids(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if prompt[: len(ids)] != ids or whole[: len(prompt)] != prompt:
            return None  # the template rewrites earlier turns: spans would point at other text
        end = len(whole)
        while end > len(prompt) and whole[end - 1] not in stop_ids:
            end -= 1  # what the template puts after the stop token is not the assistant's
        if any(token not in stop_ids for token in whole[len(prompt) : end]):
            spans.append((len(prompt), end))
        ids = whole
    if not spans:
        return None
    return Example("", "published", ids[: spans[-1][1]], spans)


def template_ids(
    tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool
) -> list[int]:
    """A conversation through the chat template, as token ids."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def windows(example: Example, max_length: int) -> list[Example]:
    """Cut an example into windows of ``max_length`` tokens, those with an answer to learn from.

    A long conversation has as much to teach after its first window as in it, and later windows
    start in the middle of one, as a draft that has lost the beginning would see it.
    """
    if len(example.ids) <= max_length:
        return [example]
    cut: list[Example] = []
    for start in range(0, len(example.ids), max_length):
        ids = example.ids[start : start + max_length]
        # An answer token is learnt from through its successor: the last of a window has none.
        spans = [
            (max(a - start, 0), min(b - start, len(ids)))
            for a, b in example.spans
            if a - start < len(ids) - 1 and b > start
        ]
        if spans:
            cut.append(Example(example.id, example.source, ids, spans))
    return cut


def append_lines(path: Path, examples: Iterable[Example]) -> None:
    """Append examples as whole lines, on disk before it returns."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(example.to_json() + "\n" for example in examples)
        file.flush()
        os.fsync(file.fileno())
