"""Write the success of Meta-World's own policies per task as a Markdown page.

Usage (``make metaworld-expert`` runs the sweep first):

    python studies/metaworld_expert.py RUN OUTPUT
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path


def main(run: Path, output: Path) -> None:
    document = json.loads((run / "result.json").read_text())
    (suite,) = document["suites"]
    expert = document["policies"]["expert"]
    with (run / "episodes.csv").open() as file:
        episodes = [row for row in csv.DictReader(file) if row["policy"] == "expert"]
    lines = ["| task | instruction | successes | control steps of a success |", "|---|---|---|---|"]
    for task in suite["tasks"]:
        own = [row for row in episodes if row["task"] == task]
        steps = sorted(int(row["steps"]) for row in own if row["success"] == "1")
        span = f"{steps[0]} ... {steps[-1]}" if steps else "-"
        lines.append(f"| {task} | {own[0]['instruction']} | {len(steps)} / {len(own)} | {span} |")
    low, high = expert["pc_success_ci95"]
    stack = ", ".join(f"{name} {suite['stack'][name]}" for name in ("metaworld", "mujoco", "numpy"))
    text = [
        "# Meta-World's own scripted policies",
        "`make metaworld-expert` wrote this page.",
        f"{expert['n_success']} of {expert['n_episodes']} episodes succeeded: {expert['pc_success']:.1f} % "
        f"(95 % interval {low:.1f} to {high:.1f}),\n"
        f"within {suite['episode_limit']} control steps at {suite['control_hz']:.0f} Hz.\n{stack}.",
        "\n".join(lines),
    ]
    output.write_text("\n\n".join(text) + "\n")
    print(text[2])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
