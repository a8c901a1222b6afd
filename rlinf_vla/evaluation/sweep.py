"""Run an evaluation sweep (policies x suites x tasks x seeds) in blocks into a run directory."""

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

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import Suite
from rlinf_vla.evaluation.block_player import VIDEOS, BlockPlayer, eval_policies_of, suites_of, video_name
from rlinf_vla.evaluation.block_workers import BlockWorkers
from rlinf_vla.evaluation.blocks import Block, EvalPolicy, Job, split_into_blocks
from rlinf_vla.evaluation.provenance import identities, same_provenance
from rlinf_vla.evaluation.results import Episode, as_csv, tables
from rlinf_vla.runtime import builders, recipes, run_directory
from rlinf_vla.runtime.saved_recipe import to_plain
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.evaluation_report import Film, print_tables, write_report

FORMAT = "rlinf-vla evaluation 2"


def run(config: DictConfig) -> None:
    """Run the missing episodes; write result.json, episodes.csv, report.html and videos."""
    recipe = recipes.read(config)
    policies, suites = eval_policies_of(recipe), suites_of(recipe)
    blocks = split_into_blocks(len(policies), [len(suite.tasks) for suite in suites], recipe.episodes, recipe.sweep.block)
    directory = run_directory.for_sweep(config)
    with run_directory.opened_for_sweep(directory, config):
        document = Sweep(recipe, to_plain(config), policies, suites, blocks, directory).carry_out()
    print_tables(document)
    print(f"episodes: {builders.relative(directory / run_directory.RESULT)}, episodes.csv; report: report.html in the same directory")
    print(f"to check it: rlinf-vla verify {builders.relative(directory / run_directory.RESULT)} --episodes 20")


class Sweep:
    """An evaluation sweep in a run directory; resumes from the blocks that are already there."""

    def __init__(
        self,
        recipe: Recipe,
        kept: dict[str, Any],
        policies: Sequence[EvalPolicy],
        suites: Sequence[Suite],
        blocks: Sequence[Block],
        directory: Path,
    ) -> None:
        """``kept``: the recipe as JSON values."""
        self.recipe, self.kept, self.policies, self.suites, self.blocks, self.directory = recipe, kept, policies, suites, blocks, directory
        self.lost_processes = 0

    def carry_out(self) -> dict[str, Any]:
        """Run missing blocks, write all results and return the document of result.json."""
        policies = identities(self.recipe, self.policies)
        machine = same_provenance(self.directory, policies)
        total, found = (sum(len(block.seeds) for block in blocks) for blocks in (self.blocks, filter(self._read, self.blocks)))
        where = builders.relative(self.directory)
        tasks = sum(len(suite.tasks) for suite in self.suites)
        how = f"{total} episodes: {tasks} tasks, {len(self.policies)} policies, {self.recipe.episodes} episodes each"
        print(f"found {found} of {total} episodes in {where}" if found else f"{how}, into {where}")
        with stages() as progress, self._opened() as play:
            for number, suite in enumerate(self.suites):
                of_suite = [block for block in self.blocks if block.suite == number]
                jobs = [Job(block) for block in of_suite if self._read(block) is None]
                play(jobs, partial(progress, f"part {number + 1} of {len(self.suites)}, {_label(suite)}"))
                films = [Job(block, filmed=True) for block in self._chosen(of_suite) if not all(map(Path.exists, self._videos(block)))]
                play(films, partial(progress, f"films of {_label(suite)}"))
        documents = [self._kept(block) for block in self.blocks]
        document = self._document(documents, policies, machine)
        (self.directory / "episodes.csv").write_text(as_csv(document["episodes"]))
        write_report(self.directory, document, [film for block in self._chosen(self.blocks) for film in self._shown(block)])
        write_json(self.directory / run_directory.RESULT, document)  # last: it marks the sweep as finished
        return document

    @contextmanager
    def _opened(self) -> Iterator[Callable[[Sequence[Job], Callable[[float], None]], None]]:
        """Yield ``play(jobs, progress)``, which runs jobs in this process or in block workers."""
        parallel = self.recipe.sweep.parallel
        with ExitStack() as stack:
            if parallel == 1:
                player = stack.enter_context(closing(BlockPlayer(self.recipe, self.policies, self.suites)))
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
        """Return a block's result, or None if it is missing or damaged and must be run."""
        try:
            document = json.loads((self.directory / run_directory.BLOCKS / f"{block.name}.json").read_text())
            whole = document["block"] == asdict(block) | {"seeds": list(block.seeds)}
            return document if whole and len(document["episodes"]) == len(block.seeds) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _kept(self, block: Block) -> dict[str, Any]:
        document = self._read(block)
        if document is None:
            raise RuntimeError(f"{block.name}.json is missing from {self.directory / run_directory.BLOCKS}")
        return document

    def _chosen(self, blocks: Sequence[Block]) -> list[Block]:
        """Return ``evaluation.filmed`` episodes per policy and task to film, failures first."""
        outcomes: dict[tuple[int, int, int], list[Episode]] = {}
        for block in blocks:
            outcomes.setdefault((block.policy, block.suite, block.task), []).extend(self._kept(block)["episodes"])
        chosen = []
        for place, episodes in outcomes.items():
            first = sorted(episodes, key=lambda episode: (episode["success"], episode["seed"]))[: self.recipe.evaluation.filmed]
            chosen += [Block(*place, tuple(episode["seed"] for episode in first))] if first else []
        return chosen

    def _videos(self, block: Block) -> list[Path]:
        return [self.directory / VIDEOS / video_name(block, seed) for seed in block.seeds]

    def _shown(self, block: Block) -> list[Film]:
        suite = self.suites[block.suite]
        return [Film(self.policies[block.policy].name, suite.name, suite.tasks[block.task], path) for path in self._videos(block)]

    def _document(self, documents: Sequence[dict[str, Any]], policies: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
        episodes = [episode for each in documents for episode in each["episodes"]]
        environments: dict[int, dict[str, Any]] = {}
        for block, document in zip(self.blocks, documents, strict=True):
            if environments.setdefault(block.suite, document["environment"]) != document["environment"]:
                where = f"{self.suites[block.suite].name} in {self.directory} was played on different simulators"
                raise UserError(f"{where}: {environments[block.suite]} and {document['environment']}; start a new run_dir")
            if document["policy"]:
                policies[self.policies[block.policy].name].update(document["policy"])
        suites = [{"suite": suite.name, "tasks": list(suite.tasks)} | environments[place] for place, suite in enumerate(self.suites)]
        lost = {"simulators": sum(document["lost_simulators"] for document in documents), "processes": self.lost_processes}
        head = {"format": FORMAT, "name": self.recipe.name, "environment": machine, "suites": suites, "provenance": policies, "lost": lost}
        return head | tables(episodes) | {"recipe": self.kept, "episodes": episodes}


def _tell(progress: Callable[[float], None], before: int, size: int, total: int, fraction: float) -> None:
    """Report ``fraction`` of a block as a fraction of all episodes."""
    progress((before + fraction * size) / total)


def _label(suite: Suite) -> str:
    return f"{suite.name}: {suite.tasks[0]}" + (f" and {len(suite.tasks) - 1} more" if len(suite.tasks) > 1 else "")
