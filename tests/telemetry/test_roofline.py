"""The minimum work of a call, on cases that can be counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from rlinf_vla.benchmarks.roofline import Limits, Work, measured_limits, work


def test_arithmetic_and_weights_of_linear_layers() -> None:
    layer, x = nn.Linear(16, 32, bias=False), torch.randn(5, 16)
    once = Work(flops=2 * 5 * 16 * 32, bytes=4 * 16 * 32)
    assert work(lambda: layer(x), layer.parameters()) == once
    assert work(lambda: (layer(x), layer(x)), layer.parameters()) == Work(2 * once.flops, 2 * once.bytes)
    assert work(lambda: layer.bfloat16()(x.bfloat16()), layer.parameters()).flops == once.flops


def test_a_weight_that_is_only_indexed_or_viewed_is_not_read() -> None:
    table = nn.Embedding(1000, 8)
    assert work(lambda: table(torch.tensor([1, 2])), table.parameters()).bytes == 0
    assert work(lambda: table.weight.t(), table.parameters()) == Work(0, 0)


def test_the_slower_of_both_limits_counts() -> None:
    limits = Limits(flops_per_s=100.0, bytes_per_s=10.0)
    assert limits.least_seconds(Work(200, 10)) == 2
    assert limits.least_seconds(Work(200, 50)) == 5
    measured = measured_limits(torch.device("cpu"), torch.float32)
    assert measured.flops_per_s > 1e8 and measured.bytes_per_s > 1e7
