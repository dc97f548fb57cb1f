"""The arms: one counting rule, and clocks that read a device at rest."""

from __future__ import annotations

from string import ascii_letters, digits
from types import SimpleNamespace
from typing import Any

import pytest
import rig
import torch
from eval_fakes import EOS, FakeDecoder, answer_ids

from eagle_dropmatch import clock
from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.evals.arms import build_arms, plain_row
from eagle_dropmatch.evals.plan import drafter_name, make_rules, plan_arms

PROMPT = [40, 41, 42]


def build(decoder, sampling=None):
    rules = {"naive": make_acceptor("naive")}
    planned = plan_arms(["plain", "hf", "exact", "naive"], rules, ())
    return build_arms(planned, decoder, [EOS], sampling or {})


def test_all_arms_give_the_same_ids_cut_by_the_same_rule():
    answers = [
        arm.answer(PROMPT, max_new_tokens=6, seed=1).output_ids for arm in build(FakeDecoder())
    ]
    assert answers == [answer_ids(PROMPT, 6)] * 4


def test_each_arm_runs_under_its_own_acceptor_also_the_one_without_drafts():
    """A rule left in the decoder would work on the plain arm's prompts, inside its time."""
    decoder = FakeDecoder()
    plain, _, exact, naive = build(decoder)
    for arm in (naive, plain, exact, naive):
        arm.answer(PROMPT, max_new_tokens=4, seed=7)
    assert [(rule.name, *rest) for rule, *rest in decoder.calls] == [
        ("naive", True, 7),
        ("exact", False, 7),
        ("exact", True, 7),
        ("naive", True, 7),
    ]


def test_transformers_decodes_greedily_whatever_the_models_config_says():
    decoder = FakeDecoder()
    hf = build(decoder)[1]
    turn = hf.answer(PROMPT, max_new_tokens=5, seed=0)
    (config,) = decoder.target.model.configs
    assert config.do_sample is False
    assert config.repetition_penalty == 1.0
    assert config.max_new_tokens == 5
    assert config.eos_token_id == [EOS]
    # A forward pass a token, the first one being the prefill's.
    assert turn.row.accept_lengths == [1] * (len(turn.output_ids) - 1)
    assert (turn.prefill_seconds, turn.decode_seconds) == (None, None)


@pytest.mark.parametrize("arm", ["lookup", "assisted"])
def test_what_drafts_in_transformers_gives_its_answers_and_its_steps_are_counted(arm):
    model = rig.tiny_model()
    small = SimpleNamespace(model=SimpleNamespace(model=rig.tiny_model()))  # right every time
    decoder = SimpleNamespace(
        target=SimpleNamespace(model=model),
        tokenizer=SimpleNamespace(pad_token_id=0),
        drafter=lambda tree: small,
        tree=None,
    )
    planned = plan_arms(["hf", arm], {}, ())
    plain, drafting = build_arms(planned, decoder, [], {})
    said = rig.greedy(model, rig.prompts(9)[0], 30)
    for prompt in (rig.prompts(9)[0], rig.prompts(9)[0] + said + rig.prompts(9)[0]):
        forwards = []
        hook = model.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        turn = drafting.answer(prompt, max_new_tokens=24, seed=0)
        hook.remove()
        assert turn.output_ids == plain.answer(prompt, max_new_tokens=24, seed=0).output_ids
        assert sum(turn.row.accept_lengths) == len(turn.output_ids) - 1
        assert len(forwards) - 1 <= len(turn.row.accept_lengths) <= len(forwards)
    assert max(turn.row.accept_lengths) > 1


def test_several_trees_give_an_exact_arm_each_with_its_own_tree():
    decoder = FakeDecoder()
    planned = plan_arms(["plain", "exact"], {}, (), [(8, 2, 3), (60, 7, 10)])
    assert [spec.name for spec, _ in planned] == ["plain", "exact-8-2-3", "exact-60-7-10"]
    assert len({spec.group for spec, _ in planned}) == 3
    arms = build_arms(planned, decoder, [EOS], {})
    drawn = []
    for arm in (arms[2], arms[1], arms[2]):
        arm.answer(PROMPT, max_new_tokens=4, seed=0)
        tree = decoder.tree
        drawn.append((tree.total_token, tree.depth, tree.top_k))
    assert drawn == [(60, 7, 10), (8, 2, 3), (60, 7, 10)]


def test_a_record_that_counts_other_tokens_than_the_output_holds_is_an_error():
    class Overcounting(FakeDecoder):
        def generate(self, *args, **kwargs):
            output = super().generate(*args, **kwargs)
            cut_short = output.sequences.clone()
            cut_short[0, len(PROMPT) + 1] = EOS
            return SimpleNamespace(sequences=cut_short, stats=output.stats)

    with pytest.raises(RuntimeError, match="the record counts"):
        build(Overcounting())[2].answer(PROMPT, max_new_tokens=8, seed=0)


def test_every_clock_reading_follows_a_synchronisation(monkeypatch):
    events = []
    monkeypatch.setattr(clock, "synchronise", lambda device: events.append("sync"))
    readings = iter([1.0, 3.5])
    monkeypatch.setattr(
        clock.time, "perf_counter", lambda: (events.append("clock"), next(readings))[1]
    )
    result, seconds = clock.timed(lambda: events.append("work") or "done", torch.device("cpu"))
    assert events == ["sync", "clock", "work", "sync", "clock"]
    assert (result, seconds) == ("done", 2.5)


def test_an_accelerator_is_waited_for_and_a_cpu_is_not(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    clock.synchronise(torch.device("cpu"))
    clock.synchronise(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]


def planned(texts, seeds=()):
    rules = {text: make_acceptor(text) for text in texts}
    return plan_arms(["exact", *texts], rules, seeds)


def test_a_random_rule_gets_an_arm_for_each_seed_in_one_row():
    arms = planned(["naive", "margin"], (0, 4))
    assert [(s.name, s.group, s.seed, s.lossy) for s, _ in arms] == [
        ("exact", "exact", None, False),
        ("naive-seed0", "naive", 0, True),
        ("naive-seed4", "naive", 4, True),
        ("margin", "margin", None, True),
    ]
    assert [getattr(rule, "seed", None) for _, rule in arms] == [None, 0, 4, None]


def test_rules_of_one_kind_have_files_and_rows_of_their_own():
    texts = ["margin(kappa=0.5)", "margin(kappa=0.3)", "any_of(naive(seed=3), top_k)"]
    texts.append("naive (K=2)")
    arms = planned([*texts, "naive(K=2)"])
    names = [spec.name for spec, _ in arms]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set(ascii_letters + digits + "._-") for name in names)
    assert [spec.group for spec, _ in arms][1:] == [*texts, "naive(K=2)"]
    assert arms[3][0].seed == 3
    seeded = planned(texts[2:3], (7, 8))
    assert [rule.rules[0].seed for _, rule in seeded[1:]] == [7, 8]
    assert not planned(["all_of(exact, naive)"])[1][0].lossy


def test_seeds_of_rules_that_spell_alike_have_files_of_their_own():
    arms = planned(["naive(K=2)", "naive (K=2)", "naive(seed=3)", "naive"], (0, 1))
    names = [spec.name for spec, _ in arms]
    assert len(set(names)) == len(names) == 9


def test_controls_stand_beside_lossy_rules_that_need_no_draft():
    texts = ["margin", "fuzzy_js", "all_of(exact, margin)"]
    rules = {text: make_acceptor(text) for text in texts}
    arms = plan_arms(["exact", *texts], rules, (), controls=True)
    assert [(s.name, s.control, s.lossy) for s, _ in arms] == [
        ("exact", False, False),
        ("margin", False, True),
        ("control-margin", True, True),
        ("fuzzy_js", False, True),
        ("all_of-exact-margin", False, False),
    ]
    decoder = FakeDecoder()
    build_arms(arms, decoder, [EOS], {})[2].answer(PROMPT, max_new_tokens=4, seed=7)
    (_, draft, _) = decoder.calls[0]
    assert not draft
    assert decoder.sampling["truncation"] is rules["margin"]
    assert decoder.sampling["temperature"] == 1.0


def test_all_arms_sample_under_the_same_settings():
    decoder = FakeDecoder()
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
    state = torch.get_rng_state()
    for arm in build(decoder, sampling):
        arm.answer(PROMPT, max_new_tokens=4, seed=7)
        assert decoder.sampling == sampling
    (config,) = decoder.target.model.configs
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 0.7, 0, 0.9)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_record_of_plain_decoding_handles_short_outputs():
    assert plain_row([EOS], 3, [EOS]).finish_reason == "stop"
    assert plain_row([EOS], 3, [EOS]).accept_lengths == []
    assert plain_row([9, 9], 3, [EOS]).finish_reason == "length"
    assert plain_row([], 3, [EOS]).output_tokens == 0


@pytest.mark.parametrize(
    ("draft_lm", "draft_ngram", "told"),
    [(None, None, "EAGLE-3"), ("folder", None, "small LM"), (None, 3, "n-gram")],
)
def test_labels_name_what_drafts(draft_lm: Any, draft_ngram: Any, told: str) -> None:
    rules = make_rules(["naive"], {})
    drafter = drafter_name(draft_lm, draft_ngram)
    labels = [spec.label for spec, _ in plan_arms(["exact", *rules], rules, (), drafter=drafter)]
    assert labels == [f"{told} exact", f"{told} + naive"]
