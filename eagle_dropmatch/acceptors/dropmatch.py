"""DropMatch's naive token matching (arXiv 2603.03333, eq. 4) on trees."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import (
    Acceptor,
    PromptContext,
    RowState,
    StepContext,
    exact_matches,
)
from eagle_dropmatch.acceptors.heads import head_choices, mask_uniforms, solve_p_drop
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import TargetOutput
from eagle_dropmatch.tree import DraftTree

#: The paper's dropout rate, and the most that ``auto`` ever chooses.
PAPER_P_DROP = 0.3


class NaiveAcceptor(Acceptor):
    """Accept a node iff it is the argmax of at least one of K dropout heads at its parent.

    Args:
        K: number of heads (the paper: 5).
        p_drop: dropout rate in [0, 1), or ``"auto"``: solved on each prompt so that a head agrees
            with the clean argmax at ``head_agreement`` of its positions, at most 0.3.
        head_agreement: the share that ``auto`` solves for, in (0, 1]. 0.8 is the lowest at which,
            on the reference target, the median token that a head lets in beside the clean argmax
            still has a tenth of the clean probability (results/agreement).
        include_clean: count the clean head among the heads; acceptance from the same prefix is
            then never shorter than exact.
        mask: ``"node"`` draws masks for every node, ``"step"`` one set for all nodes of a step.
        seed: of the masks' own generators.
    """

    name = "naive"

    def __init__(
        self,
        K: int = 5,
        p_drop: float | Literal["auto"] = "auto",
        head_agreement: float = 0.8,
        include_clean: bool = False,
        mask: Literal["node", "step"] = "node",
        seed: int = 0,
    ) -> None:
        if not isinstance(K, int) or K < 1:
            raise UserError(f"K is {K!r}: expected a whole number of at least one dropout head")
        if p_drop != "auto" and not (
            isinstance(p_drop, (int, float)) and math.isfinite(p_drop) and 0 <= p_drop < 1
        ):
            raise UserError(f"p_drop is {p_drop!r}: expected a number in [0, 1) or 'auto'")
        if not 0 < head_agreement <= 1:
            raise UserError(f"head_agreement is {head_agreement}: expected a share in (0, 1]")
        if mask not in ("node", "step"):
            raise UserError(f"mask is {mask!r}: expected 'node' or 'step'")
        self.K, self.p_drop, self.head_agreement = K, p_drop, head_agreement
        self.include_clean, self.mask, self.seed = include_clean, mask, seed

    def start(self, context: PromptContext) -> RowState:
        """Each row's p_drop: the one given, or the one that fits the row's prompt."""
        hidden = context.prefill.hidden
        if self.p_drop != "auto":
            rates = torch.full((hidden.shape[0],), float(self.p_drop), device=hidden.device)
        else:
            rates = torch.stack(
                [
                    solve_p_drop(
                        row[:length],
                        context.head,
                        context.weight,
                        target_agreement=self.head_agreement,
                        ceiling=PAPER_P_DROP,
                    )
                    for row, length in zip(hidden, context.lengths, strict=True)
                ]
            )
        return {"p_drop": rates}

    def accept(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Tensor:
        exact = exact_matches(tree, context.argmax)
        chosen = self._choices(tree, output, context)  # [B, N, K], -1 at leaves
        at_parent = chosen.gather(
            1, tree.parents.clamp(min=0)[..., None].expand(-1, -1, chosen.shape[-1])
        )
        accepted = (at_parent == tree.tokens[..., None]).any(-1)
        return accepted | exact if self.include_clean else accepted

    def _choices(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Tensor:
        batch, nodes = tree.tokens.shape
        # Heads matter only where a child waits for their verdict.
        has_child = torch.zeros(batch, nodes, dtype=torch.int64, device=tree.tokens.device)
        is_child = (tree.valid & (tree.parents >= 0)).long()
        has_child.scatter_add_(1, tree.parents.clamp(min=0), is_child)
        row, node = has_child.nonzero(as_tuple=True)
        shape = (nodes if self.mask == "node" else 1, self.K, output.hidden.shape[-1])
        uniforms = mask_uniforms(
            context.row_keys, self.seed, context.step, shape, output.hidden.device
        )
        picked = uniforms[row, node if self.mask == "node" else torch.zeros_like(node)]
        rates = context.state["p_drop"][row]
        chosen = output.hidden.new_full((batch, nodes, self.K), -1, dtype=torch.int64)
        choices = head_choices(
            output.hidden[row, node], picked, rates, context.head, output.logits.shape[-1]
        )
        # Without dropout a head is the clean one. Its product has another shape here, and in half
        # precision that rounds near ties otherwise: p_drop 0 must equal exact to the bit.
        clean = context.argmax[row, node][:, None]
        chosen[row, node] = torch.where(rates[:, None] == 0, clean, choices)
        return chosen
