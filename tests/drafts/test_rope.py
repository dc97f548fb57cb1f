"""The draft's rotary positions against transformers' own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from toy_drafts import small_draft
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle_dropmatch.drafts.rope import RotaryTable, read_rope_parameters
from eagle_dropmatch.errors import UserError

POSITIONS = torch.tensor([[0, 2047, 9000]])
HEAD_DIM = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "absent": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
}


def transformers_table(
    rope_type: str, theta: float, limit: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    parameters = {"rope_type": "default", **SCALINGS[rope_type], "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 4,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=limit,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    return cos, sin


def as_config(rope_type: str, key: str, style: str, theta: float | None) -> dict[str, Any]:
    scaling = {key if k == "rope_type" else k: v for k, v in SCALINGS[rope_type].items()}
    base = {} if theta is None else {"rope_theta": theta}
    if style == "v5":
        return {"rope_parameters": {**scaling, **base}}
    return {"rope_scaling": scaling or None, **base}


@pytest.mark.parametrize("theta", [None, 1e6])
@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rope_type", SCALINGS)
def test_every_spelling_gives_transformers_cos_and_sin(
    rope_type: str, key: str, style: str, theta: float | None
) -> None:
    limit = 16384
    parameters = read_rope_parameters(as_config(rope_type, key, style, theta))
    draft = small_draft(
        head_dim=HEAD_DIM, rope_parameters=parameters, max_position_embeddings=limit
    ).to(torch.bfloat16)
    expected = transformers_table(rope_type, theta or 10000.0, limit, POSITIONS)
    found = draft.rotary.cos_sin(POSITIONS, torch.float32)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert parameters["rope_theta"] == (theta or 10000.0)


def test_a_half_precision_draft_keeps_full_precision_angles() -> None:
    draft = small_draft(head_dim=HEAD_DIM).to(torch.bfloat16)
    cos, _ = draft.rotary.cos_sin(POSITIONS, torch.bfloat16)
    exact, _ = transformers_table("default", 10000.0, 2048, POSITIONS)
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos, exact.to(torch.bfloat16))


def test_dynamic_positions_are_never_rebuilt_for_longer_contexts() -> None:
    table = RotaryTable({**SCALINGS["dynamic"], "rope_theta": 10000.0}, HEAD_DIM, 2048)
    early = table.cos_sin(torch.tensor([[5]]), torch.float32)[0].clone()
    table.cos_sin(POSITIONS, torch.float32)
    assert torch.equal(table.cos_sin(torch.tensor([[5]]), torch.float32)[0], early)
    rebuilt, _ = transformers_table("dynamic", 10000.0, 2048, POSITIONS)
    assert not torch.allclose(table.cos_sin(POSITIONS, torch.float32)[0], rebuilt, atol=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_the_base_is_found_wherever_it_stands_and_can_be_overridden(
    settings: dict[str, Any],
) -> None:
    assert read_rope_parameters(settings)["rope_theta"] == 5e5
    assert read_rope_parameters(settings, 123.0)["rope_theta"] == 123.0


def test_drafts_with_different_bases_keep_their_own_tables() -> None:
    tables = [
        RotaryTable({"rope_type": "default", "rope_theta": t}, HEAD_DIM, 2048) for t in (1e4, 1e6)
    ]
    for table, theta in zip(tables, (1e4, 1e6), strict=True):
        cos, _ = table.cos_sin(POSITIONS, torch.float32)
        assert torch.equal(cos, transformers_table("default", theta, 2048, POSITIONS)[0])


def test_multimodal_positions_of_text_are_plain_ones() -> None:
    settings = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}
    assert read_rope_parameters(settings) == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'.*default, linear, dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "nested"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_rope_that_cannot_be_followed_is_refused_in_one_line(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        RotaryTable(read_rope_parameters(settings), HEAD_DIM, 2048)
    assert "\n" not in str(caught.value)
