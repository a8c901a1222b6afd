from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from rlinf_vla.benchmarks.synthetic_cell import SPACE
from rlinf_vla.config.recipe import LoraOptions, ModelConfig, NoAlgorithmConfig, Recipe
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.config.serve import ServeConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Policy
from rlinf_vla.features.realworld.control_actor import ControlActor, require_fit
from rlinf_vla.features.realworld.inference import Chunk, Committed
from rlinf_vla.features.realworld.inference import Request as ControlRequest
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.testing.toy_env import CounterConfig
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.features.realworld.test_control_actor import seen
from tests.features.realworld.virtual_time import VirtualClock
from tests.skips import NOT_INSTALLED, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if missing("serve"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"{NOT_INSTALLED}serve"))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe of the linear policy: chunks of 3 actions of 4 numbers, from one image ``base``."""
    monkeypatch.setattr(plugins, "models", lambda: {"linear": LinearPolicy})
    LinearPolicy(LinearOptions(seed=3)).save(tmp_path / "model")
    model = ModelConfig("linear", str(tmp_path / "model"), LinearOptions(), LoraOptions(rank=0))
    return Recipe(
        name="toy",
        iterations=0,
        seed=7,
        env=CounterConfig(),
        model=model,
        algorithm=NoAlgorithmConfig(),
    )


def an_image(seed: int, size: tuple[int, int] = (64, 64)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(256, size=(*size, 3), dtype=np.uint8)


def a_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of this machine that signs itself, and its key, as PEM files."""
    certificate = folder / "chain.pem"
    key = folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True)
    return certificate, key


def first_two_chunks(policy: Policy, temperature: float) -> tuple[Chunk, Chunk]:
    """What a control loop gets of a policy: a chunk, and one that continues its last actions."""
    require_fit(policy, SPACE, ["base"], ControlConfig(real_time_chunking=True))
    clock = VirtualClock()
    actor = ControlActor(policy, Settings(3, temperature, 1), clock)
    shown = seen(clock)
    first = actor(ControlRequest(shown, "push the cube", 0, 0))
    committed = Committed(first.actions[1:], 2)
    return first, actor(ControlRequest(shown, "push the cube", 1, 1, committed))


def native(seed: int = 0, **more: Any) -> dict[str, Any]:
    """A native observation of one row."""
    return {"images": {"base": an_image(seed)}, "instruction": "push the cube", **more}


@dataclass
class Answered:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    """A server in a thread of this process."""

    port: int
    said: list[str] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None
    soon: Callable[[Callable[[], object]], object] = lambda call: None
    """Calls something in the server's thread."""
    ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The server accepts and reads what clients send meanwhile at the end, before any of their times begins."""
        holds, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            holds.set()
            goes_on.wait(60)

        self.soon(hold)
        assert holds.wait(60)
        try:
            yield
        finally:
            goes_on.set()

    def url(self, path: str = "/") -> str:
        return f"ws://127.0.0.1:{self.port}{path}"

    def http(self, path: str, body: bytes | None = None, **headers: str) -> Answered:
        request = Request(
            f"http://127.0.0.1:{self.port}{path}",
            body,
            {name.replace("_", "-"): each for name, each in headers.items()},
        )
        try:
            with urlopen(request, timeout=60) as answer:
                return Answered(answer.status, answer.read(), answer.headers)
        except HTTPError as error:
            with error:
                return Answered(error.code, error.read(), error.headers)


Start = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def start(recipe: Recipe) -> Start:
    """Starts a server with these ``serve.*`` keys; ``open_service`` replaces loading."""

    @contextmanager
    def started(
        open_service: Any = None, token: str | None = None, ready: bool = True, **keys: Any
    ) -> Iterator[Running]:
        from rlinf_vla.features.serving.server import listening, run
        from rlinf_vla.features.serving.service import opened

        config = replace(ServeConfig(port=0), **keys)
        listener = listening(config)
        server = Running(listener.getsockname()[1])
        begun = threading.Event()
        failed = list[BaseException]()

        async def serve() -> None:
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            server.soon = loop.call_soon_threadsafe
            server.stop = lambda: None if loop.is_closed() else server.soon(stop.set)

            def say(line: str) -> None:
                server.said.append(line)
                if not ready or line.startswith("ready"):
                    begun.set()

            load = open_service or partial(opened, replace(recipe, serve=config))
            await run(listener, config, load, token, stop, say)

        def body() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                failed.append(error)
            finally:
                server.ended.set()
                begun.set()

        thread = threading.Thread(target=body)
        thread.start()
        try:
            assert begun.wait(60)
            if failed:
                raise failed[0]
            yield server
        finally:
            server.stop()
            thread.join(60)
            listener.close()
            assert not thread.is_alive(), "the server does not stop"
        if failed:
            raise failed[0]

    return started
