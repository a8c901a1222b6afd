"""Parse the arguments of verbs that take no recipe."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rlinf_vla.config.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser of ``rlinf-vla VERB`` that raises UserError; ``example`` ends each message."""

    def __init__(self, verb: str, example: str = "") -> None:
        super().__init__(f"rlinf-vla {verb}")
        self._verb = verb
        self._example = f" ({example})" if example else ""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self._verb}: {message}{self._example}")
