"""The verb ``robot``."""

from __future__ import annotations

from rlinf_vla.core.verb import DATA, RECIPE, Help, Verb

ROBOT_VERBS = ("check", "home", "stop", "acknowledge", "run", "record", "dataset", "replay")
ROBOT = Verb(
    DATA,
    "control an arm: check, home, stop, run, record, dataset, replay",
    "rlinf_vla.features.realworld.command",
    Help(
        (
            "{check|home|stop} robot=NAME [robot.KEY=VALUE ...]",
            "acknowledge robot=NAME operator=PERSON",
            "{run|record|replay} {recipe=NAME|run=RUN} [KEY=VALUE ...]",
            "dataset run=RUN output=DIR",
        ),
        (
            *RECIPE,
            ("robot=NAME", "a robot plug-in (rlinf-vla list robots)"),
            ("episode=N", "replay: number of the episode, from 0"),
        ),
        (
            "check robot=franka_sim",
            "run recipe=franka_remote",
            "record recipe=franka_rlpd output=DIR",
        ),
        "stop without robot=NAME stops all arms of this machine, as rlinf-vla-stop does.",
    ),
    keys=True,
    words=ROBOT_VERBS,
)
