#!/usr/bin/env python
"""Make a corpus to train a draft on: the target answers prompts.

A draft learns best from what its target writes itself. Without any flag the reference target
answers the opening questions of ShareGPT's conversations, greedily and at temperature 0.7 in turns;
two idle CPU cores write about 700 tokens a second.

  python scripts/make_corpus.py --limit 2000 --output answers.jsonl
  python scripts/make_corpus.py --published --output published.jsonl
  python scripts/make_corpus.py --target meta-llama/Llama-3.1-8B-Instruct --prompts prompts.jsonl \\
      --turns 2 --max-new-tokens 1024 --dtype bfloat16 --device-map cuda:0

Answers are written a batch at a time: the same command goes on with a run that was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_dropmatch import cli
from eagle_dropmatch.training.corpus_job import make_corpus
from eagle_dropmatch.training.corpus_options import add_arguments, read_options


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    add_arguments(parser)
    return make_corpus(read_options(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
