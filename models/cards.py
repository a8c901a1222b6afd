"""Cards of published checkpoints: facts that their files do not state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.plugins import nearest
from rlinf_vla.core.protocols import Convention, ToolUnits

NO_CARD = "none"
"""``model.options.card`` that uses no card, whatever the directory's name."""

LIBERO_TOOL = ToolUnits(0.05, 0.5)
"""What 1 means in an action of LIBERO's data: robosuite's OSC_POSE."""
LIBERO_CONVENTION = Convention(LIBERO_TOOL, "close_positive", "axis_angle", "rot180")
"""Of the published LIBERO data: the native gripper and images turned by 180 degrees."""


@dataclass(frozen=True)
class Card:
    """Facts on the checkpoints whose repository matches one of ``repositories``."""

    name: str
    """Value of ``model.options.card``."""
    repositories: tuple[str, ...]
    """Patterns of ORG/NAME, in lower case."""
    models: tuple[str, ...]
    """Model plug-ins that can load them."""
    source: str
    """Where the facts are stated; what is stated nowhere is left out, or ``assumed``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``model.options`` that are null."""
    convention: Convention = Convention()  # noqa: RUF009  (frozen)
    env: Mapping[str, Any] = field(default_factory=dict)
    """Values of the node ``env`` that are null, besides its cameras."""
    dataset: str | None = None
    """Dataset whose statistics the published runs un-normalise actions by, if the files have it."""
    tools: Mapping[str, ToolUnits] = field(default_factory=dict)
    """Dataset (``unnorm_key``) -> its action units, where datasets differ."""
    assumed: str | None = None
    """What no source states of these checkpoints; a run says it once, at its start."""
    layout: str | None = None
    """Layout of the files (``openpi``, ``lerobot``), where the same name has several."""

    def meaning(self, dataset: str, inherited: bool) -> Convention:
        """Return the convention of actions that are un-normalised as those of ``dataset``.

        ``inherited``: it is a dataset of the base model, which the card does not describe.
        """
        return replace(
            self.convention,
            tool=self.tools.get(dataset, None if inherited else self.convention.tool),
        )

    def remarks(self, dataset: str = "", inherited: bool = False) -> tuple[str, ...]:
        """Return lines that a user should read; arguments as of ``meaning``."""
        lines = () if self.assumed is None else (f"card {self.name} assumes: {self.assumed}",)
        if dataset in self.tools or not (self.tools or inherited):
            return lines
        return (
            *lines,
            f"card {self.name} does not know the action units of dataset {dataset}: they are not checked",
        )

    def env_for(self, cameras: Iterable[str]) -> dict[str, Any]:
        """Return the values of ``env`` for a policy that sees these cameras."""
        return {**self.env, "cameras": list(cameras)} if self.env else {}


def find_card(
    cards: Sequence[Card],
    model: str,
    directory: Path,
    chosen: str | None,
    stored: str | None,
    layout: str | None = None,
) -> Card | None:
    """Return the card of a checkpoint, or None.

    ``chosen`` (``model.options.card``) decides, else ``stored`` (``card`` in our config.json), else
    the name of the repository and the ``layout`` of its files (None: not known yet). Raises
    UserError for an unknown card or another plug-in's.
    """
    if chosen == NO_CARD:
        return None
    name = chosen or stored
    if name is not None:
        card = next((card for card in cards if card.name == name), None)
        if card is None:
            raise UserError(
                f"model.options.card={name} is not known{nearest(name, [NO_CARD, *(card.name for card in cards)])}"
            )
    else:
        fitting = [card for card in cards if layout is None or card.layout in (None, layout)]
        named = {
            name: next((card for card in fitting if _matches(card, name)), None)
            for name in repository_of(directory)
        }
        matching = {card.name: card for card in named.values() if card is not None}
        if len(matching) > 1:
            raise UserError(
                f"{directory} has names of several cards ({', '.join(matching)}): choose one with model.options.card"
            )
        card = next(iter(matching.values()), None)
    if card is not None and model not in card.models:
        raise UserError(
            f"{directory}: the checkpoint (card {card.name}) is of model={' or '.join(card.models)}, not {model}: "
            f"set model={card.models[0]}, or model.options.card=none if it is another checkpoint"
        )
    return card


def repository_of(directory: Path) -> list[str]:
    """Return what the repository of a directory may be called: ORG/NAME or NAME.

    A directory in the Hub's cache (models--ORG--NAME) has one name. Another is called by its last
    part (ORG--NAME is ORG/NAME), or by that above a revision (NAME/main). A symbolic link has the
    names of its target, too.
    """
    names: list[str] = []
    for path in (directory.absolute(), directory.resolve()):
        parts = [part for part in path.parts if part.startswith("models--")] or list(path.parts)
        while len(parts) > 1 and _REVISION.fullmatch(parts[-1]):
            parts.pop()
        names.append(parts[-1].removeprefix("models--").replace("--", "/", 1))
    return list(dict.fromkeys(names))


_REVISION = re.compile(r"main|snapshots|[0-9a-f]{40}")


def names_part(directory: Path, part: str) -> bool:
    """Return whether a name of the directory's repository has this part."""
    return any(part in name.lower() for name in repository_of(directory))


def _matches(card: Card, repository: str) -> bool:
    """Return whether the card is of a repository ORG/NAME, or of NAME, or of ORG_NAME."""
    name = repository.lower()
    if "/" in name:
        return any(fnmatchcase(name, pattern) for pattern in card.repositories)
    of_name = [pattern.rpartition("/")[2] for pattern in card.repositories]
    of_both = [
        pattern.replace("/", "_", 1) for pattern in card.repositories if not pattern.startswith("*")
    ]
    return any(fnmatchcase(name, pattern) for pattern in (*of_name, *of_both))


def with_card(options: Any, card: Card | None, stored: Mapping[str, Any]) -> Any:
    """Return ``options`` whose null fields have the card's values, where the options have them.

    The networks of all cards are in bfloat16: they have billions of weights.

    ``stored``: values in config.json, which take precedence over the card's.
    """
    if card is None:
        return options
    values = {
        key: value
        for key, value in card.options.items()
        if getattr(options, key, value) is None and key not in stored
    }
    return replace(options, dtype=options.dtype or "bfloat16", **values)
