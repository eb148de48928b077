"""A container that is a sandbox, an image that is its snapshot, and what both stand on.

Owns running, freezing and forking; `docker.py` makes the first one and says what all of it protects from.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from agentgym.errors import PathRefused, SandboxError, SnapshotError, SnapshotUnsupported
from agentgym.sandbox import DEFAULT_OUTPUT_BYTES, Change, ExecResult, FileSpec, SandboxSpec
from agentgym.sandboxes import docker_files, shell
from agentgym.sandboxes.docker_daemon import PLACE, Daemon
from agentgym.sandboxes.docker_shell import Lines
from agentgym.sandboxes.pool import ENV
from agentgym.sandboxes.seeds import command_seed
from agentgym.sandboxes.trash import remove_tree
from agentgym.types import Level

if TYPE_CHECKING:
    from agentgym.sandboxes.docker import DockerBackend

MAX_LAYERS = 100
"""Of an image, before it is made one: the daemon refuses more than 125."""
_IGNORED = ("tmp", "dev", "proc", "sys")


@dataclass(frozen=True, slots=True)
class Start:
    """What a sandbox was created from: shared by all its forks."""

    owner: DockerBackend
    daemon: Daemon
    spec: SandboxSpec
    image: str
    script: bytes
    """Of a shell in which nothing was typed."""
    listed: dict[str, dict[str, docker_files.Entry]] = field(default_factory=dict)
    """What was read of the image, by directory at the top."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """What a snapshot holds of a sandbox."""

    image: str
    state: shell.ShellState
    num_layers: int
    seed: int = 0
    commands_run: int = 0
    touched: frozenset[str] = frozenset()
    """Paths that a container on the way to here had changed."""


class DockerSandbox:
    """A live container. Calls on one sandbox wait for each other; different ones run side by side."""

    backend = "docker"

    def __init__(self, start: Start, frozen: Frozen, *binds: str) -> None:
        """Start the container and wait until its shell reads."""
        self._start = start
        self._daemon = start.daemon
        self._frozen = frozen
        self._lock = threading.RLock()
        self._closed = False
        self._oom_kills = 0
        self.capabilities = start.owner.capabilities
        self.seed = frozen.seed
        self.commands_run = frozen.commands_run
        self._lines: Lines | None = None
        self.container = ""
        self._daemon.hold(frozen.image)
        self._folder = start.owner.new_folder()
        try:
            shown = f"{self._folder}:{PLACE}:ro"
            self.container = self._daemon.create(frozen.image, start.owner.limits, (shown, *binds))
            self._launch(frozen.state.script)
        except BaseException:
            self.close()
            raise
        self.id = f"docker-{self.container[:12]}"
        start.owner.live.add(self)

    def run(self, command: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        """See `agentgym.sandbox.Sandbox.run`."""
        if "\0" in command:
            return ExecResult(1, "", "a command cannot contain a NUL byte")
        with self._lock:
            lines = self._check()
            self.commands_run += 1
            started = time.perf_counter()
            outcome = lines.shell.run(
                command,
                self.commands_run,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                random_seed=command_seed(self.seed, self.commands_run),
            )
            status, kills = outcome.status, self._oom_kills
            if outcome.ended == "shell":
                status, kills = lines.exit_status()
            elif status == 137:
                kills = self._kills(lines)
            starved = kills > self._oom_kills
            self._oom_kills = kills
            if outcome.ended != "status":
                ended = self._restart()
                if outcome.ended == "shell" and status is None:  # its parent ended before it could tell
                    status, starved = -9, bool(ended["OOMKilled"])
            result = shell.result(outcome, status, time.perf_counter() - started)
            return replace(result, oom_killed=True) if starved and status in (137, -9) else result

    def pristine(self) -> frozenset[bytes]:
        """What a shell says of itself before anything is replayed; for a shell that was not used yet."""
        with self._lock:
            self._check()
            self._daemon.end(self.container)
            self._launch(b"")
            return self._check().shell.settings()

    def read(self, path: str, *, max_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        """See `agentgym.sandbox.Sandbox.read`."""
        with self._lock:
            return docker_files.read_file(self._daemon, self.container, self._whole(path), max_bytes)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `agentgym.sandbox.Sandbox.write`."""
        with self._lock:
            docker_files.write_file(self._daemon, self.container, self._whole(path), data, mode)

    def snapshot(self, *, require: Level | None = None) -> DockerSnapshot:
        """See `agentgym.sandbox.Sandbox.snapshot`."""
        if require is not None and require > Level.SHELL:
            raise SnapshotUnsupported(f"backend 'docker' keeps level shell; level {require} was required")
        with self._lock:
            kept, losses = self._capture(self._check())
            with self._daemon.paused(self.container):
                touched = self._frozen.touched.union(self._daemon.touched(self.container))
                num_layers = self._frozen.num_layers + 1
                if num_layers < MAX_LAYERS:
                    image = self._daemon.commit(self.container, self._frozen.image)
                else:
                    image, num_layers = self._daemon.squash(self.container, self._start.image), 1
            frozen = Frozen(image, kept, num_layers, self.seed, self.commands_run, touched)
            return DockerSnapshot(self._start, frozen, losses)

    def _capture(self, lines: Lines) -> tuple[shell.ShellState, tuple[str, ...]]:
        """The shell's state and what is lost; a shell that does not give it ends, and files are all that is kept."""
        try:
            kept, named = lines.shell.capture(self._start.owner.defaults)
            losses = tuple(lines.ask("alive"))
            if not named:
                [cwd] = lines.ask("cwd")
                kept = shell.ShellState(kept.script + b"\\builtin cd -- " + _quoted(cwd) + b"\n")
                losses += (f"working directory {cwd}",) if cwd.endswith(" (deleted)") else ()
            return kept, losses
        except (shell.NoState, ValueError):
            self._restart()
            return shell.ShellState(self._start.script), (shell.HIDDEN_STATE,)

    def close(self) -> None:
        """End every process of the sandbox and remove its container."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._lines is not None:
                self._lines.close()
            if self._daemon.pid == os.getpid():
                if self.container:
                    self._daemon.remove(self.container)
                self._daemon.drop(self._frozen.image)
                remove_tree(self._folder)

    def _launch(self, script: bytes) -> None:
        if self._lines is not None:
            self._lines.close()
        self._oom_kills = 0
        self._lines = Lines(self._folder, script)
        self._daemon.start(self.container)
        self._lines.wait_ready()

    def _restart(self) -> dict[str, Any]:
        """End everything that lives in the container and start it anew; give the state in which it was left."""
        try:
            ended = self._daemon.end(self.container)
            self._launch(self._start.script)
        except SandboxError:
            self.close()
            raise
        return ended

    def _kills(self, lines: Lines) -> int:
        try:
            return int(lines.ask("oom")[0])
        except (shell.NoState, ValueError, IndexError):
            return self._oom_kills

    def _whole(self, path: str) -> str:
        self._check()
        if "\0" in path:
            raise PathRefused(f"path {path!r} has a NUL byte")
        return path if path.startswith("/") else f"{self._start.spec.workdir}/{path}"

    def _check(self) -> Lines:
        if self._closed or self._lines is None:
            raise SandboxError(f"sandbox {self.id} is closed; fork a snapshot of it, or create another")
        return self._lines


class DockerSnapshot:
    """An image and a shell state."""

    def __init__(self, start: Start, frozen: Frozen, losses: tuple[str, ...] = ()) -> None:
        """Take over one hold on the image."""
        self.id = f"snap-{frozen.image.removeprefix('sha256:')[:12]}"
        self.level = shell.level_kept(losses)
        self.losses = losses
        self.num_layers = frozen.num_layers
        self._start = start
        self._frozen = frozen
        self._released = False

    def fork(self, n: int = 1) -> list[DockerSandbox]:
        """Give n live sandboxes that start from here, each a container of its own."""
        self._check()
        made: list[DockerSandbox] = []
        try:
            for _ in range(n):
                made.append(DockerSandbox(self._start, self._frozen))
        except BaseException:
            for sandbox in made:
                sandbox.close()
            raise
        return made

    def digest(self) -> str:
        """Over files and shell state; read anew each time, so it also proves that nothing changed."""
        self._check()
        return f"{docker_files.digest(self._differences())}-{self._frozen.state.digest()[:16]}"

    def changes(self) -> dict[str, Change]:
        """See `agentgym.sandbox.SandboxSnapshot.changes`."""
        self._check()
        found = self._differences()
        return {path: change for path, (change, _) in found.items() if path.split("/")[1] not in _IGNORED}

    def inspect(self, files: Mapping[str, bytes], command: str, *, timeout_s: float) -> ExecResult:
        """See `agentgym.sandbox.SandboxSnapshot.inspect`.

        The world goes from the daemon to the daemon as one archive, into a volume that the grader's container shows
        read-only; nothing of it is unpacked on this machine.
        """
        self._check()
        daemon, owner = self._start.daemon, self._start.owner
        spec = SandboxSpec(workdir="/grader")
        placed = [FileSpec(f"/grader/{name}", data=data, mode=0o755) for name, data in files.items()]
        placed.append(FileSpec("/grader", "dir", mode=0o700))
        with daemon.volume() as volume:
            with daemon.shown(self._frozen.image) as world, daemon.shown(owner.base, f"{volume}:/world") as filler:
                with daemon.answers("export"):
                    daemon.put(filler, "/world", daemon.api.export(world))
            with daemon.shown(owner.base) as container:
                docker_files.add_files(daemon, container, placed)
                image = daemon.commit(container, "")
            try:
                script = shell.fresh_script(ENV, "/grader")
                start = Start(owner, daemon, spec, image, script)
                grader = DockerSandbox(start, Frozen(image, shell.ShellState(script), 0), f"{volume}:/world:ro")
                try:
                    return grader.run(command, timeout_s=timeout_s)
                finally:
                    grader.close()
            finally:
                daemon.drop(image)

    def release(self) -> None:
        """Give the image back; it is removed when no sandbox and no other image stands on it."""
        if not self._released:
            self._released = True
            if self._start.daemon.pid == os.getpid():
                self._start.daemon.drop(self._frozen.image)

    def _differences(self) -> dict[str, tuple[Change, bool]]:
        start = self._start
        return docker_files.differences(
            start.daemon, start.image, self._frozen.image, self._frozen.touched, start.listed
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check(self) -> None:
        if self._released:
            raise SnapshotError(f"snapshot {self.id} was released; take another one")


def _quoted(text: str) -> bytes:
    return b"'" + os.fsencode(text).replace(b"'", b"'\\''") + b"'"
