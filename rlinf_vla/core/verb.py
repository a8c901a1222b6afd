"""What a verb of the command line says of itself. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "Train and evaluate"
DATA = "Use a policy, make data"
SEE = "See what there is"
MACHINE = "This machine, a cluster"
EXTEND = "Extend, set up"
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
WITH_RECIPE = ("{recipe=NAME|run=RUN} [KEY=VALUE ...] [OPTIONS]",)


@dataclass(frozen=True)
class Help:
    """Help of a verb. ``usage`` and ``examples`` are without ``rlinf-vla VERB``."""

    usage: tuple[str, ...]
    options: Options
    examples: tuple[str, str, str]
    note: str = ""


@dataclass(frozen=True)
class Verb:
    """``use``: what a user wants, the heading in the overview. ``module``: where ``run`` is.

    ``composed``: Hydra composes its recipe, and its module gets the configuration; otherwise it
    gets the words. ``keys``: it takes keys of a recipe. ``words``: from which its first word is
    chosen. ``programs``: each of these words has a module of its own in the package ``module``;
    those in ``uncomposed`` have no recipe.
    """

    use: str
    purpose: str
    module: str
    help: Help
    composed: bool = False
    keys: bool = False
    words: tuple[str, ...] = ()
    programs: bool = False
    uncomposed: tuple[str, ...] = ()
