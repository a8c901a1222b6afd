"""Turn the errors of franky and the arm into one-line messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import franky

from rlinf_vla.features.realworld.robot import RobotError


class ConnectionLost(RobotError):
    """The connection is lost; a new one is needed."""


def robot_error(state: Any) -> str | None:
    """Return why the arm cannot move in this state, or None."""
    if state.robot_mode == franky.RobotMode.UserStopped:
        return "user stop: pressed at the arm, or activated in Desk"
    if state.robot_mode == franky.RobotMode.Reflex:
        return f"reflex: {', '.join(_errors(state.current_errors)) or 'the arm reports no cause'}"
    if state.robot_mode == franky.RobotMode.Guiding:
        return "guided by hand"
    if state.robot_mode == franky.RobotMode.Other:
        return "the arm is not ready: unlock its joints and activate FCI in Desk"
    return None


def _errors(errors: Any) -> list[str]:
    return [
        name
        for name in dir(type(errors))
        if not name.startswith("_") and getattr(errors, name) is True
    ]


def is_ending(error: Exception) -> bool:
    """Return whether a motion was refused because the previous one had not quite ended."""
    return isinstance(error, franky.InvalidMotionTypeException) or "multiple motions" in str(error)


def is_dead(error: Exception) -> bool:
    """Return whether the connection is lost; reading a state then raises a bare RuntimeError."""
    return isinstance(error, franky.NetworkException) or "Net Exception" in str(error)


def words(error: Exception) -> str:
    text = " ".join(str(error).replace("libfranka:", "").split())
    return (
        f"network: the connection to the arm is lost ({text})"
        if is_dead(error)
        else f"franky: {text or type(error).__name__}"
    )


@contextlib.contextmanager
def explained(host: str) -> Iterator[None]:
    """Turn franky's exceptions into one-line RobotErrors."""
    try:
        yield
    except franky.RealtimeException:
        raise RobotError(
            "this kernel has no real time, which a real arm needs: boot one with PREEMPT_RT (a simulated cell has `realtime: ignore`)"
        ) from None
    except franky.IncompatibleVersionException as error:
        raise RobotError(
            f"{host} has firmware that this libfranka does not support: {words(error)}; install a franky-control that does"
        ) from None
    except franky.NetworkException as error:
        raise ConnectionLost(
            f"{host} does not answer: {words(error)}; is it on, is the cable in, is FCI active in Desk?"
        ) from None
    except franky.CommandException as error:
        raise RobotError(
            f"{host}: {words(error)}; if this repeats, clear the arm's errors in Desk"
        ) from None
    except (franky.ControlException, franky.InvalidOperationException, RuntimeError) as error:
        if isinstance(error, RobotError):
            raise
        raise (ConnectionLost if is_dead(error) else RobotError)(
            f"{host}: {words(error)}"
        ) from None
