"""Puts shells into control groups, beside the spawner; standard library only.

Owns the moment of joining, which can take the kernel 11 ms where nothing joined for a while: the spawner serves others
meanwhile, and a sandbox waits for the word before its first command. Leaves the groups themselves to `cgroups`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from agentgym.sandboxes import cgroups, wire
from agentgym.sandboxes import syscalls as sc


class Limiter:
    """The spawner's end: a forked process that does what it is told, in order."""

    def __init__(self, groups: cgroups.Cgroups, limits: cgroups.Limits) -> None:
        """Start the process; before this one gives up rights that groups need."""
        ours, theirs = wire.pair()
        self._socket = ours
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                os.setsid()
                keep = theirs.fileno()
                sc.close_range(3, keep - 1)
                sc.close_range(keep + 1)
                _serve(theirs, groups, limits)
            finally:
                os._exit(0)
        theirs.close()

    def join(self, box: int, process: int, control: socket.socket | None = None) -> None:
        """Limit a process and what it starts; {"event": "limited"} on the socket tells when that is done."""
        wire.send(self._socket, {"box": box, "process": process}, [] if control is None else [control.fileno()])

    def leave(self, box: int) -> None:
        """Remove a sandbox's groups; its processes are gone."""
        wire.send(self._socket, {"box": box, "process": 0})

    def close(self) -> None:
        """Remove all groups, and wait for that."""
        self._socket.close()
        os.waitpid(self.pid, 0)


def _serve(spawner: socket.socket, groups: cgroups.Cgroups, limits: cgroups.Limits) -> None:
    with contextlib.suppress(EOFError):
        while True:
            request, fds = wire.receive(spawner)
            if not request["process"]:
                groups.remove(request["box"])
                continue
            event = {"event": "limited"}
            try:
                groups.join(request["box"], request["process"], limits)
            except OSError as error:
                event["error"] = str(error)
            for fd in fds:
                with socket.socket(fileno=fd) as control, contextlib.suppress(OSError):
                    wire.send(control, event)
    groups.close()
