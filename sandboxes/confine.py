"""Starting a process that writes only below given folders and reaches no network, without any rights.

Owns how the rules of `landlock.py` and the filter of `sockets.py` get onto a child, and the trial that shows what they
hold on this machine. Both bind one thread and what it starts, so the child is started from a thread of its own, which
ends at once. That costs under a millisecond, where a Python program that sets the rules and then executes the
shell took 12; and nothing of ours runs between fork and exec, where locks of other threads would be held for ever.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import SandboxError
from agentgym.sandboxes import landlock, sockets, syscalls

_gc_lock = threading.Lock()
_TRIAL = r"""
import json, os, socket, sys
inside, outside, other, port, parent = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
passed = []
def attempt(name, action):
    try:
        action()
        passed.append(name)
    except OSError:
        pass
def moved():
    os.makedirs(inside + "/a"); os.mkdir(inside + "/b"); open(inside + "/a/x", "w").close()
    os.rename(inside + "/a/x", inside + "/b/x"); os.remove(inside + "/b/x"); open("/dev/null", "w").close()
attempt("inside", moved)
attempt("truncate", lambda: os.truncate(outside + "/file", 0))
attempt("write", lambda: open(outside + "/file", "a").close())
attempt("create", lambda: open(outside + "/new", "x").close())
attempt("mkdir", lambda: os.mkdir(outside + "/newdir"))
attempt("link", lambda: os.link(outside + "/file", inside + "/linked"))
attempt("rename", lambda: os.rename(outside + "/file", inside + "/taken"))
attempt("remove", lambda: os.remove(outside + "/victim"))
def tcp(protocol=0):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as s:
        s.settimeout(2); s.connect(("127.0.0.1", port))
def fast():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.settimeout(2); s.sendto(b"x", 0x20000000, ("127.0.0.1", port))
def bind():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
def listen():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.listen()
attempt("tcp", tcp)
attempt("mptcp", lambda: tcp(262))
attempt("fastopen", fast)
attempt("bind", bind)
attempt("listen", listen)
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close())
attempt("signal", lambda: os.kill(parent, 0))
attempt("environ", lambda: open(f"/proc/{parent}/environ", "rb").close())
print(json.dumps(passed))
"""
_WRITES = frozenset({"truncate", "write", "create", "mkdir", "link", "rename", "remove"})
_TCP = frozenset({"tcp", "mptcp", "fastopen", "bind", "listen"})


@dataclass(frozen=True, slots=True)
class Rules:
    """What is put on each child; from `find_rules`, which tried it."""

    writes: bool = False
    """Landlock: write only below the given folders."""
    sockets: bool = False
    """The filter of sockets."""
    passed: frozenset[str] = _WRITES | _TCP | {"udp", "signal", "environ"}
    """What a child under these rules could do all the same."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Of landlock and socket_filter, what this machine does not give, and why."""

    @property
    def held(self) -> frozenset[str]:
        """The words of `Capabilities.isolation` that hold."""
        return frozenset({"writes"} if not self.passed & _WRITES else ()) | (
            frozenset({"tcp"} if not self.passed & _TCP else ())
        )

    def start(self, arguments: Sequence[str], folders: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process under the rules.

        Args:
            arguments: As for `subprocess.Popen`.
            folders: Below these it may write.
            **options: As for `subprocess.Popen`.

        Raises:
            SandboxError: the rules cannot be set any more, though they could when they were tried.
        """
        if not (self.writes or self.sockets):
            return subprocess.Popen(arguments, **options)

        def start() -> subprocess.Popen[bytes]:
            try:
                self._restrict(folders)
            except OSError as error:
                raise SandboxError(f"a sandbox's rules cannot be set: {error}; they could be at the start") from error
            return subprocess.Popen(arguments, **options)

        return _in_a_thread(start)

    def _restrict(self, folders: Sequence[str]) -> None:
        landlock.forbid_new_rights()
        if self.writes:
            landlock.restrict(folders)
        if self.sockets:
            syscalls.set_filter(sockets.program())


def find_rules(folder: str) -> Rules:
    """What this machine can hold a child to, tried on a child that attacks each promise.

    Args:
        folder: Exists; the trial makes and removes files below it.
    """
    refusals: dict[str, str] = {}
    rules = Rules()
    for name, wanted in (("landlock", Rules(writes=True)), ("socket_filter", Rules(sockets=True))):
        try:
            if "inside" in _passed(wanted, folder):
                rules = Rules(writes=rules.writes or wanted.writes, sockets=rules.sockets or wanted.sockets)
            else:
                refusals[name] = "under it nothing could be written at all"
        except (SandboxError, OSError) as error:
            refusals[name] = str(error.__cause__ or error)
    passed = _passed(rules, folder) if rules.writes or rules.sockets else Rules().passed
    return Rules(rules.writes, rules.sockets, passed - {"inside"}, refusals)


def _passed(rules: Rules, folder: str) -> frozenset[str]:
    """Names of the attempts that a child under these rules got through with."""
    with tempfile.TemporaryDirectory(dir=folder) as place, socket.create_server(("127.0.0.1", 0)) as server:
        inside, outside = os.path.join(place, "inside"), os.path.join(place, "outside")
        os.mkdir(inside)
        os.mkdir(outside)
        for name in ("file", "victim"):
            with open(os.path.join(outside, name), "w") as file:
                file.write("kept")
        trial = [sys.executable, "-I", "-S", "-c", _TRIAL, inside, outside, place, str(server.getsockname()[1])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        with rules.start([*trial, str(os.getpid())], [inside], **pipes) as process:
            output, errors = process.communicate(timeout=30)
    if process.returncode != 0:
        raise SandboxError(f"a child under the rules ended with status {process.returncode}: {errors[-200:]!r}")
    return frozenset(json.loads(output))


def _in_a_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    made: list[subprocess.Popen[bytes]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            made.append(start())
        except BaseException as error:
            errors.append(error)

    with _gc_lock:
        # the collector runs in whatever thread allocates: a finalizer of the host's could not delete its files here
        collects = gc.isenabled()
        gc.disable()
        try:
            thread = threading.Thread(target=work, name="sandbox-start")
            thread.start()
            thread.join()
        finally:
            if collects:
                gc.enable()
    if errors:
        raise errors[0]
    return made[0]
