"""Shared by the engine's tests: one target, its draft, some prompts and what it says to them."""

from __future__ import annotations

import pytest
import rig
import torch

from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.target import TargetModel

#: New tokens in ``answers``; tests may use fewer, drafters that know them need some ahead.
ANSWER_TOKENS = 72


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> TargetModel:
    return rig.tiny_target()


@pytest.fixture(scope="session")
def draft(target: TargetModel) -> Eagle3Draft:
    return rig.tiny_draft(target)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return rig.prompts(9, 3, 17, 30)


@pytest.fixture(scope="session")
def answers(target: TargetModel, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' generate says to each prompt."""
    return [rig.greedy(target.model, prompt, ANSWER_TOKENS) for prompt in prompts]
