"""A preallocated key-value cache with per-row lengths, in the shape transformers expects.

One tensor a device holds all its layers, so that keeping an accepted path moves every layer's keys
and values in two operations, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCache(Cache):
    """Keys and values of B rows, each with its own number of committed tokens.

    A forward writes N new slots a row behind the row's committed ones (``open``) and sees the
    first ``key_length`` slots; ``keep`` then commits some of them. Slots beyond a row's length
    hold finite leftovers which the mask hides.

    Attributes:
        lengths: [B] int64 on the first device, committed tokens a row.
    """

    def __init__(
        self,
        layer_devices: Sequence[torch.device],
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        self.capacity = capacity
        self._stores: dict[torch.device, Tensor] = {}
        self._layers: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        places: list[tuple[torch.device, int]] = []
        for device in layer_devices:
            places.append((device, sum(d == device for d, _ in places)))
        for device in dict.fromkeys(layer_devices):
            count = sum(d == device for d in layer_devices)
            # Zeros, not empty: a hidden slot still enters the product, and 0 * NaN is NaN.
            store = torch.zeros(
                count, 2, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device
            )
            self._put(device, store)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=layer_devices[0])
        self._row_lengths = [0] * batch
        self._starts: Tensor | int = 0
        self._opened = 0
        super().__init__(layers=[_TreeLayer(self, *place) for place in places])

    @property
    def batch(self) -> int:
        return len(self._row_lengths)

    @property
    def max_length(self) -> int:
        """Committed tokens of the longest row, known without asking the device."""
        return max(self._row_lengths)

    @property
    def key_length(self) -> int:
        """Slots that the forward now open can see."""
        return self.max_length + self._opened

    def open(self, count: int, behind: int = 0) -> None:
        """Make room for ``count`` new slots a row; the next forward writes them.

        They start ``behind`` slots after the row's committed ones: a draft that grows level by
        level writes each level behind the last without committing any.
        """
        self._opened = behind + count
        if self.key_length > self.capacity:
            self._grow(max(self.key_length, 2 * self.capacity))
        same = min(self._row_lengths) == self.max_length
        self._starts = (self.max_length if same else self.lengths) + behind

    def commit(self, counts: Sequence[int]) -> None:
        """Count the first ``counts[b]`` of the slots just written as row b's own."""
        self._row_lengths = [n + c for n, c in zip(self._row_lengths, counts, strict=True)]
        self.lengths = torch.tensor(self._row_lengths, device=self.lengths.device)

    def keep(self, path: Tensor, counts: Sequence[int]) -> None:
        """Keep the slots of an accepted path and forget the rest of the tree.

        Args:
            path: [B, A] int64 node ids from the root (0) down, padded with -1.
            counts: nodes to keep a row, root included; 0 for a row that has ended.
        """
        longest = max(counts)
        if longest > 1:
            steps = torch.arange(longest, device=path.device)
            chosen = torch.where(path[:, :longest] < 0, steps, path[:, :longest])
            self._move(chosen[:, 1:], steps[1:])
        self.commit(counts)

    def pretend(self, length: int) -> None:
        """For timing: so many tokens in every row, as if they had been read."""
        if length > self.capacity:
            self._grow(length)
        for store in self._stores.values():
            store.fill_(0.01)  # pages that nobody has written cost nothing to read
        self._row_lengths = [length] * self.batch
        self.lengths = torch.full_like(self.lengths, length)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, in this order."""
        for device, store in self._stores.items():
            self._put(device, store.index_select(2, rows.to(device)))
        kept = rows.tolist()
        self._row_lengths = [self._row_lengths[row] for row in kept]
        self.lengths = self.lengths.index_select(0, rows.to(self.lengths.device))

    def put(self, seats: Sequence[int], other: TreeCache) -> None:
        """Replace rows by those of another cache; seats may go on behind the last row."""
        size = other.max_length
        if size > self.capacity:
            self._grow(size)
        for device, store in self._stores.items():
            rows = self.batch
            if max(seats) >= rows:
                larger = store.new_zeros(*store.shape[:2], max(seats) + 1, *store.shape[3:])
                larger[:, :, :rows] = store
                store = larger
                self._put(device, store)
            index = torch.tensor(list(seats), device=device)
            new = other._stores[device].narrow(4, 0, size)
            store.narrow(4, 0, size).index_copy_(2, index, new)
        lengths = self._row_lengths + [0] * (max(seats) + 1 - self.batch)
        for seat, length in zip(seats, other._row_lengths, strict=True):
            lengths[seat] = length
        self._row_lengths = lengths
        self.lengths = torch.tensor(lengths, device=self.lengths.device)

    def _move(self, source: Tensor, target: Tensor) -> None:
        """Copy tree slots ``source`` [B, M] to slots ``target`` [M], both counted from the root."""
        for device, store in self._stores.items():
            base = self.lengths.to(device)[:, None]
            if self.batch == 1:
                first = self._row_lengths[0] + 1
                moved = store.index_select(-2, (base + source.to(device))[0])
                store[..., first : first + moved.shape[-2], :] = moved
                continue
            # Whole heads as rows of a table: gather and scatter go number by number.
            layers, kinds, batch, heads, capacity, size = store.shape
            table = store.view(-1, size)
            starts = torch.arange(layers * kinds * batch * heads, device=device) * capacity
            starts = starts.view(-1, batch, heads, 1)
            read = (starts + (base + source.to(device))[:, None]).flatten()
            write = (starts + (base + target.to(device))[:, None]).flatten()
            table.index_copy_(0, write, table.index_select(0, read))

    def _grow(self, capacity: int) -> None:
        for device, store in self._stores.items():
            larger = store.new_zeros(*store.shape[:4], capacity, store.shape[5])
            larger[..., : self.capacity, :] = store
            self._put(device, larger)
        self.capacity = capacity

    def _put(self, device: torch.device, store: Tensor) -> None:
        self._stores[device] = store
        # Split once: the hot path asks for one layer's keys and values at a time.
        self._layers[device] = [(layer[0], layer[1]) for layer in store.unbind()]

    def all_stores(self) -> list[Tensor]:
        """Everything that is held, a tensor a device."""
        return list(self._stores.values())

    def stores(self, device: torch.device) -> list[Tensor]:
        """Keys and values [B, H_kv, capacity, d] of the device's layers, two for each in turn."""
        return [each for layer in self._layers[device] for each in layer]

    def slots(self, count: int) -> Tensor:
        """[B, count] int64: where the forward now open writes."""
        steps = torch.arange(count, device=self.lengths.device)
        if isinstance(self._starts, int):
            return (self._starts + steps).expand(self.batch, -1).contiguous()
        return self._starts[:, None] + steps

    def write(self, device: torch.device, index: int, keys: Tensor, values: Tensor) -> Any:
        """Store one layer's new keys and values; returns the views that attention reads."""
        kept_keys, kept_values = self._layers[device][index]
        count = keys.shape[-2]
        if isinstance(self._starts, int):
            kept_keys.narrow(2, self._starts, count).copy_(keys)
            kept_values.narrow(2, self._starts, count).copy_(values)
        else:
            rows = torch.arange(self.batch, device=device)[:, None]
            slots = self.slots(count).to(device)
            kept_keys[rows, :, slots] = keys.transpose(1, 2)
            kept_values[rows, :, slots] = values.transpose(1, 2)
        seen = self.key_length
        return kept_keys.narrow(2, 0, seen), kept_values.narrow(2, 0, seen)


def put_rows(values: Tensor, seats: Sequence[int], new: Tensor) -> Tensor:
    """``values`` [B, ...] with the rows at ``seats`` replaced; seats may go on behind the last."""
    more = max(seats) + 1 - values.shape[0]
    if more > 0:
        values = torch.cat((values, values.new_zeros(more, *values.shape[1:])))
    return values.index_copy(0, torch.tensor(list(seats), device=values.device), new)


class _TreeLayer(CacheLayerMixin):
    """One layer's door into the shared store."""

    is_sliding = False

    def __init__(self, cache: TreeCache, device: torch.device, index: int) -> None:
        super().__init__()
        self._cache, self._place = cache, (device, index)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.write(*self._place, key_states, value_states)
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store exists before the first forward."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.key_length, 0

    def get_seq_length(self) -> int:
        return self._cache.max_length

    def get_max_length(self) -> int:
        return -1
