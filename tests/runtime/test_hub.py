"""Checkpoints named hf://ORG/NAME, with the real client: from its cache, and from a server that acts as the Hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.runtime.recipes import asset_path, located

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "moojink/openvla-7b-oft-finetuned-libero-spatial"
FILES = {
    "config.json": b"{}",
    "dataset_statistics.json": b"{}",
    "model.safetensors": b"weights",
    "action_head--150000_checkpoint.pt": b"head",
    "assets/some/norm_stats.json": b"{}",
    "params/ocdbt.process_0/d/0123": b"arrays",
    "modeling_prismatic.py": b"raise SystemExit('code of the checkpoint ran')",
    "optimizer.pt": b"pickle",
    "pytorch_model.bin": b"pickle",
}
DATA = set(FILES) - {"modeling_prismatic.py", "optimizer.pt", "pytorch_model.bin"}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's interface as ``snapshot_download`` uses."""

    requested: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.requested.append(path)
        if path.startswith("/api/models/some/gated"):
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if not path.removeprefix("/api/models").startswith(f"/{REPOSITORY}"):
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api"):
            rest = path.removeprefix(f"/api/models/{REPOSITORY}").strip("/").split("/")
            if rest[-1] not in ("", "main", COMMIT):
                return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if rest[0] == "tree":
                return self._answer(200, json.dumps([_entry(name) for name in FILES]).encode())
            document = {
                "id": REPOSITORY,
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in FILES],
            }
            return self._answer(200, json.dumps(document).encode())
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        return self._answer(
            200, FILES[name], {"ETag": _entry(name)["oid"], "X-Repo-Commit": COMMIT}
        )

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _entry(name: str) -> dict[str, object]:
    return {
        "type": "file",
        "path": name,
        "size": len(FILES[name]),
        "oid": hashlib.sha1(FILES[name]).hexdigest(),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that were requested of a server on this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}",
    )
    Hub.requested.clear()
    yield Hub.requested
    server.shutdown()
    thread.join()
    server.server_close()


def names(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_only_data_is_downloaded_never_code_or_other_pickles(hub: list[str], revision: str) -> None:
    directory = asset_path(f"hf://{REPOSITORY}{revision}")
    assert names(directory) == DATA
    assert all((directory / name).read_bytes() == FILES[name] for name in DATA)
    assert not [path for path in hub if path.endswith((".py", ".bin", "optimizer.pt"))]


def test_files_in_the_cache_are_not_downloaded_again(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = asset_path(f"hf://{REPOSITORY}")
    hub.clear()
    assert asset_path(f"hf://{REPOSITORY}") == directory and not [
        path for path in hub if "/resolve/" in path
    ]
    hub.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert asset_path(f"hf://{REPOSITORY}") == directory and not hub


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (
            "hf://some/gated",
            "hf://some/gated is gated: accept its conditions at http.*/some/gated, run `huggingface-cli login`",
        ),
        (
            "hf://some/missing",
            "has no such repository, or it is private: check the name, or run `huggingface-cli login`",
        ),
        (f"hf://{REPOSITORY}@v9", f"{REPOSITORY} has no revision v9: see http"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_fix(
    hub: list[str], location: str, words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        asset_path(location)
    assert "\n" not in str(caught.value)


def test_a_failed_download_says_how_to_go_on(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "do_HEAD", lambda self: self.send_error(403))
    with pytest.raises(
        UserError,
        match=r"is not complete in .* \(403 Forbidden.*\): try again where there is a network",
    ) as caught:
        asset_path(f"hf://{REPOSITORY}")
    assert "\n" not in str(caught.value)


def test_an_error_of_the_http_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise RuntimeError("the proxy says no\nat length")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(
        UserError,
        match=r"cannot be downloaded \(the proxy says no\): try again, or copy the checkpoint's directory here",
    ):
        asset_path(f"hf://{REPOSITORY}")


def filled(cache: Path) -> Path:
    """A copy of another machine's cache, as the client lays it out."""
    folder = cache / f"models--{REPOSITORY.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    for name in DATA:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(FILES[name])
    return snapshot


def test_a_copied_cache_serves_a_machine_without_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = filled(cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert asset_path(f"hf://{REPOSITORY}") == asset_path(f"hf://{REPOSITORY}@{COMMIT}") == snapshot


@pytest.mark.parametrize("offline", [True, False])
def test_without_network_or_cache_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, cache: Path, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as caught:
        asset_path(f"hf://{REPOSITORY}")
    assert str(caught.value).startswith(
        f"hf://{REPOSITORY} is not complete in {cache}, and the Hub is out of reach ("
    )
    assert ("(HF_HUB_OFFLINE is set)" if offline else "refused") in str(caught.value)
    assert "copy the checkpoint's directory here" in str(caught.value) and "\n" not in str(
        caught.value
    )


def test_a_published_adapter_is_downloaded_too(hub: list[str]) -> None:
    found = located(LoraOptions(rank=3, adapter=f"hf://{REPOSITORY}@main"))
    assert (found.rank, Path(str(found.adapter))) == (3, asset_path(f"hf://{REPOSITORY}"))
    assert located(LoraOptions()) == LoraOptions()


@pytest.mark.parametrize("location", ["openvla/openvla-7b", "gen-robot/openvla-7b-rlvla-warmup"])
def test_a_repository_without_its_scheme_is_refused_unless_there_is_a_directory_of_that_name(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError,
        match=f"^{location}: no such directory; if it is a repository of the Hub, write hf://{location}$",
    ):
        asset_path(location)
    Path(location).parent.mkdir()
    assert asset_path(location) == Path(location), "it may be there later, or be misspelt"


@pytest.mark.parametrize(
    "location", ["hf://", "hf://openvla-7b", "hf://a/b/c", "hf://a/b@", "hf://../b c"]
)
def test_a_location_that_names_no_repository_is_refused(location: str) -> None:
    with pytest.raises(
        UserError, match=r"names no repository: write hf://ORG/NAME or hf://ORG/NAME@REVISION"
    ):
        asset_path(location)
