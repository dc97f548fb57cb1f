"""The training run of a draft: data-parallel workers, checkpoints, resume, evaluation, log."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from eagle_dropmatch.drafts.checkpoint import save_draft
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.taps import default_tap_layers
from eagle_dropmatch.training.batches import collate, endless, fingerprint
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.optimizer import FlatAdamW, learning_rate
from eagle_dropmatch.training.teacher import Teacher
from eagle_dropmatch.training.ttt import matched_lengths, ttt_loss


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides a run. What may change on resume: ``steps`` and the intervals."""

    steps: int = 4000
    positions: int = 4096  # padded positions a step, all workers together
    learning_rate: float = 1e-3
    warmup: int = 100
    decay_steps: int = 800
    ttt_steps: int = 5
    ttt_start: int = 3  # steps of training-time test before ``ttt_full_at``
    ttt_full_at: int = 0
    ttt_decay: float = 0.8
    clip: float = 0.5
    seed: int = 0
    held_out: int = 64
    eval_every: int = 400
    save_every: int = 100
    eval_steps: int = 7

    @property
    def fixed(self) -> dict[str, Any]:
        """The part that must be the same when a run is resumed."""
        free = ("steps", "decay_steps", "eval_every", "save_every")
        return {k: v for k, v in asdict(self).items() if k not in free}

    def ttt_steps_at(self, step: int) -> int:
        return self.ttt_steps if step >= self.ttt_full_at else min(self.ttt_start, self.ttt_steps)


@dataclass(frozen=True)
class Worker:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        return items[self.rank :: self.world]


def choose_held_out(examples: Sequence[Example], count: int) -> list[Example]:
    """Greedy answers of the target where the data has any, chosen by a hash of their ids.

    The choice depends on the examples, not on their order, and hardly moves as a corpus grows.
    """
    greedy = [e for e in examples if e.source == "target-greedy"] or list(examples)
    return sorted(greedy, key=lambda e: hashlib.sha256(e.id.encode()).digest())[:count]


class Trainer:
    """Trains ``draft`` against the frozen target; ``run()`` goes from the last checkpoint on."""

    def __init__(
        self,
        draft: Eagle3Draft,
        model: Any,
        examples: Sequence[Example],
        out: Path,
        options: TrainOptions,
        *,
        stop_ids: Sequence[int],
        worker: Worker | None = None,
        card: dict[str, Any] | None = None,
    ) -> None:
        self.worker = worker or Worker()
        self.options, self.out, self.stop_ids = options, out, stop_ids
        self.draft, self.card = draft, card or {}
        self.held_out = choose_held_out(examples, options.held_out)
        held = {id(e) for e in self.held_out}
        self.examples = [e for e in examples if id(e) not in held]
        if not self.examples or not self.held_out:
            raise UserError(
                f"{len(examples)} examples are too few: more than {options.held_out} are needed, "
                "since that many are held out (--held-out)"
            )
        taps = draft.config.tap_layers or default_tap_layers(model.config.num_hidden_layers)
        self.teacher = Teacher(model, taps, draft.d2t)
        trained = [p for n, p in draft.named_parameters() if not n.startswith("embed_tokens")]
        self.optimizer = FlatAdamW(trained, betas=(0.9, 0.95), clip=options.clip)
        self.data = fingerprint(self.examples)
        self.step = 0
        self.rows = 0
        self.best_tau = 0.0
        self._resume()

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> float:
        """Train to ``options.steps``; returns the best simulated tau on held-out answers."""
        options = self.options
        lengths = [len(e.ids) for e in self.examples]
        groups = endless(lengths, options.positions, options.seed, self.step)
        bar = tqdm(
            total=options.steps,
            initial=self.step,
            desc="training",
            unit="step",
            disable=not self.worker.leads,
            dynamic_ncols=True,
        )
        if self.step == 0:
            self.evaluate()
        began = time.perf_counter()
        for group in groups:
            if self.step >= options.steps:
                break
            loss, count, norm, rate = self._train_step(group)
            self.step += 1
            self.rows += int(count)
            bar.update()
            if self.step % 10 == 0 or self.step == options.steps:
                seconds = time.perf_counter() - began
                began = time.perf_counter()
                bar.set_postfix(loss=f"{loss:.3f}", tau=f"{self.best_tau:.3f}")
                self._log({"loss": loss, "grad_norm": norm, "lr": rate, "seconds_per_10": seconds})
            ended = self.step == options.steps
            if self.step % options.eval_every == 0 or ended:
                self.evaluate()
                began = time.perf_counter()
            if self.step % options.save_every == 0 or ended:
                self.save()
        bar.close()
        return self.best_tau

    def _train_step(self, group: Sequence[int]) -> tuple[float, float, float, float]:
        options = self.options
        mine = self.worker.share(group)
        totals = torch.zeros(2)
        if mine:
            batch = self.teacher(collate([self.examples[i] for i in mine], self.stop_ids))
            loss, count = ttt_loss(
                self.draft,
                batch,
                steps=options.ttt_steps_at(self.step),
                decay=options.ttt_decay,
            )
            loss.backward()
            totals = torch.stack((loss.detach(), count)).cpu()
        if dist.is_initialized():
            dist.all_reduce(totals)
        rate = learning_rate(
            self.step,
            peak=options.learning_rate,
            warmup=options.warmup,
            total=options.steps,
            decay_steps=options.decay_steps,
        )
        norm = self.optimizer.step(totals[1], rate)
        return float(totals[0] / totals[1].clamp(min=1)), float(totals[1]), norm, rate

    # -- evaluation, checkpoints, log --------------------------------------------------------

    def evaluate(self) -> float:
        """Simulated tau of chain drafting on held-out answers; exports the draft, and the best."""
        steps = self.options.eval_steps
        run_sum = torch.zeros(steps + 2)
        mine = sorted(self.worker.share(self.held_out), key=lambda e: len(e.ids))
        for start in range(0, len(mine), 8):
            batch = self.teacher(collate(mine[start : start + 8], self.stop_ids))
            runs = matched_lengths(self.draft, batch, steps).cpu()
            run_sum += torch.bincount(runs, minlength=steps + 2).float()
        if dist.is_initialized():
            dist.all_reduce(run_sum)
        at_least = run_sum.flip(0).cumsum(0).flip(0)[: steps + 1]
        tau = 1.0 + float(at_least[1:].sum() / at_least[0].clamp(min=1))
        conditional = (at_least[1:] / at_least[:-1].clamp(min=1)).tolist()
        best = tau > self.best_tau
        self.best_tau = max(tau, self.best_tau)
        self._log({"tau": tau, "conditional_accuracy": [round(c, 4) for c in conditional]})
        if self.worker.leads:
            card = {**self.card, "steps": self.step, "rows": self.rows, "simulated_tau": tau}
            save_draft(self.draft, self.out / "last", extra_config={"training": card})
            if best:
                save_draft(self.draft, self.out / "best", extra_config={"training": card})
            draw_curves(self.out)
        return tau

    def save(self) -> None:
        """Write the checkpoint whole or not at all."""
        if not self.worker.leads:
            return
        state = {
            "step": self.step,
            "rows": self.rows,
            "best_tau": self.best_tau,
            "data": self.data,
            "options": self.options.fixed,
            "world": self.worker.world,
            "d2t": self.draft.d2t,
            "optimizer": self.optimizer.state(),
        }
        part = self.out / "checkpoint.part"
        torch.save(state, part)
        os.replace(part, self.out / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        mine = {"data": self.data, **self.options.fixed}
        theirs = {"data": state["data"], **state["options"]}
        differ = [key for key in mine if mine[key] != theirs.get(key)]
        if not torch.equal(state["d2t"], self.draft.d2t.cpu()):
            differ.append("draft vocabulary")
        if differ:
            raise UserError(
                f"the run in {self.out} was started with another {', '.join(differ)}: give the "
                "same, or another --output-dir with --init-draft to start from its weights"
            )
        self.step, self.rows = state["step"], state["rows"]
        self.best_tau = state["best_tau"]
        self.optimizer.load_state(state["optimizer"])

    def _log(self, row: dict[str, Any]) -> None:
        if not self.worker.leads:
            return
        row = {"step": self.step, "rows": self.rows, "time": time.time(), **row}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def draw_curves(out: Path) -> None:
    """Loss and simulated tau over the run's steps, from its log, as ``curves.png``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = out / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    losses = [(r["step"], r["loss"]) for r in rows if "loss" in r]
    taus = [(r["step"], r["tau"]) for r in rows if "tau" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    if losses:
        left.plot(*zip(*losses, strict=True), color="0.2", linewidth=0.8)
    left.set(xlabel="step", ylabel="weighted loss (nats)", title="training loss")
    right.plot(*zip(*taus, strict=True), color="0.2", marker="o", markersize=3)
    right.set(xlabel="step", ylabel="tau", title="simulated tau, chain, held-out answers")
    part = out / "curves.part.png"
    figure.savefig(part, dpi=130)
    plt.close(figure)
    os.replace(part, out / "curves.png")
