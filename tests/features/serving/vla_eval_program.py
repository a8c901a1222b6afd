"""Runs with vla-eval only: plays an episode of its protocol, and prints what the server said."""

import asyncio
import json
import sys

import numpy as np
from vla_eval.connection import Connection
from vla_eval.specs import DimSpec

port, path = sys.argv[1:]


async def main() -> None:
    image = np.arange(64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
    observation = {
        "images": {"agentview": image},
        "task_description": "push the cube",
        "states": np.zeros(8),
    }
    async with Connection(f"ws://127.0.0.1:{port}{path}") as connection:
        specs = {
            name: DimSpec.from_dict(each).format
            for name, each in connection.server_info["action_spec"].items()
        }
        await connection.start_episode({"task": {"name": "push"}})
        actions = [(await connection.act(observation))["actions"].tolist() for _ in range(4)]
        try:
            await connection.start_episode({"task": {"name": "push"}})
            await connection.act({"task_description": "no image"})
        except RuntimeError as error:
            refusal = str(error)
        await connection.start_episode({"task": {"name": "push"}})
        actions.append((await connection.act(observation))["actions"].tolist())
        await connection.end_episode({"success": False})
        info = connection.server_info
    print(
        json.dumps(
            {
                "actions": actions,
                "specs": specs,
                "refusal": refusal,
                "params": info["observation_params"],
            }
        )
    )


asyncio.run(main())
