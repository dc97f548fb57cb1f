"""The training run: resume, checkpoints, held-out answers, what is kept and written."""

from __future__ import annotations

import copy
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from training_toys import DRAFT_VOCAB, HIDDEN, STOP, toy_draft, toy_examples, toy_target

from eagle_dropmatch.drafts.checkpoint import load_draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training import trainer as trainer_module
from eagle_dropmatch.training import training_run
from eagle_dropmatch.training.card import DraftCard
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.options import TrainOptions
from eagle_dropmatch.training.runlog import draw_curves, read_log
from eagle_dropmatch.training.trainer import Trainer
from eagle_dropmatch.training.training_run import choose_held_out

OPTIONS = TrainOptions(
    steps=12,
    positions=512,
    learning_rate=3e-3,
    warmup=3,
    decay_steps=4,
    ttt_steps=3,
    ttt_start=2,
    ttt_full_at=8,
    held_out=4,
    eval_every=6,
    save_every=3,
    eval_steps=3,
)


@pytest.fixture(scope="module")
def model():
    return toy_target()


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Drawing takes longer than everything else here."""
    if "curves" not in request.node.name:
        monkeypatch.setattr(training_run, "draw_curves", lambda out: None)


def build(
    model: Any, out: Any, *, weights: int = 1, examples: Any = None, **changes: Any
) -> Trainer:
    out.mkdir(exist_ok=True)
    return Trainer(
        toy_draft(model, seed=weights),
        model,
        toy_examples(30) if examples is None else examples,
        out,
        replace(OPTIONS, **changes),
        stop_ids=(STOP,),
        card=DraftCard(target="owner/toy", files=("a.jsonl",)),
    )


class Killed(Exception):
    pass


def kill_at(trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until ``step`` steps are done, then die."""
    real = trainer._train_step

    def train_step(group):
        if trainer.step == step:
            raise Killed
        return real(group)

    monkeypatch.setattr(trainer, "_train_step", train_step)
    with pytest.raises(Killed):
        trainer.run()


def timeless(out):
    return [
        {k: v for k, v in row.items() if k not in ("time", "seconds_per_10")}
        for row in read_log(out)
    ]


def same_state(first: Trainer, second: Trainer) -> bool:
    ours, theirs = first.optimizer.state(), second.optimizer.state()
    moments = ("exp_avg", "exp_avg_sq", "step")
    return torch.equal(ours["master"], theirs["master"]) and all(
        torch.equal(ours["adam"]["state"][0][m], theirs["adam"]["state"][0][m]) for m in moments
    )


@pytest.mark.parametrize("killed_at", [6, 8])
def test_a_resumed_run_equals_a_straight_one_bit_for_bit(model, tmp_path, monkeypatch, killed_at):
    straight = build(model, tmp_path / "a")
    straight.run()
    first = build(model, tmp_path / "b")
    kill_at(first, killed_at, monkeypatch)
    second = build(model, tmp_path / "b", weights=2)  # its own weights are replaced
    assert second.step == 6
    second.run()
    assert same_state(straight, second)
    assert (second.step, second.rows) == (straight.step, straight.rows)
    assert second.best_tau == straight.best_tau
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert any(row.get("loss") for row in read_log(tmp_path / "b"))


def test_training_teaches(model, tmp_path):
    trainer = build(model, tmp_path, steps=40, eval_every=40, ttt_full_at=0, learning_rate=1e-2)
    trainer.run()
    losses = [row["loss"] for row in read_log(tmp_path) if "loss" in row]
    assert losses[-1] < 0.95 * losses[0]


def test_a_kill_during_a_save_leaves_the_checkpoint_before(model, tmp_path, monkeypatch):
    trainer = build(model, tmp_path)
    real = torch.save

    def save(state, file):
        if state["step"] == 6:
            file.write(b"half a checkpoint")
            raise Killed
        real(state, file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(Killed):
        trainer.run()
    monkeypatch.setattr(torch, "save", real)
    resumed = build(model, tmp_path)
    assert resumed.step == 3
    assert resumed.run() > 0
    straight = build(model, tmp_path / "straight")
    straight.run()
    assert same_state(straight, resumed)


def test_the_last_step_is_measured_and_saved_whatever_the_intervals(model, tmp_path):
    build(model, tmp_path, steps=5, save_every=100, eval_every=100).run()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 5
    assert [row["step"] for row in read_log(tmp_path) if "tau" in row] == [0, 5]
    assert [row["step"] for row in read_log(tmp_path) if "loss" in row] == [5]


def test_a_finished_run_does_nothing_and_a_raised_limit_goes_on(model, tmp_path):
    build(model, tmp_path, steps=4).run()
    before = (tmp_path / "checkpoint.pt").read_bytes()
    build(model, tmp_path, steps=4).run()
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    longer = build(model, tmp_path, steps=5, eval_every=2, decay_steps=1, attention_block=0)
    longer.run()
    assert longer.step == 5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 1.0}, "another learning_rate:"),
        ({"seed": 5, "positions": 99}, "another positions, seed:"),
        ({"examples": toy_examples(31)}, "another data:"),
        ({"held_out": 5}, "another data, held_out:"),
    ],
)
def test_a_run_is_not_resumed_with_another_what_decides_it(model, tmp_path, changes, told):
    build(model, tmp_path, steps=1).run()
    with pytest.raises(UserError) as raised:
        build(model, tmp_path, **changes)
    assert told in str(raised.value)
    assert "--init-draft" in str(raised.value)


def test_a_run_is_not_resumed_with_another_draft(model, tmp_path):
    build(model, tmp_path, steps=1).run()
    for draft, told in (
        (toy_draft(model, map_seed=9), "draft vocabulary"),
        (toy_draft(model, size=DRAFT_VOCAB - 1), "draft vocabulary, draft shape"),
        (toy_draft(model, intermediate_size=32), "draft shape"),
    ):
        with pytest.raises(UserError, match=f"another {told}:"):
            Trainer(draft, model, toy_examples(30), tmp_path, OPTIONS, stop_ids=())


def test_a_run_is_not_resumed_with_another_target(model, tmp_path):
    build(model, tmp_path, steps=1).run()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.01)
    with pytest.raises(UserError, match="another target:"):
        build(other, tmp_path)


def test_a_checkpoint_from_before_an_option_existed_is_resumed(model, tmp_path):
    build(model, tmp_path, steps=1).run()
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["options"]["clip"] = OPTIONS.clip
    del state["options"]["ttt_decay"]  # as if it were new; the run has its default
    torch.save(state, path)
    assert build(model, tmp_path).step == 1
    with pytest.raises(UserError, match="another ttt_decay:"):
        build(model, tmp_path, ttt_decay=0.5)


def test_the_log_is_cut_back_to_the_checkpoint(model, tmp_path, monkeypatch):
    kill_at(build(model, tmp_path, steps=30, eval_every=10), 11, monkeypatch)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    assert max(row["step"] for row in read_log(tmp_path)) == 10
    build(model, tmp_path, steps=30, eval_every=10)
    assert [row["step"] for row in read_log(tmp_path)] == [0]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 1


def test_a_run_without_a_checkpoint_starts_a_new_log(model, tmp_path, monkeypatch):
    kill_at(build(model, tmp_path), 2, monkeypatch)
    build(model, tmp_path, steps=1).run()
    assert [row["step"] for row in read_log(tmp_path)] == [0, 1, 1]


def test_a_batch_without_supervised_tokens_changes_nothing(model, tmp_path):
    # After truncation an answer may be a stop token alone.
    bare = [Example(f"e{i}", "target-greedy", [5, 6, STOP, 7], [(2, 3)]) for i in range(9)]
    trainer = build(model, tmp_path, examples=bare, steps=2)
    before = trainer.optimizer.master.detach().clone()
    trainer.run()
    assert torch.equal(trainer.optimizer.master, before)
    assert trainer.rows == 0
    assert [row["tau"] for row in read_log(tmp_path) if "tau" in row] == [1.0, 1.0]


def test_a_loss_that_is_no_number_ends_the_run(model, tmp_path):
    trainer = build(model, tmp_path)
    with torch.no_grad():
        trainer.draft.fc.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the loss is nan at step 0"):
        trainer.run()
    assert not (tmp_path / "checkpoint.pt").exists()


# -- held-out answers ----------------------------------------------------------------------


def test_held_out_answers_do_not_depend_on_the_order_of_the_data():
    examples = toy_examples(40) + toy_examples(40, source="published")
    chosen = choose_held_out(examples, 8)
    assert {e.source for e in chosen} == {"target-greedy"}
    for seed in range(3):
        shuffled = list(examples)
        random.Random(seed).shuffle(shuffled)
        assert choose_held_out(shuffled, 8) == chosen
    # Of a corpus that grew, those that still stand first are still held out.
    grown = choose_held_out(examples + toy_examples(8, seed=7), 8)
    assert len({e.id for e in grown} & {e.id for e in chosen}) >= 5


def test_data_without_greedy_answers_holds_out_what_it_has():
    chosen = choose_held_out(toy_examples(10, source="published"), 3)
    assert len(chosen) == 3


def test_no_other_answer_to_a_held_out_prompt_is_trained_on(model, tmp_path):
    greedy = toy_examples(20)
    others = [replace(e, source="published") for e in greedy]
    turns = [replace(e, id=f"{e.id}#2") for e in greedy]
    trainer = build(model, tmp_path, examples=[*greedy, *others, *turns])
    held = {e.id.partition("#")[0] for e in trainer.held_out}
    assert not held & {e.id.partition("#")[0] for e in trainer.examples}
    assert len(trainer.examples) == 3 * (20 - len(held))


def test_too_few_examples_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="4 examples are too few"):
        build(model, tmp_path, examples=toy_examples(4))


# -- what is kept ------------------------------------------------------------------------


def scripted(monkeypatch, taus):
    """Let evaluations find these taus, one after the other."""
    runs = itertools.chain(taus)

    def matched(draft, batch, steps, block):
        return torch.tensor([0] * 100 + [1] * round(100 * next(runs)))

    monkeypatch.setattr(trainer_module, "matched_lengths", matched)


def test_the_draft_with_the_best_tau_is_kept(model, tmp_path, monkeypatch):
    scripted(monkeypatch, [0.5, 2.0, 1.0])
    trainer = build(model, tmp_path, held_out=4)
    assert trainer.run() == pytest.approx(1 + 2 / 3)
    configs = {
        name: json.loads((tmp_path / name / "config.json").read_text())["training"]
        for name in ("best", "last")
    }
    assert (configs["best"]["steps"], configs["last"]["steps"]) == (6, 12)
    assert configs["best"]["simulated_tau"] == pytest.approx(1 + 2 / 3)
    assert configs["last"]["simulated_tau"] == pytest.approx(1.5)
    assert configs["last"]["target"] == "owner/toy"


def test_the_best_tau_survives_a_resume(model, tmp_path, monkeypatch):
    scripted(monkeypatch, [2.0, 1.0])
    kill_at(build(model, tmp_path), 6, monkeypatch)
    scripted(monkeypatch, [1.5])
    assert build(model, tmp_path).run() == pytest.approx(1 + 2 / 3)
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    assert config["training"]["steps"] == 0


def test_the_written_draft_is_the_trained_one(model, tmp_path):
    trainer = build(model, tmp_path, steps=3)
    trainer.run()
    loaded = load_draft(
        tmp_path / "last",
        target_config=model.config,
        target_embedding=model.get_input_embeddings(),
    )
    for name, value in trainer.draft.named_parameters():
        assert torch.equal(value, dict(loaded.named_parameters())[name]), name
    # And what is loaded can be trained on: every weight but the embedding's.
    loaded_trainer = Trainer(
        loaded, model, toy_examples(30), tmp_path / "last", OPTIONS, stop_ids=()
    )
    assert loaded_trainer.optimizer.master.shape == trainer.optimizer.master.shape


def test_neither_the_target_nor_an_embedding_of_the_drafts_own_is_trained(model, tmp_path):
    draft = toy_draft(model, own_embedding=True)
    draft.__dict__.pop("embed_tokens", None)  # not borrowed after all
    before = [p.detach().clone() for p in model.parameters()]
    own = draft.embed_tokens.weight.detach().clone()
    options = replace(OPTIONS, steps=2)
    Trainer(draft, model, toy_examples(30), tmp_path, options, stop_ids=()).run()
    for ours, theirs in zip(before, model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(draft.embed_tokens.weight, own)
    assert draft.embed_tokens.weight.grad is None
    assert draft.config.hidden_size == HIDDEN


# -- log and picture -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "tau": 1.2}],
        [{"step": 10, "loss": 3.0}],
        [{"step": 0, "tau": 1.2}, {"step": 10, "loss": 3.0}, {"step": 10, "tau": 1.4}],
    ],
)
def test_the_curves_are_a_picture(tmp_path, rows):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curves(tmp_path)
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000
    assert [p.name for p in tmp_path.glob("*.part*")] == []


def test_a_run_draws_its_curves(model, tmp_path):
    build(model, tmp_path, steps=1).run()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
