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
from agentgym.sandboxes.box import Box, attach, show_processes, spawn, start_first
from agentgym.sandboxes.limiter import Limiter


@dataclass(slots=True)
class Pen:
    """A PID namespace that lives."""

    number: int
    """Of its control groups, among those of sandboxes."""
    first: int
    pidfd: int
    program: int
    """Host's number of the program; its end is that of the pen."""
    files: int
    """Mount namespace whose /proc shows what lives here; nothing runs in it."""

    @classmethod
    def start(cls, number: int, box: Box, argv: list[str], environment: dict[str, str], fds: list[int]) -> Pen:
        """Start a program that sees a sandbox's files, with descriptors from 0 up.

        Raises:
            OSError: it cannot be started there.
        """
        with box.home.away(None, sc.CLONE_NEWPID):
            first, pidfd = start_first(box.kind)
            try:
                with box.home.away(None, inside.FILES):
                    files = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                    show_processes(first)
                with box.home.away(box.pidfd, inside.ALL & ~sc.CLONE_NEWPID):
                    os.chdir("/")
                    program = spawn(box.kind, argv[0], argv, environment, dict(enumerate(fds)))
            except OSError:
                _end(pidfd, first)
                raise
        return cls(number, first, pidfd, program, files)

    def view(self, box: Box) -> int:
        """A descriptor of a sandbox's root as processes here are to see it: with a /proc that knows them.

        A mount that is attached nowhere, so that nothing lies above it, also for who can change its root. Before Linux
        6.15 nothing can be attached to such a one, and /proc is the sandbox's: /proc/self is not there.
        """
        with box.home.away(self.files, inside.FILES):
            proc = sc.open_tree("/proc", recursive=True)
        # only where a detached mount comes from can something be attached to it
        with box.home.away(box.pidfd, inside.FILES):
            root = sc.open_tree("/", recursive=True)
            with contextlib.suppress(OSError):
                attach(proc, root, "proc")
        return root

    def end(self) -> None:
        """End everything in it."""
        os.close(self.files)
        _end(self.pidfd, self.first, self.program)


class Pens:
    """All that live, and their limits."""

    def __init__(self, limiter: Limiter | None) -> None:
        self._limiter = limiter
        self._by_program: dict[int, Pen] = {}

    def start(self, number: int, box: Box, argv: list[str], environment: dict[str, str], fds: list[int]) -> None:
        """As `Pen.start`; the program is limited a moment later."""
        pen = Pen.start(number, box, argv, environment, fds)
        self._by_program[pen.program] = pen
        if self._limiter is not None:
            self._limiter.join(number, pen.program)

    def of(self, number: int) -> Pen:
        """The one of a number.

        Raises:
            ValueError: it has ended.
        """
        for pen in self._by_program.values():
            if pen.number == number:
                return pen
        raise ValueError("the program it began with has ended")

    def note_end(self, pid: int) -> None:
        """A process has ended: where a pen began with it, all of that pen ends."""
        pen = self._by_program.pop(pid, None)
        if pen is not None:
            pen.end()
            if self._limiter is not None:
                self._limiter.leave(pen.number)

    def close(self) -> None:
        """End them all."""
        for pid in list(self._by_program):
            self.note_end(pid)


def _end(pidfd: int, first: int, *programs: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # the first process ends last, and not before those that only we can wait for
    for pid in (*programs, first):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    os.close(pidfd)
