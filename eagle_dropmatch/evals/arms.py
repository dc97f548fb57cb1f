"""The decoders that a benchmark compares, all behind one method.

plain   our own loop with an empty tree: what drafting has to beat
hf      ``generate`` of transformers on the same model object
exact   EAGLE-3 trees, accepted only where the target agrees
naive   EAGLE-3 trees under a lossy rule (any acceptor of the registry)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from ..stats import GenerationStats, RowStats
from .chat import cut

T = TypeVar("T")

PLAIN, HF, EXACT = "plain", "hf", "exact"
NO_DRAFTING = "none"
"""``ArmSpec.acceptance`` of the baselines."""


class ArmSpec(NamedTuple):
    """What an arm is, without the models: enough to name its file and read it back."""

    name: str
    """Unique; part of the file name."""
    group: str
    """Row of the table: the arms of several mask seeds share one."""
    label: str
    acceptance: str
    """"none" without drafting, else the acceptor's name. Readers use it to spot lossy runs."""
    lossy: bool
    seed: int | None
    """Mask seed of a randomised rule."""
    tree: tuple[int, int, int] | None = None
    """(total_token, depth, top_k) of an arm with a tree of its own; None: the decoder's."""


class Turn(NamedTuple):
    """One answer, cut by the common counting rule."""

    output_ids: list[int]
    wall_seconds: float
    """The whole call, prefill included, the device synchronised at both ends."""
    row: RowStats
    prefill_seconds: float | None
    """None where the arm cannot tell its phases apart (transformers' generate)."""
    decode_seconds: float | None


class Arm(Protocol):
    @property
    def spec(self) -> ArmSpec: ...

    def answer(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Turn:
        """Answer one prompt. ``seed`` belongs to this question and turn, not to the arm."""
        ...


def plan_arms(
    acceptor: str,
    chosen: Sequence[str],
    seeds: Sequence[int],
    trees: Sequence[tuple[int, int, int]] = (),
) -> list[ArmSpec]:
    """The specs of the ``chosen`` arms, in the table's order.

    A rule other than exact gets one arm for each of ``seeds``; its answers differ from the
    target's, and with them the number of tokens and the time. With ``trees`` there is an exact arm
    for each of them instead of one.
    """
    specs = []
    if PLAIN in chosen:
        specs.append(ArmSpec(PLAIN, PLAIN, "plain (our loop)", NO_DRAFTING, False, None))
    if HF in chosen:
        specs.append(ArmSpec(HF, HF, "transformers' generate", NO_DRAFTING, False, None))
    if trees:
        for shape in trees:
            name = "-".join(map(str, (EXACT, *shape)))
            label = f"EAGLE-3 {'/'.join(map(str, shape))}"
            specs.append(ArmSpec(name, name, label, EXACT, False, None, shape))
    elif EXACT in chosen:
        specs.append(ArmSpec(EXACT, EXACT, "EAGLE-3 exact", EXACT, False, None))
    if acceptor != EXACT and acceptor in chosen:
        for seed in seeds:
            name = acceptor if len(seeds) == 1 else f"{acceptor}-seed{seed}"
            label = f"EAGLE-3 + {acceptor}"
            specs.append(ArmSpec(name, acceptor, label, acceptor, True, seed))
    return specs


@dataclass(frozen=True)
class DecoderArm:
    """Our decoder under one acceptor, with or without drafts."""

    spec: ArmSpec
    decoder: Any
    """A :class:`~eagle_dropmatch.decoder.SpeculativeDecoder`; several arms share one."""
    acceptor: Any
    stop_ids: Sequence[int]

    def answer(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Turn:
        import torch

        from ..drafts.base import TreeShape

        device = self.decoder.target.model.device
        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=device)
        # Also without drafts: the rule that the arm before left there may have work to do on the
        # prompt, and a baseline must not be charged for it.
        self.decoder.acceptor = self.acceptor
        if self.spec.tree is not None:
            self.decoder.tree = TreeShape(*self.spec.tree)
        output, wall = timed(
            lambda: self.decoder.generate(
                ids,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(self.stop_ids),
                repetition_penalty=1.0,
                return_dict_in_generate=True,
                seed=seed,
                draft=self.spec.acceptance != NO_DRAFTING,
            ),
            device,
        )
        stats: GenerationStats = output.stats
        (row,) = stats.rows
        new_ids = output.sequences[0, len(prompt_ids) :].tolist()
        kept = cut(new_ids, self.stop_ids, max_new_tokens)
        if row.output_tokens != len(kept):
            raise RuntimeError(
                f"arm {self.spec.name}: the record counts {row.output_tokens} tokens, "
                f"the output holds {len(kept)} up to its first stop token"
            )
        return Turn(kept, wall, row, stats.prefill_seconds, stats.decode_seconds)


@dataclass(frozen=True)
class TransformersArm:
    """``generate`` of transformers, greedy, with the same stop ids and limit."""

    spec: ArmSpec
    model: Any
    stop_ids: Sequence[int]
    pad_token_id: int

    def answer(self, prompt_ids: Sequence[int], *, max_new_tokens: int, seed: int) -> Turn:
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.model.device)
        # Neutral values by name: what is left unset is filled in from the model's own config, and
        # a repetition penalty from there would make this another decoder than ours.
        config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=self.pad_token_id,
        )
        output, wall = timed(
            lambda: self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            ),
            self.model.device,
        )
        kept = cut(output[0, len(prompt_ids) :].tolist(), self.stop_ids, max_new_tokens)
        return Turn(kept, wall, plain_row(kept, len(prompt_ids), self.stop_ids), None, None)


def plain_row(output_ids: Sequence[int], prompt_tokens: int, stop_ids: Sequence[int]) -> RowStats:
    """The record of decoding without drafts: every step after the prefill commits one token."""
    steps = max(len(output_ids) - 1, 0)
    stopped = bool(output_ids) and output_ids[-1] in set(stop_ids)
    return RowStats(
        accept_lengths=[1] * steps,
        strict_accept_lengths=[1] * steps,
        relaxed_tokens=[0] * steps,
        draft_nodes=[0] * steps,
        prompt_tokens=prompt_tokens,
        output_tokens=len(output_ids),
        finish_reason="stop" if stopped else "length",
    )


def build_arms(
    specs: Sequence[ArmSpec],
    decoder: Any,
    acceptors: Mapping[str, Any],
    stop_ids: Sequence[int],
) -> list[Arm]:
    """The arms themselves, all on the models of one ``decoder``, so in one process and memory.

    ``acceptors``: by the name of the arm. Drafting nothing is judged by the exact rule.
    """
    pad = decoder.tokenizer.pad_token_id
    if pad is None:
        pad = stop_ids[0] if stop_ids else 0
    arms: list[Arm] = []
    for spec in specs:
        if spec.name == HF:
            arms.append(TransformersArm(spec, decoder.target.model, stop_ids, pad))
        else:
            arms.append(DecoderArm(spec, decoder, acceptors[spec.name], stop_ids))
    return arms


def timed(work: Callable[[], T], device: Any) -> tuple[T, float]:
    """The result of ``work`` and its seconds, one synchronisation of the device at each end."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start


def synchronise(device: Any) -> None:
    """Wait until the device has done everything it was given; a CPU always has."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)
