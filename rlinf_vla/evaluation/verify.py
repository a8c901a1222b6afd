"""Verify a sweep's result.json: run part of its episodes again and compare the outcomes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.trust import printable
from rlinf_vla.core.protocols import Suite
from rlinf_vla.evaluation.block_player import BlockPlayer, eval_policies_of, suites_of
from rlinf_vla.evaluation.blocks import Block, EvalPolicy, split_into_blocks
from rlinf_vla.evaluation.provenance import SOFTWARE, identities
from rlinf_vla.evaluation.results import COLUMNS, Episode, tables
from rlinf_vla.evaluation.sweep import FORMAT
from rlinf_vla.evaluation.verification import OUTCOME, SIGNIFICANCE, Verdict, compare_outcomes, differing, sample
from rlinf_vla.runtime.saved_recipe import with_overrides
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.environment import fingerprint

SHOWN = 5
"""Differing episodes that are listed one by one."""

NUMBERS: dict[str, Any] = {"seed": int, "success": bool, "steps": int, "return": float | int}
"""Types of the episode columns that are not strings."""

PLAYED = ("env.", "model.")
"""Recipe nodes that verify takes programs and paths from: it builds simulators and policies.
It starts no reward, robot or cluster, and writes nothing."""

Place = tuple[str, str, str, int]
"""(policy, suite, task, seed)"""


def run(arguments: Sequence[str]) -> int:
    """Return 0 if the result agrees, 1 if not.

    Raises UserError if the file is not a complete result or cannot be run again here.
    """
    path, count, settings = _read_arguments(arguments)
    document = _read(path)
    recipe = with_overrides(document["recipe"], settings, PLAYED, str(path))
    policies, suites = eval_policies_of(recipe), suites_of(recipe)
    places = _Places(policies, suites)
    expected = split_into_blocks(len(policies), [len(suite.tasks) for suite in suites], recipe.episodes, recipe.sweep.block)
    whole = [place for block in expected for place in places.of(block)] == [_place(episode) for episode in document["episodes"]]
    if not whole or len(document["suites"]) != len(suites):
        raise UserError(f"{path} does not hold the episodes of its recipe: it is damaged, or of another version")
    now = identities(recipe, policies)
    kept = {name: {key: document["provenance"].get(name, {}).get(key) for key in known} for name, known in now.items()}
    changes = differing(document["environment"], fingerprint(), (*SOFTWARE, "cpu")) + differing(
        {"policy": kept}, {"policy": now}, ("policy",)
    )

    wanted = sample(document["episodes"], count)
    again: dict[Place, Episode] = {}
    with stages() as progress, closing(BlockPlayer(recipe, policies, suites)) as player:
        for block in places.blocks(wanted):
            played = player.play(block)
            suite = document["suites"][block.suite]
            changes += [each for each in differing(suite, played["environment"], list(played["environment"])) if each not in changes]
            again |= {_place(episode): episode for episode in played["episodes"]}
            progress("episodes", len(again) / len(wanted))
    exact = not changes and recipe.cluster.device == "cpu"
    verdict = compare_outcomes(wanted, [again[_place(episode)] for episode in wanted], exact)
    sums = json.loads(json.dumps(tables(document["episodes"])))
    sound = all(document[name] == table for name, table in sums.items())
    for line in _says(path, verdict, changes, sound):
        print(printable(line))
    return 0 if verdict.agrees and sound else 1


def _says(path: Path, verdict: Verdict, changes: Sequence[str], sound: bool) -> list[str]:
    lines = [f"changed since then: {change}" for change in changes]
    same = verdict.played - len(verdict.different)
    lines.append(f"{same} of {verdict.played} episodes are bit-identical")
    for old, new in verdict.different[:SHOWN]:
        what = ", ".join(f"{name} was {old[name]}, is {new[name]}" for name in OUTCOME if old[name] != new[name])
        lines.append(f"  {old['policy']} on {old['task']}, seed {old['seed']}: {what}")
    if len(verdict.different) > SHOWN:
        lines.append(f"  and {len(verdict.different) - SHOWN} more")
    if not sound:
        lines.append("its tables do not follow from its episodes: the file has been edited")
    how = "all episodes are identical" if not verdict.different else f"p = {verdict.p_value:.3f} for equal success rates"
    if verdict.exact and verdict.different:
        how = "on the same machine and software, every episode must be identical"
    elif not verdict.agrees:
        how += f", below {SIGNIFICANCE}"
    lines.append(f"{path} {'agrees' if verdict.agrees and sound else 'DOES NOT AGREE'}: {how}")
    return lines


class _Places:
    """Convert between episodes, which have names, and blocks, which have indices."""

    def __init__(self, policies: Sequence[EvalPolicy], suites: Sequence[Suite]) -> None:
        self._policies = [policy.name for policy in policies]
        self._tasks = [[(suite.name, task) for task in suite.tasks] for suite in suites]
        self._numbers = {name: (suite, task) for suite, names in enumerate(self._tasks) for task, name in enumerate(names)}

    def of(self, block: Block) -> list[Place]:
        return [(self._policies[block.policy], *self._tasks[block.suite][block.task], seed) for seed in block.seeds]

    def blocks(self, episodes: Sequence[Episode]) -> list[Block]:
        """Return one block per policy and task, with the seeds of all its episodes."""
        seeds: dict[tuple[int, int, int], list[int]] = {}
        for episode in episodes:
            place = (self._policies.index(episode["policy"]), *self._numbers[episode["suite"], episode["task"]])
            seeds.setdefault(place, []).append(episode["seed"])
        return [Block(*place, tuple(chosen)) for place, chosen in seeds.items()]


def _place(episode: Episode) -> Place:
    return episode["policy"], episode["suite"], episode["task"], episode["seed"]


def _read(path: Path) -> dict[str, Any]:
    """Read a result. Raises UserError if it cannot be read or is incomplete."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give it the result.json of a sweep") from None
    except (ValueError, RecursionError):  # RecursionError: deeply nested lists
        raise UserError(f"{path} is damaged (no JSON): take another copy of it") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path} is not a sweep's result.json ({FORMAT})")
    kinds = {
        "recipe": dict,
        "environment": dict,
        "provenance": dict,
        "policies": dict,
        "suites": list,
        "differences": list,
        "episodes": list,
    }
    for name, kind in kinds.items():
        if not isinstance(document.get(name), kind):
            raise UserError(f"{path} is damaged ({name} is missing): take another copy of it")
    pieces = {"policy": document["provenance"].items(), "suite": enumerate(document["suites"]), "episode": enumerate(document["episodes"])}
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
    parser = _Parser("rlinf-vla verify", description="Run part of an evaluation again. Exit code: 0 if it agrees, 1 if it does not.")
    parser.add_argument("result", metavar="RESULT.json", help="result of an rlinf-vla eval sweep")
    settings = "programs and paths that the file's recipe names; they are taken only from here, such as env.python=PATH"
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=settings)
    parser.add_argument("--episodes", type=int, default=20, help="number of episodes, spread over all policies and tasks (20)")
    found = parser.parse_intermixed_args(arguments)
    if wrong := [setting for setting in found.settings if "=" not in setting]:
        parser.error(f"{wrong[0]} is not KEY=VALUE")
    if found.episodes < 1:
        raise UserError(f"verify: --episodes {found.episodes}: must be at least 1")
    return Path(found.result).expanduser(), found.episodes, found.settings
