"""A sweep of ``rlinf-vla eval``: policies x suites x tasks x seeds, block by block, into one run directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.atomic import write_json
from rlinf_vla.commands import session
from rlinf_vla.commands.block_player import VIDEOS, BlockPlayer, contest, parts_of, video_name
from rlinf_vla.commands.block_workers import BlockWorkers
from rlinf_vla.commands.provenance import identities, same_provenance
from rlinf_vla.evaluation.blocks import Block, Entrant, Job, cut
from rlinf_vla.evaluation.results import Episode, as_csv, tables
from rlinf_vla.protocols import Part
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.kept import as_kept
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.evaluation_page import Film, write_page
from rlinf_vla.telemetry.evaluation_table import print_tables
from rlinf_vla.training import run_directory
from rlinf_vla.types import UserError

FORMAT = "rlinf-vla evaluation 1"


def run(config: DictConfig) -> None:
    """Play what the run directory does not hold yet; write result.json, episodes.csv, report.html and videos there."""
    recipe = recipes.read(config)
    entrants, parts = contest(recipe), parts_of(recipe)
    blocks = cut(len(entrants), [len(part.tasks) for part in parts], recipe.episodes, recipe.sweep.block)
    directory = run_directory.for_sweep(config)
    with run_directory.opened_for_sweep(directory, config):
        document = Sweep(recipe, as_kept(config), entrants, parts, blocks, directory).carry_out()
    print_tables(document)
    print(f"every episode: {session.relative(directory / run_directory.RESULT)}, episodes.csv; report: report.html beside them")
    print(f"to check it: rlinf-vla verify {session.relative(directory / run_directory.RESULT)} --episodes 20")


class Sweep:
    def __init__(
        self,
        recipe: Recipe,
        kept: dict[str, Any],
        entrants: Sequence[Entrant],
        parts: Sequence[Part],
        blocks: Sequence[Block],
        directory: Path,
    ) -> None:
        """``kept``: the recipe as JSON values."""
        self.recipe, self.kept, self.entrants, self.parts, self.blocks, self.directory = recipe, kept, entrants, parts, blocks, directory
        self.lost_processes = 0

    def carry_out(self) -> dict[str, Any]:
        """Returns the document that result.json holds."""
        policies = identities(self.recipe, self.entrants)
        machine = same_provenance(self.directory, policies)
        total, found = (sum(len(block.seeds) for block in blocks) for blocks in (self.blocks, filter(self._read, self.blocks)))
        where = session.relative(self.directory)
        tasks = sum(len(part.tasks) for part in self.parts)
        how = f"{total} episodes: {tasks} tasks, {len(self.entrants)} policies, {self.recipe.episodes} episodes each"
        print(f"found {found} of {total} episodes in {where}" if found else f"{how}, into {where}")
        with stages() as progress, self._opened() as play:
            for number, part in enumerate(self.parts):
                of_part = [block for block in self.blocks if block.part == number]
                jobs = [Job(block) for block in of_part if self._read(block) is None]
                play(jobs, partial(progress, f"part {number + 1} of {len(self.parts)}, {_label(part)}"))
                films = [Job(block, filmed=True) for block in self._chosen(of_part) if not all(map(Path.exists, self._videos(block)))]
                play(films, partial(progress, f"films of {_label(part)}"))
        documents = [self._kept(block) for block in self.blocks]
        document = self._document(documents, policies, machine)
        (self.directory / "episodes.csv").write_text(as_csv(document["episodes"]))
        write_page(self.directory, document, [film for block in self._chosen(self.blocks) for film in self._shown(block)])
        write_json(self.directory / run_directory.RESULT, document)  # last: a sweep that has one is finished
        return document

    @contextmanager
    def _opened(self) -> Iterator[Callable[[Sequence[Job], Callable[[float], None]], None]]:
        """Yields ``play(jobs, progress)``."""
        parallel = self.recipe.sweep.parallel
        with ExitStack() as stack:
            if parallel == 1:
                player = stack.enter_context(closing(BlockPlayer(self.recipe, self.entrants, self.parts)))
            else:
                workers = stack.enter_context(BlockWorkers(self.directory, parallel, self.recipe.cluster.call_timeout_s))

            def play(jobs: Sequence[Job], progress: Callable[[float], None]) -> None:
                sizes = [len(job.block.seeds) for job in jobs]
                if parallel == 1:
                    for place, job in enumerate(jobs):
                        player.keep(job, self.directory, partial(_tell, progress, sum(sizes[:place]), sizes[place], sum(sizes)))
                    return
                for done in accumulate(len(job.block.seeds) for job in workers.run(jobs)):
                    progress(done / sum(sizes))
                self.lost_processes = workers.losses

            yield play

    def _read(self, block: Block) -> dict[str, Any] | None:
        """None: it is not there, or damaged, and so is to be played."""
        try:
            document = json.loads((self.directory / run_directory.BLOCKS / f"{block.name}.json").read_text())
            whole = document["block"] == asdict(block) | {"seeds": list(block.seeds)}
            return document if whole and len(document["episodes"]) == len(block.seeds) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _kept(self, block: Block) -> dict[str, Any]:
        document = self._read(block)
        if document is None:
            raise RuntimeError(f"{block.name}.json has vanished from {self.directory / run_directory.BLOCKS}")
        return document

    def _chosen(self, blocks: Sequence[Block]) -> list[Block]:
        """Of each policy and task, ``evaluation.filmed`` episodes to film: failures first."""
        outcomes: dict[tuple[int, int, int], list[Episode]] = {}
        for block in blocks:
            outcomes.setdefault((block.entrant, block.part, block.task), []).extend(self._kept(block)["episodes"])
        chosen = []
        for place, episodes in outcomes.items():
            first = sorted(episodes, key=lambda episode: (episode["success"], episode["seed"]))[: self.recipe.evaluation.filmed]
            chosen += [Block(*place, tuple(episode["seed"] for episode in first))] if first else []
        return chosen

    def _videos(self, block: Block) -> list[Path]:
        return [self.directory / VIDEOS / video_name(block, seed) for seed in block.seeds]

    def _shown(self, block: Block) -> list[Film]:
        part = self.parts[block.part]
        return [Film(self.entrants[block.entrant].name, part.suite, part.tasks[block.task], path) for path in self._videos(block)]

    def _document(self, documents: Sequence[dict[str, Any]], policies: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
        episodes = [episode for each in documents for episode in each["episodes"]]
        environments: dict[int, dict[str, Any]] = {}
        for block, document in zip(self.blocks, documents, strict=True):
            if environments.setdefault(block.part, document["environment"]) != document["environment"]:
                where = f"{self.parts[block.part].suite} in {self.directory} was played on different simulators"
                raise UserError(f"{where}: {environments[block.part]} and {document['environment']}; start a new run_dir")
            if document["policy"]:
                policies[self.entrants[block.entrant].name].update(document["policy"])
        suites = [{"suite": part.suite, "tasks": list(part.tasks)} | environments[place] for place, part in enumerate(self.parts)]
        lost = {"simulators": sum(document["lost_simulators"] for document in documents), "processes": self.lost_processes}
        head = {"format": FORMAT, "name": self.recipe.name, "environment": machine, "suites": suites, "entrants": policies, "lost": lost}
        return head | tables(episodes) | {"recipe": self.kept, "episodes": episodes}


def _tell(progress: Callable[[float], None], before: int, size: int, total: int, fraction: float) -> None:
    """That ``fraction`` of a block is done, as a fraction of all."""
    progress((before + fraction * size) / total)


def _label(part: Part) -> str:
    return f"{part.suite}: {part.tasks[0]}" + (f" and {len(part.tasks) - 1} more" if len(part.tasks) > 1 else "")
