"""Conformance suite of a robot plug-in: what every ``RobotPlugin`` must do.

The suite moves the arm, so it refuses a plug-in that is not simulated. The plug-in of a real arm is
tested with a driver that needs no arm, declared as simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.features.realworld.action_space import JointSpace, ToolSpace
from rlinf_vla.features.realworld.robot import (
    CellError,
    Finding,
    Robot,
    RobotError,
    RobotPlugin,
    Timed,
    ToolState,
)

from .config import assert_recipe_node
from .robot_motion import (
    BACK,
    DOWN,
    FORWARD,
    UP,
    RobotMotion,
    distance,
    one_action,
    openings,
    place,
    scale,
    target,
)


class RobotConformance(RobotMotion):
    """Subclasses set ``plugin``, and override the rest where it does not fit."""

    plugin: RobotPlugin
    wrong_configs: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Changes of ``config`` with which no robot can be made or connected."""

    @pytest.fixture
    def config(self) -> Any:
        """Return the ``robot`` node of a recipe."""
        return self.plugin.Config()

    @pytest.fixture
    def robot(self, config: Any) -> Iterator[Robot]:
        with self.connected(config) as robot:
            yield robot

    def test_its_config_fits_into_a_recipe(self, config: Any) -> None:
        assert isinstance(config.name, str) and config.name
        assert type(config) is self.plugin.Config
        assert_recipe_node(config)

    def test_a_wrong_config_is_refused_in_one_line(self, config: Any) -> None:
        for changes in self.wrong_configs:
            with (
                pytest.raises((CellError, RobotError, UserError)) as error,
                closing(self.plugin.make(replace(config, **changes))) as robot,
            ):
                robot.connect(10)
            assert "\n" not in str(error.value), error.value

    def test_its_spec_is_complete(self, robot: Robot) -> None:
        spec = robot.spec
        space = robot.spec.space
        numbers = [spec.control_hz, spec.lag_s]
        if isinstance(space, ToolSpace):
            numbers += [space.translation_m, space.rotation_rad, space.gripper_width_m]
        else:
            lower = np.array(space.lower)
            upper = np.array(space.upper)
            names = space.joint_names
            assert (
                len(lower) == len(upper) == len(space.step) == len(names) == len(set(names)) > 0
            ), space
            assert set(space.grippers) <= set(names)
            numbers += [*(upper - lower), *space.step]
        assert spec.name and all(math.isfinite(number) and number > 0 for number in numbers), spec

    def test_a_state_is_complete(self, robot: Robot) -> None:
        first = robot.observe()
        space = robot.spec.space
        count = space.state_size if isinstance(space, JointSpace) else len(first.joints)
        shapes = {
            "joints": (first.joints, count),
            "joint_velocities": (first.joint_velocities, count),
        }
        if isinstance(first, ToolState):
            pose = first.pose
            shapes |= {
                "position": (pose.position, 3),
                "quaternion": (pose.quaternion, 4),
                "wrench": (first.wrench, 6),
            }
            assert abs(np.linalg.norm(pose.quaternion) - 1) < 1e-3, "the quaternion has unit length"
        for name, (vector, length) in shapes.items():
            assert (vector.shape, vector.dtype) == ((length,), np.float64) and np.isfinite(
                vector
            ).all(), name
        for opening in openings(robot, first):
            assert -0.07 < opening < 1.07
        assert first.fault is None
        self.sleep(0.5)
        second = robot.observe()
        assert second.time > first.time and -1e-3 < self.now() - second.time < 1, (
            "times are those of the robot's clock"
        )

    def test_a_state_stays_as_it_was(self, robot: Robot) -> None:
        state = robot.observe()
        before = place(state).copy(), state.joints.copy()
        self.move(robot, FORWARD)
        assert np.array_equal(place(state), before[0]) and np.array_equal(state.joints, before[1])

    def test_it_follows_targets(self, robot: Robot) -> None:
        """Each way by itself, with the sign that is told."""
        for direction in (FORWARD, BACK, DOWN):
            before = robot.observe()
            travel = self.move(robot, direction)
            assert robot.observe().commanded is not None
            after = self.wait_still(robot)
            moved = place(after) - place(before)
            way = one_action(robot, direction)
            way = way / np.linalg.norm(way)
            along = float(moved @ way)
            assert 0.5 * travel < along < 1.2 * travel, (
                f"told {travel} along {direction}, moved {moved}"
            )
            assert np.linalg.norm(moved - along * way) < 0.25 * travel
            assert after.fault is None

    def test_the_gripper_closes_and_opens(self, robot: Robot) -> None:
        for aperture in (0.0, 1.0):
            self.move(robot, UP if aperture else DOWN, aperture)
            for opening in openings(robot, self.wait_still(robot)):
                assert abs(opening - aperture) < 0.2, (
                    f"told to open by {aperture:g}, a gripper is open by {opening}"
                )

    def test_it_holds_when_targets_cease(self, robot: Robot) -> None:
        before = robot.observe()
        travel = self.move(robot, FORWARD)
        after = self.wait_still(robot)
        assert distance(before, after) < 1.2 * travel and after.fault is None

    def test_a_malformed_target_moves_nothing(self, robot: Robot) -> None:
        """It is ignored, refused or a fault."""
        before = robot.observe()
        for wrong in (math.nan, math.inf):
            try:
                self.command(robot, np.array([wrong, *place(before)[1:]]))
            except (RobotError, ValueError):
                continue
        after = self.wait_still(robot)
        assert distance(before, after) < 5 * scale(robot).still

    def test_a_target_beyond_its_limits_is_cut_and_reported(self, robot: Robot) -> None:
        """Or it is a fault."""
        before = robot.observe()
        far = scale(robot).far
        robot.interventions()
        self.command(robot, place(before) + far * np.sign(one_action(robot, UP)), 10.0)
        after = self.wait_still(robot)
        assert distance(before, after) < 0.1 * far, "the arm goes wherever it is told"
        assert (openings(robot, after) < 1.1).all()
        if after.fault is None:
            interventions = robot.interventions()
            assert interventions and all(
                intervention.rule
                and math.isfinite(intervention.before)
                and math.isfinite(intervention.after)
                for intervention in interventions
            )
            assert robot.interventions() == [], "an intervention is reported once"

    def test_a_stop_latches_until_it_is_acknowledged(self, robot: Robot) -> None:
        self.move(robot, FORWARD)
        robot.stop("the first reason")
        self.wait_until(lambda: robot.observe().fault is not None, "a stop latches a fault")
        robot.stop("another reason")
        stands = self.wait_still(robot)
        assert "the first reason" in str(stands.fault), "the first reason stays"
        with pytest.raises(RobotError):
            self.command(robot, place(stands) + 0.5 * one_action(robot, UP))
        with pytest.raises(RobotError):
            robot.home(60)
        assert (
            distance(self.wait_still(robot), stands) < 5 * scale(robot).still
            and robot.observe().fault is not None
        )
        self.acknowledge(robot)
        self.move(robot, BACK)
        assert robot.observe().fault is None

    def test_stop_and_close_are_possible_at_any_time(self, config: Any) -> None:
        robot = self.plugin.make(config)
        robot.stop("before it is connected")
        robot.close()
        for _ in range(2):  # it can be connected again
            robot.connect(60)
            if robot.observe().fault is not None:
                self.acknowledge(robot)
            state = robot.observe()
            robot.close()
            robot.close()
            with pytest.raises(RobotError):
                robot.command(target(robot, state, place(state)), self.now() + 0.1)
            robot.stop("after it was closed")

    def test_home_is_one_place(self, robot: Robot) -> None:
        rest = self.wait_still(robot)
        self.move(robot, FORWARD)
        robot.home(60)
        assert distance(self.wait_still(robot), rest) < scale(robot).near

    def test_an_objection_stops_the_way_home(self, robot: Robot) -> None:
        self.move(robot, FORWARD)
        with pytest.raises(RobotError, match="somebody is near"):
            robot.home(60, lambda: "somebody is near")
        self.wait_until(
            lambda: "somebody is near" in str(robot.observe().fault), "the objection is latched"
        )

    def test_another_process_can_stop_it(self, config: Any, robot: Robot) -> None:
        """RobotError: this robot has no process of its own, so whoever drives it must stop it."""
        try:
            lines = self.plugin.order(config, "stop", "tester")
        except RobotError as error:
            assert str(error)
            return
        assert lines and all("\n" not in line for line in lines)
        self.wait_until(lambda: robot.observe().fault is not None, "the order is obeyed")

    def test_timings_are_seconds_since_the_last_call(self, robot: Robot) -> None:
        """Only if it is ``Timed``."""
        if isinstance(robot, Timed):
            robot.timings()
            self.move(robot, FORWARD)
            timings = robot.timings()
            assert any(timings.values()) and all(
                0 <= seconds < 10 for samples in timings.values() for seconds in samples
            )

    def test_cameras_deliver_new_images(self, config: Any, robot: Robot) -> None:
        for camera in self.plugin.cameras(config):
            with closing(camera):
                camera.start()
                first = camera.latest()
                self.sleep(0.5)
                second = camera.latest()
            camera.close()
            for frame in (first, second):
                assert (
                    frame.image.dtype == np.uint8
                    and frame.image.ndim == 3
                    and frame.image.shape[2] == 3
                )
            assert second.number > first.number and second.time > first.time and camera.name
            assert -1e-3 < self.now() - second.time < 5, "times are those of the robot's clock"

    def test_its_scene_lays_out_episodes(self, config: Any, robot: Robot) -> None:
        scene = self.plugin.scene(config)
        instruction = scene.arrange(3)
        assert instruction and scene.task and scene.arrange(3) == instruction
        state = robot.observe()
        assert scene.succeeded(state) in (True, False, None)
        advice, again = scene.expert(state), scene.expert(state)
        assert (advice is not None) == (again is not None) == scene.has_expert
        if advice is not None and again is not None:
            space = robot.spec.space
            assert advice.dtype == np.float32 and advice.ndim == 1 and len(advice) in space.sizes
            normal = isinstance(space, ToolSpace) or space.relative
            assert (np.abs(advice) <= 1 + 1e-6).all() if normal else space.accepts(advice)
            assert np.array_equal(advice, again), "an expert's advice depends on the state alone"

    def test_check_moves_nothing(self, config: Any) -> None:
        before = self.seen(config)
        robot = self.plugin.make(config)
        findings = list(self.plugin.check(config))
        assert distance(self.seen(config), before) < 5 * scale(robot).still
        for finding in [*findings, *self.plugin.diagnose()]:
            assert isinstance(finding, Finding) and finding.name and "\n" not in finding.detail
        assert findings
