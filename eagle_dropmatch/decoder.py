"""The door to everything: a target, a draft and an acceptance rule behind ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_dropmatch.acceptors import Acceptor, make_acceptor
from eagle_dropmatch.answer_queue import AnswerQueue
from eagle_dropmatch.clock import now
from eagle_dropmatch.drafts.base import Drafter, NoDrafter, TreeShape
from eagle_dropmatch.drafts.budget import TreeBudget
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loop import DecodingLoop, Limits, Row
from eagle_dropmatch.settings import new_token_limit, read_sampler, read_settings, stop_token_ids
from eagle_dropmatch.stats import GenerationStats
from eagle_dropmatch.step_costs import CostTable, batches_up_to, step_costs
from eagle_dropmatch.target import TargetModel


@dataclass(frozen=True)
class GenerateOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns."""

    sequences: Tensor  # [B, S + n] int64, prompts as given, answers right-padded
    stats: GenerationStats


class SpeculativeDecoder:
    """Decodes with a draft's trees, keeping what the acceptor allows.

    Args:
        target: the target behind its transformers model.
        drafter: builds a drafter for a tree shape; called for each ``generate``.
        tokenizer: the target's tokenizer, or None where only ids are used.
        acceptor: the acceptance rule; may be set at any time.
        tree: the trees to draw; may be set at any time.
        adaptive: choose the size of each step's trees, within ``tree``, by what steps cost here and
            how often the draft is right (``drafts/budget.py``); may be set at any time.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Callable[[TreeShape], Drafter],
        *,
        tokenizer: Any = None,
        acceptor: Acceptor | None = None,
        tree: TreeShape | None = None,
        adaptive: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.acceptor = acceptor if acceptor is not None else make_acceptor("exact")
        self.tree = tree if tree is not None else TreeShape()
        self.adaptive = adaptive
        self._costs: dict[tuple[int, int], CostTable] = {}
        self._budgets: dict[tuple[int, TreeShape], TreeBudget] = {}

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        acceptor: str | Acceptor = "exact",
        acceptor_options: Mapping[str, Any] | None = None,
        total_token: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        attn_implementation: str | None = None,
        layer_ids: Sequence[int] | None = None,
        layer_id_convention: str = "auto",
        rope_theta: float | None = None,
        fuse: bool | None = None,
        compile: bool = False,
        draft_lm: str | Path | None = None,
        draft_ngram: int | None = None,
        tree_budget: str | None = None,
    ) -> SpeculativeDecoder:
        """Load a target and an EAGLE-3 draft for it; with neither, the reference pair.

        Args:
            target: folder or hub id of a transformers causal model.
            draft: folder or hub id of an EAGLE-3 checkpoint in any published naming.
            acceptor: a name from ``ACCEPTORS`` with ``acceptor_options``, or a rule.
            total_token: tree nodes, root included; depth: draft forwards after the first (levels
                minus one); top_k: beam width. Defaults: at most 64, 9, 8 where the budget is auto;
                else 60, 7, 10, or what was measured best for the reference pair.
            dtype: of both models; by default the checkpoint's, float32 on processors without
                bfloat16.
            device_map: as transformers takes it.
            attn_implementation: ``sdpa`` (default) or ``eager``.
            layer_ids, layer_id_convention, rope_theta: overrides of what the draft's config says;
                see ``load_draft``.
            draft_lm: in the place of ``draft``: folder or hub id of a smaller causal model with the
                target's tokenizer (speculative decoding; top_k=1 drafts its chains), or
                ``"reference"`` for the one that ships for the reference target.
            draft_ngram: in the place of ``draft``: draft what followed the last tokens earlier in
                the text, by n-grams of at most so many tokens; no network.
            tree_budget: ``auto`` chooses each step's tree within total_token, depth and top_k by
                cost, the default where none of them is given; ``fixed`` draws those trees.
            fuse: run both models with exchanged modules (``fused.py``): equal results, faster, a
                second copy of the weights. By default on a CPU where it works and fits.
            compile: run both models as machine code (``compiled.py``): equal results, half the
                time, on a CPU; the first time it takes minutes and a C++ compiler.

        Raises:
            UserError: for anything that cannot be used, before weights are read where possible.
        """
        from eagle_dropmatch.loading import load_pair

        rule = (
            acceptor
            if isinstance(acceptor, Acceptor)
            else make_acceptor(acceptor, **dict(acceptor_options or {}))
        )
        pair = load_pair(
            target,
            draft,
            shape={"total_token": total_token, "depth": depth, "top_k": top_k},
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            layer_ids=layer_ids,
            layer_id_convention=layer_id_convention,
            rope_theta=rope_theta,
            fuse=fuse,
            compile=compile,
            draft_lm=draft_lm,
            draft_ngram=draft_ngram,
            tree_budget=tree_budget,
        )
        return cls(
            pair.target,
            pair.drafter,
            tokenizer=pair.tokenizer,
            acceptor=rule,
            tree=pair.tree,
            adaptive=pair.adaptive,
        )

    def language_model(self, source: str | Path) -> Callable[[TreeShape], Drafter]:
        """Drafters of another, smaller language model, to be set as ``drafter``.

        Args:
            source: folder or hub id of a causal model with the target's tokenizer, or
                ``"reference"`` for the one that ships.

        Raises:
            UserError: where it cannot be read or has another tokenizer.
        """
        from eagle_dropmatch.loading import checked_draft_lm, language_model

        lies = checked_draft_lm(source, self.tokenizer)
        return language_model(lies, self.target, self.target.head_device)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | None = None,
        streamer: Any = None,
        return_dict_in_generate: bool | None = None,
        draft: bool = True,
        truncation: Acceptor | None = None,
        seed: int | Sequence[int] = 0,
        **overrides: Any,
    ) -> Tensor | GenerateOutput:
        """Decoding with transformers' conventions, greedy unless ``do_sample=True`` is passed.

        A model whose own generation config asks for sampling is decoded greedily all the same. Its
        repetition penalty is applied.

        Args:
            input_ids: [B, S] int64; rows may be padded on either side if ``attention_mask`` says.
            attention_mask: [B, S], 1 for tokens and 0 for padding.
            generation_config: read for max_new_tokens, max_length, eos_token_id, pad_token_id,
                do_sample, temperature, top_k, top_p, min_p, repetition_penalty and
                return_dict_in_generate; what it leaves open, the model's own says. Anything else
                that it asks for and that would change the answer is refused.
            max_new_tokens: most new tokens a row; transformers' default of 20 if nothing says.
            eos_token_id: stop token or tokens; by default those of the generation config.
            stopping_criteria: callables (ids [1, n], None) -> bool or bool tensor, asked after
                every single token of a row, so that an accepted run is cut where it says.
            streamer: a transformers streamer (batch 1): gets the prompt, then each step's run.
            return_dict_in_generate: return a ``GenerateOutput`` with the step record.
            draft: False decodes plainly with the same loop and no tree.
            truncation: for plain sampling: only tokens that this rule would accept may be sampled,
                in the place of top-k, top-p and min-p (the control of a lossy rule's cost).
            seed: of the rows' keys for random numbers, one or one a row: an answer's samples follow
                from the seed and its prompt, whatever the batch and the trees; masks also have the
                acceptor's own.
            overrides: further fields of a GenerationConfig, such as ``temperature``; they win over
                ``generation_config``.

        Returns:
            [B, S + n] int64 with the prompts in front, or a ``GenerateOutput``. Answers include
            their stop token and are padded on the right.
        """
        prompts = _prompts(input_ids, attention_mask)
        if max_new_tokens is not None:
            overrides["max_new_tokens"] = max_new_tokens
        if eos_token_id is not None:
            overrides["eos_token_id"] = eos_token_id
        settings = read_settings(generation_config, self.target.model.generation_config, overrides)
        if streamer is not None and len(prompts) > 1:
            raise UserError(
                f"a streamer was given with a batch of {len(prompts)}: streaming takes batch 1"
            )
        if not isinstance(seed, int) and len(seed) != len(prompts):
            raise UserError(
                f"{len(seed)} seeds were given for {len(prompts)} rows: give one, or one a row"
            )
        limits = Limits(
            max_new_tokens=new_token_limit(settings, input_ids.shape[1]),
            stop_ids=stop_token_ids(settings),
            stops=_criteria(prompts, stopping_criteria, input_ids.device),
        )
        draft = draft and self.tree.nodes > 1
        loop = self._loops(settings, limits, len(prompts), draft=draft, truncation=truncation)()
        if streamer is not None:
            streamer.put(input_ids.cpu())
        began = now(self.target.head_device)
        loop.prefill(prompts, seed, reserve=self.tree.nodes if draft else 1)
        prefilled = now(self.target.head_device)
        if streamer is not None:
            streamer.put(torch.tensor(loop.rows[0].tokens))
        while loop.running:
            news = loop.step()
            if streamer is not None:
                streamer.put(torch.tensor(news[0][1]))
        ended = now(self.target.head_device)
        if streamer is not None:
            streamer.end()
        sequences = _join(input_ids, loop.rows, _pad_id(settings, limits))
        if return_dict_in_generate is None:
            return_dict_in_generate = bool(settings.return_dict_in_generate)
        if not return_dict_in_generate:
            return sequences
        stats = GenerationStats(
            rows=tuple(row.stats() for row in loop.rows),
            prefill_seconds=prefilled - began,
            decode_seconds=ended - prefilled,
        )
        return GenerateOutput(sequences, stats)

    def queue(
        self,
        batch_size: int,
        generation_config: Any = None,
        *,
        draft: bool = True,
        truncation: Acceptor | None = None,
        **overrides: Any,
    ) -> AnswerQueue:
        """Answer any number of prompts, ``batch_size`` of them at a time.

        A prompt takes its seat as soon as an answer ends, so that short answers do not wait for
        long ones. Answers are those of ``generate``, whatever the batch; but a lossy rule's hang on
        the trees, and trees of a chosen size on all answers before.

        Args:
            batch_size: answers that are written at the same time.
            generation_config, draft, truncation, overrides: as for ``generate``; ``max_new_tokens``
                and ``eos_token_id`` among the overrides.

        Raises:
            UserError: as ``generate`` does.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: expected at least 1")
        settings = read_settings(generation_config, self.target.model.generation_config, overrides)
        limits = Limits(new_token_limit(settings, 0), stop_token_ids(settings))
        draft = draft and self.tree.nodes > 1
        loops = self._loops(settings, limits, batch_size, draft=draft, truncation=truncation)
        return AnswerQueue(loops, batch_size, reserve=self.tree.nodes if draft else 1)

    def _loops(
        self,
        settings: Any,
        limits: Limits,
        batch: int,
        *,
        draft: bool,
        truncation: Acceptor | None,
    ) -> Callable[[], DecodingLoop]:
        """Makes loops that decode alike; they share what they learn about tree sizes."""
        rule = self.acceptor if draft else make_acceptor("exact")
        sampler = read_sampler(settings)
        if truncation is not None and (draft or sampler.greedy):
            raise UserError(
                "a truncation was given: it is for plain sampling, with draft=False and "
                "do_sample=True"
            )
        budget = self._budget(batch, rule) if draft and self.adaptive else None

        def loop() -> DecodingLoop:
            drafter = self.drafter(self.tree) if draft else NoDrafter()
            drafter.keep_logits = rule.needs_draft
            drafter.budget = budget
            return DecodingLoop(self.target, drafter, rule, limits, sampler, truncation)

        return loop

    def time_steps(self, batch: int = 1, say: Callable[[str], None] = lambda _: None) -> CostTable:
        """What steps cost here, up to this batch size: what tree sizes are chosen by.

        Timed once for a pair, machine, beam and batch size and kept in the cache folder; otherwise
        the first ``generate`` that needs it does so. ``say`` is told if it has to be timed.
        """
        sizes = batches_up_to(batch)
        key = sizes[-1], self.tree.top_k
        if key not in self._costs:
            timed = {
                (rows, context): costs
                for rows in sizes
                for context, costs in step_costs(
                    self.target, self.drafter, self.tree.top_k, rows, say=say
                ).items()
            }
            self._costs[key] = CostTable(timed)
        return self._costs[key]

    def _budget(self, batch: int, rule: Acceptor) -> TreeBudget:
        """What chooses tree sizes: goes on from call to call where that cannot change answers."""
        fresh = TreeBudget(self.time_steps(batch), self.tree.nodes)
        return self._budgets.setdefault((batch, self.tree), fresh) if rule.lossless else fresh


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise UserError(
            f"input_ids has shape {list(input_ids.shape)}: expected [batch, length], length >= 1"
        )
    if attention_mask is None:
        return [list(row) for row in input_ids.tolist()]
    if attention_mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask has shape {list(attention_mask.shape)}: expected that of input_ids, "
            f"{list(input_ids.shape)}"
        )
    prompts = [
        row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)
    ]
    if not all(prompts):
        raise UserError("a row of attention_mask is all zeros: every row needs at least one token")
    return prompts


def _criteria(
    prompts: list[list[int]],
    criteria: Sequence[Callable[..., Any]] | None,
    device: torch.device,
) -> Callable[[int, list[int]], bool] | None:
    if not criteria:
        return None

    def stops(row: int, tokens: list[int]) -> bool:
        ids = torch.tensor([prompts[row] + tokens], device=device)
        return any(bool(torch.as_tensor(each(ids, None)).all()) for each in criteria)

    return stops


def _pad_id(settings: Any, limits: Limits) -> int:
    pad = getattr(settings, "pad_token_id", None)
    if pad is not None:
        return int(pad)
    return limits.stop_ids[0] if limits.stop_ids else 0


def _join(input_ids: Tensor, rows: list[Row], pad: int) -> Tensor:
    longest = max(len(row.tokens) for row in rows)
    answers = torch.tensor([row.tokens + [pad] * (longest - len(row.tokens)) for row in rows])
    return torch.cat((input_ids, answers.to(input_ids.device)), dim=1)
