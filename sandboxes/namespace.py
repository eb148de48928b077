"""Backend `namespace`: overlay layers and Linux namespaces, driven by direct system calls.

Owns what a sandbox and a snapshot of it are; `spawner.py` makes and keeps them, `shell.py` speaks to their shell. A snapshot seals the upper layer and puts a fresh one under the living processes
(rotate), or copies it where other processes are alive; a fork stacks a new upper on the sealed layers and
replays the shell's state.

Protects from: reading or changing host files outside the allow-listed, read-only base; reaching any network;
seeing or signalling host processes; keeping anything alive after close; inheriting host variables; calls that
only an administrator needs. Where control groups can be made, from exhausting memory and process numbers too.
Does not protect from: exhausting processors, and memory where there are no control groups, which is reported as
missing; kernel faults. A hard link made before a snapshot becomes two files once one of its names is
written after it, as overlayfs has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Self

from agentgym.errors import (
    BackendUnavailable,
    PathRefused,
    SandboxError,
    SnapshotBusy,
    SnapshotError,
    SnapshotUnsupported,
)
from agentgym.sandbox import DEFAULT_OUTPUT_BYTES, BoxLimits, Capabilities, Change, ExecResult, FileSpec, SandboxSpec
from agentgym.sandboxes import layers, shell, wire
from agentgym.sandboxes.body import Body, Frozen, Start, pristine, wait_limited
from agentgym.sandboxes.capabilities import capabilities_of
from agentgym.sandboxes.client import Refused, Spawner
from agentgym.sandboxes.flattener import Flattener
from agentgym.sandboxes.pool import ENV, Blanks, Templates, environment
from agentgym.sandboxes.pyfork import PythonSnapshot
from agentgym.sandboxes.python_place import live_python
from agentgym.sandboxes.seeds import command_seed
from agentgym.sandboxes.state import collect_garbage
from agentgym.types import Level


class NamespaceBackend:
    """Makes sandboxes through one spawner process, started on first use.

    A few blank sandboxes stand ready with namespaces and a shell that has done nothing; a fork takes one, and
    only mounts its layers and replays its shell's state. Each is used once: nothing is ever cleaned and reused.
    """

    name = "namespace"

    def __init__(self, pool: int = 2, limits: BoxLimits | None = BoxLimits()) -> None:  # noqa: B008  (it is frozen)
        """Nothing starts before the first use.

        Args:
            pool: How many blanks to keep ready.
            limits: Of each sandbox; None sets none.
        """
        self.pool = pool
        self.limits = limits
        self.defaults: frozenset[bytes] = frozenset()
        """What a shell says of itself in which nothing was typed; a replay need not repeat it."""
        self.live: weakref.WeakSet[NamespaceSandbox] = weakref.WeakSet()
        self._spawner: Spawner | None = None
        self._blanks: Blanks | None = None
        self.flattener: Flattener | None = None
        self._templates = Templates()
        self._lock = threading.Lock()

    def probe(self) -> Capabilities:
        """Start the spawner and ask a shell in a sandbox for its state.

        Raises:
            BackendUnavailable: this machine refuses; says which check failed.
        """
        return capabilities_of(self.spawner(), python=True)

    def spawner(self) -> Spawner:
        """The running spawner; a forked process gets its own."""
        with self._lock:
            if self._spawner is None or self._spawner.pid != os.getpid():
                self._templates = Templates()
                spawner = Spawner(self.limits)
                try:
                    self.defaults = pristine(spawner)
                except SandboxError as error:
                    spawner.close()
                    raise BackendUnavailable(
                        f"backend 'namespace': {error}; `agentgym doctor` shows each check"
                    ) from error
                self._spawner, self._blanks = spawner, Blanks(spawner, self.pool)
                self.flattener = Flattener(spawner)
            return self._spawner

    def body(self, spawner: Spawner, chain: list[str]) -> Body | None:
        """A blank that now stands on a chain, or None where none is ready."""
        blanks = self._blanks
        return blanks.take(chain) if blanks is not None and blanks.spawner is spawner else None

    def create(self, spec: SandboxSpec) -> NamespaceSandbox:
        """Start a sandbox from a spec; equal specs share a sealed starting layer."""
        spawner = self.spawner()
        handle, chain = self._templates.hold(spawner, spec)
        state = shell.ShellState(shell.fresh_script(environment(spec), spec.workdir))
        start = Start(self, spec, chain, state.script)
        with NamespaceSnapshot(spawner, start, Frozen(handle, chain, state, spec.seed)) as template:
            return template.fork()[0]

    def close(self) -> None:
        """End every sandbox and remove the run's state folder."""
        with self._lock:
            spawner, self._spawner = self._spawner, None
            blanks, self._blanks = self._blanks, None
        if spawner is not None and spawner.pid == os.getpid():
            if self.flattener is not None:
                self.flattener.stop()
            for sandbox in list(self.live):
                sandbox.let_go()  # the spawner ends them all at once
            if blanks is not None:
                blanks.stop()
            spawner.close()
            if blanks is not None:
                blanks.join()


class NamespaceSandbox:
    """A live sandbox. Calls on one sandbox wait for each other; different ones run side by side."""

    backend = "namespace"

    def __init__(
        self, spawner: Spawner, start: Start, chain: list[str], script: bytes, *, world: list[str] | None = None
    ) -> None:
        """Start the processes; the answer to the first command shows whether that worked."""
        owner = start.owner
        self._spawner = spawner
        self._start = start
        self._lock = threading.RLock()
        self.seed = 0
        """Feeds RANDOM, together with the number of commands that ran."""
        self.commands_run = 0
        self.capabilities = capabilities_of(spawner, python=start.spec.python)
        self._oom_kills = 0
        self._closed = False
        body = (owner.body(spawner, chain) if world is None else None) or Body.start(spawner, chain, world)
        os.write(body.script, script)
        os.close(body.script)
        self._control = body.control
        self._box = body.box
        self._limited = body.limited
        self.pid = body.pid
        """Of the first process, as the spawner counts."""
        self.id = f"box-{spawner.pid}-{self._box}"
        self._shell = shell.Shell(body.fds, self._control.fileno())
        self.python = live_python(spawner, self._box, start.spec)
        owner.live.add(self)

    def run(self, command: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES) -> ExecResult:
        """See `agentgym.sandbox.Sandbox.run`."""
        if "\0" in command:
            return ExecResult(1, "", "a command cannot contain a NUL byte")
        with self._lock:
            self._check()
            self._wait_limited()
            self.commands_run += 1
            started = time.perf_counter()
            outcome = self._shell.run(
                command,
                self.commands_run,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                random_seed=command_seed(self.seed, self.commands_run),
            )
            status, outgrown = self._exit_status() if outcome.ended == "shell" else (outcome.status, False)
            if outcome.ended != "status":
                self._restart_shell()
            result = shell.result(outcome, status, time.perf_counter() - started)
            if outgrown:
                return replace(result, disk_exceeded=True)
            return replace(result, oom_killed=True) if self._lost_memory(status) else result

    def run_python(
        self, code: str, *, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    ) -> ExecResult:
        """See `agentgym.sandbox.RunsPython`."""
        with self._lock:
            self._check()
            if self.python is None:
                raise SandboxError(f"sandbox {self.id} has no live Python; create it with SandboxSpec(python=True)")
            self._wait_limited()
            result = self.python.run(code, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
            return replace(result, oom_killed=True) if result.killed and self._lost_memory(-9) else result

    def _lost_memory(self, status: int | None) -> bool:
        """Whether a process was ended for want of memory since the last look; by the kernel's count."""
        if status not in (137, -9) or "memory" not in self._spawner.limited:
            return False
        before, self._oom_kills = self._oom_kills, self._spawner.ask("oom", box=self._box)[0]["kills"]
        return self._oom_kills > before

    def read(self, path: str, *, max_bytes: int = DEFAULT_OUTPUT_BYTES) -> bytes:
        """See `agentgym.sandbox.Sandbox.read`."""
        with self._lock:
            fd = self._open(path, write=False, mode=0)
            with open(fd, "rb", buffering=0) as file:
                data = bytearray()
                while len(data) < max_bytes and (chunk := file.read(max_bytes - len(data))):
                    data += chunk
                return bytes(data)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `agentgym.sandbox.Sandbox.write`."""
        with self._lock:
            fd = self._open(path, write=True, mode=mode)
            with open(fd, "wb") as file:
                file.write(data)

    def snapshot(self, *, require: Level | None = None) -> NamespaceSnapshot:
        """See `agentgym.sandbox.Sandbox.snapshot`."""
        if require is not None and require > self.capabilities.level:
            raise SnapshotUnsupported(
                f"sandbox {self.id} keeps level {self.capabilities.level}; level {require} was required; "
                "one with SandboxSpec(python=True) keeps its Python's processes"
            )
        with self._lock, ExitStack() as undo:
            self._check()
            self._wait_limited()
            python = None if self.python is None else undo.enter_context(self.python.freeze())
            state, named, alive = self._settle(python)
            if "exchange" in alive:
                self._exchange_root(None if named else alive["cwd"])
            cwd = alive["cwd"]
            losses = [f"process {task['pid']} ({task['name']})" for task in alive["tasks"]]
            losses += [f"open file {file['fd']} ({file['path']})" for file in alive["files"]]
            losses += [f"python: {loss}" for loss in (python.losses if python is not None else ())]
            if state is None:
                losses.append(shell.HIDDEN_STATE)
                state, named = shell.ShellState(self._start.script), True
            if not named:
                state = shell.ShellState(state.script + b"\\builtin cd -- " + _quoted(cwd) + b"\n")
                if cwd.endswith(" (deleted)"):
                    losses.append(f"working directory {cwd}")
            if self._start.owner.flattener is not None:
                self._start.owner.flattener.offer(alive["chain"], len(self._start.chain))
            frozen = Frozen(alive["handle"], alive["chain"], state, self.seed, self.commands_run)
            snapshot = NamespaceSnapshot(self._spawner, self._start, frozen, tuple(losses), python)
            undo.pop_all()
        if require is not None and snapshot.level < require:
            snapshot.release()
            raise SnapshotUnsupported(
                f"level {require} was required, and would not be kept of: {', '.join(losses)}; end it, or ask for less"
            )
        return snapshot

    def _settle(self, python: PythonSnapshot | None) -> tuple[shell.ShellState | None, bool, dict[str, Any]]:
        """Freeze shell and files: the shell's state, whether its directory could be named, and what the spawner tells."""
        first: dict[str, Any] = {}
        # what is alive in live Python may write to files at any time, through descriptors that a fresh root would miss
        is_busy = python is not None and bool(python.losses)
        with self.python.paused() if is_busy and self.python is not None else nullcontext():
            # all at once: the shell writes its state down while its files are sealed; it writes no file then
            state, named = self._capture(lambda: None if is_busy else first.update(self._seal(settle=False)))
            # looked at again: the shell itself may have had something open a moment ago
            return state, named, first if "handle" in first else self._seal(settle=True, copy=is_busy)

    def _capture(self, meanwhile: Callable[[], None]) -> tuple[shell.ShellState | None, bool]:
        """The shell's state, or None where it does not give it: then the shell ends, and files are all that is kept."""
        try:
            return self._shell.capture(self._start.owner.defaults, meanwhile=meanwhile)
        except shell.NoState:
            self._restart_shell()
            self._wait_limited()
            # an answer shows that the new shell has started: its root must not be exchanged before
            self._shell.change_root(None)
            return None, True

    def close(self) -> None:
        """End every process of the sandbox; its files are deleted in the background."""
        with self._lock:
            if self.let_go() and self._spawner.pid == os.getpid():
                with contextlib.suppress(SandboxError):
                    self._spawner.ask("close", box=self._box)

    def let_go(self) -> bool:
        """Close our ends, which ends the sandbox a moment later; False if that was done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._shell.close()
            self._control.close()
            if self.python is not None and self._spawner.pid == os.getpid():
                with contextlib.suppress(SandboxError):
                    self.python.close()
            return True

    def _seal(self, settle: bool, copy: bool = False) -> dict[str, Any]:
        try:
            return self._ask("seal", settle=settle, copy=copy)[0]
        except Refused as error:
            if "to copy" in str(error):
                raise SnapshotBusy(f"{error}; end the background processes, or snapshot later") from error
            raise SnapshotError(str(error)) from error

    def _exchange_root(self, cwd: str | None) -> None:
        try:
            self._ask("exchange")
        except SandboxError:
            self.close()
            raise
        if not self._shell.change_root(cwd) and cwd is None:
            self.close()
            raise SandboxError("the shell did not follow its root into the fresh layer; the sandbox is closed")
        if self.python is not None:
            self.python.follow()

    def _open(self, path: str, write: bool, mode: int) -> int:
        self._check()
        if "\0" in path:
            raise PathRefused(f"path {path!r} has a NUL byte")
        whole = path if path.startswith("/") else f"{self._start.spec.workdir}/{path}"
        try:
            _, fds = self._ask("open", path=whole, write=write, mode=mode, above=0o755)
        except Refused as error:
            if not error.errno:
                raise
            verb = "written" if write else "read"
            raise PathRefused(f"{path!r} cannot be {verb}: {os.strerror(error.errno)}") from error
        return fds[0]

    def _restart_shell(self) -> None:
        """End everything that lives in the sandbox and start a shell in which nothing was typed yet."""
        left = self._ask("kill")[0]["left"]
        if left:
            self.close()
            raise SandboxError(f"{left} processes survived being killed; the sandbox is closed")
        self._drop_events()
        ours, theirs = shell.make_pipes()
        source = shell.script_file(self._start.script)
        try:
            self._ask("shell", [*theirs, source])
        finally:
            for fd in (*theirs, source):
                os.close(fd)
        self._limited = not self._spawner.limited
        self._shell.close()
        self._shell = shell.Shell(ours, self._control.fileno())

    def _wait_limited(self) -> None:
        if not self._limited:
            try:
                wait_limited(self._control)
            except SandboxError:
                self.close()
                raise
            self._limited = True

    def _exit_status(self) -> tuple[int, bool]:
        """How the shell ended, and whether that was for having written too much; the spawner tells."""
        try:
            event, _ = wire.receive(self._control)
        except EOFError as error:
            self.close()
            raise SandboxError(f"sandbox {self.id} is gone: its first process ended") from error
        return event["status"], event["outgrown"]

    def _drop_events(self) -> None:
        """Forget what was told of a shell that is gone."""
        with contextlib.suppress(BlockingIOError, EOFError):
            while True:
                self._control.recv(wire.MAX_MESSAGE, socket.MSG_DONTWAIT)

    def _ask(self, what: str, fds: list[int] | None = None, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        try:
            return self._spawner.ask(what, fds, box=self._box, **arguments)
        except Refused as error:
            if "first process ended" in str(error):
                self.close()
                raise SandboxError(f"sandbox {self.id} is gone: its first process ended") from error
            raise

    def _check(self) -> None:
        if self._closed:
            raise SandboxError(f"sandbox {self.id} is closed; fork a snapshot of it, or create another")


class NamespaceSnapshot:
    """Sealed layers and a shell state; forks and releases through the spawner."""

    def __init__(
        self,
        spawner: Spawner,
        start: Start,
        frozen: Frozen,
        losses: tuple[str, ...] = (),
        python: PythonSnapshot | None = None,
    ) -> None:
        self.id = f"snap-{spawner.pid}-{frozen.handle}"
        self.level = Level.PROCESS if python is not None and not losses else shell.level_kept(losses)
        self.losses = losses
        self.chain = frozen.chain
        self._spawner = spawner
        self._start = start
        self._frozen = frozen
        self._python = python
        self._released = False

    def fork(self, n: int = 1) -> list[NamespaceSandbox]:
        """Give n live sandboxes that start from here, each with its own upper layer."""
        self._check()
        made: list[NamespaceSandbox] = []
        try:
            for _ in range(n):
                sandbox = NamespaceSandbox(self._spawner, self._start, self.chain, self._frozen.state.script)
                sandbox.seed, sandbox.commands_run = self._frozen.seed, self._frozen.commands_run
                made.append(sandbox)
                if self._python is not None:
                    sandbox.python = self._python.fork(sandbox._box)
        except BaseException:
            for sandbox in made:
                sandbox.close()
            raise
        return made

    def digest(self) -> str:
        """Over files and shell state; computed anew each time, so it also proves that nothing changed."""
        self._check()
        files = layers.digest(layers.merged(self._spawner.layers, self.chain))
        return f"{files}-{self._frozen.state.digest()[:16]}"

    def changes(self) -> dict[str, Change]:
        """See `agentgym.sandbox.SandboxSnapshot.changes`."""
        self._check()
        return layers.changes(self._spawner.layers, self.chain, self._start.chain)

    def inspect(self, files: Mapping[str, bytes], command: str, *, timeout_s: float) -> ExecResult:
        """See `agentgym.sandbox.SandboxSnapshot.inspect`."""
        self._check()
        made, _ = self._spawner.ask("layer")
        try:
            specs = [FileSpec(f"/grader/{name}", data=data, mode=0o755) for name, data in files.items()]
            specs += [FileSpec("/world", "dir", mode=0o755), FileSpec("/grader", "dir", mode=0o700)]
            layers.write_layer(os.path.join(self._spawner.layers, made["layer"]), specs)
            script = shell.fresh_script(ENV, "/grader")
            start = Start(self._start.owner, SandboxSpec(workdir="/grader"), [made["layer"]], script)
            inspector = NamespaceSandbox(self._spawner, start, start.chain, script, world=self.chain)
            try:
                return inspector.run(command, timeout_s=timeout_s)
            finally:
                inspector.close()
        finally:
            self._spawner.ask("release", handle=made["handle"])

    def release(self) -> None:
        """Give the layers back; those that nothing else stands on are deleted in the background."""
        if not self._released:
            self._released = True
            if self._spawner.pid == os.getpid():
                with contextlib.suppress(SandboxError):
                    self._spawner.ask("release", handle=self._frozen.handle)
                if self._python is not None:
                    with contextlib.suppress(SandboxError):
                        self._python.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check(self) -> None:
        if self._released:
            raise SnapshotError(f"snapshot {self.id} was released; take another one")


def _quoted(text: str) -> bytes:
    return b"'" + os.fsencode(text).replace(b"'", b"'\\''") + b"'"


__all__ = ["NamespaceBackend", "NamespaceSandbox", "NamespaceSnapshot", "collect_garbage"]
