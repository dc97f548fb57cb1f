"""A training run of any network: workers, checkpoints, resume, evaluation, log."""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.files import replacing
from eagle_dropmatch.training.batches import Batch, collate, endless, fingerprint
from eagle_dropmatch.training.card import DraftCard
from eagle_dropmatch.training.corpus import Example, conversation_of
from eagle_dropmatch.training.optimizer import FlatAdamW, learning_rate
from eagle_dropmatch.training.options import TrainOptions
from eagle_dropmatch.training.runlog import RunLog, draw_curves

CHECKPOINT = "checkpoint.pt"
_EVAL_BATCH = 8


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

    def total(self, mine: Tensor) -> Tensor:
        """The sum over all workers, in place; the tensor lies where the workers' backend needs."""
        if dist.is_initialized():
            dist.all_reduce(mine)
        return mine


def choose_held_out(examples: Sequence[Example], count: int) -> list[Example]:
    """Greedy answers of the target where the data has any, chosen by a hash of their ids.

    The choice depends on the examples, not on their order, and hardly moves as a corpus grows.
    """
    greedy = [e for e in examples if e.source == "target-greedy"] or list(examples)
    return sorted(greedy, key=lambda e: (hashlib.sha256(e.id.encode()).digest(), e.ids))[:count]


def target_fingerprint(model: Any) -> str:
    """A hash of the target's shape and of some of its weights: a resumed run must see the same."""
    head = model.get_output_embeddings().weight
    layers = model.config.get_text_config().num_hidden_layers
    sample = head.detach()[:: max(1, len(head) // 64)].float().cpu().contiguous()
    text = f"{layers} {tuple(head.shape)}".encode()
    return hashlib.sha256(text + sample.numpy().tobytes()).hexdigest()[:16]


class TrainingRun(ABC):
    """Trains a network against the frozen target; ``run()`` goes from the last checkpoint on.

    What is trained, and on what loss, is the subclass's: it sets itself up, calls ``_prepare`` and
    implements ``_loss``, ``_matched`` and ``_export``.

    Args:
        examples: the corpus; some greedy answers of it are held out.
        out: folder of the drafts, the checkpoint and the log.
        stop_ids: tokens after which nothing is drafted.
        worker: this process among those that train together.
        card: what is known of the run so far.
    """

    device: torch.device

    def __init__(
        self,
        examples: Sequence[Example],
        out: Path,
        options: TrainOptions,
        *,
        stop_ids: Sequence[int],
        worker: Worker | None = None,
        card: DraftCard | None = None,
    ) -> None:
        self.worker = worker or Worker()
        self.options, self.out, self.stop_ids = options, out, stop_ids
        self.held_out = choose_held_out(examples, options.held_out)
        chosen = {id(e) for e in self.held_out}
        self.data = fingerprint([e for e in examples if id(e) not in chosen])
        # No other answer to a held-out prompt is trained on either.
        held = {conversation_of(e) for e in self.held_out}
        self.examples = [e for e in examples if conversation_of(e) not in held]
        if not self.examples or not self.held_out:
            raise UserError(
                f"{len(examples)} examples are too few: more than {options.held_out} are needed, "
                "since that many are held out (--held-out)"
            )
        self.card = (card or DraftCard()).with_data(self.examples, self.held_out, options)

    def _prepare(self, trained: Sequence[nn.Parameter], model: Any) -> None:
        """Take what is trained and the target that teaches, and go to the last checkpoint."""
        self.target = target_fingerprint(model)
        self.optimizer = FlatAdamW(trained, betas=(0.9, 0.95), clip=self.options.clip)
        self.step = 0
        self.rows = 0
        self.best_tau = 0.0
        self._resume()
        self.log = RunLog(self.out, self.step) if self.worker.leads else None

    @abstractmethod
    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed loss of a batch, with gradients, and the number of its rows; scalars."""

    @abstractmethod
    def _matched(self, batch: Batch, steps: int) -> Tensor:
        """How many of ``steps`` drafts in a row are the answer's tokens, for R roots: [R] int64."""

    @abstractmethod
    def _export(self, folder: Path, card: DraftCard) -> None:
        """Write what was trained, and its card, into ``folder``."""

    def _identity(self) -> dict[str, Tensor]:
        """Tensors that must be the same when a run is resumed, by what they are."""
        return {}

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
            ended = self.step == options.steps
            if self.step % 10 == 0 or ended:
                seconds = time.perf_counter() - began
                began = time.perf_counter()
                bar.set_postfix(loss=f"{loss:.3f}", tau=f"{self.best_tau:.3f}")
                self._log(loss=loss, grad_norm=float(norm), lr=rate, seconds_per_10=seconds)
            if self.step % options.eval_every == 0 or ended:
                self.evaluate()
                began = time.perf_counter()
            if self.step % options.save_every == 0 or ended:
                self.save()
        bar.close()
        return self.best_tau

    def _train_step(self, group: Sequence[int]) -> tuple[float, float, Tensor, float]:
        options = self.options
        mine = self.worker.share(group)
        totals = torch.zeros(2, device=self.device)
        if mine:
            loss, count = self._loss(collate([self.examples[i] for i in mine], self.stop_ids))
            loss.backward()
            totals = torch.stack((loss.detach(), count))
        # The step's one wait for the device behind the first forward.
        loss_sum, rows = self.worker.total(totals).tolist()
        if not math.isfinite(loss_sum):
            raise UserError(
                f"the loss is {loss_sum} at step {self.step}: start again from the last checkpoint "
                "with a lower --learning-rate (and --init-draft)"
            )
        rate = learning_rate(
            self.step,
            peak=options.learning_rate,
            warmup=options.warmup,
            total=options.steps,
            decay_steps=options.decay_steps,
        )
        norm = self.optimizer.step(rows, rate)
        return loss_sum / max(rows, 1.0), rows, norm, rate

    # -- evaluation, checkpoints, log --------------------------------------------------------

    def evaluate(self) -> float:
        """Simulated tau of chain drafting on held-out answers; exports the draft, and the best."""
        steps = self.options.eval_steps
        run_sum = torch.zeros(steps + 1, device=self.device)
        mine = sorted(self.worker.share(self.held_out), key=lambda e: len(e.ids))
        for start in range(0, len(mine), _EVAL_BATCH):
            runs = self._matched(collate(mine[start : start + _EVAL_BATCH], self.stop_ids), steps)
            run_sum += torch.bincount(runs, minlength=steps + 1).float()
        # How many rows matched at least k tokens, k = 0 .. steps.
        at_least = self.worker.total(run_sum).flip(0).cumsum(0).flip(0).cpu()
        tau = 1.0 + float(at_least[1:].sum() / at_least[0].clamp(min=1))
        conditional = (at_least[1:] / at_least[:-1].clamp(min=1)).tolist()
        best = tau > self.best_tau
        self.best_tau = max(tau, self.best_tau)
        self._log(tau=tau, conditional_accuracy=[round(c, 4) for c in conditional])
        if self.worker.leads:
            card = replace(self.card, steps=self.step, rows=self.rows, simulated_tau=tau)
            for name in ("last", "best") if best else ("last",):
                self._export(self.out / name, card)
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
            "target": self.target,
            "options": self.options.fixed,
            **self._identity(),
            "optimizer": self.optimizer.state(),
        }
        with replacing(self.out / CHECKPOINT, "wb") as file:
            torch.save(state, file)

    def _resume(self) -> None:
        path = self.out / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        mine = {"data": self.data, "target": self.target, **self.options.fixed}
        # What is newer than the checkpoint had its default then, or was not compared.
        theirs = {**TrainOptions().fixed, "target": self.target, **state["options"]}
        theirs |= {name: state[name] for name in ("data", "target") if name in state}
        differ = [key for key in mine if mine[key] != theirs[key]]
        differ += [
            name
            for name, tensor in self._identity().items()
            if name in state and not torch.equal(state[name], tensor.cpu())
        ]
        if state["optimizer"]["master"].shape != self.optimizer.master.shape:
            differ.append("draft shape")
        if differ:
            raise UserError(
                f"the run in {self.out} was started with another {', '.join(differ)}: give the "
                "same, or another --output-dir with --init-draft to start from its weights"
            )
        self.step, self.rows = state["step"], state["rows"]
        self.best_tau = state["best_tau"]
        self.optimizer.load_state(state["optimizer"])

    def _log(self, **row: Any) -> None:
        if self.log is not None:
            self.log.append({"step": self.step, "rows": self.rows, **row})
