"""A stand-in of the Hugging Face Hub on this machine, with as much of its interface as the client needs to share and fetch files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from huggingface_hub import close_session, constants
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

TOKEN = "hf_" + "a" * 34
LARGE = (".safetensors", ".parquet", ".mp4", ".png")


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def sha(self, revision: str) -> str | None:
        found = self.branches.get(revision) or self.tags.get(revision) or revision
        return found if found in self.commits else None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.sha(revision) or ""]


@dataclass
class Hub:
    """``repositories``: "models/ORG/NAME" -> its content. ``requests``: method and path of each."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def holds(self, kind: str, name: str, files: dict[str, bytes]) -> Repository:
        repository = self.repositories[f"{kind}/{name}"] = Repository()
        repository.commit("main", files)
        return repository

    @property
    def sent(self) -> list[str]:
        return [request for request in self.requests if not request.startswith(("GET ", "HEAD "))]


def oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.respond()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def respond(self) -> None:
        path = unquote(self.path.split("?")[0])
        body = self.body()
        self.hub.requests.append(f"{self.command} {path}")
        if (
            self.command not in ("GET", "HEAD")
            and not path.startswith("/lfs/")
            and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        ):
            return self.answer(401, {"error": "Invalid username or password."})
        if path.startswith("/lfs/"):
            self.hub.large[path.removeprefix("/lfs/")] = body
            return self.answer(200, {})
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        batch = re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        if batch is not None:
            return self.answer(
                200, {"objects": [self.object(each) for each in json.loads(body)["objects"]]}
            )
        call = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(\w+)(?:/(.+))?)?", path)
        resolve = re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if call is None and resolve is None:
            return self.answer(404, {"error": path})
        kind, name = (call[1], call[2]) if call else (resolve[1] or "models", resolve[2])  # type: ignore[index]
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None:
            return self.answer(404, {}, {"X-Error-Code": "RepoNotFound"})
        if resolve is not None:
            return self.file(repository, resolve[3], resolve[4])
        assert call is not None
        return self.call(repository, name, call[3], call[4] or "main", body)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        if asked["organization"] == "forbidden":
            return self.answer(403, {"error": "You don't have the rights"})
        if name in self.hub.repositories:
            url = f"{self.hub.endpoint}/{name.removeprefix('models/')}"
            return self.answer(409, {"error": "You already created this model repo", "url": url})
        repository = self.hub.repositories[name] = Repository(
            private=asked.get("visibility") == "private"
        )
        repository.commit("main", {".gitattributes": b""})
        return self.answer(200, {"url": f"{self.hub.endpoint}/{name.removeprefix('models/')}"})

    def object(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.hub.endpoint}/lfs/{asked['oid']}", "header": {}}
        return asked if asked["oid"] in self.hub.large else {**asked, "actions": {"upload": upload}}

    def call(
        self, repository: Repository, name: str, verb: str | None, rest: str, body: bytes
    ) -> None:
        if verb == "tag" and self.command == "DELETE":
            found = repository.tags.pop(rest, None)
            return (
                self.answer(200, {})
                if found
                else self.answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
            )
        if verb == "branch":
            repository.branches.setdefault(rest, repository.branches["main"])
            return self.answer(200, {})
        sha = repository.sha(rest)
        if sha is None:
            return self.answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
        if verb == "tag":
            repository.tags[json.loads(body)["tag"]] = sha
            return self.answer(200, {})
        if verb == "tree":
            return self.answer(
                200,
                [self.entry(path, content) for path, content in repository.commits[sha].items()],
            )
        if verb == "preupload":
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": modes})
        if verb == "commit":
            return self.commit(repository, name, rest, body)
        card = repository.commits[sha].get("README.md", b"")
        data = yaml.safe_load(card.decode().split("---")[1]) if card.startswith(b"---") else None
        siblings = [{"rfilename": path} for path in repository.commits[sha]]
        return self.answer(
            200,
            {
                "id": name,
                "sha": sha,
                "private": repository.private,
                "siblings": siblings,
                "cardData": data,
                "tags": [],
            },
        )

    def commit(self, repository: Repository, name: str, branch: str, body: bytes) -> None:
        files = dict(repository.files(branch))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(branch, files)
        self.answer(
            200,
            {
                "commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}",
                "commitOid": sha,
                "success": True,
            },
        )

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": oid(content),
        }
        if path.endswith(LARGE):
            found["lfs"] = {
                "oid": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 134,
            }
        return found

    def file(self, repository: Repository, revision: str, path: str) -> None:
        sha = repository.sha(revision)
        if sha is None or path not in repository.commits[sha]:
            return self.answer(404, {}, {"X-Error-Code": "EntryNotFound"})
        content = repository.commits[sha][path]
        tag = hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else oid(content)
        self.answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": sha})

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[Hub]:
    """The client talks to this Hub, and to no other, within the context."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": f"{cache}/hub",
        "HF_XET_CACHE": f"{cache}/xet",
        "HF_TOKEN_PATH": f"{cache}/token",
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shown = not are_progress_bars_disabled()
    disable_progress_bars()  # the constant counts only until the client is imported
    try:
        yield hub
    finally:
        if shown:
            enable_progress_bars()
        close_session()
        server.shutdown()
        thread.join()
        server.server_close()
