"""Live Python whose heap forks copy-on-write: the library's side of `pyserver.py`.

Owns what a Python tool, its frozen copies and their processes are. A snapshot forks a *keeper* off the live
interpreter, which runs no code; each branch is forked off the keeper, so a snapshot never changes and can be forked
any number of times. Leaves where processes start and what a sandbox's root is to the `Host`: the spawner.

Protects from: branches changing each other's variables, random state or open files (each is opened anew in its
own root, at its own offset); anything that a piece of code started being left after its deadline or after close; where
the kernel has Landlock's ABI 6, signals from one branch to another, and looks at another's files through /proc.
Does not protect from: code that works on the interpreter's own process to keep a way to what it shared before it was
frozen: branches of one tree are one agent's, and share a PID namespace. Code may signal copies frozen off itself, which
a later fork then reports as gone. Threads, processes, pipes, sockets and shared memory do not come along: they
are named as losses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

from agentgym.errors import SnapshotError
from agentgym.sandbox import DEFAULT_OUTPUT_BYTES, ExecResult
from agentgym.sandboxes.interpreter import Host, Keeper, Live
from agentgym.types import Level


@dataclass(frozen=True, slots=True)
class _Start:
    """How the interpreters of one tool and of all its copies start."""

    host: Host
    env: Mapping[str, str]
    workdir: str
    python: str


class PythonTool:
    """Python in a sandbox, started when it is first used."""

    def __init__(
        self, host: Host, box: int, *, env: Mapping[str, str], workdir: str, python: str = "/usr/bin/python3"
    ) -> None:
        """Nothing starts yet.

        Args:
            host: Where it lives, together with all copies.
            box: The sandbox whose root it has, in the host's numbering.
            env: The whole environment of the interpreter; its start adds `TUNING`, which code does not see.
            workdir: Where it begins.
            python: Its path in the sandbox.
        """
        self.box = box
        self._start = _Start(host, dict(env), workdir, python)
        self._empty: Keeper | None = None
        """What a fresh interpreter is forked off; shared with all copies."""
        self._live: Live | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """Descriptors that a fork could not open anew in its own root; -1: its directory was gone."""
        return () if self._live is None else tuple(self._live.lost)

    def run(self, code: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        """Run code as a notebook cell: what it prints, then the value of a last expression; errors as a traceback.

        At the deadline the code gets a KeyboardInterrupt; where that does not end it, the interpreter and all that
        it started are ended `GRACE_S` later, and `shell_restarted` says that variables are gone.

        Raises:
            BackendUnavailable: the sandbox has no Python.
            SandboxError: something survived the deadline.
        """
        if self._live is None:
            if self._empty is None:
                start = self._start
                self._empty = Keeper.start(start.host, self.box, start.env, start.python)
            self._live = self._branch(self._empty, self._start.workdir, None)
        result = self._live.run(code, timeout_s, max_output_bytes)
        if result.shell_restarted:
            self._live = None
        return result

    def freeze(self) -> PythonSnapshot:
        """Freeze it as it is; it goes on.

        Raises:
            SnapshotError: the interpreter does not answer.
        """
        losses: tuple[str, ...] = ()
        if self._live is not None and self._live.has_died():
            self._live.close()
            self._live, losses = None, ("variables of an interpreter that had ended",)
        keeper = None
        if self._live is not None:
            keeper = self._live.freeze()
            self._start.host.limit(keeper.pid, None)
        return PythonSnapshot(self._start, keeper, None if self._empty is None else self._empty.hold(), losses)

    def follow(self) -> None:
        """Move to the root that the sandbox has now, after that was exchanged."""
        if self._live is not None:
            root = self._start.host.root(self.box)
            try:
                self._live.follow(root)
            finally:
                os.close(root)

    def paused(self) -> AbstractContextManager[None]:
        """Keep it and all that it started from running for a while, so that files can be copied."""
        return nullcontext() if self._live is None else self._live.paused()

    def close(self) -> None:
        """End the interpreter and everything it started; frozen copies stay; twice is fine."""
        live, self._live = self._live, None
        empty, self._empty = self._empty, None
        try:
            if live is not None:
                live.close()
        finally:
            if empty is not None:
                empty.release()

    def _branch(self, keeper: Keeper, cwd: str | None, seed: int | None) -> Live:
        root = self._start.host.root(self.box)
        try:
            live = keeper.branch(root, cwd, seed)
        finally:
            os.close(root)
        self._start.host.limit(live.pid, self.box)
        return live


class PythonSnapshot:
    """A frozen Python tool."""

    level = Level.PROCESS

    def __init__(
        self, start: _Start, keeper: Keeper | None, empty: Keeper | None, losses: tuple[str, ...] = ()
    ) -> None:
        """Take over one holding of each keeper; None: nothing ran yet, and nothing needs to be kept."""
        self.losses = losses if keeper is None else keeper.losses
        """What was alive or open and does not come along."""
        self._start = start
        self._keeper = keeper
        self._empty = empty
        self._released = False

    def fork(self, box: int, *, seed: int | None = None) -> PythonTool:
        """Give a live copy in another sandbox.

        Args:
            box: Whose files are those of the moment when this was frozen.
            seed: Of `random` and numpy in the copy; None: their state goes on.

        Raises:
            SnapshotError: released, or the frozen process is gone.
        """
        if self._released:
            raise SnapshotError("this snapshot of Python was released; take another one")
        start = self._start
        made = PythonTool(start.host, box, env=start.env, workdir=start.workdir, python=start.python)
        made._empty = None if self._empty is None else self._empty.hold()
        if self._keeper is not None:
            try:
                made._live = made._branch(self._keeper, None, seed)
            except BaseException:
                made.close()
                raise
        return made

    def release(self) -> None:
        """End the frozen process once no branch needs it; twice is fine."""
        if not self._released:
            self._released = True
            for keeper in (self._keeper, self._empty):
                if keeper is not None:
                    keeper.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
