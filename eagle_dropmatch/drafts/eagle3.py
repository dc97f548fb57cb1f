"""The EAGLE-3 draft network (arXiv 2503.01840, section 3): one decoder layer over fused features.

A slot joins the feature of target position t with the embedding of token x_{t+1} and predicts
x_{t+2}. Its feature is the fused hidden states of several target layers, or, for a drafted slot,
the network's own output at the parent slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from eagle_dropmatch.compiled import CompiledNetwork
from eagle_dropmatch.drafts.rope import RotaryTable, rotate
from eagle_dropmatch.fused import FusedGatedMLP, FusedRMSNorm, PackedLinear, Product

#: Attention over whatever the caller keeps: (q [B, H, S, d], k, v [B, H_kv, S, d]) -> [B, H, S, d].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that decides the network's shape and arithmetic; the reader fills it in.

    ``tap_layers`` are indices into transformers' ``hidden_states`` (0 is the embedding, i the
    input of layer i), or None for the default (2, N // 2, N - 3) of an N-layer target.

    ``fuse_features`` False (``use_aux_hidden_state`` in ModelOpt's configs): no ``fc``, one tap,
    and with ``tap_layers`` None the feature is the target's last hidden state after its final norm.

    ``norm_output`` has the meaning it has in vLLM and SGLang: the feature of the next drafted slot
    is the normed output. SpecForge writes the same key and means only a norm in front of the LM
    head, which every draft here has; a draft trained there with the key set is drafted with as
    those engines draft with it, not as it was trained.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    num_taps: int = 3
    tap_layers: tuple[int, ...] | None = None
    fuse_features: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    attention_bias: bool = False  # of q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    logit_scale: float = 1.0
    own_embedding: bool = False
    own_head: bool = True

    @property
    def feature_size(self) -> int:
        """Width of the target's joined feature taps."""
        return self.num_taps * self.target_hidden_size


class StepOutput(NamedTuple):
    """What one pass over some slots gives."""

    feature: Tensor  # [B, S, H], fed to the next drafted slot
    head_input: Tensor  # [B, S, H], what the LM head multiplies


class RMSNorm(nn.Module):
    """Root-mean-square norm: float32 inside, cast back, then the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections of the draft's attention; its input is embedding and feature side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            self.heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias
        )
        self.qkv: nn.Module | None = None

    def pack(self, product: Product) -> None:
        self.qkv = product(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj
        self.o_proj = product(self.o_proj)  # type: ignore[assignment]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.qkv is None:
            products = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
        else:
            products = self.qkv(x)
        heads = products.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        turned, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(turned, cos, sin).split((self.heads, self.kv_heads), dim=1)
        projected: Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return projected


def grouped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [B, H, S, d] over keys and values [B, H_kv, K, d], under mask [B, S, K].

    Query heads of one key head are folded into its query length: nothing is repeated but the mask.
    """
    batch, heads, size, dim = q.shape
    group = heads // keys.shape[1]
    folded = q.reshape(batch, keys.shape[1], group * size, dim)
    out = functional.scaled_dot_product_attention(
        folded, keys, values, attn_mask=mask.repeat(1, group, 1)[:, None]
    )
    return out.view(batch, heads, size, dim)


class GatedMLP(nn.Module):
    """SwiGLU, or the gate that ``hidden_act`` names."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The draft's only decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embeds: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        hidden = residual + self.self_attn(x, cos, sin, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Draft(nn.Module):
    """The network under the official checkpoint's names (``fc``, ``midlayer``, ``norm``, ...).

    ``embed_tokens`` is the draft's own embedding, or the target's module, shared
    (``borrow_embedding``); ``d2t`` holds offsets: target id = draft id + d2t[draft id].
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        if config.fuse_features:
            self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_taps)
            )
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        #: Runs layer and norm in the network's place; see ``compile_layer``.
        self.compiled: CompiledNetwork | None = None
        self.embed_tokens: nn.Module | None = None
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head: nn.Module | None = None
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary = RotaryTable(
            config.rope_parameters, config.head_dim, config.max_position_embeddings
        )

    @torch.inference_mode()
    def pack(self, product: Product = PackedLinear.of) -> None:
        """Exchange modules for faster ones, for oneDNN's weights if ``product`` does not say
        otherwise. For drafting on a CPU: the network cannot be trained, moved or saved after it."""
        layer = self.midlayer
        layer.self_attn.pack(product)
        layer.mlp = FusedGatedMLP(layer.mlp, product)  # type: ignore[assignment]
        for parent in (layer, self):
            for name, child in list(parent.named_children()):
                if isinstance(child, RMSNorm):
                    setattr(parent, name, FusedRMSNorm(child))
        if self.config.fuse_features:
            self.fc = product(self.fc)  # type: ignore[assignment]
        if isinstance(self.lm_head, nn.Linear):
            packed = product(self.lm_head)
            self._modules.pop("lm_head", None)
            self._share("lm_head", packed)

    def compile_layer(self) -> None:
        """Let machine code (``compiled.py``) run the layer, then lay out the other weights.

        For drafting, as ``pack`` is.
        """
        self.compiled = CompiledNetwork(self)
        self.pack()

    def borrow_embedding(self, module: nn.Module) -> None:
        """Share the target's embedding; it is neither saved with the draft nor trained."""
        self._share("embed_tokens", module)

    def borrow_head(self, module: nn.Module) -> None:
        """Share the target's LM head: only for a draft over the target's whole vocabulary."""
        self._share("lm_head", module)

    def _share(self, name: str, module: nn.Module) -> None:
        # A plain attribute, not a submodule: the draft's .to(), .train(), parameters() and
        # state_dict() must not reach the target's weights.
        self.__dict__[name] = module

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of target-vocabulary ``tokens`` [B, S] as [B, S, H]."""
        assert self.embed_tokens is not None, "borrow_embedding comes before the first forward"
        # A borrowed embedding lies where the target has it, maybe on another device.
        home = next(self.embed_tokens.parameters()).device
        embeds: Tensor = self.embed_tokens(tokens.to(home))
        return embeds.to(device=self.device, dtype=self.dtype)

    def fuse(self, taps: Tensor) -> Tensor:
        """Join the target's taps [B, S, num_taps * H_target] into one feature [B, S, H]."""
        if self.config.fc_norm:
            parts = taps.chunk(self.config.num_taps, dim=-1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return self.fc(taps) if self.config.fuse_features else taps

    def forward(
        self, embeds: Tensor, feature: Tensor, positions: Tensor, attend: Attend
    ) -> StepOutput:
        """One pass over S slots.

        Args:
            embeds: [B, S, H], embedding of the token after each slot's target position.
            feature: [B, S, H], fused taps or the parent slot's output feature.
            positions: [B, S] int64, the target position of the slot's feature.
            attend: attention over the keys and values that the caller keeps.
        """
        cos, sin = self.rotary.cos_sin(positions, embeds.dtype)
        out = self.midlayer(embeds, feature, cos.unsqueeze(1), sin.unsqueeze(1), attend)
        normed = self.norm(out)
        return StepOutput(normed if self.config.norm_output else out, normed)

    def logits(self, head_input: Tensor) -> Tensor:
        """Scores over the draft's vocabulary [B, S, V_draft], in the network's dtype."""
        assert self.lm_head is not None, "borrow_head comes before the first forward"
        out: Tensor = self.lm_head(head_input)
        return out if self.config.logit_scale == 1.0 else out * self.config.logit_scale

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids of any shape to the target's."""
        return draft_ids + self.d2t[draft_ids]

    @property
    def target_ids(self) -> Tensor:
        """[V_draft] int64, the target's ids of all tokens of the draft's vocabulary."""
        ids: Tensor = torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t
        return ids
