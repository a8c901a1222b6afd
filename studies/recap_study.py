"""Compare RECAP with imitation of everything and of successes, on recordings that half fail.

    python studies/recap_study.py FOLDER [--task PushCube] [--seeds 3] [--episodes 100]

Of each seed: the expert and a weak policy are recorded, half the episodes fail; a model of values
is trained and labels them; three policies learn for as many steps from the same recording, and
play the same episodes. What is in FOLDER is not done again. Prints a table of Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rlinf_vla.evaluation.statistics import paired_difference

PROGRAM = [str(Path(sys.executable).with_name("rlinf-vla"))]
SMALL = ["cluster.update_threads=2", "evaluation.filmed=0"]
KINDS = {
    "imitation of everything": ["algorithm=sft"],
    "imitation of successes": ["algorithm=sft", "algorithm.demonstrations.only_successes=true"],
    "RECAP": ["algorithm=recap"],
    "RECAP, guidance 2": ["algorithm=recap", "algorithm.guidance=2"],
}


def run(result: Path, *words: str) -> None:
    """Run a command of the program, unless ``result`` is there."""
    if result.exists():
        return
    target = result.parent if result.suffix else result
    with target.with_name(f"{target.name}.log").open("w") as log:
        done = subprocess.run([*PROGRAM, *words], stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: see {log.name}")


def recorded(folder: Path, seed: int, options: argparse.Namespace) -> list[str]:
    """Record a seed's datasets and label them; return them as words of a recipe."""
    common = [f"seed={seed}", f"env.task={options.task}", f"env.episode_limit={options.limit}"]
    record = ["record.video=false", "record.failures=true", *common]
    half = options.recorded // 2
    run(
        folder / "expert",
        "record",
        "recipe=maniskill_sft",
        f"output={folder / 'expert'}",
        f"algorithm.demonstrations.episodes={half}",
        "algorithm.demonstrations.noise=[0.3]",
        *record,
    )
    weak = folder / "weak"
    run(
        weak / "report.html",
        "train",
        "recipe=maniskill_recap",
        "algorithm=sft",
        f"algorithm.demonstrations.dataset={folder / 'expert'}",
        f"iterations={options.weak}",
        "evaluation.before_and_after=false",
        f"run_dir={weak}",
        *common,
        *SMALL,
    )
    run(
        folder / "played",
        "record",
        f"run={weak}",
        "record.player=policy",
        f"record.first={half}",
        f"episodes={half}",
        f"output={folder / 'played'}",
        *record,
    )
    mixture = "[" + ",".join(f"{{dataset: {folder / name}}}" for name in ("expert", "played")) + "]"
    value = folder / "value"
    run(
        value / "report.html",
        "train",
        "recipe=maniskill_value",
        f"algorithm.demonstrations.mixture={mixture}",
        "algorithm.demonstrations.dataset=null",
        f"run_dir={value}",
        *common,
        *SMALL,
    )
    labelled = folder / "labelled"
    words = [str(folder / "expert"), str(folder / "played"), f"value={value / 'value'}"]
    run(labelled, "label", *words, f"output={labelled}", f"positive={options.positive}")
    return [
        f"algorithm.demonstrations.mixture={mixture.replace(str(folder), str(labelled))}",
        "algorithm.demonstrations.dataset=null",
        *common,
    ]


def successes(folder: Path) -> list[bool]:
    document = json.loads((folder / "evaluation" / "after.json").read_text())
    return [bool(episode["success"]) for episode in document["greedy"]["episodes"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="PushCube")
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recorded", type=int, default=200)
    parser.add_argument("--weak", type=int, default=60)
    parser.add_argument("--positive", type=float, default=0.3)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    played: dict[str, list[list[bool]]] = {kind: [] for kind in KINDS}
    for seed in range(options.seeds):
        folder = options.folder.absolute() / f"seed_{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        words = recorded(folder, seed, options)
        for kind, keys in KINDS.items():
            target = folder / kind.replace(" ", "_").replace(",", "")
            steps = [f"iterations={options.iterations}", f"episodes={options.episodes}"]
            trained = ["recipe=maniskill_recap", *keys, *words, *steps, *SMALL]
            run(target / "report.html", "train", *trained, f"run_dir={target}")
            played[kind].append(successes(target))
            print(seed, kind, sum(played[kind][-1]), flush=True)
    print_table(played)


def print_table(played: dict[str, list[list[bool]]]) -> None:
    """Print successes by seed, and the difference to imitation of everything, over all seeds."""
    seeds = range(len(next(iter(played.values()))))
    print(f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | difference in points (95 %) |")
    print("|" + "---|" * (len(seeds) + 2))
    first = [success for seed in played["imitation of everything"] for success in seed]
    for kind, results in played.items():
        rates = " | ".join(f"{100 * sum(result) / len(result):.0f} %" for result in results)
        whole = [success for result in results for success in result]
        difference, bounds = paired_difference(first, whole)
        low, high = (100 * bound for bound in bounds)
        said = "" if whole is first else f"{100 * difference:+.1f} ({low:+.1f} to {high:+.1f})"
        print(f"| {kind} | {rates} | {said} |")


if __name__ == "__main__":
    main()
