"""The target answers prompts: the corpus that a draft learns best from is the target's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle_dropmatch.acceptors.exact import ExactAcceptor
from eagle_dropmatch.drafts.base import NoDrafter
from eagle_dropmatch.evals import chat
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.prompts import Conversation, Message


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the assistant speaks, as token ids."""

    id: str
    ids: list[int]


#: Tokens that a sampled answer is drawn from at each place: over the whole vocabulary a draw would
#: cost as much as the LM head.
LIKELIEST = 256


@torch.inference_mode()
def answer(
    target: TargetModel,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    seed: int = 0,
) -> list[Example]:
    """Answer a batch of prompts with the plain loop; one example each, in their order."""
    sampler = Sampler(temperature, top_k=LIKELIEST)
    limits = Limits(max_new_tokens, stop_ids)
    loop = DecodingLoop(target, NoDrafter(), ExactAcceptor(), limits, sampler)
    loop.prefill([prompt.ids for prompt in prompts], seed=seed, reserve=1)
    while loop.running:
        loop.step()
    source = f"target-{temperature:g}" if temperature > 0 else "target-greedy"
    return [
        Example(
            prompt.id,
            source,
            prompt.ids + row.tokens,
            [(len(prompt.ids), len(prompt.ids) + len(row.tokens))],
        )
        for prompt, row in zip(prompts, loop.rows, strict=True)
    ]


def plan(prompts: Sequence[Prompt], batch: int, pool: int) -> Iterator[list[Prompt]]:
    """Batches of prompts of like length; sorted within pools, so that order stays mixed."""
    for start in range(0, len(prompts), batch * pool):
        window = sorted(prompts[start : start + batch * pool], key=lambda p: len(p.ids))
        for first in range(0, len(window), batch):
            yield window[first : first + batch]


def first_prompts(
    conversations: Sequence[Conversation], tokenizer: Any, max_tokens: int
) -> list[Prompt]:
    """The distinct opening questions of conversations, through the chat template."""
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for conversation in conversations:
        messages = conversation.up_to_question(1)
        assert messages is not None
        text = messages[-1]["content"]
        if text not in seen:
            seen.add(text)
            _add(prompts, tokenizer, conversation.id, messages, max_tokens)
    return prompts


def second_prompts(
    conversations: Sequence[Conversation],
    answers: Mapping[str, Example],
    tokenizer: Any,
    max_tokens: int,
) -> list[Prompt]:
    """Second questions behind the target's own first answers, by conversation id."""
    prompts: list[Prompt] = []
    for conversation in conversations:
        messages, first = conversation.up_to_question(2), answers.get(conversation.id)
        if messages is None or first is None:
            continue
        (start, end) = first.spans[0]
        text = tokenizer.decode(first.ids[start:end], skip_special_tokens=True)
        # The history is text, as in a chat: an answer of special tokens alone has none.
        if answer := chat.strip_thinking(text):
            history = [*messages[:-2], {"role": "assistant", "content": answer}, messages[-1]]
            _add(prompts, tokenizer, f"{conversation.id}#2", history, max_tokens)
    return prompts


def _add(
    prompts: list[Prompt], tokenizer: Any, name: str, messages: list[Message], max_tokens: int
) -> None:
    ids = chat.render(tokenizer, messages, chat.ChatSettings()).ids
    if len(ids) <= max_tokens:
        prompts.append(Prompt(name, ids))
