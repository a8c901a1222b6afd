"""Write a small plug-in package to start from: ``rlinf-vla new env my_env``.

The files are the templates of this folder. docs/plugins.md explains them.
"""

from __future__ import annotations

import ast
import keyword
import sys
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_vla.cli.verbs import PLUGINS
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.io import replacing_directory
from rlinf_vla.runtime.recipes import Configs

SHARED, SUFFIX, NAME = "package", ".jinja", "NAME"
"""Folder of the files of every kind, suffix of a template, stand-in of the name in file names."""


def run(arguments: Sequence[str]) -> None:
    """Write the package into a new folder of its name. Raises UserError."""
    if len(arguments) != 2 or arguments[0] not in PLUGINS:
        hint = plugins.nearest(arguments[0], list(PLUGINS)) if arguments else ""
        raise UserError(
            f"new needs a kind and a name: rlinf-vla new {{{'|'.join(PLUGINS)}}} NAME{hint}"
        )
    kind, name = arguments
    _check_name(kind, name)
    folder = Path(name)
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another name, or work in another folder")
    texts = rendered(kind, name)
    _check_names(kind, name, texts)
    with replacing_directory(folder) as aside:
        for path, text in texts.items():
            (aside / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / path).write_text(text)
    print(
        f"{folder}/: {', '.join(sorted(texts))}\n{folder / 'README.md'} says how to install, test and run it"
    )


def _check_name(kind: str, name: str) -> None:
    if (
        not name.isidentifier()
        or name != name.lower()
        or not name.isascii()
        or keyword.iskeyword(name)
    ):
        raise UserError(
            f"new {kind} {name}: the name is that of a Python module, so use lower-case letters, digits and underscores"
        )
    if name in [*Configs(kind), "schema"]:
        raise UserError(
            f"new {kind} {name}: {kind}={name} is installed already, choose another name"
        )
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise UserError(
            f"new {kind} {name}: a Python module {name} is installed already, choose another name"
        )


def _check_names(kind: str, name: str, texts: dict[str, str]) -> None:
    """Raise UserError if the package's class has no valid name, or that of something it imports."""
    for text in (text for path, text in texts.items() if path.endswith(".py")):
        try:
            body = ast.parse(text).body
        except SyntaxError:
            raise UserError(
                f"new {kind} {name}: a class cannot be named after it, choose another name"
            ) from None
        bound = [
            alias.asname or alias.name
            for node in body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        ]
        bound += [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        if twice := sorted({name for name in bound if bound.count(name) > 1}):
            raise UserError(
                f"new {kind} {name}: the package has another {twice[0]} already, choose another name"
            )


def rendered(kind: str, name: str) -> dict[str, str]:
    """Return the text of each file of the package, by its path there."""
    from jinja2 import Environment, StrictUndefined

    # the templates are the package's own, and are no HTML
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    words: dict[str, Any] = {
        "kind": kind,
        "name": name,
        "class": "".join(part.title() for part in name.split("_")),
    }
    templates = files("rlinf_vla.cli") / "templates"
    texts = {}
    for folder in (SHARED, kind):
        for path, file in _below(templates / folder):
            text = environment.from_string(file.read_text()).render(words)
            texts[path.replace(NAME, name).removesuffix(SUFFIX)] = text
    return texts


def _below(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    entries = []
    for child in folder.iterdir():
        entries += (
            _below(child, f"{prefix}{child.name}/")
            if child.is_dir()
            else [(f"{prefix}{child.name}", child)]
        )
    return entries
