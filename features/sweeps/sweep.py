"""Run an evaluation sweep (policies x suites x tasks x seeds) in blocks into a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.io import read_json, write_json
from rlinf_vla.core.protocols import Suite
from rlinf_vla.evaluation.statistics import Episode, column_of, count_cut
from rlinf_vla.features.sweeps.block_player import VIDEOS, BlockPlayer
from rlinf_vla.features.sweeps.block_workers import BlockWorkers
from rlinf_vla.features.sweeps.blocks import Block, Job, Sweep, fixed
from rlinf_vla.features.sweeps.provenance import identities, same_provenance
from rlinf_vla.features.sweeps.results import FORMAT, as_csv, tables
from rlinf_vla.features.sweeps.sweep_fit import require_fit
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.saved_recipe import to_plain
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.evaluation_report import Film, print_tables, write_report

Documents = dict[Block, dict[str, Any]]
"""What ``BlockPlayer.play`` returned for each block."""


def run(recipe: Recipe, config: DictConfig) -> dict[str, Any]:
    """Run the missing episodes; write result.json, episodes.csv, report.html and videos.

    Returns the document of result.json.
    """
    recipe.sweep.policies = config.sweep.policies = fixed(recipe.sweep.policies)
    sweep = Sweep.of(recipe)
    require_fit(sweep)
    directory = run_directory.for_sweep(config)
    with run_directory.opened_for_sweep(directory, config):
        document = SweepRun(sweep, directory, to_plain(config)).carry_out()
    print_tables(document)
    print(
        f"episodes: {builders.relative(directory / run_directory.RESULT)}, episodes.csv; report: report.html in the same directory"
    )
    print(
        f"to check it: rlinf-vla verify {builders.relative(directory / run_directory.RESULT)} --episodes 20"
    )
    return document


class SweepRun:
    """A sweep in a run directory; resumes from the blocks that are already there."""

    def __init__(self, sweep: Sweep, directory: Path, saved_recipe: dict[str, Any]) -> None:
        """``saved_recipe``: the recipe as JSON values."""
        self.sweep = sweep
        self.recipe = sweep.recipe
        self.directory = directory
        self.saved_recipe = saved_recipe

    def carry_out(self) -> dict[str, Any]:
        """Run missing blocks, write all results and return the document of result.json."""
        blocks, suites = self.sweep.blocks, self.sweep.suites
        policies = identities(self.recipe, self.sweep.policies)
        machine = same_provenance(self.directory, policies)
        documents = self._read(blocks)
        total, saved = _episodes(blocks), _episodes(documents)
        where = builders.relative(self.directory)
        tasks = sum(len(suite.tasks) for suite in suites)
        most = "at most " if self.recipe.sweep.stop_when_decided else ""
        kinds = "".join(f", {probe}" for probe in self.recipe.evaluation.probes)
        how = f"{most}{total} episodes: {tasks} tasks, {len(policies)} policies{kinds}, {self.recipe.episodes} episodes each"
        print(f"found {saved} of {total} episodes in {where}" if saved else f"{how}, into {where}")
        parallel, timeout = self.recipe.sweep.parallel, self.recipe.cluster.call_timeout_s
        player = BlockPlayer(self.sweep) if parallel == 1 else BlockWorkers(parallel, timeout)
        ended: list[Block] = []
        with stages() as progress, closing(player):
            for number, suite in enumerate(suites):
                stage = partial(progress, f"part {number + 1} of {len(suites)}, {_label(suite)}")
                of_suite = self.sweep.until_decided(
                    number, partial(self._play_missing, player, documents, stage)
                )
                ended += of_suite
                chosen = self._chosen({block: documents[block] for block in of_suite})
                films = [
                    Job(block, filmed=True)
                    for block in chosen
                    if not all(map(Path.exists, self._videos(block)))
                ]
                self._play(player, films, partial(progress, f"films of {_label(suite)}"))
        documents = {block: documents[block] for block in ended}
        document = self._document(documents, policies, machine, player.losses)
        (self.directory / "episodes.csv").write_text(as_csv(document["episodes"]))
        write_report(
            self.directory,
            document,
            [film for block in self._chosen(documents) for film in self._films(block)],
        )
        write_json(
            self.directory / run_directory.RESULT, document
        )  # last: it marks the sweep as finished
        return document

    def _play_missing(
        self,
        player: BlockPlayer | BlockWorkers,
        documents: Documents,
        progress: Callable[[float], None],
        part: Sequence[Block],
    ) -> list[Episode]:
        """Play blocks of ``part`` that ``documents`` lacks, and add them; return all episodes."""
        self._play(player, [Job(block) for block in part if block not in documents], progress)
        documents.update(self._read(part))
        return [episode for block in part for episode in documents[block]["episodes"]]

    def _play(
        self,
        player: BlockPlayer | BlockWorkers,
        jobs: Sequence[Job],
        progress: Callable[[float], None],
    ) -> None:
        """Carry out jobs, in this process or in workers; report the fraction of all episodes."""
        done = dict.fromkeys(jobs, 0.0)

        def reached(job: Job, fraction: float) -> None:
            done[job] = fraction
            progress(
                sum(len(job.block.seeds) * part for job, part in done.items())
                / _episodes(job.block for job in done)
            )

        player.run(jobs, self.directory, reached)

    def _read(self, blocks: Sequence[Block]) -> Documents:
        """Return the results of ``blocks`` that need not be played: neither missing nor damaged."""
        documents = {}
        for block in blocks:
            try:
                document = read_json(self.directory / run_directory.BLOCKS / f"{block.name}.json")
                whole = document["block"] == asdict(block) | {"seeds": list(block.seeds)}
                if whole and len(document["episodes"]) == len(block.seeds):
                    documents[block] = document
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return documents

    def _chosen(self, documents: Documents) -> list[Block]:
        """Return ``evaluation.filmed`` episodes per policy and task to film, failures first."""
        outcomes: dict[tuple[int, int, int], list[Episode]] = {}
        for block, document in documents.items():
            outcomes.setdefault((block.policy, block.suite, block.task), []).extend(
                document["episodes"]
            )
        chosen = []
        for indices, episodes in outcomes.items():
            first = sorted(episodes, key=lambda episode: (episode["success"], episode["seed"]))[
                : self.recipe.evaluation.filmed
            ]
            chosen += (
                [Block(*indices, tuple(episode["seed"] for episode in first))] if first else []
            )
        return chosen

    def _videos(self, block: Block) -> list[Path]:
        return [self.directory / VIDEOS / f"{block.name_of(seed)}.mp4" for seed in block.seeds]

    def _films(self, block: Block) -> list[Film]:
        return [
            Film(column_of(policy, probe), suite, task, path)
            for (policy, probe, suite, task, _), path in zip(
                self.sweep.places(block), self._videos(block), strict=True
            )
        ]

    def _document(
        self,
        documents: Documents,
        policies: dict[str, Any],
        machine: dict[str, Any],
        lost_processes: int,
    ) -> dict[str, Any]:
        environments: dict[int, dict[str, Any]] = {}
        for block, document in documents.items():
            if (
                environments.setdefault(block.suite, document["environment"])
                != document["environment"]
            ):
                where = f"{self.sweep.suites[block.suite].name} in {self.directory} was played on different simulators"
                raise UserError(
                    f"{where}: {environments[block.suite]} and {document['environment']}; start a new run_dir"
                )
            policies[self.sweep.policies[block.policy].name].update(document["policy"] or {})
        episodes = [episode for document in documents.values() for episode in document["episodes"]]
        suites = [
            {"suite": suite.name, "tasks": list(suite.tasks)} | environments[index]
            for index, suite in enumerate(self.sweep.suites)
        ]
        lost = {
            "simulators": sum(document["lost_simulators"] for document in documents.values()),
            "processes": lost_processes,
        }
        lost["episodes cut because the simulator failed"] = count_cut(episodes)
        head = {
            "format": FORMAT,
            "name": self.recipe.name,
            "environment": machine,
            "suites": suites,
            "provenance": policies,
            "lost": lost,
        }
        return head | tables(episodes) | {"recipe": self.saved_recipe, "episodes": episodes}


def _episodes(blocks: Iterable[Block]) -> int:
    return sum(len(block.seeds) for block in blocks)


def _label(suite: Suite) -> str:
    return f"{suite.name}: {suite.tasks[0]}" + (
        f" and {len(suite.tasks) - 1} more" if len(suite.tasks) > 1 else ""
    )
