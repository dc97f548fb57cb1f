"""Where an answer ends, and that every token is counted once: with drafters that are known."""

from __future__ import annotations

from typing import Any

import pytest
import rig
import torch
from transformers import GenerationConfig, MaxLengthCriteria

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.decoder import GenerateOutput
from eagle_dropmatch.drafts.base import Drafter
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.stats import RowStats
from eagle_dropmatch.target import TargetModel

LEVELS = 8


def answer(
    target: TargetModel, prompt: list[int], drafter: Any, **options: Any
) -> tuple[list[int], RowStats]:
    """New tokens and record of one prompt; what must hold of any record is checked here."""
    decoder = rig.decoder(target, drafter)
    out = decoder.generate(rig.ids(prompt), return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    new, row = out.sequences[0, len(prompt) :].tolist(), out.stats.rows[0]
    assert row.prompt_tokens == len(prompt)
    assert row.output_tokens == len(new) == 1 + sum(row.accept_lengths)
    assert row.strict_accept_lengths == row.accept_lengths
    assert row.relaxed_tokens == [0] * len(row.accept_lengths)
    return new, row


def first_occurrence(tokens: list[int], at: int) -> int:
    """The first place at or behind ``at`` whose token has not been said before."""
    return next(i for i in range(at, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("decoys", [0, 3])
def test_an_oracle_commits_levels_plus_one_tokens_a_round(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]], decoys: int
) -> None:
    drafter = rig.oracle(answers[:1], LEVELS, decoys=decoys)
    new, row = answer(target, prompts[0], drafter, max_new_tokens=1 + 5 * (LEVELS + 1))
    assert new == answers[0][: len(new)]
    assert row.accept_lengths == [LEVELS + 1] * 5
    assert row.draft_nodes == [LEVELS * (1 + 2 * decoys)] * 5


@pytest.mark.parametrize("levels", range(1, 14))
def test_no_round_commits_more_than_its_levels_and_the_bonus(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]], levels: int
) -> None:
    drafter = rig.oracle(answers[:1], levels)
    _, row = answer(target, prompts[0], drafter, max_new_tokens=2 + levels)
    assert row.accept_lengths == [levels + 1]


@pytest.mark.parametrize("decoys", [0, 3])
def test_a_hostile_draft_costs_speed_alone(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]], decoys: int
) -> None:
    drafter = rig.hostile(answers[:1], LEVELS, decoys=decoys)
    new, row = answer(target, prompts[0], drafter, max_new_tokens=24)
    assert new == answers[0][:24]
    assert row.accept_lengths == [1] * 23


def test_a_draft_that_is_right_to_a_known_depth_is_accepted_to_that_depth(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    depths = [0, 3, 8, 1, 5, 0, 8]
    drafter = rig.oracle(answers[:1], LEVELS, right=lambda turn: depths[turn], decoys=2)
    count = 1 + sum(depths) + len(depths)
    new, row = answer(target, prompts[0], drafter, max_new_tokens=count)
    assert new == answers[0][:count]
    assert row.accept_lengths == [depth + 1 for depth in depths]


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("block", [0, 2])
def test_a_stop_token_cuts_an_accepted_run_wherever_it_stands(
    target: TargetModel, block: int, offset: int
) -> None:
    # A prompt whose answer says something for the first time at this place of a block: the
    # stop token may stand nowhere before.
    place = 1 + block * (LEVELS + 1) + offset
    for seed in range(200):
        (prompt,) = rig.prompts(6, seed=seed)
        known = rig.greedy(target.model, prompt, place + 1)
        if known[place] not in known[:place]:
            break
    known += [0] * LEVELS
    new, row = answer(
        target,
        prompt,
        rig.oracle([known], LEVELS),
        max_new_tokens=place + 2 * LEVELS,
        eos_token_id=known[place],
    )
    assert new == known[: place + 1]
    assert row.finish_reason == "stop"
    assert row.accept_lengths == [LEVELS + 1] * block + [offset + 1]


def test_a_first_token_that_stops_ends_the_answer_without_a_round(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    drafter = rig.oracle(answers[:1], LEVELS)
    new, row = answer(target, prompts[0], drafter, max_new_tokens=9, eos_token_id=answers[0][0])
    assert (new, row.finish_reason, row.accept_lengths) == (answers[0][:1], "stop", [])


def test_a_stop_token_in_a_rejected_branch_stops_nothing(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    never = next(i for i in range(rig.VOCAB) if i not in answers[0])
    for right in (LEVELS, 0, 4):
        drafter = rig.oracle(
            answers[:1], LEVELS, right=lambda _, n=right: n, decoys=2, decoy_token=never
        )
        new, row = answer(target, prompts[0], drafter, max_new_tokens=30, eos_token_id=never)
        assert new == answers[0][:30]
        assert row.finish_reason == "length"


def test_each_of_several_stop_tokens_stops(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    never = next(i for i in range(rig.VOCAB) if i not in answers[0])
    place = first_occurrence(answers[0], 5)
    for stops in ([never, answers[0][place]], [answers[0][place], never]):
        drafter = rig.oracle(answers[:1], LEVELS)
        new, row = answer(target, prompts[0], drafter, max_new_tokens=40, eos_token_id=stops)
        assert new == answers[0][: place + 1]
        assert row.finish_reason == "stop"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9, 10, 11])
@pytest.mark.parametrize("kind", ["oracle", "hostile", "plain"])
def test_max_new_tokens_is_never_passed_nor_missed(
    target: TargetModel,
    prompts: list[list[int]],
    answers: list[list[int]],
    kind: str,
    count: int,
) -> None:
    make = rig.hostile if kind == "hostile" else rig.oracle
    new, row = answer(
        target,
        prompts[0],
        make(answers[:1], LEVELS),
        max_new_tokens=count,
        draft=kind != "plain",
    )
    assert new == answers[0][:count]
    assert row.finish_reason == "length"
    if kind == "oracle":
        full, rest = divmod(count - 1, LEVELS + 1)
        assert row.accept_lengths == [LEVELS + 1] * full + [rest] * bool(rest)


def test_stopping_criteria_are_asked_once_a_committed_token_and_about_nothing_else(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    asked: list[list[int]] = []

    def count(sequence: Any, scores: Any, **_: Any) -> bool:
        asked.append(sequence[0].tolist())
        return False

    decoder = rig.decoder(
        target,
        rig.oracle(answers[:1], LEVELS, decoys=2),
        acceptor=make_acceptor("naive", K=8, p_drop=0.6),
    )
    out = decoder.generate(rig.ids(prompts[0]), max_new_tokens=20, stopping_criteria=[count])
    assert isinstance(out, torch.Tensor)
    whole = out[0].tolist()
    assert asked == [whole[: len(prompts[0]) + n] for n in range(1, 21)]


@pytest.mark.parametrize("place", [1, 4, 9, 12])
def test_stopping_criteria_cut_an_accepted_run_at_exactly_their_token(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]], place: int
) -> None:
    wanted = prompts[0] + answers[0][: place + 1]

    def stops(sequence: Any, scores: Any, **_: Any) -> bool:
        assert sequence.shape[0] == 1
        return sequence[0].tolist() == wanted

    for criterion in (stops, MaxLengthCriteria(len(wanted))):
        new, row = answer(
            target,
            prompts[0],
            rig.oracle(answers[:1], LEVELS),
            max_new_tokens=30,
            stopping_criteria=[lambda *_: False, criterion],
        )
        assert new == answers[0][: place + 1]
        assert row.finish_reason == "stop"


def test_stopping_criteria_see_their_own_rows_tokens_without_padding(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    decoder = rig.decoder(target, rig.oracle(answers, LEVELS))
    tokens, mask = rig.padded(prompts)
    seen: list[list[int]] = []

    def watch(sequence: Any, scores: Any) -> bool:
        seen.append(sequence[0].tolist())
        return False

    decoder.generate(tokens, mask, max_new_tokens=5, stopping_criteria=[watch])
    wanted = [p + a[: n + 1] for p, a in zip(prompts, answers, strict=True) for n in range(5)]
    assert all(sequence in seen for sequence in wanted)
    assert all(sequence in wanted for sequence in seen)


def test_asking_for_no_new_token_is_refused(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    drafter: Any = rig.oracle(answers[:1], LEVELS)
    for options in (
        {"max_new_tokens": 0},
        {"generation_config": GenerationConfig(max_length=len(prompts[0]))},
    ):
        with pytest.raises(UserError, match="max_new_tokens is 0"):
            answer(target, prompts[0], drafter, **options)


@torch.inference_mode()
def test_the_cache_has_room_for_the_whole_answer_from_the_start(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    drafter = rig.KnownDrafter(answers[:1], LEVELS)
    loop = DecodingLoop(target, drafter, make_acceptor("exact"), Limits(50, ()))
    loop.prefill(prompts[:1], seed=0, reserve=LEVELS + 1)
    room = loop.cache.capacity
    while loop.running:
        loop.step()
    assert loop.cache.capacity == room < len(prompts[0]) + 50 + 2 * LEVELS


def test_a_drafter_is_made_anew_for_every_call(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    made: list[Drafter] = []

    def make(shape: Any) -> Drafter:
        made.append(rig.KnownDrafter(answers[:1], LEVELS))
        return made[-1]

    decoder = rig.decoder(target, make)
    for _ in range(2):
        decoder.generate(rig.ids(prompts[0]), max_new_tokens=4)
    assert len(made) == 2
