"""Where sandboxes keep their files, and what to do with what a crash left there.

Owns the state roots, one folder a run, and `collect_garbage`. A run's folder is locked for as long as its
spawner lives, by the kernel; a folder whose lock is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import stat

from agentgym.errors import BackendUnavailable
from agentgym.sandboxes import cgroups
from agentgym.sandboxes.first import MARK
from agentgym.sandboxes.trash import remove_tree


def state_roots() -> list[str]:
    """Folders that hold one folder a run: AGENTGYM_STATE if set, else the usual two."""
    chosen = os.environ.get("AGENTGYM_STATE")
    if chosen:
        return [os.path.abspath(chosen)]
    return [f"/var/tmp/agentgym-{os.getuid()}", f"/dev/shm/agentgym-{os.getuid()}"]


def places() -> list[tuple[str, bool]]:
    """Where a run may keep its layers, best first: (state root, in memory).

    A folder that the user chose is used as it is, on whatever file system it lies.
    """
    roots = state_roots()
    if os.environ.get("AGENTGYM_STATE"):
        return [(roots[0], False)]
    return [(root, in_memory) for in_memory in (True, False) for root in roots]


def open_root(root: str) -> str:
    """Make a state root, for this user only.

    Raises:
        BackendUnavailable: it belongs to somebody else, is a link, or cannot be made.
    """
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        found = os.lstat(root)
    except OSError as error:
        raise BackendUnavailable(
            f"state folder {root}: {error}; set AGENTGYM_STATE to a folder you can write"
        ) from error
    # a name that others can guess lies in a folder where others can write
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise BackendUnavailable(f"state folder {root} is not a folder of user {os.getuid()}; set AGENTGYM_STATE")
    return root


def new_folder(root: str) -> str:
    """A fresh folder for one run under a state root."""
    path = os.path.join(root, f"{os.getpid()}-{secrets.token_hex(4)}")
    os.mkdir(path, 0o700)
    return path


def dead_folders() -> list[str]:
    """Folders of runs whose spawner is gone."""
    found = []
    for root in state_roots():
        if not os.path.isdir(root) or os.path.islink(root):
            continue
        for name in sorted(os.listdir(root)):
            path = os.path.join(root, name)
            if os.path.isdir(path) and not os.path.islink(path) and not _locked(path):
                found.append(path)
    return found


def _locked(path: str) -> bool:
    """True while a spawner holds the folder, or may be about to."""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # made, but not locked yet: its maker is alive, or it is garbage
        maker = os.path.basename(path).partition("-")[0]
        return maker.isdigit() and os.path.exists(f"/proc/{maker}")
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def strays(folder: str) -> list[int]:
    """Processes that carry the mark of a folder."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def collect_garbage(*, dry_run: bool = False) -> list[str]:
    """End the processes and remove the folders of runs that died; one line for each thing.

    Mounts live only in the sandboxes' own namespaces and end with their processes.
    """
    done = []
    for folder in dead_folders():
        for pid in strays(folder):
            done.append(f"process {pid} of {folder}")
            if not dry_run:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        done.append(f"folder {folder}")
        if not dry_run:
            remove_tree(folder)
    for name, groups in cgroups.runs_with_groups().items():
        # a run with another state root has no folder here: its name begins with the process that made it
        maker = name.partition("-")[0]
        known = any(os.path.isdir(os.path.join(root, name)) for root in state_roots())
        if not known and not os.path.exists(f"/proc/{maker}") and cgroups.left_by_all(groups):
            for group in groups:
                done.append(f"control group {group}")
                if not dry_run:
                    cgroups.remove_group(group)
    return done
