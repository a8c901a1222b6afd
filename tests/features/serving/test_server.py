"""Who may connect, how long, and how a server starts and stops."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.config.serve import ServeConfig, check_serve, is_loopback
from rlinf_vla.features.serving.array_messages import json_pack, pack, unpack
from rlinf_vla.features.serving.observations import NATIVE
from rlinf_vla.features.serving.service import PolicyService, opened
from tests.features.serving.conftest import Running, Start, a_certificate, an_image, native
from tests.features.serving.test_protocols import closing, connect


def raw(server: Running, data: bytes = b"") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    found.sendall(data)
    return found


def upgraded(server: Running) -> socket.socket:
    """A websocket, up to the server's reply."""
    found = raw(
        server,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    )
    assert found.recv(12) == b"HTTP/1.1 101"
    return found


def closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection within 30 seconds."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def read_until(connection: socket.socket, end: bytes) -> bool:
    found = b""
    while not found.endswith(end) and (data := connection.recv(1 << 16)):
        found += data
    return found.endswith(end)


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


class Slow:
    """Loads or acts only when it may."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.may_load = threading.Event()
        self.may_act = threading.Event()
        self.acts = threading.Event()
        self.calls = 0

    @contextmanager
    def __call__(self) -> Iterator[PolicyService]:
        assert self.may_load.wait(60)
        with opened(self.recipe) as service:
            answer = service.answer

            def slowly(requests: Any) -> Any:
                self.calls += len(requests)
                self.acts.set()
                assert self.may_act.wait(60)
                return answer(requests)

            service.answer = slowly  # type: ignore[method-assign]
            yield service


@pytest.fixture
def slow(recipe: Recipe) -> Iterator[Slow]:
    found = Slow(recipe)
    yield found
    found.may_load.set()
    found.may_act.set()


def test_a_server_that_loads_is_alive_and_not_ready(start: Start, slow: Slow) -> None:
    with start(slow, ready=False) as server, connect(server) as early:
        assert server.http("/healthz").status == 503 and server.http("/health").status == 503
        act = server.http("/act", json_pack({"image": an_image(0), "instruction": "x"}).encode())
        assert (
            act.status == 503 and act.headers["Retry-After"] == "1" and "busy" in act.json["error"]
        )
        assert server.http("/config").status == 503 == server.http("/v1/actions/metadata").status
        slow.may_load.set()
        slow.may_act.set()
        assert "rlinf_vla" in unpack(early.recv(timeout=60)), (
            "a client that came early is greeted when the policy is ready"
        )
        assert server.http("/healthz").status == 200


def test_a_policy_that_cannot_be_loaded_ends_the_server(start: Start, recipe: Recipe) -> None:
    recipe.model.checkpoint = "/nowhere"
    with pytest.raises(FileNotFoundError), start():
        pass


def test_stopping_finishes_what_runs(start: Start, slow: Slow) -> None:
    slow.may_load.set()
    with start(slow) as server, connect(server) as busy, connect(server) as idle:
        for each in (busy, idle):
            each.recv(timeout=60)
        busy.send(pack(native()))
        assert slow.acts.wait(60)
        server.stop()
        assert closing(idle) == (1001, "the server is stopping")
        assert server.http("/healthz").status == 503
        assert not server.ended.is_set(), "it waits for the request"
        slow.may_act.set()
        assert unpack(busy.recv(timeout=60))["actions"].shape == (3, 4)
        assert closing(busy) == (1001, "the server is stopping")
        assert server.ended.wait(60)
    assert server.said[-1] == "stopped"


def test_stopping_while_it_loads(start: Start, slow: Slow) -> None:
    with start(slow, ready=False) as server, connect(server) as early:
        server.stop()
        assert closing(early)[0] == 1001
        slow.may_load.set()
        assert server.ended.wait(60)


def test_a_drain_ends(start: Start, slow: Slow) -> None:
    slow.may_load.set()
    with start(slow, drain_s=0.05) as server, connect(server) as client:
        client.recv(timeout=60)
        client.send(pack(native()))
        assert slow.acts.wait(60)
        server.stop()
        closing(client)
        slow.may_act.set()
        assert server.ended.wait(60)


def test_a_full_queue_is_busy(start: Start, slow: Slow) -> None:
    slow.may_load.set()
    with (
        start(slow, max_queue=1) as server,
        connect(server) as first,
        connect(server) as second,
        connect(server) as third,
    ):
        for each in (first, second, third):
            each.recv(timeout=60)
        first.send(pack(native(episode={"seed": 1})))
        assert slow.acts.wait(60)
        second.send(pack(native()))
        assert eventually(lambda: b"rlinf_vla_queue 1.0" in server.http("/metrics").body)
        third.send(pack(native()))
        assert str(third.recv(timeout=60)).startswith("busy: 1 requests are waiting already")
        assert closing(third)[0] == 1013
        answered = server.http(
            "/act", json_pack({"image": an_image(0), "instruction": "x"}).encode()
        )
        assert answered.status == 503
        slow.may_act.set()
        assert unpack(second.recv(timeout=60))["actions"].shape == (3, 4)


def test_a_client_that_left_is_not_answered(start: Start, slow: Slow) -> None:
    def counted(metric: str) -> bool:
        return f"\n{metric} 1.0\n" in server.http("/metrics").body.decode()

    slow.may_load.set()
    with start(slow) as server, connect(server) as first:
        first.recv(timeout=60)
        first.send(pack(native(episode={"seed": 1})))
        assert slow.acts.wait(60)
        with connect(server) as second:
            second.recv(timeout=60)
            second.send(pack(native(episode={"seed": 2})))
            assert eventually(lambda: counted("rlinf_vla_queue"))
        assert eventually(
            lambda: counted('rlinf_vla_requests_total{dialect="openpi",outcome="cancelled"}')
        )
        body = json_pack({"image": an_image(0), "instruction": "x"}).encode()
        with raw(
            server,
            b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body,
        ):
            assert eventually(lambda: counted("rlinf_vla_queue"))
        assert eventually(
            lambda: counted('rlinf_vla_requests_total{dialect="act",outcome="cancelled"}')
        )
        slow.may_act.set()
        first.recv(timeout=60)
        first.send(pack(native(episode={"seed": 3})))
        first.recv(timeout=60)
    assert slow.calls == 2, "those of the clients that left were dropped from the queue"


def test_a_token_is_required(start: Start) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect as open_socket

    with start(token="secret") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Basic secret"},
        ):
            for path in ("/config", "/metrics", "/v1/actions/metadata", "/nowhere"):
                answered = server.http(path, **headers)
                assert answered.status == 401 and answered.headers["WWW-Authenticate"] == "Bearer"
            assert server.http("/act", b"{}", **headers).status == 401
            with (
                pytest.raises(InvalidStatus) as caught,
                open_socket(server.url(), additional_headers=headers),
            ):
                pass
            assert caught.value.response.status_code == 401
        for kind in ("Bearer", "bearer", "Api-Key"):
            assert server.http("/config", Authorization=f"{kind} secret").status == 200
            with open_socket(
                server.url(), additional_headers={"Authorization": f"{kind} secret"}
            ) as client:
                assert isinstance(client.recv(timeout=60), bytes)
        assert server.http("/healthz").status == 200 == server.http("/health").status, (
            "probes need no token"
        )


def test_web_pages_are_not_served(start: Start) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect as open_socket

    with start() as server:
        assert server.http("/act", b"{}", Origin="http://evil.example").status == 403
        with (
            pytest.raises(InvalidStatus) as caught,
            open_socket(server.url(), origin="http://evil.example"),
        ):  # type: ignore[arg-type]
            pass
        assert caught.value.response.status_code == 403


def refusal_of(asked: str, address: str, **keys: Any) -> str | None:
    """Why a request for ``asked`` that arrives at ``address`` is refused."""
    from starlette.requests import HTTPConnection

    from rlinf_vla.features.serving.hosts import Hosts

    scope = {"type": "http", "headers": [(b"host", asked.encode())], "server": (address, 8000)}
    return Hosts(ServeConfig(**keys)).refusal(HTTPConnection(scope))


FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "",
    "localhost.evil.example",
    "x@localhost",
    "[::2]",
    "10.1.2.3",
)


@pytest.mark.parametrize(
    ("keys", "host", "served"),
    [
        *[
            ({}, each, True)
            for each in (
                "localhost:1",
                "LOCALHOST.",
                "127.0.0.1:8000",
                "[::1]:8000",
                socket.gethostname(),
            )
        ],
        *[({}, each, False) for each in FOREIGN],
        *[
            ({"allowed_hosts": ["gpu-box", "*.lab"]}, each, True)
            for each in ("gpu-box:80", "a.lab", "A.B.LAB")
        ],
        *[
            ({"allowed_hosts": ["gpu-box", "*.lab"]}, each, False)
            for each in ("a.gpu-box", "lab", "a.lab.evil.example")
        ],
        ({"allowed_hosts": ["*"]}, "evil.example", True),
        ({"host": "localhost", "allowed_hosts": []}, "evil.example", False),
    ],
)
def test_only_the_servers_own_names_are_served(
    keys: dict[str, Any], host: str, served: bool
) -> None:
    """A web page whose name leads to this machine sends that name, and no origin."""
    refusal = refusal_of(host, "127.0.0.1", **keys)
    assert (refusal is None) == served and (served or "serve.allowed_hosts=[NAME]" in str(refusal))


def test_an_own_address_is_a_name() -> None:
    assert refusal_of("192.168.7.8:8000", "::ffff:192.168.7.8", host="::") is None


def test_a_foreign_name_is_refused_in_one_line(start: Start) -> None:
    with start() as server:
        answered = server.http("/config", Host="evil.example")
        assert answered.status == 421 and answered.json["error"].startswith(
            "Host 'evil.example' is no name of this server: "
        )
        assert server.http("/act", b"{}", Host="evil.example").status == 421
        upgrade = (
            b"GET / HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        )
        with raw(
            server,
            upgrade
            + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        ) as socket:
            assert socket.recv(1 << 16).startswith(b"HTTP/1.1 421")


def test_a_message_over_the_limit_ends_the_connection(start: Start) -> None:
    with start(max_message_bytes=20_000) as server:
        with connect(server) as client:
            client.recv(timeout=60)
            client.send(pack(native()) + bytes(10_000))
            assert closing(client)[0] == 1009
        with raw(
            server, b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20001\r\n\r\n"
        ) as declared:
            assert declared.recv(1 << 16).startswith(b"HTTP/1.1 413")
        chunked = (
            b"POST /act HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"4000\r\n"
            + b"a" * 0x4000
            + b"\r\n"
        )
        with raw(server, chunked + b"4000\r\n" + b"a" * 0x4000 + b"\r\n") as growing:
            assert growing.recv(1 << 16).startswith(b"HTTP/1.1 413")
        with connect(server) as client:
            client.recv(timeout=60)
            client.send(pack(native()))
            assert unpack(client.recv(timeout=60))["actions"].shape == (3, 4)


def test_slow_and_silent_connections_are_closed(start: Start) -> None:
    with start(handshake_timeout_s=0.2) as server:
        with server.held():
            silent = raw(server)
            half = raw(server, b"GET /healthz HTTP/1.1\r\nHost")
            body = raw(
                server, b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            )
            kept = raw(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with silent, half, body, kept:
            assert closed(silent) and closed(half) and closed(kept)
            assert body.recv(1 << 16).startswith(b"HTTP/1.1 408")
    with start(idle_timeout_s=0.3) as server, upgraded(server) as idle, upgraded(server) as part:
        part.sendall(b"\x82\xfe\x01\x00")  # the head of a frame
        assert read_until(idle, b"nothing came for 0.3 s"), "it answers no ping"
        assert read_until(part, b"nothing came for 0.3 s")


def test_a_client_that_answers_pings_is_not_idle(start: Start) -> None:
    with start(idle_timeout_s=2.0) as server, connect(server) as paused:  # its thread answers
        paused.recv(timeout=60)
        with upgraded(server) as mute:
            assert read_until(mute, b"nothing came for 2 s"), (
                "by then the other would be closed, too"
            )
        with upgraded(server) as later:
            assert read_until(later, b"nothing came for 2 s")
        paused.send(pack(native()))
        assert unpack(paused.recv(timeout=60))["actions"].shape == (3, 4)


def test_requests_that_come_early_are_answered(start: Start, recipe: Recipe) -> None:
    """Each runs for longer than the head of a request may take."""

    @contextmanager
    def sluggish() -> Iterator[PolicyService]:
        with opened(recipe) as service:
            answer = service.answer

            def slowly(requests: Any) -> Any:
                time.sleep(0.4)
                return answer(requests)

            service.answer = slowly  # type: ignore[method-assign]
            yield service

    body = json_pack({"image": an_image(0), "instruction": "x"}).encode()
    act = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with start(sluggish, handshake_timeout_s=0.2) as server:
        with server.held():
            client = raw(server, act + act)
        with client:
            found = b""
            while found.count(b"__numpy__") < 2 and (data := client.recv(1 << 16)):
                found += data
        assert found.count(b"HTTP/1.1 200") == found.count(b"__numpy__") == 2


def test_connections_without_a_request_make_room(start: Start) -> None:
    with start(max_connections=4) as server, connect(server) as first, connect(server) as second:
        for each in (first, second):
            each.recv(timeout=60)
        silent = [raw(server) for _ in range(10)]
        assert server.http("/healthz").status == 200, "the oldest silent connection made room"
        assert sum(map(closed_now, silent)) >= 8
        with connect(server) as third, connect(server) as fourth:
            for each in (third, fourth):
                each.recv(timeout=60)
            with raw(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as fifth:
                assert fifth.recv(1 << 16).startswith(b"HTTP/1.1 503"), (
                    "all places are taken by clients"
                )
            for each in (first, fourth):
                each.send(pack(native()))
                assert unpack(each.recv(timeout=60))["actions"].shape == (3, 4)
        for each in silent:
            each.close()


def closed_now(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    return closed(connection)


def masked(first: int, payload: bytes = b"") -> bytes:
    """A frame of a client."""
    return bytes([first, 0x80 | len(payload)]) + bytes(4) + payload


FLOODS = {
    "empty fragments": masked(0x02) + masked(0x00) * 5000,
    "pings whose pongs nobody reads": masked(0x89, bytes(125)) * 200_000,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_frames_without_end(start: Start, flood: str) -> None:
    with start() as server, connect(server) as other:
        other.recv(timeout=60)
        with upgraded(server) as unread:
            with suppress(ConnectionError):
                unread.sendall(FLOODS[flood])
            assert closed(unread)
        other.send(pack(native()))
        assert unpack(other.recv(timeout=60))["actions"].shape == (3, 4)


def test_clients_at_once_get_their_own_actions(start: Start, recipe: Recipe) -> None:
    with opened(recipe) as service:
        requests = [service.request(native(seed), NATIVE, 0, 0) for seed in range(8)]
        wanted = [service.answer([each])[0] for each in requests]
    found: dict[int, Any] = {}
    all_are_there = threading.Barrier(8, timeout=60)

    def client(server: Running, seed: int) -> None:
        with connect(server) as each:
            each.recv(timeout=60)
            all_are_there.wait()
            for _ in range(5):
                each.send(pack(native(seed)))
                found[seed] = unpack(each.recv(timeout=60))["actions"]

    with start(max_wait_ms=1000.0) as server:
        threads = [threading.Thread(target=client, args=(server, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        calls = server.http("/metrics").body.decode()
    for seed, outcome in enumerate(wanted):
        assert np.array_equal(found[seed], outcome.actions)  # type: ignore[union-attr]
    assert "rlinf_vla_call_rows_sum 40.0" in calls
    assert float(calls.split("rlinf_vla_call_rows_count ")[1].split()[0]) < 40, (
        "requests were joined"
    )


def test_an_internal_error_is_one_line(
    start: Start, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def broken() -> Iterator[PolicyService]:
        with opened(recipe) as service:

            def fail(inputs: Any) -> Any:
                raise KeyError("/secret/path")

            service.policy.encode = fail  # type: ignore[method-assign]
            yield service

    with start(broken) as server, connect(server) as client:
        client.recv(timeout=60)
        client.send(pack(native()))
        assert client.recv(timeout=60) == "internal error: KeyError; the server's log says more"
        answered = server.http(
            "/act", json_pack({"image": an_image(0), "instruction": "x"}).encode()
        )
        assert answered.status == 500 and "secret" not in answered.json["error"]
    assert "/secret/path" in capsys.readouterr().err


def test_a_mistake_of_ours_beside_the_policy_is_one_line(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from rlinf_vla.features.serving.http import Http
    from rlinf_vla.features.serving.openpi import OpenPi

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(OpenPi, "answered", broken)
    monkeypatch.setattr(Http, "act_reply", broken)
    with start() as server, connect(server) as client:
        client.recv(timeout=60)
        client.send(pack(native()))
        assert client.recv(timeout=60) == "internal error: RuntimeError; the server's log says more"
        assert closing(client)[0] == 1011
        answered = server.http(
            "/act", json_pack({"image": an_image(0), "instruction": "x"}).encode()
        )
        assert answered.status == 500 and answered.json["error"].startswith(
            "internal error: RuntimeError"
        )
    assert capfd.readouterr().err.count("/secret/path") >= 2


def test_tls(start: Start, tmp_path: Path) -> None:
    from websockets.sync.client import connect as open_socket

    certificate, key = a_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=str(certificate))
    with (
        start(certificate=str(certificate), private_key=str(key)) as server,
        open_socket(server.url().replace("ws:", "wss:"), ssl=trusted, proxy=None) as client,
    ):
        assert isinstance(client.recv(timeout=60), bytes)
    with (
        start(
            certificate=str(certificate), private_key=str(key), handshake_timeout_s=0.5
        ) as server,
        raw(server) as silent,
    ):
        assert closed(silent), "a TLS handshake has its time limit, too"
    key.write_text("no key")
    with (
        pytest.raises(UserError, match=r"serve\.certificate="),
        start(certificate=str(certificate), private_key=str(key)),
    ):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_serve(ServeConfig(host=host), None)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.0.1", "localhost.example", "example"]
)
def test_other_addresses_need_a_token(host: str) -> None:
    with pytest.raises(UserError, match=r"serve\.token_env=NAME"):
        check_serve(ServeConfig(host=host), None)
    check_serve(ServeConfig(host=host, token_env="TOKEN"), "secret")
    check_serve(ServeConfig(host=host, insecure=True), None)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(
        UserError, match=r"serve\.token_env=TOKEN: this environment variable is not set"
    ):
        check_serve(ServeConfig(token_env="TOKEN"), None)
    for name in ("http://gpu-box", "gpu-box:8000", "", "*.", "a b"):
        with pytest.raises(UserError, match=r"serve\.allowed_hosts: .* is no host name"):
            check_serve(ServeConfig(allowed_hosts=["gpu-box", "*.lab", "::1", name]), None)
    with pytest.raises(UserError, match="go together"):
        check_serve(ServeConfig(certificate="chain.pem"), None)


def test_addresses_that_cannot_be_used() -> None:
    from rlinf_vla.features.serving.server import listening

    with (
        listening(ServeConfig(port=0)) as taken,
        pytest.raises(UserError, match="Address already in use: choose another port"),
    ):
        listening(ServeConfig(port=taken.getsockname()[1]))
    with pytest.raises(UserError, match="choose an address of this machine"):
        listening(ServeConfig(host="no such host", port=0))
