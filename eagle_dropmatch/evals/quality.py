"""What an answer looks like to the target itself: its log-probability, and where it strays.

One forward over prompt and answer, outside all timings. A lossy rule is bought with tokens that the
target would not have said: this says how unlikely they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..target import TargetModel

_ROWS_AT_ONCE = 128  # positions whose logits are in memory together, in float32


@dataclass(frozen=True)
class TurnQuality:
    """One answer in the target's eyes, at temperature 1 and without any truncation."""

    log_probability: float
    """Sum over the answer's tokens, in nats."""
    strays: tuple[tuple[int, float, int], ...]
    """(place in the answer, probability, rank) of each token that is not the argmax; the argmax has
    rank 0."""
    covered: int | None = None
    """Tokens of the answer that the draft can say at all; None where nobody asked."""


def judge_turn(
    target: TargetModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    drafted: Tensor | None = None,
) -> TurnQuality:
    """Read prompt and answer once.

    Args:
        drafted: [V] bool, the tokens of the draft's vocabulary.
    """
    import torch

    from ..sampling import first_argmax

    covered = None if drafted is None else sum(drafted[list(output_ids)].tolist())
    if not output_ids:
        return TurnQuality(0.0, (), covered)
    total = 0.0
    strays: list[tuple[int, float, int]] = []
    with torch.inference_mode():
        ids = torch.tensor([[*prompt_ids, *output_ids]], device=target.device)
        hidden = target.body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0]
        hidden = hidden[len(prompt_ids) - 1 :].to(target.head_device)
        answer = ids[0, len(prompt_ids) :].to(target.head_device)
        for start in range(0, len(output_ids), _ROWS_AT_ONCE):
            said = answer[start : start + _ROWS_AT_ONCE]
            logits = target.head(hidden[start : start + _ROWS_AT_ONCE])
            # Ties are the first argmax's, in the model's own dtype: what greedy decoding says.
            astray = (first_argmax(logits) != said).nonzero()[:, 0]
            log_probs = logits.float().log_softmax(-1)
            mine = log_probs.gather(1, said[:, None])
            total += float(mine.sum())
            ranks = (log_probs[astray] > mine[astray]).sum(-1)
            strays += zip(
                (astray + start).tolist(),
                mine[astray, 0].exp().tolist(),
                ranks.clamp(min=1).tolist(),
                strict=True,
            )
    return TurnQuality(total, tuple(strays), covered)
