"""EAGLE-3 tree speculative decoding for any transformers language model, with DropMatch.

``SpeculativeDecoder`` is loaded when it is first touched, so that ``import eagle_dropmatch`` (and
``eagle_dropmatch.errors``, for a script that only checks its flags) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decoder import SpeculativeDecoder

__version__ = "0.1.0"
__all__ = ["SpeculativeDecoder", "__version__"]

_LAZY = {"SpeculativeDecoder": ".decoder"}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562) and keep it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
