"""The verbs of the command line.

Those of features beside the trainer are found by entry points of ``rlinf_vla.verbs``.
"""

from __future__ import annotations

from rlinf_vla.core import plugins
from rlinf_vla.core.verb import (
    DATA,
    EXTEND,
    FOLDER,
    JSON,
    MACHINE,
    RECIPE,
    RUN,
    SEE,
    TRAIN,
    WITH_RECIPE,
    Help,
    Verb,
)

LISTS = ("recipes", "presets", "models", "envs", "tasks", "rewards", "robots")
PLUGINS = ("model", "env", "reward", "robot", "algorithm")

TRAINERS = {
    "train": Verb(
        TRAIN,
        "reinforcement learning, imitation, success classifiers",
        "rlinf_vla.cli.train",
        Help(
            WITH_RECIPE,
            (*RECIPE, ("--dry-run", "print plan and memory of each device; load nothing")),
            (
                "recipe=maniskill_ppo",
                "run=maniskill_ppo/20261101-100000",
                "recipe=maniskill_ppo cluster=1gpu --dry-run",
            ),
            "run=RUN continues the run from its newest checkpoint.",
        ),
        composed=True,
        keys=True,
    ),
    "eval": Verb(
        TRAIN,
        "success rate on fixed episodes, or a sweep over policies",
        "rlinf_vla.cli.eval",
        Help(
            WITH_RECIPE,
            (*RECIPE, ("--dry-run", "print what would be played; load nothing"), *JSON),
            (
                "run=RUN",
                "recipe=maniskill_eval episodes=50",
                "run=RUN/checkpoints/step_000030 --json",
            ),
            "run=RUN evaluates its newest checkpoint; sweep.policies makes a sweep.",
        ),
        composed=True,
        keys=True,
    ),
    "export": Verb(
        DATA,
        "merge a checkpoint into the model's official layout",
        "rlinf_vla.cli.export",
        Help(
            ("run=RUN output=DIR [KEY=VALUE ...] [OPTIONS]",),
            (*RECIPE, ("output=DIR", "new directory of the merged model")),
            (
                "run=RUN output=merged",
                "run=RUN/checkpoints/step_000030 output=merged",
                "run=RUN output=merged output_dtype=bfloat16",
            ),
        ),
        composed=True,
        keys=True,
    ),
    "push": Verb(
        DATA,
        "share a checkpoint, model or dataset on the Hugging Face Hub",
        "rlinf_vla.cli.push",
        Help(
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
    ),
    "pull": Verb(
        DATA,
        "download and check what was shared",
        "rlinf_vla.cli.pull",
        Help(
            ("ORG/NAME[@REVISION] DIRECTORY",),
            (("REVISION", "branch, tag or commit (main)"), ("DIRECTORY", "new or empty")),
            ("me/push push", "me/push@v2 push", "lerobot/pusht pusht"),
            "Downloads data only, never code, and refuses what is damaged.",
        ),
    ),
    "record": Verb(
        DATA,
        "record a LeRobotDataset from a scripted expert",
        "rlinf_vla.cli.record",
        Help(
            ("recipe=NAME output=DIR [KEY=VALUE ...] [OPTIONS]",),
            (*RECIPE, ("output=DIR", "directory of the new LeRobotDataset")),
            (
                "recipe=maniskill_sft output=pushes",
                "recipe=maniskill_sft output=images record.video=false",
                "recipe=libero_sft output=all record.failures=true",
            ),
        ),
        composed=True,
        keys=True,
    ),
    "label": Verb(
        DATA,
        "write values and advantages into a copy of a dataset",
        "rlinf_vla.cli.label",
        Help(
            ("DATASET [DATASET ...] value=DIR output=DIR [KEY=VALUE ...]",),
            (
                ("DATASET", "directory of a LeRobotDataset; several are labelled as one"),
                ("value=DIR", "model of values: the directory value of a run with algorithm=value"),
                (
                    "output=DIR",
                    "directory of the labelled copy; of several, with a folder for each",
                ),
                ("positive=0.3", "share of each task's frames that are labelled positive"),
                ("steps=10", "actions whose advantage counts"),
                ("human_key=NAME", "feature that is true where a person acted: always positive"),
                ("all_succeed=true", "every episode succeeds; next.success is not read"),
                ("action_key, state_key, cameras", "as of algorithm.demonstrations"),
                ("device=cuda", "where the model computes (cpu)"),
            ),
            (
                "mixed value=RUN/value output=labelled",
                "mixed value=RUN/value output=labelled positive=0.4 steps=50",
                "robot value=RUN/value output=labelled human_key=intervention",
            ),
            "rlinf-vla view shows the labels along the film.",
        ),
    ),
    "data": Verb(
        DATA,
        "statistics of datasets, as checkpoints have them",
        "rlinf_vla.cli.data",
        Help(
            ("statistics DATASET [DATASET ...] output=DIR [KEY=VALUE ...]",),
            (
                ("DATASET", "directory of a LeRobotDataset; several count as one"),
                ("output=DIR", "where norm_stats.json (or the files of layout) is written"),
                ("layout=NAME", "openpi, openvla or lerobot"),
                ("horizon=N", "actions of a chunk, the checkpoint's action_horizon"),
                ("delta_mask=[6,-1]", "actions relative to the state, and absolute ones"),
                ("mask=[6,-1]", "openvla: dimensions that are scaled, and others"),
                ("action_key=NAME", "feature of actions (action)"),
                ("state_key=NAME", "feature of states (observation.state)"),
            ),
            (
                "statistics pushes output=stats horizon=50",
                "statistics pushes output=stats horizon=50 delta_mask=[6,-1]",
                "statistics pushes output=stats layout=openvla mask=[6,-1]",
            ),
            "Of openvla, each dataset has an entry of its own, by its directory's name.",
        ),
        words=("statistics",),
        programs=True,
        uncomposed=("statistics",),
    ),
    "list": Verb(
        SEE,
        "list what is installed",
        "rlinf_vla.cli.list",
        Help(
            (f"[{'|'.join(LISTS)}] ... [--json]",),
            JSON,
            ("", "recipes presets", "tasks --json"),
        ),
        words=LISTS,
    ),
    "config": Verb(
        SEE,
        "show a recipe and where each value comes from",
        "rlinf_vla.cli.config",
        Help(
            ("[KEY ...] {recipe=NAME|run=RUN} [KEY=VALUE ...] [--json]",),
            (("KEY", "show only this key or node, or those of this name"), *RUN, *FOLDER, *JSON),
            (
                "recipe=maniskill_ppo",
                "algorithm recipe=maniskill_ppo preset=rl4vla",
                "run=RUN --json",
            ),
            "Of several files that set a key, the last one counts and is shown.",
        ),
        keys=True,
    ),
    "diagnose": Verb(
        SEE,
        "say what is conspicuous in a run, and which keys to change",
        "rlinf_vla.cli.diagnose",
        Help(
            ("RUN [--json]",),
            (("RUN", "directory of a run, or its name in runs/"), *JSON),
            ("maniskill_ppo/20261101-100000", "RUN", "RUN --json"),
            "The exit code is 0 with verdicts, too.",
        ),
    ),
    "doctor": Verb(
        MACHINE,
        "check this machine and fix what can be fixed",
        "rlinf_vla.cli.doctor",
        Help(
            ("[--fix|--json]",),
            (("--fix", "repair what can be repaired"), *JSON),
            ("", "--fix", "--json"),
            "Exit code: 1 while a required check fails.",
        ),
    ),
    "new": Verb(
        EXTEND,
        "write a plug-in package to start from",
        "rlinf_vla.cli.new",
        Help(
            (f"{{{'|'.join(PLUGINS)}}} NAME",),
            (("NAME", "name of the plug-in, its package and the new folder"),),
            ("env my_env", "algorithm my_ppo", "robot my_arm"),
        ),
        words=PLUGINS,
    ),
    "completion": Verb(
        EXTEND,
        "print a script that completes command lines in a shell",
        "rlinf_vla.cli.completion",
        Help(
            ("{bash|zsh|fish}",),
            (
                ("bash", "eval the output in ~/.bashrc"),
                ("zsh", "eval the output in ~/.zshrc, after compinit"),
                ("fish", "write the output into ~/.config/fish/completions/rlinf-vla.fish"),
            ),
            ("bash", "zsh", "fish"),
            "Completes verbs, options, recipes and other choices, runs, and keys.",
        ),
        words=("bash", "zsh", "fish"),
    ),
}
"""Verbs of the trainer itself."""


def verbs() -> dict[str, Verb]:
    """Return all verbs by name."""
    return TRAINERS | dict(plugins.verbs())
