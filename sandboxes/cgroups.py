"""Memory, process and processor limits by control groups, on v1, v2 and hosts that have both; standard library only.

Owns finding the controllers, one group for a run and one below it for each sandbox, and clearing up. A sandbox's
shell joins before its first command, so that everything below is counted and limited; the first process, which only
waits, stays outside. Without the right to make groups there are no such limits, and the backend says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

PREFIX = "agentgym-"
CONTROLLERS = ("memory", "pids", "cpu")
_V1_FILES = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"}
_V2_FILES = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}
_PERIOD_US = 100_000
"""The kernel's own, in which processor time is counted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox."""

    memory_bytes: int
    max_pids: int
    cpus: float
    disk_bytes: int
    """Where files are watched, for the kernel does not count them as memory."""
    disk_files: int

    def value(self, controller: str) -> str:
        """What the controller's file is told."""
        return str({"memory": self.memory_bytes, "pids": self.max_pids, "cpu": int(self.cpus * _PERIOD_US)}[controller])


@dataclass(slots=True)
class Cgroups:
    """The groups of one run."""

    name: str
    """Of the run's own group; that of its state folder, so that garbage can be told."""
    homes: dict[str, str] = field(default_factory=dict)
    """Controller to the run's group. All controllers of v2 have the same one."""
    unified: frozenset[str] = frozenset()
    """Controllers on v2."""

    @classmethod
    def open(cls, name: str) -> Cgroups:
        """Make the run's groups where that is allowed; `homes` shows which controllers there are."""
        groups = cls(name)
        for controller, (parent, unified) in _parents().items():
            home = os.path.join(parent, PREFIX + name)
            try:
                os.makedirs(home, exist_ok=True)
                if unified:
                    groups.unified |= {controller}
                    _write(os.path.join(home, "cgroup.subtree_control"), f"+{controller}")
                groups.homes[controller] = home
            except OSError:
                groups.unified -= {controller}
        return groups

    def join(self, box: int, process: int, limits: Limits) -> None:
        """Put a process into its sandbox's groups, which are made where they are missing.

        Raises:
            OSError: a group cannot be made or joined.
        """
        joined = set()
        for controller, home in self.homes.items():
            path = os.path.join(home, str(box))
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            names = _V2_FILES if controller in self.unified else _V1_FILES
            _write(os.path.join(path, names[controller]), limits.value(controller))
            if controller == "memory" and controller in self.unified:
                with contextlib.suppress(OSError):
                    _write(os.path.join(path, "memory.swap.max"), "0")
            joined.add(path)
        for path in joined:
            # gone already: it ended by itself, and whoever waits for it is told
            with contextlib.suppress(ProcessLookupError):
                _write(os.path.join(path, "cgroup.procs"), str(process))

    def oom_kills(self, box: int) -> int:
        """How many processes of a sandbox the kernel ended for want of memory."""
        if "memory" not in self.homes:
            return 0
        name = "memory.events" if "memory" in self.unified else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):
            for line in _read(os.path.join(self.homes["memory"], str(box), name)).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self, box: int) -> None:
        """Remove the groups of a sandbox whose processes are gone."""
        for home in set(self.homes.values()):
            _remove(os.path.join(home, str(box)))

    def close(self) -> None:
        """Remove the run's groups."""
        for home in set(self.homes.values()):
            remove_group(home)


def remove_group(path: str) -> None:
    """Remove a group and those below it; their processes must be gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if os.path.isdir(os.path.join(path, name)):
                _remove(os.path.join(path, name))
    _remove(path)


def in_use(path: str) -> bool:
    """Whether a process is in a group or in one below it."""
    return any(_read(os.path.join(folder, "cgroup.procs")).strip() for folder, _, _ in os.walk(path))


def left_by_all(groups: list[str]) -> bool:
    """Whether nobody is in any of the groups, or will be in a second: what was just killed takes a moment to go."""
    for _ in range(100):
        if not any(map(in_use, groups)):
            return True
        time.sleep(0.01)
    return False


def runs_with_groups() -> dict[str, list[str]]:
    """Names of runs to the groups that stand for them."""
    found: dict[str, list[str]] = {}
    for parent in {parent for parent, _ in _parents().values()}:
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if name.startswith(PREFIX):
                    found.setdefault(name.removeprefix(PREFIX), []).append(os.path.join(parent, name))
    return found


def _parents() -> dict[str, tuple[str, bool]]:
    """Controller to (the group below which ours are made, whether it is on v2)."""
    found: dict[str, tuple[str, bool]] = {}
    own: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split(" ")[3:5]
        if kind == "cgroup":
            for controller in CONTROLLERS:
                if controller in options.split(" ")[-1].split(","):
                    # below our own group, so that limits on us hold for what we start
                    below = os.path.relpath(own.get(controller, "/"), root)
                    here = os.path.normpath(os.path.join(point, below))
                    found[controller] = (here if os.path.isdir(here) else point, False)
        elif kind == "cgroup2":
            for controller in _read(os.path.join(point, "cgroup.controllers")).split():
                if controller in CONTROLLERS and controller not in found:
                    # a group that holds processes cannot hand controllers down, so not below our own
                    with contextlib.suppress(OSError):
                        _write(os.path.join(point, "cgroup.subtree_control"), f"+{controller}")
                    found[controller] = (point, True)
    return found


def _remove(path: str) -> None:
    # the kernel lets go of a group a moment after its last process
    for _ in range(50):
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.002)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
