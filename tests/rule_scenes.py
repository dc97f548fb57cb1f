"""Steps for acceptance rules to judge: small trees, hidden states, an LM head, no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_dropmatch.acceptors import Acceptor, PromptContext, StepContext
from eagle_dropmatch.sampling import Sampler, first_argmax, place_uniforms
from eagle_dropmatch.target import LMHead, PrefillOutput, TargetOutput
from eagle_dropmatch.tree import DraftTree


def linear_head(weight: Tensor, bias: Tensor | None = None, *, native: bool = False) -> LMHead:
    """An LM head of this weight [V, D] that does nothing to its logits."""
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight.data = weight
    if bias is not None:
        module.bias.data = bias
    return LMHead(module.requires_grad_(False), native=native)


class FunctionHead(LMHead):
    """A head that says whatever a function says."""

    def __init__(self, function: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        # A finish, though of nothing: its logits are not the plain product.
        super().__init__(linear_head(weight).module, lambda logits: logits)
        self.function = function

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


@dataclass(frozen=True)
class Scene:
    """A batch of trees with everything that a step knows of them."""

    tree: DraftTree
    hidden: Tensor  # [B, N, D]
    head: LMHead
    draft_ids: Tensor | None = None
    keys: tuple[int, ...] = ()

    @property
    def logits(self) -> Tensor:
        return self.head(self.hidden)

    def rows(self, index: list[int]) -> Scene:
        return Scene(
            self.tree.rows(torch.tensor(index)),
            self.hidden[index],
            self.head,
            self.draft_ids,
            tuple(self.row_keys[i] for i in index),
        )

    @property
    def row_keys(self) -> list[int]:
        return list(self.keys) or [70 + row for row in range(self.tree.batch_size)]

    def step(
        self,
        rule: Acceptor,
        sampler: Sampler | None = None,
        *,
        stops: tuple[int, ...] = (),
        logits: Tensor | None = None,
        **changes: Any,
    ) -> StepContext:
        """The context in which the rule judges this scene."""
        sampler = sampler if sampler is not None else Sampler()
        logits = self.logits if logits is None else logits
        output = TargetOutput(logits, self.hidden, self.hidden)
        prefill = PrefillOutput(logits[:, 0], self.hidden[:, 0], self.hidden, self.hidden)
        lengths = [self.tree.num_nodes] * self.tree.batch_size
        if sampler.greedy:
            choice = first_argmax(logits)
        else:
            places = self.tree.max_depth + 1
            uniforms = place_uniforms(
                self.row_keys, [5] * len(self.row_keys), places, logits.device
            )
            choice = sampler.choose(
                sampler.scores(logits.flatten(0, 1)), uniforms.gather(1, self.tree.depths).flatten()
            ).view_as(self.tree.tokens)
        given: dict[str, Any] = {
            "tree": self.tree,
            "output": output,
            "head": self.head,
            "sampler": sampler,
            "logits": logits,
            "before": None,
            "choice": choice,
            "stop_ids": torch.tensor(stops, dtype=torch.int64),
            "row_keys": self.row_keys,
            "steps": [3] * self.tree.batch_size,
            "draft_ids": self.draft_ids,
            "state": rule.start(PromptContext(prefill, lengths, self.head)),
            **changes,
        }
        return StepContext(**given)


def random_scene(
    batch: int = 5,
    nodes: int = 14,
    size: int = 24,
    vocab: int = 9,
    seed: int = 0,
    *,
    padded: bool = True,
    sharp: float = 1.0,
) -> Scene:
    """Random trees of distinct siblings (the last row padded), a head, a draft's logits.

    The draft knows all tokens but the last two, and its logits lean towards the target's.
    """
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, nodes), -1)
    tokens = torch.randint(vocab, (batch, nodes), generator=generator)
    for row in range(batch):
        for node in range(1, nodes):
            while True:
                parent = int(torch.randint(node, (1,), generator=generator))
                taken = tokens[row, :node][parents[row, :node] == parent].tolist()
                free = [token for token in range(vocab) if token not in taken]
                if free:
                    break
            parents[row, node] = parent
            pick = int(torch.randint(len(free), (1,), generator=generator))
            tokens[row, node] = free[pick]
    valid = torch.ones(batch, nodes, dtype=torch.bool)
    if padded:
        valid[-1, nodes // 2 :] = False
    hidden = torch.randn(batch, nodes, size, generator=generator)
    weight = sharp * torch.randn(vocab, size, generator=generator)
    draft_ids = torch.arange(vocab - 2)
    noise = torch.randn(batch, nodes, vocab - 2, generator=generator)
    draft_logits = (hidden @ weight.T)[..., : vocab - 2] / 2 + noise
    scores = -torch.rand(batch, nodes, generator=generator).cumsum(1)
    scores[:, 0] = 0
    tree = DraftTree.from_parents(tokens, parents, scores=scores, valid=valid)
    return Scene(
        DraftTree(**{**vars(tree), "draft_logits": draft_logits}),
        hidden,
        linear_head(weight),
        draft_ids,
    )
