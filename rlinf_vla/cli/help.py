"""Help texts of the command line: one form for all verbs, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf_vla.cli.verbs import LISTS, PLUGINS, VERBS

WIDTH = 80
EVERY = (
    "--log-level LEVEL",
    "debug, info, warning or error: what is reported on stderr, by libraries too",
)
"""An option of all verbs."""
Options = tuple[tuple[str, str], ...]
JSON: Options = (("--json", "print one JSON document on stdout, and nothing else there"),)
RUN: Options = (
    ("recipe=NAME", "a packaged recipe (rlinf-vla list recipes)"),
    ("run=RUN", "the saved recipe of a run: its directory, or its name in runs/"),
    ("KEY=VALUE", "override any key; rlinf-vla config recipe=NAME lists them"),
)
FOLDER: Options = (("--config-dir DIR", "also find recipes in DIR/recipe/NAME.yaml"),)
RECIPE: Options = (
    *RUN,
    *FOLDER,
    ("--cfg job", "print the composed recipe, run nothing"),
    ("--multirun", "run every combination of KEY=A,B"),
)


@dataclass(frozen=True)
class Help:
    """Help of a verb. ``usage`` and ``examples`` are without ``rlinf-vla VERB``."""

    usage: tuple[str, ...]
    options: Options
    examples: tuple[str, str, str]
    note: str = ""


WITH_RECIPE = ("{recipe=NAME|run=RUN} [KEY=VALUE ...] [OPTIONS]",)
HELP: dict[str, Help] = {
    "train": Help(
        WITH_RECIPE,
        (*RECIPE, ("--dry-run", "print plan and memory of each device; load nothing")),
        (
            "recipe=maniskill_ppo",
            "run=maniskill_ppo/20261101-100000",
            "recipe=maniskill_ppo cluster=1gpu --dry-run",
        ),
        "run=RUN continues the run from its newest checkpoint.",
    ),
    "eval": Help(
        WITH_RECIPE,
        (*RECIPE, ("--dry-run", "print what would be played; load nothing"), *JSON),
        ("run=RUN", "recipe=maniskill_eval episodes=50", "run=RUN/checkpoints/step_000030 --json"),
        "run=RUN evaluates its newest checkpoint; sweep.policies makes a sweep.",
    ),
    "verify": Help(
        ("RESULT.json [--episodes N] [KEY=VALUE ...]",),
        (
            ("RESULT.json", "result of a sweep"),
            ("--episodes N", "episodes, spread over all policies and tasks (20)"),
            (
                "KEY=VALUE",
                "programs and paths that the file's recipe names; they are taken only from here, such as env.python=PATH",
            ),
        ),
        (
            "RESULT.json",
            "RESULT.json --episodes 50",
            "RESULT.json env.python=/opt/isaac/bin/python",
        ),
        "Exit code: 0 if the outcomes agree, 1 if they do not.",
    ),
    "compare": Help(
        ("NAME=FILE[:COLUMN][,FILE ...] ... [OPTIONS]",),
        (
            ("FILE", "evaluation/NAME.json of a run, or result.json of a sweep"),
            ("COLUMN", "a mode (sampled, greedy), or a policy of a sweep"),
            (
                "--output FILE.json",
                "write all values there, with performance profiles and times to success",
            ),
            ("--figure FILE.svg", "draw them there (.svg, .png or .pdf)"),
            ("--published NAME", "lay the rates that a paper reports beside them"),
            *JSON,
        ),
        (
            "sft=a/evaluation/after.json ppo=b/evaluation/after.json",
            "ppo=a.json,b.json grpo=c.json,d.json --figure rates.svg",
            "a=result.json:start b=result.json:step_000030 --json",
        ),
    ),
    "record": Help(
        ("recipe=NAME output=DIR [KEY=VALUE ...] [OPTIONS]",),
        (*RECIPE, ("output=DIR", "directory of the new LeRobotDataset")),
        (
            "recipe=maniskill_sft output=pushes",
            "recipe=maniskill_sft output=images record.video=false",
            "recipe=libero_sft output=all record.failures=true",
        ),
    ),
    "export": Help(
        ("run=RUN output=DIR [KEY=VALUE ...] [OPTIONS]",),
        (*RECIPE, ("output=DIR", "new directory of the merged model")),
        (
            "run=RUN output=merged",
            "run=RUN/checkpoints/step_000030 output=merged",
            "run=RUN output=merged output_dtype=bfloat16",
        ),
    ),
    "push": Help(
        ("{RUN|CHECKPOINT|MODEL|DATASET} ORG/NAME [OPTIONS]",),
        (
            ("RUN", "directory of a run, or its name in runs/: its newest checkpoint"),
            ("CHECKPOINT", "RUN/checkpoints/step_N"),
            ("MODEL", "directory that export wrote"),
            ("DATASET", "directory of a LeRobotDataset"),
            (
                "--license KEY",
                "licence of what is shared; a model: that of its base model's card, if left out",
            ),
            (
                "--base-model ORG/NAME",
                "where the initial model is, if the recipe names a directory",
            ),
            ("--dataset ORG/NAME", "a dataset that the model was trained on; may be repeated"),
            ("--private", "make the new repository private"),
            (
                "--revision BRANCH",
                "commit to this branch of a repository that may exist (main, or a new one)",
            ),
            ("--dry-run", "list the files and show the card; send nothing"),
        ),
        (
            "maniskill_ppo/20261101 me/push --dry-run",
            "RUN me/push --license mit --private",
            "pushes me/pushes --license cc-by-4.0",
        ),
        "Optimiser state, replay, pickles, code and paths of this machine are never sent.",
    ),
    "pull": Help(
        ("ORG/NAME[@REVISION] DIRECTORY",),
        (("REVISION", "branch, tag or commit (main)"), ("DIRECTORY", "new or empty")),
        ("me/push push", "me/push@v2 push", "lerobot/pusht pusht"),
        "Downloads data only, never code, and refuses what is damaged.",
    ),
    "serve": Help(
        WITH_RECIPE,
        RECIPE,
        (
            "run=RUN",
            "run=RUN serve.port=9000 serve.protocol=openpi",
            "run=RUN serve.max_batch_size=8",
        ),
    ),
    "plan": Help(
        WITH_RECIPE,
        (
            *RECIPE,
            ("output=FILE", "write the recipe under the chosen plan; train plan=FILE"),
            *JSON,
        ),
        (
            "recipe=maniskill_ppo",
            "recipe=maniskill_ppo env.backend=gpu cluster=8gpu",
            "recipe=maniskill_ppo output=plan.yaml --json",
        ),
    ),
    "bench": Help(
        (
            "{rollout|throughput|policy|update|control|memory} recipe=NAME",
            "{env|soak} env=NAME[,NAME ...] [env.KEY=VALUE ...]",
            "load",
        ),
        RECIPE,
        ("rollout recipe=maniskill_ppo", "env env=maniskill env.num_envs=8", "load"),
    ),
    "robot": Help(
        (
            "{check|home|stop} robot=NAME [robot.KEY=VALUE ...]",
            "acknowledge robot=NAME operator=PERSON",
            "{run|record|replay} {recipe=NAME|run=RUN} [KEY=VALUE ...]",
        ),
        (
            *RECIPE,
            ("robot=NAME", "a robot plug-in (rlinf-vla list robots)"),
            ("episode=N", "replay: number of the episode, from 0"),
        ),
        (
            "check robot=franka_sim",
            "run recipe=franka_remote",
            "record recipe=franka_rlpd output=DIR",
        ),
        "stop without robot=NAME stops all arms of this machine, as rlinf-vla-stop does.",
    ),
    "new": Help(
        (f"{{{'|'.join(PLUGINS)}}} NAME",),
        (("NAME", "name of the plug-in, its package and the new folder"),),
        ("env my_env", "algorithm my_ppo", "robot my_arm"),
    ),
    "runs": Help(
        (
            "[list] [RECIPE] [--json]",
            "compare RUN RUN [--json]",
            "prune [RECIPE] [--keep N] [--yes] [--json]",
        ),
        (
            ("RUN", "directory of a run, or its name in runs/"),
            ("--keep N", "newest checkpoints of each run to keep (1)"),
            ("--yes", "remove; without it, prune only says what it would remove"),
            *JSON,
        ),
        (
            "",
            "compare maniskill_ppo/20261101 maniskill_ppo/20261102",
            "prune maniskill_ppo --keep 2",
        ),
    ),
    "view": Help(
        ("{RUN|SWEEP|DATASET} [OPTIONS]",),
        (
            ("RUN", "directory of a run, or its name in runs/"),
            ("SWEEP", "run directory of an evaluation sweep, or its name in runs/"),
            ("DATASET", "directory of a LeRobotDataset"),
            ("--port N", "port to listen on (8090); 0: any free one"),
            (
                "--host HOST",
                "address to listen on (127.0.0.1); others than this machine's need --token",
            ),
            ("--token", "only who knows the printed address may see the page"),
            ("--open", "open the page in a browser"),
        ),
        (
            "maniskill_ppo/20261101-100000",
            "runs/maniskill_eval/20261101-100000 --open",
            "pushes --port 8091",
        ),
        "The page follows a run that goes on. Ctrl-C ends; nothing is written.",
    ),
    "config": Help(
        ("[KEY ...] {recipe=NAME|run=RUN} [KEY=VALUE ...] [--json]",),
        (("KEY", "show only this key or node, or those of this name"), *RUN, *FOLDER, *JSON),
        ("recipe=maniskill_ppo", "algorithm recipe=maniskill_ppo preset=rl4vla", "run=RUN --json"),
        "Of several files that set a key, the last one counts and is shown.",
    ),
    "doctor": Help(
        ("[--fix|--json]",),
        (("--fix", "repair what can be repaired"), *JSON),
        ("", "--fix", "--json"),
        "Exit code: 1 while a required check fails.",
    ),
    "list": Help(
        (f"[{'|'.join(LISTS)}] ... [--json]",),
        JSON,
        ("", "recipes presets", "tasks --json"),
    ),
    "completion": Help(
        ("{bash|zsh|fish}",),
        (
            ("bash", "eval the output in ~/.bashrc"),
            ("zsh", "eval the output in ~/.zshrc, after compinit"),
            ("fish", "write the output into ~/.config/fish/completions/rlinf-vla.fish"),
        ),
        ("bash", "zsh", "fish"),
        "Completes verbs, options, recipes and other choices, runs, and keys.",
    ),
}


def help_of(verb: str) -> str:
    """Return purpose, usage, options and three examples of a verb."""
    page = HELP[verb]
    command = f"rlinf-vla {verb}"
    lines = [*textwrap.wrap(f"{command}: {VERBS[verb].purpose}", WIDTH), "", "Usage:"]
    lines += [f"  {command} {usage}".rstrip() for usage in page.usage]
    lines += ["", "Options:", *_pairs(dict((*page.options, EVERY)))]
    lines += ["", "Examples:", *(f"  {command} {example}".rstrip() for example in page.examples)]
    return "\n".join([*lines, *(["", *textwrap.wrap(page.note, WIDTH)] if page.note else [])])


def overview(version: str) -> str:
    """Return the help of the program: its verbs, each with its purpose, by use."""
    lines = [
        f"rlinf-vla {version}: fine-tune vision-language-action policies with",
        "reinforcement learning",
        "",
    ]
    lines += ["Usage: rlinf-vla VERB [recipe=NAME|run=RUN] [KEY=VALUE ...] [OPTIONS]"]
    for use in dict.fromkeys(verb.use for verb in VERBS.values()):
        lines += [
            "",
            f"{use}:",
            *_pairs({name: verb.purpose for name, verb in VERBS.items() if verb.use == use}, 11),
        ]
    return "\n".join([*lines, "", "rlinf-vla VERB --help: usage, options and examples of a verb."])


def _pairs(pairs: Mapping[str, str], width: int | None = None) -> list[str]:
    """Return two columns, the second wrapped."""
    width = width or max(map(len, pairs)) + 1
    lines = []
    for name, text in pairs.items():
        first, *others = textwrap.wrap(text, WIDTH - width - 3)
        lines += [f"  {name:{width}} {first}", *(f"  {'':{width}} {other}" for other in others)]
    return lines
