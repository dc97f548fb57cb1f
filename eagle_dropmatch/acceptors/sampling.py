"""Lossless sampling on trees."""

from __future__ import annotations

from eagle_dropmatch.acceptors.exact import ExactAcceptor


class SamplingAcceptor(ExactAcceptor):
    """Accept a node iff it is the token that the target sampled at its parent.

    EAGLE walks the siblings in order, keeps x with probability p(x) and otherwise takes it out of p
    and renormalises; the token after the path is drawn from what is left. Proposals being
    deterministic, that keeps each sibling with probability p(x) in all, which is the law of drawing
    one token from p and following it where it leads. So this is ``exact`` with the target's sample
    in the place of its argmax, and at temperature 0 the two are one.
    """

    name = "sampling"
