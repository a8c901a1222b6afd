"""From a command line to a composed recipe, with Hydra; its errors become one line each."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import hydra
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vla import recipe as recipes
from rlinf_vla.types import UserError

CONFIG_MODULE = "rlinf_vla.recipes"


def compose_and_run(verb: str, arguments: Sequence[str], command: Callable[[DictConfig], object]) -> int:
    """Hand the composed recipe to ``command``; Hydra's own flags (``--cfg job``, ``--help``, ``--multirun`` ...) work."""
    recipes.register()
    arguments = sorted(with_cluster(arguments), key=_is_flag)  # argparse wants the overrides together
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting

    def job(config: DictConfig) -> None:
        if "hydra" in config:
            OmegaConf.set_struct(config, False)
            del config["hydra"]
        command(config)

    saved = sys.argv
    sys.argv = [f"rlinf-vla {verb}", *arguments]
    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=verb)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, verb, arguments)) from error
    finally:
        sys.argv = saved
    return 0


def load(verb: str, overrides: Sequence[str]) -> DictConfig:
    """The composed recipe, without running anything. Raises UserError."""
    recipes.register()
    GlobalHydra.instance().clear()
    overrides = with_cluster(overrides)
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            return compose(verb, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, verb, overrides)) from error


def with_cluster(arguments: Sequence[str]) -> list[str]:
    """``cluster=auto`` (the default) becomes what this machine is."""
    if any(re.match(r"cluster=(?!auto$)", argument) for argument in arguments):
        return list(arguments)
    import torch

    found = "1gpu" if torch.cuda.is_available() else "laptop"
    return [argument for argument in arguments if argument != "cluster=auto"] + [f"cluster={found}"]


def _is_flag(argument: str) -> bool:
    """A flag of Hydra's own, or the value that follows one."""
    return not re.match(r"[~+]*[\w./@]+=|~", argument)


def explain(error: BaseException, verb: str, arguments: Sequence[str]) -> str:
    """One line: what is wrong, where, and the nearest right key."""
    causes = list(_causes(error))
    for cause in causes:
        if match := re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in|Key not found: '([^']+)'", str(cause)):
            key = getattr(cause, "full_key", None) or match[1] or match[2] or match[3]
            return f"{key} is not a key{_right_key(key, verb, arguments)}"
    if match := re.search(r"Could not find '([\w/]+)/([^'/]+)'.*?Available options in '[^']+':\n((?:\t\w+\n?)*)", str(error), re.DOTALL):
        group, name, options = match[1], match[2], [each for each in match[3].split() if each != "schema"]
        close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        return f"{group}={name} does not exist{f'; did you mean {group}={close[0]}?' if close else ''} (there are: {', '.join(options)})"
    if match := re.search(r"Error merging override (\S+)", str(error)):
        reason = next((str(cause) for cause in causes if isinstance(cause, OmegaConfBaseException)), "not a valid value")
        return f"{match[1]}: {reason.splitlines()[0]}"
    return " ".join(str(error).split()) or type(error).__name__


def _right_key(key: str, verb: str, arguments: Sequence[str]) -> str:
    """The same last name elsewhere, or a close spelling."""
    groups = [argument for argument in arguments if re.match(r"(recipe|cluster|env|model|algorithm)=", argument)]
    try:
        known = sorted(_keys(load(verb, groups)))
    except UserError:
        return ""
    if not groups or not any(group.startswith("recipe=") for group in groups):
        return ": give recipe=NAME first" if "." in key else ""
    last = key.rsplit(".", 1)[-1]
    same = [each for each in known if each.rsplit(".", 1)[-1] == last]
    close = same or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        names = {each.rsplit(".", 1)[-1]: each for each in known}
        close = [names[name] for name in difflib.get_close_matches(last, list(names), n=1, cutoff=0.6)]
    return f"; did you mean {close[0]}?" if close else " (see --cfg job)"


def _keys(node: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in map(str, node):
        child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        path = f"{prefix}{name}"
        keys += [path, *_keys(child, f"{path}.")] if isinstance(child, DictConfig) and not child._is_none() else [path]
    return keys


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
