"""Success rates that papers report, to be laid beside ours: ``rlinf-vla compare --published``.

A method of ours that has the name of a paper's column is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.evaluation.aggregate import Outcomes, success


@dataclass(frozen=True)
class Published:
    """A table of a paper.

    ``rows``: name -> the tasks, or suites of LIBERO, over which it is the mean. ``columns``: method
    -> percent per row. ``note``: what a reader must know before comparing.
    """

    title: str
    source: str
    rows: Mapping[str, Sequence[str]]
    columns: Mapping[str, Sequence[float]]
    note: str
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Rows of the same kinds of tasks in this package, compared where no task of ``rows`` is."""


_SUITES = {
    "Spatial": ("libero_spatial",),
    "Object": ("libero_object",),
    "Goal": ("libero_goal",),
    "Long": ("libero_10",),
}
LIBERO_TASKS = {"libero_90": 90}
"""Tasks of a suite of LIBERO; the others have 10."""
_LIBERO = "one episode from each of the 50 stored states of a task, in which the runs trained, too (RLinf: libero.rst)"
_OF_TASK = {
    "In distribution": ("Main-v3",),
    "Vision": (
        "VisionImage-v1-test",
        *(f"Vision{kind}-v1-test" for kind in ("Texture03", "Texture05", "Whole03", "Whole05")),
    ),
    "Semantics": (
        *("Carrot-v1-test", "Plate-v1-test", "Instruct-v1-test"),
        *("MultiCarrot-v1", "MultiCarrot-v1-test", "MultiPlate-v1", "MultiPlate-v1-test"),
    ),
    "Execution": ("Position-v1-test", "EEPose-v1-test", "PositionChangeTo-v1-test"),
}
_SCENE25 = {
    row: tuple(f"PutOnPlateInScene25{name}" for name in names) for row, names in _OF_TASK.items()
}
"""RL4VLA's groups of its tasks."""
_KINDS = {
    "In distribution": ("",),
    "Vision": ("UnseenTable", "TextureWeak", "TextureStrong", "NoiseWeak", "NoiseStrong"),
    "Semantics": (
        *("UnseenObject", "UnseenReceptacle", "UnseenInstruction", "TwoObjects"),
        *("TwoUnseenObjects", "TwoReceptacles", "TwoUnseenReceptacles"),
    ),
    "Execution": ("Position", "RobotPose", "MovedObject"),
}
_PLATES = {row: tuple(f"PutOnPlate25{name}" for name in names) for row, names in _KINDS.items()}
"""Without downloaded assets: the same kinds of shift, not the same scenes, robot or network."""
_FIRST = {"In distribution": _SCENE25["In distribution"]}
_SAMPLED = "evaluated at temperature 0.6; the training objects Carrot-v1, which RLinf evaluates, too, are in no row"
_RLINF_VLA = (
    "arXiv 2510.06710; RLinf at b4b586e6: docs/source-en/rst_source/publications/rlinf_vla.rst"
)
_SIMPLEVLA = (
    "arXiv 2509.09674, from a copy (vnrobo.com/en/blog/simplevla-rl-4-results) whose columns are shifted by one: "
    "its gains are those of Object, Goal, Long and the average, and another copy gives Long as 86.5; "
    "Spatial follows from the averages, 91.0 and 99.1"
)
_PI_RL = "arXiv 2510.25889; RLinf at 38766789: docs/source-en/rst_source/examples/embodied/pi0.rst"

PUBLISHED = {
    "rlinf_openvla": Published(
        "RLinf-VLA and RL4VLA, OpenVLA, PutOnPlateInScene25",
        _RLINF_VLA,
        _SCENE25,
        {
            "start": (53.91, 38.75, 35.94, 42.11),
            "rl4vla": (93.75, 80.47, 75.00, 81.77),
            "grpo": (84.38, 74.69, 72.99, 77.86),
            "ppo": (96.09, 82.03, 78.35, 85.42),
        },
        _SAMPLED,
        _PLATES,
    ),
    "rlinf_openvla_oft": Published(
        "RLinf-VLA, OpenVLA-OFT, PutOnPlateInScene25",
        _RLINF_VLA,
        _SCENE25,
        {
            "start": (28.13, 27.73, 12.95, 11.72),
            "grpo": (94.14, 84.69, 45.54, 44.66),
            "ppo": (97.66, 92.11, 64.84, 73.57),
        },
        _SAMPLED,
        _PLATES,
    ),
    "pirl_maniskill_pi0": Published(
        "πRL, π₀, PutOnPlateInScene25",
        _PI_RL,
        _FIRST,
        {"start": (38.4,), "sde": (78.8,), "noise": (77.8,)},
        "evaluated by Euler steps",
    ),
    "pirl_maniskill_pi05": Published(
        "πRL, π₀.₅, PutOnPlateInScene25",
        _PI_RL,
        _FIRST,
        {"start": (40.1,), "sde": (90.9,), "noise": (89.7,)},
        "evaluated by Euler steps",
    ),
    "rlinf_libero": Published(
        "RLinf-VLA, one OpenVLA-OFT for 130 tasks of LIBERO",
        _RLINF_VLA,
        _SUITES | {"90": ("libero_90",)},
        {"start": (72.18, 71.48, 64.06, 48.44, 70.97), "grpo": (99.40, 99.80, 98.79, 93.95, 98.59)},
        f"{_LIBERO}; another page of RLinf (libero.rst) gives 42.1 and 97.9 for all tasks",
    ),
    "rlinf_libero_traj1": Published(
        "RLinf-VLA, OpenVLA-OFT from one demonstration per task, LIBERO",
        "RLinf: README of 2025-09, docs/source-zh/rst_source/examples/libero.rst",
        _SUITES,
        {"start": (56.5, 25.6, 45.6, 9.7), "grpo": (99.0, 99.0, 99.0, 94.4)},
        f"{_LIBERO}; starts evaluated greedily, trained models at temperature 1.6",
    ),
    "simplevla_rl": Published(
        "SimpleVLA-RL, OpenVLA-OFT, LIBERO",
        _SIMPLEVLA,
        _SUITES,
        {"start": (91.6, 95.3, 90.6, 86.5), "grpo": (99.4, 99.1, 99.2, 98.5)},
        f"{_LIBERO}; its README gives 97.6 for Long",
    ),
    "simplevla_rl_traj1": Published(
        "SimpleVLA-RL, OpenVLA-OFT from one demonstration per task, LIBERO",
        "README of PRIME-RL/SimpleVLA-RL at 7c51662d",
        {"Long": _SUITES["Long"]},
        {"start": (17.3,), "grpo": (91.7,)},
        _LIBERO,
    ),
    "pirl_pi0": Published(
        "πRL, π₀, LIBERO",
        _PI_RL,
        _SUITES,
        {
            "start": (65.3, 64.4, 49.8, 51.2),
            "grpo": (97.8, 97.8, 83.2, 81.4),
            "ppo": (98.4, 99.4, 96.2, 90.2),
            "noise": (99.0, 99.2, 98.2, 93.8),
        },
        _LIBERO,
    ),
    "pirl_pi05": Published(
        "πRL, π₀.₅, LIBERO",
        _PI_RL,
        _SUITES,
        {
            "start": (84.6, 95.4, 84.6, 43.9),
            "grpo": (97.4, 99.8, 91.2, 77.6),
            "ppo": (99.6, 100.0, 98.8, 93.0),
            "noise": (99.6, 100.0, 99.6, 94.0),
        },
        _LIBERO,
    ),
}
"""Tables by name."""


def beside_published(name: str, outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
    """Return the paper's rows that some ``outcomes`` (by method) have, and ours beside them.

    Keys: title, source, note, missing (rows that are not there), rows: row -> paper (method ->
    percent), ours (method -> pc_success and pc_success_ci95, hierarchical) and, for methods of the
    same name, verdict: "agrees" if the paper's rate lies in our interval, else "above" or "below";
    or how many of the row's tasks ours has, if not all.
    Raises UserError for an unknown name, or if no row is there.
    """
    if name not in PUBLISHED:
        raise UserError(f"--published {name} is not known: choose from {', '.join(PUBLISHED)}")
    paper = PUBLISHED[name]
    found: dict[str, Any] = {
        "title": paper.title,
        "source": paper.source,
        "note": paper.note,
        "missing": [],
        "rows": {},
    }
    played = {task for each in outcomes.values() for task in each.tasks}
    named = any(
        _is_in(task, part) for parts in paper.rows.values() for part in parts for task in played
    )
    rows = paper.rows if named or not paper.kinds else paper.kinds
    if rows is paper.kinds:
        found["note"] += (
            "; ours is PutOnPlate25: the same kinds of shift, not the same scenes, robot or network"
        )
    for number, (row, wanted) in enumerate(rows.items()):
        ours: dict[str, Any] = {}
        lacking: dict[str, str] = {}
        total = sum(
            LIBERO_TASKS.get(part, 10) if part.startswith("libero_") else 1 for part in wanted
        )
        for method, each in outcomes.items():
            parts = [[task for task in each.tasks if _is_in(task, part)] for part in wanted]
            if all(parts):
                ours[method] = success(each.of([task for part in parts for task in part]))
                if (count := sum(map(len, parts))) < total:
                    lacking[method] = f"{count} of {total} tasks"
        if not ours:
            found["missing"].append(row)
            continue
        rates = {method: values[number] for method, values in paper.columns.items()}
        verdicts = {
            method: _verdict(rates[method], each["pc_success_ci95"])
            for method, each in ours.items()
            if method in rates
        }
        found["rows"][row] = {"paper": rates, "ours": ours, "verdict": verdicts | lacking}
    if not found["rows"]:
        wanted = ", ".join(part for parts in paper.rows.values() for part in parts)
        raise UserError(
            f"--published {name}: no row of {paper.title} is in the results: it is about {wanted}"
        )
    return found


def _is_in(task: str, part: str) -> bool:
    """``task``: "suite: task", or "task"; ``part``: a suite or a task."""
    suite, _, name = task.rpartition(": ")
    return part in (suite, name)


def _verdict(paper: float, ours: Sequence[float]) -> str:
    low, high = ours
    return "agrees" if low <= paper <= high else "above" if low > paper else "below"
