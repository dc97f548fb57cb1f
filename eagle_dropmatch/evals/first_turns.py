"""What the measuring scripts share: a pair with a fixed tree, and first turns of MT-Bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import cli
from ..errors import UserError
from .base import Benchmark, Message, Question, select
from .chat import ChatSettings, render
from .checkpoints import check_models
from .mtbench import MTBench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair, the tree and the question file."""
    parser.add_argument("--target", metavar="MODEL", help="default: the reference pair")
    parser.add_argument("--draft", metavar="MODEL")
    parser.add_argument("--total-token", type=cli.integer(2), metavar="T")
    parser.add_argument("--depth", type=cli.integer(0), metavar="D")
    parser.add_argument("--top-k", type=cli.integer(1), metavar="K")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="default: MT-Bench's")


def questions_of(args: argparse.Namespace, limit: int | None) -> Sequence[Question]:
    """The questions, with everything checked that needs no model."""
    if (args.target is None) != (args.draft is None):
        raise UserError("give both --target and --draft, or neither for the reference pair")
    check_models(args.target, args.draft)
    return select(MTBench().load(args.questions), limit=limit)


def load(
    args: argparse.Namespace, questions: Sequence[Question], **options: Any
) -> tuple[Any, list[Sequence[int]]]:
    """The decoder, its trees of one size, and the first turns' prompts."""
    cli.silence_transformers()
    from ..decoder import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained(
        args.target,
        args.draft,
        total_token=args.total_token,
        depth=args.depth,
        top_k=args.top_k,
        tree_budget="fixed",
        **options,
    )
    return decoder, prompts_of(decoder, questions)


def prompts_of(decoder: Any, questions: Sequence[Question]) -> list[Sequence[int]]:
    """The first turns of MT-Bench questions as token ids."""
    benchmark = MTBench()
    return [
        render(decoder.tokenizer, benchmark.prompt(question, 0, []), ChatSettings()).ids
        for question in questions
    ]


def answer(decoder: Any, prompts: Sequence[Sequence[int]], rule: Any, max_new_tokens: int) -> None:
    """Answer every prompt under a rule, for what the rule sees meanwhile."""
    from tqdm import tqdm

    decoder.acceptor = rule
    for prompt in tqdm(prompts, unit="question", dynamic_ncols=True):
        _answer(decoder, prompt, max_new_tokens)


def answer_until(
    enough: Callable[[], bool],
    warm: Callable[[], object],
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    most: int,
) -> None:
    """Answer the prompts over and over, until ``enough`` says so or ``most`` answers are there.

    ``warm`` is called once, behind the first answer: what was noted by then shall not count.
    """
    for turn in range(most):
        _answer(decoder, prompts[turn % len(prompts)], max_new_tokens)
        if turn == 0:
            warm()
        if enough():
            break


def _answer(decoder: Any, prompt: Sequence[int], max_new_tokens: int) -> None:
    import torch

    ids = torch.tensor([list(prompt)], device=decoder.target.device)
    decoder.generate(ids, max_new_tokens=max_new_tokens, repetition_penalty=1.0)


@dataclass(frozen=True)
class FirstTurns:
    """A benchmark's questions without their later turns."""

    whole: Benchmark

    @property
    def name(self) -> str:
        return f"{self.whole.name}-first-turns"

    def load(self, source: Path | None = None) -> list[Question]:
        return [
            replace(question, turns=question.turns[:1], reference=question.reference[:1])
            for question in self.whole.load(source)
        ]

    def prompt(self, question: Question, turn: int, history: Sequence[str]) -> list[Message]:
        return self.whole.prompt(question, turn, history)

    def score(self, question: Question, answers: Sequence[str]) -> Mapping[str, float]:
        return self.whole.score(question, answers)
