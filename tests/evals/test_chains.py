"""Speculative decoding with a small language model, beside the arms of another draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rig
from eval_fakes import FakeDecoder, fake_judge, lay_out

from eagle_dropmatch import cli
from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.drafts.model_drafter import ModelDrafter
from eagle_dropmatch.drafts.ngram_drafter import NGramDrafter
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import job
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.arms import build_arms
from eagle_dropmatch.evals.mtbench import MTBench
from eagle_dropmatch.evals.options import read_options
from eagle_dropmatch.evals.plan import plan_arms, plan_chains
from eagle_dropmatch.reports.stored_run import read_run
from eagle_dropmatch.target import TargetModel


def test_chains_are_exact_and_under_each_rule_and_are_judged_against_their_own_exact() -> None:
    rules = {"naive": make_acceptor("naive"), "margin(kappa=0.5)": make_acceptor("margin")}
    arms = plan_chains(rules, (0, 4), 5)
    assert [(s.name, s.group, s.label, s.seed, s.lossy) for s, _ in arms] == [
        ("sd", "sd", "SD, exact", None, False),
        ("sd-naive-seed0", "sd:naive", "SD + naive", 0, True),
        ("sd-naive-seed4", "sd:naive", "SD + naive", 4, True),
        ("sd-margin-kappa-0.5", "sd:margin(kappa=0.5)", "SD + margin(kappa=0.5)", None, True),
    ]
    assert {s.tree for s, _ in arms} == {(6, 4, 1)}
    assert {s.lossless_twin for s, _ in arms} == {"sd"}
    assert {s.lossless_twin for s, _ in plan_arms(["exact"], {}, ())} == {"exact"}


@pytest.mark.parametrize("batch", [1, 2])
def test_arms_of_two_drafters_take_turns_and_exact_ones_give_the_targets_answers(
    batch: int,
) -> None:
    target = TargetModel(rig.tiny_model())
    small = TargetModel(rig.tiny_model(layers=2))
    decoder = rig.decoder(target, NGramDrafter, (8, 2, 3), make_acceptor("exact"))
    decoder.tokenizer = type("Tokenizer", (), {"pad_token_id": 0})()
    rules = {"naive": make_acceptor("naive")}
    arms = build_arms(
        [*plan_arms(["plain", "exact", "naive"], rules, ()), *plan_chains(rules, (), 3)],
        decoder,
        [],
        {},
        lambda shape: ModelDrafter(small, shape, rig.VOCAB),
    )
    prompts = rig.prompts(9, 5)
    wanted = [rig.greedy(target.model, prompt, 20) for prompt in prompts]
    for arm in (*arms, *arms[::-1]):
        if batch == 1:
            turns = {i: arm.answer(p, max_new_tokens=20, seed=3) for i, p in enumerate(prompts)}
        else:
            queue = arm.queue(batch, max_new_tokens=20)
            for i, prompt in enumerate(prompts):
                queue.submit(prompt, seed=3, tag=i)
            turns = dict(queue)
        nodes = [max(turn.row.draft_nodes) for turn in turns.values()]
        if arm.spec.chain:
            assert nodes == [3, 3]
        elif arm.spec.name == "plain":
            assert nodes == [0, 0]
        if not arm.spec.lossy:
            assert [turns[i].output_ids for i in range(2)] == wanted


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "judge_turn", lambda target, *ids, drafted: fake_judge(*ids))
    lay_out(tmp_path, ("target", "draft", "small"))
    return tmp_path


def evaluate(arguments: str, decoder: Any = None) -> int:
    given = [
        "--target",
        "target",
        "--draft",
        "draft",
        "--questions",
        "q.jsonl",
        "--output-dir",
        "out",
    ]
    given += arguments.split()
    parser = cli.Parser("test")
    add_arguments(parser)
    options = read_options(parser.parse_args(given))
    return job.evaluate(MTBench(), options, given, lambda _: decoder or FakeDecoder())


def test_four_rows_stand_in_one_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = FakeDecoder()
    given = "--acceptor naive --arms plain exact naive --sd-lm small --sd-length 4 --p-drop 0.2"
    assert evaluate(given, decoder) == 0
    out = " ".join(capsys.readouterr().out.split())
    for label in ("SD, exact", "SD + dropmatch", "EAGLE-3 exact", "EAGLE-3 + naive"):
        assert label in out
    assert "sd:dropmatch / sd: tau ratio" in out
    assert "naive / exact: tau ratio" in out
    assert "SD: chains of 4 tokens of the model small" in out
    by = {(getattr(made, "source", None), tree.total_token) for made, tree in decoder.drafted_by}
    assert by == {(None, 24), ("small", 5)}
    header = json.loads((place / "out/run.json").read_text())
    assert header["arguments"]["sd"] == ["small", ["dropmatch"], 4]
    assert set(header["resolved"]["sd"]["weights"]) == {"model.safetensors"}
    assert header["resolved"]["acceptors"]["sd-dropmatch"]["p_drop"] == 0.2
    table = json.loads((place / "out/table.json").read_text())
    assert [c["against"] for c in table["comparisons"]] == ["exact", "sd"]


def test_a_run_without_chains_records_nothing_of_them(place: Path) -> None:
    assert evaluate("--arms plain exact") == 0
    header = json.loads((place / "out/run.json").read_text())
    assert "sd" not in header["arguments"]
    assert "sd" not in header["resolved"]


def test_chains_may_be_exact_alone_and_under_rules_of_their_own(place: Path) -> None:
    assert evaluate("--arms exact --sd-lm small --sd-acceptor") == 0
    assert sorted(p.name for p in (place / "out").glob("answers-*")) == [
        "answers-exact.jsonl",
        "answers-sd.jsonl",
    ]
    rules = "--arms exact --sd-lm small --overwrite --sd-acceptor naive majority"
    assert evaluate(rules) == 0
    assert {p.name for p in (place / "out").glob("answers-sd-*")} == {
        "answers-sd-naive.jsonl",
        "answers-sd-majority.jsonl",
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--sd-length 4", "--sd-length is about the chains of --sd-lm MODEL"),
        ("--sd-acceptor naive", "--sd-acceptor is about the chains of --sd-lm MODEL"),
        ("--sd-lm small --sd-acceptor naive naive", "--sd-acceptor naive naive: the same rule"),
        ("--sd-lm small --sd-acceptor nave", "nave"),
        ("--sd-lm small --trees 8/2/3", "--sd-lm and --trees"),
        ("--sd-lm none/", "--sd-lm none/: no such folder"),
        ("--sd-lm small --sd-length 0", "--sd-length: '0' is not an integer of at least 1"),
        ("--arms assisted", "needs --draft-lm or --sd-lm"),
    ],
)
def test_what_does_not_fit_is_refused(place: Path, arguments: str, told: str) -> None:
    class Untouched(FakeDecoder):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("a model was used")

    with pytest.raises(UserError, match=told.replace("'", ".")) as refused:
        evaluate(arguments, object.__new__(Untouched))
    assert "\n" not in str(refused.value)


def test_a_stored_run_has_its_chains_again(place: Path) -> None:
    assert evaluate("--acceptor naive --arms plain exact naive --sd-lm small --seeds 0 1") == 0
    table = json.loads((place / "out/table.json").read_text())
    run = read_run(place / "out")
    assert [row.group for row in run.summary.rows] == [row["group"] for row in table["rows"]]
    assert [row.group for row in run.summary.rows][-2:] == ["sd", "sd:dropmatch"]
    assert [c.against for c in run.summary.comparisons] == ["exact", "sd"]
    (place / "out/answers-sd.jsonl").write_text("")
    header = json.loads((place / "out/run.json").read_text())
    (place / "out/run.json").write_text(json.dumps({**header, "finished": None}))
    with pytest.raises(UserError, match="sd:dropmatch is lossy, and without sd beside it"):
        read_run(place / "out", partial=True)


def test_a_small_model_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    target = TargetModel(rig.tiny_model())
    decoder = rig.decoder(target, NGramDrafter, (8, 2, 3), make_acceptor("exact"))
    with pytest.raises(UserError, match="has no tokenizer that transformers can read") as told:
        decoder.language_model(str(tmp_path))
    assert "\n" not in str(told.value)


def test_a_small_model_that_does_not_fit_is_refused_before_anything_is_kept(place: Path) -> None:
    class Refusing(FakeDecoder):
        def language_model(self, source: str) -> Any:
            raise UserError("another tokenizer")

    with pytest.raises(UserError, match="another tokenizer"):
        evaluate("--arms exact --sd-lm small", Refusing())
    assert not (place / "out/run.json").exists()
