from __future__ import annotations

from typing import Any

import gymnasium


def parse_env_cfg(
    task_name: str,
    device: str = "cuda:0",
    num_envs: int | None = None,
    use_fabric: bool | None = None,
) -> Any:
    cfg = gymnasium.spec(task_name).kwargs["env_cfg_entry_point"]()
    cfg.sim.device = device
    cfg.scene.num_envs = num_envs
    return cfg
