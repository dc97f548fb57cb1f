"""Drafting with a small language model and from the text itself: exact answers, and good trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rig
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, Observation, TreeShape
from eagle_dropmatch.drafts.model_drafter import ModelDrafter
from eagle_dropmatch.drafts.ngram_drafter import NGramDrafter
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import TargetModel

COUNT = 30
SHAPES = [(24, 4, 6), (5, 3, 1)]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(rig.tiny_model())


@pytest.fixture(scope="module")
def small() -> TargetModel:
    """Another model, which is right now and then."""
    return TargetModel(rig.tiny_model(layers=2))


def makers(target: TargetModel, small: TargetModel) -> dict[str, Callable[[TreeShape], Drafter]]:
    return {
        "model": lambda shape: ModelDrafter(small, shape, rig.VOCAB),
        "itself": lambda shape: ModelDrafter(target, shape, rig.VOCAB),
        "ngram": lambda shape: NGramDrafter(shape),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["model", "itself", "ngram"])
@pytest.mark.parametrize("lengths", [(9,), (7, 3, 12)])
def test_exact_answers_are_the_targets_own(
    name: str, shape: Any, lengths: Any, target: TargetModel, small: TargetModel
) -> None:
    prompts = rig.prompts(*lengths)
    tokens, mask = rig.padded(prompts)
    decoder = rig.decoder(target, makers(target, small)[name], shape, make_acceptor("exact"))
    stop = rig.greedy(target.model, prompts[0], COUNT)[12]
    out = decoder.generate(
        tokens, mask, max_new_tokens=COUNT, eos_token_id=stop, return_dict_in_generate=True
    )
    for row, prompt in enumerate(prompts):
        wanted = rig.greedy(target.model, prompt, COUNT)
        wanted = wanted[: wanted.index(stop) + 1] if stop in wanted else wanted
        assert out.sequences[row, tokens.shape[1] :].tolist()[: len(wanted)] == wanted


def test_a_draft_that_knows_the_target_is_right_to_the_last_level(
    target: TargetModel, small: TargetModel
) -> None:
    shape = (5, 3, 1)  # a chain: of a tree's best nodes the target's own need not be
    decoder = rig.decoder(target, makers(target, small)["itself"], shape, make_acceptor("exact"))
    tokens, mask = rig.padded(rig.prompts(7, 12))
    out = decoder.generate(tokens, mask, max_new_tokens=COUNT, return_dict_in_generate=True)
    for row in out.stats.rows:
        assert set(row.accept_lengths[:-1]) == {shape[1] + 2}


@pytest.mark.parametrize("name", ["model", "ngram"])
def test_a_queue_gives_the_answers_of_each_prompt_alone(
    name: str, target: TargetModel, small: TargetModel
) -> None:
    decoder = rig.decoder(
        target, makers(target, small)[name], SHAPES[0], make_acceptor("naive", p_drop=0.2)
    )
    prompts = rig.prompts(7, 3, 21, 5, 12)
    queue = decoder.queue(2, max_new_tokens=COUNT)
    for number, prompt in enumerate(prompts):
        queue.submit(prompt, tag=number)
    found = {answer.tag: answer for answer in queue}
    for number, prompt in enumerate(prompts):
        out = decoder.generate(rig.ids(prompt), max_new_tokens=COUNT, return_dict_in_generate=True)
        assert found[number].tokens == out.sequences[0, len(prompt) :].tolist()
        assert found[number].stats == out.stats.rows[0]


def test_algorithm_1_runs_on_a_model_drafters_chains(
    target: TargetModel, small: TargetModel
) -> None:
    decoder = rig.decoder(
        target,
        makers(target, small)["model"],
        (6, 4, 1),
        make_acceptor("dropmatch", p_drop=0.2, include_clean=True),
    )
    out = decoder.generate(
        rig.ids(rig.prompts(8)[0]), max_new_tokens=COUNT, return_dict_in_generate=True
    )
    assert out.stats.tau >= out.stats.strict_tau >= 1


def test_tokens_beyond_the_targets_vocabulary_are_never_proposed(small: TargetModel) -> None:
    made = ModelDrafter(small, TreeShape(24, 3, 6), vocab_size=40)
    prompts = rig.prompts(6, 9)
    tokens = rig.padded(prompts, "right")[0]
    with torch.inference_mode():
        made.start(DraftPrompt(tokens, [6, 9], tokens[..., None], torch.tensor([3, 4])))
        assert int(made.propose().tokens.max()) < 40
    assert made.vocabulary.tolist() == list(range(40))


def propose(text: list[int], shape: TreeShape, longest: int = 3) -> Any:
    made = NGramDrafter(shape, longest)
    tokens = torch.tensor([text[:-1]])
    made.start(DraftPrompt(tokens, [len(text) - 1], tokens[..., None], torch.tensor(text[-1:])))
    return made.propose()


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    #      a  b  c  d        a  b  e  f        a  b
    text = [1, 2, 3, 4, 9, 9, 1, 2, 5, 6, 8, 7, 1, 2]
    tree = propose(text, TreeShape(20, 2, 4))
    tree.validate()
    children = [int(tree.tokens[0, i]) for i in range(1, tree.num_nodes) if tree.parents[0, i] == 0]
    assert children == [5, 3]  # the most recent first
    assert tree.tokens[0].tolist() == [2, 5, 6, 8, 3, 4, 9]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 0, 4, 5]


def test_nothing_new_to_say_is_a_root_alone_and_rows_are_padded() -> None:
    tree = propose([1, 2, 3, 4], TreeShape(20, 2, 4))
    assert tree.num_nodes == 1
    made = NGramDrafter(TreeShape(20, 2, 4))
    tokens = torch.tensor([[1, 2, 1], [5, 6, 7]])
    made.start(DraftPrompt(tokens, [3, 3], tokens[..., None], torch.tensor([2, 8])))
    tree = made.propose()
    tree.validate()
    assert tree.draft_counts.tolist() == [2, 0]
    # What is committed can be found in the next step.
    path = torch.tensor([[0, 1], [0, -1]])
    seen = Observation(
        path, [2, 1], torch.tensor([[1, 2], [5, 0]]), torch.tensor([2, 5]), tokens[..., None]
    )
    made.observe(seen)
    assert made.propose().draft_counts.tolist()[1] > 0


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.integers(1, 12),
    st.integers(0, 4),
    st.integers(1, 5),
)
def test_every_proposed_path_stood_in_the_text_behind_the_same_token(
    text: list[int], nodes: int, depth: int, top_k: int
) -> None:
    tree = propose(text, TreeShape(nodes, depth, top_k))
    tree.validate()
    assert tree.num_nodes <= nodes
    path_of = tree.ancestry[0].tolist()
    for path in path_of:
        said = [int(tree.tokens[0, node]) for node in path if node >= 0]
        assert len(said) <= depth + 2
        assert any(text[i : i + len(said)] == said for i in range(len(text)))


def test_an_ngram_of_no_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="n-gram's length is 0"):
        NGramDrafter(TreeShape(), 0)
