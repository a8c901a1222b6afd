"""Measure the success rate of the scripted expert per task and write a Markdown table.

Usage (``make libero-expert``): python studies/libero_expert.py OUTPUT SUITE ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.plugin import plugin

STATES = 6
"""Stored initial states per task, from the first on; half of them in each of two processes."""


def play(env: VectorEnv, task: int) -> list[int]:
    """Run one expert episode per environment; environment ``i`` begins in initial state ``i``.

    Returns the control steps until success per environment, -1 without success.
    """
    n = env.spec.num_envs
    states = torch.arange(n)
    alone = torch.full((n,), task)
    env.reset(Episodes.first_attempts(alone, states))
    steps = [-1] * n
    over = torch.zeros(n, dtype=torch.bool)
    for step in range(env.spec.episode_limit):
        result = env.step(env.expert_actions()[:, None])
        for row in (result.success[:, 0] & ~over).nonzero().flatten().tolist():
            steps[row] = step + 1
        over |= result.done
        if over.all():
            break
        if result.done.any():  # a step needs all episodes under way; these are ignored
            env.reset(Episodes.first_attempts(alone, states), result.done)
    return steps


def main(output: Path, suites: list[str]) -> None:
    lines = ["| task | instruction | successes | control steps |", "|---|---|---|---|"]
    summary = []
    for suite in suites:
        (env,) = plugin.create(
            LiberoConfig(suite=suite, cameras=[], num_envs=STATES, processes=2, scenes=0), 1
        )
        successes = 0
        for task, name in enumerate(env.spec.tasks):
            steps = play(env, task)
            won = [count for count in steps if count > 0]
            successes += len(won)
            instruction = env.reset(
                Episodes.first_attempts(torch.full((STATES,), task), torch.arange(STATES))
            ).instruction[0]
            lines.append(
                f"| {name} | {instruction} | {len(won)} / {STATES} | {f'{min(won)} ... {max(won)}' if won else '-'} |"
            )
            print(lines[-1], flush=True)
        total = STATES * len(env.spec.tasks)
        limit, stack = env.spec.episode_limit, env.spec.stack
        summary.append(
            f"{suite}: {successes} of {total} ({100 * successes / total:.0f} %) within {limit} control steps, MuJoCo {stack['mujoco']}."
        )
        env.close()
    output.write_text(
        "# LIBERO's scripted expert\n\n`make libero-expert` wrote this page.\n\n"
        + "\n".join([*summary, "", *lines])
        + "\n"
    )
    print("\n".join(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
