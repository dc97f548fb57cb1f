"""A pair's forwards as machine code for this processor: compiled once, kept, loaded in a second.

torch's inductor fuses the small operations of a layer into the products around them and packs the
weights, ahead of time and for all sizes at once: batch, tokens and context are dimensions that a
call brings along. What comes out is a file in the cache folder, under a name made of everything it
hangs on: weights, threads, processor and versions. It takes minutes to make and needs a C++
compiler.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_dropmatch import fused as fused_module
from eagle_dropmatch.assets import cache_dir
from eagle_dropmatch.cache import TreeCache
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.files import check_writable
from eagle_dropmatch.fused import FusedDecoder, fused, signed_turns, stacked
from eagle_dropmatch.machine import device_name
from eagle_dropmatch.native import compiler_failed, require_compiler
from eagle_dropmatch.taps import attention_sizes

# A forward of no special size, by which kernels are chosen: no two sizes alike, none of them 1.
_BATCH, _TOKENS, _CONTEXT, _CAPACITY = 2, 20, 280, 320

_SETTINGS = {
    "freezing": True,  # weights are constants, so that they can be packed
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
}

Run = Callable[..., tuple[Tensor, ...]]


class CompiledBody:
    """A target's decoder without embedding and LM head.

    Args:
        decoder: transformers' decoder, all of whose layers ``fused.py`` recognises.
        taps: ``hidden_states`` indices that the draft reads, or None.

    Raises:
        UserError: for other decoders, and where there is no C++ compiler.
    """

    def __init__(self, decoder: Any, taps: Sequence[int] | None) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        config = decoder.config
        heads, kv_heads, size = attention_sizes(config)
        weight, self._group = decoder.norm.weight, heads // kv_heads

        def build() -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
            twin = fused(decoder, stacked)
            if type(twin) is not FusedDecoder:
                raise UserError(
                    f"compile: {type(decoder).__name__} is not laid out like Llama's decoder, the "
                    "only kind that can be compiled: leave the option out"
                )
            made = functools.partial(torch.zeros, dtype=weight.dtype)
            example = (
                made(_BATCH, _TOKENS, config.hidden_size),
                made(_BATCH, _TOKENS, 1, size),
                made(_BATCH, _TOKENS, 1, size),
                made(_BATCH, 1, self._group * _TOKENS, _CONTEXT),
                torch.zeros(_BATCH, _TOKENS, dtype=torch.int64),
                [made(_BATCH, kv_heads, _CAPACITY, size) for _ in range(2 * len(twin.layers))],
            )
            free = torch.export.Dim.DYNAMIC
            kept = {0: free, 2: free}
            sizes = ({0: free, 1: free},) * 3
            whole = (*sizes, {0: free, 2: free, 3: free}, sizes[0], [kept] * len(example[5]))
            return _Body(twin, taps), example, whole

        about = {"config": config.to_json_string(), "taps": taps and list(taps)}
        told = f"the model of {config.num_hidden_layers} layers"
        self._run = _ahead_of_time("target", told, about, decoder, build)

    def __call__(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: TreeCache
    ) -> tuple[Tensor, Tensor]:
        """The LM head's input and the features of tokens [B, S] behind an open cache."""
        x = self._embed(tokens)
        cos, sin = signed_turns(*self._rotary(x, position_ids=positions))
        folded = mask.repeat(1, 1, self._group, 1)
        given = [each.contiguous() for each in (x, cos, sin, folded)]
        slots = cache.slots(tokens.shape[1])
        hidden, *taps = self._run(*given, slots, cache.stores(x.device))
        return hidden, taps[0] if taps else hidden


class CompiledNetwork:
    """An EAGLE-3 draft's layer and final norm, over a cache of one layer.

    Args:
        draft: an ``Eagle3Draft`` as it was read, before it is packed.
    """

    def __init__(self, draft: Any) -> None:
        config = draft.config
        self._rotary = draft.rotary

        def build() -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
            network = _Network(draft)
            made = functools.partial(torch.zeros, dtype=draft.dtype)
            states = made(_BATCH, _TOKENS, config.hidden_size)
            turns = made(_BATCH, 1, _TOKENS, config.head_dim)
            kept = made(_BATCH, config.num_key_value_heads, _CAPACITY, config.head_dim)
            free = torch.export.Dim.DYNAMIC
            rows, later = {0: free, 1: free}, {0: free, 2: free}
            sizes = (rows, rows, later, later, {0: free, 1: free, 2: free}, rows, later, later)
            slots = torch.zeros(_BATCH, _TOKENS, dtype=torch.int64)
            mask = made(_BATCH, _TOKENS, _CONTEXT)
            given = (states, states + 0, turns, turns + 0, mask, slots, kept, kept + 0)
            return network, given, sizes

        self._run = _ahead_of_time("draft", "the draft", {"config": repr(config)}, draft, build)

    def __call__(
        self, embeds: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: TreeCache
    ) -> tuple[Tensor, Tensor]:
        """The output features and the LM head's input of slots [B, S] behind an open cache.

        mask: [B, S, keys], additive.
        """
        cos, sin = (each[:, None] for each in self._rotary.cos_sin(positions, embeds.dtype))
        given = [each.contiguous() for each in (embeds, features, cos, sin, mask)]
        slots = cache.slots(embeds.shape[1])
        feature, head_input = self._run(*given, slots, *cache.stores(embeds.device))
        return feature, head_input


class _Body(nn.Module):
    """What is compiled of a target."""

    def __init__(self, decoder: FusedDecoder, taps: Sequence[int] | None) -> None:
        super().__init__()
        self.layers, self.norm = decoder.layers, decoder.norm
        self.taps = taps

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        slots: Tensor,
        stores: list[Tensor],
    ) -> tuple[Tensor, ...]:
        cache = _Slots(slots, stores, mask.shape[-1])
        passed = [x]
        for layer in self.layers:
            passed.append(layer(passed[-1], attention_mask=mask, cache=cache, turns=(cos, sin)))
        hidden = self.norm(passed[-1])
        if self.taps is None:
            return (hidden,)
        return hidden, torch.cat([passed[index] for index in self.taps], dim=-1)


class _Network(nn.Module):
    """What is compiled of a draft."""

    def __init__(self, draft: Any) -> None:
        super().__init__()
        twin = copy.deepcopy(draft)
        twin.pack(stacked)
        self.layer, self.norm = twin.midlayer, twin.norm
        self.norm_output = draft.config.norm_output

    def forward(
        self,
        embeds: Tensor,
        features: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from eagle_dropmatch.drafts.eagle3 import grouped_attention

        cache = _Slots(slots, [keys, values], mask.shape[-1])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouped_attention(q, *cache.update(k, v, 0), mask)

        out = self.layer(embeds, features, cos, sin, attend)
        normed = self.norm(out)
        return (normed.clone() if self.norm_output else out), normed


class _Slots:
    """A cache as compiled code has it: the keys and values of each layer in turn."""

    def __init__(self, slots: Tensor, stores: list[Tensor], seen: int) -> None:
        self._slots, self._stores, self._seen = slots, stores, seen
        self._rows = torch.arange(slots.shape[0], device=slots.device)[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        kept_keys, kept_values = self._stores[2 * layer : 2 * layer + 2]
        kept_keys[self._rows, :, self._slots] = keys.transpose(1, 2)
        kept_values[self._rows, :, self._slots] = values.transpose(1, 2)
        return kept_keys[:, :, : self._seen], kept_values[:, :, : self._seen]


def _ahead_of_time(
    what: str,
    told: str,
    about: dict[str, Any],
    weights: nn.Module,
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]],
) -> Run:
    """The compiled module: read from the cache folder, or made and kept there.

    what, told: its name in files and in messages.
    """
    about = {
        **about,
        "weights": _digest([*weights.parameters(), *weights.buffers()]),
        "dtype": str(next(weights.parameters()).dtype),
        "threads": torch.get_num_threads(),
        "processor": [device_name(torch.device("cpu")), torch.backends.cpu.get_cpu_capability()],
        "torch": torch.__version__,
        "settings": _SETTINGS,
        "code": _code_digest(),
    }
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "compiled" / f"{what}-{name}.pt2"
    loaded: Any = None
    if path.exists():
        try:
            loaded = torch._inductor.aoti_load_package(str(path))
        except (OSError, RuntimeError):  # damaged, or of another C library: made again
            path.unlink(missing_ok=True)
    if loaded is None:
        require_compiler()
        check_writable(path.parent)
        print(f"compiling {told}, once for this pair and machine, into {path}", file=sys.stderr)
        began = time.perf_counter()
        _make(path, *build())
        took = time.perf_counter() - began
        print(f"compiled {told} in {took:.0f} seconds", file=sys.stderr, flush=True)
        loaded = torch._inductor.aoti_load_package(str(path))
    return lambda *given: tuple(loaded(*given))


def _make(path: Path, module: nn.Module, example: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
    """Compile a module into a file that is whole or not there."""
    from torch._inductor.exc import CppCompileError

    for parameter in module.parameters():
        parameter.requires_grad_(False)
    handle, part = tempfile.mkstemp(suffix=".pt2", dir=path.parent)
    os.close(handle)
    try:
        with _quiet(), torch.no_grad(), torch.inference_mode(False):
            program = torch.export.export(module.eval(), example, dynamic_shapes=sizes)
            torch._inductor.aoti_compile_and_package(
                program, package_path=part, inductor_configs=dict(_SETTINGS)
            )
        os.replace(part, path)
    except CppCompileError as error:
        raise compiler_failed(error) from error
    finally:
        Path(part).unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without inductor's tables of what it tried, and without its warnings."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _digest(tensors: Iterable[Tensor]) -> str:
    """A name for numbers; half a second for a quarter of a gigabyte."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(str((tuple(each.shape), each.dtype)).encode())
        found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _code_digest() -> str:
    """A name for the code that was compiled."""
    from eagle_dropmatch.drafts import eagle3

    sources = map(inspect.getsource, (fused_module, eagle3, sys.modules[__name__]))
    return hashlib.sha256("".join(sources).encode()).hexdigest()
