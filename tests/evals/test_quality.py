"""The target's view of an answer, against plain forwards."""

from __future__ import annotations

import pytest
import rig
import torch

from eagle_dropmatch.evals import quality
from eagle_dropmatch.evals.quality import judge_turn
from eagle_dropmatch.target import TargetModel

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("rows", [1, 5, 128])
def test_log_probability_and_strays_are_those_of_one_forward_a_token(monkeypatch, rows):
    monkeypatch.setattr(quality, "_ROWS_AT_ONCE", rows)
    model = rig.tiny_model()
    answer = rig.greedy(model, PROMPT, 12)
    answer[4] = (answer[4] + 1) % rig.VOCAB
    answer[9] = (answer[9] + 7) % rig.VOCAB
    total, strays = 0.0, []
    for place, token in enumerate(answer):
        log_probs = rig.last_logits(model, PROMPT + answer[:place]).log_softmax(-1)
        total += float(log_probs[token])
        if token != int(log_probs.argmax()):
            rank = int((log_probs > log_probs[token]).sum())
            strays.append((place, float(log_probs[token].exp()), rank))
    found = judge_turn(TargetModel(model), PROMPT, answer)
    assert found.log_probability == pytest.approx(total, abs=1e-3)
    assert {place for place, *_ in found.strays} >= {4, 9}
    assert [(place, rank) for place, _, rank in found.strays] == [(p, r) for p, _, r in strays]
    for (_, mine, _), (_, theirs, _) in zip(found.strays, strays, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_greedy_answer_strays_nowhere_and_no_answer_has_no_probability():
    model = rig.tiny_model()
    assert judge_turn(TargetModel(model), PROMPT, rig.greedy(model, PROMPT, 10)).strays == ()
    fused = judge_turn(TargetModel(model, fuse=True), PROMPT, rig.greedy(model, PROMPT, 10))
    assert fused.strays == ()
    plain = judge_turn(TargetModel(model), PROMPT, rig.greedy(model, PROMPT, 10))
    assert fused.log_probability == pytest.approx(plain.log_probability, rel=1e-4)
    assert judge_turn(TargetModel(model), PROMPT, []) == quality.TurnQuality(0.0, ())


def test_what_the_model_does_to_its_logits_counts():
    config = rig.tiny_config()
    config.final_logit_softcapping = 0.5
    model = rig.FAMILIES["llama"][1](config).eval()
    with torch.inference_mode():
        raw = model(rig.ids(PROMPT), use_cache=False).logits[0, -1]
    capped = torch.tanh(raw / 0.5) * 0.5
    token = int(raw.argmin())
    found = judge_turn(TargetModel(model), PROMPT, [token])
    assert found.log_probability == pytest.approx(float(capped.log_softmax(-1)[token]), abs=1e-5)


def test_what_the_draft_can_say_is_counted_where_it_is_asked():
    model = rig.tiny_model()
    target, answer = TargetModel(model), rig.greedy(model, PROMPT, 10)
    drafted = torch.zeros(rig.VOCAB, dtype=torch.bool)
    drafted[answer[:3]] = True
    wanted = sum(token in answer[:3] for token in answer)
    assert judge_turn(target, PROMPT, answer, drafted).covered == wanted
    assert judge_turn(target, PROMPT, answer).covered is None
    assert judge_turn(target, PROMPT, [], drafted).covered == 0
