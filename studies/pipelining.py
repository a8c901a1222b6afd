"""How much of the overlap bound two groups of a simulator reach: python studies/pipelining.py

A rollout of one group of environments and one of ``--depth`` groups, which take turns, so that both
meet the same load. The policy is a wait: it takes a given time per environment and no core, as a
policy on a GPU does, so that it competes with no simulator process. It sends zero actions.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation
from rlinf_vla.rollout.episodes import training_episodes
from rlinf_vla.rollout.player import interleave, rollout_generator
from rlinf_vla.telemetry.timeline import Timeline


class Waiting:
    """Implements ``ActorProtocol``: waits ``seconds`` per environment."""

    def __init__(self, seconds: float, action_dim: int) -> None:
        self.seconds = seconds
        self.action_dim = action_dim

    def prepare(self, obs: Observation) -> Inputs:
        return {}

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        rows = len(episodes)
        time.sleep(self.seconds * rows)
        zeros = torch.zeros(rows, 1, self.action_dim)
        return ActionSample(zeros, {}, zeros, torch.zeros(rows))

    def value(self, obs: Observation, wanted: Tensor) -> Tensor:
        return torch.zeros(len(wanted))


def play(groups: Sequence[VectorEnv], actor: Waiting, calls: int) -> tuple[float, float, float]:
    """Seconds of a rollout: wall, policy, and of the simulator that took longest."""
    timeline = Timeline()
    players = []
    offset = 0
    timeline.begin_iteration(0)
    for number, env in enumerate(groups):
        slots = torch.arange(offset, offset + env.spec.num_envs)
        offset += env.spec.num_envs
        first = training_episodes(0, 0, slots, torch.zeros_like(slots), 1)

        def following(done: Tensor, first: Episodes = first) -> tuple[Episodes, Tensor]:
            return first, done

        players.append(
            rollout_generator(
                actor,
                env,
                first,
                following,
                lambda call: False,
                timeline,
                f"simulator {number}",
                calls,
            )
        )
    started = time.perf_counter()
    interleave(players)
    simulators = max(timeline.busy(f"simulator {number}") for number in range(len(groups)))
    return time.perf_counter() - started, timeline.busy("policy"), simulators


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--env", default="genesis")
    arguments.add_argument("--num-envs", type=int, default=8)
    arguments.add_argument("--depth", type=int, default=2)
    arguments.add_argument("--calls", type=int, default=40)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument(
        "--policy-s", type=float, help="per environment; default: as long as one group simulates"
    )
    options = arguments.parse_args()
    plugin = plugins.envs()[options.env]
    one = 1
    many = options.depth
    config = plugin.Config(num_envs=options.num_envs, backend="cpu", image_size=64)
    opened = {depth: plugin.create(config, depth) for depth in (one, many)}
    try:
        action_dim = opened[one][0].spec.action_dim
        probe = [play(opened[one], Waiting(0.0, action_dim), options.calls)[2] for _ in range(2)][
            -1
        ]
        actor = Waiting(options.policy_s or probe / options.calls / options.num_envs, action_dim)
        rows = []
        for _ in range(options.repeats):
            (serial, policy, simulator), (pipelined, *_) = (
                play(groups, actor, options.calls) for groups in opened.values()
            )
            ratio = serial / pipelined
            bound = serial / max(policy, simulator)
            rows.append(
                {
                    "serial_s": serial,
                    "policy_s": policy,
                    "simulator_s": simulator,
                    "pipelined_s": pipelined,
                }
            )
            rows[-1] |= {
                "ratio": ratio,
                "bound": bound,
                "share": ratio / bound,
                "load": os.getloadavg()[0],
            }
            print(
                json.dumps({name: round(value, 3) for name, value in rows[-1].items()}), flush=True
            )
        shares = sorted(row["share"] for row in rows)
        print(f"median share of the overlap bound: {100 * shares[len(shares) // 2]:.0f} %")
    finally:
        for groups in opened.values():
            for env in groups:
                env.close()


if __name__ == "__main__":
    main()
