"""The target answers prompts: the corpus that a draft learns best from is the target's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import (
    Acceptor,
    StepContext,
    Verdict,
)
from eagle_dropmatch.acceptors.exact import ExactAcceptor
from eagle_dropmatch.acceptors.heads import mask_uniforms
from eagle_dropmatch.drafts.base import NoDrafter
from eagle_dropmatch.evals import chat
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.target import TargetModel, TargetOutput
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.prompts import Conversation, Message
from eagle_dropmatch.tree import DraftTree


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the assistant speaks, as token ids."""

    id: str
    ids: list[int]


class PlainSampling(Acceptor):
    """Samples each token from softmax(logits / temperature) over the likeliest ``top`` tokens.

    For trees that are a root alone: it samples the token after the root and accepts nothing. The
    draw follows from the row's key and step, so an answer does not depend on its batch.
    """

    name = "plain-sampling"
    lossless = True

    def __init__(self, temperature: float, top: int = 256, seed: int = 0) -> None:
        self.temperature, self.top, self.seed = temperature, top, seed

    def first(self, logits: Tensor, row_keys: Sequence[int]) -> Tensor:
        return self._draw(logits, row_keys, step=-1)

    def accept(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Tensor:
        return torch.zeros_like(tree.valid)

    def verify(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Verdict:
        verdict = super().verify(tree, output, context)
        return verdict._replace(
            bonus=self._draw(output.logits[:, 0], context.row_keys, context.step)
        )

    def _draw(self, logits: Tensor, row_keys: Sequence[int], step: int) -> Tensor:
        # Sorting out a few candidates first: a draw over the vocabulary costs as much as the head.
        top = logits.float().topk(min(self.top, logits.shape[-1]), dim=-1)
        cumulative = (top.values / self.temperature).softmax(-1).cumsum(-1)
        uniforms = mask_uniforms(row_keys, self.seed, step, (1,), logits.device)
        chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:])
        return top.indices.gather(1, chosen.clamp(max=top.indices.shape[1] - 1)).squeeze(1)


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
    rule = PlainSampling(temperature, seed=seed) if temperature > 0 else ExactAcceptor()
    loop = DecodingLoop(target, NoDrafter(), rule, Limits(max_new_tokens, stop_ids))
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
