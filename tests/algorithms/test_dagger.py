"""DAgger: its mixture, a step against plain PyTorch, and what it learns in the counter world."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.dagger import DAgger, DAggerConfig, DrawnNoise
from rlinf_vla.core.transitions import RankRows, Transitions
from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import off_policy_flow, policy_of, replays_of


class Flow:
    """Notes the operations of an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.done: list[Any] = []

    def training_episodes(self, count: int, draw: int) -> Episodes:
        number = torch.arange(count)
        return Episodes.first_attempts(torch.zeros_like(number), number)

    def visit(self, episodes: Episodes, beta: float | None) -> None:
        self.done.append((len(episodes), beta))

    def update_from_replay(self, updates: int, algorithm: Any) -> None:
        self.done.append(updates)

    def publish(self) -> None:
        self.done.append("publish")

    def log(self, metrics: dict[str, float]) -> None: ...


@pytest.mark.parametrize(
    ("beta", "expected"), [(0.5, [1, 0.5, 0.25]), (0.0, [1, 0, 0]), (None, [0, 0, 0])]
)
def test_the_experts_share_falls_as_in_the_paper(beta: float | None, expected: list[float]) -> None:
    algorithm = DAgger(DAggerConfig(episodes=3, updates=7, beta=beta))
    for iteration, share in enumerate(expected):
        flow = Flow(iteration)
        algorithm.iteration(flow)
        assert flow.done == [(3, share), 7, "publish"]


def batch_of(rows: int, chunk: int = 2) -> Transitions:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (rows, 8, 8, 3), generator=generator, dtype=torch.uint8)
    action = torch.rand(rows, chunk, 4, generator=generator) * 2 - 1
    now = {"image": image, "action": action, "reward": torch.zeros(rows)}
    return Transitions(now | {"acted": torch.ones(rows, dtype=torch.bool)}, {})


def test_a_step_is_that_of_adamw_on_the_mean_loss() -> None:
    config = DAggerConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=1e6)
    policy = LinearPolicy(LinearOptions(chunk=2))
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        reference.backbone.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
    )
    trainer = Trainer(policy, DAgger(config), 64)
    for index in range(2):
        batch = batch_of(9)
        found = DAgger(config).step(
            trainer, batch, torch.Generator(), 0, index, partial(batch_of, 9)
        )
        optimizer.zero_grad()
        logits = reference.backbone["logits"](reference.encode(batch.now)).reshape(9, 2, 4, 5)
        log_prob = torch.log_softmax(logits, -1)
        bins = (batch.now["action"][..., None] - reference.centres).abs().argmin(-1)
        loss = -sum(
            log_prob[n, c, d, bins[n, c, d]] for n in range(9) for c in range(2) for d in range(4)
        ) / (9 * 2 * 4)
        loss.backward()
        optimizer.step()
        assert found == {"sft/loss": pytest.approx(loss.item(), abs=1e-6)}
    for name, value in reference.backbone.state_dict().items():
        torch.testing.assert_close(policy.backbone.state_dict()[name], value)


def test_the_noise_of_a_row_does_not_depend_on_the_ranks() -> None:
    here = torch.device("cpu")
    batch = batch_of(5)
    whole = DrawnNoise(batch, torch.Generator().manual_seed(3), here)
    rows = torch.tensor([4, 1])
    part = Transitions({}, {}, RankRows(rows, 5))
    own = DrawnNoise(part, torch.Generator().manual_seed(3), here)
    for draw in ("normal", "uniform", "normal"):
        assert torch.equal(getattr(whole, draw)(2, 3)[rows], getattr(own, draw)(2, 3))
    many = DrawnNoise(batch_of(1), torch.Generator(), here).uniform(100_000)
    assert bool(((many > 0) & (many < 1)).all())


def test_it_learns_to_act_as_the_expert(tmp_path: Path) -> None:
    config = DAggerConfig(episodes=8, updates=30, batch_size=16, learning_rate=0.02, beta=0.5)
    policy = LinearPolicy(LinearOptions(chunk=2))
    flow = off_policy_flow(
        policy,
        groups(4, 2),
        Trainer(policy, DAgger(config), 64),
        Settings(0, 1.0, 2),
        DAgger(config),
        tmp_path,
        {},
    )
    successes = []
    for iteration in range(4):
        flow.begin(iteration)
        DAgger(config).iteration(flow)
        successes.append(flow.metrics["rollout/success_once"])
    assert policy_of(flow) is policy and len(replays_of(flow)[0]) > 4 * 8
    assert successes[0] == 1, "the expert acts alone"
    evaluated = flow.evaluate(20, 0.0, 0, lambda fraction: None, None)
    assert sum(each.success for each in evaluated) == 20
