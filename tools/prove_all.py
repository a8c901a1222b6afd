"""Train every learning proof on three seeds, one after the other, and fill in a table.

    python tools/prove_all.py [--seeds 3] [--page docs/results/learning.md] [NAME ...]

Runs are in runs/prove-all/NAME/seed-K. A finished run is not repeated, and a run that was cut goes
on at its newest checkpoint, so the command may be stopped and repeated at any time. After each run
the table is printed and, with ``--page``, written with a figure per proof; rows of more seeds, from
another machine, are kept. A proof that fails is named in the table, and the others go on. Takes a
night on two cores.
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

from rlinf_vla.evaluation.aggregate import Outcomes, hierarchical_difference, success
from rlinf_vla.evaluation.compare import RATE
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
    "DAPO, sums in text": ("recipe=dialogue_grpo", "algorithm=dapo", "algorithm.granularity=action"),
}
"""Name -> keys of the training."""
STARTS: dict[str, tuple[str, ...]] = {"GRPO, LIBERO object 1": ("recipe=libero_sft", "env.tasks=[1]")}
"""Name -> keys of the training whose policy it starts from, where no packaged one fits."""
HEAD = ("| proof | done | policy | before | after, mean: each seed | gain in points, intervals |", "|---|---|---|---|---|---|")


def slug(name: str) -> str:
    return "_".join(re.findall("[a-z0-9]+", name.lower().replace("π₀", "pi0")))


def train(directory: Path, *keys: str) -> None:
    words = ("train", *keys, f"run_dir={directory}", "resume=auto")
    print("rlinf-vla", *words, flush=True)
    subprocess.run([sys.executable, "-m", "rlinf_vla.cli.main", *words], check=True)


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
        keys, start = PROOFS[self.proof], self.directory.with_name("start")
        if self.proof in STARTS:
            if not (start / "policy").exists():
                train(start, *STARTS[self.proof], "evaluation.before_and_after=false")
            keys += (f"model.checkpoint={start / 'policy'}",)
        train(self.directory, *keys, f"seed={self.seed}")

    def episodes(self, when: str) -> dict[str, list[dict[str, Any]]]:
        """Of each mode (sampled, greedy) that was evaluated. ``when``: before or after."""
        document = json.loads((self.directory / "evaluation" / f"{when}.json").read_text())
        return {mode: document[mode]["episodes"] for mode in ("sampled", "greedy") if mode in document}

    def curve(self) -> list[float]:
        return [line["rollout/success_once"] for line in read_run(self.directory).metrics if "rollout/success_once" in line]


def rows(proof: str, seeds: int, failed: set[Run]) -> Iterator[str]:
    """One line per mode of evaluation."""
    runs = [Run(proof, seed) for seed in range(seeds)]
    done = [run for run in runs if run.finished]
    state = f"{len(done)} of {seeds} seeds" + ", one failed" * any(run in failed for run in runs)
    if not done:
        yield f"| {proof} | {state} | | | | |"
        return
    starts, ends = ([run.episodes(when) for run in done] for when in ("before", "after"))
    for mode in starts[0]:
        before, after = (Outcomes([run[mode] for run in evaluated]) for evaluated in (starts, ends))
        gain, (low, high) = hierarchical_difference(before, after)
        each = ", ".join(f"{100 * rate:.1f}" for rate in after.scores.mean(1))
        first, last = success(before), success(after)
        (low_before, high_before), (low_after, high_after) = first["pc_success_ci95"], last["pc_success_ci95"]
        apart = "disjoint" if high_before < low_after else "disjoint: worse" if high_after < low_before else "overlapping"
        gained = f"{100 * gain:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}), {apart}"
        yield f"| {proof} | {state} | {mode} | {RATE.format(**first)} | {RATE.format(**last)}: {each} | {gained} |"


def table(seeds: int, failed: set[Run]) -> list[str]:
    return [*HEAD, *(line for proof in PROOFS for line in rows(proof, seeds, failed))]


def figure(proof: str, seeds: int, path: Path) -> None:
    """Write the rollouts' success of each seed, means of five iterations, as an SVG."""
    curves = [run.curve() for seed in range(seeds) if (run := Run(proof, seed)).finished]
    with matplotlib.rc_context({"svg.hashsalt": proof, "font.size": 8}):
        drawn = Figure(figsize=(4, 2.2), layout="constrained")
        axes = drawn.add_subplot()
        for number, values in enumerate(curves):
            smooth = np.convolve(values, np.ones(5) / 5, "valid") if len(values) >= 5 else np.array(values)
            axes.plot(np.arange(len(values) - len(smooth), len(values)) + 1, smooth, linewidth=1.2, label=f"seed {number}")
        axes.set(title=proof, xlabel="iteration", ylabel="success in rollouts", ylim=(0, 1))
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format="svg", metadata={"Date": None})


def seeds_of(row: str) -> int:
    return int(row.split(" | ")[1].split()[0])


def write(page: Path, seeds: int, failed: set[Run]) -> None:
    """Write the page; a row of more seeds than have finished here is kept, with its figure."""
    head = f"""# Learning proofs

`python tools/prove_all.py --page docs/results/{page.name}`, last on {machine_line(fingerprint())}, {date.today():%d %B %Y}.
It fills in this page, run after run, and keeps rows whose runs were on another machine or day, with
their intervals: those of π₀ by PPO, RL Token and GRPO in text are older than the present method, and
too narrow for several seeds.
Evaluations are of the same episodes before and after. Training improves the sampled policy.
Means over seeds have hierarchical bootstrap intervals of 95 % (seeds and episodes), as
`rlinf-vla compare`; with one seed they say nothing of other seeds, and with two or three they cover
the mean of all seeds in 86 to 100 % of simulations ([evaluation.md](../evaluation.md)).
"""
    kept = [line for line in page.read_text().splitlines() if line.startswith("| ")] if page.exists() else []
    lines, figures = [*HEAD], []
    for proof in PROOFS:
        new = list(rows(proof, seeds, failed))
        old = [line for line in kept if line.startswith(f"| {proof} | ") and seeds_of(line) > seeds_of(new[0])]
        lines += old or new
        if seeds_of(lines[-1]):
            image = page.parent.parent / "images" / "learning" / f"{slug(proof)}.svg"
            if not old:
                figure(proof, seeds, image)
            figures += ["", f"![{proof}](../images/learning/{image.name})"]
    page.write_text("\n".join([head, *lines, *figures]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"proofs to run: {', '.join(map(slug, PROOFS))}; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    if unknown := set(given.names) - set(map(slug, PROOFS)):
        parser.error(f"{', '.join(sorted(unknown))}: no such proof")
    failed: set[Run] = set()
    for seed in range(given.seeds):  # a first seed of each comes first
        for proof in PROOFS:
            run = Run(proof, seed)
            if run.finished or (given.names and slug(proof) not in given.names):
                continue
            try:
                run.train()
            except subprocess.CalledProcessError:
                failed.add(run)
            print("\n".join(table(given.seeds, failed)), flush=True)
            if given.page is not None:
                write(given.page, given.seeds, failed)
    if given.page is not None:
        write(given.page, given.seeds, failed)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
