"""What an acceptance rule is, and the walk that all rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from eagle_dropmatch.target import PrefillOutput, TargetOutput
from eagle_dropmatch.tree import DraftTree, longest_accepted_path

#: What a rule keeps for each row over an answer: tensors whose first dimension is the batch.
RowState = dict[str, Tensor]


@dataclass(frozen=True)
class PromptContext:
    """What a rule may look at before decoding starts."""

    prefill: PrefillOutput
    lengths: Sequence[int]  # prompt tokens a row
    head: Callable[[Tensor], Tensor]  # hidden [..., D] -> logits [..., V]
    weight: Tensor  # [V, D], the LM head


@dataclass(frozen=True)
class StepContext:
    """What a rule may look at in one verification step.

    ``row_keys`` name the rows independently of the batch they happen to be in: a rule's random
    numbers follow from (its seed, the row's key, the row's step) alone.
    """

    head: Callable[[Tensor], Tensor]
    argmax: Tensor  # [B, N] int64, the clean argmax at every node, lowest id on ties
    stop_ids: Tensor  # [E] int64
    row_keys: Sequence[int]
    step: int
    state: RowState = field(default_factory=dict)


class Verdict(NamedTuple):
    """What one step accepts."""

    path: Tensor  # [B, A] int64 node ids from the root down, padded with -1
    accepted: Tensor  # [B] int64, draft tokens on the path, root excluded
    bonus: Tensor  # [B] int64, the clean head's token after the path
    strict_path: Tensor  # [B, A] int64, the path that exact acceptance keeps of the same tree
    strict: Tensor  # [B] int64, its draft tokens
    strict_bonus: Tensor  # [B] int64, the clean head's token after that path
    relaxed: Tensor  # [B, A] bool, path nodes that are not the clean argmax of their parent
    allowed: Tensor  # [B, N] bool, the rule's answer at every node, for traces


class Acceptor(ABC):
    """Decides which nodes of a tree may be kept.

    A rule implements ``accept``; ``verify`` keeps the deepest path of allowed nodes. The token
    after the path is the clean argmax, the KV cache holds clean states, and a stop token is kept
    only where it is the clean argmax: relaxing into one would truncate the answer.
    """

    name: ClassVar[str]
    #: Whether outputs equal the target's own. A lossy rule is shown with its quality beside it.
    lossless: ClassVar[bool] = False

    def start(self, context: PromptContext) -> RowState:
        """What the rule needs to know of each prompt; nothing by default."""
        return {}

    def first(self, logits: Tensor, row_keys: Sequence[int]) -> Tensor:
        """The first token of each answer, from the prompt's logits [B, V]: [B] int64."""
        return first_argmax(logits)

    @abstractmethod
    def accept(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Tensor:
        """Whether each node may be kept if its parent is: [B, N] bool (the root's is not read)."""

    def verify(self, tree: DraftTree, output: TargetOutput, context: StepContext) -> Verdict:
        """Walk the deepest path of accepted nodes; ties go to the draft's higher score."""
        exact = exact_matches(tree, context.argmax)
        allowed = self.accept(tree, output, context) & tree.valid
        allowed &= exact | ~torch.isin(tree.tokens, context.stop_ids)
        path, accepted = longest_accepted_path(tree, allowed)
        strict_path, strict = path, accepted
        if not self.lossless:
            strict_path, strict = longest_accepted_path(tree, exact & tree.valid)
        bonus = after_path(context.argmax, path, accepted)
        strict_bonus = after_path(context.argmax, strict_path, strict)
        on_path = path.clamp(min=0)
        relaxed = (path > 0) & ~exact.gather(1, on_path)
        return Verdict(path, accepted, bonus, strict_path, strict, strict_bonus, relaxed, allowed)


def after_path(argmax: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """The token that ``argmax`` [B, N] gives at each path's last node: [B] int64."""
    return argmax.gather(1, path.gather(1, accepted[:, None])).squeeze(1)


def exact_matches(tree: DraftTree, argmax: Tensor) -> Tensor:
    """Whether each node is its parent's clean argmax: [B, N] bool, False at the root."""
    parents = tree.parents
    wanted = argmax.gather(1, parents.clamp(min=0))
    return (tree.tokens == wanted) & (parents >= 0)


def first_argmax(logits: Tensor) -> Tensor:
    """Argmax over the last dimension, the lowest id on ties: int64, that dimension gone.

    On a CPU ``max`` finds the same index as ``argmax`` and is several times faster in bfloat16.
    """
    if logits.device.type == "cpu":
        return logits.max(dim=-1).indices
    return logits.argmax(dim=-1)
