"""Traces to look at: a tiny decoder whose tokens are bytes, and answers of any length."""

from __future__ import annotations

import random
from typing import Any

from rig import VOCAB, decoder, eagle3, tiny_draft, tiny_target

from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.stats import GenerationStats, RowStats
from eagle_dropmatch.tracing.trace import AnswerTrace, ScoreColumn, TracedStep, origins

PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


class ByteTokenizer:
    """Every id is a byte, and byte-level vocabularies write bytes as characters."""

    chat_template = "{{ messages }}"
    name_or_path = "bytes"
    bos_token_id = eos_token_id = None

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **extra):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, skip_special_tokens=False):
        return bytes(token % 256 for token in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token):
        byte = token % 256
        others = [other for other in range(256) if other not in PLAIN]
        return chr(byte if byte in PLAIN else 256 + others.index(byte))


def tiny_decoder(tree: tuple[int, int, int] = (24, 3, 4)) -> SpeculativeDecoder:
    target = tiny_target()
    made = decoder(target, eagle3(tiny_draft(target)), tree)
    made.tokenizer = ByteTokenizer()
    return made


def made_up_trace(
    steps: int, nodes: int, *, relaxed: int = 3, text: bytes = b"ab <c", seed: int = 0
) -> AnswerTrace:
    """Steps that keep two tokens, every ``relaxed``-th of them relaxed, and a bonus.

    The answer says ``text`` over and over.
    """
    rng = random.Random(seed)
    said = [text[i % len(text)] for i in range(1 + 3 * steps)]
    made: list[TracedStep] = []
    for number in range(steps):
        at = 3 * number
        exact = [False, True, number % relaxed != 0, *[False] * (nodes - 3)]
        parents = [-1, 0, 1, *[rng.randrange(i) for i in range(3, nodes)]]
        scores = [0.0]
        for parent in parents[1:]:
            scores.append(scores[parent] - rng.random())
        p = [float("nan"), *[rng.random() / 2 for _ in parents[1:]]]
        column = ScoreColumn("p(x)", ">=", False, p, [0.3] * nodes, [value >= 0.3 for value in p])
        votes = ScoreColumn(
            "head 1", "", True, [float(rng.randrange(VOCAB)) for _ in p], None, None
        )
        made.append(
            TracedStep(
                tokens=[*said[at : at + 3], *[rng.randrange(VOCAB) for _ in range(nodes - 3)]],
                parents=parents,
                draft_scores=scores,
                p=p,
                ranks=[rng.randrange(50) for _ in parents],
                exact=exact,
                eligible=[False, *[True] * (nodes - 1)],
                allowed=[False, True, True, *[False] * (nodes - 3)],
                choice=[rng.randrange(VOCAB) for _ in parents],
                choice_p=[0.5 + rng.random() / 2 for _ in parents],
                sayable=[rng.random() < 0.9 for _ in parents],
                path=[0, 1, 2],
                strict_path=[0, 1, 2] if exact[2] else [0, 1],
                bonus=said[at + 3],
                columns=(column, votes),
            )
        )
    lengths = [3] * steps
    strict = [len(step.strict_path) for step in made]
    row = RowStats(
        lengths, strict, [3 - n for n in strict], [nodes - 1] * steps, 5, len(said), "length"
    )
    stats = GenerationStats((row,), 0.1, 1.0)
    return AnswerTrace(said, origins(made, lengths), made, stats)


HEADER = {"target": "a target", "draft": "a draft", "prompt": "Why?", "command": "python x"}


def page_of(*traces: AnswerTrace, header: dict[str, str] = HEADER) -> str:
    from eagle_dropmatch.tracing.data import page_data
    from eagle_dropmatch.tracing.page import render_page

    named: list[Any] = [
        (f"rule {i}", trace, {"log p a token": -0.5}) for i, trace in enumerate(traces)
    ]
    return render_page(page_data(named, ByteTokenizer(), header))
