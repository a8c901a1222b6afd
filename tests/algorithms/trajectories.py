"""Random rollouts of action chunks that follow the protocol: a stretch is executed, and an episode ends at its first done."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.core.types import Trajectory

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


def trajectory(
    reward: Tensor,
    value: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap: Tensor,
) -> Trajectory:
    """Per control step ``[T, B, C]``, per call ``[T, B]``; ``bootstrap`` counts where the episode is cut."""
    calls, envs, chunk = reward.shape
    ended = (terminated & valid).any(-1)
    cut = (truncated & valid).any(-1) & ~ended
    cut[-1] = ~ended[-1]
    integers = torch.zeros(calls, envs, dtype=torch.int64)
    return Trajectory(
        inputs={"image": torch.zeros(calls, envs, 1, dtype=torch.uint8)},
        latent={"choice": torch.zeros(calls, envs, chunk, 1, dtype=torch.int64)},
        log_prob=torch.zeros(calls, envs, chunk, 1),
        value=value,
        bootstrap_value=torch.where(cut, bootstrap, 0),
        cut=cut,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        success=torch.zeros_like(terminated),
        valid=valid,
        task_id=integers,
        seed=integers,
        attempt=integers,
        step=integers,
        policy_version=integers,
    )


@st.composite
def trajectories(
    draw: st.DrawFn,
    dtype: torch.dtype = torch.float64,
    garbage: bool = False,
    longest_chunk: int = 4,
) -> Trajectory:
    """``garbage`` writes NaN, infinities and random flags where nothing was executed."""
    calls = draw(st.integers(1, 7))
    envs = draw(st.integers(1, 4))
    chunk = draw(st.integers(1, longest_chunk))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    end_probability = draw(st.sampled_from([0.0, 0.3, 0.7]))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def chance(probability: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < probability

    ended = chance(end_probability, calls, envs)
    executed = torch.where(
        ended, torch.randint(1, chunk + 1, (calls, envs), generator=generator), chunk
    )
    position = torch.arange(chunk)
    late = torch.where(
        chance(0.2, calls, envs), torch.rand(calls, envs, generator=generator) * executed, 0
    )  # with a deadline
    valid = (position < executed[..., None]) & (position >= late.long()[..., None])
    last = (position == executed[..., None] - 1) & ended[..., None]
    how = torch.randint(
        0, 3, (calls, envs, 1), generator=generator
    )  # terminated, truncated, both in one step
    terminated, truncated = last & (how != 1), last & (how != 0)
    reward = torch.where(valid, normal(calls, envs, chunk), 0)
    if garbage:
        poison = torch.tensor(GARBAGE, dtype=dtype)[
            torch.randint(0, len(GARBAGE), valid.shape, generator=generator)
        ]
        reward = torch.where(valid, reward, poison)
        terminated = terminated | (~valid & chance(0.5, *valid.shape))
        truncated = truncated | (~valid & chance(0.5, *valid.shape))
    return trajectory(
        reward, normal(calls, envs), valid, terminated, truncated, normal(calls, envs)
    )
