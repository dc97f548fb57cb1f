"""The control of a lossy rule: sampling the target among the tokens that the rule would accept."""

from __future__ import annotations

from typing import Any

import pytest
import rig
import torch

from eagle_dropmatch.acceptors import PromptContext, make_acceptor
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.target import PrefillOutput, TargetModel
from eagle_dropmatch.truncation import CANDIDATES, truncate

COUNT = 24


def scores(expression: str, target: TargetModel, hidden: torch.Tensor) -> Any:
    rule = make_acceptor(expression)
    logits = target.head(hidden)
    prefill = PrefillOutput(logits, hidden, hidden[:, None], hidden[:, None])
    state = rule.start(PromptContext(prefill, [1] * len(hidden), target.head))
    keys = list(range(len(hidden)))
    return logits, truncate(rule, logits, hidden, target.head, keys, [0] * len(keys), state)


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("margin(kappa=0.4)", lambda p: p >= 0.4 * p.max()),
        ("top_k(k=3)", lambda p: p >= p.sort(descending=True).values[2]),
        ("typical(eps=0.05, delta=1)", lambda p: p > min(0.05, float((p * p.log()).sum().exp()))),
        ("exact", lambda p: p == p.max()),
    ],
)
@torch.inference_mode()
def test_the_tokens_are_those_that_the_rule_keeps(
    target: TargetModel, expression: str, kept: Any
) -> None:
    hidden = torch.randn(20, rig.HIDDEN, generator=torch.Generator().manual_seed(1))
    logits, found = scores(expression, target, hidden)
    for row in range(20):
        wanted = kept(logits[row].softmax(-1)) | (logits[row] == logits[row].max())
        ids = found.ids[row][found.values[row].isfinite()]
        assert sorted(ids.tolist()) == wanted.nonzero()[:, 0].tolist()
        assert torch.equal(
            found.values[row].isfinite().float() @ torch.ones(CANDIDATES),
            torch.tensor(float(len(ids))),
        )
        torch.testing.assert_close(
            found.values[row][found.values[row].isfinite()], logits[row][ids]
        )


@torch.inference_mode()
def test_naives_tokens_are_its_heads(target: TargetModel) -> None:
    hidden = torch.randn(30, rig.HIDDEN, generator=torch.Generator().manual_seed(1))
    _, found = scores("naive(K=3, p_drop=0.4)", target, hidden)
    sizes = found.values.isfinite().sum(-1)
    assert sizes.min() >= 1
    assert 1 < sizes.max() <= 4  # three heads and the argmax
    _, strict = scores("naive(K=3, p_drop=0.0)", target, hidden)
    assert (strict.values.isfinite().sum(-1) == 1).all()


def generate(target: TargetModel, network: Eagle3Draft, rule: str | None, **options: Any) -> Any:
    decoder = rig.decoder(target, rig.eagle3(network))
    given = {"do_sample": True, "draft": False, "top_k": 0, **options}
    if rule is not None:
        given["truncation"] = make_acceptor(rule)
    tokens, mask = rig.padded(rig.prompts(5, 9))
    return decoder.generate(tokens, mask, max_new_tokens=COUNT, **given)


def test_a_strict_rule_leaves_the_greedy_answer(target: TargetModel, draft: Eagle3Draft) -> None:
    greedy = generate(target, draft, None, do_sample=False)
    for rule in ("exact", "margin(kappa=inf)", "naive(p_drop=0.0)"):
        assert torch.equal(generate(target, draft, rule), greedy)
    loose = generate(target, draft, "margin(kappa=0.01)", seed=[1, 2])
    assert not torch.equal(loose, greedy)


def test_rows_that_leave_keep_the_others_bounds(target: TargetModel, draft: Eagle3Draft) -> None:
    whole = generate(target, draft, "naive(K=4, p_drop=auto)")
    answer = whole[1, -COUNT:].tolist()
    stop = next(token for token in whole[0, -COUNT:].tolist()[2:] if token not in answer)
    cut = generate(target, draft, "naive(K=4, p_drop=auto)", eos_token_id=stop)
    assert cut[1, -COUNT:].tolist() == answer


@pytest.mark.parametrize(
    ("rule", "options", "part"),
    [
        ("margin", {"draft": True}, "draft=False"),
        ("margin", {"do_sample": False}, "do_sample=True"),
        ("fuzzy_js", {}, "without a draft"),
    ],
)
def test_what_cannot_be_is_one_line(
    target: TargetModel, draft: Eagle3Draft, rule: str, options: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError) as caught:
        generate(target, draft, rule, **options)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
