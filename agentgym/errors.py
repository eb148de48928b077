"""One family of exceptions for everything that is our failure, and one outsider for the policy's.

    AgentGymError                 our side failed; never a reward
    ├── UsageError                the caller asked for something that cannot be; exit code 2
    │   ├── UnknownName           no such environment, task, policy, backend, chooser, bench
    │   └── ConfigError           a setting is missing, misspelt or out of range
    ├── TaskError                 a task or its file is broken
    ├── EnvError                  an environment was used wrongly, or its world broke
    ├── SandboxError              a sandbox died or refused
    │   ├── BackendUnavailable    this machine cannot run the backend; says which check failed
    │   └── PathRefused           a host-side file call met a link, device or path it will not follow
    ├── SnapshotError             a snapshot could not be taken, was released, or is gone
    │   ├── SnapshotUnsupported   the backend keeps less than the caller requires
    │   └── SnapshotBusy          live processes hold files that cannot be sealed now
    ├── EngineError               the sampler is unreachable or lacks what is asked
    ├── StoreError                the trajectory store cannot be read or written
    └── ReplayError               a stored branch cannot be executed again

    ParseError                    the policy's mistake: it reads about it as an observation

`rollout.py` is the only place that catches `AgentGymError`: it writes the error on the node, keeps that
branch out of training, and lets its siblings go on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AgentGymError(Exception):
    """Our side failed: the message says what happened, what was expected, and what to do."""


class UsageError(AgentGymError):
    """The caller asked for something that cannot be; commands exit with code 2."""


class UnknownName(UsageError):
    """A name that nothing is registered under."""

    @classmethod
    def of(cls, kind: str, name: object, known: Iterable[str], remedy: str) -> UnknownName:
        """Build the one-line message: the value, the nearest valid name, and the command that lists all.

        Args:
            kind: What the name should have been, such as "environment".
            name: What was given.
            known: The valid names.
            remedy: What to do, usually the command that lists the names.
        """
        close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        return cls(f"unknown {kind} {name!r}{hint} {remedy}")


class ConfigError(UsageError):
    """A setting is missing, misspelt, out of range, or would be ignored."""


class TaskError(AgentGymError):
    """A task or its file is broken."""


class EnvError(AgentGymError):
    """An environment was used wrongly, or its world broke."""


class SandboxError(AgentGymError):
    """A sandbox died or refused."""


class BackendUnavailable(SandboxError):
    """This machine cannot run the backend."""


class PathRefused(SandboxError):
    """A host-side file call met a link, a device or a path that it will not follow."""


class SnapshotError(AgentGymError):
    """A snapshot could not be taken, was released, or is gone."""


class SnapshotUnsupported(SnapshotError):
    """The backend keeps less of the state than the caller requires."""


class SnapshotBusy(SnapshotError):
    """Live processes hold files that cannot be sealed now."""


class EngineError(AgentGymError):
    """The sampler is unreachable or lacks what is asked."""


class StoreError(AgentGymError):
    """The trajectory store cannot be read or written."""


class ReplayError(AgentGymError):
    """A stored branch cannot be executed again."""


class ParseError(ValueError):
    """The policy wrote something that is not an action; the text is what it reads next."""
