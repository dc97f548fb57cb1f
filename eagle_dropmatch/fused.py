"""The target's decoder with fewer and faster operations: the same weights, the same results.

transformers runs a decoder layer as some thirty small operations and seven products, and on a CPU
the small ones and the Python around them cost as much as the products. ``fused`` returns a second
view of a model in which the modules it recognises are exchanged: products with weights packed once
for oneDNN, one product for queries, keys and values, one for gate and up, fewer operations a norm
and a rotation, and the loop over layers itself. Modules are recognised by their parts, and
exchanged only if the new one gives what the old one gives on random input; all others stay. The
model itself is left as it was.

Only for models that lie whole on a CPU: what helps there costs a second copy of the weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROWS = 32  # tokens a product that weights are packed for; right within a tenth from 1 to 60
_CHECKED = 7  # tokens in the comparison of new modules with old ones
_MLP = {"gate_proj", "up_proj", "down_proj"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}

#: Makes one product of several linear layers over the same input.
Product = Callable[..., nn.Module]


class PackedLinear(nn.Module):
    """A linear layer whose weights oneDNN has laid out for itself.

    Args:
        weights: [out, in] each, stacked to one product.
        biases: [out] each, or None.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None]) -> None:
        super().__init__()
        weight, self.bias = _stack(weights, biases)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @classmethod
    def of(cls, *layers: nn.Linear) -> PackedLinear:
        """Several linear layers of one input as one."""
        return cls([layer.weight for layer in layers], [layer.bias for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x, self.packed, self.bias, "none", [], "")
        return out


def stacked(*layers: nn.Linear) -> nn.Module:
    """Several linear layers of one input as one, in torch's own layout."""
    if len(layers) == 1:
        return layers[0]
    weight, bias = _stack([each.weight for each in layers], [each.bias for each in layers])
    out: nn.Linear = nn.utils.skip_init(
        nn.Linear,
        weight.shape[1],
        weight.shape[0],
        bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out


def _stack(weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Weights [out, in] and biases [out] or None, stacked; None where there is no bias at all."""
    weight = torch.cat([each.detach() for each in weights])
    if all(bias is None for bias in biases):
        return weight, None
    given = [
        weight.new_zeros(len(w)) if b is None else b.detach()
        for w, b in zip(weights, biases, strict=True)
    ]
    return weight, torch.cat(given)


class FusedRMSNorm(nn.Module):
    """A root-mean-square norm, float32 inside, rounded where transformers rounds."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        self.eps = torch.full((1,), eps, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        # torch's own rms_norm is made of more operations than this.
        wide = x.float() if x.dtype != torch.float32 else x.clone()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, size, size, value=1.0 / x.shape[-1]).rsqrt_()
        return wide.mul_(scale).to(x.dtype).mul_(self.weight)


class FusedGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) in two products."""

    def __init__(self, mlp: Any, product: Product) -> None:
        super().__init__()
        self.gate_up = product(mlp.gate_proj, mlp.up_proj)
        self.down = product(mlp.down_proj)
        self.act = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up.forward(x).chunk(2, dim=-1)
        return self.down.forward(self.act(gate).mul_(up))


class FusedAttention(nn.Module):
    """Rotary attention over a cache in two products and one attention kernel."""

    def __init__(self, attention: Any, product: Product) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = attention.layer_idx, attention.head_dim
        self.scaling = attention.scaling
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        self.heads, self.kv_heads = (parts[i].out_features // self.head_dim for i in (0, 1))
        self.grouped = self.heads != self.kv_heads
        self.qkv = product(*parts)
        self.out = product(attention.o_proj)
        self.q_norm: Any = getattr(attention, "q_norm", None)
        self.k_norm: Any = getattr(attention, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        turns = signed_turns(*position_embeddings)
        return self.mix(hidden_states, turns, self.folded(attention_mask), cache), None

    def folded(self, mask: Tensor | None) -> Tensor | None:
        """A mask [B, 1, S, K] for the queries of all heads that share keys: [B, 1, G S, K]."""
        return mask if mask is None else mask.repeat(1, 1, self.heads // self.kv_heads, 1)

    def mix(
        self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Attention over [B, S, D], rotations from ``signed_turns`` and the mask ``folded``."""
        batch, size = x.shape[:2]
        heads = self.qkv.forward(x).view(batch, size, -1, self.head_dim)
        rotary, values = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None:
            queries, keys = rotary.split((self.heads, self.kv_heads), dim=2)
            rotary = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=2)
        cos, sin = turns
        turned = torch.addcmul(rotary * cos, rotary.roll(self.head_dim // 2, -1), sin)
        queries, keys = turned.transpose(1, 2).split((self.heads, self.kv_heads), dim=1)
        values = values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        if mask is not None:
            # The kernel reads and packs keys once a head: heads that share them become queries.
            queries = queries.reshape(batch, self.kv_heads, -1, self.head_dim)
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and size > 1,
            scale=self.scaling,
            enable_gqa=self.grouped and mask is None,
        ).reshape(batch, self.heads, size, self.head_dim)
        return self.out.forward(mixed.transpose(1, 2).reshape(batch, size, -1))


def signed_turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Angles [B, S, d] of Llama's rotation, made ready for heads [B, S, H, d].

    Dimension i turns with i + d / 2: x cos + rolled x signed sin.
    """
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return cos[:, :, None], signed[:, :, None]


class FusedLayer(nn.Module):
    """A pre-norm decoder layer over fused parts, without transformers' layers of Python."""

    def __init__(self, layer: Any, product: Product) -> None:
        super().__init__()
        self.input_layernorm = FusedRMSNorm(layer.input_layernorm)
        self.self_attn = FusedAttention(layer.self_attn, product)
        self.post_attention_layernorm = FusedRMSNorm(layer.post_attention_layernorm)
        self.mlp = FusedGatedMLP(layer.mlp, product)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        turns: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        if turns is None:  # from a loop over layers that knows nothing of this one
            assert position_embeddings is not None
            turns = signed_turns(*position_embeddings)
            attention_mask = self.self_attn.folded(attention_mask)
        normed = self.input_layernorm.forward(hidden_states)
        x = self.self_attn.mix(normed, turns, attention_mask, cache).add_(hidden_states)
        return self.mlp.forward(self.post_attention_layernorm.forward(x)).add_(x)


class FusedDecoder(nn.Module):
    """The loop over fused layers, called as transformers' decoders are."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb
        self.layers, self.norm = decoder.layers, decoder.norm

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        **_: Any,
    ) -> Any:
        """Without a cache: whole sequences, causal where there is no mask."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed_tokens(input_ids)
        turns = signed_turns(*self.rotary_emb(x, position_ids=position_ids))
        mask = self.layers[0].self_attn.folded(attention_mask)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, cache=cache, turns=turns)
        return SimpleNamespace(last_hidden_state=self.norm(x))


def can_fuse(model: nn.Module) -> bool:
    """Whether ``fused`` has anything to offer: a model on a CPU that oneDNN can multiply for."""
    kinds = {(each.device.type, each.dtype) for each in model.parameters()}
    if len(kinds) != 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return False
    ((device, dtype),) = kinds
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def should_fuse(model: nn.Module) -> bool:
    """Whether it can be done, and the second copy leaves this machine a third of its memory."""
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return can_fuse(model)
    return can_fuse(model) and 2 * weights < memory * 2 / 3


@torch.inference_mode()
def fused(model: nn.Module, product: Product = PackedLinear.of) -> nn.Module:
    """A copy of a transformers decoder, its parameters shared, with faster modules in it.

    ``product`` makes one product of several linear layers: ``PackedLinear.of`` or ``stacked``.
    """
    tensors = (*model.parameters(), *model.buffers())
    shared: dict[int, Any] = {id(each): each for each in tensors}
    twin: Any = copy.deepcopy(model, shared)
    backend = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    _exchange_within(twin, product, attention=backend == "sdpa")
    names = {name for name, _ in twin.named_children()}
    if names == _DECODER and all(type(layer) is FusedLayer for layer in twin.layers):
        ids = torch.arange(_CHECKED)[None] + 5
        given = {"input_ids": ids, "position_ids": torch.arange(_CHECKED)[None]}
        wanted = twin(**given, use_cache=False).last_hidden_state.float()
        found = FusedDecoder(twin)(**given).last_hidden_state.float()
        # In the model's own dtype: layers are known to be right, and rounding adds up over them.
        if (found - wanted).std() < 0.1 * wanted.std():
            return FusedDecoder(twin)
    return twin


def _exchange_within(parent: nn.Module, product: Product, *, attention: bool) -> None:
    """Put faster modules in the place of those that are recognised, the largest first."""
    for name, child in list(parent.named_children()):
        new = _exchanged(child, product, attention=attention)
        if new is not None:
            setattr(parent, name, new)
        else:
            _exchange_within(child, product, attention=attention)


def _exchanged(old: Any, product: Product, *, attention: bool) -> nn.Module | None:
    """A faster module that gives what ``old`` gives; None where there is none."""
    if type(old) is nn.Linear:
        return product(old)
    kind = _kind(old, attention=attention)
    if kind is None:
        return None
    if kind is not FusedRMSNorm:
        kind = partial(kind, product=product)
    # In float32, where another formula cannot hide behind rounding.
    plain = copy.deepcopy(old).float()
    try:
        inputs = _inputs(plain)
        wanted, found = (_output(module, inputs) for module in (plain, kind(plain)))
        off = (found - wanted).abs() / (wanted.abs() + wanted.std())
        return kind(old) if off.max() < 1e-3 else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _kind(old: Any, *, attention: bool) -> Any:
    """The faster class for a module with these parts, if there is one."""
    linear = {name for name, child in old.named_children() if type(child) is nn.Linear}
    others = {name for name, _ in old.named_children()} - linear
    if type(old).__name__.endswith("RMSNorm") and not linear | others:
        return FusedRMSNorm
    if linear == _MLP:
        return FusedGatedMLP
    if attention and linear == _ATTENTION:
        return FusedAttention
    if attention and others == _LAYER and not linear:
        parts = (_kind(getattr(old, name), attention=True) for name in sorted(_LAYER))
        if all(part is not None for part in parts):
            return FusedLayer
    return None


def _output(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    out: Any = module(**inputs) if "hidden_states" in inputs else module(*inputs.values())
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def _inputs(old: Any) -> dict[str, Any]:
    """Random input for a module in float32."""
    generator = torch.Generator().manual_seed(0)

    def random(width: int) -> Tensor:
        return torch.randn(1, _CHECKED, width, generator=generator)

    names = {name for name, _ in old.named_children()}
    if not names:
        return {"x": random(old.weight.shape[0])}
    if names >= _MLP:
        return {"x": random(old.gate_proj.in_features)}
    attention = old if names >= _ATTENTION else old.self_attn
    angles = 3 * random(attention.head_dim)
    blocked = torch.full((_CHECKED, _CHECKED), torch.finfo(torch.float32).min).triu(1)
    return {
        "hidden_states": random(attention.q_proj.in_features),
        "position_embeddings": (angles.cos(), angles.sin()),
        "attention_mask": blocked[None, None],
        "cache": None,
    }
