"""Where features are tapped, and which targets are refused."""

from __future__ import annotations

from typing import Any

import pytest
import rig
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    Qwen3NextConfig,
)

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.taps import default_tap_layers
from eagle_dropmatch.target import TargetModel, check_attention, probe
from eagle_dropmatch.tree import DraftTree


def staircase(layers: int = 8) -> LlamaForCausalLM:
    """A target whose layer i adds i + 1 to every dimension of the residual stream."""
    model = LlamaForCausalLM(rig.tiny_config(layers=layers, mlp_bias=True)).eval()
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        layer.mlp.down_proj.bias.data.fill_(index + 1)
    return model


@pytest.mark.parametrize("taps", [(2, 4, 5), (1, 2, 3), (2, 3, 4), (0, 7, 8)], ids=str)
@torch.inference_mode()
def test_tap_i_is_the_stream_that_enters_layer_i_and_the_last_comes_before_the_norm(
    taps: tuple[int, ...],
) -> None:
    target = TargetModel(staircase(), taps)
    tokens = rig.ids([5, 6, 7])
    features = target.prefill(target.new_cache(1, 8), tokens, [3]).features
    embeds = target.model.get_input_embeddings()(tokens)
    wanted = torch.cat([embeds + sum(range(1, i + 1)) for i in taps], dim=-1)
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_tree_nodes_have_features_like_the_tokens_of_a_sequence(target: TargetModel) -> None:
    (sequence,) = rig.prompts(7)
    cache = target.new_cache(1, 16)
    target.prefill(cache, rig.ids(sequence[:4]), [4])
    ours = target.verify(cache, DraftTree.chain(torch.tensor([sequence[4:]]))).features
    states = target.model(rig.ids(sequence), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[i] for i in rig.TAPS], dim=-1)[:, 4:]
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_taps_leave_no_hooks_behind(target: TargetModel) -> None:
    def hooks() -> list[int]:
        layers = target.model.model.layers
        return [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers]

    before = hooks()  # transformers may have some of its own
    target.prefill(target.new_cache(1, 8), rig.ids([1, 2]), [2])
    assert hooks() == before


@torch.inference_mode()
def test_without_taps_the_feature_is_the_last_hidden_state_after_the_norm() -> None:
    target = TargetModel(staircase())
    out = target.prefill(target.new_cache(1, 8), rig.ids([5, 6]), [2])
    assert out.features is out.hidden
    torch.testing.assert_close(target.model.lm_head(out.hidden[:, -1]), out.logits)


def test_the_default_taps_are_the_papers() -> None:
    assert [default_tap_layers(n) for n in (7, 8, 30, 32)] == [
        (2, 3, 4),
        (2, 4, 5),
        (2, 15, 27),
        (2, 16, 29),
    ]


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_a_target_too_shallow_for_three_taps_is_refused_by_naming_the_argument(
    layers: int,
) -> None:
    refused(lambda: default_tap_layers(layers), "layer_ids", f"{layers} layers")


@pytest.mark.parametrize("taps", [(0, 1, 2), (1, 2, 3)], ids=str)
@torch.inference_mode()
def test_a_shallow_target_takes_explicit_taps(taps: tuple[int, ...]) -> None:
    target = TargetModel(staircase(layers=3), taps)
    out = target.prefill(target.new_cache(1, 8), rig.ids([5, 6]), [2])
    assert out.features.shape == (1, 2, 3 * rig.HIDDEN)


@pytest.mark.parametrize("taps", [(2, 4, 9), (-1, 2, 3), (2, 2, 5)], ids=str)
def test_taps_outside_the_target_or_given_twice_are_refused(taps: tuple[int, ...]) -> None:
    refused(lambda: TargetModel(staircase(), taps), str(list(taps)), "8 layers")


def test_sliding_windows_are_refused_at_once() -> None:
    model = rig.tiny_model("mistral", layers=2, sliding_window=16)
    refused(lambda: TargetModel(model), "mistral", "window of 16")


def test_a_window_that_the_model_does_not_use_is_no_reason_to_refuse() -> None:
    TargetModel(rig.tiny_model("qwen2", layers=2, sliding_window=16, use_sliding_window=False))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Gemma3TextConfig(num_hidden_layers=6), "sliding_attention"),
        (Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
    ],
    ids=["gemma3", "qwen3-next"],
)
def test_layers_that_are_not_full_attention_are_refused(config: Any, kind: str) -> None:
    refused(lambda: check_attention(config, "sdpa"), config.model_type, kind)


def test_flash_attention_is_refused_and_never_replaced() -> None:
    model = rig.tiny_model(layers=2)
    model.config._attn_implementation = "flash_attention_2"
    refused(lambda: TargetModel(model), "flash_attention_2", "sdpa or eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", list(rig.FAMILIES))
def test_the_probe_passes_honest_models(family: str, dtype: torch.dtype) -> None:
    probe(rig.tiny_target(family, dtype=dtype))


@pytest.mark.parametrize(
    ("config_class", "model_class", "changes"),
    [
        (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0}),
        (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
    ],
    ids=["granite", "cohere"],
)
def test_the_probe_passes_models_that_scale_their_logits(
    config_class: Any, model_class: Any, changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **changes,
    )
    probe(TargetModel(model_class(config)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_the_probe_catches_a_model_that_ignores(ignored: str, dtype: torch.dtype) -> None:
    target = rig.tiny_target(dtype=dtype)

    def forget(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, ignored: None}

    target.body.register_forward_pre_hook(forget, with_kwargs=True)
    refused(lambda: probe(target), "LlamaForCausalLM", "tree mask")


def test_the_probe_catches_logits_that_are_changed_in_an_unknown_way() -> None:
    class Doubling(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = 2 * out.logits
            return out

    model = Doubling(rig.tiny_config(layers=2))
    refused(lambda: probe(TargetModel(model)), "Doubling")


def refused(action: Any, *parts: str) -> None:
    """The action is refused in one line that holds all the parts."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
