"""The target: any transformers causal model, verified over trees through a 4-D mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from eagle_dropmatch.cache import TreeCache
from eagle_dropmatch.compiled import CompiledBody
from eagle_dropmatch.errors import UserError
from eagle_dropmatch.fused import PackedLinear, fused
from eagle_dropmatch.taps import FeatureTaps, attention_sizes, backbone, decoder_layers
from eagle_dropmatch.tree import DraftTree, additive, position_ids, tree_attention

#: Prompt tokens that a forward reads, of all rows together; longer prompts take several.
PREFILL_AT_ONCE = 1024
#: Attention backends that take an additive 4-D mask. Flash attention has no place for one.
ATTENTION_BACKENDS = ("sdpa", "eager")


#: Tokens of the vocabulary whose weights ``LMHead.block_ranges`` takes together (few_heads.cpp has
#: the same number).
BLOCK = 32


class TargetOutput(NamedTuple):
    """What one verification forward gives for the N nodes of each tree."""

    logits: Tensor  # [B, N, V] in the model's dtype
    hidden: Tensor  # [B, N, D], the LM head's input, after the final norm
    features: Tensor  # [B, N, taps * D]; without taps, ``hidden`` itself


class PrefillOutput(NamedTuple):
    """What the prompt's forward gives; rows are right-padded."""

    logits: Tensor  # [B, V], at each row's last prompt token
    last_hidden: Tensor  # [B, D], the LM head's input there
    hidden: Tensor  # [B, S, D]
    features: Tensor  # [B, S, taps * D]; without taps, ``hidden`` itself


class LMHead:
    """The LM head as rules see it: logits from its input, with what the model does to them after.

    Args:
        module: the model's output embeddings, a linear layer.
        finish: scaling or cap, or None where the product is what the model calls logits.
        product: what multiplies in the module's place, faster.
        native: let rules read the weights by machine code of our own, where they have some.
    """

    def __init__(
        self,
        module: nn.Module,
        finish: Callable[[Tensor], Tensor] | None = None,
        product: Callable[[Tensor], Tensor] | None = None,
        *,
        native: bool = False,
    ) -> None:
        self.module, self.finish, self.native = module, finish, native
        self._product = module if product is None else product

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        logits: Tensor = self._product(hidden)
        return logits if self.finish is None else self.finish(logits)

    @cached_property
    def columns(self) -> Tensor:
        """[D, V], the weights again with each column in one piece; a copy, made when asked for."""
        return self.weight.detach().t().contiguous()

    @cached_property
    def block_ranges(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest weight of each ``BLOCK`` of tokens in each dimension.

        Both [D, ceil(V / BLOCK)] in the model's dtype, made when asked for.
        """
        ranges = [part.aminmax(dim=0) for part in self.weight.detach().split(BLOCK)]
        least, greatest = zip(*ranges, strict=True)
        return torch.stack(least, 1).contiguous(), torch.stack(greatest, 1).contiguous()

    @cached_property
    def column_variance(self) -> Tensor:
        """[D] float32, of each column of the weights over the vocabulary."""
        weight = self.weight
        # In parts: a float32 copy of a large head is gigabytes.
        parts = weight.detach().split(8192)
        mean = torch.stack([part.float().sum(0) for part in parts]).sum(0) / len(weight)
        squares = [(part.float() - mean).square().sum(0) for part in parts]
        return torch.stack(squares).sum(0) / (len(weight) - 1)

    def at(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The product at a few tokens alone, in float32 and unfinished.

        Args:
            hidden: [..., K, D].
            tokens: [...] int64, one for each K states.

        Returns:
            [..., K] float32.
        """
        rows = self.weight[tokens].float()
        logits = (rows[..., None, :] @ hidden.float().mT).squeeze(-2)
        return logits if self.bias is None else logits + self.bias[tokens].float()[..., None]

    @property
    def weight(self) -> Tensor:
        """[V, D]."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V], or None."""
        return getattr(self.module, "bias", None)


class TargetModel:
    """Runs a transformers causal model over prompts and draft trees.

    Args:
        model: the transformers model, in evaluation mode, attention ``sdpa`` or ``eager``.
        tap_layers: ``hidden_states`` indices that the draft reads; None where it reads the last
            hidden state after the final norm (drafts without ``fc``), or nothing at all.
        fuse: run a faster view of the decoder (``fused.py``); the model itself stays as it is.
        compile: run the decoder as machine code (``compiled.py``), which may have to be made first.
    """

    def __init__(
        self,
        model: Any,
        tap_layers: Sequence[int] | None = None,
        *,
        fuse: bool = False,
        compile: bool = False,
    ) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        check_attention(self.config, getattr(model.config, "_attn_implementation", "sdpa"))
        stack, head = decoder_layers(model), model.get_output_embeddings()
        self.body, product = backbone(model), None
        self._compiled: CompiledBody | None = None
        self.modules = "transformers'"  # what runs in the place of the model's own
        if fuse and not compile:
            self.modules, self.body = "fused", fused(self.body)
            stack = cast(nn.ModuleList, self.body.layers)
        self.taps = FeatureTaps(stack, tap_layers) if tap_layers is not None else None
        if compile:
            self.modules, self._compiled = "compiled", CompiledBody(self.body, tap_layers)
        if (fuse or compile) and type(head) is nn.Linear:
            product = PackedLinear.of(head)
        self.head = LMHead(head, logits_finisher(self.config), product, native=compile)
        _, self._kv_heads, self._head_dim = attention_sizes(self.config)
        self._layer_devices = [next(layer.parameters()).device for layer in decoder_layers(model)]
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError(
                "device_map offloads a part of the target: it must fit into its devices' memory"
            )

    @property
    def device(self) -> torch.device:
        """Where token ids go in: the embedding's device."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def head_device(self) -> torch.device:
        """Where hidden states and logits come out."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def new_cache(self, batch: int, capacity: int) -> TreeCache:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens before it must grow."""
        return TreeCache(
            self._layer_devices, batch, self._kv_heads, self._head_dim, capacity, self.dtype
        )

    def prefill(self, cache: TreeCache, tokens: Tensor, lengths: Sequence[int]) -> PrefillOutput:
        """Read right-padded prompts into an empty cache.

        Args:
            tokens: [B, S] int64.
            lengths: prompt tokens a row, 1..S.
        """
        batch, size = tokens.shape
        places = torch.arange(size, device=tokens.device)
        hidden = features = torch.empty(0)
        # In parts: the mask of a long prompt at once would be the square of its length.
        part = max(PREFILL_AT_ONCE // batch, 1)
        for start in range(0, size, part):
            here = places[start : start + part]
            cache.open(len(here), behind=start)
            # Causal alone is enough: padding stands to the right of everything that counts.
            mask = additive(places[: cache.key_length] <= here[:, None], self.dtype)
            states, taps = self.read(
                tokens[:, start : start + part],
                mask.expand(batch, 1, *mask.shape),
                here.expand(batch, -1),
                cache,
            )
            if not start:
                # Whole at once: joining parts would hold all of them twice.
                hidden = states.new_empty(batch, size, states.shape[-1])
                features = hidden if taps is states else taps.new_empty(batch, size, taps.shape[-1])
            hidden[:, start : start + part] = states
            if taps is not states:
                features[:, start : start + part] = taps
        cache.commit(lengths)
        rows = torch.arange(batch, device=hidden.device)
        last = torch.tensor(lengths, device=hidden.device) - 1
        ends = hidden[rows, last]
        return PrefillOutput(self.head(ends), ends, hidden, features)

    def verify(self, cache: TreeCache, tree: DraftTree) -> TargetOutput:
        """Run all nodes of the trees in one forward, behind each row's committed tokens."""
        cache.open(tree.tokens.shape[1])
        mask = tree_attention(tree, cache.lengths, cache.key_length, self.dtype)
        hidden, features = self.read(tree.tokens, mask, position_ids(tree, cache.lengths), cache)
        return TargetOutput(self.head(hidden), hidden, features)

    def read(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: TreeCache
    ) -> tuple[Tensor, Tensor]:
        """The LM head's input [B, S, D] and the features of tokens [B, S] behind an open cache.

        mask: [B, 1, S, keys], additive; positions: [B, S].
        """
        if self._compiled is not None:
            return self._compiled(tokens, mask, positions, cache)

        def run() -> Tensor:
            out = self.body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
            )
            hidden: Tensor = out.last_hidden_state
            return hidden.to(self.head_device)

        if self.taps is None:
            hidden = run()
            return hidden, hidden
        with self.taps:
            hidden = run()
        return hidden, self.taps.joined()


def logits_finisher(config: Any) -> Callable[[Tensor], Tensor] | None:
    """What a model does to its LM head's output before it calls it logits; None for nothing."""
    cap = getattr(config, "final_logit_softcapping", None)
    divide = getattr(config, "logits_scaling", None)
    times = getattr(config, "logit_scale", None)
    if divide is None and times is None and cap is None:
        return None

    def finish(logits: Tensor) -> Tensor:
        if divide is not None:
            logits = logits / divide
        if times is not None:
            logits = logits * times
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return finish


def check_attention(config: Any, backend: str) -> None:
    """Refuse, in one line, what cannot verify a tree exactly."""
    name = getattr(config, "model_type", "this model")
    if backend not in ATTENTION_BACKENDS:
        raise UserError(
            f"attn_implementation {backend!r} cannot carry a tree mask: use "
            f"{' or '.join(ATTENTION_BACKENDS)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    if kinds - {"full_attention"}:
        raise UserError(
            f"{name} has layers of type {', '.join(sorted(kinds - {'full_attention'}))}: a tree "
            "can be verified only where every layer is full attention, so it cannot be a target"
        )
    if window is not None and not kinds:
        raise UserError(
            f"{name} attends in a sliding window of {window} tokens: a tree can be verified only "
            "where every layer is full attention, so it cannot be a target"
        )
    if not hasattr(config, "num_attention_heads"):
        raise UserError(f"{name} has no attention layers to verify a tree with")


@torch.inference_mode()
def probe(target: TargetModel) -> None:
    """Check on a few tokens that the cut model says what the whole one says, or refuse it.

    A prompt and a branching tree behind it, read through the cache and the mask, must give the
    logits of plain forwards over the same tokens. This catches a model that ignores the mask or
    the positions, or does something to its logits that is not known here.
    """
    ids = (torch.arange(6, device=target.device) * 7 + 3) % target.vocab_size
    prompt, drafted = ids[:3], ids[3:]
    tree = DraftTree.from_parents(drafted[None], torch.tensor([[-1, 0, 0]], device=drafted.device))
    branch = torch.cat((prompt, drafted[:1], drafted[2:]))
    plain = target.model(input_ids=branch[None], use_cache=False).logits
    name = type(target.model).__name__
    try:
        cache = target.new_cache(1, 8)
        first = target.prefill(cache, prompt[None], [3]).logits
        second = target.verify(cache, tree).logits[:, 2]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{name} cannot run with a tree mask and a cache of its own keys and values "
            f"({error}): it cannot be a target"
        ) from error
    # In standard deviations of the logits: rounding is far below, another computation far above.
    tolerance = 0.01 if target.dtype == torch.float32 else 1.0
    for ours, theirs in ((first, plain[:, 2]), (second, plain[:, 4])):
        theirs = theirs.to(ours.device).float()
        scale = theirs.std().clamp(min=1e-6)
        if not ((ours.float() - theirs).abs().max() / scale < tolerance):
            raise UserError(
                f"{name} does not give the same logits through a tree mask as without one: it "
                "cannot be a target"
            )
