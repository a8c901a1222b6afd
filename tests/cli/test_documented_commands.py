"""Runs, on the real simulator and at a small size, every command of the documentation that this machine can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlinf_vla.cli import compose
from rlinf_vla.cli import main as cli
from rlinf_vla.runtime import recipes
from tests.test_documentation import PAGES, ROOT, commands
from tests.test_recipes import COMMON, PROGRESS, SMALL, kept_simulators, require_simulator  # noqa: F401

pytestmark = [pytest.mark.simulator, pytest.mark.slow, pytest.mark.timeout(900)]

ELSEWHERE = {
    "needs a robot, a GPU or a cluster": r"^robot\b|\brobot=|recipe=(franka|so101)|cluster=\d+gpu|cluster\.address=",
    "needs a checkpoint, a file or a server of the reader": (
        r"hf://|=/data/|ws://|checkpoint=DIR|--config-dir|run=(DIR|RUN|push-cube)|=RUN/|RESULT\.json|profile=|runs/(b/|a/result)|a/evaluation"
    ),
    "needs another extra": r"recipe=(libero|genesis|newton|isaaclab|metaworld)|runtime=ray|tracker=",
    "has tests of its own, with a server, a browser or a package that is written": r"^(new|completion|serve|view|push|pull|export)\b",
    "is a form": r"\.\.\.|VERB",
}
"""Why a command of the documentation is not run here -> what such commands contain."""
RUN, DEMONSTRATIONS = "runs/a", "DIR"
EVALUATION = ("episodes=2", "evaluation.filmed=0")
SWEEP = (
    "env.tasks=[PushCube]",
    "env.num_envs=2",
    "env.processes=1",
    "rollout.pipeline_depth=1",
    "rollout.batch_size=2",
)

Command = Callable[[list[str]], int]


def shortened(words: list[str]) -> list[str]:
    """The command with few environments, episodes and steps in place of its own numbers."""
    verb, *rest = words
    given = [each for each in rest if not re.match(r"(episodes|iterations)=", each)]
    recipe = next((each for each in given if each.startswith("recipe=")), None)
    if verb in ("train", "plan"):
        if recipe is None:  # a saved recipe is small
            return [verb, *given]
        if {"--cfg", "--dry-run"} & set(given):
            return words
        algorithm = recipes.read(compose.load("train", [recipe, "cluster=laptop"])).algorithm.name
        simulator = () if "dialogue" in recipe else (PROGRESS,) * (algorithm != "sft")
        return [verb, *given, *COMMON, *SMALL[algorithm], *simulator]
    if verb == "record":
        return [
            verb,
            *given,
            "algorithm.demonstrations.episodes=2",
            "algorithm.demonstrations.noise=[0.0]",
            "env.num_envs=2",
        ]
    if verb == "eval":
        return [verb, *given, *EVALUATION, *(SWEEP if recipe else ())]
    if verb == "verify":
        return [
            verb,
            str(next(Path("runs/maniskill_eval").glob("*/result.json"))),
            "--episodes",
            "2",
        ]
    return words


@pytest.fixture(scope="module")
def folder(kept_simulators: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:  # noqa: F811
    """Holds a run, a dataset and the policy of a run of imitation, by the names that the pages have."""
    require_simulator("maniskill_ppo")
    place = tmp_path_factory.mktemp("reader")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.run(shortened(["train", "recipe=maniskill_ppo", f"run_dir={RUN}"])) == 0
        assert (
            cli.run(shortened(["record", "recipe=maniskill_sft", f"output={DEMONSTRATIONS}"])) == 0
        )
        yield place
    torch.set_num_threads(threads)


def documented(page: str) -> list[list[str]]:
    reasons = re.compile("|".join(ELSEWHERE.values()))
    found = [
        words
        for words in commands((ROOT / page).read_text())
        if not reasons.search(" ".join(words))
    ]
    return [
        [
            re.sub(r"step_\d+", "step_000001", word).replace("NAME", "maniskill_ppo")
            for word in words
        ]
        for words in found
    ]


COMMANDS = {
    page: found
    for page in (str(path.relative_to(ROOT)) for path in PAGES)
    if page.startswith("docs/")
    and not page.startswith("docs/results/")
    and (found := documented(page))
}
"""Of each page. Pages of results quote what was measured, at its full size."""
FIRST = {"start/quickstart", "guides/own_data", "guides/own_task", "guides/resume", "evaluation"}
"""Pages that a newcomer follows."""
OFTEN = {"docs/start/quickstart.md", "docs/guides/own_data.md", "docs/guides/resume.md"}
"""Pages whose commands run for each change. The program accepts those of all (test_documentation.py)."""


def test_the_pages_of_a_newcomer_have_commands_that_run() -> None:
    assert {f"docs/{page}.md" for page in FIRST} <= COMMANDS.keys()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in OFTEN else pytest.mark.nightly) for page in COMMANDS],
)
def test_the_commands_of_a_page_run(
    folder: Path, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in COMMANDS[page]:
        if any(word == f"output={DEMONSTRATIONS}" for word in words):
            continue  # the folder has it
        assert cli.run(shortened(words)) == 0, (
            f"rlinf-vla {' '.join(words)}\n{capsys.readouterr().err}"
        )
