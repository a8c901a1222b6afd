"""What a real cell needs whatever its arm is: configured cameras, and a scene laid out by hand."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Optional, cast

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Name, Range, Seconds, check_values
from rlinf_vla.features.realworld.robot import Action, RobotState


@dataclass
class CameraConfig:
    """One camera of a real robot.

    driver: opencv or realsense.
    device: index or path for OpenCV (/dev/v4l/by-id/... survives a reboot), serial number for a
    RealSense; null uses the first camera.
    width, height: requested size in pixels. hz: requested frames per second.
    latency_s: time from exposure to arrival, of a camera whose driver does not state exposures.
    max_age_s: an older frame is an error. frozen_s: bit-identical images for longer are an error.
    """

    driver: Name = "realsense"
    device: Optional[str] = None  # noqa: UP045
    width: Annotated[int, Range(16, 8192)] = 640
    height: Annotated[int, Range(16, 8192)] = 480
    hz: Annotated[int, Range(1, 1000)] = 30
    latency_s: Annotated[float, Range(0, 1)] = 0.0
    max_age_s: Seconds = 0.2
    frozen_s: Seconds = 1.0


def camera(name: str, given: Any) -> CameraConfig:
    """Return the configuration of one camera. Raises UserError for an invalid key or value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    keys = ", ".join(field.name for field in fields(CameraConfig))
    if not isinstance(given, dict):
        raise UserError(f"robot.cameras.{name}={given} must be keys and values: {keys}")
    try:
        config = cast(
            CameraConfig,
            OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CameraConfig), given)),
        )
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(
            f"robot.cameras.{name}: {str(error).splitlines()[0]}; its keys: {keys}"
        ) from None
    check_values(config, f"robot.cameras.{name}.")
    return config


class ManualScene:
    """Implements ``Scene``: the operator arranges it by hand and reports success or failure."""

    task = "ManualScene"
    by_hand = True
    has_expert = False

    def __init__(self, instruction: str) -> None:
        self.instructions: tuple[str, ...] = (instruction,)

    def arrange(self, seed: int) -> str:
        return self.instructions[0]

    def succeeded(self, state: RobotState) -> bool | None:
        return None

    def expert(self, state: RobotState) -> Action | None:
        return None
