"""Compare RECAP with imitation of everything and of successes, on recordings that half fail.

    python studies/recap_study.py FOLDER [--task PushCube] [--seeds 3] [--episodes 100]

TASK is PushCube, a task of Meta-World such as sweep-into-v3, or `franka`, the simulated arm in real
time. Of each seed: the expert and a weak policy are recorded, half the episodes fail; a model of
values is trained and labels them; three policies learn for as many steps from the same recording,
and play the same episodes. What is in FOLDER is not done again. Prints a table of Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from rlinf_vla.evaluation.statistics import paired_difference

PROGRAM = str(Path(sys.executable).with_name("rlinf-vla"))
METAWORLD = Path(".venv-metaworld/bin/python").absolute()
SMALL = ["cluster.update_threads=2", "evaluation.filmed=0"]
EVERYTHING = "imitation of everything"


@dataclass
class Kind:
    """How a policy learns from a recording, and acts."""

    folder: str
    trained: list[str]
    acts: list[str]


KINDS = {
    EVERYTHING: Kind("everything", ["algorithm=sft"], []),
    "imitation of successes": Kind(
        "successes", ["algorithm=sft", "algorithm.demonstrations.only_successes=true"], []
    ),
    "RECAP": Kind("recap", ["algorithm=recap"], []),
    "RECAP, guidance 2": Kind("recap", ["algorithm=recap"], ["algorithm.guidance=2"]),
}


@dataclass
class Setting:
    """Words of the recipes of a task."""

    expert: list[str]
    policy: list[str]
    value: list[str]
    trusted: list[str] = field(default_factory=list)
    """What the command line repeats, because the file of a run must not choose it."""


def setting(options: argparse.Namespace) -> Setting:
    if options.task == "franka":
        compact = ["model.checkpoint=asset://compact_franka", "model.options.images=[front]"]
        return Setting(
            expert=["recipe=franka_rlpd"],
            policy=["recipe=franka_recap"],
            value=["recipe=maniskill_value", *compact],
        )
    if options.task == "PushCube":
        common = ["env.task=PushCube", "env.episode_limit=30"]
        return Setting(
            expert=["recipe=maniskill_sft", *common],
            policy=["recipe=maniskill_recap", *common],
            value=["recipe=maniskill_value", *common],
        )
    python = [f"env.python={METAWORLD}"]
    metaworld = ["recipe=metaworld_sft", f"env.tasks=[{options.task}]", *python]
    return Setting(
        expert=metaworld,
        policy=[*metaworld, "model.options.reads_instruction=true"],
        value=[*metaworld, "algorithm=value"],
        trusted=python,
    )


def run(result: Path, *words: str) -> None:
    """Run a command of the program, unless ``result`` is there."""
    if result.exists():
        return
    log = result.with_name(f"{result.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run([PROGRAM, *words], stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: see {log}")


def train(folder: Path, *words: str) -> None:
    never = "evaluation.before_and_after=false"
    run(folder / "report.html", "train", *words, f"run_dir={folder}", never, *SMALL)


def record(folder: Path, task: Setting, seed: int, options: argparse.Namespace) -> None:
    """Record the expert in ``folder/expert``, a policy that imitated it in ``folder/played``."""
    expert = folder / "expert"
    played = folder / "played"
    weak = folder / "weak"
    half = options.recorded // 2
    keys = ["record.video=false", "record.failures=true", f"seed={seed}"]
    at_robot = options.task == "franka"
    count = "algorithm.demonstrations" if at_robot else "algorithm.demonstrations.episodes"
    shown = [*task.expert, f"output={expert}", f"{count}={half}", *keys]
    imitated = [f"algorithm.demonstrations.dataset={expert}", f"iterations={options.weak}"]
    if at_robot:
        run(expert, "robot", "record", *shown)
    else:
        run(expert, "record", *shown, f"algorithm.demonstrations.noise=[{options.noise}]")
    train(weak, *task.policy, "algorithm=sft", *imitated, f"seed={seed}")
    if at_robot:
        session = folder / "session"
        words = [*task.policy, "algorithm=sft", f"checkpoint={weak}", f"episodes={half}"]
        run(session / "report.html", "robot", "run", *words, f"run_dir={session}", f"seed={seed}")
        run(played, "robot", "dataset", f"run={session}", f"output={played}", "record.video=false")
    else:
        words = [f"run={weak}", *task.trusted, "record.player=policy"]
        words += [f"record.first={half}", f"episodes={half}"]
        run(played, "record", *words, f"output={played}", *keys)


def recordings(folder: Path) -> list[str]:
    """Return the words of a recipe that learns from both datasets in ``folder``."""
    both = ",".join(f"{{dataset: {folder / name}}}" for name in ("expert", "played"))
    return [
        f"algorithm.demonstrations.mixture=[{both}]",
        "algorithm.demonstrations.dataset=null",
    ]


def label(folder: Path, task: Setting, seed: int, options: argparse.Namespace) -> Path:
    """Return the folder of the labelled recordings."""
    value = folder / "value"
    labelled = folder / "labelled"
    run(
        value / "report.html",
        "train",
        *task.value,
        *recordings(folder),
        f"run_dir={value}",
        f"seed={seed}",
        *SMALL,
    )
    run(
        labelled,
        "label",
        str(folder / "expert"),
        str(folder / "played"),
        f"value={value / 'value'}",
        f"output={labelled}",
        f"positive={options.positive}",
    )
    return labelled


def successes(folder: Path) -> list[bool]:
    (document,) = (folder / "evaluation").glob("*.json")
    return [
        bool(episode["success"])
        for episode in json.loads(document.read_text())["greedy"]["episodes"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="PushCube")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recorded", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--weak", type=int, default=60)
    parser.add_argument("--positive", type=float, default=0.3)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    task = setting(options)
    played: dict[str, list[list[bool]]] = {name: [] for name in KINDS}
    for seed in range(options.seeds):
        folder = options.folder.absolute() / f"seed_{seed}"
        record(folder, task, seed, options)
        labelled = label(folder, task, seed, options)
        steps = [f"iterations={options.iterations}", f"seed={seed}"]
        for name, kind in KINDS.items():
            target = folder / kind.folder
            evaluated = folder / f"{name.replace(',', '').replace(' ', '_')}_evaluated"
            train(target, *task.policy, *kind.trained, *recordings(labelled), *steps)
            run(
                evaluated,
                "eval",
                f"run={target}",
                *task.trusted,
                *kind.acts,
                f"episodes={options.episodes}",
                f"run_dir={evaluated}",
                "evaluation.filmed=0",
            )
            played[name].append(successes(evaluated))
            print(seed, name, sum(played[name][-1]), flush=True)
    print_table(played)


def print_table(played: dict[str, list[list[bool]]]) -> None:
    """Print successes by seed, and differences over all seeds to both kinds of imitation."""
    pooled = {name: list(chain.from_iterable(seeds)) for name, seeds in played.items()}
    seeds = range(len(played[EVERYTHING]))
    columns = [f"seed {seed}" for seed in seeds]
    columns += ["to everything, in points (95 %, paired)", "to successes"]
    print(f"| | {' | '.join(columns)} |")
    print("|" + "---|" * (len(columns) + 1))
    for name, results in played.items():
        cells = [f"{100 * sum(result) / len(result):.0f} %" for result in results]
        for other in list(KINDS)[:2]:
            difference, bounds = paired_difference(pooled[other], pooled[name])
            low, high = (100 * bound for bound in bounds)
            told = f"{100 * difference:+.1f} ({low:+.1f} to {high:+.1f})"
            cells.append("" if name == other else told)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
