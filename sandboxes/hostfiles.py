"""Opening a file that an agent may have prepared, from outside its sandbox; standard library only.

Following a path in a sandbox's folder by name leaks host files: a link can point anywhere, a pipe can block
for ever, a device can answer without end. Everything here resolves inside a root descriptor.
"""

from __future__ import annotations

import errno
import os
import stat

from agentgym.sandboxes import syscalls as sc


def open_regular(root: int, path: str, *, write: bool, mode: int = 0o644, above: int = 0o755) -> int:
    """Open a regular file as seen from a root directory, for reading, or emptied for writing.

    Args:
        root: Descriptor of the directory that "/" means.
        path: Links in it cannot leave the root, and magic links of /proc are refused.
        write: Make the file and its directories where they are missing.
        mode: Of the file.
        above: Of directories made for it.

    Raises:
        OSError: what the path names is missing, or no regular file.
    """
    if write:
        _make_parents(root, path, above)
    # never block on a pipe that the agent put there; check what was opened, not what was named
    flags = os.O_NONBLOCK | os.O_NOCTTY | (os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY)
    fd = sc.open_in_root(root, path, flags, mode)
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind) or sc.file_system_magic(fd) == sc.PROC_MAGIC:
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(code, f"{path} is not a regular file")
    if write:
        os.ftruncate(fd, 0)
        os.fchmod(fd, mode)
    return fd


def _make_parents(root: int, path: str, mode: int) -> None:
    parts = [part for part in path.split("/") if part][:-1]
    for index in range(len(parts)):
        above = "/".join(parts[: index + 1])
        try:
            os.close(sc.open_in_root(root, above, os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            parent = sc.open_in_root(root, "/".join(parts[:index]) or ".", os.O_PATH | os.O_DIRECTORY)
            try:
                os.mkdir(parts[index], mode, dir_fd=parent)
            finally:
                os.close(parent)
