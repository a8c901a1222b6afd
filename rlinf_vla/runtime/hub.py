"""Exchange files with the Hugging Face Hub: data only, never code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core import origin

DATA = (*origin.WEIGHTS, *origin.DESCRIPTION)
"""Patterns of the files to download."""
DESCRIPTION = (*origin.DESCRIPTION, "policy_*processor_step_*.safetensors")
"""Those from which a model is built without weights."""
REPOSITORY = r"[\w.-]+/[\w.-]+"
REPOSITORY_AT = rf"({REPOSITORY})(?:@([\w./-]+))?"
"""ORG/NAME or ORG/NAME@REVISION."""


def download(location: str, patterns: Sequence[str] = DATA) -> Path:
    """Return the local directory of ``hf://ORG/NAME`` or ``hf://ORG/NAME@REVISION``.

    Files are kept in Hugging Face's cache (HF_HOME), and only missing ones are downloaded. Without
    network, or with HF_HUB_OFFLINE=1, a complete directory in the cache is used. Raises UserError.
    """
    match = re.fullmatch(f"hf://{REPOSITORY_AT}", location)
    if match is None:
        raise UserError(
            f"{location} names no repository: write hf://ORG/NAME or hf://ORG/NAME@REVISION"
        )
    name, revision = match.groups()
    from huggingface_hub import constants, errors, snapshot_download  # takes time to import

    copy = "copy the checkpoint's directory here from a machine that has it, and give its path"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        raise UserError(
            f"{location} is gated: accept its conditions at {constants.ENDPOINT}/{name}, run `huggingface-cli login` (or `hf auth login`), "
            f"or {copy}"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{location}: {name} has no revision {revision}: see {constants.ENDPOINT}/{name}/commits/main"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{location}: {constants.ENDPOINT} has no such repository, or it is private: check the name, or run `huggingface-cli login`"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error)
        raise UserError(
            f"{location} is not complete in {constants.HF_HUB_CACHE}, and the Hub is out of reach ({reason}): "
            f"try again where there is a network, without HF_HUB_OFFLINE, or {copy}"
        ) from None
    except (
        Exception
    ) as error:  # also those of the HTTP library, which depends on the client's version
        raise UserError(
            f"{location} cannot be downloaded ({_first_line(error)}): try again, or {copy}"
        ) from None


SHARED = (*DATA, "README.md", "recipe.yaml", "*/COMPLETE", "*.jsonl", "*.parquet", "*.mp4")
"""Patterns of the files that ``fetch`` takes."""
MAIN = "main"
LOGIN = "run `hf auth login`, or set HF_TOKEN"


@contextmanager
def told(repository: str) -> Iterator[None]:
    """Turn an error of the client into one line: a UserError if the user can do something."""
    from huggingface_hub import constants, errors

    of_http: type[Exception] = errors.HfHubHTTPError.__bases__[
        0
    ]  # of httpx or httpx2, which depends on the client's version
    try:
        yield
    except (UserError, Failure):
        raise
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{repository} has no such revision: see {constants.ENDPOINT}/{repository}"
        ) from None
    except (errors.HFValidationError, errors.LocalTokenNotFoundError) as error:
        raise UserError(f"{repository}: {_first_line(error)} ({LOGIN})") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: f"{constants.ENDPOINT} wants a valid token, or has no such repository: {LOGIN}",
            403: f"your token has no right to do that at {constants.ENDPOINT}: {LOGIN} of an account that has it",
            404: f"{constants.ENDPOINT} has no such repository, or it is private: check the name, or {LOGIN}",
            409: "exists already: choose another name, or give --revision main to add a commit to it",
        }
        if status in reasons:
            raise UserError(f"{repository}: {reasons[status]}") from None
        raise Failure(
            f"{repository}: {constants.ENDPOINT} answered {status} ({_first_line(error)}): try again"
        ) from None
    except (
        of_http,
        ConnectionError,
        TimeoutError,
        errors.LocalEntryNotFoundError,
        RuntimeError,
    ) as error:
        raise Failure(
            f"{repository}: {constants.ENDPOINT} is out of reach ({_first_line(error)}): check the network, try again"
        ) from None


def license_of(repository: str) -> str | None:
    """Return the licence that the card of a model states. Raises UserError or Failure."""
    from huggingface_hub import HfApi

    with told(repository):
        card = HfApi().model_info(repository).card_data
    license_name = card.get("license") if card is not None else None
    return license_name if isinstance(license_name, str) else None


def upload(
    repository: str,
    kind: str,
    files: Mapping[str, bytes | Path],
    message: str,
    private: bool = False,
    revision: str | None = None,
    tag: str | None = None,
) -> str:
    """Commit ``files`` to a repository and return the commit's address.

    Without ``revision`` the repository must be new. With it, files that an earlier commit left in
    the same folders are removed. ``tag`` is moved to the commit. Raises UserError or Failure.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

    api = HfApi()
    branch = revision or MAIN
    with told(repository):
        api.create_repo(
            repository, repo_type=kind, private=private or None, exist_ok=revision is not None
        )
        if private and not api.repo_info(repository, repo_type=kind).private:
            raise UserError(
                f"{repository} is public, and --private does not change that: choose another name, or leave --private out"
            )
        if branch != MAIN:
            api.create_branch(repository, branch=branch, repo_type=kind, exist_ok=True)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, files[name]) for name in sorted(files)
        ]
        if revision is not None:
            folders = {name.partition("/")[0] for name in files if "/" in name}
            there = api.list_repo_files(repository, repo_type=kind, revision=branch)
            operations += [
                CommitOperationDelete(name)
                for name in there
                if name not in files and "/" in name and name.partition("/")[0] in folders
            ]
        done = api.create_commit(
            repository, operations, commit_message=message, repo_type=kind, revision=branch
        )
        if tag is not None:
            with suppress(errors.RevisionNotFoundError):
                api.delete_tag(repository, tag=tag, repo_type=kind)
            api.create_tag(repository, tag=tag, revision=done.oid, repo_type=kind)
    return str(done.commit_url)


def fetch(repository: str, revision: str | None, directory: Path) -> str:
    """Download a repository of a model or dataset into ``directory`` and return its commit.

    Only data is taken (SHARED). Raises UserError or Failure.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    api = HfApi()
    with told(repository if revision is None else f"{repository}@{revision}"):
        try:
            info = api.repo_info(repository, revision=revision, repo_type="model")
            kind = "model"
        except errors.RevisionNotFoundError:
            raise
        except errors.RepositoryNotFoundError:
            info = api.repo_info(repository, revision=revision, repo_type="dataset")
            kind = "dataset"
        for name in api.list_repo_files(repository, revision=info.sha, repo_type=kind):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise UserError(
                    f"{repository} has a file named {name!r}, which leaves the directory: do not use it"
                )
        snapshot_download(
            repository,
            repo_type=kind,
            revision=info.sha,
            local_dir=directory,
            allow_patterns=list(SHARED),
        )
        shutil.rmtree(directory / ".cache", ignore_errors=True)  # the client's notes
    return str(info.sha)


def _first_line(error: Exception) -> str:
    """Return the first line of the original error's message."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
