"""Send orders to the processes that drive arms; entry point of the program ``rlinf-vla-stop``.

Any process of the same user can send them. This module imports as little as possible.
"""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vla.core.listener import ask
from rlinf_vla.core.robot import STOPPED_BY, RobotError

from . import runtime_folder

ANSWER_S = 2.0
"""Time to wait for the answer of one process."""
RECOVERY_S = 15.0
"""Time to wait until an acknowledged fault is cleared; the arm may have to be connected again."""


def send_order(where: Sequence[Path], order: str, operator: str) -> list[str]:
    """Send ``stop`` or ``acknowledge`` to the driven arms among the folders ``where``.

    Returns a line for each arm: its latched faults. Raises RobotError if none is driven, if one
    does not answer, or if an acknowledgement clears no fault within RECOVERY_S.
    """
    answers, failed = list[str](), list[str]()
    for each in where:
        try:
            sent = _send(each, order, operator)
        except TimeoutError as error:
            failed.append(f"{each.name}: {order} was delivered, but there is {error}: look at the arm, and use its own stop")
            continue
        if sent is not None:
            done, line = sent
            (answers if done else failed).append(line)
    if failed:
        raise RobotError("\n".join([*failed, *answers]))
    if not answers:
        raise RobotError(f"nothing to {order}: no process of yours drives an arm on this machine")
    return answers


def _send(folder: Path, order: str, operator: str) -> tuple[bool, str] | None:
    """Return whether the order had its effect, and what to print; None if nobody drives the arm."""
    message = {"stop": f"{STOPPED_BY}{operator}"} if order == "stop" else {"acknowledge": operator}
    answer = ask(folder / runtime_folder.ORDERS, message, ANSWER_S)
    if answer is None:
        return None
    before, left = answer["fault"], ""
    if order != "stop" and before is not None:
        answer = _recovered(folder, answer)
        if answer["fault"] is not None:
            left = ": still latched, " + ("fix its cause and acknowledge again" if answer["fault"] == before else "acknowledge that, too")
    done = order == "stop" or before is None or answer["fault"] != before
    return done, f"{answer['host']} (process {answer['pid']}): {answer['fault'] or 'no fault'}{left}"


def _recovered(folder: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a process when its faults have changed, or after RECOVERY_S."""
    before, until = answer["fault"], time.monotonic() + RECOVERY_S
    while answer["fault"] == before and time.monotonic() < until:
        time.sleep(0.05)
        answer = ask(folder / runtime_folder.ORDERS, {}, ANSWER_S) or answer
    return answer


def main() -> None:
    """Stop every arm driven by this user; only ``rlinf-vla robot acknowledge`` releases them."""
    try:
        print("\n".join(send_order(runtime_folder.arms(), "stop", getpass.getuser())))
    except RobotError as error:
        sys.exit(f"rlinf-vla-stop: {error}")
