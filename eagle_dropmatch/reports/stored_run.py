"""A run's folder read back for figures and texts: nothing in it is changed, no model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..evals.folder import HEADER, answers_path, header_in, read_answers
from ..evals.plan import EXACT, ArmSpec, plan_run
from ..evals.records import QuestionResult, read_record
from ..evals.summary import Pool, Results, Row, Summary, summarise


@dataclass(frozen=True)
class StoredRun:
    """The answers of a run that every arm has given, and their numbers."""

    path: Path
    header: Mapping[str, Any]
    specs: tuple[ArmSpec, ...]
    """The arms with answers, in the table's order."""
    results: Results
    summary: Summary
    unfinished: str
    """What an unfinished run still lacks; empty for a finished one."""

    @property
    def benchmark(self) -> str:
        return str(self.header["arguments"]["benchmark"])

    @property
    def title(self) -> str:
        """Which run a figure shows: benchmark, folder, size and what is missing."""
        count = len(self.summary.question_ids)
        told = f"{self.benchmark}, {self.path.name}: {count} question{'s' * (count != 1)}"
        return f"{told} ({self.unfinished})" if self.unfinished else told

    def name_of(self, row: Row) -> str:
        """What to call a row: the rule, or, where two kinds of drafts stand together, that too."""
        return row.label if any(spec.chain for spec in self.specs) else row.group

    def pool(self, group: str) -> Pool:
        """For every question, the answers of the arms (mask seeds) that a row pools."""
        names = [spec.name for spec in self.specs if spec.group == group]
        return [[self.results[name][qid] for name in names] for qid in self.summary.question_ids]


def read_run(path: Path, *, partial: bool = False) -> StoredRun:
    """The run in ``path``, its numbers worked out again from its records.

    Args:
        partial: take what is complete of a run that has not ended.

    UserError for no folder, no run, an unfinished run without ``partial``, arms with answers to
    different questions, and a lossy rule without a quality measure or exact beside it.
    """
    header = _header(path)
    specs = [spec for spec, _ in plan_run(header["arguments"])]
    records = {spec.name: read_answers(answers_path(path, spec.name))[0] for spec in specs}
    answered = [spec for spec in specs if records[spec.name]]
    wanted = header["arguments"]["question_ids"]
    _require_finished(path, header, records, partial=partial)
    # In the order of the file, as the run's own table has them: resampling depends on the order.
    first = records[answered[0].name] if answered else {}
    shared = [qid for qid in first if all(qid in records[s.name] for s in answered)]
    if not shared:
        raise UserError(
            f"{path}: no question has been answered by every arm, so no two arms can be paired; "
            "let the run go on with the command that began it"
        )
    _require_quality(path, answered, records)
    results = {
        spec.name: {qid: _result(path, records[spec.name][qid]) for qid in shared}
        for spec in answered
    }
    summary = summarise(answered, results, sampled=bool(header["arguments"]["sampling"]))
    unfinished = ""
    if not header["finished"]:
        unfinished = f"unfinished: {len(shared)} of {len(wanted)} questions"
        if len(answered) < len(specs):
            unfinished += f", {len(answered)} of {len(specs)} arms"
    return StoredRun(path, header, tuple(answered), results, summary, unfinished)


def _header(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; expected the output folder of a run")
    header = header_in(path)
    if header is None:
        raise UserError(
            f"{path} holds no {HEADER}, so it is not a run; expected the output folder of "
            "eval_mtbench.py, eval_komtbench.py or compare_rules.py"
        )
    return header


def _result(path: Path, record: Mapping[str, Any]) -> QuestionResult:
    try:
        return read_record(record)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: the record of question {record['question_id']} cannot be read "
            f"({type(error).__name__}: {error}); measure again with --overwrite"
        ) from None


def _require_finished(
    path: Path,
    header: Mapping[str, Any],
    records: Mapping[str, Mapping[Any, Any]],
    *,
    partial: bool,
) -> None:
    wanted = set(header["arguments"]["question_ids"])
    if not header["finished"]:
        if not partial:
            raise UserError(
                f"{path} is not finished; go on with the command that began it, or take what is "
                "complete with --partial"
            )
        return
    for arm, answers in records.items():
        if set(answers) != wanted:
            raise UserError(
                f"{path}: arm {arm} has answers to {len(wanted & set(answers))} of the run's "
                f"{len(wanted)} questions and to {len(set(answers) - wanted)} others: arms with "
                "different questions cannot be paired; measure the run again"
            )


def _require_quality(
    path: Path, specs: Sequence[ArmSpec], records: Mapping[str, Mapping[Any, Any]]
) -> None:
    """A lossy rule's gain is never told without what it costs."""
    groups = {spec.group for spec in specs}
    for spec in specs:
        if spec.lossy and spec.lossless_twin not in groups:
            raise UserError(
                f"{path}: {spec.group} is lossy, and without {spec.lossless_twin} beside it nobody "
                f"can tell what it costs; measure again with --arms {EXACT} ..."
            )
        for qid, record in records[spec.name].items():
            if not all(_measured(choice) for choice in record["choices"]):
                raise UserError(
                    f"{path}: arm {spec.name} has no log_probability for question {qid}, and a "
                    "lossy rule is not drawn without its quality; measure again with this "
                    "version's eval script and --overwrite"
                )


def _measured(choice: Mapping[str, Any]) -> bool:
    values = choice.get("log_probability") or [None]
    return all(value is not None for value in values)
