"""Run ``rlinf-vla VERB [recipe=NAME] [KEY=VALUE ...]``; each verb is a module.

Exit codes: 0 success, 1 failure, 2 user error; 129, 130 and 143 interrupted by SIGHUP, SIGINT and
SIGTERM. Top-level imports are cheap because Ctrl-C prints a Python traceback until ``main`` begins.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from rlinf_vla import __version__
from rlinf_vla.cli.verbs import TRAINERS, verbs
from rlinf_vla.config.errors import Failure, UserError, printable
from rlinf_vla.core import child_process, plugins
from rlinf_vla.core.interrupt import Interrupted, exit_at_once, raise_at_once

HELP = ("-h", "--help")
DRY_RUN, JSON, LOG_LEVEL = "--dry-run", "--json", "--log-level"
LOG_LEVELS = ("debug", "info", "warning", "error")
WITH_DOCUMENT = ("eval", "plan")
"""Verbs with a recipe whose result JSON prints; verbs without one read the option themselves."""


def main() -> None:
    exit_at_once()
    _open_standard_files()
    os.environ.update(child_process.SAFE)  # also for processes that libraries start
    code = run(sys.argv[1:])
    exit_at_once()
    sys.exit(code)


def _open_standard_files() -> None:
    """Open standard files that were closed (``>&-``) on /dev/null, so that no later file gets their
    descriptors."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  (open until the process ends)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every failure ends in one line on stderr."""
    logging.getLogger("matplotlib").setLevel(
        logging.ERROR
    )  # it warns if it cannot write below HOME, and works anyway
    try:
        return _dispatch(_with_log_level(arguments))
    except UserError as error:
        return _fail(str(error), 2)
    except Failure as error:
        return _fail(str(error), 1)
    except Interrupted as interruption:
        return _fail(f"interrupted by {interruption.args[0]}", 128 + interruption.signum)
    except KeyboardInterrupt:  # raised by a library; a real Ctrl-C arrives as Interrupted
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader closed our output
        sys.stdout = None
        return 1
    except Exception as error:
        code = _system_error(error)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
            return _fail(
                f"{os.strerror(code)}{where}: free space, then continue with resume=auto; the last checkpoint is complete",
                1,
            )
        if code == errno.ENAMETOOLONG:
            assert isinstance(error, OSError)
            return _fail(
                f"{os.strerror(code)} ({str(error.filename)[:60]}...): choose a shorter one", 2
            )
        import traceback

        traceback.print_exc()
        return _fail(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
            1,
        )


def _with_log_level(arguments: Sequence[str]) -> list[str]:
    """Write messages of the program and its libraries from ``--log-level LEVEL`` on to stderr.

    Returns the other arguments. Raises UserError.
    """
    rest = [
        part
        for word in arguments
        for part in (word.split("=", 1) if word.startswith(f"{LOG_LEVEL}=") else [word])
    ]
    at = next((i for i, word in enumerate(rest) if word in (LOG_LEVEL, "--")), len(rest))
    if at == len(rest) or rest[at] == "--":  # what follows is a line to complete
        return list(arguments)
    level = rest[at + 1] if at + 1 < len(rest) else ""
    if level not in LOG_LEVELS:
        raise UserError(f"{LOG_LEVEL} {level}: choose {', '.join(LOG_LEVELS)}")
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    return rest[:at] + rest[at + 2 :]


def _system_error(error: Exception) -> int | None:
    """Return the error's errno or None; safetensors has it only in its message."""
    if isinstance(error, OSError):
        return error.errno
    match = (
        re.search(r"\(os error (\d+)\)", str(error))
        if type(error).__name__ == "SafetensorError"
        else None
    )
    return int(match[1]) if match else None


def _fail(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # the output is closed, which is not the error to report
        sys.stdout = None
    with contextlib.suppress(OSError):
        print(printable(f"rlinf-vla: {message}"), file=sys.stderr)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in (*HELP, "help"):
        from rlinf_vla.cli.help import overview

        print(overview(__version__))
        return 0
    if arguments[0] in ("--version", "version"):
        print(__version__)
        return 0
    verb, *rest = arguments
    known = TRAINERS if verb in TRAINERS else verbs()
    if verb not in known:
        raise UserError(
            f"{verb!r} is not a verb{plugins.nearest(verb, list(known))} (verbs: {', '.join(known)})"
        )
    if set(HELP) & set(rest) and "--" not in rest:
        from rlinf_vla.cli.help import help_of

        print(help_of(verb))
        return 0
    chosen = known[verb]
    module = chosen.module
    composed = chosen.composed
    if chosen.programs:
        if not rest or rest[0] not in chosen.words:
            raise UserError(
                f"{verb} needs one of {', '.join(chosen.words)}: rlinf-vla {verb} {chosen.help.examples[0]}"
            )
        word = rest.pop(0)
        verb = f"{verb}_{word}"
        module = f"{module}.{word}"
        composed = word not in chosen.uncomposed
    dry = DRY_RUN in rest and verb in plugins.dry_runs()
    if dry:
        if JSON in rest:
            raise UserError(f"{DRY_RUN} prints no document: leave {JSON} out")
        rest.remove(DRY_RUN)

    def begin(argument: Any) -> Any:
        command: Callable[..., Any] = plugins.dry_runs()[verb] if dry else import_module(module).run
        raise_at_once()
        return command(argument)

    if not composed:
        return begin(rest) or 0
    from rlinf_vla.cli.compose import compose_and_run

    if JSON not in rest:
        return compose_and_run(verb, rest, begin)
    if verb not in WITH_DOCUMENT:
        raise UserError(
            f"{verb} has no {JSON}: {', '.join(WITH_DOCUMENT)}, config, diagnose, list, runs, compare and doctor have it"
        )
    if {"-m", "--multirun"} & set(rest):
        raise UserError(f"{JSON} prints one document: run without --multirun")
    documents: list[Any] = []
    with _stdout_to_stderr():
        code = compose_and_run(
            verb,
            [word for word in rest if word != JSON],
            lambda config: documents.append(begin(config)),
        )
    print(*(json.dumps(document, indent=1, ensure_ascii=False) for document in documents))
    return code


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is printed within the context, by libraries and child processes too."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
