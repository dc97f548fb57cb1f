"""Conversations to make a corpus of, from the formats that people have them in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eagle_dropmatch.errors import UserError

Message = dict[str, str]

_FORMATS = (
    'lines of {"id", "messages"}, of {"question_id", "turns"}, or of ShareGPT\'s '
    '{"id", "conversations"}, or a ShareGPT JSON array'
)
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}


class Conversation(NamedTuple):
    """A conversation that alternates, the user first; a system message may stand before."""

    id: str
    messages: list[Message]

    def up_to_question(self, turn: int) -> list[Message] | None:
        """The messages up to the user's ``turn``-th question (from 1), None if there is none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        return self.messages[: asked[turn - 1] + 1] if len(asked) >= turn else None


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a file, those with nothing in them left out.

    A ShareGPT array may be cut off at its end; a line that cannot be read is an error with its
    number, and so is an id that comes twice: a corpus is resumed by its ids.
    """
    if not path.is_file():
        raise UserError(f"prompt file {path} does not exist")
    text = path.read_text(encoding="utf-8", errors="ignore")
    is_array = text.lstrip()[:1] == "["
    found = _read_array(text) if is_array else _read_lines(path, text)
    conversations = [each for each in found if each.up_to_question(1)]
    if not conversations:
        raise UserError(f"{path} holds no conversation: expected {_FORMATS}")
    seen: set[str] = set()
    for each in conversations:
        if each.id in seen or "#" in each.id:
            wrong = "comes twice" if each.id in seen else 'has a "#", which marks later turns'
            raise UserError(f"{path}: the id {each.id!r} {wrong}: give every conversation its own")
        seen.add(each.id)
    return conversations


def _read_array(text: str) -> Iterator[Conversation]:
    """ShareGPT's array, decoded one conversation at a time up to the first that is not whole."""
    decoder = json.JSONDecoder()
    at = text.find("[") + 1
    while True:
        while at < len(text) and text[at] in " \r\n\t,":
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        if isinstance(row, dict) and isinstance(row.get("conversations"), list):
            yield _from_sharegpt(row)


def _read_lines(path: Path, text: str) -> Iterator[Conversation]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            keys = (key for key in _READERS if key in row)
            yield _READERS[next(keys)](row)
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            why = "not valid JSON" if isinstance(error, ValueError) else "no conversation"
            raise UserError(f"{path}, line {number}: {why}; expected {_FORMATS}") from None


def _from_messages(row: dict[str, Any]) -> Conversation:
    turns = [(message["role"], message["content"]) for message in row["messages"]]
    return Conversation(str(row["id"]), _alternating(turns))


def _from_turns(row: dict[str, Any]) -> Conversation:
    """FastChat's questions: the user's turns alone. Their answers stay empty."""
    messages: list[Message] = []
    for turn in row["turns"]:
        if messages:
            messages.append({"role": "assistant", "content": ""})
        messages.append({"role": "user", "content": turn.strip()})
    return Conversation(str(row["question_id"]), messages)


def _from_sharegpt(row: dict[str, Any]) -> Conversation:
    turns = [(turn.get("from"), turn.get("value")) for turn in row["conversations"]]
    return Conversation(str(row["id"]), _alternating(turns))


_READERS: dict[str, Callable[[dict[str, Any]], Conversation]] = {
    "messages": _from_messages,
    "turns": _from_turns,
    "conversations": _from_sharegpt,
}


def _alternating(turns: list[tuple[Any, Any]]) -> list[Message]:
    """The turns up to where they stop to alternate, or one of them is empty."""
    messages: list[Message] = []
    expected = "user"
    for role, text in turns:
        if role == "system" and not messages:
            messages.append({"role": "system", "content": str(text)})
            continue
        content = text.strip() if isinstance(text, str) else ""
        if _ROLES.get(str(role)) != expected or not content:
            break
        messages.append({"role": expected, "content": content})
        expected = "assistant" if expected == "user" else "user"
    return messages
