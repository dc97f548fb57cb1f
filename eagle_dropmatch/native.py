"""C++ for this processor: the compiler, and files of the package built with it, kept and loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_dropmatch.assets import cache_dir
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.files import check_writable
from eagle_dropmatch.machine import device_name

_PACKAGE = Path(__file__).parent
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Behind torch's, which leave vectors to torch's own code generator.
_FLAGS = ("-O3", "-ftree-loop-vectorize", "-ffp-contract=fast")


def can_compile() -> bool:
    """Whether there is a C++ compiler, by the name that torch asks for."""
    from torch._inductor import config

    names: Any = config.cpp.cxx
    return any(shutil.which(name) for name in names if name)


def require_compiler() -> None:
    """UserError without one."""
    if not can_compile():
        raise UserError(
            "compile needs a C++ compiler and there is none: install g++ or clang++, or leave the "
            "option out"
        )


def compiler_failed(error: Exception) -> UserError:
    """What to raise where it does not take what it was given."""
    reason = str(error).strip().splitlines()[-1]
    return UserError(
        f"compile: the C++ compiler failed ({reason}): see to it, or leave the option out"
    )


def build_all() -> None:
    """Build what is not built yet of the package's C++, so that no answer has to wait for it.

    UserError where that does not work.
    """
    for source in sorted(_PACKAGE.rglob("*.cpp")):
        library(source)


@cache
def kernel(source: Path, dtype: torch.dtype) -> Any:
    """The function of a file, named as the file is, for tensors of a dtype; None for other dtypes.

    Built first if it must be. UserError where that does not work.
    """
    if dtype not in _DTYPES:
        return None
    return getattr(library(source), f"{source.stem}_{_DTYPES[dtype]}")


def numbers_and_places(*values: int | Tensor) -> list[Any]:
    """What a function gets: int64 as they are, and where the numbers of a contiguous tensor lie."""
    return [
        ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else ctypes.c_int64(each)
        for each in values
    ]


def record(
    kind: type[ctypes.Structure], tensors: Mapping[str, Tensor | None], **numbers: float
) -> Any:
    """A structure of numbers and of places of tensors, which null stands for where there is none.

    Tensors that are not contiguous are copied; all of them live as long as the structure does.
    """
    held = {name: each.contiguous() for name, each in tensors.items() if each is not None}
    made: Any = kind(**numbers, **{name: each.data_ptr() for name, each in held.items()})
    made.held = held
    return made


@cache
def library(source: Path) -> ctypes.CDLL:
    """A C++ file as a library, built first where it must be, which takes seconds.

    With torch's own settings of compiler and threads. UserError where that does not work.
    """
    require_compiler()
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchOptions(vec_isa=pick_vec_isa(), extra_flags=_FLAGS)
    about = (
        *(each.read_text(encoding="utf-8") for each in (source, *sorted(_PACKAGE.rglob("*.h")))),
        CppBuilder(source.stem, source.name, options).get_command_line(),
        device_name(torch.device("cpu")),
    )
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    folder = cache_dir() / "compiled"
    path = folder / f"{source.stem}-{name}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or of another C library: made again
            path.unlink(missing_ok=True)
    check_writable(folder)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        builder = CppBuilder(source.stem, str(source), options, part)
        try:
            builder.build()
        except RuntimeError as error:
            raise compiler_failed(error) from error
        os.replace(builder.get_target_file_path(), path)
    return ctypes.CDLL(str(path))
