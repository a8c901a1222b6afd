"""Client of the Franka's process, used in the policy's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf_vla.features.realworld.robot import Target, ToolState, ToolTarget

from .. import cell_file
from ..arm_client import ArmClient
from ..cell import Cell
from . import messages


class FrankaRobot(ArmClient):
    """A Franka with its hand; ``found`` also has ``widest``, the hand's opening in metres.

    find_host: returns the arm's host within the given seconds, starting a simulated cell if needed.
    leave: undoes that.
    """

    module = "franka.process"

    def __init__(
        self,
        cell: Cell,
        folder: Path,
        find_host: Callable[[float], str],
        leave: Callable[[], None] = lambda: None,
        journal: str | None = None,
        python: str | None = None,
    ) -> None:
        super().__init__(cell.spec, folder, leave, python)
        self.cell = cell
        self._find_host = find_host
        self._journal = journal

    def options(self, timeout_s: float) -> dict[str, Any]:
        return {
            "host": self._find_host(timeout_s),
            "cell": self.cell.name,
            "limits": cell_file.as_json(self.cell),
            "folder": str(self._folder),
            "journal": self._journal,
        }

    def pack(self, target: Target) -> list[float | None]:
        assert isinstance(target, ToolTarget)
        return messages.pack_target(target)

    def unpack(self, data: bytes) -> ToolState:
        return messages.unpack(data)

    def observe(self) -> ToolState:
        state = super().observe()
        assert isinstance(state, ToolState)
        return state
