"""DraftTree: a batch of draft trees, padded to one width and held as plain tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Choice = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of B draft trees padded to N nodes; all tensors lie on one device.

    Node 0 is the root, the last committed token. A parent has a lower id than its children, and
    padding comes after the valid nodes of its row.

    tokens: [B, N] int64, ids in the target's vocabulary; 0 at padding.
    parents: [B, N] int64, node ids; -1 at the root and at padding.
    depths: [B, N] int64, edges between the root and the node; 0 at the root and at padding.
    scores: [B, N] float32, cumulative draft log-probability (nats); root 0, padding -inf.
    valid: [B, N] bool, False at padding.
    draft_logits: [B, N, V_draft] or None, the draft's raw logits over a node's children.
    levels: the greatest depth that a node can have, known on the host so that the width of a path
        needs no device sync; None means N - 1. EAGLE's `depth` is levels - 1.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    valid: Tensor
    draft_logits: Tensor | None = None
    levels: int | None = None

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """N: nodes per row, root and padding included."""
        return self.tokens.shape[1]

    @property
    def max_depth(self) -> int:
        """The greatest depth that a node can have; a path holds at most max_depth + 1 nodes."""
        return self.num_nodes - 1 if self.levels is None else self.levels

    @cached_property
    def jumps(self) -> list[Tensor]:
        """The nodes' ``jump_pointers``, worked out once."""
        return jump_pointers(self.parents, self.valid, self.max_depth)

    @cached_property
    def ancestry(self) -> Tensor:
        """[B, N, max_depth + 1] int64: the ids from the root down to each node, padded with -1.

        A padding node's path is itself alone. Worked out once: mask and walks read it.
        """
        upwards = torch.arange(self.num_nodes, device=self.tokens.device)
        upwards = upwards[:, None].expand(
            self.batch_size, -1, 1
        )  # entry t: the ancestor t edges up
        for jump in self.jumps:
            further = jump.gather(1, upwards.flatten(1)).view_as(upwards)
            upwards = torch.cat([upwards, further], dim=2)
        steps = torch.arange(self.max_depth + 1, device=self.tokens.device)
        edges = self.depths[:, :, None] - steps
        return upwards.gather(2, edges.clamp(min=0)).masked_fill(edges < 0, -1)

    @cached_property
    def preference(self) -> Tensor:
        """[B, N] int64, greater for a deeper node, else a higher score, else a lower id."""
        order = self.scores.sort(dim=1, descending=True, stable=True).indices
        places = torch.arange(self.num_nodes, 0, -1, device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, places)
        return self.depths * (self.num_nodes + 1) + rank

    @property
    def draft_counts(self) -> Tensor:
        """[B] int64: drafted nodes of each row (the root is not drafted)."""
        return self.valid.sum(dim=1) - 1

    def to(self, device: torch.device) -> "DraftTree":
        """The same trees on another device; this very object if they are there already."""
        if self.tokens.device == device:
            return self
        logits = self.draft_logits
        return replace(
            self,
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            depths=self.depths.to(device),
            scores=self.scores.to(device),
            valid=self.valid.to(device),
            draft_logits=None if logits is None else logits.to(device),
        )

    @classmethod
    def root_only(cls, tokens: Tensor) -> "DraftTree":
        """Empty trees, with which a step is plain decoding. tokens: [B] int64, the roots."""
        return cls.chain(tokens[:, None])

    @classmethod
    def chain(
        cls, tokens: Tensor, scores: Tensor | None = None, valid: Tensor | None = None
    ) -> "DraftTree":
        """Chains: node i's parent is node i - 1.

        tokens: [B, N] int64, the root first. scores: [B, N], cumulative log-probabilities, or None
        for zeros. valid: [B, N] bool, valid nodes first, for chains of unequal length.
        """
        nodes = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls._padded(tokens, nodes - 1, nodes, scores, valid, tokens.shape[1] - 1)

    @classmethod
    def from_parents(
        cls,
        tokens: Tensor,
        parents: Tensor,
        scores: Tensor | None = None,
        valid: Tensor | None = None,
        *,
        levels: int | None = None,
    ) -> "DraftTree":
        """Trees from parent pointers; depths are derived, whatever lies at padding is blanked.

        tokens, parents: [B, N] int64, node 0 the root with parent -1, parents[b, i] < i.
        scores: [B, N], cumulative log-probabilities, or None for zeros.
        valid: [B, N] bool, valid nodes first, or None where no row is padded.
        levels: the greatest depth, where the caller knows it; narrows the paths.
        """
        real = torch.ones_like(parents, dtype=torch.bool) if valid is None else valid
        max_depth = tokens.shape[1] - 1 if levels is None else levels
        # depths after step s: edges among the first 2^s towards the root
        depths = (real & (parents >= 0)).long()
        for jump in jump_pointers(parents, real, max_depth):
            depths = depths + depths.gather(1, jump)
        return cls._padded(tokens, parents, depths, scores, valid, levels)

    @classmethod
    def from_choices(
        cls,
        root: Tensor,
        table: Tensor,
        choices: Sequence[Sequence[int]],
        log_probs: Tensor | None = None,
    ) -> "DraftTree":
        """Static trees in the notation of Medusa and EAGLE-1.

        A choice (r_1, .., r_d) is a node of depth d: the r_d-th best child of the node
        (r_1, .., r_{d-1}). Nodes are numbered by depth, then lexicographically. The token of a node
        depends on its depth and last rank only, as with Medusa's heads; where it depends on the
        whole path, arrange the tokens by `choice_parents` and call `from_parents`.

        root: [B] int64. table: [B, L, R] int64, the token of rank r at depth l + 1.
        log_probs: [B, L, R] or None for zeros, the log-probability of each entry of the table.
        """
        nodes, parents = choice_parents(choices)
        levels = max((len(node) for node in nodes), default=0)
        ranks = max((max(node) for node in nodes), default=-1) + 1
        if table.ndim != 3 or table.shape[1] < levels or table.shape[2] < ranks:
            raise ValueError(
                f"a token table of shape {list(table.shape)} was given, but these choices need "
                f"[batch, {levels} levels, {ranks} ranks] or more"
            )
        width = table.shape[2]
        flat = [(len(node) - 1) * width + node[-1] for node in nodes]
        where = torch.tensor(flat, dtype=torch.int64, device=table.device)
        tokens = torch.cat([root[:, None], table.flatten(1).index_select(1, where)], dim=1)
        parent_ids = torch.tensor(parents, dtype=torch.int64, device=table.device)
        scores = None
        if log_probs is not None:
            # one entry of the table for each edge of a node's path; the last column is the zero
            # that stands for "no edge"
            blank = table.shape[1] * width
            edges = [[lv * width + rank for lv, rank in enumerate(node)] for node in [(), *nodes]]
            index = torch.tensor(
                [path + [blank] * (levels - len(path)) for path in edges],
                dtype=torch.int64,
                device=table.device,
            )
            padded = torch.nn.functional.pad(log_probs.float().flatten(1), (0, 1))
            scores = padded[:, index].sum(dim=-1)
        return cls.from_parents(tokens, parent_ids.expand_as(tokens), scores, levels=levels)

    @classmethod
    def _padded(
        cls,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        scores: Tensor | None,
        valid: Tensor | None,
        levels: int | None,
    ) -> "DraftTree":
        """Builds the tree and writes the padding values wherever `valid` is False."""
        if scores is None:
            scores = torch.zeros_like(tokens, dtype=torch.float32)
        scores = scores.float()
        if valid is None:
            valid = torch.ones_like(tokens, dtype=torch.bool)
        else:
            tokens = tokens.where(valid, 0)
            parents = parents.where(valid, -1)
            depths = depths.where(valid, 0)
            scores = scores.where(valid, -torch.inf)
        return cls(tokens, parents, depths, scores, valid, levels=levels)

    def rows(self, index: Tensor) -> "DraftTree":
        """The trees of some rows. index: [M] int64 row numbers, or [B] bool."""
        logits = self.draft_logits
        return DraftTree(
            self.tokens[index],
            self.parents[index],
            self.depths[index],
            self.scores[index],
            self.valid[index],
            None if logits is None else logits[index],
            self.levels,
        )

    def validate(self, *, distinct_siblings: bool = True) -> "DraftTree":
        """Raises ValueError at the first broken rule of the class, else returns the tree itself.

        For tests and for drafters under development: it reads the tensors on the host.
        distinct_siblings: also demand that no node has two children with the same token, which
        sampling without replacement relies on.
        """
        self._check_types()
        node = torch.arange(self.num_nodes, device=self.tokens.device)
        valid, parents, depths, scores = self.valid, self.parents, self.depths, self.scores
        root = (node == 0).expand_as(valid)
        drafted = valid & ~root
        above = parents.clamp(0, self.num_nodes - 1)
        rules: list[tuple[str, Tensor]] = [
            ("the root, node 0, must be valid", root & ~valid),
            ("the root's parent must be -1", root & (parents != -1)),
            ("the root's score must be 0", root & (scores != 0)),
            ("padding must come after the valid nodes", valid & (~valid).cumsum(1).bool()),
            ("a parent must be an earlier node", drafted & ((parents < 0) | (parents >= node))),
            (
                "a node must be one deeper than its parent, and the root at depth 0",
                valid & (depths != torch.where(root, 0, depths.gather(1, above) + 1)),
            ),
            (
                f"a depth must be at most levels = {self.max_depth}",
                valid & (depths > self.max_depth),
            ),
            ("a score must be a number", valid & scores.isnan()),
            (
                "padding must hold parent -1, depth 0 and score -inf",
                ~valid & ((parents != -1) | (depths != 0) | (scores != -torch.inf)),
            ),
        ]
        if distinct_siblings:
            pairs = drafted[:, :, None] & drafted[:, None, :] & (node[:, None] > node)
            pairs &= parents[:, :, None] == parents[:, None, :]
            pairs &= self.tokens[:, :, None] == self.tokens[:, None, :]
            rules.append(("siblings must have distinct tokens", pairs.any(dim=2)))
        for rule, broken in rules:
            if bool(broken.any()):
                row, position = broken.nonzero()[0].tolist()
                raise ValueError(f"not a draft tree: {rule} (row {row}, node {position})")
        return self

    def _check_types(self) -> None:
        expected = {
            "tokens": torch.int64,
            "parents": torch.int64,
            "depths": torch.int64,
            "scores": torch.float32,
            "valid": torch.bool,
        }
        shape, device = self.tokens.shape, self.tokens.device
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(f"not a draft tree: tokens must be [B, N >= 1], got {list(shape)}")
        for name, dtype in expected.items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
                raise ValueError(
                    f"not a draft tree: {name} must be {dtype} {list(shape)} on {device}, got "
                    f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )
        logits = self.draft_logits
        if logits is not None and (logits.ndim != 3 or logits.shape[:2] != shape):
            raise ValueError(
                f"not a draft tree: draft_logits must be {[*shape, 'V_draft']}, "
                f"got {list(logits.shape)}"
            )


def jump_pointers(parents: Tensor, valid: Tensor, max_depth: int) -> list[Tensor]:
    """Pointer jumping: entry s maps each node to its ancestor 2^s edges up.

    The root stands in where there are fewer edges; padding maps to itself. The strides add up to
    at least max_depth, so that combining all entries reaches every ancestor.

    parents: [B, N] int64. valid: [B, N] bool. Returns [B, N] int64 tensors.
    """
    if max_depth == 0:
        return []
    nodes = torch.arange(parents.shape[1], device=parents.device)
    jumps = [torch.where(valid & (parents >= 0), parents, nodes)]
    for _ in range(max_depth.bit_length() - 1):
        jumps.append(jumps[-1].gather(1, jumps[-1]))
    return jumps


def choice_parents(choices: Sequence[Sequence[int]]) -> tuple[list[Choice], list[int]]:
    """The node order of a list of choices, and its parent ids.

    Returns the choices sorted by depth, then lexicographically (choice i becomes node i + 1), and
    the parents of all nodes, the root's -1 first. Raises ValueError for an empty choice, a negative
    rank, a choice given twice, or one whose parent is missing.
    """
    nodes = sorted((tuple(choice) for choice in choices), key=lambda node: (len(node), node))
    ids: dict[Choice, int] = {(): 0}
    parents = [-1]
    for node in nodes:
        if not node or min(node) < 0:
            raise ValueError(f"choice {node} must be one or more child ranks, each 0 or greater")
        if node in ids:
            raise ValueError(f"choice {node} is given twice")
        if node[:-1] not in ids:
            raise ValueError(f"choice {node} has no parent: add {node[:-1]}")
        ids[node] = len(ids)
        parents.append(ids[node[:-1]])
    return nodes, parents
