"""What a decoding step costs on this machine: measured once for a pair, kept, and read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.assets import cache_dir
from eagle_dropmatch.clock import timed
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, NoDrafter, Observation, TreeShape
from eagle_dropmatch.files import write_text
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.machine import device_name
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree

_FORMAT = 2
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_CONTEXTS = (256, 1792)
_TIMES, _FEW_TIMES, _FEW_ROWS = 7, 4, 2
_DEAR = 10  # times a step of one node: no tree can earn more, so larger ones are not timed
_GRAIN = 128  # tokens of context between two sets of costs


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts, at one batch size and context.

    Attributes:
        nodes: tree sizes that were timed, ascending, from 1.
        verify: a step over trees of so many nodes a row, without what the draft does.
        level: of one draft level.
        start: of the draft over a step's accepted tokens, and its first level.
    """

    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    level: float
    start: float

    def seconds(self, most: int) -> list[float]:
        """Of steps over 1, 2, ... ``most`` nodes: linear between what was timed, never falling."""
        found: list[float] = []
        for count in range(1, most + 1):
            # The stretch that holds the count; beyond what was timed, the last one goes on.
            at = sum(nodes <= count for nodes in self.nodes[1:-1])
            low, high = self.nodes[at], self.nodes[at + 1]
            share = (count - low) / (high - low)
            value = self.verify[at] + share * (self.verify[at + 1] - self.verify[at])
            found.append(max(value, found[-1]) if found else value)
        return found


class Prices(NamedTuple):
    """What a step's parts cost now, in seconds."""

    verify: Tensor  # [n] float64: entry i, a step over trees of i + 1 nodes a row
    level: float
    start: float


class CostTable:
    """Step costs over batch sizes and contexts: linear between what was timed.

    Beyond the longest context the last stretch goes on; beyond the largest batch its costs stay.

    Args:
        timed: by rows and context; all contexts for each number of rows.
    """

    def __init__(self, timed: Mapping[tuple[int, int], StepCosts]) -> None:
        self._timed = dict(timed)
        self._rows = sorted({rows for rows, _ in timed})
        self._contexts = sorted({context for _, context in timed})
        self._known: dict[tuple[int, int, int], Prices] = {}

    def at(self, rows: int, context: int, most: int) -> Prices:
        """The prices of a step of ``rows`` rows behind ``context`` tokens, up to ``most`` nodes."""
        key = rows, context // _GRAIN, most
        if key not in self._known:
            self._known[key] = self._between(rows, key[1] * _GRAIN, most)
        return self._known[key]

    def _between(self, rows: int, context: int, most: int) -> Prices:
        low, high, share = _stretch(self._rows, min(rows, self._rows[-1]))
        start, end, way = _stretch(self._contexts, max(context, self._contexts[0]))
        values = torch.zeros(most + 2, dtype=torch.float64)
        for count, much in ((low, 1 - share), (high, share)):
            for length, weight in ((start, 1 - way), (end, way)):
                costs = self._timed[count, length]
                parts = [*costs.seconds(most), costs.level, costs.start]
                values += much * weight * torch.tensor(parts, dtype=torch.float64)
        # Noise must not make a longer context free of charge.
        values.clamp_(min=1e-6)
        level, first = values[most:].tolist()
        return Prices(values[:most], level, first)


def _stretch(known: Sequence[int], value: int) -> tuple[int, int, float]:
    """The two known places that hold a value, or the last two; its share of the way between."""
    at = sum(place <= value for place in known[1:-1])
    low, high = known[at], known[min(at + 1, len(known) - 1)]
    return low, high, (value - low) / (high - low) if high > low else 0.0


class _Fixed(NoDrafter):
    """Chains of any tokens, so that a step is all but the draft."""

    nodes = 1

    def propose(self) -> DraftTree:
        return DraftTree.chain(self._roots[:, None].repeat(1, self.nodes))


class StepTimer:
    """Times steps of ``batch`` rows behind ``context`` tokens each, without what a draft does.

    What the tokens are changes no time, so none is read: making one costs the cache's memory.
    """

    @torch.inference_mode()
    def __init__(self, target: TargetModel, batch: int, context: int) -> None:
        self._chains = _Fixed()
        self._loop = DecodingLoop(
            target, self._chains, make_acceptor("exact"), Limits(10**6, stop_ids=())
        )
        self._loop.prefill(some_prompts(batch), 0, reserve=_SIZES[-1])
        self._loop.cache.pretend(context)

    def seconds(self, nodes: int) -> float:
        """Of one step over trees of so many nodes."""
        self._chains.nodes = nodes
        return timed(self._loop.step, self._loop.target.head_device)[1]


def some_prompts(batch: int) -> list[list[int]]:
    """Short prompts, for what must begin before it can be timed."""
    return [[1 + row % 7, 2, 3, 4] for row in range(batch)]


def batches_up_to(batch: int) -> list[int]:
    """The batch sizes that are timed for one: powers of two, the last at least as large."""
    return [2**power for power in range((batch - 1).bit_length() + 1)]


def step_costs(
    target: TargetModel,
    drafter: Callable[[TreeShape], Drafter],
    top_k: int,
    batch: int,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> dict[int, StepCosts]:
    """The costs of this pair here, by context: those measured earlier, or measured now.

    Measured at a beam of ``top_k``; a few seconds at batch 1, half a minute at 16. Kept in the
    cache folder under a name made of everything that they hang on.
    """
    about = _description(target, drafter, top_k, batch)
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "step-costs" / f"{name}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["costs"]
        return {
            int(context): StepCosts(
                tuple(each["nodes"]), tuple(each["verify"]), each["level"], each["start"]
            )
            for context, each in kept.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    say(
        f"timing steps at batch {batch}, once for this pair and machine; to have it done again, "
        f"delete {path}"
    )
    costs = measure(target, drafter, top_k, batch)
    with contextlib.suppress(OSError):  # a cache that cannot be written is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"about": about, "costs": {key: asdict(each) for key, each in costs.items()}}
        write_text(path, json.dumps(content, indent=1) + "\n")
    return costs


@torch.inference_mode()
def measure(
    target: TargetModel, drafter: Callable[[TreeShape], Drafter], top_k: int, batch: int
) -> dict[int, StepCosts]:
    """Time all parts, sizes in turn so that a slow moment hits them alike; medians."""
    return {context: _measure(target, drafter, top_k, batch, context) for context in _CONTEXTS}


def _measure(
    target: TargetModel,
    drafter: Callable[[TreeShape], Drafter],
    top_k: int,
    batch: int,
    context: int,
) -> StepCosts:
    times = _TIMES if batch <= _FEW_ROWS else _FEW_TIMES
    timer = StepTimer(target, batch, context)
    sizes = list(_SIZES)
    seconds: dict[int, list[float]] = {nodes: [] for nodes in sizes}
    for turn in range(times + 1):
        for nodes in list(sizes):
            took = timer.seconds(nodes)
            if turn:
                seconds[nodes].append(took)
            elif nodes == 1:
                least = timer.seconds(nodes)
            elif took > _DEAR * least and nodes > 2:
                sizes = [size for size in sizes if size <= nodes]
                break
    verify = tuple(statistics.median(seconds[nodes]) for nodes in sizes)
    level, start = _draft_seconds(target, drafter, top_k, batch, context, times)
    return StepCosts(tuple(sizes), verify, level, start)


def _draft_seconds(
    target: TargetModel,
    drafter: Callable[[TreeShape], Drafter],
    top_k: int,
    batch: int,
    context: int,
    times: int,
) -> tuple[float, float]:
    """Of one draft level, and of a step's start."""
    prompts, deep = some_prompts(batch), 4
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor(prompts, device=target.device)
    out = target.prefill(target.new_cache(batch, max(lengths)), tokens, lengths)
    roots = out.logits.argmax(-1)
    made = [drafter(TreeShape(60, depth, top_k)) for depth in (0, deep)]
    prompt = DraftPrompt(tokens, lengths, out.features, roots)
    for each in made:
        each.start(prompt)
        each.pretend(context)
    path = torch.tensor([[0, 1, 2]], device=roots.device).expand(batch, -1)
    seen = Observation(
        path, [3] * batch, roots[:, None].expand(-1, 3), roots, out.features[:, :3].contiguous()
    )
    shallow, deeper, taken = [], [], []
    for turn in range(times + 1):
        spent = [timed(each.propose, target.head_device)[1] for each in made]
        taking = [timed(partial(each.observe, seen), target.head_device)[1] for each in made]
        if turn:
            shallow.append(spent[0])
            deeper.append(spent[1])
            taken += taking
    first = statistics.median(shallow)
    level = (statistics.median(deeper) - first) / deep
    return max(level, 1e-6), first + statistics.median(taken)


def _description(
    target: TargetModel, drafter: Callable[[TreeShape], Drafter], top_k: int, batch: int
) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "target": target.config.to_json_string(),
        "draft": drafter(TreeShape(2, 0, 1)).describe(),
        "dtype": str(target.dtype),
        "device": device_name(target.head_device),
        "threads": torch.get_num_threads(),
        "modules": target.modules,
        "torch": torch.__version__,
        "top_k": top_k,
        "batch": batch,
    }
