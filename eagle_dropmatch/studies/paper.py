"""What DropMatch published (arXiv 2603.03333), table by table.

Its models are others than those measured here (mostly Llama-3.1-8B drafting for a 70B target, on
four A100s), so these numbers stand beside ours for their direction and size, never as a goal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SOURCE = "DropMatch, arXiv 2603.03333"
HEADS, P_DROP = 5, 0.3
"""The paper's K and dropout rate, unless a table says otherwise."""

SINGLE_HEAD_PASS: Mapping[float, float] = {
    0.0: 81.7,
    0.1: 80.9,
    0.2: 80.4,
    0.3: 78.5,
    0.4: 77.1,
    0.5: 70.4,
}
"""Table 1: HumanEval pass@1 in percent when one dropout head writes the answer, by its rate; mean
of five heads. The 8B draft alone has 72.6."""


class Votes(NamedTuple):
    """How many heads agree on their most frequent token, at the positions of HumanEval answers."""

    share: float
    """Of positions."""
    probability: float
    """Mean probability of that token."""


VOTES: Mapping[int, Votes] = {
    1: Votes(0.0, 0.255),
    2: Votes(0.0014, 0.325),
    3: Votes(0.0082, 0.460),
    4: Votes(0.0054, 0.517),
    5: Votes(0.9840, 0.939),
}
"""Table 2, by the heads that agree."""


class Distances(NamedTuple):
    """Mean JS divergence to the heads' centre, in nats."""

    draft: float
    heads: float


DISPERSED, CONCENTRATED = Distances(0.0254, 0.0313), Distances(0.0097, 0.0014)
"""Table 3: where the heads disagree, and where they agree."""

HEAD_SHARE: Mapping[str, float] = {"none": 0.0005, "naive": 0.0017, "js": 0.0164}
"""Table 4: share of the forward pass spent in the LM head, by rule; 70B, batch 1, 5 tokens."""

BATCH_RATIO: Mapping[int, float] = {1: 1.19, 4: 1.18, 16: 1.12, 32: 1.10, 64: 1.15, 128: 1.10}
"""Table 5: tokens/s of DropMatch over speculative decoding by batch size, GSM8K, L = 10."""


class Pair(NamedTuple):
    """A number of the same trees under exact acceptance and under naive."""

    exact: float
    naive: float

    @property
    def ratio(self) -> float:
        return self.naive / self.exact


MT_BENCH_TAU: Mapping[int, Pair] = {
    5: Pair(5.37, 5.86),
    7: Pair(5.81, 6.58),
    9: Pair(6.06, 6.89),
}
"""Table 7, MT-Bench, by EAGLE's depth L: EAGLE-3 on Llama-3.3-70B."""

MT_BENCH_SCORE: Mapping[int, Pair] = {
    5: Pair(8.47, 8.45),
    7: Pair(8.43, 8.46),
    9: Pair(8.48, 8.59),
}
"""The score, 1 to 10, that a judge gave the same answers."""
