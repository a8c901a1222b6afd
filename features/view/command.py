"""Show a run, a sweep or a dataset in a browser: ``rlinf-vla view`` (docs/guides/view.md)."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rlinf_vla.config.arguments import Parser
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.serve import is_loopback
from rlinf_vla.core.sockets import listening_at, url_of
from rlinf_vla.runtime.run_names import named

PACKAGES = ("starlette", "uvicorn")
PORT = 8090


def run(arguments: Sequence[str]) -> int:
    """Serve the page until SIGINT or SIGTERM. Raises UserError."""
    parser = Parser("view", "rlinf-vla view RUN")
    parser.add_argument("directory", metavar="RUN|SWEEP|DATASET")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--token", action="store_true")
    parser.add_argument("--open", action="store_true")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port} is not between 0 and 65535")
    if absent := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"view needs {', '.join(absent)}: pip install 'rlinf-vla[serve]'")
    if not is_loopback(options.host) and not options.token:
        raise UserError(
            f"--host {options.host} can be reached from other machines: give --token, which makes the address secret"
        )
    directory = Path(options.directory).expanduser()
    directory = directory if directory.is_dir() else named(options.directory)
    token = secrets.token_urlsafe() if options.token else None

    import uvicorn

    from rlinf_vla.features.view.app import build_app, require_known

    require_known(directory)

    class Server(uvicorn.Server):
        """Returns after a signal, where uvicorn's raises it again."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {
                signum: signal.signal(signum, self.handle_exit)
                for signum in (signal.SIGINT, signal.SIGTERM)
            }
            try:
                yield
            finally:
                for signum, handler in before.items():
                    signal.signal(signum, handler)

    with listening_at(
        options.host, options.port, f"--host {options.host} --port {options.port}"
    ) as listener:
        url = url_of(listener, "http") + (f"/?token={token}" if token else "/")
        print(f"{directory}: {url} (Ctrl-C ends)", flush=True)
        if options.open:
            import webbrowser

            webbrowser.open(url)
        app = build_app(directory, token, is_loopback(options.host))
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        Server(settings).run([listener])
    return 0
