"""What an acceptance rule is, and the walk that all rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.parents import Parents
from eagle_dropmatch.acceptors.scores import Scores
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.sampling import Sampler
from eagle_dropmatch.target import LMHead, PrefillOutput, TargetOutput
from eagle_dropmatch.tree import DraftTree, longest_accepted_path

#: What a rule keeps for each row over an answer: tensors whose first dimension is the batch.
RowState = dict[str, Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class PromptContext:
    """What a rule may look at before decoding starts."""

    prefill: PrefillOutput
    lengths: Sequence[int]  # prompt tokens a row
    head: LMHead


@dataclass(frozen=True)
class StepContext:
    """What a rule may look at in one verification step, beside the tree and the target's output.

    ``row_keys`` name the rows independently of the batch they happen to be in: a rule's random
    numbers follow from (its seed, the row's key, the row's step) alone.
    """

    tree: DraftTree
    output: TargetOutput
    head: LMHead
    sampler: Sampler
    #: [B, N, V]: the output's logits after the repetition penalty, the very ones where there is
    #: none.
    logits: Tensor
    #: [B, N, S] int64, the tokens up to each node, where there is a repetition penalty.
    before: Tensor | None
    #: [B, N] int64: what the target itself says after each node: its argmax, the lowest id on ties,
    #: or at a temperature above 0 its sample.
    choice: Tensor
    stop_ids: Tensor  # [E] int64
    row_keys: Sequence[int]
    steps: Sequence[int]  # verification steps of each row before this one
    #: [V_draft] int64, the target's ids of the draft's tokens; None where the draft has none.
    draft_ids: Tensor | None = None
    state: RowState = field(default_factory=dict)

    @cached_property
    def exact(self) -> Tensor:
        """[B, N] bool: is the node what the target says after its parent? False at the root."""
        parents = self.tree.parents
        wanted = self.choice.gather(1, parents.clamp(min=0))
        return (self.tree.tokens == wanted) & (parents >= 0)

    @cached_property
    def eligible(self) -> Tensor:
        """[B, N] bool: may a rule keep the node at all? Stop tokens only as the target's choice."""
        tree = self.tree
        return (tree.parents >= 0) & (self.exact | ~torch.isin(tree.tokens, self.stop_ids))

    @cached_property
    def draft(self) -> tuple[Tensor, Tensor]:
        """The draft's log-probabilities at the M parents [M, V_draft], over its tokens [V_draft].

        At the target's temperature, without its truncations. UserError for a drafter without them.
        """
        if self.tree.draft_logits is None or self.draft_ids is None:
            raise UserError(
                "this rule compares the draft's distribution with the target's, and this drafter "
                "has none to show"
            )
        logits = self.tree.draft_logits[self.parents.row, self.parents.node].float()
        if not self.sampler.greedy:
            logits = logits / self.sampler.temperature
        return logits.log_softmax(-1), self.draft_ids

    def of_part(self, index: int) -> StepContext:
        """The context for one of several rules whose states stand in ``joined_states``."""
        prefix = f"{index}."
        own = replace(
            self,
            state={
                name.removeprefix(prefix): value
                for name, value in self.state.items()
                if name.startswith(prefix)
            },
        )
        # What one rule has worked out about the target serves the next.
        own.__dict__.update(exact=self.exact, parents=self.parents)
        return own

    @cached_property
    def parents(self) -> Parents:
        """The nodes that have children, and the target's distributions there."""
        return Parents(self.tree, self.output.hidden, self.logits, self.sampler)


class Verdict(NamedTuple):
    """What one step accepts."""

    path: Tensor  # [B, A] int64 node ids from the root down, padded with -1
    accepted: Tensor  # [B] int64, draft tokens on the path, root excluded
    bonus: Tensor  # [B] int64, what the target says after the path
    strict_path: Tensor  # [B, A] int64, the path that exact acceptance keeps of the same tree
    strict: Tensor  # [B] int64, its draft tokens
    strict_bonus: Tensor  # [B] int64, what the target says after that path
    relaxed: Tensor  # [B, A] bool, path nodes that are not the target's choice at their parent
    allowed: Tensor  # [B, N] bool, the rule's answer, at least at all nodes of the path


class Acceptor(ABC):
    """Decides which nodes of a tree may be kept.

    A rule implements ``accept``; ``verify`` keeps the deepest path of allowed nodes. The token
    after the path is the target's own choice, the KV cache holds clean states, and a stop token is
    kept only where it is that choice: relaxing into one would truncate the answer.

    Rules look at the target's probabilities after the settings of sampling; greedy decoding has
    none, and there they look at the plain softmax. At a temperature above 0 the token that the
    target sampled stands where the argmax stands at temperature 0.
    """

    name: ClassVar[str]
    #: Whether outputs equal the target's own. A lossy rule is shown with its quality beside it.
    lossless: bool = False
    #: Options under which the rule accepts exactly what exact acceptance does.
    strict: ClassVar[Options] = {}
    #: Whether the rule reads ``tree.draft_logits``, which are kept for it then.
    needs_draft: bool = False

    def start(self, context: PromptContext) -> RowState:
        """What the rule needs to know of each prompt; nothing by default."""
        return {}

    @abstractmethod
    def accept(self, context: StepContext) -> Tensor:
        """Whether each node may be kept if its parent is: [B, N] bool (the root's is not read)."""

    def accept_path(self, context: StepContext, eligible: Tensor) -> Tensor:
        """``accept``, right at least about the longest path of accepted ``eligible`` nodes [B, N].

        A rule whose verdicts are dear can refuse other nodes without a look.
        """
        return self.accept(context)

    def explain(self, context: StepContext) -> Scores:
        """What ``accept`` looks at in each node, by name: [B, N] numbers and their bounds.

        For traces: it may cost more than the verdict does. Empty where a rule compares nothing.
        """
        return {}

    def verify(self, context: StepContext) -> Verdict:
        """Walk the deepest path of accepted nodes; ties go to the draft's higher score."""
        tree, exact = context.tree, context.exact
        allowed = self.accept_path(context, context.eligible) & context.eligible
        path, accepted = longest_accepted_path(tree, allowed)
        strict_path, strict = path, accepted
        if not self.lossless:
            strict_path, strict = longest_accepted_path(tree, exact & tree.valid)
        bonus = after_path(context.choice, path, accepted)
        strict_bonus = after_path(context.choice, strict_path, strict)
        on_path = path.clamp(min=0)
        relaxed = (path > 0) & ~exact.gather(1, on_path)
        return Verdict(path, accepted, bonus, strict_path, strict, strict_bonus, relaxed, allowed)


def after_path(choice: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """The token that ``choice`` [B, N] has at each path's last node: [B] int64."""
    return choice.gather(1, path.gather(1, accepted[:, None])).squeeze(1)


def joined_states(rules: Sequence[Acceptor], context: PromptContext) -> RowState:
    """What several rules need to know of each prompt, each under its number."""
    return {
        f"{index}.{name}": value
        for index, rule in enumerate(rules)
        for name, value in rule.start(context).items()
    }
