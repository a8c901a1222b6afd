"""DAgger: its mixture, a step against plain PyTorch, and what it learns in the counter world."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.dagger import DAgger, DAggerConfig, DrawnNoise
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.transitions import RankRows, Transitions
from rlinf_vla.core.types import Episodes, Inputs
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import off_policy_flow, policy_of, replays_of

GENERATOR = torch.Generator()
"""For noise that no loss here draws."""


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


class Calls(LinearPolicy):
    """In float64, so that rounding hides no error."""

    def __init__(self, seed: int) -> None:
        super().__init__(LinearOptions(chunk=2, seed=seed))
        self.double()

    def encode(self, inputs: Inputs) -> torch.Tensor:
        return 5 * super().encode(inputs).double()


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_a_divergence_is_that_of_each_token(loss: str, temperature: float) -> None:
    student, teacher = Calls(0), Calls(1)
    records = batch_of(4).now
    del records["action"]
    algorithm = DAgger(DAggerConfig(teacher="somewhere", loss=loss), temperature)
    here = torch.device("cpu")
    found = algorithm.loss(student, teacher, records, DrawnNoise(batch_of(4), GENERATOR, here))
    log_prob = [
        (
            policy.backbone["logits"](policy.encode(records)).reshape(4, 2, 4, 5) / temperature
        ).log_softmax(-1)
        for policy in (student, teacher)
    ]
    p, q = log_prob if loss == "reverse_kl" else log_prob[::-1]
    for row in range(4):
        total = sum(
            math.exp(a) * (a - b)
            for first, second in zip(p[row].flatten(0, 1), q[row].flatten(0, 1), strict=True)
            for a, b in zip(first.tolist(), second.tolist(), strict=True)
        )
        assert found[row].item() == pytest.approx(total / 8, abs=1e-12)
    found.sum().backward()
    assert student.backbone["logits"].weight.grad.abs().sum() > 0
    assert teacher.backbone["logits"].weight.grad is None


def test_a_teacher_is_imitated_in_its_greedy_actions() -> None:
    student, teacher = Calls(0), Calls(1)
    records = batch_of(4).now
    del records["action"]
    algorithm = DAgger(DAggerConfig(teacher="somewhere"))
    noise = DrawnNoise(batch_of(4), GENERATOR, torch.device("cpu"))
    found = algorithm.loss(student, teacher, records, noise)
    logits = teacher.backbone["logits"](teacher.encode(records)).reshape(4, 2, 4, 5)
    greedy = teacher.centres[logits.argmax(-1)]
    assert torch.equal(found, student.supervised_loss(records, greedy, noise))


@pytest.mark.parametrize("loss", ["imitation", "forward_kl", "reverse_kl"])
def test_a_student_approaches_its_teacher(loss: str, tmp_path: Path) -> None:
    config = DAggerConfig(
        episodes=8, updates=40, batch_size=32, learning_rate=0.02, teacher="somewhere", loss=loss
    )
    student, teacher = (LinearPolicy(LinearOptions(chunk=2, seed=seed)) for seed in (0, 1))
    with torch.no_grad():
        teacher.backbone["logits"].weight.mul_(4)
    trainer = Trainer(student, DAgger(config), 64)
    trainer.teacher = teacher
    settings = Settings(0, 1.0, 2)
    flow = off_policy_flow(student, groups(4, 2), trainer, settings, DAgger(config), tmp_path, {})
    for iteration in range(4):
        flow.begin(iteration)
        DAgger(config).iteration(flow)
    visited = replays_of(flow)[0].sample(64, torch.Generator().manual_seed(0)).now
    if loss == "imitation":
        greedy = [each.act(each.encode(visited), None, 0.0).actions for each in (student, teacher)]
        assert (greedy[0] == greedy[1]).float().mean() > 0.9
    else:
        latent = {"choice": visited["latent.choice"]}
        own, theirs = (each.distributions(visited, latent, 1.0) for each in (student, teacher))
        assert theirs.divergence(own).mean() < 0.05


def test_a_loss_without_a_distribution_and_a_mixture_without_the_expert_are_refused() -> None:
    with pytest.raises(UserError, match=r"the scripted expert has none: set algorithm\.teacher"):
        DAgger(DAggerConfig(loss="forward_kl"))
    with pytest.raises(UserError, match=r"only labels, set algorithm\.beta=null"):
        DAgger(DAggerConfig(teacher="somewhere", beta=0.5))
