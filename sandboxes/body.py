"""The parts of a sandbox as the library holds them: its processes, what it started from, what is frozen.

Owns the pipes, the control socket and the start of a blank, and the first shell of a backend, which shows
that sandboxes can be started and what a fresh shell says of itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from agentgym.errors import SandboxError
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes import shell, wire
from agentgym.sandboxes.client import Spawner
from agentgym.sandboxes.flattener import Flattener


@dataclass(slots=True)
class Body:
    """The processes of a sandbox and our ends of what connects them."""

    box: int
    pid: int
    """Of the first process, as the spawner counts: as the host does, where the spawner runs as root."""
    control: socket.socket
    """Tells when the shell is limited and when it ends; closing it ends the sandbox."""
    fds: list[int]
    script: int
    """A file in memory that the shell reads before its first command."""
    limited: bool
    """Whether control groups hold for the shell already; until then it must not be told anything."""

    @classmethod
    def start(cls, spawner: Spawner, chain: list[str], world: list[str] | None = None) -> Body:
        """Ask the spawner for it; the shell still starts when this returns.

        Raises:
            SandboxError: the spawner refused.
        """
        ours, theirs = shell.make_pipes()
        control, box_end = wire.pair()
        script = os.memfd_create("script", os.MFD_CLOEXEC)
        try:
            made, _ = spawner.ask("create", [box_end.fileno(), *theirs, script], chain=chain, world=world)
        except BaseException:
            control.close()
            for fd in (*ours, script):
                os.close(fd)
            raise
        finally:
            box_end.close()
            for fd in theirs:
                os.close(fd)
        return cls(made["box"], made["pid"], control, ours, script, not spawner.limited)

    def wait_ready(self) -> None:
        """Wait until its shell reads: before that, its root may not be exchanged.

        Raises:
            SandboxError: it did not start.
        """
        if not self.limited:
            wait_limited(self.control)
            self.limited = True
        poller = select.poll()
        poller.register(self.fds[3], select.POLLIN)
        poller.register(self.control, select.POLLIN)
        if [fd for fd, _ in poller.poll(10_000)] != [self.fds[3]]:
            raise SandboxError("a sandbox's shell did not start: is /bin/bash there?")

    def discard(self, spawner: Spawner | None) -> None:
        """End it before any sandbox used it."""
        self.control.close()
        for fd in (*self.fds, self.script):
            os.close(fd)
        if spawner is not None:
            with contextlib.suppress(SandboxError):
                spawner.ask("close", box=self.box)


def wait_limited(control: socket.socket) -> None:
    """Wait until control groups hold for a shell that was just started.

    Raises:
        SandboxError: they cannot, or the sandbox ended.
    """
    try:
        event, _ = wire.receive(control)
    except (OSError, EOFError) as error:
        raise SandboxError("a sandbox ended while it was set up") from error
    if event["event"] != "limited":
        raise SandboxError("a sandbox's shell ended while it was set up")
    if "error" in event:
        raise SandboxError(f"a sandbox cannot be limited: {event['error']}")


class Owner(Protocol):
    """What a sandbox asks of the backend that made it."""

    defaults: frozenset[bytes]
    flattener: Flattener | None
    live: weakref.WeakSet[Any]

    def body(self, spawner: Spawner, chain: list[str]) -> Body | None:
        """A blank that now stands on a chain, or None where none is ready."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a sandbox was created from: shared by all its forks."""

    owner: Owner
    spec: SandboxSpec
    chain: list[str]
    script: bytes


@dataclass(frozen=True, slots=True)
class Frozen:
    """What a snapshot holds of a sandbox."""

    handle: int
    chain: list[str]
    """Layer names, top to bottom, without the base."""
    state: shell.ShellState
    seed: int = 0
    commands_run: int = 0


def pristine(spawner: Spawner) -> frozenset[bytes]:
    """The settings of a shell in a sandbox that has just started; also the proof that one can be started."""
    body = Body.start(spawner, [])
    os.close(body.script)
    bash = shell.Shell(body.fds, body.control.fileno())
    try:
        body.wait_ready()
        return bash.settings()
    finally:
        bash.close()
        body.control.close()
        with contextlib.suppress(SandboxError):
            spawner.ask("close", box=body.box)
