"""The verbs on recorded results."""

from __future__ import annotations

from rlinf_vla.core.verb import JSON, SEE, TRAIN, Help, Verb

VERIFY = Verb(
    TRAIN,
    "repeat part of an evaluation and compare the outcomes",
    "rlinf_vla.features.sweeps.verify",
    Help(
        ("RESULT.json [--episodes N] [KEY=VALUE ...]",),
        (
            ("RESULT.json", "result of a sweep"),
            ("--episodes N", "episodes, spread over all policies and tasks (20)"),
            (
                "KEY=VALUE",
                "programs and paths that the file's recipe names; they are taken only from here, such as env.python=PATH",
            ),
        ),
        (
            "RESULT.json",
            "RESULT.json --episodes 50",
            "RESULT.json env.python=/opt/isaac/bin/python",
        ),
        "Exit code: 0 if the outcomes agree, 1 if they do not.",
    ),
)
COMPARE = Verb(
    TRAIN,
    "compare recorded evaluations",
    "rlinf_vla.features.sweeps.compare",
    Help(
        ("NAME=FILE[:COLUMN][,FILE ...] ... [OPTIONS]",),
        (
            ("FILE", "evaluation/NAME.json of a run, or result.json of a sweep"),
            ("COLUMN", "a mode (sampled, greedy), or a policy of a sweep"),
            (
                "--output FILE.json",
                "write all values there, with performance profiles and times to success",
            ),
            ("--figure FILE.svg", "draw them there (.svg, .png or .pdf)"),
            ("--published NAME", "lay the rates that a paper reports beside them"),
            *JSON,
        ),
        (
            "sft=a/evaluation/after.json ppo=b/evaluation/after.json",
            "ppo=a.json,b.json grpo=c.json,d.json --figure rates.svg",
            "a=result.json:start b=result.json:step_000030 --json",
        ),
    ),
)
RUNS = Verb(
    SEE,
    "list, compare and prune runs",
    "rlinf_vla.features.sweeps.runs",
    Help(
        (
            "[list] [RECIPE] [--json]",
            "compare RUN RUN [--json]",
            "prune [RECIPE] [--keep N] [--yes] [--json]",
        ),
        (
            ("RUN", "directory of a run, or its name in runs/"),
            ("--keep N", "newest checkpoints of each run to keep (1)"),
            ("--yes", "remove; without it, prune only says what it would remove"),
            *JSON,
        ),
        (
            "",
            "compare maniskill_ppo/20261101 maniskill_ppo/20261102",
            "prune maniskill_ppo --keep 2",
        ),
    ),
    words=("list", "compare", "prune"),
)
