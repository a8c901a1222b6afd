"""Hash the weights of small training runs, to compare two trees bit by bit.

    python studies/same_bits.py

Prints a row for each run: SHA-256 of the tensors of its last checkpoint, and of the commands that
the safety filter of the simulated Franka gives to hostile goals. On one machine, rows are equal as
long as a change does not change results.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np

from rlinf_vla.benchmarks import robot_safety_trials
from rlinf_vla.cli.main import run
from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.safety import SafetyFilter

ITERATIONS = 2
COMMON = (
    *("cluster=laptop", "cluster.update_threads=1", f"iterations={ITERATIONS}"),
    *("checkpoints.every=1", "evaluation.before_and_after=false"),
    *("env.num_envs=2", "env.episode_limit=4", "env.reward=progress", "env.processes=1"),
    *("rollout.pipeline_depth=1", "rollout.batch_size=2"),
)
ON_POLICY = ("algorithm.epochs=2", "algorithm.minibatch_size=4")
OFF_POLICY = ("algorithm.episodes=2", "algorithm.batch_size=4", "algorithm.updates_per_step=0.5")
RAY = ("cluster.runtime=ray", "cluster.rollout_workers=1", "cluster.plan=given")
PPO = ("recipe=maniskill_ppo", "algorithm.horizon=4", *ON_POLICY)
GROUPS = ("algorithm.episodes=4", "algorithm.group_size=2")
RUNS = {
    "PPO": PPO,
    "PPO on Ray": (*PPO, *RAY),
    "GRPO": ("recipe=maniskill_grpo", *GROUPS, *ON_POLICY),
    "SAC": ("recipe=maniskill_sac", *OFF_POLICY),
    "RLPD": ("recipe=maniskill_rlpd", "algorithm.demonstrations=1", *OFF_POLICY),
    "imitation": (
        "recipe=maniskill_sft",
        "algorithm.demonstrations.episodes=2",
        "algorithm.batch_size=4",
    ),
}
GOALS = 60


def weights(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(str(path.relative_to(checkpoint)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def commands() -> str:
    cell = cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell)
    draw = np.random.default_rng(7)
    safety_filter = SafetyFilter(cell)
    goals = robot_safety_trials.goals(draw, cell, lambda: safety_filter.admitted)
    sent = ((next(goals), int(draw.integers(1, 12))) for _ in range(GOALS))
    trial = robot_safety_trials.run_trial(cell, safety_filter, sent)
    return hashlib.sha256(np.asarray(trial.commands).tobytes()).hexdigest()


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, keys) in enumerate(RUNS.items()):
            directory = Path(folder, str(number))
            if run(["train", *keys, *COMMON, f"run_dir={directory}"]):
                raise SystemExit(f"{name} failed")
            rows[name] = weights(directory / "checkpoints" / f"step_{ITERATIONS:06d}")
    rows["filtered goals of the simulated Franka"] = commands()
    print("| run | SHA-256 |\n|---|---|")
    for name, digest in rows.items():
        print(f"| {name} | `{digest[:16]}` |")


if __name__ == "__main__":
    main()
