"""Exchanged modules: the same results as transformers' own, and nothing exchanged that is not."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import rig
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.fused import FusedDecoder, FusedRMSNorm, PackedLinear, can_fuse, fused
from eagle_dropmatch.target import TargetModel, TargetOutput
from eagle_dropmatch.tree import DraftTree

FAMILIES = list(rig.FAMILIES)


def read(target: TargetModel, lengths: tuple[int, ...] = (9, 4)) -> tuple[Tensor, TargetOutput]:
    """A prefill's logits and a verification behind it."""
    prompts = rig.prompts(*lengths)
    cache = target.new_cache(len(prompts), 32)
    first = target.prefill(cache, rig.padded(prompts, "right")[0], list(lengths)).logits
    parents = torch.tensor([[-1, 0, 0, 1, 2, 1]]).expand(len(prompts), -1)
    tokens = torch.arange(6 * len(prompts)).view(len(prompts), 6) + 40
    return first, target.verify(cache, DraftTree.from_parents(tokens, parents))


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_fused_target_says_what_the_model_says(family: str, dtype: torch.dtype) -> None:
    model = rig.tiny_model(family, layers=4, dtype=dtype)
    plain, fast = TargetModel(model, (0, 2, 4)), TargetModel(model, (0, 2, 4), fuse=True)
    exact = TargetModel(copy.deepcopy(model).double(), (0, 2, 4))
    found = kinds(fast.body)
    assert type(fast.body) is FusedDecoder
    assert found["FusedLayer"] == found["FusedAttention"] == found["FusedGatedMLP"] == 4
    assert found["Linear"] == 0
    said = [read(target) for target in (fast, plain, exact)]
    for ours, theirs, true in zip(*[(first, *out) for first, out in said], strict=True):
        assert ours.dtype == dtype
        # No further from what exact arithmetic gives than transformers is.
        off, limit = ((each.double() - true).square().mean().sqrt() for each in (ours, theirs))
        assert off < 2 * limit
        assert limit < 0.1 * true.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_transformers_own(family: str) -> None:
    model = rig.tiny_model(family)
    target = TargetModel(model, rig.TAPS, fuse=True)
    prompts = rig.prompts(7, 12)
    draft = rig.tiny_draft(target)
    draft.pack()
    tokens, mask = rig.padded(prompts)
    decoder = rig.decoder(target, rig.eagle3(draft), (24, 4, 6), make_acceptor("exact"))
    out = decoder.generate(tokens, mask, max_new_tokens=40)
    for row, prompt in enumerate(prompts):
        assert out[row, -40:].tolist() == rig.greedy(model, prompt, 40)


def test_the_model_is_left_as_it_was_and_its_parameters_are_shared() -> None:
    model = rig.tiny_model(layers=3)
    before, names = kinds(model), dict(model.model.named_parameters())
    twin = fused(model.model)
    assert kinds(model) == before
    mine = {id(parameter) for parameter in names.values()}
    assert {id(parameter) for parameter in twin.parameters()} <= mine
    assert twin.get_submodule("norm").weight is model.model.norm.weight


def test_the_draft_packed_says_what_it_said() -> None:
    target = rig.tiny_target()
    for changes in ({}, {"attention_bias": True, "mlp_bias": True, "fc_bias": True}):
        draft = rig.tiny_draft(target, **changes)
        packed = copy.deepcopy(draft)
        packed.borrow_embedding(target.model.get_input_embeddings())
        packed.pack()
        assert not any(type(module) is nn.Linear for module in packed.modules())
        generator = torch.Generator().manual_seed(1)
        taps = torch.randn(2, 5, 3 * rig.HIDDEN, generator=generator)
        tokens = torch.arange(10).view(2, 5)
        positions = torch.arange(5).expand(2, 5)
        said = []
        with torch.inference_mode():
            for network in (draft, packed):
                out = network(
                    network.embed(tokens),
                    network.fuse(taps),
                    positions,
                    lambda q, k, v: nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    ),
                )
                said.append((network.logits(out.head_input), out.feature))
        for ours, theirs in zip(said[1], said[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class OddNorm(LlamaRMSNorm):
    """As in Gemma: the weight counts from one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + super().forward(hidden_states) / self.weight


class ScaledModel(LlamaModel):
    """As in Gemma: embeddings are scaled."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        return super().forward(inputs_embeds=8.0 * self.embed_tokens(input_ids), **given)


def odd_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = OddNorm


def scaled_embeddings(model: Any) -> None:
    model.model.__class__ = ScaledModel


def double_residual(model: Any) -> None:
    for layer in model.model.layers:
        inner = type(layer)

        class Other(inner):  # type: ignore[misc, valid-type]
            def forward(self, hidden_states: Tensor, **given: Any) -> Any:
                return super().forward(hidden_states, **given) + hidden_states

        layer.__class__ = Other


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (odd_norms, "FusedLayer"),
        (double_residual, "FusedLayer"),
        (scaled_embeddings, "FusedDecoder"),
    ],
)
@torch.inference_mode()
def test_what_computes_something_else_is_not_exchanged(change: Any, kept: str) -> None:
    model = rig.tiny_model(layers=3)
    change(model)
    fast = TargetModel(model, fuse=True)
    found = kinds(fast.body)
    assert found[kept] == 0
    # The rest still is.
    assert found["PackedLinear"] > 0
    assert found["FusedGatedMLP"] == 3
    (first, out), (fast_first, fast_out) = read(TargetModel(model)), read(fast)
    torch.testing.assert_close(fast_first, first, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fast_out.logits, out.logits, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_eager_attention_stays_transformers_own() -> None:
    model = rig.tiny_model(layers=2, attention="eager")
    fast = TargetModel(model, fuse=True)
    found = kinds(fast.body)
    assert found["FusedAttention"] == found["FusedLayer"] == 0
    assert found["FusedGatedMLP"] == 2
    for ours, theirs in zip(read(fast), read(TargetModel(model)), strict=True):
        logits = [x if isinstance(x, Tensor) else x.logits for x in (ours, theirs)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_norm_rounds_where_transformers_does() -> None:
    norm = LlamaRMSNorm(96, eps=1e-5).to(torch.bfloat16)
    norm.weight.data = torch.rand(96).to(torch.bfloat16) + 0.5
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(4, 500, 96, generator=generator).to(torch.bfloat16)
    with torch.inference_mode():
        found, wanted = FusedRMSNorm(norm)(x), norm(x)
    # But where the last bit of float32 decides.
    assert float((found != wanted).float().mean()) < 1e-3
    torch.testing.assert_close(found, wanted, rtol=2.0**-7, atol=0)


def test_several_layers_of_one_input_are_one_product() -> None:
    first, second = nn.Linear(20, 7), nn.Linear(20, 5, bias=False)
    x = torch.randn(3, 2, 20)
    with torch.inference_mode():
        together = PackedLinear.of(first, second)(x)
        torch.testing.assert_close(together, torch.cat((first(x), second(x)), dim=-1))


def test_only_models_whole_on_a_cpu_in_a_usual_dtype_can_be_fused() -> None:
    assert can_fuse(rig.tiny_model(layers=1))
    assert not can_fuse(rig.tiny_model(layers=1, dtype=torch.float16))
    with torch.device("meta"):
        assert not can_fuse(nn.Linear(3, 3))
    hooked = rig.tiny_model(layers=1)
    hooked.model.layers[0]._hf_hook = object()
    assert not can_fuse(hooked)


def test_fusing_what_cannot_be_is_refused_in_one_line(reference_target_dir: Any) -> None:
    with pytest.raises(UserError, match="whole on a CPU") as caught:
        SpeculativeDecoder.from_pretrained(dtype="float16", fuse=True)
    assert "\n" not in str(caught.value)
