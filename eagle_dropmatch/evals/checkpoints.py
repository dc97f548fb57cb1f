"""What can be said about a target and a draft without loading either."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..assets import REFERENCE, draft_lm_source
from ..errors import UserError

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
HASHED_BYTES = 256 * 2**20
"""Weights up to this size are hashed for the run's header; of larger ones the size is recorded."""


def check_models(target: str | None, draft: str | None, flag: str = "--target") -> None:
    """UserError for a path that is no checkpoint, and for a draft of another target's width.

    Hub ids pass: whether they exist is known when they are fetched.
    """
    configs = [
        None if source is None else read_config(source, name)
        for source, name in ((target, flag), (draft, "--draft"))
    ]
    if configs[0] is None or configs[1] is None:
        return
    width = _width(configs[0])
    wanted = configs[1].get("target_hidden_size", _width(configs[1]))
    if width is not None and wanted is not None and width != wanted:
        raise UserError(
            f"--draft {draft} was trained for a target with hidden_size {wanted}, but --target "
            f"{target} has {width}: give the draft of this target"
        )


def check_draft_lm(source: str | None, target: str | None, flag: str) -> None:
    """The same for a small language model: a path, a hub id, or the reference target's own."""
    if source != REFERENCE:
        check_models(source, None, flag=flag)
    elif target is not None:
        raise UserError(
            f"{flag} {REFERENCE} is the small model of the reference target: give a model with the "
            "tokenizer of --target"
        )


def describe_draft_lm(source: str) -> dict[str, Any]:
    """``describe_source`` of a small language model, under the name that was given."""
    return {**describe_source(draft_lm_source(source)), "name": source}


def read_config(source: str, flag: str) -> dict[str, Any] | None:
    """config.json of a local checkpoint, or None for a hub id. UserError for anything else."""
    folder = Path(source).expanduser()
    if not folder.exists():
        if _looks_like_hub_id(source):
            return None
        raise UserError(f"{flag} {source}: no such folder, and not a hub id (owner/name)")
    if not folder.is_dir():
        raise UserError(f"{flag} {source} is a file; give the folder of a checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{flag} {source} is no checkpoint: it has no config.json")
    if not any(found for pattern in WEIGHTS for found in folder.glob(pattern)):
        raise UserError(
            f"{flag} {source} is no checkpoint: it has no weights ({', '.join(WEIGHTS)})"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object")
    return config


def describe_source(source: str | Path) -> dict[str, Any]:
    """Identifies a checkpoint in a run's header: its name, and for a folder its content."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return {"name": str(source)}
    weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    small = sum(path.stat().st_size for path in weights) <= HASHED_BYTES
    return {
        "name": str(source),
        "config_sha256": _sha256(folder / "config.json"),
        "weights": {
            path.name: _sha256(path) if small else f"{path.stat().st_size} bytes"
            for path in weights
        },
    }


def _width(config: Mapping[str, Any]) -> int | None:
    """hidden_size, also where a multi-modal or a speculators config nests it."""
    nests = ("text_config", "transformer_layer_config")
    for part in (config, *(config.get(name) or {} for name in nests)):
        if isinstance(part.get("hidden_size"), int):
            return int(part["hidden_size"])
    return None


def _looks_like_hub_id(source: str) -> bool:
    """name or owner/name; anything that starts like a path or goes deeper is a path."""
    parts = source.split("/")
    return not source.startswith((".", "~", "/")) and len(parts) <= 2 and all(parts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
