"""From checked arguments to a trace page: the body of ``scripts/trace.py``.

As in an evaluation, everything that can be refused is refused before a model is loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import cli
from ..assets import REFERENCE_TARGET_HUB_ID
from ..errors import UserError
from ..evals import BENCHMARKS, arguments
from ..evals.base import Benchmark, Question
from ..evals.chat import ChatSettings, Prompt, render, strip_thinking
from ..evals.checkpoints import check_draft_lm, check_models
from ..evals.job import DEFAULT_ROOT, Loader, describe_draft, fit_tree, load_decoder
from ..evals.options import EvalOptions, read_options
from ..evals.provenance import describe_sampling, describe_tree
from ..evals.runner import turn_seed
from ..files import check_writable, write_text
from ..settings import stop_token_ids
from .page import render_page, require_jinja2

if TYPE_CHECKING:
    from ..acceptors import Acceptor
    from .trace import AnswerTrace

BENCHMARK = "mt_bench"


class Asked(NamedTuple):
    """What is answered: a turn of a question, or a prompt of the user's own."""

    benchmark: Benchmark
    question: Question
    turn: int  # from 0
    name: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``scripts/trace.py``."""
    arguments.add_models(parser)
    arguments.add_tree(parser)
    group = parser.add_argument_group("rules, prompt and answer")
    group.add_argument(
        "--acceptor",
        nargs="+",
        required=True,
        metavar="RULE",
        help="one acceptance rule, or two side by side, as names or with options: naive, "
        "'relaxed_top_n(n=10, delta=0.3)'",
    )
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="what the user says")
    what.add_argument("--question", metavar="ID", help="a benchmark's question, by its question_id")
    group.add_argument(
        "--benchmark", choices=sorted(BENCHMARKS), help=f"of --question (default {BENCHMARK})"
    )
    group.add_argument(
        "--questions", type=Path, metavar="FILE", help="its question file in FastChat's jsonl"
    )
    group.add_argument(
        "--turn",
        type=cli.integer(1),
        metavar="N",
        help="which turn of --question to trace (default 1); those before it are answered with "
        "exact acceptance",
    )
    arguments.add_answers(group)
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: a file in runs/ named after the arguments)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the page's data here, too")


def trace(args: argparse.Namespace, argv: Sequence[str], load: Loader | None = None) -> int:
    """Answer, and write the page; returns the exit code."""
    require_jinja2()
    if len(args.acceptor) > 2:
        raise UserError(f"--acceptor was given {len(args.acceptor)} rules: a page shows one or two")
    options = read_options(arguments.with_defaults(args))
    asked = read_question(args)
    check_models(options.target, options.draft)
    check_draft_lm(options.draft_lm, options.target, "--draft-lm")
    output = args.output or default_output(asked, argv)
    for flag, path in (("--output", output), ("--json", args.json)):
        _check_file(flag, path)
    if args.json is not None and args.json.resolve() == output.resolve():
        raise UserError(f"--json {args.json} is the page itself: give another file")
    from ..acceptors import make_acceptor

    rules = {text: make_acceptor(text) for text in args.acceptor}
    decoder = (load or load_decoder)(options)
    fit_tree(decoder, options)
    if decoder.adaptive:
        decoder.time_steps(1, say=_say)
    data = answer(decoder, rules, asked, options, shlex.join(["python", "scripts/trace.py", *argv]))
    if args.json is not None:
        from .data import as_json

        write_text(args.json, as_json(data) + "\n")
    write_text(output, render_page(data))
    told = [f"{each['rule']} tau {each['numbers']['tau'] or '-'}" for each in data["traces"]]
    print(f"{output}: {', '.join(told)}")
    return 0


def answer(
    decoder: Any, rules: Mapping[str, Acceptor], asked: Asked, options: EvalOptions, command: str
) -> dict[str, Any]:
    """The page's data: one answer under each rule, all to the same prompt."""
    from ..evals.quality import judge_turn
    from .data import page_data

    prompt = _prompt(decoder, asked, options)
    traces: list[tuple[str, AnswerTrace, Mapping[str, float]]] = []
    first: float | None = None
    for text, rule in rules.items():
        trace = _traced(decoder, text, rule, prompt, options, asked)
        log_p = judge_turn(decoder.target, prompt.ids, trace.tokens).log_probability
        log_p /= len(trace.tokens)
        more = {"log p a token": log_p}
        if first is not None:
            more["log p below the first rule's"] = first - log_p
        first = log_p
        traces.append((text, trace, more))
    tree = {**vars(decoder.tree), "adaptive": decoder.adaptive}
    return page_data(
        traces,
        decoder.tokenizer,
        {
            "target": options.target or REFERENCE_TARGET_HUB_ID,
            "draft": str(describe_draft(options)["name"]),
            "drafting": describe_tree(tree),
            "decoding": describe_sampling(options.sampling),
            "question": asked.name,
            "prompt": prompt.text,
            "command": command,
        },
    )


def read_question(args: argparse.Namespace) -> Asked:
    """The question that the flags name. UserError where there is none, or they do not fit."""
    benchmark = BENCHMARKS[args.benchmark or BENCHMARK]()
    if args.prompt is not None:
        for flag in ("benchmark", "questions", "turn"):
            if getattr(args, flag) is not None:
                raise UserError(f"--{flag} goes with --question, not with --prompt")
        if not args.prompt.strip():
            raise UserError("--prompt is empty: give what the user says")
        return Asked(benchmark, Question("prompt", "", (args.prompt,)), 0, "a prompt")
    questions = benchmark.load(args.questions)
    found = [each for each in questions if str(each.question_id) == args.question]
    if not found:
        first, last = questions[0].question_id, questions[-1].question_id
        raise UserError(
            f"--question {args.question}: {benchmark.name} has {len(questions)} questions, "
            f"{first} to {last}, and not this one"
        )
    (question,) = found
    turn = args.turn or 1
    if turn > len(question.turns):
        raise UserError(
            f"--turn {turn}: question {question.question_id} has {len(question.turns)} turn(s)"
        )
    name = f"{benchmark.name} {question.question_id}, turn {turn}"
    return Asked(benchmark, question, turn - 1, name)


def default_output(asked: Asked, argv: Sequence[str]) -> Path:
    """The same arguments have the same file."""
    digest = hashlib.sha256(repr(list(argv)).encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "-", asked.name)
    return DEFAULT_ROOT / f"trace-{name}-{digest}.html"


def _check_file(flag: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder: give a file")
    check_writable(path.parent)


def _prompt(decoder: Any, asked: Asked, options: EvalOptions) -> Prompt:
    """The turn's rendered prompt, the turns before it answered with exact acceptance."""
    chat = ChatSettings(options.system_prompt, options.thinking)
    history: list[str] = []
    for turn in range(asked.turn + 1):
        messages = asked.benchmark.prompt(asked.question, turn, history)
        prompt = render(decoder.tokenizer, messages, chat)
        if turn < asked.turn:
            _say(f"answering turn {turn + 1} with exact acceptance")
            text = decoder.tokenizer.decode(
                _plain(decoder, prompt, turn, asked, options), skip_special_tokens=True
            )
            history.append(strip_thinking(text.strip()))
    return prompt


def _plain(
    decoder: Any, prompt: Prompt, turn: int, asked: Asked, options: EvalOptions
) -> list[int]:
    import torch

    from ..acceptors import make_acceptor

    decoder.acceptor = make_acceptor("exact")
    settings = _settings(decoder, options, asked, turn)
    out = decoder.generate(torch.tensor([prompt.ids]), **settings)
    answer: list[int] = out[0, len(prompt.ids) :].tolist()
    return answer


def _traced(
    decoder: Any, text: str, rule: Acceptor, prompt: Prompt, options: EvalOptions, asked: Asked
) -> AnswerTrace:
    from tqdm import tqdm

    from .trace import trace_answer

    _say(f"{text}: {len(prompt.ids)} prompt tokens, at most {options.max_new_tokens} new ones")
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=options.max_new_tokens, unit="token", disable=None, leave=False) as bar:
        settings = _settings(decoder, options, asked, asked.turn)
        trace = trace_answer(decoder, rule, prompt.ids, watch=bar.update, **settings)
    _say(f"{text}: {len(trace.tokens)} tokens in {len(trace.steps)} steps")
    return trace


def _settings(decoder: Any, options: EvalOptions, asked: Asked, turn: int) -> dict[str, Any]:
    """Of ``generate``: those under which an evaluation answers the same turn."""
    return {
        "max_new_tokens": options.max_new_tokens,
        "eos_token_id": stop_token_ids(decoder.target.model.generation_config, decoder.tokenizer),
        "repetition_penalty": 1.0,
        "seed": turn_seed(asked.question, turn),
        **options.sampling,
    }


def _say(text: str) -> None:
    """To stderr: stdout holds the last line alone."""
    print(text, file=sys.stderr, flush=True)
