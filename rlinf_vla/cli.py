"""The command line: ``rlinf-vla VERB [recipe=NAME] [KEY=VALUE ...]``. One verb, one module of ``commands``.

Exit codes: 0 done, 1 failed, 2 the user's mistake, 129, 130 and 143 interrupted by SIGHUP, SIGINT and SIGTERM.

At its top this module imports nothing but what is ready at once: until ``main`` has begun, Ctrl-C ends in Python's own traceback.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from rlinf_vla import __version__, child_process
from rlinf_vla.commands.interrupt import Interrupted, exit_at_once, raise_at_once
from rlinf_vla.trust import printable

VERBS = {
    "train": "reinforcement learning, imitation, success classifiers: rlinf-vla train recipe=maniskill_ppo",
    "record": "a LeRobotDataset of a scripted expert: rlinf-vla record recipe=maniskill_sft output=DIR",
    "eval": "success on fixed episodes: rlinf-vla eval run=DIR, or a sweep: rlinf-vla eval recipe=maniskill_eval",
    "verify": "play part of an evaluation again: rlinf-vla verify RESULT.json --episodes 20",
    "export": "merge a checkpoint into the official layout: rlinf-vla export run=DIR output=DIR",
    "plan": "who does what where, and how long it will take: rlinf-vla plan recipe=maniskill_ppo cluster=laptop",
    "bench": "measure this machine: rlinf-vla bench {rollout|throughput|policy|update|control} recipe=NAME, {env|soak} env=NAME, load",
    "robot": "an arm: rlinf-vla robot {check|home|stop|acknowledge} robot=franka_sim, robot {record|replay} recipe=franka_rlpd",
    "doctor": "check this machine, and mend what can be mended: rlinf-vla doctor [--fix]",
    "list": "what there is: rlinf-vla list [recipes|presets|models|envs|tasks|rewards|robots]",
}
PLAIN = ("doctor", "list", "verify", "bench_env", "bench_soak", "robot")
"""Verbs without a recipe."""
BENCHES = ("rollout", "throughput", "policy", "update", "control", "load", "env", "soak")


def main() -> None:
    exit_at_once()
    _open_standard_files()
    os.environ.update(child_process.SAFE)  # also for processes that libraries start
    code = run(sys.argv[1:])
    exit_at_once()
    sys.exit(code)


def _open_standard_files() -> None:
    """Where one was closed (``>&-``), nothing is read or written, and the next file that is opened does not take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  (as long as the process)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every failure ends in one line on stderr."""
    from rlinf_vla.robot import CellError, RobotError
    from rlinf_vla.types import Failure, UserError

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where it cannot write below HOME, and works all the same
    try:
        return _dispatch(arguments)
    except (UserError, CellError) as error:
        return _fail(str(error), 2)
    except (Failure, RobotError) as error:
        return _fail(str(error), 1)
    except Interrupted as interruption:
        return _fail(f"interrupted by {interruption.args[0]}", 128 + interruption.signum)
    except KeyboardInterrupt:  # a library's own; a real Ctrl-C arrives as Interrupted
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stdout = None
        return 1
    except Exception as error:
        code = _system_error(error)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
            return _fail(f"{os.strerror(code)}{where}: free space, then go on with resume=auto; the last checkpoint is whole", 1)
        if code == errno.ENAMETOOLONG:
            assert isinstance(error, OSError)
            return _fail(f"{os.strerror(code)} ({str(error.filename)[:60]}...): choose a shorter one", 2)
        import traceback

        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}", 1)


def _system_error(error: Exception) -> int | None:
    """Its errno; safetensors says it in words only."""
    if isinstance(error, OSError):
        return error.errno
    said = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(said[1]) if said else None


def _fail(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads it any more, which is not what failed
        sys.stdout = None
    with contextlib.suppress(OSError):
        print(printable(f"rlinf-vla: {message}"), file=sys.stderr)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if arguments[0] in ("--version", "version"):
        print(__version__)
        return 0
    from rlinf_vla.types import UserError

    verb, *rest = arguments
    if verb not in VERBS:
        from rlinf_vla.plugins import nearest

        raise UserError(f"{verb!r} is not a verb{nearest(verb, list(VERBS))} (verbs: {', '.join(VERBS)})")
    module = verb
    if verb == "bench":
        if not rest or rest[0] not in BENCHES:
            raise UserError(f"bench needs to know what ({', '.join(BENCHES)}): rlinf-vla bench rollout recipe=NAME")
        module = f"bench_{rest.pop(0)}"
    command: Callable[..., int | None] = import_module(f"rlinf_vla.commands.{module}").run
    if module in PLAIN:
        raise_at_once()
        return command(rest) or 0
    from rlinf_vla.compose import compose_and_run

    def begin(config: Any) -> int | None:
        raise_at_once()
        return command(config)

    return compose_and_run(module, rest, begin)


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {text}" for verb, text in VERBS.items()]
    return "\n".join(
        [
            f"rlinf-vla {__version__}: fine-tune vision-language-action policies with reinforcement learning",
            "",
            "rlinf-vla VERB [recipe=NAME|run=DIR] [KEY=VALUE ...]",
            "",
            *lines,
            "",
            "run=DIR takes the recipe that a run keeps: train goes on with that run, eval and export take its newest checkpoint.",
            "rlinf-vla VERB recipe=NAME --cfg job shows what it would run. --help shows the keys of train, record, eval, export, plan,",
            "bench rollout (and the other benches), robot record and robot replay, and what verify takes.",
        ]
    )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
