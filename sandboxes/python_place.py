"""Where the live Python of namespace sandboxes lives: a pen for each tree of interpreters (see `pen.py`).

Interpreters are forked, and what is forked cannot change namespaces: in the first sandbox they would end with it, and its
shell could reach into all of them. The root directory, and the limits, are each one's own.

Protects from what every sandbox does. Does not protect from branches of one tree taking each other's ports: they share the
network of the sandbox where the tree began, which has no interface.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from agentgym.errors import SandboxError
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes.client import Spawner
from agentgym.sandboxes.pool import environment
from agentgym.sandboxes.pyfork import PythonTool

PYTHON = "/usr/bin/python3"


class Place:
    """A `Host` of interpreters."""

    def __init__(self, spawner: Spawner) -> None:
        """Nothing starts yet."""
        self._spawner = spawner
        self._pen: int | None = None

    def start(self, box: int, fds: list[int], argv: list[str], env: Mapping[str, str]) -> None:
        """See `interpreter.Host.start`."""
        self._pen = self._spawner.ask("start", fds, box=box, argv=argv, environment=dict(env))[0]["pen"]

    def stop(self) -> None:
        """See `interpreter.Host.stop`; a pen ends with the program that it began with."""
        self._pen = None

    def root(self, box: int) -> int:
        """See `interpreter.Host.root`."""
        return self._spawner.ask("view", box=box, pen=self._number())[1][0]

    def limit(self, pid: int, box: int | None) -> None:
        """See `interpreter.Host.limit`."""
        if self._spawner.limited:
            self._spawner.ask("limit", pen=self._number(), process=pid, box=box)

    def _number(self) -> int:
        if self._pen is None:
            raise SandboxError("live Python has ended, and its place with it")
        return self._pen


def live_python(spawner: Spawner, box: int, spec: SandboxSpec) -> PythonTool | None:
    """The Python of a sandbox that was just created, not started yet; None where the spec asks for none."""
    if not spec.python:
        return None
    return PythonTool(Place(spawner), box, env=dict(environment(spec)), workdir=spec.workdir, python=PYTHON)


def has_python() -> bool:
    """Whether the base has one; whether it can do what is needed shows when it starts."""
    return os.access(PYTHON, os.X_OK)
