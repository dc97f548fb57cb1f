"""Does a draft checkpoint hold together, and does it belong to this target?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eagle_dropmatch.drafts.draft_config import Shapes
from eagle_dropmatch.drafts.eagle3 import Eagle3Config, Eagle3Draft
from eagle_dropmatch.errors import UserError


@dataclass(frozen=True)
class TargetShape:
    """What a draft must agree with in its target."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int

    @classmethod
    def of(cls, config: TargetShape | PreTrainedConfig) -> TargetShape:
        """The shape of a target given as itself or as a transformers config."""
        if isinstance(config, TargetShape):
            return config
        text = config.get_text_config()
        return cls(text.hidden_size, text.vocab_size, text.num_hidden_layers)


def check_fit(name: str, config: Eagle3Config, target: TargetShape) -> None:
    """Refuse a draft that was trained for another target."""
    for what, drafts, targets in (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("a vocabulary of", config.vocab_size, target.vocab_size),
    ):
        if drafts != targets:
            raise UserError(
                f"the draft {name} was trained for a target with {what} {drafts}, and this target "
                f"has {targets}: use a draft that was trained for this target"
            )
    taps = config.tap_layers or ()
    if any(tap > target.num_hidden_layers for tap in taps):
        raise UserError(
            f"the draft {name} taps hidden states {list(taps)} (0 is the embedding), and this "
            f"target's last is {target.num_hidden_layers}: give layer_ids, or the convention "
            "that its ids follow"
        )


def check_tensors(
    name: str, config: Eagle3Config, shapes: Shapes, *, tied: bool, target: TargetShape | None
) -> None:
    """Compare the stored names and shapes with the network's; all differences are one error.

    Args:
        name: the draft's name in the message.
        config: the network that the checkpoint describes.
        shapes: shape of every stored tensor under the official names.
        tied: the LM head is the embedding.
        target: where a missing embedding or head would be borrowed; None asks only whether the
            draft's own sizes allow it.
    """
    with torch.device("meta"):
        network = Eagle3Draft(config)
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    target_width = config.target_hidden_size if target is None else target.hidden_size
    same_width = config.hidden_size == target_width
    full_vocabulary = config.draft_vocab_size == config.vocab_size
    if not config.own_embedding and not same_width:
        expected["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    # A tied head has the embedding's width by itself; a borrowed one has the target's.
    if not config.own_head and not (full_vocabulary and (tied or same_width)):
        expected["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    optional = {"t2d", "d2t"} if full_vocabulary else {"t2d"}

    missing = [f"{k} {list(v)}" for k, v in expected.items() if k not in {*shapes, *optional}]
    surplus = [f"{k} {list(v)}" for k, v in shapes.items() if k not in expected]
    misshapen = [
        f"{k} (expected {list(v)}, found {list(shapes[k])})"
        for k, v in expected.items()
        if k in shapes and shapes[k] != v
    ]
    problems = [
        f"{title} {', '.join(entries)}"
        for title, entries in (
            ("missing", missing),
            ("unexpected", surplus),
            ("of another shape", misshapen),
        )
        if entries
    ]
    if problems:
        raise UserError(
            f"the tensors of the draft {name} are not those its config.json describes: "
            f"{'; '.join(problems)}"
        )


def complete_vocabulary(name: str, config: Eagle3Config, state: dict[str, Tensor]) -> None:
    """Check ``d2t`` and ``t2d`` in ``state`` and put the missing ones there, int64 and bool.

    A draft over the whole vocabulary maps every id to itself: offsets of zero.
    """
    size, vocab = config.draft_vocab_size, config.vocab_size
    device = state["norm.weight"].device
    offsets = state.get("d2t", torch.zeros(size, dtype=torch.int64, device=device))
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise UserError(f"d2t of the draft {name} is {offsets.dtype}: expected whole numbers")
    offsets = offsets.to(torch.int64)
    ids = torch.arange(size, device=device) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(
            f"d2t of the draft {name} maps to target ids {int(ids.min())} to {int(ids.max())}, and "
            f"the vocabulary has {vocab}: expected offsets (target id minus draft id)"
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise UserError(
            f"d2t of the draft {name} is not ascending or maps two draft ids to one target id: "
            "expected offsets (target id minus draft id) of a sorted vocabulary"
        )
    members = torch.zeros(vocab, dtype=torch.bool, device=device)
    members[ids] = True
    if "t2d" in state and not torch.equal(state["t2d"].to(torch.bool), members):
        raise UserError(
            f"t2d and d2t of the draft {name} disagree on which target ids the draft knows: "
            "delete t2d (it follows from d2t), or convert the draft again"
        )
    state["d2t"], state["t2d"] = offsets, members
