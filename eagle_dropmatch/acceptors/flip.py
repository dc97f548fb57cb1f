"""DropMatch's naive rule without its dice: how likely a head is to prefer the draft token."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import StepContext
from eagle_dropmatch.acceptors.checks import number
from eagle_dropmatch.acceptors.dropmatch import DropoutRule
from eagle_dropmatch.acceptors.parents import Parents
from eagle_dropmatch.acceptors.scores import Score, Scores, all_hold
from eagle_dropmatch.acceptors.step_heads import Heads
from eagle_dropmatch.target import LMHead


class FlipProbabilityAcceptor(DropoutRule):
    """Accept x iff one of K dropout heads would prefer it to the argmax with enough probability.

    Under dropout the logit gap between the argmax a and x has mean D = z_a - z_x and variance
    s^2 = p / (1 - p) * sum over j of ((W_aj - W_xj) h_j)^2. Taken as normal, a head prefers x with
    probability Phi(-D / s), and one of K does with 1 - (1 - Phi(-D / s))^K. No mask is drawn and no
    head computed: only the rows of W at the argmax and at the drafted tokens are read. The target's
    own choice always passes. Tokens that could beat both are left out of the account.

    Args:
        threshold: in (0, 1], of that probability.
        K, p_drop, head_agreement, adapt: as for the rules of K heads; K rates count one by one.
    """

    name = "flip_probability"

    def __init__(
        self,
        threshold: float = 0.5,
        K: int = 5,
        p_drop: object = "auto",
        head_agreement: float = 0.8,
        adapt: str = "none",
    ) -> None:
        super().__init__(K, p_drop, head_agreement, adapt=adapt)  # type: ignore[arg-type]
        self.threshold = number("threshold", threshold, 0, 1, open_low=True)

    def match(self, heads: Heads, context: StepContext) -> Tensor:
        return context.exact | all_hold(self.measure(heads, context))

    def measure(self, heads: Heads, context: StepContext) -> Scores:
        rates = heads.parents.to_children(heads.rates)
        flips = flip_probability(context, context.head, rates)
        return {"flip probability": Score(1 - (1 - flips).prod(-1), ">=", self.threshold)}

    def votes(self, heads: Heads) -> Scores:
        """None: no head is computed."""
        return {}


def flip_probability(context: StepContext, head: LMHead, rates: Tensor) -> Tensor:
    """Phi(-D / s) of each node against the argmax at its parent, for each head's rate.

    Args:
        rates: [B, N, K] float32, p_drop.

    Returns:
        [B, N, K] float32; 1 at the argmax itself; 0 where nothing is dropped.
    """
    parents: Parents = context.parents
    if not parents.count:
        return rates
    best = parents.to_children(parents.likeliest)
    tokens = context.tree.tokens
    rows = _rows(context, head, best) - _rows(context, head, tokens)
    terms = rows[..., :-1] * parents.to_children(parents.hidden).float()
    mean = terms.sum(-1) + rows[..., -1]
    spread = (rates / (1 - rates)).sqrt() * terms.square().sum(-1).sqrt()[..., None]
    flips = torch.special.ndtr(-mean[..., None] / spread.clamp(min=1e-20))
    flips = flips.masked_fill(spread == 0, 0.0)
    flips = flips.masked_fill((best == tokens)[..., None], 1.0)
    # Without dropout a head says what the target says, which is for exact acceptance to find.
    return flips.masked_fill(rates == 0, 0.0)


def _rows(context: StepContext, head: LMHead, tokens: Tensor) -> Tensor:
    """[B, N, D + 1] float32: W's rows with the bias behind, as the repetition penalty scales them.

    Args:
        tokens: [B, N] int64, each of them judged at its node's parent.
    """
    weight = head.weight[tokens].float()
    bias = weight.new_zeros(tokens.shape) if head.bias is None else head.bias[tokens].float()
    rows = torch.cat((weight, bias[..., None]), dim=-1)
    if not context.sampler.penalises:
        return rows
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    at = row, context.tree.parents.clamp(min=0), tokens
    raw = context.output.logits[at].float()
    factor = (context.logits[at].float() / raw).where(raw != 0, 1.0)
    return rows * factor[..., None]
