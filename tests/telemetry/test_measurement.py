"""Seconds, memory and use of processes, on cases that can be counted by hand."""

from __future__ import annotations

import subprocess
import sys
from mmap import PAGESIZE, mmap

import pytest
import torch
from torch import Tensor, nn

from rlinf_vla.telemetry import measurement
from rlinf_vla.telemetry.measurement import Usage, nbytes, peak_growth, resident, saved_for_backward

CPU = torch.device("cpu")
MEGABYTE = 2**20


def test_variants_take_turns_and_the_first_turns_are_warm_up() -> None:
    order = ""

    def note(name: str) -> None:
        nonlocal order
        order += name

    seconds = measurement.time_interleaved(
        {"a": lambda: note("a"), "b": lambda: note("b")}, CPU, calls=2, warmup=1
    )
    assert order == "ababab" and {name: len(each) for name, each in seconds.items()} == {
        "a": 2,
        "b": 2,
    }
    assert all(each >= 0 for times in seconds.values() for each in times)


def test_no_turn_starts_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: float(next(clock)))
    found = measurement.time_interleaved({"a": lambda: None}, CPU, calls=50, warmup=2, limit=10.0)[
        "a"
    ]
    assert 1 <= len(found) < 10 and set(found) == {1.0}, "a call takes one tick of this clock"


def test_memory_freed_before_the_end_counts() -> None:
    def some() -> None:
        for size in (64, 16):
            with mmap(
                -1, size * MEGABYTE
            ) as taken:  # an allocator may keep freed memory and take the next block from elsewhere
                taken[::PAGESIZE] = bytes(size * MEGABYTE // PAGESIZE)

    assert 60 * MEGABYTE < peak_growth(some, CPU) < 80 * MEGABYTE
    assert peak_growth(lambda: None, CPU) < MEGABYTE, "an earlier peak does not count"
    assert resident("VmHWM") >= resident("VmRSS") > 0


def test_the_tensors_that_a_product_saves() -> None:
    """Both factors of ``x * y`` with their complete storages; tensors that are known already do not count."""
    x, y = (torch.ones(10, 10, requires_grad=True) for _ in range(2))
    assert saved_for_backward(lambda: x * y) == 800
    assert saved_for_backward(lambda: x * y, [x]) == 400
    assert saved_for_backward(lambda: x[0] * x[1]) == 400, "views of one storage"
    with torch.no_grad():
        assert saved_for_backward(lambda: x * y) == 0


def test_only_tensors_held_at_the_same_time_count() -> None:
    """A chain of n exponentials keeps n results (``tanh`` and ``exp`` save their own output); a backward pass frees them."""
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


# in a separate process, whose children are known: this one may have children of other tests

PARENT = """
import subprocess, sys
from rlinf_vla.telemetry.measurement import usage

print(*usage(), flush=True)
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(*usage(), flush=True)
    child.communicate(b"\\n")
print(*usage())
"""
BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def before_during_after(child: str) -> list[Usage]:
    said = subprocess.run(
        [sys.executable, "-c", PARENT, child], capture_output=True, text=True, check=True
    ).stdout
    found = [line.split() for line in said.splitlines()]
    return [Usage(int(processes), float(cpu), int(resident)) for processes, cpu, resident in found]


def test_the_memory_of_a_child_counts_while_it_lives() -> None:
    before, during, after = before_during_after(BUSY)
    assert (before.processes, during.processes, after.processes) == (0, 1, 0)
    assert during.cpu > 0.15 and during.resident > 1e6
    assert before == after == (0, 0, 0)


def test_a_grandchild_counts() -> None:
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
    assert [found.processes for found in before_during_after(code)] == [0, 2, 0]
