"""Folders of depth sweeps read back: their shapes, one figure for all, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from stored_runs import write_run, write_sweep

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.reports.compare import compare


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_sweeps_of_all_shapes_share_one_figure(tmp_path: Path) -> None:
    folders = [
        write_sweep(tmp_path / "fixed", {1: 11, 2: 60, 3: 60}),
        write_sweep(tmp_path / "grown", {1: 9, 2: 17, 3: 25}),
        write_sweep(tmp_path / "line", {1: 2, 2: 3, 3: 4}),
    ]
    compare(folders, tmp_path / "out")
    assert names(tmp_path / "out") == {"depth.png", "depth.pdf", "compare.md", "compare.json"}
    sweeps = json.loads((tmp_path / "out" / "compare.json").read_text())["sweeps"]
    assert [sweep["shape"] for sweep in sweeps] == [
        "tree, 60 nodes",
        "tree, growing by 8 nodes a level",
        "chain",
    ]
    assert [point["levels"] for point in sweeps[1]["curves"]["naive"]] == [1, 2, 3]
    assert (
        "| 2 (1) | 17 | naive | 1.70 [1.60, 1.80] | 0.100 |"
        in (tmp_path / "out" / "compare.md").read_text()
    )


def test_sweeps_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", {1: 2, 2: 3})
    other = write_sweep(tmp_path / "other", {1: 2}, questions=3)
    with pytest.raises(UserError, match="asked different questions"):
        compare([sweep, other], tmp_path / "out")
    write_run(sweep / "levels-02", finished=False)
    with pytest.raises(UserError, match=r"not finished.*--partial"):
        compare([sweep], tmp_path / "out")
    compare([sweep], tmp_path / "out", partial=True)
    assert "unfinished" in (tmp_path / "out" / "compare.md").read_text()
    rows = json.loads((other / "sweep.json").read_text())
    rows[1]["cost"] = None
    (other / "sweep.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match="naive is lossy and has no cost at 1 levels"):
        compare([other], tmp_path / "out")
    (other / "sweep.json").write_text("[]")
    with pytest.raises(UserError, match=r"sweep\.json is not a sweep's"):
        compare([other], tmp_path / "out")
    shutil.rmtree(other / "levels-01")
    with pytest.raises(UserError, match="expected the whole output folder"):
        compare([other], tmp_path / "out")
