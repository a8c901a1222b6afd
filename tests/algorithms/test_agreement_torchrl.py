"""Compares with TorchRL's modules where both define the same quantity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_vla.algorithms.advantages import gae
from rlinf_vla.algorithms.feature_policy import Critics
from rlinf_vla.algorithms.off_policy import critic_loss
from rlinf_vla.algorithms.on_policy import Clip, policy_loss, value_loss
from rlinf_vla.algorithms.sac import actor_loss, alpha_loss, soft_target, squash
from rlinf_vla.benchmarks.update_soft import separate
from rlinf_vla.core.types import Trajectory
from tests.algorithms.trajectories import trajectories
from tests.skips import NOT_INSTALLED

pytest.importorskip("torchrl", reason=NOT_INSTALLED + "peers")

from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value.functional import generalized_advantage_estimate

BATCH, STATES, ACTIONS = 12, 5, 3
GAMMA = 0.97
seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40)
@given(
    trajectories(longest_chunk=1),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae(rollouts: Trajectory, gamma: float, gae_lambda: float) -> None:
    """Terminated and truncated separately. TorchRL receives the value of the next observation in all cases."""
    following = torch.cat([rollouts.value[1:], rollouts.value[:1]])
    following = torch.where(rollouts.cut, rollouts.bootstrap_value, following)
    terminated = (rollouts.terminated & rollouts.valid).any(-1)
    fields = (
        rollouts.value,
        following,
        rollouts.reward[..., 0],
        terminated | rollouts.cut,
        terminated,
    )
    expected = generalized_advantage_estimate(
        gamma, gae_lambda, *(each[..., None] for each in fields), time_dim=0
    )
    for ours, theirs in zip(gae(rollouts, gamma, gae_lambda), expected, strict=True):
        torch.testing.assert_close(
            ours, theirs[..., 0], rtol=1e-5, atol=1e-5
        )  # TorchRL discounts in float32


def actor(distribution: type, seed: int) -> tuple[nn.Module, Any]:
    """A network from observations to (loc, scale), and TorchRL's policy on it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(STATES, 2 * ACTIONS), NormalParamExtractor()).double()
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    return network, ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=distribution, return_log_prob=True
    )


@settings(max_examples=15)
@given(seeds, st.sampled_from(["l2", "smooth_l1"]), st.sampled_from([None, 0.2]))
def test_clipped_surrogate_and_critic(seed: int, error: str, value_clip: float | None) -> None:
    """TorchRL's squared error has no half in front, its smooth L1 is Huber's at 1."""
    network, policy = actor(IndependentNormal, seed)
    critic = ValueOperator(nn.Linear(STATES, 1).double(), in_keys=["observation"])
    observation = normal(BATCH, STATES, seed=seed)
    action = normal(BATCH, ACTIONS, seed=seed + 1)
    advantage, old_value, target, change = normal(4, BATCH, seed=seed + 2)

    def log_probs() -> Tensor:
        loc, scale = network(observation)
        return torch.distributions.Normal(loc, scale).log_prob(action).sum(-1)

    old = (log_probs() + 0.3 * change).detach()
    theirs = ClipPPOLoss(
        policy,
        critic,
        clip_epsilon=(0.1, 0.2),
        entropy_bonus=False,
        critic_coeff=0.5 if error == "l2" else 1.0,
        loss_critic_type=error,
        clip_value=value_clip,
    )
    data = {
        "observation": observation,
        "action": action,
        "action_log_prob": old,
        "advantage": advantage[:, None],
    }
    data |= {"state_value": old_value[:, None], "value_target": target[:, None]}
    found = theirs(TensorDict(data, [BATCH]))

    mask = torch.ones(BATCH, 1, dtype=torch.bool)
    weight = torch.full((BATCH,), 1 / BATCH, dtype=torch.float64)
    loss, statistics = policy_loss(
        log_probs()[:, None], old[:, None], advantage, mask, weight, Clip(0.1, 0.2)
    )
    torch.testing.assert_close(loss, found["loss_objective"])
    torch.testing.assert_close(statistics["clip_fraction"], found["clip_fraction"])
    torch.testing.assert_close(statistics["ppo_kl"], found["kl_approx"])
    parameters = list(network.parameters())
    expected = torch.autograd.grad(
        found["loss_objective"],
        list(theirs.actor_network_params.values(True, True)),
        retain_graph=True,
    )
    ours = {tuple(each.shape): each for each in torch.autograd.grad(loss, parameters)}
    for gradient in expected:
        torch.testing.assert_close(ours[tuple(gradient.shape)], gradient)

    value = critic.module(observation)[:, 0]
    ours_critic = (
        value_loss(value, old_value, target, mask[:, 0], value_clip, None if error == "l2" else 1.0)
        / BATCH
    )
    torch.testing.assert_close(ours_critic, found["loss_critic"])


@given(seeds)
def test_squashed_gaussian(seed: int) -> None:
    mean, raw, noise = normal(3, BATCH, ACTIONS, seed=seed)
    log_std = raw.tanh() - 1
    theirs = TanhNormal(mean, log_std.exp(), event_dims=1)
    action, log_prob = squash(mean + log_std.exp() * noise, mean, log_std)
    torch.testing.assert_close(log_prob.sum(-1), theirs.log_prob(action), rtol=1e-6, atol=1e-6)


class Member(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.network(torch.cat([observation, action], dim=-1))


@settings(max_examples=10)
@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")  # they stay unchanged
@given(seeds)
def test_sac(seed: int) -> None:
    """Three critics, the least of all of them; the same random numbers. TorchRL's alpha loss is in log alpha: no factor alpha."""
    network, policy = actor(TanhNormal, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        critics = Critics(3, STATES + ACTIONS, 16).double()
    members = [Member(each.double()) for each in separate(critics)]
    qvalues = [
        ValueOperator(each, in_keys=["observation", "action"], out_keys=["state_action_value"])
        for each in members
    ]
    theirs = SACLoss(
        policy,
        qvalues,
        num_qvalue_nets=3,
        loss_function="l2",
        alpha_init=0.3,
        target_entropy=-float(ACTIONS),
    )
    theirs.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    now, following = normal(2, BATCH, STATES, seed=seed)
    action = normal(BATCH, ACTIONS, seed=seed + 1).tanh()
    reward, chance, truncate = normal(3, BATCH, seed=seed + 2)
    terminated = chance > 0.5
    columns = {"reward": reward, "terminated": terminated, "done": terminated | (truncate > 0.5)}
    after = {"observation": following, **{name: value[:, None] for name, value in columns.items()}}
    data = TensorDict(
        {"observation": now, "action": action, "next": TensorDict(after, [BATCH])}, [BATCH]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = theirs(data)
        torch.manual_seed(seed)
        next_noise, noise = (
            torch.normal(torch.zeros(BATCH, ACTIONS).double(), 1.0) for _ in range(2)
        )

    def draw(observation: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = network(observation)
        chosen, log_prob = squash(loc + scale * eps, loc, scale.log())
        return chosen[:, None], log_prob.sum(-1)

    alpha = torch.tensor(0.3, dtype=torch.float64)
    with torch.no_grad():
        next_action, next_log_prob = draw(following, next_noise)
        discount = torch.where(terminated, 0.0, GAMMA)
        target = soft_target(
            reward,
            discount,
            critics(following, next_action),
            next_log_prob,
            alpha,
            backup_entropy=True,
        )
    close = {"rtol": 1e-5, "atol": 1e-6}  # TorchRL keeps alpha in float32
    torch.testing.assert_close(
        2 * critic_loss(critics(now, action[:, None]), target), found["loss_qvalue"], **close
    )
    chosen, log_prob = draw(now, noise)
    climbing = actor_loss(critics(now, chosen), log_prob, alpha, "min")
    torch.testing.assert_close(climbing, found["loss_actor"], **close)
    gradients = torch.autograd.grad(
        found["loss_actor"], list(theirs.actor_network_params.values(True, True)), retain_graph=True
    )
    ours = {
        tuple(each.shape): each
        for each in torch.autograd.grad(climbing, list(network.parameters()), retain_graph=True)
    }
    for gradient in gradients:
        torch.testing.assert_close(ours[tuple(gradient.shape)], gradient, **close)
    log_alpha = torch.tensor(math.log(0.3), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(
        alpha_loss(log_alpha, log_prob.detach(), -float(ACTIONS)), log_alpha
    )
    (their_slope,) = torch.autograd.grad(found["loss_alpha"], theirs.log_alpha)
    assert float(slope) == pytest.approx(0.3 * float(their_slope), rel=1e-4, abs=1e-6)
