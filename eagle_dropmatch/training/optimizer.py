"""One flat float32 master vector under a network that computes in its own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FlatAdamW:
    """AdamW without weight decay over all parameters as one vector.

    The network's parameters become views of one buffer in their dtype (bfloat16 where the
    processor has it); the master copy and the moments stay in float32. One vector means one
    reduction between workers, one norm to clip and one update, whatever the layer count.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], betas: tuple[float, float], clip: float
    ) -> None:
        self.parameters = list(parameters)
        self.clip = clip
        self.working = torch.cat([p.detach().flatten() for p in self.parameters])
        self.master = nn.Parameter(self.working.float().clone())
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            parameter.data = self.working[start:end].view_as(parameter)
            start = end
        self.fused = self.master.is_cuda
        self.adam = torch.optim.AdamW(
            [self.master], betas=betas, weight_decay=0.0, fused=self.fused
        )

    def step(self, count: float, learning_rate: float) -> Tensor:
        """Apply the summed gradients divided by ``count``, all workers together.

        Returns the gradient's norm before clipping, a scalar on the device: the host does not wait
        for it. A step that taught nothing changes nothing.
        """
        gradient = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten().float()
                for p in self.parameters
            ]
        )
        if dist.is_initialized():
            dist.all_reduce(gradient)
        for parameter in self.parameters:
            parameter.grad = None
        if count == 0:
            return torch.zeros((), device=gradient.device)
        gradient /= count
        norm = gradient.norm()
        gradient *= (self.clip / norm).clamp(max=1.0)
        self.master.grad = gradient
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        self.master.grad = None
        self.working.copy_(self.master.detach())
        return norm

    def state(self) -> dict[str, Any]:
        return {"master": self.master.detach(), "adam": self.adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.master.copy_(state["master"])
        adam = state["adam"]
        # Where the saved run had another device, the kernel is this device's.
        groups = [{**group, "fused": self.fused} for group in adam["param_groups"]]
        self.adam.load_state_dict({**adam, "param_groups": groups})
        self.working.copy_(self.master.detach())


def learning_rate(step: int, *, peak: float, warmup: int, total: int, decay_steps: int) -> float:
    """Warm-up, constant, and a linear fall to a twentieth over the last ``decay_steps`` steps.

    The constant middle lets a run be made longer: all that depends on its end is the fall.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    left = max(0, total - step)
    if left >= decay_steps:
        return peak
    return peak * max(0.05, left / decay_steps)
