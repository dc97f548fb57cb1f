"""The recorded runs of the public EAGLE-3 reference: same ids, rounds and trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.drafts.base import TreeShape
from eagle_dropmatch.drafts.checkpoint import load_draft
from eagle_dropmatch.drafts.eagle3_drafter import Eagle3Drafter
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree

RUNS = ("seed0_vd200", "seed0_vd320", "seed1_vd200", "seed1_vd320")


class RecordingDrafter(Eagle3Drafter):
    """Keeps every tree it proposes."""

    trees: list[DraftTree]

    def propose(self) -> DraftTree:
        tree = super().propose()
        self.trees.append(tree)
        return tree


def load(folder: Path) -> tuple[TargetModel, Any, list[dict[str, Any]]]:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    target = TargetModel(model, (2, 4, 5))
    draft = load_draft(
        folder / "draft",
        target_config=model.config,
        target_embedding=model.get_input_embeddings(),
        dtype=torch.float32,
    )
    return target, draft, json.loads((folder / "cases.json").read_text())


def test_there_are_eight_greedy_runs(data_dir: Path) -> None:
    cases = [case for run in RUNS for case in load(data_dir / "parity" / run)[2]]
    assert len(cases) == 8
    assert all(case["temperature"] == 0 for case in cases)


@pytest.mark.parametrize("run", RUNS)
@torch.inference_mode()
def test_ids_rounds_and_trees_equal_the_recorded_reference(data_dir: Path, run: str) -> None:
    target, draft, cases = load(data_dir / "parity" / run)
    for case in cases:
        shape = TreeShape(case["total_token"], case["depth"], case["top_k"])
        drafter = RecordingDrafter(draft, shape)
        drafter.trees = []
        prompt, wanted = case["prompt"], case["output_ids"]
        # The reference cuts nothing and leaves out the pending root: decode freely for as many
        # rounds as it ran.
        loop = DecodingLoop(target, drafter, make_acceptor("exact"), Limits(10_000, ()))
        loop.prefill([prompt], seed=0, reserve=shape.nodes)
        for _ in range(case["rounds_run"]):
            loop.step()
        row = loop.rows[0]
        assert prompt + row.tokens[:-1] == wanted
        assert sum(row.accept_lengths) == case["new_token"]
        drafter.propose()  # the reference draws one more tree after its last round
        assert len(drafter.trees) == len(case["trees"]) == case["rounds_run"] + 1
        for ours, theirs in zip(drafter.trees, case["trees"], strict=True):
            assert ours.tokens[0].tolist() == theirs["tokens"]
            assert ours.parents[0].tolist() == theirs["parents"]
