"""What franky raises and reports, in words of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import franky

from rlinf_vla.robot import RobotError


class LineDead(RobotError):
    """The connection is of no use any more."""


def trouble(state: Any) -> str | None:
    if state.robot_mode == franky.RobotMode.UserStopped:
        return "user stop: pressed at the arm, or activated in Desk"
    if state.robot_mode == franky.RobotMode.Reflex:
        return f"reflex: {', '.join(_errors(state.current_errors)) or 'the arm does not say which'}"
    if state.robot_mode == franky.RobotMode.Guiding:
        return "guided by hand"
    if state.robot_mode == franky.RobotMode.Other:
        return "the arm is not ready: unlock its joints and activate FCI in Desk"
    return None


def _errors(errors: Any) -> list[str]:
    return [name for name in dir(type(errors)) if not name.startswith("_") and getattr(errors, name) is True]


def is_ending(error: Exception) -> bool:
    """A motion was begun while libfranka was still at the last breath of the one before."""
    return isinstance(error, franky.InvalidMotionTypeException) or "multiple motions" in str(error)


def is_dead(error: Exception) -> bool:
    """Reading a state from a dead line raises a bare RuntimeError."""
    return isinstance(error, franky.NetworkException) or "Net Exception" in str(error)


def words(error: Exception) -> str:
    text = " ".join(str(error).replace("libfranka:", "").split())
    return f"network: the line to the arm is dead ({text})" if is_dead(error) else f"franky: {text or type(error).__name__}"


@contextlib.contextmanager
def explained(host: str) -> Iterator[None]:
    """franky's exceptions become RobotErrors of one line."""
    try:
        yield
    except franky.RealtimeException:
        raise RobotError(
            "this kernel has no real time, which a real arm wants: boot one with PREEMPT_RT (a simulated cell says `realtime: ignore`)"
        ) from None
    except franky.IncompatibleVersionException as error:
        raise RobotError(
            f"{host} runs firmware that this libfranka does not speak: {words(error)}; install a franky-control that does"
        ) from None
    except franky.NetworkException as error:
        raise LineDead(f"{host} does not answer: {words(error)}; is it on, is the cable in, is FCI active in Desk?") from None
    except franky.CommandException as error:
        raise RobotError(f"{host}: {words(error)}; where this goes on, clear the arm's errors in Desk") from None
    except (franky.ControlException, franky.InvalidOperationException, RuntimeError) as error:
        if isinstance(error, RobotError):
            raise
        raise (LineDead if is_dead(error) else RobotError)(f"{host}: {words(error)}") from None
