"""One sandbox as the spawner makes and keeps it: namespaces, root, first process, programs; standard library only.

Owns everything that must happen inside a sandbox: mounting, exchanging the root, starting programs, listing and
stopping tasks. All of it is done from outside, by the spawner stepping in, so that nothing inside has more rights than
the agent, but for a first process that only waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.sandboxes import inside, overlay
from agentgym.sandboxes import syscalls as sc
from agentgym.sandboxes.first import MARK

COMMAND_FD, STATUS_FD, SCRIPT_FD = 30, 31, 32
_PLACES = (COMMAND_FD, 1, 2, STATUS_FD, SCRIPT_FD, 0)
"""Of (commands, output, errors, status, script, null) in a shell."""
_SAVED = 10
"""From here up bash keeps copies of descriptors that a running command has redirected."""
_PARKED = 64
"""Above every place: a descriptor to place must not stand where another belongs."""
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
_PROC_HIDDEN = ("kcore", "keys", "key-users", "timer_list", "sched_debug", "kmsg", "kallsyms", "kpagecount")

View = tuple[list[str], list[str]]
"""A chain of layers, and those of them that change /usr."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all sandboxes of a spawner have in common."""

    state: str
    """The folder of the run; the layers lie in `layers` below it."""
    binds: list[str]
    """Host directories shown read-only at the top."""
    userxattr: bool
    """True in a user namespace."""
    environment: dict[str, str]
    """Of a shell: nothing but what it needs to start."""
    first: str
    """Path of what the first process executes; on the host, since it starts before the root changes."""
    lifeline: int
    """Its standard input: end of a pipe that only the spawner holds the other end of."""
    max_file_bytes: int
    """Of one file that a program writes; 0: no limit."""
    max_files: int
    """Descriptors that a program may have open, until it asks for more."""

    @property
    def layers(self) -> str:
        """The folder of all layers."""
        return os.path.join(self.state, "layers")


@dataclass(slots=True)
class Box:
    """A sandbox that lives."""

    number: int
    control: socket.socket
    """The spawner's end; only events go through it, and its other end closing ends the sandbox."""
    kind: Kind
    home: inside.Home
    upper: str
    """The layer it writes to."""
    chain: list[str]
    """All that lies below, and what is shown at /world."""
    mounts: list[str] = field(default_factory=list)
    """Mount points under the root that move along when the root is exchanged."""
    first: int = 0
    """Host's number of its first process."""
    pidfd: int = -1
    shell: int = 0
    """Host's number of its shell; 0: there is none."""
    programs: set[int] = field(default_factory=set)
    """Host's numbers of what was started in it and not waited for yet, the shell included."""
    fresh: list[int] = field(default_factory=list)
    """Mounts for the root exchange that comes next."""
    was_ended: bool = False
    """For having written too much, since the last count."""
    had_bytes: int = 0
    """What it had written then, and may have again."""
    had_files: int = 0
    outgrown: bool = False
    """Its shell was ended for that; said with its end."""
    _shell_inside: int = 0

    def build(self, views: Sequence[View], fds: list[int]) -> None:
        """Make namespaces, root and first process, and start a shell on (commands, output, errors, status, script)."""
        with self.home.away(None):
            self.first, self.pidfd = start_first(self.kind)
            self.mounts = _build_root(self.kind, self.upper, views, self.first)
            sc.sethostname("sandbox")
            self._start_shell_here(fds)

    def start_shell(self, fds: list[int]) -> None:
        """Start another shell, where the one before has ended."""
        with self.home.away(self.pidfd):
            self._start_shell_here(fds)

    def exchange_root(self, mounts: list[int]) -> None:
        """Put a new root (and a new /usr, if given) under every process."""
        root = mounts[0]
        with self.home.away(self.pidfd, inside.FILES):
            sc.move_mount(root, "", sc.AT_FDCWD, "/")
            for name in self.mounts:
                if name == "usr" and len(mounts) > 1:
                    sc.move_mount(mounts[1], "", root, "usr")
                else:
                    sc.move_mount(sc.AT_FDCWD, "/" + name, root, name)
            _pivot(root)

    def root(self) -> int:
        """A descriptor of the directory that the sandbox sees as /."""
        return os.open(f"/proc/{self.first}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def alive(self) -> dict[str, Any]:
        """What is alive or open beside the idle shell, and where the shell is."""
        found = []
        for pid in self._others():
            name = _read(f"/proc/{self.first}/root/proc/{pid}/cmdline")
            found.append({"pid": pid, "name": name.replace("\0", " ").strip()[:80]})
        cwd = ""
        if self.shell:
            with contextlib.suppress(OSError):
                cwd = os.readlink(f"/proc/{self.shell}/cwd")
        return {"tasks": found, "files": _open_files(self.shell) if self.shell else [], "cwd": cwd}

    def freeze(self) -> None:
        """Stop everything.

        Raises:
            OSError: something does not stop within a second; all goes on.
        """
        if self.home.fork_inside(self.pidfd, _stop_all)["running"]:
            self.thaw()
            raise OSError(errno.EBUSY, "a process does not stop within 1 s")

    def thaw(self) -> None:
        """Let stopped tasks go on."""
        self.home.fork_inside(self.pidfd, _continue_all)

    def kill_all(self) -> int:
        """End every process but the first; give how many are left."""
        left: int = self.home.fork_inside(self.pidfd, _kill_all)["left"]
        for pid in list(self.programs):
            if not left:
                os.waitpid(pid, 0)
                self.programs.discard(pid)
        self.shell = self._shell_inside = 0
        return left

    def condemn(self) -> None:
        """Begin the end: the kernel ends everything inside."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def bury(self) -> None:
        """Wait until everything has ended, and close what was open."""
        # the first process ends last, and not before those that only we can wait for
        for pid in (*self.programs, self.first):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.control.close()
        for fd in (self.pidfd, *self.fresh):
            os.close(fd)

    # inside

    def _start_shell_here(self, fds: list[int]) -> None:
        # a script named "bash", so that messages begin as everybody knows them: "bash: line 1: ..."
        os.chdir("/dev/shell")
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            places = dict(zip(_PLACES, (*fds, null), strict=True))
            argv = ["bash", "--norc", "--noprofile", "bash"]
            self.shell = spawn(self.kind, "/bin/bash", argv, self.kind.environment, places)
            self.programs.add(self.shell)
            self._shell_inside = 0
        finally:
            os.close(null)

    def _others(self) -> list[int]:
        """The sandbox's own numbers of its processes, without the first and the shell."""
        if self.shell and not self._shell_inside:
            for line in _read(f"/proc/{self.shell}/status").splitlines():
                if line.startswith("NSpid:"):
                    self._shell_inside = int(line.split()[-1])
        names = os.listdir(f"/proc/{self.first}/root/proc")
        return [int(n) for n in names if n.isdigit() and int(n) not in (1, self._shell_inside)]


def start_first(kind: Kind) -> tuple[int, int]:
    """Start what every PID namespace begins with; give its number and a descriptor of it."""
    # it has a capability that nothing else inside has, so that nothing else may look into it
    sc.pass_on(sc.CAP_SYS_ADMIN, True)
    try:
        pid = os.posix_spawn(
            kind.first,
            ["init"],
            {MARK: kind.state},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, kind.lifeline, 0),
                (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=_default_signals(),
        )
    finally:
        sc.pass_on(sc.CAP_SYS_ADMIN, False)
    return pid, os.pidfd_open(pid)


def spawn(kind: Kind, path: str, argv: list[str], environment: dict[str, str], places: dict[int, int]) -> int:
    """Start a program in the namespaces where we stand, with descriptors at their places; give its number."""
    parked = {place: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PARKED) for place, fd in places.items()}
    try:
        # unlike fork, this copies no page tables
        pid = os.posix_spawn(
            path,
            argv,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, place) for place, fd in parked.items()],
            setsid=True,
            setsigdef=_default_signals(),
        )
    finally:
        for fd in parked.values():
            os.close(fd)
    # from outside, and before it was told anything: this process itself has other limits
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (kind.max_files, hard))
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    if kind.max_file_bytes:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (kind.max_file_bytes,) * 2)
    return pid


def _default_signals() -> set[signal.Signals]:
    # Python and the spawner ignore some, and programs keep what they inherit
    return signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


def _build_root(kind: Kind, upper: str, views: Sequence[View], first: int) -> list[str]:
    layers, userxattr = kind.layers, kind.userxattr
    chain, in_usr = views[0]
    root = overlay.mount_root(layers, upper, chain, userxattr)
    try:
        sc.move_mount(root, "", sc.AT_FDCWD, os.path.join(kind.state, "mnt"))
        attach(overlay.mount_usr(layers, upper, in_usr, userxattr), root, "usr")
        sc.move_mount(sc.AT_FDCWD, os.path.join(kind.state, "dev"), root, "dev")
        for name in kind.binds:
            sc.move_mount(sc.AT_FDCWD, os.path.join(kind.state, "binds", name), root, name)
        for world, world_usr in views[1:]:
            attach(overlay.mount_root(layers, None, world, userxattr), root, "world")
            attach(overlay.mount_usr(layers, None, world_usr, userxattr), root, "world/usr")
        _attach_proc(first, root)
        _pivot(root)
    finally:
        os.close(root)
    _mask_proc()
    return ["usr", "dev", "proc", *kind.binds, *(["world"] if len(views) > 1 else [])]


def attach(mount: int, root: int, place: str) -> None:
    """Put a detached mount at a place below a directory, and close its descriptor."""
    try:
        sc.move_mount(mount, "", root, place)
    finally:
        os.close(mount)


_numbers_by_option = True


def use_old_proc() -> None:
    """For kernels before 6.17, where /proc shows the numbers of whoever mounts it."""
    global _numbers_by_option
    _numbers_by_option = False


def _attach_proc(first: int, root: int) -> None:
    attributes = sc.ATTR_NOSUID | sc.ATTR_NODEV | sc.ATTR_NOEXEC
    if _numbers_by_option:
        try:
            attach(sc.new_mount("proc", [("pidns", f"/proc/{first}/ns/pid")], attributes), root, "proc")
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            use_old_proc()
    pid = os.fork()
    if pid == 0:
        try:
            attach(sc.new_mount("proc", [], attributes), root, "proc")
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise OSError(errno.EPERM, "mounting proc in a sandbox: refused")


def show_processes(first: int) -> None:
    """Let /proc show, where we stand, what lives with a first process, and no more of the machine than a sandbox sees."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _attach_proc(first, root)
    finally:
        os.close(root)
    _mask_proc()


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
            attach(fd, sc.AT_FDCWD, path)
    for name in _PROC_HIDDEN:
        path = "/proc/" + name
        if os.path.exists(path):
            attach(sc.open_tree("/dev/null"), sc.AT_FDCWD, path)


def _open_files(pid: int) -> list[dict[str, Any]]:
    """Open files of a shell that an exchanged root would leave in the sealed layer, and that no fork gets back."""
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


# what a fork of the spawner does among the processes of a sandbox; /proc is theirs


def _kill_all() -> dict[str, Any]:
    for _ in range(1000):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        # the dead that the spawner has started wait for it
        left = [pid for pid in _beside_us() if _task_state(pid) not in "ZX"]
        if not left:
            return {"left": 0}
        time.sleep(0.001)
    return {"left": len(left)}


def _stop_all() -> dict[str, Any]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if all(_task_state(pid) in "TtZX" for pid in _beside_us()):
            return {"running": False}
        time.sleep(0.0005)
    return {"running": True}


def _continue_all() -> dict[str, Any]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGCONT)
    return {}


def _beside_us() -> list[int]:
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) not in (1, os.getpid())]


def _task_state(pid: int) -> str:
    """One letter; X for what is gone."""
    return (_read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X"])[0]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
