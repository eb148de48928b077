"""Messages with descriptors between library, spawner and the first process of a sandbox.

One JSON object a message over a SOCK_SEQPACKET pair; standard library only.
"""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_MESSAGE = 160 * 1024
MAX_FDS = 16


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep message borders."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message; the descriptors stay open here."""
    raw = json.dumps(message).encode()
    if len(raw) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(raw)} bytes; at most {MAX_MESSAGE} fit, pass a descriptor instead")
    if fds:
        socket.send_fds(sock, [raw], fds)
    else:
        sock.send(raw)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors.

    Raises:
        EOFError: the other side is gone.
    """
    try:
        raw, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, MAX_FDS)
    except ConnectionResetError:
        raise EOFError("the other side is gone") from None
    if not raw:
        raise EOFError("the other side is gone")
    message: dict[str, Any] = json.loads(raw)
    return message, fds
