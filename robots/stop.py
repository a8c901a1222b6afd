"""Send orders to the processes that drive arms; entry point of the program ``rlinf-vla-stop``.

Any process of the same user can send them. This module imports as little as possible.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf_vla.core.listener import ask
from rlinf_vla.core.robot import STOPPED_BY, RobotError

from . import runtime_folder

ANSWER_S = 2.0
"""Time to wait for the answer of one process."""


def send_order(where: Sequence[Path], order: str, operator: str) -> list[str]:
    """Send ``stop`` or ``acknowledge`` to the driven arms among the folders ``where``.

    Returns a line for each arm. Raises RobotError if none is driven, or if one does not answer.
    """
    message = {"stop": f"{STOPPED_BY}{operator}"} if order == "stop" else {"acknowledge": operator}
    answers, silent = [], []
    for each in where:
        try:
            answer = ask(each / runtime_folder.ORDERS, message, ANSWER_S)
        except TimeoutError as error:
            silent.append(f"{each.name}: {order} was delivered, but there is {error}: look at the arm, and use its own stop")
            continue
        if answer is not None:
            answers.append(f"{answer['host']} (process {answer['pid']}): {answer['fault'] or 'no fault'}")
    if silent:
        raise RobotError("\n".join([*silent, *answers]))
    if not answers:
        raise RobotError(f"nothing to {order}: no process of yours drives an arm on this machine")
    return answers


def main() -> None:
    """Stop every arm driven by this user; only ``rlinf-vla robot acknowledge`` releases them."""
    try:
        print("\n".join(send_order(runtime_folder.arms(), "stop", getpass.getuser())))
    except RobotError as error:
        sys.exit(f"rlinf-vla-stop: {error}")
