"""The decoders that a benchmark compares, all behind one method."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..clock import timed
from ..stats import GenerationStats, RowStats
from .chat import cut
from .plan import ASSISTED, LOOKUP, NO_DRAFTING, ArmSpec

if TYPE_CHECKING:  # torch comes with it, and bad arguments are refused without torch
    from ..acceptors import Acceptor
    from ..drafts.base import TreeShape

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes at most, as transformers' own documentation sets it."""


class Turn(NamedTuple):
    """One answer, cut by the common counting rule."""

    output_ids: list[int]
    wall_seconds: float
    """The whole call, prefill included, the device synchronised at both ends."""
    row: RowStats
    prefill_seconds: float | None
    """None where the arm cannot tell its phases apart (transformers' generate)."""
    decode_seconds: float | None
    latency: float | None = None
    """In a batch: seconds from the reading of the prompt to the end. Then all other times are
    shares of the batch's."""


class Arm(Protocol):
    @property
    def spec(self) -> ArmSpec: ...

    def answer(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Turn:
        """Answer one prompt. ``seed`` belongs to this question and turn, not to the arm."""
        ...


class BatchArm(Arm, Protocol):
    """An arm that can answer several prompts at the same time."""

    def queue(self, batch_size: int, *, max_new_tokens: int) -> TurnQueue: ...


class TurnQueue(Protocol):
    """Prompts in, turns out as they end, whatever their order."""

    def submit(self, prompt_ids: Sequence[int], *, seed: int, tag: Any) -> None: ...

    def __iter__(self) -> Iterator[tuple[Any, Turn]]:
        """Tags and turns; prompts may be submitted all the while."""
        ...


@dataclass(frozen=True)
class DecoderArm:
    """Our decoder under one acceptor, with or without drafts."""

    spec: ArmSpec
    decoder: Any
    """A :class:`~eagle_dropmatch.decoder.SpeculativeDecoder`; several arms share one."""
    acceptor: Any
    stop_ids: Sequence[int]
    sampling: Mapping[str, Any]
    """Settings of generate beyond greedy decoding."""
    tree: Any
    """The :class:`~eagle_dropmatch.drafts.base.TreeShape` of its drafts."""
    adaptive: bool
    drafter: Any
    """Makes a drafter for a tree shape."""

    def _settings(self, max_new_tokens: int) -> dict[str, Any]:
        """Set the decoder up for this arm; what its calls are given."""
        # Also without drafts: the rule that the arm before left there may have work to do on the
        # prompt, and a baseline must not be charged for it.
        self.decoder.acceptor = self.acceptor
        self.decoder.tree, self.decoder.adaptive = self.tree, self.adaptive
        self.decoder.drafter = self.drafter
        sampling = dict(self.sampling)
        if self.spec.control:
            sampling |= {"do_sample": True, "truncation": self.acceptor}
            sampling.setdefault("temperature", 1.0)
        return {
            "max_new_tokens": max_new_tokens,
            "eos_token_id": list(self.stop_ids),
            "repetition_penalty": 1.0,
            "draft": self.spec.acceptance != NO_DRAFTING,
            **sampling,
        }

    def answer(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Turn:
        import torch

        device = self.decoder.target.model.device
        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=device)
        settings = self._settings(max_new_tokens)
        output, wall = timed(
            lambda: self.decoder.generate(ids, return_dict_in_generate=True, seed=seed, **settings),
            device,
        )
        stats: GenerationStats = output.stats
        (row,) = stats.rows
        kept = self._cut(output.sequences[0, len(prompt_ids) :].tolist(), row, max_new_tokens)
        return Turn(kept, wall, row, stats.prefill_seconds, stats.decode_seconds)

    def queue(self, batch_size: int, *, max_new_tokens: int) -> TurnQueue:
        """Answer at most so many prompts at the same time. One queue at a time: arms share a
        decoder."""
        return _DecoderQueue(
            self, self.decoder.queue(batch_size, **self._settings(max_new_tokens)), max_new_tokens
        )

    def _cut(self, new_ids: Sequence[int], row: RowStats, max_new_tokens: int) -> list[int]:
        kept = cut(new_ids, self.stop_ids, max_new_tokens)
        if row.output_tokens != len(kept):
            raise RuntimeError(
                f"arm {self.spec.name}: the record counts {row.output_tokens} tokens, "
                f"the output holds {len(kept)} up to its first stop token"
            )
        return kept


@dataclass(frozen=True)
class _DecoderQueue:
    arm: DecoderArm
    queue: Any
    """An :class:`~eagle_dropmatch.answer_queue.AnswerQueue`."""
    max_new_tokens: int

    def submit(self, prompt_ids: Sequence[int], *, seed: int, tag: Any) -> None:
        self.queue.submit(prompt_ids, seed=seed, tag=tag)

    def __iter__(self) -> Iterator[tuple[Any, Turn]]:
        for each in self.queue:
            kept = self.arm._cut(each.tokens, each.stats, self.max_new_tokens)
            seconds = each.prefill_seconds, each.decode_seconds
            yield each.tag, Turn(kept, sum(seconds), each.stats, *seconds, each.latency)


@dataclass(frozen=True)
class TransformersArm:
    """``generate`` of transformers, greedy, with the same stop ids and limit."""

    spec: ArmSpec
    model: Any
    stop_ids: Sequence[int]
    pad_token_id: int
    sampling: Mapping[str, Any]
    lookup: bool = False
    assistant: Any = None
    """A small model that drafts for it."""

    def answer(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Turn:
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.model.device)
        # Neutral values by name: what is left unset is filled in from the model's own config, and
        # a repetition penalty from there would make this another decoder than ours.
        config = GenerationConfig(
            **{
                "do_sample": False,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 50,
                **self.sampling,
            },
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=self.pad_token_id,
        )
        starts: list[int] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            torch.manual_seed(seed)
            drafts = self.lookup or self.assistant is not None
            if self.lookup:
                config.prompt_lookup_num_tokens = LOOKUP_TOKENS
            if drafts:  # without that every forward commits one token
                hook = self.model.register_forward_pre_hook(_noting(starts), with_kwargs=True)
                stack.callback(hook.remove)
            output, wall = timed(
                lambda: self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    **({"assistant_model": self.assistant} if self.assistant is not None else {}),
                ),
                self.model.device,
            )
        kept = cut(output[0, len(prompt_ids) :].tolist(), self.stop_ids, max_new_tokens)
        steps = _committed(starts, len(prompt_ids), len(kept)) if drafts else None
        return Turn(kept, wall, plain_row(kept, len(prompt_ids), self.stop_ids, steps), None, None)


def _noting(starts: list[int]) -> Callable[..., None]:
    """A forward hook that notes how many tokens the cache holds."""

    def hook(module: Any, args: Any, given: Mapping[str, Any]) -> None:
        cache = given.get("cache", given.get("past_key_values"))
        starts.append(0 if cache is None else int(cache.get_seq_length()))

    return hook


def _committed(starts: Sequence[int], prompt_tokens: int, output_tokens: int) -> list[int]:
    """Tokens that each forward committed, from what the cache held before it: all but the last
    token known by then. The first forward's first token is the prefill's, not a step's."""
    ends = [*starts[1:], prompt_tokens + output_tokens - 1]
    each = [end - start for start, end in zip(starts, ends, strict=True)]
    each[0] -= prompt_tokens
    # A stop token may cut off what the last forwards committed.
    return [count for count in each if count > 0]


def plain_row(
    output_ids: Sequence[int],
    prompt_tokens: int,
    stop_ids: Sequence[int],
    accept_lengths: Sequence[int] | None = None,
) -> RowStats:
    """The record of an arm that keeps none: each step after the prefill commits one token, or as
    many as ``accept_lengths`` says."""
    lengths = list(accept_lengths or [1] * max(len(output_ids) - 1, 0))
    stopped = bool(output_ids) and output_ids[-1] in set(stop_ids)
    return RowStats(
        accept_lengths=lengths,
        strict_accept_lengths=lengths,
        relaxed_tokens=[0] * len(lengths),
        draft_nodes=[0] * len(lengths),
        prompt_tokens=prompt_tokens,
        output_tokens=len(output_ids),
        finish_reason="stop" if stopped else "length",
    )


def build_arms(
    planned: Sequence[tuple[ArmSpec, Acceptor | None]],
    decoder: Any,
    stop_ids: Sequence[int],
    sampling: Mapping[str, Any],
    language_model: Callable[[TreeShape], Any] | None = None,
) -> list[Arm]:
    """The arms themselves, all on the models of one ``decoder``, so in one process and memory.

    ``language_model``: makes the drafters of the arms that draft chains.
    """
    from ..drafts.base import ADAPTIVE_TREE, TreeShape

    pad = decoder.tokenizer.pad_token_id
    if pad is None:
        pad = stop_ids[0] if stop_ids else 0
    small = language_model or decoder.drafter
    arms: list[Arm] = []
    for spec, rule in planned:
        if rule is None:
            arms.append(
                TransformersArm(
                    spec,
                    decoder.target.model,
                    stop_ids,
                    pad,
                    sampling,
                    lookup=spec.name == LOOKUP,
                    # The small model behind the drafter, as transformers has it.
                    assistant=small(decoder.tree).model.model if spec.name == ASSISTED else None,
                )
            )
            continue
        tree, adaptive = decoder.tree, decoder.adaptive
        if spec.tree is not None:
            adaptive = isinstance(spec.tree, str)
            tree = ADAPTIVE_TREE if isinstance(spec.tree, str) else TreeShape(*spec.tree)
        drafter = small if spec.chain else decoder.drafter
        arms.append(DecoderArm(spec, decoder, rule, stop_ids, sampling, tree, adaptive, drafter))
    return arms
