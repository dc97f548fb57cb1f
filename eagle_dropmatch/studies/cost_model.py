"""What a run on a pair will need, worked out from its configs: memory, and seconds.

Weights and caches are counted exactly. Seconds are a floor, the bytes that must be read and the
operations that must be done on the machine in question, times a ratio of real steps to their floor
that was measured on the reference pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..drafts.base import TreeShape
from .step_profile import Machine, draft_parameters

RATIO = 2.6
"""A compiled step of the reference pair over its floor (docs/performance.md: 26.6 and 10.2 ms)."""
FEATURES = 3
"""Hidden states of the target that an EAGLE-3 draft reads."""


@dataclass(frozen=True)
class PairShape:
    """Parameters and sizes of a target and its draft; all that costs follow from."""

    body: int
    """The target's parameters without embedding and LM head."""
    head: int
    """Vocabulary times width."""
    embedding: int
    """Rows that are looked up; 0 where the LM head's are used."""
    width: int
    cache: int
    """Numbers that a token adds to the target's keys and values."""
    draft_layer: int
    draft_fusing: int
    draft_head: int
    draft_cache: int

    @property
    def target(self) -> int:
        return self.body + self.head + self.embedding

    @property
    def draft(self) -> int:
        return self.draft_layer + self.draft_fusing + self.draft_head


def shape_of(target: Any, draft: Any) -> PairShape:
    """From transformers' config of the target and the ``Eagle3Config`` of its draft.

    The target is built without memory, so that every architecture's own layers are counted.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ..taps import attention_sizes, backbone

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(target)
    text = target.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    body = sum(p.numel() for p in backbone(model).parameters()) - embedding.numel()
    _, kv_heads, size = attention_sizes(text)
    layer, fusing, draft_head = draft_parameters(draft)
    return PairShape(
        body=body,
        head=head.numel(),
        embedding=0 if text.tie_word_embeddings else embedding.numel(),
        width=text.hidden_size,
        cache=2 * text.num_hidden_layers * kv_heads * size,
        draft_layer=layer,
        draft_fusing=fusing,
        draft_head=draft_head,
        draft_cache=2 * draft.num_key_value_heads * draft.head_dim,
    )


def memory(
    pair: PairShape, tree: TreeShape, *, batch: int, context: int, item: int = 2
) -> Mapping[str, float]:
    """Bytes by what holds them, at the end of ``batch`` answers of ``context`` tokens.

    Args:
        item: bytes of a number.
    """
    room = batch * (context + tree.total_token + tree.levels * tree.top_k)
    return {
        "target": float(pair.target * item),
        "draft": float(pair.draft * item),
        "caches": float(room * (pair.cache + pair.draft_cache) * item),
        # While the draft reads the prompt: last hidden states and features.
        "prompt states": float(batch * context * pair.width * (1 + FEATURES) * item),
        # A step's, and a part of them in float32.
        "logits": float(batch * tree.total_token * (pair.head // pair.width) * item + 2**26),
    }


def plain_floor(
    pair: PairShape, machine: Machine, *, batch: int, context: int, item: int = 2
) -> float:
    """Least seconds of a forward over one token a row."""
    cache = batch * context * pair.cache * item / machine.bandwidth
    return machine.floor(pair.body + pair.head, batch, item) + cache


def step_floor(
    pair: PairShape,
    machine: Machine,
    tree: TreeShape,
    *,
    batch: int,
    context: int,
    item: int = 2,
) -> float:
    """Least seconds of a step: every draft level, and the target over all nodes."""
    rows, beam = batch * tree.total_token, batch * tree.top_k
    cache = batch * context * item / machine.bandwidth
    return (
        machine.floor(pair.draft_layer + pair.draft_head, beam, item, tree.levels)
        + machine.floor(pair.draft_fusing, batch, item)
        + machine.floor(pair.body + pair.head, rows, item)
        + cache * (pair.cache + tree.levels * pair.draft_cache)
    )


def prompt_floor(pair: PairShape, machine: Machine, *, tokens: int, item: int = 2) -> float:
    """Least seconds of reading a prompt, by target and draft."""
    return machine.floor(pair.body + pair.draft_layer + pair.draft_fusing, tokens, item)
