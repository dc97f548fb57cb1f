"""Order, history, warm-up and resumption of a run."""

from __future__ import annotations

import json

import pytest
from eval_fakes import (
    CharTokenizer,
    FakeArm,
    SilentProgress,
    answer_ids,
    fake_judge,
    make_questions,
    spec,
)

from eagle_dropmatch.evals.chat import ChatSettings, render
from eagle_dropmatch.evals.folder import RunFolder
from eagle_dropmatch.evals.mtbench import MTBench
from eagle_dropmatch.evals.records import read_record
from eagle_dropmatch.evals.runner import RunSettings, rotated, run, stored_results, turn_seed
from eagle_dropmatch.evals.summary import summarise

ARGUMENTS = {"benchmark": "mt_bench"}
NAMES = ("plain", "exact", "naive")


def settings(**changes):
    return RunSettings(max_new_tokens=32, model_id="fake", **{"warmup": 0, **changes})


def arms_of(names=NAMES, **changes):
    log: list[str] = []
    arms = [FakeArm(spec(name), step=3, **changes) for name in names]
    for arm in arms:
        arm.log = log
    return arms, log


def go(path, arms, questions, run_settings=None, progress=None):
    with RunFolder(path) as folder:
        folder.open(ARGUMENTS)
        folder.start(ARGUMENTS, {}, {}, {})
        return run(
            MTBench(),
            questions,
            arms,
            CharTokenizer(),
            run_settings or settings(),
            folder,
            progress or SilentProgress(),
            fake_judge,
        )


def lines(path, arm):
    text = (path / f"answers-{arm}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_the_first_arm_rotates_with_the_question(tmp_path):
    arms, log = arms_of()
    go(tmp_path, arms, make_questions(3))
    assert log[::2] == [
        *("plain", "exact", "naive"),
        *("exact", "naive", "plain"),
        *("naive", "plain", "exact"),
    ]


def test_each_arms_history_is_its_own_answer(tmp_path):
    plain, naive = FakeArm(spec("plain")), FakeArm(spec("naive"), suffix="xyz")
    (question,) = make_questions(1)
    go(tmp_path, [plain, naive], [question])
    assert plain.prompts[0] == naive.prompts[0]
    assert plain.prompts[1] != naive.prompts[1]
    first = CharTokenizer().decode(answer_ids(plain.prompts[0], 32)) + "xyz"
    messages = MTBench().prompt(question, 1, [first])
    assert naive.prompts[1] == render(CharTokenizer(), messages, ChatSettings()).ids


def test_reasoning_is_recorded_but_not_in_the_next_prompt(tmp_path):
    arm = FakeArm(spec("plain"), suffix="<think>no</think>yes")
    go(tmp_path, [arm], make_questions(1))
    (record,) = lines(tmp_path, "plain")
    assert "<think>no</think>yes" in record["choices"][0]["turns"][0]
    second = CharTokenizer().decode(arm.prompts[1])
    assert "yes" in second
    assert "think" not in second


def test_seeds_belong_to_question_and_turn():
    first, second = make_questions(2)
    seeds = [turn_seed(q, t) for q in (first, second) for t in (0, 1)]
    assert len(set(seeds)) == 4
    assert seeds == [turn_seed(q, t) for q in (first, second) for t in (0, 1)]


def test_warm_up_asks_every_arm_and_enters_neither_records_nor_times(tmp_path):
    arms, log = arms_of()
    progress = SilentProgress()
    results = go(tmp_path, arms, make_questions(1), settings(warmup=2), progress)
    assert progress.warmed == list(NAMES)
    assert log[:6] == ["plain", "plain", "exact", "exact", "naive", "naive"]
    for name in NAMES:
        assert len(lines(tmp_path, name)) == 1
        result = results[name][100]
        assert result.wall_seconds == pytest.approx(0.01 * result.output_tokens)


class ColdArm(FakeArm):
    """The first call of a process takes two seconds more."""

    def answer(self, prompt_ids, **kwargs):
        cold = not self.log
        turn = super().answer(prompt_ids, **kwargs)
        return turn._replace(wall_seconds=turn.wall_seconds + 2.0) if cold else turn


def test_a_cold_first_call_does_not_change_the_speed(tmp_path):
    warm = go(tmp_path / "a", [FakeArm(spec("plain"))], make_questions(2), settings(warmup=1))
    cold = go(tmp_path / "b", [ColdArm(spec("plain"))], make_questions(2), settings(warmup=1))
    assert cold["plain"] == warm["plain"]


def test_two_identical_arms_have_a_speed_up_of_exactly_one(tmp_path):
    specs = [spec("plain"), spec("exact")]
    results = go(tmp_path, [FakeArm(s) for s in specs], make_questions(4))
    row = summarise(specs, results).rows[1]
    assert row.speedup["plain"].value == 1.0
    assert row.speedup["plain"].interval == (1.0, 1.0)
    assert row.wall_ratio["plain"].value == 1.0


def test_the_record_has_the_fields_of_all_three_answer_files(tmp_path):
    go(tmp_path, [FakeArm(spec("naive", lossy=True, seed=4), step=3)], make_questions(1))
    (record,) = lines(tmp_path, "naive")
    assert record["question_id"] == 100
    assert record["model_id"] == "fake"
    assert record["acceptance"] == "naive"
    assert record["lossy"] is True
    assert {"category", "answer_id", "tstamp"} <= set(record)
    (choice,) = record["choices"]
    steps = choice["decoding_steps"]
    assert [idx + 1 for idx in choice["idxs"]] == steps
    assert [n + 1 for n in choice["new_tokens"]] == choice["output_tokens"]
    assert [len(ids) for ids in choice["output_ids"]] == choice["output_tokens"]
    for per_step in ("accept_lengths", "strict_accept_lengths", "relaxed_tokens", "draft_nodes"):
        assert len(choice[per_step]) == sum(steps)
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    assert sum(choice["acceptance_histogram"]) == sum(steps)
    assert choice["seed"] == 4
    assert choice["finish_reason"] == ["stop", "stop"]
    for per_turn in ("turns", "wall_time", "prompt_tokens", "prefill_time", "decode_time"):
        assert len(choice[per_turn]) == 2


def test_a_record_read_back_is_what_was_measured(tmp_path):
    results = go(tmp_path, [FakeArm(spec("exact"), step=3)], make_questions(2))
    again = {r["question_id"]: read_record(r) for r in lines(tmp_path, "exact")}
    assert again == results["exact"]


def test_repeats_record_medians_and_alternate(tmp_path):
    arms, log = arms_of(("plain", "exact"))
    arms[0].seconds = 0.02
    results = go(tmp_path, arms, make_questions(1), settings(repeats=3))
    assert log[::2] == ["plain", "exact", "exact", "plain", "plain", "exact"]
    (record,) = lines(tmp_path, "plain")
    assert [choice["index"] for choice in record["choices"]] == [0, 1, 2]
    result = results["plain"][100]
    assert result.wall_seconds == pytest.approx(0.02 * result.output_tokens)
    assert len(result.repeats_wall_seconds) == 3


def test_rotation_of_nothing_is_nothing():
    assert rotated([], 3) == []


ANSWERS = 3 * 3 * 2  # questions x arms x turns


@pytest.mark.parametrize("kill_at", range(ANSWERS))
def test_a_run_killed_anywhere_ends_like_one_that_was_not(tmp_path, kill_at):
    questions = make_questions(3)
    whole = go(tmp_path / "whole", arms_of()[0], questions)

    path = tmp_path / "killed"
    arms, log = arms_of(kill_after=kill_at)
    with pytest.raises(KeyboardInterrupt):
        go(path, arms, questions)
    assert len(log) == kill_at
    resumed, log = arms_of()
    assert go(path, resumed, questions) == whole
    # An interrupted question is asked again from its first turn, everything else once.
    assert len(log) == ANSWERS - kill_at + kill_at % 2
    for name in NAMES:
        assert sorted(r["question_id"] for r in lines(path, name)) == [100, 101, 102]


@pytest.mark.parametrize("arm", NAMES)
@pytest.mark.parametrize("line", range(3))
@pytest.mark.parametrize("half", [False, True])
def test_files_cut_at_any_line_or_in_it_are_completed(tmp_path, arm, line, half):
    questions = make_questions(3)
    whole = go(tmp_path, arms_of()[0], questions)
    path = tmp_path / f"answers-{arm}.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(rows[:line]) + (rows[line][: len(rows[line]) // 2] if half else b"")
    path.write_bytes(kept)
    arms, log = arms_of()
    assert go(tmp_path, arms, questions) == whole
    assert log == [arm, arm] * (3 - line)


def test_a_finished_run_asks_nothing_and_does_not_warm_up(tmp_path):
    questions = make_questions(2)
    go(tmp_path, arms_of()[0], questions)
    arms, log = arms_of()
    progress = SilentProgress()
    go(tmp_path, arms, questions, settings(warmup=3), progress)
    assert log == []
    assert progress.warmed == []


def test_stored_results_of_an_arm_that_never_ran_are_empty(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.open(ARGUMENTS)
        assert stored_results(folder, ["exact"]) == {"exact": {}}


def test_in_a_batch_each_conversation_is_the_one_it_is_alone(tmp_path):
    questions = make_questions(7)
    alone = go(tmp_path / "a", arms_of()[0], questions)
    arms, _ = arms_of()
    together = go(tmp_path / "b", arms, questions, settings(batch_size=3))
    for name in NAMES:
        assert set(together[name]) == set(alone[name])
        for qid, result in alone[name].items():
            # Two turns each, in their order, with their own history.
            assert together[name][qid].output_ids == result.output_ids
            assert together[name][qid].latencies == pytest.approx(
                [0.02 * len(ids) for ids in result.output_ids]
            )
            assert result.latencies == ()
    assert all(arm.queues == [3] for arm in arms)


def test_batches_of_a_block_go_to_one_arm_after_the_other(tmp_path):
    arms, log = arms_of()
    go(tmp_path, arms, make_questions(9), settings(batch_size=2))
    first = ["plain"] * 16 + ["exact"] * 16 + ["naive"] * 16
    assert log == [*first, "exact", "exact", "naive", "naive", "plain", "plain"]


def test_a_killed_batch_keeps_what_had_ended_and_goes_on_with_the_rest(tmp_path):
    questions = make_questions(6)
    arms, _ = arms_of()
    arms[1].kill_after = 12 + 7  # answers of all arms so far
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, arms, questions, settings(batch_size=4))
    assert 0 < len(lines(tmp_path, "exact")) < 6
    again, log = arms_of()
    results = go(tmp_path, again, questions, settings(batch_size=4))
    assert all(len(results[name]) == 6 for name in NAMES)
    assert "plain" not in log
    for name in NAMES:
        ids = [line["question_id"] for line in lines(tmp_path, name)]
        assert sorted(ids) == [question.question_id for question in questions]


def test_a_batch_is_warmed_up_as_a_batch(tmp_path):
    arms, log = arms_of(("plain",))
    go(tmp_path, arms, make_questions(5), settings(batch_size=3, warmup=1))
    assert arms[0].queues == [3, 3]
    assert len(log) == 3 + 10
