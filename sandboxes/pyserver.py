"""A Python interpreter that runs code and forks itself on request, inside a sandbox; standard library only.

Owns what happens in the interpreter's process: running a piece of code as a notebook cell, forking, and following a
root that changed. It is told over one socket, and everything that it prints goes to its descriptors 1 and 2.

A process is a *keeper* or *live*. A keeper holds a frozen heap: it runs no code, only forks; the first one is the
empty interpreter that all others come from. A live one runs code and can be frozen, which forks a keeper off it.

The agent's code shares the process, so nothing here is a wall: answers are untrusted, and what must hold (walls, limits,
deadlines, which root a process has) is held or checked from outside.
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import gc
import json
import linecache
import os
import random
import signal
import socket
import struct
import sys
import threading
import traceback
import types
import warnings
from typing import Any

from agentgym.sandboxes import wire

SOURCE_FD, SOCKET_FD = 3, 4
"""Where a starting interpreter finds this module's text and its socket."""
_OWN_SOCKET, _NOWHERE = 100, 101
"""Where the socket and a dead descriptor lie later: what the code opens begins at 3, as everywhere."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_SCOPES = 0b11
"""Landlock: no signal and no abstract socket out of the domain."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Server:
    """One interpreter; after a fork, the child goes on in the same object with a socket of its own."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pid = os.getpid()
        self.running = False
        self.cells = 0
        self.keepers: list[int] = []
        """Frozen copies of this one, its children: they are reaped by number, since the code may wait for its own."""
        self.files: list[list[Any]] = []
        """Of a keeper: (descriptor, path or None, flags, offset) of what was open when it was frozen."""
        self.cwd = "/"
        self.child_handler: Any = signal.SIG_DFL
        self.main = types.ModuleType("__main__")
        sys.modules["__main__"] = self.main

    def serve(self) -> None:
        """Answer until the library goes away."""
        while True:
            try:
                request, fds = wire.receive(self.control)
            except EOFError:
                return
            self._reap()
            pid = self.pid
            try:
                answer = getattr(self, "do_" + request.pop("do"))(fds, **request)
            except OSError as error:
                if os.getpid() != pid:
                    raise  # a child that cannot become what it was forked for
                answer = {"error": str(error)}
            for fd in fds:
                os.close(fd)
            wire.send(self.control, answer)

    # requests

    def do_run(self, fds: list[int]) -> dict[str, Any]:
        """Run the code in a file: all of it, and the value of a last expression is shown."""
        with open(fds.pop(), encoding="utf-8") as file:
            code = file.read()
        self.cells += 1
        is_well = self._execute(code, f"<cell {self.cells}>")
        if os.getpid() != self.pid:
            os._exit(0 if is_well else 1)  # the code forked, and this is its child
        return {"ok": is_well}

    def do_root(self, fds: list[int], cwd: str, files: list[list[Any]]) -> dict[str, Any]:
        """Move to a fresh root of the same content; open files are opened anew there."""
        return {"lost": self._enter(fds[0], cwd, files)}

    def do_freeze(self, fds: list[int], cwd: str, files: list[list[Any]]) -> dict[str, Any]:
        """Fork a keeper: fds are its socket and the root in which it rests."""
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        pid = self._fork()
        if pid:
            self.keepers.append(pid)
            return {"threads": threads}
        os.fchdir(fds[1])
        os.chroot(".")
        self.files, self.cwd = files, cwd
        # the code that it was forked from may not look into it or change it through /proc
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        self.child_handler = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _blank([1, 2])
        _blank([fd for fd, *_ in files])
        self._take_socket(fds)
        return {"event": "ready"}

    def do_branch(self, fds: list[int], cwd: str | None, seed: int | None) -> dict[str, Any]:
        """Fork a live interpreter: fds are its socket, output, errors and the root it is to live in.

        The directory is where it was frozen unless told; the random state too.
        """
        if self._fork():
            return {}
        if seed is not None:
            _reseed(seed)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if self.child_handler is None else self.child_handler)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _keep_signals_in()
        os.dup2(fds[1], 1)
        os.dup2(fds[2], 2)
        lost = self._enter(fds[3], self.cwd if cwd is None else cwd, self.files)
        self.files = []
        self._take_socket(fds)
        return {"event": "ready", "lost": lost}

    # inside

    def _fork(self) -> int:
        # what is there now is left alone by the collector from here on: its marks would copy every page
        gc.freeze()
        state = random.getstate()  # Python reseeds in a fork, and a copy should be a copy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn where threads are alive; the caller names them
            pid = os.fork()
        if pid == 0:
            random.setstate(state)
            self.pid = os.getpid()
            self.keepers = []
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return pid

    def _take_socket(self, fds: list[int]) -> None:
        os.dup2(fds[0], self.control.fileno(), inheritable=False)

    def _enter(self, root: int, cwd: str, files: list[list[Any]]) -> list[int]:
        """Move to a root and a directory in it; the descriptors that could not be opened anew are told."""
        os.fchdir(root)
        os.chroot(".")
        lost = []
        try:
            os.chdir(cwd)
        except OSError:
            os.chdir("/")
            lost.append(-1)
        for fd, path, flags, offset in files:
            try:
                if path is None:
                    raise FileNotFoundError
                fresh = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
                if offset:
                    os.lseek(fresh, offset, os.SEEK_SET)
            except OSError:
                _blank([fd])
                lost.append(fd)
            else:
                os.dup2(fresh, fd, inheritable=not flags & os.O_CLOEXEC)
                os.close(fresh)
        return lost

    def _reap(self) -> None:
        for pid in list(self.keepers):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self.keepers.remove(pid)
            except ChildProcessError:
                self.keepers.remove(pid)

    def _execute(self, code: str, name: str) -> bool:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        told = ""
        try:
            # not ast.parse, which would stand in the traceback of a syntax error
            tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
            last = tree.body[-1] if tree.body else None
            ending = None
            if isinstance(last, ast.Expr):
                tree.body.pop()
                ending = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            first = compile(tree, name, "exec", dont_inherit=True)
            self.running = True
            exec(first, self.main.__dict__)
            if ending is not None:
                sys.displayhook(eval(ending, self.main.__dict__))
            self.running = False
        except BaseException as error:  # SystemExit too: the code ends, the interpreter does not
            self.running = False
            told = _traceback(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the code closed it, or put something of its own in its place
                continue
        _write(told)
        return not told

    def interrupt(self, number: int, frame: object) -> None:
        """End the code that runs, and nothing else."""
        if self.running:
            raise KeyboardInterrupt


def _traceback(error: BaseException) -> str:
    """As Python prints it, without the frames of this module."""
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    ours = _traceback.__code__.co_filename
    kept = [frame for frame in told.stack if frame.filename != ours]
    told.stack = traceback.StackSummary.from_list(kept) if kept else None  # type: ignore[assignment]
    return "".join(told.format())


def _write(text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        try:
            data = data[os.write(2, data) :]
        except OSError:
            return  # the code closed it


def _blank(fds: list[int]) -> None:
    """Let descriptors lead nowhere and keep their numbers, so that nothing else is mistaken for what they were."""
    for fd in fds:
        os.dup2(_NOWHERE, fd, inheritable=False)


def _reseed(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def _keep_signals_in() -> None:
    """Let this process and what it starts signal nobody outside, where the kernel can: Landlock, at most 16 deep."""
    record = struct.pack("QQQ", 0, 0, _SCOPES)
    rules = _libc.syscall(
        ctypes.c_long(_CREATE_RULESET), ctypes.c_char_p(record), ctypes.c_size_t(len(record)), ctypes.c_uint(0)
    )
    if rules >= 0:
        _libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint(0))
        os.close(rules)


def main() -> None:
    """Become the first keeper, on the descriptors above."""
    os.close(SOURCE_FD)
    fcntl.fcntl(SOCKET_FD, fcntl.F_DUPFD_CLOEXEC, _OWN_SOCKET)
    os.close(SOCKET_FD)
    # neither read nor written, and no directory: one of those would be a way out of a branch's root
    os.dup2(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC), _NOWHERE, inheritable=False)
    os.closerange(SOURCE_FD, _OWN_SOCKET)
    for name in [name for name in sys.modules if name.partition(".")[0] == "agentgym"]:
        del sys.modules[name]
    for tuning in json.loads(os.environ.pop("AGENTGYM_TUNING")):
        os.environ.pop(tuning, None)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    server = Server(socket.socket(fileno=_OWN_SOCKET))
    signal.signal(signal.SIGINT, server.interrupt)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    wire.send(server.control, {"event": "ready"})
    server.serve()
