"""Run ``rlinf-vla robot VERB``: check, move, stop, record or replay on a real or simulated arm.

Cheap to import, because stopping an arm must be fast.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.core import plugins
from rlinf_vla.core.user_dirs import user_name
from rlinf_vla.features.realworld.operator_session import RECOVERY_S
from rlinf_vla.features.realworld.robot import Robot, RobotError, RobotPlugin
from rlinf_vla.features.realworld.verb import ROBOT_VERBS

ORDERS = ("stop", "acknowledge")
USAGE = (
    "rlinf-vla robot {check|home|stop|acknowledge} robot=NAME [robot.KEY=VALUE ...] [operator=NAME], "
    "rlinf-vla robot {run|record|replay} recipe=franka_rlpd, rlinf-vla robot dataset run=RUN output=DIR"
)
CONNECT_S, HOME_S = 60.0, 60.0


def run(arguments: Sequence[str]) -> int:
    """Run one robot verb; return the exit code. Raises UserError.

    ``stop`` and ``acknowledge`` go to the process that drives the arm, whoever started it; without
    ``robot=`` to all on this machine. If no process drives the arm, ``acknowledge robot=NAME``
    clears the fault that an earlier one latched.
    """
    verb, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if verb not in ROBOT_VERBS:
        raise UserError(
            f"robot needs a verb{plugins.nearest(verb, list(ROBOT_VERBS)) if verb else ''}: {USAGE}"
        )
    if verb in ("run", "record", "dataset", "replay"):
        return _with_recipe(verb, rest)
    operator = next(
        (word.removeprefix("operator=") for word in rest if word.startswith("operator=")), ""
    )
    chosen = [word for word in rest if not word.startswith("operator=")]
    if verb in ORDERS:
        if verb == "acknowledge" and not operator:
            raise UserError(
                "robot acknowledge needs operator=NAME: the person who has checked the arm and lets it move again"
            )
        for line in _order(verb, operator or user_name(), chosen):
            print(printable(line))
        return 0
    plugin, config = _choose(chosen)
    if verb == "home":
        with _connected(plugin, config) as robot:
            robot.home(HOME_S)
        print("the arm is at its rest position")
        return 0
    return _check(plugin, config)


def _check(plugin: RobotPlugin, config: Any) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    with console.status("connecting"):
        diagnoses = list(plugin.check(config))
    table = Table("", "what", "found", show_edge=False)
    for diagnosis in diagnoses:
        table.add_row("ok" if diagnosis.ok else "WRONG", diagnosis.name, diagnosis.detail)
    console.print(table)
    return 0 if all(diagnosis.ok for diagnosis in diagnoses) else 1


def _with_recipe(verb: str, rest: Sequence[str]) -> int:
    from rlinf_vla.cli.compose import compose_and_run

    if verb == "run":
        from rlinf_vla.features.realworld.run_policy import run_policy

        return compose_and_run("robot_run", rest, run_policy)
    from rlinf_vla.features.realworld.record import dataset, record, replay

    if verb == "dataset":
        return compose_and_run("robot_dataset", rest, dataset)
    if verb == "record":
        return compose_and_run("robot_record", rest, record)
    episode = next(
        (word.removeprefix("episode=") for word in rest if word.startswith("episode=")), "0"
    )
    if not episode.isdigit():
        raise UserError(f"episode={episode}: the number of an episode, from 0")
    overrides = [word for word in rest if not word.startswith("episode=")]
    return compose_and_run("robot_replay", overrides, lambda config: replay(config, int(episode)))


def _choose(words: Sequence[str]) -> tuple[RobotPlugin, Any]:
    """Read ``robot=NAME robot.KEY=VALUE`` without Hydra, because stopping an arm must be fast."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlinf_vla.config.ranges import check_values

    words = [
        word.removeprefix("+") for word in words
    ]  # a recipe's command line needs it for new keys, such as a camera
    chosen = [word.removeprefix("robot=") for word in words if word.startswith("robot=")]
    if len(chosen) != 1:
        raise UserError(
            f"which robot? robot={' or robot='.join(plugins.robots()) or '... (none is installed)'}: {USAGE}"
        )
    plugin = plugins.choose("robot", chosen[0], plugins.robots())
    config = OmegaConf.structured(plugin.Config)
    for word in words:
        if word.startswith("robot="):
            continue
        key, equals, _ = word.partition("=")
        keys = [f"robot.{name}" for name in config]
        if not equals or key.split(".")[:2] not in [name.split(".") for name in keys]:
            raise UserError(
                f"{word}: not a key of robot={chosen[0]}{plugins.nearest(key, keys)} (keys: {', '.join(keys)})"
            )
        try:
            config.merge_with(OmegaConf.from_dotlist([word.removeprefix("robot.")]))
        except OmegaConfBaseException as error:
            raise UserError(f"{word}: {str(error).splitlines()[0]}") from None
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"robot.{missing[0]} has no value: give robot.{missing[0]}=...")
    settings = OmegaConf.to_object(config)
    check_values(settings, "robot.")
    return plugin, settings


def _order(order: str, operator: str, chosen: Sequence[str]) -> list[str]:
    """Give an order to the arm that ``chosen`` names, or to all; return what to print."""
    if not chosen:
        return _order_all(order, operator)
    plugin, config = _choose(chosen)
    try:
        return plugin.order(config, order, operator)
    except RobotError as nobody:
        if order == "stop":
            raise
        return [_acknowledge(plugin, config, operator, nobody)]


@contextmanager
def _connected(plugin: RobotPlugin, config: Any) -> Iterator[Robot]:
    robot = plugin.make(config)
    try:
        robot.connect(CONNECT_S)
        yield robot
    finally:
        robot.close()


def _acknowledge(plugin: RobotPlugin, config: Any, operator: str, nobody: RobotError) -> str:
    """Clear the fault that an ended process left latched. Raises ``nobody`` if there is none."""
    with _connected(plugin, config) as robot:
        acknowledged = fault = robot.observe().fault
        if acknowledged is None:
            raise nobody
        robot.acknowledge(operator)
        until = time.monotonic() + RECOVERY_S
        while fault == acknowledged and time.monotonic() < until:
            time.sleep(0.1)
            fault = robot.observe().fault
    if fault == acknowledged:
        raise RobotError(
            f"{fault}: still there {RECOVERY_S:g} s after the acknowledgement; fix its cause and acknowledge again"
        )
    left = "" if fault is None else f"; still latched: {fault}: acknowledge that, too"
    return f"{acknowledged}: acknowledged by {operator}{left}"


def _order_all(order: str, operator: str) -> list[str]:
    """Give the order to all arms, also if a plug-in fails, which is reported afterwards."""
    lines, broken = list[str](), list[str]()
    nothing: RobotError | None = None
    installed = plugins.robots()
    for name in installed:
        try:
            lines += installed[name].order(None, order, operator)
        except RobotError as error:
            nothing = error
        except Exception as error:
            broken.append(f"robot={name} cannot {order} its arms: {type(error).__name__}: {error}")
    if broken:
        raise RobotError("\n".join([*broken, *lines, *([] if nothing is None else [str(nothing)])]))
    if not lines and nothing is not None and order == "acknowledge":
        raise RobotError(f"{nothing}; give robot=NAME to clear an earlier fault")
    if not lines:
        raise nothing or RobotError("no robot plug-in is installed")
    return sorted(set(lines))
