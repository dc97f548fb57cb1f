"""scripts/train_draft.py: a whole run, what it says, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from training_toys import save_toy_target, toy_examples, write_corpus

from eagle_dropmatch import cli
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training import launch, train_job
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.options import RunSpec, TrainOptions
from eagle_dropmatch.training.runlog import read_log
from eagle_dropmatch.training.train_arguments import add_arguments, read_spec


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("train_draft")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_toy_target(tmp_path_factory.mktemp("models") / "toy-chat")


@pytest.fixture
def place(tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    (tmp_path / "toy-chat").symlink_to(checkpoint)
    write_corpus(tmp_path / "a.jsonl", toy_examples(24))
    write_corpus(tmp_path / "p.jsonl", toy_examples(6, source="published", seed=4))
    write_corpus(tmp_path / "big.jsonl", [Example("x", "s", [1, 5000, 3, 4], [(1, 4)])] * 9)
    (tmp_path / "bad.jsonl").write_text("{half\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, changes in (
        ("shallow", {"num_hidden_layers": 6}),
        ("draft", {}),
        ("wide_draft", {"hidden_size": 4096}),
    ):
        (tmp_path / name).mkdir()
        config = {"hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 8, **changes}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


RUN = (
    "--target toy-chat --data a.jsonl p.jsonl --output-dir out --draft-vocab 200 --held-out 4 "
    "--positions 512 --steps 4 --eval-every 2 --save-every 2 --ttt-steps 2 --eval-steps 3 "
    "--device cpu --dtype float32 --workers 1 --threads 1"
)


def run(script, arguments=RUN):
    return cli.run_command(script.main, arguments.split())


def test_a_run_says_what_it_does_and_where_its_drafts_are(script, place, capsys):
    assert run(script) == 0
    out, err = capsys.readouterr()
    assert "data: published: 6 examples" in err
    assert "data: target-greedy: 24 examples" in err
    assert "4 steps of 512 padded positions, 2 steps of training-time test; 4 answers" in err
    assert "1 x cpu, 1 threads each, float32; into out" in err
    taus = [row["tau"] for row in read_log(place / "out") if "tau" in row]
    assert f"best draft: out/best (simulated tau {max(taus):.3f}, step " in out
    assert f"last draft: out/last (simulated tau {taus[-1]:.3f}, step 4)" in out
    assert "out/log.jsonl" in out
    assert "out/curves.png" in out
    for name in ("best", "last"):
        assert (place / "out" / name / "model.safetensors").is_file()
    card = (place / "out" / "last" / "README.md").read_text()
    assert "base_model: toy-chat" in card
    assert "| published | the conversations' published answers | 6 |" in card
    assert "| target-greedy | answers that the base model wrote greedily | 20 |" in card
    assert f"Simulated tau on the held-out answers: {taus[-1]:.3f}" in card
    assert "4 steps" in card
    assert str(place) not in card
    assert "apache" not in card.lower()  # not ours to say for another target
    assert str(place) not in (place / "out" / "last" / "config.json").read_text()


def test_the_same_command_goes_on_and_a_draft_can_be_trained_further(script, place, capsys):
    assert run(script) == 0
    assert run(script, RUN.replace("--steps 4", "--steps 5")) == 0
    assert torch.load(place / "out/checkpoint.pt", weights_only=True)["step"] == 5
    capsys.readouterr()
    assert run(script, f"{RUN} --seed 3") == 2
    assert "was started with another seed" in capsys.readouterr().err.splitlines()[-1]
    further = RUN.replace("--draft-vocab 200", "--init-draft out/last").replace("dir out", "dir o2")
    assert run(script, further) == 0
    assert "started from the draft last" in (place / "o2/last/README.md").read_text()
    assert json.loads((place / "o2/last/config.json").read_text())["draft_vocab_size"] == 200


def test_a_finished_run_without_its_log_still_says_where_its_drafts_are(tmp_path):
    assert "best" in train_job.result(tmp_path)


def test_jemalloc_is_advised_on_cpus_only_where_it_is_missing(script, place, monkeypatch, capsys):
    monkeypatch.setattr(launch, "train", lambda spec: None)
    monkeypatch.setattr(train_job, "result", lambda out: "")
    assert run(script) == 0
    err = capsys.readouterr().err
    assert "LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=dirty_decay_ms:10000" in err
    assert err.rstrip().endswith(f"python scripts/train_draft.py {RUN}")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert run(script) == 0
    assert "LD_PRELOAD" not in capsys.readouterr().err


BAD = [
    ("--nonsense", "unrecognized arguments: --nonsense"),
    ("--step 3", "unrecognized arguments: --step 3"),
    ("--steps 0", "argument --steps: '0' is not an integer of at least 1"),
    ("--steps many", "argument --steps: 'many' is not"),
    ("--positions 0", "argument --positions: '0' is not"),
    ("--learning-rate 0", "argument --learning-rate: '0' is not a number above 0"),
    ("--learning-rate nan", "'nan' is not a number above 0"),
    ("--learning-rate inf", "'inf' is not a number above 0"),
    ("--clip -1", "argument --clip: '-1' is not a number above 0"),
    ("--warmup -1", "argument --warmup: '-1' is not an integer of at least 0"),
    ("--decay-steps -1", "argument --decay-steps: '-1' is not"),
    ("--ttt-steps 0", "argument --ttt-steps: '0' is not"),
    ("--ttt-decay 0", "argument --ttt-decay: '0' is not a number in (0, 1]"),
    ("--ttt-decay 1.5", "'1.5' is not a number in (0, 1]"),
    ("--held-out 0", "argument --held-out: '0' is not"),
    ("--held-out 40", "the data has 30 examples: more than 40 are needed"),
    ("--eval-every 0", "argument --eval-every: '0' is not"),
    ("--save-every 0", "argument --save-every: '0' is not"),
    ("--eval-steps 0", "argument --eval-steps: '0' is not"),
    ("--attn-implementation flash_attention_2", "flash-attn is not installed; run `pip install"),
    ("--max-length 4", "argument --max-length: '4' is not an integer of at least 8"),
    ("--draft-vocab 0", "argument --draft-vocab: '0' is not"),
    ("--draft-vocab 321", "--draft-vocab 321: the target has only 320 tokens"),
    ("--workers -1", "argument --workers: '-1' is not"),
    ("--threads -1", "argument --threads: '-1' is not"),
    ("--attention-block -1", "argument --attention-block: '-1' is not"),
    ("--seed -1", "argument --seed: '-1' is not"),
    ("--device tpu", "argument --device: invalid choice: 'tpu'"),
    ("--dtype fp16", "argument --dtype: invalid choice: 'fp16'"),
    ("--data none.jsonl", "no corpus at none.jsonl: make one with scripts/make_corpus.py"),
    ("--data a.jsonl none.jsonl", "no corpus at none.jsonl"),
    ("--data file", "the corpus file is empty"),
    ("--data bad.jsonl", "bad.jsonl, line 1: not a corpus line"),
    ("--target none/", "--target none/: no such folder"),
    ("--target empty", "--target empty is no checkpoint: it has no config.json"),
    ("--target shallow", "--target shallow has 6 layers"),
    ("--init-draft none/", "--init-draft none/: no such folder"),
    ("--init-draft empty", "--init-draft empty is no checkpoint"),
    ("--init-draft wide_draft", "with hidden_size 4096, but --target toy-chat has 64"),
    ("--init-draft draft --draft-vocab 10", "whose vocabulary is kept: give one of them"),
    ("--output-dir file", "the output folder file cannot be written"),
    ("--output-dir file/below", "the output folder file/below cannot be written"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_a_model_is_loaded(
    script, place, monkeypatch, capsys, arguments, told
):
    def train(spec):
        raise AssertionError("training began")

    monkeypatch.setattr(launch, "train", train)
    for flag, value in (
        ("--data", "a.jsonl p.jsonl"),
        ("--target", "toy-chat"),
        ("--output-dir", "out"),
    ):
        if flag not in arguments:
            arguments += f" {flag} {value}"
    if "--init-draft" not in arguments and "--draft-vocab" not in arguments:
        arguments += " --draft-vocab 200"
    assert run(script, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("--output-dir out", "required: --data"), ("--data a.jsonl", "required: --output-dir")],
)
def test_data_and_output_folder_must_be_given(script, place, capsys, arguments, told):
    assert run(script, arguments) == 2
    assert told in capsys.readouterr().err


def test_the_reference_target_is_the_default(script, place, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(train_job, "reference_target", lambda: place / "toy-chat")
    monkeypatch.setattr(launch, "train", seen.append)
    monkeypatch.setattr(train_job, "result", lambda out: "")
    assert run(script, RUN.replace("--target toy-chat ", "")) == 0
    (spec,) = seen
    assert spec.target == str(place / "toy-chat")
    assert spec.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "draft for HuggingFaceTB/SmolLM2-135M-Instruct" in capsys.readouterr().err


def test_every_option_of_a_run_has_a_flag_with_the_librarys_default():
    parser = cli.Parser("test")
    add_arguments(parser)
    spec = read_spec(parser.parse_args(["--data", "a", "--output-dir", "o"]))
    assert spec.options == TrainOptions(attention_block=0)  # settled on the device
    assert (spec.draft_vocab, spec.max_length) == (RunSpec.draft_vocab, RunSpec.max_length)
    given = (
        "--target t --base-model b --data x y --output-dir o --init-draft d --max-length 99 "
        "--held-out 3 --steps 5 --positions 77 --learning-rate 0.5 --warmup 6 --decay-steps 7 "
        "--clip 2 --seed 8 --eval-every 9 --save-every 10 --ttt-steps 11 --ttt-start 12 "
        "--ttt-full-at 13 --ttt-decay 0.25 --eval-steps 14 --device cuda --dtype bf16 --workers 2 "
        "--threads 4 --attention-block 15 --attn-implementation sdpa --compile"
    )
    spec = read_spec(parser.parse_args(given.split()))
    assert spec == RunSpec(
        target="t",
        data=("x", "y"),
        out="o",
        options=TrainOptions(
            5, 77, 0.5, 6, 7, 11, 12, 13, 0.25, 2.0, 8, 3, 9, 10, 14, attention_block=15
        ),
        max_length=99,
        init_draft="d",
        workers=2,
        threads=4,
        dtype="bfloat16",
        device="cuda",
        base_model="b",
        attn_implementation="sdpa",
        compile=True,
    )


def test_the_machines_own_values_are_settled(monkeypatch):
    spec = RunSpec("t", ("a",), "o", TrainOptions(attention_block=0), workers=0, threads=0)
    auto = launch.replace(spec, device="auto", dtype="auto")
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "cpu_has_bfloat16", lambda: False)
    found = launch.settle(auto)
    assert (found.device, found.dtype, found.workers, found.threads) == ("cpu", "float32", 6, 1)
    assert found.options.attention_block == 64
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(32)))
    found = launch.settle(auto)
    assert (found.workers, found.threads) == (8, 4)
    assert launch.settle(launch.replace(auto, workers=2)).threads == 16
    with pytest.raises(UserError, match="torch sees no GPU"):
        launch.settle(launch.replace(auto, device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = launch.settle(auto)
    assert (found.device, found.dtype, found.workers) == ("cuda", "bfloat16", 2)
    assert found.options.attention_block == 0
    with pytest.raises(UserError, match="--workers 3 was given for 2 GPUs"):
        launch.settle(launch.replace(auto, workers=3))


def test_a_new_draft_is_taught_by_the_very_target_that_it_will_serve(place):
    """Casting a model to float32 and back rounds its rotary frequencies to bfloat16."""
    spec = RunSpec("toy-chat", ("a.jsonl",), "o", TrainOptions(held_out=2), draft_vocab=100)
    trainer = launch.build_run(spec, launch.Worker())
    rotary = trainer.teacher.model.model.rotary_emb
    assert trainer.teacher.model.dtype == torch.bfloat16
    assert rotary.inv_freq.dtype == torch.float32
    assert trainer.draft.dtype == torch.bfloat16


def test_a_corpus_of_another_tokenizer_is_refused(script, place, capsys):
    assert run(script, RUN.replace("a.jsonl p.jsonl", "big.jsonl")) == 2
    assert "has the token id 5000, but the target's vocabulary has 320" in capsys.readouterr().err


def test_examples_are_cut_into_windows_of_the_maximal_length(place):
    spec = RunSpec("t", ("a.jsonl", "p.jsonl"), "o", TrainOptions(), max_length=22)
    found = launch.load_data(spec)
    whole = launch.load_data(launch.replace(spec, max_length=1000))
    assert max(len(e.ids) for e in found) == 22
    assert len(found) > len(whole) == 30
    taught = [sum(b - a for e in part for a, b in e.spans) for part in (found, whole)]
    assert 0.9 * taught[1] < taught[0] <= taught[1]
    sources = [e.source for e in found]
    assert sources == sorted(sources, key=["target-greedy", "published"].index)


def test_the_script_itself_exits_with_2_and_imports_no_torch(repository, place):
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import train_draft; "
        "from eagle_dropmatch import cli; "
        "code = cli.run_command(train_draft.main, ['--data', 'none', '--output-dir', 'o']); "
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
    assert done.stderr == "error: no corpus at none: make one with scripts/make_corpus.py\n"


@pytest.mark.gpu
def test_a_gpu_trains_as_a_cpu_does_and_goes_on_with_its_run(script, place):
    assert run(script) == 0
    assert run(script, RUN.replace("cpu", "cuda").replace("dir out", "dir gpu")) == 0
    for cpu, gpu in zip(read_log(place / "out"), read_log(place / "gpu"), strict=True):
        for key in {"loss", "grad_norm"} & set(cpu):
            assert gpu[key] == pytest.approx(cpu[key], rel=1e-2)
    assert run(script, RUN.replace("cpu", "cuda").replace("--steps 4", "--steps 6")) == 0
    assert torch.load(place / "out/checkpoint.pt", map_location="cpu")["step"] == 6


# -- several workers -----------------------------------------------------------------------


def spawn_but_one(work, args, nprocs):
    """torch's spawn with rank 0 in this process, which has imported everything already."""
    others = [
        torch.multiprocessing.get_context("spawn").Process(
            target=work, args=(rank, *args), daemon=True
        )
        for rank in range(1, nprocs)
    ]
    for process in others:
        process.start()
    work(0, *args)
    for process in others:
        process.join()
        assert process.exitcode == 0


def test_two_workers_train_as_one_does(place, checkpoint, monkeypatch):
    """Float32 sums in another order are all that may differ."""
    monkeypatch.setattr(launch.mp, "spawn", spawn_but_one)
    options = TrainOptions(
        steps=3, positions=512, warmup=1, held_out=4, ttt_steps=2, eval_steps=3, eval_every=3
    )
    alone = RunSpec(
        str(checkpoint),
        ("a.jsonl",),
        "one",
        options,
        draft_vocab=200,
        dtype="float32",
    )
    together = launch.replace(alone, out="two", workers=2)
    launch.train(alone)
    launch.train(together)
    one, two = (torch.load(f"{out}/checkpoint.pt", weights_only=True) for out in ("one", "two"))
    assert (one["rows"], one["step"]) == (two["rows"], two["step"])
    moved = one["optimizer"]["adam"]["state"][0]["exp_avg"]
    torch.testing.assert_close(
        two["optimizer"]["adam"]["state"][0]["exp_avg"], moved, rtol=1e-3, atol=1e-6
    )
    assert moved.abs().max() > 1e-4
    for first, second in zip(read_log(place / "one"), read_log(place / "two"), strict=True):
        for key in {"loss", "tau", "grad_norm"} & set(first):
            assert first[key] == pytest.approx(second[key], rel=1e-4)


def test_a_mistake_that_a_worker_finds_is_one_line_too(place, monkeypatch):
    def spawn(work, args, nprocs):
        """One worker in this process, failing as torch's own spawn lets workers fail."""
        spec, _, mistakes = args
        try:
            work(0, spec, None, mistakes)
        except Exception:
            raise launch.mp.ProcessRaisedException("a traceback", 0, 1) from None

    monkeypatch.setattr(launch.mp, "spawn", spawn)
    spec = RunSpec("toy-chat", ("big.jsonl",), "o", TrainOptions(), dtype="float32", workers=2)
    with pytest.raises(UserError, match="has the token id 5000"):
        launch.train(spec)
    with pytest.raises(launch.mp.ProcessRaisedException):  # a bug stays one
        launch.train(launch.replace(spec, dtype="no such dtype"))
