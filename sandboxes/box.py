"""The first process of a sandbox: builds its root, starts its shell, then answers the library; stdlib only.

Owns everything that must happen inside the sandbox's namespaces: mounting, rotating the root, listing and
killing tasks, opening files. It runs with full capabilities and is out of the agent's reach: the shell and
all below it have theirs cut, and a PID namespace protects its first process from signals.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from agentgym.sandboxes import hostfiles, overlay, seccomp, wire
from agentgym.sandboxes import syscalls as sc

COMMAND_FD, STATUS_FD, SCRIPT_FD = 30, 31, 32
_PLACES = (COMMAND_FD, 1, 2, STATUS_FD, SCRIPT_FD, 0)
_SAVED = 10
"""From here up bash keeps copies of descriptors that a running command has redirected."""
_PARKED = 600
"""Descriptors wait from here up while everything below is closed."""
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18})
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
_PROC_HIDDEN = ("kcore", "keys", "key-users", "timer_list", "sched_debug", "kmsg", "kallsyms", "kpagecount")


class Box:
    """State of the first process."""

    def __init__(
        self, control: socket.socket, mounts: list[str], environment: dict[str, str], doors: list[tuple[int, int]]
    ) -> None:
        self.control = control
        self.mounts = mounts
        """Mount points under the root that move along when the root is rotated."""
        self.environment = environment
        """Of the shell: nothing but what it needs to start."""
        self.doors = doors
        """Descriptors of the control groups' doors, in and out."""
        self.shell = 0

    def serve(self) -> None:
        """Answer requests until the library goes away; then end, and the kernel ends the rest."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(woken, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                    self._reap()
                else:
                    self._answer()

    def _answer(self) -> None:
        request, fds = wire.receive(self.control)
        try:
            answer, given = getattr(self, "do_" + request.pop("do"))(fds, **request)
        except OSError as error:
            answer, given = {"errno": error.errno, "error": str(error)}, []
        wire.send(self.control, answer, given)
        for fd in (*fds, *given):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.shell:
                self.shell = 0
                wire.send(self.control, {"event": "exit", "status": os.waitstatus_to_exitcode(status)})

    # what the library asks for

    def do_ready(self, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Say that the sandbox is set up."""
        return {}, []

    def do_shell(self, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Start a shell on (commands, output, errors, status, script)."""
        self.start_shell(fds)
        return {}, []

    def do_kill(self, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """End every process but this one, and say that none is left."""
        self.shell = 0
        for _ in range(1000):
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                if not self._others():
                    return {"left": 0}, []
            time.sleep(0.001)
        return {"left": len(self._others())}, []

    def do_tasks(self, fds: list[int], freeze: bool) -> tuple[dict[str, Any], list[int]]:
        """Name what is alive or open beside the idle shell, and stop it if asked."""
        others = self._others()
        if others and freeze:
            os.kill(-1, signal.SIGSTOP)
            self._wait_stopped()
            others = self._others()
        tasks = [{"pid": pid, "name": _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:80]} for pid in others]
        files = _open_files(self.shell) if self.shell else []
        cwd = ""
        if self.shell:
            with contextlib.suppress(OSError):
                cwd = os.readlink(f"/proc/{self.shell}/cwd")
        return {"tasks": tasks, "files": files, "cwd": cwd}, []

    def do_thaw(self, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Let stopped tasks go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)
        return {}, []

    def do_rotate(self, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Put a new root (and a new /usr, if given) under every process."""
        root = fds[0]
        sc.move_mount(root, "", sc.AT_FDCWD, "/")
        for name in self.mounts:
            if name == "usr" and len(fds) > 1:
                sc.move_mount(fds[1], "", root, "usr")
            else:
                sc.move_mount(sc.AT_FDCWD, "/" + name, root, name)
        _pivot(root)
        return {}, []

    def do_open(
        self, fds: list[int], path: str, write: bool, mode: int, above: int
    ) -> tuple[dict[str, Any], list[int]]:
        """Open a regular file as the sandbox sees it; `above` is the mode of directories made for it."""
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = hostfiles.open_regular(root, path, write=write, mode=mode, above=above)
        finally:
            os.close(root)
        return {"size": os.fstat(fd).st_size}, [fd]

    # inside

    def start_shell(self, fds: list[int]) -> None:
        """Start the shell; its descriptors stay open here, for the caller to close."""
        # Python and the spawner ignore some signals, and bash keeps what it inherits
        default = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        # parked: a descriptor to place must not stand where another belongs; all but those placed close on exec
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PARKED) for fd in (*fds, os.open("/dev/null", os.O_RDONLY))]
        actions = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in zip(parked, _PLACES, strict=True)]
        # a script named "bash", so that messages begin as everybody knows them: "bash: line 1: ..."
        os.chdir("/dev/shell")
        for enter, _ in self.doors:
            os.write(enter, b"0")
        # unlike fork, this copies no page tables: 0.2 ms instead of 0.8
        self.shell = os.posix_spawn(
            "/bin/bash",
            ["bash", "--norc", "--noprofile", "bash"],
            self.environment,
            file_actions=actions,
            setsid=True,
            setsigdef=default,
        )
        for _, leave in self.doors:
            os.write(leave, b"0")
        os.chdir("/")
        for fd in parked:
            os.close(fd)

    def _others(self) -> list[int]:
        return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) not in (1, self.shell)]

    def _wait_stopped(self) -> None:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            states = [_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] for pid in self._others()]
            if all(state in ([], ["T"], ["Z"], ["X"], ["t"]) for state in states):
                return
            time.sleep(0.0005)
        os.kill(-1, signal.SIGCONT)
        raise OSError(errno.EBUSY, "a process does not stop within 1 s")


View = tuple[list[str], list[str]]
"""A chain of layers, and those of them that change /usr."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sandbox is to be."""

    layers: str
    """The folder of all layers."""
    upper: str
    """The layer to write to."""
    views: list[View]
    """Its own view, and optionally one to show read-only at /world."""
    binds: list[str]
    """Host directories shown read-only at the top."""
    userxattr: bool
    """True in a user namespace."""
    environment: dict[str, str]
    """Of the shell."""
    doors: list[tuple[str, str]]
    """Files through which a process joins the sandbox's control groups, and leaves them."""
    max_file_bytes: int
    """Of one file that a program writes; 0: no limit."""


def run(fds: list[int], plan: Plan) -> None:
    """The whole life of the first process; fds are (control, commands, output, errors, status, script)."""
    sc.die_with_parent()
    signal.set_wakeup_fd(-1)  # the spawner's, closed below
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PARKED) for fd in fds]
    sc.close_range(3, _PARKED - 1)
    sc.close_range(max(parked) + 1)
    control = socket.socket(fileno=parked[0])
    try:
        doors = [(os.open(enter, os.O_WRONLY), os.open(leave, os.O_WRONLY)) for enter, leave in plan.doors]
        mounts = _build_root(plan)
        sc.sethostname("sandbox")
        _set_limits(plan)
        box = Box(control, mounts, plan.environment, doors)
        box.start_shell(parked[1:])
        for fd in parked[1:]:
            os.close(fd)
    except OSError as error:
        wire.send(control, {"event": "broken", "error": str(error)})
        raise
    with contextlib.suppress(EOFError, BrokenPipeError):
        box.serve()


def _build_root(plan: Plan) -> list[str]:
    layers, upper, userxattr = plan.layers, plan.upper, plan.userxattr
    state = os.path.dirname(layers)
    chain, in_usr = plan.views[0]
    root = overlay.mount_root(layers, upper, chain, userxattr)
    sc.move_mount(root, "", sc.AT_FDCWD, os.path.join(state, "mnt"))
    sc.move_mount(overlay.mount_usr(layers, upper, in_usr, userxattr), "", root, "usr")
    sc.move_mount(sc.AT_FDCWD, os.path.join(state, "dev"), root, "dev")
    for name in plan.binds:
        sc.move_mount(sc.AT_FDCWD, os.path.join(state, "binds", name), root, name)
    for world, world_usr in plan.views[1:]:
        sc.move_mount(overlay.mount_root(layers, None, world, userxattr), "", root, "world")
        sc.move_mount(overlay.mount_usr(layers, None, world_usr, userxattr), "", root, "world/usr")
    proc = sc.new_mount("proc", [], sc.ATTR_NOSUID | sc.ATTR_NODEV | sc.ATTR_NOEXEC)
    sc.move_mount(proc, "", root, "proc")
    _pivot(root)
    os.chdir("/")
    _mask_proc()
    return ["usr", "dev", "proc", *plan.binds, *(["world"] if len(plan.views) > 1 else [])]


def _pivot(root: int) -> None:
    os.fchdir(root)
    sc.pivot_root(".", ".")
    sc.umount(".", sc.MNT_DETACH)
    os.chdir("/")


def _mask_proc() -> None:
    for name in _PROC_READ_ONLY:
        path = "/proc/" + name
        if os.path.exists(path):
            fd = sc.open_tree(path)
            sc.set_mount_attributes(fd, sc.ATTR_RDONLY | sc.ATTR_NOSUID | sc.ATTR_NODEV | sc.ATTR_NOEXEC)
            sc.move_mount(fd, "", sc.AT_FDCWD, path)
            os.close(fd)
    for name in _PROC_HIDDEN:
        path = "/proc/" + name
        if os.path.exists(path):
            fd = sc.open_tree("/dev/null")
            sc.move_mount(fd, "", sc.AT_FDCWD, path)
            os.close(fd)


def _set_limits(plan: Plan) -> None:
    """What everything below this process gets: the shell is started with these and cannot lift them.

    This process itself keeps its capabilities, since it never executes anything.
    """
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if plan.max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.max_file_bytes, plan.max_file_bytes))
    sc.bound_capabilities(_KEPT_CAPABILITIES)
    secret = int.from_bytes(os.urandom(8), "big") | 1
    sc.set_filter(seccomp.program(secret))
    sc.use_secret(secret)


def _open_files(pid: int) -> list[dict[str, Any]]:
    """Open files of a shell that a rotated root would leave in the sealed layer, and that no fork gets back."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        number = int(name)
        ours = number in _PLACES or number >= _SAVED
        if target == "/dev/null" or (ours and target.startswith(("pipe:", "/memfd:"))):
            continue
        found.append({"fd": number, "path": target[:200]})
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
