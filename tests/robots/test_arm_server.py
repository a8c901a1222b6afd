"""Physics and the client of the simulated arm stay synchronised on a busy machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.skips import NOT_INSTALLED

pytest.importorskip("franky_sim", reason=NOT_INSTALLED + "franka")

from franky_sim.franka_robot_protocol import (
    MoveCommandControllerMode,
    MoveCommandMotionGeneratorMode,
    UDPCommand,
)
from franky_sim.franka_robot_state import FrankaRobotState

from rlinf_vla.robots.simulated.server import ArmServer


@pytest.fixture
def server() -> ArmServer:
    arm = SimpleNamespace(
        state=FrankaRobotState(), has_gripper=False, _set_server=lambda server: None
    )
    made = ArmServer(arm, [])
    made.start_motion(
        MoveCommandControllerMode.kExternalController,
        MoveCommandMotionGeneratorMode.kJointVelocity,
        1,
    )
    return made


def command(server: ArmServer) -> None:
    empty = UDPCommand(message_id=1)
    fields = (
        empty.q_c,
        empty.dq_c,
        empty.O_T_EE_c,
        empty.O_dP_EE_c,
        empty.elbow_c,
        (False, False),
        empty.tau_J_d,
        (False,),
    )
    server._handle_udp_command(
        UDPCommand.STRUCT.pack(1, *(number for each in fields for number in each))
    )


def test_simulated_time_waits_for_the_command_for_the_last_state(server: ArmServer) -> None:
    server.send_state()
    assert not server.waiting, "a client reads the first states without commands"
    command(server)
    assert not server.waiting
    for _ in range(3):
        server.send_state()
        assert server.waiting
        command(server)
        assert not server.waiting


def test_simulated_time_continues_if_no_command_can_arrive(server: ArmServer) -> None:
    command(server)
    server.send_state()
    server.inject("udp_silence")
    assert not server.waiting, "the connection is dead"
    server.end("udp_silence")
    assert server.waiting
    server.reset_current_motion_id()
    assert not server.waiting, "no motion"
