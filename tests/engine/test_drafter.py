"""What an EAGLE-3 drafter remembers: slots with the target's own features, and nothing else."""

from __future__ import annotations

import pytest
import rig
import torch
from toy_drafts import chain_logits

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.drafts.base import DraftPrompt, NoDrafter, Observation, TreeShape
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree

SHAPE = TreeShape(16, 3, 4)
LEVELS = 4


class Steered(Eagle3Drafter):
    """Draws its own tree, so that drafted slots are written, but proposes a known one."""

    def __init__(self, draft: Eagle3Draft, known: rig.KnownDrafter) -> None:
        super().__init__(draft, SHAPE)
        self.known = known

    def start(self, prompt: DraftPrompt) -> None:
        super().start(prompt)
        self.known.start(prompt)

    def propose(self) -> DraftTree:
        super().propose()
        return self.known.propose()

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        self.known.observe(seen)

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        self.known.select(rows)


def from_scratch(
    target: TargetModel, draft: Eagle3Draft, committed: list[int], shape: TreeShape = SHAPE
) -> Eagle3Drafter:
    """A drafter that has read everything up to the pending root, by the target's own features."""
    states = target.model(rig.ids(committed[:-1]), output_hidden_states=True).hidden_states
    fresh = Eagle3Drafter(draft, shape)
    fresh.start(
        DraftPrompt(
            rig.ids(committed[:-1]),
            [len(committed) - 1],
            torch.cat([states[i] for i in rig.TAPS], dim=-1),
            torch.tensor(committed[-1:]),
        )
    )
    return fresh


def same_state(drafter: Eagle3Drafter, row: int, fresh: Eagle3Drafter) -> None:
    length = fresh._cache.max_length
    assert int(drafter._cache.lengths[row]) == length
    (store,), (wanted,) = drafter._cache._stores.values(), fresh._cache._stores.values()
    close = {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(store[:, :, row, :, :length], wanted[:, :, 0, :, :length], **close)
    torch.testing.assert_close(drafter._ends["feature"][row], fresh._ends["feature"][0], **close)
    torch.testing.assert_close(
        drafter._ends["head_input"][row], fresh._ends["head_input"][0], **close
    )
    assert int(drafter._roots[row]) == int(fresh._roots[0])


@pytest.mark.parametrize("decoys", [0, 2])
@torch.inference_mode()
def test_after_every_round_it_is_as_if_read_from_scratch(
    target: TargetModel,
    draft: Eagle3Draft,
    prompts: list[list[int]],
    answers: list[list[int]],
    decoys: int,
) -> None:
    depths = [0, LEVELS, 2, 0, 1, LEVELS, 3]  # none, all and some tokens accepted
    known = rig.KnownDrafter(answers[:1], LEVELS, right=lambda turn: depths[turn], decoys=decoys)
    drafter = Steered(draft, known)
    loop = DecodingLoop(target, drafter, make_acceptor("exact"), Limits(60, ()))
    loop.prefill(prompts[:1], seed=0, reserve=64)
    same_state(drafter, 0, from_scratch(target, draft, prompts[0] + loop.rows[0].tokens))
    for depth in depths:
        loop.step()
        assert loop.rows[0].accept_lengths[-1] == depth + 1
        same_state(drafter, 0, from_scratch(target, draft, prompts[0] + loop.rows[0].tokens))


@torch.inference_mode()
def test_rows_of_a_batch_are_remembered_apart_also_when_one_leaves(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    depths = [1, 0, LEVELS, 2, 3]
    # Wrong in places of their own, so that the rows of a round keep different numbers of slots.
    partly = [
        [
            (token + 1) % rig.VOCAB if at % (3 + row) == 2 else token
            for at, token in enumerate(known)
        ]
        for row, known in enumerate(answers)
    ]
    drafter = Steered(draft, rig.KnownDrafter(partly, LEVELS, right=lambda turn: depths[turn]))
    stop = next(t for t in answers[2][2:8] if all(t not in a[:20] for a in answers[:2]))
    loop = DecodingLoop(target, drafter, make_acceptor("exact"), Limits(60, (stop,)))
    loop.prefill(prompts, seed=0, reserve=64)
    for turn in range(len(depths) + 1):
        for place, row in enumerate(loop.seated):
            if row.finish_reason is None:
                committed = prompts[row.index] + row.tokens
                same_state(drafter, place, from_scratch(target, draft, committed))
        if turn < len(depths):
            loop.step()
    rounds = zip(*(row.accept_lengths for row in loop.rows[:2]), strict=False)
    assert any(len(set(lengths)) > 1 for lengths in rounds)
    assert len(loop.seated) < len(prompts)


@torch.inference_mode()
def test_its_trees_follow_from_the_committed_tokens_alone(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    drafter = Eagle3Drafter(draft, SHAPE)
    loop = DecodingLoop(target, drafter, make_acceptor("exact"), Limits(60, ()))
    loop.prefill(prompts[:1], seed=0, reserve=64)
    for _ in range(6):
        loop.step()
        again = drafter.propose()  # asking twice changes nothing
        fresh = from_scratch(target, draft, prompts[0] + loop.rows[0].tokens).propose()
        for tree in (again, drafter.propose()):
            assert tree.tokens.tolist() == fresh.tokens.tolist()
            assert tree.parents.tolist() == fresh.parents.tolist()
            torch.testing.assert_close(tree.scores, fresh.scores, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_every_nodes_score_is_what_drafting_its_path_alone_gives(
    target: TargetModel, draft: Eagle3Draft
) -> None:
    """Slot t: feature of position t, token at t + 1, causal attention, rotary position t."""
    (prompt,) = rig.prompts(7)
    root = int(rig.last_logits(target.model, prompt).argmax())
    tree = from_scratch(target, draft, [*prompt, root], TreeShape(34, 3, 3)).propose()
    states = target.model(rig.ids(prompt), output_hidden_states=True).hidden_states
    taps = torch.cat([states[i] for i in rig.TAPS], dim=-1)[0]
    own_ids = {int(token): i for i, token in enumerate(rig.loud_ids())}
    assert tree.num_nodes == 31, "all candidates are nodes, so that every expansion is checked"
    assert len({int(p) for p, d in zip(tree.parents[0], tree.depths[0], strict=True) if d == 4}) > 1
    for node in range(1, tree.num_nodes):
        path, at = [], node
        while at > 0:
            path.insert(0, int(tree.tokens[0, at]))
            at = int(tree.parents[0, at])
        logits = chain_logits(draft, taps, torch.tensor([*prompt[1:], root]), path[:-1])
        steps = logits[len(prompt) - 1 :].log_softmax(-1)
        score = sum(float(steps[i, own_ids[token]]) for i, token in enumerate(path))
        assert float(tree.scores[0, node]) == pytest.approx(score, abs=1e-3)


def test_a_beam_wider_than_the_drafts_vocabulary_is_refused(draft: Eagle3Draft) -> None:
    size = draft.config.draft_vocab_size
    Eagle3Drafter(draft, TreeShape(60, 2, size))
    with pytest.raises(UserError, match=f"top_k is {size + 1}.* only {size} tokens"):
        Eagle3Drafter(draft, TreeShape(60, 2, size + 1))


@pytest.mark.parametrize(
    ("shape", "nodes", "levels"),
    [
        (TreeShape(60, 7, 10), 60, 8),
        (TreeShape(9, 7, 1), 9, 8),
        (TreeShape(100, 2, 3), 22, 3),  # 3 + 2 * 9 candidates and the root
        (TreeShape(1, 7, 10), 1, 0),
        (TreeShape(6, 0, 5), 6, 1),
    ],
    ids=str,
)
@torch.inference_mode()
def test_trees_have_the_shape_that_was_asked_for(
    target: TargetModel, draft: Eagle3Draft, shape: TreeShape, nodes: int, levels: int
) -> None:
    (prompt,) = rig.prompts(8)
    drafter = Eagle3Drafter(draft, shape)
    loop = DecodingLoop(target, drafter, make_acceptor("exact"), Limits(9, ()))
    loop.prefill([prompt], seed=0, reserve=64)
    tree = drafter.propose().validate()
    assert tree.num_nodes == nodes
    assert int(tree.depths.max()) <= levels
    assert set(tree.tokens[0, 1:].tolist()) <= set(rig.loud_ids().tolist())
    if shape.nodes != 1 and shape.top_k == 1:
        assert tree.parents.tolist() == [list(range(-1, nodes - 1))]


def test_no_drafter_proposes_the_pending_token_alone() -> None:
    drafter = NoDrafter()
    features = torch.zeros(2, 1, 4)
    drafter.start(DraftPrompt(torch.zeros(2, 1).long(), [1, 1], features, torch.tensor([5, 6])))
    assert drafter.propose().tokens.tolist() == [[5], [6]]
    path = torch.zeros(2, 1, dtype=torch.int64)
    drafter.observe(Observation(path, [1, 1], path, torch.tensor([7, 8]), features))
    drafter.select(torch.tensor([1]))
    assert drafter.propose().tokens.tolist() == [[8]]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"total_token": 0}, "total_token is 0"),
        ({"depth": -1}, "depth is -1"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_shapes_that_make_no_sense_are_one_line(options: dict[str, int], part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        TreeShape(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at_once", [1, 4, 12])
@torch.inference_mode()
def test_a_prompt_read_in_parts_draws_the_trees_of_the_prompt_read_whole(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = rig.tiny_target()
    draft = rig.tiny_draft(target)
    prompts = rig.prompts(3, 12, 7)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 12, draft.config.feature_size, generator=generator)
    trees = []
    for size in (1024, at_once):
        monkeypatch.setattr("eagle_dropmatch.drafts.growing.PREFILL_AT_ONCE", size)
        made = Eagle3Drafter(draft, SHAPE)
        tokens = rig.padded(prompts, "right")[0]
        made.start(DraftPrompt(tokens, [3, 12, 7], features, torch.tensor([5, 6, 7])))
        trees.append(made.propose())
    for name in ("tokens", "parents", "scores"):
        torch.testing.assert_close(*(getattr(tree, name) for tree in trees))
