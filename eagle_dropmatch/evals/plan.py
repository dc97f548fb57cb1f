"""The arms of an evaluation before any model is loaded: what they are and how they are named.

plain   our own loop with an empty tree: what drafting has to beat
hf      ``generate`` of transformers on the same model object
lookup  the same with its prompt-lookup decoding, which drafts from the text so far
assisted the same with its assisted decoding, by the small model of --draft-lm or --sd-lm
exact   EAGLE-3 trees, accepted only where the target agrees
naive   EAGLE-3 trees under a lossy rule (any acceptor, by its name or expression)
sd      chains of the small language model of --sd-lm: speculative decoding, exact
sd:naive the same chains under a lossy rule
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch comes with it, and bad arguments are refused without torch
    from ..acceptors import Acceptor

PLAIN, HF, LOOKUP, ASSISTED, EXACT = "plain", "hf", "lookup", "assisted", "exact"
SD = "sd"
NO_DRAFTING = "none"
"""``ArmSpec.acceptance`` of the baselines."""


class ArmSpec(NamedTuple):
    """What an arm is, without the models: enough to name its file and read it back."""

    name: str
    """Unique; part of the file name."""
    group: str
    """Row of the table: the arms of several mask seeds share one."""
    label: str
    acceptance: str
    """"none" without drafting, else the acceptor's name. Readers use it to spot lossy runs."""
    lossy: bool
    seed: int | None
    """Mask seed of a randomised rule."""
    tree: tuple[int, int, int] | str | None = None
    """(total_token, depth, top_k) of an arm with a tree of its own, or "auto"; None: the
    decoder's."""
    control: bool = False
    """Plain sampling among the tokens that its rule would accept: what a truncation costs alone."""
    chain: bool = False
    """Speculative decoding by the small language model, in chains."""

    @property
    def lossless_twin(self) -> str:
        """The group of the arm that a lossy one is judged against."""
        return SD if self.chain else EXACT


def drafter_name(draft_lm: object, draft_ngram: object) -> str:
    """What tables call the drafter of a run with these options."""
    if draft_ngram is not None:
        return "n-gram"
    return "EAGLE-3" if draft_lm is None else "small LM"


def plan_run(
    arguments: Mapping[str, Any], rules: Mapping[str, Acceptor] | None = None
) -> list[tuple[ArmSpec, Acceptor | None]]:
    """All arms of a run in the table's order, from what its header says of it.

    Args:
        arguments: as ``run_arguments`` gives them, or read back.
        rules: those of the arms by their names, where they are none that a user can name.
    """
    flags, seeds = arguments["acceptor_options"], arguments["seeds"]
    if rules is None:
        rules = make_rules([text for text in arguments["acceptors"] if text != EXACT], flags)
    planned = plan_arms(
        arguments["arms"],
        rules,
        seeds,
        [tree if isinstance(tree, str) else tuple(tree) for tree in arguments["trees"]],
        controls=arguments["controls"],
        drafter=drafter_name(arguments.get("draft_lm"), arguments.get("draft_ngram")),
    )
    if "sd" in arguments:
        _, chains, length = arguments["sd"]
        planned += plan_chains(make_rules(chains, flags), seeds, length)
    return planned


def plan_arms(
    chosen: Sequence[str],
    rules: Mapping[str, Acceptor],
    seeds: Sequence[int],
    trees: Sequence[tuple[int, int, int] | str] = (),
    *,
    controls: bool = False,
    drafter: str = "EAGLE-3",
) -> list[tuple[ArmSpec, Acceptor | None]]:
    """The ``chosen`` arms in the table's order, each with its rule; None where nobody is judged.

    A random rule gets one arm for each of ``seeds``, or one with its own seed where there are none.
    With ``trees`` there is an exact arm for each of them instead of one.

    Args:
        rules: by the text that they were given as, which names them.
        controls: a control arm beside each lossy rule that can do without a draft.
        drafter: what labels call it; see ``drafter_name``.
    """
    from ..acceptors import ExactAcceptor, seed_of, with_seed

    exact = ExactAcceptor()
    arms: list[tuple[ArmSpec, Acceptor | None]] = []
    if PLAIN in chosen:
        spec = ArmSpec(PLAIN, PLAIN, "plain (our loop)", NO_DRAFTING, False, None)
        arms.append((spec, exact))
    if HF in chosen:
        spec = ArmSpec(HF, HF, "transformers'\ngenerate", NO_DRAFTING, False, None)
        arms.append((spec, None))
    if LOOKUP in chosen:
        label = "transformers'\nprompt lookup"
        arms.append((ArmSpec(LOOKUP, LOOKUP, label, NO_DRAFTING, False, None), None))
    if ASSISTED in chosen:
        label = "transformers'\nassisted"
        arms.append((ArmSpec(ASSISTED, ASSISTED, label, NO_DRAFTING, False, None), None))
    for shape in trees:
        parts = [shape] if isinstance(shape, str) else list(map(str, shape))
        name, label = "-".join((EXACT, *parts)), f"{drafter} {'/'.join(parts)}"
        arms.append((ArmSpec(name, name, label, EXACT, False, None, shape), exact))
    if EXACT in chosen and not trees:
        arms.append((ArmSpec(EXACT, EXACT, f"{drafter} exact", EXACT, False, None), exact))
    for text, rule in rules.items():
        if text not in chosen:
            continue
        own = seed_of(rule)
        drawn = [None] if own is None else list(seeds) or [own]
        stem = file_name(text, [spec.name for spec, _ in arms])
        for seed in drawn:
            name = stem if len(drawn) == 1 else f"{stem}-seed{seed}"
            label = f"{drafter} + {text}" if len(text) <= SHORT else f"+ {text}"
            spec = ArmSpec(name, text, label, text, not rule.lossless, seed)
            arms.append((spec, rule if seed is None else with_seed(rule, seed)))
        if controls and not (rule.lossless or rule.needs_draft):
            name = file_name(f"control-{text}", [spec.name for spec, _ in arms])
            group = f"control of {text}"
            arms.append((ArmSpec(name, group, group, NO_DRAFTING, True, own, None, True), rule))
    return arms


def make_rules(texts: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Acceptor]:
    """The rules by the texts that name them, each with those of the flags' options that it takes.

    An expression has its options written in and takes none of them.
    """
    from ..acceptors import make_acceptor

    return {text: make_acceptor(text, **flags_of(text, flags)) for text in texts}


def flags_of(text: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags' options that a rule takes."""
    from ..acceptors import ACCEPTORS, option_names

    known = option_names(ACCEPTORS[text]) if text in ACCEPTORS else []
    return {name: value for name, value in flags.items() if name in known}


def plan_chains(
    rules: Mapping[str, Acceptor], seeds: Sequence[int], length: int
) -> list[tuple[ArmSpec, Acceptor | None]]:
    """Speculative decoding in chains of ``length`` drafted tokens: exact, and under each rule."""
    arms = plan_arms([EXACT, *rules], rules, seeds)
    tree = (length + 1, length - 1, 1)
    return [
        (
            spec._replace(
                name=SD if spec.name == EXACT else f"{SD}-{spec.name}",
                group=SD if spec.group == EXACT else f"{SD}:{spec.group}",
                label="SD, exact" if spec.group == EXACT else f"SD + {spec.group}",
                tree=tree,
                chain=True,
            ),
            rule,
        )
        for spec, rule in arms
    ]


SHORT = 14
"""Rules of up to so many characters are written out in the table's first column."""


def file_name(text: str, taken: Sequence[str]) -> str:
    """A rule as a part of a file's name, which no name that is taken begins with."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")
    begun = [each for each in taken if each == name or each.startswith(f"{name}-seed")]
    return f"{name}-{len(taken)}" if begun else name
