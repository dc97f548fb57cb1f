"""Naive DropMatch on trees: what it accepts, what it leaves alone, and that it repeats itself."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rig
import torch
from rule_scenes import FunctionHead, Scene, linear_head, random_scene
from torch import Tensor

from eagle_dropmatch.acceptors import (
    Acceptor,
    NaiveAcceptor,
    PromptContext,
    StepContext,
    few_heads_native,
    make_acceptor,
)
from eagle_dropmatch.acceptors.heads import mask_uniforms
from eagle_dropmatch.acceptors.step_heads import Heads
from eagle_dropmatch.decoder import GenerateOutput
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.target import LMHead, TargetModel
from eagle_dropmatch.tree import DraftTree, longest_accepted_path

COUNT = 32
TREE = (24, 4, 6)


def generate(
    target: TargetModel,
    draft: Eagle3Draft,
    rows: Sequence[Sequence[int]],
    acceptor: Any,
    **options: Any,
) -> GenerateOutput:
    tokens, mask = rig.padded(rows)
    out = rig.decoder(target, rig.eagle3(draft), TREE, acceptor).generate(
        tokens, mask, return_dict_in_generate=True, **{"max_new_tokens": COUNT, **options}
    )
    assert isinstance(out, GenerateOutput)
    return out


def leading(drawn: Scene) -> Scene:
    """The same trees with the tokens that lead at their parents: the best, the second best ..."""
    tokens, parents = drawn.tree.tokens.clone(), drawn.tree.parents.tolist()
    order = drawn.logits.argsort(dim=-1, descending=True, stable=True)
    for row, above in enumerate(parents):
        for node, parent in enumerate(above):
            if parent >= 0:
                tokens[row, node] = order[row, parent, above[:node].count(parent)]
    return replace(drawn, tree=replace(drawn.tree, tokens=tokens))


def scene(batch: int = 3, nodes: int = 12, size: int = 24, vocab: int = 9, seed: int = 0) -> Scene:
    return random_scene(batch, nodes, size, vocab, seed, padded=False)


@pytest.mark.parametrize("include_clean", [False, True])
@pytest.mark.parametrize("mask", ["node", "step"])
@pytest.mark.parametrize("heads", [1, 5, 8])
def test_without_dropout_it_is_exact_acceptance(
    target: TargetModel,
    draft: Eagle3Draft,
    prompts: list[list[int]],
    heads: int,
    mask: Any,
    include_clean: bool,
) -> None:
    rule = NaiveAcceptor(K=heads, p_drop=0.0, mask=mask, include_clean=include_clean)
    exact = generate(target, draft, prompts[:2], make_acceptor("exact"))
    naive = generate(target, draft, prompts[:2], rule)
    assert torch.equal(naive.sequences, exact.sequences)
    assert naive.stats.rows == exact.stats.rows
    assert naive.stats.tau > 1


@pytest.mark.parametrize("p_drop", [0.0, "auto"])
@pytest.mark.parametrize("heads", [1, 5, 8])
def test_without_dropout_it_is_exact_also_where_products_round_by_their_shape(
    heads: int, p_drop: Any
) -> None:
    drawn = scene(vocab=8)
    # Tokens tie in pairs, and the heads' product rounds towards the other one of each pair.
    weight = drawn.head.weight[::2].repeat_interleave(2, dim=0)
    tilt = torch.arange(8) * 1e-3
    drawn = replace(drawn, head=FunctionHead(lambda h: h @ weight.T + tilt, weight))
    rule = NaiveAcceptor(K=heads, p_drop=p_drop)
    state = {"p_drop": torch.zeros(3, heads)}
    step = drawn.step(rule, logits=drawn.hidden @ weight.T, state=state)
    assert step.exact.any()
    # The root's entry means nothing.
    assert torch.equal(rule.accept(step)[:, 1:], step.exact[:, 1:])


@pytest.mark.parametrize("mask", ["node", "step"])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_node_is_accepted_iff_some_head_at_its_parent_picks_it(heads: int, mask: Any) -> None:
    p = 0.4
    drawn = scene()
    tree, weight = drawn.tree, drawn.head.weight
    rule = NaiveAcceptor(K=heads, p_drop=p, mask=mask, seed=5)
    step = drawn.step(rule)
    accepted = rule.accept(step)
    batch, nodes = tree.tokens.shape
    count = nodes if mask == "node" else 1
    draws = mask_uniforms(step.row_keys, 5, step.steps, (count, heads, 24), torch.device("cpu"))
    relaxed = 0
    for row in range(batch):
        for node in range(1, nodes):
            parent = int(tree.parents[row, node])
            picks = []
            for head in range(heads):
                kept = draws[row, parent if mask == "node" else 0, head] >= p
                masked = torch.where(kept, drawn.hidden[row, parent] / (1 - p), 0.0)
                picks.append(int((weight @ masked).argmax()))
            token = int(tree.tokens[row, node])
            assert bool(accepted[row, node]) == (token in picks)
            relaxed += token in picks and token != int(step.choice[row, parent])
    assert relaxed > 0


def test_masks_per_step_are_one_set_for_all_nodes() -> None:
    drawn = scene(batch=1, nodes=3)
    # The same hidden state at every node: only the masks can tell the nodes apart.
    same = drawn.hidden[:, :1].expand(-1, 40, -1)
    chain = DraftTree.chain(torch.zeros(1, 40, dtype=torch.int64))
    drawn = Scene(chain, same, drawn.head)
    chosen = {}
    for mask in ("node", "step"):
        rule = NaiveAcceptor(K=2, p_drop=0.5, mask=mask)  # type: ignore[arg-type]
        chosen[mask] = Heads(rule, drawn.step(rule)).choices
    assert (chosen["step"] == chosen["step"][0]).all()
    assert not (chosen["node"] == chosen["node"][0]).all()


@pytest.mark.parametrize("margin", [0.4, 1.0])
def test_acceptance_of_a_runner_up_follows_the_closed_form(margin: float) -> None:
    """P(accept) = 1 - (1 - Phi(-D / s))^K with s^2 = p / (1 - p) * sum of squared terms."""
    rows, size, p, heads = 4000, 256, 0.3, 3
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(size, generator=generator)
    first = torch.randn(size, generator=generator)
    terms = torch.randn(size, generator=generator) * hidden
    s = float((p / (1 - p) * terms.square().sum()).sqrt())
    # Shift the terms so that the clean gap is the margin, in units of s.
    terms = terms + (margin * s - terms.sum()) / size
    s = float((p / (1 - p) * terms.square().sum()).sqrt())
    weight = torch.stack((first, first - terms / hidden))
    clean = hidden @ weight.T
    gap = float(clean[0] - clean[1])
    assert gap > 0
    states = hidden.expand(rows, 2, size)
    tree = DraftTree.chain(torch.tensor([[0, 1]]).expand(rows, 2))
    rule = NaiveAcceptor(K=heads, p_drop=p)
    step = Scene(tree, states, linear_head(weight)).step(rule)
    share = float(rule.accept(step)[:, 1].float().mean())
    flip = 0.5 * math.erfc(gap / s / math.sqrt(2))
    wanted = 1 - (1 - flip) ** heads
    # Four standard errors, and what the normal approximation may be off for 256 terms.
    assert share == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / rows) + 0.015)


@pytest.mark.parametrize("seed", range(4))
def test_with_the_clean_head_it_accepts_all_that_exact_does_and_never_a_shorter_path(
    seed: int,
) -> None:
    drawn = scene(batch=40, vocab=4, seed=seed)
    rule = NaiveAcceptor(K=2, p_drop=0.5, include_clean=True)
    step = drawn.step(rule)
    exact = step.exact
    assert (rule.accept(step) | ~exact).all()
    verdict = rule.verify(step)
    assert (verdict.accepted >= verdict.strict).all()
    assert (verdict.accepted > verdict.strict).any()
    # The clean head is what makes it so: without it an exact child may be refused.
    alone = NaiveAcceptor(K=2, p_drop=0.5)
    assert (exact & ~alone.accept(drawn.step(alone))).any()


@pytest.mark.parametrize("clean", [True, False], ids=["clean-stop", "clean-goes-on"])
def test_it_is_relaxed_into_a_stop_token_only_where_the_clean_head_stops(clean: bool) -> None:
    stop, other, vocab = 4, 2, 6
    tree = DraftTree.from_parents(torch.tensor([[0, stop, other]]), torch.tensor([[-1, 0, 0]]))
    states = torch.ones(1, 3, 8)
    logits = torch.zeros(1, 3, vocab)
    logits[..., stop if clean else 5] = 1.0
    for picked in (stop, other):  # what every dropout head says
        rule = NaiveAcceptor(K=2, p_drop=0.3)
        votes = torch.nn.functional.one_hot(torch.tensor(picked), vocab).float()
        head = FunctionHead(
            lambda h, votes=votes: votes.expand(*h.shape[:-1], vocab), torch.zeros(vocab, 8)
        )
        step = Scene(tree, states, head).step(rule, logits=logits, stops=(stop, 1))
        kept = int(rule.verify(step).path[0, 1])
        if picked == other:
            assert kept == 2
        else:
            assert kept == (1 if clean else -1)


def test_the_bonus_and_the_record_come_from_the_clean_head() -> None:
    #     0 -- 1 (clean) -- 3 (relaxed) -- 4 (clean)
    #      \-- 2 (not accepted)
    tree = DraftTree.from_parents(torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    argmax = torch.tensor([[1, 7, 8, 4, 6]])  # node 1's own child would have been 7
    states = torch.zeros(1, 5, 4)
    logits = torch.nn.functional.one_hot(argmax, 10).float()

    class Votes(Acceptor):
        name = "votes"

        def accept(self, context: StepContext) -> Tensor:
            return torch.tensor([[False, True, False, True, True]])

    rule = Votes()
    drawn = Scene(tree, states, linear_head(torch.zeros(10, 4)))
    verdict = rule.verify(drawn.step(rule, logits=logits))
    assert verdict.path.tolist() == [[0, 1, 3, 4, -1]]
    assert (verdict.accepted.item(), verdict.bonus.item()) == (3, 6)
    assert verdict.strict_path.tolist() == [[0, 1, -1, -1, -1]]
    assert (verdict.strict.item(), verdict.strict_bonus.item()) == (1, 7)
    assert verdict.relaxed.tolist() == [[False, False, True, False, False]]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=rig.needs_compiler)])
@pytest.mark.parametrize("vocab", [30, 390])  # of less than a block of tokens, of some and a part
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"mask": "step"}, {"noise": "gaussian"}, {"bias": True}])
@pytest.mark.parametrize("p_drop", [0.02, 0.1, 0.4, (0.0, 0.05, 0.3, 0.6)])
def test_verdicts_are_those_of_all_heads_over_all_tokens(
    p_drop: Any, options: dict[str, Any], dtype: torch.dtype, vocab: int, native: bool
) -> None:
    relaxed, differing, decided = 0, [], 0
    options = dict(options)
    with_bias = options.pop("bias", False)
    for seed in range(6):
        drawn = random_scene(batch=6, nodes=20, vocab=vocab, size=96, seed=seed)
        # Tokens tie in pairs, so that their order matters also where nothing rounds.
        weight = drawn.head.weight[::2].repeat_interleave(2, dim=0).to(dtype)
        bias = torch.linspace(-1, 1, vocab, dtype=dtype) if with_bias else None
        head = linear_head(weight, bias, native=native)
        drawn = leading(replace(drawn, hidden=drawn.hidden.to(dtype), head=head))
        for clean in (False, True):
            rule = NaiveAcceptor(K=4, p_drop=p_drop, include_clean=clean, seed=seed, **options)
            step = drawn.step(rule)
            child = drawn.tree.parents >= 0
            heads = Heads(rule, step)
            said = heads.parents.to_children(heads.choices)
            whole = (said == drawn.tree.tokens[..., None]).any(-1)
            whole = (whole | step.exact if clean else whole) & child
            assert torch.equal(rule.accept(step) & child, whole)
            verdict, (path, count) = rule.verify(step), longest_accepted_path(drawn.tree, whole)
            assert torch.equal(verdict.path, path)
            assert torch.equal(verdict.accepted, count)
            relaxed += int((whole & ~step.exact).sum())
            differing.append(float((said != step.choice[..., None])[child].float().mean()))
            if native:
                decided += few_heads_native.few_heads(heads, None, step.eligible) is not None
    assert relaxed > 20
    assert max(differing) > 0.05
    # In float32 tied tokens lie within all that whole products may round, which then decide.
    if native and dtype == torch.bfloat16:
        assert (decided > 6) if options.get("noise") != "gaussian" else not decided


@rig.needs_compiler
def test_machine_code_leaves_mixed_dtypes_and_float16_alone() -> None:
    drawn = scene()
    rule = NaiveAcceptor(p_drop=0.1)

    def looked_at(weights: torch.dtype, logits: torch.dtype) -> bool:
        head = linear_head(drawn.head.weight.to(weights), native=True)
        cast = replace(drawn, hidden=drawn.hidden.to(weights), head=head)
        step = cast.step(rule, logits=drawn.logits.to(logits))
        return few_heads_native.few_heads(Heads(rule, step), None, None) is not None

    assert looked_at(torch.float32, torch.float32)
    assert not looked_at(torch.bfloat16, torch.float32)
    assert not looked_at(torch.float16, torch.float16)


@pytest.mark.parametrize(("p_drop", "most"), [(0.05, 0), (0.6, 20)])
def test_few_heads_are_computed_whole(p_drop: float, most: int) -> None:
    computed: list[int] = []

    class Counting(LMHead):
        def __call__(self, hidden: Tensor) -> Tensor:
            computed.append(hidden[..., 0].numel())
            return super().__call__(hidden)

    drawn = leading(random_scene(batch=1, nodes=40, vocab=200, size=512, padded=False))
    rule = NaiveAcceptor(K=5, p_drop=p_drop)
    step = replace(drawn, head=Counting(drawn.head.module)).step(rule, logits=drawn.logits)
    verdict = rule.verify(step)
    assert step.parents.count * rule.K > 60
    assert verdict.accepted > 0
    assert sum(computed) <= most


@pytest.fixture(scope="module")
def loose() -> NaiveAcceptor:
    """A rule that relaxes a lot on the tiny target."""
    return NaiveAcceptor(K=5, p_drop=0.3, seed=0)


def test_it_relaxes_and_says_how_much(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], loose: NaiveAcceptor
) -> None:
    exact = generate(target, draft, prompts, make_acceptor("exact"))
    stats = generate(target, draft, prompts, loose).stats
    assert stats.relaxed_share > 0
    assert stats.tau > exact.stats.tau
    for row in stats.rows:
        for step, relaxed in zip(row.accept_lengths, row.relaxed_tokens, strict=True):
            assert relaxed < step
        assert row.output_tokens == 1 + sum(row.accept_lengths)


def test_a_seed_repeats_itself_and_another_differs(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], loose: NaiveAcceptor
) -> None:
    first = generate(target, draft, prompts, loose)
    again = generate(target, draft, prompts, NaiveAcceptor(K=5, p_drop=0.3, seed=0))
    assert torch.equal(first.sequences, again.sequences)
    assert first.stats.rows == again.stats.rows
    other_masks = generate(target, draft, prompts, NaiveAcceptor(K=5, p_drop=0.3, seed=1))
    assert not torch.equal(first.sequences, other_masks.sequences)
    other_call = generate(target, draft, prompts, loose, seed=1)
    assert not torch.equal(first.sequences, other_call.sequences)


def test_a_row_draws_the_same_masks_in_any_batch_and_at_any_place(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], loose: NaiveAcceptor
) -> None:
    records = {}
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0]):
        out = generate(target, draft, [prompts[i] for i in order], loose)
        for place, i in enumerate(order):
            answer = out.sequences[place, -COUNT:].tolist()
            record = (answer, out.stats.rows[place])
            assert records.setdefault(i, record) == record
    alone = generate(target, draft, [prompts[1]], loose)
    assert (alone.sequences[0, -COUNT:].tolist(), alone.stats.rows[0]) == records[1]


@pytest.mark.parametrize("p_drop", [0.3, "auto"])
def test_rows_that_leave_shift_neither_masks_nor_rates_of_those_that_stay(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], p_drop: Any
) -> None:
    rule = NaiveAcceptor(K=5, p_drop=p_drop, head_agreement=0.8)
    alone = generate(target, draft, [prompts[0]], rule)
    answer = alone.sequences[0, -COUNT:].tolist()
    other = generate(target, draft, [prompts[1]], rule).sequences[0, -COUNT:].tolist()
    stop = next(token for token in other[:12] if token not in answer)
    both = generate(target, draft, [prompts[1], prompts[0]], rule, eos_token_id=stop)
    assert both.stats.rows[0].finish_reason == "stop"
    assert both.stats.rows[0].output_tokens < COUNT // 2
    assert both.sequences[1, -len(answer) :].tolist() == answer


def test_the_loop_tells_a_rule_its_step_and_names_its_rows_whoever_has_left(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    class Watching(NaiveAcceptor):
        seen: list[tuple[list[int], list[int]]]

        def verify(self, context: StepContext) -> Any:
            self.seen.append((list(context.steps), list(context.row_keys)))
            return super().verify(context)

    rule = Watching(p_drop=0.0)
    rule.seen = []
    stop = next(token for token in answers[2][2:8] if token not in answers[0][:COUNT])
    generate(target, draft, [prompts[2], prompts[0]], rule, eos_token_id=stop)
    assert [steps[-1] for steps, _ in rule.seen] == list(range(len(rule.seen)))
    both, alone = rule.seen[0][1], rule.seen[-1][1]
    assert len(set(both)) == 2
    assert alone == both[1:]


@pytest.mark.parametrize("tied", [False, True])
def test_dropout_touches_no_weight_and_no_other_random_stream(tied: bool) -> None:
    target = rig.tiny_target(tie_word_embeddings=tied)
    draft = rig.tiny_draft(target)
    assert (target.head.weight is target.model.get_input_embeddings().weight) == tied
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    drafted = {name: value.clone() for name, value in draft.state_dict().items()}
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    generate(target, draft, rig.prompts(5), NaiveAcceptor(p_drop=0.3), max_new_tokens=12)
    generate(target, draft, rig.prompts(5), NaiveAcceptor(p_drop="auto"), max_new_tokens=12)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]
    assert not target.model.training
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, value in draft.state_dict().items():
        assert torch.equal(value, drafted[name]), name


@torch.inference_mode()
def test_the_cache_holds_clean_states_to_the_bit(
    target: TargetModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Replaying the trees and paths of a naive run without its rule gives the same cache."""
    tree = rig.KnownDrafter(answers[:1], 4, right=lambda turn: turn % 3, decoys=6)

    class Recording(NaiveAcceptor):
        steps: list[tuple[DraftTree, Tensor, int]]

        def verify(self, context: StepContext) -> Any:
            verdict = super().verify(context)
            self.steps.append((context.tree, verdict.path, int(verdict.accepted)))
            return verdict

    rule = Recording(K=8, p_drop=0.6)
    rule.steps = []
    loop = DecodingLoop(target, tree, rule, Limits(12, ()))
    loop.prefill(prompts[:1], seed=0, reserve=64)
    while loop.running:
        loop.step()
    assert sum(loop.rows[0].relaxed) > 0
    cache = target.new_cache(1, loop.cache.capacity)
    target.prefill(cache, rig.ids(prompts[0]), [len(prompts[0])])
    for drawn, path, accepted in rule.steps[:-1]:  # the last round is not committed
        target.verify(cache, drawn)
        cache.keep(path, [accepted + 1])
    size = loop.cache.max_length
    assert cache.max_length == size > len(prompts[0])
    for device, store in loop.cache._stores.items():
        assert torch.equal(store[..., :size, :], cache._stores[device][..., :size, :])


def test_auto_solves_each_rows_rate_on_its_own_prompt(
    target: TargetModel, prompts: list[list[int]]
) -> None:
    def rates(rows: list[list[int]], wanted: float, seed: int = 0) -> Tensor:
        lengths = [len(row) for row in rows]
        with torch.inference_mode():
            cache = target.new_cache(len(rows), 64)
            out = target.prefill(cache, rig.padded(rows, "right")[0], lengths)
            rule = NaiveAcceptor(p_drop="auto", head_agreement=wanted, seed=seed)
            return rule.start(PromptContext(out, lengths, target.head))["p_drop"][:, 0]

    together = rates(prompts, 0.8)
    alone = torch.cat([rates([prompt], 0.8) for prompt in prompts])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=0)
    assert len(set(together.tolist())) > 1
    assert ((together >= 0) & (together <= 0.3 + 1e-6)).all()
    assert (rates(prompts, 0.95) <= together).all()
    assert (rates(prompts, 0.95) < together).any()
    assert (rates(prompts, 0.01) == 0.3).all()
    # Runs under other mask seeds are runs at the same rate.
    assert torch.equal(rates(prompts, 0.8, seed=1), together)


def test_auto_generates_with_the_rates_it_solved(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    exact = generate(target, draft, prompts, make_acceptor("exact"))
    strict = generate(target, draft, prompts, NaiveAcceptor(p_drop="auto", head_agreement=1.0))
    loose = generate(target, draft, prompts, NaiveAcceptor(p_drop="auto", head_agreement=0.5))
    assert exact.stats.relaxed_share == 0
    assert strict.stats.relaxed_share < loose.stats.relaxed_share


def test_a_running_rate_follows_how_often_heads_agree(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    seen: list[list[float]] = []

    class Seen(NaiveAcceptor):
        def verify(self, context: StepContext) -> Any:
            verdict = super().verify(context)
            seen.append(context.state["p_drop"][:, 0].tolist())
            return verdict

    for wanted in (0.98, 0.5):
        seen.clear()
        rule = Seen(K=8, p_drop="running", head_agreement=wanted)
        generate(target, draft, prompts[:1], rule, max_new_tokens=60)
        rates = [step[0] for step in seen]
        assert len(set(rates)) > len(rates) // 2
        assert all(1e-3 <= rate <= 0.3 + 1e-6 for rate in rates)
        if wanted > 0.9:
            strict = statistics.fmean(rates)
        else:
            assert statistics.fmean(rates) > strict


def test_a_running_rate_belongs_to_its_row_and_its_answer(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    rule = NaiveAcceptor(K=5, p_drop="running", head_agreement=0.8)
    both = generate(target, draft, prompts[:2], rule)
    for row in range(2):
        alone = generate(target, draft, [prompts[row]], rule)
        assert alone.sequences[0, -COUNT:].tolist() == both.sequences[row, -COUNT:].tolist()


def test_disturbed_weights_move_each_logit_by_its_own_number() -> None:
    rows, size, p = 4000, 32, 0.2
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(6, size, generator=generator)
    hidden = torch.randn(size, generator=generator)
    tree = DraftTree.chain(torch.zeros(rows, 2, dtype=torch.int64))
    drawn = Scene(tree, hidden.expand(rows, 2, size), linear_head(weight))
    rule = NaiveAcceptor(K=1, p_drop=p, noise="swag")
    said = Heads(rule, drawn.step(rule)).choices[:, 0]
    spread = (p / (1 - p) * (hidden.square() * weight.var(0)).sum()).sqrt()
    noise = torch.randn(200_000, 6, generator=generator)
    wanted = torch.bincount((weight @ hidden + spread * noise).argmax(-1), minlength=6) / 200_000
    found = torch.bincount(said, minlength=6) / rows
    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt() + 0.003).all()
    assert (found > 0.02).sum() > 1
