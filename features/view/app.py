"""Answer the requests of ``rlinf-vla view``: read-only, and nothing from outside the directory."""

from __future__ import annotations

import hmac
import threading
from functools import partial
from hashlib import sha256
from io import BytesIO
from os import stat_result
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.serve import is_loopback
from rlinf_vla.features.view import results
from rlinf_vla.runtime.run_directory import BLOCKS, RECIPE, RESULT, is_sweep
from rlinf_vla.telemetry.metrics import METRICS_FILE
from rlinf_vla.telemetry.page import render
from rlinf_vla.telemetry.run_files import Run, read_run

if TYPE_CHECKING:
    from rlinf_vla.features.view.episodes import Dataset

HERE = Path(__file__).parent
FOLDERS = ("", "evaluation", "videos", BLOCKS)
"""What a page about a run or a sweep is made of."""
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""No script runs but our own, whatever a page contains, and no other page embeds a part of ours."""
COOKIE = "rlinf_vla_view"


def require_known(directory: Path) -> None:
    """Raise UserError unless ``directory`` is empty, or a run, a sweep or a dataset."""
    names = (RECIPE, METRICS_FILE, RESULT, BLOCKS, "evaluation", "meta", "data", ".lock")
    if any(directory.iterdir()) and not any((directory / name).exists() for name in names):
        raise UserError(
            f"{directory} holds no run, no sweep and no dataset: give the directory of one, or a run's name"
        )


def build_app(directory: Path, token: str | None, loopback: bool) -> ASGIApp:
    """Return the application. ``loopback``: it is asked for by a name of this machine only."""
    viewer = Viewer(directory)
    routes = [
        Route("/", viewer.page),
        Route("/episodes/{number:int}", viewer.page),
        Route("/episodes/{number:int}/{camera:int}/{frame:int}.jpg", viewer.frame),
        Mount("/videos", Films(directory)),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
    return Guarded(Starlette(routes=routes), token, loopback)


class Films(StaticFiles):
    """Files ``videos/*.mp4`` of the directory, none through links that lead out of it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory=directory, check_dir=False)

    def lookup_path(self, path: str) -> tuple[str, stat_result | None]:
        if Path(path).name != path or not path.endswith(".mp4"):
            return "", None
        return super().lookup_path(f"videos/{path}")


class Viewer:
    """Makes pages of what is in ``directory`` at the time of the request."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._drawing = threading.Lock()  # matplotlib's settings belong to the process
        self._dataset: Dataset | None = None

    def page(self, request: Request) -> Response:
        version = f'"{self._version()}"'
        if request.headers.get("if-none-match") == version:
            return Response(status_code=304)
        with self._drawing:
            text = self._text(request)
        return HTMLResponse(
            text.encode(errors="replace"), headers={"ETag": version, "Cache-Control": "no-store"}
        )

    def _text(self, request: Request) -> str:
        try:
            return self._page(
                request.path_params.get("number"), request.query_params.get("page", "")
            )
        except HTTPException:
            raise
        except UserError as error:
            problem = str(error)
        except Exception as error:  # of a file that holds something else than what its name says
            problem = f"cannot be shown ({type(error).__name__}: {error})"
        name = self.directory.resolve().name
        return render(
            "message.html",
            [HERE / "templates"],
            kind="Nothing to show",
            name=name,
            header=[problem],
            data={},
        )

    def _page(self, number: int | None, page: str) -> str:
        folders = [HERE / "templates"]
        if (self.directory / "meta").exists():
            dataset = self._episodes()
            if number is None:
                return render("episodes.html", folders, **dataset.listed(page))
            return render("episode.html", folders, **dataset.episode(number))
        if number is not None:
            raise HTTPException(404)
        if is_sweep(self.directory):
            return results.sweep(
                self.directory, lambda content: render("sweep.html", folders, **content)
            )

        def show(run: Run) -> str:
            return render("run.html", folders, **results.run(run, self.directory))

        run = read_run(self.directory)
        try:
            return show(run)
        except Exception:  # of a value that is not what its name says
            return results.what_can_be_shown(run, show)

    def frame(self, request: Request) -> Response:
        try:
            image = self._episodes().frame(
                *(request.path_params[parameter] for parameter in ("number", "camera", "frame"))
            )
        except UserError as error:
            return PlainTextResponse(str(error), 404)
        file = BytesIO()
        Image.fromarray(image).save(file, "jpeg", quality=90)
        return Response(
            file.getvalue(), media_type="image/jpeg", headers={"Cache-Control": "max-age=600"}
        )

    def _episodes(self) -> Dataset:
        from rlinf_vla.features.view.episodes import (
            Dataset,
        )  # imports PyTorch, which runs and sweeps do without

        if self._dataset is None:
            self._dataset = Dataset(self.directory)
        return self._dataset

    def _version(self) -> str:
        """Return what changes with any file of a run or sweep that a page shows."""
        files = [
            path
            for folder in FOLDERS
            if (self.directory / folder).is_dir()
            for path in (self.directory / folder).iterdir()
        ]
        digest = sha256()
        for path in sorted(files):
            try:
                stat = path.stat()
            except OSError:  # replaced at this moment, or a link to nothing
                continue
            digest.update(f"{path}\0{stat.st_mtime_ns}\0{stat.st_size}\0".encode(errors="replace"))
        return digest.hexdigest()[:32]


class Guarded:
    """Lets requests pass that know the token, and adds HEADERS to every answer.

    Without a token, a page is shown only under a name of this machine: otherwise a web page whose
    own name leads to 127.0.0.1 could read it.
    """

    def __init__(self, app: ASGIApp, token: str | None, loopback: bool) -> None:
        self.app = app
        self.token = token
        self.loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(Request(scope)) or self.app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        try:
            host = (
                urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
            )  # starlette guesses for some that are odd
        except ValueError:
            host = ""
        if self.token is None:
            allowed = not self.loopback or is_loopback(host)
            return (
                None
                if allowed
                else PlainTextResponse("open this page as localhost or 127.0.0.1\n", 403)
            )
        same = partial(hmac.compare_digest, self.token.encode())
        if same(request.cookies.get(COOKIE, "").encode()):
            return None
        if same(request.query_params.get("token", "").encode()):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse(
            "open the address that rlinf-vla view printed: it contains the token\n", 401
        )
