"""Start a training run: load target and data, build or load the draft, spawn the workers."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from eagle_dropmatch import cli
from eagle_dropmatch.drafts.checkpoint import load_draft
from eagle_dropmatch.drafts.eagle3 import Eagle3Draft
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.loading import cpu_has_bfloat16
from eagle_dropmatch.settings import stop_token_ids
from eagle_dropmatch.taps import decoder_layers
from eagle_dropmatch.training import distil
from eagle_dropmatch.training.batches import vocabulary_map
from eagle_dropmatch.training.card import DraftCard
from eagle_dropmatch.training.corpus import Example, read_examples, windows
from eagle_dropmatch.training.distil import Distiller, cut_model, spread_layers
from eagle_dropmatch.training.initial import new_draft_config, start_from_target
from eagle_dropmatch.training.options import RunSpec, TrainOptions
from eagle_dropmatch.training.trainer import Trainer
from eagle_dropmatch.training.training_run import TrainingRun, Worker
from eagle_dropmatch.training.ttt import ChunkLoss, chunk_loss

MOST_CPU_WORKERS = 8


def load_data(spec: RunSpec) -> list[Example]:
    """All corpora in the order given, in windows of the maximal length."""
    return [
        window
        for path in spec.data
        for example in read_examples(Path(path))
        for window in windows(example, spec.max_length)
    ]


def train(spec: RunSpec) -> None:
    """Run to the end, in this process or in ``spec.workers`` of them."""
    Path(spec.out).mkdir(parents=True, exist_ok=True)
    if spec.workers == 1:
        _work(0, spec, None, None)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mistakes = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(_work, args=(spec, f"tcp://127.0.0.1:{port}", mistakes), nprocs=spec.workers)
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        # A user's mistake is one line here too, not a worker's traceback.
        if mistakes.empty():
            raise
        raise UserError(mistakes.get()) from None


def _work(rank: int, spec: RunSpec, address: str | None, mistakes: Any) -> None:
    torch.set_num_threads(spec.threads)
    if spec.device == "cuda":
        torch.cuda.set_device(rank)
    if address is not None:
        backend = "nccl" if spec.device == "cuda" else "gloo"
        dist.init_process_group(backend, address, rank=rank, world_size=spec.workers)
    try:
        build_run(spec, Worker(rank, spec.workers)).run()
    except UserError as error:
        if mistakes is not None:
            mistakes.put(str(error))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def build_run(spec: RunSpec, worker: Worker) -> TrainingRun:
    """The run of one worker, at the step of the last checkpoint."""
    cli.silence_transformers()
    device = torch.device(spec.device, worker.rank) if spec.device == "cuda" else spec.device
    examples = load_data(spec)
    model = load_model(spec, spec.target, device)
    model.requires_grad_(False)
    check_ids(examples, model.config.get_text_config().vocab_size)
    build = build_trainer if spec.layers is None else build_distiller
    return build(spec, worker, model, examples)


def load_model(spec: RunSpec, source: str, device: Any) -> Any:
    """A causal language model in the run's dtype, on the worker's device."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, spec.dtype), attn_implementation=spec.attn_implementation
    )
    return model.to(device)


def build_distiller(
    spec: RunSpec, worker: Worker, model: Any, examples: Sequence[Example]
) -> Distiller:
    """The run that distils a small language model out of some of the target's layers."""
    from transformers import AutoTokenizer

    assert spec.layers is not None
    layers = model.config.get_text_config().num_hidden_layers
    kept = spread_layers(layers, spec.layers)
    small = cut_model(model, kept)
    if spec.init_draft is not None:
        earlier = load_model(spec, spec.init_draft, model.device)
        if earlier.config.get_text_config().num_hidden_layers != len(kept):
            raise UserError(f"--init-draft {spec.init_draft} has another number of --layers")
        small.load_state_dict(earlier.state_dict())
    kernel: distil.ChunkLoss = distil.chunk_loss
    if spec.compile:
        kernel = torch.compile(kernel, dynamic=True)
        for layer in (*decoder_layers(model), *decoder_layers(small)):
            layer.compile(dynamic=True)
    return Distiller(
        small,
        kept,
        model,
        AutoTokenizer.from_pretrained(spec.target),
        examples,
        Path(spec.out),
        spec.options,
        stop_ids=stop_token_ids(model.generation_config),
        worker=worker,
        card=start_card(spec),
        kernel=kernel,
    )


def start_card(spec: RunSpec) -> DraftCard:
    """What is known of a run before it begins."""
    return DraftCard(
        target=spec.base_model or _public_name(spec.target),
        files=tuple(Path(path).name for path in spec.data),
        started_from=None if spec.init_draft is None else _public_name(spec.init_draft),
        earlier_rows=rows_seen(spec.init_draft),
    )


def build_trainer(
    spec: RunSpec, worker: Worker, model: Any, examples: Sequence[Example]
) -> Trainer:
    """The run that trains an EAGLE-3 draft."""
    config, device = model.config.get_text_config(), model.device
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.init_draft is not None:
        draft = load_draft(
            spec.init_draft,
            target_config=config,
            target_embedding=model.get_input_embeddings(),
            target_head=model.get_output_embeddings(),
            dtype=dtype,
            device=device,
        )
        if not draft.config.fuse_features:
            raise UserError(
                f"the draft {spec.init_draft} fuses no features (it has no fc): only drafts that "
                "read several of the target's layers can be trained here"
            )
    else:
        shape = new_draft_config(config, spec.draft_vocab)
        draft = Eagle3Draft(shape)
        d2t = vocabulary_map(examples, spec.draft_vocab, config.vocab_size)
        # The model's own dtype stays as it is: casting there and back would round its rotary
        # frequencies, and the draft would learn from another target.
        start_from_target(draft, model, d2t)
        draft.to(device=device, dtype=dtype)
    kernel: ChunkLoss = compile_parts(model, draft) if spec.compile else chunk_loss
    return Trainer(
        draft,
        model,
        examples,
        Path(spec.out),
        spec.options,
        stop_ids=stop_token_ids(model.generation_config),
        worker=worker,
        card=start_card(spec),
        kernel=kernel,
    )


def compile_parts(model: Any, draft: Eagle3Draft) -> ChunkLoss:
    """Compile the target's layers, the draft's norms and MLP, and the loss of a chunk.

    One layer's code serves all layers and, with dynamic shapes, all buckets: half a minute once,
    for norms, gates and softmaxes that no longer go through memory operation by operation.
    """
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
    mid = draft.midlayer
    for part in (
        mid.mlp,
        mid.input_layernorm,
        mid.hidden_norm,
        mid.post_attention_layernorm,
        draft.norm,
    ):
        part.compile(dynamic=True)
    return torch.compile(chunk_loss, dynamic=True)


def rows_seen(draft: str | None) -> int:
    """Supervised rows that a draft of these scripts has been trained on; 0 where nothing says."""
    config = Path(draft or "", "config.json")
    if draft is None or not config.is_file():
        return 0
    training = json.loads(config.read_text(encoding="utf-8")).get("training", {})
    return int(training.get("rows_in_all", training.get("rows", 0)))


def check_ids(examples: Sequence[Example], vocab_size: int) -> None:
    """Refuse a corpus that was made with another tokenizer, where that shows."""
    largest = max((max(example.ids) for example in examples), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"the corpus has the token id {largest}, but the target's vocabulary has {vocab_size}: "
            "make the corpus with this target's tokenizer"
        )


def settle(spec: RunSpec) -> RunSpec:
    """Put the machine's own values where ``spec`` says auto or 0; UserError where they are missing.

    On a GPU: a worker for each. On CPUs: a worker a core up to ``MOST_CPU_WORKERS`` (each holds the
    target), and the cores shared out as threads.
    """
    device = spec.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus == 0:
            raise UserError("--device cuda was given, but torch sees no GPU: use --device cpu")
        if spec.workers > gpus:
            raise UserError(
                f"--workers {spec.workers} was given for {gpus} GPUs: one worker needs one GPU"
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    workers = spec.workers or (gpus if device == "cuda" else min(cores, MOST_CPU_WORKERS))
    fast = device == "cuda" or cpu_has_bfloat16()
    dtype = ("bfloat16" if fast else "float32") if spec.dtype == "auto" else spec.dtype
    options = spec.options
    if options.attention_block == 0 and device == "cpu":
        options = replace(options, attention_block=TrainOptions.attention_block)
    return replace(
        spec,
        options=options,
        device=device,
        workers=workers,
        threads=spec.threads or max(1, cores // workers),
        dtype=dtype,
    )


def _public_name(source: str) -> str:
    """A hub id as it is, and of a folder its name alone: paths are nobody's business."""
    return Path(source).resolve().name if Path(source).is_dir() else source
