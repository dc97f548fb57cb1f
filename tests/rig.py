"""A rig for the decoding engine: tiny random targets, drafts for them, and drafters that are known.

The targets are random but loud: a few of the vocabulary's rows are large in the LM head, so that
greedy answers wander among those tokens, and a random draft over the same tokens is right often
enough for accepted paths of every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle_dropmatch.acceptors import Acceptor
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, Observation, TreeShape
from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.native import can_compile
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree

needs_compiler = pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler")

VOCAB, HIDDEN, LAYERS, LOUD = 512, 64, 8, 12
TAPS = (2, 4, 5)  # EAGLE-3's own for eight layers

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    # A head is twice as wide as hidden size / heads.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def tiny_config(family: str = "llama", layers: int = LAYERS, **changes: Any) -> Any:
    config_class, _, own = FAMILIES[family]
    return config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **own,
            **changes,
        }
    )


def loud_ids(seed: int = 0) -> Tensor:
    """The tokens that a tiny target likes to say: [LOUD] int64, ascending."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randperm(VOCAB, generator=generator)[:LOUD].sort().values


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A random causal model whose greedy answers vary and hang on the whole context."""
    config = tiny_config(family, **changes)
    config._attn_implementation = attention
    model = FAMILIES[family][1](config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms, and the biases of Qwen2
            noise = 0.1 * torch.randn(weight.shape, generator=generator)
            weight.data = noise if name.endswith("bias") else 1 + noise
        else:
            scale = 1.0 if "embed" in name else 1.9 * weight.shape[1] ** -0.5
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    if not config.tie_word_embeddings:
        model.lm_head.weight.data[loud_ids(seed)] *= 3.0
    return model.to(dtype).eval()


def tiny_target(family: str = "llama", **options: Any) -> TargetModel:
    return TargetModel(tiny_model(family, **options), TAPS)


@torch.no_grad()
def tiny_draft(
    target: TargetModel, seed: int = 0, target_seed: int = 0, **changes: Any
) -> Eagle3Draft:
    """A random EAGLE-3 draft over the target's loud tokens, sharp enough to draw deep trees."""
    config = Eagle3Config(
        **{
            "hidden_size": HIDDEN,
            "target_hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCAB,
            "draft_vocab_size": LOUD,
            **changes,
        }
    )
    draft = Eagle3Draft(config)
    generator = torch.Generator().manual_seed(500 + seed)
    for weight in draft.parameters():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * weight.shape[1] ** -0.5)
    draft.lm_head.weight.mul_(1.5)
    ids = loud_ids(target_seed)
    draft.d2t.copy_(ids - torch.arange(LOUD))
    draft.t2d[ids] = True
    draft.borrow_embedding(target.model.get_input_embeddings())
    return draft.to(target.dtype).eval()


def eagle3(draft: Eagle3Draft) -> Callable[[TreeShape], Drafter]:
    return lambda shape: Eagle3Drafter(draft, shape)


def decoder(
    target: TargetModel,
    drafter: Callable[[TreeShape], Drafter],
    tree: tuple[int, int, int] = (60, 7, 10),
    acceptor: Acceptor | None = None,
) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, drafter, acceptor=acceptor, tree=TreeShape(*tree))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2000 + seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def ids(prompt: Sequence[int]) -> Tensor:
    return torch.tensor([list(prompt)])


def padded(
    rows: Sequence[Sequence[int]], side: str = "left", pad: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of unequal lengths as (input_ids, attention_mask)."""
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        tokens[i, where] = torch.tensor(list(row))
        mask[i, where] = 1
    return tokens, mask


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` new tokens of transformers' own greedy decoding, no stop token."""
    out = model.generate(
        ids(prompt),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def last_logits(model: Any, sequence: Sequence[int]) -> Tensor:
    """[V], a plain forward's logits at the end of a sequence."""
    with torch.inference_mode():
        return model(ids(sequence), use_cache=False).logits[0, -1]


class KnownDrafter(Drafter):
    """Drafts from answers that are known beforehand: exactly as much of them as it is told.

    Args:
        answers: what the target will say in each row, longer than the run by ``levels``.
        levels: depth of the tree.
        right: how many levels of each round's tree are the target's own (0: always wrong).
        decoys: wrong siblings beside every node of the main path; each has a wrong child.
        decoy_token: what the decoys say; by default other wrong tokens.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        levels: int,
        right: Callable[[int], int] | None = None,
        decoys: int = 0,
        decoy_token: int | None = None,
    ) -> None:
        self.answers = [list(answer) for answer in answers]
        self.levels, self.decoys, self.decoy_token = levels, decoys, decoy_token
        self.right = right if right is not None else lambda _: levels
        self.round = 0

    def start(self, prompt: DraftPrompt) -> None:
        self._roots = prompt.roots
        self._at = [1] * len(prompt.lengths)

    def propose(self) -> DraftTree:
        right = self.right(self.round)
        self.round += 1
        rows = [
            self._row(root, answer[at : at + self.levels], right)
            for root, answer, at in zip(self._roots.tolist(), self.answers, self._at, strict=True)
        ]
        tokens = torch.tensor([row[0] for row in rows])
        return DraftTree.from_parents(tokens, torch.tensor([row[1] for row in rows]))

    def observe(self, seen: Observation) -> None:
        self._roots = seen.bonus
        self._at = [at + count for at, count in zip(self._at, seen.counts, strict=True)]

    def select(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self._roots = self._roots[rows]
        self._at = [self._at[row] for row in kept]
        self.answers = [self.answers[row] for row in kept]

    def join(self, seats: Sequence[int], guests: Drafter) -> None:
        raise AssertionError("what it proposes is known for one batch")

    def _row(self, root: int, coming: list[int], right: int) -> tuple[list[int], list[int]]:
        tokens, parents, main = [root], [-1], 0
        for level, true in enumerate(coming):
            for decoy in range(self.decoys):
                wrong = (true + 2 + decoy) % VOCAB
                if self.decoy_token not in (None, true):
                    wrong = self.decoy_token
                tokens += [wrong, wrong]
                parents += [main, len(tokens) - 2]
            tokens.append(true if level < right else (true + 1) % VOCAB)
            parents.append(main)
            main = len(tokens) - 1
        return tokens, parents


def oracle(answers: Sequence[Sequence[int]], levels: int, **options: Any) -> Any:
    """A factory of drafters that are always right."""
    return lambda _: KnownDrafter(answers, levels, **options)


def hostile(answers: Sequence[Sequence[int]], levels: int, **options: Any) -> Any:
    """A factory of drafters that are always wrong."""
    return oracle(answers, levels, right=lambda _: 0, **options)
