"""Runs with openpi-client only: asks a server for actions, and prints what it said."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

port, token, path = sys.argv[1:]
policy = WebsocketClientPolicy(host=f"ws://127.0.0.1:{port}{path}", api_key=token)
image = np.arange(64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
observations = [
    {"observation/image": image, "observation/state": np.zeros(8), "prompt": "push the cube"},
    {"images": {"base": image}, "instruction": "push the cube", "temperature": np.float32(0)},
]
replies = [policy.infer(each) for each in observations for _ in range(2)]
policy.reset()
try:
    policy.infer({"prompt": "push the cube"})
except RuntimeError as error:
    refusal = str(error)
said = {
    "actions": [each["actions"].tolist() for each in replies],
    "timing": [sorted(each["server_timing"]) for each in replies],
}
print(
    json.dumps(
        {
            **said,
            "metadata": sorted(policy.get_server_metadata()),
            "refusal": refusal,
            "numpy": np.__version__,
        }
    )
)
