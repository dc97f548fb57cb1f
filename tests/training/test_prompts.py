"""Prompt files in the formats that people have."""

from __future__ import annotations

import json

import pytest

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training.prompts import Conversation, read_conversations


def sharegpt(name, *turns):
    roles = ("human", "gpt")
    return {
        "id": name,
        "conversations": [{"from": roles[i % 2], "value": t} for i, t in enumerate(turns)],
    }


def write(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def contents(conversation):
    return [(m["role"][0], m["content"]) for m in conversation.messages]


def test_messages_turns_and_sharegpt_lines_may_stand_in_one_file(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"id": 1, "messages": [{"role": "user", "content": " hi\u2028there "}]},
        {"question_id": 81, "turns": ["first", "second"], "category": "x"},
        sharegpt("s", "q", "a", "q2"),
    )
    found = read_conversations(path)
    assert [c.id for c in found] == ["1", "81", "s"]
    assert contents(found[0]) == [("u", "hi\u2028there")]
    assert contents(found[1]) == [("u", "first"), ("a", ""), ("u", "second")]
    assert contents(found[2]) == [("u", "q"), ("a", "a"), ("u", "q2")]


def test_the_questions_of_a_conversation_are_counted_from_one():
    conversation = Conversation(
        "a",
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "2"},
        ],
    )
    first, second = conversation.up_to_question(1), conversation.up_to_question(2)
    assert first == conversation.messages[:2]
    assert second == conversation.messages
    assert conversation.up_to_question(3) is None


def test_a_sharegpt_array_is_read_up_to_where_it_was_cut_off(tmp_path):
    path = tmp_path / "s.json"
    rows = [sharegpt(f"c{i}", f"question {i}", f"answer {i}") for i in range(4)]
    text = json.dumps(rows, indent=1)
    path.write_text(text)
    assert [c.id for c in read_conversations(path)] == ["c0", "c1", "c2", "c3"]
    for end in (text.index('"c3"') + 9, text.index("answer 3") + 4, text.rindex("}")):
        path.write_text(text[:end])
        assert [c.id for c in read_conversations(path)] == ["c0", "c1", "c2"]


def test_a_file_cut_inside_a_character_is_still_read(tmp_path):
    path = tmp_path / "s.json"
    data = json.dumps([sharegpt("a", "q", "x"), sharegpt("b", "ü")], ensure_ascii=False).encode()
    path.write_bytes(data[: data.index("ü".encode()) + 1])
    assert [c.id for c in read_conversations(path)] == ["a"]


def test_conversations_are_cut_where_they_stop_to_alternate(tmp_path):
    rows = [
        sharegpt("starts-with-gpt", "x"),
        {"id": "twice", "conversations": [{"from": "human", "value": v} for v in ("a", "b")]},
        sharegpt("empty", "q", "  ", "q2"),
        {"id": "other", "conversations": [{"from": "human", "value": "q"}, {"from": "bing"}]},
        {"id": "none", "conversations": []},
    ]
    rows[0]["conversations"][0]["from"] = "gpt"
    found = read_conversations(write(tmp_path / "p.jsonl", *rows))
    assert {c.id: len(c.messages) for c in found} == {"twice": 1, "empty": 1, "other": 1}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no conversation"),
        ("[]", "holds no conversation"),
        ('{"id": 1, "messages": []}', "holds no conversation"),
        ('{"question_id": 1, "turns": ["a"]}\n{half', "line 2: not valid JSON"),
        ('\n\n{"id": 1, "text": "a"}', "line 3: no conversation"),
        ('{"id": 1, "messages": [{"role": "user"}]}', "line 1: no conversation"),
        ('{"turns": ["a"]}', "line 1: no conversation"),
        ('{"question_id": 1, "turns": [3]}', "line 1: no conversation"),
        ("7", "line 1: no conversation"),
        ('{"question_id": 1, "turns": ["a"]}\n' * 2, "the id '1' comes twice"),
        ('{"question_id": "a#2", "turns": ["a"]}', 'has a "#"'),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, text, told):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        read_conversations(path)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "p.jsonl" in str(raised.value)
