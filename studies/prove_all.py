"""Train every learning proof on three seeds, one after the other, and fill in a table.

    python studies/prove_all.py [--seeds 3] [--page docs/results/learning.md [--missing]] [NAME ...]

Runs are in runs/prove-all/NAME/seed-K. A finished run is not repeated, and a run that was cut goes
on at its newest checkpoint, so the command may be stopped and repeated at any time. After each run
the table is printed and, with ``--page``, written with a figure per proof. What each seed did in
each episode is then stored beside the page, in learning/NAME.json, so that seeds from several
machines make one row; ``--missing`` trains only those that are not stored. A proof that fails is
named in the table, and the others go on. Takes some nights on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from rlinf_vla.evaluation.statistics import task_of
from rlinf_vla.features.sweeps.aggregate import Outcomes, hierarchical_difference, success
from rlinf_vla.features.sweeps.compare import RATE
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.page import machine_line
from rlinf_vla.telemetry.run_files import read_run

ROOT = Path(__file__).parents[1]
RUNS = Path("runs/prove-all")
LEARNT_NOISE = ("model.options.sampler=flow_noise", "model.options.noise_range=[0.5,1]")
PROOFS: dict[str, tuple[str, ...]] = {
    "PPO, PushCube": ("recipe=maniskill_ppo",),
    "GRPO, PushCube": ("recipe=maniskill_grpo",),
    "PPO on OFT, PushCube": ("recipe=maniskill_ppo", "model=openvla_oft"),
    "SAC, PushCube": ("recipe=maniskill_sac",),
    "RLPD, PushCube": ("recipe=maniskill_rlpd",),
    "SAC on a frozen OFT, PushCube": ("recipe=maniskill_sac", "model=openvla_oft"),
    "PPO, PutOnPlate": ("recipe=maniskill_ppo_putonplate",),
    "GRPO, PutOnPlate": ("recipe=maniskill_grpo_putonplate",),
    "PPO, PutOnPlate25": ("recipe=maniskill_ppo_putonplate25",),
    "GRPO, PutOnPlate25": ("recipe=maniskill_grpo_putonplate25",),
    "PPO on π₀ (flow-SDE), PushCube": ("recipe=maniskill_ppo", "model=pi0"),
    "PPO on π₀ (flow-noise), PushCube": ("recipe=maniskill_ppo", "model=pi0", *LEARNT_NOISE),
    "PPO on SmolVLA (flow-SDE), PushCube": ("recipe=maniskill_ppo", "model=smolvla"),
    "DSRL on π₀, PushCube": ("recipe=maniskill_dsrl",),
    "RL Token on π₀, PushCube": ("recipe=maniskill_rlt",),
    "RL Token on SmolVLA, PushCube": ("recipe=maniskill_rlt", "model=smolvla"),
    "GRPO, LIBERO object 0": ("recipe=libero_grpo", "episodes=100"),
    "GRPO, LIBERO object 1": ("recipe=libero_grpo", "episodes=100", "env.tasks=[1]"),
    "PPO, Genesis": ("recipe=genesis_ppo",),
    "GRPO, sums in text": ("recipe=dialogue_grpo",),
    "DAPO, sums in text": (
        "recipe=dialogue_grpo",
        "algorithm=dapo",
        "algorithm.granularity=action",
    ),
}
"""Name -> keys of the training."""
STARTS: dict[str, tuple[str, ...]] = {
    "GRPO, LIBERO object 1": ("recipe=libero_sft", "env.tasks=[1]"),
    "PPO, Genesis": ("recipe=genesis_sft",),
}
"""Name -> keys of the training whose policy it starts from, where no packaged one fits."""
WHEN = ("before", "after")
Modes = dict[str, list[dict[str, Any]]]
HEAD = (
    "| proof | done | policy | before | after, mean: each seed | gain in points, intervals |",
    "|---|---|---|---|---|---|",
)


def slug(name: str) -> str:
    return "_".join(re.findall("[a-z0-9]+", name.lower().replace("π₀", "pi0")))


def train(directory: Path, *keys: str) -> None:
    words = ("train", *keys, f"run_dir={directory}", "resume=auto")
    print("rlinf-vla", *words, flush=True)
    subprocess.run([sys.executable, "-m", "rlinf_vla.cli.main", *words], check=True)


@dataclass(frozen=True)
class Result:
    """Of one seed: mode -> episodes before and after, and the rollouts' success by iteration."""

    before: Modes
    after: Modes
    curve: list[float]


@dataclass(frozen=True)
class Run:
    """One seed of a proof."""

    proof: str
    seed: int

    @property
    def directory(self) -> Path:
        return RUNS / slug(self.proof) / f"seed-{self.seed}"

    @property
    def finished(self) -> bool:
        return (self.directory / "evaluation" / "comparison.json").exists()

    def train(self) -> None:
        """Train, or go on. Raises CalledProcessError."""
        keys = PROOFS[self.proof]
        start = self.directory.with_name("start")
        if self.proof in STARTS:
            if not (start / "policy").exists():
                train(start, *STARTS[self.proof], "evaluation.before_and_after=false")
            keys += (f"model.checkpoint={start / 'policy'}",)
        train(self.directory, *keys, f"seed={self.seed}")

    def episodes(self, when: str) -> Modes:
        """Of each mode (sampled, greedy) that was evaluated. ``when``: before or after."""
        document = json.loads((self.directory / "evaluation" / f"{when}.json").read_text())
        return {
            mode: document[mode]["episodes"] for mode in ("sampled", "greedy") if mode in document
        }

    def result(self) -> Result:
        metrics = read_run(self.directory).metrics
        curve = [line["rollout/success_once"] for line in metrics if "rollout/success_once" in line]
        return Result(self.episodes("before"), self.episodes("after"), curve)


class Store:
    """Results beside a page, of each proof: seed -> when -> mode -> task -> seeds of episodes.

    Results of other keys than those of ``PROOFS`` are forgotten. Without a page nothing is stored.
    """

    def __init__(self, page: Path | None) -> None:
        self._folder = page and page.with_suffix("")

    def load(self, proof: str) -> dict[int, Result]:
        if self._folder is None or not (file := self._folder / f"{slug(proof)}.json").exists():
            return {}
        document = json.loads(file.read_text())
        if document["keys"] != [*PROOFS[proof]]:
            return {}
        by_seed = {}
        for seed, entry in document["seeds"].items():
            before, after = (
                {mode: listed(tasks) for mode, tasks in entry[when].items()} for when in WHEN
            )
            by_seed[int(seed)] = Result(before, after, entry["curve"])
        return by_seed

    def save(self, proof: str, results: dict[int, Result]) -> None:
        if self._folder is None or not results:
            return
        documents = {
            seed: {
                when: {mode: packed(episodes) for mode, episodes in getattr(result, when).items()}
                for when in WHEN
            }
            | {"curve": [round(rate, 4) for rate in result.curve]}
            for seed, result in results.items()
        }
        lines = ",\n".join(
            f' "{seed}": {json.dumps(document)}' for seed, document in sorted(documents.items())
        )
        keys = json.dumps(PROOFS[proof], ensure_ascii=False)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{slug(proof)}.json").write_text(
            f'{{"keys": {keys}, "seeds": {{\n{lines}\n}}}}\n'
        )


def packed(episodes: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Task -> seeds of the episodes that succeeded and failed."""
    tasks: dict[str, dict[str, list[int]]] = {}
    for episode in episodes:
        tasks.setdefault(task_of(episode), {"succeeded": [], "failed": []})[
            "succeeded" if episode["success"] else "failed"
        ].append(episode["seed"])
    return tasks


def listed(tasks: dict[str, dict[str, list[int]]]) -> list[dict[str, Any]]:
    """The reverse of ``packed``."""
    return [
        {"task": task, "seed": seed, "success": name == "succeeded"}
        for task, seeds in tasks.items()
        for name in seeds
        for seed in seeds[name]
    ]


def results(proof: str, seeds: int, store: Store) -> dict[int, Result]:
    """Of each seed that has finished here, or is stored, in ascending order."""
    here = {seed: run.result() for seed in range(seeds) if (run := Run(proof, seed)).finished}
    return dict(sorted((store.load(proof) | here).items()))


def rows(proof: str, seeds: int, failed: set[Run], results: dict[int, Result]) -> Iterator[str]:
    """One line per mode of evaluation."""
    values = list(results.values())
    state = f"{len(values)} of {max(seeds, len(values))} seeds" + ", one failed" * any(
        run.proof == proof for run in failed
    )
    if not values:
        yield f"| {proof} | {state} | | | | |"
        return
    for mode in values[0].before:
        before, after = (
            Outcomes([getattr(result, when)[mode] for result in values]) for when in WHEN
        )
        gain, (low, high) = hierarchical_difference(before, after)
        rates = ", ".join(f"{100 * rate:.1f}" for rate in after.scores.mean(1))
        first, last = success(before), success(after)
        (low_before, high_before) = first["pc_success_ci95"]
        (low_after, high_after) = last["pc_success_ci95"]
        apart = (
            "disjoint"
            if high_before < low_after
            else "disjoint: worse"
            if high_after < low_before
            else "overlapping"
        )
        gained = f"{100 * gain:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}), {apart}"
        yield f"| {proof} | {state} | {mode} | {RATE.format(**first)} | {RATE.format(**last)}: {rates} | {gained} |"


def table(seeds: int, failed: set[Run], store: Store) -> list[str]:
    return [
        *HEAD,
        *(
            line
            for proof in PROOFS
            for line in rows(proof, seeds, failed, results(proof, seeds, store))
        ),
    ]


def figure(proof: str, found: dict[int, Result], path: Path) -> None:
    """Write the rollouts' success of each seed, means of five iterations, as an SVG."""
    with matplotlib.rc_context({"svg.hashsalt": proof, "font.size": 8}):
        drawn = Figure(figsize=(4, 2.2), layout="constrained")
        axes = drawn.add_subplot()
        for number, values in ((seed, result.curve) for seed, result in found.items()):
            smooth = (
                np.convolve(values, np.ones(5) / 5, "valid")
                if len(values) >= 5
                else np.array(values)
            )
            axes.plot(
                np.arange(len(values) - len(smooth), len(values)) + 1,
                smooth,
                linewidth=1.2,
                label=f"seed {number}",
            )
        axes.set(title=proof, xlabel="iteration", ylabel="success in rollouts", ylim=(0, 1))
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format="svg", metadata={"Date": None})


def seeds_of(row: str) -> int:
    return int(row.split(" | ")[1].split()[0])


def write(page: Path, seeds: int, failed: set[Run]) -> None:
    """Write the page; a row of more seeds than have finished here is kept, with its figure."""
    head = f"""# Learning proofs

`python studies/prove_all.py --page docs/results/{page.name}`, last on {machine_line(fingerprint())}, {date.today():%d %B %Y}.
It fills in this page, run after run. What each seed did in each episode is stored in `learning/`, so
rows join seeds of several machines and days. Rows marked † are of seeds that were not stored: their
intervals are of an older method, which is too narrow for three seeds, and the greedy ones of SmolVLA
and RL Token started from zero noise ([now from drawn](../pi0.md)).
Evaluations are of the same episodes before and after. Training improves the sampled policy.
Means over seeds have intervals of 95 % (seeds and episodes), as `rlinf-vla compare`
([evaluation.md](../evaluation.md)): with one seed they say nothing of other seeds, and with two they
are wide, because two hardly show how much seeds differ.
"""
    store = Store(page)
    previous_lines = (
        [line for line in page.read_text().splitlines() if line.startswith("| ")]
        if page.exists()
        else []
    )
    lines = [*HEAD]
    figures = []
    for proof in PROOFS:
        by_seed = results(proof, seeds, store)
        store.save(proof, by_seed)
        new = list(rows(proof, seeds, failed, by_seed))
        old = [
            line
            for line in previous_lines
            if line.startswith(f"| {proof} | ") and seeds_of(line) > seeds_of(new[0])
        ]
        lines += old or new
        if seeds_of(lines[-1]):
            image = page.parent.parent / "images" / "learning" / f"{slug(proof)}.svg"
            if not old:
                figure(proof, by_seed, image)
            figures += ["", f"![{proof}](../images/learning/{image.name})"]
    page.write_text("\n".join([head, *lines, *figures]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"proofs to run: {', '.join(map(slug, PROOFS))}; all by default",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", type=Path)
    parser.add_argument(
        "--missing",
        action="store_true",
        help="leave out seeds whose results are stored beside the page",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(map(slug, PROOFS)):
        parser.error(f"{', '.join(sorted(unknown))}: no such proof")
    failed = set[Run]()
    store = Store(arguments.page)
    for seed in range(arguments.seeds):  # a first seed of each comes first
        for proof in PROOFS:
            run = Run(proof, seed)
            stored = arguments.missing and seed in store.load(proof)
            if run.finished or stored or (arguments.names and slug(proof) not in arguments.names):
                continue
            try:
                run.train()
            except subprocess.CalledProcessError:
                failed.add(run)
            print("\n".join(table(arguments.seeds, failed, store)), flush=True)
            if arguments.page is not None:
                write(arguments.page, arguments.seeds, failed)
    if arguments.page is not None:
        write(arguments.page, arguments.seeds, failed)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
