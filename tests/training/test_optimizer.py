"""The flat optimizer and the learning rate's schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from eagle_dropmatch.training.optimizer import FlatAdamW, learning_rate


def networks():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return ours, copy.deepcopy(ours)


def gradients(network, seed):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    (network(x).square().sum() * 10).backward()


def test_it_is_adamw_with_a_clipped_norm():
    ours, theirs = networks()
    flat = FlatAdamW(list(ours.parameters()), betas=(0.9, 0.95), clip=0.5)
    adam = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for seed, rate in enumerate((0.01, 0.02, 0.005)):
        gradients(ours, seed)
        gradients(theirs, seed)
        for parameter in theirs.parameters():
            parameter.grad /= 6.0
        wanted = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        adam.zero_grad()
        assert flat.step(6.0, rate).item() == pytest.approx(float(wanted), rel=1e-5)
        assert float(wanted) > 0.5
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_a_small_gradient_is_not_touched_by_the_clip():
    ours, _ = networks()
    flat = FlatAdamW(list(ours.parameters()), betas=(0.9, 0.95), clip=1e9)
    gradients(ours, 0)
    wanted = torch.cat([p.grad.flatten() for p in ours.parameters()]) / 2
    norm = flat.step(2.0, 1e-3)
    torch.testing.assert_close(norm, wanted.norm())
    torch.testing.assert_close(flat.state()["adam"]["state"][0]["exp_avg"], 0.1 * wanted)


def test_a_step_that_taught_nothing_changes_nothing():
    ours, theirs = networks()
    flat = FlatAdamW(list(ours.parameters()), betas=(0.9, 0.95), clip=0.5)
    assert flat.step(0.0, 0.1).item() == 0.0
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert flat.state()["adam"]["state"] == {}


def test_a_low_precision_network_follows_a_float32_master():
    ours, _ = networks()
    ours.to(torch.bfloat16)
    flat = FlatAdamW(list(ours.parameters()), betas=(0.9, 0.95), clip=0.5)
    # Steps of 1e-5 are lost in bfloat16 and add up in the master.
    start = flat.master.detach().clone()
    for seed in range(40):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        ours(x).float().square().sum().backward()
        flat.step(1.0, 1e-5)
    assert (flat.master - start).abs().max() > 1e-4
    assert flat.master.dtype == torch.float32
    flattened = torch.cat([p.detach().flatten() for p in ours.parameters()])
    assert torch.equal(flattened, flat.master.detach().bfloat16())


def test_the_learning_rate_rises_stays_and_falls():
    rates = [learning_rate(s, peak=2.0, warmup=4, total=20, decay_steps=10) for s in range(20)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:11] == [2.0] * 7
    assert rates[11:] == pytest.approx([1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2])
    late = learning_rate(199, peak=2.0, warmup=0, total=200, decay_steps=100)
    assert late == pytest.approx(2.0 * 0.05)


def test_a_longer_run_has_the_same_rates_up_to_the_shorter_ones_fall():
    def rates(total):
        return [
            learning_rate(s, peak=1.0, warmup=5, total=total, decay_steps=10) for s in range(30)
        ]

    assert rates(40)[:31] == rates(400)[:31]
    assert learning_rate(7, peak=1.0, warmup=0, total=8, decay_steps=0) == 1.0
