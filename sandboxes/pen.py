"""A program that outlives the sandbox it was started in, with all that it starts; standard library only.

Owns its PID namespace. A live interpreter is forked into other sandboxes, each time into another root; all its copies
stay in the namespace that it began in, which therefore is not that of a sandbox, and ends with the first of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from agentgym.sandboxes import inside
from agentgym.sandboxes import syscalls as sc
from agentgym.sandboxes.box import Box, spawn, start_first


@dataclass(slots=True)
class Pen:
    """A PID namespace that lives."""

    number: int
    """Of its control groups, among those of sandboxes."""
    first: int
    pidfd: int
    program: int
    """Host's number of the program; its end is that of the pen."""

    @classmethod
    def start(cls, number: int, box: Box, argv: list[str], environment: dict[str, str], fds: list[int]) -> Pen:
        """Start a program that sees a sandbox's files, with descriptors from 0 up.

        Raises:
            OSError: it cannot be started there.
        """
        with box.home.away(None, sc.CLONE_NEWPID):
            first, pidfd = start_first(box.kind)
            try:
                with box.home.away(box.pidfd, inside.ALL & ~sc.CLONE_NEWPID):
                    os.chdir("/")
                    program = spawn(box.kind, argv[0], argv, environment, dict(enumerate(fds)))
            except OSError:
                _end(pidfd, first)
                raise
        return cls(number, first, pidfd, program)

    def end(self) -> None:
        """End everything in it."""
        _end(self.pidfd, self.first, self.program)


def _end(pidfd: int, first: int, *programs: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # the first process ends last, and not before those that only we can wait for
    for pid in (*programs, first):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    os.close(pidfd)
