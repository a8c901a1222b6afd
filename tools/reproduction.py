"""Write docs/results/reproduction.md: published results, settings and the commands to repeat them.

    python tools/reproduction.py

Predicts the time of an iteration on one machine with 8 H100 from published numbers. Needs no GPU
and no weights. Takes minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_memory import PRESETS

from rlinf_vla.cli import compose
from rlinf_vla.evaluation.published import PUBLISHED
from rlinf_vla.planner.choice import choose
from rlinf_vla.planner.prediction import Prediction
from rlinf_vla.planner.search import plan_problem
from rlinf_vla.runtime import recipes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "reproduction.md"
SETTING = re.compile(r"^ *(?P<key>\w+): (?P<value>\S.*?)(?: # (?P<source>.*))?$")
LIBERO = "recipe=libero_grpo"
AS_RLINF = "model.options.stop_token=false model.options.center_crop=false model.options.resize=processor"
SHARDED = ("cluster.trainer_sharding=full", "cluster.gradient_checkpointing=true")


@dataclass(frozen=True)
class Run:
    """``keys``: of training. ``control_steps``: of the published run, None if it does not say.

    ``full``: all weights of a 7B network are trained, which takes sharding.
    """

    preset: str
    keys: str
    method: str
    control_steps: int | None = None
    full: bool = False


MANISKILL = (
    "env.task=TASK env.episode_limit=80 env.image_size=224 env.control_mode=pd_ee_delta_pose env.backend=gpu model.options.dtype=bfloat16"
)
RUNS = {
    "rlinf_openvla": (
        Run(
            "rl4vla",
            f"recipe=maniskill_ppo model=openvla model.checkpoint=hf://gen-robot/openvla-7b-rlvla-warmup {MANISKILL}",
            "rl4vla",
            2_000_000,
        ),
        Run(
            "rlinf_ppo_openvla",
            f"recipe=maniskill_ppo model=openvla model.checkpoint=hf://gen-robot/openvla-7b-rlvla-warmup {MANISKILL}",
            "ppo",
        ),
        Run(
            "rlinf_grpo_openvla",
            f"recipe=maniskill_grpo model=openvla model.checkpoint=hf://gen-robot/openvla-7b-rlvla-warmup {MANISKILL}",
            "grpo",
            full=True,
        ),
    ),
    "rlinf_openvla_oft": tuple(
        Run(
            f"rlinf_{method}_openvla_oft",
            f"recipe=maniskill_{method} model=openvla_oft model.checkpoint=hf://RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main {MANISKILL}",
            method,
        )
        for method in ("ppo", "grpo")
    ),
    "rlinf_libero": (
        Run(
            "rlinf_libero_grpo_openvla_oft",
            f"{LIBERO} model.checkpoint=hf://Haozhan72/Openvla-oft-SFT-libero-spatial-traj1 {AS_RLINF}",
            "grpo",
            full=True,
        ),
    ),
    "simplevla_rl": (Run("simplevla_rl", f"{LIBERO} model.checkpoint=hf://Haozhan72/Openvla-oft-SFT-libero10-trajall", "grpo", full=True),),
    "pirl_pi0": (
        Run("pirl_flow_sde", "recipe=libero_ppo_pi0 model.checkpoint=hf://RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT", "ppo"),
        Run("pirl_grpo", f"{LIBERO} model=pi0 model.checkpoint=hf://RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT", "grpo"),
    ),
    "pirl_pi05": (Run("pirl_flow_sde_pi05", "recipe=libero_ppo_pi0 model.checkpoint=hf://RLinf/RLinf-Pi05-LIBERO-SFT", "ppo"),),
}
"""Table of PUBLISHED -> the runs that repeat it."""


def predict(run: Run) -> tuple[Prediction, int]:
    """Return the fastest plan on ``cluster=8gpu``, and the control steps of an iteration."""
    length = ("env.episode_limit=80",) if MANISKILL in run.keys else ()
    keys = [*PRESETS[run.preset], f"preset={run.preset}", "model.options.dtype=bfloat16", "cluster=8gpu", *length, *SHARDED * run.full]
    problem, _ = plan_problem(recipes.read(compose.load("plan", keys)))
    best = choose(problem).best
    return best, round(best.steps_per_s * best.seconds)


def predicted(run: Run) -> str:
    best, steps = predict(run)
    hours = 8 * best.seconds / 3600
    total = "The number of control steps is not stated"
    if run.control_steps is not None:
        iterations = run.control_steps / steps
        total = f"{run.control_steps:,} control steps are {iterations:.0f} iterations, **{hours * iterations:.0f} GPU hours**"
    return f"Predicted on 8 H100: {best.seconds:.0f} s per iteration of {steps:,} control steps ({hours:.2f} GPU hours). {total}."


def settings(preset: str) -> Iterator[str]:
    """Yield the preset's comment, and a row for each value that it sets, with its source."""
    lines = (ROOT / "recipes" / "preset" / f"{preset}.yaml").read_text().splitlines()
    yield from (line.removeprefix("# ") for line in lines[1:] if line.startswith("# "))
    yield from ("", "| key | value | source |", "|---|---|---|")
    section: list[str] = []
    for line in lines:
        indent, name = (len(line) - len(line.lstrip())) // 2, line.strip().rstrip(":")
        if line.startswith("#") or not name:
            continue
        section = [*section[:indent], name]
        if section[0] != "preset" and (found := SETTING.match(line)):
            key = ".".join([*section[:indent], found["key"]])
            yield f"| `{key}` | {found['value']} | {found['source'] or 'as the others'} |"


def sheet(name: str) -> Iterator[str]:
    paper = PUBLISHED[name]
    yield from (f"## {paper.title}", "", f"Source: {paper.source}. Percent; {paper.note}.", "")
    yield f"| | {' | '.join(paper.columns)} |"
    yield "|---|" + "---|" * len(paper.columns)
    for number, row in enumerate(paper.rows):
        yield f"| {row} | {' | '.join(f'{rates[number]:.1f}' for rates in paper.columns.values())} |"
    for run in RUNS[name]:
        result = f"runs/{run.preset}/sweep/result.json"
        yield from ("", f"### `preset={run.preset}`", "", "```")
        sharded = f" {' '.join(SHARDED)}" if run.full else ""
        yield f"rlinf-vla train {run.keys} preset={run.preset} cluster=8gpu{sharded} run_dir=runs/{run.preset}"
        keys = f"checkpoint=null sweep.policies=[start,runs/{run.preset}] evaluation.modes=[greedy]"
        yield f"rlinf-vla eval run=runs/{run.preset} {keys} run_dir=runs/{run.preset}/sweep"
        columns = f"start={result}:start {run.method}={result}:{run.preset}"
        yield f"rlinf-vla compare {columns} --published {name} --output {run.preset}.json"
        yield from ("```", "")
        if "TASK" in run.keys:
            yield from ("`TASK` is a task that a plug-in registers in ManiSkill: the papers' own is not in it.", "")
        yield predicted(run)
        yield ""
        yield from settings(run.preset)


def main() -> None:
    head = """# Reproduction sheets

What published runs reported, their settings here with the source of each, the commands, and the
predicted time. **None of these runs has been made with this package.** `python tools/reproduction.py`
writes this page. Times are predicted from published numbers ([scale.md](scale.md) says how, and how
they depend on the assumptions). What cannot be expressed is in [presets.md](../presets.md), and so is
the reason why the ManiSkill checkpoints of OpenVLA are refused today.

The last command of each run writes a JSON file with all episodes' rates, intervals and verdicts: the
result of a lab that repeats it.
"""
    lines = [head.rstrip(), *(line for name in PUBLISHED for line in ("", *sheet(name)))]
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
