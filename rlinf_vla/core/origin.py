"""The files from which a model was loaded: what is trained on top belongs to them alone."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import digest

DESCRIPTION = ("*.json", "tokenizer.model")
WEIGHTS = (
    "*.safetensors",
    # components of OpenVLA-OFT, published as pickles; their reader admits tensors only
    *(
        "action_head--*.pt",
        "proprio_projector--*.pt",
        "vision_backbone--*.pt",
        "noisy_action_projector--*.pt",
    ),
    "params/*",  # openpi's checkpoints in JAX
    "full_weights.pt",  # RLinf's, of which only tensors are unpickled
)
"""Patterns of the files of a model directory, of which the Hub's are downloaded."""


class Origin:
    """The files of a model directory, and their digests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._digests: Future[dict[str, str]] | None = None

    def begin(self) -> Future[dict[str, str]]:
        """Compute the digests in the background: those of 15 GB take some ten seconds."""
        if self._digests is None:
            self._digests = Future()
            Thread(target=self._compute, args=(self._digests,), daemon=True).start()
        return self._digests

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file by name, as they were when this was first asked for."""
        return self.begin().result()

    def require(self, known: Mapping[str, str], checkpoint: Path) -> None:
        """Raise UserError unless these are the files on which ``checkpoint`` was trained.

        ``known``: the digests that it names. A file that only describes something may be added.
        """
        present = self.digests()
        changed = [name for name in sorted(known) if present.get(name) != known[name]]
        changed += [
            name for name in sorted(present.keys() - known.keys()) if _matches(name, WEIGHTS)
        ]
        if changed:
            raise UserError(
                f"{checkpoint} was trained on another model than the one that is now in {self.directory} "
                f"({changed[0]} differs): restore its files, or set model.checkpoint to a copy of the model that it began with"
            )

    def _compute(self, result: Future[dict[str, str]]) -> None:
        try:
            result.set_result({name: digest(path) for name, path in self._files()})
        except OSError as error:
            result.set_exception(error)

    def _files(self) -> list[tuple[str, Path]]:
        below = (
            (path.relative_to(self.directory), path)
            for path in sorted(self.directory.rglob("*"))
            if path.is_file()
        )
        return [
            (name.as_posix(), path)
            for name, path in below
            if _matches(name.as_posix(), (*DESCRIPTION, *WEIGHTS))
            and not any(part.startswith(".") for part in name.parts)
        ]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
