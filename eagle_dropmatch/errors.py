"""The one error type that a user's mistake becomes."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message is one line: what was given, what was expected, what to do. Scripts print it to
    stderr and exit with code 2; library callers see an ordinary ``ValueError``.
    """
