"""Settings of official trainers in whole runs of imitation (see docs/imitation.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, Counting

QUICK = (
    "evaluation.before_and_after=false",
    "algorithm.demonstrations.episodes=4",
    "rollout.pipeline_depth=1",
)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (
            ("algorithm.schedule=step",),
            "algorithm.schedule=step needs the step at which the learning rate falls: set algorithm.decay_steps",
        ),
        (
            ("algorithm.schedule=linear",),
            "algorithm.schedule=linear is not known: use cosine or step",
        ),
        (
            ("algorithm.learning_rate_end=2",),
            "algorithm.learning_rate_end=2.0 is out of range: use a number from 0 to 1",
        ),
        (
            ("algorithm.adam_beta2=1",),
            "algorithm.adam_beta2=1.0 is out of range: use a number of at least 0 and below 1",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    rlinf_vla: CommandLine, counting: Counting, words: tuple[str, ...], complaint: str
) -> None:
    assert rlinf_vla(*counting.arguments("train", "counting_sft", *words)).complaint == complaint


def test_a_constant_learning_rate_does_not_depend_on_the_runs_length(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    words = (*QUICK, "algorithm.learning_rate_end=1", "run_dir=run")
    arguments = counting.arguments("train", "counting_sft", *words, "iterations=2")
    assert rlinf_vla(*arguments).code == 0
    assert rlinf_vla("train", "run=run", "iterations=20").code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["sft/learning_rate"] for line in lines} == {0.05}
