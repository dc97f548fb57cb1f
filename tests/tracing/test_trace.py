"""The trace of an answer: the answer is the same, and all that is shown of it is true."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import ids, prompts
from trace_scenes import HEADER, ByteTokenizer, made_up_trace, page_of, tiny_decoder

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.tracing.data import as_json, page_data, parting
from eagle_dropmatch.tracing.page import script_safe
from eagle_dropmatch.tracing.token_text import pieces, token_text
from eagle_dropmatch.tracing.trace import BONUS, EXACT, FIRST, RELAXED, AnswerTrace, trace_answer
from eagle_dropmatch.tree import DraftTree, longest_accepted_path

RULES = [
    "exact",
    "naive(K=3)",
    "naive(p_drop=running)",
    "dropmatch",
    "flip_probability",
    "thresholds(accumulated=0.6)",
    "any_of(naive(K=3, p_drop=0.2), relaxed_top_n)",
]
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.9}
PROMPT = prompts(20)[0]


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.mark.parametrize("sampling", [{}, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("expression", RULES)
def test_a_traced_answer_is_the_answer(decoder, expression: str, sampling: dict[str, Any]) -> None:
    decoder.acceptor = make_acceptor(expression)
    plain = decoder.generate(
        ids(PROMPT), max_new_tokens=20, return_dict_in_generate=True, seed=3, **sampling
    )
    rule = make_acceptor(expression)
    trace = trace_answer(decoder, rule, PROMPT, max_new_tokens=20, seed=3, **sampling)
    assert trace.tokens == plain.sequences[0, len(PROMPT) :].tolist()
    assert trace.stats.rows == plain.stats.rows
    assert decoder.acceptor is not rule
    assert_true_to_itself(trace)


def assert_true_to_itself(trace: AnswerTrace) -> None:
    (row,) = trace.stats.rows
    assert len(trace.origins) == len(trace.tokens)
    assert len(trace.steps) == len(row.accept_lengths)
    assert trace.origins[0].kind == FIRST
    for token, origin in zip(trace.tokens[1:], trace.origins[1:], strict=True):
        step = trace.steps[origin.step]
        wanted = step.choice[step.parents[origin.node]]
        if origin.kind == BONUS:
            assert token == step.bonus == step.choice[step.path[-1]]
        else:
            assert token == step.tokens[origin.node]
            assert (origin.kind == EXACT) == (token == wanted)
    for number, step in enumerate(trace.steps):
        # The verdicts at all nodes lead to the path that was kept.
        tree = DraftTree.from_parents(
            torch.tensor([step.tokens]),
            torch.tensor([step.parents]),
            torch.tensor([step.draft_scores]),
        )
        for verdicts, path in ((step.allowed, step.path), (step.exact, step.strict_path)):
            found = longest_accepted_path(tree, torch.tensor([verdicts])).nodes[0].tolist()
            assert [node for node in found if node >= 0] == path
        assert all(step.parents[node] == above for above, node in pairwise(step.path))
        if number + 1 < len(trace.steps):
            assert trace.steps[number + 1].tokens[0] == step.bonus
            kinds = [origin.kind for origin in trace.origins if origin.step == number]
            assert kinds.count(RELAXED) == row.relaxed_tokens[number]
            assert len(kinds) == row.accept_lengths[number]


def test_probabilities_ranks_and_vocabulary_are_the_targets(decoder) -> None:
    trace = trace_answer(decoder, make_acceptor("naive"), PROMPT, max_new_tokens=12)
    model = decoder.target.model
    known = set(decoder.drafter(decoder.tree).vocabulary.tolist())
    step = trace.steps[0]
    for node in (1, 5, len(step.tokens) - 1):
        path, above = [], step.parents[node]
        while above >= 0:
            path.insert(0, step.tokens[above])
            above = step.parents[above]
        with torch.inference_mode():
            logits = model(ids([*PROMPT, *path]), use_cache=False).logits[0, -1]
        p = logits.softmax(-1)
        parent = step.parents[node]
        assert step.p[node] == pytest.approx(float(p[step.tokens[node]]), rel=1e-3)
        assert step.ranks[node] == int((logits > logits[step.tokens[node]]).sum())
        assert step.choice[parent] == int(logits.argmax())
        assert step.choice_p[parent] == pytest.approx(float(p.max()), rel=1e-3)
        assert step.sayable is not None
        assert step.sayable[parent] == (step.choice[parent] in known)
    assert math.isnan(step.p[0])


def test_what_relaxed_tokens_give_up_is_counted_in_nats_a_token(decoder) -> None:
    trace = trace_answer(decoder, make_acceptor("relaxed_top_n"), PROMPT, max_new_tokens=30)
    lost = 0.0
    for origin in trace.origins:
        if origin.kind == RELAXED:
            step = trace.steps[origin.step]
            lost += math.log(step.choice_p[step.parents[origin.node]] / step.p[origin.node])
    assert lost > 0
    assert trace.given_up == pytest.approx(lost / 30)
    assert trace_answer(decoder, make_acceptor("exact"), PROMPT, max_new_tokens=9).given_up == 0


def test_an_answer_of_one_token_has_no_step(decoder) -> None:
    trace = trace_answer(decoder, make_acceptor("naive"), PROMPT, max_new_tokens=1)
    assert (len(trace.tokens), trace.steps) == (1, [])
    assert json.loads(as_json(page_data([("naive", trace, {})], ByteTokenizer(), HEADER)))


def test_several_answers_at_once_are_no_trace(decoder) -> None:
    from eagle_dropmatch.tracing.trace import TracingAcceptor

    decoder.acceptor = TracingAcceptor(make_acceptor("exact"))
    with pytest.raises(ValueError, match="one answer, not of 2"):
        decoder.generate(torch.tensor([PROMPT, PROMPT]), max_new_tokens=5)


@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_pieces_hold_whole_characters_and_give_the_text(text: str) -> None:
    tokens = list(text.encode())
    found = pieces(ByteTokenizer(), tokens)
    assert [piece.start for piece in found] == [
        sum(each.tokens for each in found[:i]) for i in range(len(found))
    ]
    assert sum(piece.tokens for piece in found) == len(tokens)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "".join(piece.text for piece in found) == text
        assert len(found) == len(text)


@given(tokens=st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=200, deadline=None)
def test_broken_text_shows_bytes_and_no_replacement_characters(tokens: list[int]) -> None:
    # U+FFFD itself is text like any other; without its first byte none of them says it.
    tokens = [token for token in tokens if token != 0xEF]
    found = pieces(ByteTokenizer(), tokens)
    assert sum(piece.tokens for piece in found) == len(tokens)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in found)


def test_a_part_of_a_character_is_shown_as_its_bytes() -> None:
    korean, newline = "가".encode(), ord("\n")
    assert [token_text(ByteTokenizer(), byte) for byte in korean] == ["⟨EA⟩", "⟨B0⟩", "⟨80⟩"]
    assert token_text(ByteTokenizer(), newline) == "\n"


def test_answers_part_at_their_first_difference() -> None:
    assert parting([[1, 2, 3]]) is None
    assert parting([[1, 2, 3], [1, 2, 3]]) is None
    assert parting([[1, 2, 3], [1, 5, 3]]) == 1
    assert parting([[1, 2], [1, 2, 3]]) == 2


def test_nothing_that_a_model_writes_leaves_the_pages_data() -> None:
    hostile = b"</script><img src=x onerror=alert(1)><!--"
    header = {**HEADER, "prompt": "</pre><b>bold</b>", "target": "<i>"}
    page = page_of(made_up_trace(20, 6, text=hostile), header=header)
    assert page.count("</script>") == 2  # the data's own and the script's own
    assert "<img" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    text = as_json({"said": "</script>\u2028&<!--"})
    assert json.loads(script_safe(text)) == json.loads(text)


def test_numbers_that_json_has_not_are_written_all_the_same() -> None:
    trace = made_up_trace(2, 5)
    trace.steps[0].p[1] = math.inf
    data = json.loads(as_json(page_data([("rule", trace, {})], ByteTokenizer(), HEADER)))
    (step, _) = data["traces"][0]["steps"]
    assert step["p"][:2] == [None, "∞"]
    assert step["scores"][0]["bounds"] == 0.3
    assert set(step["scores"][0]["holds"]) <= {"0", "1"}


@pytest.fixture
def script(load_script):
    return load_script("trace")


def question_file(folder: Path) -> str:
    path = folder / "questions.jsonl"
    path.write_text(json.dumps({"question_id": 7, "turns": ["one?", "and <two>?"]}) + "\n")
    return str(path)


def test_the_script_writes_a_page_and_its_data(
    script, decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rules = ["naive", "relaxed_top_n(n=3, delta=0.5)"]
    options = ["--question", "7", "--questions", question_file(tmp_path), "--turn", "2"]
    command = [*options, "--acceptor", *rules, "--max-new-tokens", "20", "--json", "data.json"]
    assert script.main(command, lambda _: decoder) == 0
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    (page,) = (tmp_path / "runs").iterdir()
    assert line.startswith(f"runs/{page.name}: naive tau ")
    assert "answering turn 1 with exact acceptance" in printed.err
    data = json.loads((tmp_path / "data.json").read_text())
    assert [trace["rule"] for trace in data["traces"]] == rules
    assert all(len(trace["tokens"]) == 20 for trace in data["traces"])
    assert "and <two>?" in data["header"]["prompt"]
    assert data["header"]["prompt"].startswith("<user>one?<assistant>")
    assert data["header"]["command"].startswith("python scripts/trace.py --question 7")
    first, second = (trace["numbers"] for trace in data["traces"])
    gap = first["log p a token"] - second["log p a token"]
    assert second["log p below the first rule's"] == pytest.approx(gap, abs=1e-3)
    assert script_safe(as_json(data)) in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--question", "81"], "--acceptor"),
        (["--acceptor", "naive"], "--prompt --question"),
        (["--acceptor", "a", "b", "c", "--prompt", "x"], "3 rules: a page shows one or two"),
        (["--acceptor", "naive", "naive", "--prompt", "x"], "the same rule twice"),
        (["--acceptor", "nave", "--prompt", "x"], "unknown acceptor 'nave'"),
        (["--acceptor", "naive", "--prompt", " "], "--prompt is empty"),
        (["--acceptor", "naive", "--prompt", "x", "--turn", "2"], "--turn goes with --question"),
        (["--acceptor", "naive", "--question", "8", "--questions", "Q"], "1 questions, 7 to 7"),
        (["--acceptor", "naive", "--question", "7", "--questions", "Q", "--turn", "3"], "2 turn"),
        (["--acceptor", "naive", "--prompt", "x", "--output", "."], "--output . is a folder"),
        (["--acceptor", "naive", "--prompt", "x", "--output", "p", "--json", "p"], "page itself"),
        (["--acceptor", "naive", "--prompt", "x", "--draft", "d"], "--draft without --target"),
        (["--acceptor", "naive", "--prompt", "x", "--sampling-top-k", "3"], "--temperature"),
    ],
)
def test_mistakes_are_told_in_one_line_before_a_model_is_loaded(
    script, refused_in_one_line, tmp_path, monkeypatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = question_file(tmp_path)
    arguments = [file if each == "Q" else each for each in arguments]

    def load(_: object) -> None:
        raise AssertionError("a model was loaded")

    refused_in_one_line(lambda argv: script.main(argv, load), arguments, told)


def test_a_missing_jinja2_is_told_before_anything_else(
    script, refused_in_one_line, monkeypatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["--acceptor", "naive", "--prompt", "x"]
    refused_in_one_line(script.main, arguments, "pip install eagle-dropmatch[trace]")


def test_help_names_every_flag(script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run_command(script.main, ["--help"])
    told = capsys.readouterr().out
    for flag in ("--acceptor", "--prompt", "--question", "--turn", "--total-token", "--json"):
        assert flag in told
    assert "--limit" not in told
