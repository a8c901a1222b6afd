"""Under which names a server may be asked for, against web pages that point their name to it."""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address

from starlette.requests import HTTPConnection

from rlinf_vla.config.serve import ServeConfig, is_loopback

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d*)?", re.ASCII)
"""The header ``Host``: a name or an address, and a port."""


class Hosts:
    """The names of one server: its own names and addresses, and ``serve.allowed_hosts``.

    A web page can let its own name lead to this machine (DNS rebinding). For the browser the server
    then belongs to the page, and no ``Origin`` tells it, but ``Host`` is still the page's name.
    """

    def __init__(self, config: ServeConfig) -> None:
        machine = _plain(socket.gethostname())
        short = machine.partition(".")[0]
        allowed = [name.lower() for name in config.allowed_hosts]
        self._all = "*" in allowed
        self._ends = tuple(name[1:] for name in allowed if name.startswith("*."))
        self._names = {machine, short, f"{short}.local", _plain(config.host), *map(_plain, allowed)}

    def refusal(self, request: HTTPConnection) -> str | None:
        """Return why the host of ``request`` is none of the names, or None."""
        for host in request.headers.getlist("host") if not self._all else ():
            match = _HOST.fullmatch(host)
            if match is None or not self._knows(_plain(match[1]), request):
                return f"Host {host[:60]!r} is no name of this server: use its address, or start it with serve.allowed_hosts=[NAME]"
        return None

    def _knows(self, name: str, request: HTTPConnection) -> bool:
        address, _ = request.scope.get("server") or ("", None)
        return (
            is_loopback(name)
            or name in self._names
            or name == _plain(address)
            or name.endswith(self._ends)
        )


def _plain(name: str) -> str:
    """Return one spelling of a host name or an address."""
    name = name.strip("[]").lower().removesuffix(".")
    try:
        address = ip_address(name.partition("%")[0])
    except ValueError:
        return name
    return str(getattr(address, "ipv4_mapped", None) or address)
