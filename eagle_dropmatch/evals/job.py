"""An evaluation from its checked arguments to its table: the body of the eval scripts.

Everything that can be refused is refused before a model is loaded, in the order of what it costs to
find out: arguments, questions, checkpoint folders, the acceptor's name and options, the output
folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import cli
from ..assets import REFERENCE_TARGET_HUB_ID
from ..errors import UserError
from ..machine import device_name
from ..settings import stop_token_ids
from .arms import build_arms
from .base import Benchmark, Question, select
from .chat import ChatSettings, render
from .checkpoints import (
    check_draft_lm,
    check_models,
    describe_draft_lm,
    describe_source,
)
from .folder import RunFolder, default_folder
from .options import RULE_FLAGS, EvalOptions
from .plan import EXACT, NO_DRAFTING, ArmSpec, flags_of, make_rules, plan_run
from .progress import RunProgress
from .provenance import header_lines, run_arguments, session
from .quality import judge_turn
from .runner import RunSettings, run, stored_results
from .statistics import require_scipy
from .summary import Summary, summarise
from .table import as_json, markdown, terminal_text

if TYPE_CHECKING:
    from ..acceptors import Acceptor

    Planned = Sequence[tuple[ArmSpec, Acceptor | None]]

DEFAULT_ROOT = Path("runs")

Loader = Callable[[EvalOptions], Any]
"""Loads the decoder; tests put a small one in its place."""
After = Callable[[Summary, Path], None]


def evaluate(
    benchmark: Benchmark,
    options: EvalOptions,
    argv: Sequence[str],
    load: Loader | None = None,
    after: After | None = None,
    *,
    rules: Mapping[str, Acceptor] | None = None,
    show: bool = True,
) -> int:
    """Run or go on with an evaluation; returns the exit code.

    ``after`` gets the summary and the run's folder once the table is written, to add figures.
    ``rules``: those of the options' arms, where they are none that a user can name.
    ``show``: print the table.
    """
    for note in options.notes:
        _say(note)
    require_scipy()
    everything = benchmark.load(options.questions)
    questions = select(everything, limit=options.limit, begin=options.begin, end=options.end)
    check_models(options.target, options.draft)
    check_draft_lm(options.draft_lm, options.target, "--draft-lm")
    check_draft_lm(options.sd_lm, options.target, "--sd-lm")
    arguments = run_arguments(benchmark.name, options, questions)
    planned = plan_run(arguments, rules_of(options) if rules is None else rules)
    specs = [spec for spec, _ in planned]
    path = options.output_dir or default_folder(DEFAULT_ROOT, benchmark.name, arguments)
    with RunFolder(path) as folder:
        earlier = folder.open(arguments, overwrite=options.overwrite)
        if earlier and (header := RunFolder.read_header(path)) and header["finished"]:
            _say(f"{path} holds this run, finished; its table again (--overwrite measures afresh)")
            return _conclude(folder, specs, header, after, show=show)
        _say(_opening(folder, specs, questions, earlier))
        decoder = (load or load_decoder)(options)
        fit_tree(decoder, options)
        if decoder.adaptive:
            decoder.time_steps(options.batch_size, say=_say)
        description = {
            "benchmark_questions": len(everything),
            "turns": sum(len(question.turns) for question in questions),
        }
        return _measure(
            benchmark,
            questions,
            options,
            planned,
            decoder,
            folder,
            arguments,
            description,
            argv,
            after,
            show=show,
        )


def load_decoder(options: EvalOptions) -> Any:
    """The decoder with the asked-for tree; UserError where transformers cannot find the models."""
    cli.silence_transformers()
    import torch

    from ..decoder import SpeculativeDecoder

    if str(options.device_map).startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device-map {options.device_map}: torch sees no CUDA device here")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        return SpeculativeDecoder.from_pretrained(
            options.target,
            options.draft,
            total_token=options.total_token,
            depth=options.depth,
            top_k=options.top_k,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            device_map=options.device_map,
            attn_implementation=options.attn_implementation,
            fuse=options.fuse,
            compile=options.compile,
            draft_lm=options.draft_lm,
            draft_ngram=options.draft_ngram,
            tree_budget=options.tree_budget,
        )
    except OSError as error:
        # transformers and the hub's client report missing repositories and networks this way.
        raise UserError(f"the models cannot be loaded: {str(error).splitlines()[0]}") from error


def fit_tree(decoder: Any, options: EvalOptions) -> None:
    """Cut the tree to the nodes that its depth and top-k can give, and say so if it was asked for.

    A chain keeps all of its nodes unless --total-token says otherwise.
    """
    from ..tree import candidate_count

    tree = decoder.tree
    most = candidate_count(tree.depth, tree.top_k) + 1
    wanted = options.total_token or (most if options.chain else tree.total_token)
    if options.total_token is not None and wanted > most:
        _say(
            f"note: --total-token {wanted} is more than depth {tree.depth} and top-k {tree.top_k} "
            f"can give ({most} nodes with the root): clipped to {most}"
        )
    decoder.tree = replace(tree, total_token=min(wanted, most))
    for shape in options.trees:
        if isinstance(shape, str):
            continue
        nodes, depth, top_k = shape
        most = candidate_count(depth, top_k) + 1
        if nodes > most:
            _say(f"note: tree {nodes}/{depth}/{top_k} has at most {most} nodes: clipped to that")


def rules_of(options: EvalOptions) -> dict[str, Acceptor]:
    """The rules beside exact, by the text they were given as; refused here, without a model.

    Options given as flags go to every rule given by its name alone that takes them.
    """
    flags = options.acceptor_options
    rules = make_rules(options.acceptors, flags)
    taken = {name for text in options.acceptors for name in flags_of(text, flags)}
    left = [flag for flag, name in RULE_FLAGS.items() if name in set(flags) - taken]
    if left:
        names = ", ".join(f"--{flag.replace('_', '-')}" for flag in left)
        raise UserError(
            f"{names}: no rule of --acceptor {' '.join(options.acceptors)} takes that as a flag; "
            "write options into the rule, as in 'naive(K=3)'"
        )
    return {text: rule for text, rule in rules.items() if text != EXACT}


def _measure(
    benchmark: Benchmark,
    questions: Sequence[Question],
    options: EvalOptions,
    planned: Planned,
    decoder: Any,
    folder: RunFolder,
    arguments: Mapping[str, Any],
    description: Mapping[str, Any],
    argv: Sequence[str],
    after: After | None,
    *,
    show: bool,
) -> int:
    tokenizer = decoder.tokenizer
    chat = ChatSettings(options.system_prompt, options.thinking)
    first = render(tokenizer, benchmark.prompt(questions[0], 0, []), chat)
    stop_ids = stop_token_ids(decoder.target.model.generation_config, tokenizer)
    specs = [spec for spec, _ in planned]
    # Before the folder holds anything: a model that does not fit is refused here.
    small = None if options.sd_lm is None else decoder.language_model(options.sd_lm)
    resolved = _resolved(decoder, options, planned, stop_ids)
    folder.start(
        arguments,
        resolved,
        {**description, "first_prompt": first.text, "first_prompt_ids": first.ids[:8]},
        session(argv),
    )
    arms = build_arms(planned, decoder, stop_ids, options.sampling, small)
    judge = partial(judge_turn, decoder.target, drafted=_drafted(decoder))
    settings = RunSettings(
        max_new_tokens=options.max_new_tokens,
        model_id=str(resolved["target"]["name"]),
        chat=chat,
        batch_size=options.batch_size,
        repeats=options.repeats,
        warmup=options.warmup,
    )
    progress = RunProgress(len(questions), [spec.name for spec in specs])
    try:
        run(benchmark, questions, arms, tokenizer, settings, folder, progress, judge)
    except KeyboardInterrupt:
        progress.close()
        _say(f"\ninterrupted; {folder.path} keeps all answers so far. To go on: {_again(options)}")
        return cli.EXIT_INTERRUPTED
    progress.close()
    header = RunFolder.read_header(folder.path)
    assert header is not None, "start() has written it"
    code = _conclude(folder, specs, header, after, show=show)
    # Only now: a run whose table could not be made shall make it when it is started again.
    folder.finish()
    return code


def _drafted(decoder: Any) -> Any:
    """[V] bool, the tokens that the draft can say, or None where that is not known."""
    import torch

    ids = decoder.drafter(decoder.tree).vocabulary
    if ids is None:
        return None
    known = torch.zeros(decoder.target.vocab_size, dtype=torch.bool)
    known[ids.cpu()] = True
    return known


def _resolved(
    decoder: Any,
    options: EvalOptions,
    planned: Planned,
    stop_ids: Sequence[int],
) -> dict[str, Any]:
    """What became known with the models; sessions of one run must agree on all of it."""
    import torch

    from ..acceptors import describe

    model = decoder.target.model
    tree = decoder.tree
    return {
        # Under the names that were given: where the reference pair lies on this machine says
        # nothing to a reader of the record.
        "target": {
            **describe_source(_target_source(options)),
            "name": options.target or REFERENCE_TARGET_HUB_ID,
        },
        "draft": describe_draft(options),
        **({} if options.sd_lm is None else {"sd": describe_draft_lm(options.sd_lm)}),
        "tree": {
            "total_token": tree.total_token,
            "depth": tree.depth,
            "top_k": tree.top_k,
            "adaptive": decoder.adaptive,
        },
        "acceptors": {
            spec.name: describe(rule)
            for spec, rule in planned
            if rule is not None and spec.acceptance not in (NO_DRAFTING, EXACT)
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "modules": decoder.target.modules,
        "stop_ids": list(stop_ids),
    }


def _target_source(options: EvalOptions) -> str | Path:
    from ..assets import reference_target

    return options.target if options.target is not None else reference_target()


def describe_draft(options: EvalOptions) -> dict[str, Any]:
    if options.draft_ngram is not None:
        return {"name": f"n-grams of at most {options.draft_ngram} tokens"}
    if options.draft_lm is not None:
        return {**describe_draft_lm(options.draft_lm), "name": f"the model {options.draft_lm}"}
    from ..assets import reference_draft

    source = options.draft if options.draft is not None else reference_draft()
    return {**describe_source(source), "name": options.draft or "the reference draft"}


def _conclude(
    folder: RunFolder,
    specs: Sequence[ArmSpec],
    header: Mapping[str, Any],
    after: After | None,
    *,
    show: bool,
) -> int:
    """Write and print the table from what the folder holds."""
    results = stored_results(folder, [spec.name for spec in specs])
    summary = summarise(specs, results, sampled=bool(header["arguments"]["sampling"]))
    lines = header_lines(header, {spec.name: spec.group for spec in specs})
    folder.write_text("table.md", markdown(summary, lines))
    folder.write_text("table.json", as_json(summary, lines))
    if show:
        print(terminal_text(summary, lines), end="")
    if after is not None:
        after(summary, folder.path)
    _say(f"answers, header and table: {folder.path}")
    return 0


def _opening(
    folder: RunFolder, specs: Sequence[ArmSpec], questions: Sequence[Question], earlier: bool
) -> str:
    total = len(specs) * len(questions)
    if not earlier:
        return f"{len(questions)} questions, {len(specs)} arms; writing to {folder.path}"
    done = sum(len(folder.answers(spec.name)) for spec in specs)
    return f"going on in {folder.path}: {done} of {total} answers are there"


def _again(options: EvalOptions) -> str:
    return "the same command without --overwrite" if options.overwrite else "the same command"


def _say(text: str) -> None:
    """To stderr: stdout holds the table alone."""
    print(text, file=sys.stderr, flush=True)
