"""Stepping into a sandbox's namespaces and back; standard library only.

Owns the way home. The spawner makes a sandbox from within: it leaves its own namespaces for new ones, mounts and starts
what belongs there, and returns. Nothing is forked for that, so a sandbox costs no copy of an interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from agentgym.sandboxes import syscalls as sc

ALL = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWUTS | sc.CLONE_NEWIPC | sc.CLONE_NEWNET
FILES = sc.CLONE_NEWNS
"""Only the view of files."""


class Home:
    """The spawner's own namespaces, held by a process that never leaves them."""

    def __init__(self, keeper: int) -> None:
        """Remember the namespaces of a child that stays where it is."""
        self._keeper = os.pidfd_open(keeper)

    @contextlib.contextmanager
    def away(self, pidfd: int | None, what: int = ALL) -> Iterator[None]:
        """Stand in other namespaces for a while: those of a process, or new ones.

        What is started meanwhile lives there. Afterwards the working directory is /. A spawner that cannot come home
        would make the next sandbox inside this one, so it ends instead, and everything with it.
        """
        if pidfd is None:
            sc.unshare(what)
        else:
            sc.setns(pidfd, what)
        try:
            yield
        finally:
            try:
                sc.setns(self._keeper, what)
            except OSError:
                os._exit(70)

    def fork_inside(self, pidfd: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Let a fork of this process do something among the processes of a sandbox, out of their reach.

        It has rights that they lack, so they can neither read nor trace it; and as no first process, it ends with its work.

        Raises:
            OSError: it ended without an answer.
        """
        answer, question = os.pipe2(os.O_CLOEXEC)
        with self.away(pidfd, FILES | sc.CLONE_NEWPID):
            child = os.fork()
            if child == 0:
                try:
                    os.chdir("/")
                    os.write(question, json.dumps(work()).encode())
                finally:
                    os._exit(0)
        os.close(question)
        with open(answer, "rb") as file:
            told = file.read()
        os.waitpid(child, 0)
        if not told:
            raise OSError("what was sent inside ended without an answer")
        found: dict[str, Any] = json.loads(told)
        return found


def enter_user_namespace() -> None:
    """Become root of a user namespace, and enter others that belong to it, since only those can be come back to.

    The process that the library started waits for the one that goes on.
    """
    user, group = os.getuid(), os.getgid()
    sc.unshare(sc.CLONE_NEWUSER | ALL)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    sc.die_with_parent()
