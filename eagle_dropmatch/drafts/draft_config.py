"""What a draft's config.json says, in any of the published dialects.

Dialects: the official flat one, SpecForge's (``LlamaForCausalLMEagle3``, ids under
``eagle_config``), ModelOpt's (flags under ``eagle_config``), speculators' (the layer's shape under
``transformer_layer_config``). Where config and weights can disagree (layer count, biases, own
embedding, own head) the weights decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformers.activations import ACT2FN

from eagle_dropmatch.drafts.eagle3 import Eagle3Config
from eagle_dropmatch.drafts.rope import read_rope_parameters
from eagle_dropmatch.errors import UserError

LayerIdConvention = Literal["auto", "output", "input"]
Shapes = Mapping[str, tuple[int, ...]]

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
#: Endings that only quantised checkpoints have. Their configs do not tell: a draft's may be a copy
#: of a quantised target's.
_QUANTISED = (".weight_scale", ".weight_packed", ".qweight", ".weight_scale_inv")
_SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")


def parse_draft_config(
    raw: Mapping[str, Any],
    shapes: Shapes,
    *,
    layer_ids: Sequence[int] | None = None,
    layer_id_convention: LayerIdConvention = "auto",
    rope_theta: float | None = None,
) -> Eagle3Config:
    """The network that a checkpoint describes.

    Args:
        raw: its parsed config.json.
        shapes: shape of every stored tensor under the official names.
        layer_ids: feature taps, instead of the config's. Indices into ``hidden_states`` unless
            ``layer_id_convention`` is "output".
        layer_id_convention: what an id i means: "output" of layer i (``hidden_states[i + 1]``,
            SGLang, SpecForge, ModelOpt), "input" of layer i (``hidden_states[i]``, vLLM,
            speculators), or "auto": by the config's dialect, never by the numbers.
        rope_theta: rope base instead of the config's.
    """
    refuse_other_drafts(raw, shapes)
    speculators = is_speculators(raw)
    layer = _without_nulls(raw.get("transformer_layer_config") or {})
    # The nested config is a whole transformers config: what it says about heads and tying is the
    # target's, not the draft's.
    layer.pop("tie_word_embeddings", None)
    settings = {**layer, **_without_nulls(raw)}
    eagle = _without_nulls(settings.get("eagle_config") or {})
    flags = {**eagle, **settings}

    hidden = _size(settings, "hidden_size")
    target_hidden = _size(settings, "target_hidden_size", hidden)
    heads = _size(settings, "num_attention_heads")
    if "head_dim" not in settings and hidden % heads:
        raise UserError(
            f"the draft's config.json has hidden_size {hidden}, {heads} heads and no head_dim: "
            "the size is not divisible by the heads, expected a head_dim"
        )
    vocab = _size(settings, "vocab_size")
    llama4 = "llama4_text" in (layer.get("model_type"), raw.get("model_type"))
    activation = settings.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise UserError(
            f"the draft's config.json has hidden_act {activation!r}: expected an activation that "
            "transformers knows"
        )
    fuse = bool(flags.get("use_aux_hidden_state", True))
    taps = read_layer_ids(raw, layer_ids, layer_id_convention)
    overridden = layer_ids is not None
    if fuse:
        num_taps = _num_taps(flags, taps, shapes, target_hidden, overridden=overridden)
    else:
        taps, num_taps = _single_tap(taps, hidden, target_hidden, overridden=overridden), 1
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=_size(
            settings, "intermediate_size_mlp" if llama4 else "intermediate_size"
        ),
        num_attention_heads=heads,
        num_key_value_heads=_size(settings, "num_key_value_heads", heads),
        head_dim=_size(settings, "head_dim", hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=_size(settings, "draft_vocab_size", vocab),
        hidden_act=activation,
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_size(settings, "max_position_embeddings", 2048),
        rope_parameters=read_rope_parameters(settings, rope_theta),
        num_taps=num_taps,
        tap_layers=taps,
        fuse_features=fuse,
        # speculators trains with the normed residual and may leave the key out.
        norm_before_residual=bool(flags.get("norm_before_residual", speculators)),
        norm_before_fc=bool(flags.get("norm_before_fc", False)),
        fc_norm=bool(flags.get("fc_norm", False) or flags.get("use_aux_norm", False)),
        norm_output=bool(flags.get("norm_output", False)),
        fc_bias="fc.bias" in shapes,
        attention_bias=_any_bias(shapes, "self_attn", ("q_proj", "k_proj", "v_proj")),
        attention_output_bias=_any_bias(shapes, "self_attn", ("o_proj",)),
        mlp_bias=_any_bias(shapes, "mlp", ("gate_proj", "up_proj", "down_proj")),
        logit_scale=float(settings.get("logit_scale", 1.0)),
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
    )


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json was written by speculators."""
    return bool(
        raw.get("speculators_model_type")
        or raw.get("transformer_layer_config")
        or any(name in _SPECULATORS_ARCHITECTURES for name in raw.get("architectures") or ())
    )


def read_layer_ids(
    raw: Mapping[str, Any], layer_ids: Sequence[int] | None, convention: LayerIdConvention
) -> tuple[int, ...] | None:
    """Feature taps as indices into ``hidden_states``, or None where nothing names any.

    The same list means other layers in other dialects. ``auto`` reads ids under ``eagle_config``,
    and any ids of a ``LlamaForCausalLMEagle3``, as layer outputs, since SGLang and SpecForge do;
    all others as layer inputs, since only vLLM and speculators look for them there.
    """
    if layer_ids is not None:
        return tap_layers(layer_ids, convention == "output")
    nested = (raw.get("eagle_config") or {}).get(_LAYER_IDS) or ()
    flat = raw.get(_LAYER_IDS) or ()
    speculators = is_speculators(raw)
    ids = (flat or nested) if speculators else (nested or flat)
    if not ids:
        return None
    sglang = bool(nested) or "LlamaForCausalLMEagle3" in (raw.get("architectures") or ())
    automatic = sglang and not speculators
    return tap_layers(ids, automatic if convention == "auto" else convention == "output")


def tap_layers(ids: Sequence[int], outputs: bool) -> tuple[int, ...]:
    """Layer ids as ascending indices into ``hidden_states``: every engine taps in layer order."""
    if not all(isinstance(i, int) for i in ids):
        raise UserError(f"layer ids {list(ids)}: expected whole numbers")
    taps = tuple(sorted(i + outputs for i in ids))
    if not taps or taps[0] < 0 or len(set(taps)) != len(taps):
        raise UserError(
            f"layer ids {list(ids)}: expected distinct ids of the target's layers, none negative"
        )
    return taps


def refuse_other_drafts(raw: Mapping[str, Any], shapes: Shapes) -> None:
    """Say in one line what a checkpoint is when it is no single-layer EAGLE-3 draft."""
    architectures = ", ".join(raw.get("architectures") or ("an unnamed architecture",))
    kind = raw.get("speculators_model_type") or "eagle3"
    deeper = sorted({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    query = shapes.get("midlayer.self_attn.q_proj.weight", (0, 0))
    single_input = len(query) == 2 and query[-1] == raw.get("hidden_size")
    if "mask_hidden" in shapes or kind == "peagle":
        what = "a P-EAGLE draft (mask_hidden), which drafts in parallel"
    elif kind != "eagle3":
        what = f"a speculators draft of type {kind!r}"
    elif "Deepseek" in architectures or "kv_lora_rank" in raw or _has_part(shapes, "kv_a_proj"):
        what = f"a draft with multi-head latent attention (MLA, {architectures})"
    elif any(name.endswith(_QUANTISED) for name in shapes):
        what = "a quantised draft"
    elif "midlayer.hidden_norm.weight" not in shapes and single_input and "fc.weight" in shapes:
        what = "an EAGLE-1 or EAGLE-2 head"
    elif not {"fc.weight", "midlayer.hidden_norm.weight"} & set(shapes):
        what = f"no draft ({architectures}, without fc.weight and hidden_norm)"
    elif deeper:
        what = f"a draft of several layers (layers.{', layers.'.join(deeper)} beside layer 0)"
    else:
        return
    raise UserError(f"the draft checkpoint is {what}: only EAGLE-3 drafts of one layer can be used")


def _num_taps(
    flags: Mapping[str, Any],
    taps: tuple[int, ...] | None,
    shapes: Shapes,
    target_hidden: int,
    *,
    overridden: bool,
) -> int:
    """How many hidden states are fused: as declared, as listed, or as wide as ``fc`` is."""
    width = shapes.get("fc.weight", (0, 0))[-1]
    from_width = width // target_hidden if width and width % target_hidden == 0 else 3
    declared = None if overridden else flags.get("num_aux_hidden_states")
    count = from_width if overridden else int(declared or (len(taps) if taps else from_width))
    if taps is not None and len(taps) != count:
        raise UserError(
            f"layer ids {list(taps)} (as hidden-state indices) for a draft that fuses {count} "
            "hidden states: expected as many ids"
        )
    if taps is None and count != 3:
        raise UserError(
            f"the draft fuses {count} hidden states and its config.json names no layers: "
            "give layer_ids explicitly"
        )
    return count


def _single_tap(
    taps: tuple[int, ...] | None, hidden: int, target_hidden: int, *, overridden: bool
) -> tuple[int, ...] | None:
    """The one tap of a draft without ``fc``; a config's list for fusion means nothing there."""
    if hidden != target_hidden:
        raise UserError(
            f"the draft has no fc (use_aux_hidden_state is false), hidden size {hidden} and a "
            f"target of hidden size {target_hidden}: without fc the two must be equal"
        )
    if taps is None or len(taps) == 1:
        return taps
    if overridden:
        raise UserError(
            f"layer ids {list(taps)} (as hidden-state indices) for a draft without fc: expected one"
        )
    return None


def _has_part(shapes: Shapes, part: str) -> bool:
    return any(part in name for name in shapes)


def _any_bias(shapes: Shapes, block: str, names: Sequence[str]) -> bool:
    return any(f"midlayer.{block}.{name}.bias" in shapes for name in names)


def _without_nulls(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _size(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = settings.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"the draft's config.json has {key} {value!r}: expected a positive whole number"
        )
    return value
