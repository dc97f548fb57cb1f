"""The output folder: killed at any point, it neither loses nor doubles a question."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.evals.folder import FORMAT, RunFolder, answer_files, default_folder

ARGUMENTS = {"benchmark": "mt_bench", "seeds": (0, 1), "depth": None}
RESOLVED = {"dtype": "float32"}


def started(path, arguments=ARGUMENTS, resolved=RESOLVED):
    folder = RunFolder(path)
    folder.open(arguments)
    folder.start(arguments, resolved, {"first_prompt": "안녕"}, {"started": 1.0})
    return folder


def test_records_come_back_with_their_text(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 1, "text": "한국어 \u2028 ✓"})
        assert folder.answers("exact") == {1: {"question_id": 1, "text": "한국어 \u2028 ✓"}}
        # Readable as it stands, not escaped.
        assert "한국어" in folder.answers_path("exact").read_text(encoding="utf-8")


def test_a_record_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with started(tmp_path / "run") as folder:
        synced.clear()
        folder.append("exact", {"question_id": 1})
    assert len(synced) == 1


@pytest.mark.parametrize("kept", range(1, 30))
def test_a_half_written_last_line_is_cut_off(tmp_path, kept):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 1, "t": "한"})
        whole = folder.answers_path("exact").read_bytes()
        folder.append("exact", {"question_id": 2, "t": "국"})
        half = folder.answers_path("exact").read_bytes()[: len(whole) + kept]
        folder.answers_path("exact").write_bytes(half)
        complete = half.endswith(b"\n")
        assert list(folder.answers("exact")) == ([1, 2] if complete else [1])
        folder.append("exact", {"question_id": 3})
        assert list(folder.answers("exact")) == ([1, 2, 3] if complete else [1, 3])


def packed(path):
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_packed_answers_are_read_and_gone_on_with(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 1, "t": "한"})
        packed(folder.answers_path("exact"))
        assert [path.name for path in answer_files(folder.path)] == ["answers-exact.jsonl"]
        assert folder.answers("exact") == {1: {"question_id": 1, "t": "한"}}
        assert not folder.answers_path("exact").exists()
        folder.append("exact", {"question_id": 2})
        assert list(folder.answers("exact")) == [1, 2]
        assert not list(folder.path.glob("*.gz"))


def test_packed_answers_without_a_header_are_refused_and_overwritten_only_when_asked(tmp_path):
    path = tmp_path / "run" / "answers-exact.jsonl"
    path.parent.mkdir()
    path.write_text('{"question_id": 1}\n')
    packed(path)
    with RunFolder(path.parent) as folder, pytest.raises(UserError, match="answers without a run"):
        folder.open({})
    with RunFolder(path.parent) as folder:
        folder.open({}, overwrite=True)
        assert not answer_files(path.parent)


def test_what_cannot_be_unpacked_is_named(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 1})
        path = folder.answers_path("exact")
        whole = gzip.compress(path.read_bytes())
        path.unlink()
        for damaged in (b"text", whole[:-9], whole[:-12] + b"\0" * 12):
            path.with_name(f"{path.name}.gz").write_bytes(damaged)
            with pytest.raises(UserError, match=r"answers-exact.jsonl.gz cannot be unpacked"):
                folder.answers("exact")


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 1})
        path = folder.answers_path("exact")
        path.write_bytes(path.read_bytes() + b"\0\0\0\n")
        with pytest.raises(UserError, match=r"answers-exact.jsonl, line 2: not an answer record"):
            folder.answers("exact")


def test_a_doubled_question_is_named(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 7})
        folder.append("exact", {"question_id": 7})
        with pytest.raises(UserError, match="line 2: question 7 is there twice"):
            folder.answers("exact")


def test_the_same_arguments_go_on_and_the_header_lists_the_sessions(tmp_path):
    started(tmp_path / "run").close()
    folder = RunFolder(tmp_path / "run")
    assert folder.open(ARGUMENTS) is True
    folder.start(ARGUMENTS, RESOLVED, {}, {"started": 2.0})
    folder.close()
    header = RunFolder.read_header(tmp_path / "run")
    assert header is not None
    assert [session["started"] for session in header["sessions"]] == [1.0, 2.0]
    assert header["first_prompt"] == "안녕"


def test_other_arguments_are_refused_with_the_field_that_differs(tmp_path):
    started(tmp_path / "run").close()
    with pytest.raises(UserError, match=r"another depth \(null, now 5\).*--overwrite"):
        RunFolder(tmp_path / "run").open({**ARGUMENTS, "depth": 5})


def test_what_only_the_loaded_models_tell_is_compared_too(tmp_path):
    started(tmp_path / "run").close()
    folder = RunFolder(tmp_path / "run")
    folder.open(ARGUMENTS)
    with pytest.raises(UserError, match='another dtype \\("float32", now "bfloat16"\\)'):
        folder.start(ARGUMENTS, {"dtype": "bfloat16"}, {}, {})
    folder.close()


def test_overwrite_deletes_the_earlier_run_and_nothing_else(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.append("exact", {"question_id": 1})
        folder.write_text("table.md", "old")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with RunFolder(tmp_path / "run") as folder:
        assert folder.open({**ARGUMENTS, "depth": 5}, overwrite=True) is False
        assert folder.answers("exact") == {}
    assert not (tmp_path / "run" / "table.md").exists()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_answers_of_unknown_origin_are_not_mixed_in(tmp_path):
    (tmp_path / "answers-exact.jsonl").write_text('{"question_id": 1}\n')
    with pytest.raises(UserError, match=r"answers without a run\.json"):
        RunFolder(tmp_path).open(ARGUMENTS)


@pytest.mark.parametrize("content", ["{half", "[]", '{"format": 99}'])
def test_a_header_that_cannot_be_read_is_not_overwritten(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match="give another --output-dir"):
        RunFolder(tmp_path).open(ARGUMENTS)
    assert (tmp_path / "run.json").read_text() == content


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be written"):
            RunFolder(path).open(ARGUMENTS)


def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(UserError, match="cannot be written"):
            RunFolder(tmp_path).open(ARGUMENTS)
    finally:
        tmp_path.chmod(0o700)


def test_a_failing_disk_is_refused_as_unwritable(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("eagle_dropmatch.evals.folder.tempfile.TemporaryFile", full)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        RunFolder(tmp_path).open(ARGUMENTS)


def test_two_runs_do_not_share_a_folder(tmp_path):
    pytest.importorskip("fcntl")
    with started(tmp_path / "run"), pytest.raises(UserError, match="another run is writing"):
        RunFolder(tmp_path / "run").open(ARGUMENTS)
    with RunFolder(tmp_path / "run") as later:
        assert later.open(ARGUMENTS) is True


def test_the_header_is_whole_even_if_writing_is_killed(tmp_path, monkeypatch):
    with started(tmp_path / "run") as folder:
        before = (tmp_path / "run" / "run.json").read_bytes()

        def killed(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.finish()
        assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_the_default_folder_goes_on_until_finished_and_then_changes(tmp_path):
    first = default_folder(tmp_path, "mt_bench", ARGUMENTS)
    assert first == default_folder(tmp_path, "mt_bench", dict(reversed(ARGUMENTS.items())))
    assert first != default_folder(tmp_path, "mt_bench", {**ARGUMENTS, "depth": 1})
    with started(first) as folder:
        assert default_folder(tmp_path, "mt_bench", ARGUMENTS) == first
        folder.finish()
    second = default_folder(tmp_path, "mt_bench", ARGUMENTS)
    assert second.name == f"{first.name}-2"
    with started(second) as folder:
        folder.finish()
    assert default_folder(tmp_path, "mt_bench", ARGUMENTS).name == f"{first.name}-3"


def test_the_header_says_when_the_run_was_finished(tmp_path):
    with started(tmp_path / "run") as folder:
        folder.finish()
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["finished"] > 1e9
    assert header["format"] == FORMAT
