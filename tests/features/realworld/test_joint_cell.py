"""Sessions at a robot that is moved by its joints, such as a real SO-101: its operator's device gives words alone."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlinf_vla.benchmarks.synthetic_cell import SyntheticCamera
from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.features.realworld.cell import open_cell, require_demonstrator
from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.operator_session import OperatorLeft
from rlinf_vla.features.realworld.robot import Camera, Intervention, JointTarget, RobotState, Target
from rlinf_vla.robots.lerobot.config import LeRobotConfig
from rlinf_vla.robots.lerobot.plugin import LeRobot
from rlinf_vla.runtime import recipes

REAL = (
    "robot=lerobot",
    "robot.cell=cell://so101_sim",
    "robot.actions=relative",
    "+robot.options.port=/dev/null",
)
REAL += (
    "+robot.cameras.front.driver=opencv",
    "session.acknowledge=operator",
    "session.operator=keyboard",
    "cluster=laptop",
)


def composed(*words: str) -> Recipe:
    return recipes.read(compose.load("train", ["recipe=so101_rlpd", *REAL, *words]))


class Joints:
    """Reaches every target at once."""

    def __init__(
        self, config: LeRobotConfig, make: Callable[[LeRobot, LeRobotConfig], object]
    ) -> None:
        self.spec = make(LeRobot(), config).spec  # type: ignore[attr-defined]
        self.state = RobotState(0.0, np.zeros(6), np.zeros(6))

    def connect(self, timeout_s: float) -> None: ...

    def observe(self) -> RobotState:
        return self.state

    def command(self, target: Target, valid_until: float) -> None:
        assert isinstance(target, JointTarget)

    def interventions(self) -> list[Intervention]:
        return []

    def close(self) -> None: ...


def test_a_keyboard_gives_the_words_of_a_session_and_moves_no_joint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cameras(plugin: LeRobot, config: LeRobotConfig) -> list[Camera]:
        return [SyntheticCamera(Clock(), "front", (64, 64))]

    make = LeRobot.make
    monkeypatch.setattr(LeRobot, "make", lambda plugin, config: Joints(config, make))
    monkeypatch.setattr(LeRobot, "cameras", cameras)
    keys, terminal = pty.openpty()
    recipe = composed("algorithm.demonstrations=0", f"session.device={os.ttyname(terminal)}")
    require_demonstrator(recipe)
    with (
        open_cell(recipe, lambda message: None) as cell,
        pytest.raises(OperatorLeft, match="keyboard said quit"),
    ):
        os.write(keys, b"wx")
        while True:
            cell.player.rest()
    for end in (keys, terminal):
        os.close(end)


@pytest.mark.parametrize("words", [[], ["session.operator=none"]])
def test_demonstrations_by_an_operator_are_refused(words: list[str]) -> None:
    with pytest.raises(
        UserError,
        match=r"the joints of robot=lerobot: .* lerobot-record .* algorithm\.demonstrations=0",
    ):
        require_demonstrator(composed(*words))


def test_a_simulated_expert_needs_no_operator() -> None:
    recipe = recipes.read(compose.load("train", ["recipe=so101_rlpd", "cluster=laptop"]))
    require_demonstrator(recipe)
    recipe.session.operator = "keyboard"
    with pytest.raises(UserError, match=r"session\.operator=none"):
        require_demonstrator(recipe)


def test_corrections_are_refused_and_imitation_is_not(tmp_path: Path) -> None:
    keys = ["recipe=so101_sft", *REAL, f"algorithm.demonstrations.dataset={tmp_path}"]
    require_demonstrator(recipes.read(compose.load("train", keys)))
    corrected = recipes.read(compose.load("train", [*keys, "algorithm=hg_dagger"]))
    with pytest.raises(UserError, match="set algorithm=sft"):
        require_demonstrator(corrected)
