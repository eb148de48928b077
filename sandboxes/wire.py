"""Messages with descriptors between library, spawner and the first process of a sandbox.

One JSON object a message over a SOCK_SEQPACKET pair; standard library only.
"""

from __future__ import annotations

import array
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
    fds = array.array("i")
    room = socket.CMSG_LEN(MAX_FDS * fds.itemsize)
    try:
        # not socket.recv_fds: before Python 3.13 it ignores its flags, and the descriptors would be inherited
        raw, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        raise EOFError("the other side is gone") from None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not raw:
        raise EOFError("the other side is gone")
    message: dict[str, Any] = json.loads(raw)
    return message, list(fds)
