"""Prompts through the tokenizer's own chat template, and nothing else.

A template written by hand, or chosen from a model's name, is where benchmarks go wrong without
anybody noticing: doubled BOS tokens, the format of another model, a system prompt nobody set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import UserError
from .base import Message

_CLOSED_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class ChatSettings(NamedTuple):
    """What the user may add to a template."""

    system_prompt: str | None = None
    thinking: bool | None = None
    """``enable_thinking`` of templates that know it (Qwen3); None leaves their default."""


class Prompt(NamedTuple):
    """A rendered prompt and its ids."""

    text: str
    ids: list[int]


def require_chat_template(tokenizer: Any) -> None:
    """UserError for a tokenizer that has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "the target"
        raise UserError(
            f"the tokenizer of {name} has no chat template: give a chat (instruct) model, "
            "or put a chat_template.jinja into its folder"
        )


def render(tokenizer: Any, messages: Sequence[Message], settings: ChatSettings) -> Prompt:
    """The template's text, ending where the answer begins, and its ids with at most one BOS."""
    require_chat_template(tokenizer)
    if settings.thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        raise UserError("--thinking: the target's chat template knows no enable_thinking")
    turns = list(messages)
    if settings.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": settings.system_prompt})
    extra = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    try:
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **extra
        )
    except Exception as error:
        # A template refuses through jinja2's exceptions; jinja2 itself is optional to import here.
        if type(error).__module__.partition(".")[0] != "jinja2":
            raise
        role = "a system prompt" if settings.system_prompt is not None else "this conversation"
        raise UserError(f"the target's chat template refuses {role}: {error}") from None
    # The template writes its own BOS; asking the tokenizer for special tokens would add a second.
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    while bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    return Prompt(text, ids)


def strip_thinking(answer: str) -> str:
    """The answer without its reasoning, as it belongs into the next turn's history.

    A block that was cut off before ``</think>`` goes to the end; a ``</think>`` whose opening stood
    in the prompt takes everything before it.
    """
    answer = _CLOSED_THINKING.sub("", answer)
    _, closed, rest = answer.rpartition("</think>")
    answer = rest if closed else answer
    return answer.partition("<think>")[0].strip()


def cut(ids: Sequence[int], stop_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The generated ids up to and including the first stop token, at most ``max_new_tokens``.

    The one counting rule of all arms.
    """
    stops = set(stop_ids)
    kept: list[int] = []
    for token in ids[:max_new_tokens]:
        kept.append(token)
        if token in stops:
            break
    return kept
