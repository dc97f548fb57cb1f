"""How large a tree pays: from what a step costs here and from how often the draft is right.

A step that verifies n nodes behind l draft levels takes T(l, n) seconds and commits 1 + the sum of
P(v) tokens in expectation, over its nodes v, P(v) being the chance that v ends up on the accepted
path. The draft's own cumulative probability of a node tells P after calibration on what became of
earlier nodes. So the tree that commits most tokens a second can be chosen exactly among those that
growth can give, and where no tree beats plain decoding the drafter rests.

All decisions follow from the measured costs and from earlier steps of the answers, never from a
clock: the same run draws the same trees again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_dropmatch.step_costs import CostTable

_EDGES = (-6.0, -5.0, -4.0, -3.2, -2.6, -2.1, -1.7, -1.35, -1.05, -0.8, -0.6, -0.42, -0.27, -0.15)
_PRIOR = 6.0  # nodes that the prior of a cell counts for
_FADE = 0.995  # weight of what was seen a step ago
_REST, _LONGEST = 8, 64  # steps without drafts after drafts did not pay, and their most
_TRIAL = 6  # steps with drafts before they are judged


class Calibration:
    """The chance that a node lands on the accepted path, from its cumulative log-probability.

    A histogram over the log-probability; each cell starts as if the draft's word were true for a
    few nodes, and forgets slowly.
    """

    def __init__(self) -> None:
        self._edges = torch.tensor(_EDGES)
        bounds = torch.tensor([-7.0, *_EDGES, 0.0])
        middle = ((bounds[1:] + bounds[:-1]) / 2).exp()
        self._seen = torch.full_like(middle, _PRIOR)
        self._right = _PRIOR * middle

    def chance(self, scores: Tensor) -> Tensor:
        """Chances of nodes with these log-probabilities, of their shape; 0 for impossible ones."""
        # By luck alone may less likely nodes have been right more often.
        cells = (self._right / self._seen).cummax(0).values
        found = cells[torch.bucketize(scores.contiguous(), self._edges)]
        return found.masked_fill(scores == -torch.inf, 0.0)

    def learn(self, scores: Tensor, right: Tensor) -> None:
        """Take in nodes [n] and whether each was on the accepted path [n]."""
        cells = torch.bucketize(scores, self._edges)
        self._seen *= _FADE
        self._right *= _FADE
        self._seen.index_add_(0, cells, torch.ones_like(scores))
        self._right.index_add_(0, cells, right.to(scores.dtype))


class TreeBudget:
    """Chooses levels and nodes of each step's trees, one choice for all rows of a batch.

    Args:
        costs: of the steps.
        most_nodes: of a tree; never more than these.
    """

    def __init__(self, costs: CostTable, most_nodes: int = 64) -> None:
        self.costs, self.most_nodes = costs, most_nodes
        self.calibration = Calibration()
        self._speedup = 1.0  # over plain decoding, that drafting reaches
        self._plain, self._spent, self._trial = 0.0, 0.0, 0
        self._resting, self._pause = 0, _REST
        self.begin(1, 0)

    def begin(self, rows: int, context: int) -> None:
        """A step of so many rows behind so many tokens comes next."""
        self._prices = prices = self.costs.at(rows, context, self.most_nodes)
        first, last = prices.verify[0].item(), prices.verify[-1].item()
        self._one = first  # seconds of a step of plain decoding
        self._node = max((last - first) / max(self.most_nodes - 1, 1), 1e-9)

    @property
    def resting(self) -> bool:
        """Whether this step goes without drafts, because those before did not pay."""
        return self._resting > 0

    def deepen(self, level: int, beam: Tensor) -> bool:
        """Whether the beam [B, R] of cumulative log-probabilities is worth another draft level.

        A child of a beam row is on the path about as often as the row's own chance times that of
        the best row's; each node and each level must earn what plain time would bring.
        """
        chance = self.calibration.chance(beam)
        onward = chance * self._onward
        rows = beam.shape[0]
        rate = self._speedup / self._one
        worth = (onward - rate * self._node).clamp(min=0).sum() / rows
        return bool(worth > rate * self._prices.level)

    def choose(self, scores: Tensor, levels: int) -> int:
        """Nodes of the trees, root included, from the sorted candidates' scores [B, C]."""
        most = min(self.most_nodes - 1, scores.shape[1])
        chance = self.calibration.chance(scores[:, :most]).mean(0).double()
        tokens = 1 + torch.cat((chance.new_zeros(1), chance.cumsum(0)))
        drafting = self._prices.start + levels * self._prices.level
        seconds = drafting + self._prices.verify[: most + 1]
        speedup = tokens / seconds * self._one
        best = int(speedup.argmax())
        self._speedup += 0.1 * (float(speedup[best]) - self._speedup)
        self._planned = float(seconds[best])
        return best + 1

    def learn(
        self, scores: Tensor, drafted: Tensor, on_path: Tensor, counts: Sequence[int]
    ) -> None:
        """Take in what became of a step's trees.

        Args:
            scores: [B, N] cumulative log-probabilities; drafted: [B, N] which count.
            on_path: [B, N], on the accepted path.
            counts: tokens committed a row; rows of 0 have ended.
        """
        going = [count for count in counts if count]
        if not going:
            return
        live = torch.tensor([count > 0 for count in counts], device=scores.device)
        mine = drafted & live[:, None]
        self.calibration.learn(scores[mine].float().cpu(), on_path[mine].cpu())
        # What plain decoding would have taken for these tokens, and what the steps took.
        self._plain += sum(going) / len(going) * self._one
        self._spent += self._planned
        self._trial += 1
        if self._trial >= _TRIAL:
            if self._plain < self._spent:
                self._resting, self._pause = self._pause, min(2 * self._pause, _LONGEST)
            else:
                self._pause = _REST
            self._plain, self._spent, self._trial = 0.0, 0.0, 0

    def rested(self) -> None:
        """A step without drafts is over."""
        self._resting -= 1

    @property
    def _onward(self) -> float:
        """The chance that a likely child follows its parent on the path."""
        return float(self.calibration.chance(torch.tensor([-0.5]))[0])
