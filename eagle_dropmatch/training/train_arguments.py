"""The flags of the training scripts and the run they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.arguments import DTYPES
from eagle_dropmatch.training.options import RunSpec, TrainOptions

_OPTIONS = TrainOptions()
#: Without float16: its gradients would need a scale that nothing here keeps.
_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype != "float16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of an EAGLE-3 draft's training run."""
    models = parser.add_argument_group("models and data")
    _add_models(models, "the target's last layer and head rows")
    _option(
        models,
        "--draft-vocab",
        cli.integer(1),
        None,
        "N",
        f"tokens of the draft's vocabulary, the most frequent ones of the answers (default "
        f"{RunSpec.draft_vocab})",
    )
    _add_schedule(parser.add_argument_group("schedule"))
    _add_loss(parser.add_argument_group("training-time test"))
    machine = parser.add_argument_group("machine")
    _add_machine(machine)
    _option(
        machine,
        "--attention-block",
        cli.integer(0),
        0,
        "N",
        "rows that attend together, a matter of speed; 0: all on a GPU, "
        f"{_OPTIONS.attention_block} on CPUs",
    )


def add_distil_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a small language model's distillation."""
    models = parser.add_argument_group("models and data")
    _add_models(models, "layers of the target")
    _option(
        models,
        "--layers",
        cli.integer(1),
        4,
        "N",
        "decoder layers of the small model: the target's first and last, and some in between",
    )
    schedule = parser.add_argument_group("schedule")
    _add_schedule(schedule)
    _add_eval_steps(schedule)
    _add_machine(parser.add_argument_group("machine"))


def read_spec(args: argparse.Namespace) -> RunSpec:
    """The run that the flags describe; 0, auto and an empty target are settled later."""
    if args.init_draft is not None and args.draft_vocab is not None:
        raise UserError(
            "--draft-vocab was given with --init-draft, whose vocabulary is kept: give one of them"
        )
    return _read(args, draft_vocab=args.draft_vocab or RunSpec.draft_vocab)


def read_distil_spec(args: argparse.Namespace) -> RunSpec:
    """The distillation that the flags describe."""
    return _read(args, layers=args.layers)


def _read(args: argparse.Namespace, **more: Any) -> RunSpec:
    given = {name: getattr(args, name, None) for name in (f.name for f in fields(TrainOptions))}
    options = {name: value for name, value in given.items() if value is not None}
    return RunSpec(
        target=args.target or "",
        data=tuple(args.data),
        out=args.output_dir,
        options=TrainOptions(**options),
        max_length=args.max_length,
        init_draft=args.init_draft,
        workers=args.workers,
        threads=args.threads,
        dtype=_DTYPES.get(args.dtype, "auto"),
        device=args.device,
        base_model=args.base_model,
        attn_implementation=args.attn_implementation,
        compile=args.compile,
        **more,
    )


def _add_models(group: argparse._ArgumentGroup, start: str) -> None:
    group.add_argument(
        "--target",
        metavar="MODEL",
        help="folder or hub id of the model to draft for (default: the reference target)",
    )
    group.add_argument(
        "--base-model",
        metavar="NAME",
        help="the target's public name for the draft's model card "
        "(default: the hub id or the folder's name)",
    )
    group.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="corpora of scripts/make_corpus.py, used together",
    )
    group.add_argument(
        "--output-dir",
        required=True,
        metavar="DIR",
        help="best/ and last/ drafts, checkpoint, log and curves; a run that was stopped there "
        "goes on",
    )
    group.add_argument(
        "--init-draft",
        metavar="DRAFT",
        help=f"start from a draft of an earlier run (default: from {start})",
    )
    _option(
        group,
        "--max-length",
        cli.integer(8),
        RunSpec.max_length,
        "N",
        "tokens; longer examples are cut into windows of so many",
    )
    _option(
        group,
        "--held-out",
        cli.integer(1),
        _OPTIONS.held_out,
        "N",
        "answers kept from training to measure tau on",
    )


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    _option(
        group,
        "--steps",
        cli.integer(1),
        _OPTIONS.steps,
        "N",
        "optimizer steps in all; may be raised when a run is resumed",
    )
    _option(
        group,
        "--positions",
        cli.integer(1),
        _OPTIONS.positions,
        "N",
        "padded token positions a step, all workers together",
    )
    _option(
        group, "--learning-rate", cli.positive, _OPTIONS.learning_rate, "LR", "peak of AdamW's rate"
    )
    _option(
        group, "--warmup", cli.integer(0), _OPTIONS.warmup, "N", "steps of the rate's linear rise"
    )
    _option(
        group,
        "--decay-steps",
        cli.integer(0),
        _OPTIONS.decay_steps,
        "N",
        "steps of its linear fall to a twentieth, at the end of the run",
    )
    _option(group, "--clip", cli.positive, _OPTIONS.clip, "NORM", "largest gradient norm")
    _option(group, "--seed", cli.integer(0), _OPTIONS.seed, "SEED", "of the data's order")
    _option(
        group,
        "--eval-every",
        cli.integer(1),
        _OPTIONS.eval_every,
        "N",
        "steps between measurements of tau, each of which writes the drafts",
    )
    _option(
        group, "--save-every", cli.integer(1), _OPTIONS.save_every, "N", "steps between checkpoints"
    )


def _add_loss(group: argparse._ArgumentGroup) -> None:
    _option(
        group,
        "--ttt-steps",
        cli.integer(1),
        _OPTIONS.ttt_steps,
        "N",
        "steps in which the draft goes on from its own outputs; costs about as many forwards",
    )
    _option(
        group,
        "--ttt-start",
        cli.integer(1),
        _OPTIONS.ttt_start,
        "N",
        "such steps before --ttt-full-at",
    )
    _option(
        group,
        "--ttt-full-at",
        cli.integer(0),
        _OPTIONS.ttt_full_at,
        "STEP",
        "optimizer step from which all --ttt-steps run",
    )
    _option(
        group,
        "--ttt-decay",
        cli.share,
        _OPTIONS.ttt_decay,
        "W",
        "weight of each further step against the one before, in (0, 1]",
    )
    _add_eval_steps(group)


def _add_eval_steps(group: argparse._ArgumentGroup) -> None:
    _option(
        group,
        "--eval-steps",
        cli.integer(1),
        _OPTIONS.eval_steps,
        "N",
        "length of the chains that tau is measured with, in tokens",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--attn-implementation",
        choices=("sdpa", "eager", "flash_attention_2"),
        metavar="NAME",
        help="attention of the frozen target, which reads whole sequences here and no trees: sdpa, "
        "eager or flash_attention_2 (default: what transformers chooses)",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="fuse small operations with torch.compile: half a minute at the start (and a C++ "
        "compiler on CPUs), then about 1.4 times as many positions a second on two cores",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where torch sees a GPU (default)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        metavar="DTYPE",
        help="float32 or bfloat16, of both networks' arithmetic; the weights' master copy is "
        "float32. auto: bfloat16 on GPUs and on CPUs that multiply it, else float32 (default)",
    )
    _option(
        group,
        "--workers",
        cli.integer(0),
        0,
        "N",
        "processes that share each step's examples; 0: one a GPU, or one a CPU core, at most 8",
    )
    _option(
        group, "--threads", cli.integer(0), 0, "N", "CPU threads a worker; 0: the cores, shared out"
    )


def _option(
    group: argparse._ArgumentGroup,
    flag: str,
    kind: Callable[[str], Any],
    default: Any,
    metavar: str,
    text: str,
) -> None:
    shown = "" if default is None else f" (default {default})"
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)
