#!/usr/bin/env python
"""Distil a small language model out of a target, to draft for it in speculative decoding.

It has some of the target's decoder layers between the target's own embedding and LM head, so the
tokenizer and the vocabulary are the target's, and learns the target's distribution after each
answer token of corpora of scripts/make_corpus.py. best/ holds the model with the highest simulated
tau on held-out answers, last/ the latest: transformers checkpoints with a model card, for
--draft-lm.

  python scripts/distil_draft_lm.py --data answers.jsonl published.jsonl --output-dir runs/small
  python scripts/eval_mtbench.py --draft-lm runs/small/best --chain --arms plain exact naive

The same command goes on with a run that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.training.train_arguments import add_distil_arguments, read_distil_spec
from eagle_dropmatch.training.train_job import run_training


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_distil_arguments(parser)
    return run_training(read_distil_spec(parser.parse_args(argv)), argv)


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
