"""Deleting what sandboxes leave, in the background; standard library only.

Owns the process that deletes: it lives beside the spawner and one moment longer, since it removes the whole folder of
the run when the spawner is gone, however that came.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

from agentgym.sandboxes import syscalls as sc


class Trash:
    """The spawner's end."""

    def __init__(self, state: str) -> None:
        """Start the process.

        Args:
            state: The folder of the run.
        """
        self.folder = os.path.join(state, "trash")
        read, self._names = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._names)
                os.setsid()
                _empty(read, state)
            finally:
                os._exit(0)
        os.close(read)

    def take(self, path: str) -> None:
        """Move a folder away at once; it is deleted later."""
        name = os.path.basename(path)
        os.rename(path, os.path.join(self.folder, name))
        os.write(self._names, name.encode() + b"\n")

    def close(self) -> None:
        """Have everything removed, and wait for that."""
        os.close(self._names)
        os.waitpid(self.pid, 0)


def _empty(pipe: int, state: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sc.close_range(pipe + 1)
    with open(pipe, encoding="ascii") as names:
        for name in names:
            remove_tree(os.path.join(state, "trash", name.strip()))
    for name in ("dev", *(f"binds/{bind}" for bind in os.listdir(os.path.join(state, "binds")))):
        with contextlib.suppress(OSError):
            sc.umount(os.path.join(state, name))
    with contextlib.suppress(OSError):
        sc.umount(state)
    remove_tree(state)


def remove_tree(path: str) -> None:
    """Delete a folder of layers: links are not followed, and work folders of mode 000 are opened first."""
    # a work folder that cannot be listed is the only thing that a plain removal stumbles over
    for folder, names, _, fd in os.fwalk(path, onerror=None, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode & 0o700 != 0o700:
                    os.chmod(os.path.join(folder, name), 0o700)
    shutil.rmtree(path, ignore_errors=True)
