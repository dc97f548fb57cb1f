"""Toy laws against the rules at work, head by head, mask by mask; the bound; the script."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_dropmatch.acceptors import ACCEPTORS, make_acceptor
from eagle_dropmatch.acceptors.dropmatch import NaiveAcceptor
from eagle_dropmatch.cli import run_command
from eagle_dropmatch.drafts.base import TreeShape
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loop import committed_tokens
from eagle_dropmatch.sampling import Sampler, first_argmax, place_uniforms
from eagle_dropmatch.studies.toy import (
    Samples,
    StepLaw,
    Toy,
    all_samples,
    answer_law,
    context_of,
    long_run,
    make_toy,
    step_law,
)
from eagle_dropmatch.studies.toy_rules import (
    flip_bound,
    head_law,
    judged_ends,
    judges_nodes_alone,
    measure,
    node_laws,
    tree_ends,
)

T1 = Sampler(1.0)
GREEDY = Sampler()
SAMPLERS = {"greedy": GREEDY, "t1": T1, "top_p": Sampler(0.8, top_k=4, top_p=0.9)}
SHAPES = {"tree": TreeShape(8, 2, 2), "wide": TreeShape(7, 1, 3), "chain": TreeShape(4, 2, 1)}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=list(SAMPLERS))
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def toy_of(seed: int = 1, vocab: int = 4, shape: TreeShape = SHAPES["tree"], **sizes: Any) -> Toy:
    return make_toy(vocab, shape, seed, **{"hidden_size": 6, "sharpness": 1.2, **sizes})


def own_law(toy: Toy, sampler: Sampler, length: int) -> Tensor:
    """The target's answers, by multiplying its probabilities."""
    p = toy.probabilities(sampler)
    rows = []
    for start in range(toy.vocab):
        for answer in itertools.product(range(toy.vocab), repeat=length):
            chance = torch.ones((), dtype=torch.float64)
            for before, token in itertools.pairwise((start, *answer)):
                chance = chance * p[before, token]
            rows.append(chance)
    return torch.stack(rows).view(toy.vocab, -1)


def law_of(toy: Toy, rule: str, sampler: Sampler = T1, draws: int = 5_000) -> StepLaw:
    built, samples = make_acceptor(rule), all_samples(toy, sampler)
    if judges_nodes_alone(built):
        laws = [law.mean(0) for law in node_laws(toy, built, sampler, draws)]
        ends = tree_ends(toy, laws, samples)
    else:
        ends = judged_ends(toy, built, sampler, samples)
    return step_law(toy, sampler, samples, ends)


def decode(toy: Toy, rule: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Answers [rows, length] after token 0, and steps [rows]: what the decoding loop does.

    The target's numbers belong to places of the answer, as in the loop.
    """
    built, keys = make_acceptor(rule), range(rows)
    roots = torch.zeros(rows, dtype=torch.int64)
    texts: list[list[int]] = [[] for _ in keys]
    steps = torch.zeros(rows, dtype=torch.int64)
    for step in itertools.count():
        going = [row for row in keys if len(texts[row]) < length]
        if not going:
            break
        trees = toy.trees.rows(roots[going])
        places = [len(texts[row]) for row in going]
        uniforms = place_uniforms(going, places, trees.max_depth + 1, roots.device)
        scores = T1.scores(toy.logits[trees.tokens].flatten(0, 1))
        choice = T1.choose(scores, uniforms.gather(1, trees.depths).flatten())
        choice = choice.view_as(trees.tokens)
        given = context_of(toy, built, T1, trees, choice, row_keys=going, steps=[step] * len(going))
        path, accepted, bonus, *_ = built.verify(given)
        new = committed_tokens(trees.tokens, path, accepted, bonus).tolist()
        for row, tokens, count in zip(going, new, accepted.tolist(), strict=True):
            texts[row] += tokens[: count + 1]
            roots[row] = texts[row][-1]
            steps[row] += 1
    return torch.tensor([text[:length] for text in texts]), steps


@every_shape
@every_sampler
def test_samples_are_a_law_and_lossless_rules_keep_the_targets_own(
    sampler: Sampler, shape: TreeShape
) -> None:
    toy = toy_of(shape=shape)
    samples = all_samples(toy, sampler)
    whole = torch.zeros(toy.vocab, dtype=torch.float64)
    torch.testing.assert_close(
        whole.index_add(0, samples.root, samples.weight), torch.ones_like(whole)
    )
    # Each node's samples follow the target's probabilities there.
    for node in range(toy.trees.num_nodes):
        for root in range(toy.vocab):
            if toy.trees.depths[root, node] < toy.trees.depths.max():
                rows = samples.root == root
                found = torch.zeros(toy.vocab, dtype=torch.float64)
                found.index_add_(0, samples.choice[rows, node], samples.weight[rows])
                wanted = toy.probabilities(sampler)[toy.trees.tokens[root, node]]
                torch.testing.assert_close(found, wanted)
    for rule in ("exact", "sampling"):
        found = answer_law(law_of(toy, rule, sampler), 4)
        torch.testing.assert_close(found, own_law(toy, sampler, 4))


@pytest.mark.parametrize(
    "rule",
    [
        "margin(kappa=0.6)",
        "naive(K=2, p_drop=0.2)",
        "majority(K=3, p_drop=0.2)",
        "dropmatch(K=2, p_drop=0.1)",
        "lenience(lenience=0.6)",
        "thresholds(single=0.8, accumulated=0.7)",
        "regret_budget(gap=0.5)",
    ],
)
def test_answers_and_tau_are_those_of_decoding(rule: str) -> None:
    toy, rows, length = toy_of(2), 4000, 3
    step = law_of(toy, rule)
    law = answer_law(step, length)[0]
    answers, _ = decode(toy, rule, rows, length)
    codes = (answers * toy.vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    counts = codes.bincount(minlength=len(law)).double()
    assert counts[law == 0].sum() == 0
    spread = (rows * law * (1 - law)).clamp(min=1.0).sqrt()
    assert ((counts - rows * law).abs() < 5 * spread).all()
    longer, steps = decode(toy, rule, 20, 150)
    assert long_run(step)[0] == pytest.approx(longer.numel() / float(steps.sum()), rel=0.04)


@every_sampler
@every_shape
@pytest.mark.parametrize(
    "rule", ["exact", "margin(kappa=0.4)", "top_k", "mars(variant=released)", "fuzzy_js", "typical"]
)
def test_nodes_judged_alone_make_up_the_verdict_on_the_tree(
    rule: str, shape: TreeShape, sampler: Sampler
) -> None:
    toy, built = toy_of(3, shape=shape), make_acceptor(rule)
    samples = all_samples(toy, sampler)
    laws = [law[0] for law in node_laws(toy, built, sampler, 1)]
    found = tree_ends(toy, laws, samples)
    torch.testing.assert_close(found, judged_ends(toy, built, sampler, samples))


@every_sampler
@pytest.mark.parametrize("rule", ["naive", "majority"])
def test_enumerated_heads_are_the_heads_that_are_drawn(rule: str, sampler: Sampler) -> None:
    toy, draws = toy_of(4), 1500
    for options in ("K=3, p_drop=0.2", "K=2, p_drop=0.4, adapt=entropy, include_clean=True"):
        text = f"{rule}({options})"
        exact = node_laws(toy, make_acceptor(text), sampler, 1)
        drawn = node_laws(toy, make_acceptor(f"any_of({text})"), sampler, draws)
        assert exact[0].shape[0] == 1 < drawn[0].shape[0]
        for one, other in zip(exact, drawn, strict=True):
            spread = (one[0] * (1 - one[0]) / draws).clamp(min=1e-6).sqrt()
            assert ((one[0] - other.mean(0)).abs() < 5 * spread).all()


def test_one_heads_law_is_the_sum_over_its_masks() -> None:
    toy, rate = toy_of(5), 0.3
    wanted = torch.zeros(toy.vocab, toy.vocab, dtype=torch.float64)
    for mask in itertools.product((0, 1), repeat=toy.hidden.shape[1]):
        kept = torch.tensor(mask)
        said = first_argmax(toy.head(toy.hidden * kept / (1 - rate)))
        chance = (1 - rate) ** sum(mask) * rate ** (len(mask) - sum(mask))
        wanted[torch.arange(toy.vocab), said] += chance
    found = head_law(toy, GREEDY, torch.full((toy.vocab,), rate))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    none = head_law(toy, GREEDY, torch.zeros(toy.vocab))
    assert torch.equal(none, toy.probabilities(GREEDY))


def test_naives_bound_is_that_of_its_heads() -> None:
    toy = toy_of(6, shape=TreeShape(2, 0, 1), draft_noise=2.0)  # a root and one child
    rule, length = NaiveAcceptor(K=3, p_drop=0.3), 2
    law = head_law(toy, GREEDY, torch.full((toy.vocab,), 0.3))
    best = first_argmax(toy.logits)
    child = toy.drafted[:, 0]
    flips = law[torch.arange(toy.vocab), child].masked_fill(child == best, 0.0)
    stays = (1 - flips) ** 3
    wanted = 1 - float((stays * stays[best]).mean())
    cost = measure(toy, rule, GREEDY, all_samples(toy, GREEDY), length=length)
    assert cost.bound == pytest.approx(wanted, abs=1e-6)
    assert 0 < cost.tv <= wanted


@pytest.mark.parametrize("seed", range(15))
def test_no_answer_law_is_farther_away_than_its_bound(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = list(SHAPES.values())[seed % 3]
    vocab = int(torch.randint(3, 6, (1,), generator=generator))
    toy = make_toy(vocab, shape, seed, sharpness=float(1 + 3 * torch.rand(1, generator=generator)))
    for sampler in (GREEDY, T1):
        samples = all_samples(toy, sampler)
        for rate in (0.0, 0.01, 0.05, 0.2):
            rule = NaiveAcceptor(K=1 + seed % 5, p_drop=rate)
            cost = measure(toy, rule, sampler, samples, length=4)
            assert cost.bound is not None
            assert cost.tv_error == 0
            assert cost.tv <= cost.bound + 1e-9
            assert cost.bound == pytest.approx(0, abs=1e-9) or rate > 0
        for text in ("lenience(lenience=0.7)", "margin(kappa=0.8)", "js(p_drop=0.05, K=2)"):
            cost = measure(toy, make_acceptor(text), sampler, samples, length=4, draws=50)
            assert cost.bound is not None
            assert cost.tv <= cost.bound + 1e-9


def test_greedy_the_distance_is_the_chance_of_another_answer() -> None:
    toy = toy_of(7)
    samples, rule = all_samples(toy, GREEDY), "naive(p_drop=0.05)"
    cost = measure(toy, make_acceptor(rule), GREEDY, samples, length=3)
    best = first_argmax(toy.logits)
    law = answer_law(law_of(toy, rule, GREEDY), 3)
    kept = []
    for start in range(toy.vocab):
        one = int(best[start])
        two = int(best[one])
        kept.append(float(law[start, (one * toy.vocab + two) * toy.vocab + int(best[two])]))
    assert cost.tv == pytest.approx(1 - sum(kept) / toy.vocab)
    assert cost.tv > 0.01


def test_the_closed_form_is_a_bound_where_gaps_are_normal_and_near_one_elsewhere() -> None:
    closed, exact = [], []
    for seed in range(6):
        toy = make_toy(5, SHAPES["tree"], seed, hidden_size=12)
        samples = all_samples(toy, GREEDY)
        assert flip_bound(toy, NaiveAcceptor(p_drop=0.0), 4) == pytest.approx(0, abs=1e-9)
        for rate in (0.02, 0.1):
            rule = NaiveAcceptor(K=2, p_drop=rate, noise="gaussian")
            drawn = measure(toy, rule, GREEDY, samples, length=4, draws=2000)
            closed.append(flip_bound(toy, rule, 4))
            assert drawn.tv <= closed[-1] + 5 * drawn.tv_error
            cost = measure(toy, NaiveAcceptor(K=2, p_drop=rate), GREEDY, samples, length=4)
            assert cost.bound is not None
            exact.append(cost.bound)
    assert torch.corrcoef(torch.tensor([closed, exact]))[0, 1] > 0.8


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("toy_distortion")


@pytest.fixture(scope="module")
def small() -> tuple[Toy, Samples]:
    toy = make_toy(5, TreeShape(7, 2, 2), 0)
    return toy, all_samples(toy, T1)


def test_every_rule_has_a_curve_and_no_other_name_has(script: ModuleType) -> None:
    assert set(script.CURVES) == set(ACCEPTORS)
    shown = [name for names in script.PANELS.values() for name in names]
    assert sorted([*shown, "exact", "sampling"]) == sorted(ACCEPTORS)


@pytest.mark.parametrize("name", list(ACCEPTORS))
def test_a_curve_begins_without_loss_and_loses_more_as_it_gains(
    name: str, script: ModuleType, small: tuple[Toy, Samples]
) -> None:
    toy, samples = small
    costs = [
        measure(toy, make_acceptor(rule), T1, samples, length=3, draws=200)
        for rule in script.CURVES[name]
    ]
    exact = measure(toy, make_acceptor("exact"), T1, samples, length=3)
    strict = costs[0]
    assert strict.tv == pytest.approx(0, abs=1e-9)
    assert strict.kl == pytest.approx(0, abs=1e-9)
    assert strict.tv_error == strict.relaxed_share == 0
    assert strict.tau == pytest.approx(exact.tau)
    if ACCEPTORS[name].lossless:
        return
    assert all(cost.tv > strict.tv and cost.kl > 0 for cost in costs[-2:])
    assert all(0 <= cost.relaxed_share <= 1 and cost.tv <= 1 for cost in costs)
    both = torch.tensor([[cost.tau for cost in costs], [cost.tv for cost in costs]])
    assert torch.corrcoef(both)[0, 1] > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rules nave", "unknown acceptor 'nave'"),
        ("--rules margin(kappa=-1)", "kappa is -1"),
        ("--vocab 1", "--vocab: '1' is not an integer of at least 2"),
        ("--vocab 17", "vocab is 17: this toy can have 2 to 16"),
        ("--vocab 3 --top-k 4", "top_k is 4: this toy can have 1 to 3"),
        ("--total-token 14", "total_token is 14: this toy can have 2 to 13"),
        ("--length 9", "10077696 answers of 9"),
        ("--depth 11 --top-k 1 --total-token 13", "different things along the tree"),
        ("--toys 0", "--toys: '0' is not an integer of at least 1"),
        ("--samples none", "--samples: 'none' is not"),
        ("--output-dir file/inside", "cannot be written"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    arguments: str,
    message: str,
    script: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert run_command(script.main, arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_run_leaves_table_numbers_and_figure(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    pytest.importorskip("matplotlib")
    rules = ["naive", "regret_budget", "all_of(naive(K=2, p_drop=0.1), floor(floor=0.2))"]
    sizes = "--vocab 4 --length 3 --depth 1 --top-k 2 --total-token 5 --toys 2 --samples 20"
    out = tmp_path / "new" / "toy"
    arguments = [*sizes.split(), "--output-dir", str(out), "--rules", *rules]
    assert run_command(script.main, arguments) == 0
    text = (out / "toy.md").read_text()
    assert text.endswith(capsys.readouterr().out)
    assert f"| {rules[2]} | " in text
    data = json.loads((out / "toy.json").read_text())
    assert next(iter(data["rules"])) == "exact"
    assert all(len(each) == 2 for each in data["rules"].values())
    assert {"tau", "tv", "kl", "relaxed_share", "bound"} <= set(data["rules"]["exact"][0])
    for row in data["naive_greedy"]:
        assert all(toy["tv"] <= toy["bound"] + 1e-9 for toy in row["toys"])
    assert {path.name for path in out.iterdir()} == {"toy.md", "toy.json", "toy.png", "toy.pdf"}


def test_without_matplotlib_the_figure_is_refused_before_the_work(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install eagle-dropmatch\[plot\]"):
        script.main(["--output-dir", str(tmp_path)])
