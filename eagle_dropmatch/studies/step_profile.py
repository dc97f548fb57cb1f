"""Where the time of a decoding step goes, and what the machine would need for it at least."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..cache import TreeCache
from ..decoder import SpeculativeDecoder
from ..drafts.base import TreeShape
from ..drafts.eagle3 import Eagle3Config
from ..drafts.eagle3_drafter import Eagle3Drafter
from ..evals import first_turns
from ..loop import DecodingLoop

#: Parts of a step, in its order, and what they hold.
PARTS = {
    "draft network": "its layer over every level's beam and over the accepted tokens",
    "draft head": "its logits, the softmax and the beam's children",
    "tree building": "beams, re-ranking, parents",
    "mask": "the tree's mask and positions, room in the cache",
    "target body": "the forward over all nodes, up to the LM head",
    "target head": "logits of all nodes",
    "acceptor": "the rule, the walk, dropout heads",
    "cache": "moving the accepted nodes' keys and values",
    "bookkeeping": "stop tokens, the record, the transfer to the host",
}


@dataclass
class StepClock:
    """Exclusive seconds of named work, step by step: a part's time is without its parts'."""

    steps: list[dict[str, float]] = field(default_factory=list)
    _open: list[list[Any]] = field(default_factory=list)

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work`` with its time put down; what a rule calls inside is the rule's own."""

        def run(*args: Any, **options: Any) -> Any:
            if not self._open or self._open[-1][0] == "acceptor":
                return work(*args, **options)
            return self._run(name, work, args, options)

        return run

    def step(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work`` as a whole step; its own time is bookkeeping."""

        def run(*args: Any, **options: Any) -> Any:
            self.steps.append(defaultdict(float))
            return self._run("bookkeeping", work, args, options)

        return run

    def _run(self, name: str, work: Callable[..., Any], args: Any, options: Any) -> Any:
        self._open.append([name, 0.0])
        began = time.perf_counter()
        try:
            return work(*args, **options)
        finally:
            took = time.perf_counter() - began
            _, inside = self._open.pop()
            self.steps[-1][name] += took - inside
            if self._open:
                self._open[-1][1] += took

    def medians(self) -> dict[str, float]:
        """Seconds of each part in the median over all steps, in the order of ``PARTS``."""
        return {name: statistics.median([step[name] for step in self.steps]) for name in PARTS}

    @property
    def whole(self) -> float:
        """Seconds of the median step."""
        return statistics.median([sum(step.values()) for step in self.steps])


@contextmanager
def watched(decoder: SpeculativeDecoder, clock: StepClock) -> Iterator[None]:
    """Time the decoder's parts while this is open. One device, which is synchronised nowhere."""
    target, build = decoder.target, decoder.drafter

    def drafter(shape: TreeShape) -> Any:
        made = build(shape)
        assert isinstance(made, Eagle3Drafter), "parts are known of EAGLE-3 drafters alone"
        vars(made).update(
            propose=clock.timed("tree building", made.propose),
            observe=clock.timed("tree building", made.observe),
            _forward=clock.timed("draft network", made._forward),
            _best=clock.timed("draft head", made._best),
        )
        return made

    with (
        mock.patch.object(decoder, "drafter", drafter),
        mock.patch.object(target, "verify", clock.timed("mask", target.verify)),
        mock.patch.object(target, "read", clock.timed("target body", target.read)),
        mock.patch.object(
            target.head, "_product", clock.timed("target head", target.head._product)
        ),
        mock.patch.object(
            decoder.acceptor, "verify", clock.timed("acceptor", decoder.acceptor.verify)
        ),
        mock.patch.object(TreeCache, "keep", clock.timed("cache", TreeCache.keep)),
        mock.patch.object(DecodingLoop, "step", clock.step(DecodingLoop.step)),
    ):
        yield


def profile(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    steps: int,
) -> StepClock:
    """Answer prompts until so many steps are timed; the first answer is not counted."""
    clock = StepClock()
    with watched(decoder, clock):
        first_turns.answer_until(
            lambda: len(clock.steps) >= steps,
            clock.steps.clear,
            decoder,
            prompts,
            max_new_tokens=max_new_tokens,
            most=100,
        )
    return clock


@dataclass(frozen=True)
class Machine:
    """What this machine gives at most, measured: bytes and operations a second."""

    bandwidth: float
    operations: float

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Machine:
        """Reading 256 MB of memory, and a product of two 2048 x 2048 matrices of ``dtype``."""
        one, other = (torch.ones(2**25) for _ in range(2))
        read = _best_of(lambda: torch.dot(one, other))
        left, right = (torch.ones(2048, 2048, dtype=dtype) for _ in range(2))
        product = _best_of(lambda: left @ right)
        return cls(2 * 4 * 2**25 / read, 2 * 2048**3 / product)

    def floor(self, parameters: int, rows: int, item: int, forwards: int = 1) -> float:
        """Seconds that products with so many parameters take at least over ``rows`` rows each."""
        read = parameters * item / self.bandwidth
        return forwards * max(read, 2 * parameters * rows / self.operations)


def _best_of(work: Callable[[], Any], times: int = 12) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def floors(decoder: SpeculativeDecoder, machine: Machine) -> dict[str, float]:
    """Least seconds of the parts that multiply, each weight read once a forward."""
    target, tree = decoder.target, decoder.tree
    item = target.head.weight.element_size()
    body = _matrices(target.model.get_decoder())
    made: Any = decoder.drafter(tree)
    layer, fusing, head = draft_parameters(made.draft.config)
    forwards = tree.depth + 1
    return {
        "draft network": machine.floor(layer, tree.top_k, item, forwards)
        + machine.floor(fusing, 1, item),
        "draft head": machine.floor(head, tree.top_k, item, forwards),
        "target body": machine.floor(body, tree.total_token, item),
        "target head": machine.floor(target.head.weight.numel(), tree.total_token, item),
    }


def draft_parameters(config: Eagle3Config) -> tuple[int, int, int]:
    """Numbers that an EAGLE-3 draft multiplies with: its layer's, of the fusing of features, of its
    LM head."""
    size, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
    layer = 2 * size * heads * config.head_dim + config.num_attention_heads * config.head_dim * size
    layer += 3 * size * config.intermediate_size
    fusing = config.feature_size * size if config.fuse_features else 0
    return layer, fusing, config.draft_vocab_size * size


def _matrices(model: nn.Module) -> int:
    """Parameters that every token is multiplied with: no embeddings, no vectors."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
