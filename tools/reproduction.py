"""Write docs/results/reproduction.md: published results, and the commands that repeat them.

    python tools/reproduction.py

Reads the recipes ``repro_*``. Predicts the time of an iteration on one machine with 8 H100 from
published numbers. Needs no GPU and no weights. Takes minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rlinf_vla.cli import compose
from rlinf_vla.cli.list import recipe_names
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.io import step_name
from rlinf_vla.features.planner.choice import choose
from rlinf_vla.features.planner.prediction import Prediction
from rlinf_vla.features.planner.search import plan_problem
from rlinf_vla.features.sweeps.published import tables
from rlinf_vla.runtime import recipes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "reproduction.md"
SUITES = ("spatial", "object", "goal", "10")
METHODS = ("ppo", "grpo")
RUNS: dict[str, dict[str, str]] = {
    "rlinf_openvla": {
        "repro_rl4vla_ppo": "rl4vla",
        **{f"repro_rlinf_openvla_{method}": method for method in METHODS},
    },
    "rlinf_openvla_oft": {f"repro_rlinf_oft_{method}": method for method in METHODS},
    "rlinf_libero": {"repro_rlinf_libero_130_grpo": "grpo"},
    "rlinf_libero_traj1": {f"repro_rlinf_libero_{suite}_grpo": "grpo" for suite in SUITES},
    "simplevla_rl": {f"repro_simplevla_{suite}": "grpo" for suite in SUITES},
    "simplevla_rl_traj1": {"repro_simplevla_10_traj1": "grpo"},
    **{
        f"pirl_{model}": {
            f"repro_pirl_{model}_{suite}_{method}": method
            for suite in SUITES
            for method in (*METHODS, "noise")
        }
        for model in ("pi0", "pi05")
    },
    **{
        f"pirl_maniskill_{model}": {
            f"repro_pirl_{model}_maniskill_{noise}": noise for noise in ("sde", "noise")
        }
        for model in ("pi0", "pi05")
    },
}
"""Published table -> the recipes that repeat it, and their columns."""
PREDICTED: dict[str, tuple[Prediction, int]] = {}
"""Settings that the time depends on -> what is predicted."""
HEAD = """# Reproduction sheets

What published runs reported, and the commands that repeat them. **None of these runs has been made
with this package and the official weights.** Each training command is composed and checked, and has
run an iteration, on stand-ins of the repositories that it names (`tests/cli/test_reproductions.py`,
where the three commands of a run are played in sequence, too).
`python tools/reproduction.py` writes this page. Settings, each with its source, are in the recipes
(`recipes/recipe/NAME.yaml`) and in the [presets](../presets.md) that they name; what cannot be
expressed is there, too.

Hours are predicted for 8 H100 from published numbers ([scale.md](scale.md) says how, and how they
depend on the assumptions). Where a paper does not say how long it trained, they are those of the
limit in its configuration file.

The last command of each run writes a JSON file with all episodes' rates, intervals and verdicts: the
result of a lab that repeats it. `rlinf-vla eval recipe=NAME_eval` evaluates the authors' own
checkpoint, where they published one.
"""


@cache
def recipe_of(name: str, *keys: str) -> Recipe:
    verb = "eval" if name.endswith("_eval") else "train"
    return recipes.read(compose.load(verb, [f"recipe={name}", "cluster=8gpu", *keys]))


def size_of(name: str) -> str:
    """The packaged sizes of the network that a recipe trains."""
    if "pirl" not in name:
        return "asset://openvla_7b"
    return "asset://pi05_3b" if "pi05" in name else "asset://pi0_3b"


def predict(name: str) -> tuple[Prediction, int]:
    """Return the fastest plan on ``cluster=8gpu``, and the control steps of an iteration.

    Recipes that differ in suite and checkpoint alone take the same time.
    """
    recipe, size = recipe_of(name), size_of(name)
    trained = (
        recipe.preset,
        recipe.rollout,
        recipe.algorithm,
        recipe.cluster,
        recipe.model.options,
        recipe.model.lora,
    )
    settings = f"{trained} {size} {recipe.env.episode_limit} {recipe.env.num_envs}"
    if settings not in PREDICTED:
        problem, _ = plan_problem(
            recipe_of(name, f"model.checkpoint={size}", "model.lora.adapter=null")
        )
        best = choose(problem).best
        PREDICTED[settings] = best, round(best.steps_per_s * best.seconds)
    return PREDICTED[settings]


def predicted(name: str) -> str:
    best, steps = predict(name)
    iterations = recipe_of(name).iterations
    hours = 8 * best.seconds / 3600
    length = f"{best.seconds:.0f} s per iteration of {steps:,} control steps"
    return f"{length}; {iterations} iterations, **{hours * iterations:,.0f} GPU hours**"


@cache
def evaluation_tasks() -> str:
    """The key of the tasks that RLinf evaluates on PutOnPlateInScene25."""
    tasks = recipe_of("repro_rl4vla_ppo_eval").env.tasks
    return f"env.tasks={json.dumps(tasks, separators=(',', ':'))}".replace('"', "")


def commands(table: str, name: str, method: str) -> Iterator[str]:
    recipe = recipe_of(name)
    run = f"runs/{name}"
    sampled = recipe.model.name != "pi0" and recipe.evaluation.temperature is not None
    keys = f"checkpoint=null sweep.policies=[start,{run}] evaluation.modes=[{'sampled' if sampled else 'greedy'}]"
    count = 50 if recipe.env.name == "libero" else 64
    together = f"env.num_envs={count} rollout.batch_size={count} sweep.block={count} model.options.prompt_length=null"
    episodes = (
        "episodes=50" if recipe.env.name == "libero" else f"episodes=320 {evaluation_tasks()}"
    )
    yield f"rlinf-vla train recipe={name} cluster=8gpu run_dir={run}"
    yield f"rlinf-vla eval run={run} {keys} {episodes} {together} run_dir={run}/sweep"
    result = f"{run}/sweep/result.json"
    last = step_name(recipe.iterations)
    yield f"rlinf-vla compare start={result}:start {method}={result}:{last} --published {table} --output {name}.json"


def sheet(table: str) -> Iterator[str]:
    paper = tables()[table]
    descriptions = recipe_names("recipe")
    yield from (f"## {paper.title}", "", f"Source: {paper.source}. Percent; {paper.note}.", "")
    yield f"| | {' | '.join(paper.columns)} |"
    yield "|---|" + "---|" * len(paper.columns)
    for number, row in enumerate(paper.rows):
        yield f"| {row} | {' | '.join(f'{rates[number]:.1f}' for rates in paper.columns.values())} |"
    for name, method in RUNS[table].items():
        recipe = recipe_of(name)
        start = recipe.model.checkpoint + (
            "" if recipe.model.lora.adapter is None else f" with {recipe.model.lora.adapter}"
        )
        yield from (
            "",
            f"### `{name}`",
            "",
            f"{descriptions[name]} Start: {start}. Preset: `{recipe.preset.name}`.",
            "",
            "```",
        )
        yield from commands(table, name, method)
        yield from ("```", "", f"Predicted: {predicted(name)}.")
        if f"{name}_eval" in descriptions:
            yield from (
                "",
                f"Evaluation alone: `rlinf-vla eval recipe={name}_eval`, of {recipe_of(f'{name}_eval').model.checkpoint}.",
            )


def main() -> None:
    lines = [HEAD.rstrip(), *(line for table in RUNS for line in ("", *sheet(table)))]
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
