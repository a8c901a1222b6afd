"""Orders to the process that drives an arm, from any other of this user; and the program ``rlinf-vla-stop``, which loads no more."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf_vla.robot import RobotError

from . import folder
from .channel import ask

_ANSWER_S = 2.0


def give(where: Sequence[Path], order: str, person: str) -> list[str]:
    """``stop`` or ``acknowledge``, to those arms of the folders ``where`` that are driven now. A line for each. Raises RobotError."""
    message = {"stop": f"stopped by {person}"} if order == "stop" else {"acknowledge": person}
    answers, silent = [], []
    for each in where:
        try:
            answer = ask(each / folder.ORDERS, message, _ANSWER_S)
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
    """Every arm that this user's processes drive stands still, and is let go by ``rlinf-vla robot acknowledge`` alone."""
    try:
        print("\n".join(give(folder.arms(), "stop", getpass.getuser())))
    except RobotError as error:
        sys.exit(f"rlinf-vla-stop: {error}")
