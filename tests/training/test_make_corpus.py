"""scripts/make_corpus.py: whole runs, killed runs, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from training_toys import STOP, save_toy_target, toy_tokenizer

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training import corpus_job
from eagle_dropmatch.training.corpus import read_examples
from eagle_dropmatch.training.corpus_file import CorpusFile


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("make_corpus")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_toy_target(tmp_path_factory.mktemp("models") / "toy-chat")


QUESTIONS = [{"question_id": i, "turns": [f"What is {i}?", f"And {i} + 1?"]} for i in range(9)]


@pytest.fixture
def place(tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE_DROPMATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "toy-chat").symlink_to(checkpoint)
    lines = "".join(json.dumps(q) + "\n" for q in QUESTIONS)
    (tmp_path / "q.jsonl").write_text(lines)
    (tmp_path / "bad.jsonl").write_text(lines + "{half\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


RUN = (
    "--target toy-chat --prompts q.jsonl --output c.jsonl --batch 2 --max-new-tokens 12 "
    "--max-prompt-tokens 300"
)


def run(script, arguments=RUN):
    return cli.run_command(script.main, arguments.split())


def by_id(path):
    examples = list(read_examples(path))
    found = {example.id: example for example in examples}
    assert len(found) == len(examples), "an example came twice"
    return found


def test_every_prompt_is_answered_once_greedily_and_sampled_in_turns(script, place, capsys):
    assert run(script) == 0
    found = by_id(place / "c.jsonl")
    assert sorted(found) == [str(i) for i in range(9)]
    assert Counter(e.source for e in found.values()) == {"target-greedy": 5, "target-0.7": 4}
    tokenizer = toy_tokenizer()
    for i, example in found.items():
        ((start, end),) = example.spans
        assert tokenizer.decode(example.ids[:start]).endswith(
            f"<|im_start|>user\nWhat is {i}?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert end == len(example.ids)
        assert end - start == 12 or example.ids[-1] == STOP
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "c.jsonl"
    assert "target-greedy: 5 examples" in out
    assert "tokens/s" in err
    meta = json.loads((place / "c.jsonl.meta.json").read_text())
    assert meta["target"] == "toy-chat"
    assert (meta["seed"], meta["temperatures"], meta["max_new_tokens"]) == (0, [0.0, 0.7], 12)


@pytest.mark.parametrize("whole_lines", [0, 1, 3, 8])
def test_a_run_killed_inside_a_line_goes_on_without_losing_or_doubling(
    script, place, capsys, whole_lines
):
    assert run(script) == 0
    wanted = by_id(place / "c.jsonl")
    lines = (place / "c.jsonl").read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:whole_lines])
    (place / "c.jsonl").write_bytes(kept + lines[whole_lines][:25])
    capsys.readouterr()
    assert run(script) == 0
    assert (place / "c.jsonl").read_bytes().startswith(kept)
    # The same answers: each depends on seed and prompt, not on who else was in its batch.
    assert by_id(place / "c.jsonl") == wanted
    assert (f"has {whole_lines} examples; going on" in capsys.readouterr().err) == (whole_lines > 0)


def test_a_finished_run_is_left_as_it_is(script, place):
    assert run(script) == 0
    before = (place / "c.jsonl").read_bytes()
    assert run(script) == 0
    assert (place / "c.jsonl").read_bytes() == before


def test_a_limit_can_be_raised_later(script, place):
    assert run(script, f"{RUN} --limit 4") == 0
    first = by_id(place / "c.jsonl")
    assert len(first) == 4
    assert run(script) == 0
    found = by_id(place / "c.jsonl")
    assert len(found) == 9
    assert {i: found[i] for i in first} == first


def test_second_turns_follow_the_answers_of_the_first(script, place):
    assert run(script) == 0
    first = by_id(place / "c.jsonl")
    # Asked for later, as well as at once: the first turns are not answered again.
    assert run(script, f"{RUN} --turns 2") == 0
    found = by_id(place / "c.jsonl")
    assert {i: found[i] for i in first} == first
    assert sorted(set(found) - set(first)) == [f"{i}#2" for i in range(9)]
    tokenizer = toy_tokenizer()
    for i, example in first.items():
        answer = tokenizer.decode(example.ids[slice(*example.spans[0])], skip_special_tokens=True)
        later = found[f"{i}#2"]
        prompt = tokenizer.decode(later.ids[: later.spans[0][0]])
        assert answer.strip() in prompt
        assert prompt.endswith(f"And {i} + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert {e.source for i, e in found.items() if "#" in i} == {"target-greedy", "target-0.7"}
    lines = (place / "c.jsonl").read_bytes().splitlines(keepends=True)
    (place / "c.jsonl").write_bytes(b"".join(lines[:13]) + lines[13][:30])
    assert run(script, f"{RUN} --turns 2") == 0
    assert by_id(place / "c.jsonl") == found


def test_published_answers_need_no_model(script, place, monkeypatch):
    def load(target, options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(corpus_job, "load_target", load)
    rows = [
        {
            "id": f"s{i}",
            "conversations": [
                {"from": ("human", "gpt")[k % 2], "value": f"text {i} {k}"} for k in range(4)
            ],
        }
        for i in range(3)
    ]
    (place / "s.json").write_text(json.dumps(rows)[:-30])  # cut off, as ShareGPT's is
    asked = "--published --target toy-chat --prompts s.json --output p.jsonl"
    assert run(script, asked) == 0
    found = by_id(place / "p.jsonl")
    assert sorted(found) == ["s0", "s1"]
    tokenizer = toy_tokenizer()
    for i, example in found.items():
        assert example.source == "published"
        assert [tokenizer.decode(example.ids[a:b]) for a, b in example.spans] == [
            f"text {i[1:]} {k}<|im_end|>" for k in (1, 3)
        ]
    data = (place / "p.jsonl").read_bytes()
    (place / "p.jsonl").write_bytes(data[:-10])
    assert run(script, asked) == 0
    assert (place / "p.jsonl").read_bytes() == data


def test_without_output_the_corpus_lies_in_the_cache(script, place, capsys):
    arguments = "--target toy-chat --prompts q.jsonl --limit 2 --max-new-tokens 3"
    assert run(script, arguments) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(str(place / "cache" / "corpus-toy-chat-target-"))
    assert run(script, arguments + " --seed 3") == 0
    assert capsys.readouterr().out.splitlines()[0] != first


def test_a_corpus_belongs_to_its_prompts(script, place, capsys):
    asked = "--target toy-chat --prompts q.jsonl --output c.jsonl --limit 1 --max-new-tokens 3"
    assert run(script, asked) == 0
    kept = (place / "c.jsonl").read_bytes()
    (place / "q.jsonl").write_text((place / "q.jsonl").read_text().replace("?", "!") + "\n\n")
    assert run(script, asked) == 2
    assert "c.jsonl was made with another prompts" in capsys.readouterr().err
    assert (place / "c.jsonl").read_bytes() == kept


BAD = [
    ("--nonsense", "unrecognized arguments: --nonsense"),
    ("--temp 0", "unrecognized arguments: --temp 0"),
    ("--temperature -1", "'-1' is not a temperature from 0 to 10"),
    ("--temperature warm", "'warm' is not a temperature"),
    ("--temperature nan", "'nan' is not a temperature"),
    ("--temperature 0 0.7 0", "--temperature 0 0.7 0: the same temperature twice"),
    ("--limit 0", "'0' is neither a number of at least 1 nor all"),
    ("--batch 0", "argument --batch: '0' is not an integer of at least 1"),
    ("--max-new-tokens 0", "argument --max-new-tokens: '0' is not"),
    ("--max-prompt-tokens x", "argument --max-prompt-tokens: 'x' is not"),
    ("--seed -1", "argument --seed: '-1' is not"),
    ("--threads 0", "argument --threads: '0' is not"),
    ("--turns 3", "argument --turns: invalid choice: 3"),
    ("--published --turns 2", "--turns: --published keeps all turns"),
    ("--dtype int8", "argument --dtype: invalid choice"),
    ("--prompts none.jsonl", "prompt file none.jsonl does not exist"),
    ("--prompts empty", "prompt file empty does not exist"),
    ("--prompts file", "file holds no conversation"),
    ("--prompts bad.jsonl", "bad.jsonl, line 10: not valid JSON"),
    ("--target none/", "--target none/: no such folder"),
    ("--target empty", "--target empty is no checkpoint: it has no config.json"),
    ("--target file", "--target file is a file"),
    ("--output file/below", "the corpus file/below cannot be written"),
    ("--output empty", "the corpus empty cannot be written"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_a_model_is_loaded(
    script, place, monkeypatch, capsys, arguments, told
):
    def load(target, options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(corpus_job, "load_target", load)
    for flag, value in (("--prompts", "q.jsonl"), ("--target", "toy-chat")):
        if flag not in arguments:
            arguments += f" {flag} {value}"
    assert run(script, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_good_input_does_reach_the_model(script, place, monkeypatch):
    """The table above would pass as well if nothing ever reached it."""

    def load(target, options):
        raise LookupError("the model is loaded now")

    monkeypatch.setattr(corpus_job, "load_target", load)
    with pytest.raises(LookupError, match="loaded now"):
        run(script)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("--seed 1", "another seed 0, not 1;"),
        ("--temperature 0", "another temperatures [0.0, 0.7], not [0.0];"),
        ("--max-new-tokens 5", "another max_new_tokens 12, not 5;"),
        ("--published", "another answers 'target', not 'published'"),
    ],
)
def test_a_corpus_is_not_continued_with_another_what_made_it(script, place, capsys, change, told):
    assert run(script, f"{RUN} --limit 1") == 0
    before = (place / "c.jsonl").read_bytes()
    capsys.readouterr()
    assert run(script, f"{RUN} {change}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert (place / "c.jsonl").read_bytes() == before


def test_another_template_or_target_is_told_too(script, place, capsys):
    assert run(script, f"{RUN} --limit 1") == 0
    copy = place / "other"
    copy.mkdir()
    for file in (place / "toy-chat").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    capsys.readouterr()
    assert run(script, RUN.replace("toy-chat", "other")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "target 'toy-chat', not 'other', template " in line


def test_a_corpus_nobody_knows_the_making_of_is_not_continued(script, place, capsys):
    assert run(script, f"{RUN} --limit 1") == 0
    (place / "c.jsonl.meta.json").unlink()
    capsys.readouterr()
    assert run(script) == 2
    assert "without a readable c.jsonl.meta.json" in capsys.readouterr().err


def test_no_prompt_short_enough_is_told(script, place, capsys):
    assert run(script, f"{RUN} --max-prompt-tokens 5") == 2
    assert "none of 9 conversations gave an example" in capsys.readouterr().err


def test_two_writers_at_once_are_refused(tmp_path):
    path = tmp_path / "c.jsonl"
    with (
        CorpusFile(path),
        pytest.raises(UserError, match="another run is writing"),
        CorpusFile(path),
    ):
        pass
    with CorpusFile(path) as corpus:
        corpus.open({"seed": 1})


def test_the_script_itself_exits_with_2_and_imports_no_torch(repository, place):
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import make_corpus; "
        "from eagle_dropmatch import cli; "
        "code = cli.run_command(make_corpus.main, ['--prompts', 'none.jsonl']); "
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
    assert done.stderr == "error: prompt file none.jsonl does not exist\n"
