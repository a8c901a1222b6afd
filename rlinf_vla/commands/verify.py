"""``rlinf-vla verify RESULT.json``: play part of a result again, and say whether it agrees."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from rlinf_vla.commands.block_player import BlockPlayer, contest, parts_of
from rlinf_vla.commands.provenance import SOFTWARE, identities
from rlinf_vla.commands.sweep import FORMAT
from rlinf_vla.evaluation.blocks import Block, Entrant, cut
from rlinf_vla.evaluation.results import COLUMNS, Episode, tables
from rlinf_vla.evaluation.verification import OUTCOME, SIGNIFICANCE, Verdict, differing, judge, sample
from rlinf_vla.protocols import Part
from rlinf_vla.recipe.kept import with_said
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.trust import printable
from rlinf_vla.types import UserError

SHOWN = 5
"""Episodes that came out otherwise, told one by one."""

NUMBERS: dict[str, Any] = {"seed": int, "success": bool, "steps": int, "return": float | int}
"""Columns of an episode that are no words."""

PLAYED = ("env.", "model.")
"""Nodes of a recipe that make simulators and policies; verify uses no reward, no robot and no cluster, and writes nothing."""

Place = tuple[str, str, str, int]
"""policy, suite, task, seed"""


def run(arguments: Sequence[str]) -> int:
    """0: it agrees; 1: it does not. Raises UserError where the file is no whole result, or cannot be played again here."""
    path, count, settings = _read_arguments(arguments)
    document = _read(path)
    recipe = with_said(document["recipe"], settings, PLAYED, str(path))
    entrants, parts = contest(recipe), parts_of(recipe)
    places = _Places(entrants, parts)
    expected = cut(len(entrants), [len(part.tasks) for part in parts], recipe.episodes, recipe.sweep.block)
    whole = [place for block in expected for place in places.of(block)] == [_place(episode) for episode in document["episodes"]]
    if not whole or len(document["suites"]) != len(parts):
        raise UserError(f"{path} does not hold the episodes that its recipe plays: it is damaged, or of another version")
    now = identities(recipe, entrants)
    kept = {name: {key: document["entrants"].get(name, {}).get(key) for key in known} for name, known in now.items()}
    changes = differing(document["environment"], fingerprint(), (*SOFTWARE, "cpu")) + differing(
        {"policy": kept}, {"policy": now}, ("policy",)
    )

    wanted = sample(document["episodes"], count)
    again: dict[Place, Episode] = {}
    with stages() as progress, closing(BlockPlayer(recipe, entrants, parts)) as player:
        for block in places.blocks(wanted):
            played = player.play(block)
            suite = document["suites"][block.part]
            changes += [each for each in differing(suite, played["environment"], list(played["environment"])) if each not in changes]
            again |= {_place(episode): episode for episode in played["episodes"]}
            progress("episodes", len(again) / len(wanted))
    exact = not changes and recipe.cluster.device == "cpu"
    verdict = judge(wanted, [again[_place(episode)] for episode in wanted], exact)
    sums = json.loads(json.dumps(tables(document["episodes"])))
    sound = all(document[name] == table for name, table in sums.items())
    for line in _says(path, verdict, changes, sound):
        print(printable(line))
    return 0 if verdict.agrees and sound else 1


def _says(path: Path, verdict: Verdict, changes: Sequence[str], sound: bool) -> list[str]:
    lines = [f"not the same as then: {change}" for change in changes]
    same = verdict.played - len(verdict.different)
    lines.append(f"{same} of {verdict.played} episodes came out the same, bit for bit")
    for old, new in verdict.different[:SHOWN]:
        what = ", ".join(f"{name} was {old[name]}, is {new[name]}" for name in OUTCOME if old[name] != new[name])
        lines.append(f"  {old['policy']} on {old['task']}, seed {old['seed']}: {what}")
    if len(verdict.different) > SHOWN:
        lines.append(f"  and {len(verdict.different) - SHOWN} more")
    if not sound:
        lines.append("its tables do not follow from its episodes: it has been changed")
    how = "every episode the same" if not verdict.different else f"p = {verdict.p_value:.3f} that chance alone explains the successes"
    if verdict.exact and verdict.different:
        how = "same machine, same software: every episode had to be the same"
    elif not verdict.agrees:
        how += f", below {SIGNIFICANCE}"
    lines.append(f"{path} {'agrees' if verdict.agrees and sound else 'DOES NOT AGREE'}: {how}")
    return lines


class _Places:
    """Between episodes, which bear names, and blocks, which bear numbers."""

    def __init__(self, entrants: Sequence[Entrant], parts: Sequence[Part]) -> None:
        self._entrants = [entrant.name for entrant in entrants]
        self._tasks = [[(part.suite, task) for task in part.tasks] for part in parts]
        self._numbers = {name: (part, task) for part, names in enumerate(self._tasks) for task, name in enumerate(names)}

    def of(self, block: Block) -> list[Place]:
        return [(self._entrants[block.entrant], *self._tasks[block.part][block.task], seed) for seed in block.seeds]

    def blocks(self, episodes: Sequence[Episode]) -> list[Block]:
        """All of a policy and task in one."""
        seeds: dict[tuple[int, int, int], list[int]] = {}
        for episode in episodes:
            place = (self._entrants.index(episode["policy"]), *self._numbers[episode["suite"], episode["task"]])
            seeds.setdefault(place, []).append(episode["seed"])
        return [Block(*place, tuple(chosen)) for place, chosen in seeds.items()]


def _place(episode: Episode) -> Place:
    return episode["policy"], episode["suite"], episode["task"], episode["seed"]


def _read(path: Path) -> dict[str, Any]:
    """Raises UserError unless everything is there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give it the result.json of a sweep") from None
    except (ValueError, RecursionError):  # the second: lists in lists in lists
        raise UserError(f"{path} is damaged (no JSON): take another copy of it") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path} is not a sweep's result.json ({FORMAT})")
    kinds = {"recipe": dict, "environment": dict, "entrants": dict, "policies": dict, "suites": list, "differences": list, "episodes": list}
    for name, kind in kinds.items():
        if not isinstance(document.get(name), kind):
            raise UserError(f"{path} is damaged ({name} is missing): take another copy of it")
    pieces = {"entrant": document["entrants"].items(), "suite": enumerate(document["suites"]), "episode": enumerate(document["episodes"])}
    for what, of_them in pieces.items():
        for name, piece in of_them:
            if not isinstance(piece, dict) or (what == "episode" and not _is_episode(piece)):
                raise UserError(f"{path} is damaged ({what} {name}): take another copy of it")
    return document


def _is_episode(piece: dict[str, Any]) -> bool:
    return all(isinstance(piece.get(column), NUMBERS.get(column, str)) for column in COLUMNS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"verify: {message} (rlinf-vla verify RESULT.json --episodes 20)")


def _read_arguments(arguments: Sequence[str]) -> tuple[Path, int, list[str]]:
    parser = _Parser("rlinf-vla verify", description="Play part of an evaluation again; exit code 0 where it agrees, 1 where it does not.")
    parser.add_argument("result", metavar="RESULT.json", help="what rlinf-vla eval wrote")
    settings = "programs and places that the recipe in the file names and that are taken from here alone, such as env.python=PATH"
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=settings)
    parser.add_argument("--episodes", type=int, default=20, help="how many, spread over all policies and tasks (20)")
    found = parser.parse_intermixed_args(arguments)
    if wrong := [setting for setting in found.settings if "=" not in setting]:
        parser.error(f"{wrong[0]} is not KEY=VALUE")
    if found.episodes < 1:
        raise UserError(f"verify: --episodes {found.episodes}: must be at least 1")
    return Path(found.result).expanduser(), found.episodes, found.settings
