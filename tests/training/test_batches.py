"""Batches: what is supervised, in what order, over which vocabulary."""

from __future__ import annotations

from itertools import islice

import torch

from eagle_dropmatch.training.batches import (
    BUCKETS,
    bucket_of,
    collate,
    endless,
    fingerprint,
    plan_epoch,
    vocabulary_map,
)
from eagle_dropmatch.training.corpus import Example


def example(ids, spans, name="a", source="target-greedy"):
    return Example(name, source, list(ids), spans)


def test_collate_pads_to_a_bucket_and_marks_the_answers():
    batch = collate([example(range(10, 20), [(3, 6)]), example([5] * 140, [(0, 2), (7, 9)])], ())
    assert batch.tokens.shape == batch.supervised.shape == (2, 192)
    assert batch.tokens[0, :10].tolist() == list(range(10, 20))
    assert not batch.tokens[0, 10:].any()
    assert batch.supervised[0].nonzero().flatten().tolist() == [3, 4, 5]
    assert batch.supervised[1].nonzero().flatten().tolist() == [0, 1, 7, 8]


def test_nothing_is_learned_behind_a_stop_token():
    batch = collate([example([1, 2, 3, 9, 4, 5, 8, 6], [(1, 4), (5, 7)])], (9, 8))
    assert batch.supervised[0].nonzero().flatten().tolist() == [1, 2, 5]


def test_the_last_token_of_an_answer_cut_by_its_limit_is_not_supervised():
    batch = collate([example([1, 2, 3, 4], [(1, 4)])], (9,))
    assert batch.supervised[0].nonzero().flatten().tolist() == [1, 2]


def test_buckets_are_few_and_nothing_is_too_long():
    assert [bucket_of(n) for n in (1, 128, 129, 2048, 3000)] == [128, 128, 192, 2048, 3000]
    assert len({bucket_of(n) for n in range(1, 2049)}) == len(BUCKETS)


def test_an_epoch_uses_every_example_once_in_batches_of_one_bucket_within_the_budget():
    lengths = [20 + 37 * i % 700 for i in range(100)]
    groups = plan_epoch(lengths, 2048, seed=1, epoch=0)
    assert sorted(i for group in groups for i in group) == list(range(100))
    for group in groups:
        (size,) = {bucket_of(lengths[i]) for i in group}
        assert len(group) == 1 or len(group) * size <= 2048
    assert groups == plan_epoch(lengths, 2048, seed=1, epoch=0)
    assert groups != plan_epoch(lengths, 2048, seed=1, epoch=1)
    assert groups != plan_epoch(lengths, 2048, seed=2, epoch=0)


def test_a_resumed_stream_of_batches_goes_on_where_it_was():
    lengths = [20 + 37 * i % 300 for i in range(30)]
    whole = list(islice(endless(lengths, 512, 0, 0), 60))
    per_epoch = len(plan_epoch(lengths, 512, 0, 0))
    assert 3 * per_epoch < 60
    for start in (1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch + 3):
        assert list(islice(endless(lengths, 512, 0, start), 60 - start)) == whole[start:]


def chosen_ids(offsets):
    return (offsets + torch.arange(len(offsets))).tolist()


def test_the_vocabulary_counts_assistant_tokens_only():
    examples = [example([7, 7, 7, 5, 5, 3], [(3, 6)]), example([7, 3, 2], [(1, 2)])]
    # 5 twice, 3 twice; 7 and 2 stand in prompts.
    assert chosen_ids(vocabulary_map(examples, 2, 10)) == [3, 5]


def test_ties_in_the_vocabulary_go_to_the_lower_id():
    assert chosen_ids(vocabulary_map([example([9, 4, 6, 9], [(0, 4)])], 2, 10)) == [4, 9]


def test_a_vocabulary_with_room_is_filled_with_the_lowest_unused_ids():
    assert chosen_ids(vocabulary_map([example([1, 8], [(0, 2)])], 5, 10)) == [0, 1, 2, 3, 8]


def test_the_vocabulary_map_is_sorted_and_injective():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (2000,), generator=generator).tolist()
    offsets = vocabulary_map([example(ids, [(0, 2000)])], 300, 500)
    found = chosen_ids(offsets)
    assert offsets.dtype == torch.int64
    assert found == sorted(set(found))
    assert len(found) == 300
    assert found[-1] < 500
    assert chosen_ids(vocabulary_map([example(ids, [(0, 2000)])], 500, 500)) == list(range(500))


def test_the_fingerprint_knows_ids_spans_and_order():
    a, b = example([1, 2, 3], [(1, 3)]), example([1, 2, 4], [(1, 3)])
    known = {fingerprint(data) for data in ([a, b], [b, a], [a], [a, example([1, 2, 4], [(2, 3)])])}
    assert len(known) == 4
    assert fingerprint([a, b]) == fingerprint([a, b])
