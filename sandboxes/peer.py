"""One interpreter of a live Python tool, seen from outside: its socket and its process; and the tree it belongs to.

Owns the talk with it and its end. Its process number comes from the kernel, with its first message. What it says comes
from a process that runs untrusted code: it is checked for its form, and nothing is believed that matters.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import SandboxError
from agentgym.sandboxes import processes, wire

_START_S = 20.0
_ANSWER_S = 30.0


@dataclass(slots=True)
class Tree:
    """The processes that were forked off one start, and those of them that live."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    pids: set[int] = field(default_factory=set)
    rest: int = -1
    """A descriptor of the root where the tree began: keepers rest there, and hold no sandbox's files."""


class Peer:
    """A running interpreter, seen from outside: its socket and its process."""

    def __init__(self, control: socket.socket, tree: Tree) -> None:
        """Wait for its first message, which says who it is.

        Raises:
            SandboxError: it ended instead.
        """
        self.control = control
        self._tree = tree
        self._is_mute = False
        self.hello, self.pid = _first_message(control)
        self.pidfd = os.pidfd_open(self.pid)
        tree.pids.add(self.pid)

    def ask(self, what: str, fds: list[int], **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            SandboxError: the interpreter ended, or does not answer.
        """
        if self._is_mute:
            raise SandboxError(f"the interpreter {self.pid} ended, or does not answer")
        try:
            wire.send(self.control, {"do": what, **arguments}, fds)
            answer = self.answer()
        except (OSError, EOFError) as error:
            self._is_mute = True  # an answer that comes later would be taken for another's
            raise SandboxError(f"the interpreter {self.pid} ended, or does not answer ({error})") from error
        if "error" in answer:
            raise SandboxError(f"{what}: {str(answer['error'])[:200]}")
        return answer

    def answer(self) -> dict[str, Any]:
        """One message of the interpreter.

        Raises:
            OSError, EOFError: there is none, or it is nonsense.
        """
        try:
            answer, fds = wire.receive(self.control)
        except (ValueError, RecursionError) as error:
            raise OSError(f"its answer is no message: {error}") from error
        for fd in fds:
            os.close(fd)  # none is ever expected
        if not isinstance(answer, dict):
            raise OSError("its answer is no message")
        return answer

    def look(self) -> processes.Look:
        """What it has open, and what it started."""
        try:
            return processes.Look.at(self.pid)
        except OSError as error:
            raise SandboxError(f"the interpreter {self.pid} cannot be looked at: {error}") from error

    def end(self) -> None:
        """Kill it and everything it started, but for interpreters that live on.

        Raises:
            SandboxError: something survived.
        """
        with self._tree.lock:
            left = processes.end(self.pidfd, self.pid, self._tree.pids - {self.pid})
            self._tree.pids.discard(self.pid)
        self.control.close()
        os.close(self.pidfd)
        if left:
            raise SandboxError(f"{left} processes that Python code started survived being killed")


def pair() -> tuple[socket.socket, socket.socket]:
    """Our end and an interpreter's; with the first message comes the sender's process number."""
    ours, theirs = wire.pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def _first_message(control: socket.socket) -> tuple[dict[str, Any], int]:
    """What an interpreter says first, and its process number as this machine counts, which the kernel adds."""
    control.settimeout(_START_S)
    room = socket.CMSG_SPACE(struct.calcsize("3i")) + socket.CMSG_SPACE(array.array("i").itemsize)
    try:
        raw, ancillary, _, _ = control.recvmsg(wire.MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
        said = json.loads(raw) if raw else None
    except (OSError, ValueError) as error:
        raise SandboxError(f"an interpreter did not start: {error}") from error
    if not isinstance(said, dict):
        raise SandboxError("an interpreter ended while it started")
    pids = [struct.unpack("3i", data[:12])[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    control.settimeout(_ANSWER_S)
    return said, pids[0]
