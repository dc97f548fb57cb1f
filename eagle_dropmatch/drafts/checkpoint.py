"""Reading a draft from any published checkpoint, and writing it in the official format.

Reading is strict: every parameter of the network comes from the checkpoint or, where that is the
format's rule, from the target; whatever is missing, left over or of another shape is one error
that lists it all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from eagle_dropmatch.drafts.draft_checks import (
    TargetShape,
    check_fit,
    check_tensors,
    complete_vocabulary,
)
from eagle_dropmatch.drafts.draft_config import LayerIdConvention, parse_draft_config
from eagle_dropmatch.drafts.draft_files import (
    StoredTensor,
    list_tensors,
    read_config_file,
    read_tensors,
    resolve_folder,
)
from eagle_dropmatch.drafts.draft_writer import save_draft
from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_dropmatch.errors import UserError

__all__ = ["DraftDescription", "TargetShape", "load_draft", "read_draft_config", "save_draft"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DraftDescription:
    """A draft checkpoint whose names and shapes are known to fit, before any value is read."""

    folder: Path
    config: Eagle3Config
    tied_head: bool  # the LM head is the embedding, the draft's own or the target's
    tensors: Mapping[str, StoredTensor]  # by official name


def read_draft_config(
    path: str | Path,
    *,
    target_config: TargetShape | PreTrainedConfig | None = None,
    layer_ids: Sequence[int] | None = None,
    layer_id_convention: LayerIdConvention = "auto",
    rope_theta: float | None = None,
) -> DraftDescription:
    """Check a draft's config, tensor names and shapes (and its fit to a target), reading no values.

    The arguments are ``load_draft``'s.
    """
    folder = resolve_folder(path)
    raw = read_config_file(folder)
    tensors = list_tensors(folder)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = parse_draft_config(
        raw,
        shapes,
        layer_ids=layer_ids,
        layer_id_convention=layer_id_convention,
        rope_theta=rope_theta,
    )
    # A head in the file wins over the key, which a config may have copied from its target.
    tied = bool(raw.get("tie_word_embeddings", False)) and not config.own_head
    target = None if target_config is None else TargetShape.of(target_config)
    if target is not None:
        check_fit(str(path), config, target)
    check_tensors(str(path), config, shapes, tied=tied, target=target)
    return DraftDescription(folder, config, tied, tensors)


def load_draft(
    path: str | Path,
    *,
    target_config: TargetShape | PreTrainedConfig,
    target_embedding: nn.Module,
    target_head: nn.Module | None = None,
    layer_ids: Sequence[int] | None = None,
    layer_id_convention: LayerIdConvention = "auto",
    rope_theta: float | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Eagle3Draft:
    """Build the draft of a checkpoint, ready to run, in evaluation mode.

    Args:
        path: a local folder, or a hub id (owner/name).
        target_config: the target's config; sizes of another target are refused.
        target_embedding: shared with the draft if the checkpoint holds no embedding.
        target_head: shared with the draft if the checkpoint holds no head and drafts over the
            target's whole vocabulary. A shared module is never moved or cast.
        layer_ids: feature taps instead of the checkpoint's, as indices into ``hidden_states``
            (the input of layer i) unless ``layer_id_convention`` is "output".
        layer_id_convention: how to read layer ids: "output" of layer i, "input" of layer i, or
            "auto", by the checkpoint's dialect.
        rope_theta: rope base instead of the checkpoint's; the one in force is
            ``draft.config.rope_parameters["rope_theta"]``.
        dtype: of the weights; None keeps the checkpoint's, or takes a shared head's.
        device: of the weights; None is the CPU.
    """
    description = read_draft_config(
        path,
        target_config=target_config,
        layer_ids=layer_ids,
        layer_id_convention=layer_id_convention,
        rope_theta=rope_theta,
    )
    config, tied = description.config, description.tied_head
    own_tie = tied and config.own_embedding
    shared_head = None
    if not config.own_head and not own_tie:
        shared_head = target_embedding if tied else target_head
        if shared_head is None:
            raise UserError(
                f"the draft {path} holds no lm_head.weight and takes the target's head, "
                "which was not given"
            )
    values = read_tensors(description.tensors)
    dtype = _choose_dtype(str(path), values, dtype, shared_head)
    state = {
        name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        for name, value in values.items()
    }
    complete_vocabulary(str(path), config, state)
    # Laid out without memory, then given the checkpoint's tensors: nothing is ever initialised.
    with torch.device("meta"):
        draft = Eagle3Draft(config)
    draft.load_state_dict(state, strict=True, assign=True)
    draft.eval()
    if not config.own_embedding:
        draft.borrow_embedding(target_embedding)
    if tied:
        assert draft.embed_tokens is not None
        draft.borrow_head(_head_on(draft.embed_tokens))
    elif shared_head is not None:
        draft.borrow_head(shared_head)
    return draft


def _choose_dtype(
    name: str,
    values: Mapping[str, Tensor],
    asked: torch.dtype | None,
    shared_head: nn.Module | None,
) -> torch.dtype:
    """One dtype for all weights: asked for, or a shared head's, or the stored projections'."""
    stored = {value.dtype for value in values.values() if value.is_floating_point()}
    if not stored <= set(_FLOATS):
        raise UserError(
            f"the draft {name} holds weights of type {', '.join(sorted(map(str, stored)))}: "
            "expected float32, float16 or bfloat16, so convert the draft first"
        )
    head = None if shared_head is None else next(shared_head.parameters()).dtype
    if None not in (asked, head) and asked != head:
        raise UserError(
            f"dtype {asked} for the draft {name}, which shares its target's head in {head}: "
            "the two must be the same"
        )
    return asked or head or values["midlayer.self_attn.q_proj.weight"].dtype


def _head_on(embedding: nn.Module) -> nn.Linear:
    """An LM head that is the embedding's own weight."""
    weight = embedding.weight
    assert isinstance(weight, nn.Parameter)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    return head
