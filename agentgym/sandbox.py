"""The door between environments and sandboxes: what a backend, a sandbox and its snapshot can do.

Owns the protocols and the values that pass through them, and the table of backends (by name, so that the
core imports none of them). Leaves every mechanism to `agentgym.sandboxes`.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from agentgym.errors import BackendUnavailable, TaskError, UnknownName
from agentgym.types import Level

DEFAULT_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend gives on this machine; filled by doing, never assumed."""

    level: Level
    """The highest level a snapshot keeps."""
    isolation: frozenset[str]
    """Of: network, pids, readonly_host, own_root, capabilities, seccomp, memory, max_pids, cpu, disk, writes, tcp.

    The last two are weaker than readonly_host and network, for a sandbox that shares the host's root: "writes", no
    file outside its own folders can be made, changed, moved or removed; "tcp", no TCP connection can be made or taken,
    on this machine neither.
    """
    missing: Mapping[str, str] = field(default_factory=dict)
    """What this machine does not give, each with its consequence."""
    max_depth: int | None = None
    """Longest chain of layers; None where there is no limit."""


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """What one sandbox may use."""

    memory_bytes: int = 2 << 30
    """Of all its processes together, and of the files it writes where those lie in memory."""
    max_pids: int = 512
    """Processes and threads at once."""
    cpus: float = 2.0
    """Processors' worth of time."""
    disk_bytes: int = 2 << 30
    """Of the files it writes, where they do not count as memory."""
    disk_files: int = 200_000
    """How many files and directories those may be."""


@dataclass(frozen=True, slots=True)
class FileSpec:
    """One file, directory or link that is there when a sandbox starts."""

    path: str
    """Absolute inside the sandbox, or relative to the working directory."""
    kind: str = "file"
    """"file", "dir" or "link"."""
    data: bytes = b""
    """Content of a file; target of a link."""
    mode: int = 0o644
    mtime_s: int | None = None
    """Modification time in seconds since 1970; None: now."""

    def __post_init__(self) -> None:
        """Refuse what could reach outside the sandbox or is no kind at all."""
        if self.kind not in ("file", "dir", "link"):
            raise TaskError(f"file {self.path!r} has kind {self.kind!r}; expected file, dir or link")
        if not self.path or "\0" in self.path or ".." in self.path.split("/"):
            raise TaskError(f"file path {self.path!r} is empty, has a NUL or a '..'; write it without them")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """How a sandbox starts. Equal specs share one sealed starting layer."""

    files: tuple[FileSpec, ...] = ()
    workdir: str = "/workspace"
    env: tuple[tuple[str, str], ...] = ()
    """Variables exported in the shell; nothing of the host's environment is inherited."""
    seed: int = 0
    """Feeds RANDOM and PYTHONHASHSEED; not part of the starting layer."""
    python: bool = False
    """A live Python beside the shell (`RunsPython`), on backends of level `process`; started when it is first used."""

    def refuse_python(self, backend: str) -> None:
        """For backends that have no live Python: a wish that would be ignored is an error.

        Raises:
            BackendUnavailable: live Python is asked for.
        """
        if self.python:
            raise BackendUnavailable(
                f"backend {backend!r} has no live Python; use backend 'namespace', or ask for none (python=False)"
            )

    def key(self) -> str:
        """A digest of what makes the starting layer."""
        plain = asdict(self) | {"seed": 0, "python": False}
        plain["files"] = [f | {"data": base64.b64encode(f["data"]).decode()} for f in plain["files"]]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did. Status and output come from untrusted code: never a reward by themselves."""

    exit_code: int | None
    """None when the command did not end by itself."""
    stdout: str
    stderr: str
    timed_out: bool = False
    killed: bool = False
    """The shell was killed by a signal that we did not send."""
    oom_killed: bool = False
    """The kernel ended a process of the sandbox for want of memory, by its own count."""
    disk_exceeded: bool = False
    """Everything in the sandbox was ended because its files had outgrown their limit."""
    shell_restarted: bool = False
    """The shell ended (exit, timeout, kill); a fresh one with the starting state answers the next command."""
    truncated: bool = False
    stdout_bytes: int = 0
    """Bytes written, also where `stdout` was cut in the middle."""
    stderr_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """How one path differs from the starting layer."""

    kind: str
    """"file", "dir", "link" or "deleted"."""
    mode: int = 0
    size_bytes: int = 0
    sha256: str = ""
    """Of the content of a file, in hex."""
    target: str = ""
    """Of a link."""


@runtime_checkable
class ResourceSnapshot(Protocol):
    """A frozen copy of one forkable part of a world."""

    level: Level
    losses: tuple[str, ...]
    """What was running or open and will not come back, each named."""

    def fork(self, n: int = 1) -> Sequence[Resource]:
        """Give n live copies, independent of each other and of the origin."""

    def digest(self) -> str:
        """A hash of the frozen state; equal states have equal digests."""

    def release(self) -> None:
        """Give the storage back; copies that live go on."""


@runtime_checkable
class Resource(Protocol):
    """Anything an environment can attach: it freezes, and it closes."""

    def snapshot(self) -> ResourceSnapshot:
        """Freeze the state as it is now and go on living."""

    def close(self) -> None:
        """Free everything; twice is fine."""


class SandboxSnapshot(ResourceSnapshot, Protocol):
    """A frozen sandbox."""

    id: str

    def fork(self, n: int = 1) -> list[Sandbox]:
        """Give n live sandboxes that start from here."""

    def changes(self) -> dict[str, Change]:
        """Every path that differs from the starting layer, without /tmp, /dev and /proc.

        A directory that only shows because something below it changed is left out.
        """

    def inspect(self, files: Mapping[str, bytes], command: str, *, timeout_s: float) -> ExecResult:
        """Run a verifier on the frozen world: never through the agent's shell, never with its programs.

        A fresh sandbox on the pristine base shows the frozen world read-only at /world and the given files
        at /grader, runs the command with `sh`, and is thrown away.
        """

    def __enter__(self) -> Self:
        """Give the snapshot itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""


class Sandbox(Protocol):
    """A live world with one shell."""

    id: str
    backend: str
    capabilities: Capabilities

    def run(self, command: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        """Run a command in the shell and wait for its end, or kill everything at the deadline.

        Raises:
            SandboxError: the sandbox is closed or broke. A command that fails, hangs or kills its shell is
                no error but a result.
        """

    def read(self, path: str, *, max_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        """Read a regular file, without following links out of the sandbox.

        Raises:
            PathRefused: no such file, or no regular file, or a path that leaves the sandbox.
        """

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file, making its directories.

        Raises:
            PathRefused: as for `read`.
        """

    def snapshot(self, *, require: Level | None = None) -> SandboxSnapshot:
        """Freeze the sandbox as it is and go on.

        Raises:
            SnapshotUnsupported: something alive is not kept at the level required.
            SnapshotBusy: live processes hold files that cannot be sealed.
        """

    def close(self) -> None:
        """End every process and free every file; twice is fine."""


@runtime_checkable
class RunsPython(Protocol):
    """A sandbox with a live Python beside its shell, whose variables a snapshot of level `process` keeps."""

    def run_python(
        self, code: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    ) -> ExecResult:
        """Run code as a notebook cell and wait for its end.

        At the deadline it is interrupted; where that does not end it, Python and all that it started are ended, and
        `shell_restarted` says that its variables are gone.

        Raises:
            SandboxError: the sandbox is closed or broke. Code that fails, hangs or ends Python is a result.
        """


class Backend(Protocol):
    """A way to make sandboxes."""

    name: str

    def probe(self) -> Capabilities:
        """Say what this machine gives, by doing it once; cached for the process.

        Raises:
            BackendUnavailable: names the check that failed and what to use instead.
        """

    def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox."""

    def close(self) -> None:
        """End every sandbox of this backend and free its state; twice is fine."""


_BACKENDS = {
    "namespace": "agentgym.sandboxes.namespace:NamespaceBackend",
    "local": "agentgym.sandboxes.local:LocalBackend",
    "docker": "agentgym.sandboxes.docker:DockerBackend",
}
_open: dict[str, Backend] = {}


def backend_names() -> list[str]:
    """The names `get_backend` accepts."""
    return sorted(_BACKENDS)


def get_backend(name: str) -> Backend:
    """The process-wide backend of that name, started on first use.

    Raises:
        UnknownName: there is no such backend.
        BackendUnavailable: this machine refuses it. Nothing falls back in silence.
    """
    if name not in _BACKENDS:
        raise UnknownName.of("backend", name, _BACKENDS, "`agentgym list backends` lists them")
    if name not in _open:
        module, _, attribute = _BACKENDS[name].partition(":")
        backend: Backend = getattr(importlib.import_module(module), attribute)()
        backend.probe()
        if not _open:
            atexit.register(close_backends)
        _open[name] = backend
    return _open[name]


def close_backends() -> None:
    """Close every backend this process opened."""
    while _open:
        _open.popitem()[1].close()
