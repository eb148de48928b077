"""Rules that a process sets on itself and on all it starts, without any rights: Linux's Landlock; standard library only.

Owns the three system calls, what each version of the interface (ABI) knows, and one rule set: write below some
folders and to the harmless devices, nowhere else; no TCP; no signal and no abstract socket out of the rules.

Protects from: creating, changing, truncating, renaming or deleting files elsewhere; mounting; tracing processes
outside and reading their memory; from ABI 4 TCP bind and connect; from ABI 6 signals to processes
outside and abstract Unix sockets of theirs.
Does not protect from: reading files, and with root's rights the environment of processes; changing modes, owners, times and attributes of files that one owns; UDP, multipath TCP,
TCP fast open and listening on a port that the kernel chooses (`sockets.py` refuses those); Unix sockets with a path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PR_SET_NO_NEW_PRIVS = 38
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_WRITE_FILE = 1 << 1
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Remove directories and files, make every kind of entry."""
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FS_SINCE = ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
_TCP = 0b11
"""Bind and connect."""
_SCOPES = 0b11
"""Abstract Unix sockets and signals."""
MIN_ABI = 2
"""Before it, no file could be moved from one directory to another, not even below a folder that is allowed."""
TCP_ABI, SCOPE_ABI = 4, 6
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _syscall(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result


def abi() -> int:
    """The version of the interface that this kernel has; 0 where it has none, or is not allowed to be asked."""
    try:
        return _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG))
    except OSError:
        return 0


def restrict(folders: Sequence[str]) -> None:
    """Set the rules on this thread and on all that it starts from now on; they can never be lifted.

    Args:
        folders: Below these, everything may be written but device nodes.

    Raises:
        OSError: the kernel has no Landlock of at least `MIN_ABI`, refuses it, or a folder is missing.
    """
    version = abi()
    if version < MIN_ABI:
        raise OSError(errno.ENOSYS, f"landlock: this kernel gives ABI {version}, {MIN_ABI} is needed")
    handled = _CHANGES | sum(right for since, right in _FS_SINCE if version >= since)
    record = struct.pack("QQQ", handled, _TCP if version >= TCP_ABI else 0, _SCOPES if version >= SCOPE_ABI else 0)
    # a kernel that knows a shorter record takes a longer one whose rest is zero
    rules = _syscall(_CREATE_RULESET, ctypes.c_char_p(record), ctypes.c_size_t(len(record)), ctypes.c_uint(0))
    try:
        for folder in folders:
            _allow(rules, folder, handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
        for device in DEVICES:
            if os.path.exists(device):
                _allow(rules, device, handled & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV))
        forbid_new_rights()
        _syscall(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def forbid_new_rights() -> None:
    """No program that this thread executes gains rights by its setuid bit; filters and rules ask for that."""
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"no_new_privs: {os.strerror(code)}")


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        record = ctypes.c_char_p(struct.pack("=Qi", rights, place))
        _syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_uint(_PATH_BENEATH), record, ctypes.c_uint(0))
    finally:
        os.close(place)
