"""The paper's small tables on a tiny pair: every part end to end, and what each one measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rig
import torch
from eval_fakes import CharTokenizer

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import NaiveAcceptor
from eagle_dropmatch.acceptors.heads import drop, mask_uniforms
from eagle_dropmatch.decoder import SpeculativeDecoder
from eagle_dropmatch.drafts.base import TreeShape
from eagle_dropmatch.studies import head_times, single_head
from eagle_dropmatch.studies.head_checks import Watching
from eagle_dropmatch.studies.parts import Found, PartsReport
from eagle_dropmatch.studies.single_head import SingleHead

TREE = (24, 4, 6)


class LettersTokenizer(CharTokenizer):
    """Its ids stay inside the tiny target's vocabulary."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 500 + 4 for c in text[:12]]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = rig.tiny_target()
    made = rig.decoder(target, rig.eagle3(rig.tiny_draft(target)), TREE)
    made.tokenizer = LettersTokenizer()
    return made


def generate(decoder: SpeculativeDecoder, rule: Any, count: int, **options: Any) -> Any:
    decoder.acceptor, decoder.tree = rule, TreeShape(*TREE)
    prompt = rig.ids(rig.prompts(7)[0])
    return decoder.generate(prompt, max_new_tokens=count, return_dict_in_generate=True, **options)


def test_one_head_without_dropout_writes_the_targets_own_answer(
    decoder: SpeculativeDecoder,
) -> None:
    out = generate(decoder, SingleHead(0.0), 24)
    assert out.sequences[0, 7:].tolist() == rig.greedy(decoder.target.model, rig.prompts(7)[0], 24)
    assert out.stats.relaxed_share == 0
    assert out.stats.tau == out.stats.strict_tau > 1


def test_every_token_is_the_heads_own_on_and_behind_the_path(decoder: SpeculativeDecoder) -> None:
    """By brute force: each committed token is the argmax under its own node's mask."""
    steps = []

    class Noting(SingleHead):
        def verify(self, context: Any) -> Any:
            verdict = super().verify(context)
            steps.append((context, verdict))
            return verdict

    generate(decoder, Noting(0.4, seed=3), 24)
    lengths = []
    for context, verdict in steps:
        hidden = context.output.hidden
        shape = (hidden.shape[1], 1, rig.HIDDEN)
        uniforms = mask_uniforms(context.row_keys, 3, context.steps, shape, hidden.device)
        told = context.head(drop(hidden, uniforms[:, :, 0], torch.tensor(0.4))).argmax(-1)[0]
        path = [node for node in verdict.path[0].tolist() if node >= 0]
        for parent, node in pairwise(path):
            assert context.tree.tokens[0, node] == told[parent]
        assert verdict.bonus[0] == told[path[-1]]
        children = (context.tree.parents[0] == path[-1]) & context.tree.valid[0]
        assert int(verdict.bonus[0]) not in context.tree.tokens[0, children].tolist()
        lengths.append(len(path))
    assert max(lengths) > 1
    assert any(bool(verdict.relaxed.any()) for _, verdict in steps)


def test_a_head_may_stop_where_the_target_would_not(decoder: SpeculativeDecoder) -> None:
    free = generate(decoder, SingleHead(0.4, seed=3), 24).sequences[0, 7:].tolist()
    stop = next(token for token in free[5:] if token not in free[:5])
    out = generate(decoder, SingleHead(0.4, seed=3), 24, eos_token_id=stop)
    assert out.sequences[0, 7:].tolist() == free[: free.index(stop) + 1]


def test_repetition_is_what_distinct_runs_miss() -> None:
    from eagle_dropmatch.evals.records import QuestionResult

    ids = ((1, 2, 3, 4, 1, 2, 3, 4, 1), (1, 2))
    result = QuestionResult(0, ids, (), 1.0, None, None, (1.0,), 0.0, ())
    assert single_head.distinct_runs(result) == (4, 6)


def test_the_split_times_every_work_in_every_step_and_changes_no_answer(
    decoder: SpeculativeDecoder,
) -> None:
    plain = generate(decoder, Watching([], lambda _: None), 16).sequences
    rule = NaiveAcceptor(K=3, p_drop=0.3)
    times = head_times.HeadTimes(rule)
    with times.watching(decoder.target):
        watched = generate(decoder, Watching([rule], times, draft=True), 16)
    assert torch.equal(watched.sequences, plain)
    assert {len(each) for each in times.seconds.values()} == {watched.stats.num_steps}
    assert set(times.seconds) == {head_times.BODY, *head_times.WORKS}
    found = head_times.split(times, TreeShape(*TREE))
    body, head, whole = (
        found.parts[n] for n in (head_times.BODY, head_times.HEAD, head_times.WHOLE)
    )
    assert body.of_forward + head.of_forward == pytest.approx(1)
    assert head.head_share == pytest.approx(head.of_forward)
    together = head.seconds + whole.seconds
    assert whole.head_share == pytest.approx(together / (body.seconds + together))


def test_a_report_keeps_parts_in_their_order_and_knows_their_settings(tmp_path: Path) -> None:
    with PartsReport(tmp_path, "r", ["a", "b"]) as report:
        report.keep("b", Found([1], ["of b"]), {"n": (1, 2)}, "second")
        report.keep("a", Found({"x": float("nan")}, ["of a"]), {"n": 1}, "first")
        with (
            pytest.raises(ValueError, match="another run is writing"),
            PartsReport(tmp_path, "r", []),
        ):
            pass
    text = (tmp_path / "r.md").read_text()
    assert text.split() == ["`first`", "of", "a", "`second`", "of", "b"]
    with PartsReport(tmp_path, "r", ["a", "b", "c"]) as report:
        assert report.done("b", {"n": [1, 2]})
        assert not report.done("c", {})
        with pytest.raises(ValueError, match="holds part a with another n; give another"):
            report.done("a", {"n": 2})
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(ValueError, match="no record"), PartsReport(tmp_path, "r", ["a"]):
        pass


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("bench_overhead")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for three questions, two of them GSM8K's too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eagle_dropmatch.evals.statistics.RESAMPLES", 99)
    rows = [{"question_id": i, "category": "c", "turns": [f"{i} a", f"b {i}"]} for i in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(2)]
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"hidden_size": 64}')
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    flags = "--target target --draft draft --questions q.jsonl --output-dir out --heads 3 --steps 4"
    flags += " --total-token 24 --depth 4 --top-k 6 --max-new-tokens 10 --batch-sizes 1 2"
    return [*flags.split(), "--rates", "0.3", "0.5", "--p-drop", "0.3", "auto"]


def test_all_parts_on_a_tiny_pair(
    script: ModuleType,
    decoder: SpeculativeDecoder,
    given: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [*given, "--gsm8k", "gsm.jsonl", "--gsm8k-tokens", "9", "--seeds", "0", "1"]
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), asked) == 0
    printed = capsys.readouterr().out
    text = Path("out/overhead.md").read_text(encoding="utf-8")
    assert all(line in text for line in printed.splitlines())
    for table in range(1, 6):
        assert f"**Table {table}, " in text
    parts = json.loads(Path("out/overhead.json").read_text())["parts"]
    assert set(parts) == {"split", "single", "votes", "js", "batches"}
    assert [each["nodes"] for each in parts["split"]["data"]] == [5, 24]
    answers = parts["single"]["data"]["answers"]
    assert [row["p_drop"] for row in answers] == [0, 0.3, 0.5]
    assert answers[0]["equal"]["value"] == 1
    assert answers[0]["cost"] is None
    assert 0 < answers[2]["equal"]["value"] < 1
    assert answers[2]["cost"]["value"] > 0
    assert all(0 < row["distinct"]["value"] <= 1 for row in answers)
    solved = parts["single"]["data"]["gsm8k"]
    assert set(solved) == {"exact", "one head, p_drop 0.3", "one head, p_drop 0.5"}
    assert parts["votes"]["data"] == parts["js"]["data"]
    for row in parts["js"]["data"]:
        assert sum(row["votes"]) == pytest.approx(1)
    assert [each["batch_size"] for each in parts["batches"]["data"]] == [1, 2]
    assert all(each["ratio"]["value"] > 0 for each in parts["batches"]["data"])
    # It is all there: nothing is measured, and nothing loaded.
    assert cli.run_command(lambda argv: script.main(argv, pytest.fail), asked) == 0
    assert Path("out/overhead.md").read_text(encoding="utf-8") == text


def test_the_papers_numbers_stand_beside_ours(
    script: ModuleType, decoder: SpeculativeDecoder, given: list[str]
) -> None:
    asked = [*given, "--heads", "5", "--depth", "9", "--parts", "split", "votes", "js", "batches"]
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), asked) == 0
    text = Path("out/overhead.md").read_text(encoding="utf-8")
    assert "| 98.40% | 0.939 |" in text
    assert "| 0.0254 | 0.0313 | 0.0097 | 0.0014 |" in text
    for rule, share in (("LM head", "0.05%"), ("naive, all", "0.17%"), ("JS, all", "1.64%")):
        lines = [line for line in text.splitlines() if f"| {rule}" in line]
        assert len(lines) == 2
        assert all(line.endswith(f"| {share} |") for line in lines)
    (alone,) = [line for line in text.splitlines() if line.startswith("| 1 | 3 |")]
    assert alone.endswith("| 1.19 |")


def test_a_killed_run_goes_on_and_no_answer_is_lost_or_doubled(
    script: ModuleType,
    decoder: SpeculativeDecoder,
    given: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [*given, "--parts", "votes", "single", "batches"]
    whole, calls = SpeculativeDecoder.queue, []

    def killing(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 6:  # every arm is warmed up, two have answered
            raise KeyboardInterrupt
        return whole(self, *args, **options)

    monkeypatch.setattr(SpeculativeDecoder, "queue", killing)
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), asked) == 130
    before = {path.name: path.read_text() for path in Path("out/single").glob("answers-*")}
    assert len(before) == 2
    assert not Path("out/overhead.json").exists()
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), asked) == 0
    for path in Path("out").glob("*/answers-*"):
        ids = [json.loads(line)["question_id"] for line in path.read_text().splitlines()]
        assert sorted(ids) == [0, 1, 2]
    assert all(Path("out/single", name).read_text() == was for name, was in before.items())
    assert len(list(Path("out").glob("*/answers-*"))) == 3 + 2 * 2
    assert set(json.loads(Path("out/overhead.json").read_text())["parts"]) == {
        "votes",
        "single",
        "batches",
    }


def test_a_part_under_other_settings_is_refused_or_measured_again(
    script: ModuleType,
    decoder: SpeculativeDecoder,
    given: list[str],
    refused_in_one_line: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [*given, "--parts", "votes"]
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), asked) == 0
    other = [*asked, "--heads", "4"]
    told = "out holds part votes with another heads; give another --output-dir, or --overwrite"
    capsys.readouterr()
    refused_in_one_line(lambda argv: script.main(argv, pytest.fail), other, told)
    again = [*other, "--overwrite"]
    assert cli.run_command(lambda argv: script.main(argv, lambda _: decoder), again) == 0
    (row, _) = json.loads(Path("out/overhead.json").read_text())["parts"]["votes"]["data"]
    assert len(row["votes"]) == 4


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--parts all", "invalid choice: 'all'"),
        ("--rates auto", "name rates in [0, 1)"),
        ("--p-drop 2", "'2' is neither a number in [0, 1) nor auto"),
        ("--batch-sizes 0", "'0' is not an integer of at least 1"),
        ("--gsm8k none.jsonl", "question file none.jsonl cannot be read"),
        ("--gsm8k q.jsonl", 'line 1: expected a JSON object with "question" and "answer"'),
        ("--questions none.jsonl", "none.jsonl does not exist"),
        ("--draft draft", "--draft without --target"),
        ("--draft-ngram 3 --parts js", "js of --parts look at the draft's distribution"),
        ("--overwrite", "--overwrite needs the --output-dir"),
    ],
)
def test_bad_input_is_one_line(
    script: ModuleType, given: list[str], refused_in_one_line: Any, flags: str, told: str
) -> None:
    refused_in_one_line(lambda argv: script.main(argv, pytest.fail), flags.split(), told)
