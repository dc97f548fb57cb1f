"""Toy draft checkpoints for tests: config, tensors under the official names, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle_dropmatch.drafts.checkpoint import TargetShape, load_draft
from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 32, 50, 20, 9
TARGET = TargetShape(HIDDEN, VOCAB, LAYERS)


def toy_config(**changes: Any) -> dict[str, Any]:
    """An official config.json; a change to None removes the key."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def toy_tensors(
    config: Mapping[str, Any], *, taps: int = 3, biases: Sequence[str] = (), seed: int = 0
) -> dict[str, Tensor]:
    """Random float32 weights of every tensor that ``config`` asks for, and the vocabulary map."""
    generator = torch.Generator().manual_seed(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", size // heads)
    wide = taps * config.get("target_hidden_size", size)
    vocab = config["vocab_size"]
    drafted = config.get("draft_vocab_size", vocab)
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    matrices = {
        "fc": (size, wide),
        f"{attention}q_proj": (heads * head, 2 * size),
        f"{attention}k_proj": (kv_heads * head, 2 * size),
        f"{attention}v_proj": (kv_heads * head, 2 * size),
        f"{attention}o_proj": (size, heads * head),
        f"{mlp}gate_proj": (inner, size),
        f"{mlp}up_proj": (inner, size),
        f"{mlp}down_proj": (size, inner),
        "lm_head": (drafted, size),
    }
    norms = {
        "midlayer.input_layernorm": size,
        "midlayer.hidden_norm": size,
        "midlayer.post_attention_layernorm": size,
        "norm": size,
    }
    if config.get("norm_before_fc"):
        norms["input_norm"] = wide
    if config.get("fc_norm"):
        norms |= {f"fc_norm.{i}": wide // taps for i in range(taps)}

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {f"{k}.weight": noise(*shape) / shape[1] ** 0.5 for k, shape in matrices.items()}
    tensors |= {f"{k}.weight": 1 + 0.3 * noise(width) for k, width in norms.items()}
    tensors |= {f"{k}.bias": noise(tensors[f"{k}.weight"].shape[0]) for k in biases}
    if drafted < vocab:
        ids = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    suffix: str = "safetensors",
    shards: int = 1,
) -> Path:
    """Write config.json and the weights as ``suffix`` ("safetensors" or "bin") in some shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = {name: tensors[name] for name in names[i::shards]}
        number = f"-{i + 1:05d}-of-{shards:05d}" if shards > 1 else ""
        file = folder / f"{stem}{number}.{suffix}"
        weight_map |= dict.fromkeys(part, file.name)
        if suffix == "bin":
            torch.save(part, file)
        else:
            save_file(part, file)
    if shards > 1:
        index = folder / f"{stem}.{suffix}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def target_modules(target: TargetShape = TARGET) -> tuple[nn.Embedding, nn.Linear]:
    """A target's embedding and head, always the same."""
    generator = torch.Generator().manual_seed(99)
    embedding = nn.Embedding(target.vocab_size, target.hidden_size)
    head = nn.Linear(target.hidden_size, target.vocab_size, bias=False)
    for module in (embedding, head):
        module.weight.data = torch.randn(module.weight.shape, generator=generator)
    return embedding, head


def load_toy(folder: Path, target: TargetShape = TARGET, **options: Any) -> Eagle3Draft:
    """Load a checkpoint for the toy target, whose modules it may borrow."""
    embedding, head = target_modules(target)
    return load_draft(
        folder,
        target_config=target,
        target_embedding=embedding,
        **{"target_head": head, **options},
    )


@torch.no_grad()
def chain_logits(
    draft: Eagle3Draft, taps: Tensor, tokens: Tensor, drafted: Sequence[int]
) -> Tensor:
    """Logits [S + D, V_draft] of S context slots and D slots drafted after them, one by one.

    Args:
        draft: the network.
        taps: [S, feature size], the target's taps at positions 0 .. S - 1.
        tokens: [S] int64, the token after each of them.
        drafted: the D tokens that the drafted slots embed.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        past = sum(part.shape[2] for part in keys) - q.shape[2]
        causal = torch.ones(q.shape[2], past + q.shape[2], dtype=torch.bool).tril(past)
        return nn.functional.scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=causal, enable_gqa=True
        )

    count = tokens.shape[0]
    feature = draft.fuse(taps[None].to(draft.dtype))
    feature, head_input = draft(
        draft.embed(tokens[None]), feature, torch.arange(count)[None], attend
    )
    rows = [draft.logits(head_input)[0]]
    feature = feature[:, -1:]
    for i, token in enumerate(drafted):
        embeds = draft.embed(torch.tensor([[token]]))
        feature, head_input = draft(embeds, feature, torch.tensor([[count + i]]), attend)
        rows.append(draft.logits(head_input)[0])
    return torch.cat(rows)


def context(width: int, count: int = 5, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Random taps [count, width] and the tokens [count] that follow them."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(count, width, generator=generator)
    return taps, torch.randint(0, VOCAB, (count,), generator=generator)


def small_draft(**changes: Any) -> Eagle3Draft:
    """A network with a draft vocabulary of three ids, built without a checkpoint."""
    config = Eagle3Config(
        **{
            "hidden_size": HIDDEN,
            "target_hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCAB,
            "draft_vocab_size": 3,
            **changes,
        }
    )
    return Eagle3Draft(config)
