"""The verbs of the command line: what each is for, where its code is, and which words it takes.

The rest of a verb's help is in ``help.py``.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """``use``: what a user wants, the heading in the overview. ``module``: in ``rlinf_vla``.

    ``composed``: Hydra composes its recipe, and its module gets the configuration; otherwise it
    gets the words. ``keys``: it takes keys of a recipe. ``words``: from which its first word is
    chosen; the module of a word of ``bench`` has that name.
    """

    use: str
    purpose: str
    module: str
    composed: bool = False
    keys: bool = False
    words: tuple[str, ...] = ()


def _with_recipe(use: str, purpose: str, module: str, words: tuple[str, ...] = ()) -> Verb:
    return Verb(use, purpose, module, composed=True, keys=True, words=words)


TRAIN = "Train and evaluate"
DATA = "Use a policy, make data"
SEE = "See what there is"
MACHINE = "This machine, a cluster"
EXTEND = "Extend, set up"
LISTS = ("recipes", "presets", "models", "envs", "tasks", "rewards", "robots")
BENCHES = ("rollout", "throughput", "policy", "update", "control", "load", "memory", "env", "soak")
ROBOT_VERBS = ("check", "home", "stop", "acknowledge", "run", "record", "replay")
PLUGINS = ("model", "env", "reward", "robot", "algorithm")

VERBS = {
    "train": _with_recipe(
        TRAIN, "reinforcement learning, imitation, success classifiers", "cli.train"
    ),
    "eval": _with_recipe(
        TRAIN, "success rate on fixed episodes, or a sweep over policies", "cli.eval"
    ),
    "verify": Verb(
        TRAIN, "repeat part of an evaluation and compare the outcomes", "evaluation.verify"
    ),
    "compare": Verb(TRAIN, "compare recorded evaluations", "evaluation.compare"),
    "serve": _with_recipe(DATA, "serve a policy over websockets and HTTP", "cli.serve"),
    "export": _with_recipe(
        DATA, "merge a checkpoint into the model's official layout", "cli.export"
    ),
    "push": Verb(DATA, "share a checkpoint, model or dataset on the Hugging Face Hub", "cli.push"),
    "pull": Verb(DATA, "download and check what was shared", "cli.pull"),
    "record": _with_recipe(DATA, "record a LeRobotDataset from a scripted expert", "cli.record"),
    "robot": Verb(
        DATA,
        "control an arm: check, home, stop, run, record, replay",
        "cli.robot",
        keys=True,
        words=ROBOT_VERBS,
    ),
    "list": Verb(SEE, "list what is installed", "cli.list", words=LISTS),
    "config": Verb(SEE, "show a recipe and where each value comes from", "cli.config", keys=True),
    "runs": Verb(
        SEE, "list, compare and prune runs", "cli.runs", words=("list", "compare", "prune")
    ),
    "view": Verb(SEE, "a local web page of a run, a sweep or a dataset", "view.command"),
    "doctor": Verb(MACHINE, "check this machine and fix what can be fixed", "cli.doctor"),
    "plan": _with_recipe(
        MACHINE, "predict the fastest placement on a cluster and its speed", "planner.search"
    ),
    "bench": _with_recipe(MACHINE, "measure this machine", "benchmarks", BENCHES),
    "new": Verb(EXTEND, "write a plug-in package to start from", "cli.new", words=PLUGINS),
    "completion": Verb(
        EXTEND,
        "print a script that completes command lines in a shell",
        "cli.completion",
        words=("bash", "zsh", "fish"),
    ),
}
UNCOMPOSED_BENCHES = ("env", "soak")
"""They compare several simulators, so they have no recipe."""
