"""How often a dropout head agrees with the clean one, and what it picks when it does not.

This is what a default for ``p_drop`` or ``head_agreement`` is chosen from. No draft is involved:
the target answers greedily, and K heads vote at every position of its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..acceptors import make_acceptor
from ..acceptors.dropmatch import PAPER_P_DROP
from ..acceptors.heads import head_choices, mask_uniforms, solve_p_drop
from ..drafts.base import NoDrafter
from ..loop import DecodingLoop, Limits
from ..sampling import first_argmax
from ..target import TargetModel


@dataclass(frozen=True)
class Setting:
    """A fixed dropout rate, or a share of agreement that is solved on every prompt."""

    p_drop: float | None = None
    head_agreement: float | None = None


@dataclass(frozen=True)
class AgreementRow:
    """One setting, pooled over the answers' positions."""

    setting: Setting
    mean_p_drop: float
    prompt_agreement: float
    """Share of (prompt position, head) pairs that pick the clean argmax."""
    answer_agreement: float
    """The same on positions that predict answer tokens."""
    unanimous: float
    """Share of answer positions at which all K heads agree with each other."""
    clean_in_set: float
    """Share of answer positions at which some head picks the clean argmax."""
    mean_set_size: float
    other_probability: tuple[float, float, float]
    """Quartiles of the clean probability of the picked tokens that are not the clean argmax."""


@dataclass(frozen=True)
class _Answer:
    prompt_hidden: Tensor  # [S, D]
    answer_hidden: Tensor  # [n, D], the positions that predict the answer's tokens
    key: int


@torch.inference_mode()
def measure(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    *,
    heads: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    seed: int = 0,
) -> list[AgreementRow]:
    """Answer the prompts greedily and let ``heads`` dropout heads vote under every setting."""
    answers = [_answer(target, prompt, max_new_tokens, stop_ids) for prompt in prompts]
    return [_row(target, answers, setting, heads, seed) for setting in settings]


def _answer(
    target: TargetModel, prompt: Sequence[int], max_new_tokens: int, stop_ids: tuple[int, ...]
) -> _Answer:
    loop = DecodingLoop(
        target, NoDrafter(), make_acceptor("exact"), Limits(max_new_tokens, stop_ids)
    )
    loop.prefill([prompt], seed=0, reserve=1)
    while loop.running:
        loop.step()
    row = loop.rows[0]
    ids = [*prompt, *row.tokens]
    cache = target.new_cache(1, len(ids))
    tokens = torch.tensor([ids], device=target.device)
    hidden = target.prefill(cache, tokens, [len(ids)]).hidden[0]
    return _Answer(hidden[: len(prompt)], hidden[len(prompt) - 1 : -1], row.key)


def _row(
    target: TargetModel, answers: Sequence[_Answer], setting: Setting, heads: int, seed: int
) -> AgreementRow:
    rates: list[float] = []
    on_prompt: list[Tensor] = []
    votes: list[Tensor] = []
    clean: list[Tensor] = []
    others: list[Tensor] = []
    for answer in answers:
        rate = _rate(target, answer.prompt_hidden, setting)
        rates.append(float(rate))
        picks, best, _ = _vote(target, answer.prompt_hidden, rate, heads, answer.key, seed)
        on_prompt.append((picks == best[:, None]).float().flatten())
        picks, best, logits = _vote(target, answer.answer_hidden, rate, heads, answer.key, seed + 1)
        votes.append(picks)
        clean.append(best)
        probabilities = logits.float().softmax(-1)
        pairs = torch.arange(len(picks), device=picks.device)[:, None] * logits.shape[-1] + picks
        different = pairs[picks != best[:, None]].unique()
        others.append(probabilities.flatten()[different])
    picks, best = torch.cat(votes), torch.cat(clean)
    agree = picks == best[:, None]
    ordered = picks.sort(dim=-1).values
    sizes = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
    other = torch.cat(others)
    quartiles = (
        torch.quantile(other, torch.tensor([0.25, 0.5, 0.75], device=other.device)).tolist()
        if other.numel()
        else [float("nan")] * 3
    )
    return AgreementRow(
        setting=setting,
        mean_p_drop=sum(rates) / len(rates),
        prompt_agreement=float(torch.cat(on_prompt).mean()),
        answer_agreement=float(agree.float().mean()),
        unanimous=float((sizes == 1).float().mean()),
        clean_in_set=float(agree.any(-1).float().mean()),
        mean_set_size=float(sizes.float().mean()),
        other_probability=(quartiles[0], quartiles[1], quartiles[2]),
    )


def _rate(target: TargetModel, prompt_hidden: Tensor, setting: Setting) -> Tensor:
    if setting.p_drop is not None:
        return torch.tensor(setting.p_drop, device=prompt_hidden.device)
    assert setting.head_agreement is not None
    return solve_p_drop(
        prompt_hidden,
        target.head,
        target_agreement=setting.head_agreement,
        ceiling=PAPER_P_DROP,
    )


def _vote(
    target: TargetModel, hidden: Tensor, rate: Tensor, heads: int, key: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks of the dropout heads [n, K], of the clean head [n], and the clean logits [n, V]."""
    logits = target.head(hidden)
    shape = (hidden.shape[0], heads, hidden.shape[1])
    uniforms = mask_uniforms([key], seed, [0], shape, hidden.device)[0]
    rates = rate.expand(hidden.shape[0], heads)
    picks = head_choices(hidden, uniforms, rates, target.head, logits.shape[-1])
    return picks, first_argmax(logits), logits


COLUMNS = (
    "setting",
    "p_drop, mean",
    "head = clean, prompts",
    "head = clean, answers",
    "all K agree",
    "clean in the set",
    "set size",
    "clean probability of other picks (quartiles)",
)


def markdown(rows: Sequence[AgreementRow], lines: Sequence[str]) -> str:
    """The rows as a markdown table under ``lines``."""
    out = [*lines, "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        setting = row.setting
        name = (
            f"p_drop {setting.p_drop:g}"
            if setting.p_drop is not None
            else f"auto, head_agreement {setting.head_agreement:g}"
        )
        cells: list[Any] = [
            name,
            f"{row.mean_p_drop:.3f}",
            f"{row.prompt_agreement:.1%}",
            f"{row.answer_agreement:.1%}",
            f"{row.unanimous:.1%}",
            f"{row.clean_in_set:.1%}",
            f"{row.mean_set_size:.2f}",
            " / ".join(f"{q:.3f}" for q in row.other_probability),
        ]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"
