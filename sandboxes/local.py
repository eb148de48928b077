"""Backend `local`: a copied folder and a plain shell, for machines that refuse namespaces.

Owns the portable way: a fork copies the workspace and replays the shell's state. It is never chosen in
silence; whoever wants it names it. Where the kernel has Landlock and system call filters, which take no rights, each
shell is started under them (`confine.py`); the probe attacks each promise once and `capabilities` tells what held.

Protects from: inheriting host variables; host-side file calls that follow links out of the workspace. With `writes`:
changing files outside the workspace and its folder for temporary files, in other sandboxes too. With `tcp`: any use
of TCP, on this machine as well; with the filter, of every other network.
Does not protect from: reading what you can read; changing modes, owners and times of your files; seeing your
processes; Unix sockets of your programs; exhausting memory, processors, disk; a process that leaves its session and
clears its environment outlives the sandbox. Without Landlock also from everything else that you can do.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agentgym.errors import BackendUnavailable, PathRefused, SandboxError, SnapshotError, SnapshotUnsupported
from agentgym.sandbox import DEFAULT_OUTPUT_BYTES, Capabilities, Change, ExecResult, FileSpec, SandboxSpec
from agentgym.sandboxes import hostfiles, layers, shell, state
from agentgym.sandboxes.confine import Rules, find_rules
from agentgym.sandboxes.first import MARK
from agentgym.sandboxes.seeds import command_seed, hash_seed
from agentgym.sandboxes.trash import remove_tree
from agentgym.types import Level

_MISSING = {
    "network": "commands reach whatever this machine reaches",
    "pids": "commands see and can signal your processes",
    "readonly_host": "commands can change every file that you can change",
    "own_root": "absolute paths are the host's",
    "capabilities": "commands run with your rights",
    "memory": "a command can use all memory of this machine",
    "cpu": "a command can use all processors",
    "disk": "a command can fill the disk",
    "seccomp": "all system calls are allowed",
}
_TEMPORARY = "-tmp"
"""Added to the name of a workspace: its folder for temporary files, which moves with it wherever a script names it."""


def _capabilities(rules: Rules) -> Capabilities:
    missing = dict(_MISSING)
    if "writes" in rules.held:
        missing["readonly_host"] = "commands read all that you can read, and can change modes and times of your files"
    if "tcp" in rules.held:
        missing["network"] = "Unix sockets of your programs can be reached, such as a container daemon's"
        missing["network"] += "; and UDP" if "udp" in rules.passed else ""
    if "signal" not in rules.passed:
        shown = " and their environment" if "environ" in rules.passed else ""
        missing["pids"] = f"commands see your processes{shown}, and cannot signal them"
    if rules.sockets:
        missing["seccomp"] = "all system calls are allowed but those that make sockets out of this machine"
    missing |= {name: f"not set on shells: {reason}" for name, reason in rules.refusals.items()}
    return Capabilities(Level.SHELL, rules.held, missing)


class LocalBackend:
    """Makes sandboxes that are folders."""

    name = "local"

    def __init__(self) -> None:
        self._folder: str | None = None
        self.shell_folder = ""
        self._lock_fd = -1
        self._numbers = itertools.count(1)
        self._boxes: set[LocalSandbox] = set()
        self._lock = threading.Lock()
        self._rules: Rules | None = None

    def probe(self) -> Capabilities:
        """Check that there are bash and a place for folders, and try which rules hold a shell.

        Raises:
            BackendUnavailable: one of them is missing.
        """
        if not os.path.exists("/bin/bash") or not os.path.isdir("/proc/self/fd"):
            raise BackendUnavailable("backend 'local' needs /bin/bash and /proc; both are there on any Linux")
        return _capabilities(self.rules())

    def rules(self) -> Rules:
        """What every shell is started under; tried once."""
        place = self.new_folder()
        with self._lock:
            if self._rules is None:
                os.mkdir(place)
                self._rules = find_rules(place)
            return self._rules

    def new_folder(self) -> str:
        """The name of a folder that does not exist yet, in this process's own."""
        with self._lock:
            if self._folder is None:
                root = state.open_root(state.state_roots()[0])
                self._folder = state.new_folder(root)
                self._lock_fd = os.open(
                    os.path.join(self._folder, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
                )
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
                self.shell_folder = os.path.join(self._folder, "shell")
                os.mkdir(self.shell_folder)
                # a script named "bash", so that messages begin with that
                os.symlink(f"/dev/fd/{shell.COMMAND_FD}", os.path.join(self.shell_folder, "bash"))
            # of one width: no name is the beginning of another, so that paths in a script can be exchanged
            return os.path.join(self._folder, f"{next(self._numbers):08d}")

    def create(self, spec: SandboxSpec) -> LocalSandbox:
        """Start a sandbox; all its files must lie in its working directory.

        Raises:
            SandboxError: a file lies elsewhere, which would be the host's; or live Python is asked for.
        """
        spec.refuse_python(self.name)
        files = [_relative(file, spec.workdir) for file in spec.files]
        start = self.new_folder()
        for name in (start, start + "/r", start + "/u"):
            os.mkdir(name, 0o755)
        layers.write_layer(start, files)
        script = _fresh(spec, spec.seed, start + "/r")
        return LocalSandbox(self, _Frozen(start + "/r", start + "/r", script, spec, spec.seed))

    def keep(self, box: LocalSandbox, alive: bool) -> None:
        """Note a sandbox that lives, or no longer does."""
        with self._lock:
            (self._boxes.add if alive else self._boxes.discard)(box)

    def close(self) -> None:
        """End every sandbox and remove the folder."""
        for box in list(self._boxes):
            box.close()
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            os.close(self._lock_fd)
            remove_tree(folder)


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A folder and a shell state to start from."""

    folder: str
    start: str
    """The folder as the task gave it, for `changes`."""
    script: bytes
    """Brings the shell back; paths in it are those of `folder`."""
    spec: SandboxSpec
    seed: int
    commands_run: int = 0


class LocalSandbox:
    """A live folder with a shell in it."""

    backend = "local"

    def __init__(self, owner: LocalBackend, frozen: _Frozen) -> None:
        """Copy the folder and start the shell."""
        self._owner = owner
        self._frozen = frozen
        self._lock = threading.RLock()
        self._closed = False
        self._rules = owner.rules()
        self.capabilities = _capabilities(self._rules)
        self.folder = owner.new_folder()
        self.id = f"local-{os.path.basename(self.folder)}"
        self.seed = frozen.seed
        self.commands_run = frozen.commands_run
        _copy(frozen.folder, self.folder)
        self._start_shell(self._moved(frozen.script, frozen.folder))
        owner.keep(self, True)

    def run(self, command: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        """See `agentgym.sandbox.Sandbox.run`."""
        if "\0" in command:
            return ExecResult(1, "", "a command cannot contain a NUL byte")
        with self._lock:
            self._check()
            self.commands_run += 1
            started = time.perf_counter()
            outcome = self._shell.run(
                command,
                self.commands_run,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                random_seed=command_seed(self.seed, self.commands_run),
            )
            status = outcome.status
            if outcome.ended == "shell":
                status = self._process.wait()
            if outcome.ended != "status":
                self._end_processes()
                self._start_shell(self._first_script())
            return shell.result(outcome, status, time.perf_counter() - started)

    def read(self, path: str, *, max_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        """See `agentgym.sandbox.Sandbox.read`."""
        with self._lock, open(self._open(path, write=False), "rb") as file:
            return file.read(max_bytes)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `agentgym.sandbox.Sandbox.write`."""
        with self._lock, open(self._open(path, write=True, mode=mode), "wb") as file:
            file.write(data)

    def snapshot(self, *, require: Level | None = None) -> LocalSnapshot:
        """See `agentgym.sandbox.Sandbox.snapshot`."""
        if require is not None and require > Level.SHELL:
            raise SnapshotUnsupported(f"backend 'local' keeps level shell; level {require} was required")
        with self._lock:
            self._check()
            losses: tuple[str, ...] = ()
            try:
                kept, named = self._shell.capture(frozenset())
            except shell.NoState:
                self._end_processes()
                self._start_shell(self._first_script())
                kept, named = shell.ShellState(self._first_script()), True
                losses = (shell.HIDDEN_STATE,)
            losses += tuple(f"process {pid}" for pid in state.strays(self.folder) if pid != self._process.pid)
            copied = self._owner.new_folder()
            _copy(self.folder, copied)
            script = kept.script.replace(os.fsencode(self.folder), os.fsencode(copied))
            if not named:
                losses += ("working directory",)
            frozen = _Frozen(copied, self._frozen.start, script, self._frozen.spec, self.seed, self.commands_run)
            return LocalSnapshot(self._owner, frozen, losses)

    def close(self) -> None:
        """End the shell and what it started, and delete the folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_processes()
            self._owner.keep(self, False)
            _remove(self.folder)

    def _first_script(self) -> bytes:
        start = self._frozen.start
        return self._moved(_fresh(self._frozen.spec, self.seed, start), start)

    def _moved(self, script: bytes, origin: str) -> bytes:
        return script.replace(os.fsencode(origin), os.fsencode(self.folder))

    def _start_shell(self, script: bytes) -> None:
        ours, theirs = shell.make_pipes()
        source = shell.script_file(script)
        # above the places they go to: a descriptor must not stand where another belongs
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, shell.SCRIPT_FD + 1) for fd in (*theirs, source)]
        for fd in (*theirs, source):
            os.close(fd)
        commands, output, errors, status, source = high
        places = f"{shell.COMMAND_FD}<&{commands} {shell.STATUS_FD}>&{status} {shell.SCRIPT_FD}<&{source}"
        closed = f"{commands}<&- {status}>&- {source}<&-"
        self._process = self._rules.start(
            ["/bin/bash", "-c", f"exec /bin/bash --norc --noprofile bash {places} {closed}"],
            [self.folder, self.folder + _TEMPORARY],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            pass_fds=[commands, status, source],
            env={MARK: self.folder, **shell.LOOP_ENV},
            cwd=self._owner.shell_folder,
            start_new_session=True,
        )
        for fd in high:
            os.close(fd)
        self._alive = os.pidfd_open(self._process.pid)
        self._shell = shell.Shell(ours, self._alive)

    def _end_processes(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in state.strays(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._shell.close()
        os.close(self._alive)

    def _open(self, path: str, *, write: bool, mode: int = 0o644) -> int:
        self._check()
        inside = path.removeprefix(self._frozen.spec.workdir.rstrip("/") + "/")
        root = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            return hostfiles.open_regular(root, inside, write=write, mode=mode)
        except (OSError, ValueError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
            raise PathRefused(f"{path!r} cannot be {'written' if write else 'read'}: {reason}") from error
        finally:
            os.close(root)

    def _check(self) -> None:
        if self._closed:
            raise SandboxError(f"sandbox {self.id} is closed; fork a snapshot of it, or create another")


class LocalSnapshot:
    """A copied folder and a shell state."""

    def __init__(self, owner: LocalBackend, frozen: _Frozen, losses: tuple[str, ...]) -> None:
        self.id = f"snap-{os.path.basename(frozen.folder)}"
        self.level = shell.level_kept(losses)
        self.losses = losses
        self._owner = owner
        self._frozen = frozen
        self._released = False

    def fork(self, n: int = 1) -> list[LocalSandbox]:
        """Give n live copies."""
        self._check()
        return [LocalSandbox(self._owner, self._frozen) for _ in range(n)]

    def digest(self) -> str:
        """Over files and shell state."""
        self._check()
        place = os.fsencode(self._frozen.folder)
        script = shell.ShellState(self._frozen.script.replace(place, b"WORKSPACE")).digest()
        files = dict(layers.walk(self._frozen.folder))
        files |= layers.walk(self._frozen.folder + _TEMPORARY, "//tmp")
        return f"{layers.digest(files)}-{script[:16]}"

    def changes(self) -> dict[str, Change]:
        """Every path of the workspace that differs from its start; paths begin at the working directory."""
        self._check()
        before, after = (dict(layers.walk(folder)) for folder in (self._frozen.start, self._frozen.folder))
        found = {path: entry.change() for path, entry in after.items() if not layers.same(entry, before.get(path))}
        found |= {path: Change("deleted") for path in before if path not in after}
        return {self._frozen.spec.workdir + path: change for path, change in found.items()}

    def inspect(self, files: Mapping[str, bytes], command: str, *, timeout_s: float) -> ExecResult:
        """Not possible here.

        Raises:
            SandboxError: always; a grader would lie within the agent's reach.
        """
        raise SandboxError("backend 'local' cannot run a grader out of the agent's reach; use backend 'namespace'")

    def release(self) -> None:
        """Delete the copy; live forks go on."""
        if not self._released:
            self._released = True
            _remove(self._frozen.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check(self) -> None:
        if self._released:
            raise SnapshotError(f"snapshot {self.id} was released; take another one")


def _relative(file: FileSpec, workdir: str) -> FileSpec:
    inside = file.path.removeprefix(workdir.rstrip("/") + "/")
    if inside.startswith("/"):
        raise SandboxError(f"file {file.path!r} lies outside {workdir}; backend 'local' has no root, use 'namespace'")
    return FileSpec(inside, file.kind, file.data, file.mode, file.mtime_s)


def _fresh(spec: SandboxSpec, seed: int, folder: str) -> bytes:
    """The script of a shell in which nothing was typed, with the paths of a folder."""
    env = [("PATH", os.defpath), ("HOME", "."), ("LANG", "C.UTF-8"), ("TERM", "dumb")]
    env += [("TMPDIR", folder + _TEMPORARY), ("PYTHONHASHSEED", str(hash_seed(seed))), *spec.env]
    return shell.fresh_script(env, folder)


def _copy(source: str, target: str) -> None:
    """Copy a workspace and, where there are any, its temporary files."""
    for end in ("", _TEMPORARY):
        if end and not (os.path.isdir(source + end) and os.listdir(source + end)):
            os.mkdir(target + end)
            continue
        subprocess.run(["cp", "-a", "--reflink=auto", source + end, target + end], check=True, capture_output=True)


def _remove(folder: str) -> None:
    for end in ("", _TEMPORARY):
        remove_tree(folder + end)
