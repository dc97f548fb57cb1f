"""What a trained draft was made of: the model card beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from eagle_dropmatch.assets import REFERENCE_TARGET_HUB_ID
from eagle_dropmatch.drafts.eagle3 import Eagle3Config
from eagle_dropmatch.files import write_text
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.options import TrainOptions

CARD_NAME = "README.md"

#: Where an example's answer comes from, in words.
_SOURCES = {
    "target-greedy": "answers that the base model wrote greedily",
    "published": "the conversations' published answers",
}


class SourceCount(NamedTuple):
    """How much of the training data came from one source."""

    source: str
    examples: int
    answer_tokens: int  # tokens in the assistant's spans, stop tokens included


@dataclass(frozen=True)
class DraftCard:
    """The facts of a training run that a reader of the draft needs."""

    target: str = "unnamed"
    files: tuple[str, ...] = ()
    sources: tuple[SourceCount, ...] = ()
    held_out: int = 0
    started_from: str | None = None  # a draft; None for the target's own weights
    options: TrainOptions = field(default_factory=TrainOptions)
    steps: int = 0
    rows: int = 0
    earlier_rows: int = 0  # seen by the drafts that this one started from
    simulated_tau: float = 0.0

    def with_data(
        self, examples: Sequence[Example], held_out: Sequence[Example], options: TrainOptions
    ) -> DraftCard:
        return replace(
            self, sources=count_sources(examples), held_out=len(held_out), options=options
        )

    def started_from_words(self, otherwise: str) -> str:
        return otherwise if self.started_from is None else f"the draft {self.started_from}"

    def summary(self) -> dict[str, Any]:
        """The entry in the draft's config.json."""
        return {
            "target": self.target,
            "data": list(self.files),
            "sources": [source.source for source in self.sources],
            "steps": self.steps,
            "rows": self.rows,
            "rows_in_all": self.earlier_rows + self.rows,
            "simulated_tau": self.simulated_tau,
        }


def count_sources(examples: Sequence[Example]) -> tuple[SourceCount, ...]:
    """Examples and answer tokens of each source, by name."""
    counts: dict[str, tuple[int, int]] = {}
    for example in examples:
        number, tokens = counts.get(example.source, (0, 0))
        tokens += sum(end - start for start, end in example.spans)
        counts[example.source] = number + 1, tokens
    return tuple(SourceCount(name, *counts[name]) for name in sorted(counts))


def write_card(folder: Path, card: DraftCard, config: Eagle3Config) -> None:
    """Write ``README.md`` into a draft's folder, whole or not at all."""
    write_text(folder / CARD_NAME, card_text(card, config))


def write_lm_card(folder: Path, card: DraftCard, kept: Sequence[int]) -> None:
    """The same of a small language model of the target's layers ``kept``."""
    write_text(folder / CARD_NAME, lm_card_text(card, kept))


def card_text(card: DraftCard, config: Eagle3Config) -> str:
    """The card as Markdown, with the front matter that model hubs read."""
    options = card.options
    start = "the base model's own last layer, final norm and LM-head rows"
    return f"""{_front(card, "eagle3, speculative-decoding")}

# EAGLE-3 draft for {card.target}

A draft for speculative decoding: one decoder layer of width {config.hidden_size} over three of the
base model's hidden states, {config.draft_vocab_size:,} of its {config.vocab_size:,} tokens, in the
official EAGLE-3 format. Trained with eagle-dropmatch (`scripts/train_draft.py`); it serves no other
base model.

## Training

Training-time test of {options.ttt_steps} steps (weight {options.ttt_decay:g} to the power of the
step) against the frozen base model, started from {card.started_from_words(start)}.
{_schedule(card)}

{_ending(card)}"""


def lm_card_text(card: DraftCard, kept: Sequence[int]) -> str:
    """The card of a small language model of the base model's layers ``kept``, as Markdown."""
    numbers = ", ".join(map(str, kept))
    start = "the base model's own weights"
    return f"""{_front(card, "speculative-decoding")}

# A small language model for {card.target}

{len(kept)} of the base model's decoder layers ({numbers}) between its own embedding and LM head, to
draft for it in speculative decoding: the same tokenizer, the same vocabulary. Distilled with
eagle-dropmatch (`scripts/distil_draft_lm.py`).

## Training

Cross-entropy against the frozen base model's distribution over its whole vocabulary after each
answer token, started from {card.started_from_words(start)}; embedding and LM head stay as they are.
{_schedule(card)}

{_ending(card)}"""


def _front(card: DraftCard, tags: str) -> str:
    lines = ["license: apache-2.0"] if _reference(card) else []
    lines += [f"base_model: {card.target}", f"tags: [{tags}]"]
    return "\n".join(("---", *lines, "---"))


def _reference(card: DraftCard) -> bool:
    return card.target == REFERENCE_TARGET_HUB_ID


def _schedule(card: DraftCard) -> str:
    options = card.options
    earlier = (
        f" ({card.earlier_rows + card.rows:,} with those of the drafts it started from)"
        if card.earlier_rows
        else ""
    )
    return f"""AdamW, peak learning rate
{options.learning_rate:g}, gradient clip {options.clip:g}, {options.positions:,} padded positions a
step, seed {options.seed}. {card.steps:,} steps, {card.rows:,} supervised rows
seen{earlier}."""


def _ending(card: DraftCard) -> str:
    """Data, result and licence."""
    options = card.options
    table = "\n".join(
        f"| {source.source} | {_describe(source.source)} | {source.examples:,} | "
        f"{source.answer_tokens:,} |"
        for source in card.sources
    )
    licence = (
        "Apache-2.0, as the base model's."
        if _reference(card)
        else "The terms of the base model and of the training data apply."
    )
    return f"""Data files: {", ".join(card.files) or "unnamed"}.

| source | what it is | examples | answer tokens |
|---|---|---:|---:|
{table}

{card.held_out} answers, with every other answer to the same prompts, were held out.

## Result

Simulated tau on the held-out answers: {card.simulated_tau:.3f}. It is 1 + the mean number of
steps in a row, at most {options.eval_steps}, in which the draft's argmax is the answer's next
token, drafting a chain behind every answer position that has as many tokens after it. Trees
accept more.

## Licence

{licence}
"""


def _describe(source: str) -> str:
    if source in _SOURCES:
        return _SOURCES[source]
    temperature = source.removeprefix("target-")
    if temperature != source:
        return f"answers that the base model sampled at temperature {temperature}"
    return "other answers"
