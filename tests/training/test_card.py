"""The model card of a trained draft."""

from __future__ import annotations

from training_toys import toy_draft, toy_examples, toy_target

from eagle_dropmatch.assets import REFERENCE_TARGET_HUB_ID
from eagle_dropmatch.drafts.checkpoint import save_draft
from eagle_dropmatch.training.card import DraftCard, card_text, count_sources, write_card
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.launch import rows_seen
from eagle_dropmatch.training.options import TrainOptions

EXAMPLES = [
    Example("a", "target-greedy", [1] * 9, [(2, 5), (7, 9)]),
    Example("b", "target-0.7", [1] * 9, [(2, 9)]),
    Example("c", "target-greedy", [1] * 2000, [(0, 1500)]),
    Example("d", "mine", [1] * 3, [(1, 2)]),
]


def test_sources_are_counted_in_examples_and_answer_tokens():
    assert count_sources(EXAMPLES) == (
        ("mine", 1, 1),
        ("target-0.7", 1, 7),
        ("target-greedy", 2, 1505),
    )


def test_the_card_names_target_data_training_and_result(tmp_path):
    config = toy_draft(toy_target()).config
    card = DraftCard(
        target=REFERENCE_TARGET_HUB_ID,
        files=("a.jsonl", "b.jsonl"),
        steps=1234,
        rows=5678901,
        simulated_tau=2.3456,
    ).with_data(EXAMPLES, toy_examples(7), TrainOptions(ttt_steps=6, eval_steps=5))
    write_card(tmp_path, card, config)
    text = (tmp_path / "README.md").read_text()
    assert text == card_text(card, config)
    front, body = text.split("---\n")[1:3]
    assert "license: apache-2.0\n" in front
    assert f"base_model: {REFERENCE_TARGET_HUB_ID}\n" in front
    said = " ".join(body.split())
    for fact in (
        "1,234 steps, 5,678,901 supervised rows seen",
        "Training-time test of 6 steps",
        "started from the base model's own last layer",
        "Data files: a.jsonl, b.jsonl.",
        "| target-greedy | answers that the base model wrote greedily | 2 | 1,505 |",
        "| target-0.7 | answers that the base model sampled at temperature 0.7 | 1 | 7 |",
        "| mine | other answers | 1 | 1 |",
        "7 answers, with every other answer to the same prompts, were held out",
        "Simulated tau on the held-out answers: 2.346. It is 1 + the mean number of steps",
        "at most 5, in which",
        "200 of its 320 tokens",
        "Apache-2.0",
    ):
        assert fact in said, fact


def test_rows_add_up_over_the_drafts_that_one_started_from(tmp_path):
    draft = toy_draft(toy_target())
    assert rows_seen(None) == rows_seen(str(tmp_path)) == 0
    first = DraftCard(rows=100)
    save_draft(draft, tmp_path / "a", extra_config={"training": first.summary()})
    second = DraftCard(rows=30, earlier_rows=rows_seen(str(tmp_path / "a")))
    save_draft(draft, tmp_path / "b", extra_config={"training": second.summary()})
    assert rows_seen(str(tmp_path / "b")) == 130
    said = " ".join(card_text(second, draft.config).split())
    assert "30 supervised rows seen (130 with those of the drafts it started from)." in said
    assert "with those of" not in card_text(first, draft.config)


def test_a_draft_of_another_target_claims_no_licence():
    text = card_text(DraftCard(target="owner/llama"), toy_draft(toy_target()).config)
    assert "license:" not in text
    assert "The terms of the base model and of the training data apply." in text
