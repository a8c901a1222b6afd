"""Check that ``evaluate`` reproduces the log-probabilities that the rollout stored.

A wrong ``evaluate`` (another temperature, a shifted token) trains on wrong ratios without any other
sign. Rounding differs legitimately: ``act`` and ``evaluate`` compute in batches of other sizes,
token by token or all at once, with merged adapters or not. So errors are judged in units of the
dtype's unit roundoff u. Measured on the packaged tiny policies (OpenVLA, OFT, pi0 with every
sampler; 64 to 128 calls), as means and 99 % quantiles over tokens:

* ``act`` against ``evaluate``: up to 0.8 u and 6.8 u in bfloat16, 5.6 u and 40 u in float32;
* in bfloat16 with merged adapters against without: up to 3.7 u and 19 u;
* a bfloat16 network against the float32 network with the same weights, which is as different as
  rounding can make them: up to 3.7 u and 31 u. The maximum was 148 u (0.6), so none is judged;
* 1.5 times the temperature: from 63 u and 219 u on in bfloat16 with trained weights;
* at full size, openvla-7b with random weights: 8.2 u and 19 u in bfloat16
  (``studies/rehearse_full_size.py``). Errors of independent roundings grow as the square root of
  the number of layers.

The bounds 12 u and 72 u leave a factor of 1.5. Up to ``REFUSED`` times as much is only a warning.
In exact float32, where a wrong policy is off by a million u, they are ``SPARE`` times as large.

On CUDA the products of a float32 network are in TF32 (``cluster.tf32``). It rounds what is
multiplied, as bfloat16 does, only to 11 bits in place of 8, so its u is judged by the same bounds:
with products rounded in this way on the CPU, ``act`` against ``evaluate`` differed by up to 1.0 u
and 8.8 u, with adapters merged or not. What follows the last product (softmax, log-probabilities)
is float32 in all cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_vla.core.devices import device_of, uses_tf32
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Trajectory

FLOAT32, TF32, BFLOAT16 = 2.0**-24, 2.0**-11, 2.0**-8
"""Unit roundoff: the largest relative error of rounding to the nearest number."""
MEAN, HIGH = 12.0, 72.0
"""Largest expected mean and 99 % quantile of the errors, in units of the roundoff."""
QUANTILE = 0.99
SPARE = 32.0
REFUSED = 4.0


@dataclass(frozen=True)
class Parity:
    """Mean and 99 % quantile of the errors in log_prob, in nats, and their bounds."""

    mean: float
    high: float
    mean_bound: float
    high_bound: float

    @staticmethod
    def of(errors: Tensor, unit: float) -> Parity:
        """``errors`` ``[n]``, ``n > 0``; ``unit``: of the network's products (see ``unit_of``)."""
        unit *= SPARE if unit == FLOAT32 else 1.0
        exact = errors.double()
        return Parity(
            exact.mean().item(), exact.quantile(QUANTILE).item(), MEAN * unit, HIGH * unit
        )

    def within(self, factor: float = 1.0) -> bool:
        """Return whether both are at most ``factor`` times their bounds; false for NaN."""
        return self.mean <= factor * self.mean_bound and self.high <= factor * self.high_bound

    def __str__(self) -> str:
        return (
            f"they differ by {self.mean:.2g} on average (bound {self.mean_bound:.2g}) and by {self.high:.2g} in the highest "
            f"percent (bound {self.high_bound:.2g})"
        )

    def report(self) -> str:
        """Return a line for the user; it warns if a bound is exceeded."""
        if self.within():
            return f"first rollout: recomputed log-probabilities equal the stored ones to {self.high:.1e}"
        return f"warning: recomputed log-probabilities of the first rollout deviate: {self}"

    def check(self) -> None:
        """Raise RuntimeError if the errors are beyond rounding."""
        if not self.within(REFUSED):
            raise RuntimeError(
                f"evaluate() does not reproduce the rollout's log-probabilities: {self}, more than {REFUSED:g} times a "
                "bound; the policy's act() and evaluate() disagree"
            )


def unit_of(policy: Policy) -> float:
    """Return the unit roundoff of the policy's least precise products, on its device."""
    if any(parameter.dtype == torch.bfloat16 for parameter in policy.backbone.parameters()):
        return BFLOAT16
    return TF32 if uses_tf32(device_of(policy)) else FLOAT32


def parity_errors(
    policy: Policy, rollouts: Trajectory, temperature: float, calls: int = 64
) -> Tensor:
    """Return the absolute errors of ``evaluate`` in log_prob, ``[n]`` for the ``n`` executed action
    dimensions of the first ``calls`` calls."""
    flat = rollouts[:calls].to(device_of(policy))
    with torch.no_grad():
        again = policy.evaluate(flat.inputs, flat.latent, temperature).log_prob
    return (again - flat.log_prob).abs()[flat.valid]
