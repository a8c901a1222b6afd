"""Shell completion: ``rlinf-vla completion bash`` prints the script for a shell.

Hydra's own completion knows neither verbs nor runs, and it composes the recipe at each key press,
which imports PyTorch. This one reads names of files and plug-ins and the keys of the engine; keys
of plug-ins and algorithms are not completed (``rlinf-vla config recipe=NAME`` lists them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlinf_vla.cli.help import EVERY
from rlinf_vla.cli.verbs import PLUGINS, verbs
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins

SCRIPTS = {
    "bash": """\
# put this into ~/.bashrc: eval "$(rlinf-vla completion bash)"
_rlinf_vla() {
  local line="${COMP_LINE:0:COMP_POINT}" word
  local current="${line##* }"
  local done="${current%"${current##*[=:]}"}"  # bash completes only what follows = or :
  local -a words
  read -ra words <<< "$line"
  [[ $line == *' ' ]] && words+=("")
  COMPREPLY=()
  while IFS= read -r word; do
    COMPREPLY+=("${word#"$done"}")
  done < <(rlinf-vla completion -- "${words[@]:1}" 2>/dev/null)
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o default -F _rlinf_vla rlinf-vla
""",
    "zsh": """\
# put this into ~/.zshrc, after compinit: eval "$(rlinf-vla completion zsh)"
_rlinf_vla() {
  local -a found
  found=("${(@f)$(rlinf-vla completion -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  compadd -S '' -a found || _files
}
compdef _rlinf_vla rlinf-vla
""",
    "fish": """\
# rlinf-vla completion fish > ~/.config/fish/completions/rlinf-vla.fish
complete -c rlinf-vla -a '(rlinf-vla completion -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
FILES = ("recipe", "preset", "cluster", "algorithm")
CHOICES = tuple(dict.fromkeys((*FILES, *PLUGINS)))
RUNS = Path("runs")


def run(arguments: Sequence[str]) -> None:
    """Print a shell's script; after ``--``, what may stand for the last of the words typed."""
    if arguments and arguments[0] == "--":
        for word in candidates(arguments[1:]):
            print(word)
        return
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        raise UserError(
            f"completion needs the name of a shell: rlinf-vla completion {{{'|'.join(SCRIPTS)}}}"
        )
    print(SCRIPTS[arguments[0]], end="")


def candidates(words: Sequence[str]) -> list[str]:
    """Return the words that begin with the last of ``words``, which follow ``rlinf-vla``."""
    *before, current = words or [""]
    return sorted({word for word in _known(before, current) if word.startswith(current)})


def _known(before: Sequence[str], current: str) -> Iterator[str]:
    verb = before[0] if before else ""
    known = verbs()
    if verb not in known:
        if not before:
            yield from (*known, "--help", "--version")
        return
    described = known[verb]
    key, equals, _ = current.partition("=")
    if current.startswith("-"):
        yield from (
            "--help",
            *(
                name.split()[0]
                for name, _ in (*described.help.options, EVERY)
                if name.startswith("-")
            ),
        )
    elif equals:
        yield from (f"{key}={value}" for value in _values(key))
    else:
        yield from described.words if len(before) == 1 or verb == "list" else ()
        if verb in ("runs", "view", "push"):
            yield from _runs()
        if described.keys:
            yield from (f"{choice}=" for choice in (*CHOICES, "run"))
            yield from (f"{name}=" for name in keys(Recipe))


def _values(key: str) -> Iterator[str]:
    if key == "run":
        yield from _runs()
    if key in FILES:
        folder = files("rlinf_vla.recipes") / key
        yield from (
            path.name.removesuffix(".yaml")
            for path in folder.iterdir()
            if path.name.endswith(".yaml")
        )
    if key in PLUGINS:
        yield from getattr(plugins, f"{key}s")()


def _runs() -> Iterator[str]:
    """Yield RECIPE/TIMESTAMP of the runs here; ``runtime/run_names.py`` would import PyTorch."""
    yield from (str(path.parent.relative_to(RUNS)) for path in RUNS.glob("*/*/recipe.yaml"))


def keys(node: type, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a dataclass and of the dataclasses in it."""
    for field in fields(node):
        inner: Any = field.default_factory
        if inner is not MISSING and is_dataclass(inner):
            yield from keys(inner, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name
