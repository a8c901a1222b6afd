"""An arm without physics that follows docs/conventions.md exactly and at once, or makes one known mistake. It needs no simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.envs.batch_serving import BatchServer
from rlinf_vla.envs.genesis import rotations
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.serving import serve
from rlinf_vla.envs.shared_arrays import SimulatorSpec
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS

MISTAKES = (
    *(
        "gripper polarity",
        "gripper threshold at zero to one",
        "quaternion x y z w",
        "turns the other way round",
        "actions in millimetres",
    ),
    *(
        "mirrored base",
        "turns about the tool's own axes",
        "four times the control rate",
        "a tenth of the control rate",
        "state of the last reset",
    ),
)


class PerfectArm:
    """Implements ``Batch``."""

    num_envs = NUM_ENVS
    device = torch.device("cpu")
    spec = SimulatorSpec(
        action_dim=7, state_dim=8, control_hz=20.0, images={}, picture=[2, 2], tool=[0.05, 0.25]
    )

    def __init__(self, mistake: str = "") -> None:
        assert mistake in ("", *MISTAKES)
        self.mistake = mistake
        self.position = torch.zeros(NUM_ENVS, 3)
        self.quaternion = torch.zeros(NUM_ENVS, 4)
        self.finger = torch.zeros(NUM_ENVS)

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self.position[rows] = torch.tensor([0.4, 0.0, 0.3])
        self.finger[rows] = 0.04
        self.quaternion[rows] = torch.tensor([0.0, 1.0, 0.0, 0.0])  # it points down
        self.kept = self._state()
        return ["be still"] * NUM_ENVS

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        actions = actions.clamp(-1, 1)
        times = {
            "four times the control rate": 4.0,
            "a tenth of the control rate": 0.1,
            "actions in millimetres": 0.001,
        }.get(self.mistake, 1.0)
        move = 0.05 * times * actions[:, :3]
        self.position = self.position + (
            move * torch.tensor([1.0, -1.0, 1.0]) if self.mistake == "mirrored base" else move
        )
        turn = rotations.from_vector(
            (-0.25 if self.mistake == "turns the other way round" else 0.25) * actions[:, 3:6]
        )
        pair = (
            (self.quaternion, turn)
            if self.mistake == "turns about the tool's own axes"
            else (turn, self.quaternion)
        )
        self.quaternion = rotations.product(*pair)
        opens = -actions[:, 6] if self.mistake == "gripper polarity" else actions[:, 6]
        threshold = -1.5 if self.mistake == "gripper threshold at zero to one" else 0.0
        self.finger = torch.where(opens > threshold, 0.04, 0.0)
        done = torch.zeros(NUM_ENVS, dtype=torch.bool)
        return done.float(), done, done

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        return (self.kept if self.mistake == "state of the last reset" else self._state())[rows], {}

    def expert(self) -> Tensor:
        raise NotImplementedError

    def render(self, index: int) -> Tensor:
        raise NotImplementedError

    def close(self) -> None: ...

    def _state(self) -> Tensor:
        quaternion = (
            self.quaternion.roll(-1, 1) if self.mistake == "quaternion x y z w" else self.quaternion
        )
        return torch.cat([self.position, quaternion, self.finger[:, None]], dim=1)


def perfect_arm(mistake: str = "") -> ProcessVectorEnv:
    pool = SimulatorPool(
        [__file__], {"mistake": mistake}, slots=NUM_ENVS, processes=1, episode_limit=EPISODE_LIMIT
    )
    return ProcessVectorEnv(pool, ("Reach",))


if __name__ == "__main__":
    serve(lambda options, slots: PerfectArm(options["mistake"]), BatchServer)
