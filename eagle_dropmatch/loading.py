"""Loading a pair of target and draft, the reference pair when nothing is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_dropmatch import native
from eagle_dropmatch.drafts.base import ADAPTIVE_TREE, Drafter, TreeShape
from eagle_dropmatch.drafts.checkpoint import load_draft, read_draft_config
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.drafts.model_drafter import ModelDrafter
from eagle_dropmatch.drafts.ngram_drafter import NGramDrafter
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.fused import can_fuse, should_fuse
from eagle_dropmatch.taps import default_tap_layers
from eagle_dropmatch.target import ATTENTION_BACKENDS, TargetModel, check_attention, probe

#: The reference pair's fastest tree on two CPU cores, by measurement (results/tree-search).
REFERENCE_TREE = TreeShape(total_token=20, depth=4, top_k=4)


@dataclass(frozen=True)
class Pair:
    """A target with everything that drafts for it."""

    target: TargetModel
    drafter: Callable[[TreeShape], Drafter]
    tokenizer: Any
    tree: TreeShape
    adaptive: bool


def load_pair(
    target: str | Path | None,
    draft: str | Path | None,
    *,
    draft_lm: str | Path | None,
    draft_ngram: int | None,
    shape: Mapping[str, int | None],
    dtype: torch.dtype | str | None,
    device_map: Any,
    attn_implementation: str | None,
    layer_ids: Sequence[int] | None,
    layer_id_convention: Any,
    rope_theta: float | None,
    fuse: bool | None,
    compile: bool,
    tree_budget: str | None,
) -> Pair:
    """Load both, checking what can be checked before weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from eagle_dropmatch.assets import (
        REFERENCE,
        reference_draft,
        reference_target,
    )

    others = [each for each in (draft_lm, draft_ngram) if each is not None]
    if len(others) + (draft is not None) > 1:
        raise UserError("several drafts were given: give one of draft, draft_lm and draft_ngram")
    if not others and (target is None) != (draft is None):
        raise UserError(
            "only one of target and draft was given: give both, or neither for the reference pair"
        )
    if draft_lm == REFERENCE and target is not None:
        raise UserError(
            f"draft_lm {REFERENCE!r} is the small model of the reference target: give none, or a "
            "model with the tokenizer of your target"
        )
    sized = any(value is not None for value in shape.values())
    if tree_budget not in (None, "auto", "fixed"):
        raise UserError(f"tree_budget {tree_budget!r}: expected auto or fixed")
    adaptive = not sized if tree_budget is None else tree_budget == "auto"
    fixed = REFERENCE_TREE if target is None and not others else TreeShape()
    defaults = ADAPTIVE_TREE if adaptive else fixed
    tree = TreeShape(**{k: getattr(defaults, k) if v is None else v for k, v in shape.items()})
    backend = attn_implementation or "sdpa"
    if backend not in ATTENTION_BACKENDS:
        raise UserError(
            f"attn_implementation {backend!r} cannot carry a tree mask: use "
            f"{' or '.join(ATTENTION_BACKENDS)}"
        )
    weights = _dtype(dtype, device_map)
    target = reference_target() if target is None else target
    draft = reference_draft() if draft is None and not others else draft
    text_config = _read(AutoConfig, target, "config").get_text_config()
    check_attention(text_config, backend)
    taps: Sequence[int] | None = None
    if draft is not None:
        description = read_draft_config(
            draft,
            target_config=text_config,
            layer_ids=layer_ids,
            layer_id_convention=layer_id_convention,
            rope_theta=rope_theta,
        )
        taps = description.config.tap_layers
        if taps is None and description.config.fuse_features:
            taps = default_tap_layers(text_config.num_hidden_layers)
    tokenizer = _read(AutoTokenizer, target, "tokenizer")
    if draft_lm is not None:
        draft_lm = checked_draft_lm(draft_lm, tokenizer)
    model = _read(
        AutoModelForCausalLM,
        target,
        "causal language model",
        dtype=weights,
        device_map=device_map,
        attn_implementation=backend,
    )
    if compile and fuse is False:
        raise UserError("compile goes with exchanged modules: leave fuse=False, or --fuse off, out")
    for option, wanted in (("fuse", fuse), ("compile", compile)):
        if wanted and not can_fuse(model):
            raise UserError(
                f"{option}: the target must lie whole on a CPU, in float32 or a bfloat16 that the "
                "processor multiplies; leave the option out"
            )
    fuse = should_fuse(model) if fuse is None else fuse
    if compile:
        native.build_all()  # not in the midst of an answer
    wrapped = TargetModel(model, taps, fuse=fuse, compile=compile)
    probe(wrapped)
    if draft_ngram is not None:
        longest = draft_ngram
        return Pair(wrapped, lambda size: NGramDrafter(size, longest), tokenizer, tree, adaptive)
    if draft_lm is not None:
        return Pair(
            wrapped, language_model(draft_lm, wrapped, device_map), tokenizer, tree, adaptive
        )
    assert draft is not None
    network = load_draft(
        draft,
        target_config=text_config,
        target_embedding=model.get_input_embeddings(),
        target_head=model.get_output_embeddings(),
        layer_ids=layer_ids,
        layer_id_convention=layer_id_convention,
        rope_theta=rope_theta,
        dtype=wrapped.dtype,
        device=wrapped.head_device,
    ).eval()
    if compile:
        network.compile_layer()
    elif fuse:
        network.pack()
    return Pair(wrapped, lambda size: Eagle3Drafter(network, size), tokenizer, tree, adaptive)


def language_model(
    source: str | Path, target: TargetModel, device_map: Any = None
) -> Callable[[TreeShape], ModelDrafter]:
    """Drafters of one small language model, run as the target is run.

    The caller has compared the tokenizers.
    """
    from transformers import AutoModelForCausalLM

    model = _read(
        AutoModelForCausalLM,
        source,
        "causal language model",
        dtype=target.dtype,
        device_map=device_map,
        attn_implementation=target.model.config._attn_implementation,
    )
    fuse, compile = target.modules != "transformers'", target.modules == "compiled"
    small = TargetModel(model, fuse=fuse and can_fuse(model), compile=compile)
    probe(small)
    return lambda shape: ModelDrafter(small, shape, target.vocab_size)


def checked_draft_lm(name: str | Path, tokenizer: Any) -> str | Path:
    """Where the small model of this name lies. UserError where its tokenizer is another."""
    from transformers import AutoTokenizer

    from eagle_dropmatch.assets import draft_lm_source

    source = draft_lm_source(name)
    check_tokenizer(source, _read(AutoTokenizer, source, "tokenizer"), tokenizer)
    return source


def check_tokenizer(name: str | Path, small: Any, target: Any) -> None:
    """UserError where a draft's token ids do not mean what the target's mean."""
    mine, theirs = small.get_vocab(), target.get_vocab()
    other = sum(theirs.get(token) != number for token, number in mine.items())
    if other or len(mine) != len(theirs):
        raise UserError(
            f"draft_lm {str(name)!r} has another tokenizer than the target ({len(mine)} tokens, "
            f"{other} of them not or not under the same id among the target's {len(theirs)}): its "
            "tokens would mean something else; give a model with the target's tokenizer"
        )


def _read(loader: Any, target: str | Path, what: str, **options: Any) -> Any:
    """One part of a transformers checkpoint, or one line that says which part is not there."""
    try:
        return loader.from_pretrained(target, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model {str(target)!r} has no {what} that transformers can read ({reason}): give a "
            "folder with a whole checkpoint or a hub id"
        ) from error


def _dtype(dtype: torch.dtype | str | None, device_map: Any) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise UserError(f"dtype {dtype!r}: expected float32, bfloat16, float16 or auto")
        return found
    if device_map is None and not cpu_has_bfloat16():
        return torch.float32
    return "auto"


def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware (AMX or AVX512-BF16)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
