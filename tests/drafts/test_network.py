"""The draft network against a plain re-telling of the EAGLE-3 contract, one slot at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_drafts import (
    HIDDEN,
    TARGET,
    VOCAB,
    chain_logits,
    context,
    load_toy,
    small_draft,
    target_modules,
    toy_config,
    toy_tensors,
    write_checkpoint,
)

from eagle_dropmatch.drafts.checkpoint import TargetShape

DRAFTED = (3, 41, 8, 8)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one head [head_dim]: element j pairs with element j + head_dim / 2."""
    half = x.shape[0] // 2
    out = torch.empty_like(x)
    for j in range(half):
        angle = position * theta ** (-j / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[j] = x[j] * cos - x[j + half] * sin
        out[j + half] = x[j + half] * cos + x[j] * sin
    return out


def plain_chain(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    taps: Tensor,
    tokens: Sequence[int],
    drafted: Sequence[int],
) -> Tensor:
    """Logits of context slots and drafted slots in loops, float32, by the contract's words."""
    eps, theta = config["rms_norm_eps"], config.get("rope_theta", 10000.0)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    act: Callable[[Tensor], Tensor] = nn.functional.silu

    def w(name: str) -> Tensor:
        return tensors[f"{name}.weight"]

    def linear(name: str, x: Tensor) -> Tensor:
        return w(name) @ x + tensors.get(f"{name}.bias", torch.zeros(()))

    def fuse(tap: Tensor) -> Tensor:
        if config.get("fc_norm"):
            parts = tap.split(tap.shape[0] // 3)
            tap = torch.cat([rms(p, w(f"fc_norm.{i}"), eps) for i, p in enumerate(parts)])
        if config.get("norm_before_fc"):
            tap = rms(tap, w("input_norm"), eps)
        return linear("fc", tap) if "fc.weight" in tensors else tap

    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    rows: list[Tensor] = []
    feature = torch.empty(0)
    for slot, token in enumerate([*tokens, *drafted]):
        if slot < len(tokens):
            feature = fuse(taps[slot])
        emb = rms(embedding[token], w("midlayer.input_layernorm"), eps)
        normed = rms(feature, w("midlayer.hidden_norm"), eps)
        x = torch.cat([emb, normed])
        q = linear("midlayer.self_attn.q_proj", x).view(heads, head_dim)
        k = linear("midlayer.self_attn.k_proj", x).view(kv_heads, head_dim)
        v = linear("midlayer.self_attn.v_proj", x).view(kv_heads, head_dim)
        keys.append([turn(k[h], slot, theta) for h in range(kv_heads)])
        values.append([v[h] for h in range(kv_heads)])
        outs = []
        for h in range(heads):
            group = h // (heads // kv_heads)
            query = turn(q[h], slot, theta)
            scores = torch.stack([query @ key[group] for key in keys]) / math.sqrt(head_dim)
            share = scores.softmax(0)
            outs.append(sum(p * value[group] for p, value in zip(share, values, strict=True)))
        attended = linear("midlayer.self_attn.o_proj", torch.cat(outs))
        y = (normed if config.get("norm_before_residual") else feature) + attended
        z = rms(y, w("midlayer.post_attention_layernorm"), eps)
        gated = act(linear("midlayer.mlp.gate_proj", z)) * linear("midlayer.mlp.up_proj", z)
        out = y + linear("midlayer.mlp.down_proj", gated)
        head_input = rms(out, w("norm"), eps)
        rows.append(w("lm_head") @ head_input * config.get("logit_scale", 1.0))
        feature = head_input if config.get("norm_output") else out
    return torch.stack(rows)


BIASED = (
    "fc",
    "midlayer.self_attn.q_proj",
    "midlayer.self_attn.k_proj",
    "midlayer.self_attn.v_proj",
    "midlayer.self_attn.o_proj",
    "midlayer.mlp.gate_proj",
    "midlayer.mlp.up_proj",
    "midlayer.mlp.down_proj",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "official": {},
    "norm before residual": {"norm_before_residual": True},
    "norm output": {"norm_output": True},
    "norm before fc": {"norm_before_fc": True},
    "fc norm": {"fc_norm": True},
    "every norm": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "head dim of its own": {"head_dim": 12},
    "heads that do not divide the size": {"num_attention_heads": 6, "head_dim": 10},
    "base of its own": {"rope_theta": 500.0},
    "logit scale": {"logit_scale": 0.25},
    "full vocabulary": {"draft_vocab_size": VOCAB},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_chain_drafting_follows_the_contract(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = toy_config(**changes)
    tensors = toy_tensors(config)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    taps, tokens = context(3 * HIDDEN)
    embedding = target_modules()[0].weight.detach()
    expected = plain_chain(config, tensors, embedding, taps, tokens.tolist(), DRAFTED)
    torch.testing.assert_close(chain_logits(draft, taps, tokens, DRAFTED), expected)


@pytest.mark.parametrize("biases", [BIASED, BIASED[:1], BIASED[1:4]], ids=["all", "fc", "qkv"])
def test_biases_apply_wherever_the_checkpoint_has_them(
    tmp_path: Path, biases: tuple[str, ...]
) -> None:
    config = toy_config()
    tensors = toy_tensors(config, biases=biases)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    taps, tokens = context(3 * HIDDEN)
    embedding = target_modules()[0].weight.detach()
    expected = plain_chain(config, tensors, embedding, taps, tokens.tolist(), DRAFTED)
    torch.testing.assert_close(chain_logits(draft, taps, tokens, DRAFTED), expected)


def test_a_wider_target_feeds_a_draft_with_its_own_embedding(tmp_path: Path) -> None:
    config = toy_config(target_hidden_size=48)
    tensors = toy_tensors(config)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    wide = TargetShape(48, VOCAB, 9)
    draft = load_toy(write_checkpoint(tmp_path, config, tensors), wide)
    taps, tokens = context(3 * 48)
    expected = plain_chain(
        config, tensors, tensors["embed_tokens.weight"], taps, tokens.tolist(), DRAFTED
    )
    torch.testing.assert_close(chain_logits(draft, taps, tokens, DRAFTED), expected)


def test_a_draft_without_aux_states_takes_the_feature_as_it_is(tmp_path: Path) -> None:
    config = toy_config(eagle_config={"use_aux_hidden_state": False})
    tensors = toy_tensors(config)
    del tensors["fc.weight"]
    draft = load_toy(write_checkpoint(tmp_path, config, tensors))
    assert draft.config.feature_size == HIDDEN
    taps, tokens = context(HIDDEN)
    embedding = target_modules()[0].weight.detach()
    expected = plain_chain(config, tensors, embedding, taps, tokens.tolist(), DRAFTED)
    torch.testing.assert_close(chain_logits(draft, taps, tokens, DRAFTED), expected)


def test_norm_output_changes_drafted_slots_and_no_context_slot(tmp_path: Path) -> None:
    taps, tokens = context(3 * HIDDEN)
    plain, normed = (
        chain_logits(
            load_toy(write_checkpoint(tmp_path / str(flag), config, toy_tensors(config))),
            taps,
            tokens,
            DRAFTED,
        )
        for flag in (False, True)
        for config in [toy_config(norm_output=flag)]
    )
    torch.testing.assert_close(plain[: len(tokens)], normed[: len(tokens)], rtol=0, atol=0)
    assert (plain[len(tokens) :] - normed[len(tokens) :]).abs().amax(1).min() > 1e-2


def test_draft_ids_map_to_the_target_by_offsets() -> None:
    draft = small_draft()
    draft.d2t.copy_(torch.tensor([3, 7, 11]) - torch.arange(3))
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert draft.to_target_ids(logits.argmax(-1)).tolist() == [7]
    assert draft.to_target_ids(torch.tensor([[0, 2], [2, 1]])).tolist() == [[3, 11], [11, 7]]


def test_borrowed_modules_stay_the_targets() -> None:
    embedding, head = target_modules(TARGET)
    draft = small_draft(draft_vocab_size=VOCAB, own_head=False)
    before = set(draft.state_dict())
    draft.borrow_embedding(embedding)
    draft.borrow_head(head)
    draft.to(torch.bfloat16).eval()
    assert draft.dtype == torch.bfloat16
    assert embedding.weight.dtype == head.weight.dtype == torch.float32
    assert embedding.training
    assert set(draft.state_dict()) == before
    assert not {embedding.weight, head.weight} & set(draft.parameters())
    assert draft.embed(torch.tensor([[4]])).dtype == torch.bfloat16


def test_a_borrowed_embedding_on_another_device_gets_its_ids_there() -> None:
    class Elsewhere(nn.Embedding):
        """Its weight is on a device of its own; what it was asked on is kept."""

        asked = torch.device("cpu")

        def forward(self, ids: Tensor) -> Tensor:
            self.asked = ids.device
            return torch.ones(*ids.shape, self.embedding_dim)

    draft = small_draft()
    elsewhere = Elsewhere(VOCAB, HIDDEN, device="meta")
    draft.borrow_embedding(elsewhere)
    out = draft.embed(torch.zeros(1, 3, dtype=torch.int64))
    assert elsewhere.asked == torch.device("meta")
    assert (out.device, out.shape) == (draft.device, (1, 3, HIDDEN))
