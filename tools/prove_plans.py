"""Check that plans on eight fake GPUs run as they are printed, and do not change the result.

    python tools/prove_plans.py [--page docs/results/plans.md] [RECIPE ...]

Each plan is written as `rlinf-vla plan output=FILE` writes it and run by `rlinf-vla train
plan=FILE`: real Ray, a real simulator and a tiny policy, on the CPU. Compared are the plan's GPUs
and those that Ray gave the workers, the tracks of the predicted and of the recorded timeline, and
the trained weights and those of the run in one process. About a minute per plan on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from rlinf_vla.cli.compose import load
from rlinf_vla.planner.plan import Plan
from rlinf_vla.planner.search import plan_problem, write_plan
from rlinf_vla.planner.simulate import simulate
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.machines import assign, describe
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.run_files import read_run

ITERATIONS = 2
COMMON = (
    *("cluster=8gpu", "cluster.device=fake_gpu", "cluster.micro_batch_size=20", "cluster.update_threads=1", "seed=7"),
    *(f"iterations={ITERATIONS}", "env.num_envs=8", "env.episode_limit=5", "env.reward=normalized_dense", "env.processes=1"),
    *("rollout.batch_size=2", "evaluation.before_and_after=false", "checkpoints.every=1", "model.options.random_weights=true"),
    *("algorithm.minibatch_size=20", "algorithm.kl_coef=0.05", "algorithm.epochs=2"),
)
RECIPES = {
    "maniskill_ppo": ("model.checkpoint=asset://openvla_tiny", "algorithm.horizon=10", "algorithm.value_warmup=0"),
    "maniskill_grpo": ("model.checkpoint=asset://openvla_tiny", "algorithm.episodes=16", "algorithm.group_size=4"),
    "maniskill_ppo model=pi0": ("algorithm.horizon=10", "algorithm.value_warmup=0"),
}


def ray(placement: str, workers: int, ranks: int, **more: Any) -> Plan:
    return Plan("ray", placement, workers, trainer_ranks=ranks, **{"micro_batch_size": 20, **more})


EVERYWHERE = {
    "collocated, taking turns": ray("collocated", 2, 2, offload=True),
    "disaggregated": ray("disaggregated", 4, 2),
    "hybrid": ray("hybrid", 4, 2),
}
"""Plans that are run for each recipe."""
ONCE = {
    "2 groups taking turns": (Plan(pipeline_depth=2, micro_batch_size=20), ("env.processes=2",)),
    "1 rollout worker": (ray("collocated", 1, 1), ()),
    "2 rollout workers of 2 groups": (ray("collocated", 2, 1, pipeline_depth=2), ("env.processes=2",)),
    "without streaming": (ray("disaggregated", 2, 1, streaming=False), ()),
    "reference workers": (ray("disaggregated", 2, 1, reference_workers=1), ()),
    "split policy": (ray("collocated", 1, 1, split="head"), ()),
    "2 shards per worker": (ray("disaggregated", 2, 1), ("cluster.shards_per_worker=2",)),
    "2 sharded ranks (FSDP2)": (ray("collocated", 2, 2), ("cluster.trainer_sharding=full",)),
    "4 sharded ranks, taking turns": (ray("collocated", 4, 4, offload=True), ("cluster.trainer_sharding=full",)),
}
"""Further plans of the first recipe, with further keys."""


@dataclass(frozen=True)
class Outcome:
    """What a run did. gpus, tracks: the difference from the plan, empty if there is none."""

    gpus: str
    tracks: str
    weights: dict[str, torch.Tensor]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    rows, worst = list[str](), 0.0
    for name in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            for row, error in prove(name, Path(folder)):
                print(row, flush=True)
                rows.append(row)
                worst = max(worst, error)
    if given.page:
        given.page.write_text(page(rows, worst, given.recipes))


def prove(name: str, folder: Path) -> Iterator[tuple[str, float]]:
    """Run the plans of a recipe; yield a row of the table, and the largest error of the weights."""
    plans: dict[str, tuple[Plan, tuple[str, ...]]] = {
        "one process": (Plan(micro_batch_size=20), ()),
        **{title: (plan, ()) for title, plan in EVERYWHERE.items()},
    }
    if name == next(iter(RECIPES)):
        plans |= ONCE
    known: dict[str, torch.Tensor] = {}
    for number, (title, (plan, more)) in enumerate(plans.items()):
        config = load("train", [f"recipe={name.split()[0]}", *name.split()[1:], *COMMON, *RECIPES[name], *more])
        found = run(config, plan, folder / str(number))
        known = known or found.weights
        error = max(float((found.weights[key] - value).abs().max()) for key, value in known.items())
        moved = "the same bits" if error == 0 else f"{error:.1e}"
        yield f"| {name} | {title} | {plan} | {found.gpus or 'yes'} | {found.tracks or 'yes'} | {moved} | {found.seconds:.0f} |", error


def run(config: DictConfig, plan: Plan, folder: Path) -> Outcome:
    """Run the recipe under ``plan`` from its file. Raises RuntimeError if the run fails."""
    folder.mkdir()
    write_plan(folder / "plan.yaml", config, plan)
    command = [sys.executable, "-m", "rlinf_vla.cli.main", "train", f"plan={folder / 'plan.yaml'}", f"run_dir={folder / 'run'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    checkpoint = folder / "run" / "checkpoints" / f"step_{ITERATIONS:06d}"
    weights = {
        f"{path.name} {key}": value
        for path in sorted(checkpoint.rglob("*.safetensors"))
        if path.name != "optimizer.safetensors"
        for key, value in load_file(path).items()
    }
    recipe = recipes.read(load("train", [f"plan={folder / 'plan.yaml'}"]))
    return Outcome(
        gpus_differ(plan, recipe, folder / "run"), tracks_differ(plan, recipe, folder / "run"), weights, metrics[-1]["timing_s/iteration"]
    )


def gpus_differ(plan: Plan, recipe: Any, directory: Path) -> str:
    """Compare the plan's GPUs with what each worker said; their numbers may be permuted."""
    if plan.runtime == "in_process":
        return "–" if not (directory / "placement.json").exists() else "started workers"
    workers = json.loads((directory / "placement.json").read_text())["workers"]
    planned = dict(
        zip(("rollout", "trainer"), assign(plan.placement, plan.rollout_workers, plan.trainer_ranks, describe(recipe.cluster)), strict=True)
    )
    pairs = set()
    for worker in workers:
        if len(worker["gpus"]) != 1:
            return f"{worker['role']} {worker['number']} has GPUs {worker['gpus']}"
        slots = planned.get(worker["role"]) or planned["trainer"]
        pairs.add((slots[worker["number"] % len(slots)], worker["gpus"][0]))
    started = {role: sum(worker["role"] == role for worker in workers) for role in ("rollout", "trainer", "reference", "feature")}
    wanted = {
        "rollout": plan.rollout_workers,
        "trainer": plan.trainer_ranks,
        "reference": plan.reference_workers,
        "feature": int(plan.split == "head"),
    }
    if started != wanted:
        return f"started {started}"
    return "" if len(pairs) == len({slot for slot, _ in pairs}) == len({gpu for _, gpu in pairs}) else f"other GPUs: {sorted(pairs)}"


def tracks_differ(plan: Plan, recipe: Any, directory: Path) -> str:
    """Compare the tracks of policies, simulators and trainers in both timelines."""
    problem, _ = plan_problem(recipe)
    known = ("policy", "simulator", "trainer")
    predicted, recorded = (
        {span.track for span in spans if any(word in span.track for word in known)}
        for spans in (simulate(problem, plan).spans, read_run(directory).timeline)
    )
    return ", ".join(sorted(predicted ^ recorded))


def page(rows: Sequence[str], worst: float, names: Sequence[str]) -> str:
    machine = fingerprint()
    return f"""# Plans on eight fake GPUs

`python tools/prove_plans.py --page docs/results/plans.md` on {machine["cpu"]}, {machine["cores"]} cores, {machine["memory_gb"]} GB,
without a GPU. `cluster=8gpu cluster.device=fake_gpu`: Ray claims eight GPUs and
places the workers on them, and all compute on the CPU. {ITERATIONS} iterations with KL to the reference policy,
seed 7, real ManiSkill, tiny policies with random weights.

GPUs: every worker says that it has the GPU of the plan, up to the numbers of GPUs. Tracks: the
predicted and the recorded timeline have the same rows of policies, simulators and trainers. The
last columns are the largest difference of a trained weight from the run in one process ({worst:.1e}
at most), and the seconds of the last iteration.

| recipe | plan | as printed | GPUs agree | tracks agree | difference of weights | s |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
