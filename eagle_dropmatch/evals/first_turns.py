"""What the measuring scripts share: a pair with a fixed tree, and first turns of MT-Bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import cli
from ..errors import UserError
from .base import Question, select
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
    benchmark = MTBench()
    return decoder, [
        render(decoder.tokenizer, benchmark.prompt(question, 0, []), ChatSettings()).ids
        for question in questions
    ]
