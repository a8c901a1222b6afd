"""Compose a recipe from a command line with Hydra, and turn Hydra's errors into one line."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import hydra
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vla.cli.verbs import verbs
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime import recipes

CONFIG_MODULE = "rlinf_vla.recipes"
FOLDER = "--config-dir"
HYDRAS = (
    "cfg",
    "multirun",
    "resolve",
    "package",
    "info",
    "shell_completion",
    "config_dir",
    "config_path",
    "config_name",
    "sc",
    "cd",
)
"""Hydra's own options."""
READERS = {
    "sweep": ("eval",),
    "serve": ("serve",),
    "record": ("record",),
    "output": ("record", "export", "plan"),
    "output_dtype": ("export",),
}
"""Node of a recipe -> the verbs that read it; benches and robots have names of their own here."""
CHOICES = ("recipe", "preset", "env", "robot", "model", "algorithm", "reward", "cluster")


def compose_and_run(
    verb: str, arguments: Sequence[str], command: Callable[[DictConfig], object]
) -> int:
    """Call ``command`` with the composed recipe. Hydra's flags work. Raises UserError."""
    saved = sys.argv
    sys.argv = [f"rlinf-vla {verb.replace('_', ' ')}", *arguments]  # it is saved with results
    try:
        refuse_dashes(arguments)
        overrides = with_folder(arguments)
        flagged = any(
            _is_flag(override) or re.match(r"[~+]*hydra[./@=](?!searchpath=)", override)
            for override in overrides
        )
        jobs = _by_hydra(verb, overrides) if flagged else [load(verb, overrides)]
        refuse_nodes_of_other_verbs(verb, overrides)
        if verb == "eval":
            for job in jobs:
                refuse_task_of_sweep(job, overrides)
        if len(jobs) > 1:
            from rlinf_vla.cli.jobs import run_jobs  # imports PyTorch

            run_jobs(jobs, command)
        elif jobs:
            command(jobs[0])
    finally:
        sys.argv = saved
    return 0


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raise UserError if a key is given like an option of another program: ``--iterations 3``."""
    for word, after in pairwise((*arguments, "")):
        if match := re.fullmatch(r"--?([\w.-]+?)(?:=(.*))?", word):
            name = match[1].replace("-", "_")
            if len(name) > 1 and name not in HYDRAS and name in (*CHOICES, *recipes.keys()):
                raise UserError(
                    f"{word}: a key is given without dashes, write {name}={match[2] or after or 'VALUE'}"
                )


def refuse_nodes_of_other_verbs(verb: str, arguments: Sequence[str]) -> None:
    """Raise UserError if a key is given that only other verbs read."""
    for word in arguments:
        node = re.split(r"[.=]", word, maxsplit=1)[0]
        readers = READERS.get(node, (verb,))
        if verb not in readers and verb in verbs():
            raise UserError(
                f"{word} has no effect: {node} is for rlinf-vla {' and '.join(readers)}, leave it out of {verb}"
            )


def refuse_task_of_sweep(config: DictConfig, arguments: Sequence[str]) -> None:
    """Raise UserError if ``env.task`` is given and the recipe's ``env.tasks`` are played."""
    task = _given("env.task", arguments)
    tasks = OmegaConf.select(config, "env.tasks")
    if task and tasks:
        alone = task.removeprefix("env.task=")
        raise UserError(
            f"{task} has no effect, because env.tasks={','.join(tasks)} are played: write env.tasks=[{alone}]"
        )


def with_folder(arguments: Sequence[str]) -> list[str]:
    """Replace ``--config-dir DIR`` by Hydra's override. Raises UserError if DIR does not exist."""
    overrides = list[str]()
    words = iter(arguments)
    for word in words:
        option, _, value = word.partition("=")
        if option == FOLDER:
            folder = Path(value or next(words, "")).expanduser()
            if not folder.is_dir():
                raise UserError(f"{FOLDER} {folder}: no such directory")
            word = (
                f"hydra.searchpath=[{quoted(f'file://{folder.resolve()}')}]"  # Hydra decodes no %20
            )
        overrides.append(word)
    return overrides


def _by_hydra(verb: str, overrides: Sequence[str]) -> list[DictConfig]:
    """Do what Hydra's flags say; return the recipes to run, several for ``--multirun``."""
    recipes.register()
    completes = {"--shell-completion", "-sc"} & set(
        overrides
    )  # of a line in COMP_LINE, not of these arguments
    sys.argv[1:] = sorted(
        overrides if completes else with_choices(verb, overrides), key=_is_flag
    )  # argparse needs overrides together
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
    configs: list[DictConfig] = []

    def job(config: DictConfig) -> None:
        configs.append(config)

    try:
        hydra.main(
            version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=primary(verb)
        )(job)()
    except Exception as error:
        raise UserError(explain(error, overrides)) from error
    return configs


def primary(verb: str) -> str:
    """Return the name of the verb's config file; verbs without one share that of ``train``."""
    return verb if (files(CONFIG_MODULE) / f"{verb}.yaml").is_file() else "train"


def _filed(group: str) -> list[str]:
    folder = files(CONFIG_MODULE) / group
    return (
        [
            path.name.removesuffix(".yaml")
            for path in folder.iterdir()
            if path.name.endswith(".yaml")
        ]
        if folder.is_dir()
        else []
    )


def load(verb: str, overrides: Sequence[str]) -> DictConfig:
    """Return the composed recipe without running anything. Raises UserError."""
    with composed(verb, overrides) as (config, _):
        return config


@contextmanager
def composed(verb: str, overrides: Sequence[str]) -> Iterator[tuple[DictConfig, list[str]]]:
    """Yield the composed recipe, and the overrides that Hydra composed it from.

    Hydra's ``config_loader`` is open within the context. Raises UserError.
    """
    recipes.register()
    GlobalHydra.instance().clear()
    choices = with_choices(verb, overrides)
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            yield compose(primary(verb), overrides=choices), choices
    except UserError:
        raise
    except Exception as error:
        raise UserError(explain(error, overrides)) from error


def with_choices(verb: str, arguments: Sequence[str]) -> list[str]:
    """Replace ``run=DIR`` or ``plan=FILE`` by the choice of its recipe, and complete ``cluster=``.

    The saved cluster is kept unless ``cluster=NAME`` is given. Raises UserError.
    """
    saved = [argument for argument in arguments if argument.startswith(("run=", "plan="))]
    if not saved:
        return with_cluster(arguments)
    rest = [argument for argument in arguments if argument not in saved]
    if len(saved) > 1:
        raise UserError(f"{saved[0]} and {saved[1]}: give one")
    kind, _, location = saved[0].partition("=")
    for argument in rest:
        if argument.partition("=")[0] in CHOICES and not argument.startswith("cluster="):
            raise UserError(
                f"{saved[0]} and {argument}: a {kind} has its own recipe, leave one of the two out"
            )
    from rlinf_vla.runtime.saved_recipe import choose_plan, choose_run

    named = any(argument.startswith("cluster=") for argument in rest)
    chosen = choose_run(location, verb, rest) if kind == "run" else choose_plan(location, rest)
    return [chosen, *(with_cluster(rest) if named else rest)]


def with_cluster(arguments: Sequence[str]) -> list[str]:
    """Replace ``cluster=auto`` (the default) by 1gpu or laptop, whichever this machine is."""
    if any(re.match(r"cluster=(?!auto$)", argument) for argument in arguments):
        return list(arguments)
    return [argument for argument in arguments if argument != "cluster=auto"] + [
        f"cluster={'1gpu' if _has_gpu() else 'laptop'}"
    ]


def _has_gpu() -> bool:
    if version("torch").endswith(
        "+cpu"
    ):  # a build without CUDA need not be imported, which takes seconds
        return False
    import torch

    return torch.cuda.is_available()


def _is_flag(argument: str) -> bool:
    """Return whether the argument is a flag of Hydra or the value that follows one."""
    return not re.match(r"[~+]*[\w./@]+=|~", argument)


def explain(error: BaseException, arguments: Sequence[str]) -> str:
    """Return one line that says what is wrong, where, and the nearest valid key."""
    if word := _stray(arguments):
        apart = re.search(
            rf"(?:^| )({re.escape(word)}) (= ?\S*)", " ".join(arguments)
        ) or re.fullmatch(r"([\w.]+)(:\S*)", word)
        if apart:
            return f"{apart[0].strip()} is not KEY=VALUE: write {apart[1]}={apart[2].lstrip('=: ') or 'VALUE'}"
        recipe = difflib.get_close_matches(word, _filed("recipe"), n=1, cutoff=0.6)
        return f"{word} is not KEY=VALUE: write recipe={recipe[0] if recipe else 'NAME'} (`rlinf-vla list recipes` names them)"
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OverrideParseException) and (
            match := re.match(r"([~+]*[\w./@:-]+)=(.*)", cause.override, re.DOTALL)
        ):
            text = " ".join(match[2].split())
            example = {"[": "['TEXT']", "{": "{NAME: 'TEXT'}"}.get(text[:1], quoted(text))
            return f'{match[1]}: Hydra cannot read {text}: quote text, for the shell and for Hydra: "{match[1]}={example}"'
        if match := re.search(
            r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in|Key not found: '([^']+)'",
            str(cause),
        ):
            key = getattr(cause, "full_key", None) or match[1] or match[2] or match[3]
            keys = recipes.keys()
            elsewhere = any(
                f".{candidate}".endswith(f".{key}") for candidate in keys
            )  # with another algorithm or model, so not misspelt
            if elsewhere and not any(
                re.match(rf"[+~]*([\w.]+\.)?{re.escape(key)}(=|$)", argument)
                for argument in arguments
            ):
                if preset := _given("preset", arguments):
                    hint = "`rlinf-vla list presets` describes each"
                    return f"{preset} does not fit: it sets {key}, which this recipe's algorithm or model does not have ({hint})"
                for group in ("env", "model", "algorithm", "robot", "reward"):
                    if (chosen := _given(group, arguments)) and (
                        base := _given("recipe", arguments)
                    ):
                        return f"{chosen} does not fit {base}, which sets {key}: choose another recipe, or write one (--config-dir DIR)"
            entry = re.search(r"Key '([^']+)' is not in struct", " ".join(map(str, causes)))
            if entry and match[1] in keys and entry[1] != match[1].rpartition(".")[2]:
                return (
                    f"{match[1]} has no entry {entry[1]}: add it with +{match[1]}.{entry[1]}=VALUE"
                )
            inner = re.search(r"Key '([^']+)' not in '", " ".join(map(str, causes)))
            if inner and match[1] in keys and inner[1] != match[1].rpartition(".")[2]:
                return f"an entry of {match[1]} has no key {inner[1]}: see its keys in the documentation"
            if (run := _given("run", arguments)) and key in keys:
                return f"{key} is not a key of the recipe of {run}: its env, model or algorithm is one that does not have it"
            return f"{key} is not a key{recipes.unknown_key_hint(str(key))}"
    if match := re.search(
        r"Could not find '([\w/]+)/([^'/]+)'.*?Available options in '[^']+':\n((?:\t\w+\n?)*)",
        str(error),
        re.DOTALL,
    ):
        group = match[1]
        name = match[2]
        options = [name for name in match[3].split() if name != "schema"]
        close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        return f"{group}={name} does not exist{f'; did you mean {group}={close[0]}?' if close else ''} (available: {', '.join(options)})"
    if match := re.search(r"Error merging override (\S+)", str(error)):
        reason = next(
            (str(cause) for cause in causes if isinstance(cause, OmegaConfBaseException)),
            "not a valid value",
        )
        key, _, value = match[1].partition("=")
        if "is not a ListConfig" in reason:
            return f"{match[1]}: a list is expected, write '{key}=[{value}]'"
        if value.lower() in ("none", "nil", "nan"):
            return f"{match[1]}: {reason.splitlines()[0]}; for no value write {key}=null"
        return f"{match[1]}: {reason.splitlines()[0]}"
    return f"{' '.join(arguments)}: {' '.join(str(error).split()) or type(error).__name__}"


def quoted(text: str) -> str:
    """Return a text as a value that Hydra reads unchanged."""
    return "'" + text.replace("'", "\\'") + "'"


def _stray(arguments: Sequence[str]) -> str | None:
    """Return a word that is not an override, a flag, or the value that follows a flag."""
    for before, word in pairwise(("", *arguments)):
        if (
            word
            and not word.startswith(("-", "+", "~"))
            and "=" not in word
            and not (before.startswith("-") and "=" not in before)
        ):
            return word
    return None


def _given(group: str, arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if argument.startswith(f"{group}=")), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
