#!/usr/bin/env python
"""Train an EAGLE-3 draft for a target by training-time test.

Without --target it is the reference target. The draft starts from the target's last layer and head
rows and learns from corpora of scripts/make_corpus.py; best/ holds the draft with the highest
simulated tau on held-out answers, last/ the latest, both with a model card.

  python scripts/train_draft.py --data answers.jsonl published.jsonl --output-dir runs/draft
  python scripts/train_draft.py --data answers.jsonl --output-dir runs/more \\
      --init-draft runs/draft/best --steps 2000
  python scripts/train_draft.py --target meta-llama/Llama-3.1-8B-Instruct --draft-vocab 32000 \\
      --data llama.jsonl --output-dir runs/llama --device cuda --positions 16384 --max-length 2048

The same command goes on with a run that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.training.train_arguments import add_arguments, read_spec
from eagle_dropmatch.training.train_job import run_training


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    return run_training(read_spec(parser.parse_args(argv)), argv)


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
