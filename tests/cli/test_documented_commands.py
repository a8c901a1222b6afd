"""Runs, on the real simulator and at a small size, the commands of the pages that a newcomer follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlinf_vla.cli import compose
from rlinf_vla.cli import main as cli
from rlinf_vla.runtime import recipes
from tests.test_documentation import ROOT, commands
from tests.test_recipes import COMMON, PROGRESS, SMALL, kept_simulators, require_simulator  # noqa: F401

pytestmark = [pytest.mark.simulator, pytest.mark.slow, pytest.mark.timeout(900)]

PAGES = ("start/quickstart.md", "guides/own_data.md", "guides/own_task.md", "guides/resume.md", "evaluation.md")
ELSEWHERE = re.compile(
    r"^(new|robot|completion|train --config-dir)\b|recipe=(libero|genesis|so101|franka)|hf://|\[|\.\.\.|a/evaluation|VERB|runs/b/"
)
"""Commands that need hardware, files of the reader, or another extra; written packages have tests of their own."""
RUN, DEMONSTRATIONS = "runs/a", "DIR"
EVALUATION = ("episodes=2", "evaluation.filmed=0")
SWEEP = ("env.tasks=[PushCube]", "env.num_envs=2", "env.processes=1", "rollout.pipeline_depth=1", "rollout.batch_size=2")

Command = Callable[[list[str]], int]


def shortened(words: list[str]) -> list[str]:
    """The command with few environments, episodes and steps in place of its own numbers."""
    verb, *rest = words
    given = [each for each in rest if not re.match(r"(episodes|iterations)=", each)]
    recipe = next((each for each in given if each.startswith("recipe=")), None)
    if verb == "train":
        if recipe is None:  # a saved recipe is small
            return [verb, *given]
        if "--cfg" in given:
            return words
        algorithm = recipes.read(compose.load("train", [recipe, "cluster=laptop"])).algorithm.name
        simulator = () if "dialogue" in recipe else (PROGRESS,) * (algorithm != "sft")
        return [verb, *given, *COMMON, *SMALL[algorithm], *simulator]
    if verb == "record":
        return [verb, *given, "algorithm.demonstrations.episodes=2", "algorithm.demonstrations.noise=[0.0]", "env.num_envs=2"]
    if verb == "eval":
        return [verb, *given, *EVALUATION, *(SWEEP if recipe else ())]
    if verb == "verify":
        return [verb, str(next(Path("runs/maniskill_eval").glob("*/result.json"))), "--episodes", "2"]
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
        assert cli.run(shortened(["record", "recipe=maniskill_sft", f"output={DEMONSTRATIONS}"])) == 0
        yield place
    torch.set_num_threads(threads)


def documented(page: str) -> list[list[str]]:
    found = [words for words in commands((ROOT / "docs" / page).read_text()) if not ELSEWHERE.search(" ".join(words))]
    return [[re.sub(r"step_\d+", "step_000001", word) for word in words] for words in found]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(folder: Path, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = documented(page)
    assert found
    for words in found:
        if any(word == f"output={DEMONSTRATIONS}" for word in words):
            continue  # the folder has it
        assert cli.run(shortened(words)) == 0, f"rlinf-vla {' '.join(words)}\n{capsys.readouterr().err}"
