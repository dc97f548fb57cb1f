"""What is seen while a run goes on."""

from __future__ import annotations

import io

from eval_fakes import EOS, make_row

from eagle_dropmatch.evals.progress import RunProgress
from eagle_dropmatch.evals.records import QuestionResult


class Terminal(io.StringIO):
    def isatty(self):
        return True


def answer(step: int, seconds: float) -> QuestionResult:
    ids = [*range(50, 62), EOS]
    row = make_row(ids, 5, step)
    return QuestionResult(1, (tuple(ids),), (row,), seconds, None, None, (seconds,), -1.0, ())


def test_live_numbers_are_tau_and_speed_of_each_arm():
    progress = RunProgress(2, ["plain", "exact", "naive"], stream=io.StringIO())
    progress.answered("plain", answer(1, 1.3))
    progress.answered("exact", answer(3, 0.5))
    progress.answered("exact", answer(6, 0.5))
    assert progress.live() == "plain 10/s, exact tau 4.00 26/s"


def test_a_log_file_gets_a_line_now_and_then():
    log = io.StringIO()
    quiet = RunProgress(9, ["exact"], stream=log, interval=1e9)
    quiet.answered("exact", answer(3, 0.5))
    assert log.getvalue() == ""
    chatty = RunProgress(9, ["exact"], stream=log, interval=0.0)
    chatty.answered("exact", answer(3, 0.5))
    chatty.question_done()
    chatty.answered("exact", answer(3, 0.5))
    assert log.getvalue().splitlines() == [
        "question 1/9: exact tau 3.00 26/s",
        "question 2/9: exact tau 3.00 26/s",
    ]


def test_a_terminal_gets_a_bar_over_questions():
    terminal = Terminal()
    progress = RunProgress(2, ["exact"], stream=terminal)
    progress.warming_up("exact")
    progress.answered("exact", answer(3, 0.5))
    progress.question_done()
    progress.close()
    shown = terminal.getvalue()
    assert "warming up exact" in shown
    assert "1/2" in shown
    assert "exact tau 3.00 26/s" in shown
