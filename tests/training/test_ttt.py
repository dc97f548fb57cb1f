"""Training-time test: the same numbers as drafting, the right rows, the right loss."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from toy_drafts import chain_logits
from training_toys import DRAFT_VOCAB, HIDDEN, VOCAB, toy_draft, toy_target

from eagle_dropmatch.drafts.base import DraftPrompt, TreeShape
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.training.launch import compile_parts
from eagle_dropmatch.training.ttt import (
    TeacherBatch,
    matched_lengths,
    soft_cross_entropy,
    step_rows,
    supervised_rows,
    ttt_loss,
    unroll,
)

STEPS = 7


@pytest.fixture(scope="module")
def model():
    return toy_target()


def random_batch(batch: int = 2, size: int = 23, seed: int = 5) -> TeacherBatch:
    """Random taps, tokens and soft targets; every token supervised and known."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (batch, size), generator=generator)
    probs = torch.randn(batch * size, DRAFT_VOCAB, generator=generator).softmax(-1)
    following = torch.randint(0, DRAFT_VOCAB, (batch, size), generator=generator)
    following[:, -1] = -1
    return TeacherBatch(
        tokens,
        torch.ones(batch, size, dtype=torch.bool),
        torch.randn(batch, size, 3 * HIDDEN, generator=generator),
        probs,
        following,
    )


@torch.no_grad()
def step_logits(draft, batch, steps=STEPS, block=64):
    """[step][b, t] logits of every row."""
    shape = batch.tokens.shape
    rows = [torch.arange(batch.tokens.numel())] * steps
    return [
        draft.logits(step.head_input).view(*shape, -1) for step in unroll(draft, batch, rows, block)
    ]


@pytest.mark.parametrize("block", [0, 1, 5, 7, 23, 64])
def test_step_s_of_a_row_equals_the_s_th_slot_drafted_behind_it(model, block):
    draft, batch = toy_draft(model), random_batch()
    logits = step_logits(draft, batch, block=block)
    for b in range(2):
        for anchor in (0, 3, 9, 23 - STEPS - 1):
            tokens = batch.tokens[b]
            wanted = chain_logits(
                draft,
                batch.taps[b, : anchor + 1],
                tokens[1 : anchor + 2],
                tokens[anchor + 2 : anchor + 1 + STEPS].tolist(),
            )
            for s in range(STEPS):
                torch.testing.assert_close(
                    logits[s][b, anchor], wanted[anchor + s], atol=1e-5, rtol=1e-5
                )


@pytest.mark.parametrize("anchor", [2, 8])
def test_a_chain_of_the_real_drafter_scores_what_the_steps_say(model, anchor):
    draft, batch = toy_draft(model), random_batch(1)
    tokens = batch.tokens.clone()
    drafter = Eagle3Drafter(draft, TreeShape(total_token=STEPS + 1, depth=STEPS - 1, top_k=1))
    with torch.no_grad():
        drafter.start(
            DraftPrompt(
                tokens[:, : anchor + 1],
                [anchor + 1],
                batch.taps[:, : anchor + 1],
                tokens[:, anchor + 1],
            )
        )
        tree = drafter.propose()
    drafted = tree.tokens[0, 1:]
    tokens[0, anchor + 2 : anchor + 2 + STEPS] = drafted
    batch = TeacherBatch(tokens, batch.supervised, batch.taps, batch.probs, batch.following)
    total = 0.0
    for s, logits in enumerate(step_logits(draft, batch)):
        best = logits[0, anchor].argmax()
        assert draft.to_target_ids(best) == drafted[s]
        total += float(logits[0, anchor].log_softmax(-1)[best])
        assert total == pytest.approx(float(tree.scores[0, s + 1]), abs=1e-5)


@pytest.mark.parametrize("change", [{"norm_before_residual": True}, {"norm_output": True}])
def test_variants_of_the_network_train_as_they_draft(model, change):
    draft, batch = toy_draft(model, **change), random_batch(1)
    logits = step_logits(draft, batch, steps=3)
    tokens = batch.tokens[0]
    wanted = chain_logits(draft, batch.taps[0, :5], tokens[1:6], tokens[6:8].tolist())
    for s in range(3):
        torch.testing.assert_close(logits[s][0, 4], wanted[4 + s], atol=1e-5, rtol=1e-5)


def spanned(start: int, end: int, size: int) -> torch.Tensor:
    marked = torch.zeros(1, size, dtype=torch.bool)
    marked[:, start:end] = True
    return marked


def test_rows_are_those_whose_tokens_up_to_the_label_were_all_written():
    marked = spanned(3, 5, 6)
    assert step_rows(marked, 0).nonzero().tolist() == [[0, 2], [0, 3]]
    assert step_rows(marked, 1).nonzero().tolist() == [[0, 2]]
    assert not step_rows(marked, 2).any()
    # Nothing is carried over the right edge, and no step is longer than the sequence.
    assert step_rows(torch.ones(1, 6, dtype=torch.bool), 3)[0].tolist() == [True] * 2 + [False] * 4
    assert not step_rows(torch.ones(1, 6, dtype=torch.bool), 9).any()


def test_gradient_flows_at_the_end_of_the_prompt_and_nowhere_stale(model):
    """Six tokens, the assistant's are 3 and 4; attention is cut, so that rows do not mix."""
    draft = toy_draft(model)
    with torch.no_grad():
        draft.midlayer.self_attn.o_proj.weight.zero_()
    base = random_batch(1, 6)
    taps = base.taps.requires_grad_()
    batch = TeacherBatch(base.tokens, spanned(3, 5, 6), taps, base.probs, base.following)
    loss, count = ttt_loss(draft, batch, steps=4, decay=0.8)
    loss.backward()
    assert count == 2
    assert taps.grad is not None
    by_row = taps.grad[0].abs().sum(-1)
    # Row 2 joins the last prompt token's feature with token 3; row 3 has token 4.
    assert (by_row[2:4] > 0).all()
    assert by_row[[0, 1, 4, 5]].tolist() == [0.0] * 4


def test_a_row_is_taught_by_the_distribution_behind_its_token(model):
    draft, batch = toy_draft(model), random_batch(1, 6)
    batch = TeacherBatch(batch.tokens, spanned(3, 5, 6), batch.taps, batch.probs, batch.following)
    wanted = sum(
        -(0.8**j) * float((batch.probs[label] * logits[0, row].log_softmax(-1)).sum())
        for j, logits in enumerate(step_logits(draft, batch, steps=2))
        for row, label in (((2, 3), (3, 4)), ((2, 4),))[j]
    )
    loss, _ = ttt_loss(draft, batch, steps=2, decay=0.8)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_rows_whose_next_token_the_draft_cannot_say_are_dropped(model):
    batch = random_batch(1, 8)
    batch.following[0, 4] = -1
    rows = [kept.tolist() for kept in supervised_rows(batch, 2)]
    # The label of row t in step j is t + 1 + j; position 7 has no next token.
    assert rows == [[0, 1, 2, 4, 5], [0, 1, 3, 4]]
    loss, count = ttt_loss(toy_draft(model), batch, steps=2, decay=0.8)
    assert count == 5
    assert loss.isfinite()


def test_rows_of_one_sequence_never_reach_into_the_next(model):
    batch = random_batch(2, 5)
    batch.following[1, 0] = -1  # the first position of the second sequence
    flat = supervised_rows(batch, 1)[0].tolist()
    assert flat == [0, 1, 2, 5, 6, 7]


def test_the_loss_does_not_depend_on_the_attention_block(model):
    draft, batch = toy_draft(model), random_batch()
    found = []
    for block in (0, 4, 64):
        draft.zero_grad()
        loss, _ = ttt_loss(draft, batch, steps=5, decay=0.8, block=block)
        loss.backward()
        found.append((loss.detach(), draft.midlayer.self_attn.k_proj.weight.grad.clone()))
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-4)


def test_a_batch_without_supervised_tokens_gives_zero_and_no_nan(model):
    draft, batch = toy_draft(model), random_batch()
    batch.supervised.zero_()
    loss, count = ttt_loss(draft, batch, steps=3, decay=0.8)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0.0)
    for parameter in draft.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("chunk", [1, 3, 7, 1024])
def test_soft_cross_entropy_equals_a_dense_reference_in_value_and_gradients(chunk):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    hidden, weight = draw(7, 6).requires_grad_(), draw(11, 6).requires_grad_()
    probs = draw(9, 11).softmax(-1)
    labels = torch.tensor([8, 0, 3, 3, 2, 7, 1])
    scale = torch.tensor([1.0, 0.8, 0.64, 1.0, 1.0, 0.8, 0.0])
    loss = soft_cross_entropy(hidden, weight, probs, labels, scale, chunk)
    (3 * loss).backward()
    ours = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logs = F.log_softmax(hidden @ weight.T, dim=-1)
    dense = -(scale * (probs[labels] * logs).sum(-1)).sum()
    (3 * dense).backward()
    torch.testing.assert_close(loss, dense)
    torch.testing.assert_close(ours, (hidden.grad, weight.grad))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_parts_teach_the_same(model):
    plain, fused = toy_draft(model), toy_draft(model)
    kernel = compile_parts(toy_target(), fused)
    for size in (12, 17):  # two shapes, one compilation
        batch = random_batch(2, size)
        wanted, _ = ttt_loss(plain, batch, steps=3, decay=0.8)
        loss, _ = ttt_loss(fused, batch, steps=3, decay=0.8, kernel=kernel)
        torch.testing.assert_close(loss, wanted)
        wanted.backward()
        loss.backward()
        for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_scaled_head_is_trained_as_it_is_drafted_with(model):
    draft, batch = toy_draft(model, logit_scale=0.25), random_batch(1, 6)
    loss, _ = ttt_loss(draft, batch, steps=1, decay=0.8)
    logs = step_logits(draft, batch, steps=1)[0][0].log_softmax(-1)
    wanted = -sum(float((batch.probs[row + 1] * logs[row]).sum()) for row in range(4))
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_matched_lengths_count_the_steps_that_the_answer_confirms(model):
    draft, batch = toy_draft(model), random_batch(1, 9)
    with torch.no_grad():
        guesses = [logits[0].argmax(-1) for logits in step_logits(draft, batch, steps=3)]
    # Row t has three labels, t + 1 .. t + 3: rows 0 .. 5. Let rows 0, 3 match 3, 2 steps.
    batch.following.fill_(-1)
    for row, count in ((0, 3), (4, 2)):
        for j in range(count):
            batch.following[0, row + 1 + j] = guesses[j][row]
    wanted = []
    for row in range(6):
        run = 0
        while run < 3 and batch.following[0, row + 1 + run] == guesses[run][row]:
            run += 1
        wanted.append(run)
    assert (wanted[0], wanted[4]) == (3, 2)
    assert matched_lengths(draft, batch, 3).tolist() == wanted


def test_matched_lengths_ask_only_rows_that_have_all_steps(model):
    draft, batch = toy_draft(model), random_batch(1, 9)
    batch.supervised.zero_()
    batch.supervised[0, 2:6] = True
    assert matched_lengths(draft, batch, 3).shape == (2,)  # rows 1 and 2
    assert matched_lengths(draft, batch, 5).shape == (0,)
