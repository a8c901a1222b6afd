from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import EnvSpec
from rlinf_vla.core.transitions import ACTED, ACTION, DISCOUNT, REWARD
from rlinf_vla.data.from_dataset import dataset_transitions
from rlinf_vla.data.lerobot_format import recorded_features
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.features.realworld.arm_convention import ArmConvention
from rlinf_vla.features.realworld.episode import DEMONSTRATION, Job, episode_inputs
from rlinf_vla.features.realworld.record import ReplayScene, robot_frames
from rlinf_vla.features.realworld.records import RecordForm, to_records
from rlinf_vla.features.realworld.robot import ACKNOWLEDGE, PAUSE, RESUME
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.features.realworld.toy_cell import Toy, ToyScene

SPEC = EnvSpec(1, 4, 8, 10.0, 20, {"base": (64, 64)}, ("Touch",), torch.device("cpu"))


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("limit", [1, 20])
def test_a_dataset_gives_the_same_records_as_the_session(
    limit: int, chunk: int, tmp_path: Path
) -> None:
    """Truncated, and ended by success; of single actions, and of chunks."""
    toy = Toy(limit=limit)
    toy.player.play(Job(DEMONSTRATION, 0, 7, scripted=True), toy.keep)
    large = torch.randint(256, (len(toy.episodes[0]) + 1, 64, 64, 3), dtype=torch.uint8)
    episode = replace(toy.episodes[0], images={"base": large})
    with LeRobotWriter(
        tmp_path / "data", 10.0, recorded_features(SPEC, video=False), "toy"
    ) as writer:
        writer.add_episode(robot_frames(episode, toy.robot.spec.space), episode.instruction)
    policy = LinearPolicy(LinearOptions(chunk=chunk))
    (found,) = dataset_transitions(policy, SACConfig(dataset=str(tmp_path / "data"), gamma=0.9))
    form = RecordForm(chunk, ArmConvention(policy.spec.convention), False, 0.9)
    wanted = to_records(episode, episode_inputs(episode, policy.prepare), form, 0, len(episode))
    assert (
        (found.success, found.steps)
        == (wanted.success, wanted.steps)
        == (limit == 20, len(episode))
    )
    for name in (ACTION, REWARD, DISCOUNT, ACTED, "image"):
        torch.testing.assert_close(found.records[name], wanted.records[name])
    action = LeRobotReader(tmp_path / "data").episode(0, ["action"]).columns["action"]
    assert (action[len(episode) :] == [0, 0, 0, episode.action[-1, -1]]).all(), (
        "nothing moves, including the hand"
    )
    again = ReplayScene(toy.scene, action[: len(episode)])
    state = toy.robot.state
    assert again.arrange(7) == episode.instruction
    np.testing.assert_array_equal(
        np.stack([again.expert(state) for _ in range(len(episode))]), episode.action.numpy()
    )  # type: ignore[arg-type]
    assert again.expert(state) is None


@pytest.mark.parametrize(
    "slow_part, ticks",
    [("camera", [0, 1, 3, 4, 8, 9, 10, 11, 12]), ("expert", [0, 1, 3, 4, 5, 9, 10, 11, 12])],
)
def test_a_replay_gives_every_action_also_if_steps_are_too_slow_for_one(
    slow_part: str, ticks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a period is over before the action is asked for, or only when it comes."""
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)

    def replayed(scene: ToyScene) -> ReplayScene:
        scene.can_tell = False
        return ReplayScene(scene, actions)

    toy = Toy(limit=100, wrap=replayed)
    delays = iter([0, 0, 0.13, 0, 0, 0.35] + [0] * 100)
    part, method = (toy.camera, "latest") if slow_part == "camera" else (ReplayScene, "expert")
    original = getattr(part, method)

    def slow(*arguments: Any) -> Any:
        toy.clock.sleep_until(toy.clock.now() + next(delays))
        return original(*arguments)

    monkeypatch.setattr(part, method, slow)
    toy.player.play(Job(DEMONSTRATION, 0, 7, scripted=True), toy.keep)
    (episode,) = toy.episodes
    np.testing.assert_array_equal(episode.action.numpy(), actions)
    assert episode.ended == "no action is left" and episode.tick.tolist() == ticks


def test_a_replay_restarts_after_a_fault_on_the_operators_command() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)

    def replayed(scene: ToyScene) -> ReplayScene:
        scene.by_hand = True
        scene.can_tell = False
        return ReplayScene(scene, actions)

    toy = Toy(limit=8, wrap=replayed)
    toy.clock.at(2.7, lambda: toy.robot.stop("reflex"))
    toy.operator.plan = {
        2_000: RESUME,
        10_000: ACKNOWLEDGE,
        12_000: RESUME,
        12_600: PAUSE,
        20_000: RESUME,
        22_000: RESUME,
    }
    toy.player.play(Job(DEMONSTRATION, 0, 7, scripted=True), toy.keep)
    (episode,) = toy.episodes
    np.testing.assert_array_equal(episode.action.numpy(), actions)
    assert episode.human.all() and [each["for"] for each in toy.told if "for" in each] == [
        RESUME,
        ACKNOWLEDGE,
        RESUME,
        RESUME,
        RESUME,
    ]
    assert 4 < len(toy.robot.commands) - len(actions) < 2 * len(actions), "it was interrupted twice"


def test_a_dataset_has_no_distances() -> None:
    spec = replace(SPEC, images={"base": (8, 8), "base_depth": (8, 8)})
    with pytest.raises(
        UserError, match="'base_depth' shows distances, a LeRobotDataset written here"
    ):
        recorded_features(spec, video=False)
