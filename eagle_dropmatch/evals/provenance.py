"""The header of a run: what somebody needs to repeat it, or to refuse to compare it."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from .base import Question
from .options import EvalOptions

LISTED_IDS = 16
"""Up to so many questions are named above the table."""
REPOSITORY = Path(__file__).resolve().parents[2]


def run_arguments(
    benchmark: str, options: EvalOptions, questions: Sequence[Question]
) -> dict[str, Any]:
    """All that is known before a model is loaded and that changes what is recorded."""
    return {
        "benchmark": benchmark,
        "target": options.target,
        "draft": options.draft,
        "dtype": options.dtype,
        "attn_implementation": options.attn_implementation,
        "device_map": options.device_map,
        "threads": options.threads,
        "fuse": options.fuse,
        # Only where it is on: a run that began before the option was there can go on.
        **({"compile": True} if options.compile else {}),
        **({"draft_lm": options.draft_lm} if options.draft_lm is not None else {}),
        **({"draft_ngram": options.draft_ngram} if options.draft_ngram is not None else {}),
        **(
            {"sd": [options.sd_lm, options.sd_acceptors, options.sd_length]}
            if options.sd_lm is not None
            else {}
        ),
        **({"batch_size": options.batch_size} if options.batch_size > 1 else {}),
        "tree": {
            "shape": "chain" if options.chain else "tree",
            "total_token": options.total_token,
            "depth": options.depth,
            "top_k": options.top_k,
        },
        "trees": options.trees,
        "tree_budget": options.tree_budget,
        "acceptors": options.acceptors,
        "acceptor_options": dict(options.acceptor_options),
        "seeds": options.seeds,
        "controls": options.controls,
        "arms": options.arms,
        "max_new_tokens": options.max_new_tokens,
        "sampling": dict(options.sampling),
        "system_prompt_sha256": _text_hash(options.system_prompt),
        "enable_thinking": options.thinking,
        "question_ids": [question.question_id for question in questions],
        "questions_sha256": _text_hash(
            json.dumps([[q.question_id, q.turns] for q in questions], ensure_ascii=False)
        ),
        "repeats": options.repeats,
        "warmup": options.warmup,
        "versions": versions(),
    }


def session(argv: Sequence[str]) -> dict[str, Any]:
    """One start of the program: a run that was killed and went on has several."""
    return {"started": time.time(), "arguments": list(argv), "commit": commit()}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "eagle_dropmatch": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit of a checkout, with "+changes" if files differ from it; None elsewhere."""
    if not (REPOSITORY / ".git").exists():
        return None
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def header_lines(header: Mapping[str, Any], groups: Mapping[str, str]) -> list[str]:
    """What stands above the table, from the header as it was written.

    ``groups``: by the name of an arm, the rule that it is one seed of.
    """
    arguments, resolved = header["arguments"], header["resolved"]
    tree = resolved["tree"]
    ids = arguments["question_ids"]
    listed = f" (a fixed sample: {', '.join(map(str, ids))})" if len(ids) <= LISTED_IDS else ""
    return [
        f"{arguments['benchmark']}: {len(ids)} of {header['benchmark_questions']} questions"
        f"{listed}, {header['turns']} turns, at most {arguments['max_new_tokens']} new tokens "
        "a turn",
        f"{describe_sampling(arguments['sampling'])}, batch {arguments.get('batch_size', 1)}, "
        "PyTorch loop, all arms in one process and in turn, "
        f"{arguments['warmup']} untimed answer(s) each before",
        f"target {resolved['target']['name']}; draft {resolved['draft']['name']}"
        + _chains(arguments.get("sd")),
        f"{resolved['dtype']} on {resolved['device']}, {resolved['threads']} threads, attention "
        f"{resolved['attention']}, {resolved['modules']} modules, torch "
        f"{arguments['versions']['torch']}, transformers {arguments['versions']['transformers']}",
        describe_tree(tree, arguments["trees"]),
        *_rules(resolved["acceptors"], groups),
    ]


def describe_tree(tree: Mapping[str, int], several: Sequence[Any] = ()) -> str:
    if several:
        return (
            "trees: nodes with the root / EAGLE's --depth (draft levels - 1) / top-k; auto: of a "
            "size chosen at each step"
        )
    if tree["adaptive"]:
        return (
            f"trees: of a size chosen at each step, at most {tree['total_token']} nodes with the "
            f"root, {tree['depth'] + 1} draft levels, top-k {tree['top_k']}"
        )
    return (
        f"tree: {tree['total_token']} nodes with the root, {tree['depth'] + 1} draft levels "
        f"(EAGLE's --depth {tree['depth']}), top-k {tree['top_k']}"
    )


def _chains(sd: Sequence[Any] | None) -> str:
    return "" if sd is None else f"; SD: chains of {sd[2]} tokens of the model {sd[0]}"


def describe_sampling(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "greedy"
    told = f"sampled at temperature {settings['temperature']:g}"
    if settings["top_k"]:
        told += f", top-k {settings['top_k']}"
    return told + (f", top-p {settings['top_p']:g}" if settings["top_p"] < 1 else "")


def _rules(described: Mapping[str, Mapping[str, Any]], groups: Mapping[str, str]) -> list[str]:
    """Each rule's options: the same for all of its arms but for the seeds."""
    lines: dict[str, list[str]] = {}
    seeds: dict[str, list[str]] = {}
    for arm, options in described.items():
        name = groups[arm]
        lines[name] = [f"{key} {_short(value)}" for key, value in options.items() if key != "seed"]
        if "seed" in options:
            seeds.setdefault(name, []).append(str(options["seed"]))
    for name, drawn in seeds.items():
        lines[name].append(f"seed{'s' if len(drawn) > 1 else ''} {', '.join(drawn)}")
    return [f"{name}: {', '.join(told)}" for name, told in lines.items() if told]


def _short(value: Any) -> str:
    if isinstance(value, list):  # the parts of a composed rule
        return " & ".join(
            f"{each['rule']} ({', '.join(f'{k} {v}' for k, v in each.items() if k != 'rule')})"
            if isinstance(each, dict)
            else str(each)
            for each in value
        )
    return str(value)


def _text_hash(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *command],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
