"""The minimum work of a call, on cases that can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_vla.benchmarks import roofline
from rlinf_vla.benchmarks.roofline import Limits, limits_of, measured_limits
from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.features.planner.accounting import kernels_of
from rlinf_vla.features.planner.work import Work, counted, work
from rlinf_vla.training.lora_layers import AdaptedProduct

BATCH = 3
LENGTH = 10
WIDTH = 32
HEADS = 4
LAYERS = 2


class Block(nn.Module):
    """A transformer layer whose MLP is four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


# per layer: products with 12 width² weights for each token, and two products of attention
LINEAR = LAYERS * 2 * BATCH * LENGTH * 12 * WIDTH**2
ATTENTION = LAYERS * 2 * BATCH * 2 * LENGTH**2 * WIDTH


def network(device: str) -> tuple[nn.ModuleList, Callable[[], Tensor]]:
    blocks = nn.ModuleList(Block() for _ in range(LAYERS)).to(device)
    x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device)

    def run() -> Tensor:
        found = x.clone().requires_grad_(torch.is_grad_enabled())
        for block in blocks:
            found = block(found, mask)
        return found.sum()

    return blocks, run


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_transformer_does_what_the_closed_form_says(device: str) -> None:
    blocks, run = network(device)
    with kernels_of("cpu"):
        assert work(run, blocks.parameters()).flops == LINEAR + ATTENTION
        with torch.inference_mode():
            assert work(run, blocks.parameters()).flops == LINEAR + ATTENTION
        everything = work(lambda: run().backward(), blocks.parameters())
        assert everything.flops == 3 * (LINEAR + ATTENTION), (
            "a gradient of the inputs and one of the weights for each product"
        )
        blocks.requires_grad_(False)
        assert (
            work(lambda: run().backward(), blocks.parameters()).flops == 2 * LINEAR + 3 * ATTENTION
        ), "no gradients of frozen weights"


def test_attention_counts_the_same_in_every_kernel() -> None:
    q, k = torch.randn(2, 4, 6, 8, device="meta"), torch.randn(2, 4, 9, 8, device="meta")
    plain = work(lambda: F.scaled_dot_product_attention(q, k, k), [])
    assert plain.flops == 2 * 2 * (2 * 4 * 6 * 9 * 8)
    with kernels_of("cpu"):
        fused = work(lambda: F.scaled_dot_product_attention(q, k, k), [])
    assert fused.flops == plain.flops
    assert fused.bytes == 4 * (2 * q.numel() + 2 * k.numel() + 2 * 4 * 6) < plain.bytes, (
        "in, out, and a number per row and head"
    )
    one = k[:, :1]
    with kernels_of("cpu"):
        assert (
            work(lambda: F.scaled_dot_product_attention(q, one, one, enable_gqa=True), []).flops
            == fused.flops
        ), "grouped queries"


def test_both_products_of_lora_count() -> None:
    rows = 5
    wide = 16
    out = 32
    rank = 4
    x, a, b = (
        torch.randn(*shape, requires_grad=True)
        for shape in ((rows, wide), (rank, wide), (out, rank))
    )
    weight = torch.randn(out, wide)
    factors = 2 * rows * rank * (wide + out)
    forward = work(lambda: AdaptedProduct.apply(x, weight, None, a, b, 0.5), [weight, a, b])
    assert forward.flops == 2 * rows * wide * out + factors
    both = work(
        lambda: AdaptedProduct.apply(x, weight, None, a, b, 0.5).sum().backward(), [weight, a, b]
    )
    assert both.flops == 2 * (2 * rows * wide * out) + 3 * factors, (
        "no gradient of the frozen weight"
    )


def test_arithmetic_and_bytes_of_linear_layers() -> None:
    layer = nn.Linear(16, 32, bias=False)
    x = torch.randn(5, 16)
    once = Work(flops=2 * 5 * 16 * 32, bytes=4 * (16 * 32 + 5 * 16 + 5 * 32))
    assert work(lambda: layer(x), layer.parameters()) == once
    assert work(lambda: (layer(x), layer(x)), layer.parameters()) == once * 2 == once + once
    low = work(lambda: layer.bfloat16()(x.bfloat16()), layer.parameters())
    assert low.flops == once.flops and once.bytes / 2 <= low.bytes < 2 * once.bytes, (
        "the conversion reads the weights once, too"
    )


def test_a_weight_that_is_only_indexed_or_viewed_is_not_read() -> None:
    table = nn.Embedding(1000, 8)
    assert work(lambda: table(torch.tensor([1, 2])), table.parameters()).bytes == 0
    assert work(lambda: table.weight.t(), table.parameters()) == Work(0, 0)


def test_the_slower_of_both_limits_counts() -> None:
    limits = Limits(flops_per_s=100.0, bytes_per_s=10.0)
    assert limits.least_seconds(Work(200, 10)) == 2
    assert limits.least_seconds(Work(200, 50)) == 5
    reached = limits.reached(Work(200, 50), 10)
    assert (reached.mfu, reached.of_roofline) == (0.2, 0.5)
    measured = measured_limits(torch.device("cpu"), torch.float32)
    assert (
        measured.flops_per_s > 1e8 and measured.bytes_per_s > 1e7 and measured.source == "measured"
    )


def test_a_known_gpu_has_the_limits_of_its_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = {"cuda": NodeConfig(gpus=1, gpu="nvidia-h100-80gb-hbm3"), "cpu": NodeConfig()}
    monkeypatch.setattr(roofline, "this_machine", machines.__getitem__)
    monkeypatch.setattr(roofline, "measured_limits", lambda *_: Limits(1.0, 2.0))
    gpu = torch.device("cuda")
    assert limits_of(gpu, torch.bfloat16) == Limits(989.4e12, 3350e9, "datasheet")
    assert limits_of(gpu, torch.float32).flops_per_s == pytest.approx(66.9e12)
    machines["cuda"] = NodeConfig(gpus=1, gpu="a-gpu-of-tomorrow")
    assert (
        limits_of(gpu, torch.bfloat16)
        == limits_of(torch.device("cpu"), torch.float32)
        == Limits(1.0, 2.0)
    )


def test_a_count_of_one_row_gives_the_time_of_many() -> None:
    """Weights and their gradients count once, whatever the rows."""
    layer = nn.Linear(16, 32, bias=False, device="meta")

    def one(rows: int) -> None:
        layer(torch.randn(rows, 5, 16, device="meta", requires_grad=True)).sum().backward()

    single, many = (
        counted(lambda rows=rows: one(rows), layer.parameters(), rows) for rows in (1, 8)
    )
    for rates in ((1.0, 1e9), (1e9, 1.0), (3.0, 7.0)):
        assert single.seconds(8, *rates) == pytest.approx(many.seconds(8, *rates))
    assert single.dispatched > 3, "the products, and what is between them"
    assert single.seconds(8, 1.0, float("inf")) == 3 * 2 * 8 * 5 * 16 * 32
    assert single.seconds(8, float("inf"), 1.0) == 4 * 3 * (16 * 32 + 8 * 5 * (16 + 32))
