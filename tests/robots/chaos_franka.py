"""Fault injection with the real franky against franky-sim."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from chaos import STRICT, CameraLimits, Chaos
from franka_session import CELL_YAML, STILL_RAD_S, clear_latch
from trajectory import Trajectory

from rlinf_vla.features.realworld.clock import Clock
from rlinf_vla.features.realworld.inference import Chunk, Infer, InferenceWorker, Request
from rlinf_vla.robots.franka.plugin import franka_sim, read_cell
from rlinf_vla.robots.simulated.client import SimulatedCell

CAMERAS = {"frozen_camera": "freeze front", "lost_camera": "lose front"}
STEP_S = 7200.0


class Real(Chaos):
    where = "franky-sim"
    still = STILL_RAD_S
    settle_s = 0.5
    patience = 1.0 if STRICT else 8.0

    def __init__(self, cell: SimulatedCell, wall_clock_off: Path) -> None:
        clear_latch(cell.folder)
        patient = cell.folder / "patient.yaml"
        patient.write_text(CELL_YAML)
        limits = "cell://franka_sim" if STRICT else str(patient)
        may = CameraLimits(0.4, 1.0) if STRICT else CameraLimits(1.5, 1.5)
        config = franka_sim.Config(
            folder=str(cell.folder),
            cell=limits,
            cameras=["front"],
            image_size=64,
            max_age_s=may.max_age_s,
            frozen_s=may.frozen_s,
        )
        self._cell = cell
        self._off = wall_clock_off
        self.seen = Trajectory(cell)
        self._stalled = threading.Event()
        self._goes_on = threading.Event()
        robot = franka_sim.make(config)
        cameras = franka_sim.cameras(config)
        clock = Clock()
        robot.connect(60)
        for camera in cameras:
            camera.start()
        self.arm_folder = cell.folder
        folder = cell.folder / "episodes"
        super().__init__(robot, cameras, self._threaded, clock, folder, read_cell(limits), may)

    def _threaded(self, infer: Infer) -> InferenceWorker:
        self._background = InferenceWorker(infer, Clock())
        return self._background

    def close(self) -> None:
        self.seen.close()
        self._background.close()
        self.robot.close()

    def trajectory(self) -> list[tuple[float, float]]:
        return list(self.seen.samples)

    def forget(self) -> None:
        self.seen.forget()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        timer = threading.Timer(moment - self.clock.now(), event)
        timer.daemon = True
        timer.start()

    def _infer(self, request: Request) -> Chunk:
        if self._stalled.is_set():
            self._goes_on.wait(30)
        return super()._infer(request)

    def inject(self, fault: str) -> None:
        if fault in CAMERAS:
            self._cell.fault(CAMERAS[fault])
            self._injected = (
                self.clock.now()
            )  # it takes effect after the image that is being rendered
        elif fault == "stalled_policy":
            self._goes_on.clear()
            self._stalled.set()
        elif fault == "clock_step":  # backwards, and forwards in the next round
            if self._off.exists():
                self._off.unlink()
            else:
                self._off.write_text(str(-STEP_S))
        elif fault in ("nan", "jump"):
            self.policy.asks = fault
        else:
            self._cell.fault(fault)
            if fault == "gripper":
                self.policy.gripper = -1.0

    def fix(self, fault: str) -> None:
        self._stalled.clear()
        self._goes_on.set()
        self.policy.asks = None
        self.policy.gripper = 1.0
        if fault in CAMERAS:
            self._cell.fix(f"{CAMERAS[fault].split()[0]} front")
        elif fault not in ("stalled_policy", "clock_step", "nan", "jump"):
            self._cell.fix(fault)
