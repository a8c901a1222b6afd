"""Every fault that needs no separate process, repeated at random moments on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chaos import CHUNK, FAULTS, ROUNDS, SERVER_FAULTS, CameraLimits, Chaos
from obedient import CELL, VirtualFranka

from rlinf_vla.config.errors import Failure
from rlinf_vla.features.realworld.inference import Chunk, Request
from rlinf_vla.features.realworld.robot import Frame
from rlinf_vla.robots.cameras import FrameMonitor
from tests.features.realworld.virtual_time import ScheduledInference, VirtualClock

CAMERAS = CameraLimits(max_age_s=0.4, frozen_s=1.0)
INFERENCE_S, SILENT_S = 0.02, 5.0
SILENT = ("stalled_server", "cut_server")


class VirtualCamera:
    """A new image at every read, unless it is set to fail."""

    name = "front"

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._draw = np.random.default_rng(0)
        self.lost_since: float | None = None
        self.frozen: Frame | None = None

    def start(self) -> None:
        self._watch = FrameMonitor(self.name, CAMERAS.max_age_s, CAMERAS.frozen_s)

    def latest(self) -> Frame:
        now = self._clock.now()
        image = (
            self._draw.integers(0, 256, (4, 4, 3), np.uint8)
            if self.frozen is None
            else self.frozen.image
        )
        frame = Frame(now if self.lost_since is None else self.lost_since, 0, image)
        self._watch.check(frame, now)
        self._last = frame
        return frame

    def freeze(self) -> None:
        self.frozen = self._last

    def close(self) -> None: ...


class Exact(Chaos):
    where = "virtual clock"
    still = 1e-4
    settle_s = 0.0

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = VirtualClock(100.0)
        self.arm = VirtualFranka(clock, folder)
        self.camera = VirtualCamera(clock)
        self._monkeypatch = monkeypatch
        self.camera.start()
        self._stalls_s = 0.0
        super().__init__(
            self.arm,
            [self.camera],
            lambda infer: ScheduledInference(infer, clock, self._lasts),
            clock,
            folder,
            CELL,
            CAMERAS,
        )

    def trajectory(self) -> list[tuple[float, float]]:
        return self.arm.trajectory

    def forget(self) -> None:
        self.arm.trajectory.clear()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        clock = self.clock
        assert isinstance(clock, VirtualClock)
        clock.at(moment, event)

    def _lasts(self, request: Request) -> float:
        return INFERENCE_S + self._stalls_s

    def inject(self, fault: str) -> None:
        arm = self.arm
        if fault in ("udp_silence", "silent"):
            arm.silent = True
        elif fault == "tcp_close":
            arm.arm.problem = "network: the connection to the arm is lost"
        elif fault == "reflex":
            arm.arm.problem = "reflex: joint_reflex"
        elif fault == "user_stop":
            arm.arm.problem = "user stop: pressed at the arm"
        elif fault == "gripper":
            arm.gripper.broken = True
            self.policy.gripper = -1.0
        elif fault == "frozen_camera":
            self.camera.freeze()
        elif fault == "lost_camera":
            self.camera.lost_since = self.clock.now()
        elif fault == "stalled_policy":
            self._stalls_s = 5.0
        elif fault == "clock_step":
            self._monkeypatch.setattr(time, "time", lambda: -7200.0)
        else:
            self.policy.asks = fault

    def fix(self, fault: str) -> None:
        self.arm.silent = False
        self.arm.arm.problem = None
        self.arm.gripper.broken = False
        self.arm.gripper.problem = None
        self.policy.gripper = 1.0
        self.policy.asks = None
        self.camera.frozen = None
        self.camera.lost_since = None
        self._stalls_s = 0.0
        self._monkeypatch.undo()


class ExactServed(Exact):
    """The policy is on a server. A silent one counts as lost after ``SILENT_S``, and may have come back by then."""

    chunk = CHUNK
    warmup = 2
    _broken: str | None = None
    _in_silence: Request | None = None
    """Asked of a silent server; an answer that was under way before still arrives."""

    def _lasts(self, request: Request) -> float:
        if self._broken not in SILENT:
            return INFERENCE_S
        self._in_silence = request
        return SILENT_S

    def _infer(self, request: Request) -> Chunk:
        if self._broken is not None and (self._broken not in SILENT or request is self._in_silence):
            raise Failure(f"the policy server ws://it does not answer: {self._broken}")
        return super()._infer(request) if self.player.warm else self.policy(request)

    def inject(self, fault: str) -> None:
        self._broken = fault

    def fix(self, fault: str) -> None:
        self._broken = None


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_stops_the_arm_in_time_and_is_latched(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(Exact(tmp_path, monkeypatch), fault)


@pytest.mark.parametrize("fault", SERVER_FAULTS)
def test_so_does_each_fault_of_a_policy_server(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(ExactServed(tmp_path, monkeypatch), fault)


def play(chaos: Exact, fault: str) -> None:
    found = chaos.rounds(fault, max(ROUNDS, 20))
    chaos.arm.close()
    assert [each.wrong for each in found] == [None] * len(found)
    print(fault, f"{max(each.stood_s for each in found):.3f} of {found[0].stated_s:.3f} s")
