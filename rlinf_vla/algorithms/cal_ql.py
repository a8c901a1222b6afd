"""Cal-QL: SAC that first learns from demonstrations alone and then goes on online.

Nakamoto et al. 2023 (arXiv 2303.05479). The critics' loss has the regulariser of CQL(H) (Kumar et
al. 2020, arXiv 2006.04779, appendix F), which lowers the values of actions that the data do not
have; but not the values of the policy's actions below the return of the stored transition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_vla.algorithms.off_policy import Flow
from rlinf_vla.algorithms.sac import SAC, SACConfig, SACPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, CountOrZero, Name, NonNegative
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.transitions import COST, COST_RETURN, DISCOUNT, RETURN, REWARD, Transitions
from rlinf_vla.core.types import ActionSample, Inputs, Tensors


@dataclass
class CalQLConfig(SACConfig):
    """Recipe node ``algorithm``."""

    name: Name = "cal_ql"
    offline_iterations: CountOrZero = 10
    """First iterations, which learn from the demonstrations alone and collect nothing."""
    offline_updates: Count = 200
    """Critic updates in each of them."""
    conservative_coef: NonNegative = 0.5
    """Coefficient of the conservative loss of the critics (alpha of CQL). It goes with the scale of
    returns, here of 1: the paper has 5 for returns of 10."""
    online_conservative_coef: NonNegative | None = None
    """The same after the offline iterations; null: conservative_coef; 0: the updates are SAC's."""
    conservative_samples: Count = 10
    """Actions per transition in this loss, of each kind: uniformly random, the policy's, and the
    policy's at the next observation."""


class CalQL(SAC):
    """The Cal-QL algorithm."""

    Config = CalQLConfig
    config: CalQLConfig

    def __init__(self, config: CalQLConfig, temperature: float = 1.0, iterations: int = 0) -> None:
        super().__init__(config, temperature, iterations)
        if config.offline_iterations and not self._has_demonstrations:
            raise UserError(
                f"algorithm.offline_iterations={config.offline_iterations} learn from demonstrations alone: "
                "set algorithm.dataset or algorithm.demonstrations"
            )
        if iterations and config.offline_iterations > iterations:
            raise UserError(
                f"algorithm.offline_iterations={config.offline_iterations} are part of the {iterations} iterations of the run: "
                "raise iterations, or lower algorithm.offline_iterations"
            )

    def offline(self, iteration: int) -> bool:
        """Return whether the iteration learns from the demonstrations alone."""
        return iteration < self.config.offline_iterations

    def coefficient(self, iteration: int) -> float:
        """Return the coefficient of the conservative loss."""
        online = self.config.online_conservative_coef
        if online is None or self.offline(iteration):
            return self.config.conservative_coef
        return online

    @property
    def peak_iteration(self) -> int:  # type: ignore[override]
        last = self.config.offline_iterations - 1
        return last if last >= 0 and not self.coefficient(last + 1) else super().peak_iteration

    def iteration(self, flow: Flow) -> None:
        offline = self.offline(flow.iteration)
        flow.log({"cal_ql/offline": float(offline)})
        if not offline:
            super().iteration(flow)
            return
        flow.demonstrate(self.config.demonstrations)
        flow.update_from_replay(self.config.offline_updates, self)
        flow.publish()

    def demonstrated(self, iteration: int) -> float:
        return 1.0 if self.offline(iteration) else super().demonstrated(iteration)

    def stored(self, records: Tensors) -> Tensors:
        discount = records[DISCOUNT]
        return records | {
            RETURN: returns_to_go(records[REWARD], discount),
            COST_RETURN: returns_to_go(records[COST], discount),
        }

    def charged(self, batch: Transitions) -> Transitions:
        """Return a replay batch with the penalty subtracted from the reward and its return."""
        if not self.multiplier:
            return batch
        returns = batch.now[RETURN] - self.multiplier * batch.now[COST_RETURN]
        charged = super().charged(batch)
        return replace(charged, now=charged.now | {RETURN: returns})

    def record(self, policy: Policy, inputs: Inputs, sample: ActionSample) -> Tensors:
        number = sample.value.new_empty(1)
        return super().record(policy, inputs, sample) | {RETURN: number, COST_RETURN: number}

    def penalty(
        self,
        policy: SACPolicy,
        batch: Transitions,
        generator: torch.Generator,
        iteration: int,
        seen: tuple[Tensor, Tensor],
        estimates: Tensor,
    ) -> tuple[Tensor | float, Tensors]:
        coefficient = self.coefficient(iteration)
        if not coefficient:
            return 0.0, {}
        count = self.config.conservative_samples
        size = (len(batch), count, *policy.size)
        device = estimates.device

        def rows(values: Tensor) -> Tensor:
            return batch.own(values).to(device).flatten(0, 1)

        uniform = rows(2 * torch.rand(size, generator=generator) - 1)
        actions = [uniform]
        log_densities = [uniform.new_full(uniform.shape[:1], -math.log(2) * math.prod(policy.size))]
        # what follows a terminated episode is arbitrary
        goes_on = batch.now[DISCOUNT].to(device)[:, None] > 0
        with torch.no_grad():
            for features in (seen[0], torch.where(goes_on, seen[1], seen[0])):
                noise = rows(torch.randn(size, generator=generator))
                drawn, log_prob = policy.draw(features.repeat_interleave(count, 0), noise)
                actions.append(drawn)
                log_densities.append(log_prob)
        repeated = policy.standard(seen[0]).repeat_interleave(count, 0).repeat(len(actions), 1)
        values = policy.critics(repeated, torch.cat(actions))
        values = values.unflatten(1, (len(actions), -1, count))
        returns = batch.now[RETURN].to(device)
        gap = conservative_gap(
            calibrated(values, returns),
            torch.stack(log_densities).unflatten(1, (-1, count)),
            estimates,
        )
        below = values[:, 1:] < returns[:, None]
        metrics = {
            "critic/conservative": batch.part(gap.mean()),
            "critic/calibrated": batch.part(below.to(values.dtype).mean()),
        }
        return coefficient * batch.part(gap.mean(dim=1).sum()), metrics


def returns_to_go(reward: Tensor, discount: Tensor) -> Tensor:
    """Return the discounted return ``[L]`` of an episode from each of its records on.

    ``reward`` and ``discount``: of chunks, ``[L]``, see ``EpisodeRecords``. Of a truncated episode
    it is the return until then: its last record, which holds only an observation, has reward 0.
    """
    found = torch.zeros_like(reward)
    after = 0.0
    for index in reversed(range(len(reward))):
        after = float(reward[index]) + float(discount[index]) * after
        found[index] = after
    return found


def calibrated(values: Tensor, returns: Tensor) -> Tensor:
    """Return values ``[K, S, B, N]`` of actions of ``S`` kinds, the first of which is random.

    Those of the other kinds, the policy's, are not less than ``returns`` ``[B]``, the Monte-Carlo
    return of the stored transition (Cal-QL, eq. 5.1).
    """
    return torch.cat([values[:, :1], values[:, 1:].maximum(returns[:, None])], dim=1)


def conservative_gap(values: Tensor, log_density: Tensor, stored: Tensor) -> Tensor:
    """Return ``log mean_i exp(Q(s, a_i) - log mu(a_i)) - Q(s, a)`` ``[K, B]``.

    ``values``: Q of sampled actions ``[K, S, B, N]``. ``log_density``: of the distributions that
    they were drawn from, ``[S, B, N]``. ``stored``: Q of the stored actions ``[K, B]``. The mean
    estimates the integral of exp Q over all actions (CQL(H), appendix F, without its constant).
    """
    weighted = (values - log_density).transpose(1, 2).flatten(2)
    return weighted.logsumexp(-1) - math.log(weighted.shape[-1]) - stored
