"""A training run from its checked flags to its last draft: the body of the training scripts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from eagle_dropmatch.assets import REFERENCE_TARGET_HUB_ID, reference_target
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training.checks import check
from eagle_dropmatch.training.options import RunSpec
from eagle_dropmatch.training.runlog import CURVES, LOG, read_log

# A decay of -1 is a little faster and keeps the memory of every shape for ever: over a few hundred
# steps two workers grew to 11 GB each and the machine stood still.
JEMALLOC_SETTINGS = "dirty_decay_ms:10000,muzzy_decay_ms:10000,oversize_threshold:0,narenas:2"

Train = Callable[[RunSpec], None]
"""Trains; tests put something quicker in its place."""


def run_training(spec: RunSpec, argv: Sequence[str], train: Train | None = None) -> int:
    """Check, say what will be done, train, say what came out; returns the exit code."""
    check(spec)
    if not spec.target:
        name = spec.base_model or REFERENCE_TARGET_HUB_ID
        spec = replace(spec, target=str(reference_target()), base_model=name)
    # Only now: what is refused above must not wait for torch.
    from eagle_dropmatch.training import launch

    spec = launch.settle(spec)
    _say(opening(spec))
    if spec.device == "cpu" and "jemalloc" not in os.environ.get("LD_PRELOAD", ""):
        _say(allocator_advice(argv, spec))
    (train or launch.train)(spec)
    print(result(Path(spec.out)))
    return 0


def opening(spec: RunSpec) -> str:
    """What a run will do, from its settled spec and its data."""
    from eagle_dropmatch.training.card import count_sources
    from eagle_dropmatch.training.launch import load_data

    examples = load_data(spec)
    if len(examples) <= spec.options.held_out:
        raise UserError(
            f"the data has {len(examples)} examples: more than {spec.options.held_out} are needed, "
            "since that many are held out (--held-out)"
        )
    steps = f"{spec.options.steps:,} steps of {spec.options.positions:,} padded positions"
    if spec.layers is None:
        what, start = "draft", "its last layer and head rows"
        steps += f", {spec.options.ttt_steps} steps of training-time test"
    else:
        what, start = f"language model of {spec.layers} layers", "layers of it"
    lines = [
        f"{what} for {spec.base_model or spec.target}, from {spec.init_draft or start}",
        *(
            f"data: {source}: {number:,} examples, {tokens:,} answer tokens"
            for source, number, tokens in count_sources(examples)
        ),
        f"{steps}; {spec.options.held_out} answers held out",
        f"{spec.workers} x {spec.device}, {spec.threads} threads each, {spec.dtype}; "
        f"into {spec.out}",
    ]
    return "\n".join(lines)


def allocator_advice(argv: Sequence[str], spec: RunSpec) -> str:
    """Fresh memory is what a training step waits for with the C library's own allocator."""
    script = "train_draft" if spec.layers is None else "distil_draft_lm"
    again = shlex.join(["python", f"scripts/{script}.py", *argv])
    return (
        "note: training on CPUs is about three times faster with jemalloc (Debian, Ubuntu: "
        "apt install libjemalloc2):\n"
        f"  LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF={JEMALLOC_SETTINGS} {again}"
    )


def result(out: Path) -> str:
    """Where the drafts of a finished run lie, and how good they are."""
    taus = [(row["tau"], row["step"]) for row in read_log(out) if "tau" in row]
    if not taus:
        return f"drafts: {out / 'best'}, {out / 'last'} (no tau: {out / LOG} is gone)"
    best, step = max(taus, key=lambda pair: (pair[0], -pair[1]))
    last, end = taus[-1]
    return "\n".join(
        (
            f"best draft: {out / 'best'} (simulated tau {best:.3f}, step {step})",
            f"last draft: {out / 'last'} (simulated tau {last:.3f}, step {end})",
            f"log: {out / LOG}, curves: {out / CURVES}",
        )
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
