"""Divergences between next-token distributions, in nats, from log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LN2 = math.log(2.0)


def weighted(log_p: Tensor, log_ratio: Tensor) -> Tensor:
    """The sum over the last dimension of p * log_ratio, where p = 0 adds nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * log_ratio, 0.0).sum(-1)


def js_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of p and q [..., V], in [0, ln 2]: [...]."""
    log_m = torch.logaddexp(log_p, log_q) - LN2
    js = (weighted(log_p, log_p - log_m) + weighted(log_q, log_q - log_m)) / 2
    return js.clamp(min=0.0)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence of p from q [..., V], infinite where q misses a part of p."""
    return weighted(log_p, log_p - log_q).clamp(min=0.0)


def js_from_draft(log_q: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    """JS(q, p), where q lives on some tokens and is 0 on all others.

    Outside q's tokens p meets a mixture of half its own size, so each unit of p's mass there adds
    ln 2 / 2: only q's tokens have to be looked at.

    Args:
        log_q: [M, V_draft] float32, normalised.
        ids: [V_draft] int64, the target's ids of q's tokens.
        log_p: [M, V] float32, normalised.

    Returns:
        [M] float32.
    """
    shared = log_p[:, ids]
    log_m = torch.logaddexp(log_q, shared) - LN2
    inside = (weighted(log_q, log_q - log_m) + weighted(shared, shared - log_m)) / 2
    outside = (1.0 - shared.exp().sum(-1)).clamp(min=0.0)
    return (inside + outside * LN2 / 2).clamp(min=0.0)


def kl_to_draft(log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) over q's tokens, where q is 0 on all others: [M].

    In full it is infinite wherever p has any mass outside q's tokens, which is everywhere. p's mass
    outside is put on one more token that q gives ``1e-6``, so that it counts without deciding
    alone.
    """
    shared = log_p[:, ids]
    outside = (1.0 - shared.exp().sum(-1)).clamp(min=0.0)
    inside = weighted(shared, shared - log_q)
    return (inside + torch.special.xlogy(outside, outside / 1e-6)).clamp(min=0.0)
