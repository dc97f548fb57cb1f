"""Where a transformers causal model is cut: decoder layers, final norm, LM head, and feature taps.

Together with ``target.py`` and ``cache.py`` these are the only files that know how transformers
lays a model out.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from eagle_dropmatch.errors import UserError


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers of a transformers causal model."""
    layers = getattr(backbone(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(
            f"{type(model).__name__} has no list of decoder layers called 'layers': only "
            "decoder-only models laid out like Llama, Qwen or Mistral can be targets"
        )
    return layers


def backbone(model: Any) -> nn.Module:
    """The model without its LM head."""
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return decoder


def attention_sizes(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads and the size of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's taps of an N-layer target: hidden states 2, N // 2 and N - 3."""
    taps = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        raise UserError(
            f"the target has {num_layers} layers, and EAGLE-3's three taps (2, N // 2, N - 3) "
            "are distinct and in order only from 7 layers on: give layer_ids explicitly"
        )
    return taps


class FeatureTaps:
    """Records the residual stream at chosen boundaries while the backbone runs.

    Index i is transformers' ``hidden_states[i]``: the input of layer i, and for i = N the last
    layer's output before the final norm.

    Use as a context manager around one forward; ``joined()`` then gives [B, S, len(layers) * H].

    Args:
        stack: the backbone's decoder layers.
        layers: indices.
    """

    def __init__(self, stack: nn.ModuleList, layers: Sequence[int]) -> None:
        wrong = [i for i in layers if not 0 <= i <= len(stack)]
        if wrong or len(set(layers)) != len(layers):
            raise UserError(
                f"feature taps {list(layers)} do not fit a target of {len(stack)} layers: give "
                f"distinct hidden-state indices from 0 to {len(stack)}"
            )
        self.layers = tuple(layers)
        self._stack = stack
        self._values: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureTaps:
        self._values.clear()
        for index in self.layers:
            if index < len(self._stack):
                hook = self._stack[index].register_forward_pre_hook(
                    self._record_input(index), with_kwargs=True
                )
            else:
                hook = self._stack[-1].register_forward_hook(self._record_output(index))
            self._handles.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def joined(self) -> Tensor:
        """The taps of the last forward side by side, in the order asked for, on one device."""
        device = self._values[self.layers[-1]].device
        return torch.cat([self._values[i].to(device) for i in self.layers], dim=-1)

    def _record_input(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._values[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _record_output(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._values[index] = output[0] if isinstance(output, tuple) else output

        return hook
