"""Share a run's checkpoint, a model directory or a LeRobotDataset on the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlinf_vla.cli.cards import card
from rlinf_vla.cli.shared_files import DATASET, Shared, of_dataset, of_model, of_run
from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError
from rlinf_vla.data.lerobot_format import INFO
from rlinf_vla.runtime import hub
from rlinf_vla.runtime.run_directory import RECIPE, checkpoint_at, split
from rlinf_vla.runtime.run_names import named

CARD = "README.md"


def run(arguments: Sequence[str]) -> None:
    """Push what the arguments name, or only show it. Raises UserError or Failure."""
    parser = Parser("push", "rlinf-vla push RUN ORG/NAME --license apache-2.0")
    parser.add_argument("what")
    parser.add_argument("repository")
    parser.add_argument("--license")
    parser.add_argument("--base-model")
    parser.add_argument("--dataset", action="append", default=[])
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--revision")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    for name, value in (
        ("", options.repository),
        ("--base-model ", options.base_model),
        *(("--dataset ", dataset) for dataset in options.dataset),
    ):
        if value is not None and not re.fullmatch(hub.REPOSITORY, value):
            raise UserError(f"push: {name}{value} names no repository: write ORG/NAME")
    shared = _shared(options.what, options.base_model)
    text = card(shared, options.repository, options.license or _license(shared), options.dataset)
    shared.files[CARD] = text.encode()
    total = sum(map(shared.size, shared.files)) / 1e6
    if options.dry_run:
        for name in sorted(shared.files):
            print(f"{shared.size(name):>14,} bytes  {name}")
        print(f"\n{CARD} of the {shared.kind} {options.repository}:\n\n{text}")
        print(f"{len(shared.files)} files, {total:,.1f} MB; nothing was sent (--dry-run)")
        return
    message = f"Upload {shared.checkpoint or shared.kind} with rlinf-vla"
    tag = shared.info["codebase_version"] if shared.kind == DATASET else None
    address = hub.upload(
        options.repository,
        shared.kind,
        shared.files,
        message,
        options.private,
        options.revision,
        tag,
    )
    print(f"{len(shared.files)} files, {total:,.1f} MB: {address}")


def _shared(what: str, base: str | None) -> Shared:
    path = Path(what).expanduser()
    if (path / INFO).exists():
        return of_dataset(path)
    if path.is_dir() and not (path / RECIPE).exists() and split(path)[1] is None:
        if (path / "config.json").exists():
            return of_model(path, base)
        raise UserError(
            f"push: {what} is no run ({RECIPE}), checkpoint, model directory (config.json) or LeRobotDataset ({INFO})"
        )
    directory, checkpoint = split(path if path.is_dir() else named(what))
    return of_run(directory, checkpoint or checkpoint_at(str(directory), "run"), base)


def _license(shared: Shared) -> str:
    """Return the licence of the base model; none is ever assumed."""
    licence = hub.license_of(shared.base) if shared.base is not None else None
    if licence is None:
        whose = (
            f"the card of {shared.base} states none"
            if shared.base
            else "there is no base model whose licence applies"
        )
        raise UserError(
            f"push needs a licence, {whose}: give --license, such as --license apache-2.0"
        )
    return licence
