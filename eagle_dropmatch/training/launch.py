"""Start a training run: load target and data, build or load the draft, spawn the workers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from eagle_dropmatch.errors import UserError
from eagle_dropmatch.training.corpus import Example, read_examples, truncate
from eagle_dropmatch.training.trainer import Trainer, TrainOptions, Worker


@dataclass(frozen=True)
class RunSpec:
    """What a training run is made of; plain values, so that it crosses to worker processes."""

    target: str
    data: tuple[str, ...]
    out: str
    options: TrainOptions
    draft_vocab: int = 8192
    max_length: int = 768
    init_draft: str | None = None
    workers: int = 1
    threads: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"


def load_data(spec: RunSpec) -> list[Example]:
    """All corpora in the order given, cut to the maximal length."""
    cut = (
        truncate(example, spec.max_length)
        for path in spec.data
        for example in read_examples(Path(path))
    )
    return [example for example in cut if example is not None]


def train(spec: RunSpec) -> None:
    """Run to the end, in this process or in ``spec.workers`` of them."""
    Path(spec.out).mkdir(parents=True, exist_ok=True)
    if spec.workers == 1:
        _work(0, spec, None)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_work, args=(spec, f"tcp://127.0.0.1:{port}"), nprocs=spec.workers)


def _work(rank: int, spec: RunSpec, address: str | None) -> None:
    torch.set_num_threads(spec.threads)
    if address is not None:
        backend = "nccl" if spec.device == "cuda" else "gloo"
        dist.init_process_group(backend, address, rank=rank, world_size=spec.workers)
    try:
        trainer = build_trainer(spec, Worker(rank, spec.workers))
        trainer.run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def build_trainer(spec: RunSpec, worker: Worker) -> Trainer:
    """The trainer of one worker, at the step of the last checkpoint."""
    from transformers import AutoModelForCausalLM

    from eagle_dropmatch.drafts.checkpoint import load_draft
    from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
    from eagle_dropmatch.training.batches import vocabulary_map
    from eagle_dropmatch.training.initial import new_draft_config, start_from_target

    device = torch.device(spec.device, worker.rank) if spec.device == "cuda" else spec.device
    dtype: torch.dtype = getattr(torch, spec.dtype)
    examples = load_data(spec)
    model: Any = AutoModelForCausalLM.from_pretrained(spec.target, dtype=dtype)
    model.to(device)
    model.requires_grad_(False)
    if spec.init_draft is not None:
        draft = load_draft(
            spec.init_draft,
            target_config=model.config,
            target_embedding=model.get_input_embeddings(),
            target_head=model.get_output_embeddings(),
            dtype=dtype,
            device=device,
        )
    else:
        d2t = vocabulary_map(examples, spec.draft_vocab, model.config.vocab_size)
        draft = Eagle3Draft(new_draft_config(model.config, spec.draft_vocab))
        start_from_target(draft, model.float(), d2t)
        model.to(dtype)
        draft.to(device=device, dtype=dtype)
    sources = sorted({example.source for example in examples})
    card = {"target": spec.target, "data": [Path(p).name for p in spec.data], "sources": sources}
    return Trainer(
        draft,
        model,
        examples,
        Path(spec.out),
        spec.options,
        stop_ids=stop_ids(model.generation_config),
        worker=worker,
        card=card,
    )


def stop_ids(generation_config: Any) -> Sequence[int]:
    """The target's stop tokens, none, one or several, as a tuple."""
    eos = generation_config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def check(spec: RunSpec) -> None:
    """Refuse what cannot run, before anything heavy is loaded."""
    for path in spec.data:
        if not Path(path).is_file():
            raise UserError(f"no corpus at {path}: make one with scripts/make_corpus.py")
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch sees no GPU: use --device cpu")
    if spec.device == "cuda" and spec.workers > torch.cuda.device_count():
        raise UserError(
            f"--workers {spec.workers} was given for {torch.cuda.device_count()} GPUs: "
            "one worker needs one GPU"
        )
