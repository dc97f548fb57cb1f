"""Distilling a small language model out of a target: some of its layers, taught by the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_dropmatch.taps import backbone, decoder_layers
from eagle_dropmatch.target import logits_finisher
from eagle_dropmatch.training.batches import Batch
from eagle_dropmatch.training.card import DraftCard, write_lm_card
from eagle_dropmatch.training.corpus import Example
from eagle_dropmatch.training.options import TrainOptions
from eagle_dropmatch.training.training_run import TrainingRun, Worker
from eagle_dropmatch.training.ttt import step_rows

Finish = Callable[[Tensor], Tensor] | None
"""What a model does with its LM head's product; None: nothing."""


def spread_layers(layers: int, kept: int) -> tuple[int, ...]:
    """``kept`` of a model's ``layers``, the first and the last among them, as even as can be."""
    if kept == 1:
        return (layers - 1,)
    return tuple(round(i * (layers - 1) / (kept - 1)) for i in range(kept))


@torch.no_grad()
def cut_model(model: Any, kept: Sequence[int]) -> Any:
    """A model of the target's class with these of its layers, and all else as the target has it."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(kept)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = [text.layer_types[i] for i in kept]
    small = type(model)(config).to(device=model.device)
    # Not .to(dtype): that would round the rotary frequencies, which stay in float32.
    for parameter in small.parameters():
        parameter.data = parameter.data.to(model.dtype)
    given = model.state_dict()
    prefix = _layers_prefix(model)
    for name, value in small.state_dict().items():
        source = name
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            source = f"{prefix}{kept[int(number)]}.{rest}"
        value.copy_(given[source])
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def _layers_prefix(model: Any) -> str:
    """What the names of the layers' parameters begin with, up to the layer's number."""
    stack = decoder_layers(model)
    return next(f"{name}." for name, module in model.named_modules() if module is stack)


def trained_parameters(small: Any) -> list[torch.nn.Parameter]:
    """The layers and the final norm; embedding and LM head stay the target's own."""
    fixed = {id(p) for p in small.get_input_embeddings().parameters()}
    fixed |= {id(p) for p in small.get_output_embeddings().parameters()}
    for parameter in small.parameters():
        parameter.requires_grad_(id(parameter) not in fixed)
    return [p for p in small.parameters() if p.requires_grad]


def chunk_loss(logits: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a few rows and its gradient: ([] float32, [C, V] in the logits' dtype).

    Args:
        logits: [C, V], the small model's.
        taught: [C, V], the target's.
    """
    wide, soft = logits.float(), taught.float().softmax(-1)
    norm = wide.logsumexp(-1, keepdim=True)
    loss = (norm.squeeze(-1) - (soft * wide).sum(-1)).sum()
    return loss, ((wide - norm).exp() - soft).to(logits.dtype)


#: ``chunk_loss``, or a compiled form of it.
ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _DistilLoss(torch.autograd.Function):
    """Both models' logits exist for a chunk of rows at a time; the head learns nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        taught: Tensor,
        head: Any,
        finish: Finish,
        chunk: int,
        kernel: ChunkLoss,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk):
            part, source = hidden[start : start + chunk], taught[start : start + chunk]
            if finish is None:
                loss, grad = kernel(head(part), head(source))
            else:
                done = torch.func.vjp(finish, head(part))
                loss, grad = kernel(done[0], finish(head(source)))
                (grad,) = done[1](grad)
            total += loss
            torch.mm(grad, head.weight, out=gradient[start : start + chunk])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        (above,) = grads
        return gradient * above, None, None, None, None, None


def distil_loss(
    hidden: Tensor,
    taught: Tensor,
    head: Any,
    finish: Finish = None,
    chunk: int = 256,
    kernel: ChunkLoss = chunk_loss,
) -> Tensor:
    """Sum over rows r of -sum_v p_v(taught_r) log p_v(hidden_r), p after the shared LM head.

    Args:
        hidden: [R, H], what the small model gives its LM head; gradients flow into it.
        taught: [R, H], what the target gives its own.
        head: the LM head of both, a module with a ``weight`` [V, H].
        finish: what both do with its product.
        chunk: rows whose logits exist at once.
        kernel: what a chunk goes through.
    """
    apply: Callable[..., Tensor] = _DistilLoss.apply
    return apply(hidden, taught, head, finish, chunk, kernel)


class Distiller(TrainingRun):
    """Trains ``small`` to say what the frozen target ``model`` says after each answer token.

    Args:
        small: a model of ``cut_model``.
        kept: the layers of the target that it began with.
        model: the target.
        tokenizer: the target's, written beside the weights.
    """

    def __init__(
        self,
        small: Any,
        kept: Sequence[int],
        model: Any,
        tokenizer: Any,
        examples: Sequence[Example],
        out: Path,
        options: TrainOptions,
        *,
        stop_ids: Sequence[int],
        worker: Worker | None = None,
        card: DraftCard | None = None,
        kernel: ChunkLoss = chunk_loss,
    ) -> None:
        super().__init__(examples, out, options, stop_ids=stop_ids, worker=worker, card=card)
        self.small, self.kept, self.tokenizer, self.kernel = small, kept, tokenizer, kernel
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        self.head = model.get_output_embeddings()
        self.finish = logits_finisher(model.config.get_text_config())
        self._prepare(trained_parameters(small), model)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = batch.supervised.to(self.device)
        hidden = self._read(self.small, batch)[rows]
        with torch.no_grad():
            taught = self._read(self.model, batch)[rows]
        loss = distil_loss(hidden, taught, self.head, self.finish, kernel=self.kernel)
        return loss, torch.full_like(loss, hidden.shape[0])

    @torch.no_grad()
    def _matched(self, batch: Batch, steps: int) -> Tensor:
        """One forward tells all chains: a chain goes on only where its tokens are the answer's."""
        hidden = self._read(self.small, batch)
        tokens = batch.tokens.to(self.device)
        right = torch.zeros_like(tokens, dtype=torch.bool)
        for row, wanted in enumerate(tokens):
            logits = self.head(hidden[row, :-1])
            if self.finish is not None:
                logits = self.finish(logits)
            right[row, :-1] = logits.argmax(-1) == wanted[1:]
        # Row t of training-time test starts from x_{t+1}: the same roots as an EAGLE-3 draft's.
        roots = step_rows(batch.supervised.to(self.device), steps - 1).nonzero()
        run = torch.zeros(len(roots), dtype=torch.int64, device=self.device)
        alive = torch.ones_like(run, dtype=torch.bool)
        for ahead in range(1, steps + 1):
            alive &= right[roots[:, 0], roots[:, 1] + ahead]
            run += alive
        return run

    @staticmethod
    def _read(model: Any, batch: Batch) -> Tensor:
        """[B, S, H]; right padding needs no mask, since causal rows never see it."""
        tokens = batch.tokens.to(model.device)
        output = backbone(model)(input_ids=tokens, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _export(self, folder: Path, card: DraftCard) -> None:
        # Trained parameters are views of one buffer, which the format does not allow.
        state = {
            name: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            for name, value in self.small.state_dict().items()
        }
        self.small.config.training = {**card.summary(), "kept_layers": list(self.kept)}
        self.small.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        write_lm_card(folder, card, self.kept)
