"""Sampling on trees: the target's law, proved by enumeration, and the ids of plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import rig
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.cache import put_rows
from eagle_dropmatch.decoder import GenerateOutput, SpeculativeDecoder
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, Observation
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import Sampler, place_uniforms
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree

CPU = torch.device("cpu")
SMALL = 5  # tokens of the vocabulary that can be enumerated
TREES = {
    "tree": [-1, 0, 0, 0, 1, 1, 2, 4, 4],
    "chain": [-1, 0, 1, 2],
    "wide": [-1, 0, 0, 0, 0, 0],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "t1": {"temperature": 1.0, "top_k": 0},
    "cool": {"temperature": 0.6, "top_k": 0},
    "hot": {"temperature": 1.7, "top_k": 0},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 0.9, "top_k": 0, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "top_k": 4, "min_p": 0.2},
    "penalty": {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.4},
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))


class SameTrees(Drafter):
    """The same tree every step; siblings differ, and the root's token moves them around."""

    def __init__(self, parents: Sequence[int], vocab: int = SMALL) -> None:
        self.parents, self.vocab = list(parents), vocab
        self.rank = [sum(p == parents[i] for p in parents[:i]) for i in range(len(parents))]

    def start(self, prompt: DraftPrompt) -> None:
        self.roots = prompt.roots

    def propose(self) -> DraftTree:
        rank = torch.tensor(self.rank) + torch.tensor(self.parents)
        tokens = (self.roots[:, None] + rank) % self.vocab
        tokens[:, 0] = self.roots
        return DraftTree.from_parents(tokens, torch.tensor(self.parents).expand_as(tokens))

    def observe(self, seen: Observation) -> None:
        self.roots = seen.bonus

    def select(self, rows: Tensor) -> None:
        self.roots = self.roots[rows]

    def join(self, seats: Sequence[int], guests: Any) -> None:
        self.roots = put_rows(self.roots, seats, guests.roots)


@pytest.fixture(scope="module")
def tiny() -> TargetModel:
    """A target of SMALL tokens whose distributions are neither flat nor sharp."""
    config = rig.tiny_config(vocab_size=SMALL)
    torch.manual_seed(3)
    model = rig.FAMILIES["llama"][1](config)
    model.lm_head.weight.data *= 8
    return TargetModel(model.float().eval())


def processors(setting: dict[str, Any]) -> LogitsProcessorList:
    """transformers' own processors, in its own order."""
    steps: list[Any] = []
    if setting.get("repetition_penalty", 1.0) != 1.0:
        steps.append(logits_process.RepetitionPenaltyLogitsProcessor(setting["repetition_penalty"]))
    steps.append(logits_process.TemperatureLogitsWarper(setting["temperature"]))
    if setting["top_k"]:
        steps.append(logits_process.TopKLogitsWarper(setting["top_k"]))
    if "top_p" in setting:
        steps.append(logits_process.TopPLogitsWarper(setting["top_p"]))
    if "min_p" in setting:
        steps.append(logits_process.MinPLogitsWarper(setting["min_p"]))
    return LogitsProcessorList(steps)


@torch.inference_mode()
def enumerate_answers(
    target: TargetModel, prompt: list[int], count: int, setting: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """The probability of every answer of ``count`` tokens, by plain forwards."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for answer, chance in chances.items():
            text = rig.ids([*prompt, *answer])
            logits = target.model(text, use_cache=False).logits[:, -1]
            probs = processors(setting)(text, logits).double().softmax(-1)[0]
            longer |= {(*answer, i): chance * float(p) for i, p in enumerate(probs) if p > 0}
        chances = longer
    assert sum(chances.values()) == pytest.approx(1)
    return chances


def sample(
    target: TargetModel,
    drafter: Any,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    count: int,
    setting: dict[str, Any],
    rule: str = "sampling",
    **options: Any,
) -> GenerateOutput:
    decoder = SpeculativeDecoder(target, drafter, acceptor=make_acceptor(rule))
    tokens, mask = rig.padded(prompts)
    out = decoder.generate(
        tokens,
        mask,
        max_new_tokens=count,
        do_sample=True,
        seed=seeds,
        return_dict_in_generate=True,
        **setting,
        **options,
    )
    assert isinstance(out, GenerateOutput)
    return out


def fits(found: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """The p-value of Pearson's test, rare answers taken together."""
    assert set(found) <= set(chances), "an answer that has no probability"
    total = sum(found.values())
    common = [answer for answer, chance in chances.items() if chance * total >= 5]
    cells = [found[answer] for answer in common]
    wanted = [chances[answer] * total for answer in common]
    if len(common) < len(chances):
        cells.append(total - sum(cells))
        wanted.append(total - sum(wanted))
    return float(stats.chisquare(cells, wanted, sum_check=False).pvalue)


@pytest.mark.parametrize("shape", TREES)
@every_setting
def test_answers_follow_the_targets_law(
    tiny: TargetModel, setting: dict[str, Any], shape: str
) -> None:
    prompt, count, draws = [1, 4, 2], 3, 2000
    chances = enumerate_answers(tiny, prompt, count, setting)
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, 500):
        seeds = range(start, start + 500)
        out = sample(tiny, lambda _: SameTrees(TREES[shape]), [prompt] * 500, seeds, count, setting)
        found.update(map(tuple, out.sequences[:, len(prompt) :].tolist()))
        assert max(max(row.accept_lengths) for row in out.stats.rows) > 1
    # 21 tests are made: a true law fails one of them once in 500 runs of other seeds.
    p = fits(found, chances)
    print(f"\nchi-square | {setting} | {shape} | batch 500 | {len(chances)} answers | p {p:.3f}")
    assert p > 1e-4
    # The test can fail: the law of another temperature is told apart.
    warmer = {**setting, "temperature": setting["temperature"] * 1.5}
    assert (
        fits(
            found, {**dict.fromkeys(found, 1e-9), **enumerate_answers(tiny, prompt, count, warmer)}
        )
        < 1e-4
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_a_batch_follow_their_own_laws(tiny: TargetModel, batch: int) -> None:
    setting, count = SETTINGS["t1"], 2
    prompts = [[1, 4, 2], [0, 3], [2, 2, 1, 0, 4]][:batch]
    found: list[Counter[tuple[int, ...]]] = [Counter() for _ in prompts]
    for start in range(0, 1500, 250):
        seeds = [start + i for i in range(250) for _ in prompts]
        rows = prompts * 250
        out = sample(tiny, lambda _: SameTrees(TREES["tree"]), rows, seeds, count, setting)
        for i, answer in enumerate(out.sequences[:, -count:].tolist()):
            found[i % batch][tuple(answer)] += 1
    for prompt, counts in zip(prompts, found, strict=True):
        chances = enumerate_answers(tiny, prompt, count, setting)
        p = fits(counts, chances)
        about = f"{setting} | tree | batch {batch} | {len(chances)} answers"
        print(f"\nchi-square | {about} | p {p:.3f}")
        assert p > 1e-4


@every_setting
def test_trees_draw_the_very_answer_of_plain_decoding(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]], setting: dict[str, Any]
) -> None:
    if setting["top_k"] == 3:
        setting = {**setting, "top_k": 40}
    seeds = [4, 9, 2, 7][: len(prompts)]
    plain = sample(target, rig.eagle3(draft), prompts, seeds, 24, setting, draft=False)
    for rule in ("sampling", "exact", "lenience(lenience=1.0)"):
        trees = sample(target, rig.eagle3(draft), prompts, seeds, 24, setting, rule)
        assert torch.equal(trees.sequences, plain.sequences)
        assert trees.stats.num_steps < plain.stats.num_steps
    for row in range(len(prompts)):
        alone = sample(target, rig.eagle3(draft), [prompts[row]], [seeds[row]], 24, setting)
        assert alone.sequences[0, -24:].tolist() == plain.sequences[row, -24:].tolist()


def test_other_seeds_draw_other_answers_and_the_global_generator_stays(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    before = torch.get_rng_state()
    rows = [prompts[0]] * 3
    out = sample(target, rig.eagle3(draft), rows, [0, 1, 0], 16, SETTINGS["hot"])
    assert torch.equal(out.sequences[0], out.sequences[2])
    assert not torch.equal(out.sequences[0], out.sequences[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_leaves_the_sampling_stream_where_it_was(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    """A rule of dropout heads that changes no acceptance changes no sample."""
    rows, seeds = prompts[:2], [0, 1]
    exact = sample(target, rig.eagle3(draft), rows, seeds, 20, SETTINGS["t1"])
    rule = "all_of(exact, naive(K=3, p_drop=0.4, include_clean=True))"
    both = sample(target, rig.eagle3(draft), rows, seeds, 20, SETTINGS["t1"], rule)
    assert torch.equal(both.sequences, exact.sequences)


def test_greedy_decoding_applies_the_repetition_penalty_on_trees(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    decoder = rig.decoder(target, rig.eagle3(draft))
    for prompt in prompts[:2]:
        ours = decoder.generate(rig.ids(prompt), max_new_tokens=24, repetition_penalty=1.3)
        theirs = target.model.generate(
            rig.ids(prompt),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.3,
            pad_token_id=0,
        )
        assert ours.tolist() == theirs.tolist()
        plain = decoder.generate(rig.ids(prompt), max_new_tokens=24)
        assert ours.tolist() != plain.tolist()


def test_unset_fields_have_transformers_values(
    target: TargetModel, draft: Eagle3Draft, prompts: list[list[int]]
) -> None:
    decoder = rig.decoder(target, rig.eagle3(draft))
    prompt = rig.ids(prompts[0])
    unset = decoder.generate(prompt, max_new_tokens=20, do_sample=True, seed=3)
    named = decoder.generate(
        prompt, max_new_tokens=20, do_sample=True, seed=3, temperature=1.0, top_k=50, top_p=1.0
    )
    assert torch.equal(unset, named)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"do_sample": True, "temperature": 0.0}, "temperature 0.0"),
        ({"do_sample": True, "temperature": -1.0}, "temperature -1.0"),
        ({"do_sample": True, "top_p": 0.0}, "top_p is 0.0"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1"),
        ({"do_sample": True, "min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p=0.5"),
        ({"seed": [1, 2, 3]}, "3 seeds"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(
    target: TargetModel, draft: Eagle3Draft, options: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError) as caught:
        rig.decoder(target, rig.eagle3(draft)).generate(rig.ids([1, 2, 3]), **options)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_logits(temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.2, -0.3, 0.9, -2.0])
    draws = 20_000
    sampler = Sampler(temperature)
    uniforms = place_uniforms(range(draws), [0] * draws, 1, CPU)[:, 0]
    found = sampler.choose(sampler.scores(logits.expand(draws, 8)), uniforms)
    counts = torch.bincount(found, minlength=8).double()
    probs = (logits.double() / temperature).softmax(-1)
    assert stats.chisquare(counts, draws * probs, sum_check=False).pvalue > 1e-4
    other = (logits.double() / (1.2 * temperature)).softmax(-1)
    assert stats.chisquare(counts, draws * other, sum_check=False).pvalue < 1e-4


def test_numbers_of_different_places_are_independent() -> None:
    uniforms = place_uniforms(range(4000), [7] * 4000, 2, CPU)
    halves = (uniforms > 0.5).long()
    counts = torch.bincount(halves[:, 0] * 2 + halves[:, 1], minlength=4)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert torch.equal(place_uniforms([5], [8], 1, CPU)[0, 0], uniforms[5, 1])


def test_no_uniform_leads_to_a_token_without_probability() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    sampler = Sampler(1.0)
    for uniform in (0.0, 1e-12, 0.2689, 0.999999, 1 - 2**-53):
        found = sampler.choose(sampler.scores(scores), torch.tensor([uniform], dtype=torch.float64))
        assert int(found) in (1, 3)


def test_only_the_likeliest_tokens_are_drawn() -> None:
    logits = torch.zeros(500, 50)
    logits[:, 30:] = 1.0
    sampler = Sampler(5.0, top_k=20)
    uniforms = place_uniforms(range(500), [0] * 500, 1, CPU)[:, 0]
    found = sampler.choose(sampler.scores(logits), uniforms)
    assert found.min() >= 30
    assert len(set(found.tolist())) > 10


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_scores_are_transformers_own(setting: str) -> None:
    given = SETTINGS[setting]
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20, 30, generator=generator)
    before = torch.randint(30, (20, 6), generator=generator)
    sampler = Sampler(**given)
    values, ids = sampler.scores(sampler.penalise(logits, before))
    whole = torch.full_like(logits, -torch.inf)
    whole = values if ids is None else whole.scatter(1, ids, values)
    wanted = processors(given)(before, logits)
    torch.testing.assert_close(whole.softmax(-1), wanted.softmax(-1))
