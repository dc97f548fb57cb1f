"""The flags of an evaluation script, under the names that users of EAGLE and transformers know."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import cli
from .plan import EXACT

SAMPLE = 10
"""Questions of a run without --limit: spread evenly over the set, so fixed by this number alone."""
MAX_NEW_TOKENS = 64
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of an evaluation."""
    add_models(parser)
    _add_trees(add_tree(parser))
    _add_chains(parser.add_argument_group("speculative decoding beside it"))
    _add_rule(parser.add_argument_group("acceptance"))
    _add_questions(parser.add_argument_group("questions and answers"))
    _add_run(parser.add_argument_group("run"))


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """An evaluation's arguments, where another script's flags leave them open."""
    parser = cli.Parser("")
    add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **vars(args)})


def add_models(parser: argparse.ArgumentParser) -> None:
    """The pair and how it runs."""
    group = parser.add_argument_group("models (without --target and --draft: reference pair)")
    group.add_argument(
        "--target", "--base-model-path", metavar="MODEL", help="folder or hub id of a chat model"
    )
    group.add_argument(
        "--draft",
        "--ea-model-path",
        metavar="MODEL",
        help="folder or hub id of an EAGLE-3 draft trained for the target",
    )
    group.add_argument(
        "--draft-lm",
        metavar="MODEL",
        help="draft with a smaller language model of the target's tokenizer instead: with --chain "
        "that is speculative decoding; reference: the one that ships for the reference target",
    )
    group.add_argument(
        "--draft-ngram",
        type=cli.integer(1),
        metavar="N",
        help="draft from the text instead: what followed its last N tokens or fewer before",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, metavar="DTYPE", help="float32, bfloat16 or float16"
    )
    group.add_argument(
        "--attn-implementation",
        metavar="NAME",
        help="sdpa or eager, for all arms; flash attention takes no tree mask",
    )
    group.add_argument("--device-map", metavar="MAP", help="as in transformers: cpu, cuda:0, auto")
    group.add_argument("--threads", type=cli.integer(1), metavar="N", help="CPU threads of torch")
    group.add_argument(
        "--fuse",
        choices=("on", "off"),
        help="run both models with exchanged modules: equal results, faster, a second copy of the "
        "weights (default: on a CPU, where it works and fits); arm hf never does",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="run both models as machine code for this CPU: equal results, half the time a step; "
        "made once for a pair and machine, which takes minutes and a C++ compiler",
    )


def _add_chains(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sd-lm",
        metavar="MODEL",
        help="beside the arms of the draft: speculative decoding, with chains of this smaller "
        "language model of the target's tokenizer, exact and under the rules of --sd-acceptor; "
        "reference: the one that ships for the reference target",
    )
    group.add_argument(
        "--sd-acceptor",
        nargs="*",
        metavar="RULE",
        help="rules of its chains (default: dropmatch, the paper's Algorithm 1)",
    )
    group.add_argument(
        "--sd-length",
        type=cli.integer(1),
        metavar="L",
        help="tokens of its chains (default 5)",
    )


def add_tree(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The tree that is drafted; returns the flags' group."""
    group = parser.add_argument_group("draft tree")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--tree", action="store_true", help="draft trees (the default)")
    shape.add_argument(
        "--chain", action="store_true", help="draft chains: a tree with top-k 1, all nodes kept"
    )
    group.add_argument(
        "--total-token",
        type=cli.integer(1, "it counts the root"),
        metavar="T",
        help="nodes of the tree verified in a step, EAGLE's meaning: the root (the last committed "
        "token) is one of them, so T - 1 are drafted",
    )
    group.add_argument(
        "--depth",
        type=cli.integer(0),
        metavar="D",
        help="expansions after the first, EAGLE's meaning: the tree has D + 1 levels of draft "
        "tokens and a step commits at most D + 2 tokens",
    )
    group.add_argument(
        "--top-k",
        type=cli.integer(1),
        metavar="K",
        help="nodes expanded on each level, and children scored for each of them",
    )
    group.add_argument(
        "--tree-budget",
        choices=("auto", "fixed"),
        help="auto: each step's tree has the size that commits most tokens a second, by what steps "
        "cost here (timed once) and how often the draft is right; --total-token, --depth and "
        "--top-k are then its bounds. The default where none of them is given",
    )
    return group


def _add_trees(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trees",
        type=cli.tree_shape,
        nargs="+",
        metavar="T/D/K",
        help="compare trees: an exact arm for each total-token/depth/top-k, as 24/5/6, or auto, "
        "instead of one tree",
    )


def _add_rule(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--acceptor",
        nargs="+",
        default=[EXACT],
        metavar="RULE",
        help="exact (lossless, the default), or one or more lossy rules, which always run beside "
        "exact: naive (DropMatch: a token is accepted if one of K dropout heads would choose it), "
        "or any other of the README's table, with options as in 'margin(kappa=0.5)' or "
        "'any_of(naive(K=3), top_k)'",
    )
    group.add_argument(
        "--heads", type=cli.integer(1), metavar="K", help="dropout heads of rules that have them"
    )
    group.add_argument(
        "--p-drop",
        type=cli.drop_probability,
        metavar="P",
        help="their dropout probability in [0, 1), or auto: solved on the prompt for "
        "--head-agreement",
    )
    group.add_argument(
        "--head-agreement",
        type=cli.share,
        metavar="SHARE",
        help="with --p-drop auto: share of prompt positions on which a dropout head still chooses "
        "the clean head's token",
    )
    group.add_argument(
        "--include-clean",
        action="store_const",
        const=True,
        help="count the clean head among the heads, so that exact matches always pass",
    )
    group.add_argument(
        "--mask",
        choices=("node", "step"),
        metavar="PER",
        help="node: fresh dropout masks at every node; step: one set for all nodes of a step",
    )
    group.add_argument(
        "--seeds",
        "--seed",
        type=cli.integer(0),
        nargs="+",
        metavar="SEED",
        help="seeds of a rule's own random numbers: one arm for each, pooled in the table (default "
        "0)",
    )
    group.add_argument(
        "--controls",
        action="store_true",
        help="beside each lossy rule an arm that samples the target itself, without a draft, among "
        "the tokens that the rule would accept (at --temperature, or 1): what its truncation costs "
        "alone",
    )
    group.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="which of plain (our loop without drafts), hf (transformers' generate), lookup (the "
        "same with prompt-lookup decoding), assisted (the same with the model of --draft-lm), "
        "exact and the rules of --acceptor to run (default: all but lookup and assisted)",
    )


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="question file in FastChat's jsonl format, or HuggingFaceH4/mt_bench_prompts",
    )
    group.add_argument(
        "--limit",
        type=cli.limit,
        default=argparse.SUPPRESS,
        metavar="N",
        help=f"this many questions, spread evenly over the set, or all (default {SAMPLE}, or all "
        "of a range given by the next two)",
    )
    group.add_argument("--question-begin", type=cli.integer(0), metavar="I", help="first index")
    group.add_argument(
        "--question-end", type=cli.integer(0), metavar="I", help="index after the last"
    )
    add_answers(group)


def add_answers(group: argparse._ArgumentGroup) -> None:
    """How an answer is written."""
    group.add_argument(
        "--max-new-tokens",
        "--max-new-token",
        type=cli.integer(1),
        default=MAX_NEW_TOKENS,
        metavar="N",
        help=f"longest answer of a turn, in tokens (default {MAX_NEW_TOKENS})",
    )
    group.add_argument(
        "--temperature",
        type=cli.temperature,
        default=0.0,
        metavar="T",
        help="0: greedy, the default; above it everything is sampled",
    )
    group.add_argument(
        "--sampling-top-k",
        type=cli.integer(0),
        metavar="K",
        help="with a temperature: sample from the K likeliest tokens (default 0: from all)",
    )
    group.add_argument(
        "--sampling-top-p",
        type=cli.share,
        metavar="P",
        help="with a temperature: from the likeliest that hold P together (default 1)",
    )
    group.add_argument("--system-prompt", metavar="TEXT", help="put before every conversation")
    group.add_argument(
        "--thinking",
        choices=("on", "off"),
        metavar="ON|OFF",
        help="enable_thinking of chat templates that have it (default: the template's)",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size",
        type=cli.integer(1),
        default=1,
        metavar="B",
        help="conversations that are answered at the same time; above 1 the arms are our own, a "
        "waiting turn takes the seat of an answer that ends, and seconds are shares of the batch's "
        "(default 1)",
    )
    group.add_argument(
        "--repeats",
        type=cli.integer(1),
        default=1,
        metavar="N",
        help="answers a question; times are medians (default 1)",
    )
    group.add_argument(
        "--warmup",
        type=cli.integer(0),
        default=1,
        metavar="N",
        help="untimed answers of every arm before the first timed one (default 1)",
    )
    group.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="where records go; a run that was killed there goes on (default: a folder in runs/ "
        "named after the arguments)",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="delete an earlier run in --output-dir"
    )
