"""Logits of many nodes: judged in parts with the same verdicts, never whole in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import rig
import torch
from rule_scenes import linear_head, random_scene
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_dropmatch.acceptors import ACCEPTORS, make_acceptor
from eagle_dropmatch.sampling import Sampler

AT_ONCE = "eagle_dropmatch.sampling.NUMBERS_AT_ONCE"
SAMPLERS = {
    "greedy": Sampler(),
    "t1": Sampler(1.0),
    "settings": Sampler(0.7, top_k=6, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("at_once", [1, 20, 70])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=list(SAMPLERS))
@pytest.mark.parametrize("name", list(ACCEPTORS))
def test_nodes_judged_in_parts_are_judged_as_together(
    name: str, sampler: Sampler, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, rule = random_scene(), make_acceptor(name)
    whole = rule.verify(scene.step(rule, sampler))
    monkeypatch.setattr(AT_ONCE, at_once)
    for each, other in zip(rule.verify(scene.step(rule, sampler)), whole, strict=True):
        assert torch.equal(each, other)


def test_samples_drawn_in_parts_are_those_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target = rig.tiny_target()
    decoder = rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), (24, 4, 6))
    tokens, mask = rig.padded(rig.prompts(7, 12))
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 20}
    whole = decoder.generate(tokens, mask, **settings)
    monkeypatch.setattr(AT_ONCE, 3 * rig.VOCAB)
    assert torch.equal(decoder.generate(tokens, mask, **settings), whole)


class Widest(TorchDispatchMode):
    """Remembers the largest wide float that comes out of an operation, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype in (torch.float32, torch.float64):
                held = each.untyped_storage().nbytes() // each.element_size()
                self.numbers = max(self.numbers, held)
        return out


@pytest.mark.parametrize("name", list(ACCEPTORS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_rule_holds_all_nodes_rows_in_float32(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, part = 4096, 8
    drawn = random_scene(batch=2, nodes=30, vocab=vocab, padded=False)
    half = drawn.head.weight.to(torch.bfloat16)
    scene = replace(drawn, hidden=drawn.hidden.to(torch.bfloat16), head=linear_head(half))
    # A real draft knows a part of the vocabulary alone.
    scene = replace(
        scene,
        draft_ids=torch.arange(64),
        tree=replace(drawn.tree, draft_logits=drawn.tree.draft_logits[..., :64]),
    )
    rule = make_acceptor(name)
    step = scene.step(rule, Sampler(temperature))
    assert step.parents.count > 2 * part
    vars(step).pop("parents")
    monkeypatch.setattr(AT_ONCE, part * vocab)
    monkeypatch.setattr("eagle_dropmatch.acceptors.parents._AT_ONCE", part)
    with Widest() as seen:
        rule.verify(step)
    assert seen.numbers <= part * vocab
