"""Tokens as text: whole characters for reading, and single tokens that show what they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MOST = 8  # tokens that may wait for the end of a character: broken text must not wait for ever


class Piece(NamedTuple):
    """Tokens that hold whole characters together."""

    start: int
    tokens: int
    text: str


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[Piece]:
    """The text of ``ids``, cut as finely as characters allow.

    A character outside ASCII may be spread over several byte-level tokens, none of which can be
    shown alone; what never becomes a character is shown as bytes. Each piece is decoded behind the
    one before, since some tokenizers drop a leading space.
    """
    found: list[Piece] = []
    before = start = 0
    for end in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[before:end])
        if text.endswith(UNFINISHED) and end < len(ids) and end - start < _MOST:
            continue
        text = text[len(_decode(tokenizer, ids[before:start])) :]
        if UNFINISHED in text:
            text = "".join(token_text(tokenizer, token) for token in ids[start:end])
        found.append(Piece(start, end - start, text))
        before, start = start, end
    return found


def token_text(tokenizer: Any, token: int) -> str:
    """One token by itself; the bytes of a part of a character as ⟨EC·9D⟩."""
    text = _decode(tokenizer, [token])
    if UNFINISHED not in text:
        return text
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if all(character in _byte_of() for character in piece):
        return f"⟨{'·'.join(f'{_byte_of()[character]:02X}' for character in piece)}⟩"
    return piece


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""


@cache
def _byte_of() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes.

    Printable bytes of Latin-1 stand for themselves, all others for the characters from 256 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {
        **{chr(byte): byte for byte in plain},
        **{chr(256 + place): byte for place, byte in enumerate(others)},
    }
