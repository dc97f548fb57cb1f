"""The decoding loop: propose a tree, verify it, keep the accepted path, stop where told to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_dropmatch.acceptors.base import (
    Acceptor,
    PromptContext,
    RowState,
    StepContext,
    Verdict,
)
from eagle_dropmatch.cache import put_rows
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, Observation
from eagle_dropmatch.sampling import (
    Sampler,
    Scores,
    first_argmax,
    place_uniforms,
    rows_at_once,
)
from eagle_dropmatch.stats import RowStats
from eagle_dropmatch.target import PrefillOutput, TargetModel, TargetOutput
from eagle_dropmatch.tree import DraftTree, ancestor_matrix
from eagle_dropmatch.truncation import require_usable, truncate


@dataclass
class Row:
    """One answer while it is being written. ``tokens`` are new tokens, the pending root last."""

    index: int  # place in the caller's batch
    key: int
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    strict_lengths: list[int] = field(default_factory=list)
    relaxed: list[int] = field(default_factory=list)
    draft_nodes: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def stats(self) -> RowStats:
        return RowStats(
            accept_lengths=self.accept_lengths,
            strict_accept_lengths=self.strict_lengths,
            relaxed_tokens=self.relaxed,
            draft_nodes=self.draft_nodes,
            prompt_tokens=len(self.prompt),
            output_tokens=len(self.tokens),
            finish_reason=self.finish_reason or "length",
        )


@dataclass(frozen=True)
class Limits:
    """When an answer ends."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    #: Further criterion over (row index, new tokens so far); asked after each single token.
    stops: Callable[[int, list[int]], bool] | None = None

    def admit(self, row: Row, new: Sequence[int]) -> int:
        """Append ``new`` to the row up to its end, mark it if it ended; how many were kept.

        A stop token is kept and nothing after it, wherever in the accepted path it stands.
        """
        for count, token in enumerate(new, 1):
            row.tokens.append(token)
            if token in self.stop_ids or (
                self.stops is not None and self.stops(row.index, row.tokens)
            ):
                row.finish_reason = "stop"
            elif len(row.tokens) >= self.max_new_tokens:
                row.finish_reason = "length"
            if row.ended:
                return count
        return len(new)

    def cut(self, written: int, path: Sequence[int]) -> int:
        """How many of ``path`` would be kept behind ``written`` tokens.

        Further criteria are not asked: they may count their calls, and this path is hypothetical.
        """
        for count, token in enumerate(path, 1):
            if token in self.stop_ids or written + count >= self.max_new_tokens:
                return count
        return len(path)


def row_key(prompt: Sequence[int], seed: int) -> int:
    """A name for an answer that follows from its prompt and the seed, not from the batch."""
    text = f"{seed}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class DecodingLoop:
    """Decodes a batch of prompts to their ends; one call of ``step`` is one draft + verify cycle.

    Ended rows leave the batch once they are a quarter of it: leaving copies the cache of those
    that stay, which costs more than a few idle rows. Or they keep their seats, and new prompts
    ``join`` in them. Nothing outlives the loop: two calls in a row are two loops.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        acceptor: Acceptor,
        limits: Limits,
        sampler: Sampler | None = None,
        truncation: Acceptor | None = None,
    ) -> None:
        self.target, self.drafter, self.acceptor, self.limits = target, drafter, acceptor, limits
        self.sampler = sampler if sampler is not None else Sampler()
        self.truncation = truncation  # for plain decoding; see ``truncation.py``
        self.rows: list[Row] = []
        self.seated: list[Row] = []  # the rows of the batch, ended ones that have not left included
        self._bounds: RowState = {}

    @property
    def running(self) -> bool:
        """Whether any row still goes on."""
        return not all(row.ended for row in self.seated)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seed: int | Sequence[int],
        reserve: int,
        first: int = 0,
    ) -> None:
        """Read the prompts and take each answer's first token from the clean head.

        Args:
            prompts: token ids a row, of any lengths.
            seed: part of every row's key for random numbers; one, or one a row.
            reserve: tree nodes to make room for in the cache.
            first: the first row's index; the others go on from there.
        """
        lengths = [len(prompt) for prompt in prompts]
        device = self.target.device
        tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : lengths[row]] = torch.tensor(prompt)
        tokens = tokens.to(device)
        room = max(lengths) + min(self.limits.max_new_tokens, 2048) + reserve
        self.cache = self.target.new_cache(len(prompts), room)
        out = self.target.prefill(self.cache, tokens, lengths)
        context = PromptContext(out, lengths, self.target.head)
        self.state: RowState = self.acceptor.start(context)
        seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
        keys = [row_key(*each) for each in zip(prompts, seeds, strict=True)]
        if self.truncation is not None:
            require_usable(self.truncation)
            self._bounds = self.truncation.start(context)
        roots = self._first(out, prompts, keys)
        self._stop_ids = torch.tensor(self.limits.stop_ids, dtype=torch.int64, device=roots.device)
        for index, (prompt, root) in enumerate(zip(prompts, roots.tolist(), strict=True)):
            answer = Row(first + index, keys[index], prompt)
            self.limits.admit(answer, [root])
            self.rows.append(answer)
        self.seated = list(self.rows)
        if self.running:
            self.drafter.start(DraftPrompt(tokens, lengths, out.features, roots))

    @torch.inference_mode()
    def join(self, guests: DecodingLoop, seats: Sequence[int]) -> None:
        """Go on with the rows of another loop that has just read its prompts.

        Args:
            guests: of the same target, rule and settings; used up by this.
            seats: places in the batch, one a guest: those of ended rows, or new ones behind the
                last.
        """
        taken = [seat for seat in seats if seat < len(self.seated) and not self.seated[seat].ended]
        if taken or len(seats) != len(guests.seated):
            raise ValueError(f"seats {list(seats)} are not free for {len(guests.seated)} guests")
        self.rows += guests.rows
        if not guests.running:
            return
        self.cache.put(seats, guests.cache)
        self.drafter.join(seats, guests.drafter)
        for mine, theirs in ((self.state, guests.state), (self._bounds, guests._bounds)):
            for name, values in theirs.items():
                mine[name] = put_rows(mine[name], seats, values)
        self.seated += [guests.seated[-1]] * (max(seats) + 1 - len(self.seated))
        for seat, row in zip(seats, guests.seated, strict=True):
            self.seated[seat] = row

    @torch.inference_mode()
    def step(self, *, leave: bool = True) -> list[tuple[Row, list[int]]]:
        """One cycle for all rows that go on; returns what each got, after the cut.

        ``leave``: ended rows may leave the batch; otherwise their seats wait for others.
        """
        tree = self.drafter.propose().to(self.target.device)
        output = self.target.verify(self.cache, tree)
        tree = tree.to(output.logits.device)
        verdict = self.acceptor.verify(self._context(tree, output))
        tokens = committed_tokens(tree.tokens, verdict.path, verdict.accepted, verdict.bonus)
        strict = tokens
        if verdict.strict_path is not verdict.path:
            strict = committed_tokens(
                tree.tokens, verdict.strict_path, verdict.strict, verdict.strict_bonus
            )
        # The loop's one synchronisation a step: everything the host needs, in one transfer.
        width = tokens.shape[1]
        host = torch.cat(
            (
                torch.stack((verdict.accepted, verdict.strict, tree.draft_counts), dim=1),
                tokens,
                strict,
                verdict.relaxed.long(),
            ),
            dim=1,
        ).tolist()
        news: list[tuple[Row, list[int]]] = []
        counts: list[int] = []
        for row, (accepted, exact, nodes, *rest) in zip(self.seated, host, strict=True):
            counts.append(0 if row.finish_reason is not None else accepted + 1)
            if row.finish_reason is not None:
                continue
            relaxed = rest[2 * width :]
            written = len(row.tokens)
            new = rest[: accepted + 1]
            kept = self.limits.admit(row, new)
            row.accept_lengths.append(kept)
            exact_path = rest[width : width + exact + 1]
            # Where the answer ended within what both paths share, it ended for both.
            ended = row.ended and exact_path[:kept] == new[:kept]
            row.strict_lengths.append(kept if ended else self.limits.cut(written, exact_path))
            # The last of the kept tokens counts as the bonus, also where the cut made it so.
            row.relaxed.append(sum(relaxed[1:kept]))
            row.draft_nodes.append(nodes)
            news.append((row, new[:kept]))
        if self.running:
            self._commit(verdict, tokens, counts, output.features, leave=leave)
        return news

    def _first(
        self, out: PrefillOutput, prompts: Sequence[Sequence[int]], keys: Sequence[int]
    ) -> Tensor:
        """The first token of each answer: [B] int64."""
        logits = out.logits
        if self.sampler.penalises:
            logits = self.sampler.penalise(logits, padded(prompts, logits.device))
        if self.sampler.greedy:
            return first_argmax(logits, machine_code=self.target.head.native)
        uniforms = place_uniforms(keys, [0] * len(keys), 1, logits.device)
        before = [-1] * len(keys)
        scores = self._scores(logits, out.last_hidden, keys, before)
        return self.sampler.choose(scores, uniforms[:, 0])

    def _sample(
        self,
        logits: Tensor,
        hidden: Tensor,
        keys: Sequence[int],
        steps: Sequence[int],
        uniforms: Tensor,
    ) -> Tensor:
        """What the target's samples say at logits [B, N, V] under uniforms [B, N]: [B, N]."""
        flat, states, numbers = logits.flatten(0, 1), hidden.flatten(0, 1), uniforms.flatten()
        if self.truncation is not None:  # plain decoding: a node a row
            return self.sampler.choose(self._scores(flat, states, keys, steps), numbers)[:, None]
        # In parts: in float64 all nodes' rows at once would be four times the logits.
        size = rows_at_once(flat.shape[-1])
        chosen = [
            self.sampler.choose(self.sampler.scores(some), those)
            for some, those in zip(flat.split(size), numbers.split(size), strict=True)
        ]
        return torch.cat(chosen).view_as(uniforms)

    def _scores(
        self, logits: Tensor, hidden: Tensor, keys: Sequence[int], steps: Sequence[int]
    ) -> Scores:
        """What may be sampled from logits [M, V]."""
        if self.truncation is None:
            return self.sampler.scores(logits)
        kept = truncate(
            self.truncation, logits, hidden, self.target.head, keys, steps, self._bounds
        )
        return Scores(kept.values / self.sampler.temperature, kept.ids)

    def _context(self, tree: DraftTree, output: TargetOutput) -> StepContext:
        logits, before = output.logits, None
        keys = [row.key for row in self.seated]
        steps = [len(row.accept_lengths) for row in self.seated]
        if self.sampler.penalises:
            before = self._before(tree)
            logits = self.sampler.penalise(logits.flatten(0, 1), before.flatten(0, 1)).view_as(
                logits
            )
        if self.sampler.greedy:
            choice = first_argmax(logits, machine_code=self.target.head.native)
        else:
            # The root is the last of the tokens, so a node of depth d says what comes d later.
            places = [len(row.tokens) for row in self.seated]
            uniforms = place_uniforms(keys, places, tree.max_depth + 1, logits.device)
            uniforms = uniforms.gather(1, tree.depths)
            choice = self._sample(logits, output.hidden, keys, steps, uniforms)
        return StepContext(
            tree=tree,
            output=output,
            head=self.target.head,
            sampler=self.sampler,
            logits=logits,
            before=before,
            choice=choice,
            stop_ids=self._stop_ids,
            row_keys=keys,
            steps=steps,
            draft_ids=self.drafter.vocabulary,
            state=self.state,
        )

    def _before(self, tree: DraftTree) -> Tensor:
        """[B, N, S] int64: the tokens up to each node, itself included; some more than once."""
        texts = padded([[*row.prompt, *row.tokens] for row in self.seated], tree.tokens.device)
        within = ancestor_matrix(tree.parents, tree.valid, tree.max_depth)
        path = torch.where(within, tree.tokens[:, None], tree.tokens[:, :1, None])
        return torch.cat((texts[:, None].expand(-1, tree.num_nodes, -1), path), dim=2)

    def _commit(
        self,
        verdict: Verdict,
        tokens: Tensor,
        counts: list[int],
        features: Tensor,
        *,
        leave: bool,
    ) -> None:
        self.cache.keep(verdict.path.to(self.cache.lengths.device), counts)
        seen = Observation(verdict.path, counts, tokens, verdict.bonus, features)
        staying = [i for i, row in enumerate(self.seated) if not row.ended]
        if leave and len(staying) <= 0.75 * len(self.seated):
            rows = torch.tensor(staying, device=verdict.path.device)
            self.cache.select(rows)
            self.drafter.select(rows)
            self.state = {name: value[rows] for name, value in self.state.items()}
            self._bounds = {name: value[rows] for name, value in self._bounds.items()}
            seen = seen.rows(rows, staying)
            self.seated = [self.seated[i] for i in staying]
        self.drafter.observe(seen)


def committed_tokens(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
    """The draft tokens of an accepted path with the bonus behind them: [B, A] int64.

    Args:
        tokens: [B, N], of the tree.
        path: [B, A] node ids from the root down, padded with -1.
        accepted: [B], draft tokens on the path.
        bonus: [B].
    """
    drafted = tokens.gather(1, path.clamp(min=0))[:, 1:]
    drafted = torch.cat((drafted, bonus[:, None]), dim=1)
    return drafted.scatter(1, accepted[:, None], bonus[:, None])


def padded(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids of unequal lengths as [B, S], each filled up with its own first token."""
    longest = max(map(len, texts))
    return torch.tensor(
        [[*text, *[text[0]] * (longest - len(text))] for text in texts], device=device
    )
