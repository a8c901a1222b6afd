"""Verify a sweep's result.json: run part of its episodes again and compare the outcomes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.core.io import read_document
from rlinf_vla.evaluation.statistics import Episode, mcnemar_exact
from rlinf_vla.features.sweeps.block_player import BlockPlayer
from rlinf_vla.features.sweeps.blocks import Block, Place, Sweep
from rlinf_vla.features.sweeps.provenance import identities
from rlinf_vla.features.sweeps.results import COLUMNS, FORMAT, tables
from rlinf_vla.runtime.saved_recipe import with_overrides
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.environment import SOFTWARE, differing, fingerprint

SIGNIFICANCE = 0.05
"""A smaller p-value counts as a disagreement."""
OUTCOME = ("instruction", "success", "steps", "return")
"""Fields of a repeated episode that must be bit-identical on the same software and hardware."""
ENOUGH = 6
"""With fewer episodes no p-value can be below SIGNIFICANCE."""
SHOWN = 5
"""Differing episodes that are listed one by one."""
PLAYED = ("env.", "model.", "rollout.")
"""Recipe nodes that verify takes programs and paths from: it builds simulators and policies.
It starts no reward, robot or cluster, and writes nothing."""


def run(arguments: Sequence[str]) -> int:
    """Return 0 if the result agrees, 1 if not.

    Raises UserError if the file is not a complete result or cannot be run again here.
    """
    path, count, settings = _read_arguments(arguments)
    document = _read(path)
    sweep = Sweep.of(with_overrides(document["recipe"], settings, PLAYED, str(path)))
    blocks = {place: block for block in sweep.blocks for place in sweep.places(block)}
    if _expected(sweep, document["episodes"]) != list(map(_place, document["episodes"])) or len(
        document["suites"]
    ) != len(sweep.suites):
        raise UserError(
            f"{path} does not hold the episodes of its recipe: it is damaged, or of another version"
        )
    now = identities(sweep.recipe, sweep.policies)
    saved = {
        name: {key: document["provenance"].get(name, {}).get(key) for key in identity}
        for name, identity in now.items()
    }
    changes = differing(document["environment"], fingerprint(), (*SOFTWARE, "cpu")) + differing(
        {"policy": saved}, {"policy": now}, ("policy",)
    )

    sampled = sample(document["episodes"], count)
    seeds: dict[Block, list[int]] = {}  # of each policy and task
    for episode in sampled:
        seeds.setdefault(replace(blocks[_place(episode)], seeds=()), []).append(episode["seed"])
    again: dict[Place, Episode] = {}
    with stages() as progress, closing(BlockPlayer(sweep)) as player:
        for block, chosen in seeds.items():
            result = player.play(replace(block, seeds=tuple(chosen)))
            suite = document["suites"][block.suite]
            changes += [
                change
                for change in differing(suite, result["environment"], list(result["environment"]))
                if change not in changes
            ]
            again |= {_place(episode): episode for episode in result["episodes"]}
            progress("episodes", len(again) / len(sampled))
    exact = not changes and all(
        identity.get("device", sweep.recipe.cluster.device) == "cpu" for identity in now.values()
    )
    verdict = compare_outcomes(sampled, [again[_place(episode)] for episode in sampled], exact)
    sums = json.loads(json.dumps(tables(document["episodes"])))
    sound = all(document[name] == table for name, table in sums.items())
    for line in _says(path, verdict, changes, sound):
        print(printable(line))
    return 0 if verdict.agrees and sound else 1


@dataclass(frozen=True)
class Verdict:
    """Comparison of saved and repeated episodes.

    ``different``: (saved, repeated) pairs that differ. ``p_value``: of "both succeed equally
    often".
    """

    played: int
    different: list[tuple[Episode, Episode]]
    p_value: float
    exact: bool
    """Whether every episode must be identical."""

    @property
    def agrees(self) -> bool:
        if self.exact:
            return not self.different
        return self.p_value >= SIGNIFICANCE and not (self.changed and self.played < ENOUGH)

    @property
    def changed(self) -> int:
        """Number of episodes with another success."""
        return sum(old["success"] != new["success"] for old, new in self.different)


def compare_outcomes(kept: Sequence[Episode], again: Sequence[Episode], exact: bool) -> Verdict:
    """Compare the saved with the repeated outcomes of the same episodes in the same order."""
    pairs = list(zip(kept, again, strict=True))
    different = [
        (old, new) for old, new in pairs if any(old[name] != new[name] for name in OUTCOME)
    ]
    return Verdict(
        len(pairs),
        different,
        mcnemar_exact([old["success"] for old in kept], [new["success"] for new in again]),
        exact,
    )


def sample(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Return ``count`` episodes (or all), evenly spaced in the list, so over policies and tasks."""
    total = len(episodes)
    return (
        [episodes[index * total // count] for index in range(count)]
        if count < total
        else list(episodes)
    )


def _says(path: Path, verdict: Verdict, changes: Sequence[str], sound: bool) -> list[str]:
    lines = [f"changed since then: {change}" for change in changes]
    same = verdict.played - len(verdict.different)
    lines.append(f"{same} of {verdict.played} episodes are bit-identical")
    for old, new in verdict.different[:SHOWN]:
        what = ", ".join(
            f"{name} was {old[name]}, is {new[name]}" for name in OUTCOME if old[name] != new[name]
        )
        lines.append(f"  {old['policy']} on {old['task']}, seed {old['seed']}: {what}")
    if len(verdict.different) > SHOWN:
        lines.append(f"  and {len(verdict.different) - SHOWN} more")
    if not sound:
        lines.append("its tables do not follow from its episodes: the file has been edited")
    how = f"{verdict.changed} of {verdict.played} succeed in one and fail in the other, p = {verdict.p_value:.3f} for equal success rates"
    if not verdict.different:
        how = "all episodes are identical"
    elif verdict.exact:
        how = "on the same machine and software, every episode must be identical"
    elif verdict.p_value < SIGNIFICANCE:
        how += f", below {SIGNIFICANCE}"
    elif not verdict.agrees:
        how += f"; fewer than {ENOUGH} episodes cannot tell: raise --episodes"
    lines.append(f"{path} {'agrees' if verdict.agrees and sound else 'DOES NOT AGREE'}: {how}")
    return lines


def _expected(sweep: Sweep, episodes: Sequence[Episode]) -> list[Place]:
    """Return the episodes of a complete result, which ends where these ``episodes`` decide it."""
    recorded = {_place(episode): episode for episode in episodes}

    def play(part: Sequence[Block]) -> list[Episode]:
        return [
            recorded[place] for block in part for place in sweep.places(block) if place in recorded
        ]

    return [
        place
        for suite in range(len(sweep.suites))
        for block in sweep.until_decided(suite, play)
        for place in sweep.places(block)
    ]


def _place(episode: Episode) -> Place:
    return episode["policy"], episode["probe"], episode["suite"], episode["task"], episode["seed"]


def _read(path: Path) -> dict[str, Any]:
    """Read a result. Raises UserError if it cannot be read or is incomplete."""
    document = read_document(path, "give it the result.json of a sweep")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path} is not a sweep's result.json ({FORMAT})")
    kinds: dict[str, type] = dict.fromkeys(
        ("recipe", "environment", "provenance", "policies"), dict
    )
    kinds |= dict.fromkeys(("suites", "differences", "episodes"), list)
    for name, kind in kinds.items():
        if not isinstance(document.get(name), kind):
            raise UserError(f"{path} is damaged ({name} is missing): take another copy of it")
    pieces = {
        "policy": document["provenance"].items(),
        "suite": enumerate(document["suites"]),
        "episode": enumerate(document["episodes"]),
    }
    for what, of_them in pieces.items():
        columns = COLUMNS if what == "episode" else {}
        for name, piece in of_them:
            if not (
                isinstance(piece, dict)
                and all(isinstance(piece.get(column), kind) for column, kind in columns.items())
            ):
                raise UserError(f"{path} is damaged ({what} {name}): take another copy of it")
    return document


def _read_arguments(arguments: Sequence[str]) -> tuple[Path, int, list[str]]:
    parser = Parser("verify", "rlinf-vla verify RESULT.json --episodes 20")
    parser.add_argument("result", metavar="RESULT.json")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--episodes", type=int, default=20)
    options = parser.parse_intermixed_args(arguments)
    if wrong := [setting for setting in options.settings if "=" not in setting]:
        parser.error(f"{wrong[0]} is not KEY=VALUE")
    if options.episodes < 1:
        raise UserError(f"verify: --episodes {options.episodes}: must be at least 1")
    return Path(options.result).expanduser(), options.episodes, options.settings
