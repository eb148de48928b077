"""The Linux calls that Python does not offer, made directly through ctypes; standard library only.

Owns numbers, flags and error handling. Numbers of 424 and up are the same on every architecture; the few
older ones are tabled for x86-64 and arm64. Leaves what the calls are used for to the other modules.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_OLD = {
    "x86_64": {"mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "sethostname": 170}
    | {"capget": 125, "capset": 126},
    "aarch64": {"mount": 40, "umount2": 39, "pivot_root": 41, "unshare": 97, "setns": 268, "sethostname": 161}
    | {"capget": 90, "capset": 91},
}
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT = 428, 429, 430, 431, 432
CLOSE_RANGE, OPENAT2, MOUNT_SETATTR = 436, 437, 442

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x01, 0x02, 0x10

_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 28, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_LOWER, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 3, 4
_NOROOT_LOCKED = 0x3
CAP_SYS_ADMIN = 21
PASSABLE = frozenset({CAP_SYS_ADMIN})
"""Capabilities that are passed on only when asked for."""

PROC_MAGIC = 0x9FA0


def _old(name: str) -> int:
    machine = platform.machine()
    if machine not in _OLD:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}; known: {', '.join(_OLD)}")
    return _OLD[machine][name]


def _call(number: int, *arguments: object, what: str) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _checked(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _c(text: str | None) -> ctypes.c_char_p:
    return ctypes.c_char_p(None if text is None else os.fsencode(text))


_secret = 0


def use_secret(secret: int) -> None:
    """Send it with every guarded call from now on: a filter set on this process lets only those pass."""
    global _secret
    _secret = secret


def _guarded(number: int, *arguments: object, what: str) -> int:
    padding = [ctypes.c_long(0)] * (5 - len(arguments))
    return _call(number, *arguments, *padding, ctypes.c_ulong(_secret), what=what)


def unshare(flags: int) -> None:
    """Move this process into new namespaces; of processes, what it starts from now on."""
    _guarded(_old("unshare"), ctypes.c_long(flags), what="unshare")


def setns(pidfd: int, flags: int) -> None:
    """Move this process into namespaces of another one, or into one by its own descriptor, as for `unshare`."""
    _guarded(_old("setns"), ctypes.c_long(pidfd), ctypes.c_long(flags), what="setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system the old way."""
    arguments = (_c(source), _c(target), _c(kind), ctypes.c_ulong(flags), _c(data))
    _guarded(_old("mount"), *arguments, what=f"mount {target}")


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """Unmount, lazily unless told otherwise."""
    _guarded(_old("umount2"), _c(target), ctypes.c_long(flags), what=f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make new_root the root of every process in this mount namespace."""
    _guarded(_old("pivot_root"), _c(new_root), _c(put_old), what="pivot_root")


def move_mount(from_fd: int, from_path: str, to_fd: int, to_path: str) -> None:
    """Attach a detached mount (empty from_path), or move an attached one."""
    flags = (0x4 if not from_path else 0) | (0x40 if not to_path else 0)
    arguments = (from_fd, _c(from_path), to_fd, _c(to_path), ctypes.c_uint(flags))
    _guarded(MOVE_MOUNT, *arguments, what=f"move_mount to {to_path!r}")


def open_tree(path: str, *, recursive: bool = False) -> int:
    """A detached copy of the mount at a path, with those below it if asked."""
    flags = 1 | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return _guarded(OPEN_TREE, AT_FDCWD, _c(path), ctypes.c_uint(flags), what=f"open_tree {path}")


def set_mount_attributes(fd: int, attributes: int) -> None:
    """Add attributes (ATTR_*) to a mount held by its descriptor, and to those below it."""
    record = struct.pack("QQQQ", attributes, 0, 0, 0)
    _guarded(
        MOUNT_SETATTR,
        fd,
        _c(""),
        ctypes.c_uint(AT_EMPTY_PATH | AT_RECURSIVE),
        ctypes.c_char_p(record),
        ctypes.c_size_t(len(record)),
        what="mount_setattr",
    )


def new_mount(kind: str, options: list[tuple[str, str | None]], attributes: int = 0) -> int:
    """A detached mount of a new file system.

    Args:
        kind: Such as "overlay".
        options: Key and value, in order; value None for a flag.
        attributes: ATTR_* of the mount.
    """
    context = _guarded(FSOPEN, _c(kind), ctypes.c_uint(1), what=f"fsopen {kind}")
    try:
        for key, value in options:
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            _guarded(
                FSCONFIG, context, ctypes.c_uint(command), _c(key), _c(value), 0, what=f"{kind} option {key}={value}"
            )
        _guarded(FSCONFIG, context, ctypes.c_uint(_FSCONFIG_CMD_CREATE), None, None, 0, what=f"making {kind}")
        return _guarded(FSMOUNT, context, ctypes.c_uint(1), ctypes.c_uint(attributes), what=f"fsmount {kind}")
    finally:
        os.close(context)


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    """Close all descriptors from first to last."""
    _call(CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(0), what="close_range")


def open_in_root(root_fd: int, path: str, flags: int, mode: int = 0, *, extra: int = 0) -> int:
    """Open a path as seen from a root directory: links cannot leave it, magic links of /proc are refused."""
    resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | extra
    record = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, resolve)
    return _call(OPENAT2, root_fd, _c(path), ctypes.c_char_p(record), ctypes.c_size_t(len(record)), what=f"open {path}")


def file_system_magic(fd: int) -> int:
    """The f_type of the file system that a descriptor lies on."""
    buffer = ctypes.create_string_buffer(256)
    _checked(_libc.fstatfs(fd, buffer), "fstatfs")
    return int(struct.unpack_from("l", buffer)[0])


def die_with_parent() -> None:
    """Be killed when the parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit_programs(kept: frozenset[int]) -> None:
    """Let what this process executes have these capabilities by inheritance alone, and never gain any.

    Being root gives none. `pass_on` changes what the next program gets.
    """
    _set_inheritable(kept | PASSABLE)
    for number in range(64):
        if number not in kept and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break  # past the last capability that this kernel knows
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in kept:
        pass_on(number, True)
    _checked(_libc.prctl(_PR_SET_SECUREBITS, _NOROOT_LOCKED, 0, 0, 0), "secure bits")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def pass_on(capability: int, yes: bool) -> None:
    """Whether programs executed from now on have a capability; of those kept, and of PASSABLE."""
    what = _PR_CAP_AMBIENT_RAISE if yes else _PR_CAP_AMBIENT_LOWER
    _checked(_libc.prctl(_PR_CAP_AMBIENT, what, capability, 0, 0), f"passing on capability {capability}")


def set_filter(program: bytes) -> None:
    """Let the kernel refuse system calls of this process and all below it; forbid gaining rights first."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0), "seccomp filter")


def _set_inheritable(kept: frozenset[int]) -> None:
    header = struct.pack("II", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    _call(_old("capget"), ctypes.c_char_p(header), data, what="capget")
    words = list(struct.unpack("6I", data.raw))
    for half in (0, 1):
        words[2 + 3 * half] = sum(1 << (n - 32 * half) for n in kept if n // 32 == half)
    _call(_old("capset"), ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("6I", *words)), what="capset")


def sethostname(name: str) -> None:
    """Name this UTS namespace."""
    raw = os.fsencode(name)
    _guarded(_old("sethostname"), ctypes.c_char_p(raw), ctypes.c_size_t(len(raw)), what="sethostname")
