"""The processes of a sandbox as the library holds them, before and while one uses them.

Owns the pipes, the control socket and the start of a blank, and the first shell of a backend, which shows
that sandboxes can be started and what a fresh shell says of itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from agentgym.errors import SandboxError
from agentgym.sandboxes import shell, wire
from agentgym.sandboxes.client import Spawner


@dataclass(slots=True)
class Body:
    """The processes of a sandbox and our ends of what connects them."""

    box: int
    pid: int
    """Of the first process, as the host counts."""
    control: socket.socket
    fds: list[int]
    script: int
    """A file in memory that the shell reads before its first command."""

    @classmethod
    def start(cls, spawner: Spawner, chain: list[str], world: list[str] | None = None) -> Body:
        """Ask the spawner for it; it still sets itself up when this returns.

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
        return cls(made["box"], made["pid"], control, ours, script)

    def discard(self, spawner: Spawner | None) -> None:
        """End it before any sandbox used it."""
        self.control.close()
        for fd in (*self.fds, self.script):
            os.close(fd)
        if spawner is not None:
            with contextlib.suppress(SandboxError):
                spawner.ask("close", box=self.box)


def pristine(spawner: Spawner) -> frozenset[bytes]:
    """The settings of a shell in a sandbox that has just started; also the proof that one can be started."""
    body = Body.start(spawner, [])
    os.close(body.script)
    bash = shell.Shell(body.fds, body.control.fileno())
    try:
        return bash.settings()
    except SandboxError:
        with contextlib.suppress(EOFError, BlockingIOError):
            body.control.setblocking(False)
            message, _ = wire.receive(body.control)
            raise SandboxError(f"a sandbox cannot be set up: {message.get('error', message)}") from None
        raise
    finally:
        bash.close()
        body.control.close()
        with contextlib.suppress(SandboxError):
            spawner.ask("close", box=body.box)
