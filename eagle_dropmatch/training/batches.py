"""Batches in a few fixed shapes, in an order that depends on nothing but the seed and the data."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_dropmatch.training.corpus import Example

#: Padded lengths. Few shapes let the allocator reuse its memory, which is what is dear on a CPU.
BUCKETS = (128, 192, 256, 320, 384, 512, 640, 768, 1024, 2048)


@dataclass(frozen=True)
class Batch:
    """B right-padded sequences of one bucket."""

    tokens: Tensor  # [B, S] int64
    supervised: Tensor  # [B, S] bool, assistant tokens after which decoding goes on


def bucket_of(length: int) -> int:
    """The smallest bucket that holds ``length`` tokens."""
    return next((size for size in BUCKETS if length <= size), length)


def plan_epoch(lengths: Sequence[int], positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Groups of example indices, each group one batch of about ``positions`` padded positions."""
    order = list(range(len(lengths)))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    waiting: dict[int, list[int]] = defaultdict(list)
    groups: list[list[int]] = []
    for index in order:
        size = bucket_of(lengths[index])
        waiting[size].append(index)
        if (len(waiting[size]) + 1) * size > positions:
            groups.append(waiting.pop(size))
    groups.extend(group for _, group in sorted(waiting.items()))
    # Buckets fill at different speeds: without this the long ones would come in bursts.
    random.Random(f"{seed}-{epoch}-groups").shuffle(groups)
    return groups


def endless(lengths: Sequence[int], positions: int, seed: int, start: int) -> Iterator[list[int]]:
    """The groups of all epochs from the ``start``-th on: where a resumed run goes on."""
    epoch = 0
    skipped = 0
    while True:
        groups = plan_epoch(lengths, positions, seed, epoch)
        yield from groups[max(0, start - skipped) :]
        skipped += len(groups)
        epoch += 1


def collate(examples: Sequence[Example], stop_ids: Sequence[int]) -> Batch:
    """Pad to the bucket of the longest and mark what is supervised.

    An answer that was cut by its length limit ends without a stop token: nobody knows what follows
    its last token, so that is not supervised either.
    """
    size = max(bucket_of(len(example.ids)) for example in examples)
    tokens = torch.zeros(len(examples), size, dtype=torch.int64)
    supervised = torch.zeros(len(examples), size, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.ids)] = torch.tensor(example.ids)
        for start, end in example.spans:
            supervised[row, start : min(end, len(example.ids) - 1)] = True
    for stop_id in stop_ids:
        supervised &= tokens != stop_id  # nothing is ever drafted after a stop token
    return Batch(tokens, supervised)


def vocabulary_map(examples: Sequence[Example], size: int, vocab_size: int) -> Tensor:
    """d2t for the ``size`` most frequent assistant tokens: offsets [size] int64, ids ascending.

    Ties go to the lower id; where fewer tokens occur, the lowest unused ids fill up.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        for start, end in example.spans:
            counts.update(example.ids[start:end])
    chosen = [token for token, _ in sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))[:size]]
    if len(chosen) < size:
        taken = set(chosen)
        spare = (token for token in range(vocab_size) if token not in taken)
        chosen.extend(next(spare) for _ in range(size - len(chosen)))
    ids = torch.tensor(sorted(chosen), dtype=torch.int64)
    return ids - torch.arange(size)


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the data's ids and spans: a resumed run must see the same."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(torch.tensor(example.ids, dtype=torch.int32).numpy().tobytes())
        digest.update(str(example.spans).encode())
    return digest.hexdigest()[:16]
