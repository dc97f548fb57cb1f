"""The files of a draft checkpoint: where they are, and what each stored tensor is called here."""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle_dropmatch.errors import UserError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
#: Weight files in the order they are looked for; an index names its shards.
_WEIGHT_FILES = (
    WEIGHTS_NAME,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_DOWNLOADED = [CONFIG_NAME, "*.safetensors", "*.bin", "*.index.json"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: Foreign spellings at the start of a name and the official ones, applied in this order.
_RENAMED_PREFIXES = (
    ("model.", ""),
    ("layers.0.", "midlayer."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
#: Stored by some writers and never part of the draft: tables that are computed here, and the
#: target's own head and norm, which speculators' trainer holds beside the draft.
_NOT_THE_DRAFTS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_(lm_head|norm)\.weight")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk."""

    file: Path
    name: str  # as stored
    shape: tuple[int, ...]


def resolve_folder(path: str | Path) -> Path:
    """The local folder of a draft: the folder itself, or a hub id's downloaded snapshot."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"draft {path} is a file: expected the folder that holds its {CONFIG_NAME}")
    if not _HUB_ID.fullmatch(str(path)):
        raise UserError(
            f"draft {path}: there is no such folder, and it is no hub id (owner/name) either"
        )
    try:
        return Path(snapshot_download(str(path), allow_patterns=_DOWNLOADED))
    # The hub client lets through the errors of whichever HTTP library it was built on.
    except Exception as error:
        raise UserError(
            f"draft {path}: there is no such folder, and the hub gave none ({_one_line(error)})"
        ) from error


def read_config_file(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a draft."""
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} is no draft checkpoint: it holds no {CONFIG_NAME}")
    return _read_json(folder / CONFIG_NAME)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, expected a JSON object")
    return content


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every stored tensor of the draft by its official name, without reading the values."""
    found: dict[str, StoredTensor] = {}
    for file, names in _weight_files(folder):
        stored = _list_file(file)
        absent = sorted(names - set(stored))
        if absent:
            raise UserError(f"{file} lacks {', '.join(absent)}, which the index says it holds")
        for name, tensor in stored.items():
            official = official_name(name)
            if _NOT_THE_DRAFTS.fullmatch(official):
                continue
            if official in found:
                raise UserError(
                    f"the draft stores one tensor twice, as {found[official].name} and {name}"
                )
            found[official] = tensor
    return found


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The values of ``stored``, on the CPU, in memory of their own."""
    by_file: dict[Path, dict[str, str]] = defaultdict(dict)
    for official, tensor in stored.items():
        by_file[tensor.file][official] = tensor.name
    values: dict[str, Tensor] = {}
    for file, names in by_file.items():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                values |= {official: opened.get_tensor(name) for official, name in names.items()}
        else:
            # A mapped file must not stay behind the weights: overwriting it would change them.
            loaded = _load_bin(file, "cpu")
            values |= {official: loaded[name].clone() for official, name in names.items()}
    return values


def official_name(name: str) -> str:
    """A stored name under the spelling of the official checkpoints."""
    for foreign, official in _RENAMED_PREFIXES:
        if name.startswith(foreign):
            name = official + name[len(foreign) :]
    return name


def _weight_files(folder: Path) -> list[tuple[Path, set[str]]]:
    """The weight files, each with the names that an index promises in it."""
    for candidate in _WEIGHT_FILES:
        file = folder / candidate
        if not file.is_file():
            continue
        if file.suffix != ".json":
            return [(file, set())]
        shards: dict[str, set[str]] = defaultdict(set)
        weight_map = _read_json(file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{file} names no shards: expected a weight_map")
        for name, shard in weight_map.items():
            shards[shard].add(name)
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        if absent:
            raise UserError(f"{file} names shards that are not there: {', '.join(absent)}")
        return [(folder / shard, names) for shard, names in sorted(shards.items())]
    raise UserError(
        f"{folder} is no draft checkpoint: it holds no {WEIGHTS_NAME} and no pytorch_model.bin "
        "(nor an index of shards)"
    )


def _list_file(file: Path) -> dict[str, StoredTensor]:
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as opened:
                return {
                    name: StoredTensor(file, name, tuple(opened.get_slice(name).get_shape()))
                    for name in opened.keys()  # noqa: SIM118 (no mapping)
                }
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {_one_line(error)}") from error
    return {
        name: StoredTensor(file, name, tuple(tensor.shape))
        for name, tensor in _load_bin(file, "meta").items()
    }


def _load_bin(file: Path, device: str) -> dict[str, Tensor]:
    try:
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        content = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    # Unpickling a foreign file can fail in any way.
    except Exception as error:
        raise UserError(
            f"{file} cannot be read: it is damaged, or holds more than tensors ({_one_line(error)})"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"{file} is no table of tensors: expected a state dict")
    return content


def _one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
