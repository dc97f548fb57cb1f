"""Prompts that wait for seats: the answers of one prompt alone, whoever sat beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import rig
import torch

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.answer_queue import QueuedAnswer
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.drafts.budget import TreeBudget
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loop import DecodingLoop
from eagle_dropmatch.target import TargetModel

LENGTHS = (7, 3, 21, 5, 12, 1, 9, 30, 4)
COUNT = 24


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return rig.tiny_target()


@pytest.fixture(scope="module")
def decoder(target: TargetModel) -> SpeculativeDecoder:
    return rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), (24, 4, 6))


PROMPTS = rig.prompts(*LENGTHS)


def stop_ids(decoder: SpeculativeDecoder) -> list[int]:
    """Tokens that end some answers early, at different places, and leave others whole."""
    answers = [rig.greedy(decoder.target.model, prompt, COUNT) for prompt in PROMPTS]
    return [answers[0][4], answers[3][9]]


def alone(decoder: SpeculativeDecoder, **options: Any) -> list[tuple[list[int], Any]]:
    """Each prompt's answer by itself, with its record."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        out = decoder.generate(
            rig.ids(prompt), seed=number, return_dict_in_generate=True, **options
        )
        found.append((out.sequences[0, len(prompt) :].tolist(), out.stats.rows[0]))
    return found


def queued(decoder: SpeculativeDecoder, seats: int, **options: Any) -> dict[int, QueuedAnswer]:
    queue = decoder.queue(seats, **options)
    for number, prompt in enumerate(PROMPTS):
        queue.submit(prompt, seed=number, tag=number)
    return {answer.tag: answer for answer in queue}


@pytest.mark.parametrize("seats", [3, 20])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("exact", {}),
        ("exact", {"draft": False}),
        ("exact", {"do_sample": True, "temperature": 0.8, "top_k": 20}),
        # Rates of each prompt, masks of each row's own steps.
        ("naive", {}),
        ("naive(p_drop='running', adapt='margin')", {}),
        ("lenience(lenience=0.2)", {"do_sample": True, "temperature": 1.0}),
        ("exact", {"repetition_penalty": 1.3}),
    ],
    ids=["exact", "plain", "sampled", "naive", "running", "lenience", "penalty"],
)
def test_answers_and_records_are_those_of_each_prompt_alone(
    decoder: SpeculativeDecoder, seats: int, rule: str, options: dict[str, Any]
) -> None:
    decoder.acceptor = make_acceptor(rule)
    given = {"max_new_tokens": COUNT, "eos_token_id": stop_ids(decoder), **options}
    found = queued(decoder, seats, **given)
    assert sorted(found) == list(range(len(PROMPTS)))
    for number, (tokens, stats) in enumerate(alone(decoder, **given)):
        assert found[number].tokens == tokens
        assert found[number].stats == stats
    reasons = {answer.stats.finish_reason for answer in found.values()}
    assert "stop" in reasons or options.get("do_sample")


def test_a_rules_control_is_that_of_each_prompt_alone(decoder: SpeculativeDecoder) -> None:
    given: dict[str, Any] = {
        "max_new_tokens": 9,
        "draft": False,
        "do_sample": True,
        "temperature": 1.0,
        "truncation": make_acceptor("naive"),
    }
    found = queued(decoder, 2, **given)
    for number, (tokens, _) in enumerate(alone(decoder, **given)):
        assert found[number].tokens == tokens


def test_a_seat_is_filled_as_soon_as_it_is_free(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.acceptor = make_acceptor("exact")
    live: list[int] = []
    step = DecodingLoop.step

    def watched(self: DecodingLoop, **options: Any) -> Any:
        live.append(sum(not row.ended for row in self.seated))
        assert len(self.seated) <= 3
        return step(self, **options)

    monkeypatch.setattr(DecodingLoop, "step", watched)
    found = queued(decoder, 3, max_new_tokens=COUNT, draft=False, eos_token_id=stop_ids(decoder))
    steps = sum(len(answer.stats.accept_lengths) for answer in found.values())
    assert sum(live) == steps
    # Full while anyone waits: only the last ones sit beside empty seats.
    first = next((i for i, count in enumerate(live) if count < 3), len(live))
    assert all(a >= b for a, b in zip(live[first:], live[first + 1 :], strict=False))
    assert first >= (steps - 2 * COUNT) // 3


def test_who_comes_late_widens_the_batch_again(decoder: SpeculativeDecoder) -> None:
    decoder.acceptor = make_acceptor("naive")
    given: dict[str, Any] = {"max_new_tokens": COUNT, "eos_token_id": stop_ids(decoder)}
    wanted = [tokens for tokens, _ in alone(decoder, **given)]
    queue = decoder.queue(4, **given)
    for number in range(4):
        queue.submit(PROMPTS[number], seed=number, tag=number)
    found: dict[int, list[int]] = {}
    for answer in queue:
        found[answer.tag] = answer.tokens
        if len(found) == 3:  # one is left, and the others have gone
            for number in range(4, len(PROMPTS)):
                queue.submit(PROMPTS[number], seed=number, tag=number)
    assert [found[number] for number in range(len(PROMPTS))] == wanted


def test_an_answer_of_one_token_needs_no_seat(decoder: SpeculativeDecoder) -> None:
    decoder.acceptor = make_acceptor("exact")
    found = queued(decoder, 2, max_new_tokens=1)
    assert [len(found[number].tokens) for number in range(len(PROMPTS))] == [1] * len(PROMPTS)


def test_a_resting_draft_reads_up_before_others_join(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = rig.tiny_draft(target)
    adaptive = rig.decoder(target, rig.eagle3(draft), (24, 4, 6))
    adaptive.adaptive = True

    class Restless(TreeBudget):
        """Rests three steps of five, and chooses the whole tree otherwise."""

        def __init__(self) -> None:
            self.at = 0

        @property
        def resting(self) -> bool:
            return self.at % 5 in (1, 2, 3)

        def begin(self, *_: Any) -> None:
            pass

        def rested(self) -> None:
            self.at += 1

        def deepen(self, level: int, beam: torch.Tensor) -> bool:
            return True

        def choose(self, scores: torch.Tensor, levels: int) -> int:
            return 24

        def learn(self, *_: Any) -> None:
            self.at += 1

    budget = Restless()
    monkeypatch.setattr(adaptive, "_budget", lambda *_: budget)
    found = queued(adaptive, 3, max_new_tokens=COUNT)
    for number, prompt in enumerate(PROMPTS):
        assert found[number].tokens == rig.greedy(target.model, prompt, COUNT)
    # What the draft has read is right: it is right as often as one that never rested.
    accepted = [n for answer in found.values() for n in answer.stats.accept_lengths if n > 1]
    assert len(accepted) > 10


def test_times_are_shares_that_add_up(decoder: SpeculativeDecoder) -> None:
    decoder.acceptor = make_acceptor("exact")
    queue = decoder.queue(3, max_new_tokens=COUNT)
    for number, prompt in enumerate(PROMPTS):
        queue.submit(prompt, tag=number)
    found: Iterable[QueuedAnswer] = list(queue)
    total = sum(answer.prefill_seconds + answer.decode_seconds for answer in found)
    assert total == pytest.approx(queue.seconds)
    for answer in found:
        assert answer.latency >= answer.prefill_seconds + answer.decode_seconds - 1e-9


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda decoder: decoder.queue(0), "batch_size is 0"),
        (lambda decoder: decoder.queue(2).submit([]), "empty prompt"),
        (lambda decoder: decoder.queue(2, num_beams=3), "num_beams=3"),
        (lambda decoder: decoder.queue(2, max_new_tokens=0), "max_new_tokens is 0"),
    ],
)
def test_bad_input_is_one_line(decoder: SpeculativeDecoder, call: Any, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        call(decoder)
    assert "\n" not in str(caught.value)
