"""Bounds the difference of a float32 network from an official implementation on another machine by rounding.

Every compared quantity is computed twice here: in float32, as the policies do, and in float64, which serves as the exact answer. The two
differ by the rounding of this machine's instructions. The official numbers, which another machine rounded, may be as far from the exact
answer, times ``FACTOR``. A wrong network is wrong in float64, too.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EPS = torch.finfo(torch.float32).eps

FACTOR = 8.0
"""The largest accepted ratio of the official rounding to the one measured here; docs/results/portability.md has the ratios found."""

ULPS = 4000.0
"""The largest accepted rounding here, in float32 spacings of the largest number compared (found: 1030, GR00T's gradients on an AMD EPYC).
TF32 has spacings of 8192 of them and bfloat16 of 65536: results computed in less than float32 do not count as rounding."""

KINKS = 8
"""ReLUs so close to zero that rounding decides their side: gradients are computed for both sides of each, 2**KINKS times at most."""

FEW = 4
"""Quantities of at most so many numbers are bounded by the rounding of all quantities of their call."""

Compute = Callable[["Precision"], Mapping[str, Tensor]]

ratios: dict[str, float] = {}
"""The largest accepted ratio in this process, by quantity; written as JSON into the folder that ``PARITY_RATIOS`` names."""


class Precision:
    """Casts modules and tensors to one of the two dtypes; integers and masks stay."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._cast: dict[nn.Module, nn.Module] = {}

    def __call__(self, it: Any) -> Any:
        if isinstance(it, Tensor):
            return it.to(self.dtype) if it.is_floating_point() else it
        if self.dtype == torch.float32:
            return it
        if it not in self._cast:
            self._cast[it] = copy.deepcopy(it).double()
        return self._cast[it]


class Exact(TorchFunctionMode):
    """Requests for float32 get float64. Inputs of ReLUs are kept, one tensor per call, and their side can be set."""

    def __init__(self, sides: Mapping[tuple[int, int], bool] | None = None) -> None:
        super().__init__()
        self.sides = sides or {}
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func in (F.relu, torch.relu):
            return self._relu(args[0])
        args = [torch.float64 if each is torch.float32 else each for each in args]
        return func(
            *args,
            **{
                key: torch.float64 if value is torch.float32 else value
                for key, value in (kwargs or {}).items()
            },
        )

    def _relu(self, x: Tensor) -> Tensor:
        positive = x.detach() > 0
        for (call, place), side in self.sides.items():
            if call == len(self.inputs):
                positive.view(-1)[place] = side
        self.inputs.append(x.detach())
        return x * positive


class Rounded(Exact):
    """Only keeps the inputs of ReLUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.relu, torch.relu):
            self.inputs.append(args[0].detach().double())
        return func(*args, **(kwargs or {}))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _run(compute: Compute, mode: Exact) -> dict[str, Tensor]:
    dtype = torch.float32 if isinstance(mode, Rounded) else torch.float64
    with _default_dtype(dtype), mode:
        found = dict(compute(Precision(dtype)))
    for name, value in found.items():
        assert value.dtype == dtype, f"{name} was computed in {value.dtype}"
    return {name: value.detach().double() for name, value in found.items()}


def agree(compute: Compute, expected: Mapping[str, Tensor]) -> None:
    """The results of ``compute``, by name, must equal ``expected`` up to rounding.

    The rounding of ``FEW`` numbers can cancel by chance: their bound is the largest relative rounding of this call.
    """
    found, exact = _run(compute, Rounded()), _run(compute, Exact())
    relative = {name: _largest(found[name] - exact[name]) / _largest(exact[name]) for name in exact}
    worst = max(relative.values())
    assert worst <= ULPS * EPS, f"{relative}: more than rounding in float32"
    for name, value in exact.items():
        official = expected[name].double()
        assert official.shape == value.shape, (name, official.shape, value.shape)
        _accept(
            name,
            _largest(official - value),
            max(worst if value.numel() <= FEW else relative[name], EPS) * _largest(value),
        )


def gradients_agree(compute: Compute, norms: Mapping[str, float]) -> None:
    """``compute`` returns gradients by name, of which ``norms`` are the official norms.

    ``|norm(a) - norm(b)| <= norm(a - b)``: the norm of the rounding bounds what rounding makes of the norm. Where a ReLU's input is within
    rounding of zero, either side is right, and the gradient of either may be the official one.
    """
    rounded, exact = Rounded(), Exact()
    found = _run(compute, rounded)
    candidates = [_run(compute, exact)]
    kinks = [
        (call, place)
        for call, (here, there) in enumerate(zip(rounded.inputs, exact.inputs, strict=True))
        for place in (there.abs() <= FACTOR * _largest(here - there))
        .view(-1)
        .nonzero()[:, 0]
        .tolist()
    ]
    assert len(kinks) <= KINKS, (
        f"{len(kinks)} ReLUs are within rounding of zero: these inputs decide nothing"
    )
    if kinks:
        sides = itertools.product((False, True), repeat=len(kinks))
        candidates = [_run(compute, Exact(dict(zip(kinks, each, strict=True)))) for each in sides]
    nearest = min(
        candidates, key=lambda each: sum(float((found[name] - each[name]).norm()) for name in norms)
    )
    rounding = {
        name: float((found[name] - nearest[name]).norm()) + EPS * float(nearest[name].norm())
        for name in norms
    }
    assert sum(rounding.values()) <= ULPS * EPS * sum(
        float(nearest[name].norm()) for name in norms
    ), "more than rounding in float32"

    def worst(candidate: Mapping[str, Tensor]) -> float:
        return max(
            _ratio(abs(float(candidate[name].norm()) - norm), rounding[name])
            for name, norm in norms.items()
        )

    official = min(candidates, key=worst)
    for name, norm in norms.items():
        _accept(f"gradient of {name}", abs(float(official[name].norm()) - norm), rounding[name])


def _accept(name: str, off: float, rounding: float) -> None:
    ratio = _ratio(off, rounding)
    assert ratio <= FACTOR, (
        f"{name}: {off:.2e} off, {ratio:.1f} times this machine's rounding of {rounding:.2e}"
    )
    ratios[name] = max(ratios.get(name, 0.0), ratio)


def _ratio(off: float, rounding: float) -> float:
    """A result that depends on nothing, such as the gradient of a layer that is never run, has no rounding."""
    return off / rounding if rounding else math.inf if off else 0.0


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


if folder := os.environ.get("PARITY_RATIOS"):
    atexit.register(lambda: Path(folder, f"{os.getpid()}.json").write_text(json.dumps(ratios)))
