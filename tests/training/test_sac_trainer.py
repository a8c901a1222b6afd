"""SAC's step against values known in closed form: the fixed point of the (soft) Bellman equation, and targets computed by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.sac import SAC, SACConfig, SACPolicy
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.training.trainer import Trainer
from tests.algorithms.sac_step import sac_step
from tests.rollout.walk import ACTOR_STD, Table, Walk, tabular
from tests.runtime.here import off_policy_flow

SETTINGS = Settings(0, 1.0, 2)
RING = [1.0, -2.0, 3.0]
CONFIG = SACConfig(
    critics=3,
    critic_subset=2,
    hidden=8,
    shift=0,
    batch_size=64,
    gamma=0.7,
    value_learning_rate=0.05,
    target_rate=0.3,
    initial_alpha=0.4,
)


def learnt(
    world: Walk, config: SACConfig, directory: Path, chunk: int = 2, steps: int = 500
) -> Tensor:
    """The critics' tables ``[K, places]`` after ``updates`` updates on six episodes, two from each third of the seeds."""
    policy = tabular(len(world.rewards), chunk, config)
    trainer = Trainer(policy, SAC(config), 64)
    running = off_policy_flow(
        policy, [world], trainer, SETTINGS, SAC(config), directory / "replay", {}
    )
    replay, _ = running.trainers.worker.replays
    running.begin(0)
    seeds = torch.arange(6)
    running.collect_transitions(Episodes.first_attempts(torch.zeros_like(seeds), seeds))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        sac_step(trainer, replay.sample(config.batch_size, generator), generator)
    return policy.critics.values.detach()  # type: ignore[union-attr, return-value]


def ring_values(gamma: float) -> list[float]:
    """For a walk that never ends: ``V(p) = r(p) + gamma V(p + 1)``."""
    places = len(RING)
    shift = np.roll(np.eye(places), 1, axis=1)
    return np.linalg.solve(np.eye(places) - gamma * shift, RING).tolist()


@pytest.mark.parametrize("limit", [4, 5, 7])
def test_a_truncated_walk_has_the_value_of_an_endless_one(limit: int, tmp_path: Path) -> None:
    """Chunks of two control steps, the last of an odd episode with one of them: a discount per control step makes all of them agree."""
    found = learnt(Walk(RING, limit), CONFIG, tmp_path)
    for member in found:
        assert member.tolist() == pytest.approx(ring_values(CONFIG.gamma), abs=0.02)


def test_a_discount_per_chunk_counts_policy_calls(tmp_path: Path) -> None:
    """``Q(p) = r(p) + r(p + 1) + gamma Q(p + 2)`` in full chunks."""
    config = replace(CONFIG, gamma=0.4, gamma_unit="chunk")
    shift = np.roll(np.eye(3), 2, axis=1)
    expected = np.linalg.solve(
        np.eye(3) - config.gamma * shift, [RING[p] + RING[(p + 1) % 3] for p in range(3)]
    )
    for member in learnt(Walk(RING, 4), config, tmp_path):
        assert member.tolist() == pytest.approx(expected.tolist(), abs=0.02)


def test_a_terminating_walk_has_the_value_of_its_remaining_rewards(tmp_path: Path) -> None:
    rewards = [1.0, 2.0, -1.0, 4.0, 3.0, 99.0]
    world = Walk(rewards, 5, terminates=True)
    world.rewards[5] = 0.0
    found = learnt(FromTheFirst(world), CONFIG, tmp_path)  # type: ignore[arg-type]
    for member in found:
        for place in (0, 2, 4):
            left = sum(CONFIG.gamma**i * rewards[place + i] for i in range(5 - place))
            assert float(member[place]) == pytest.approx(left, abs=0.02)


class FromTheFirst:
    """A world whose episodes all start at the first place."""

    def __init__(self, world: Walk) -> None:
        self._world = world
        self.spec = world.spec
        self.rewards = world.rewards

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._world.reset_async(replace(episodes, seed=torch.zeros_like(episodes.seed)), mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def squashed_entropy(std: float) -> float:
    """Entropy of ``tanh(x)``, x normal with mean 0, by quadrature: ``H(x) + E[log(1 - tanh(x)**2)]``; nats."""
    x = np.linspace(-9 * std, 9 * std, 20_001)
    density = np.exp(-0.5 * (x / std) ** 2) / (std * math.sqrt(2 * math.pi))
    return 0.5 * math.log(2 * math.pi * math.e * std**2) + float(
        np.trapezoid(density * np.log1p(-(np.tanh(x) ** 2)), x)
    )


def test_the_soft_fixed_point_counts_the_entropy_of_full_chunks(tmp_path: Path) -> None:
    """``Q(p) = r(p) + gamma r(p+1) + gamma**2 (Q(p+2) + alpha H)``, H of a chunk's two actions, one dimension each."""
    config = replace(
        CONFIG,
        backup_entropy=True,
        critics=1,
        critic_subset=1,
        batch_size=128,
        value_learning_rate=0.04,
    )
    bonus = config.initial_alpha * 2 * squashed_entropy(ACTOR_STD)
    gamma = config.gamma
    shift = np.roll(np.eye(3), 2, axis=1)
    rewards = [RING[p] + gamma * RING[(p + 1) % 3] + gamma**2 * bonus for p in range(3)]
    expected = np.linalg.solve(np.eye(3) - gamma**2 * shift, rewards)
    assert bonus < -1, "without the entropy the test would fail"
    (found,) = learnt(Walk(RING, 4), config, tmp_path, steps=700)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=0.05)


# one step, computed by hand


def batch(size: int = 6) -> Transitions:
    """Transitions from place 0 to place 1 of three; the last of them terminated."""
    places = torch.eye(3)
    reward = torch.linspace(-1, 1, size)
    discount = torch.full((size,), 0.9)
    discount[-1] = 0.0
    now = {
        "place": places[0].expand(size, 3).clone(),
        "action": torch.zeros(size, 2, 1),
        "reward": reward,
        "discount": discount,
    }
    following = now | {
        "place": places[1].expand(size, 3).clone(),
        "reward": torch.full((size,), 77.0),
    }
    return Transitions(
        now | {"acted": torch.ones(size).bool()}, following | {"acted": torch.ones(size).bool()}
    )


def subject(
    config: SACConfig, online: list[list[float]], target: list[list[float]]
) -> tuple[SACPolicy, Trainer]:
    """Critics with these tables ``[K][3]``."""
    policy = tabular(3, 2, config)
    trainer = Trainer(policy, SAC(config), 64)
    critics: Any = policy.critics
    critics.values.data = torch.tensor(online)
    trainer.target.critics.values.data = torch.tensor(target)  # type: ignore[union-attr]
    return policy, trainer


def step(trainer: Trainer, seed: int = 0, **options: Any) -> dict[str, float]:
    return sac_step(trainer, batch(), torch.Generator().manual_seed(seed), **options)


def test_targets_are_of_the_slow_critics_at_the_next_observation() -> None:
    """Every entry of both tables differs, so only the right critics at the right place give this number."""
    config = replace(CONFIG, critics=2, value_learning_rate=0.0)
    _, trainer = subject(
        config,
        online=[[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]],
        target=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    )
    metrics = step(trainer)
    data = batch().now
    expected = data["reward"] + data["discount"] * 2.0
    assert metrics["critic/target_mean"] == pytest.approx(float(expected.mean()))
    assert metrics["critic/value_mean"] == pytest.approx(25.0), (
        "of the learning critics, at the present observation"
    )
    losses = [float(((value - expected) ** 2).mean()) / 2 for value in (10.0, 40.0)]
    assert metrics["critic/vf_loss"] == pytest.approx(sum(losses))


def test_the_subset_of_critics_is_drawn_for_every_update() -> None:
    """The minimum of two of four critics, all pairs equally likely: critic 0 is in half of them; it is 0, 1 or 2 in 3, 2 and 1 of 6."""
    config = replace(CONFIG, critics=4, critic_subset=2, value_learning_rate=0.0, target_rate=0.0)
    table = [[float(member)] * 3 for member in range(4)]
    _, trainer = subject(config, table, table)
    data = batch()
    generator = torch.Generator().manual_seed(0)
    updates = 240
    found = Counter[int]()
    for _ in range(updates):
        mean = sac_step(trainer, data, generator)["critic/target_mean"]
        found[
            round((mean - float(data.now["reward"].mean())) / float(data.now["discount"].mean()))
        ] += 1
    assert found.keys() == {0, 1, 2}
    for least, share in ((0, 3 / 6), (1, 2 / 6), (2, 1 / 6)):
        assert found[least] / updates == pytest.approx(share, abs=0.1), "3.1 standard deviations"


@pytest.mark.parametrize(("backup", "alpha"), [(False, 0.4), (True, 0.4), (True, 0.1)])
def test_the_entropy_bonus_in_a_target(backup: bool, alpha: float) -> None:
    config = replace(
        CONFIG,
        critics=1,
        critic_subset=1,
        backup_entropy=backup,
        initial_alpha=alpha,
        value_learning_rate=0.0,
    )
    _, trainer = subject(config, [[0.0] * 3], [[0.0] * 3])
    means = [step(trainer, seed)["critic/target_mean"] for seed in range(150)]
    discount = float(batch().now["discount"].mean())
    expected = discount * alpha * 2 * squashed_entropy(ACTOR_STD) if backup else 0.0
    assert sum(means) / 150 == pytest.approx(expected, abs=0.05)


def test_slow_critics_follow_by_their_rate() -> None:
    config = replace(CONFIG, critics=1, critic_subset=1, target_rate=0.25)
    policy, trainer = subject(config, [[1.0, 2.0, 3.0]], [[9.0, 8.0, 7.0]])
    step(trainer)
    online: Any = policy.critics
    expected = 0.75 * torch.tensor([[9.0, 8.0, 7.0]]) + 0.25 * online.values
    torch.testing.assert_close(trainer.target.critics.values.data, expected.detach())  # type: ignore[union-attr]


def test_alpha_reaches_the_target_entropy() -> None:
    """The actor's entropy is that of two squashed actions; alpha rises below the target and falls above it."""
    entropy = 2 * squashed_entropy(ACTOR_STD)
    for wanted, rises in ((entropy + 1, True), (entropy - 1, False)):
        config = replace(
            CONFIG, critics=1, critic_subset=1, target_entropy=wanted, learning_rate=1e-2
        )
        policy, trainer = subject(config, [[0.0] * 3], [[0.0] * 3])
        before = policy.log_alpha.item()
        metrics = step(trainer, with_actor=True)
        assert (policy.log_alpha.item() > before) == rises
        assert metrics["actor/alpha"] == pytest.approx(config.initial_alpha), (
            "the one that the losses used"
        )


def test_the_default_target_entropy_is_minus_one_nat_per_dimension() -> None:
    policy = tabular(3, 2, CONFIG)
    assert SAC(CONFIG).target_entropy(policy) == -2.0
    assert SAC(replace(CONFIG, target_entropy=0.0)).target_entropy(policy) == 0.0


class Prefers(nn.Module):
    """Critics that prefer actions near +0.6; with a bias per member."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(float(members)))

    def forward(self, features: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        bias = self.bias if chosen is None else self.bias[chosen]
        return bias[:, None] - 5 * (action - 0.6).pow(2).sum(dim=(1, 2))


def test_the_actor_maximises_the_critics_which_do_not_learn_from_it() -> None:
    config = replace(
        CONFIG,
        critics=2,
        learning_rate=3e-2,
        value_learning_rate=0.0,
        initial_alpha=1e-3,
        target_entropy=-50.0,
    )
    policy = tabular(3, 2, config)
    policy.value_head = policy.critics = Prefers(2)  # type: ignore[assignment]
    trainer = Trainer(policy, SAC(config), 64)
    generator = torch.Generator().manual_seed(0)
    metrics = [sac_step(trainer, batch(32), generator, with_actor=True) for _ in range(150)]
    mean, _ = policy.distribution(torch.eye(3)[:1])
    assert mean.tanh().flatten().tolist() == pytest.approx([0.6, 0.6], abs=0.1)
    assert metrics[-1]["actor/pg_loss"] < metrics[0]["actor/pg_loss"] - 0.5
    critics: Any = policy.critics
    assert critics.bias.tolist() == [0.0, 1.0] and critics.bias.requires_grad


def test_a_resumed_trainer_has_its_slow_critics_and_moments() -> None:
    """Bit for bit, actor and alpha too."""
    config = replace(CONFIG, target_rate=0.1)
    straight, resumed = (
        subject(config, [[1.0, 2.0, 3.0]] * 3, [[3.0, 1.0, 2.0]] * 3) for _ in range(2)
    )
    for seed in range(4):
        step(straight[1], seed, with_actor=True)
    for seed in range(2):
        step(resumed[1], seed, with_actor=True)
    state = {name: value.clone() for name, value in resumed[1].state().items()}
    weights = {name: value.clone() for name, value in resumed[0].state_dict().items()}
    policy = tabular(3, 2, config)
    policy.load_state_dict(weights)
    trainer = Trainer(policy, SAC(config), 64)
    trainer.load_state(state)
    for seed in range(2, 4):
        step(trainer, seed, with_actor=True)
    for name, value in straight[0].state_dict().items():
        assert torch.equal(value, policy.state_dict()[name]), name
    assert isinstance(trainer.target.critics, Table) and isinstance(
        straight[1].target.critics, Table
    )
    assert torch.equal(trainer.target.critics.values, straight[1].target.critics.values)


@pytest.mark.parametrize("which", ["critic", "actor"])
def test_a_gradient_that_is_not_finite_takes_no_step(which: str) -> None:
    policy, trainer = subject(CONFIG, [[1.0, 2.0, 3.0]] * 3, [[3.0, 1.0, 2.0]] * 3)
    data = batch()
    if which == "critic":
        data.now["reward"][0] = float("nan")
    else:
        policy.log_alpha.data.fill_(float("inf"))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(FloatingPointError, match=f"gradient of the {which} is not finite"):
        sac_step(trainer, data, torch.Generator().manual_seed(0), with_actor=True)
    names = [
        name
        for name in before
        if name.startswith("actor." if which == "actor" else ("actor.", "critics.", "value_head."))
    ]
    assert names and all(torch.equal(before[name], policy.state_dict()[name]) for name in names)


def test_steps_are_limited_by_gradient_clipping() -> None:
    """With gradient descent instead of Adam, the critics' change is the clipped gradient."""
    config = replace(CONFIG, critics=1, critic_subset=1, max_grad_norm=0.5)
    policy, trainer = subject(config, [[100.0, 0.0, 0.0]], [[0.0] * 3])
    critics: Any = policy.critics
    trainer.optimizers["critic"] = torch.optim.SGD([critics.values], lr=1.0)  # type: ignore[assignment]
    step(trainer)
    assert critics.values[0].tolist() == pytest.approx([99.5, 0.0, 0.0], abs=1e-4)


def test_imitation_is_weighted_by_its_coefficient() -> None:
    """With constant critics and no entropy, gradient descent moves the actor in proportion to the coefficient."""
    found = []
    for coefficient in (0.0, 0.5, 1.5):
        config = replace(
            CONFIG, demonstrations=1, sft_coef=coefficient, initial_alpha=1e-12, max_grad_norm=1e6
        )
        policy, trainer = subject(config, [[0.0] * 3] * 3, [[0.0] * 3] * 3)
        actor = list(policy.actor.parameters())
        trainer.optimizers["actor"] = torch.optim.SGD(actor, lr=1e-3)  # type: ignore[assignment]
        shown = batch()
        shown.now["action"] = torch.full((6, 2, 1), 0.5)
        before = [parameter.detach().clone() for parameter in actor]
        metrics = step(trainer, with_actor=True, shown=shown)
        assert metrics.get("sft/loss", 0.25) == pytest.approx(0.25) and ("sft/loss" in metrics) == (
            coefficient > 0
        ), "the mean action is 0"
        found.append(
            [parameter.detach() - old for parameter, old in zip(actor, before, strict=True)]
        )
    for none, half, more in zip(*found, strict=True):
        torch.testing.assert_close(none, torch.zeros_like(none), atol=1e-9, rtol=0)
        torch.testing.assert_close(3 * half, more, atol=1e-8, rtol=1e-3)
    assert found[1][-1].abs().max() > 1e-5
