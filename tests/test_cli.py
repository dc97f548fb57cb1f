"""Scripts: what is refused, how, and before what."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals import job
from eagle_dropmatch.evals.arguments import add_arguments
from eagle_dropmatch.evals.options import read_options

QUESTION = {"question_id": 81, "category": "writing", "turns": ["a", "b"]}


@pytest.fixture
def script(load_script):
    return load_script("eval_mtbench")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with everything that the bad arguments below point to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTION) + "\n")
    (tmp_path / "bad.jsonl").write_text(json.dumps(QUESTION) + "\n{half\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, width in (("target", 576), ("draft", 576), ("other_draft", 4096)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": width}))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    return tmp_path


PAIR = "--target target --draft draft"
BAD = [
    ("--trees 24/5", "argument --trees: '24/5' is neither total-token/depth/top-k"),
    ("--trees auto auto", "--trees: the same tree twice"),
    ("--trees 24/5/6 --tree-budget auto", "goes without --tree-budget"),
    ("--tree-budget large", "argument --tree-budget: invalid choice"),
    ("--batch-size 0", "argument --batch-size: '0' is not an integer of at least 1"),
    ("--batch-size 4 --arms plain hf", "--batch-size 4: hf of --arms answer one prompt at a time"),
    ("--compile --fuse off", "--compile goes with exchanged modules"),
    ("--draft-ngram 0", "argument --draft-ngram: '0' is not an integer of at least 1"),
    ("--draft-ngram 3 --draft-lm target", "--draft-lm, --draft-ngram: each is a draft"),
    (f"{PAIR} --draft-ngram 3", "--draft-ngram, --draft: each is a draft"),
    ("--draft-lm empty", "--draft-lm empty is no checkpoint: it has no config.json"),
    ("--arms plain assisted", "--arms assisted: transformers' assisted decoding needs --draft-lm"),
    ("--fuse maybe", "argument --fuse: invalid choice"),
    ("--trees 0/5/6", "argument --trees: '0/5/6': total-token and top-k are at least 1"),
    ("--trees 24/5/6 24/5/6", "--trees: the same tree twice"),
    ("--trees 24/5/6 --depth 3", "under exact acceptance and goes without --depth"),
    ("--trees 24/5/6 --acceptor naive", "goes without --acceptor naive"),
    ("--acceptor magic", "unknown acceptor 'magic': expected one of exact, sampling, naive,"),
    ("--acceptor naive --p-drop 1.5", "argument --p-drop: '1.5' is neither a number in [0, 1)"),
    ("--acceptor naive --p-drop 1", "argument --p-drop: '1' is neither"),
    ("--acceptor naive --p-drop -0.1", "argument --p-drop: '-0.1' is neither"),
    ("--acceptor naive --p-drop nan", "argument --p-drop: 'nan' is neither"),
    ("--acceptor naive --p-drop lots", "argument --p-drop: 'lots' is neither"),
    ("--acceptor naive --heads 0", "argument --heads: '0' is not an integer of at least 1"),
    ("--acceptor naive --mask token", "argument --mask: invalid choice"),
    ("--acceptor naive --head-agreement 1.2", "'1.2' is not a number in (0, 1]"),
    ("--acceptor naive --head-agreement .9 --p-drop .1", "give one of them"),
    ("--acceptor naive --seeds 1 1", "the same seed twice"),
    ("--acceptor naive --arms exact", "--arms leaves out naive"),
    ("--heads 5", "--heads: the exact acceptor has no such option; add --acceptor naive"),
    ("--include-clean --seeds 3", "--include-clean, --seeds: the exact acceptor"),
    (
        "--arms plain fast",
        "--arms fast: with --acceptor exact there are plain, hf, lookup,",
    ),
    ("--depth -1", "argument --depth: '-1' is not an integer of at least 0"),
    ("--depth deep", "argument --depth: 'deep' is not an integer"),
    ("--total-token 0", "'0' is not an integer of at least 1 (it counts the root)"),
    ("--top-k 0", "argument --top-k: '0' is not an integer of at least 1"),
    ("--chain --top-k 4", "--chain drafts with top-k 1"),
    ("--chain --tree", "not allowed with argument"),
    ("--temperature -1", "'-1' is not a temperature: expected 0 or more"),
    ("--temperature inf", "'inf' is not a temperature"),
    ("--sampling-top-p 0.9", "--sampling-top-p without --temperature"),
    ("--sampling-top-k 5", "--sampling-top-k without --temperature"),
    ("--temperature 1 --sampling-top-p 0", "'0' is not a number in (0, 1]"),
    ("--acceptor naive naive", "--acceptor naive naive: the same rule twice"),
    ("--acceptor margin(kappa=-1)", "kappa is -1: expected a number in [0, inf]"),
    ("--acceptor margin(kapa=1)", "acceptor 'margin' has no option kapa: it takes kappa"),
    ("--acceptor margin --heads 3", "--heads: no rule of --acceptor margin takes that as a flag"),
    ("--limit 0", "argument --limit: '0' is neither a number of at least 1 nor all"),
    ("--limit some", "argument --limit: 'some' is neither"),
    ("--question-begin 5 --question-end 5", "--question-begin 5 is not below --question-end 5"),
    ("--question-end 0", "--question-begin 0 is not below --question-end 0"),
    ("--question-begin 7 --questions q.jsonl", "no question is left: 1 questions"),
    ("--questions none.jsonl", "question file none.jsonl does not exist"),
    ("--questions bad.jsonl", "bad.jsonl, line 2: not valid JSON"),
    ("--max-new-tokens 0", "'0' is not an integer of at least 1"),
    ("--repeats 0", "'0' is not an integer of at least 1"),
    ("--warmup -1", "'-1' is not an integer of at least 0"),
    ("--threads 0", "'0' is not an integer of at least 1"),
    ("--dtype int8", "argument --dtype: invalid choice"),
    ("--attn-implementation flash_attention_2", "verification needs a tree mask"),
    ("--target target", "--target without --draft: a draft serves the one target"),
    ("--draft draft", "--draft without --target: a draft serves the one target"),
    ("--target none/ --draft draft", "--target none/: no such folder"),
    ("--target empty --draft draft", "--target empty is no checkpoint: it has no config.json"),
    ("--target target --draft file", "--draft file is a file"),
    ("--target target --draft other_draft", "has 576: give the draft of this target"),
    ("--output-dir file", "output folder file cannot be written"),
    ("--output-dir file/below", "output folder file/below cannot be written"),
    ("--overwrite", "--overwrite needs the --output-dir"),
    ("--total 60", "unrecognized arguments: --total 60"),
    ("--nonsense", "unrecognized arguments: --nonsense"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_a_model_is_loaded(
    script, place, monkeypatch, capsys, arguments, told
):
    def load(options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(job, "load_decoder", load)
    given = arguments.split()
    if "--questions" not in given:
        given += ["--questions", "q.jsonl"]
    assert cli.run_command(script.main, given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert not (place / "runs").exists()


def test_good_input_does_reach_the_models(script, place, monkeypatch):
    """The table above would pass as well if nothing ever reached them."""

    def load(options):
        raise LookupError("the models are loaded now")

    monkeypatch.setattr(job, "load_decoder", load)
    with pytest.raises(LookupError, match="loaded now"):
        cli.run_command(script.main, [*PAIR.split(), "--questions", "q.jsonl"])


@pytest.mark.parametrize(
    "arguments",
    ["--p-drop 2", "--questions none.jsonl", f"{PAIR} --questions bad.jsonl", "--acceptor magic"],
)
def test_the_script_itself_exits_with_2_and_one_line(repository, place, arguments):
    done = subprocess.run(
        [sys.executable, repository / "scripts" / "eval_mtbench.py", *arguments.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_number_is_refused_without_importing_torch(repository):
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import eval_mtbench; "
        "from eagle_dropmatch import cli; "
        "code = cli.run_command(eval_mtbench.main, ['--depth', '-1']); "
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr


def options(*arguments):
    parser = cli.Parser("test")
    add_arguments(parser)
    return read_options(parser.parse_args(arguments))


def test_eagles_and_transformers_names_are_the_same_flags():
    eagle = options(
        *("--base-model-path", "t", "--ea-model-path", "d", "--total-token", "60"),
        *("--depth", "7", "--top-k", "10", "--max-new-token", "128", "--temperature", "0.0"),
        *("--question-begin", "2", "--question-end", "9"),
    )
    ours = options(
        *("--target", "t", "--draft", "d", "--total-token", "60", "--depth", "7", "--top-k", "10"),
        *("--max-new-tokens", "128", "--question-begin", "2", "--question-end", "9"),
    )
    assert eagle == ours
    assert (ours.target, ours.draft, ours.total_token, ours.depth) == ("t", "d", 60, 7)


def test_a_flag_left_out_is_left_to_the_rules_own_default():
    assert options("--acceptor", "naive").acceptor_options == {}
    given = options(
        *("--acceptor", "naive", "--heads", "3", "--p-drop", "auto", "--head-agreement", "0.8"),
        *("--include-clean", "--mask", "step"),
    )
    assert given.acceptor_options == {
        "K": 3,
        "p_drop": "auto",
        "head_agreement": 0.8,
        "include_clean": True,
        "mask": "step",
    }


def test_a_run_without_limit_is_a_sample_and_a_range_is_taken_whole():
    assert options().limit == 10
    assert options("--limit", "all").limit is None
    assert options("--limit", "25").limit == 25
    assert options("--question-begin", "3").limit is None
    assert options("--question-begin", "3", "--limit", "2").limit == 2


def test_exact_always_runs_beside_a_lossy_rule():
    chosen = options("--acceptor", "naive", "--arms", "plain", "naive")
    assert chosen.arms == ("plain", "exact", "naive")
    assert "exact" in chosen.notes[0]
    assert options("--acceptor", "naive").arms == ("plain", "hf", "exact", "naive")
    assert options("--arms", "exact", "plain").arms == ("plain", "exact")
    several = options("--acceptor", "naive", "top_k(k=3)", "--arms", "naive", "top_k(k=3)")
    assert several.arms == ("exact", "naive", "top_k(k=3)")
    assert "naive, top_k(k=3)" in several.notes[0]
    assert options().notes == ()


def test_one_seed_or_several():
    assert options("--acceptor", "naive").seeds == ()  # the rule's own
    assert options("--acceptor", "naive", "--seed", "4").seeds == (4,)
    assert options("--acceptor", "naive", "--seeds", "0", "1", "2").seeds == (0, 1, 2)


def test_dtypes_have_the_names_people_use():
    assert options("--dtype", "bf16").dtype == "bfloat16"
    assert options("--dtype", "float32").dtype == "float32"


def test_an_interrupt_outside_a_run_exits_with_130(capsys):
    def main(argv):
        raise KeyboardInterrupt

    assert cli.run_command(main, []) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_an_error_message_never_becomes_two_lines(capsys):
    def main(argv):
        raise UserError("first\n  second")

    assert cli.run_command(main, []) == 2
    assert capsys.readouterr().err == "error: first second\n"


def test_a_bug_is_not_dressed_up_as_a_users_mistake():
    def main(argv):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        cli.run_command(main, [])


def test_help_names_units_and_eagles_meanings(script, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(script.main, ["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the root (the last committed token) is one of them" in text
    assert "D + 1 levels of draft tokens" in text
    assert "spread evenly over the set" in text
