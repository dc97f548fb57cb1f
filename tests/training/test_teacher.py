"""The frozen target as a teacher, and the draft that starts from it."""

from __future__ import annotations

import pytest
import torch
from training_toys import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, toy_config, toy_draft, toy_target
from transformers import GraniteConfig, GraniteForCausalLM, Phi3Config, Phi3ForCausalLM

from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training.batches import Batch
from eagle_dropmatch.training.initial import new_draft_config, start_from_target
from eagle_dropmatch.training.teacher import Teacher

TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def model():
    return toy_target()


def a_batch(size=12):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (2, size), generator=generator)
    return Batch(tokens, torch.ones(2, size, dtype=torch.bool))


def ids_of(draft):
    return draft.d2t + torch.arange(len(draft.d2t))


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_the_teacher_says_what_the_model_says_over_the_drafts_vocabulary(model, chunk):
    draft, batch = toy_draft(model), a_batch()
    taught = Teacher(model, TAPS, draft.d2t, chunk)(batch)
    with torch.no_grad():
        out = model(batch.tokens, output_hidden_states=True)
    wanted = out.logits[..., ids_of(draft)].softmax(-1)
    torch.testing.assert_close(taught.probs.view_as(wanted), wanted)
    torch.testing.assert_close(taught.taps, torch.cat([out.hidden_states[i] for i in TAPS], -1))
    assert not taught.taps.requires_grad


def test_the_next_token_is_named_in_the_drafts_ids_or_not_at_all(model):
    draft, batch = toy_draft(model), a_batch()
    following = Teacher(model, TAPS, draft.d2t)(batch).following
    assert (following[:, -1] == -1).all()
    for b in range(2):
        for i in range(11):
            token, found = batch.tokens[b, i + 1], following[b, i]
            if draft.t2d[token]:
                assert draft.to_target_ids(found) == token
            else:
                assert found == -1


def test_padding_on_the_right_changes_nothing_before_it(model):
    draft, batch = toy_draft(model), a_batch()
    teacher = Teacher(model, TAPS, draft.d2t)
    whole = teacher(batch)
    padded = teacher(Batch(torch.nn.functional.pad(batch.tokens, (0, 5)), batch.supervised))
    torch.testing.assert_close(padded.taps[:, :12], whole.taps, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        padded.probs.view(2, 17, -1)[:, :12], whole.probs.view(2, 12, -1), atol=1e-5, rtol=1e-3
    )


def test_a_model_that_scales_its_logits_teaches_the_scaled_ones():
    granite = GraniteForCausalLM(
        GraniteConfig(**toy_config().to_diff_dict() | {"logits_scaling": 5.0, "model_type": None})
    ).eval()
    draft, batch = toy_draft(granite), a_batch()
    with torch.no_grad():
        wanted = granite(batch.tokens).logits[..., ids_of(draft)].softmax(-1)
    taught = Teacher(granite, TAPS, draft.d2t)(batch)
    torch.testing.assert_close(taught.probs.view_as(wanted), wanted)


def new_draft(model, seed=0):
    draft = Eagle3Draft(new_draft_config(model.config, DRAFT_VOCAB))
    start_from_target(draft, model, toy_draft(model).d2t, seed)
    return draft


def test_a_new_draft_starts_as_the_targets_last_layer_over_its_highest_tap(model):
    draft = new_draft(model)
    last = model.model.layers[-1]
    taps = torch.randn(1, 9, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(draft.fuse(taps), taps[..., -HIDDEN:], atol=0.05, rtol=0)
    mid = draft.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(mid.self_attn, name).weight
        torch.testing.assert_close(weight[:, HIDDEN:], getattr(last.self_attn, name).weight)
        assert weight[:, :HIDDEN].abs().max() < 0.01
    for mine, theirs in (
        (mid.self_attn.o_proj, last.self_attn.o_proj),
        (mid.mlp.down_proj, last.mlp.down_proj),
        (mid.mlp.gate_proj, last.mlp.gate_proj),
        (draft.norm, model.model.norm),
    ):
        torch.testing.assert_close(mine.weight, theirs.weight)
    torch.testing.assert_close(draft.lm_head.weight, model.lm_head.weight[ids_of(draft)])
    assert draft.t2d.nonzero().flatten().tolist() == ids_of(draft).tolist()
    assert draft.embed_tokens is model.get_input_embeddings()


def test_a_layer_in_another_shape_leaves_its_part_at_random_but_the_same_everywhere():
    fused = Phi3ForCausalLM(
        Phi3Config(**toy_config().to_diff_dict() | {"pad_token_id": 0, "model_type": None})
    )
    drafts = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)  # workers do not share a global state
        drafts.append(new_draft(fused))
    first, second = (dict(draft.named_parameters()) for draft in drafts)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    query = first["midlayer.self_attn.q_proj.weight"][:, HIDDEN:]
    assert 0.1 < query.std() * HIDDEN**0.5 < 10
    torch.testing.assert_close(
        first["midlayer.self_attn.o_proj.weight"], fused.model.layers[-1].self_attn.o_proj.weight
    )


def test_the_new_drafts_shape_is_the_targets(model):
    config = new_draft_config(model.config, DRAFT_VOCAB)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (HIDDEN, 2, 16)
    assert config.rope_parameters["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert new_draft_config(model.config, VOCAB).draft_vocab_size == VOCAB


@pytest.mark.parametrize(
    ("changes", "size", "told"),
    [
        ({}, VOCAB + 1, "expected 1 to 320"),
        ({}, 0, "expected 1 to 320"),
        ({"num_hidden_layers": LAYERS - 2}, 100, "6 layers"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(changes, size, told):
    with pytest.raises(UserError, match=told):
        new_draft_config(toy_config(**changes), size)
