"""Cal-QL's loss and returns against explicit loops, and its two phases in counter world."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.algorithms.advantages import GAMMA_UNITS, chunk_rewards
from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.cal_ql import (
    CalQL,
    CalQLConfig,
    calibrated,
    conservative_gap,
    returns_to_go,
)
from rlinf_vla.algorithms.sac import SAC, SACConfig, SACPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.transitions import RankRows, Transitions
from rlinf_vla.core.types import Episodes
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.training.replay import ShardedReplay
from rlinf_vla.training.trainer import Trainer
from tests.algorithms.sac_runs import flow, policy, run
from tests.data.test_from_dataset import played, write
from tests.runtime.here import replays_of

SIZES: dict[str, Any] = {"critics": 3, "hidden": 16, "batch_size": 16, "shift": 0}
CONFIG = CalQLConfig(
    episodes=4,
    updates_per_step=0.2,
    offline_iterations=2,
    offline_updates=3,
    conservative_coef=5.0,
    conservative_samples=4,
    dataset="unread",
    **SIZES,
)
CHUNK = 2
seeds = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seeds)
def test_the_conservative_loss_against_a_loop(seed: int) -> None:
    values = normal(2, 3, 4, 5, seed=seed)
    density = normal(3, 4, 5, seed=seed + 1)
    stored = normal(2, 4, seed=seed + 2)
    returns = normal(4, seed=seed + 3)
    found = conservative_gap(calibrated(values, returns), density, stored)
    for critic in range(2):
        for row in range(4):
            total = 0.0
            for kind in range(3):
                for sample in range(5):
                    value = float(values[critic, kind, row, sample])
                    if kind > 0:
                        value = max(value, float(returns[row]))
                    total += math.exp(value) / math.exp(float(density[kind, row, sample]))
            expected = math.log(total / 15) - float(stored[critic, row])
            assert float(found[critic, row]) == pytest.approx(expected)


def test_its_weights_make_it_the_integral_over_actions() -> None:
    """Whatever the actions are drawn from: of exp(a) over [-1, 1] here."""
    generator = torch.Generator().manual_seed(0)
    uniform = 2 * torch.rand(1, 1, 200_000, generator=generator, dtype=torch.float64) - 1
    mean, log_std = torch.tensor(0.4), torch.tensor(-0.3)
    normals = torch.distributions.Normal(mean.double(), log_std.double().exp())
    squashed = torch.distributions.TransformedDistribution(
        normals, [torch.distributions.TanhTransform(cache_size=1)]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = squashed.sample(torch.Size([1, 1, 200_000]))
    actions = torch.cat([uniform, drawn])
    density = torch.cat([torch.full_like(uniform, math.log(0.5)), squashed.log_prob(drawn)])
    found = conservative_gap(actions[None], density, torch.zeros(1, 1).double())
    assert float(found) == pytest.approx(math.log(math.e - 1 / math.e), abs=0.01)


@pytest.mark.parametrize("unit", GAMMA_UNITS)
@pytest.mark.parametrize("terminated", [True, False])
def test_returns_against_a_loop(unit: str, terminated: bool) -> None:
    """Of an episode of 8 steps in chunks of 3; if truncated, with a last observation."""
    gamma, chunk = 0.8, 3
    reward = normal(8, seed=1)
    step = torch.arange(0, 8, chunk)[:, None] + torch.arange(chunk)
    earned, discount = chunk_rewards(reward[step.clamp(max=7)], step < 8, gamma, unit)
    if terminated:
        discount[-1] = 0
    else:
        earned, discount = (torch.cat([each, torch.zeros(1)]) for each in (earned, discount))
    found = returns_to_go(earned, discount)
    for call, first in enumerate(range(0, 8, chunk)):
        expected = 0.0
        for index in range(first, 8):
            elapsed = index - first if unit == "step" else (index - first) // chunk
            expected += gamma**elapsed * float(reward[index])
        assert float(found[call]) == pytest.approx(expected)
    assert terminated or float(found[-1]) == 0


def transitions(size: int = 6) -> Transitions:
    generator = torch.Generator().manual_seed(5)

    def records() -> dict[str, Tensor]:
        return {
            "image": torch.randint(0, 256, (size, 8, 8, 3), generator=generator, dtype=torch.uint8),
            "action": torch.rand(size, 2, 4, generator=generator) * 2 - 1,
            "reward": torch.randn(size, generator=generator),
            "discount": torch.tensor([0.9, 0.0, 0.9, 0.9, 0.9, 0.81][:size]),
            "return": torch.randn(size, generator=generator),
            "acted": torch.ones(size).bool(),
        }

    return Transitions(records(), records())


def encoded(subject: SACPolicy, batch: Transitions) -> tuple[Tensor, Tensor]:
    now, following = (
        subject.encode({"image": each["image"]}).pooled for each in (batch.now, batch.following)
    )
    return now, following


def test_sampled_actions_and_their_densities_against_a_loop() -> None:
    """Actions are random, the policy's, and the policy's at the next observation, with values here."""
    subject = policy(CalQL(CONFIG), CHUNK)
    batch = transitions()
    seen = encoded(subject, batch)
    action = batch.now["action"]
    estimates = subject.critics(seen[0], action)
    loss, metrics = CalQL(CONFIG).penalty(
        subject, batch, torch.Generator().manual_seed(3), 0, seen, estimates
    )
    generator = torch.Generator().manual_seed(3)
    shape = (6, 4, 2, 4)
    uniform = 2 * torch.rand(shape, generator=generator) - 1
    noises = [torch.randn(shape, generator=generator) for _ in range(2)]
    gaps = []
    lower = 0
    for row in range(6):
        terms: list[Tensor] = []
        here = seen[0][row : row + 1]
        for sample in range(4):
            value = subject.critics(here, uniform[row, sample][None])[:, 0]
            terms.append(value - math.log(0.5**8))
        following = seen[1] if float(batch.now["discount"][row]) else seen[0]
        for features, noise in zip((seen[0], following), noises, strict=True):
            mean, log_std = subject.distribution(features[row : row + 1])
            drawn_from = torch.distributions.TransformedDistribution(
                torch.distributions.Normal(mean[0], log_std[0].exp()),
                [torch.distributions.TanhTransform(cache_size=1)],
            )
            for sample in range(4):
                drawn = (mean[0] + log_std[0].exp() * noise[row, sample]).tanh()
                value = subject.critics(here, drawn[None])[:, 0]
                bound = batch.now["return"][row]
                lower += int((value < bound).sum())
                density = drawn_from.log_prob(drawn).sum()
                terms.append(value.maximum(bound) - density)
        mean_of_terms = torch.stack(terms).exp().mean(0)
        gaps.append(mean_of_terms.log() - estimates[:, row])
    gap = torch.stack(gaps)
    torch.testing.assert_close(metrics["critic/conservative"], gap.mean(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(loss, 5.0 * gap.mean(0).sum(), rtol=1e-3, atol=1e-3)
    assert float(metrics["critic/calibrated"]) == pytest.approx(lower / (6 * 3 * 8))


@torch.no_grad()
def test_what_follows_a_terminated_episode_changes_nothing() -> None:
    """In float64, because single rows change the loss by little."""
    subject = policy(CalQL(CONFIG), CHUNK).double()
    batch = transitions()
    now, following = (features.double() for features in encoded(subject, batch))
    estimates = subject.critics(now, batch.now["action"].double())

    def found(row: int, change: float = 1.0) -> float:
        other = following.clone()
        other[row] += change
        generator = torch.Generator().manual_seed(3)
        seen = (now, other)
        return float(CalQL(CONFIG).penalty(subject, batch, generator, 0, seen, estimates)[0])

    assert batch.now["discount"][1] == 0
    assert found(1) == found(1, change=0.0)
    assert found(2) != found(1)


def loss_of(subject: SACPolicy, batch: Transitions) -> Tensor:
    seen = encoded(subject, batch)
    estimates = subject.critics(seen[0], batch.now["action"])
    generator = torch.Generator().manual_seed(3)
    loss = CalQL(CONFIG).penalty(subject, batch, generator, 0, seen, estimates)[0]
    assert isinstance(loss, Tensor)
    return loss


def test_ranks_add_up_to_the_whole_batch() -> None:
    subject = policy(CalQL(CONFIG), CHUNK)
    whole = transitions()

    parts = []
    for rows in (torch.tensor([4, 0]), torch.tensor([1, 2, 3, 5])):
        now, following = (
            {name: value[rows] for name, value in each.items()}
            for each in (whole.now, whole.following)
        )
        parts.append(loss_of(subject, Transitions(now, following, RankRows(rows, 6))))
    torch.testing.assert_close(parts[0] + parts[1], loss_of(subject, whole))


def test_the_bound_stops_the_push_on_the_policys_actions() -> None:
    """Below the return, only random actions are lowered; above it, all are."""
    values = torch.full((1, 3, 1, 2), 0.0, requires_grad=True)
    density = torch.zeros(3, 1, 2)
    for returns, expected in ((1.0, 0.0), (-1.0, 2 / 3)):
        gap = conservative_gap(calibrated(values, torch.tensor([returns])), density, torch.zeros(1))
        (gradient,) = torch.autograd.grad(gap.sum(), values)
        assert float(gradient[:, 1:].sum()) == pytest.approx(expected)
        assert float(gradient[:, 0].sum()) > 0


def stepped(config: SACConfig, iteration: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    algorithm = CalQL(config) if isinstance(config, CalQLConfig) else SAC(config)
    subject = policy(algorithm, CHUNK)
    trainer = Trainer(subject, algorithm, 64)
    generator = torch.Generator().manual_seed(0)
    metrics = algorithm.step(trainer, transitions(), generator, iteration, 0, transitions)
    return trainer.weights(), metrics


def test_without_a_coefficient_online_updates_are_those_of_sac() -> None:
    weights, metrics = stepped(replace(CONFIG, online_conservative_coef=0.0), 2)
    expected, of_sac = stepped(SACConfig(dataset="unread", **SIZES), 2)
    assert metrics == of_sac
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_each_phase_has_its_coefficient() -> None:
    def coefficients(online: float | None) -> list[float]:
        algorithm = CalQL(replace(CONFIG, online_conservative_coef=online))
        return [algorithm.coefficient(iteration) for iteration in range(4)]

    assert coefficients(None) == [5.0] * 4
    assert coefficients(0.5) == [5.0, 5.0, 0.5, 0.5]
    offline = stepped(replace(CONFIG, online_conservative_coef=0.5), 1)
    online = stepped(replace(CONFIG, online_conservative_coef=0.5), 2)
    assert offline[1]["critic/conservative"] == online[1]["critic/conservative"]
    assert any(not torch.equal(online[0][name], value) for name, value in offline[0].items())


def test_memory_is_counted_in_an_iteration_with_the_conservative_loss() -> None:
    for online in (0.0, None):
        algorithm = CalQL(replace(CONFIG, online_conservative_coef=online))
        assert algorithm.coefficient(algorithm.peak_iteration)
    assert CalQL(replace(CONFIG, offline_iterations=0)).peak_iteration == SAC.peak_iteration


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of episodes of which some are truncated."""
    noisy = DemonstrationConfig(episodes=9, noise=[0.0, 3.0], random_actions=0.5)
    return write(tmp_path_factory.mktemp("recorded") / "data", played(config=noisy))


def test_nothing_is_collected_offline(
    tmp_path: Path, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, dataset=dataset)
    played_in = list[int]()
    collect = OffPolicyFlow.collect_transitions

    def noted(running: OffPolicyFlow, episodes: Episodes) -> int:
        played_in.append(running.iteration)
        return collect(running, episodes)

    monkeypatch.setattr(OffPolicyFlow, "collect_transitions", noted)
    _, metrics, running = run(tmp_path, CalQL(config), 4, chunk=CHUNK)
    assert played_in == [2, 3]
    assert [each["cal_ql/offline"] for each in metrics] == [1, 1, 0, 0]
    assert all(each["actor/updates"] == 3 for each in metrics[:2])
    assert all("rollout/steps" not in each for each in metrics[:2])
    assert all("critic/conservative" in each for each in metrics)
    assert "demonstrations/success" in metrics[0] and running.changed


def test_updates_offline_are_of_the_dataset_alone(tmp_path: Path, dataset: str) -> None:
    """Records of the online replay that would break an update are not read; later they are."""
    config = replace(CONFIG, dataset=dataset, demonstration_share=0.25)
    algorithm = CalQL(config)
    assert [algorithm.demonstrated(iteration) for iteration in range(4)] == [1, 1, 0.25, 0.25]
    subject = policy(CalQL(config), CHUNK)
    running = flow(tmp_path, subject, Trainer(subject, algorithm, 64), algorithm, {})
    running.begin(0)
    running.demonstrate(0)
    newest = replays_of(running)[1].newest()
    poisoned = newest | {"reward": torch.full((1,), float("nan")), "acted": torch.ones(1).bool()}
    replays_of(running)[0].append(poisoned)
    running.update_from_replay(3, algorithm)
    running.begin(2)
    running.replay.set_size((1, 1))
    with pytest.raises(FloatingPointError):
        running.update_from_replay(3, algorithm)


def test_the_replay_has_the_returns_of_the_dataset(tmp_path: Path, dataset: str) -> None:
    config = replace(CONFIG, dataset=dataset, gamma=0.9)
    subject = policy(CalQL(config), CHUNK)
    running = flow(tmp_path, subject, Trainer(subject, CalQL(config), 64), CalQL(config), {})
    running.begin(0)
    running.demonstrate(0)
    replay = replays_of(running)[1]
    numbers = np.arange(replay.total)
    records = replay.gather(numbers)  # type: ignore[union-attr]
    reader = LeRobotReader(Path(dataset))
    expected = []
    for number in range(len(reader)):
        columns = reader.episode(number, ["next.reward", "next.done", "next.truncated"]).columns
        reward = columns["next.reward"].tolist()
        truncated = bool(columns["next.truncated"][-1])
        steps = len(reward) - truncated
        for first in range(0, steps, 2):
            terms = (0.9 ** (index - first) * reward[index] for index in range(first, steps))
            expected.append(sum(terms))
        if truncated:
            expected.append(0.0)
    torch.testing.assert_close(records["return"], torch.tensor(expected))
    assert len(set(expected)) > 3 and not bool(records["acted"].all())


def test_a_penalty_for_costs_is_subtracted_from_the_return() -> None:
    algorithm = CalQL(replace(CONFIG, cost_limit=0.0, cost_initial=0.5))
    reward, cost = normal(2, 4, seed=0)
    discount = torch.tensor([0.9, 0.8, 0.9, 0.0]).double()
    records = algorithm.stored({"reward": reward, "cost": cost, "discount": discount})
    found = algorithm.charged(Transitions(records, records)).now
    torch.testing.assert_close(found["reward"], reward - 0.5 * cost)
    torch.testing.assert_close(found["return"], returns_to_go(reward - 0.5 * cost, discount))
    assert CalQL(CONFIG).charged(Transitions(records, {})).now["return"] is records["return"]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, dataset: str, stop: int) -> None:
    """In the middle of the offline phase, between the two, and online."""
    config = replace(CONFIG, dataset=dataset, online_conservative_coef=0.5)
    whole, metrics, _ = run(tmp_path / "whole", CalQL(config), 4, chunk=CHUNK)
    parts, again, _ = run(tmp_path / "parts", CalQL(config), 4, stop, chunk=CHUNK)
    for name, value in whole.weights().items():
        assert torch.equal(value, parts.weights()[name]), name
    for name, value in whole.state().items():
        assert torch.equal(value, parts.state()[name]), name
    untimed = partial(filter, lambda pair: "timing" not in pair[0] and "throughput" not in pair[0])
    last = [dict(untimed(each[-1].items())) for each in (metrics, again)]
    assert last[0] == last[1]


def test_ranks_know_whether_each_has_a_demonstration(tmp_path: Path) -> None:
    episode = {"acted": torch.ones(2).bool(), "reward": torch.zeros(2)}
    store = ShardedReplay(tmp_path, 1, 3, 100)
    found = []
    for _ in range(3):
        store.append(episode)
        found.append(store.on_all_ranks)
    assert found == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "iterations", "complaint"),
    [
        (
            {"dataset": None},
            0,
            "algorithm.offline_iterations=2 learn from demonstrations alone: set algorithm.dataset",
        ),
        ({}, 1, "algorithm.offline_iterations=2 are part of the 1 iterations of the run"),
        ({"noise_bound": 1.0, "frozen_backbone": True}, 4, "cannot use demonstrations"),
        ({"anchor": 1.0}, 4, "set algorithm.frozen_backbone=true"),
    ],
)
def test_what_makes_no_sense_is_refused(
    changes: dict[str, Any], iterations: int, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        CalQL(replace(CONFIG, **changes), 1.0, iterations)


def test_it_may_begin_online_or_end_offline() -> None:
    CalQL(replace(CONFIG, offline_iterations=0, dataset=None), 1.0, 4)
    CalQL(CONFIG, 1.0, 2)


@pytest.mark.parametrize("anchor", [None, 0.5])
def test_features_of_a_frozen_backbone_are_stored_and_standardised_offline(
    tmp_path: Path, dataset: str, anchor: float | None
) -> None:
    config = replace(CONFIG, dataset=dataset, frozen_backbone=True, anchor=anchor)
    trainer, metrics, running = run(tmp_path, CalQL(config), 3, chunk=CHUNK)
    stored = replays_of(running)[1].newest()
    assert "features" in stored and "image" not in stored
    assert bool((trainer.policy.feature_spread != 1).any())
    assert all(math.isfinite(value) for each in metrics for value in each.values())
