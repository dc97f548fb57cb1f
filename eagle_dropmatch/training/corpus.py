"""Training examples: conversations as token ids with the spans that the assistant wrote.

A corpus is a JSON-lines file; a line is ``{"id", "source", "ids": [...], "spans": [[a, b), ...]}``.
Ids, not text: an answer that the target wrote is kept as the very tokens it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_dropmatch.errors import UserError


@dataclass(frozen=True)
class Example:
    """One conversation. ``spans`` are half-open ranges of assistant tokens, stop token included."""

    id: str
    source: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def read_examples(path: Path) -> Iterator[Example]:
    """Read a corpus; a line that cannot be read is an error with its number."""
    if not path.is_file():
        raise UserError(f"no corpus at {path}: make one with scripts/make_corpus.py")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                spans = [(int(a), int(b)) for a, b in row["spans"]]
                yield Example(str(row["id"]), str(row["source"]), list(row["ids"]), spans)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number}: not a corpus line ({error}); expected an object with "
                    "id, source, ids and spans"
                ) from None


def read_sharegpt(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Conversations of a ShareGPT file as (id, messages), in its order.

    The file may be cut off: it is decoded one conversation at a time up to the first that is not
    whole. Conversations that do not start with the user and alternate are cut where they stop to.
    """
    text = path.read_text(encoding="utf-8", errors="ignore")
    decoder = json.JSONDecoder()
    at = text.find("[") + 1
    while True:
        while at < len(text) and text[at] in " \r\n\t,":
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        messages = _alternating(row.get("conversations", []))
        if messages:
            yield str(row.get("id")), messages


def _alternating(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    roles = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}
    messages: list[dict[str, str]] = []
    for turn in turns:
        expected = "user" if len(messages) % 2 == 0 else "assistant"
        content = turn.get("value", "").strip()
        if roles.get(turn.get("from", "")) != expected or not content:
            break
        messages.append({"role": expected, "content": content})
    return messages


def mostly_ascii(text: str, share: float = 0.95) -> bool:
    """Whether a text is in a language that the reference target was trained on, roughly."""
    return sum(ch.isascii() for ch in text) >= share * max(1, len(text))


def render(tokenizer: Any, messages: list[dict[str, str]], stop_id: int) -> Example | None:
    """A whole conversation through the tokenizer's chat template, with the assistant's spans.

    Spans are found by rendering the conversation up to each answer and after it: no template's
    own markers are needed. None where no answer is left.
    """
    spans: list[tuple[int, int]] = []
    ids: list[int] = []
    for turn in range(1, len(messages), 2):
        prompt = _ids(tokenizer, messages[:turn], add_generation_prompt=True)
        whole = _ids(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if prompt[: len(ids)] != ids[: len(prompt)] or whole[: len(prompt)] != prompt:
            return None  # the template rewrites earlier turns: spans would point at other text
        end = len(whole)
        while end > len(prompt) and whole[end - 1] != stop_id:
            end -= 1  # what the template puts after the stop token is not the assistant's
        if end > len(prompt):
            spans.append((len(prompt), end))
        ids = whole
    if not spans:
        return None
    return Example("", "published", ids[: spans[-1][1]], spans)


def _ids(
    tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool
) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def truncate(example: Example, max_length: int) -> Example | None:
    """Cut an example to ``max_length`` tokens; None if no answer token is left to learn from."""
    spans = [(a, min(b, max_length)) for a, b in example.spans if a < max_length - 2]
    if not spans:
        return None
    return Example(example.id, example.source, example.ids[:max_length], spans)


def append_lines(path: Path, examples: Iterable[Example]) -> None:
    """Append examples as whole lines, on disk before it returns."""
    import os

    with path.open("a", encoding="utf-8") as file:
        file.writelines(example.to_json() + "\n" for example in examples)
        file.flush()
        os.fsync(file.fileno())
