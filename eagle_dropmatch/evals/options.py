"""Arguments of an evaluation, checked against each other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import cli
from ..errors import UserError
from .arguments import DTYPES, SAMPLE
from .plan import ASSISTED, EXACT, HF, LOOKUP, PLAIN

ATTENTION = ("sdpa", "eager")
SD_ACCEPTOR, SD_LENGTH = "dropmatch", 5
"""What DropMatch's table 6 measures on chains."""
RULE_FLAGS = {
    "heads": "K",
    "p_drop": "p_drop",
    "head_agreement": "head_agreement",
    "include_clean": "include_clean",
    "mask": "mask",
}
"""Flag -> option of the dropout acceptors; a flag left out leaves the acceptor's own default."""


@dataclass(frozen=True)
class EvalOptions:
    """Checked arguments. None means: not given, the decoder's or acceptor's default."""

    target: str | None
    draft: str | None
    draft_lm: str | None
    draft_ngram: int | None
    sd_lm: str | None
    sd_acceptors: tuple[str, ...]
    """Rules of the chains of ``sd_lm``; empty without it."""
    sd_length: int
    """Tokens of these chains."""
    dtype: str | None
    attn_implementation: str | None
    device_map: str | None
    threads: int | None
    fuse: bool | None
    compile: bool
    chain: bool
    total_token: int | None
    depth: int | None
    top_k: int | None
    trees: tuple[tuple[int, int, int] | str, ...]
    """Shapes, or "auto"."""
    tree_budget: str | None
    acceptors: tuple[str, ...]
    """Rules as they were given, names or expressions."""
    acceptor_options: Mapping[str, Any]
    """Options given as flags, by their names in the rules."""
    seeds: tuple[int, ...]
    """Empty: each rule's own."""
    controls: bool
    arms: tuple[str, ...]
    max_new_tokens: int
    sampling: Mapping[str, Any]
    """Settings of generate for a temperature above 0; empty: greedy."""
    system_prompt: str | None
    thinking: bool | None
    questions: Path | None
    limit: int | None
    begin: int | None
    end: int | None
    batch_size: int
    repeats: int
    warmup: int
    output_dir: Path | None
    overwrite: bool
    notes: tuple[str, ...]
    """What the user should know about how the arguments were read."""


def read_options(args: argparse.Namespace) -> EvalOptions:
    """Check what one flag cannot check alone. UserError names the flags."""
    begin, end = args.question_begin, args.question_end
    if end is not None and (begin or 0) >= end:
        raise UserError(
            f"--question-begin {begin or 0} is not below --question-end {end}: no question is left"
        )
    if args.attn_implementation is not None and args.attn_implementation not in ATTENTION:
        raise UserError(
            f"--attn-implementation {args.attn_implementation}: verification needs a tree mask, "
            f"which only {' and '.join(ATTENTION)} take"
        )
    if args.compile and args.fuse == "off":
        raise UserError("--compile goes with exchanged modules: leave --fuse off out")
    drafts = [
        flag for flag in ("draft_lm", "draft_ngram", "draft") if getattr(args, flag) is not None
    ]
    if len(drafts) > 1:
        names = ", ".join(f"--{flag.replace('_', '-')}" for flag in drafts)
        raise UserError(f"{names}: each is a draft; give one of them")
    if (args.target is None) != (not drafts) and drafts in ([], ["draft"]):
        given, missing = ("--target", "--draft") if args.draft is None else ("--draft", "--target")
        raise UserError(
            f"{given} without {missing}: a draft serves the one target it was trained for; give "
            "both, or neither for the reference pair"
        )
    if args.overwrite and args.output_dir is None:
        raise UserError("--overwrite needs the --output-dir whose run it shall delete")
    sample = None if (begin, end) != (None, None) else SAMPLE
    acceptors = tuple(args.acceptor)
    if len(set(acceptors)) != len(acceptors):
        raise UserError(f"--acceptor {' '.join(acceptors)}: the same rule twice")
    arms, notes = _arms(args.arms, [rule for rule in acceptors if rule != EXACT])
    if ASSISTED in arms and args.draft_lm is None and args.sd_lm is None:
        raise UserError(
            f"--arms {ASSISTED}: transformers' assisted decoding needs --draft-lm or --sd-lm"
        )
    if args.batch_size > 1:
        arms = _batched(arms, args)
    return EvalOptions(
        target=args.target,
        draft=args.draft,
        draft_lm=args.draft_lm,
        draft_ngram=args.draft_ngram,
        **_chains(args),
        dtype=None if args.dtype is None else DTYPES[args.dtype],
        attn_implementation=args.attn_implementation,
        device_map=args.device_map,
        threads=args.threads,
        fuse=cli.switch(args.fuse),
        compile=args.compile,
        **_tree(args),
        trees=_trees(args),
        tree_budget=args.tree_budget,
        acceptors=acceptors,
        acceptor_options=_acceptor_options(args),
        seeds=_seeds(args),
        arms=arms,
        max_new_tokens=args.max_new_tokens,
        sampling=_sampling(args),
        controls=args.controls,
        system_prompt=args.system_prompt,
        thinking=cli.switch(args.thinking),
        questions=args.questions,
        limit=getattr(args, "limit", sample),
        begin=begin,
        end=end,
        batch_size=args.batch_size,
        repeats=args.repeats,
        warmup=args.warmup,
        output_dir=args.output_dir,
        overwrite=args.overwrite,
        notes=notes,
    )


def _batched(arms: tuple[str, ...], args: argparse.Namespace) -> tuple[str, ...]:
    """The arms that answer in batches: those of transformers do not."""
    theirs = [arm for arm in (HF, LOOKUP, ASSISTED) if arm in (args.arms or ())]
    if theirs:
        raise UserError(
            f"--batch-size {args.batch_size}: {' and '.join(theirs)} of --arms answer one prompt "
            "at a time; leave them out"
        )
    return tuple(arm for arm in arms if arm != HF)


def _tree(args: argparse.Namespace) -> dict[str, Any]:
    if args.chain and args.top_k not in (None, 1):
        raise UserError(f"--chain drafts with top-k 1; --top-k {args.top_k} needs --tree")
    return {
        "chain": args.chain,
        "total_token": args.total_token,
        "depth": args.depth,
        "top_k": 1 if args.chain else args.top_k,
    }


def _chains(args: argparse.Namespace) -> dict[str, Any]:
    """The second drafter, a language model, and its rules."""
    if args.sd_lm is None:
        for flag in ("sd_acceptor", "sd_length"):
            if getattr(args, flag) is not None:
                name = flag.replace("_", "-")
                raise UserError(f"--{name} is about the chains of --sd-lm MODEL: give that too")
        return {"sd_lm": None, "sd_acceptors": (), "sd_length": SD_LENGTH}
    for flag in ("draft_lm", "trees"):
        if getattr(args, flag):
            raise UserError(
                f"--sd-lm and --{flag.replace('_', '-')}: speculative decoding stands beside the "
                "arms of a draft of its own; leave one of them out"
            )
    rules = (SD_ACCEPTOR,) if args.sd_acceptor is None else tuple(args.sd_acceptor)
    if len(set(rules)) != len(rules):
        raise UserError(f"--sd-acceptor {' '.join(rules)}: the same rule twice")
    return {
        "sd_lm": args.sd_lm,
        "sd_acceptors": tuple(rule for rule in rules if rule != EXACT),
        "sd_length": args.sd_length or SD_LENGTH,
    }


def _trees(args: argparse.Namespace) -> tuple[tuple[int, int, int] | str, ...]:
    trees = tuple(args.trees or ())
    single = ("chain", "total_token", "depth", "top_k", "tree_budget")
    given = [f"--{name.replace('_', '-')}" for name in single if getattr(args, name)]
    if trees and (given or args.acceptor != [EXACT]):
        also = ", ".join(given) or f"--acceptor {' '.join(args.acceptor)}"
        raise UserError(f"--trees compares trees under exact acceptance and goes without {also}")
    if len(set(trees)) != len(trees):
        raise UserError("--trees: the same tree twice")
    return trees


def _acceptor_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {flag: getattr(args, flag) for flag in RULE_FLAGS if getattr(args, flag) is not None}
    if args.acceptor == [EXACT] and (given or args.seeds):
        names = ", ".join(f"--{flag.replace('_', '-')}" for flag in [*given, *_seed_flag(args)])
        raise UserError(f"{names}: the exact acceptor has no such option; add --acceptor naive")
    if args.head_agreement is not None and args.p_drop not in (None, "auto"):
        raise UserError(
            f"--head-agreement solves for the dropout probability, --p-drop {args.p_drop} sets it: "
            "give one of them"
        )
    return {RULE_FLAGS[flag]: value for flag, value in given.items()}


def _seed_flag(args: argparse.Namespace) -> list[str]:
    return ["seeds"] if args.seeds else []


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    if args.temperature == 0:
        for name in ("sampling_top_k", "sampling_top_p"):
            if getattr(args, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} without --temperature: greedy decoding samples "
                    "nothing"
                )
        return {}
    return {
        "do_sample": True,
        "temperature": args.temperature,
        "top_k": args.sampling_top_k or 0,
        "top_p": 1.0 if args.sampling_top_p is None else args.sampling_top_p,
    }


def _seeds(args: argparse.Namespace) -> tuple[int, ...]:
    seeds = tuple(args.seeds or ())
    if len(set(seeds)) != len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))}: the same seed twice")
    return seeds


def _arms(
    chosen: Sequence[str] | None, rules: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arms in order, and notes. exact joins every other rule, which is judged against it."""
    known = [PLAIN, HF, LOOKUP, ASSISTED, EXACT, *rules]
    if chosen is None:
        return tuple(arm for arm in known if arm not in (LOOKUP, ASSISTED)), ()
    unknown = [arm for arm in chosen if arm not in known]
    if unknown:
        raise UserError(
            f"--arms {' '.join(unknown)}: with --acceptor {' '.join(rules) or EXACT} there are "
            f"{', '.join(known)}"
        )
    arms = [arm for arm in known if arm in chosen]
    left_out = [rule for rule in rules if rule not in arms]
    if left_out:
        raise UserError(f"--arms leaves out {', '.join(left_out)}, which --acceptor asks for")
    if rules and EXACT not in arms:
        arms.insert(arms.index(rules[0]), EXACT)
        told = f"the exact arm runs as well: {', '.join(rules)} is judged against it"
        return tuple(arms), (told,)
    return tuple(arms), ()
