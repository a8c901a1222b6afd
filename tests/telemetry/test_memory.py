"""Memory as the system sees it, and as autograd holds it, on cases that can be counted by hand."""

from __future__ import annotations

from mmap import PAGESIZE, mmap

import torch
from torch import Tensor, nn

from rlinf_vla.telemetry.memory import nbytes, peak_growth, resident, saved_for_backward

CPU = torch.device("cpu")
MEGABYTE = 2**20


def test_what_is_freed_before_the_end_counts() -> None:
    def some() -> None:
        for size in (64, 16):
            with mmap(-1, size * MEGABYTE) as taken:  # an allocator may keep what is freed, and take the next from elsewhere
                taken[::PAGESIZE] = bytes(size * MEGABYTE // PAGESIZE)

    assert 60 * MEGABYTE < peak_growth(some, CPU) < 80 * MEGABYTE
    assert peak_growth(lambda: None, CPU) < MEGABYTE, "an earlier peak is forgotten"
    assert resident("VmHWM") >= resident("VmRSS") > 0


def test_what_a_product_saves() -> None:
    """Both factors of ``x * y``, whole storages of them; not what is known already."""
    x, y = (torch.ones(10, 10, requires_grad=True) for _ in range(2))
    assert saved_for_backward(lambda: x * y) == 800
    assert saved_for_backward(lambda: x * y, [x]) == 400
    assert saved_for_backward(lambda: x[0] * x[1]) == 400, "views of one storage"
    with torch.no_grad():
        assert saved_for_backward(lambda: x * y) == 0


def test_only_what_is_held_at_a_time_counts() -> None:
    """A chain of n exponentials keeps n results (``tanh`` and ``exp`` save their own output); a backward pass lets them go."""
    x = torch.zeros(100, requires_grad=True)

    def chain(length: int) -> Tensor:
        y = x
        for _ in range(length):
            y = y.exp()
        return y.sum()

    def twice() -> None:
        chain(5).backward()
        chain(3).backward()

    assert saved_for_backward(lambda: chain(5)) == 2000
    assert saved_for_backward(twice) == 2000
    both: list[Tensor] = []
    assert saved_for_backward(lambda: both.extend((chain(5), chain(3)))) == 3200


def test_it_changes_no_gradient() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)

    def learn() -> None:
        layer.zero_grad()
        layer(x).tanh().pow(2).sum().backward()

    learn()
    assert layer.weight.grad is not None
    expected = layer.weight.grad.clone()
    assert saved_for_backward(learn, layer.parameters()) > 0
    assert torch.equal(layer.weight.grad, expected)


def test_bytes() -> None:
    tied = torch.zeros(3, 5, dtype=torch.float64)
    assert nbytes([tied, tied, torch.zeros(2, dtype=torch.uint8)]) == 122
    assert nbytes([]) == 0
