#!/usr/bin/env python
"""Write the numbers of run folders into the texts that tell them, between their markers.

A text marks what it takes from a run, and this puts there what the run's records say:

  <!-- mtbench-default: table -->            the run's table, up to a line <!-- end -->;
                                             "costs" instead: what each rule gains and costs
  <!-- =komtbench naive tau_ratio -->...<!-- -->   a number, of a row of the run's table

  python scripts/update_readme.py            README.md and results/README.md
  python scripts/update_readme.py --check    changes nothing; fails where a text says otherwise
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.statistics import require_scipy
from eagle_dropmatch.files import write_text
from eagle_dropmatch.reports.marked_text import refreshed
from eagle_dropmatch.reports.quantities import QUANTITIES
from eagle_dropmatch.reports.stored_run import StoredRun, read_run

TEXTS = (Path("README.md"), Path("results/README.md"))
EXIT_DIFFERENT = 1


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=f"{__doc__}\nquantities: {', '.join(QUANTITIES)}\n")
    parser.add_argument("texts", type=Path, nargs="*", metavar="TEXT", default=list(TEXTS))
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        help="the folder of the runs that markers name (default %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="only say what would change")
    args = parser.parse_args(argv)
    require_scipy()

    @cache
    def source(folder: str) -> StoredRun:
        return read_run(args.results / folder)

    # All texts are read and worked out before the first one is written.
    updates = []
    for path in args.texts:
        try:
            updates.append(
                (path, *refreshed(path.read_text(encoding="utf-8"), source, args.results))
            )
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
        except UserError as error:
            raise UserError(f"{path}, {error}") from None
    for path, text, changes in updates:
        for change in changes:
            told = "" if "\n" in change.new else f": {change.old!r} is now {change.new!r}"
            print(f"{path}, line {change.line}, {change.marker}{told}")
        if changes and not args.check:
            write_text(path, text)
    different = any(changes for _, _, changes in updates)
    if args.check and different:
        print(
            "run `python scripts/update_readme.py` to take over what the runs say", file=sys.stderr
        )
        return EXIT_DIFFERENT
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_command(main))
