"""A whole evaluation on a decoder that costs nothing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from eval_fakes import FakeDecoder, fake_judge

from eagle_dropmatch import cli
from eagle_dropmatch.drafts.base import TreeShape
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import job
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.mtbench import MTBench
from eagle_dropmatch.evals.options import read_options


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder with three questions and a pair of checkpoints nobody loads."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question_id": i, "category": "글쓰기", "turns": [f"질문 {i}", f"다시 {i}"]}
        for i in (81, 82, 83)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "q.jsonl").write_text(text, encoding="utf-8")
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"hidden_size": 64}')
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    return tmp_path


def evaluate(*arguments, decoder=None, refuse_models=False):
    given = ["--target", "target", "--draft", "draft", "--questions", "q.jsonl", *arguments]
    parser = cli.Parser("test")
    add_arguments(parser)
    options = read_options(parser.parse_args(given))

    def load(options):
        assert not refuse_models, "a model was loaded"
        return decoder or FakeDecoder()

    return job.evaluate(MTBench(), options, given, load)


@pytest.fixture(autouse=True)
def _judge(monkeypatch):
    monkeypatch.setattr(job, "judge_turn", lambda target, *ids, drafted: fake_judge(*ids))


def answers(path, arm):
    text = (path / f"answers-{arm}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def only_run(place):
    (path,) = (place / "runs").iterdir()
    return path


def test_the_table_goes_to_stdout_and_everything_else_to_stderr(place, capsys):
    assert evaluate("--acceptor", "naive") == 0
    out, err = capsys.readouterr()
    for label in ("plain (our loop)", "transformers'", "EAGLE-3 exact", "EAGLE-3 + naive"):
        assert label in out
    flat = " ".join(out.split())
    assert "3 of 3 questions (a fixed sample: 81, 82, 83), 6 turns, at most 64 new tokens" in flat
    assert "tree: 24 nodes with the root, 4 draft levels (EAGLE's --depth 3), top-k 4" in flat
    assert "target target; draft draft" in flat
    assert "p_drop auto" in flat
    assert "naive is lossy" in flat
    assert "writing to runs/mt_bench-" in err
    assert (only_run(place) / "table.md").exists()
    assert json.loads((only_run(place) / "table.json").read_text())["turns"] == 6


def test_the_header_says_how_to_repeat_the_run(place):
    evaluate("--acceptor", "naive", "--system-prompt", "간결하게", "--output-dir", "out")
    header = json.loads((place / "out" / "run.json").read_text(encoding="utf-8"))
    arguments, resolved = header["arguments"], header["resolved"]
    assert set(arguments["versions"]) == {"eagle_dropmatch", "torch", "transformers", "python"}
    assert arguments["question_ids"] == [81, 82, 83]
    assert arguments["sampling"] == {}
    assert arguments["warmup"] == 1
    assert len(arguments["system_prompt_sha256"]) == 64
    assert resolved["dtype"] == "float32"
    assert resolved["attention"] == "sdpa"
    assert resolved["threads"] >= 1
    assert resolved["modules"] == "fused"
    assert arguments["fuse"] is None
    assert resolved["device"]
    assert resolved["stop_ids"] == [2]
    assert resolved["acceptors"]["naive"]["K"] == 5
    assert resolved["acceptors"]["naive"]["seed"] == 0
    assert set(resolved["draft"]["weights"]) == {"model.safetensors"}
    assert header["first_prompt"].startswith("<s><system>간결하게</><user>질문 81</>")
    assert len(header["first_prompt_ids"]) == 8
    (session,) = header["sessions"]
    assert "--system-prompt" in session["arguments"]
    assert "commit" in session
    assert abs(header["finished"] - time.time()) < 60


def test_each_mask_seed_is_an_arm_of_its_own(place, capsys):
    decoder = FakeDecoder()
    evaluate("--acceptor", "naive", "--seeds", "3", "5", "--output-dir", "out", decoder=decoder)
    assert [r["choices"][0]["seed"] for r in answers(place / "out", "naive-seed3")] == [3, 3, 3]
    assert len(answers(place / "out", "naive-seed5")) == 3
    seeds = {rule.seed for rule, draft, _ in decoder.calls if draft and rule.name == "naive"}
    assert seeds == {3, 5}
    header = json.loads((place / "out" / "run.json").read_text(encoding="utf-8"))
    assert header["resolved"]["acceptors"]["naive-seed5"]["seed"] == 5
    assert "seeds 3, 5" in " ".join(capsys.readouterr().out.split())


def test_every_rule_is_described_above_the_table(place, capsys):
    evaluate("--acceptor", "naive", "naive(seed=3)", "margin(kappa=0.25)")
    lines = capsys.readouterr().out.splitlines()
    for begin in ("naive: K 5", "naive(seed=3): K 5", "margin(kappa=0.25): kappa 0.25"):
        assert sum(line.startswith(begin) for line in lines) == 1, begin


def test_an_interrupted_run_says_how_to_go_on_and_does(place, capsys):
    stopping = FakeDecoder()
    stopping.interrupt_at = 9
    assert evaluate(decoder=stopping) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "To go on: the same command" in err
    assert evaluate() == 0
    err = capsys.readouterr().err
    assert "going on in runs/mt_bench-" in err
    path = only_run(place)
    for arm in ("plain", "hf", "exact"):
        assert sorted(r["question_id"] for r in answers(path, arm)) == [81, 82, 83]
    assert len(json.loads((path / "run.json").read_text())["sessions"]) == 2


def test_after_a_finished_run_the_same_command_measures_afresh(place):
    evaluate()
    evaluate()
    names = sorted(path.name for path in (place / "runs").iterdir())
    assert names[1] == f"{names[0]}-2"


def test_a_finished_run_in_a_named_folder_is_shown_again_without_its_models(place, capsys):
    evaluate("--output-dir", "out")
    first = capsys.readouterr().out
    before = answers(place / "out", "exact")
    assert evaluate("--output-dir", "out", refuse_models=True) == 0
    out, err = capsys.readouterr()
    assert out == first
    assert "finished" in err
    assert answers(place / "out", "exact") == before
    evaluate("--output-dir", "out", "--overwrite")
    assert answers(place / "out", "exact") != before


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (["--max-new-tokens", "32"], "max_new_tokens"),
        (["--depth", "2"], "tree"),
        (["--limit", "2"], "question_ids"),
        (["--acceptor", "naive"], "acceptor"),
        (["--system-prompt", "x"], "system_prompt_sha256"),
        (["--repeats", "2"], "repeats"),
    ],
)
def test_other_arguments_in_the_same_folder_are_refused_before_a_model(place, changed, field):
    evaluate("--output-dir", "out")
    with pytest.raises(UserError, match=f"another {field}"):
        evaluate("--output-dir", "out", *changed, refuse_models=True)


def test_other_weights_in_the_drafts_folder_are_another_run(place):
    stopping = FakeDecoder()
    stopping.interrupt_at = 3
    evaluate("--output-dir", "out", decoder=stopping)
    (place / "draft" / "model.safetensors").write_bytes(b"trained further")
    with pytest.raises(UserError, match="another draft"):
        evaluate("--output-dir", "out")


@pytest.mark.parametrize(
    ("flags", "loaded", "kept", "noted"),
    [
        (["--total-token", "500"], TreeShape(500, 1, 3), 13, True),
        (["--total-token", "13"], TreeShape(13, 1, 3), 13, False),
        (["--total-token", "1"], TreeShape(1, 1, 3), 1, False),
        # The reference pair's default with a small depth: nobody asked for 60 nodes.
        (["--depth", "1"], TreeShape(60, 1, 3), 13, False),
        (["--chain"], TreeShape(60, 7, 1), 9, False),
        (["--chain"], TreeShape(4, 7, 1), 9, False),
        (["--chain", "--total-token", "4"], TreeShape(4, 7, 1), 4, False),
    ],
)
def test_a_tree_larger_than_its_candidates_is_clipped(capsys, flags, loaded, kept, noted):
    decoder = FakeDecoder()
    decoder.tree = loaded
    evaluate(*flags, "--arms", "exact", decoder=decoder)
    assert decoder.tree.total_token == kept
    assert (f"clipped to {kept}" in capsys.readouterr().err) is noted


def test_answers_of_one_token_have_no_step_and_no_tau(capsys):
    assert evaluate("--acceptor", "naive", "--max-new-tokens", "1") == 0
    flat = " ".join(capsys.readouterr().out.split())
    assert "EAGLE-3 exact - - 0.0%" in flat
    assert "nan" not in flat


def test_a_device_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = cli.Parser("test")
    add_arguments(parser)
    with pytest.raises(UserError, match="--device-map cuda:0: torch sees no CUDA device"):
        job.load_decoder(read_options(parser.parse_args(["--device-map", "cuda:0"])))


def test_the_flags_reach_the_decoder(monkeypatch):
    from eagle_dropmatch import decoder

    seen = {}
    monkeypatch.setattr(
        decoder.SpeculativeDecoder,
        "from_pretrained",
        lambda target, draft, **settings: seen.update(settings, target=target, draft=draft),
    )
    given = "--target t --draft d --depth 5 --top-k 8 --total-token 40 --dtype fp32"
    given += " --device-map cpu --attn-implementation eager --threads 2 --fuse on --compile"
    parser = cli.Parser("test")
    add_arguments(parser)
    threads = torch.get_num_threads()
    try:
        job.load_decoder(read_options(parser.parse_args(given.split())))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == {
        "target": "t",
        "draft": "d",
        "total_token": 40,
        "depth": 5,
        "top_k": 8,
        "dtype": torch.float32,
        "device_map": "cpu",
        "fuse": True,
        "compile": True,
        "draft_lm": None,
        "draft_ngram": None,
        "tree_budget": None,
        "attn_implementation": "eager",
    }


def test_models_that_cannot_be_fetched_are_one_line(monkeypatch):
    from eagle_dropmatch import decoder

    def from_pretrained(*args, **kwargs):
        raise OSError("no-such/model is not a valid model identifier\nlisted on the hub")

    monkeypatch.setattr(decoder.SpeculativeDecoder, "from_pretrained", from_pretrained)
    parser = cli.Parser("test")
    add_arguments(parser)
    with pytest.raises(UserError, match="cannot be loaded: no-such/model is not a valid model"):
        job.load_decoder(read_options(parser.parse_args([])))


@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_are_timed_before_the_first_answer_where_trees_choose_their_size(
    place, capsys, monkeypatch, adaptive
):
    def timed(self, batch, *, say):
        assert batch == 1
        assert not list((place / "runs").rglob("answers-*"))
        say("timing steps")

    monkeypatch.setattr(FakeDecoder, "time_steps", timed, raising=False)

    decoder = FakeDecoder()
    decoder.adaptive = adaptive
    assert evaluate(decoder=decoder) == 0
    out, err = capsys.readouterr()
    assert ("timing steps" in err) is adaptive
    assert ("trees: of a size chosen at each step" in " ".join(out.split())) is adaptive


def test_a_batch_leaves_transformers_arm_out_and_says_what_its_times_are(place, capsys):
    assert evaluate("--batch-size", "3", decoder=FakeDecoder()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "batch 3" in out
    assert "transformers' generate" not in out
    assert "an answer's seconds are its shares of the batch's" in out
    (record, *_) = answers(only_run(place), "exact")
    assert record["choices"][0]["latency"]


def test_coverage_by_the_drafts_vocabulary_is_recorded(place, monkeypatch, capsys):
    decoder = FakeDecoder()
    decoder.target.vocab_size = 60_000
    letters = torch.arange(ord("a") + 10, ord("m") + 10)  # half of what the fake target says
    decoder.drafter = lambda shape: SimpleNamespace(vocabulary=letters)

    def judged(target, prompt, ids, drafted):
        return replace(fake_judge(prompt, ids), covered=int(drafted[list(ids)].sum()))

    monkeypatch.setattr(job, "judge_turn", judged)
    assert evaluate(decoder=decoder) == 0
    assert "the draft's vocabulary holds" in " ".join(capsys.readouterr().out.split())
    (record, *_) = answers(only_run(place), "exact")
    (choice,) = record["choices"]
    wanted = [sum(int(token) in letters.tolist() for token in ids) for ids in choice["output_ids"]]
    assert choice["covered"] == wanted
