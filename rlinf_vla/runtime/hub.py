"""Download published checkpoints from the Hugging Face Hub: data only, never code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlinf_vla.config.errors import UserError

DATA = (
    *("*.safetensors", "*.json", "tokenizer.model"),
    # components of OpenVLA-OFT, published as pickles; their reader admits tensors only
    *("action_head--*.pt", "proprio_projector--*.pt", "vision_backbone--*.pt"),
    "params/*",  # openpi's checkpoints in JAX
)
"""Patterns of the files to download."""
DESCRIPTION = ("*.json", "tokenizer.model")
"""Those from which a model is built without weights."""


def download(location: str, patterns: Sequence[str] = DATA) -> Path:
    """Return the local directory of ``hf://ORG/NAME`` or ``hf://ORG/NAME@REVISION``.

    Files are kept in Hugging Face's cache (HF_HOME), and only missing ones are downloaded. Without
    network, or with HF_HUB_OFFLINE=1, a complete directory in the cache is used. Raises UserError.
    """
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", location)
    if found is None:
        raise UserError(f"{location} names no repository: write hf://ORG/NAME or hf://ORG/NAME@REVISION")
    name, revision = found.groups()
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
        raise UserError(f"{location}: {name} has no revision {revision}: see {constants.ENDPOINT}/{name}/commits/main") from None
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
    except Exception as error:  # also those of the HTTP library, which depends on the client's version
        raise UserError(f"{location} cannot be downloaded ({_first_line(error)}): try again, or {copy}") from None


def _first_line(error: Exception) -> str:
    """Return the first line of the original error's message."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
