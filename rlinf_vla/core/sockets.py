"""Listen for TCP connections, or say in one line why not."""

from __future__ import annotations

import socket

from rlinf_vla.config.errors import UserError


def listening_at(host: str, port: int, where: str) -> socket.socket:
    """Return a socket that listens. Raises UserError; ``where``: the address as given."""
    try:
        addresses = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, number, _, address = addresses[0]
        listener = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"{where}: {getattr(error, 'strerror', None) or error}: choose an address of this machine"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{where}: {error.strerror}: choose another port, or an address of this machine"
        ) from None
    return listener


def url_of(listener: socket.socket, scheme: str) -> str:
    """Return the address at which ``listener`` can be reached."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
