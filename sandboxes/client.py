"""The library's end of the spawner: start it, ask it, end it.

Owns the process and the socket. A spawner never falls back: what it cannot do on this machine is raised with
the check that failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from agentgym.errors import BackendUnavailable, SandboxError
from agentgym.sandbox import BoxLimits
from agentgym.sandboxes import state, wire
from agentgym.sandboxes.first import MARK
from agentgym.sandboxes.shell import LOOP_ENV
from agentgym.sandboxes.trash import remove_tree

# a bare package object stands in for agentgym, whose own start would import far more than a fork should copy
_BOOT = (
    "import os,sys,types;p=types.ModuleType('agentgym');p.__path__=[os.environ.pop('AGENTGYM_CODE')];"
    "sys.modules['agentgym']=p;from agentgym.sandboxes.spawner import main;"
    "main()"
)


class Refused(SandboxError):
    """The spawner cannot do what it was asked for."""

    def __init__(self, what: str, reason: str, code: int) -> None:
        super().__init__(f"{what}: {reason}")
        self.errno = code
        """Of the system call that failed; 0: none did."""


class Spawner:
    """A running spawner process."""

    def __init__(self, limits: BoxLimits | None) -> None:
        """Start it in memory if that works, else in the first state root that does.

        Args:
            limits: Of each sandbox, where this machine allows control groups; None: none.

        Raises:
            BackendUnavailable: names what each attempt answered.
        """
        self._lock = threading.Lock()
        self.limits = limits
        refusals: dict[str, list[str]] = {}
        for root, in_memory in state.places():
            try:
                self._start(state.new_folder(state.open_root(root)), in_memory)
                return
            except (OSError, BackendUnavailable) as error:
                refusals.setdefault(str(error), []).append(f"{root}{' in memory' if in_memory else ''}")
        told = "; ".join(f"{reason} (tried {', '.join(places)})" for reason, places in refusals.items())
        raise BackendUnavailable(
            f"backend 'namespace' cannot run here: {told}. It needs Linux with overlayfs and mount and PID namespaces; "
            "`agentgym doctor` shows each check, `--set env.backend=local` runs without isolation, on what you trust"
        )

    def _start(self, folder: str, in_memory: bool) -> None:
        ours, theirs = wire.pair()
        import agentgym

        limits = None if self.limits is None else asdict(self.limits)
        order = {"socket": theirs.fileno(), "in_memory": in_memory, "environment": LOOP_ENV, "limits": limits}
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "PYTHONHOME": f"{sys.base_prefix}:{sys.base_exec_prefix}",
            MARK: folder,
            "AGENTGYM_CODE": next(iter(agentgym.__path__)),
            "AGENTGYM_START": json.dumps(order),
        }
        with theirs:
            # the name in the process list is all that an agent can read of it
            self.process = subprocess.Popen(
                ["agentgym-sandbox", "-S", "-c", _BOOT],
                executable=os.path.realpath(sys.executable),
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        self.socket = ours
        self.folder = folder
        self.pid = os.getpid()
        try:
            hello, _ = wire.receive(ours)
        except EOFError:
            hello = {"error": f"the spawner ended with status {self.process.wait()}"}
        if "error" in hello:
            ours.close()
            self.process.wait()
            remove_tree(folder)
            raise BackendUnavailable(hello["error"])
        # its mounts are its own: the way to its files leads through a process that has them
        self.layers = f"/proc/{hello['keeper'] or self.process.pid}/root" + hello["layers"]
        self.limited: frozenset[str] = frozenset(hello["limited"])
        """Of memory, pids, cpu and disk, what the kernel limits for each sandbox."""
        self.in_memory = in_memory

    def ask(self, what: str, fds: list[int] | None = None, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """Send one request and wait for its answer.

        Raises:
            Refused: it cannot be done.
            SandboxError: the spawner is gone.
        """
        with self._lock:
            try:
                wire.send(self.socket, {"do": what, **arguments}, fds)
                answer, given = wire.receive(self.socket)
            except (OSError, EOFError) as error:
                raise SandboxError(f"the spawner is gone ({error}); all its sandboxes ended, start again") from error
        if "error" in answer:
            raise Refused(what, answer["error"], answer["errno"] or 0)
        return answer, given

    def close(self) -> None:
        """End every sandbox, remove the folder, wait until both are done."""
        self.socket.close()
        if self.pid == os.getpid():
            self.process.wait()
