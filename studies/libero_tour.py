"""Reset and step every LIBERO or LIBERO-PRO task in two stored states, and write a table.

``make libero-all`` and ``make libero-pro`` run:
python studies/libero_tour.py OUTPUT libero|pro [TASKS]
TASKS limits the run to the first tasks of each suite.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.plugin import plugin
from rlinf_vla.envs.libero.suites import LIMITS, SUITES

SUITES_OF = {
    "libero": tuple(LIMITS),
    "pro": tuple(suite for suite in SUITES if suite not in LIMITS),
}
HEADS = {
    "libero": "# All of LIBERO\n\n`make libero-all`",
    "pro": "# LIBERO-PRO\n\n`make libero-pro`",
}
HEAD = "wrote this page: each task made, begun in its stored states 0 and 49, stepped 5 times each."
STEPS = 5
FIRST, LAST = 0, 49


def visit(env: VectorEnv, tasks: list[int]) -> list[str]:
    """Return the problem of each of these tasks, one per environment; empty if there is none."""
    wrong = [""] * len(tasks)
    generator = torch.Generator().manual_seed(0)
    states = []
    for seed in (FIRST, LAST):
        seen = env.reset(
            Episodes.first_attempts(torch.tensor(tasks), torch.full((len(tasks),), seed))
        )
        result = env.step(
            2 * torch.rand(len(tasks), STEPS, env.spec.action_dim, generator=generator) - 1
        )
        states.append(seen.state)
        for row in range(len(tasks)):
            if not result.valid[row].all() or result.success[row].any():
                wrong[row] = f"state {seed} is a success at once"
            if not (
                result.observation.state[row].isfinite().all()
                and (result.observation.state[row] != seen.state[row]).any()
            ):
                wrong[row] = f"the robot does not move from state {seed}"
    return wrong


def tour(suites: Sequence[str], most: int | None) -> tuple[str, int]:
    """Return the table and the number of failed tasks. ``most`` limits the tasks per suite."""
    lines = ["| suite | tasks | made, begun twice and stepped | seconds |", "|---|---|---|---|"]
    failures: list[str] = []
    for suite in suites:
        begin = time.monotonic()
        (env,) = plugin.create(
            LiberoConfig(suite=suite, cameras=[], num_envs=2, processes=2, scenes=0), 1
        )
        names = env.spec.tasks[:most]
        wrong = 0
        for first in range(0, len(names), 2):
            tasks = [first, min(first + 1, len(names) - 1)]
            for task, reason in dict(zip(tasks, visit(env, tasks), strict=True)).items():
                wrong += bool(reason)
                failures += [f"{names[task]}: {reason}"] if reason else []
        lines.append(
            f"| {suite} | {len(names)} | {len(names) - wrong} | {time.monotonic() - begin:.0f} |"
        )
        print(lines[-1], flush=True)
        stack = env.spec.stack
        env.close()
    lines += [
        "",
        f"On MuJoCo {stack['mujoco']}, robosuite {stack['robosuite']}, numpy {stack['numpy']}; two processes, no cameras.",
        *failures,
    ]
    return "\n".join(lines) + "\n", len(failures)


if __name__ == "__main__":
    which = sys.argv[2]
    most = int(sys.argv[3]) if sys.argv[3:] else None
    text, failed = tour(SUITES_OF[which], most)
    Path(sys.argv[1]).write_text(f"{HEADS[which]} {HEAD}\n\n{text}")
    sys.exit(failed > 0)
