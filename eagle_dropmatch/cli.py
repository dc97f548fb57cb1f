"""What all scripts share: arguments that explain themselves, and errors of one line.

A user's mistake ends a script with one line on stderr and exit code 2, an interrupt with 130.
Nothing here imports torch: bad input is refused before anything heavy is loaded.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from .errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong argument is a UserError: one line, without the usage text before it.

    Abbreviated flags are refused: ``--total`` would silently change its meaning as flags are added.

    Args:
        replacing: a flag that is added again takes the place of the earlier one, which otherwise is
            a mistake.
    """

    def __init__(self, description: str, *, replacing: bool = False) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            conflict_handler="resolve" if replacing else "error",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a script's ``main`` and turn the two expected ways of failing into exit codes."""
    silence_warnings()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def silence_warnings() -> None:
    """Keep the libraries' warnings off the user's screen. Call before importing them."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def silence_transformers() -> None:
    """Switch off its log and its loading bars; imports transformers, so call it late."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def one_line(message: str) -> str:
    return " ".join(message.split())


def integer(at_least: int, what: str = "") -> Callable[[str], int]:
    """An argument type: an integer not below ``at_least``; ``what`` explains the limit."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < at_least:
            reason = f" ({what})" if what else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not an integer of at least {at_least}{reason}"
            )
        return value

    return parse


def tree_shape(text: str) -> tuple[int, int, int] | str:
    """total-token/depth/top-k, as 24/5/6, or "auto"."""
    if text == "auto":
        return text
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither total-token/depth/top-k, as 24/5/6, nor auto"
        )
    nodes, depth, top_k = (int(part) for part in parts)
    if nodes < 1 or top_k < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: total-token and top-k are at least 1")
    return nodes, depth, top_k


def switch(text: str | None) -> bool | None:
    """What a flag of the choices on and off says; None where it was not given."""
    return None if text is None else text == "on"


def limit(text: str) -> int | None:
    """A number of questions of at least 1, or "all", which is None."""
    if text == "all":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor all")
    return value


def drop_probability(text: str) -> float | str:
    """A number in [0, 1), or "auto"."""
    if text == "auto":
        return text
    value = _number(text)
    if value is None or not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number in [0, 1) nor auto")
    return value


def share(text: str) -> float:
    """A number in (0, 1]."""
    value = _number(text)
    if value is None or not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in (0, 1]")
    return value


def positive(text: str) -> float:
    """A finite number above zero."""
    value = _number(text)
    if value is None or not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def temperature(text: str) -> float:
    """A finite number of at least 0, which is greedy."""
    value = _number(text)
    if value is None or not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature: expected 0 or more")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
