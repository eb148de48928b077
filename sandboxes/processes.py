"""What the kernel says of a process, seen from outside: its children, threads, open files, and that it ended.

Owns reading `/proc` of this machine by process numbers of this machine. Nothing here asks the process, so nothing here
can be answered wrongly by it.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

_ACCESS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_DIRECTORY | os.O_CLOEXEC
_PASSES = 2000


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One descriptor of a process."""

    number: int
    name: str
    """As /proc has it, such as "/workspace/log" or "pipe:[123]", without the process's own root."""
    path: str | None
    """Where it can be opened anew; None for pipes, sockets, deleted files and what has no path."""
    flags: int
    offset: int


@dataclass(frozen=True, slots=True)
class Look:
    """A process at one moment."""

    cwd: str
    """As the process itself would name it."""
    num_threads: int
    children: tuple[int, ...]
    files: tuple[OpenFile, ...]
    """Without devices, such as /dev/null, which have no state."""
    shared: tuple[str, ...]
    """Memory that it shares with others and may write: named by file, or by address."""

    @classmethod
    def at(cls, pid: int) -> Look:
        """Look at a process, numbered as this machine counts.

        Raises:
            OSError: it ended, or may not be looked at.
        """
        home = f"/proc/{pid}"
        root = os.readlink(f"{home}/root").rstrip("/")
        files = [_open_file(home, number, root) for number in sorted(map(int, os.listdir(f"{home}/fd")))]
        return cls(
            os.readlink(f"{home}/cwd").removeprefix(root) or "/",
            len(os.listdir(f"{home}/task")),
            tuple(children(pid)),
            tuple(file for file in files if file is not None),
            tuple(_shared(home)),
        )


def _open_file(home: str, number: int, root: str) -> OpenFile | None:
    link = f"{home}/fd/{number}"
    try:
        target = os.readlink(link)
        mode = os.stat(link).st_mode
        with open(f"{home}/fdinfo/{number}", encoding="ascii") as file:
            told = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return None  # closed meanwhile
    name = target.removeprefix(root) if target.startswith("/") else target
    flags = int(told["flags"], 8)
    if stat.S_ISCHR(mode):
        return None
    has_path = name.startswith("/") and not name.endswith(" (deleted)") and not name.startswith("/memfd:")
    anew = has_path and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and not flags & os.O_PATH
    return OpenFile(number, name, name if anew else None, flags & _ACCESS, int(told["pos"]))


def _shared(home: str) -> list[str]:
    found = []
    with open(f"{home}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, rights, _, _, _, *name = line.split(maxsplit=5)
            if rights.startswith("rw") and rights.endswith("s"):
                found.append(name[0].strip() if name else place)
    return found


def children(pid: int) -> list[int]:
    """Its children; none where it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def command(pid: int) -> str:
    """The command line, short; empty where it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read(4096).replace("\0", " ").strip()[:80]
    except OSError:
        return ""


def end(pidfd: int, pid: int, spared: Collection[int] = ()) -> int:
    """Kill a process and everything it started, and see that nothing is left.

    It must be where processes go whose parent ended (a subreaper), as then nothing it started can leave it.

    Args:
        pidfd: Of the process.
        pid: The same, as this machine counts.
        spared: Processes below it that live on, with all that is below them.

    Returns:
        How many are left: 0, unless the kernel does not let one go.
    """
    # while it is stopped it starts nothing, and gets what its children leave behind
    if not send(pidfd, signal.SIGSTOP):
        return 0
    _wait_stopped(pid)
    left = end_below(pid, spared)
    send(pidfd, signal.SIGKILL)
    return left + (not has_ended(pidfd, 5.0))


def has_ended(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ends within a time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def stop(pid: int, spared: Collection[int]) -> list[int]:
    """Stop a process and what is below it, but for some and all below them; give what was stopped, to go on later."""
    stopped: list[int] = []
    while fresh := [one for one in (pid, *_descendants(pid, spared)) if one not in stopped and _state(one) not in "ZX"]:
        for one in fresh:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
            _wait_stopped(one)
        stopped += fresh
    return stopped


def go_on(pids: Collection[int]) -> None:
    """Let what was stopped go on."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def end_below(pid: int, spared: Collection[int]) -> int:
    """Kill what is below a process, but for some and all below them; how many are left."""
    found: list[int] = []
    for attempt in range(_PASSES):
        found = [below for below in _descendants(pid, spared) if _state(below) not in "ZX"]
        if not found:
            return 0
        for below in found:
            with suppress(ProcessLookupError):
                os.kill(below, signal.SIGKILL)
        time.sleep(0 if attempt < 10 else 0.001)
    return len(found)


def _descendants(pid: int, spared: Collection[int]) -> list[int]:
    found: list[int] = []
    below = [child for child in children(pid) if child not in spared]
    while below:
        found += below
        below = [child for parent in below for child in children(parent) if child not in spared]
    return found


def _wait_stopped(pid: int) -> None:
    deadline = time.monotonic() + 1.0
    while _state(pid) not in "TtZX" and time.monotonic() < deadline:
        time.sleep(0.0005)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def send(pidfd: int, number: int) -> bool:
    """Send a signal to exactly that process; False where it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
