"""Run the jobs of ``--multirun`` one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from rlinf_vla.config.errors import Failure, UserError, printable
from rlinf_vla.config.recipe import NO_ALGORITHM
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.builders import build_algorithm


def run_jobs(jobs: Sequence[DictConfig], command: Callable[[DictConfig], object]) -> None:
    """Run the jobs of ``--multirun``, also those after one that failed.

    Raises UserError before any if one of them cannot run, and Failure at the end if one failed.
    """
    count = len(jobs)
    failed = list[int]()
    for number, job in enumerate(jobs, 1):
        try:
            recipe = recipes.read(job)
            if recipe.algorithm.name != NO_ALGORITHM:
                build_algorithm(recipe)
        except UserError as error:
            raise UserError(f"job {number} of {count}: {error} (no job was started)") from None
    for key in ("run_dir", "output"):
        directories = [job[key] for job in jobs if job[key] is not None]
        if len(set(directories)) < len(directories):
            raise UserError(
                f"{key}={directories[0]} is that of several jobs: leave it out, or let it depend on what differs, such as ${{seed}}"
            )
    for number, job in enumerate(jobs, 1):
        print(f"job {number} of {count}", flush=True)
        try:
            command(job)
        except (UserError, Failure) as error:
            failed.append(number)
            print(
                printable(f"job {number} of {count} failed: {error}"), file=sys.stderr, flush=True
            )
        except BaseException:
            if number < count:
                print(
                    f"job {number} of {count} was stopped; those after it were not started",
                    file=sys.stderr,
                    flush=True,
                )
            raise
    if failed:
        raise Failure(f"{len(failed)} of {count} jobs failed: {', '.join(map(str, failed))}")
