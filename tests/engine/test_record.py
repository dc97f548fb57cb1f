"""The record of a lossy run, checked by hand against rounds that are known."""

from __future__ import annotations

import pytest
import rig
import torch
from torch import Tensor

from eagle_dropmatch.acceptors import Acceptor, StepContext
from eagle_dropmatch.decoder import GenerateOutput
from eagle_dropmatch.stats import RowStats
from eagle_dropmatch.target import TargetModel


class Credulous(Acceptor):
    """Accepts everything that is drafted."""

    name = "credulous"

    def accept(self, context: StepContext) -> Tensor:
        return torch.ones_like(context.tree.valid)


def run(
    target: TargetModel, prompt: list[int], answer: list[int], count: int, **options: object
) -> tuple[list[int], RowStats, GenerateOutput]:
    """A round of four drafted tokens of which the first two are the target's own."""
    drafter = rig.oracle([answer], 4, right=lambda _: 2)
    out = rig.decoder(target, drafter, acceptor=Credulous()).generate(
        rig.ids(prompt), max_new_tokens=count, return_dict_in_generate=True, **options
    )
    assert isinstance(out, GenerateOutput)
    return out.sequences[0, len(prompt) :].tolist(), out.stats.rows[0], out


def test_one_round_is_counted_by_both_rules(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    known = answers[0]
    new, row, out = run(target, prompts[0], known, 6)
    drafted = [*known[1:3], (known[3] + 1) % rig.VOCAB, (known[4] + 1) % rig.VOCAB]
    bonus = int(rig.last_logits(target.model, prompts[0] + known[:1] + drafted).argmax())
    assert new == [known[0], *drafted, bonus]
    after_third = rig.last_logits(target.model, prompts[0] + known[:1] + drafted[:3])
    assert int(after_third.argmax()) != drafted[3], "the fourth token must be relaxed too"
    assert row.accept_lengths == [5]
    assert row.strict_accept_lengths == [3]
    assert row.relaxed_tokens == [2]
    assert row.draft_nodes == [4]
    assert (out.stats.tau, out.stats.strict_tau, out.stats.relaxed_share) == (5.0, 3.0, 0.5)


@pytest.mark.parametrize(
    ("count", "accepted", "strict", "relaxed"),
    # The last committed token stands for the bonus, so it is never a relaxed draft token.
    [(2, 1, 1, 0), (3, 2, 2, 0), (4, 3, 3, 0), (5, 4, 3, 1)],
)
def test_a_round_that_the_budget_cuts_is_cut_for_both_rules(
    target: TargetModel,
    prompts: list[list[int]],
    answers: list[list[int]],
    count: int,
    accepted: int,
    strict: int,
    relaxed: int,
) -> None:
    new, row, _ = run(target, prompts[0], answers[0], count)
    assert len(new) == count
    assert row.accept_lengths == [accepted]
    assert row.strict_accept_lengths == [strict]
    assert row.relaxed_tokens == [relaxed]


def test_stopping_criteria_cut_both_rules(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    def two_tokens(sequence: Tensor, scores: object) -> bool:
        return sequence.shape[1] == len(prompts[0]) + 3

    _, row, _ = run(target, prompts[0], answers[0], 30, stopping_criteria=[two_tokens])
    assert (row.accept_lengths, row.strict_accept_lengths) == ([2], [2])


def test_an_accepted_stop_token_that_the_clean_head_does_not_say_is_not_kept(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    wrong = (answers[0][3] + 1) % rig.VOCAB
    assert wrong not in answers[0]
    new, row, _ = run(target, prompts[0], answers[0], 4, eos_token_id=wrong)
    assert new == answers[0][:4]
    assert row.accept_lengths == [3]
    assert row.finish_reason == "length"
