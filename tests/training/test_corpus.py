"""Corpora: spans through any chat template, and files that were cut off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from training_toys import BOS, CHATML, PLAIN, STOP, toy_tokenizer

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training.corpus import (
    Example,
    append_lines,
    mostly_ascii,
    read_examples,
    render,
    windows,
)

#: A system prompt of its own, and a generation prompt that is more than the role's name.
HEADED = (
    "{{ '<s>' }}[INST] <<SYS>> Be brief <</SYS>>\n{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% if not loop.first %}[INST] {% endif %}"
    "{{ message['content'] }} [/INST]{% else %} {{ message['content'] }}<|im_end|>\n\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{% endif %}"
)
#: Forgets earlier answers, as templates that cut the reasoning out do.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'user' or loop.last %}"
    "{{ message['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
ENDLESS = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "Hi, wörld?"},
    {"role": "assistant", "content": "Hello!\n\nIt is 1 < 2."},
    {"role": "user", "content": "And more"},
    {"role": "assistant", "content": "No."},
]


def texts(tokenizer, example):
    return [
        tokenizer.decode(example.ids[a:b], skip_special_tokens=True).strip()
        for a, b in example.spans
    ]


@pytest.mark.parametrize("template", [CHATML, PLAIN, HEADED], ids=["chatml", "plain", "headed"])
def test_spans_are_the_assistants_text_and_its_stop_token(template):
    tokenizer = toy_tokenizer(template)
    example = render(tokenizer, MESSAGES, [STOP])
    assert example is not None
    assert texts(tokenizer, example) == [MESSAGES[1]["content"], MESSAGES[3]["content"]]
    for start, end in example.spans:
        assert example.ids[end - 1] == STOP
        assert STOP not in example.ids[start : end - 1]
    assert example.ids.count(BOS) == ("<s>" in template)
    assert len(example.ids) == example.spans[-1][1]


@pytest.mark.reference
def test_spans_of_the_reference_template(reference_target_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference_target_dir)
    example = render(tokenizer, MESSAGES, [tokenizer.eos_token_id])
    assert example is not None
    assert texts(tokenizer, example) == [MESSAGES[1]["content"], MESSAGES[3]["content"]]
    assert example.ids[example.spans[0][1] - 1] == tokenizer.eos_token_id


def test_a_question_without_an_answer_is_left_out():
    tokenizer = toy_tokenizer()
    assert render(tokenizer, MESSAGES[:3], [STOP]) == render(tokenizer, MESSAGES[:2], [STOP])
    assert render(tokenizer, MESSAGES[:1], [STOP]) is None


def test_an_empty_answer_has_no_span():
    tokenizer = toy_tokenizer()
    empty = [MESSAGES[0], {"role": "assistant", "content": ""}]
    assert render(tokenizer, empty, [STOP]) is None
    example = render(tokenizer, [*empty, *MESSAGES[2:]], [STOP])
    assert example is not None
    assert texts(tokenizer, example) == ["No."]


def test_a_system_message_of_the_conversation_stays():
    tokenizer = toy_tokenizer()
    example = render(tokenizer, [{"role": "system", "content": "Rhyme"}, *MESSAGES], [STOP])
    assert example is not None
    assert texts(tokenizer, example) == [MESSAGES[1]["content"], MESSAGES[3]["content"]]
    assert "Rhyme" in tokenizer.decode(example.ids)


def test_a_template_that_rewrites_earlier_turns_gives_no_example():
    assert render(toy_tokenizer(FORGETFUL), MESSAGES, [STOP]) is None


def test_a_template_without_a_stop_token_gives_no_example():
    assert render(toy_tokenizer(ENDLESS), MESSAGES, [STOP]) is None


def test_windows_hold_every_answer_token_once_and_drop_what_teaches_nothing():
    example = Example("a", "published", list(range(20)), [(4, 8), (12, 20)])
    assert windows(example, 20) == [example]
    first, second = windows(example, 15)
    assert first == replace(example, ids=list(range(15)), spans=[(4, 8), (12, 15)])
    assert second == replace(example, ids=list(range(15, 20)), spans=[(0, 5)])
    # The first five tokens have one answer token at their end, which nothing follows.
    assert [w.ids[0] for w in windows(example, 5)] == [5, 10, 15]
    taught = [w.ids[i] for w in windows(example, 7) for a, b in w.spans for i in range(a, b)]
    assert taught == [4, 5, 6, 7, *range(12, 20)]


def test_examples_survive_the_file(tmp_path):
    path = tmp_path / "c.jsonl"
    examples = [
        Example("ä", "published", [1, 2, 3], [(1, 3)]),
        Example("b", "target-0.7", [4, 5], [(1, 2)]),
    ]
    append_lines(path, examples[:1])
    append_lines(path, examples[1:])
    assert list(read_examples(path)) == examples


GOOD = json.dumps({"id": "a", "source": "s", "ids": [1, 2], "spans": [[1, 2]]})


@pytest.mark.parametrize(
    "line",
    [
        "{half",
        "[]",
        '{"id": "a"}',
        '{"id": "a", "source": "s", "ids": "text", "spans": []}',
        '{"id": "a", "source": "s", "ids": [1, -2], "spans": []}',
        '{"id": "a", "source": "s", "ids": [1, 2], "spans": [[1, 3]]}',
        '{"id": "a", "source": "s", "ids": [1, 2], "spans": [[-1, 1]]}',
        '{"id": "a", "source": "s", "ids": [1, 2], "spans": [[1, 1]]}',
        '{"id": "a", "source": "s", "ids": [1, 2], "spans": 3}',
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line):
    path = tmp_path / "c.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: not a corpus line"):
        list(read_examples(path))


def test_a_last_line_without_its_end_is_passed_over(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:20]}")
    assert len(list(read_examples(path))) == 1
    path.write_text(f"{GOOD}\n{GOOD}")
    assert len(list(read_examples(path))) == 2


def test_a_missing_corpus_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match="make_corpus"):
        list(read_examples(tmp_path / "none.jsonl"))


def test_text_in_other_scripts_is_told_from_english_with_some_accents():
    assert mostly_ascii("Plain words, and one naïve café in a long enough line of them.")
    assert not mostly_ascii("Это не английский")
    assert mostly_ascii("")
