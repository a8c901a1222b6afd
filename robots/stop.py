"""Send orders to the processes that drive arms; entry point of the program ``rlinf-vla-stop``.

Any process of the same user can send them. This module imports as little as possible.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_vla.core.user_dirs import user_name
from rlinf_vla.features.realworld.listener import ask
from rlinf_vla.features.realworld.robot import STOPPED_BY, RobotError

from . import runtime_folder

ANSWER_S = 2.0
"""Time to wait for the answer of one process."""
RECOVERY_S = 15.0
"""Time to wait until an acknowledged fault is cleared; the arm may have to be connected again."""
SOCKETS = Path("/proc/net/unix")
"""The system's list of sockets."""
HELP = """Usage: rlinf-vla-stop

Stop every arm that you drive on this machine, whichever process drives it. The program takes no
arguments. `rlinf-vla robot stop robot=NAME` stops a single arm, and only
`rlinf-vla robot acknowledge operator=NAME` lets an arm move again."""

_Addresses = tuple[Path | str, ...]
"""Of one process: in the arm's folder, then the abstract one, which is there without the folder."""


def send_order(where: Sequence[Path] | None, order: str, operator: str) -> list[str]:
    """Send ``stop`` or ``acknowledge`` to the driven arms among the folders ``where``.

    None: to all arms that this user drives on this machine. Returns a line for each arm: its
    latched faults. Raises RobotError if none is driven, if one does not answer, or if an
    acknowledgement clears no fault within RECOVERY_S.
    """
    answers, failed = list[str](), list[str]()
    for name, addresses in (
        _all_arms(failed)
        if where is None
        else {folder.name: _addresses(folder) for folder in where}
    ).items():
        try:
            sent = _send(addresses, order, operator)
        except TimeoutError as error:
            failed.append(
                f"{name}: {order} was delivered, but there is {error}: look at the arm, and use its own stop"
            )
            continue
        if sent is not None:
            done, line = sent
            (answers if done else failed).append(line)
    if failed:
        raise RobotError("\n".join([*failed, *answers]))
    if not answers:
        raise RobotError(f"nothing to {order}: no process of yours drives an arm on this machine")
    return answers


def _addresses(folder: Path) -> _Addresses:
    return folder / runtime_folder.ORDERS, runtime_folder.abstract_address(folder)


def _all_arms(failed: list[str]) -> Mapping[str, _Addresses]:
    """Return the addresses of all arms by their names; add to ``failed`` which may be missing."""
    arms = dict[str, _Addresses]()
    try:
        arms.update((folder.name, _addresses(folder)) for folder in runtime_folder.arms())
    except (RobotError, OSError) as error:  # the arms have abstract addresses, too
        failed.append(str(error))
    abstract_addresses = {abstract for _, abstract in arms.values()}
    mine = f"@{runtime_folder.abstract_addresses()[1:]}"
    try:
        names = [line.split()[-1] for line in SOCKETS.read_text(errors="replace").splitlines()]
    except OSError as error:
        failed.append(
            f"{SOCKETS}: {error.strerror}: an arm whose folder was deleted cannot be found"
        )
        names = []
    others = sorted(
        {f"\0{name[1:]}" for name in names if name.startswith(mine)} - abstract_addresses
    )
    return arms | {
        f"an arm in another folder ({address.rpartition('-')[2]})": (address,) for address in others
    }


def _send(addresses: _Addresses, order: str, operator: str) -> tuple[bool, str] | None:
    """Return whether the order had its effect, and what to print; None if nobody drives the arm."""
    message = {"stop": f"{STOPPED_BY}{operator}"} if order == "stop" else {"acknowledge": operator}
    answer = _asked(addresses, message)
    if answer is None:
        return None
    before = answer["fault"]
    left = ""
    if order != "stop" and before is not None:
        answer = _recovered(addresses, answer)
        if answer["fault"] is not None:
            left = ": still latched, " + (
                "fix its cause and acknowledge again"
                if answer["fault"] == before
                else "acknowledge that, too"
            )
    done = order == "stop" or before is None or answer["fault"] != before
    return (
        done,
        f"{answer['host']} (process {answer['pid']}): {answer['fault'] or 'no fault'}{left}",
    )


def _asked(addresses: _Addresses, message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer at the first address that gives one."""
    return next(
        (
            answer
            for address in addresses
            if (answer := ask(address, message, ANSWER_S)) is not None
        ),
        None,
    )


def _recovered(addresses: _Addresses, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a process when its faults have changed, or after RECOVERY_S."""
    before = answer["fault"]
    until = time.monotonic() + RECOVERY_S
    while answer["fault"] == before and time.monotonic() < until:
        time.sleep(0.05)
        answer = _asked(addresses, {}) or answer
    return answer


def main(words: Sequence[str] | None = None) -> None:
    """Stop every arm driven by this user; only ``rlinf-vla robot acknowledge`` releases them."""
    words = sys.argv[1:] if words is None else words
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    if words:
        print(
            f"rlinf-vla-stop: {words[0]!r} is not known, and no arm was stopped: give no arguments, or --help",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        print("\n".join(send_order(None, "stop", user_name())))
    except RobotError as error:
        sys.exit(f"rlinf-vla-stop: {error}")
