"""Exact acceptance says what transformers' generate says, whatever the tree and the batch."""

from __future__ import annotations

import pytest
import rig
import torch

from eagle_dropmatch.acceptors import ExactAcceptor, PromptContext
from eagle_dropmatch.acceptors.base import RowState
from eagle_dropmatch.decoder import GenerateOutput, SpeculativeDecoder
from eagle_dropmatch.drafts.base import Drafter, TreeShape
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.target import TargetModel

COUNT = 40
TREES = {"wide": (60, 7, 10), "small": (8, 2, 3), "chain": (9, 7, 1), "shallow": (6, 0, 5)}


def run(
    decoder: SpeculativeDecoder, prompt: list[int], count: int = COUNT, **options: object
) -> tuple[list[int], GenerateOutput]:
    out = decoder.generate(
        rig.ids(prompt), max_new_tokens=count, return_dict_in_generate=True, **options
    )
    assert isinstance(out, GenerateOutput)
    return out.sequences[0, len(prompt) :].tolist(), out


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_trees_of_every_shape_say_what_generate_says(
    target: TargetModel,
    draft: Eagle3Draft,
    prompts: list[list[int]],
    answers: list[list[int]],
    tree: tuple[int, int, int],
) -> None:
    decoder = rig.decoder(target, rig.eagle3(draft), tree)
    for prompt, answer in zip(prompts[:2], answers, strict=False):
        new, out = run(decoder, prompt)
        assert new == answer[:COUNT]
        assert out.stats.num_steps < COUNT - 1, "nothing was ever accepted"
        assert out.stats.strict_tau == out.stats.tau


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_other_architectures_say_what_generate_says(family: str) -> None:
    target = rig.tiny_target(family)
    decoder = rig.decoder(target, rig.eagle3(rig.tiny_draft(target)))
    (prompt,) = rig.prompts(9)
    new, out = run(decoder, prompt)
    assert new == rig.greedy(target.model, prompt, COUNT)
    assert out.stats.num_steps < COUNT - 1


def test_without_drafts_the_same_loop_decodes_plainly(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    decoder = rig.decoder(target, rig.eagle3(draft))
    new, out = run(decoder, prompts[0], draft=False)
    assert new == answers[0][:COUNT]
    assert out.stats.rows[0].accept_lengths == [1] * (COUNT - 1)
    assert out.stats.rows[0].draft_nodes == [0] * (COUNT - 1)


def test_plain_decoding_is_charged_for_no_rule_and_no_draft(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    class Costly(ExactAcceptor):
        def start(self, context: PromptContext) -> RowState:
            raise AssertionError("the rule looked at the prompt")

    def drafts(shape: TreeShape) -> Drafter:
        raise AssertionError("a drafter was made")

    decoder = rig.decoder(target, drafts, acceptor=Costly())
    assert run(decoder, prompts[0], 5, draft=False)[0] == answers[0][:5]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_unequal_prompts_equals_its_rows_alone(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], side: str
) -> None:
    decoder = rig.decoder(target, rig.eagle3(draft))
    tokens, mask = rig.padded(prompts, side)
    out = decoder.generate(tokens, mask, max_new_tokens=COUNT, return_dict_in_generate=True)
    assert isinstance(out, GenerateOutput)
    assert torch.equal(out.sequences[:, : tokens.shape[1]], tokens)
    for row, prompt in enumerate(prompts):
        alone, single = run(decoder, prompt)
        assert out.sequences[row, tokens.shape[1] :].tolist() == alone
        assert out.stats.rows[row] == single.stats.rows[0]


def test_rows_that_end_early_leave_the_others_as_they_were(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    decoder = rig.decoder(target, rig.eagle3(draft), TREES["small"])
    # Each row ends at another place, so that the batch shrinks several times on the way.
    stops = [answer[8 * row + 3] for row, answer in enumerate(answers)]
    tokens, mask = rig.padded(prompts)
    out = decoder.generate(
        tokens, mask, max_new_tokens=COUNT, eos_token_id=stops, return_dict_in_generate=True
    )
    assert isinstance(out, GenerateOutput)
    lengths = [row.output_tokens for row in out.stats.rows]
    assert len(set(lengths)) > 1
    for row, answer in enumerate(answers):
        new = out.sequences[row, tokens.shape[1] :].tolist()
        assert new[: lengths[row]] == answer[: lengths[row]]
        assert new[lengths[row] :] == [stops[0]] * (len(new) - lengths[row])
        _, single = run(decoder, prompts[row], eos_token_id=stops)
        assert out.stats.rows[row] == single.stats.rows[0]


def test_calls_in_a_row_equal_fresh_decoders(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    used = rig.decoder(target, rig.eagle3(draft))
    for prompt in (prompts[3], prompts[0], prompts[1], prompts[0]):
        again, record = run(used, prompt)
        fresh, fresh_record = run(rig.decoder(target, rig.eagle3(draft)), prompt)
        assert again == fresh
        assert record.stats.rows == fresh_record.stats.rows


def test_two_decoders_in_turns_do_not_mix_their_answers(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    first, second = (
        rig.decoder(target, rig.eagle3(draft), tree) for tree in list(TREES.values())[:2]
    )
    assert run(first, prompts[0])[0] == answers[0][:COUNT]
    assert run(second, prompts[1])[0] == answers[1][:COUNT]
    assert run(first, prompts[1])[0] == answers[1][:COUNT]
