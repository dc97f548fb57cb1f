"""The log of a training run: one JSON object a line, and the picture drawn from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from eagle_dropmatch.files import replacing, write_text

LOG = "log.jsonl"
CURVES = "curves.png"


class RunLog:
    """Appends to ``log.jsonl`` from ``step`` on.

    A run that was killed wrote beyond its last checkpoint: what is later than ``step``, and a
    half-written line, is cut off when the log is opened again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG
        if self.path.exists():
            # A run that starts anew evaluates the untrained draft anew.
            kept = [row for row in read_log(folder) if row["step"] <= step] if step else []
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "time": time.time()}) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The log's rows, up to the first line that is not whole; none where there is no log."""
    rows: list[dict[str, Any]] = []
    if not (folder / LOG).exists():
        return rows
    for line in (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def draw_curves(out: Path) -> None:
    """Loss and simulated tau over the run's steps, from its log, as ``curves.png``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_log(out)
    losses = [(r["step"], r["loss"]) for r in rows if "loss" in r]
    taus = [(r["step"], r["tau"]) for r in rows if "tau" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    if losses:
        left.plot(*zip(*losses, strict=True), color="0.2", linewidth=0.8)
    left.set(xlabel="step", ylabel="weighted loss (nats)", title="training loss")
    if taus:
        right.plot(*zip(*taus, strict=True), color="0.2", marker="o", markersize=3)
    right.set(xlabel="step", ylabel="tau", title="simulated tau, chain, held-out answers")
    with replacing(out / CURVES, "wb") as file:
        figure.savefig(file, dpi=130, format="png")
    plt.close(figure)
