"""The processes of a live Python tool as the library holds them: keepers, which are forked, and live ones.

Owns their start, their sockets and outputs, what is found out about them from outside, and their end. Leaves what a
tool and its snapshot are to `pyfork.py`, what happens inside of them to `pyserver.py`.

Every process of a tool is a child of the one it was forked off, and where the children go of one that ended: so
nothing that code starts can leave, and all of it is found when it has to end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from agentgym.errors import BackendUnavailable, SandboxError, SnapshotError
from agentgym.sandbox import ExecResult
from agentgym.sandboxes import processes, wire
from agentgym.sandboxes.peer import Peer, Tree, pair
from agentgym.sandboxes.shell import Collector

GRACE_S = 1.0
"""Code that a KeyboardInterrupt at its deadline does not end within this time is ended with its interpreter."""
_CHUNK = 1 << 16
_DRAIN_BYTES = 1 << 20
# objects in malloc's heap and that in huge pages: with 100 MB of objects a fork takes 0.3 ms instead of 1.6, with
# 500 MB 0.6 instead of 16; a branch that ran a small piece of code then weighs 5.4 MB instead of 3.6
TUNING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
# the modules come as text through a descriptor: the sandbox has no file of ours
_BOOT = (
    "import json,sys,types\n"
    "for name,text in json.load(open(3,closefd=False)).items():\n"
    " m=sys.modules[name]=types.ModuleType(name);m.__path__=[]\n"
    " exec(compile(text,'<'+name+'>','exec'),m.__dict__)\n"
    " parent,_,last=name.rpartition('.')\n"
    " if parent:setattr(sys.modules[parent],last,m)\n"
    "m.main()"
)
_OUTPUTS = (1, 2)
_SOCKET = 100


class Host(Protocol):
    """Where the processes of one tool and of all its copies live: a place of their own, with a sandbox's walls.

    They share it, since forked processes cannot change namespaces; each has the root directory of its own sandbox.
    """

    def start(self, box: int, fds: list[int], argv: list[str], env: Mapping[str, str]) -> None:
        """Make the place, and start its first program, limited as any of a sandbox.

        Args:
            box: Of the host's numbering; the program sees its files.
            fds: Placed at 0, 1, 2 and so on; all else is closed.
            argv: The program by its path, and its arguments.
            env: The whole environment.

        Raises:
            SandboxError: it could not be started.
        """

    def stop(self) -> None:
        """Give the place up: the processes in it have ended."""

    def root(self, box: int) -> int:
        """A descriptor of the root that a sandbox has now, for a process in the place; the caller closes it."""

    def limit(self, pid: int, box: int | None) -> None:
        """Count a process of the place (this machine's number) among those of a sandbox; None: of no one sandbox."""


class Keeper:
    """A frozen interpreter: it runs nothing, and is forked for each branch. Counted: the last holder ends it."""

    def __init__(self, process: Peer, tree: Tree, losses: tuple[str, ...] = (), host: Host | None = None) -> None:
        self._process = process
        self.tree = tree
        self.losses = losses
        self._host = host
        """To be told when it ends; of the first one, which ends last."""
        self._holders = 1

    @classmethod
    def start(cls, host: Host, box: int, env: Mapping[str, str], python: str) -> Keeper:
        """Start an empty interpreter, the first of a tree, among the files of a sandbox.

        Raises:
            BackendUnavailable: there is no Python there that can do it; says what it answered.
        """
        ours, theirs = pair()
        read, write = os.pipe2(os.O_CLOEXEC)
        nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        source = os.memfd_create("python", os.MFD_CLOEXEC)
        os.write(source, json.dumps(_sources()).encode())
        os.lseek(source, 0, os.SEEK_SET)
        whole = {**TUNING, **env, "AGENTGYM_TUNING": json.dumps(list(TUNING))}
        try:
            fds = [nowhere, nowhere, write, source, theirs.fileno()]
            host.start(box, fds, [python, "-c", _BOOT], whole)
            theirs.close()
            os.close(write)
            write = -1
            tree = Tree()
            first = Peer(ours, tree)
            tree.rest = os.open(f"/proc/{first.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            return cls(first, tree, host=host)
        except SandboxError as error:
            ours.close()
            said = _said(read) if write < 0 else ""
            host.stop()
            raise BackendUnavailable(
                f"no live Python in the sandbox: {said or error}; it needs {python} of version 3.9 or newer with ctypes "
                "(Debian: package python3)"
            ) from error
        finally:
            theirs.close()
            for fd in (read, nowhere, source, *([write] if write >= 0 else [])):
                os.close(fd)

    @property
    def pid(self) -> int:
        """As this machine counts."""
        return self._process.pid

    def hold(self) -> Keeper:
        """Count one holder more."""
        with self.tree.lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Count one holder less; the last one ends it."""
        with self.tree.lock:
            self._holders -= 1
            if self._holders:
                return
            try:
                self._process.end()
            finally:
                if self._host is not None:
                    os.close(self.tree.rest)
                    self._host.stop()

    def branch(self, root: int, cwd: str | None, seed: int | None) -> Live:
        """Fork a live interpreter.

        Args:
            root: Descriptor of the root directory it is to live in.
            cwd: Where it begins; None: where it was frozen.
            seed: Of `random` and numpy; None: their state is kept.

        Raises:
            SnapshotError: the frozen interpreter is gone.
        """
        ours, theirs = pair()
        out, out_write = _pipe()
        err, err_write = _pipe()
        try:
            with self.tree.lock:
                fds = [theirs.fileno(), out_write, err_write, root]
                self._process.ask("branch", fds, cwd=cwd, seed=seed)
                theirs.close()
                return Live(Peer(ours, self.tree), (out, err), root, self)
        except SandboxError as error:
            for fd in (out, err):
                os.close(fd)
            ours.close()
            raise SnapshotError(f"a frozen Python interpreter cannot be forked: {error}") from error
        finally:
            theirs.close()
            os.close(out_write)
            os.close(err_write)

    def sweep(self) -> int:
        """Kill what interpreters that ended left behind; how many are left."""
        with self.tree.lock:
            return processes.end_below(self._process.pid, self.tree.pids)


class Live:
    """An interpreter that runs code."""

    def __init__(self, process: Peer, outputs: tuple[int, int], root: int, keeper: Keeper) -> None:
        """Take over the read ends of its outputs.

        Raises:
            SandboxError: it did not move to its root.
        """
        self._process = process
        self._outputs = outputs
        self._keeper = keeper.hold()
        self.ended = False
        self.lost: list[int] = process.hello.get("lost", [])
        """Descriptors that could not be opened anew; -1 for the working directory."""
        self._poller = select.poll()
        for fd in (*outputs, process.control.fileno(), process.pidfd):
            self._poller.register(fd, select.POLLIN)
        if not self._lives_in(root):
            self.end()
            raise SandboxError("a forked interpreter did not move to its sandbox's root; it was ended")

    def run(self, code: str, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run code to its end or its deadline; afterwards `ended` says whether the interpreter is gone."""
        try:
            text = code.encode()
        except UnicodeEncodeError as error:
            return ExecResult(1, "", f"the code is not valid Unicode at character {error.start}")
        started = time.perf_counter()
        collectors = {fd: Collector(max_output_bytes) for fd in self._outputs}
        source = os.memfd_create("cell", os.MFD_CLOEXEC)
        try:
            with open(source, "wb", closefd=False) as file:
                file.write(text)
            os.lseek(source, 0, os.SEEK_SET)
            wire.send(self._process.control, {"do": "run"}, [source])
            is_well, timed_out = self._await(collectors, timeout_s)
        except OSError:
            is_well, timed_out = None, False
        finally:
            os.close(source)
        if is_well is None:
            self.end()
        out, err = (collectors[fd].captured() for fd in self._outputs)
        if self.ended:
            self._close_outputs()
        return ExecResult(
            None if is_well is None else int(not is_well),
            out.text,
            err.text,
            timed_out=timed_out,
            killed=is_well is None and not timed_out,
            shell_restarted=is_well is None,
            truncated=out.truncated or err.truncated,
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            duration_s=time.perf_counter() - started,
        )

    def freeze(self) -> Keeper:
        """Fork a keeper off it.

        Raises:
            SnapshotError: the interpreter does not do it.
        """
        look = self._process.look()
        ours, theirs = pair()
        try:
            tree = self._keeper.tree
            with tree.lock:
                told = self._process.ask("freeze", [theirs.fileno(), tree.rest], cwd=look.cwd, files=_table(look))
                theirs.close()
                process = Peer(ours, tree)
        except SandboxError as error:
            ours.close()
            raise SnapshotError(f"the Python interpreter cannot be frozen: {error}") from error
        finally:
            theirs.close()
        threads = told.get("threads")
        losses = _losses(look, threads if isinstance(threads, list) else [], self._keeper.tree.pids)
        return Keeper(process, self._keeper.tree, (*losses, *self._redirected(look)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep it and all that it started from running for a while, so that files can be copied."""
        with self._keeper.tree.lock:
            pids = processes.stop(self._process.pid, self._keeper.tree.pids - {self._process.pid})
        try:
            yield
        finally:
            processes.go_on(pids)

    def follow(self, root: int) -> None:
        """Move to a fresh root of the same content, with its directory and its open files.

        Raises:
            SandboxError: it did not.
        """
        look = self._process.look()
        self._process.ask("root", [root], cwd=look.cwd, files=_table(look))
        if not self._lives_in(root):
            self.end()
            raise SandboxError("the Python interpreter did not follow its sandbox's root; it was ended")

    @property
    def pid(self) -> int:
        """As this machine counts."""
        return self._process.pid

    def has_died(self) -> bool:
        """Whether it ended by itself."""
        return processes.has_ended(self._process.pidfd, 0.0)

    def end(self) -> None:
        """End it and everything it started; twice is fine."""
        if not self.ended:
            self.ended = True
            try:
                self._process.end()
                left = self._keeper.sweep()
            finally:
                self._keeper.release()
            if left:
                raise SandboxError(f"{left} processes that Python code left behind survived being killed")

    def close(self) -> None:
        """End it and close our ends."""
        self.end()
        self._close_outputs()

    def _redirected(self, look: processes.Look) -> list[str]:
        names = {file.number: file.name for file in look.files}
        ours = {number: f"pipe:[{os.fstat(fd).st_ino}]" for number, fd in zip(_OUTPUTS, self._outputs, strict=True)}
        return [
            f"output {number} sent to {names.get(number, 'nowhere')}"
            for number in ours
            if names.get(number) != ours[number]
        ]

    def _close_outputs(self) -> None:
        for fd in self._outputs:
            os.close(fd)
        self._outputs = ()  # type: ignore[assignment]

    def _lives_in(self, root: int) -> bool:
        try:
            return os.path.samestat(os.stat(f"/proc/{self._process.pid}/root"), os.stat(root))
        except OSError:
            return False

    def _await(self, collectors: Mapping[int, Collector], timeout_s: float) -> tuple[bool | None, bool]:
        """Collect until the answer: whether the code ended well (None: no answer) and whether its time ran out."""
        deadline = time.monotonic() + timeout_s
        timed_out = False
        while True:
            ready = {fd for fd, _ in self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            for fd in ready & set(collectors):
                _read_into(fd, collectors[fd], self._poller)
            is_well = None
            if self._process.control.fileno() in ready:
                with suppress(OSError, EOFError, ValueError):
                    is_well = bool(self._process.answer().get("ok"))
            if ready & {self._process.control.fileno(), self._process.pidfd}:
                for fd, collector in collectors.items():
                    _drain(fd, collector)
                return is_well, timed_out
            if time.monotonic() >= deadline:
                if timed_out:
                    return None, True
                timed_out = True
                processes.send(self._process.pidfd, signal.SIGINT)
                deadline += GRACE_S


def _sources() -> dict[str, str]:
    here = Path(__file__).parent
    names = ("wire", "pyserver")
    texts = {f"agentgym.sandboxes.{name}": (here / f"{name}.py").read_text("utf-8") for name in names}
    return {"agentgym": "", "agentgym.sandboxes": "", **texts}


def _said(fd: int) -> str:
    """The last line that a program which did not start had to say."""
    lines = os.read(fd, _CHUNK).decode("utf-8", "replace").split("\n") if select.select([fd], [], [], 0)[0] else []
    return next((line for line in reversed(lines) if line.strip()), "")


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    return read, write


def _table(look: processes.Look) -> list[list[Any]]:
    own = (*_OUTPUTS, _SOCKET)
    return [[file.number, file.path, file.flags, file.offset] for file in look.files if file.number not in own]


def _losses(look: processes.Look, threads: list[Any], known: set[int]) -> tuple[str, ...]:
    names = [f"thread {str(name)[:80]}" for name in threads]
    names += [f"{more} threads outside Python"] if (more := look.num_threads - 1 - len(names)) > 0 else []
    names += [f"process {pid} ({processes.command(pid)})" for pid in look.children if pid not in known]
    own = (*_OUTPUTS, _SOCKET)
    files = [file for file in look.files if file.path is None and file.number not in own]
    names += [f"open file {file.number} ({file.name})" for file in files]
    return (*names, *(f"shared memory ({name}): branches go on sharing it" for name in look.shared))


def _read_into(fd: int, collector: Collector, poller: select.poll) -> None:
    with suppress(BlockingIOError):
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            poller.unregister(fd)
        collector.add(chunk)


def _drain(fd: int, collector: Collector) -> None:
    # bounded: something in the background may go on writing for ever
    taken = 0
    with suppress(BlockingIOError):
        while taken < _DRAIN_BYTES and (chunk := os.read(fd, _CHUNK)):
            collector.add(chunk)
            taken += len(chunk)
