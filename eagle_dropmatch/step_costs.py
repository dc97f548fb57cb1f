"""What a decoding step costs on this machine: measured once for a pair, kept, and read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from eagle_dropmatch.acceptors import make_acceptor
from eagle_dropmatch.assets import cache_dir
from eagle_dropmatch.clock import timed
from eagle_dropmatch.drafts.base import Drafter, DraftPrompt, NoDrafter, Observation, TreeShape
from eagle_dropmatch.files import write_text
from eagle_dropmatch.loop import DecodingLoop, Limits
from eagle_dropmatch.machine import device_name
from eagle_dropmatch.target import TargetModel
from eagle_dropmatch.tree import DraftTree

_FORMAT = 1
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_CONTEXT, _TIMES = 256, 7


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts, for one pair on one machine at one batch size.

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


class _Fixed(NoDrafter):
    """Chains of any tokens, so that a step is all but the draft."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def propose(self) -> DraftTree:
        return DraftTree.chain(self._roots[:, None].repeat(1, self.nodes))


def step_costs(
    target: TargetModel,
    drafter: Callable[[TreeShape], Drafter],
    top_k: int,
    batch: int,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> StepCosts:
    """The costs of this pair here: those measured earlier, or measured now, in a few seconds.

    Measured at a context of 256 tokens a row and a beam of ``top_k``. Kept in the cache folder
    under a name made of everything that they hang on.
    """
    about = _description(target, drafter, top_k, batch)
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "step-costs" / f"{name}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["costs"]
        return StepCosts(tuple(kept["nodes"]), tuple(kept["verify"]), kept["level"], kept["start"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    say(
        "timing steps over trees of 1 to 64 nodes, once for this pair and machine; to have it done "
        f"again, delete {path}"
    )
    costs = measure(target, drafter, top_k, batch)
    with contextlib.suppress(OSError):  # a cache that cannot be written is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"about": about, "costs": asdict(costs)}, indent=1) + "\n")
    return costs


@torch.inference_mode()
def measure(
    target: TargetModel, drafter: Callable[[TreeShape], Drafter], top_k: int, batch: int
) -> StepCosts:
    """Time all parts, sizes in turn so that a slow moment hits them alike; medians."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.vocab_size, (batch, _CONTEXT), generator=generator).tolist()
    limits = Limits(max_new_tokens=10**6, stop_ids=())
    exact = make_acceptor("exact")
    loops = []
    for nodes in _SIZES:
        loop = DecodingLoop(target, _Fixed(nodes), exact, limits)
        loop.prefill(prompts, 0, reserve=nodes)
        loops.append(loop)
    seconds: list[list[float]] = [[] for _ in _SIZES]
    for turn in range(_TIMES + 1):
        for loop, mine in zip(loops, seconds, strict=True):
            _, took = timed(loop.step, target.head_device)
            if turn:
                mine.append(took)
    level, start = _draft_seconds(target, drafter, top_k, prompts)
    return StepCosts(_SIZES, tuple(map(statistics.median, seconds)), level, start)


def _draft_seconds(
    target: TargetModel,
    drafter: Callable[[TreeShape], Drafter],
    top_k: int,
    prompts: list[list[int]],
) -> tuple[float, float]:
    """Of one draft level, and of a step's start."""
    batch, deep = len(prompts), 4
    cache = target.new_cache(batch, _CONTEXT + 8)
    tokens = torch.tensor(prompts, device=target.device)
    out = target.prefill(cache, tokens, [_CONTEXT] * batch)
    roots = out.logits.argmax(-1)
    made = [drafter(TreeShape(60, depth, top_k)) for depth in (0, deep)]
    prompt = DraftPrompt(tokens, [_CONTEXT] * batch, out.features, roots)
    for each in made:
        each.start(prompt)
    path = torch.tensor([[0, 1, 2]], device=roots.device).expand(batch, -1)
    seen = Observation(
        path, [3] * batch, roots[:, None].expand(-1, 3), roots, out.features[:, :3].contiguous()
    )
    shallow, deeper, taken = [], [], []
    for turn in range(_TIMES + 1):
        times = [timed(each.propose, target.head_device)[1] for each in made]
        taking = [timed(partial(each.observe, seen), target.head_device)[1] for each in made]
        if turn:
            shallow.append(times[0])
            deeper.append(times[1])
            taken += taking
    first = statistics.median(shallow)
    level = (statistics.median(deeper) - first) / deep
    return max(level, 1e-6), first + statistics.median(taken)


def _description(
    target: TargetModel, drafter: Callable[[TreeShape], Drafter], top_k: int, batch: int
) -> dict[str, Any]:
    config = getattr(getattr(drafter(TreeShape(2, 0, 1)), "draft", None), "config", None)
    return {
        "format": _FORMAT,
        "target": target.config.to_json_string(),
        "draft": repr(config),
        "dtype": str(target.dtype),
        "device": device_name(target.head_device),
        "threads": torch.get_num_threads(),
        "modules": target.modules,
        "torch": torch.__version__,
        "top_k": top_k,
        "batch": batch,
    }
