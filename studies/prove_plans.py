"""Check that plans on eight fake GPUs run as they are printed, and do not change the result.

    python studies/prove_plans.py [--page docs/results/plans.md] [RECIPE ...]

Needs EXTRAS=maniskill,genesis,ray.

Each plan is written as `rlinf-vla plan output=FILE` writes it and run by `rlinf-vla train
plan=FILE`: real Ray, a real simulator and a tiny policy, on the CPU. Compared are the plan's GPUs
and those that Ray gave the workers, the tracks of the predicted and of the recorded timeline, and
the trained weights and those of the run in one process. Half a minute per plan on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlinf_vla.cli.compose import load
from rlinf_vla.core.io import step_name
from rlinf_vla.features.planner.plan import Plan
from rlinf_vla.features.planner.search import plan_problem, write_plan
from rlinf_vla.features.planner.simulate import simulate
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.machines import assign, describe
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.run_files import read_run

ITERATIONS, LONG = 2, 40
"""Of a run, and of one in which workers join or leave, which takes a while."""
COMMON = (
    *(
        "cluster=8gpu",
        "cluster.device=fake_gpu",
        "cluster.micro_batch_size=20",
        "cluster.update_threads=1",
        "seed=7",
    ),
    *(
        f"iterations={ITERATIONS}",
        "env.num_envs=8",
        "env.episode_limit=5",
        "rollout.batch_size=2",
        "algorithm.minibatch_size=20",
    ),
    *(
        "evaluation.before_and_after=false",
        "checkpoints.every=1",
        "checkpoints.keep=99",
        "model.options.random_weights=true",
    ),
    *("algorithm.kl_coef=0.05", "algorithm.epochs=2"),
)
MANISKILL = ("env.reward=normalized_dense", "env.processes=1")
TINY = "model.checkpoint=asset://openvla_tiny"
PPO = ("algorithm.horizon=10", "algorithm.value_warmup=0")
RECIPES = {
    "maniskill_ppo": (*MANISKILL, TINY, *PPO),
    "maniskill_grpo": (*MANISKILL, TINY, "algorithm.episodes=16", "algorithm.group_size=4"),
    "maniskill_ppo model=pi0": (*MANISKILL, *PPO),
    "genesis_ppo": (TINY, *PPO),
}


def ray(placement: str, workers: int, ranks: int, **more: Any) -> Plan:
    return Plan("ray", placement, workers, trainer_ranks=ranks, **{"micro_batch_size": 20, **more})


PLACEMENTS = {
    "collocated, taking turns": ray("collocated", 2, 2, offload=True),
    "disaggregated": ray("disaggregated", 4, 2),
    "hybrid": ray("hybrid", 4, 2),
}
"""Plans that are run for each recipe in ManiSkill."""
PIPELINED = {
    "2 groups taking turns": (Plan(pipeline_depth=2, micro_batch_size=20), ()),
    "2 rollout workers of 2 groups": (ray("collocated", 2, 1, pipeline_depth=2), ()),
}
"""Plans of the recipe in Genesis, which advances a group as one batch in a process of its own."""
JOIN = "2 rollout workers join"
PREEMPT = "a worker is told to leave (SIGTERM)"
MIXED = "mixed pool: 2 GPUs each of two types"
ONCE = {
    "2 groups taking turns": (Plan(pipeline_depth=2, micro_batch_size=20), ("env.processes=2",)),
    "1 rollout worker": (ray("collocated", 1, 1), ()),
    "2 rollout workers of 2 groups": (
        ray("collocated", 2, 1, pipeline_depth=2),
        ("env.processes=2",),
    ),
    "without streaming": (ray("disaggregated", 2, 1, streaming=False), ()),
    "reference workers": (ray("disaggregated", 2, 1, reference_workers=1), ()),
    "2 shards per worker": (ray("disaggregated", 2, 1), ("cluster.shards_per_worker=2",)),
    "2 sharded ranks (FSDP2)": (ray("collocated", 2, 2), ("cluster.trainer_sharding=full",)),
    "4 sharded ranks, taking turns": (
        ray("collocated", 4, 4, offload=True),
        ("cluster.trainer_sharding=full",),
    ),
    JOIN: (
        ray("disaggregated", 2, 1),
        (
            "cluster.shards_per_worker=2",
            "cluster.most_rollout_workers=4",
            "cluster.roles.rollout.cpus=0.2",
        ),
    ),
    PREEMPT: (ray("disaggregated", 2, 1), ()),
    MIXED: (ray("hybrid", 4, 2), ()),
}
"""Further plans of the first recipe, with further keys."""
SPLIT = {"split policy": (ray("collocated", 1, 1, split="head"), ())}
"""Further plan of the recipe with π₀; OpenVLA cannot be split."""


@dataclass(frozen=True)
class Outcome:
    """What a run did. gpus, tracks: the difference from the plan, empty if there is none.

    weights: after each iteration.
    """

    gpus: str
    tracks: str
    weights: list[dict[str, torch.Tensor]]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    rows = list[str]()
    worst = [0.0, 0.0]
    for name in arguments.recipes:
        with tempfile.TemporaryDirectory() as folder:
            for row, errors in prove(name, Path(folder)):
                print(row, flush=True)
                rows.append(row)
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    if arguments.page:
        arguments.page.write_text(page(rows, worst))


def prove(name: str, folder: Path) -> Iterator[tuple[str, list[float]]]:
    """Run the plans of a recipe; yield a row of the table, and the largest error of the weights
    after each iteration."""
    plans: dict[str, tuple[Plan, tuple[str, ...]]] = {
        "one process": (Plan(micro_batch_size=20), ())
    }
    plans |= (
        {title: (plan, ()) for title, plan in PLACEMENTS.items()}
        if name.startswith("maniskill")
        else PIPELINED
    )
    if name == next(iter(RECIPES)):
        plans |= ONCE
    if "pi0" in name:
        plans |= SPLIT
    reference: list[dict[str, torch.Tensor]] = []
    for number, (title, (plan, more)) in enumerate(plans.items()):
        keys = [f"recipe={name.split()[0]}", *name.split()[1:], *COMMON, *RECIPES[name], *more]
        with ExitStack() as stack:
            pool = stack.enter_context(two_types()) if title == MIXED else []
            keys += pool + [f"iterations={LONG}"] * (
                title in (JOIN, PREEMPT) or (not reference and JOIN in plans)
            )
            result = run(keys, plan, folder / str(number), title)
        reference = reference or result.weights
        errors = [
            max(float((weights[key] - value).abs().max()) for key, value in expected.items())
            for weights, expected in zip(result.weights, reference, strict=False)
        ]
        errors = [errors[0], errors[-1]]
        moved = " | ".join("the same bits" if error == 0 else f"{error:.1e}" for error in errors)
        yield (
            f"| {name} | {title} | {plan} | {result.gpus or 'yes'} | {result.tracks or 'yes'} | {moved} | {result.seconds:.0f} |",
            errors,
        )


@contextmanager
def two_types() -> Iterator[list[str]]:
    """Start a Ray cluster of two machines, each with two fake GPUs of its type; yield its keys."""
    from ray.cluster_utils import Cluster

    kinds = {"fast": "nvidia-h100-80gb-hbm3", "slow": "nvidia-a100-sxm4-80gb"}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for kind in kinds:
            cluster.add_node(num_cpus=16, num_gpus=2, labels={"pool": kind})
        nodes = [
            f"{{name: {kind}, gpus: 2, gpu: {gpu}, cpus: 16, memory_gb: 500, labels: {{pool: {kind}}}}}"
            for kind, gpu in kinds.items()
        ]
        yield [f"cluster.address='{cluster.address}'", f"cluster.nodes=[{', '.join(nodes)}]"]
    finally:
        cluster.shutdown()


def run(keys: Sequence[str], plan: Plan, folder: Path, title: str) -> Outcome:
    """Run the recipe of ``keys`` under ``plan`` from its file. Raises RuntimeError if it fails.

    With PREEMPT, a rollout worker gets SIGTERM after the first iteration.
    """
    preempt = title == PREEMPT
    folder.mkdir()
    write_plan(folder / "plan.yaml", load("train", keys), plan)
    # an address is not taken from a file alone
    keys = [
        f"plan={folder / 'plan.yaml'}",
        *(key for key in keys if key.startswith("cluster.address=")),
    ]
    command = [
        sys.executable,
        "-m",
        "rlinf_vla.cli.main",
        "train",
        *keys,
        f"run_dir={folder / 'run'}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = folder / "run" / "metrics.jsonl"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        while preempt and process.poll() is None:
            if lines.exists() and lines.read_text():
                workers = json.loads((folder / "run" / "placement.json").read_text())["workers"]
                os.kill(
                    next(worker["pid"] for worker in workers if worker["role"] == "rollout"),
                    signal.SIGTERM,
                )
                break
            time.sleep(0.05)
        if process.wait():
            raise RuntimeError((folder / "log").read_text())
    metrics = [json.loads(line) for line in lines.read_text().splitlines()]
    if preempt and not any(line["faults/rollout"] for line in metrics):
        raise RuntimeError("the worker was not lost during the run")
    recipe = recipes.read(load("train", keys))
    return Outcome(
        gpus_differ(plan, recipe, folder / "run"),
        # the timeline is that of the last iterations, in which a lost worker has no shard
        "" if preempt else tracks_differ(plan, recipe, folder / "run", title == JOIN),
        [
            weights_of(folder / "run" / "checkpoints" / step_name(number + 1))
            for number in range(len(metrics))
        ],
        metrics[-1]["timing_s/iteration"],
    )


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the trained weights of a checkpoint, by file and name."""
    return {
        f"{path.name} {key}": value
        for path in sorted(checkpoint.rglob("*.safetensors"))
        if path.name != "optimizer.safetensors"
        for key, value in load_file(path).items()
    }


def gpus_differ(plan: Plan, recipe: Any, directory: Path) -> str:
    """Compare the plan's GPUs with what each worker said; their numbers may be permuted."""
    if plan.runtime == "in_process":
        return "–" if not (directory / "placement.json").exists() else "started workers"
    workers = json.loads((directory / "placement.json").read_text())["workers"]
    planned = dict(
        zip(
            ("rollout", "trainer"),
            assign(
                plan.placement, plan.rollout_workers, plan.trainer_ranks, describe(recipe.cluster)
            ),
            strict=True,
        )
    )
    pairs = set()
    for worker in workers:
        if len(worker["gpus"]) != 1:
            return f"{worker['role']} {worker['number']} has GPUs {worker['gpus']}"
        slots = planned.get(worker["role"]) or planned["trainer"]
        pairs.add((slots[worker["number"] % len(slots)], (worker["node_id"], worker["gpus"][0])))
    started = {
        role: sum(worker["role"] == role for worker in workers)
        for role in ("rollout", "trainer", "reference", "feature")
    }
    expected = {
        "rollout": plan.rollout_workers,
        "trainer": plan.trainer_ranks,
        "reference": plan.reference_workers,
        "feature": int(plan.split == "head"),
    }
    if started != expected:
        return f"started {started}"
    return (
        ""
        if len(pairs) == len({slot for slot, _ in pairs}) == len({gpu for _, gpu in pairs})
        else f"other GPUs: {sorted(pairs)}"
    )


def tracks_differ(plan: Plan, recipe: Any, directory: Path, joined: bool) -> str:
    """Compare the tracks of policies, simulators and trainers in both timelines.

    ``joined``: there must be tracks of workers that joined, besides.
    """
    if recipe.env.name == "genesis":
        return "not predicted"  # its rates are not published
    problem, _ = plan_problem(recipe)
    words = ("policy", "simulator", "trainer")
    predicted, recorded = (
        {span.track for span in spans if any(word in span.track for word in words)}
        for spans in (simulate(problem, plan).spans, read_run(directory).timeline)
    )
    others = {
        track
        for track in recorded
        if joined and any(f"rollout {number} " in track for number in (2, 3))
    }
    return ", ".join(sorted(predicted ^ (recorded - others))) or "no worker joined" * (
        joined and not others
    )


def page(rows: Sequence[str], worst: Sequence[float]) -> str:
    machine = fingerprint()
    return f"""# Plans on eight fake GPUs

`python studies/prove_plans.py --page docs/results/plans.md` on {machine["cpu"]}, {machine["cores"]} cores, {machine["memory_gb"]} GB,
without a GPU. `cluster=8gpu cluster.device=fake_gpu`: Ray claims eight GPUs and
places the workers on them, and all compute on the CPU. {ITERATIONS} iterations ({LONG} where
workers join or leave) with KL to the reference policy, seed 7, real ManiSkill and Genesis, tiny
policies with random weights.

GPUs: every worker says that it has the GPU of the plan, up to the numbers of GPUs. Tracks: the
predicted and the recorded timeline have the same rows of policies, simulators and trainers (not for
Genesis, of which no rates on such GPUs are published). The last columns are the largest difference
of a trained weight from the run in one process, after the first iteration ({worst[0]:.1e} at most)
and after the last ({worst[-1]:.1e}), and the seconds of the last iteration. Ranks sum gradients in
another order. Adam divides by their size, and so a difference where a gradient is almost zero
counts as much as any.

| recipe | plan | as printed | GPUs agree | tracks agree | after the first | after the last | s |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
