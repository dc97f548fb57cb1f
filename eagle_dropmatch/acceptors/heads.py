"""The K dropout heads of DropMatch (arXiv 2603.03333, eq. 2-3), and the p_drop that fits a target.

Head i multiplies h * m_i / (1 - p) by the LM head, m_i ~ Bernoulli(1 - p)^D. Only this product is
touched: weights, KV cache and the clean logits are not.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle_dropmatch import native
from eagle_dropmatch.acceptors import rate_native
from eagle_dropmatch.sampling import first_argmax
from eagle_dropmatch.target import LMHead

_UNIFORMS = Path(__file__).with_name("uniforms.cpp")


def drop(hidden: Tensor, uniforms: Tensor, p_drop: Tensor) -> Tensor:
    """``hidden`` under dropout masks, in its dtype.

    Args:
        hidden: [..., D], the LM head's input.
        uniforms: [..., D], uniform on [0, 1); an entry below ``p_drop`` drops that dimension.
        p_drop: broadcastable to them, in [0, 1).
    """
    scale = (1.0 - p_drop).reciprocal()
    return (hidden * scale.to(hidden.dtype)).masked_fill(uniforms < p_drop, 0.0)


def shake(hidden: Tensor, uniforms: Tensor, p_drop: Tensor) -> Tensor:
    """``hidden`` under Gaussian noise of dropout's own mean and variance, in its dtype.

    Each dimension is multiplied by 1 + sqrt(p / (1 - p)) * g, g standard normal: what dropout tends
    to where no few dimensions dominate, with flip probabilities that hold in closed form.

    Args: as for ``drop``; ``uniforms`` become g through the normal quantile.
    """
    spread = (p_drop / (1.0 - p_drop)).sqrt()
    return hidden * (1.0 + spread * normal(uniforms)).to(hidden.dtype)


def normal(uniforms: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones on [0, 1), through the quantile."""
    # 0 and 1 have no quantile, and the middle of the last cell of 2^-24 would round to 1.
    return torch.special.ndtri((uniforms + 2.0**-25).clamp(max=1 - 2.0**-24))


#: How a head's input is disturbed, by name.
NOISES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dropout": drop,
    "gaussian": shake,
}


def mask_uniforms(
    row_keys: Sequence[int],
    seed: int,
    steps: Sequence[int],
    shape: tuple[int, ...],
    device: torch.device,
    purpose: str = "",
    *,
    machine_code: bool = False,
) -> Tensor:
    """Uniform numbers [B, *shape] float32 that follow from (purpose, seed, row key, step) alone.

    ``steps`` is one a row. Each row has a generator of its own, so a row draws the same masks
    whatever batch it is in, and turning dropout on leaves every other random stream where it was.

    Args:
        machine_code: on a CPU, draw the same numbers by uniforms.cpp, several times faster.
    """
    out = torch.empty(len(row_keys), *shape, device=device)
    names = [f"{purpose}{seed} {key} {step}" for key, step in zip(row_keys, steps, strict=True)]
    digests = [hashlib.blake2b(name.encode(), digest_size=7).digest() for name in names]
    seeds = [int.from_bytes(digest, "little") for digest in digests]
    if machine_code and device.type == "cpu":
        keys = torch.tensor(seeds)
        sizes = (len(seeds), math.prod(shape), torch.get_num_threads())
        run = native.kernel(_UNIFORMS, out.dtype)
        run(*native.numbers_and_places(keys, *sizes, out))
        return out
    generator = torch.Generator(device)
    for numbers, each in zip(out, seeds, strict=True):
        numbers.uniform_(generator=generator.manual_seed(each))
    return out


def head_choices(
    hidden: Tensor,
    uniforms: Tensor,
    p_drop: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    noise: Callable[[Tensor, Tensor, Tensor], Tensor] = drop,
    max_elements: int = 2**26,
) -> Tensor:
    """The argmax of every dropout head, all heads and nodes in one product.

    Args:
        hidden: [M, D], the LM head's input at M nodes.
        uniforms: [M, K, D].
        p_drop: [M, K] float32.
        head: hidden [..., D] -> logits [..., V].
        vocab_size: V.
        noise: one of ``NOISES``.
        max_elements: logits that may exist at once; beyond it the product goes in chunks of rows
            (K = 16 over 60 nodes and a vocabulary of 152k would otherwise hold 146M).

    Returns:
        [M, K] int64 token ids.
    """
    nodes, heads, size = uniforms.shape
    noisy = noise(hidden[:, None], uniforms, p_drop[..., None]).reshape(-1, size)
    chunks = noisy.split(max(1, max_elements // vocab_size))
    return torch.cat([first_argmax(head(chunk)) for chunk in chunks]).view(nodes, heads)


def _agreement(parts: Tensor, bias: Tensor, uniforms: Tensor) -> Callable[[Tensor], Tensor]:
    """The share of (position, head) pairs whose head picks the clean argmax, by p_drop.

    Args:
        parts: [P, C, D] float32, what each dimension adds to the logits of each position's C most
            likely tokens, best first.
        bias: [P, C], of the LM head at these tokens.
        uniforms: [P, K, D].
    """
    whole, dropped = parts.sum(-1)[:, None], torch.empty_like(uniforms)

    def share(p: Tensor) -> Tensor:
        # Subtracting what is dropped needs no disturbed copy of the hidden states.
        lost = torch.bmm(torch.lt(uniforms, p, out=dropped), parts.mT)
        noisy = (whole - lost) / (1 - p) + bias[:, None]
        return (noisy.argmax(-1) == 0).float().mean()

    return share


@functools.lru_cache(maxsize=8)
def _fixed_uniforms(positions: int, heads: int, size: int, device: torch.device) -> Tensor:
    """Always the same numbers: runs with other mask seeds must be runs at the same rate."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(positions, heads, size, generator=generator, device=device)


_CANDIDATES = 32  # rate.cpp has the same number
_TRIALS = 10


def solve_p_drop(
    hidden: Tensor,
    head: LMHead,
    *,
    target_agreement: float,
    ceiling: float,
    heads: int = 8,
    positions: int = 64,
) -> Tensor:
    """The p_drop at which a head agrees with the clean argmax at a chosen share of positions.

    A fixed p_drop means little: 0.3 leaves 98% agreement on a 70B target and 40% on one of 135M.
    What carries over is the agreement, so p is solved on the prompt's own last positions, by
    bisection under one fixed set of uniforms; only each position's most likely tokens compete,
    since others cannot win at the small p that comes out.

    Args:
        hidden: [S, D], the LM head's input at one prompt's positions.
        head: the LM head.
        target_agreement: share in (0, 1].
        ceiling: never above this p (the paper's 0.3).

    Returns:
        Scalar float32 tensor in [0, ceiling].
    """
    hidden = hidden[-positions:]
    uniforms = _fixed_uniforms(hidden.shape[0], heads, hidden.shape[1], hidden.device)
    logits = head(hidden)
    if head.native:
        found = rate_native.solve(
            logits,
            hidden,
            head,
            uniforms,
            agreement=target_agreement,
            ceiling=ceiling,
            trials=_TRIALS,
        )
        if found is not None:
            return found
    ids = logits.topk(min(_CANDIDATES, head.weight.shape[0]), dim=-1).indices
    parts = head.weight[ids].float().mul_(hidden[:, None])
    bias = parts.new_zeros(ids.shape) if head.bias is None else head.bias[ids].float()
    share = _agreement(parts, bias, uniforms)
    low = torch.zeros((), device=hidden.device)
    high = torch.full((), ceiling, device=hidden.device)
    if share(high) >= target_agreement:
        return high
    for _ in range(_TRIALS):
        middle = (low + high) / 2
        enough = share(middle) >= target_agreement
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low
