from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.sac import SAC, SACConfig, SACPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.transitions import COST, REWARD
from rlinf_vla.features.realworld.episode import DEMONSTRATION, TRAINING, Job, RobotEpisode
from rlinf_vla.features.realworld.flow import OnlineFlow
from rlinf_vla.models.compact.options import CompactOptions
from rlinf_vla.models.compact.policy import CompactPolicy
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.off_policy import ReplayFlow
from rlinf_vla.runtime.workers.learner import LearnerWorker
from rlinf_vla.runtime.workers.local import local_workers
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import HERE, replays_of

CONFIG = SACConfig(
    episodes=2,
    updates_per_step=0.2,
    batch_size=4,
    critics=2,
    hidden=8,
    shift=0,
    gamma=0.9,
    demonstrations=2,
)


class Played:
    """A player that records its jobs, with episodes that depend only on their seed. Their steps ``human`` are the operator's."""

    def __init__(self, human: slice = slice(0)) -> None:
        self.log: list[tuple[str, int]] = []
        self.human = human
        self.shows_well = True
        self.empty = -1
        self.weights: dict[str, Tensor] = {}
        self.version = -1
        self.scripted: list[bool] = []
        self.shown: list[Job] = []
        self.played: list[Job] = []
        self.attended = threading.Semaphore(0)

    def begin(self, job: Job) -> None:
        self.scripted.append(job.scripted)
        self.shown += [job] if job.kind == DEMONSTRATION else []
        self.log.append((f"begin {job.kind}", job.number))

    def episode(self, job: Job, idle: Callable[[], None]) -> RobotEpisode:
        idle()
        self.played.append(job)
        self.log.append((f"end {job.kind}", job.number))
        generator = torch.Generator().manual_seed(job.seed)
        length = 4 + job.seed % 3
        success = job.kind == DEMONSTRATION and self.shows_well
        human = torch.zeros(length, dtype=torch.bool)
        human[self.human] = True
        if job.kind == DEMONSTRATION and job.number == self.empty:
            length = 0
            human = human[:0]
        images = torch.randint(256, (length + 1, 8, 8, 3), generator=generator).byte()
        return RobotEpisode(
            job=job,
            task="Touch",
            instruction="touch",
            images={"front": images},
            state=torch.rand(length + 1, 8, generator=generator),
            tick=torch.arange(length + 1),
            action=torch.rand(length, 4, generator=generator),
            human=human | (job.kind == DEMONSTRATION),
            begins=~human & (job.kind != DEMONSTRATION),
            chosen=torch.zeros(length, 0),
            reward=torch.tensor([0.0] * (length - 1) + [float(success)] * (length > 0)),
            cost=torch.arange(length) % 2.0,
            terminated=success,
            success=success,
            ended="",
        )

    def attend(self) -> None:
        self.attended.release()

    def share(self, weights: Callable[[], Mapping[str, Tensor]], version: int) -> None:
        if version != self.version:
            self.version = version
            self.log.append(("publish", version))
            self.weights = {name: value.detach().clone() for name, value in weights().items()}

    def forget(self, job: Job) -> None:
        self.log.append(("forget", job.number))

    def control_metrics(self) -> dict[str, float]:
        return {"control/missed": 3.0}


@pytest.fixture
def policy(tmp_path: Path) -> SACPolicy:
    config = {
        "image_sizes": [8, 8],
        "chunk": 1,
        "action_dim": 4,
        "state_dim": 8,
        "patch": 2,
        "channels": [4],
        "width": 8,
    }
    config["state_range"] = {"low": [0] * 8, "high": [1] * 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return SAC(CONFIG).wrap(
        CompactPolicy.load(tmp_path, CompactOptions(random_weights=True, images=["front"])), 0
    )


def flow_of(
    policy: SACPolicy,
    player: Played,
    directory: Path,
    state: dict[str, int] | None = None,
    config: SACConfig = CONFIG,
    scripted: bool = True,
) -> OnlineFlow:
    settings = Settings(0, 1.0, 1)
    return OnlineFlow(
        player,
        iterations=3,
        workers=local_workers(
            policy,
            (),
            (),
            Trainer(policy, SAC(config), 64),
            SAC(config),
            settings,
            HERE,
            LearnerWorker,
        ),
        scripted=scripted,
        settings=settings,
        config=config,
        directory=directory,
        state=state or {},
        instructions=(),
    )


def iterate(flow: OnlineFlow, iteration: int, config: SACConfig = CONFIG) -> None:
    flow.begin(iteration)
    SAC(config, 1.0).iteration(flow)


def test_the_robot_continues_during_updates(policy: SACPolicy, tmp_path: Path) -> None:
    player = Played()
    flow = flow_of(policy, player, tmp_path / "replay")
    iterate(flow, 0)
    begin, end = f"begin {TRAINING}", f"end {TRAINING}"
    assert player.log[:5] == [
        *(
            (f"begin {DEMONSTRATION}", 0),
            (f"begin {DEMONSTRATION}", 1),
            (f"end {DEMONSTRATION}", 0),
            (f"end {DEMONSTRATION}", 1),
        ),
        ("publish", 0),
    ]
    assert player.log[5:] == [
        *((begin, 0), (begin, 1), (end, 0), (end, 1), (begin, 2), (begin, 3)),
        ("publish", 1),
    ]
    before = dict(player.weights)
    del player.log[:]
    for iteration in (1, 2):
        iterate(flow, iteration)
    assert player.log == [
        *((end, 2), (end, 3), (begin, 4), (begin, 5), ("publish", 2)),
        *((end, 4), (end, 5), ("publish", 3)),
    ], "no episodes run after the last iteration"
    assert not any(name.startswith("value_head") for name in before) and any(
        (player.weights[name] != before[name]).any() for name in before
    )


def test_the_robot_is_attended_to_during_updates(
    policy: SACPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = Played()
    update = ReplayFlow.update_from_replay
    flow = flow_of(policy, player, tmp_path / "replay")
    seen: list[bool] = []

    def long(self: ReplayFlow, updates: int, algorithm: SAC) -> None:
        seen.extend(player.attended.acquire(timeout=120) for _ in range(3))
        update(self, updates, algorithm)

    monkeypatch.setattr(ReplayFlow, "update_from_replay", long)
    iterate(flow, 0)
    assert seen == [True] * 3 and flow.metrics["actor/updates"] > 0


def test_collected_episodes_are_used_for_training(policy: SACPolicy, tmp_path: Path) -> None:
    player = Played(human=slice(1, 3))
    flow = flow_of(policy, player, tmp_path / "replay")
    iterate(flow, 0)
    lengths = [4 + job.seed % 3 for job in player.played if job.kind == TRAINING]
    assert len(flow.replay) == sum(lengths) == flow.metrics["rollout/steps"], (
        "truncated episodes end with an observation that is no step"
    )
    assert flow.metrics["control/missed"] == 3
    assert flow.metrics["demonstrations/success"] == 1 and flow.metrics[
        "rollout/human_share"
    ] == 4 / sum(lengths)
    assert (
        flow.metrics["actor/updates"] == round(0.2 * sum(lengths))
        and "critic/vf_loss" in flow.metrics
    )
    shown = [job for job in player.log if job[0] == f"end {DEMONSTRATION}"]
    assert len(shown) == 2 and flow.demonstrations.total > 2 * 3, (
        "the operator's steps join the demonstrations"
    )
    state = flow.save()
    assert (
        state["replay"] == flow.replay.total
        and state["demonstrations"] == flow.demonstrations.total
    )
    again = flow_of(policy, player, tmp_path / "replay", state)
    assert len(again.replay) == len(flow.replay) and len(again.demonstrations) == len(
        flow.demonstrations
    )
    flow.saved([{"iteration": 1} | state, {"iteration": 2} | state])
    assert [entry for entry in player.log if entry[0] == "forget"] == [("forget", 0), ("forget", 1)]


def test_interventions_are_a_cost(policy: SACPolicy, tmp_path: Path) -> None:
    player = Played()
    config = replace(CONFIG, cost_limit=0.5, cost_rate=0.1)
    flow = flow_of(policy, player, tmp_path / "replay")
    subject = SAC(config, 1.0)
    flow.begin(0)
    subject.iteration(flow)
    lengths = [4 + job.seed % 3 for job in player.played if job.kind == TRAINING]
    cost = sum(length // 2 for length in lengths) / len(lengths)
    assert flow.metrics["rollout/cost_per_episode"] == cost
    assert subject.adapt(flow.metrics) == {
        "actor/cost_multiplier": pytest.approx(0.1 * (cost - 0.5))
    }
    batch = replays_of(flow)[0].sample(64, torch.Generator().manual_seed(0))
    assert set(batch.now[COST].tolist()) == {0.0, 1.0}
    torch.testing.assert_close(
        subject.charged(batch).now[REWARD], batch.now[REWARD] - subject.multiplier * batch.now[COST]
    )


def test_without_demonstrations_the_operators_steps_are_the_first(
    policy: SACPolicy, tmp_path: Path
) -> None:
    config = replace(CONFIG, demonstrations=0)
    flow = flow_of(policy, Played(human=slice(0, 2)), tmp_path / "replay", config=config)
    iterate(flow, 0, config)
    assert len(flow.demonstrations) == 4


@pytest.mark.parametrize("scripted", [True, False])
def test_the_operator_or_the_expert_demonstrates(
    policy: SACPolicy, tmp_path: Path, scripted: bool
) -> None:
    player = Played()
    iterate(flow_of(policy, player, tmp_path / "replay", scripted=scripted), 0)
    assert player.scripted == [scripted] * 2 + [False] * 4


def test_a_demonstration_without_an_action_is_not_counted(
    policy: SACPolicy, tmp_path: Path
) -> None:
    player = Played()
    player.empty = 0
    flow = flow_of(policy, player, tmp_path / "replay")
    iterate(flow, 0)
    assert len(flow.demonstrations) == sum(
        4 + job.seed % 3 for job in player.shown if job.number == 1
    )


def test_an_interrupted_run_keeps_its_demonstrations(policy: SACPolicy, tmp_path: Path) -> None:
    player = Played()
    flow = flow_of(policy, player, tmp_path / "replay")
    flow.begin(0)
    episode = player.episode

    def leave(job: Job, idle: Callable[[], None]) -> RobotEpisode:
        if job.number == 1:
            raise KeyboardInterrupt
        return episode(job, idle)

    player.episode = leave  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        flow.demonstrate(2)
    state = flow.save()
    assert state["demonstrations"] == 0 < flow.demonstrations.total
    player.episode = episode  # type: ignore[method-assign]
    again = flow_of(policy, player, tmp_path / "replay", state)
    again.demonstrate(2)
    assert (
        again.save()["demonstrations"]
        == again.demonstrations.total
        == sum(4 + job.seed % 3 for job in player.shown[:2])
    )


def test_the_number_of_successful_demonstrations_is_reported(
    policy: SACPolicy, tmp_path: Path
) -> None:
    player = Played()
    player.empty = 0
    flow = flow_of(policy, player, tmp_path / "replay")
    flow.begin(0)
    flow.demonstrate(2)
    assert flow.metrics["demonstrations/success"] == 0.5


def test_a_date_is_a_seed(policy: SACPolicy, tmp_path: Path) -> None:
    flow = flow_of(policy, Played(), tmp_path / "replay")
    flow.settings = Settings(20261123, 1.0, 1)
    iterate(flow, 0)
    assert flow.metrics["actor/updates"] > 0


def test_failed_demonstrations_are_reported(policy: SACPolicy, tmp_path: Path) -> None:
    player = Played()
    player.shows_well = False
    with pytest.raises(UserError, match="none of them succeeded"):
        iterate(flow_of(policy, player, tmp_path / "replay"), 0)
