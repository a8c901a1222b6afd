"""HG-DAgger: which steps are imitated, in which batches, and that a resumed run goes on with the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.hg_dagger import HGDAgger, HGDAggerConfig
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.core.protocols import Noise
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.features.planner.graph import trace
from rlinf_vla.features.realworld.dagger import DAggerFlow
from rlinf_vla.features.realworld.episode import TRAINING, Job, RobotEpisode
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.noise import imitation_noise
from rlinf_vla.runtime.workers.local import local_workers
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.features.realworld.test_online_flow import Played
from tests.runtime.here import HERE

CHUNK = 3
CONFIG = HGDAggerConfig(episodes=2, updates=3, batch_size=8, learning_rate=0.01)


class Corrected(Played):
    """Writes its episodes; the policy's camera is there. In those with an odd number nobody takes over."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def episode(self, job: Job, idle: Callable[[], None]) -> RobotEpisode:
        found = super().episode(job, idle)
        images = torch.randint(
            256, (len(found) + 1, 64, 64, 3), generator=torch.Generator().manual_seed(job.seed)
        ).byte()
        human = torch.zeros(len(found), dtype=torch.bool)
        if job.number % 2 == 0:
            human[[0, 1, 3]] = True
        found = replace(found, images={"base": images}, human=human)
        found.write(self.folder)
        return found


def flow_of(player: Corrected, policy: LinearPolicy, config: HGDAggerConfig = CONFIG) -> DAggerFlow:
    settings = Settings(0, 1.0, 1)
    return DAggerFlow(
        player,
        player.folder,
        local_workers(
            policy, (), (), Trainer(policy, HGDAgger(config), 64), HGDAgger(config), settings, HERE
        ),
        settings,
    )


def iterate(flow: DAggerFlow, first: int, last: int, config: HGDAggerConfig = CONFIG) -> None:
    flow.policy_version = first
    for iteration in range(first, last):
        flow.begin(iteration)
        HGDAgger(config).iteration(flow)


def weights(policy: LinearPolicy) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in policy.named_parameters()}


def test_every_run_of_the_operators_steps_is_imitated(tmp_path: Path) -> None:
    policy = LinearPolicy(LinearOptions(chunk=CHUNK - 1))
    policy.horizon = CHUNK  # it executes fewer actions than it predicts
    flow = flow_of(Corrected(tmp_path), policy)
    flow.begin(0)
    found = flow.correct(2)
    assert found is not None
    episode = RobotEpisode.read(tmp_path / Job(TRAINING, 0, 0).file)
    prepared = policy.prepare(episode.observation())["image"]
    rows = [(0, [0, 1, 1]), (1, [1, 1, 1]), (3, [3, 3, 3])]
    assert len(found) == len(rows)
    for row, (step, actions) in enumerate(rows):
        assert torch.equal(found.inputs["image"][row], prepared[step])
        assert torch.equal(found.actions[row], episode.action[actions])
    assert flow.metrics["replay/size"] == 3 and flow.metrics["rollout/human_share"] > 0


def test_a_batch_has_a_share_of_corrections() -> None:
    def labelled(count: int, label: float) -> Demonstrations:
        return Demonstrations(
            {"x": torch.full((count, 1), label)},
            torch.full((count, 1, 1), label),
            torch.arange(count),
        )

    class Flow:
        iteration = 5

        def generator(self) -> torch.Generator:
            return torch.Generator().manual_seed(0)

    algorithm = HGDAgger(replace(CONFIG, correction_share=0.25))
    batches = algorithm.batches(labelled(10, 0.0), labelled(4, 1.0), Flow())  # type: ignore[arg-type]
    assert [int(each.actions.sum()) for each in batches] == [2, 2, 2] and all(
        len(each) == 8 for each in batches
    )
    assert torch.cat([each.draws for each in batches]).tolist() == list(range(5 * 24, 6 * 24)), (
        "each row has its own random numbers"
    )
    for shown, corrected, total in ((labelled(10, 0.0), None, 0), (None, labelled(4, 1.0), 24)):
        batches = algorithm.batches(shown, corrected, Flow())  # type: ignore[arg-type]
        assert sum(int(each.actions.sum()) for each in batches) == total


def test_a_resumed_run_goes_on_with_the_same_corrections(tmp_path: Path) -> None:
    whole = LinearPolicy(LinearOptions(chunk=CHUNK))
    iterate(flow_of(Corrected(tmp_path / "whole"), whole), 0, 3)
    cut = LinearPolicy(LinearOptions(chunk=CHUNK))
    before = flow_of(Corrected(tmp_path / "cut"), cut)
    iterate(before, 0, 2)
    again = flow_of(Corrected(tmp_path / "cut"), cut)
    again.trainer.load_state(before.trainer.state())
    iterate(again, 2, 3)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(cut)[name]), name
    assert not torch.equal(
        weights(whole)["backbone.logits.weight"],
        LinearPolicy(LinearOptions(chunk=CHUNK)).backbone["logits"].weight,
    )


class Inverting(LinearPolicy):
    """Its trainer shows it inverted images, made from those that it does not act on."""

    augmentation_unsupported = None

    def prepare_to_augment(self, obs: Observation) -> Inputs:
        return {name: value // 2 for name, value in self.prepare(obs).items()}

    def augment(self, inputs: Inputs, noise: Noise) -> Inputs:
        assert noise.uniform(1).shape == (len(inputs["image"]), 1)
        return {"image": 255 - 2 * inputs["image"]}


def test_it_has_the_settings_of_imitation(tmp_path: Path) -> None:
    """Images are augmented, and a moving average of the weights acts."""
    config = replace(CONFIG, updates=1, augmentation="official", ema_decay=0.75)
    policy = Inverting(LinearOptions(chunk=CHUNK))
    flow = flow_of(Corrected(tmp_path), policy, config)
    before = weights(policy)
    flow.begin(0)
    found = flow.correct(2)
    assert found is not None
    episode = RobotEpisode.read(tmp_path / Job(TRAINING, 0, 0).file)
    seen = policy.prepare(episode.observation())["image"]
    assert torch.equal(found.inputs["image"], seen[[0, 1, 3]] // 2)

    algorithm = HGDAgger(config)
    (batch,) = algorithm.batches(None, found, flow)
    inverted = {"image": 255 - 2 * batch.inputs["image"]}
    expected = policy.supervised_loss(inverted, batch.actions, imitation_noise(0, batch.draws))
    flow.aggregate([batch])
    flow.publish()
    assert flow.metrics["sft/loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    flow.begin(1)
    flow.correct(2)
    shared = flow.player.weights  # type: ignore[attr-defined]
    learnt = weights(policy)
    name = "backbone.logits.weight"
    assert not torch.equal(learnt[name], before[name])
    torch.testing.assert_close(shared[name], 0.75 * before[name] + 0.25 * learnt[name])


def test_without_a_correction_nothing_is_learnt(tmp_path: Path) -> None:
    policy = LinearPolicy(LinearOptions(chunk=CHUNK))
    before = weights(policy)
    config = replace(CONFIG, episodes=1)
    player = Corrected(tmp_path)
    flow = flow_of(player, policy, config)
    flow.policy_version = 1
    RobotEpisode.write(_untouched(player), tmp_path)
    flow.begin(1)
    HGDAgger(config).iteration(flow)
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
    assert "actor/updates" not in flow.metrics and flow.policy_version == 2


def _untouched(player: Corrected) -> RobotEpisode:
    """The episode of the iteration before, without a takeover."""
    found = player.episode(Job(TRAINING, 0, 1), lambda: None)
    return replace(found, human=torch.zeros(len(found), dtype=torch.bool))


@pytest.mark.parametrize("dataset", [None, "data"])
def test_its_flow_is_planned_like_any_other(dataset: str | None) -> None:
    config = HGDAggerConfig()
    config.demonstrations.dataset = dataset
    assert ("demonstrate" in trace(HGDAgger(config))) == (dataset is not None)
    assert "aggregate" in trace(HGDAgger(config))
