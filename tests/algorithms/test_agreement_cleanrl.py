"""Compares with the mathematics of CleanRL (Huang et al., JMLR 2022), reimplemented here as loops over numbers.

Sources: ``cleanrl/ppo.py`` and ``ppo_continuous_action.py`` (GAE with ``nextnonterminal``, the clipped losses) and
``sac_continuous_action.py`` (targets, actor, alpha). Where the two differ by definition, the test states how and by how much.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.algorithms.advantages import gae
from rlinf_vla.algorithms.off_policy import critic_loss
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.algorithms.sac import LOG_STD_RANGE, actor_loss, alpha_loss, soft_target, squash
from rlinf_vla.core.types import Trajectory
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.algorithms.test_ppo import moved
from tests.algorithms.trajectories import trajectories

GAMMA = 0.97
LAMBDA = 0.9
CLIP = 0.2
ENT_COEF = 0.01
VF_COEF = 0.5
ALPHA = 0.3
TARGET_ENTROPY = -2.0
single_steps = trajectories(longest_chunk=1)
seeds = st.integers(0, 2**32 - 1)


def gae_with_nextnonterminal(
    rewards: list[float], values: list[float], ends: list[bool], next_value: float
) -> list[float]:
    """One environment. ``ends[t]``: step t was the last of its episode; CleanRL's ``dones[t + 1]`` and, at the end, its ``next_done``."""
    advantages = [0.0] * len(rewards)
    lastgaelam = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        nextnonterminal = 0.0 if ends[t] else 1.0
        nextvalues = next_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + GAMMA * nextvalues * nextnonterminal - values[t]
        lastgaelam = delta + GAMMA * LAMBDA * nextnonterminal * lastgaelam
        advantages[t] = lastgaelam
    return advantages


@given(single_steps)
def test_gae(rollouts: Trajectory) -> None:
    """CleanRL treats a truncated episode as terminated; so do we if the remaining value is 0."""
    ends = (rollouts.terminated | rollouts.truncated).any(-1)
    worthless = replace(rollouts, bootstrap_value=torch.where(ends, 0, rollouts.bootstrap_value))
    found, returns = gae(worthless, GAMMA, LAMBDA)
    columns = []
    for env in range(rollouts.shape[1]):
        reward = rollouts.reward[:, env, 0].tolist()
        value = rollouts.value[:, env].tolist()
        end = ends[:, env].tolist()
        columns.append(
            gae_with_nextnonterminal(reward, value, end, float(rollouts.bootstrap_value[-1, env]))
        )
    expected = torch.tensor(columns, dtype=torch.float64).T
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(returns, expected + rollouts.value)


@pytest.fixture(scope="module")
def played() -> tuple[LinearPolicy, Trajectory]:
    policy = LinearPolicy(LinearOptions(chunk=1))
    rollouts = collect(Actor(policy, Settings(1, 1.0, 3)), groups(6, 2), 0, 0, 24, Timeline())
    return moved(policy), replace(
        rollouts,
        value=torch.randn(rollouts.value.shape, generator=torch.Generator().manual_seed(3)),
    )


@pytest.mark.parametrize("clip_vloss", [True, False])
@pytest.mark.parametrize("norm_adv", [True, False])
def test_ppo_losses(
    played: tuple[LinearPolicy, Trajectory], norm_adv: bool, clip_vloss: bool
) -> None:
    """One minibatch with all rows. CleanRL divides by the unbiased standard deviation, we by the biased one."""
    policy, rollouts = played
    config = PPOConfig(
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        normalize_advantages=norm_adv,
        clip_low=CLIP,
        clip_high=CLIP,
        value_clip=CLIP if clip_vloss else None,
        value_coef=VF_COEF,
        entropy_coef=ENT_COEF,
    )
    algorithm = PPO(config, 1.0)
    batch, _ = algorithm.advantages(rollouts)
    loss, statistics = algorithm.loss(policy, batch, value_only=False)
    ours = {
        name: float(value.detach()) / len(batch)
        for name, value in {"loss": loss, **statistics}.items()
    }

    advantages, returns = (each.flatten().tolist() for each in gae(rollouts, GAMMA, LAMBDA))
    n = len(advantages)
    with torch.no_grad():
        new = policy.evaluate(batch.calls.inputs, batch.calls.latent, 1.0)
    newlogprob = new.log_prob.sum((1, 2)).tolist()
    entropy = new.entropy.sum((1, 2)).tolist()
    newvalue = new.value.tolist()
    logprobs = batch.calls.log_prob.sum((1, 2)).tolist()
    values = batch.calls.value.tolist()
    if norm_adv:
        mean = sum(advantages) / n
        std = math.sqrt(sum((each - mean) ** 2 for each in advantages) / (n - 1))
        advantages = [(each - mean) / (std + 1e-8) * math.sqrt(n / (n - 1)) for each in advantages]
    pg_loss = v_loss = approx_kl = clipfrac = 0.0
    for i in range(n):
        logratio = newlogprob[i] - logprobs[i]
        ratio = math.exp(logratio)
        pg_loss += (
            max(-advantages[i] * ratio, -advantages[i] * min(max(ratio, 1 - CLIP), 1 + CLIP)) / n
        )
        approx_kl += ((ratio - 1) - logratio) / n
        clipfrac += (abs(ratio - 1) > CLIP) / n
        unclipped = (newvalue[i] - returns[i]) ** 2
        clipped = (values[i] + min(max(newvalue[i] - values[i], -CLIP), CLIP) - returns[i]) ** 2
        v_loss += 0.5 * (max(unclipped, clipped) if clip_vloss else unclipped) / n
    expected = {
        "actor/pg_loss": pg_loss,
        "critic/vf_loss": v_loss,
        "actor/entropy": sum(entropy) / n,
        "actor/approx_kl": approx_kl,
        "actor/clip_fraction": clipfrac,
        "loss": pg_loss - ENT_COEF * sum(entropy) / n + VF_COEF * v_loss,
    }
    assert {name: ours[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert 0 < clipfrac < 1, "some ratios are clipped and some are not"


@pytest.mark.parametrize("num_iterations", [1, 7, 100])
def test_annealed_learning_rate(num_iterations: int) -> None:
    """``frac = 1.0 - (iteration - 1.0) / args.num_iterations``, iterations from 1 on."""
    algorithm = PPO(PPOConfig(learning_rate_end=1 / num_iterations), 1.0, num_iterations)
    for iteration in range(1, num_iterations + 1):
        algorithm.schedule(iteration - 1)
        assert algorithm.rate == pytest.approx(1.0 - (iteration - 1.0) / num_iterations)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seeds)
def test_squashed_gaussian(seed: int) -> None:
    """CleanRL adds 1e-6 inside the logarithm, which bounds log-probabilities in the tails; we do not."""
    mean, free, noise = normal(3, 4, seed=seed).clamp(-1.5, 1.5).tolist()
    log_std_min, log_std_max = LOG_STD_RANGE
    assert LOG_STD_RANGE == (-5, 2), "CleanRL's"
    for mu, raw, eps in zip(mean, free, noise, strict=True):
        log_std = log_std_min + 0.5 * (log_std_max - log_std_min) * (math.tanh(raw - 1.5) + 1)
        std = math.exp(log_std)
        x_t = mu + std * eps
        y_t = math.tanh(x_t)
        log_prob = (
            -((x_t - mu) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
        )
        log_prob -= math.log((1 - y_t**2) + 1e-6)
        action, found = squash(
            *(torch.tensor(each, dtype=torch.float64) for each in (x_t, mu, log_std))
        )
        assert float(action) == pytest.approx(y_t) and float(found) == pytest.approx(
            log_prob, abs=2e-6 / (1 - y_t**2) + 1e-9
        )


@given(seeds)
def test_sac_losses_and_their_gradients(seed: int) -> None:
    """Two critics. CleanRL sums two mean squared errors, we sum their halves: under Adam the same step."""
    n = 6
    rewards, log_pi, next_log_pi = normal(3, n, seed=seed).tolist()
    dones = (normal(n, seed=seed + 1) > 0.5).double().tolist()
    qf, next_target = normal(2, n, seed=seed + 2), normal(2, n, seed=seed + 3)
    discount = torch.tensor([GAMMA * (1 - done) for done in dones], dtype=torch.float64)
    reward, log_prob, next_log_prob = (
        torch.tensor(each, dtype=torch.float64) for each in (rewards, log_pi, next_log_pi)
    )
    alpha = torch.tensor(ALPHA, dtype=torch.float64)

    target = soft_target(reward, discount, next_target, next_log_prob, alpha, backup_entropy=True)
    next_q_value = []
    for i in range(n):
        min_qf_next_target = (
            min(float(next_target[0, i]), float(next_target[1, i])) - ALPHA * next_log_pi[i]
        )
        next_q_value.append(rewards[i] + (1 - dones[i]) * GAMMA * min_qf_next_target)
    torch.testing.assert_close(target, torch.tensor(next_q_value, dtype=torch.float64))

    values = qf.clone().requires_grad_()
    critic_loss(values, target).backward()
    qf_loss = sum(
        sum((float(qf[k, i]) - next_q_value[i]) ** 2 for i in range(n)) / n for k in range(2)
    )
    assert float(critic_loss(qf, target)) == pytest.approx(qf_loss / 2)
    slopes = [[2 * (float(qf[k, i]) - next_q_value[i]) / n for i in range(n)] for k in range(2)]
    torch.testing.assert_close(2 * values.grad, torch.tensor(slopes, dtype=torch.float64))

    climbing = sum(ALPHA * log_pi[i] - min(float(qf[0, i]), float(qf[1, i])) for i in range(n)) / n
    assert float(actor_loss(qf, log_prob, alpha, "min")) == pytest.approx(climbing)

    log_alpha = torch.tensor(math.log(ALPHA), dtype=torch.float64, requires_grad=True)
    loss = alpha_loss(log_alpha, log_prob, TARGET_ENTROPY)
    loss.backward()
    expected = sum(-math.exp(math.log(ALPHA)) * (each + TARGET_ENTROPY) for each in log_pi) / n
    assert float(loss.detach()) == pytest.approx(expected) and float(
        log_alpha.grad
    ) == pytest.approx(expected), "it is its own derivative"
