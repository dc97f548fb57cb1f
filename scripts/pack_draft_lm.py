#!/usr/bin/env python
"""Keep of a distilled language model what its target does not have, a byte a number.

  python scripts/pack_draft_lm.py runs/small/best packed

This is how the reference target's small model is shipped (eagle_dropmatch/assets).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_dropmatch import cli
from eagle_dropmatch.evals.checkpoints import check_models
from eagle_dropmatch.files import check_writable


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=str(__doc__))
    parser.add_argument("source", metavar="MODEL", help="best/ or last/ of distil_draft_lm.py")
    parser.add_argument("output", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    check_models(args.source, None, flag="the model")
    check_writable(args.output)

    from eagle_dropmatch.training.packed_lm import pack

    cli.silence_transformers()
    size = pack(Path(args.source), args.output)
    print(f"{args.output}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
