"""Training-time test: the draft learns from its own outputs (arXiv 2503.01840, section 3.2).

Row t of a sequence joins the target's feature F_t with the token x_{t+1} and predicts x_{t+2}. In
step j >= 1 the same row goes on from its own output of step j - 1 with the token x_{t+1+j}, as a
drafted slot does at inference. Rows are independent of each other but for the keys of step 0,
which are built from target features: row t attends to those of rows <= t, and to its own keys of
steps 1..j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_dropmatch.drafts.eagle3 import Eagle3Draft


@dataclass(frozen=True)
class TeacherBatch:
    """What the frozen target says about a batch of B sequences of S tokens.

    ``supervised[b, i]`` marks tokens that the target (or the corpus' author) wrote and after
    which decoding goes on: the assistant's tokens without the stop token.
    """

    tokens: Tensor  # [B, S] int64
    supervised: Tensor  # [B, S] bool
    taps: Tensor  # [B, S, num_taps * H_target]
    probs: Tensor  # [B * S, V_draft], softmax of the target's logits over the draft's vocabulary
    following: Tensor  # [B, S] int64, the next token as a draft id, -1 outside the draft's ids


class Step(NamedTuple):
    """The rows that step j supervises, and what the draft made of them."""

    rows: Tensor  # [R] int64, flat indices b * S + t
    head_input: Tensor  # [R, H]
    labels: Tensor  # [R] int64, flat index into TeacherBatch.probs of each row's target


def step_rows(supervised: Tensor, step: int) -> Tensor:
    """Which rows t step j supervises: x_{t+1} .. x_{t+1+j} were all written by the answer.

    The mask is that of x_{t+1}, the row's input token: at inference a slot's token is a generated
    one. Rows whose token lies past the right edge are out, so nothing is carried over it.
    """
    size = supervised.shape[1]
    kept = torch.zeros_like(supervised)
    if step + 1 >= size:
        return kept
    rows = size - 1 - step
    kept[:, :rows] = supervised[:, 1 : 1 + rows]
    for ahead in range(2, step + 2):
        kept[:, :rows] &= supervised[:, ahead : ahead + rows]
    return kept


def shift_left(x: Tensor, by: int) -> Tensor:
    """``x`` [B, S] moved left by ``by``, zeros at the right edge."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])))


class OwnRowAttention:
    """The attention of training-time test over keys kept from all steps so far.

    Rows go through in blocks: a block sees the step-0 keys up to its own end, and of each later
    step only its own rows, so the cost of a step grows by the block, not by the sequence.
    On a GPU one block (0) is best: there the launches cost, not the products.
    """

    def __init__(self, block: int = 64) -> None:
        self.block = block
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(k)
        self._values.append(v)
        batch, heads, size, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        grouped = q.view(batch, kv_heads, group, size, dim)
        parts = []
        block = self.block or size
        for start in range(0, size, block):
            end = min(start + block, size)
            rows = end - start
            out = F.scaled_dot_product_attention(
                grouped[:, :, :, start:end].reshape(batch, kv_heads, group * rows, dim),
                self._window(self._keys, start, end),
                self._window(self._values, start, end),
                attn_mask=self._mask(start, end, group, q),
            )
            parts.append(out.view(batch, kv_heads, group, rows, dim))
        return torch.cat(parts, dim=3).view(batch, heads, size, dim)

    @staticmethod
    def _window(kept: list[Tensor], start: int, end: int) -> Tensor:
        return torch.cat([kept[0][:, :, :end], *(x[:, :, start:end] for x in kept[1:])], dim=2)

    def _mask(self, start: int, end: int, group: int, like: Tensor) -> Tensor:
        rows = end - start
        causal = torch.ones(rows, end, dtype=torch.bool, device=like.device).tril(start)
        own = torch.eye(rows, dtype=torch.bool, device=like.device)
        seen = torch.cat([causal] + [own] * (len(self._keys) - 1), dim=1).repeat(group, 1)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
            ~seen, float("-inf")
        )


def unroll(
    draft: Eagle3Draft, batch: TeacherBatch, rows: Sequence[Tensor], block: int = 64
) -> list[Step]:
    """Run a step of training-time test for each of ``rows``; gradients flow through all of them.

    Args:
        draft: the network.
        batch: what the target says.
        rows: for step j, [R_j] int64, the flat rows b * S + t whose outputs are asked for.
        block: rows that attend together, 0 for all.
    """
    size = batch.tokens.shape[1]
    attend = OwnRowAttention(block)
    feature = draft.fuse(batch.taps)
    positions = torch.arange(size, device=batch.tokens.device).expand_as(batch.tokens)
    out: list[Step] = []
    for j, asked in enumerate(rows):
        embeds = draft.embed(shift_left(batch.tokens, j + 1))
        feature, head_input = draft(embeds, feature, positions + j, attend)
        # Row t of step j is taught by the target's distribution after x_{t+1+j}.
        out.append(Step(asked, head_input.flatten(0, 1)[asked], asked + j + 1))
    return out


def supervised_rows(batch: TeacherBatch, steps: int) -> list[Tensor]:
    """The flat rows that each step learns from: supervised, next token in the draft's vocabulary.

    All steps at once and before the first forward: counting rows waits for the device.
    """
    known = batch.following.flatten() >= 0
    out: list[Tensor] = []
    for j in range(steps):
        # What rolls around the end is never supervised.
        kept = step_rows(batch.supervised, j).flatten() & known.roll(-(j + 1))
        out.append(kept.nonzero().squeeze(1))
    return out


def chunk_loss(logits: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a few rows and its gradient: ([] float32, [C, V] in the logits' dtype).

    Args:
        logits: [C, V].
        target: [C, V], soft targets.
        scale: [C] float32.
    """
    wide, soft = logits.float(), target.float()
    norm = wide.logsumexp(-1, keepdim=True)
    loss = (scale * (norm.squeeze(-1) - (soft * wide).sum(-1))).sum()
    gradient = ((wide - norm).exp() - soft) * scale[:, None]
    return loss, gradient.to(logits.dtype)


#: ``chunk_loss``, or a compiled form of it.
ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of draft logits against soft targets, with its gradient taken on the way.

    Logits exist for one chunk of rows at a time: the whole [R, V] never does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        probs: Tensor,
        labels: Tensor,
        scale: Tensor,
        chunk: int,
        kernel: ChunkLoss,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], chunk):
            part = hidden[start : start + chunk]
            target = probs[labels[start : start + chunk]]
            loss, grad = kernel(part @ weight.T, target, scale[start : start + chunk])
            total += loss
            grad_hidden[start : start + chunk] = grad @ weight
            grad_weight += grad.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (above,) = grads
        return grad_hidden * above, grad_weight * above, None, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    probs: Tensor,
    labels: Tensor,
    scale: Tensor,
    chunk: int = 1024,
    kernel: ChunkLoss = chunk_loss,
) -> Tensor:
    """Sum over rows r of -scale_r sum_v p_v log softmax(hidden_r @ weight.T)_v, in float32.

    Args:
        hidden: [R, H], what the draft's LM head multiplies.
        weight: [V, H], the draft's LM head.
        probs: [P, V], soft targets, each row summing to one.
        labels: [R] int64, the row of ``probs`` that teaches each row of ``hidden``.
        scale: [R] float32.
        chunk: rows whose logits exist at once.
        kernel: what a chunk goes through.
    """
    apply: Callable[..., Tensor] = _SoftCrossEntropy.apply
    return apply(hidden, weight, probs, labels, scale, chunk, kernel)


def ttt_loss(
    draft: Eagle3Draft,
    batch: TeacherBatch,
    *,
    steps: int,
    decay: float,
    block: int = 64,
    kernel: ChunkLoss = chunk_loss,
) -> tuple[Tensor, Tensor]:
    """The summed, step-weighted loss of a batch and the number of rows of its first step.

    Rows whose next token is outside the draft's vocabulary are dropped. (The reference asks the
    target's argmax instead; the two are one on greedy answers, and the argmax over the whole
    vocabulary would cost more than the rest of the step.)
    """
    assert draft.lm_head is not None
    rows = supervised_rows(batch, steps)
    taken = unroll(draft, batch, rows, block)
    scales = [torch.full(kept.shape, decay**j, device=kept.device) for j, kept in enumerate(rows)]
    hidden = torch.cat([step.head_input for step in taken])
    if draft.config.logit_scale != 1.0:
        hidden = hidden * draft.config.logit_scale
    weight: Tensor = draft.lm_head.weight  # type: ignore[assignment]
    # One product for the rows of all steps: the head's gradient is then summed once.
    loss = soft_cross_entropy(
        hidden,
        weight,
        batch.probs,
        torch.cat([step.labels for step in taken]),
        torch.cat(scales),
        kernel=kernel,
    )
    return loss, torch.full_like(loss, rows[0].numel())


@torch.no_grad()
def matched_lengths(draft: Eagle3Draft, batch: TeacherBatch, steps: int, block: int = 64) -> Tensor:
    """How many steps in a row the draft's argmax is the next token, for each row with all steps.

    Returns [R] int64 in 0..steps. On answers that the target wrote greedily, 1 + the mean is the
    tau of chain drafting with ``steps`` levels (NeMo's simulated acceptance length), were every
    position equally likely to be a root.
    """
    rows = step_rows(batch.supervised, steps - 1).flatten().nonzero().squeeze(1)
    run = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    following = batch.following.flatten()
    for step in unroll(draft, batch, [rows] * steps, block):
        alive &= draft.logits(step.head_input).argmax(-1) == following[step.labels]
        run += alive
    return run
