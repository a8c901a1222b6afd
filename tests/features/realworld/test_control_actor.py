from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_vla.benchmarks.synthetic_cell import SPACE, SyntheticCamera, SyntheticRobot
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.core.types import Episodes
from rlinf_vla.features.realworld.control_actor import ControlActor, require_fit
from rlinf_vla.features.realworld.control_loop import ControlLoop
from rlinf_vla.features.realworld.inference import Committed, Request
from rlinf_vla.features.realworld.sensing import Reading, Sensors
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.features.realworld.virtual_time import ScheduledInference, VirtualClock
from tests.models.test_pi0 import TINY


def seen(clock: VirtualClock, size: int = 64) -> Reading:
    cameras = [SyntheticCamera(clock, "base", (size, size))]
    return Sensors(SyntheticRobot(clock, 10.0), cameras, clock).read(
        lambda *_: None, lambda *_: None
    )


def test_an_observation_is_in_the_units_of_the_conventions() -> None:
    found = seen(VirtualClock(2.0)).observation("touch the cube")
    assert (
        found.images["base"].shape == (1, 64, 64, 3) and found.images["base"].dtype == torch.uint8
    )
    assert found.state.tolist()[0] == pytest.approx([0.45, 0, 0.3, 0, 1, 0, 0, 0.04])
    assert found.state.dtype == torch.float32 and found.instruction == ["touch the cube"]


def test_it_acts_as_rollouts_do_with_noise_of_episode_and_tick() -> None:
    clock = VirtualClock()
    policy = LinearPolicy(LinearOptions())
    settings = Settings(run_seed=3, temperature=1.0, batch_size=1)
    control = ControlActor(policy, settings, clock)
    one = torch.ones(1, dtype=torch.int64)
    control.episode = Episodes(one, 5 * one, 2 * one)
    request = Request(seen(clock), "touch the cube", step=4, tick=6)
    chunk = control(request)
    inputs = policy.prepare(request.seen.observation("touch the cube"))
    expected = Actor(policy, settings).act(inputs, control.episode, 6 * one)
    np.testing.assert_array_equal(chunk.actions, expected.actions[0].numpy())
    assert chunk.actions.dtype == np.float32 and chunk.sections == {
        "prepare": 0,
        "encode": 0,
        "act": 0,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_flow_policy_continues_the_committed_actions(temperature: float) -> None:
    clock = VirtualClock()
    policy = Pi0Policy.load(TINY, Pi0Options(random_weights=True, denoise_steps=3))
    shown = seen(clock)
    actor = ControlActor(policy, Settings(3, temperature, 1), clock)
    require_fit(policy, SPACE, list(policy.spec.images), ControlConfig(real_time_chunking=True))
    first = actor(Request(shown, "push the cube", 0, 0))
    left = first.actions[1:]
    second = actor(Request(shown, "push the cube", 1, 1, Committed(left, 2)))
    np.testing.assert_array_equal(second.actions[:2], left[:2])
    assert second.sections.keys() == {"prepare", "encode", "act"}


def test_policies_that_cannot_drive_a_robot_are_refused() -> None:
    policy = LinearPolicy(LinearOptions())
    require_fit(policy, SPACE, ["base", "wrist"], ControlConfig())
    with pytest.raises(UserError, match="real_time_chunking"):
        require_fit(policy, SPACE, ["base"], ControlConfig(real_time_chunking=True))
    with pytest.raises(UserError, match=r"'base'.*wrist"):
        require_fit(policy, SPACE, ["wrist"], ControlConfig())
    for change in ({"action_dim": 14}, {"state_dim": 5}):
        policy.spec = replace(LinearPolicy(LinearOptions()).spec, **change)
        with pytest.raises(UserError, match=str(*change.values())):
            require_fit(policy, SPACE, ["base"], ControlConfig())


def test_a_policy_drives_a_robot() -> None:
    clock = VirtualClock()
    policy = LinearPolicy(LinearOptions(chunk=4))
    robot = SyntheticRobot(clock, 10.0)
    camera = SyntheticCamera(clock, "base", (64, 64))
    actor = ControlActor(policy, Settings(0, 1.0, 1), clock)
    loop = ControlLoop(
        robot,
        [camera],
        ScheduledInference(actor, clock, lambda request: 0.03),
        4,
        ControlConfig(),
        clock,
    )
    loop.warm_up("touch the cube")
    loop.run("touch the cube", lambda step: "enough" if step.tick == 20 else None)
    assert len(robot.commands) == 20 and loop.accounting.missed == 0
    document = loop.accounting.document()
    assert document["chunks"]["accepted"] == document["sections_ms"]["encode"]["n"] == 19
