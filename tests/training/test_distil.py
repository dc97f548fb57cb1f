"""Distilling a small language model: what is cut out, what it learns, and the whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from training_toys import (
    LAYERS,
    STOP,
    VOCAB,
    save_toy_target,
    toy_examples,
    toy_target,
    write_corpus,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle_dropmatch import cli
from eagle_dropmatch.loading import check_tokenizer
from eagle_dropmatch.training import training_run
from eagle_dropmatch.training.batches import collate
from eagle_dropmatch.training.distil import (
    Distiller,
    cut_model,
    distil_loss,
    spread_layers,
    trained_parameters,
)
from eagle_dropmatch.training.options import TrainOptions
from eagle_dropmatch.training.runlog import read_log

OPTIONS = TrainOptions(
    steps=8,
    positions=512,
    learning_rate=1e-2,
    warmup=1,
    decay_steps=2,
    held_out=4,
    eval_every=4,
    save_every=4,
    eval_steps=3,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return toy_target()


def build(model: Any, out: Any, **changes: Any) -> Distiller:
    out.mkdir(exist_ok=True)
    kept = spread_layers(LAYERS, 2)
    return Distiller(
        cut_model(model, kept),
        kept,
        model,
        FakeTokenizer(),
        toy_examples(30),
        out,
        replace(OPTIONS, **changes),
        stop_ids=(STOP,),
    )


class FakeTokenizer:
    def save_pretrained(self, folder: Any) -> None:
        (folder / "tokenizer.json").write_text("{}")


@given(st.integers(2, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_kept_layers_are_spread_and_have_both_ends(sizes: tuple[int, int]) -> None:
    layers, count = sizes
    kept = spread_layers(layers, count)
    assert len(set(kept)) == count
    assert list(kept) == sorted(kept)
    assert kept[-1] == layers - 1
    if count > 1:
        assert kept[0] == 0
        gaps = [b - a for a, b in pairwise(kept)]
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_model_is_the_target_without_the_other_layers(tied: bool) -> None:
    model = toy_target(tie_word_embeddings=tied)
    small = cut_model(model, (0, 3, 7))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        hidden = model.model.embed_tokens(ids)
        positions = torch.arange(12)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        for layer in (0, 3, 7):
            hidden = model.model.layers[layer](hidden, position_embeddings=rotary)
        wanted = model.lm_head(model.model.norm(hidden))
        torch.testing.assert_close(small(ids).logits, wanted)
    assert small.config.num_hidden_layers == 3
    assert model.config.num_hidden_layers == LAYERS


def test_layers_and_norm_learn_while_embedding_and_head_stay(model: Any) -> None:
    small = cut_model(model, (0, 7))
    trained = {id(p) for p in trained_parameters(small)}
    for name, parameter in small.named_parameters():
        outside = "embed_tokens" in name or "lm_head" in name
        assert (id(parameter) in trained) == (not outside), name
        assert parameter.requires_grad == (not outside)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 9),
    finish=st.sampled_from([None, lambda x: torch.tanh(x / 2) * 2, lambda x: x * 0.5]),
    seed=st.integers(0, 99),
)
def test_the_loss_and_its_gradient_are_the_cross_entropys(
    rows: int, chunk: int, finish: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    head = torch.nn.Linear(6, 11)
    hidden = torch.randn(rows, 6, requires_grad=True)
    taught = torch.randn(rows, 6)
    loss = distil_loss(hidden, taught, head, finish, chunk)
    loss.backward()
    again = hidden.detach().clone().requires_grad_()
    done = finish or (lambda x: x)
    wanted = F.cross_entropy(
        done(head(again)), done(head(taught)).softmax(-1).detach(), reduction="sum"
    )
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(hidden.grad, again.grad)


def test_simulated_tau_is_that_of_chains_drafted_one_by_one(model: Any, tmp_path: Any) -> None:
    run = build(model, tmp_path)
    batch = collate(run.held_out, (STOP,))
    for column in range(1, batch.tokens.shape[1]):
        # Most tokens are what the small model says, so that there are matches of all lengths.
        with torch.no_grad():
            said = run.small(batch.tokens[:, :column]).logits[:, -1].argmax(-1)
        own = (torch.arange(len(said)) + column) % 4 > 0
        batch.tokens[:, column] = torch.where(own, said, batch.tokens[:, column])
    found = run._matched(batch, 3).tolist()
    counted = []
    for row in range(len(batch.tokens)):
        for root in range(batch.tokens.shape[1] - 3):
            if not batch.supervised[row, root : root + 3].all() or root == 0:
                continue
            text = batch.tokens[row, : root + 1]
            agreed = 0
            for ahead in range(1, 4):
                with torch.no_grad():
                    said = run.small(text[None]).logits[0, -1].argmax()
                if said != batch.tokens[row, root + ahead]:
                    break
                agreed += 1
                text = torch.cat([text, said[None]])
            counted.append(agreed)
    assert found == counted
    assert set(counted) == {0, 1, 2, 3}


def test_distilling_teaches(model: Any, tmp_path: Any) -> None:
    run = build(model, tmp_path, steps=40, eval_every=40)
    run.run()
    losses = [row["loss"] for row in read_log(tmp_path) if "loss" in row]
    taus = [row["tau"] for row in read_log(tmp_path) if "tau" in row]
    assert losses[-1] < losses[0]
    assert taus[-1] > taus[0]


def test_a_resumed_run_equals_a_straight_one(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "draw_curves", lambda out: None)
    straight = build(model, tmp_path / "a")
    straight.run()
    first = build(model, tmp_path / "b")
    real = first._loss

    def loss(batch: Any) -> Any:
        if first.step == 6:
            raise KeyboardInterrupt
        return real(batch)

    monkeypatch.setattr(first, "_loss", loss)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = build(model, tmp_path / "b")
    assert second.step == 4
    second.run()
    assert torch.equal(second.optimizer.master, straight.optimizer.master)
    assert (second.step, second.rows) == (straight.step, straight.rows)
    assert second.best_tau == straight.best_tau


@pytest.fixture
def place(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    save_toy_target(tmp_path / "toy-chat")
    write_corpus(tmp_path / "a.jsonl", toy_examples(24))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


RUN = (
    "--target toy-chat --data a.jsonl --output-dir out --layers 2 --held-out 4 --positions 512 "
    "--steps 2 --eval-every 2 --eval-steps 3 --device cpu --dtype float32 --workers 1 --threads 1"
)


def test_a_run_leaves_a_checkpoint_that_drafts_for_the_target(
    load_script: Any, place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("distil_draft_lm")
    assert cli.run_command(script.main, RUN.split()) == 0
    out, err = capsys.readouterr()
    assert "language model of 2 layers for toy-chat, from layers of it" in err
    assert "training-time test" not in err
    assert "python scripts/distil_draft_lm.py --target" in err
    assert "best draft: out/best" in out
    small = AutoModelForCausalLM.from_pretrained("out/last")
    target = AutoModelForCausalLM.from_pretrained("toy-chat")
    assert small.config.num_hidden_layers == 2
    assert torch.equal(small.get_input_embeddings().weight, target.get_input_embeddings().weight)
    assert torch.equal(small.get_output_embeddings().weight, target.get_output_embeddings().weight)
    learnt, given_weight = (m.model.layers[-1].mlp.up_proj.weight for m in (small, target))
    assert not torch.equal(learnt, given_weight)
    given, theirs = (AutoTokenizer.from_pretrained(name) for name in ("out/last", "toy-chat"))
    check_tokenizer("out/last", given, theirs)
    assert small.config.vocab_size == VOCAB
    card = (place / "out/last/README.md").read_text()
    assert "2 of the base model's decoder layers (0, 7)" in card
    assert "base_model: toy-chat" in card
    config = json.loads((place / "out/last/config.json").read_text())
    assert config["training"]["kept_layers"] == [0, 7]
    more = RUN.replace("dir out", "dir more") + " --init-draft out/last"
    assert cli.run_command(script.main, more.split()) == 0
    assert "started from the draft last" in (place / "more/last/README.md").read_text()
    other = more.replace("--layers 2", "--layers 3").replace("dir more", "dir other")
    assert cli.run_command(script.main, other.split()) == 2
    assert "has another number of --layers" in capsys.readouterr().err


def test_more_layers_than_the_target_has_are_refused(
    load_script: Any, place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("distil_draft_lm")
    given = RUN.replace("--layers 2", "--layers 8").split()
    assert cli.run_command(script.main, given) == 2
    assert "--layers 8: the target has 8; keep 1 to 7 of them" in capsys.readouterr().err
